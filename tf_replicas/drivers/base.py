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
import contextlib
import functools
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple
from typing import Protocol
from typing import TypeVar

import numpy as np
import tensorflow as tf

from tf_replicas import cluster
from tf_replicas.drivers import connection
from tf_replicas.drivers import heartbeats
from tf_replicas.drivers import leases
from tf_replicas.drivers import timeline
from tf_replicas.drivers import watchdog
from tf_replicas.replica import model_replica
from tf_replicas.rules import base as rule_base
from tf_replicas.rules import results
from tf_replicas.runtime import own_variables
from tf_replicas.runtime import patches
from tf_replicas.runtime import processes
from tf_replicas.runtime import resources
from tf_replicas.runtime import waiting
from tf_replicas.session import checkpoints
from tf_replicas.session import evaluation
from tf_replicas.session import interrupts
from tf_replicas.session import training
from tf_replicas.store import metric_sums
from tf_replicas.store import parameter_store
from tf_replicas.store import tables

_OPTIONAL_STATE = (
  *("slots/", "optimizer/", "averages/", "sums", "async/"),
  f"variables/{own_variables.LOSS_SCALE}",
  f"variables/{own_variables.METRIC_SUMS}",
)
_R = TypeVar("_R")
# Seconds that the calls of a training may take to end after its parameter
# servers were lost.
_END_SECS = 30.0
_RETRY_SECS = 0.5
# How long a step waits for the restart of a worker, if `recovery_timeout_secs`,
# which is for parameter servers too, is 0.
_RESTART_TIMEOUT_SECS = 600.0


def is_optional(name: str) -> bool:
  """Returns whether a checkpoint may lack an entry when training resumes.

  The optimizer, averages, update rule, dtype or metrics may have changed, but
  not the variables of the model.

  Args:
    name: The name of the entry in checkpoints.
  """
  return name.startswith(_OPTIONAL_STATE)


class TrainedState(checkpoints.Checkpointable, Protocol):
  """The interface of the object that holds the trained variables.

  All drivers (the objects that run a training) have such an object.

  Attributes:
    examples_seen: int64 scalar variable: the number of examples in all updates.
  """

  examples_seen: tf.Variable

  def read_global_step(self) -> tf.Tensor:
    """Returns the number of updates made so far, an int64 scalar."""

  def counts(self) -> tuple[int, int]:
    """Reads the global step and `examples_seen`, both as of the same update."""
    ...

  def table(self) -> str:
    """Returns a readable table of the variables and their devices."""

  def assign(self, index: int, value: parameter_store.Value) -> None:
    """Assigns `value` to the trained variable of position `index`.

    The positions are those of `Replica.shared`, the list of all variables that
    the replicas share.
    """

  def subtract(self, index: int, value: parameter_store.Value) -> None:
    """Subtracts `value` in place from the trained variable of position `index`.

    The positions are those of `Replica.shared`, the list of all variables that
    the replicas share.
    """

  def reader(self, indices: Sequence[int]) -> Callable[[], list[tf.Tensor]]:
    """Returns a function that reads the variables of some positions.

    Args:
      indices: Positions in `Replica.shared`, the list of all variables that the
        replicas share.

    Returns:
      A function without arguments. Each call returns the present values of
      these variables, in the order of `indices`.
    """
    ...


