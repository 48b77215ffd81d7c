"""Averages metrics, named scalars of the loss function, over applied batches.

A replica contributes the scalars of its batch together with its gradients. They
are sent as the change of a *statistic*, a variable without gradients. So the
update rules need no code for metrics, and contributions that a rule refuses do
not count. The variable is never reset. It holds, for each name, the sum of the
scalars since the training began, and their number. The chief reports the mean
over what was added between two reads.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import tensorflow as tf

from tf_replicas.runtime import own_variables
from tf_replicas.store import placement


class _Store(Protocol):
  """Interface of the part of a `ParameterStore` that `Reader` uses."""

  def reader(self, indices: Sequence[int]) -> Callable[[], list[tf.Tensor]]:
    """Makes a function that reads only some of the variables.

    Args:
      indices: The positions of these variables in the store.

    Returns:
      A function without arguments that returns the values, in this order.
    """
    ...


def variable(names: Sequence[str]) -> tf.Variable:
  """Makes the variable that holds the sums of metrics and their counts.

  Args:
    names: The names of the metrics.

  Returns:
    A variable, float64 [2, number of names]. The first row has the sums, the
    second one the counts. The dtype is float64, as large sums are subtracted
    from each other.
  """
  zeros = tf.zeros([2, len(names)], tf.float64)
  return tf.Variable(zeros, trainable=False, name=own_variables.METRIC_SUMS)


def move(names: Sequence[str], values: Mapping[str, tf.Tensor]) -> tf.Tensor:
  """Computes what a replica contributes to the sums of metrics after a batch.

  Args:
    names: The names of the metrics.
    values: A scalar per name. A scalar that is not finite is left out.

  Returns:
    Old minus new value of the variable of the sums, as for every statistic (a
    variable without gradients): the negative of the scalars and of their
    counts, float64 [2, number of names].
  """
  scalars = tf.stack([tf.cast(values[name], tf.float64) for name in names])
  is_finite = tf.math.is_finite(scalars)
  zeros = tf.zeros_like(scalars)
  sums = tf.where(is_finite, scalars, zeros)
  return -tf.stack([sums, tf.cast(is_finite, tf.float64)])


class Reader:
  """Reads the means of metrics over the batches applied since the last read."""

  def __init__(
    self,
    store: _Store,
    variables: Sequence[tf.Variable],
    names: Sequence[str],
  ):
    """Reads the present sums; the first `means` cover what is added after that.

    Args:
      store: Holds the sums.
      variables: The variables of the model, with the same paths and in the same
        order as in the store.
      names: The names of the metrics; if empty, nothing is ever read.
    """
    self._names = names
    if names:
      paths = [placement.path_of(v) for v in variables]
      self._read = store.reader([paths.index(own_variables.METRIC_SUMS)])
      self._previous = np.asarray(self._read()[0])

  def means(self) -> dict[str, float]:
    """Returns the mean of each metric over the batches since the last call.

    The means are by name of the metric. A name is left out if none of these
    batches had a finite value for it.
    """
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
