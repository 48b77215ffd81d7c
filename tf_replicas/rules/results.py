"""Defines the results and errors that every update rule reports to the chief.

`rules.base` explains contributions, `rules.protocol` tags and admission.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tf_replicas.rules import protocol


class NonFiniteGradientError(FloatingPointError):
  """A replica computed a gradient or a loss that is not finite.

  Attributes:
    replica: The index of the replica.
    global_step: The global step of the variables that the replica used.
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
    global_step: The global step after the update.
    loss: The mean loss of the contributions to the update.
    num_examples: The number of examples in the contributions.
    learning_rate: The learning rate used; NaN if it is not known.
    began: When all contributions had arrived, in seconds since 1970; 0 from
      asynchronous rules.
    ended: When the update was complete, in seconds since 1970; 0 as `began`.
  """

  global_step: int
  loss: float
  num_examples: int
  learning_rate: float
  began: float = 0.0
  ended: float = 0.0


class ReplicaStatus(NamedTuple):
  """The state of one replica.

  Attributes:
    status: The replica's state, as the chief last recorded it.
    tag: The tag of the replica's last contribution; -1 if it has offered none.
      A tag is the time of the offer in microseconds since 1970 or, without an
      offer, the tag before it plus 1.
  """

  status: protocol.Status
  tag: int


class StepStatus(NamedTuple):
  """The progress of the present step.

  Attributes:
    received: The number of contributions that were delivered.
    needed: The number of contributions that the step needs.
    replicas: The state of each replica.
  """

  received: int
  needed: int
  replicas: Sequence[ReplicaStatus]


class Counts(NamedTuple):
  """The outcomes of the contributions of one replica since the start.

  Attributes:
    applied: The number of contributions used in an update.
    surplus: The number refused because N others came first, or because the
      replica was declared lost after admission, before it had delivered.
    late: `late[k - 1]` is the number refused because their variables were k
      steps old; the last element also counts older ones.
    staleness: `staleness[k]` is the number of applied contributions whose
      variables were k updates old. Empty for rules that apply no stale
      gradients. The last element may count older ones too.
    straggler_wait_secs: The seconds for which updates waited for this replica
      alone.
  """

  applied: int
  surplus: int
  late: tuple[int, ...]
  staleness: tuple[int, ...] = ()
  straggler_wait_secs: float = 0.0

  @property
  def refused(self) -> int:
    """Number of contributions that were not used."""
    return self.surplus + sum(self.late)


def total(counts: Sequence[Counts]) -> Counts:
  """Adds up the counts that several rules have for one replica."""

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
    The mean staleness, the 95th percentile, and the maximum.
  """
  counts = np.asarray(staleness)
  mean = float(np.average(np.arange(len(counts)), weights=counts))
  bound = np.searchsorted(np.cumsum(counts), 0.95 * counts.sum())
  return mean, int(bound), len(counts) - 1
