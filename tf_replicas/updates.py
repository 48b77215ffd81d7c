"""What the chief hears from one update, whatever rule made it."""

import itertools
from collections.abc import Callable
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tf_replicas import ledger
from tf_replicas import timeline
from tf_replicas import training


class NonFiniteGradientError(FloatingPointError):
  """A replica computed a gradient or a loss that is not finite.

  Attributes:
    replica: Which one.
    global_step: The step it was for.
  """

  def __init__(self, replica: int, global_step: int, name: str = ""):
    super().__init__(
      f"{name or f'replica {replica}'} computed a loss or a gradient that is"
      f" not finite, from the variables of step {global_step}"
    )
    self.replica = replica
    self.global_step = global_step


class Interrupted(Exception):
  """`apply_update` was woken before the step had its contributions."""


class Update(NamedTuple):
  """One update of the variables.

  Attributes:
    global_step: The step after it.
    loss: Mean loss of the N contributions that it used.
    num_examples: Examples in them.
    learning_rate: The rate used; NaN if the inner optimizer has none.
    began: Seconds since 1970: its contributions were there; of updates from
      one contribution 0.
    ended: Seconds since 1970: it was made; or 0.
  """

  global_step: int
  loss: float
  num_examples: int
  learning_rate: float
  began: float = 0.0
  ended: float = 0.0


class Counts(NamedTuple):
  """What became of the contributions of one replica since the start.

  Attributes:
    applied: Used in an update.
    surplus: Refused: fresh, but N others came first; or admitted, but the
      replica was lost, or seemed to be, before it had delivered.
    late: `late[k - 1]` were refused for being k steps old; the last counts
      all that were older.
    staleness: `staleness[k]` of those applied were k updates old; empty where
      none can be. The last may count all that were older.
    held_up_secs: For how long updates lacked nothing but its contribution: all
      others had come.
  """

  applied: int
  surplus: int
  late: tuple[int, ...]
  staleness: tuple[int, ...] = ()
  held_up_secs: float = 0.0

  @property
  def refused(self) -> int:
    """All that were not used."""
    return self.surplus + sum(self.late)


def of_step(
  step: float,
  examples: float,
  loss: float,
  began: float,
  ended: float,
  rate_fn: Callable[[int], float],
) -> Update:
  """An update from the variables of `step`; its fields as they travelled."""
  return Update(
    global_step=int(step) + 1,
    loss=float(loss),
    num_examples=int(examples),
    learning_rate=rate_fn(int(step)),
    began=began,
    ended=ended,
  )


def of_ledger(state: ledger.Ledger) -> list[Counts]:
  """What a ledger says of each replica."""
  rows = zip(state.counts.tolist(), state.held_up.tolist(), strict=True)
  return [
    Counts(applied, surplus, tuple(late), held_up_secs=secs)
    for (applied, surplus, *late), secs in rows
  ]


def total(counts: Sequence[Counts]) -> Counts:
  """The counts of one replica under several rules together."""

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
    held_up_secs=sum(c.held_up_secs for c in counts),
  )


def summary(staleness: Sequence[int]) -> tuple[float, int, int]:
  """Mean, the smallest bound of 95%, and maximum of `Counts.staleness`."""
  counts = np.asarray(staleness)
  mean = float(np.average(np.arange(len(counts)), weights=counts))
  most_of = np.searchsorted(np.cumsum(counts), 0.95 * counts.sum())
  return mean, int(most_of), len(counts) - 1


def updates_of(optimizer, names: Sequence[str], most: int = 1) -> list[Update]:
  """What is told next, with the replicas' names in errors.

  `optimizer.apply_update()`, or several by a rule that has `apply_updates`.
  """
  try:
    if hasattr(optimizer, "apply_updates"):
      return optimizer.apply_updates(most)
    return [optimizer.apply_update()]
  except NonFiniteGradientError as error:
    name = names[error.replica]
    raise NonFiniteGradientError(
      error.replica, error.global_step, name
    ) from None


def step_of(
  optimizer,
  names: Sequence[str],
  raise_if_ended: Callable[[], None],
  recorder: timeline.Recorder | None = None,
  most: int = 1,
) -> training.StepResult:
  """One update, or several, as the session wants to hear of them.

  A stray wake-up is passed over.

  Args:
    optimizer: The update rule.
    names: The replicas' names.
    raise_if_ended: Raises what ended the training, if it has ended.
    recorder: Told of updates from several contributions, if there is one.
    most: How many updates at most.
  """
  while True:
    try:
      made = updates_of(optimizer, names, most)
      break
    except Interrupted:
      raise_if_ended()
  for update in made:
    if recorder is not None and update.ended:
      recorder.record_update(update.global_step - 1, update.began, update.ended)
  return training.StepResult(
    made[-1].global_step,
    made[-1].loss,
    sum(update.num_examples for update in made),
    {"learning_rate": made[-1].learning_rate},
  )
