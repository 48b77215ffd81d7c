"""Parts of a learning rate, by the examples in all updates so far.

Counting examples and not steps keeps a schedule right for any number of
replicas. Counts are ints, or integer tensors, for which results are float64
tensors. No TensorFlow is imported, so that a launcher can check its flags.
"""

from typing import TypeVar

_Count = TypeVar("_Count")


def num_examples(epochs: float, per_epoch: int) -> int:
  """The examples of some passes over a training set of `per_epoch`."""
  return round(epochs * per_epoch)


def share(examples: _Count, length: int) -> _Count:
  """The share of `length` that some examples are, in [0, 1]; 1 if it is 0.

  A rate is warmed up by it in its first `length` examples (Goyal et al. 2017,
  section 2.2).

  Args:
    examples: The examples; an int or an integer tensor.
    length: The number of examples at which the share is 1.

  Returns:
    A float, or a float64 tensor.
  """
  if not length:
    return 1.0
  # Neither `min` nor `tf.minimum` is for both numbers and tensors.
  return 1 - _not_negative(1 - _not_negative(examples / length))


def staircase(examples: _Count, factor: float, length: int) -> _Count:
  """`factor` ** k, where k is how many times `length` examples have passed.

  It is `tf.compat.v1.train.exponential_decay(staircase=True)` in examples.
  """
  return factor ** ((examples / max(1, length)) // 1)


def _not_negative(value):
  return (value + abs(value)) / 2
