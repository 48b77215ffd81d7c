"""Finds out which part this process has in a training.

Environment variables say which task of a cluster the process is. `fit` and
`join` begin with `take`. A *serving task* (a parameter server or an in-graph
worker) serves inside `take`, which then ends its process. In the other tasks,
`take` returns a `Part`, which makes their *driver*, the object that runs this
task's part of a training.

The script of the chief may train several times on one cluster. These trainings
are a *series*. Before a second training, a worker waits until the chief calls
`fit` or `run` again, and then makes the same call.
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NoReturn

import tensorflow as tf

from tf_replicas import cluster as cluster_module
from tf_replicas.cluster import environment
from tf_replicas.drivers import base as driver_base
from tf_replicas.drivers import between_graph
from tf_replicas.drivers import connection
from tf_replicas.drivers import in_graph
from tf_replicas.drivers import mirrored
from tf_replicas.drivers import one_machine
from tf_replicas.drivers import server
from tf_replicas.fitting import arguments
from tf_replicas.fitting import series as series_module
from tf_replicas.programs import run_options
from tf_replicas.programs import update_options
from tf_replicas.replica import model_replica
from tf_replicas.rules import base as rule_base
from tf_replicas.runtime import devices as runtime_devices
from tf_replicas.runtime import processes
from tf_replicas.store import tables

MIRRORED = "mirrored"
_DRIVERS = {
  "between_graph": between_graph.BetweenGraph,
  "in_graph": in_graph.InGraph,
  MIRRORED: mirrored.Mirrored,
}
_Role = tuple[cluster_module.ClusterSpec, cluster_module.Task]
# The series of trainings that this process has joined, if any.
_series: series_module.Series | None = None
# Whether this process has trained with mirrored variables on a cluster.
_was_mirrored = False


def Sync(**settings: Any) -> update_options.UpdateSettings:
  """Makes the rule of synchronous updates.

  An update applies the mean of `replicas_to_aggregate` gradients, by default
  one of every replica. If this number is smaller than the number of replicas,
  the update applies the gradients that arrive first.

  Args:
    **settings: Fields of `UpdateSettings` that are for synchronous updates,
      such as `replicas_to_aggregate` and `wire_dtype`.

  Returns:
    The argument `rule` of `fit`, `run` and `join`.
  """
  return update_options.UpdateSettings(rules=("sync",), **settings)


def Async(*rules: str, **settings: Any) -> update_options.UpdateSettings:
  """Makes a rule of asynchronous updates.

  Args:
    *rules: Names of asynchronous rules, such as "bounded_staleness"; see
      `UpdateSettings.rules`. Without names, every gradient is applied when it
      arrives.
    **settings: Fields of `UpdateSettings` that are for these rules, such as
      `max_staleness`.

  Returns:
    The argument `rule` of `fit`, `run` and `join`.
  """
  return update_options.UpdateSettings(rules=rules or ("async",), **settings)


def Periodic(rule: str, **settings: Any) -> update_options.UpdateSettings:
  """Makes a rule by which each replica trains its own copy of the variables.

  After every `period` batches, a replica sends the result of these batches to
  the parameter servers, and reads the variables there.

  Args:
    rule: "model_average", "elastic_average" or "accumulated_gradients".
    **settings: Fields of `UpdateSettings` that are for this rule, such as
      `period`.

  Returns:
    The argument `rule` of `run` and `join`. `fit` does not take it.
  """
  return update_options.UpdateSettings(rules=(rule,), **settings)


def check_rule(rule: object) -> update_options.UpdateSettings:
  """Checks the argument `rule` of `fit` or `join`.

  Returns:
    `rule`; `Sync()` if it is None.

  Raises:
    TypeError: If `rule` is not an update rule.
  """
  if rule is None:
    return Sync()
  if not isinstance(rule, update_options.UpdateSettings):
    raise TypeError(
      "`rule` must be made by `tf_replicas.Sync`, `tf_replicas.Async` or, for"
      f" `run` and `join`, `tf_replicas.Periodic`. Received: {rule!r}."
    )
  return rule


@dataclasses.dataclass(frozen=True)
class Part:
  """The part of a process in a training: which task it is, on which devices.

  Serving tasks have none.

  Attributes:
    role: The cluster and the task of this process; None without a cluster.
    replication: "between_graph", "in_graph" or "mirrored".
    towers: The devices that have a copy of the model: devices of this process,
      or with in-graph replication, devices of each worker. Empty: one copy on
      the default device.
    start_timeout_secs: Seconds to wait for the other tasks to start.
    recovery_timeout_secs: Seconds to wait for the restart of a parameter server
      that was lost; 0: the loss ends training.
    caller: The name of the function that the user called, such as "fit".
  """

  role: _Role | None
  replication: str
  towers: Sequence[str]
  start_timeout_secs: float
  recovery_timeout_secs: float = 0.0
  caller: str = "fit"

  @property
  def num_replicas(self) -> int:
    """The number of replicas in the whole cluster."""
    count = 1 if self.role is None else len(self._replicas(self.role[0]))
    if self.replication == MIRRORED:
      count *= max(1, len(self.towers))
    return count

  @property
  def devices(self) -> Sequence[str]:
    """The devices of one replica, each with a copy of the model.

    Empty: one copy on the default device. It is empty with mirrored variables,
    where each device is a replica.
    """
    return () if self.replication == MIRRORED else self.towers

  @property
  def is_replicated(self) -> bool:
    """Whether there is a cluster, or several devices compute."""
    return self.role is not None or len(self.towers) > 1

  def describe(
    self, rule: update_options.UpdateSettings, batch_size: int | None = None
  ) -> str:
    """Returns a line for the log, about the replicas and how updates are made.

    Args:
      rule: The settings of the update rule.
      batch_size: The number of examples that one copy of the model computes at
        a time. None: the line does not say it.
    """
    return run_options.describe_updates(
      self.replication,
      rule,
      self.num_replicas,
      num_towers=max(1, len(self.devices)),
      batch_size=batch_size,
    )

  @property
  def connects_late(self) -> bool:
    """Whether no op may run before this process has joined the cluster.

    This is so for mirrored variables on a cluster.
    """
    return self.role is not None and self.replication == MIRRORED

  @property
  def is_first(self) -> bool:
    """Whether this is the first training of this process on a cluster."""
    return _series is None

  @property
  def runs_own_script(self) -> bool:
    """Whether each replica is a process that runs the user's script."""
    is_alone = self.role is None
    return self.replication == "between_graph" or (
      is_alone and self.replication != MIRRORED
    )

  def _replicas(
    self, spec: cluster_module.ClusterSpec
  ) -> Sequence[cluster_module.Task]:
    is_in_graph = self.replication == "in_graph"
    return spec.tasks("worker") if is_in_graph else spec.replicas

  def check_joining(self, rule: update_options.UpdateSettings) -> None:
    """Checks that other workers can join, if the environment says they may.

    Args:
      rule: The update rule.

    Raises:
      cluster.ClusterError: If TensorFlow cannot add workers, or updates need
        some that may never join.
    """
    if self.role is None or not self.role[0].max_workers:
      return
    spec, _ = self.role
    if self.replication != "between_graph":
      raise cluster_module.ClusterError(
        f'`{environment.MAX_WORKERS}` needs `replication="between_graph"`: no'
        f" worker can join otherwise. Received: {spec.max_workers}, and"
        f" {self.replication!r}."
      )
    listed = self.num_replicas - len(spec.joining)
    update_options.check_joining(rule, listed, self.num_replicas)

  def call_workers(
    self, function: Callable[..., object], given: Mapping[str, object]
  ) -> None:
    """Makes the workers call a function, in the chief's second training.

    It is called in every training and task, but acts only in the chief, from
    its second training on: the workers wait to be told about the training. The
    first training needs no message, because all scripts begin it.

    Args:
      function: The function that each worker has to call.
      given: The keyword arguments of `function`, without `cluster`.

    Raises:
      ImportError: If cloudpickle is needed, but not installed.
      TypeError, ValueError: If an argument cannot be sent. The message names
        it.
      RuntimeError: If a task of the cluster has ended.
    """
    if _series is not None and _series.is_idle:
      _series.begin_next(self.caller, function, given)

  def contribute(self, driver: driver_base.Driver) -> NoReturn:
    """Computes gradients, in a worker, until the training ends.

    In the first training, the worker then takes part in all later trainings of
    the chief, and ends the process after the last one.

    Args:
      driver: The driver of this task.

    Raises:
      series.Contributed: At the end of a later training. The exception leads
        back to where the worker waits for the next training.
    """
    with processes.one_line_errors(
      (), (OSError, RuntimeError, tf.errors.OpError)
    ):
      with driver:
        driver.run_replica()
    if _series is not None:
      _series.answer_calls()
    processes.exit_now(0)

  def end(self) -> None:
    """Notes, in the chief, that a training has ended without an error.

    So another training may follow.
    """
    if _series is not None:
      _series.end_training()

  def driver(
    self,
    replica_fn: Callable[[], model_replica.Replica],
    rule_fn: Callable[[], rule_base.UpdateRule],
  ) -> driver_base.Driver:
    """Makes the driver of this process.

    If that fails in a worker other than the chief, the process prints one line,
    and ends.

    Args:
      replica_fn: Builds the replica.
      rule_fn: Builds the update rule.

    Returns:
      The driver for `replication`, or `OneMachine` without a cluster.
    """
    global _was_mirrored
    if self.replication == MIRRORED:
      _was_mirrored |= self.role is not None
      spec, own = self.role or (None, None)
      make = functools.partial(
        mirrored.Mirrored,
        replica_fn,
        lambda _: rule_fn(),
        self.towers,
        spec=spec,
        task=own,
        start_timeout_secs=self.start_timeout_secs,
      )
    elif self.role is None:
      make = functools.partial(one_machine.OneMachine, replica_fn, rule_fn)
    else:
      make = functools.partial(self._in_series, replica_fn, rule_fn)
    if self.role is None or self.role[1] == self.role[0].chief:
      return make()
    with processes.one_line_errors((), (OSError, RuntimeError)):
      return make()

  def _in_series(
    self,
    replica_fn: Callable[[], model_replica.Replica],
    rule_fn: Callable[[], rule_base.UpdateRule],
  ) -> driver_base.Driver:
    """Makes the driver of the present training, with parameter servers.

    In the first training of this process, it also begins the series.

    Args:
      replica_fn: Builds the replica.
      rule_fn: Builds the update rule.
    """
    global _series
    assert self.role is not None
    if _series is None:
      _series = series_module.Series(
        *self.role, self.replication, timeout_secs=self.start_timeout_secs
      )
      _series.start()
    _series.timeout_secs = self.start_timeout_secs
    return _DRIVERS[self.replication](
      *self.role,
      replica_fn,
      rule_fn,
      start_timeout_secs=self.start_timeout_secs,
      timeline_dir=os.environ.get(environment.TIMELINE) or None,
      namespace=_series.namespace,
      joined=_series.beats,
      recovery_timeout_secs=self.recovery_timeout_secs,
    )


