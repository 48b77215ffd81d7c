"""Which applications are under way, finished or refused: exact counts.

The memory of `async_replicas`: variables on PS task 0, changed under one lock,
and a queue in which the chief hears of every application.
"""

import functools
from collections.abc import Callable

import tensorflow as tf

from tf_replicas import ledger
from tf_replicas import parameter_store
from tf_replicas import resources

# Gradients that are this stale or staler are counted together.
MAX_STALENESS = 255


class Applications:
  """The applications of M replicas.

  Attributes:
    applied: int64 [M, 1 + MAX_STALENESS] variable: applied, by staleness.
    dropped: int64 [M, 1 + ledger.MAX_LATE] variable: dropped, by staleness.
  """

  def __init__(
    self,
    store: parameter_store.ParameterStore,
    num_replicas: int,
    admits: Callable[[tf.Tensor], tf.Tensor] | None,
  ):
    """Creates the objects on PS task 0, or attaches to them.

    Args:
      store: Holds the global step.
      num_replicas: M.
      admits: Whether gradients of a staleness, an int64 scalar, are applied;
        all are if not given.
    """
    self._store = store
    self._num_replicas = num_replicas
    self._admits = admits
    self._device = store.device_of_task(0)
    with tf.device(self._device):
      self._lock = resources.Mutex("async/lock")
      self._is_open, self.dropped, self.applied = (
        resources.shared_variable(f"async/{name}", shape, tf.int64)
        for name, shape in (
          ("open", [num_replicas]),
          ("dropped", [num_replicas, ledger.MAX_LATE + 1]),
          ("applied", [num_replicas, MAX_STALENESS + 1]),
        )
      )
      self._has_ended = resources.shared_variable("async/ended", [], tf.bool)
      # Kind, replica, step, examples, loss.
      self._progress = resources.Queue("async/progress", [tf.float64])

  def initialize(self) -> None:
    """Nothing was applied yet. For the chief of a new training, once."""
    for variable in (self._is_open, self.dropped, self.applied):
      variable.assign(tf.zeros(variable.shape, tf.int64))
    self._has_ended.assign(False)

  def admit(self, replica, local_step, is_sound) -> list[tf.Tensor]:
    """Decides on one application; to be used inside a `tf.function`.

    Args:
      replica: Who asks; scalar.
      local_step: int64 scalar, the global step whose variables it used.
      is_sound: Whether all its numbers are finite; if not, the chief is told.

    Returns:
      Whether to apply; the updates before this one, finished or under way; the
      staleness; whether training has ended.
    """
    with tf.device(self._device):
      return self._lock.hold(lambda: self._admit(replica, local_step, is_sound))

  def finish(self, replica, staleness, loss, num_examples) -> tf.Tensor:
    """Counts one application that is made; the global step after it."""
    with tf.device(self._device):
      (step,) = self._lock.hold(
        lambda: self._finish(replica, staleness, loss, num_examples)
      )
      return tf.identity(step)

  def forget(self, replica: tf.Tensor) -> None:
    """What `replica` has under way will not be finished."""

    def close():
      is_open = self._is_open.read_value()
      zeros = tf.zeros_like(is_open)
      self._is_open.assign(tf.where(self._is_this(replica), zeros, is_open))
      return [tf.constant(True)]

    with tf.device(self._device):
      self._lock.hold(close)

  def end(self) -> None:
    """Admits nothing from now on."""
    with tf.device(self._device):
      self._has_ended.assign(True)

  def wake(self) -> None:
    """Makes a waiting `listen` return."""
    self._send(ledger.Kind.WAKE)

  def close(self) -> None:
    """Ends `listen` with `OutOfRangeError`."""
    self._progress.close()

  @functools.cached_property
  def listen(self) -> Callable[[], tf.Tensor]:
    """Waits for a message and takes all there are: float64 [n, 5].

    A row is (`ledger.Kind`, replica, step, examples, loss).
    """
    client_device = tf.constant(0).device

    def dequeue(rows):
      (row,) = self._progress.dequeue()
      return [tf.concat([rows, tf.reshape(row, [1, 5])], axis=0)]

    @tf.function(autograph=False)
    def listen():
      with tf.device(self._device):
        (rows,) = tf.while_loop(
          lambda rows: (tf.shape(rows)[0] == 0) | (self._progress.size() > 0),
          dequeue,
          [tf.zeros([0, 5], tf.float64)],
          shape_invariants=[tf.TensorShape([None, 5])],
        )
      with tf.device(client_device):
        return tf.identity(rows)

    return listen.get_concrete_function()

  def _admit(self, replica, local_step, is_sound) -> list[tf.Tensor]:
    """Whether to apply, the updates before this one, staleness, the end."""
    this = self._is_this(replica)
    # A replica that was restarted may still count as under way.
    others = tf.where(this, tf.zeros([], tf.int64), self._is_open.read_value())
    version = self._store.read_global_step() + tf.reduce_sum(others)
    staleness = tf.maximum(version - local_step, 0)
    ended = self._has_ended.read_value()
    is_fresh = tf.constant(True)
    if self._admits is not None:
      is_fresh = self._admits(staleness)
    admitted = is_fresh & is_sound & ~ended
    self._is_open.assign(tf.where(this, tf.cast(admitted, tf.int64), others))
    row = tf.cast(replica, tf.int64)
    row = tf.where(is_sound & ~ended & ~is_fresh, row, -tf.ones_like(row))
    _count(self.dropped, row, staleness)

    def complain():
      sent = self._send(ledger.Kind.NONFINITE, replica, local_step)
      with tf.control_dependencies([sent]):
        return tf.constant(True)

    tf.cond(is_sound, lambda: tf.constant(False), complain)
    return [admitted, version, staleness, ended]

  def _finish(self, replica, staleness, loss, num_examples) -> list[tf.Tensor]:
    """Counts one application; the global step after it."""
    this = self._is_this(replica)
    is_open = self._is_open.read_value()
    self._is_open.assign(tf.where(this, tf.zeros([], tf.int64), is_open))
    _count(self.applied, replica, staleness)
    num_examples = tf.cast(num_examples, tf.int64)
    self._store.examples_seen.assign_add(num_examples)
    self._store.global_step.assign_add(1)
    step = self._store.read_global_step()
    sent = self._send(ledger.Kind.DELIVERED, replica, step, num_examples, loss)
    with tf.control_dependencies([sent]):
      return [tf.identity(step)]

  def _is_this(self, replica) -> tf.Tensor:
    return tf.range(self._num_replicas, dtype=tf.int64) == replica

  def _send(self, kind, replica=-1, step=-1, num_examples=0, loss=0.0):
    with tf.device(self._device):
      fields = (int(kind), replica, step, num_examples, loss)
      fields = tf.stack([tf.cast(field, tf.float64) for field in fields])
      return self._progress.enqueue([fields])


def _count(table: tf.Variable, row, column) -> None:
  """Adds one at (row, column) of `table`, or in the last column; row -1: no."""
  rows, columns = table.shape
  row = tf.one_hot(row, rows, dtype=tf.int64)
  column = tf.one_hot(tf.minimum(column, columns - 1), columns, dtype=tf.int64)
  table.assign_add(row[:, None] * column[None, :])
