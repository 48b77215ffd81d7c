"""Makes optimizers of Keras, for tests that run with several versions of it."""

import inspect
import unittest

import keras


def make(name: str, *args, **kwargs) -> keras.optimizers.Optimizer:
  """Makes a Keras optimizer, or skips the test if Keras does not support it.

  Args:
    name: The name of a class of `keras.optimizers`.
    *args: The arguments of the class.
    **kwargs: The keyword arguments of the class.
  """
  # Without this argument, Muon fails with TensorFlow; `InnerOptimizer` refuses
  # it.
  require(name, *(["rms_rate"] if name == "Muon" else []))
  # Keras before 3.10; `InnerOptimizer` refuses them.
  if name in ("Adagrad", "Ftrl") and not hasattr(
    keras.optimizers.Optimizer, "add_optimizer_variables"
  ):
    raise unittest.SkipTest(
      f"{name} of Keras {keras.__version__} has slots without their variables'"
      " names"
    )
  return getattr(keras.optimizers, name)(*args, **kwargs)


def require(name: str, *arguments: str) -> None:
  """Skips the calling test or module if Keras lacks an optimizer.

  Args:
    name: The name of a class of `keras.optimizers`.
    *arguments: Names of arguments that its constructor must have.
  """
  found = getattr(keras.optimizers, name, None)
  if not found or set(arguments) - set(inspect.signature(found).parameters):
    raise unittest.SkipTest(
      f"Keras {keras.__version__} has no {name}, or an older one"
    )