def take(
  *,
  replication: str,
  cluster: cluster_module.ClusterSpec | str | None,
  devices: Sequence[str] | None,
  start_timeout_secs: float,
  recovery_timeout_secs: float,
  log: Callable[[str], None],
  caller: str,
) -> Part:
  """Finds out which part this process has in a training.

  In a serving task (a parameter server or an in-graph worker), it does not
  return: it serves until the end of the training, and then ends the process.

  Args:
    replication: "between_graph", "in_graph" or "mirrored".
    cluster: A cluster spec, or the path of its file. None: the cluster that the
      environment describes. The task of this process comes from the environment
      in both cases.
    devices: The devices of this process that compute. None: the GPUs that the
      cluster spec gives to this task.
    start_timeout_secs: Seconds to wait for the other tasks to start.
    recovery_timeout_secs: Seconds to wait for the restart of a parameter server
      that was lost; 0: the loss ends training.
    log: Receives each line of the log of a serving task.
    caller: The name of the calling function, such as "fit", for error messages.

  Returns:
    The part of this process.

  Raises:
    cluster.ClusterError: If cluster, task and replication do not fit together.
    TypeError, ValueError: If `cluster` or `devices` is invalid.
    RuntimeError: If this process has trained before and cannot train again.
  """
  runtime_devices.start_quietly()
  role = _role(cluster)
  arguments.check_devices(devices, is_alone=role is None)
  if role is not None:
    _check_role(*role, replication, caller)
    _check_again(role, replication, caller)
  towers = _towers(role, replication, devices)
  if role is not None and _only_serves(role, replication):
    _serve(*role, replication, start_timeout_secs, log)
  return Part(
    role,
    replication,
    towers,
    start_timeout_secs,
    recovery_timeout_secs,
    caller,
  )


