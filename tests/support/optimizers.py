"""Makes optimizers of Keras, for tests that run with several versions of it."""

import unittest

import keras


def make(name: str, *args, **kwargs) -> keras.optimizers.Optimizer:
  """Makes an optimizer, or skips the test if this Keras has no such one.

  Args:
    name: The name of a class of `keras.optimizers`.
    *args: The arguments of the class.
    **kwargs: The keyword arguments of the class.
  """
  require(name)
  return getattr(keras.optimizers, name)(*args, **kwargs)


def require(name: str) -> None:
  """Skips the test, or the module that calls this, without that optimizer."""
  if not hasattr(keras.optimizers, name):
    raise unittest.SkipTest(f"Keras {keras.__version__} has no {name}")
