"""The training loop: logs, checkpoints, evaluation, warm starts."""
