"""Applies several optimizers that take turns, such as those of a GAN.

Training with such optimizers consists of *rounds* of several updates, for
example k updates of the discriminator, then one of the generator (Goodfellow et
al. 2014, algorithm 1). Each update of a round is a *phase*, which has an
optimizer and the variables that this optimizer updates. The global step
determines the phase, on every replica. So every update is computed from the
variables as the previous update has left them.
"""

from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_replicas.store import inner_optimizer
from tf_replicas.store import parameter_store


class Phase(NamedTuple):
  """One update of a round, which is a fixed series of updates.

  Attributes:
    name: The name of the optimizer that makes the update.
    paths: The paths of the variables that the optimizer updates.
  """

  name: str
  paths: Collection[str]


def applies_before(
  phases: Sequence[Phase], name: str, step: int | tf.Tensor
) -> tf.Tensor:
  """Counts the updates that one optimizer has made until a global step.

  Args:
    phases: The phases (updates) of a round, in order. Rounds are repeated.
    name: The name of the optimizer, as in `Phase.name`.
    step: Scalar, the global step: the number of updates by all optimizers.

  Returns:
    An int64 scalar: how many of these `step` updates the optimizer made.
  """
  turns = [int(phase.name == name) for phase in phases]
  earlier = [sum(turns[:number]) for number in range(len(turns))]
  step = tf.cast(step, tf.int64)
  rounds = tf.math.floordiv(step, len(turns))
  in_round = tf.gather(earlier, tf.math.floormod(step, len(turns)))
  return rounds * sum(turns) + tf.cast(in_round, tf.int64)


class AlternatingOptimizer:
  """Applies several optimizers, one in each update, in a fixed cycle.

  It is for a `train_step` that applies gradients several times, such as that of
  a GAN: a *phase* is one of these calls, with its optimizer and the variables
  that it updates. The update that follows global step s makes phase number s
  modulo the number of phases. The class has the methods of `InnerOptimizer`,
  which applies one optimizer.
  """

  def __init__(
    self,
    optimizers: Mapping[str, inner_optimizer.Optimizer],
    phases: Sequence[Phase],
  ):
    """Wraps the optimizers that take turns.

    Args:
      optimizers: The optimizers by name. None of them may be built yet.
      phases: The phases (updates) of a round, in order. Each optimizer has at
        least one phase.
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
    """Creates the slots of all optimizers, each on the device of its variable.

    A slot is a value that an optimizer keeps per variable, such as momentum.

    Args:
      store: Holds the variables.
      is_chief: Whether this client (training process) sets the learning rates.

    Raises:
      ValueError: If `InnerOptimizer.build` raises it, or if an optimizer has a
        state that belongs to no single variable.
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
    """Returns the learning rate of the next update after global step `step`.

    This is the current rate of the optimizer whose turn it is.
    """
    name = self._phases[step % len(self._phases)].name
    count = applies_before(self._phases, name, step)
    return self._members[name].learning_rate(int(count))

  def refresh(self) -> None:
    """Copies scalars that have changed, such as learning rates, to PS tasks.

    The client (training process) that sets the learning rates calls this method
    before each update.
    """
    for member in self._members.values():
      member.refresh()

  def has_adjustable_rate(self) -> bool:
    """Returns False: `apply` cannot scale the learning rate of an update.

    So the argument `rate_factor` of `apply` must be None.
    """
    return False

  def has_common_state(self) -> bool:
    """Returns False: no optimizer has state that several variables share.

    `build` refuses an optimizer with such state.
    """
    return False

  def stays_on_task(self) -> bool:
    """Returns whether `apply` uses only variables of its own PS task."""
    return all(member.stays_on_task() for member in self._members.values())

  def read_origins(self) -> list[tf.Tensor]:
    """Reads the global steps at which the slots were created, on PS task 0.

    Returns:
      int64 scalars: what `InnerOptimizer.read_origins` returns for each
      optimizer, in the order of the optimizers.
    """
    return [
      origin
      for member in self._members.values()
      for origin in member.read_origins()
    ]

  def apply(
    self,
    task: int,
    gradients: Sequence[parameter_store.Gradient],
    variables: Sequence[tf.Variable],
    step: tf.Tensor,
    rate_factor: tf.Tensor | None = None,
    origins: Sequence[tf.Tensor] | None = None,
  ) -> list[tuple[tf.Variable, tf.Tensor]]:
    """Makes the update that follows global step `step`, on one PS task.

    The global step determines the phase of the update: the optimizer, and the
    variables that it updates. Other variables do not change, and their
    gradients are ignored.

    Args:
      task: The PS task on which the ops are placed.
      gradients: One per element of `variables`, dense or `tf.IndexedSlices`,
        not None.
      variables: Shards of the store's trainable variables, all on this task.
      step: int64 scalar, the global step before this update.
      rate_factor: Must be None.
      origins: What `read_origins` returned. None: PS task 0 is asked for it.

    Returns:
      An empty list: nothing is left for `commit` to assign.
    """
    assert rate_factor is None
    owners = {
      id(variable): self._store.specs[index].path
      for index in self._store.trainable
      for variable in self._store.variables(index)
    }

    origin_of = dict(zip(self._members, origins or (), strict=False))

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
          origins=[origin_of[phase.name]] if origins else None,
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
    """Raises NotImplementedError: optimizers in turn cannot skip an update.

    `InnerOptimizer.skip` is for an update that was not made, because a scaled
    loss overflowed. The global step counts this update all the same. Here the
    global step determines whose turn it is, so an optimizer would lose a turn.
    """
    raise NotImplementedError

  def commit(self, changed: Sequence[tuple[tf.Variable, tf.Tensor]]) -> None:
    """Does nothing, since `apply` assigns all new values itself.

    The method belongs to the interface of an `InnerOptimizer`.
    """
    del changed
