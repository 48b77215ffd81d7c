"""The interface of a driver, and what drivers with parameter servers share.

A *driver* decides which program runs what. It builds the replica and the update
rule, and takes this process's part in the training:

    with Driver(...) as driver:
      if driver.is_chief:
        driver.step()  # Again and again; saves, logs and stops in between.
      else:
        driver.run_replica()  # Returns when the chief has ended the training.
"""

import abc
import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import NamedTuple
from typing import Protocol

import numpy as np
import tensorflow as tf

from tf_replicas import cluster
from tf_replicas.drivers import heartbeats
from tf_replicas.drivers import timeline
from tf_replicas.drivers import watchdog
from tf_replicas.replica import model_replica
from tf_replicas.rules import base as rule_base
from tf_replicas.rules import results
from tf_replicas.runtime import resources
from tf_replicas.runtime import waiting
from tf_replicas.session import checkpoints
from tf_replicas.session import evaluation
from tf_replicas.session import training
from tf_replicas.store import metric_sums
from tf_replicas.store import parameter_store


class TrainedState(checkpoints.Checkpointable, Protocol):
  """The trained variables as the programs see them.

  Attributes:
    examples_seen: int64 scalar variable: the examples that updates used.
  """

  examples_seen: tf.Variable

  def read_global_step(self) -> tf.Tensor:
    """The updates made so far: an int64 scalar."""

  def table(self) -> str:
    """The placement of the variables; for people."""

  def assign(self, index: int, value: parameter_store.Value) -> None:
    """Assigns a variable by its position in `Replica.shared`."""

  def subtract(self, index: int, value: parameter_store.Value) -> None:
    """Subtracts from such a variable, in place."""

  def reader(self, indices: Sequence[int]) -> Callable[[], list[tf.Tensor]]:
    """A function that reads only such variables, in the order of `indices`."""
    ...


class Driver(abc.ABC):
  """Builds the model and the shared state, and runs this task's part.

  Leaving the `with` statement closes it. If an error ends the block, all tasks
  are told at once, instead of finding out when its heartbeat times out.

  Attributes:
    is_chief: Whether this task is the chief: it calls `step` and saves
      checkpoints. The others call `run_replica`.
    replica: The model replica that this task computes gradients with.
    store: The trained variables; what a `Session` saves.
    replica_names: The names of the replicas, in the order of `counts`; empty
      if the driver counts nothing.
  """

  is_chief: bool
  replica: model_replica.Replica
  store: TrainedState
  replica_names: Sequence[str] = ()

  @abc.abstractmethod
  def step(self, max_updates: int = 1) -> training.StepResult:
    """The chief's: makes an update, or several in one call.

    Args:
      max_updates: How many at most; a driver may always make one.

    Returns:
      The global step, the loss of the last update, and the number of examples
      of all these updates.

    Raises:
      NonFiniteGradientError: If a loss or a gradient is not finite.
      RuntimeError: If this task is not the chief, if training was ended
        elsewhere, or if a data set has ended.
    """

  @abc.abstractmethod
  def run_replica(self) -> int:
    """Every other task's: contributes until training ends.

    Returns:
      The global step when it ended.

    Raises:
      RuntimeError: If this task is the chief, or if training ended with an
        error; it has the same message.
    """

  @abc.abstractmethod
  def set_learning_rate(self, rate: float) -> None:
    """The chief's: sets the learning rate, from the next update on."""

  def stop_at(self, step: int) -> None:
    """The chief's: makes no update beyond global step `step`."""
    del step  # Where `step` alone makes updates, its caller decides.

  def counts(self) -> list[results.Counts]:
    """How the contributions of each of `replica_names` were used."""
    return []

  def interrupt(self) -> None:
    """Wakes a call of `step` in another thread, to check whether to stop."""
    return  # Where no step waits for others.

  @property
  def accepted_fraction(self) -> float:
    """The fraction of what replicas compute that is used."""
    return 1.0

  @property
  def global_step(self) -> int:
    """The updates made so far."""
    return int(self.store.read_global_step())

  def examples_drawn(self) -> tf.Tensor:
    """Roughly how many examples all replicas have drawn: an int64 scalar.

    Includes examples of refused contributions, assuming that all replicas are
    equally fast. A training that goes on draws new ones from there.
    """
    used = tf.cast(self.store.examples_seen.read_value(), tf.float64)
    return tf.cast(tf.round(used / self.accepted_fraction), tf.int64)

  def values(self, *, averaged: bool = False) -> dict[str, np.ndarray]:
    """Reads the trained variables; those of the Keras model do not change.

    Args:
      averaged: Whether to take the moving average of what has one.

    Returns:
      The values by `variable.path`; see `load_into_keras`.
    """
    state = {name: np.asarray(v) for name, v in self.store.state().items()}
    if not averaged:
      state = {n: v for n, v in state.items() if n.startswith("variables/")}
    found = evaluation.averaged_variables(state)
    return {p: v for p, v in found.items() if not metric_sums.is_own(p)}

  @functools.cached_property
  def _metrics(self) -> metric_sums.Reader:
    """Reads the metrics; to be used before the first update, too."""
    return metric_sums.Reader(
      self.store, self.replica.shared, self.replica.metrics
    )

  @abc.abstractmethod
  def close(self, error: BaseException | None = None) -> None:
    """Leaves the training; the chief ends it first.

    Args:
      error: What ended it early; told to every task.
    """

  def __enter__(self):
    return self

  def __exit__(self, kind, error, traceback) -> None:
    self.close(error)

  def _check_role(self, *, needs_chief: bool) -> None:
    """Raises RuntimeError if this task has the other role."""
    if self.is_chief == needs_chief:
      return
    if needs_chief:
      raise RuntimeError(
        "`step` is for the chief: this task must call `run_replica`."
      )
    raise RuntimeError(
      "`run_replica` is not for the chief: this task must call `step`."
    )


