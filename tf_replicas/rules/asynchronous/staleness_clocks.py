"""Provides barriers at which fast replicas wait for the slowest one.

All objects are on PS task 0. For each replica, a barrier has three of them: the
*clock*, which counts how often the replica has come to the barrier; the *tag*
under which the replica waits there, its time of arrival in microseconds; and a
queue into which this tag is put when the replica may pass. The function
`arrive` computes the next state; it is a pure function of tensors. A lock
protects the state.
"""

from typing import NamedTuple

import tensorflow as tf

from tf_replicas.rules import reply_queues
from tf_replicas.rules import step_token
from tf_replicas.runtime import control_flow
from tf_replicas.runtime import resources

# Stands for no replica, and for the tag of a replica that does not wait.
NOBODY = -1
# The clock of a lost replica: no other replica waits for it.
LOST = 1 << 60


class State(NamedTuple):
  """The state of a barrier at which R replicas may wait; int64 [R] each.

  Attributes:
    clocks: How often each replica has come to the barrier; `LOST` for a lost
      replica, for which no other waits.
    waiting: The tag under which each replica waits at the barrier (its time of
      arrival in microseconds); `NOBODY` (-1) if the replica does not wait.
  """

  clocks: tf.Tensor
  waiting: tf.Tensor


def arrive(
  state: State,
  replica: tf.Tensor | int,
  clock: tf.Tensor | int,
  tag: tf.Tensor | int,
  max_lead: int,
  is_open: tf.Tensor | bool = False,
) -> tuple[State, tf.Tensor]:
  """Records that a replica has come to a barrier, and finds who may pass.

  The clock of a replica counts how often it has come. A replica may pass if its
  clock is at most `max_lead` above the smallest clock. This is a pure function.

  Args:
    state: The state of the barrier before the call.
    replica: int64 scalar, the index of the replica; `NOBODY` changes no clock.
    clock: int64 scalar, how often the replica has come, including this time;
      `LOST` makes the other replicas no longer wait for it.
    tag: int64 scalar, the tag under which the replica waits (its time of
      arrival in microseconds); `NOBODY` if it does not wait.
    max_lead: The largest difference to the smallest clock with which a replica
      may pass.
    is_open: bool scalar, whether all replicas may pass.

  Returns:
    The new state; and int64 [R], which has the tag of each replica that may
    pass now, and `NOBODY` for each other replica.
  """
  num_replicas = state.clocks.shape[0]
  this = tf.range(num_replicas, dtype=tf.int64) == replica
  clocks = tf.where(this, clock, state.clocks)
  waiting = tf.where(this, tag, state.waiting)
  nobody = tf.constant(NOBODY, tf.int64)
  is_near = clocks - tf.reduce_min(clocks) <= max_lead
  may_pass = (waiting != nobody) & (is_near | is_open)
  passing = tf.where(may_pass, waiting, nobody)
  return State(clocks, tf.where(may_pass, nobody, waiting)), passing