def check_replication(replication: str) -> None:
  """Raises ValueError unless `replication` is the name of a kind."""
  if replication not in tuple(_DRIVERS):  # It may not be hashable.
    raise ValueError(
      f"`replication` must be one of {', '.join(_DRIVERS)}. Received:"
      f" {replication!r}."
    )


def _role(
  cluster: cluster_module.ClusterSpec | str | None,
) -> _Role | None:
  """Finds out the cluster and the task of this process.

  Args:
    cluster: A cluster spec, or the path of its file. None: the cluster that the
      environment variables describe.

  Returns:
    (cluster spec, task). None if this process trains without a cluster.

  Raises:
    cluster.ClusterError: If the cluster is invalid, or if it has several tasks
      and the environment does not say which one this process is.
    TypeError: If `cluster` is of another type.
  """
  role = environment.role(os.environ)
  if cluster is None:
    return role
  spec = cluster
  if not isinstance(spec, cluster_module.ClusterSpec):
    if not isinstance(spec, str | os.PathLike):
      raise TypeError(
        "`cluster` must be a `tf_replicas.ClusterSpec` or the path of one."
        f" Received: {arguments.short(spec)}."
      )
    spec = cluster_module.load(spec)
  if not spec.is_distributed:
    raise cluster_module.ClusterError(
      f"{spec.where}`cluster` must name tasks for `fit` and `run`; in one"
      " process, leave the argument out, and name the devices by `devices`."
      " Received: a spec without tasks."
    )
  if role is None:
    raise cluster_module.ClusterError(
      f"{spec.where}`cluster` has several tasks, and the environment does not"
      " say which this is: start the script with"
      " `python -m tf_replicas.launch` or `srun`, or set TF_CONFIG. Received:"
      " none of them."
    )
  _, task = role
  # A worker that has joined keeps its address in later trainings.
  address = None
  if _series is not None and _series.task == task:
    address = _series.spec.address(task)
  return environment.settle(spec, os.environ).with_joined(task, address), task


