"""Simulates synchronous steps of very many replicas, a step at a time.

All replicas that are released together are handled as one array. Only late
replicas, and reads on the shared link, are simulated event by event.
"""

import bisect
import heapq
import math

import numpy as np

from experiments.simulator import simulated_cluster
from experiments.simulator import simulated_links


class Rounds:
  """Simulates a synchronous training step by step; `run` makes the updates."""

  def __init__(
    self,
    cluster: simulated_cluster.Cluster,
    rule: simulated_cluster.Sync,
    seed: int,
  ):
    """Prepares the training; at time 0 all replicas begin to read.

    Args:
      cluster: The cluster, without a bound on its cores.
      rule: The synchronous rule. It needs at most as many contributions (sets
        of gradients) per update as there are replicas.
      seed: The seed of the compute times.
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
    """Simulates `num_steps` updates, and returns the result."""
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
    delivered = simulated_links.ends_evenly(
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
    """Makes all replicas abandon their batches at the end of a step.

    Args:
      times: The times at which late replicas would have offered gradients.
      late: The indices of these replicas.
    """
    spent = self._computing[late] - (times - self._time)
    spent += 2 * self._cluster.latency
    self._result.compute_secs[late] += np.clip(spent, 0, self._computing[late])
    # Each step ends in one of the three ways for everybody.
    known = self._result.applied + self._result.surplus
    self._result.late = self._step - known
    self._forget_reads()

  def _advance(self, offers: "_Offers", end: float) -> None:
    """Simulates reads, offers of gradients and refusals, ordered by time.

    A replica offers its gradients when it has computed them.

    Args:
      offers: The offers in this step, to which new ones are added.
      end: Where the simulation stops. If it is infinite, it stops when the
        first N offers of the step are known.
    """
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
  """Collects the offers of one step: which replicas have gradients, and when.

  Many offers are added as an array, and few singly. The step uses the first N.

  Attributes:
    bound: The time at which the last of the first N offers arrives, as far as
      is known; infinity while there are fewer offers.
  """

  def __init__(self, places: int):
    self.bound = math.inf
    self._places = places
    self._times, self._replicas = np.empty([0]), np.empty([0], np.int64)
    self._single = []
    # How many of either kind are among the first N.
    self._num_first, self._num_single = 0, 0

  def add(self, times: np.ndarray, replicas: np.ndarray) -> None:
    """Adds many offers of gradients, in any order.

    Args:
      times: The times at which the offers arrive.
      replicas: The indices of the replicas.
    """
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
    """Adds one offer of gradients, which arrives at `time` from `replica`."""
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
    """Returns the first N offers of gradients, in the order of their arrival.

    Returns:
      The arrival times, float64 [N], and the replicas, int64 [N].
    """
    return self._merge(slice(self._num_first), slice(self._num_single))

  def rest(
    self, *, since: float = -math.inf, before: float = math.inf
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns the offers of gradients that are not among the first N.

    Args:
      since: Offers before this time are left out.
      before: Offers at this time or later are left out.

    Returns:
      The arrival times and the replicas, in the order of arrival.
    """
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
