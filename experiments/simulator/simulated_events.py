"""Simulates a training by any update rule, event by event.

`Training` does what is common to all rules: a replica reads the variables,
computes gradients, and is ready. Then the rule decides what happens until the
replica reads again.
"""

import functools
import heapq
import math
from collections.abc import Callable

import numpy as np

from experiments.simulator import simulated_cluster
from experiments.simulator import simulated_links


class Training:
  """Simulates one training event by event; `run` makes the updates.

  Attributes:
    cluster: The cluster that is simulated.
    result: The counts so far.
    latency: The seconds that a message takes, one way.
    time: The simulated time now, in seconds.
    step: The number of updates made so far.
    tags: For each replica, the global step of the variables that it read last.
    ready: For each replica, the time at which its last batch was computed.
  """

  def __init__(
    self,
    cluster: simulated_cluster.Cluster,
    rule: simulated_cluster.Sync | simulated_cluster.Async,
    seed: int,
    *,
    records: bool = False,
  ):
    """Prepares the training; at time 0 all replicas begin to read.

    Args:
      cluster: The cluster that is simulated.
      rule: How updates are made of gradients; without `restarts_late`.
      seed: The seed of the compute times.
      records: Whether to keep all events.
    """
    self.cluster = cluster
    self.result = simulated_cluster.empty_result(cluster.num_replicas)
    self.latency = cluster.latency
    self.time, self.step = 0.0, 0
    self.tags = [0] * cluster.num_replicas
    self.ready = [0.0] * cluster.num_replicas
    self._computing = [0.0] * cluster.num_replicas
    self._read_start = [0.0] * cluster.num_replicas
    self._draws = cluster.draws(seed)
    self._records = records
    self._queue, self._number = [], 0
    self._ends, self._staleness = [], []
    self._reads, self._gradients = (
      _Shared(
        self,
        simulated_links.FairShare(
          cluster.total_bandwidth, cluster.replica_bandwidth
        ),
      )
      for _ in range(2)
    )
    self._cores = _Shared(self, simulated_links.FairShare(cluster.cores, 1.0))
    is_sync = isinstance(rule, simulated_cluster.Sync)
    self._rule = (_SyncRule if is_sync else _AsyncRule)(self, rule)
    for replica in range(cluster.num_replicas):
      self.release(replica, -self.latency)

  def run(self, num_steps: int) -> simulated_cluster.Result:
    """Simulates until `num_steps` updates are made, and returns the result."""
    while self.step < num_steps:
      self.time, _, act = heapq.heappop(self._queue)
      act()
    self.result.step_ends = np.array(self._ends)
    self.result.staleness = np.array(self._staleness, np.int64)
    return self.result

  def at(self, time: float, act: Callable[[], None]) -> None:
    """Schedules a call of `act` at the simulated time `time`.

    Calls that are scheduled for one time are made in the order of scheduling.
    """
    self._number += 1
    heapq.heappush(self._queue, (time, self._number, act))

  def record(self, task, step, kind, start, end) -> None:
    """Appends an event to the result, if events are to be kept.

    Args:
      task: The index of a replica, or the name of another task.
      step: The global step to which the event belongs.
      kind: What the task did, such as "compute".
      start: The begin in seconds.
      end: The end in seconds.
    """
    if self._records:
      name = task if isinstance(task, str) else f"worker:{task}"
      event = simulated_cluster.Event(name, step, kind, start, end)
      self.result.events.append(event)

  def release(self, replica: int, time: float) -> None:
    """Lets a replica read the variables again.

    The message to the replica leaves the PS (parameter server) at `time`.
    """
    self._read_start[replica] = time + self.latency
    self.at(time + 2 * self.latency, functools.partial(self._read, replica))

  def hand_over(
    self, replica: int, start: float, act: Callable[[], None]
  ) -> None:
    """Simulates that a replica sends its gradients to the PS tasks.

    Args:
      replica: The index of the replica.
      start: The time at which it begins to send.
      act: Called at the time at which the gradients have arrived.
    """
    self.at(
      start + self.latency, functools.partial(self._send, replica, start, act)
    )

  def refuse(self, replica: int) -> None:
    """Counts gradients that are too late, and the wait of their replica.

    The replica is told now that its gradients are not wanted.
    """
    self.result.late[replica] += 1
    self.spend(replica)
    end = self.time + self.latency
    self.result.wait_secs[replica] += end - self.ready[replica]
    self.record(
      replica, self.tags[replica], "refused", self.ready[replica], end
    )

  def spend(self, replica: int) -> None:
    """Adds the time of the replica's last batch to its total compute time."""
    self.result.compute_secs[replica] += self._computing[replica]

  def wait(self, replica: int, start: float, end: float) -> None:
    """Counts and records that a replica waited from `start` to `end`."""
    if end > start:
      self.result.wait_secs[replica] += end - start
      self.record(replica, self.tags[replica], "wait", start, end)

  def update(self, task: int | str, start: float, staleness: list[int]) -> None:
    """Counts and records an update, which ends now.

    Args:
      task: The task that makes the update.
      start: The time at which the update began.
      staleness: The staleness of each gradient in the update: the number of
        updates since the variables were read.
    """
    self.record(task, self.step, "apply", start, self.time)
    self.step += 1
    self._ends.append(self.time)
    self._staleness.extend(staleness)

  def _read(self, replica: int) -> None:
    self.tags[replica] = self.step
    self.result.read_bytes[replica] += self.cluster.read_bytes
    self._reads.use(
      self.cluster.read_bytes, functools.partial(self._begin, replica)
    )

  def _begin(self, replica: int) -> None:
    """Schedules the computation of a replica whose read has left the PS.

    The last byte of the parameters arrives `latency` later. Then the replica
    begins to compute.
    """
    start = self.time + self.latency
    secs = self._draws.next_of(replica)
    self._computing[replica] = secs
    self.record(
      replica, self.tags[replica], "read", self._read_start[replica], start
    )
    done = functools.partial(self._done, replica, start)
    if self.cluster.cores == math.inf:
      self.at(start + secs, done)
    else:
      self.at(start, functools.partial(self._cores.use, secs, done))

  def _done(self, replica: int, start: float) -> None:
    self.ready[replica] = self.time
    self.record(replica, self.tags[replica], "compute", start, self.time)
    self._rule.ready(replica)

  def _send(self, replica: int, start: float, act: Callable[[], None]) -> None:
    amount = self.cluster.handed_over_bytes
    self.result.sent_bytes[replica] += amount

    def arrive():
      end = self.time + self.latency
      self.record(replica, self.tags[replica], "hand_over", start, end)
      act()

    self._gradients.use(amount, arrive)