class Driver(abc.ABC):
  """The interface of an object that runs one task's part of a training.

  It builds the model, and the variables that all replicas share. It is a
  context manager, which calls `close` at its end. If an error ends the `with`
  block of the chief, `close` tells the other tasks about the error at once.

  Attributes:
    is_chief: Whether this task is the chief. The chief calls `step` and saves
      checkpoints. All other tasks call `run_replica`.
    replica: The model replica from which this task, or the workers that it
      drives, compute gradients.
    store: The trained variables, and the other state that a `Session` saves.
    replica_names: The names of the replicas, such as "worker 0". The method
      `counts` returns one entry for each of them. Empty if the driver does not
      count contributions, which are what the replicas send for the updates.
    recovers: Whether training may go on after the loss of a parameter server.
    on_leave: The chief calls it in `step` if a parameter server was asked to
      end, by SIGTERM, which waits until the call has returned, for eight
      seconds at most. It should save a checkpoint, as `Session.save` does.
      None: nothing is called.
  """

  is_chief: bool
  replica: model_replica.Replica
  store: TrainedState
  replica_names: Sequence[str] = ()
  recovers: bool = False
  on_leave: Callable[[], object] | None = None

  @abc.abstractmethod
  def step(self, max_updates: int = 1) -> training.StepResult:
    """Makes one update or several. Only the chief calls this method.

    Args:
      max_updates: The largest number of updates to make. A driver may make
        fewer, but at least one.

    Returns:
      A `StepResult`: the global step after the updates, the loss of the last
      update, the number of examples in all of these updates, and the means of
      the model's metrics.

    Raises:
      NonFiniteGradientError: If a loss or a gradient is not finite.
      RuntimeError: If this task is not the chief, if another task ended the
        training, or if a data set has ended.
    """

  @abc.abstractmethod
  def run_replica(self) -> int:
    """Runs a replica, which contributes gradients, until training ends.

    All tasks except the chief call this.

    Returns:
      The global step when training ended.

    Raises:
      RuntimeError: If this task is the chief, or if training ended with an
        error. With parameter servers the message is that of the error.
    """

  @abc.abstractmethod
  def set_learning_rate(self, rate: float) -> None:
    """Sets the learning rate of all later updates. Called by the chief only."""

  def stop_at(self, step: int) -> None:
    """Prevents updates beyond the global step `step`.

    Only the chief calls this method. It does nothing if all updates are made by
    calls of the method `step`.
    """
    del step  # Where `step` alone makes updates, its caller decides.

  def counts(self) -> list[results.Counts]:
    """Counts the contributions of each replica that were used or refused.

    A contribution is what a replica sends for one update, such as a gradient.

    Returns:
      One entry for each of `replica_names`, in the same order. An entry counts
      the contributions of that replica since the start of the training.
    """
    return []

  def row_updates(self) -> dict[str, int]:
    """Returns how many rows of tables the updates have changed on each PS task.

    A table is a matrix whose rows live on the PS tasks (parameter servers). The
    chief calls this.

    Returns:
      Maps each PS task, such as "ps 0", to the number of rows. A row counts
      once per update that changes it. The map is empty without tables.
    """
    return {}  # Where there are no PS tasks.

  def interrupt(self) -> None:
    """Wakes the thread that waits in `step`.

    That thread then checks whether the training has to stop. If not, it waits
    on.
    """
    return  # Where no step waits for others.

  def recover(self, error: tf.errors.OpError) -> bool:
    """Waits for the restart of a lost parameter server, and attaches again.

    The chief calls it after `step`, or a call of `store`, has raised an error.
    If the result is True, `store` and the update rule are new objects, and the
    variables have their initial values. The caller then has to restore a
    checkpoint, and can go on with `step`.

    Args:
      error: The error that the call raised.

    Returns:
      Whether the training can go on. False if no parameter server was lost, or
      if the driver does not recover; the caller then has to raise the error.

    Raises:
      TimeoutError: If the parameter server is not restarted in time.
      RuntimeError: If another task ended the training.
    """
    del error  # Without parameter servers, there is nothing to recover.
    return False

  def recovering(self, train: Callable[[], _R]) -> _R:
    """Calls `train`, and calls it again after each loss of a parameter server.

    Between the calls, it waits for the restart of the parameter server, as
    `recover` describes.

    Args:
      train: Does the part of this task: in the chief, it restores the newest
        checkpoint and makes the updates that are left.

    Returns:
      The result of the last call of `train`.

    Raises:
      tf.errors.OpError: If `train` fails in TensorFlow for another reason, or
        if the driver does not recover.
      TimeoutError: If the parameter server is not restarted in time.
      RuntimeError: If another task ended the training.
    """
    while True:
      try:
        return train()
      except tf.errors.OpError as error:
        if not self.recover(error):
          raise

  def recoveries(self) -> list["Recovery"]:
    """Returns one entry per loss of parameter servers that was recovered from.

    Only the chief keeps these entries. The oldest loss comes first.
    """
    return []

  @property
  def accepted_fraction(self) -> float:
    """The fraction of all computed gradients that updates use, in (0, 1].

    The others are refused, for example because an update had enough gradients.
    The fraction is not measured. It follows from the settings of the update
    rule, if all replicas are equally fast.
    """
    return 1.0

  @property
  def global_step(self) -> int:
    """Number of updates made so far."""
    return int(self.store.read_global_step())

  def examples_drawn(self) -> tf.Tensor:
    """Estimates how many examples all replicas have drawn from the data.

    These are the examples of all gradients, also of those that were refused. A
    resumed training starts to draw examples at this position. The estimate
    assumes that all replicas are equally fast.

    Returns:
      The number of examples, an int64 scalar.
    """
    used = tf.cast(self.store.examples_seen.read_value(), tf.float64)
    return tf.cast(tf.round(used / self.accepted_fraction), tf.int64)

  def values(self, *, averaged: bool = False) -> dict[str, np.ndarray]:
    """Reads the trained variables from where they live.

    It does not assign them to the variables of the model in this process. The
    state of a loss scale and the sums of metrics are left out.

    Args:
      averaged: Whether to return the moving average of each variable that has
        one, in place of its value.

    Returns:
      The values by `variable.path`, in the form that `load_into_keras` expects.
    """
    state = {name: np.asarray(v) for name, v in self.store.state().items()}
    if not averaged:
      state = {n: v for n, v in state.items() if n.startswith("variables/")}
    return evaluation.averaged_variables(state)

  @functools.cached_property
  def _metrics(self) -> metric_sums.Reader:
    """The object that reads the means of the model's metrics.

    It is made before the first update, so that it counts that update too.
    """
    return metric_sums.Reader(
      self.store, self.replica.shared, self.replica.metrics
    )

  @abc.abstractmethod
  def close(self, error: BaseException | None = None) -> None:
    """Takes this task out of the training. In the chief, ends it for all tasks.

    Args:
      error: The error because of which training ends early, if any. The chief
        tells the other tasks about it.
    """

  def __enter__(self):
    return self

  def __exit__(self, kind, error, traceback) -> None:
    # Without the end of the chief, other tasks would wait for it.
    postponed = (
      interrupts.postponed if self.is_chief else contextlib.nullcontext
    )
    with postponed():
      self.close(error)

  def _check_role(self, *, needs_chief: bool) -> None:
    """Checks that `step` or `run_replica` is called in the right task.

    Args:
      needs_chief: True if `step` was called, which is for the chief. False if
        `run_replica` was called, which is for all other tasks.

    Raises:
      RuntimeError: If the method is not for this task.
    """
    if self.is_chief == needs_chief:
      return
    if needs_chief:
      raise RuntimeError(
        "`step` is for the chief: this task must call `run_replica`."
      )
    raise RuntimeError(
      "`run_replica` is not for the chief: this task must call `step`."
    )


