"""Defines when a `SwitchingOptimizer` changes its update rule.

Each condition uses the first rule, and from some time on the second.
"""

import collections
import time
from collections.abc import Callable
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tf_replicas.rules import results


class Progress(NamedTuple):
  """The progress of a training, from which the next rule is chosen.

  Attributes:
    global_step: The number of updates so far.
    rule: The index of the rule in use, in [0, number of rules).
    counts: Returns, for each replica, the outcomes of its contributions under
      the rule in use since the start of training. Reads them from PS task 0.
  """

  global_step: int
  rule: int
  counts: Callable[[], Sequence[results.Counts]]


class Choice(NamedTuple):
  """The choice of a rule for the next updates.

  Attributes:
    rule: The index of the rule, in [0, number of rules).
    until: The global step at which to choose again; no update is made beyond
      it before that. None: choose again at every call of `apply_updates`, for
      which asynchronous updates do not wait.
  """

  rule: int
  until: int | None = None


def at_step(step: int) -> Callable[[Progress], Choice]:
  """Returns a condition: the second rule is used from global step `step` on."""

  def choose(progress: Progress) -> Choice:
    if progress.global_step < step:
      return Choice(0, until=step)
    return Choice(1)

  return choose


def when_refused(
  share: float, least: int = 100
) -> Callable[[Progress], Choice]:
  """Returns a condition: switch once a replica is refused too often.

  The contributions of a slow replica may always be too late or too stale. The
  condition is checked every `least` steps.

  Args:
    share: The largest fraction of a replica's contributions that may be
      refused before the switch.
    least: The number of contributions that a replica must have made before it
      can cause the switch.
  """

  def is_refused(count: results.Counts) -> bool:
    total = count.applied + count.refused
    return total >= least and count.refused > share * total

  return _every(least, lambda counts: any(map(is_refused, counts)))


def when_slow(share: float, least: int = 100) -> Callable[[Progress], Choice]:
  """Returns a condition: switch once updates wait too long for one replica.

  For synchronous updates that need every replica. Every `least` steps, the
  condition checks the interval since the last check. The first interval, in
  which the replicas start one by one, is not checked.

  Args:
    share: The largest fraction of an interval for which updates may wait for
      one replica alone (`results.Counts.straggler_wait_secs`).
    least: The number of steps between two checks.
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
  """Returns a condition: switch once `is_due`, checked every `least` steps."""

  def choose(progress: Progress) -> Choice:
    step, rule = progress.global_step, progress.rule
    if rule == 0 and step % least == 0:
      rule = int(is_due(progress.counts()))
    return Choice(rule, until=None if rule else step - step % least + least)

  return choose
