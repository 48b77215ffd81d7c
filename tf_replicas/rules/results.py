"""Defines the results and errors that every update rule reports to the chief.

A contribution is what one replica hands over for one update: gradients, the
loss and the number of examples. `rules.protocol` explains tags and admission.
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
  """Raised by `UpdateRule.apply_updates` if `interrupt` ended its wait.

  It was then waiting for an update, and has made or reported none.
  """


class Update(NamedTuple):
  """A report of one update of the variables, or of several combined.

  A contribution is one replica's gradients for one update.

  Attributes:
    global_step: The global step after the update.
    loss: The mean loss of the contributions that the update used.
    num_examples: The number of examples in these contributions together.
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
  """The state of one replica, as the chief last recorded it.

  Attributes:
    status: Whether the replica computes, waits, has delivered, or is lost.
    tag: The tag, an integer that identifies the replica's last contribution
      (its gradients for one update); -1 if there was none. It is the time of
      the offer in microseconds since 1970. A contribution that was admitted in
      advance is not offered; it has the tag of the contribution before, plus 1.
  """

  status: protocol.Status
  tag: int


class StepStatus(NamedTuple):
  """The progress of the next update.

  A contribution is one replica's gradients for one update.

  Attributes:
    received: The number of contributions that have arrived for the update.
    needed: N, the number of contributions in a full update. With
      `min_contributions`, an update may need fewer.
    replicas: The state of each replica, by replica index.
  """

  received: int
  needed: int
  replicas: Sequence[ReplicaStatus]


class Counts(NamedTuple):
  """The outcomes of one replica's contributions since the start of training.

  A contribution is one replica's gradients for one update. A synchronous update
  averages N contributions; an asynchronous update uses one.

  Attributes:
    applied: The number of contributions used in an update.
    surplus: The number of contributions that were refused for another reason
      than their age: N others came first, the replica was declared lost or
      exceeded a deadline before its gradients had arrived, or a new chief
      dropped them.
    late: `late[k - 1]` is the number of contributions that were refused because
      their variables were k steps old. The last element also counts older ones.
    staleness: `staleness[k]` is the number of used contributions whose
      variables were k updates old. The last element may also count older ones.
      Empty for synchronous rules.
    straggler_wait_secs: The total time in seconds for which updates had all
      contributions but this replica's.
    missed: The number of updates that were made without this replica, from
      fewer than N contributions.
  """

  applied: int
  surplus: int
  late: tuple[int, ...]
  staleness: tuple[int, ...] = ()
  straggler_wait_secs: float = 0.0
  missed: int = 0

  @property
  def refused(self) -> int:
    """The number of contributions (sets of gradients) that were not used."""
    return self.surplus + sum(self.late)


def total(counts: Sequence[Counts]) -> Counts:
  """Adds up the counts of one replica under several update rules.

  Args:
    counts: One element for each rule: the outcomes of the replica's
      contributions (its gradients for one update each) under that rule.

  Returns:
    The sum of each field. `late` and `staleness` are added element by element.
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
      were k updates old when they were applied. The last element is not 0.

  Returns:
    The mean, the 95th percentile and the maximum of the staleness, in updates.
  """
  counts = np.asarray(staleness)
  mean = float(np.average(np.arange(len(counts)), weights=counts))
  bound = np.searchsorted(np.cumsum(counts), 0.95 * counts.sum())
  return mean, int(bound), len(counts) - 1
