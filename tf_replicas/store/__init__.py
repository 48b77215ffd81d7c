"""Keeps variables on parameter servers, and updates them by optimizers."""
