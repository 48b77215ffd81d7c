"""Hands out numbers of batches to replicas, each number to one replica.

A replica that leases batches asks for the number of its next batch when it
needs one. So replicas may join, leave and differ in speed, and yet every batch
of an epoch is used. A counter on PS task 0 holds the next number; reading and
incrementing it is one operation.
"""

import tensorflow as tf

from tf_replicas.runtime import resources


class Leases:
  """The counter of leased batches, which all replicas of a training share."""

  def __init__(self, namespace: resources.Namespace, device: str):
    """Creates the counter on `device`, or attaches to it.

    Args:
      namespace: The scope of the counter's name.
      device: The device of PS task 0.
    """
    with tf.device(device):
      self._next = namespace.variable("leases", [], tf.int64)

    def take():
      with tf.device(device):
        return self._next.count_up()

    self._take = resources.remote_reader(take)

  def begin(self, number: int) -> None:
    """Makes `number` the next one, unless this training has leased some before.

    The chief calls it before replicas begin, and again after a restart.
    """
    if not bool(self._next.is_initialized()):
      self._next.assign(number)

  def take(self) -> tf.Tensor:
    """Takes the next number, an int64 scalar, which no other call returns."""
    return self._take()

  def numbers(self) -> tf.data.Dataset:
    """Makes an endless data set of numbers that it leases when they are read.

    It works only in this process, as it calls Python code.
    """
    self._take.trace()

    def one(_):
      return tf.ensure_shape(tf.py_function(self.take, [], tf.int64), [])

    return tf.data.Dataset.counter().map(one)