class _Shared:
  """Connects a `FairShare`, such as a shared link, to the events of a training.

  At the simulated time at which a user of the capacity has got its amount, a
  function is called.
  """

  def __init__(self, training: Training, share: simulated_links.FairShare):
    self._training = training
    self._share = share
    self._planned = math.inf

  def use(self, amount: float, act: Callable[[], None]) -> None:
    """Begins to use the shared capacity now.

    Args:
      amount: The amount needed, such as bytes.
      act: Called at the time at which this amount was transferred.
    """
    self._share.add(self._training.time, amount, act)
    self._plan()

  def _plan(self) -> None:
    # A later arrival delays the end: then the event comes too early and
    # plans anew, which is cheaper than to plan anew at every arrival.
    end = self._share.next_end()
    if end < self._planned:
      self._planned = end
      self._training.at(end, functools.partial(self._wake, end))

  def _wake(self, planned: float) -> None:
    if planned != self._planned:
      return
    self._planned = math.inf
    while self._share.next_end() <= self._training.time:
      self._share.pop()()
    self._plan()


class _SyncRule:
  """Simulates the synchronous rule with N contributions per step.

  It takes the first N contributions (sets of gradients) of a step, and refuses
  all others.
  """

  def __init__(self, training: Training, rule: simulated_cluster.Sync):
    self._training = training
    num_replicas = training.cluster.num_replicas
    self._places = rule.replicas_to_aggregate or num_replicas
    self._asks = self._places < num_replicas
    self._num_admitted = 0
    self._waiting = []
    self._delivered = []

  def ready(self, replica: int) -> None:
    training = self._training
    now, latency = training.time, training.latency
    if self._asks:
      training.at(now + latency, functools.partial(self._offer, replica))
    else:
      training.hand_over(
        replica, now, functools.partial(self._deliver, replica)
      )

  def _offer(self, replica: int) -> None:
    training = self._training
    if training.tags[replica] < training.step:
      training.refuse(replica)
      training.release(replica, training.time)
    elif self._num_admitted == self._places:
      self._waiting.append(replica)
    else:
      self._num_admitted += 1
      admitted = training.time + training.latency
      training.wait(replica, training.ready[replica], admitted)
      training.hand_over(
        replica, admitted, functools.partial(self._deliver, replica)
      )

  def _deliver(self, replica: int) -> None:
    now = self._training.time
    self._delivered.append((now, replica))
    if len(self._delivered) == self._places:
      end = now + self._training.cluster.apply_secs
      self._training.at(end, functools.partial(self._end, now))

  def _end(self, start: float) -> None:
    training = self._training
    told = training.time + training.latency
    for delivered, replica in self._delivered:
      training.result.applied[replica] += 1
      training.spend(replica)
      training.wait(replica, delivered + training.latency, told)
    for replica in self._waiting:
      training.result.surplus[replica] += 1
      training.spend(replica)
      ready = training.ready[replica]
      training.result.wait_secs[replica] += told - ready
      training.record(replica, training.step, "refused", ready, told)
    released = [replica for _, replica in self._delivered] + self._waiting
    training.update("chief", start, [0] * self._places)
    self._num_admitted, self._delivered, self._waiting = 0, [], []
    for replica in sorted(released):
      training.release(replica, training.time)


