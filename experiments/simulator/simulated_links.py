"""What several replicas use at once: shared evenly, or one after the other."""

import heapq
import math

import numpy as np


class FairShare:
  """A capacity that all who use it at the moment share evenly.

  Such as a PS task's outgoing link, from which many read at the same time; or
  the cores of a machine. Each gets `min(limit, capacity / users)`. How much
  each has got since it all began, were it there from the start, is the same
  for all and grows with time; somebody who came when it was v and needs x is
  done when it is v + x. So an arrival costs O(log users).
  """

  def __init__(self, capacity: float, limit: float):
    """Nobody uses it yet.

    Args:
      capacity: Per second, of all together.
      limit: Per second, of one.
    """
    self._capacity = capacity
    self._limit = limit
    self._time = 0.0
    self._served = 0.0
    self._users = 0
    self._waiting = []
    self._arrivals = 0

  def add(self, time: float, amount: float, who: object, users: int = 1):
    """`users` arrive, each needs `amount`; `time` never decreases."""
    self._advance(time)
    self._users += users
    self._arrivals += 1
    entry = (self._served + amount, self._arrivals, users, who)
    heapq.heappush(self._waiting, entry)

  def next_end(self) -> float:
    """When the next will be done if nobody else comes; infinity if none."""
    if not self._waiting:
      return math.inf
    missing = self._waiting[0][0] - self._served
    return self._time + missing / self._rate() if missing > 0 else self._time

  def pop(self) -> object:
    """Takes out who is done at `next_end`."""
    end = self.next_end()
    served, _, users, who = heapq.heappop(self._waiting)
    self._time, self._served = end, max(served, self._served)
    self._users -= users
    return who

  def _rate(self) -> float:
    return min(self._limit, self._capacity / self._users)

  def _advance(self, time: float) -> None:
    if self._waiting and time > self._time:
      rate = self._rate()
      if rate < math.inf:
        self._served += (time - self._time) * rate
    self._time = max(time, self._time)


class InOrder:
  """A link that takes one transfer after the other, as they come.

  None is faster than its sender's own link, but that is not waited for.
  """

  def __init__(self, capacity: float, limit: float):
    """Idle.

    Args:
      capacity: Bytes/s of this link.
      limit: Bytes/s of a sender's.
    """
    self._capacity = capacity
    self._limit = limit
    self._free = 0.0

  def end(self, time: float, amount: float) -> float:
    """When a transfer that begins at `time` has arrived."""
    self._free = max(time, self._free) + amount / self._capacity
    return max(self._free, time + amount / self._limit)


def ends_in_order(
  times: np.ndarray, amount: float, capacity: float, limit: float
) -> np.ndarray:
  """As `InOrder.end` for transfers of one size on an idle link.

  Args:
    times: float64 [n], ascending.
    amount: Bytes of each.
    capacity: As for `InOrder`.
    limit: As for `InOrder`.

  Returns:
    float64 [n].
  """
  # Of max(time[k], free[k - 1]) + secs: Lindley's recurrence, unrolled.
  secs = amount / capacity
  order = np.arange(len(times)) * secs
  free = np.maximum.accumulate(times - order) + order + secs
  return np.maximum(free, times + amount / limit)