class Options(NamedTuple):
  """What the caller of a driver with parameter servers chooses.

  Attributes:
    start_timeout_secs: How long to wait for PS tasks, workers and chief.
    lost_after_secs: Seconds without a heartbeat after which a worker is lost,
      so that its place in a step goes to another replica.
    timeline_dir: Where to record the timelines; see `timeline`.
    namespace: The name of the training.
    log: Receives each line of the log.
  """

  start_timeout_secs: float
  lost_after_secs: float
  timeline_dir: str | None
  namespace: str
  log: Callable[[str], None]


def build_replica(
  replica_fn: Callable[[], model_replica.Replica],
) -> model_replica.Replica:
  """Builds the replica of a process that is connected to a cluster.

  Raises:
    ValueError: If its model was built before the process was connected.
  """
  try:
    replica = replica_fn()
    for variable in replica.shared:
      tf.convert_to_tensor(variable)
  except tf.errors.InvalidArgumentError as error:
    if "Client for target /job:localhost" not in error.message:
      raise
    raise ValueError(
      "the model was built before the driver connected to the cluster, which"
      " makes earlier variables unusable: build the model inside `replica_fn`,"
      " or inside `model_fn` of `fit`"
    ) from None
  return replica


class ParameterServerDriver(Driver):
  """A client of parameter servers.

  Attributes:
    task: The task of this process.
    rule: The update rule.
  """

  rule: rule_base.UpdateRule
  store: parameter_store.ParameterStore

  def __init__(
    self,
    spec: cluster.ClusterSpec,
    task: cluster.Task,
    replica_fn: Callable[[], model_replica.Replica],
    rule_fn: Callable[[], rule_base.UpdateRule],
    *,
    replicas: Sequence[cluster.Task],
    client: int,
    devices: Sequence[str],
    timeline_file: str,
    options: Options,
  ):
    """Builds the training, once this process is connected.

    Args:
      spec: The cluster.
      task: The task of this process.
      replica_fn: Builds the replica.
      rule_fn: Builds the update rule.
      replicas: The tasks that contribute.
      client: The number of this client in the heartbeat tables.
      devices: One device of each serving task; the first is PS task 0.
      timeline_file: The name of the file of timelines, without directory.
      options: What the caller chose.

    Raises:
      TimeoutError: If a serving task or the chief does not answer in time.
      RuntimeError: If this program builds other variables than the chief's.
      ValueError: If the rule is for another number of replicas, or the
        namespace is invalid.
    """
    self.task = task
    self.replica_names = [str(replica) for replica in replicas]
    self._options = options
    self._log = options.log
    self._thread: waiting.RaisingThread | None = None
    self._watchdog: watchdog.StepWatchdog | None = None
    self._recorder: timeline.Recorder | None = None
    if options.timeline_dir is not None:
      self._recorder = timeline.Recorder(options.timeline_dir, timeline_file)
    namespace = resources.Namespace(options.namespace)
    self._heartbeats = heartbeats.Heartbeats(
      client,
      devices=devices,
      timeout_secs=options.start_timeout_secs,
      namespace=namespace,
      log=options.log,
    )
    with self._heartbeats.announce_failure(self.is_chief):
      self.replica = build_replica(replica_fn)
      self.rule = rule_base.check_rule(rule_fn())
      rule_base.check_replicas(self.rule, self.replica_names)
      self.store = parameter_store.build(
        spec,
        self.replica.shared,
        wire_dtype=self.rule.wire_dtype,
        namespace=namespace,
      )
      self._agree()
      self._attach()

  def set_learning_rate(self, rate: float) -> None:
    """See `Driver.set_learning_rate`."""
    self.rule.set_learning_rate(rate)

  def stop_at(self, step: int) -> None:
    """See `Driver.stop_at`."""
    self.rule.stop_at(step)

  def counts(self) -> list[results.Counts]:
    """See `Driver.counts`."""
    return self.rule.counts()

  def interrupt(self) -> None:
    """See `Driver.interrupt`."""
    self.rule.interrupt()

  @property
  def accepted_fraction(self) -> float:
    """See `Driver.accepted_fraction`."""
    return self.rule.accepted_fraction

  def step(self, max_updates: int = 1) -> training.StepResult:
    """See `Driver.step`; raises what failed in the chief's own replica too."""
    self._check_role(needs_chief=True)
    metrics = self._metrics
    if self._thread is None:
      self._start()
    self._thread.raise_error()
    self._heartbeats.raise_if_replaced()
    made = self._next_updates(max_updates)
    # A process that was replaced must not save what it read.
    self._heartbeats.raise_if_replaced()
    self._watchdog.progress()
    return training.StepResult(
      made[-1].global_step,
      made[-1].loss,
      sum(update.num_examples for update in made),
      {"learning_rate": made[-1].learning_rate},
      metrics=metrics.means(),
    )

  def _agree(self) -> None:
    """Checks that this task has the variables and the rule of the chief.

    The chief publishes them. No variable has been created yet.
    """
    rule, variables = self.rule.signature(), self.store.signature()
    if self.is_chief:
      self._heartbeats.publish({"rule": rule, "variables": variables})
      return
    theirs = waiting.await_value(
      lambda: self._heartbeats.published() or self._heartbeats.outcome(),
      timeout_secs=self._options.start_timeout_secs,
      what=f"{self.task} waits for the chief to publish its variables",
      log=self._log,
    )
    if isinstance(theirs, str):  # The chief failed.
      self._heartbeats.leave()
      raise RuntimeError(theirs)
    found = heartbeats.differences(variables, theirs["variables"])
    if rule != theirs["rule"]:
      found.append(
        f"the update rule is {rule} here and {theirs['rule']} at the chief"
      )
    if found:
      message = f"{self.task} differs from the chief: {'; '.join(found)}"
      self._heartbeats.end(message)
      self._heartbeats.leave()
      raise RuntimeError(message)

  def _attach(self) -> None:
    """Attaches to the shared objects; the chief creates them first."""
    self.rule.build(self.store, is_sparse=model_replica.sparsity(self.replica))
    if self.is_chief:
      values = [tf.identity(v) for v in self.replica.shared]
      rule_base.create_or_resume(self.rule, self.store, values)

  def _start(self) -> None:
    """Starts the update rule, the watchdog thread and the replicas."""
    if self.global_step < 0:
      raise RuntimeError(
        "the chief was killed in the middle of an update and there is no"
        " checkpoint to restore: restart the parameter servers"
      )
    self.rule.start()
    self._watchdog = watchdog.StepWatchdog(
      self.rule,
      lambda: self.global_step,
      self._ages,
      self._heartbeats.outcome,
      self.replica_names,
      lost_after_secs=self._options.lost_after_secs,
      log=self._log,
    )
    self._thread = self._start_replicas()

  @abc.abstractmethod
  def _ages(self) -> list[float]:
    """Seconds since each replica's last heartbeat; see `StepWatchdog`."""

  @abc.abstractmethod
  def _start_replicas(self) -> waiting.RaisingThread:
    """The chief's: lets the replicas begin.

    Returns:
      The thread that runs or watches them. It must interrupt the rule if it
      fails.
    """

  def _next_updates(self, max_updates: int) -> list[results.Update]:
    """The next updates; ignores interrupts without a reason."""
    while True:
      try:
        made = self.rule.apply_updates(max_updates)
        break
      except results.Interrupted:
        self._thread.raise_error()
        self._heartbeats.raise_if_ended()
      except results.NonFiniteGradientError as error:
        name = self.replica_names[error.replica]
        raise results.NonFiniteGradientError(
          error.replica, error.global_step, name
        ) from None
    for update in made:
      if self._recorder is not None and update.ended:
        self._recorder.record_update(
          update.global_step - 1, update.began, update.ended
        )
    return made
