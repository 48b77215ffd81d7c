"""Decides which gradients asynchronous updates apply, and counts them.

The state of `AsyncReplicasOptimizer` is on PS task 0. It consists of variables
that are changed under one lock (`count_lock` of the store), and two queues. One
queue brings the chief a message about every update. At the other queue, a
replica waits if the updates already begun reach the limit of `stop_at`: one of
them may still fail, and the replica may then make an update after all.
"""

import functools
import time
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tf_replicas.rules import protocol
from tf_replicas.rules import results
from tf_replicas.runtime import control_flow
from tf_replicas.runtime import records
from tf_replicas.runtime import resources
from tf_replicas.runtime import waiting
from tf_replicas.store import parameter_store

# The state of a replica: it applies no gradients at present, is applying
# gradients, or is lost.
IDLE, OPEN, LOST = 0, 1, -1
# A replica that fails is declared lost much sooner.
_PATIENCE_SECS = 600.0
# Gradients of at least this staleness are counted together.
MAX_STALENESS = 255
# The chief reports updates together that are made within this time, the longer
# one if it waits for many. A report costs it and PS task 0 about as much
# processor time as a step of a small model.
_LEAST_REPORT_SECS = 0.03
_MOST_REPORT_SECS = 0.1


class Admission(NamedTuple):
  """The decision whether one set of gradients is applied to the variables.

  The fields are scalars on PS task 0.

  Attributes:
    admitted: bool, whether the gradients are applied.
    version: int64, the number of updates before this one, finished or in
      progress.
    staleness: int64, the number of these updates made after the replica read
      its variables.
    has_ended: bool, whether training has ended.
    must_wait: bool, whether the replica must wait and then ask again, because
      `version` has reached the limit of `stop_at`. The gradients can still be
      admitted if this limit is raised, or if a replica is lost while it makes
      an update.
  """

  admitted: tf.Tensor
  version: tf.Tensor
  staleness: tf.Tensor
  has_ended: tf.Tensor
  must_wait: tf.Tensor


class _Progress(NamedTuple):
  """One message to the chief about the progress of asynchronous updates.

  Attributes:
    kind: A `protocol.MessageType`: DELIVERED if gradients were applied,
      NONFINITE if a gradient or a loss was not finite, or WAKE, which ends the
      chief's wait for messages.
    replica: The index of the sender; -1 for WAKE.
    step: For DELIVERED, the global step after the gradients were applied. For
      NONFINITE, the global step of the variables that the replica used.
    examples: The number of examples in the replica's batch.
    loss: The mean loss of the replica's batch.
  """

  kind: records.Int
  replica: records.Int = -1
  step: records.Int = -1
  examples: records.Int = 0
  loss: records.Float = 0.0


_LAYOUT = records.Layout(_Progress, tf.float64)


