"""Computes factors of a learning rate from the number of examples seen so far.

A schedule that counts examples instead of steps needs no change for another
number of replicas. The number of examples is an int or an integer tensor. For a
tensor, the result is a float64 tensor. The module does not import TensorFlow,
so that a launcher can check its flags quickly.
"""

from typing import TypeVar

_Count = TypeVar("_Count")


def num_examples(epochs: float, per_epoch: int) -> int:
  """Returns the number of examples in `epochs` epochs, rounded.

  Args:
    epochs: The number of epochs, which need not be whole.
    per_epoch: The number of examples in one epoch.
  """
  return round(epochs * per_epoch)


def share(examples: _Count, length: int) -> _Count:
  """Returns `examples / length`, clipped to [0, 1].

  It is the factor of a learning rate that is warmed up over the first `length`
  examples (Goyal et al. 2017, section 2.2).

  Args:
    examples: The number of examples seen so far: an int or an integer tensor.
    length: The number of examples at which the result reaches 1. If it is 0,
      the result is always 1.

  Returns:
    A float, or a float64 tensor.
  """
  if not length:
    return 1.0
  # Neither `min` nor `tf.minimum` is for both numbers and tensors.
  return 1 - _not_negative(1 - _not_negative(examples / length))


def staircase(examples: _Count, factor: float, length: int) -> _Count:
  """Returns the factor of a learning rate that decays in steps.

  The result is `factor` ** k with k = floor(examples / length). It is the decay
  of `tf.compat.v1.train.exponential_decay(staircase=True)`, but counts examples
  instead of steps.

  Args:
    examples: The number of examples seen so far: an int or an integer tensor.
    factor: The factor by which the rate is multiplied after each interval.
    length: The number of examples in an interval.

  Returns:
    A float, or a float64 tensor.
  """
  return factor ** ((examples / max(1, length)) // 1)


def _not_negative(value):
  return (value + abs(value)) / 2
