"""Contains the code that all training programs share."""
