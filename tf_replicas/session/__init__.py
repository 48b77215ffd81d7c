"""Runs trainings: the loop, log lines, checkpoints, evaluation, warm starts."""
