"""Trains compiled Keras models: data, computation, Keras' own loop."""