class Barrier:
  """A barrier at which a replica waits if it is too far ahead of others.

  The *clock* of a replica counts how often the replica has come to the barrier.
  A replica passes if its clock is at most `max_lead` above the smallest clock
  of all replicas that are not lost.
  """

  def __init__(
    self,
    namespace: resources.Namespace,
    num_replicas: int,
    *,
    max_lead: int,
    device: str,
  ):
    """Creates the barrier's variables, lock and queues.

    If another process has created objects of these names, uses those.

    Args:
      namespace: The scope of the names of these objects, used by this barrier
        alone.
      num_replicas: R, the number of replicas.
      max_lead: The largest difference to the smallest clock with which a
        replica may pass.
      device: The device of PS task 0, which holds the objects.
    """
    self._max_lead = max_lead
    self._device = device
    self._num_replicas = num_replicas
    with tf.device(device):
      self._lock = namespace.mutex("lock")
      self._state = State(
        *[
          namespace.variable(k, [num_replicas], tf.int64) for k in State._fields
        ]
      )
      self._is_open = namespace.variable("open", [], tf.bool)
      self._passes = [
        namespace.queue(f"pass/{r}", [tf.int64]) for r in range(num_replicas)
      ]

  def initialize(self) -> None:
    """Resets the barrier: all clocks are 0, and fast replicas wait at it.

    The chief calls it in a new training, or to undo `open`.
    """
    zeros = tf.zeros([self._num_replicas], tf.int64)
    self._is_open.assign(False)
    self._state.clocks.assign(zeros)
    self._state.waiting.assign(zeros + NOBODY)

  def clocks(self) -> tf.Tensor:
    """Reads how often each of R replicas has come to the barrier, as int64 [R].

    It is `LOST` for a lost replica.
    """
    with tf.device(self._device):
      return self._state.clocks.read_value()

  def is_waiting(self) -> tf.Tensor:
    """Reads whether each of R replicas waits for slower ones, as bool [R]."""
    return self._state.waiting.read_value() != NOBODY

  def enter(self, replica: int | tf.Tensor, clock: tf.Tensor) -> tf.Tensor:
    """Makes a replica wait at the barrier until it may pass.

    To be used inside a `tf.function`.

    Args:
      replica: The index of the replica that comes to the barrier.
      clock: int64 scalar, how often the replica has come to the barrier,
        including this time.

    Returns:
      A tensor; a control dependency on it waits until the replica may pass.

    Raises:
      tf.errors.OutOfRangeError, tf.errors.CancelledError: After `close`, at run
        time.
    """
    with tf.device(self._device):
      tag = step_token.microseconds(step_token.now())
      (tag,) = self._arrive(replica, clock, tag)
      with tf.control_dependencies([tag]):
        _, is_anothers = reply_queues.take_own(
          self._passes, replica, tag, lambda passed: passed
        )
      with tf.control_dependencies([is_anothers]):
        return tf.identity(tag)

  def _arrive(self, replica, clock, tag) -> list[tf.Tensor]:
    """Records that a replica has come, and lets all replicas pass that now may.

    Computes the new state of the barrier by the function `arrive`, which
    documents the arguments, and writes it, under the lock of the barrier.

    Returns:
      A list of one tensor, `tag`, which is available when the state is changed.
    """

    def change():
      state = State(*[v.read_value() for v in self._state])
      this = tf.range(self._num_replicas, dtype=tf.int64) == replica
      # A wait that a killed client left behind would take the next tag off the
      # queue: end that wait first.
      self._send(tf.where(this, state.waiting, tf.constant(NOBODY, tf.int64)))
      is_open = self._is_open.read_value()
      state, passing = arrive(
        state, replica, clock, tag, self._max_lead, is_open
      )
      for variable, value in zip(self._state, state, strict=True):
        variable.assign(value)
      self._send(passing)
      return [tf.identity(tag)]

    return self._lock.hold(change)

  def _send(self, tags: tf.Tensor) -> None:
    for r, queue in enumerate(self._passes):
      control_flow.run_if(
        tags[r] != NOBODY,
        lambda r=r, queue=queue: queue.enqueue([tags[r]]),
      )

  def declare_lost(self, replica: tf.Tensor) -> None:
    """Lets other replicas pass the barrier without waiting for a lost replica.

    They wait for it again after it has come back to the barrier.

    Args:
      replica: int64 scalar, the index of the lost replica.
    """
    with tf.device(self._device):
      self._arrive(
        replica, tf.constant(LOST, tf.int64), tf.constant(NOBODY, tf.int64)
      )

  def open(self) -> None:
    """Lets all replicas pass the barrier from now on, without waiting.

    To be used inside a `tf.function`.
    """
    with tf.device(self._device):
      self._is_open.assign(True)
      nobody = tf.constant(NOBODY, tf.int64)
      self._arrive(nobody, nobody, nobody)

  def close(self) -> None:
    """Closes the queues at which replicas wait for slower replicas.

    Waiting calls of `enter` raise `tf.errors.OutOfRangeError`.
    """
    for queue in self._passes:
      queue.close()


