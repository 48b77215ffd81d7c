"""Synchronous steps of very many replicas, a step at a time.

All replicas that are released together are one array; only those that come
late, and what happens on the link from which they read, are events.
"""

import bisect
import heapq
import math

import numpy as np

from experiments.simulator import simulated_cluster
from experiments.simulator import simulated_links


class Rounds:
  """A synchronous training; `run` makes its updates."""

  def __init__(
    self,
    cluster: simulated_cluster.Cluster,
    rule: simulated_cluster.Sync,
    seed: int,
  ):
    """At time 0 all replicas begin to read.

    Args:
      cluster: Without a bound on its cores.
      rule: At most as many contributions per update as there are replicas.
      seed: Of the compute times.
    """
    self._cluster = cluster
    self._restarts = rule.restarts_late
    self._places = rule.replicas_to_aggregate or cluster.num_replicas
    self._asks = self._places < cluster.num_replicas and not self._restarts
    self._draws = cluster.draws(seed)
    self._result = simulated_cluster.empty_result(cluster.num_replicas)
    self._computing = np.zeros([cluster.num_replicas])
    self._tag = np.zeros([cluster.num_replicas], np.int64)
    self._step, self._time = 0, 0.0
    # Offers that will be refused, as (arrival, replica).
    self._stale = []
    self._forget_reads()
    self._request(cluster.latency, np.arange(cluster.num_replicas))

  def run(self, num_steps: int) -> simulated_cluster.Result:
    """Makes `num_steps` updates."""
    ends = np.empty([num_steps])
    for step in range(num_steps):
      self._make_step()
      ends[step] = self._time
    self._result.step_ends = ends
    self._result.staleness = np.zeros([num_steps * self._places], np.int64)
    return self._result

  def _forget_reads(self) -> None:
    # Requests on their way, as (arrival, number, replicas); one replica is an
    # int, since arrays of one are slow.
    self._requests, self._num_requests = [], 0
    self._link = simulated_links.FairShare(
      self._cluster.total_bandwidth, self._cluster.replica_bandwidth
    )

  def _release(self, replicas: np.ndarray) -> None:
    self._request(self._time + 2 * self._cluster.latency, replicas)

  def _request(self, arrival: float, replicas: np.ndarray | int) -> None:
    self._num_requests += 1
    heapq.heappush(self._requests, (arrival, self._num_requests, replicas))

  def _make_step(self) -> None:
    offers = _Offers(self._places)
    self._advance(offers, math.inf)
    times, winners = offers.first()
    cluster = self._cluster
    if self._asks:
      times = times + 2 * cluster.latency
    delivered = simulated_links.ends_in_order(
      times,
      cluster.handed_over_bytes,
      cluster.total_bandwidth,
      cluster.replica_bandwidth,
    )
    end = delivered.max() + cluster.apply_secs
    self._advance(offers, end)
    surplus_times, surplus = offers.rest(before=end)
    late_times, late = offers.rest(since=end)
    self._count(end, winners, delivered, surplus, surplus_times)
    self._step, self._time = self._step + 1, end
    if self._restarts:
      self._give_up(late_times, late)
      self._release(np.arange(cluster.num_replicas))
      return
    self._expect_stale(late_times, late)
    self._release(np.sort(np.concatenate([winners, surplus])))

  def _count(self, end, winners, delivered, surplus, surplus_times) -> None:
    result, latency = self._result, self._cluster.latency
    result.applied[winners] += 1
    result.surplus[surplus] += 1
    result.sent_bytes[winners] += self._cluster.handed_over_bytes
    result.wait_secs[winners] += end - delivered + 2 * latency * self._asks
    result.wait_secs[surplus] += end + 2 * latency - surplus_times
    for replicas in (winners, surplus):
      result.compute_secs[replicas] += self._computing[replicas]

  def _give_up(self, times: np.ndarray, late: np.ndarray) -> None:
    """Everybody begins anew; `late` would have offered at `times`."""
    spent = self._computing[late] - (times - self._time)
    spent += 2 * self._cluster.latency
    self._result.compute_secs[late] += np.clip(spent, 0, self._computing[late])
    # Each step ends in one of the three ways for everybody.
    known = self._result.applied + self._result.surplus
    self._result.late = self._step - known
    self._forget_reads()

  def _advance(self, offers: "_Offers", end: float) -> None:
    """Lets everything happen until `end`, or until the step has its offers."""
    while True:
      offered = self._stale[0][0] if self._stale else math.inf
      asked = self._requests[0][0] if self._requests else math.inf
      read = self._link.next_end()
      time = min(offered, asked, read)
      if time >= (offers.bound if end == math.inf else end):
        return
      if time == read:
        self._compute(read, self._link.pop(), offers)
      elif time == asked:
        self._read(asked, heapq.heappop(self._requests)[2])
      else:
        self._refuse(*heapq.heappop(self._stale))

  def _refuse(self, time: float, replica: int) -> None:
    latency = self._cluster.latency
    self._result.late[replica] += 1
    self._result.compute_secs[replica] += self._computing[replica]
    self._result.wait_secs[replica] += 2 * latency
    self._request(time + 2 * latency, replica)

  def _read(self, time: float, replicas: np.ndarray | int) -> None:
    self._tag[replicas] = self._step
    self._result.read_bytes[replicas] += self._cluster.read_bytes
    users = 1 if isinstance(replicas, int) else len(replicas)
    self._link.add(time, self._cluster.read_bytes, replicas, users)

  def _compute(
    self, time: float, replicas: np.ndarray | int, offers: "_Offers"
  ) -> None:
    time += 2 * self._cluster.latency
    if isinstance(replicas, int):
      secs = self._draws.next_of(replicas)
      if self._tag[replicas] == self._step:
        offers.add_one(time + secs, replicas)
      else:
        heapq.heappush(self._stale, (time + secs, replicas))
    else:
      secs = self._draws.next(replicas)
      if self._tag[replicas[0]] == self._step:
        offers.add(time + secs, replicas)
      else:
        self._expect_stale(time + secs, replicas)
    self._computing[replicas] = secs

  def _expect_stale(self, times: np.ndarray, replicas: np.ndarray) -> None:
    self._stale += zip(times.tolist(), replicas.tolist(), strict=True)
    self._stale.sort()


