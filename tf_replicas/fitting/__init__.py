"""Trains on a cluster or alone: `fit` for Keras models, `run` for any model."""
