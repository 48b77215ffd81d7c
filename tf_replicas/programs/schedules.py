"""Computes factors of a learning rate from the number of examples seen so far.

A schedule that counts examples instead of steps is right for any number of
replicas. A count is an int or an integer tensor; for a tensor, the result is a
float64 tensor. TensorFlow is not imported, so that a launcher can check its
flags quickly.
"""

from typing import TypeVar

_Count = TypeVar("_Count")


def num_examples(epochs: float, per_epoch: int) -> int:
  """Returns the number of examples in `epochs` epochs.

  Args:
    epochs: Number of epochs, possibly a fraction.
    per_epoch: Number of examples in one epoch.
  """
  return round(epochs * per_epoch)


def share(examples: _Count, length: int) -> _Count:
  """Returns `examples / length`, clipped to [0, 1].

  Multiplied by this factor, a learning rate is warmed up over its first
  `length` examples (Goyal et al. 2017, section 2.2).

  Args:
    examples: Number of examples: an int or an integer tensor.
    length: Number of examples at which the result reaches 1. With 0, the result
      is always 1.

  Returns:
    A float, or a float64 tensor.
  """
  if not length:
    return 1.0
  # Neither `min` nor `tf.minimum` is for both numbers and tensors.
  return 1 - _not_negative(1 - _not_negative(examples / length))


def staircase(examples: _Count, factor: float, length: int) -> _Count:
  """Returns a factor of the learning rate that decays in equal intervals.

  The result is `factor` ** k with k = floor(examples / length). This is the
  decay of `tf.compat.v1.train.exponential_decay(staircase=True)`, but by
  examples instead of steps.

  Args:
    examples: Number of examples seen so far: an int or an integer tensor.
    factor: The factor of one interval.
    length: Number of examples in one interval.
  """
  return factor ** ((examples / max(1, length)) // 1)


def _not_negative(value):
  return (value + abs(value)) / 2