class StalenessClocks:
  """The barriers of an asynchronous step, which bound the staleness.

  The staleness of a gradient is the number of updates made after its variables
  were read. After its update, a replica waits until no other replica is more
  than `max_lead` updates behind it. So its next read includes all updates of
  every replica, except at most the last `max_lead` of each (Ho et al. 2013,
  section 2). If `max_lead` is 0, a replica also waits before its update, until
  all replicas have computed their gradients. So all replicas compute them from
  the same values.
  """

  def __init__(
    self,
    namespace: resources.Namespace,
    num_replicas: int,
    *,
    max_lead: int | None,
    device: str,
  ):
    """Creates the barriers that bound the staleness.

    If another process has created shared objects of these names, uses those.

    Args:
      namespace: The scope of the names of the barriers' shared objects.
      num_replicas: R, the number of replicas.
      max_lead: The largest number of updates by which a replica may be ahead of
        the slowest one. None: there is no limit and no barrier.
      device: The device of PS task 0, which holds the shared objects.
    """
    self._device = device
    self._num_replicas = num_replicas

    def barrier(name: str) -> Barrier:
      return Barrier(
        namespace.child(f"gates/{name}"),
        num_replicas,
        max_lead=max_lead,
        device=device,
      )

    self._after = None if max_lead is None else barrier("after")
    self._before = barrier("before") if max_lead == 0 else None
    self._barriers = [b for b in (self._after, self._before) if b is not None]

  def initialize(self) -> None:
    """Resets all barriers, at which fast replicas wait for the slowest one.

    Each replica has then made 0 steps. The chief calls it in a new training, or
    to undo `open`.
    """
    for barrier in self._barriers:
      barrier.initialize()

  def next_clock(self, replica: int | tf.Tensor) -> tf.Tensor:
    """Returns how many steps a replica has made, including this one.

    A lost replica that comes back continues from the number of the slowest
    replica. To be used inside a `tf.function`.

    Args:
      replica: The index of the replica.

    Returns:
      int64 scalar, the `clock` for `before` and `after`; 0 if there is no
      barrier.
    """
    with tf.device(self._device):
      if self._after is None:
        return tf.zeros([], tf.int64)
      clock = self._after.clocks()
      clock = tf.where(clock < LOST, clock, tf.reduce_min(clock))
      clock = tf.where(clock < LOST, clock, 0)
      return tf.gather(clock, replica) + 1

  def before(self, replica: int | tf.Tensor, clock: tf.Tensor) -> tf.Tensor:
    """Makes a replica wait before its update, if `max_lead` is 0.

    It waits until all replicas have computed their gradients.

    Args:
      replica: The index of the replica.
      clock: The result of `next_clock`.

    Returns:
      A tensor; a control dependency on it waits until the replica may go on.
    """
    if self._before is None:
      return clock
    return self._before.enter(replica, clock)

  def after(self, replica: int | tf.Tensor, clock: tf.Tensor) -> tf.Tensor:
    """Makes a replica wait after its update, unless `max_lead` is None.

    It waits until no replica is more than `max_lead` updates behind it.

    Args:
      replica: The index of the replica.
      clock: The result of `next_clock`.

    Returns:
      A tensor; a control dependency on it waits until the replica may go on.
    """
    if self._after is None:
      return clock
    return self._after.enter(replica, clock)

  def is_waiting(self) -> tf.Tensor:
    """Reads whether each of R replicas waits for slower ones, as bool [R]."""
    is_waiting = tf.zeros([self._num_replicas], tf.bool)
    for barrier in self._barriers:
      is_waiting |= barrier.is_waiting()
    return is_waiting

  def declare_lost(self, replica: tf.Tensor) -> None:
    """Lets other replicas pass all barriers without waiting for a lost replica.

    Once the lost replica comes to a barrier again, the others wait for it there
    as before.

    Args:
      replica: int64 scalar, the index of the lost replica.
    """
    for barrier in self._barriers:
      barrier.declare_lost(replica)

  def open(self) -> None:
    """Lets all replicas pass all barriers from now on, without waiting.

    To be used inside a `tf.function`.
    """
    for barrier in self._barriers:
      barrier.open()

  def close(self) -> None:
    """Closes the queues at which replicas wait for slower replicas.

    Calls of `before` and `after` that wait raise `tf.errors.OutOfRangeError`.
    """
    for barrier in self._barriers:
      barrier.close()
