"""Trains with replicas in virtual time, by the library's update rules.

An event clock decides when each replica ends its computation. All else is real:
the gradients, the update rule of the library, its messages and its waits. A
replica is a thread that calls the rule as a replica of a cluster does, and one
more thread is the chief. The clock starts one step of one replica, and waits
until every replica has either returned from the rule or waits in it for other
replicas. Only then does the clock go on to the next event. So equal seeds give
equal weights, although the threads run at the same time.

A step of a replica, in virtual time:

1. It reads the variables, at the time at which the rule releases it.
2. After the time that the computation of its batches takes, and a constant time
   for the exchange with the parameter server, it hands its gradients over. The
   gradients are computed at this moment, from the variables of 1.
3. The rule returns at once, or when another replica's step ends the wait.

Updates themselves take no time, and links are never congested.
"""

import concurrent.futures
import dataclasses
import heapq
import itertools
from collections.abc import Callable
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from experiments.simulator import compute_times
from experiments.support import one_thread
from tf_replicas.drivers import replica_loop
from tf_replicas.replica import model_replica
from tf_replicas.rules import base as rule_base
from tf_replicas.rules import protocol
from tf_replicas.rules import results
from tf_replicas.rules import step_token
from tf_replicas.runtime import waiting
from tf_replicas.store import placement

_CPU = "/device:CPU:0"
# How long the clock waits for a call before it reads the rule's status.
_POLL_SECS = 0.0005
# A rule that does not answer for so long hangs.
_PATIENCE_SECS = 100.0
_WAITS = (protocol.Status.WAITING, protocol.Status.DELIVERED)


@dataclasses.dataclass(frozen=True)
class Absence:
  """The time for which one replica is dead.

  A replica dies while it computes. If it waits for others at the time `start`,
  it dies when it begins its next batch. What it has computed is lost.

  Attributes:
    replica: The index of the replica.
    start: The virtual time of its death.
    end: The virtual time at which it begins anew.
    noticed_after: The time after its death at which the chief declares it lost.
  """

  replica: int
  start: float
  end: float
  noticed_after: float


class Point(NamedTuple):
  """The state of a training at one point of virtual time.

  Attributes:
    time: The virtual time.
    updates: The number of updates (the global step).
    examples: The number of examples in these updates.
    values: The values of the shared variables.
  """

  time: float
  updates: int
  examples: int
  values: list[tf.Tensor]


class _Batches:
  """An iterator over the batches of one replica, inside a `tf.function`."""

  def __init__(self, data: tf.Variable, drawn: tf.Variable, index: tf.Tensor):
    self._data, self._drawn, self._index = data, drawn, index

  def __next__(self) -> tuple[tf.Tensor]:
    count, size = self._data.shape[:2]
    this = tf.one_hot(self._index, count, dtype=tf.int64)
    numbers = self._drawn.assign_add(this)
    number = (tf.gather(numbers, self._index) - 1) % size
    return (tf.gather_nd(self._data, tf.stack([self._index, number])),)


class _Chief:
  """The chief: a thread that makes updates, or waits for them.

  Attributes:
    error: The error that ended the thread; None while it runs.
  """

  def __init__(self, rule: rule_base.UpdateRule):
    self._rule = rule
    self._is_ending = False
    self.error: BaseException | None = None
    self._thread = waiting.RaisingThread(self._run, on_error=bool)

  def _run(self) -> None:
    try:
      while True:
        self._update()
    except BaseException as error:  # `Training` raises it in its own thread.
      self.error = error

  def _update(self) -> None:
    try:
      self._rule.apply_updates()
    except results.Interrupted:
      # An interrupt of the training before may arrive late.
      if self._is_ending:
        raise

  def end(self) -> None:
    """Interrupts the chief, and waits for its end."""
    self._is_ending = True
    while self._thread.is_alive():
      self._rule.interrupt()
      self._thread.join(0.1)