class _AsyncRule:
  """Simulates an asynchronous rule: gradients are applied as they arrive.

  The rule may bound the staleness of gradients, or how far a replica is ahead.
  """

  def __init__(self, training: Training, rule: simulated_cluster.Async):
    num_replicas = training.cluster.num_replicas
    self._training = training
    self._rule = rule
    self._asks = rule.max_lead == 0 or rule.max_staleness is not None
    lead = math.inf if rule.max_lead is None else rule.max_lead
    self._before = _Gate(num_replicas, math.inf if lead else 0)
    self._after = _Gate(num_replicas, lead)
    self._num_admitted = 0
    # Of an update to come, as (step that was read, replica).
    self._group = []
    self._delivered = [0.0] * num_replicas
    self._free = 0.0

  def ready(self, replica: int) -> None:
    now = self._training.time
    if self._asks:
      arrive = functools.partial(self._arrive, replica)
      self._training.at(now + self._training.latency, arrive)
    else:
      self._admit(replica, now)

  def _arrive(self, replica: int) -> None:
    training, bound = self._training, self._rule.max_staleness
    for other in self._before.pass_on(replica):
      # Updates that are finished or under way, as far as they are known.
      under_way = self._num_admitted // self._rule.gradients_per_update
      stale = training.step + under_way - training.tags[other]
      if bound is not None and stale > bound:
        training.refuse(other)
        self._delivered[other] = training.time
        self._pass_on(other)
        continue
      admitted = training.time + training.latency
      training.wait(other, training.ready[other], admitted)
      self._admit(other, admitted)

  def _admit(self, replica: int, start: float) -> None:
    self._num_admitted += 1
    self._training.hand_over(
      replica, start, functools.partial(self._deliver, replica)
    )

  def _deliver(self, replica: int) -> None:
    training = self._training
    self._delivered[replica] = training.time
    self._group.append((training.tags[replica], replica))
    if len(self._group) < self._rule.gradients_per_update:
      self._go_on(replica)
      return
    start = max(training.time, self._free)
    self._free = start + training.cluster.apply_secs
    training.at(
      self._free, functools.partial(self._update, replica, start, self._group)
    )
    self._group = []

  def _update(self, replica, start, group) -> None:
    training = self._training
    for _, member in group:
      training.result.applied[member] += 1
    self._num_admitted -= len(group)
    staleness = [training.step - tag for tag, _ in group]
    training.update(f"worker:{replica}", start, staleness)
    self._go_on(replica)

  def _go_on(self, replica: int) -> None:
    self._training.spend(replica)
    self._pass_on(replica)

  def _pass_on(self, replica: int) -> None:
    training = self._training
    for other in self._after.pass_on(replica):
      acknowledged = self._delivered[other] + training.latency
      training.wait(other, acknowledged, training.time + training.latency)
      training.release(other, training.time)


class _Gate:
  """Holds up replicas that are too far ahead of the slowest replica.

  A replica comes to the gate once per batch. It may pass if it has come at most
  `max_lead` times more often than the slowest one.
  """

  def __init__(self, num_replicas: int, max_lead: float):
    self._max_lead = max_lead
    self._clocks = [0] * num_replicas
    # How many replicas came as often.
    self._counts = {0: num_replicas}
    self._slowest = 0
    self._waiting = []

  def pass_on(self, replica: int) -> list[int]:
    """Counts that a replica has come to the gate.

    Returns:
      The replicas, among those that wait at the gate, that may pass now.
    """
    clock = self._clocks[replica]
    self._clocks[replica] = clock + 1
    self._counts[clock] -= 1
    self._counts[clock + 1] = self._counts.get(clock + 1, 0) + 1
    self._waiting.append(replica)
    if self._counts[self._slowest]:
      candidates = [replica]
    else:
      del self._counts[self._slowest]
      self._slowest += 1
      candidates = sorted(self._waiting)
    highest = self._slowest + self._max_lead
    passing = [r for r in candidates if self._clocks[r] <= highest]
    self._waiting = [r for r in self._waiting if r not in set(passing)]
    return passing
