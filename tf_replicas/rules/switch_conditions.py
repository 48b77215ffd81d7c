"""Conditions on which a `SwitchingOptimizer` changes its update rule."""

import collections
import time
from collections.abc import Callable
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tf_replicas.rules import results


class Progress(NamedTuple):
  """The progress of a training; the choice of a rule depends on it.

  Attributes:
    global_step: The updates made so far.
    rule: Which rule is in use, in [0, number of rules).
    counts: Returns the counts of each replica under that rule since the start;
      a call to PS task 0.
  """

  global_step: int
  rule: int
  counts: Callable[[], Sequence[results.Counts]]


class Choice(NamedTuple):
  """A rule for the updates to come.

  Attributes:
    rule: The rule, in [0, number of rules).
    until: The global step at which to choose again. None: at every call of
      `apply_updates`; asynchronous updates do not wait for it.
  """

  rule: int
  until: int | None = None


def at_step(step: int) -> Callable[[Progress], Choice]:
  """Chooses the first rule before global step `step`, then the second."""

  def choose(progress: Progress) -> Choice:
    if progress.global_step < step:
      return Choice(0, until=step)
    return Choice(1)

  return choose


def when_refused(
  share: float, least: int = 100
) -> Callable[[Progress], Choice]:
  """Switches to the second rule once a replica is refused too often.

  Contributions of a straggler are always late, or always too stale. Checks
  every `least` steps.

  Args:
    share: The fraction of a replica's contributions that may be refused.
    least: The contributions of a replica that must be counted first.
  """

  def is_refused(count: results.Counts) -> bool:
    total = count.applied + count.refused
    return total >= least and count.refused > share * total

  return _every(least, lambda counts: any(map(is_refused, counts)))


def when_slow(share: float, least: int = 100) -> Callable[[Progress], Choice]:
  """Switches to the second rule once updates wait for a straggler.

  For synchronous updates that need every replica. Checks the interval since
  the last check every `least` steps, except the first interval, in which the
  replicas start one by one.

  Args:
    share: The fraction of the time for which updates may wait for one replica
      alone (`results.Counts.straggler_wait_secs`).
    least: The steps between two checks.
  """
  checks = collections.deque(maxlen=3)

  def is_held_up(counts: Sequence[results.Counts]) -> bool:
    waits = [count.straggler_wait_secs for count in counts]
    checks.append((time.monotonic(), np.asarray(waits)))
    if len(checks) < checks.maxlen:
      return False
    _, (since, before), (now, after) = checks
    return bool(np.max(after - before) > share * (now - since))

  return _every(least, is_held_up)


def _every(
  least: int, is_due: Callable[[Sequence[results.Counts]], bool]
) -> Callable[[Progress], Choice]:
  """Checks the counts every `least` steps, until `is_due` of them is true."""

  def choose(progress: Progress) -> Choice:
    step, rule = progress.global_step, progress.rule
    if rule == 0 and step % least == 0:
      rule = int(is_due(progress.counts()))
    return Choice(rule, until=None if rule else step - step % least + least)

  return choose
