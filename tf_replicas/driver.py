"""What all drivers have in common."""

import abc
from collections.abc import Callable
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tf_replicas import cluster
from tf_replicas import evaluation
from tf_replicas import parameter_store
from tf_replicas import towers
from tf_replicas import training
from tf_replicas import update_rule
from tf_replicas import updates


class Driver(abc.ABC):
  """Builds a training and takes its part in it; a context manager.

  Leaving the `with` statement closes it; by an error, all tasks hear of that
  at once instead of waiting until this one counts as lost.

  Attributes:
    is_chief: Whether this task makes the steps (`step`) and saves; the others
      call `run_replica`.
    replica: What every replica trains.
    store: The variables that are trained; what a `Session` saves.
    optimizer: The update rule.
  """

  is_chief: bool
  replica: towers.Replica
  store: parameter_store.ParameterStore
  optimizer: update_rule.UpdateRule

  @property
  def global_step(self) -> int:
    """The updates made so far."""
    return int(self.store.read_global_step())

  def examples_drawn(self) -> tf.Tensor:
    """About as many as all replicas have drawn so far: an int64 scalar.

    Those of refused contributions are among them, for alike replicas: where
    each has its own part of the data, a training that goes on draws new ones.
    """
    used = tf.cast(self.store.examples_seen.read_value(), tf.float64)
    return tf.cast(tf.round(used / self.optimizer.used_share), tf.int64)

  def _build(
    self,
    spec: cluster.ClusterSpec,
    names: Sequence[str],
    replica_fn: Callable[[], towers.Replica],
    optimizer_fn: Callable[[], update_rule.UpdateRule],
  ) -> None:
    """Builds what a client of parameter servers trains, and the shared copy.

    Args:
      spec: The cluster.
      names: The replicas'.
      replica_fn: Builds the replica.
      optimizer_fn: Builds the update rule.

    Raises:
      ValueError: If the rule is for another number of replicas.
    """
    self.replica = replica_fn()
    self.optimizer = optimizer_fn()
    update_rule.check_replicas(self.optimizer, names)
    self.store = parameter_store.build(
      spec, self.replica.shared, wire_dtype=self.optimizer.wire_dtype
    )

  def _begin(self) -> None:
    """The chief's, before its first update."""
    if self.global_step < 0:
      raise RuntimeError(
        "an update was cut off in the middle when the chief was killed, and no"
        " checkpoint was restored: start the parameter servers anew"
      )
    self.optimizer.begin_updates()

  def _make_updates(self, most: int) -> training.StepResult:
    """The chief's step, with parameter servers; see `BetweenGraph.step`."""
    self._thread.raise_error()
    self._members.raise_if_replaced()
    result = updates.step_of(
      self.optimizer, self._names, self._raise_if_ended, self._recorder, most
    )
    self._members.raise_if_replaced()  # Nobody saves another's half update.
    self._watch.progress()
    return result

  def _raise_if_ended(self) -> None:
    self._thread.raise_error()
    self._members.raise_if_ended()

  def values(self, *, averaged: bool = False) -> dict[str, np.ndarray]:
    """Reads the trained variables, which the Keras model's own are not.

    Args:
      averaged: Whether to take the moving average of what has one.

    Returns:
      The values by `variable.path`; see `load_into_keras`.
    """
    state = {name: np.asarray(v) for name, v in self.store.state().items()}
    if not averaged:
      state = {n: v for n, v in state.items() if n.startswith("variables/")}
    return evaluation.averaged_variables(state)

  @abc.abstractmethod
  def close(self, error: BaseException | None = None) -> None:
    """Leaves; the chief ends the training first.

    Args:
      error: What ended it early, told to everyone.
    """

  def __enter__(self):
    return self

  def __exit__(self, kind, error, traceback) -> None:
    self.close(error)