class _UnreachableError(tf.errors.UnavailableError):
  """Reports that heartbeats to a parameter server fail."""

  def __init__(self, message: str):
    super().__init__(None, None, message)


class Recovery(NamedTuple):
  """The loss of a parameter server, and the recovery from it.

  Attributes:
    lost: The names of the lost parameter servers, such as "ps 0". Empty if only
      the connection to one was lost.
    step: The last global step that the chief knew of before the loss.
    resumed: The global step of the checkpoint from which training resumed.
    secs: Seconds from the loss until the chief resumed the training.
  """

  lost: Sequence[str]
  step: int
  resumed: int
  secs: float

  @property
  def repeated(self) -> int:
    """The number of updates that were made again."""
    return max(self.step - self.resumed, 0)

  def __str__(self) -> str:
    """Describes the recovery in one line."""
    return (
      f"recovered from the loss of {', '.join(self.lost) or 'a connection'} at"
      f" step {self.step}"
      f" in {self.secs:.1f} s: resumed at step {self.resumed}, so"
      f" {self.repeated} updates were made again"
    )


class Options(NamedTuple):
  """The options that the caller of a driver with parameter servers chooses.

  Attributes:
    start_timeout_secs: Seconds to wait for other tasks (PS tasks, workers, the
      chief) to start.
    lost_after_secs: Seconds without a heartbeat after which a worker counts as
      lost. Then a step uses the gradients of another replica in its place.
    timeline_dir: The directory for timelines, the files that record what each
      replica does when. None: no timelines.
    namespace: The name of the training, which is part of the names of all
      shared variables.
    joined: The heartbeats of this process, if it takes part in a series of
      trainings (several trainings, one after the other, on one cluster). After
      a training without an error, the tasks then stay for the next one. None:
      the driver sends heartbeats for this training only.
    log: Receives each line of the log.
    recovery_timeout_secs: Seconds to wait for the restart of a parameter server
      that was lost, and for that of a worker without which no update can be
      made. 0: the loss of a parameter server ends the training at once; the
      time for a worker is 600 s.
  """

  start_timeout_secs: float
  lost_after_secs: float
  timeline_dir: str | None
  namespace: str
  joined: heartbeats.Heartbeats | None
  log: Callable[[str], None]
  recovery_timeout_secs: float = 0.0


