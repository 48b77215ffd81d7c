"""Contains update rules, which decide when gradients reach the variables."""
