"""Defines the driver interface, and the base class with parameter servers.

A *driver* decides which process runs which part of a training. It builds the
replica and the update rule, and runs the part of its own process:

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
from tf_replicas.store import tables


class TrainedState(checkpoints.Checkpointable, Protocol):
  """The interface of the trained variables, the same for all drivers.

  Attributes:
    examples_seen: int64 scalar variable: the number of examples in all updates.
  """

  examples_seen: tf.Variable

  def read_global_step(self) -> tf.Tensor:
    """Returns the number of updates made so far, an int64 scalar."""

  def table(self) -> str:
    """Returns a readable table of the variables and their devices."""

  def assign(self, index: int, value: parameter_store.Value) -> None:
    """Assigns `value` to the variable `Replica.shared[index]`."""

  def subtract(self, index: int, value: parameter_store.Value) -> None:
    """Subtracts `value` from the variable `Replica.shared[index]`, in place."""

  def reader(self, indices: Sequence[int]) -> Callable[[], list[tf.Tensor]]:
    """Returns a function that reads the variables at `indices`, in order."""
    ...


class Driver(abc.ABC):
  """Builds the model and the shared state, and runs this task's part.

  Leaving the `with` statement calls `close`. If an error ends the block, all
  tasks are told at once; they need not wait for this task's heartbeats to stop.

  Attributes:
    is_chief: Whether this task is the chief. The chief calls `step` and saves
      checkpoints. All other tasks call `run_replica`.
    replica: The model replica that this task computes gradients with.
    store: The trained variables, and the other state that a `Session` saves.
    replica_names: The names of the replicas, in the order of `counts`. Empty
      if the driver does not count contributions.
  """

  is_chief: bool
  replica: model_replica.Replica
  store: TrainedState
  replica_names: Sequence[str] = ()

  @abc.abstractmethod
  def step(self, max_updates: int = 1) -> training.StepResult:
    """Makes one update or several, in the chief.

    Args:
      max_updates: The largest number of updates to make. A driver may always
        make only one.

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
    """Contributes gradients until training ends, in all tasks but the chief.

    Returns:
      The global step when training ended.

    Raises:
      RuntimeError: If this task is the chief, or if training ended with an
        error. With parameter servers the message is that of the error.
    """

  @abc.abstractmethod
  def set_learning_rate(self, rate: float) -> None:
    """Sets the learning rate from the next update on, in the chief."""

  def stop_at(self, step: int) -> None:
    """Prevents updates beyond the global step `step`, in the chief."""
    del step  # Where `step` alone makes updates, its caller decides.

  def counts(self) -> list[results.Counts]:
    """Returns how the contributions of each of `replica_names` were used."""
    return []

  def interrupt(self) -> None:
    """Wakes `step` in another thread, so that it checks whether to stop."""
    return  # Where no step waits for others.

  @property
  def accepted_fraction(self) -> float:
    """Fraction of all contributions that updates use, if replicas are alike."""
    return 1.0

  @property
  def global_step(self) -> int:
    """Number of updates made so far."""
    return int(self.store.read_global_step())

  def examples_drawn(self) -> tf.Tensor:
    """Estimates how many examples all replicas have drawn: an int64 scalar.

    Includes the examples of refused contributions, assuming that all replicas
    are equally fast. A resumed training draws its first examples from there.
    """
    used = tf.cast(self.store.examples_seen.read_value(), tf.float64)
    return tf.cast(tf.round(used / self.accepted_fraction), tf.int64)

  def values(self, *, averaged: bool = False) -> dict[str, np.ndarray]:
    """Reads the trained variables. The model's own variables do not change.

    Args:
      averaged: Whether to take, for each variable that has a moving average,
        that average.

    Returns:
      The values by `variable.path`, as `load_into_keras` takes them.
    """
    state = {name: np.asarray(v) for name, v in self.store.state().items()}
    if not averaged:
      state = {n: v for n, v in state.items() if n.startswith("variables/")}
    found = evaluation.averaged_variables(state)
    return {p: v for p, v in found.items() if not metric_sums.is_own(p)}

  @functools.cached_property
  def _metrics(self) -> metric_sums.Reader:
    """Reader of the metrics, made before the first update to count it too."""
    return metric_sums.Reader(
      self.store, self.replica.shared, self.replica.metrics
    )

  @abc.abstractmethod
  def close(self, error: BaseException | None = None) -> None:
    """Leaves the training. The chief first ends the training for all tasks.

    Args:
      error: The error that ended the training early, which every task is told;
        None if there was none.
    """

  def __enter__(self):
    return self

  def __exit__(self, kind, error, traceback) -> None:
    self.close(error)

  def _check_role(self, *, needs_chief: bool) -> None:
    """Raises RuntimeError unless `is_chief` is equal to `needs_chief`."""
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
  """The options that the caller of a driver with parameter servers chooses.

  Attributes:
    start_timeout_secs: Seconds to wait for PS tasks, workers and chief.
    lost_after_secs: Seconds without a heartbeat after which a worker is lost,
      so that a step uses a contribution of another replica instead.
    timeline_dir: The directory to record the timelines in (see `timeline`);
      None: no timelines.
    namespace: The name of the training.
    joined: The heartbeats of this process, if the training is one of a series
      that it has joined. At the end of the training, this client then stays in
      the series, unless there was an error. None: the driver joins and leaves.
    log: Receives each line of the log.
  """

  start_timeout_secs: float
  lost_after_secs: float
  timeline_dir: str | None
  namespace: str
  joined: heartbeats.Heartbeats | None
  log: Callable[[str], None]