def _check_role(
  spec: cluster_module.ClusterSpec,
  task: cluster_module.Task,
  replication: str,
  caller: str,
) -> None:
  if (replication == MIRRORED) != (spec.variables.on == MIRRORED):
    raise cluster_module.ClusterError(
      f'{spec.where}`replication` must be "mirrored" if, and only if, the'
      ' cluster spec has its variables on "mirrored". Received:'
      f" {replication!r}, and variables on {spec.variables.on!r}."
    )
  if replication == "in_graph" and not spec.num_tasks("worker"):
    raise cluster_module.ClusterError(
      f"{spec.where}in-graph replication needs at least one worker. Received:"
      " none."
    )
  if replication != MIRRORED and (
    spec.variables.on != "ps" or not spec.num_tasks("ps")
  ):
    raise cluster_module.ClusterError(
      f"{spec.where}`{caller}` needs variables on parameter servers, with at"
      f" least one `ps` task. Received: variables on {spec.variables.on!r},"
      f" {spec.num_tasks('ps')} `ps` tasks."
    )
  if replication == "in_graph" and not spec.num_tasks("chief"):
    raise cluster_module.ClusterError(
      f"{spec.where}in-graph replication needs a `chief` task, which drives"
      " the workers: add it to the cluster, or start with `tf_replicas.launch"
      " --chief`. Received: none."
    )
  if spec.layers and caller == "fit":
    raise cluster_module.ClusterError(
      f"{spec.where}`layers` must be absent for `fit`, which places no layers;"
      " `tf_replicas.run` trains a replica with `place_layers`. Received:"
      f" {dict(spec.layers)}."
    )
  if task not in spec.tasks():
    raise cluster_module.ClusterError(
      f"{spec.where}`task` must be a task of the cluster. Received: {task}."
    )


