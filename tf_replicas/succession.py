"""What a restarted chief finds: a whole model, or one with half an update.

A synchronous update is one call on the PS tasks. If its chief is killed, the
call may live on there and finish, or stop in the middle (TensorFlow 2.21;
both were seen). `UpdateMark` tells these cases apart.
"""

import time

import tensorflow as tf

from tf_replicas import parameter_store
from tf_replicas import resources

# As the global step: what is there belongs to no step.
TORN = -2
# How long a call of a killed chief may go on.
_GRACE_SECS = 5.0


class UpdateMark:
  """Says of which step the update was begun last; on PS task 0.

  The global step is advanced when an update is done, so as long as both are
  the same an update is under way, or was cut off.
  """

  def __init__(self, store: parameter_store.ParameterStore):
    """Creates the mark, or attaches to it."""
    self._store = store
    self._device = store.device_of_task(0)
    with tf.device(self._device):
      self._begun = resources.shared_variable("begun", [], tf.int64)

  def clear(self) -> None:
    """Says that no update is under way."""
    self._begun.assign(-1)
    resources.await_assigned([self._begun])

  def begin(self, step: tf.Tensor) -> tf.Tensor:
    """Says that an update from `step` is about to begin; returns the step.

    To be used inside a `tf.function`.
    """
    with tf.device(self._device):
      with tf.control_dependencies([self._begun.assign(step)]):
        return tf.identity(step)

  def await_end(self) -> None:
    """Waits a while for an earlier chief's update, or says that it was cut off.

    Then the global step is `TORN`, until a checkpoint is restored: gradients of
    such variables are refused.
    """
    deadline = time.monotonic() + _GRACE_SECS
    while self._is_under_way() and time.monotonic() < deadline:
      time.sleep(0.1)
    if self._is_under_way():
      self._store.global_step.assign(TORN)
      resources.await_assigned([self._store.global_step])

  def _is_under_way(self) -> bool:
    return int(self._begun.read_value()) == int(self._store.read_global_step())
