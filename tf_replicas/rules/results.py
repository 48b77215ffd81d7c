"""Results of updates, as every update rule reports them to the chief."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tf_replicas.rules import protocol


class NonFiniteGradientError(FloatingPointError):
  """A replica computed a gradient or a loss that is not finite.

  Attributes:
    replica: The replica.
    global_step: The global step of the variables that it computed from.
  """

  def __init__(self, replica: int, global_step: int, name: str = ""):
    super().__init__(
      f"{name or f'replica {replica}'} computed a loss or a gradient that is"
      f" not finite, from the variables of step {global_step}"
    )
    self.replica = replica
    self.global_step = global_step


class Interrupted(Exception):
  """`apply_updates` was interrupted before it made an update."""


class Update(NamedTuple):
  """One update of the variables.

  Attributes:
    global_step: The step after it.
    loss: The mean loss of its contributions.
    num_examples: The examples in them.
    learning_rate: The rate used; NaN if the inner optimizer has none.
    began: Seconds since 1970 when its contributions had arrived; 0 if it is
      made of one contribution.
    ended: Seconds since 1970 when it was made; 0 as for `began`.
  """

  global_step: int
  loss: float
  num_examples: int
  learning_rate: float
  began: float = 0.0
  ended: float = 0.0


class ReplicaStatus(NamedTuple):
  """What one replica is doing.

  Attributes:
    status: What it is doing, as far as the chief knows.
    tag: The number of its last contribution (microseconds since 1970, or the
      last number plus 1); -1 if it has offered none.
  """

  status: protocol.Status
  tag: int


class StepStatus(NamedTuple):
  """How far the present step has come.

  Attributes:
    received: How many contributions were delivered.
    needed: How many the step needs.
    replicas: The status of each replica.
  """

  received: int
  needed: int
  replicas: Sequence[ReplicaStatus]


class Counts(NamedTuple):
  """The outcomes of the contributions of one replica since the start.

  Attributes:
    applied: How many were used in an update.
    surplus: How many were refused because N others came first, or because the
      replica was declared lost after admission, before it had delivered.
    late: `late[k - 1]` were refused because they were k steps old; the last
      element counts all older ones too.
    staleness: `staleness[k]` of the applied ones were k updates old; empty
      for rules without stale gradients. The last may count older ones too.
    straggler_wait_secs: How long updates waited for this replica alone, in
      seconds.
  """

  applied: int
  surplus: int
  late: tuple[int, ...]
  staleness: tuple[int, ...] = ()
  straggler_wait_secs: float = 0.0

  @property
  def refused(self) -> int:
    """How many were not used."""
    return self.surplus + sum(self.late)


def total(counts: Sequence[Counts]) -> Counts:
  """The sum of the counts of one replica under several rules."""

  def add_up(field):
    columns = itertools.zip_longest(
      *(getattr(c, field) for c in counts), fillvalue=0
    )
    return tuple(map(sum, columns))

  return Counts(
    applied=sum(c.applied for c in counts),
    surplus=sum(c.surplus for c in counts),
    late=add_up("late"),
    staleness=add_up("staleness"),
    straggler_wait_secs=sum(c.straggler_wait_secs for c in counts),
  )


def summary(staleness: Sequence[int]) -> tuple[float, int, int]:
  """Summarizes `Counts.staleness`.

  Returns:
    The mean staleness; the smallest bound that holds for 95% of the gradients;
    the maximum.
  """
  counts = np.asarray(staleness)
  mean = float(np.average(np.arange(len(counts)), weights=counts))
  bound = np.searchsorted(np.cumsum(counts), 0.95 * counts.sum())
  return mean, int(bound), len(counts) - 1
