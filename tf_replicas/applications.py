"""Which applications are under way, finished or refused: exact counts.

The memory of `async_replicas`: variables on PS task 0, changed under one lock,
a queue in which the chief hears of every application, and one in which those
who came after the last one wait.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tf_replicas import connection
from tf_replicas import ledger
from tf_replicas import parameter_store
from tf_replicas import resources
from tf_replicas import updates

# Of a replica that has nothing under way, has, or is lost.
_IDLE, _OPEN, _LOST = 0, 1, -1
# A replica that does not come back is declared lost much sooner.
_PATIENCE_SECS = 600.0
# Gradients that are this stale or staler are counted together.
MAX_STALENESS = 255
_NO_LIMIT = 1 << 60


class Admission(NamedTuple):
  """The answer to one set of gradients; scalars on PS task 0.

  Attributes:
    admitted: bool, whether to apply it.
    version: int64, the updates before it, finished or under way.
    staleness: int64, those of them since its variables were read.
    has_ended: bool, whether training has ended.
    must_wait: bool, whether the last update is under way, so that it can be
      admitted only if that comes to nothing.
  """

  admitted: tf.Tensor
  version: tf.Tensor
  staleness: tf.Tensor
  has_ended: tf.Tensor
  must_wait: tf.Tensor


class Applications:
  """The applications of M replicas.

  Attributes:
    applied: int64 [M, 1 + MAX_STALENESS] variable: applied, by staleness.
    dropped: int64 [M, 1 + ledger.MAX_LATE] variable: dropped, by staleness.
    pending: int64 scalar variable: gradients in the update to come, where one
      is made of several.
  """

  def __init__(
    self,
    store: parameter_store.ParameterStore,
    num_replicas: int,
    admits: Callable[[tf.Tensor], tf.Tensor] | None,
    gradients_per_update: int = 1,
  ):
    """Creates the objects on PS task 0, or attaches to them.

    Args:
      store: Holds the global step.
      num_replicas: M.
      admits: Whether gradients of a staleness, an int64 scalar, are applied;
        all are if not given.
      gradients_per_update: How many sets of gradients make an update.
    """
    self._store = store
    self._per_update = gradients_per_update
    self._num_replicas = num_replicas
    self._admits = admits
    self._was_woken = False
    self._device = store.device_of_task(0)
    with tf.device(self._device):
      self._lock = resources.Mutex("async/lock")
      self._state, self.dropped, self.applied = (
        resources.shared_variable(f"async/{name}", shape, tf.int64)
        for name, shape in (
          ("state", [num_replicas]),
          ("dropped", [num_replicas, ledger.MAX_LATE + 1]),
          ("applied", [num_replicas, MAX_STALENESS + 1]),
        )
      )
      self._has_ended = resources.shared_variable("async/ended", [], tf.bool)
      # What is summed up for an update of 4 is none of an update of 2.
      self._limit, self.pending = (
        resources.shared_variable(f"async/{name}", [], tf.int64)
        for name in ("limit", f"pending_{gradients_per_update}")
      )
      # Kind, replica, step, examples, loss.
      self._progress = resources.Queue("async/progress", [tf.float64])
      self._retries = resources.Queue("async/retries", [tf.bool])
    if gradients_per_update > 1:
      store.adopt(self.pending)

  def initialize(self) -> None:
    """Nothing was applied yet. For the chief of a new training, once."""
    for variable in (self._state, self.dropped, self.applied):
      variable.assign(tf.zeros(variable.shape, tf.int64))
    self._has_ended.assign(False)
    self._limit.assign(_NO_LIMIT)
    self.pending.assign(0)

  def stop_at(self, step: int) -> None:
    """Lets the global step not get beyond `step`."""
    self._limit.assign(step)
    resources.await_assigned([self._limit])
    for _ in range(self._num_replicas):
      self._retries.enqueue([tf.constant(True)])

  def admit(self, replica, local_step, is_sound) -> Admission:
    """Decides on one application; to be used inside a `tf.function`.

    Waits while the last update before the limit is under way.

    Args:
      replica: Who asks; scalar.
      local_step: int64 scalar, the global step whose variables it used.
      is_sound: Whether all its numbers are finite; if not, the chief is told.
    """

    def ask():
      def decide():
        return list(self._admit(replica, local_step, is_sound))

      # Who still computes must not hold up the others.
      return self._lock.hold(decide, after=[is_sound])

    def ask_again(*_):
      with tf.control_dependencies(self._retries.dequeue()):
        return ask()

    with tf.device(self._device):
      decision = tf.while_loop(
        lambda *fields: Admission(*fields).must_wait, ask_again, ask()
      )
      return Admission(*decision)

  def finish(
    self, replica, staleness, loss, num_examples, is_update=True
  ) -> tf.Tensor:
    """Counts one application that is made; the global step after it.

    Args:
      replica: Whose; scalar.
      staleness: As `admit` gave it.
      loss: float64 scalar, of its batch.
      num_examples: Scalar, the size of that.
      is_update: Whether this completed an update; scalar.
    """
    with tf.device(self._device):
      (step,) = self._lock.hold(
        lambda: self._finish(replica, staleness, loss, num_examples, is_update)
      )
      return tf.identity(step)

  def declare_lost(self, replica: tf.Tensor) -> None:
    """What `replica` has under way will not be finished."""

    def close():
      self._note(self._is_this(replica), tf.constant(_LOST))
      self._retries.enqueue([tf.constant(True)])
      return [tf.constant(True)]

    with tf.device(self._device):
      self._lock.hold(close)

  def counts(self) -> list[updates.Counts]:
    """What became of each replica's gradients; late: dropped as too stale."""
    rows = zip(self.applied.numpy(), self.dropped.numpy(), strict=True)
    return [
      updates.Counts(
        applied=int(applied.sum()),
        surplus=0,
        late=tuple(map(int, dropped[1:])),
        staleness=tuple(map(int, np.trim_zeros(applied, "b"))),
      )
      for applied, dropped in rows
    ]

  def is_lost(self) -> tf.Tensor:
    """Who was declared lost and did not come back: bool [M]."""
    return self._state.read_value() == _LOST

  def end(self) -> None:
    """Admits nothing from now on."""
    with tf.device(self._device):
      with tf.control_dependencies([self._has_ended.assign(True)]):
        self._retries.enqueue([tf.constant(True)])

  def has_ended(self) -> bool:
    """Whether `end` was called, and `resume` not since."""
    return bool(self._has_ended.read_value())

  def resume(self) -> None:
    """Admits again."""
    self._has_ended.assign(False)

  def await_idleness(self) -> None:
    """Waits until nobody applies; who was lost on the way does not count.

    Raises:
      TimeoutError: If that takes long beyond reason.
    """
    connection.await_value(
      lambda: not tf.reduce_any(self._state.read_value() == _OPEN),
      timeout_secs=_PATIENCE_SECS,
      what="waiting for the last asynchronous update",
    )

  def wake(self) -> None:
    """Makes a waiting `collect` return."""
    try:
      self._send(ledger.Kind.WAKE)
    except tf.errors.OpError:
      pass  # It was closed meanwhile, which ends the wait as well.

  def close(self) -> None:
    """Ends `collect` and who waits in `admit` with `OutOfRangeError`."""
    self._progress.close()
    self._retries.close()

  def collect(self, rate: Callable[[int], float]) -> updates.Update:
    """Waits for an application; what was applied since the last call.

    Args:
      rate: Maps a global step to the learning rate then.

    Raises:
      NonFiniteGradientError: If a replica computed something not finite.
      Interrupted: If `wake` was called, and all before it has been told.
      tf.errors.OutOfRangeError: After `close`.
    """
    update = None if self._was_woken else self._take(rate)
    if update is None:
      self._was_woken = False
      raise updates.Interrupted("interrupted")
    return update

  def collect_rest(self, rate: Callable[[int], float]) -> updates.Update | None:
    """As `collect`, but does not wait: None if nothing was applied."""
    return self._take(rate) if int(self._size()) else None

  def trace_ahead(self) -> None:
    """Traces what may be called while a task stands still; see `in_graph`."""
    self._listen.trace()
    self._size.trace()

  @functools.cached_property
  def _size(self) -> Callable[[], tf.Tensor]:
    return resources.reader(self._progress.size)

  def _take(self, rate: Callable[[int], float]) -> updates.Update | None:
    """Waits for messages; what was applied, unless all of them are wake-ups."""
    rows = self._listen().numpy()
    kinds = rows[:, 0]
    for _, replica, step, _, _ in rows[kinds == ledger.Kind.NONFINITE]:
      raise updates.NonFiniteGradientError(int(replica), int(step))
    # Together with an update it is left to the next call.
    self._was_woken |= bool((kinds == ledger.Kind.WAKE).any())
    applied = rows[kinds == ledger.Kind.DELIVERED]
    if not len(applied):
      return None
    step = int(applied[:, 2].max())
    return updates.Update(
      global_step=step,
      loss=float(applied[:, 4].mean()),
      num_examples=int(applied[:, 3].sum()),
      learning_rate=rate(step - 1),
    )

  @functools.cached_property
  def _listen(self) -> Callable[[], tf.Tensor]:
    """Waits for a message and takes all there are: float64 [n, 5].

    A row is (`ledger.Kind`, replica, step, examples, loss).
    """

    def dequeue(rows):
      (row,) = self._progress.dequeue()
      return [tf.concat([rows, tf.reshape(row, [1, 5])], axis=0)]

    def listen():
      with tf.device(self._device):
        (rows,) = tf.while_loop(
          lambda rows: (tf.shape(rows)[0] == 0) | (self._progress.size() > 0),
          dequeue,
          [tf.zeros([0, 5], tf.float64)],
          shape_invariants=[tf.TensorShape([None, 5])],
        )
      return rows

    return resources.reader(listen)

  def _admit(self, replica, local_step, is_sound) -> Admission:
    this = self._is_this(replica)
    # A replica that was restarted may still count as under way.
    state = self._state.read_value()
    is_open = ~this & (state == _OPEN)
    ahead = self.pending.read_value() + tf.math.count_nonzero(is_open)
    step = self._store.read_global_step()
    version = step + ahead // self._per_update
    staleness = tf.maximum(version - local_step, 0)
    ended = self._has_ended.read_value()
    has_room = version < self._limit.read_value()
    is_fresh = tf.constant(True)
    if self._admits is not None:
      is_fresh = self._admits(staleness)
    is_good = is_fresh & is_sound & ~ended
    admitted = is_good & has_room
    self._note(this, tf.where(admitted, _OPEN, _IDLE))
    row = tf.cast(replica, tf.int64)
    row = tf.where(is_sound & ~ended & ~is_fresh, row, -tf.ones_like(row))
    _count(self.dropped, row, staleness)

    def pass_on():  # Whoever waits learns of the end by this.
      with tf.control_dependencies([self._retries.enqueue([ended])]):
        return tf.constant(True)

    tf.cond(ended, pass_on, lambda: tf.constant(False))

    def complain():
      sent = self._send(ledger.Kind.NONFINITE, replica, local_step)
      with tf.control_dependencies([sent]):
        return tf.constant(True)

    tf.cond(is_sound, lambda: tf.constant(False), complain)
    return Admission(admitted, version, staleness, ended, is_good & ~has_room)

  def _finish(
    self, replica, staleness, loss, num_examples, is_update
  ) -> list[tf.Tensor]:
    self._note(self._is_this(replica), tf.constant(_IDLE))
    _count(self.applied, replica, staleness)
    num_examples = tf.cast(num_examples, tf.int64)
    self._store.examples_seen.assign_add(num_examples)
    if self._per_update > 1:
      pending = self.pending.read_value() + 1
      self.pending.assign(tf.where(is_update, tf.zeros_like(pending), pending))
    self._store.global_step.assign_add(tf.cast(is_update, tf.int64))
    step = self._store.read_global_step()
    sent = self._send(ledger.Kind.DELIVERED, replica, step, num_examples, loss)
    with tf.control_dependencies([sent]):
      return [tf.identity(step)]

  def _note(self, this: tf.Tensor, state: tf.Tensor) -> None:
    states = self._state.read_value()
    states = tf.where(this, tf.cast(state, tf.int64), states)
    self._state.assign(states)

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
