"""Metrics of the loss function: named scalars, averaged over what was applied.

A replica contributes the scalars of its batch with its gradients. They travel
as a statistic, so the update rules need not know them, and contributions that
are refused do not count. The statistic is never reset: it adds up the scalars
since the training began, and how many there were. The chief reports the
differences between two reads.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import tensorflow as tf

from tf_replicas.store import placement

_PATH = "metrics/sums"


class _Store(Protocol):
  """What `Reader` needs of a store."""

  def reader(self, indices: Sequence[int]) -> Callable[[], list[tf.Tensor]]:
    """See `ParameterStore.reader`."""
    ...


def is_own(path: str) -> bool:
  """Whether a variable is that of the sums."""
  return path == _PATH


def variable(names: Sequence[str]) -> tf.Variable:
  """The variable of the sums, [2, number of names]: sums, then counts.

  float64, as a difference of large sums is small.
  """
  zeros = tf.zeros([2, len(names)], tf.float64)
  return tf.Variable(zeros, trainable=False, name=_PATH)


def move(names: Sequence[str], values: Mapping[str, tf.Tensor]) -> tf.Tensor:
  """What a replica contributes to the sums.

  It is old minus new value, as for every statistic, and therefore negative.

  Args:
    names: The names.
    values: A scalar per name; one that is not finite is left out.
  """
  scalars = tf.stack([tf.cast(values[name], tf.float64) for name in names])
  is_finite = tf.math.is_finite(scalars)
  zeros = tf.zeros_like(scalars)
  sums = tf.where(is_finite, scalars, zeros)
  return -tf.stack([sums, tf.cast(is_finite, tf.float64)])


class Reader:
  """Reads the means over what was applied since the last read."""

  def __init__(
    self,
    store: _Store,
    variables: Sequence[tf.Variable],
    names: Sequence[str],
  ):
    """Reads the sums so far, if there are names.

    Args:
      store: Holds the sums.
      variables: Patterns of the store's variables, in its order.
      names: The names of the scalars.
    """
    self._names = names
    if names:
      paths = [placement.path_of(v) for v in variables]
      self._read = store.reader([paths.index(_PATH)])
      self._previous = np.asarray(self._read()[0])

  def means(self) -> dict[str, float]:
    """The means by name, of what was applied since the last call."""
    if not self._names:
      return {}
    now = np.asarray(self._read()[0])
    sums, counts = now - self._previous
    self._previous = now
    return {
      name: float(total / count)
      for name, total, count in zip(self._names, sums, counts, strict=True)
      if count > 0
    }