class Training:
  """Trainings in virtual time, one after the other, with one update rule.

  `start` begins a new training; `advance` lets virtual time pass. The traced
  functions are used again by the next training.

  Attributes:
    rule: The update rule.
    time: The virtual time now.
  """

  def __init__(
    self,
    rule: rule_base.UpdateRule,
    replica: model_replica.Replica,
    *,
    batches_shape: Sequence[int],
    exchange_secs: float = 0.0,
    needs: Callable[[int], int] | None = None,
  ):
    """Builds the rule and its variables.

    Args:
      rule: The update rule, not built yet. It must not average several
        contributions of one replica in one update.
      replica: The computation of each replica; its loss function takes the
        parameters and the indices of a batch. `dataset_fn` is not used.
      batches_shape: [batches per replica, examples per batch].
      exchange_secs: The virtual time of one exchange with the parameter server.
      needs: For a rule that switches: maps the global step to the number of
        contributions in the next update. The clock then waits until the chief
        has changed the rule.
    """
    self.rule = rule
    self._store = one_thread.local_store(
      placement.from_variables(replica.variables)
    )
    rule.build(self._store, is_sparse=[False] * len(self._store.contributed))
    self._exchange_secs = exchange_secs
    self._needs = needs
    self._period = getattr(rule, "period", 1)
    count = rule.total_num_replicas
    self._drawn = tf.Variable(tf.zeros([count], tf.int64))
    self._data = tf.Variable(tf.zeros([count, *batches_shape], tf.int64))

    def loop(index):
      batches = _Batches(self._data, self._drawn, index)
      return replica_loop.ReplicaLoop(
        rule, replica, batches, index, device=_CPU
      )

    self._begin = tf.function(lambda i: loop(i).begin(), autograph=False)
    self._offer, self._hand_over = (
      tf.function(
        lambda i, *carried, is_pre=is_pre: loop(i).run_one(
          *carried, is_preadmitted=is_pre
        ),
        autograph=False,
      )
      for is_pre in (False, True)
    )
    self._indices = [tf.constant(i, tf.int64) for i in range(count)]
    self._pool = concurrent.futures.ThreadPoolExecutor(count)
    self._chief: _Chief | None = None

  def start(
    self,
    values: Sequence[tf.Tensor],
    batches: np.ndarray,
    times: compute_times.Draws,
    absence: Absence | None = None,
  ) -> None:
    """Begins a new training at time 0; the last one must be finished.

    Args:
      values: The first value of each variable.
      batches: int64 [replicas, batches, examples], the examples of each batch.
        After its last batch, a replica begins again with the first.
      times: The virtual time that each batch of each replica takes.
      absence: When a replica dies and returns; None: all live.
    """
    self._data.assign(batches)
    self._drawn.assign(tf.zeros_like(self._drawn))
    self.rule.create(values, resumed=False)
    self._store.start()
    self.rule.start()
    self.time = 0.0
    self._times, self._absence = times, absence
    self._calls: dict[int, concurrent.futures.Future] = {}
    self._states: dict[int, list[tf.Tensor]] = {}
    self._dead: set[int] = set()
    self._is_finishing = False
    # (time, replica, number, what happens then)
    self._events: list[tuple[float, int, int, Callable[[int], None]]] = []
    self._numbers = itertools.count()
    self._chief = _Chief(self.rule)
    if absence is not None:
      self._add(absence.start, absence.replica, self._die)
    for index in range(self.rule.total_num_replicas):
      self._live(index)

  def advance(self, time: float) -> None:
    """Lets all happen that happens up to a virtual time.

    Raises:
      NonFiniteGradientError: If a loss or a gradient is not finite.
      TimeoutError: If the rule hangs.
    """
    while self._events and self._events[0][0] <= time:
      self._next()
    self.time = max(time, self.time)

  def point(self) -> Point:
    """Reads the state of the training at the present virtual time."""
    return Point(
      self.time,
      int(self._store.read_global_step()),
      int(self._store.examples_seen.read_value()),
      self._store.read(),
    )

  def finish(self) -> None:
    """Ends the training, after the steps that still wait in the rule.

    Replicas begin new steps only if others wait for these.
    """
    self._is_finishing = True
    while self._calls:
      if not self._events:
        for replica in self._idle():
          self._compute(replica)
      self._next()
    self._chief.end()

  def close(self) -> None:
    """Closes the rule, so that no thread waits any longer."""
    self.rule.close()
    self._pool.shutdown(wait=False)

  # Events.

  def _add(self, time: float, replica: int, what) -> None:
    number = next(self._numbers)
    heapq.heappush(self._events, (time, replica, number, what))

  def _next(self) -> None:
    self.time, replica, _, what = heapq.heappop(self._events)
    what(replica)

  def _live(self, replica: int) -> None:
    """Lets a replica begin: it reads the variables."""
    self._dead.discard(replica)
    self._states[replica] = self._begin(self._indices[replica])
    self._compute(replica)

  def _compute(self, replica: int) -> None:
    """Lets a replica compute its next batches, from now on."""
    absence = self._absence
    if absence and absence.replica == replica:
      if absence.start <= self.time < absence.end:
        self._die(replica)
        return
    secs = sum(self._times.next_of(replica) for _ in range(self._period))
    self._add(self.time + self._exchange_secs + secs, replica, self._step)

  def _step(self, replica: int) -> None:
    """Lets a replica hand over what it has computed."""
    carried = self._states.pop(replica)
    (token,) = step_token.LAYOUT.unpack_rows(carried[0].numpy()[None])
    has_tag = token.preadmitted_tag != step_token.NO_TAG
    run = self._hand_over if has_tag else self._offer
    self._calls[replica] = self._pool.submit(
      run, self._indices[replica], *carried
    )
    self._settle()

  def _die(self, replica: int) -> None:
    """Kills a replica that computes. One that waits dies in `_compute`."""
    if replica in self._calls or replica in self._dead:
      return
    self._dead.add(replica)
    self._events = [e for e in self._events if e[1] != replica]
    heapq.heapify(self._events)
    noticed = self.time + self._absence.noticed_after
    self._add(min(noticed, self._absence.end), replica, self._notice)
    self._add(self._absence.end, replica, self._live)

  def _notice(self, replica: int) -> None:
    """Lets the chief declare a dead replica lost, as its watchdog does."""
    tag = self.rule.status().replicas[replica].tag
    self.rule.declare_lost(replica, tag)
    lost = protocol.Status.LOST
    self._await(lambda: self.rule.status().replicas[replica].status == lost)
    self._settle()

  # Waiting.

  def _settle(self) -> None:
    """Waits until each replica has returned, or waits for others in the rule.

    Replicas that have returned begin to compute, in the order of their indices.
    """
    self._await(self._is_settled)
    for replica in sorted(self._calls):
      if self._calls[replica].done():
        self._states[replica] = self._calls.pop(replica).result()
        if not self._is_finishing:
          self._compute(replica)

  def _idle(self) -> list[int]:
    return sorted(set(self._states) - self._dead)

  def _is_settled(self) -> bool:
    busy = [i for i, call in self._calls.items() if not call.done()]
    if busy:
      calls = [self._calls[i] for i in busy]
      concurrent.futures.wait(
        calls, _POLL_SECS, concurrent.futures.FIRST_COMPLETED
      )
      busy = [i for i in busy if not self._calls[i].done()]
    if not busy and self._needs is None:
      return True
    # The states of all replicas are one variable, so they are of one moment.
    status = self.rule.status()
    states = [row.status for row in status.replicas]
    if states.count(protocol.Status.DELIVERED) == status.needed:
      return False  # The chief makes an update.
    if self._needs is not None:
      step = int(self._store.read_global_step())
      if status.needed != self._needs(step):
        return False  # The chief changes the rule.
    return all(states[index] in _WAITS for index in busy)

  def _await(self, condition: Callable[[], bool]) -> None:
    def holds():
      if self._chief.error is not None:
        raise self._chief.error
      return condition()

    waiting.await_value(
      holds,
      timeout_secs=_PATIENCE_SECS,
      what="waiting for the replicas",
      poll_secs=0.0,
    )