def build_replica(
  replica_fn: Callable[[], model_replica.Replica],
) -> model_replica.Replica:
  """Calls `replica_fn`, in a process that is connected to a cluster.

  Returns:
    The model replica that `replica_fn` built.

  Raises:
    ValueError: If `replica_fn` returns a model that was built before the
      process was connected to the cluster. Its variables cannot be used.
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


def check_endless(replica: model_replica.Replica, kind: str) -> None:
  """Checks that a replica wants an error when its data set ends.

  Args:
    replica: The replica.
    kind: The kind of training, for the message.

  Raises:
    ValueError: If `replica.on_data_end` is not "error".
  """
  if replica.on_data_end != "error":
    raise ValueError(
      f"`on_data_end` must be 'error' in {kind}, whose data must be endless."
      f" Received: {replica.on_data_end!r}."
    )


class ParameterServerDriver(Driver):
  """The base class of drivers that keep the variables on parameter servers.

  A process with such a driver is a *client* of the parameter servers.

  Attributes:
    task: The task of this process.
    rule: The update rule.
  """

  rule: rule_base.UpdateRule
  store: parameter_store.ParameterStore
  # Whether the driver can go on, or end well, when a data set ends.
  _may_data_end = True

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
    """Builds model and update rule, and attaches to the shared variables.

    The shared variables live on the PS tasks (the parameter servers). The
    process must be connected to the cluster already.

    Args:
      spec: The cluster.
      task: The task of this process.
      replica_fn: Builds the replica, which holds the model and the data.
      rule_fn: Builds the update rule.
      replicas: The tasks that contribute gradients.
      client: The index of this process in the heartbeat tables, which record
        the processes that are alive.
      devices: One device of each serving task (parameter server or in-graph
        worker). The first one is that of PS task 0.
      timeline_file: The name of the timeline file, without directory and
        extension.
      options: The options that the caller chose.

    Raises:
      TimeoutError: If a serving task or the chief does not answer in time.
      RuntimeError: If this program builds other variables, or another update
        rule, than the chief, or takes part in another training of a series.
      ValueError: If the model was built before the process was connected, the
        rule is for another number of replicas, or the namespace is invalid.
    """
    processes.print_stacks_on_request()
    self.task = task
    self.recovers = options.recovery_timeout_secs > 0
    self._spec = spec
    self._rule_fn = rule_fn
    self._recoveries: list[Recovery] = []
    # The lost tasks and the time, until training has resumed; then None.
    self._loss: tuple[Sequence[str], float] | None = None
    self._is_rolled_back = False
    self._last_step = 0
    self._end_step: int | None = None
    self._is_built = False
    self.replica_names = [str(replica) for replica in replicas]
    self._options = options
    self._log = options.log
    self._thread: waiting.RaisingThread | None = None
    self._watchdog: watchdog.StepWatchdog | None = None
    self._recorder: timeline.Recorder | None = None
    if options.timeline_dir is not None:
      self._recorder = timeline.Recorder(options.timeline_dir, timeline_file)
    self._heartbeats = options.joined or heartbeats.Heartbeats(
      client,
      devices=devices,
      timeout_secs=options.start_timeout_secs,
      namespace=resources.Namespace(options.namespace),
      log=options.log,
    )
    if self.recovers:
      self._heartbeats.answer_timeout_secs = options.recovery_timeout_secs
    self._home = tables.Home(
      self._namespace(), spec.num_tasks("ps"), parameter_store.ps_device
    )
    with self._heartbeats.announce_failure(self.is_chief):
      with tables.home(self._home):
        self.replica = build_replica(replica_fn)
      if not self._may_data_end:
        check_endless(self.replica, "in-graph training")
      try:
        self._build()
      except tf.errors.OpError as error:  # A task ended since it answered.
        if not self.recover(error):
          raise

  def _namespace(self, generation: int | None = None) -> resources.Namespace:
    """Returns the namespace, a prefix of the names of all shared variables.

    It includes the *generation*, a number that changes when a parameter server
    is restarted. So no task uses resources from before the restart.

    Args:
      generation: The generation. None: the present one.
    """
    if generation is None:
      generation = self._heartbeats.generation
    return resources.Namespace(self._options.namespace, generation)

  def _build(self) -> None:
    """Builds update rule and store, and attaches to the shared variables.

    Raises:
      TimeoutError: If the chief does not answer in time.
      RuntimeError: If this program builds other variables, or another update
        rule, than the chief, or takes part in another training of a series.
      ValueError: If the rule is for another number of replicas.
    """
    self._is_built = False
    self.rule = rule_base.check_rule(self._rule_fn())
    rule_base.check_replicas(self.rule, self.replica_names)
    self.store = parameter_store.build(
      self._spec,
      self.replica.shared,
      wire_dtype=self.rule.wire_dtype,
      namespace=self._home.namespace,
    )
    self._agree()
    self._attach()
    self._is_built = True

  def set_learning_rate(self, rate: float) -> None:
    """Sets the learning rate of all later updates. Called by the chief only."""
    self.rule.set_learning_rate(rate)

  def stop_at(self, step: int) -> None:
    """Prevents updates beyond the global step `step`.

    Only the chief calls this method.
    """
    self._end_step = step
    self.rule.stop_at(step)

  def counts(self) -> list[results.Counts]:
    """Counts the contributions of each replica that were used or refused.

    A contribution is what a replica sends for one update, such as a gradient.

    Returns:
      One entry for each of `replica_names`, in the same order. An entry counts
      the contributions of that replica since the start of the training.
    """
    return self.rule.counts()

  def row_updates(self) -> dict[str, int]:
    """Returns how many rows of tables the updates have changed on each PS task.

    A table is a matrix whose rows live on the PS tasks (parameter servers). The
    chief calls this.

    Returns:
      Maps each PS task, such as "ps 0", to the number of rows, since the first
      task of this training started. A row counts once per update that changes
      it. The map is empty without tables.
    """
    counts = enumerate(self.store.row_updates())
    return {f"ps {task}": count for task, count in counts}

  def interrupt(self) -> None:
    """Wakes the thread that waits in `step`.

    That thread then checks whether the training has to stop. If not, it waits
    on.
    """
    self.rule.interrupt()

  @property
  def accepted_fraction(self) -> float:
    """The fraction of all computed gradients that updates use, in (0, 1].

    The others are refused, for example because an update had enough gradients.
    The fraction is not measured. It follows from the settings of the update
    rule, if all replicas are equally fast.
    """
    return self.rule.accepted_fraction

  def recoveries(self) -> list[Recovery]:
    """Returns one entry per loss of parameter servers that was recovered from.

    Only the chief keeps these entries. The oldest loss comes first.
    """
    return [*self._recoveries]

  def recover(self, error: tf.errors.OpError) -> bool:
    """Waits for the restart of a lost parameter server, and attaches again.

    Call it after a call that needs the parameter servers has raised an error.
    If the result is True, `store` and `rule` are new objects, and the variables
    have their initial values. The chief then has to restore a checkpoint.

    Args:
      error: The error that the call raised.

    Returns:
      Whether the training can go on. False if no parameter server was lost, or
      if `recovers` is False; the caller then has to raise the error.

    Raises:
      TimeoutError: If the parameter server is not restarted in time.
      RuntimeError: If another task ended the training, or if another thread of
        this process still waits for the lost parameter server after 30 s.
    """
    if not self.recovers:
      return False
    lost = self._find_lost(error)
    # Else the connection may have been interrupted.
    is_cut = isinstance(error, _UnreachableError) or (
      isinstance(error, tf.errors.UnavailableError)
      and "/job:ps" in error.message
    )
    if not lost and not is_cut:
      return False
    since = time.monotonic()
    timeout_secs = self._options.recovery_timeout_secs
    what = ", ".join(lost) or "the connection to a parameter server"
    when = f" at step {self._last_step}" if self.is_chief else ""
    self._log(
      f"{self.task}: {what} was lost{when}; waiting for at most"
      f" {timeout_secs:.0f} s until all parameter servers answer. If no"
      " launcher restarts a dead one, start it again with the same command"
      f" ({processes.shortened(error.message)})"
    )
    if self._loss is None:
      self._loss = lost, since
    # Longer than any time limit in it: this ends what hangs in TensorFlow.
    of_agreement = max(self._options.start_timeout_secs, timeout_secs)
    with processes.killed_after(timeout_secs + of_agreement + 2 * _END_SECS):
      if self.is_chief and "ps 0" not in lost:
        # The chief closes the queues, which the others still use.
        with contextlib.suppress(tf.errors.OpError):
          self._heartbeats.renew()
      self._abandon()
      self._reattach(since, what)
    return True

  def _find_lost(self, error: tf.errors.OpError) -> list[str]:
    """Returns the names of the lost parameter servers.

    Args:
      error: The error after which they are asked.
    """
    del error
    return self._heartbeats.find_lost()

  def _unreachable(self) -> str:
    """Names the parameter servers that do not answer heartbeats.

    Returns:
      Their names, separated by commas. "" if all of them answer, or if
      `recovers` is False.
    """
    return ", ".join(self._heartbeats.lost()) if self.recovers else ""

  def _abandon(self) -> None:
    """Ends the threads of this process that use the lost parameter servers.

    Raises:
      RuntimeError: If a thread does not end within 30 s.
    """
    stages = [] if self._watchdog is None else [self._watchdog.stop]
    if self.is_chief and self._is_built:
      stages.append(self.rule.close)
    heartbeats.run_all(stages, log=lambda line: None)
    self._watchdog = None
    if self._thread is not None:
      with contextlib.suppress(Exception):  # It fails as the main thread did.
        self._thread.join(_END_SECS)
      if self._thread.is_alive():
        raise RuntimeError(
          f"{self.task} cannot recover: a call to a lost parameter server did"
          f" not end within {_END_SECS:.0f} s"
        )
      self._thread = None

  def _reattach(self, since: float, what: str) -> None:
    """Connects to the restarted parameter servers, and builds rule and store.

    It waits for the restart, for at most `recovery_timeout_secs`.

    Args:
      since: The time of the loss, by `time.monotonic`.
      what: What was lost, for error messages.

    Raises:
      TimeoutError: If a parameter server is not restarted in time, or if the
        chief does not publish its variables in time.
    """
    timeout_secs = self._options.recovery_timeout_secs
    deadline = since + timeout_secs
    old = self._home.namespace
    stages = [self.rule.close] if self._is_built else []
    while True:
      connection.await_servers(
        self._spec,
        "ps",
        timeout_secs=timeout_secs,
        since=since,
        log=self._log,
      )
      try:
        self._reconnect()
        left = max(deadline - time.monotonic(), 1.0)
        self._heartbeats.attach_again(left)
        if self.is_chief and self._namespace() == old:
          # No parameter server was restarted, but PS task 0 could not be
          # reached: others may still wait at the queues of this namespace.
          self._heartbeats.renew()
          heartbeats.run_all(stages, log=lambda line: None)
          self._heartbeats.attach_again(left)
        namespace = self._namespace()
        if self.is_chief and namespace != old:
          self._clear(old)
        self._home.move(namespace)
        old = namespace  # Another loss may follow within this call.
        if self._home.paths:
          self.replica.trace_again()
        vars(self).pop("_metrics", None)
        self._build()
        if self.is_chief and self._end_step is not None:
          self.rule.stop_at(self._end_step)
        return
      except tf.errors.OpError as error:
        if time.monotonic() > deadline:
          raise TimeoutError(
            f"waiting for the restart of {what}: gave up after"
            f" {timeout_secs:.0f} s ({processes.shortened(error.message)})"
          ) from None
        time.sleep(_RETRY_SECS)

  def _reconnect(self) -> None:
    """Connects this process to parameter servers that were restarted.

    Raises:
      tf.errors.OpError: If a task cannot be reached.
    """
    patches.reconnect()

  def _clear(self, namespace: resources.Namespace) -> None:
    """Deletes the variables and queues of a namespace on all parameter servers.

    It skips parameter servers that it cannot reach.

    Args:
      namespace: The namespace before parameter servers were restarted.
    """
    for address in self._spec.addresses("ps"):
      with contextlib.suppress(tf.errors.OpError):
        resources.clear(namespace, address)

  def step(self, max_updates: int = 1) -> training.StepResult:
    """Makes one update or several. Only the chief calls this method.

    If the replicas make the updates themselves, as with asynchronous rules, it
    waits for these updates. The first call starts the replicas. If the chief's
    own replica has failed, its error is raised.

    Args:
      max_updates: The largest number of updates.

    Returns:
      A `StepResult`: the global step after the updates, the loss of the last
      update, the number of examples in all of these updates, the learning rate,
      and the means of the model's metrics.

    Raises:
      NonFiniteGradientError: If a loss or a gradient is not finite.
      RuntimeError: If this task is not the chief, if another process runs as
        the same task, if another task ended the training, or if a data set has
        ended.
      training.StepExpired: If an update had too few contributions at the
        deadline that the update rule sets (`step_timeout_secs`), or if it could
        not be made without replicas that were lost and not restarted in time
        (`recovery_timeout_secs`; 600 s if that is 0).
      tf.errors.UnavailableError: If a parameter server was lost.
    """
    self._check_role(needs_chief=True)
    metrics = self._metrics
    if self._thread is None:
      self._start()
    self._thread.raise_error()
    self._heartbeats.raise_if_replaced()
    assert self._watchdog is not None
    self._watchdog.raise_error()
    self._watchdog.begin()
    made = self._next_updates(max_updates)
    self._let_servers_leave()
    # A process that was replaced must not save what it read.
    self._heartbeats.raise_if_replaced()
    self._watchdog.progress()
    self._last_step = max(self._last_step, made[-1].global_step)
    return training.StepResult(
      made[-1].global_step,
      made[-1].loss,
      sum(update.num_examples for update in made),
      {"learning_rate": made[-1].learning_rate},
      metrics=metrics.means(),
    )

  def _let_servers_leave(self) -> None:
    """Lets parameter servers end that were asked to end, by SIGTERM.

    It first calls `on_leave`. It returns when they have ended.

    Raises:
      KeyboardInterrupt: If this process was asked to end, too. Then the
        parameter servers go on, until the training has ended.
    """
    names = self._heartbeats.leaving()
    if not names:
      return
    self._log(f"{', '.join(names)} must end")
    if self.on_leave is not None:
      self.on_leave()
    interrupts.raise_delayed()
    # Other replicas may have made updates since: they are lost.
    self._last_step = self.global_step
    self._heartbeats.release()

  def _agree(self) -> None:
    """Makes sure that this task takes part in the training of the chief.

    The chief publishes the name of the training, and descriptions of its
    variables and of its update rule. Any other task waits for them, and
    compares them with its own. If they differ, it ends the training for all
    tasks. This is done before any variable is created on the PS tasks.

    Raises:
      RuntimeError: In a task that is not the chief, if training, variables or
        rule differ, or the chief failed.
      TimeoutError: If the chief does not publish them in time.
      tf.errors.UnavailableError: In a task that is not the chief, if a
        parameter server was lost meanwhile, or the chief has recovered from
        such a loss.
    """
    rule, variables = self.rule.signature(), self.store.signature()
    generation = self._heartbeats.generation
    signature = {
      "training": self._options.namespace,
      "rule": rule,
      "variables": variables,
      "generation": generation,
    }

    def is_present(found: dict | None) -> bool:
      return found is not None and found["generation"] == generation

    def published() -> dict | None:
      found = self._heartbeats.published()
      if is_present(found):
        return found
      # Else of a generation before this one, or of a later one.
      if found is not None and (lost := self._heartbeats.find_lost()):
        message = f"{', '.join(lost)} was lost while {self.task} waited"
        raise tf.errors.UnavailableError(None, None, message)
      return None

    if self.is_chief:
      found = self._heartbeats.published()
      if not is_present(found):
        if found is not None:  # An earlier chief did not live to clear it.
          self._clear(self._namespace(found["generation"]))
        self._heartbeats.close_training()
      self._heartbeats.publish(signature)
      return
    theirs = waiting.await_value(
      lambda: published() or self._heartbeats.outcome(),
      timeout_secs=max(
        self._options.start_timeout_secs, self._options.recovery_timeout_secs
      ),
      what=f"{self.task} waits for the chief to publish its variables",
      log=self._log,
    )
    if isinstance(theirs, str):  # The chief failed.
      self._heartbeats.leave()
      raise RuntimeError(theirs)
    message = self._difference(signature, theirs)
    if message:
      self._heartbeats.end(message)
      self._heartbeats.leave()
      raise RuntimeError(message)

  def _difference(
    self, own: Mapping[str, Any], chiefs: Mapping[str, Any]
  ) -> str | None:
    """Says how this task differs from the chief; None if it does not.

    Args:
      own: What this task would publish if it were the chief.
      chiefs: What the chief has published.
    """
    if own["training"] != chiefs["training"]:
      return (
        f"{self.task} takes part in training {own['training']}, and the chief"
        f" in training {chiefs['training']}: the chief was started again, or"
        " this task was too late. Start all tasks again. With a `train_dir` for"
        " each training, they resume"
      )
    found = heartbeats.differences(own["variables"], chiefs["variables"])
    if own["rule"] != chiefs["rule"]:
      found.append(
        f"the update rule is {own['rule']} here and {chiefs['rule']} at the"
        " chief"
      )
    if not found:
      return None
    return f"{self.task} differs from the chief: {'; '.join(found)}"

  @functools.cached_property
  def _is_sparse(self) -> list[bool]:
    """For each variable of `Replica.shared`, whether its gradient is sparse.

    Sparse gradients are `tf.IndexedSlices`. The property is computed once and
    kept. After the loss of a parameter server, it could not be computed: the
    data set may read the global step, which has no value then.
    """
    return model_replica.sparsity(self.replica)

  def _attach(self) -> None:
    """Attaches to the variables and queues on the PS tasks by their names.

    The chief also initializes the variables. If the process of an earlier chief
    has initialized them already, it keeps their values.
    """
    self.rule.build(self.store, is_sparse=self._is_sparse)
    self._leases = None
    if self._spec.max_workers and self.replica.leased is not None:
      self._leases = leases.Leases(
        self._home.namespace, self.store.device_of_task(0)
      )
    if self.is_chief:
      values = [tf.identity(v) for v in self.replica.shared]
      rule_base.create_or_resume(self.rule, self.store, values)
      # The process of an earlier chief was killed in the middle of an update.
      self._is_rolled_back = self._leases is not None and self.global_step < 0

  def _start(self) -> None:
    """Starts the update rule, the replicas, and the watchdog thread.

    The watchdog reports long waits and lost replicas. Only the chief calls
    this method: in the first `step`, and in the first `step` after a recovery.

    Raises:
      RuntimeError: If the chief's process before this one was killed in the
        middle of an update, and no checkpoint was restored since.
    """
    step = self.global_step
    if step < 0:
      raise RuntimeError(
        "the chief was killed in the middle of an update and there is no"
        " checkpoint to restore: start all tasks again"
      )
    if self._loss is not None:
      lost, since = self._loss
      secs = time.monotonic() - since
      recovery = Recovery(lost, self._last_step, step, secs)
      self._recoveries.append(recovery)
      self._log(str(recovery))
      self._loss = None
    self._last_step = step
    self.rule.start()
    if self._leases is not None and self.replica.leased is not None:
      self._leases.begin(
        self.replica.leased.num_before(*self.store.counts()),
        is_back=self._is_rolled_back,
      )
      self._is_rolled_back = False
    self._watchdog = watchdog.StepWatchdog(
      self.rule,
      lambda: self.global_step,
      self._ages,
      lambda: self._heartbeats.outcome() or self._unreachable(),
      self.replica_names,
      must_wake=lambda: bool(self._heartbeats.leaving()),
      lost_after_secs=self._options.lost_after_secs,
      restart_timeout_secs=(
        self._options.recovery_timeout_secs or _RESTART_TIMEOUT_SECS
      ),
      joining={self.replica_names.index(str(t)) for t in self._spec.joining},
      start_timeout_secs=self._options.start_timeout_secs,
      log=self._log,
    )
    self._thread = self._start_replicas()

  @abc.abstractmethod
  def _ages(self) -> list[float]:
    """Returns the seconds since the last heartbeat of each replica.

    The entry of a replica is -1 if no heartbeat has come yet, and 0 if the
    replica has left the training.
    """

  @abc.abstractmethod
  def _start_replicas(self) -> waiting.RaisingThread:
    """Lets the replicas begin. Only the chief calls this.

    Returns:
      A thread of the chief, already started, that runs or watches replicas. If
      it fails, it calls `interrupt` of the update rule, so that `step` wakes.
    """

  def _check_data(self) -> None:
    """Raises `training.DataEnded` if there are no data for another update."""

  def _next_updates(self, max_updates: int) -> list[results.Update]:
    """Makes the next updates or waits for them, and returns their results.

    If `interrupt` wakes it, it checks whether the training has to stop, and
    goes on if not. `step` documents the errors.

    Args:
      max_updates: The largest number of updates.

    Returns:
      At least one update, in the order of the global steps.
    """
    while True:
      try:
        made = self.rule.apply_updates(max_updates)
        break
      except results.Interrupted:
        self._thread.raise_error()
        self._heartbeats.raise_if_ended()
        self._check_data()
        self._let_servers_leave()
        if self._watchdog is not None:
          self._watchdog.raise_error()
          self._watchdog.raise_if_expired()
        if lost := self._unreachable():
          raise _UnreachableError(f"{lost} cannot be reached") from None
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
