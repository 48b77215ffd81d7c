"""Detects an update that was interrupted when its chief was killed.

A synchronous update is one call on the PS tasks. If its chief is killed, the
call may continue there and finish, or stop in the middle (TensorFlow 2.21; both
were seen). A restarted chief tells these cases apart by `UpdateInProgress`.
"""

import time

import tensorflow as tf

from tf_replicas.runtime import resources
from tf_replicas.store import parameter_store

# The global step that marks the variables as inconsistent: an update was
# interrupted.
INCONSISTENT = -2
# How long the call of a killed chief may continue.
_GRACE_SECS = 5.0


class UpdateInProgress:
  """Marks the step from which the last update began; on PS task 0.

  The global step advances when an update is complete. So while it equals the
  mark, an update is in progress, or was interrupted. All rules of a training
  share the mark, since they update the same variables.
  """

  def __init__(self, store: parameter_store.ParameterStore):
    """Creates the mark, or attaches to it."""
    self._store = store
    self._device = store.device_of_task(0)
    with tf.device(self._device):
      self._begun = store.namespace.variable("begun", [], tf.int64)

  def clear(self) -> None:
    """Marks that no update is in progress."""
    self._begun.assign(-1)
    resources.flush_assignments([self._begun])

  def begin(self, step: tf.Tensor) -> tf.Tensor:
    """Marks that an update begins; to be used inside a `tf.function`.

    Args:
      step: int64 scalar, the global step before the update.

    Returns:
      `step`, once it is marked.
    """
    with tf.device(self._device):
      with tf.control_dependencies([self._begun.assign(step)]):
        return tf.identity(step)

  def await_end(self) -> None:
    """Waits up to 5 s for the update of an earlier chief.

    If it was interrupted, the global step is `INCONSISTENT` until a checkpoint
    is restored, and gradients from these variables are refused.
    """
    deadline = time.monotonic() + _GRACE_SECS
    while self._is_under_way() and time.monotonic() < deadline:
      time.sleep(0.1)
    if self._is_under_way():
      self._store.global_step.assign(INCONSISTENT)
      resources.flush_assignments([self._store.global_step])

  def _is_under_way(self) -> bool:
    return int(self._begun.read_value()) == int(self._store.read_global_step())
