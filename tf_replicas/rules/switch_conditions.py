"""Defines when a `SwitchingOptimizer` changes its update rule.

A condition is a function that decides between two rules. It starts with the
first rule, and changes to the second rule once.
"""

import collections
import time
from collections.abc import Callable
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tf_replicas.rules import results


class Progress(NamedTuple):
  """The progress of a training, from which the next update rule is chosen.

  Attributes:
    global_step: The number of updates so far.
    rule: The index of the rule in use, in [0, number of rules).
    counts: A function without arguments. It returns one `results.Counts` for
      each replica: how many of its contributions (its gradients for one update
      each) the rule in use has used or refused since the start of training.
      Each call reads the numbers from PS task 0.
  """

  global_step: int
  rule: int
  counts: Callable[[], Sequence[results.Counts]]


class Choice(NamedTuple):
  """The choice of an update rule for the next updates.

  `SwitchingOptimizer.apply_updates` asks for a choice at each call.

  Attributes:
    rule: The index of the rule, in [0, number of rules).
    until: A global step at which updates stop until the next choice is made.
      None: updates do not stop; asynchronous rules make updates while the next
      choice is made.
  """

  rule: int
  until: int | None = None


def at_step(step: int) -> Callable[[Progress], Choice]:
  """Makes a condition that changes to the second rule at a global step.

  Args:
    step: The number of updates that the first rule makes.

  Returns:
    A function for the argument `choose` of `SwitchingOptimizer`. It maps the
    progress of the training to a `Choice`.
  """

  def choose(progress: Progress) -> Choice:
    if progress.global_step < step:
      return Choice(0, until=step)
    return Choice(1)

  return choose


def when_refused(
  share: float, least: int = 100
) -> Callable[[Progress], Choice]:
  """Makes a condition that changes the rule if a replica is refused too often.

  If a replica is slow, all its contributions (its gradients for one update
  each) may come too late. The condition changes to the second rule as soon as
  it finds one such replica.

  Args:
    share: The largest acceptable fraction of a replica's contributions that are
      refused, in [0, 1].
    least: The number of contributions below which a replica is not judged; also
      the number of global steps between two checks.

  Returns:
    A function for the argument `choose` of `SwitchingOptimizer`. It maps the
    progress of the training to a `Choice`.
  """

  def is_refused(count: results.Counts) -> bool:
    total = count.applied + count.refused
    return total >= least and count.refused > share * total

  return _every(least, lambda counts: any(map(is_refused, counts)))


def when_slow(share: float, least: int = 100) -> Callable[[Progress], Choice]:
  """Makes a condition that changes the rule if updates wait for one replica.

  It is meant for a first rule whose synchronous updates need every replica.
  Every `least` steps, the condition finds how long updates have waited for each
  replica alone since the last check (`results.Counts.straggler_wait_secs`). The
  time before the second check is ignored, because the replicas start one by
  one.

  Args:
    share: The largest acceptable fraction of the time between two checks for
      which updates wait for one replica, in [0, 1].
    least: The number of global steps between two checks.

  Returns:
    A function for the argument `choose` of `SwitchingOptimizer`. It maps the
    progress of the training to a `Choice`.
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
  period: int, is_due: Callable[[Sequence[results.Counts]], bool]
) -> Callable[[Progress], Choice]:
  """Makes a condition that calls `is_due` at every multiple of `period` steps.

  Args:
    period: The number of global steps between two calls of `is_due`.
    is_due: Says whether to change to the second rule. Its argument is one
      `results.Counts` for each replica: how many of its contributions were used
      or refused since the start of training.

  Returns:
    A function for the argument `choose` of `SwitchingOptimizer`. It maps the
    progress of the training to a `Choice`.
  """

  def choose(progress: Progress) -> Choice:
    step, rule = progress.global_step, progress.rule
    if rule == 0 and step % period == 0:
      rule = int(is_due(progress.counts()))
    return Choice(rule, until=None if rule else step - step % period + period)

  return choose
