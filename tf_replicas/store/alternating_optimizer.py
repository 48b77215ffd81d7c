"""Applies several optimizers that take turns, such as those of a GAN.

Such a training consists of *rounds* of several updates, for example k updates
of the discriminator, then one of the generator (Goodfellow et al. 2014,
algorithm 1). Each update of a round is a *phase*, which has an optimizer and
the variables that this optimizer updates. The global step determines the phase,
on every replica. So every update is computed from the variables that the update
before it has made.
"""

from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_replicas.store import inner_optimizer
from tf_replicas.store import parameter_store


class Phase(NamedTuple):
  """One update of a round.

  Attributes:
    name: The name of the optimizer that makes the update.
    paths: The paths of the variables that are updated.
  """

  name: str
  paths: Collection[str]


def applies_before(
  phases: Sequence[Phase], name: str, step: int | tf.Tensor
) -> tf.Tensor:
  """Counts the updates that an optimizer makes before a global step.

  Args:
    phases: The phases of a round, in order.
    name: The name of the optimizer.
    step: Scalar, the global step.

  Returns:
    An int64 scalar, the number of updates.
  """
  turns = [int(phase.name == name) for phase in phases]
  earlier = [sum(turns[:number]) for number in range(len(turns))]
  step = tf.cast(step, tf.int64)
  rounds = tf.math.floordiv(step, len(turns))
  in_round = tf.gather(earlier, tf.math.floormod(step, len(turns)))
  return rounds * sum(turns) + tf.cast(in_round, tf.int64)


class AlternatingOptimizer:
  """Several optimizers that take turns.

  Has the interface of an `InnerOptimizer`, in whose place it is used.
  """

  def __init__(
    self,
    optimizers: Mapping[str, inner_optimizer.Optimizer],
    phases: Sequence[Phase],
  ):
    """Wraps `optimizers`.

    Args:
      optimizers: The optimizers by name. None of them may be built yet.
      phases: The phases of a round, at least one for each optimizer.
    """
    self.optimizer = dict(optimizers)
    self._phases = list(phases)
    self._members = {}
    for name, optimizer in optimizers.items():
      paths = [phase.paths for phase in phases if phase.name == name]
      self._members[name] = inner_optimizer.InnerOptimizer(
        optimizer, name=name, paths=set().union(*paths)
      )

  def build(
    self, store: parameter_store.ParameterStore, *, is_chief: bool = True
  ) -> None:
    """Creates the slots of all optimizers; see `InnerOptimizer.build`.

    Raises:
      ValueError: If `InnerOptimizer.build` raises it, or if an optimizer has a
        state that belongs to no variable.
    """
    self._store = store
    for name, member in self._members.items():
      member.build(store, is_chief=is_chief)
      if member.has_common_state():
        raise ValueError(
          f"the optimizer {name!r} must keep its state by variable, as several"
          " optimizers take turns. Received:"
          f" {type(member.optimizer).__name__}."
        )

  def learning_rate(self, step: int) -> float:
    """Returns the rate of the optimizer that makes the update after `step`."""
    name = self._phases[step % len(self._phases)].name
    count = applies_before(self._phases, name, step)
    return self._members[name].learning_rate(int(count))

  def refresh(self) -> None:
    """See `InnerOptimizer.refresh`."""
    for member in self._members.values():
      member.refresh()

  def has_adjustable_rate(self) -> bool:
    """Returns False: `apply` takes no `rate_factor`."""
    return False

  def has_common_state(self) -> bool:
    """Returns False: updates change no scalars of a whole optimizer."""
    return False

  def apply(
    self,
    task: int,
    gradients: Sequence[parameter_store.Gradient],
    variables: Sequence[tf.Variable],
    step: tf.Tensor,
    rate_factor: tf.Tensor | None = None,
  ) -> list[tuple[tf.Variable, tf.Tensor]]:
    """Applies the gradients of the variables that the phase of `step` updates.

    Skips other variables. See `InnerOptimizer.apply`.
    """
    assert rate_factor is None
    owners = {
      id(variable): self._store.specs[index].path
      for index in self._store.trainable
      for variable in self._store.variables(index)
    }

    def branch(phase: Phase):
      def make() -> tf.Tensor:
        pairs = [
          (gradient, variable)
          for gradient, variable in zip(gradients, variables, strict=True)
          if owners[id(variable)] in phase.paths
        ]
        self._members[phase.name].apply(
          task,
          [gradient for gradient, _ in pairs],
          [variable for _, variable in pairs],
          applies_before(self._phases, phase.name, step),
        )
        return tf.constant(True)

      return make

    with tf.device(self._store.device_of_task(task)):
      number = tf.math.floormod(step, len(self._phases))
      tf.switch_case(
        tf.cast(number, tf.int32), [branch(phase) for phase in self._phases]
      )
    return []

  def skip(self) -> None:
    """Raises NotImplementedError, as no update can be skipped.

    The global step determines which optimizer makes the update. See
    `InnerOptimizer.skip`.
    """
    raise NotImplementedError

  def commit(self, changed: Sequence[tuple[tf.Variable, tf.Tensor]]) -> None:
    """Does nothing: `apply` leaves nothing to assign."""
    del changed
