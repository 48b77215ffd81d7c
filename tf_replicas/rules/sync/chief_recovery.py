"""Detects an update that was interrupted when its chief was killed.

A synchronous update is one function call on the PS tasks. If the chief that
made the call is killed, the update may still finish there, or stop in the
middle (TensorFlow 2.21; both were seen). A restarted chief finds out by
`UpdateInProgress` which of the two happened.
"""

import time

import tensorflow as tf

from tf_replicas.runtime import resources
from tf_replicas.store import parameter_store

# The global step that marks the variables as inconsistent: an update was
# interrupted.
INCONSISTENT = -2
# How long the call of a killed chief may continue: this long, and longer if the
# model is large. Parameter servers update this many bytes of variables per
# second even if their machine is busy.
_GRACE_SECS = 5.0
_LEAST_BYTES_PER_SEC = 20e6


class UpdateInProgress:
  """Finds out whether an update is in progress, or was interrupted.

  A variable on PS task 0, the *mark*, holds the global step from which the last
  update began. The global step increases when an update is complete. So while
  the global step equals the mark, an update is in progress, or was interrupted.
  All rules of a training share the mark, since they update the same variables.
  """

  def __init__(self, store: parameter_store.ParameterStore):
    """Creates the mark, or finds the mark that an earlier chief has created.

    The mark is a variable on PS task 0 that holds the global step from which
    the last update began.

    Args:
      store: Holds the variables and the global step.
    """
    self._store = store
    self._device = store.device_of_task(0)
    with tf.device(self._device):
      self._begun = store.namespace.variable("begun", [], tf.int64)

  def clear(self) -> None:
    """Sets the mark to -1, which says that no update is in progress.

    The mark holds the global step from which the last update began.
    """
    self._begun.assign(-1)
    resources.flush_assignments([self._begun])

  def begin(self, step: tf.Tensor) -> tf.Tensor:
    """Records that an update begins; to be used inside a `tf.function`.

    Writes the global step to the mark, a variable on PS task 0.

    Args:
      step: int64 scalar, the global step before the update.

    Returns:
      `step`; a control dependency on it waits until the mark is written.
    """
    with tf.device(self._device):
      with tf.control_dependencies([self._begun.assign(step)]):
        return tf.identity(step)

  def await_end(self) -> bool:
    """Waits until no update of an earlier chief is in progress.

    It waits for 5 s, and 1 s more per 20 MB of variables. (An update changes
    only some rows of tables, so these do not count.) If an update still is in
    progress, it counts as interrupted, and the variables count as
    inconsistent. The global step is then set to `INCONSISTENT` (-2) until a
    checkpoint is restored. Gradients that replicas compute meanwhile are
    refused.

    Returns:
      Whether the variables are inconsistent.
    """
    dense = [spec for spec in self._store.specs if spec.table is None]
    num_bytes = sum(spec.num_bytes for spec in dense)
    patience_secs = _GRACE_SECS + num_bytes / _LEAST_BYTES_PER_SEC
    deadline = time.monotonic() + patience_secs
    while self._is_under_way() and time.monotonic() < deadline:
      time.sleep(0.1)
    if self._is_under_way():
      self._store.global_step.assign(INCONSISTENT)
      resources.flush_assignments([self._store.global_step])
    return int(self._store.read_global_step()) == INCONSISTENT

  def _is_under_way(self) -> bool:
    return int(self._begun.read_value()) == int(self._store.read_global_step())