class AsyncAdmission:
  """Decides whether replicas' gradients are applied, and counts them.

  The staleness of gradients is the number of updates made since the replica
  read the variables. All variables are on PS task 0.

  Attributes:
    applied: int64 [M, 1 + MAX_STALENESS] variable: the number of sets of
      gradients that were applied, by replica (of M) and staleness.
    dropped: int64 [M, 1 + protocol.MAX_LATE] variable: the number of sets of
      gradients that were dropped as too stale, by replica and staleness.
    pending: int64 scalar variable: the number of sets of gradients that were
      summed so far for the next update, if an update is the mean of several
      sets.
  """

  def __init__(
    self,
    store: parameter_store.ParameterStore,
    num_replicas: int,
    admits: Callable[[tf.Tensor], tf.Tensor] | None,
    gradients_per_update: int = 1,
    namespace: resources.Namespace | None = None,
  ):
    """Creates the variables and queues on PS task 0.

    If another process has created objects of these names, uses those.

    Args:
      store: Holds the global step.
      num_replicas: M, the number of replicas.
      admits: Maps the staleness (the number of updates made since the replica
        read the variables, an int64 scalar) to a bool scalar: whether gradients
        are applied. None: all gradients are applied.
      gradients_per_update: The number of sets of gradients in an update.
      namespace: The scope of the names of all objects except `pending` and the
        lock, which are in the namespace of `store`, as the sums of gradients
        and the global step are. None: the namespace of `store`.
    """
    namespace = namespace or store.namespace
    self._store = store
    self._per_update = gradients_per_update
    self._num_replicas = num_replicas
    self._admits = admits
    self._was_woken = False
    self._reported = 0.0  # When, in seconds of `time.monotonic`.
    self._reported_step = 0
    self._update_secs = 0.0
    self._device = store.device_of_task(0)
    self._lock = store.count_lock
    with tf.device(self._device):
      self._state, self.dropped, self.applied = (
        namespace.variable(f"async/{name}", shape, tf.int64)
        for name, shape in (
          ("state", [num_replicas]),
          ("dropped", [num_replicas, protocol.MAX_LATE + 1]),
          ("applied", [num_replicas, MAX_STALENESS + 1]),
        )
      )
      self._has_ended = namespace.variable("async/ended", [], tf.bool)
      self._limit = namespace.variable("async/limit", [], tf.int64)
      # The name contains `gradients_per_update`: a sum of 4 gradients must not
      # be completed as a sum of 2.
      self.pending = store.namespace.variable(
        f"async/pending_{gradients_per_update}", [], tf.int64
      )
      self._progress = namespace.queue("async/progress", [tf.float64])
      self._retries = namespace.queue("async/retries", [tf.bool])
    if gradients_per_update > 1:
      store.track(self.pending)

  def initialize(self) -> None:
    """Resets the state: all counts are 0, no replica is lost, no limit is set.

    The chief calls it once, in a new training.
    """
    for variable in (self._state, self.dropped, self.applied):
      variable.assign(tf.zeros(variable.shape, tf.int64))
    self._has_ended.assign(False)
    self._limit.assign(protocol.NO_LIMIT)
    self.pending.assign(0)

  def stop_at(self, step: int) -> None:
    """Sets the global step that no update may exceed.

    Replicas that wait because of the old limit ask again.
    """
    self._limit.assign(step)
    resources.flush_assignments([self._limit])
    for _ in range(self._num_replicas):
      self._retry()

  def admit(self, replica, local_step, is_sound) -> Admission:
    """Decides whether one replica's gradients are applied to the variables.

    If the updates already begun reach the limit of `stop_at`, waits until the
    limit is raised, training ends, or a replica is lost whose update had begun.
    To be used inside a `tf.function`.

    Args:
      replica: Scalar, the index of the replica that asks.
      local_step: int64 scalar, the global step of the variables that the
        replica used.
      is_sound: bool scalar, whether the gradients and the loss are finite. If
        not, they are not admitted, and the chief is told.

    Returns:
      The decision, with the staleness of the gradients.

    Raises:
      tf.errors.OutOfRangeError: At run time, if it waits when `close` is
        called.
    """

    def ask():
      def decide():
        return list(self._admit(replica, local_step, is_sound))

      # Wait for the gradient before taking the lock.
      return self._lock.hold(decide, after=[is_sound])

    def ask_again(*_):
      with tf.control_dependencies(self._retries.dequeue()):
        return ask()

    with tf.device(self._device):
      first = Admission(*ask())
      # A loop costs many ops even if its body never runs: enter it rarely.
      decision = tf.cond(
        first.must_wait,
        lambda: tf.while_loop(
          lambda *fields: Admission(*fields).must_wait, ask_again, list(first)
        ),
        lambda: [tf.identity(field) for field in first],
      )
      return Admission(*decision)

  def finish(
    self,
    replica,
    staleness,
    loss,
    num_examples,
    is_update: tf.Tensor | bool = True,
  ) -> tf.Tensor:
    """Counts one set of gradients that was applied, and tells the chief.

    Also increases the global step by 1 if the set completed an update.

    Args:
      replica: Scalar, the index of the replica that computed the gradients.
      staleness: int64 scalar, the `staleness` that `admit` returned.
      loss: Scalar, the mean loss of the replica's batch.
      num_examples: Scalar, the number of examples in the batch.
      is_update: bool scalar, whether this set completed an update.

    Returns:
      int64 scalar, the global step after this.
    """
    with tf.device(self._device):
      (step,) = self._lock.hold(
        lambda: self._finish(replica, staleness, loss, num_examples, is_update)
      )
      return tf.identity(step)

  def declare_lost(self, replica: tf.Tensor) -> None:
    """Marks a replica as lost until it asks again to apply gradients.

    An update that the replica has begun and not finished is no longer expected.
    So a replica that waits at the limit of `stop_at` asks again.

    Args:
      replica: Scalar, the index of the replica.
    """

    def close():
      self._set_state(replica, LOST)
      return [control_flow.done(self._retry())]

    with tf.device(self._device):
      self._lock.hold(close)

  def counts(self) -> list[results.Counts]:
    """Returns how many sets of gradients of each replica were used or dropped.

    Returns:
      One `results.Counts` per replica. Its `late` counts the sets that were
      dropped as too stale.
    """
    return counts_of(self.applied.numpy(), self.dropped.numpy())

  def is_lost(self) -> tf.Tensor:
    """Reads whether each of the M replicas was declared lost, as bool [M]."""
    return self._state.read_value() == LOST

  def end(self) -> None:
    """Refuses all gradients from now on, also those of replicas that wait.

    Replicas whose gradients are refused are told that training has ended.
    """
    with tf.device(self._device):
      with tf.control_dependencies([self._has_ended.assign(True)]):
        self._retry()

  def has_ended(self) -> bool:
    """Returns whether `end` was called and not yet undone by `resume`."""
    return bool(self._has_ended.read_value())

  def resume(self) -> None:
    """Lets gradients be applied again after `end`."""
    self._has_ended.assign(False)

  def await_idleness(self) -> None:
    """Waits until no replica is applying gradients; lost replicas do not count.

    Raises:
      TimeoutError: After 600 s.
    """
    waiting.await_value(
      lambda: not tf.reduce_any(self._state.read_value() == OPEN),
      timeout_secs=_PATIENCE_SECS,
      what="waiting for the last asynchronous update",
    )

  def wake(self) -> None:
    """Ends the wait of `collect`, which runs in another thread.

    `collect` then raises `Interrupted`, as soon as it has reported all updates
    that were made before.
    """
    try:
      self._send(protocol.MessageType.WAKE)
    except tf.errors.OpError:
      pass  # The queue was closed meanwhile, which ends the wait as well.

  def close(self) -> None:
    """Closes the queues of this object, so that no call waits any longer.

    Calls of `collect` and `admit` that wait raise `tf.errors.OutOfRangeError`.
    """
    self._progress.close()
    self._retries.close()

  def collect(
    self, rate: Callable[[int], float], max_updates: int = 1
  ) -> results.Update:
    """Waits for an update, and returns one report of all unreported updates.

    Each report costs time in the chief and in PS task 0. So it waits until 30
    ms have passed since its last return. If the caller waits for more than one
    update, it takes longer, but at most 100 ms: as long as it takes to make the
    others, at the last rate.

    Args:
      rate: Maps a global step to the learning rate at that step. The report has
        the rate of the last update.
      max_updates: How many updates the caller waits for. There may be more in
        the report.

    Returns:
      The report. Its loss is the mean over all sets of gradients.

    Raises:
      NonFiniteGradientError: If a replica computed a gradient or a loss that is
        not finite.
      Interrupted: If `wake` was called, and all updates made before are
        reported.
      tf.errors.OutOfRangeError: After `close`.
    """
    others_secs = (max_updates - 1) * self._update_secs
    wait_secs = min(max(_LEAST_REPORT_SECS, others_secs), _MOST_REPORT_SECS)
    time.sleep(max(0.0, self._reported + wait_secs - time.monotonic()))
    update = None if self._was_woken else self._take(rate)
    now = time.monotonic()
    elapsed_secs, self._reported = now - self._reported, now
    if update is None:
      self._was_woken = False
      raise results.Interrupted("interrupted")
    num_updates = max(update.global_step - self._reported_step, 1)
    self._reported_step = update.global_step
    self._update_secs = elapsed_secs / num_updates
    return update

  def collect_rest(self, rate: Callable[[int], float]) -> results.Update | None:
    """Returns one report of all unreported updates, without waiting for any.

    Args:
      rate: Maps a global step to the learning rate at that step. The report has
        the rate of the last update.

    Returns:
      The report; None if there is no update to report.

    Raises:
      NonFiniteGradientError: If a replica computed a gradient or a loss that is
        not finite.
    """
    return self._take(rate) if int(self._size()) else None

  def trace_ahead(self) -> None:
    """Traces the functions that `collect` and `collect_rest` call.

    They could not be traced later, while a task hangs: a client that traces a
    function waits for all tasks.
    """
    self._listen.trace()
    self._size.trace()

  @functools.cached_property
  def _size(self) -> Callable[[], tf.Tensor]:
    return resources.remote_reader(self._progress.size)

  def _take(self, rate: Callable[[int], float]) -> results.Update | None:
    """Waits for messages to the chief, and takes all that there are.

    Args:
      rate: Maps a global step to the learning rate at that step.

    Returns:
      One report of all updates in the messages; None if they contain none.

    Raises:
      NonFiniteGradientError: If a replica computed a gradient or a loss that is
        not finite.
    """
    kinds = protocol.MessageType
    messages = _LAYOUT.unpack_rows(self._listen().numpy())
    for message in messages:
      if message.kind == kinds.NONFINITE:
        raise results.NonFiniteGradientError(message.replica, message.step)
    # If a wake-up came together with an update, the next call raises the error.
    self._was_woken |= any(m.kind == kinds.WAKE for m in messages)
    applied = [m for m in messages if m.kind == kinds.DELIVERED]
    if not applied:
      return None
    step = max(m.step for m in applied)
    return results.Update(
      global_step=step,
      loss=float(np.mean([m.loss for m in applied])),
      num_examples=sum(m.examples for m in applied),
      learning_rate=rate(step - 1),
    )

  @functools.cached_property
  def _listen(self) -> Callable[[], tf.Tensor]:
    """A function that waits for messages to the chief, and takes all there are.

    It returns them on this process, as a float64 tensor of shape [number of
    messages, number of fields]. Row i has the fields of the `_Progress` of
    message i. There is at least one row. It raises `tf.errors.OutOfRangeError`
    after `close`.
    """

    def dequeue(rows):
      (row,) = self._progress.dequeue()
      return [tf.concat([rows, tf.reshape(row, [1, _LAYOUT.size])], axis=0)]

    def listen():
      with tf.device(self._device):
        (rows,) = tf.while_loop(
          lambda rows: (tf.shape(rows)[0] == 0) | (self._progress.size() > 0),
          dequeue,
          [tf.zeros([0, _LAYOUT.size], _LAYOUT.dtype)],
          shape_invariants=[tf.TensorShape([None, _LAYOUT.size])],
        )
      return rows

    return resources.remote_reader(listen)

  def _admit(self, replica, local_step, is_sound) -> Admission:
    """Decides whether one replica's gradients are applied; called under a lock.

    Unlike `admit`, it does not wait, but may return a decision with
    `must_wait`.

    Args:
      replica: Scalar, the index of the replica that asks.
      local_step: int64 scalar, the global step of the variables that the
        replica used.
      is_sound: bool scalar, whether the gradients and the loss are finite.

    Returns:
      The decision, with the staleness of the gradients.
    """
    # A restarted replica may still be marked as applying: leave it out here. In
    # the decisions on other replicas it counts.
    others = tf.range(self._num_replicas, dtype=tf.int64) != tf.cast(
      replica, tf.int64
    )
    is_open = others & (self._state.read_value() == OPEN)
    ahead = tf.math.count_nonzero(is_open)
    step = self._store.read_global_step()
    if self._per_update == 1:
      version = step + ahead
    else:
      ahead += self.pending.read_value()
      version = step + ahead // self._per_update
    staleness = tf.maximum(version - local_step, 0)
    ended = self._has_ended.read_value()
    has_room = version < self._limit.read_value()
    is_good = is_sound & tf.logical_not(ended)
    if self._admits is not None:
      is_fresh = self._admits(staleness)
      is_stale = is_good & tf.logical_not(is_fresh)
      _count(self.dropped, replica, staleness, is_stale)
      is_good &= is_fresh
    admitted = is_good & has_room
    self._set_state(replica, tf.where(admitted, OPEN, IDLE))

    def tell():
      # Let the next waiting replica ask again, so that it ends too.
      has_retried = control_flow.run_if(ended, self._retry)
      has_told = control_flow.run_if(
        ~is_sound,
        lambda: self._send(protocol.MessageType.NONFINITE, replica, local_step),
      )
      return [has_retried, has_told]

    control_flow.run_if(ended | ~is_sound, tell)
    return Admission(admitted, version, staleness, ended, is_good & ~has_room)

  def _finish(
    self, replica, staleness, loss, num_examples, is_update
  ) -> list[tf.Tensor]:
    """Counts one set of gradients that was applied, and tells the chief.

    Does the work of `finish`, under the lock.

    Args:
      replica: Scalar, the index of the replica that computed the gradients.
      staleness: int64 scalar, the staleness of the gradients in updates.
      loss: Scalar, the mean loss of the replica's batch.
      num_examples: Scalar, the number of examples in the batch.
      is_update: bool scalar, whether this set completed an update.

    Returns:
      A list of one int64 scalar, the global step after this.
    """
    self._set_state(replica, IDLE)
    _count(self.applied, replica, staleness)
    num_examples = tf.cast(num_examples, tf.int64)
    self._store.examples_seen.assign_add(num_examples)
    if self._per_update > 1:
      pending = self.pending.read_value() + 1
      self.pending.assign(tf.where(is_update, tf.zeros_like(pending), pending))
    self._store.global_step.assign_add(tf.cast(is_update, tf.int64))
    step = self._store.read_global_step()
    sent = self._send(
      protocol.MessageType.DELIVERED, replica, step, num_examples, loss
    )
    with tf.control_dependencies([sent]):
      return [tf.identity(step)]

  def _set_state(
    self, replica: int | tf.Tensor, state: int | tf.Tensor
  ) -> None:
    """Sets the state of one replica.

    Args:
      replica: The index of the replica.
      state: `OPEN` if the replica is applying gradients, `IDLE` if not, `LOST`
        if it is lost.
    """
    self._state.scatter_update(
      tf.IndexedSlices(tf.cast(state, tf.int64), tf.cast(replica, tf.int64))
    )

  def _retry(self) -> tf.Operation | None:
    """Makes one of the replicas that wait in `admit` ask for admission again.

    `admit` waits if the updates already begun reach the limit of `stop_at`.
    """
    return self._retries.enqueue([tf.constant(True)])

  def _send(self, kind: protocol.MessageType, *fields) -> tf.Operation | None:
    """Sends a message about the progress of asynchronous updates to the chief.

    Args:
      kind: The type of the message.
      *fields: The other fields of `_Progress`, in order.
    """
    with tf.device(self._device):
      message = _Progress(int(kind), *fields)
      return self._progress.enqueue([_LAYOUT.pack(message)])


def counts_of(applied: np.ndarray, dropped: np.ndarray) -> list[results.Counts]:
  """Computes how many sets of gradients of each replica were used or dropped.

  Args:
    applied: The value of `AsyncAdmission.applied`.
    dropped: The value of `AsyncAdmission.dropped`.

  Returns:
    One `results.Counts` per replica.
  """
  return [
    results.Counts(
      applied=int(row.sum()),
      surplus=0,
      late=tuple(map(int, late[1:])),
      staleness=tuple(map(int, np.trim_zeros(row, "b"))),
    )
    for row, late in zip(applied, dropped, strict=True)
  ]


def _count(
  table: Any,
  row: int | tf.Tensor,
  column: tf.Tensor,
  condition: bool | tf.Tensor = True,
) -> None:
  """Adds 1 to an element of `table`, a variable that holds counts.

  Args:
    table: int64 [rows, columns] variable.
    row: Scalar, the row.
    column: int64 scalar, the column. If it is too large, the last column is
      used.
    condition: bool scalar; False adds nothing.
  """
  column = tf.minimum(column, table.shape[1] - 1)
  place = tf.stack([tf.cast(row, tf.int64), column])
  table.scatter_nd_add([place], [tf.cast(condition, tf.int64)])