def build_replica(
  replica_fn: Callable[[], model_replica.Replica],
) -> model_replica.Replica:
  """Builds the replica of a process that is connected to a cluster.

  Raises:
    ValueError: If the model was built before the process was connected.
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
  """The base class of drivers that keep the variables on parameter servers.

  A process with such a driver is a *client* of the parameter servers.

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
    """Builds replica and rule, and attaches to the objects on the PS tasks.

    The process must be connected to the cluster already.

    Args:
      spec: The cluster.
      task: The task of this process.
      replica_fn: Builds the replica.
      rule_fn: Builds the update rule.
      replicas: The tasks that contribute gradients.
      client: The number of this client in the heartbeat tables.
      devices: One device of each serving task (parameter server or in-graph
        worker). The first one is that of PS task 0.
      timeline_file: The name of the timeline file, without directory and
        extension.
      options: The options that the caller chose.

    Raises:
      TimeoutError: If a serving task or the chief does not answer in time.
      RuntimeError: If this program builds other variables, or another update
        rule, than the chief.
      ValueError: If the model was built before the process was connected, the
        rule is for another number of replicas, or the namespace is invalid.
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
    self._home = tables.Home(
      namespace, spec.num_tasks("ps"), parameter_store.ps_device
    )
    self._heartbeats = options.joined or heartbeats.Heartbeats(
      client,
      devices=devices,
      timeout_secs=options.start_timeout_secs,
      namespace=namespace,
      log=options.log,
    )
    with self._heartbeats.announce_failure(self.is_chief):
      with tables.home(self._home):
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
    """Makes updates; see `Driver.step`.

    Also raises the error of the chief's own replica, if that has failed.
    """
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
    """Compares this task's variables and update rule with the chief's.

    The chief publishes its variables and rule for the other tasks. This is done
    before any variable is created on the PS tasks.

    Raises:
      RuntimeError: If they differ, or the chief failed.
      TimeoutError: If the chief does not publish them in time.
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
    """Attaches to the objects on the PS tasks. The chief initializes them."""
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
    """Returns the seconds since each replica's last heartbeat.

    -1 and 0 have the meaning that `StepWatchdog` documents.
    """

  @abc.abstractmethod
  def _start_replicas(self) -> waiting.RaisingThread:
    """Lets the replicas begin, in the chief.

    Returns:
      The thread that runs or watches the replicas. If it fails, it must
      interrupt the rule.
    """

  def _next_updates(self, max_updates: int) -> list[results.Update]:
    """Waits for the next updates, and returns them.

    Continues after an interrupt that has no reason to stop.
    """
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
