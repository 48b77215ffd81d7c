"""A gate that keeps replicas together: nobody passes far ahead of the slowest.

Everything lives on PS task 0: the clock of each replica, which is how often it
came to the gate, who waits there, and one queue per replica that lets it pass.
Clocks change under a lock, by one pure function of tensors (`arrive`).
"""

from typing import NamedTuple

import tensorflow as tf

from tf_replicas import releases
from tf_replicas import replies
from tf_replicas import resources

NOBODY = -1
# The clock of a replica that nobody waits for.
LOST = 1 << 60


class State(NamedTuple):
  """Who is where; int64 [R] each.

  Attributes:
    clocks: How often each replica came to the gate, or `LOST`.
    waiting: The tag under which it waits there, or -1.
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
  """Notes that `replica` is at the gate, or is `LOST`; pure.

  Args:
    state: Before.
    replica: Who; int64 scalar.
    clock: How often it came, this time included, or `LOST`; int64 scalar.
    tag: What it waits for; int64 scalar, -1 if it does not wait.
    max_lead: How far ahead of the slowest a replica may pass.
    is_open: Whether all may pass from now on.

  Returns:
    The state after it, and the tags of those who may pass: int64 [R] or -1.
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


class Gate:
  """One gate, by its name."""

  def __init__(
    self, name: str, num_replicas: int, *, max_lead: int, device: str
  ):
    """Creates the objects on `device`, or attaches to them.

    Args:
      name: Unique among gates.
      num_replicas: R.
      max_lead: How many times more than the slowest a replica may pass.
      device: Of PS task 0.
    """
    self._max_lead = max_lead
    self._device = device
    self._num_replicas = num_replicas
    with tf.device(device):
      self._lock = resources.Mutex(f"{name}/lock")
      self._state = State(
        *[
          resources.shared_variable(f"{name}/{k}", [num_replicas], tf.int64)
          for k in State._fields
        ]
      )
      self._is_open = resources.shared_variable(f"{name}/open", [], tf.bool)
      self._passes = [
        resources.Queue(f"{name}/pass/{r}", [tf.int64])
        for r in range(num_replicas)
      ]

  def initialize(self) -> None:
    """Nobody came yet. For the chief of a new training, once."""
    zeros = tf.zeros([self._num_replicas], tf.int64)
    self._is_open.assign(False)
    self._state.clocks.assign(zeros)
    self._state.waiting.assign(zeros + NOBODY)

  def clocks(self) -> tf.Tensor:
    """How often each came: int64 [R]."""
    with tf.device(self._device):
      return self._state.clocks.read_value()

  def is_waiting(self) -> tf.Tensor:
    """Who waits: bool [R]."""
    return self._state.waiting.read_value() != NOBODY

  def enter(self, replica: int | tf.Tensor, clock: tf.Tensor) -> tf.Tensor:
    """Comes to the gate for the `clock`th time and waits until it may pass.

    To be used inside a `tf.function`.

    Returns:
      A tensor to wait for.

    Raises:
      tf.errors.OutOfRangeError, tf.errors.CancelledError: After `close`, at
        run time.
    """
    with tf.device(self._device):
      tag = releases.microseconds(releases.now())
      (tag,) = self._note(replica, clock, tag)
      with tf.control_dependencies([tag]):
        _, is_anothers = replies.take_own(
          self._passes, replica, tag, lambda passed: passed
        )
      with tf.control_dependencies([is_anothers]):
        return tf.identity(tag)

  def _note(self, replica, clock, tag) -> list[tf.Tensor]:
    def note():
      state = State(*[v.read_value() for v in self._state])
      this = tf.range(self._num_replicas, dtype=tf.int64) == replica
      # Whoever waits for this replica already is a dead client's step, that
      # may live on at the PS; it would take the next pass.
      self._send(tf.where(this, state.waiting, tf.constant(NOBODY, tf.int64)))
      is_open = self._is_open.read_value()
      state, passing = arrive(
        state, replica, clock, tag, self._max_lead, is_open
      )
      for variable, value in zip(self._state, state, strict=True):
        variable.assign(value)
      self._send(passing)
      return [tf.identity(tag)]

    return self._lock.hold(note)

  def _send(self, tags: tf.Tensor) -> None:
    for r, queue in enumerate(self._passes):

      def send(r=r, queue=queue):
        with tf.control_dependencies([queue.enqueue([tags[r]])]):
          return tf.constant(True)

      tf.cond(tags[r] != NOBODY, send, lambda: tf.constant(False))

  def declare_lost(self, replica: tf.Tensor) -> None:
    """Lets nobody wait for `replica` until it comes again."""
    with tf.device(self._device):
      self._note(
        replica, tf.constant(LOST, tf.int64), tf.constant(NOBODY, tf.int64)
      )

  def open(self) -> None:
    """Lets all pass from now on; to be used inside a `tf.function`."""
    with tf.device(self._device):
      self._is_open.assign(True)
      nobody = tf.constant(NOBODY, tf.int64)
      self._note(nobody, nobody, nobody)

  def close(self) -> None:
    """Releases everybody with an error."""
    for queue in self._passes:
      queue.close()


class Gates:
  """What every replica passes once a step, before its update and after.

  After its update it waits until nobody is more than `max_lead` updates behind,
  so that its next read has all updates of each but the last `max_lead` (Ho et
  al. 2013, section 2). Where that is 0 it also waits before, until all have
  computed: nobody's read has an update of the same step.
  """

  def __init__(self, num_replicas: int, *, max_lead: int, device: str):
    """Creates the objects on `device`, or attaches to them; as `Gate`."""
    self._device = device

    def gate(name):
      return Gate(
        f"gates/{name}", num_replicas, max_lead=max_lead, device=device
      )

    self._after = gate("after")
    self._before = None if max_lead else gate("before")
    self._gates = [g for g in (self._after, self._before) if g is not None]

  def initialize(self) -> None:
    """Nobody came yet. For the chief of a new training, once."""
    for gate in self._gates:
      gate.initialize()

  def next_clock(self, replica: int | tf.Tensor) -> tf.Tensor:
    """How often `replica` will have come, with this step; int64 scalar.

    To be used inside a `tf.function`. One that was lost comes back where the
    slowest is.
    """
    with tf.device(self._device):
      clock = self._after.clocks()
      clock = tf.where(clock < LOST, clock, tf.reduce_min(clock))
      clock = tf.where(clock < LOST, clock, 0)
      return tf.gather(clock, replica) + 1

  def before(self, replica: int | tf.Tensor, clock: tf.Tensor) -> tf.Tensor:
    """Passes the one before the update, if there is one; see `Gate.enter`."""
    if self._before is None:
      return clock
    return self._before.enter(replica, clock)

  def after(self, replica: int | tf.Tensor, clock: tf.Tensor) -> tf.Tensor:
    """Passes the one after the update; see `Gate.enter`."""
    return self._after.enter(replica, clock)

  def is_waiting(self) -> tf.Tensor:
    """Who waits: bool [R]."""
    return tf.reduce_any([gate.is_waiting() for gate in self._gates], axis=0)

  def declare_lost(self, replica: tf.Tensor) -> None:
    """Lets nobody wait for `replica` until it comes again."""
    for gate in self._gates:
      gate.declare_lost(replica)

  def open(self) -> None:
    """Lets all pass from now on; to be used inside a `tf.function`."""
    for gate in self._gates:
      gate.open()

  def close(self) -> None:
    """Releases everybody with an error."""
    for gate in self._gates:
      gate.close()
