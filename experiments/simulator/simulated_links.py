"""Simulates capacities that replicas share evenly."""

import heapq
import math

import numpy as np


class FairShare:
  """Simulates a capacity that all its current users share evenly.

  Such a capacity is a PS task's outgoing link, from which many replicas read at
  the same time, or the cores of a machine. Each user gets `min(limit, capacity
  / users)` per second.

  The implementation keeps v, the amount that a user would have got if it had
  been there since the start. A user that came when v was v0 and needs the
  amount x is done when v is v0 + x. So an arrival costs O(log users).
  """

  def __init__(self, capacity: float, limit: float):
    """Creates the capacity without users.

    Args:
      capacity: The amount per second for all users together.
      limit: The largest amount per second for one user.
    """
    self._capacity = capacity
    self._limit = limit
    self._time = 0.0
    self._served = 0.0
    self._users = 0
    self._waiting = []
    self._arrivals = 0

  def add(self, time: float, amount: float, who: object, users: int = 1):
    """Adds users that arrive at `time` and need `amount` each.

    Args:
      time: The time in seconds; must not be less than in earlier calls.
      amount: The amount that each user needs.
      who: Any object; `pop` returns it when these users are done.
      users: The number of users.
    """
    self._advance(time)
    self._users += users
    self._arrivals += 1
    entry = (self._served + amount, self._arrivals, users, who)
    heapq.heappush(self._waiting, entry)

  def next_end(self) -> float:
    """Returns when the next user is done, if no other user arrives before.

    Returns:
      The time in seconds; infinity if there are no users.
    """
    if not self._waiting:
      return math.inf
    missing = self._waiting[0][0] - self._served
    return self._time + missing / self._rate() if missing > 0 else self._time

  def pop(self) -> object:
    """Removes the users that are done at the time `next_end`.

    Returns:
      The object that was given for them.
    """
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


def ends_evenly(
  times: np.ndarray, amount: float, capacity: float, limit: float
) -> np.ndarray:
  """Returns when transfers of equal size arrive that share a link evenly.

  They arrive in the order in which they begin.

  Args:
    times: float64 [n], ascending, the times at which the transfers begin.
    amount: The bytes of each transfer.
    capacity: The bytes/s of the link.
    limit: The bytes/s of the link of each sender.

  Returns:
    float64 [n], the times at which the transfers have arrived.
  """
  if not amount or capacity == math.inf:
    return times + amount / limit
  link = FairShare(capacity, limit)
  ends = np.empty(len(times))

  def finish_until(time: float) -> None:
    while (end := link.next_end()) <= time and end < math.inf:
      ends[link.pop()] = end

  for number, time in enumerate(times.tolist()):
    finish_until(time)
    link.add(time, amount, number)
  finish_until(math.inf)
  return ends
