"""Hands out batch numbers to replicas, each number to one replica.

The batches of a training are numbered. A replica that needs a batch *leases*
the next number and computes the batch of this number. So every batch of an
epoch is used, although replicas join, leave and differ in speed. A counter on
PS task 0 holds the next number; reading and incrementing it is one operation.
"""

import tensorflow as tf

from tf_replicas.runtime import resources


class Leases:
  """The counter of batch numbers that all replicas of a training share."""

  def __init__(self, namespace: resources.Namespace, device: str):
    """Creates the counter on `device`, or attaches to the existing one.

    Args:
      namespace: The scope of the counter's name on the PS task.
      device: The device of PS task 0.
    """
    with tf.device(device):
      self._next = namespace.variable("leases", [], tf.int64)

    def take():
      with tf.device(device):
        return self._next.count_up()

    self._take = resources.remote_reader(take)

  def begin(self, number: int, *, is_back: bool = False) -> None:
    """Sets the counter to `number`, unless the counter has a value already.

    It has a value if an earlier chief of the same training has set it. The
    chief calls this method before replicas take numbers, and again after a
    restart.

    Args:
      number: The first batch number to hand out.
      is_back: Whether the chief has restored an older checkpoint, because an
        update was interrupted. Then the counter is set in any case: the batches
        since that checkpoint come again.
    """
    if is_back or not bool(self._next.is_initialized()):
      self._next.assign(number)

  def take(self) -> tf.Tensor:
    """Takes the next batch number, an int64 scalar unique to this call."""
    return self._take()

  def numbers(self) -> tf.data.Dataset:
    """Makes an endless data set of batch numbers.

    Each number is taken when the element is read. The data set can be used only
    in this process, as it calls Python code.
    """
    self._take.trace()

    def one(_):
      return tf.ensure_shape(tf.py_function(self.take, [], tf.int64), [])

    return tf.data.Dataset.counter().map(one)
