"""When a training changes its update rule: choices for `SwitchingOptimizer`."""

import collections
import time
from collections.abc import Callable
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tf_replicas import updates


class Progress(NamedTuple):
  """What the choice of a rule may depend on.

  Attributes:
    global_step: The updates made so far.
    rule: Which rule is in use, in [0, number of rules).
    counts: Tells what became of each replica's gradients under that rule, since
      the training began; a call to the PS.
  """

  global_step: int
  rule: int
  counts: Callable[[], Sequence[updates.Counts]]


class Choice(NamedTuple):
  """A rule for the updates to come.

  Attributes:
    rule: Which, in [0, number of rules).
    until: The global step to choose again at; None: whenever the chief looks,
      which asynchronous updates do not wait for.
  """

  rule: int
  until: int | None = None


def at_step(step: int) -> Callable[[Progress], Choice]:
  """Chooses the first rule before global step `step`, and the second then."""

  def choose(progress: Progress) -> Choice:
    if progress.global_step < step:
      return Choice(0, until=step)
    return Choice(1)

  return choose


def when_refused(
  share: float, least: int = 100
) -> Callable[[Progress], Choice]:
  """Chooses the second rule, for good, once some replica is too slow.

  That is one whose contributions are refused too often: they are always late,
  or always too stale. Looks at every `least` steps.

  Args:
    share: Of a replica's contributions, how many may be refused.
    least: How many contributions of it to wait for before it is judged.
  """

  def is_refused(count: updates.Counts) -> bool:
    total = count.applied + count.refused
    return total >= least and count.refused > share * total

  return _every(least, lambda counts: any(map(is_refused, counts)))


def when_slow(share: float, least: int = 100) -> Callable[[Progress], Choice]:
  """Chooses the second rule, for good, once updates wait for one replica.

  For synchronous updates that need every replica. Looks at every `least` steps
  at the time since the look before; not at the first, in which the replicas
  begin one by one.

  Args:
    share: Of the time, for how much updates may wait for one replica alone, all
      others having contributed (`updates.Counts.held_up_secs`).
    least: Steps between two looks.
  """
  looks = collections.deque(maxlen=3)

  def is_held_up(counts: Sequence[updates.Counts]) -> bool:
    waits = [count.held_up_secs for count in counts]
    looks.append((time.monotonic(), np.asarray(waits)))
    if len(looks) < looks.maxlen:
      return False
    _, (since, before), (now, after) = looks
    return bool(np.max(after - before) > share * (now - since))

  return _every(least, is_held_up)


def _every(least: int, judge) -> Callable[[Progress], Choice]:
  """Looks at the counts every `least` steps, until `judge` says it is time."""

  def choose(progress: Progress) -> Choice:
    step, rule = progress.global_step, progress.rule
    if rule == 0 and step % least == 0:
      rule = int(judge(progress.counts()))
    return Choice(rule, until=None if rule else step - step % least + least)

  return choose
