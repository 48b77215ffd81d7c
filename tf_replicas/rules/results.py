"""Defines the results and errors that every update rule reports to the chief.

A contribution is what a replica hands over for one update: gradients, the loss
and the number of examples. `rules.protocol` explains tags and admission.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tf_replicas.rules import protocol


class NonFiniteGradientError(FloatingPointError):
  """Raised if a replica computed a gradient or a loss that is not finite.

  Attributes:
    replica: The index of the replica.
    global_step: The global step of the variables from which the replica
      computed the gradient and the loss.
  """

  def __init__(self, replica: int, global_step: int, name: str = ""):
    super().__init__(
      f"{name or f'replica {replica}'} computed a loss or a gradient that is"
      f" not finite, from the variables of step {global_step}"
    )
    self.replica = replica
    self.global_step = global_step


class Interrupted(Exception):
  """Raised by `apply_updates` if it was interrupted before any update."""


class Update(NamedTuple):
  """A report of one update of the variables.

  Attributes:
    global_step: The global step after the update.
    loss: The mean loss of the contributions (replicas' gradients) to the
      update.
    num_examples: The number of examples in the contributions.
    learning_rate: The learning rate used; NaN if it is not known.
    began: When all contributions had arrived, in seconds since 1970.
      Asynchronous rules report 0.
    ended: When the update was complete, in seconds since 1970. Asynchronous
      rules report 0.
  """

  global_step: int
  loss: float
  num_examples: int
  learning_rate: float
  began: float = 0.0
  ended: float = 0.0


class ReplicaStatus(NamedTuple):
  """The state of one replica, as the chief knows it.

  Attributes:
    status: The replica's state, as the chief last recorded it.
    tag: The tag, an integer that identifies the replica's last contribution
      (its gradients for one update); -1 if it has made none. A tag is the time
      at which the contribution was offered, in microseconds since 1970. For a
      contribution that was admitted in advance, without an offer, it is the
      previous tag plus 1.
  """

  status: protocol.Status
  tag: int


class StepStatus(NamedTuple):
  """The progress of the next update.

  A contribution is one replica's gradients for one update.

  Attributes:
    received: The number of contributions that were delivered.
    needed: The number of contributions that the update needs.
    replicas: The state of each replica.
  """

  received: int
  needed: int
  replicas: Sequence[ReplicaStatus]


class Counts(NamedTuple):
  """The outcomes of one replica's contributions since the start of training.

  A contribution is one replica's gradients for one update, which averages N of
  them.

  Attributes:
    applied: The number of contributions used in an update.
    surplus: The number of contributions refused because N others came first, or
      because the replica was declared lost after a contribution had been
      accepted and before its gradients had arrived.
    late: `late[k - 1]` is the number of contributions refused because they were
      computed from variables k steps old; the last element also counts older
      ones.
    staleness: `staleness[k]` is the number of applied contributions whose
      variables were k updates old. Empty for rules that apply no stale
      gradients. The last element may count older ones too.
    straggler_wait_secs: The seconds for which updates waited for this replica
      alone.
    missed: The number of updates that were made from fewer contributions than
      usual, without this replica, because a step exceeded its deadline.
  """

  applied: int
  surplus: int
  late: tuple[int, ...]
  staleness: tuple[int, ...] = ()
  straggler_wait_secs: float = 0.0
  missed: int = 0

  @property
  def refused(self) -> int:
    """Number of contributions (sets of gradients) that were not used."""
    return self.surplus + sum(self.late)


def total(counts: Sequence[Counts]) -> Counts:
  """Adds up the counts that several update rules have for one replica.

  Args:
    counts: For each rule, the outcomes of the replica's contributions (its
      gradients for one update each).
  """

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
    missed=sum(c.missed for c in counts),
  )


def summary(staleness: Sequence[int]) -> tuple[float, int, int]:
  """Computes mean, 95th percentile and maximum of a staleness histogram.

  Args:
    staleness: `Counts.staleness`: element k is the number of gradients that
      were k updates old when they were applied.

  Returns:
    The mean staleness, the 95th percentile, and the maximum.
  """
  counts = np.asarray(staleness)
  mean = float(np.average(np.arange(len(counts)), weights=counts))
  bound = np.searchsorted(np.cumsum(counts), 0.95 * counts.sum())
  return mean, int(bound), len(counts) - 1