class _Offers:
  """Offers of one step: many that came at once, and few that come singly.

  Attributes:
    bound: When the last of the first N arrives, as far as is known.
  """

  def __init__(self, places: int):
    self.bound = math.inf
    self._places = places
    self._times, self._replicas = np.empty([0]), np.empty([0], np.int64)
    self._single = []
    # How many of either kind are among the first N.
    self._num_first, self._num_single = 0, 0

  def add(self, times: np.ndarray, replicas: np.ndarray) -> None:
    """Adds offers in any order."""
    times = np.concatenate([self._times, times])
    order = np.argsort(times, kind="stable")
    self._times = times[order]
    self._replicas = np.concatenate([self._replicas, replicas])[order]
    both = np.concatenate([self._times, [time for time, _ in self._single]])
    first = np.argsort(both, kind="stable")[: self._places]
    self._num_first = int((first < len(times)).sum())
    self._num_single = len(first) - self._num_first
    self._find_bound()

  def add_one(self, time: float, replica: int) -> None:
    """Adds an offer."""
    bisect.insort(self._single, (time, replica))
    if time >= self.bound:
      return
    self._num_single += 1
    if self._num_first + self._num_single > self._places:
      if self._last_single() < self._last_first():
        self._num_first -= 1
      else:
        self._num_single -= 1
    self._find_bound()

  def _last_first(self) -> float:
    return self._times[self._num_first - 1] if self._num_first else -math.inf

  def _last_single(self) -> float:
    count = self._num_single
    return self._single[count - 1][0] if count else -math.inf

  def _find_bound(self) -> None:
    if self._num_first + self._num_single == self._places:
      self.bound = max(self._last_first(), self._last_single())

  def first(self) -> tuple[np.ndarray, np.ndarray]:
    """(arrivals, replicas) of the first N, in order: float64 and int64 [N]."""
    return self._merge(slice(self._num_first), slice(self._num_single))

  def rest(
    self, *, since: float = -math.inf, before: float = math.inf
  ) -> tuple[np.ndarray, np.ndarray]:
    """As `first`, of those that are not among the first N."""
    many = slice(
      max(self._num_first, int(np.searchsorted(self._times, since))),
      max(self._num_first, int(np.searchsorted(self._times, before))),
    )
    low = bisect.bisect_left(self._single, (since, -1))
    high = bisect.bisect_left(self._single, (before, -1))
    single = slice(max(self._num_single, low), max(self._num_single, high))
    return self._merge(many, single)

  def _merge(self, many: slice, single: slice):
    some = self._single[single]
    times = np.concatenate([self._times[many], [time for time, _ in some]])
    replicas = [replica for _, replica in some]
    replicas = np.concatenate(
      [self._replicas[many], np.array(replicas, np.int64)]
    )
    order = np.argsort(times, kind="stable")
    return times[order], replicas[order]