def _check_again(role: _Role, replication: str, caller: str) -> None:
  """Checks that this process may train, if it has trained before.

  Raises:
    cluster.ClusterError: If it trained on another cluster, or with another
      replication.
    RuntimeError: If the other tasks have ended because the training before
      failed or had mirrored variables; or if the user's own driver has
      connected this process to a cluster.
  """
  if _was_mirrored:
    raise RuntimeError(
      f"`{caller}` trains once per process on a cluster with mirrored"
      " variables, because the other tasks end when a training ends: start all"
      " tasks again to train again"
    )
  if _series is None:
    if connection.was_used():
      raise RuntimeError(
        f"`{caller}` cannot use the connection of another driver of this"
        " process: start another process"
      )
    return
  spec, task = role
  own = _series.spec.as_dict(), _series.task, _series.replication
  if own != (spec.as_dict(), task, replication):
    raise cluster_module.ClusterError(
      f"{spec.where}`cluster` and `replication` must be those of the first"
      f" training of this process, {_series.replication!r}. Received: another"
      f" cluster or replication, {replication!r}."
    )
  if not _series.may_train:
    raise RuntimeError(
      f"`{caller}` cannot follow a training that has failed or still runs, as"
      " all tasks of the cluster end with that training: start them again"
    )


def _serve(
  spec: cluster_module.ClusterSpec,
  task: cluster_module.Task,
  replication: str,
  start_timeout_secs: float,
  log: Callable[[str], None],
) -> NoReturn:
  """Serves as a parameter server or in-graph worker, and ends the process.

  The exit status is 0 if training ended without an error, otherwise 1.
  """
  status = 1
  with processes.one_line_errors((ValueError,), (OSError, RuntimeError)):
    status = server.serve_training(
      spec,
      task,
      replication=replication,
      start_timeout_secs=start_timeout_secs,
      timeline_dir=os.environ.get(environment.TIMELINE) or None,
      log=log,
    )
  processes.exit_now(status)


def check_tables_are_saved(
  driver: driver_base.Driver, train_dir: str | os.PathLike[str] | None
) -> None:
  """Raises ValueError if the model has tables and `train_dir` is None.

  Tables are variables whose rows exist only on the parameter servers. Only
  checkpoints save them, so they would be lost without `train_dir`. It is no
  error if there are no parameter servers.
  """
  variables = driver.replica.variables
  found = [r.path for r in map(tables.rows_of, variables) if r is not None]
  if found and train_dir is None and driver.replica_names:
    raise ValueError(
      "`train_dir` must be given where the model has tables, whose rows exist"
      " only on the parameter servers and end with the training. Received:"
      f" None, and the table {found[0]!r}."
    )


def describe_load(rows: Mapping[str, int]) -> str:
  """Says in one line which share of the row updates each server made.

  Args:
    rows: Maps each parameter server, such as "ps 0", to the number of rows of
      tables that updates changed there. One of the numbers must not be 0.
  """
  total = sum(rows.values())
  shares = ", ".join(f"{n / total:.1%} on {task}" for task, n in rows.items())
  return f"{total} rows of tables were updated: {shares}"


def _only_serves(role: _Role, replication: str) -> bool:
  return (replication, role[1].job) == ("in_graph", "worker") or (
    role[1].job == "ps"
  )


def _towers(
  role: _Role | None, replication: str, devices: Sequence[str] | None
) -> list[str]:
  """Chooses the GPUs that this process may use, and the devices that compute.

  Args:
    role: The cluster and the task of this process; None without a cluster.
    replication: "between_graph", "in_graph" or "mirrored".
    devices: The argument `devices` of `fit` or `run`.

  Returns:
    The devices that have a copy of the model, as `Part.towers` documents them.

  Raises:
    cluster.ClusterError: If a GPU of the cluster spec does not exist.
  """
  if role is None:
    return list(devices or ())
  spec, task = role
  gpus = spec.gpus(task)
  if gpus is None:
    # Tasks of one machine share a GPU only if the spec gives it to both.
    here = spec.local_tasks(own=task)
    is_alone = not any(t.job != "ps" for t in here if t != task)
    gpus = None if is_alone else ()
  if gpus or runtime_devices.find_gpus():
    try:
      runtime_devices.configure(gpus)
    except ValueError as error:
      raise cluster_module.ClusterError(str(error)) from None
  if devices is not None:
    return list(devices)
  if replication == "in_graph":  # The towers are the workers'.
    gpus = spec.gpus(spec.tasks("worker")[0])
  return runtime_devices.tower_devices(gpus, emulate=False) if gpus else []
