"""Trains a `Replica`, with any model and loss, on a cluster: `run` and `join`.

Both functions find out which task of the cluster this process is. `join` gives
the chief a driver, the object that makes updates, for a loop of the user's own.
`run` contains the loop: it makes all updates, logs and writes checkpoints.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple
from typing import NoReturn

import keras
import numpy as np

from tf_replicas import cluster as cluster_module
from tf_replicas.drivers import base as driver_base
from tf_replicas.fitting import arguments
from tf_replicas.fitting import roles
from tf_replicas.programs import update_options
from tf_replicas.replica import model_replica
from tf_replicas.rules import base as rule_base
from tf_replicas.session import interrupts
from tf_replicas.session import reports
from tf_replicas.session import training
from tf_replicas.store import moving_averages


class Trained(NamedTuple):
  """The result of `run`, in the chief.

  Attributes:
    global_step: The number of updates made, including those of earlier runs.
    loss: The loss of the last update; NaN if no update was left to make.
    metrics: The means of the replica's metrics in the last update, by name.
    values: The values of the variables by path. `load_into_keras` and
      `load_into_module` load them into a model.
    averages: The same as `values`, but with the moving average of each variable
      that has one, in place of its value. Empty if `run` was called without
      `variable_averages`.
    row_updates: Maps each parameter server, such as "ps 0", to the number of
      rows of tables that updates changed there. Empty without tables.
  """

  global_step: int
  loss: float
  metrics: dict[str, float]
  values: dict[str, np.ndarray]
  averages: dict[str, np.ndarray]
  row_updates: dict[str, int]


@contextlib.contextmanager
def join(
  replica_fn: Callable[[], model_replica.Replica],
  optimizer_fn: Callable[[], rule_base.Optimizer],
  *,
  rule: update_options.UpdateSettings | None = None,
  variable_averages: moving_averages.MovingAverages | None = None,
  clip_replica_norm: float | None = None,
  clip_mean_norm: float | None = None,
  replication: str = "between_graph",
  cluster: cluster_module.ClusterSpec | str | None = None,
  devices: Sequence[str] | None = None,
  start_timeout_secs: float = 120.0,
  recovery_timeout_secs: float = 0.0,
  log: Callable[[str], None] = print,
) -> Iterator[driver_base.Driver]:
  """Returns a context that gives the chief a driver, which makes updates.

  The role of this process comes from environment variables (see
  `cluster.environment.role`). Without a role, this process trains alone, as the
  chief. Other tasks enter the context too, but do not get into its block: a
  parameter server serves, and a worker computes gradients, until the chief's
  process ends, and then the process exits. So the block, and what follows it,
  run in the chief only. The end of the block ends the training. In the block,
  SIGTERM raises KeyboardInterrupt, unless the program handles SIGTERM itself.
  The chief may begin another training afterwards, in which the other tasks take
  part again.

  Args:
    replica_fn: Builds the replica, in the same way in all tasks. It is called
      once per task, after this process has joined the cluster.
    optimizer_fn: Makes the optimizer: one of Keras 3, `tf_keras` or Sonnet, or
      any object with a method `apply(gradients, variables)` or
      `apply_gradients(pairs)`.
    rule: The update rule, made by `Sync`, `Async` or `Periodic`. None: that of
      `Sync()`.
    variable_averages: The moving averages to keep of the variables. None: no
      averages.
    clip_replica_norm: The largest global norm of each replica's gradients.
      Larger gradients are scaled down to this norm. None: they are not clipped.
    clip_mean_norm: The same for the mean gradients of an update. Rules made by
      `Periodic` do not have it.
    replication: "between_graph": every worker runs the script and trains;
      "in_graph": the chief, a separate task, drives all workers; "mirrored":
      every device has a copy of the variables, and gradients are all-reduced.
    cluster: A cluster spec, or the path of its file. None: the cluster that the
      environment describes. The task of this process comes from the environment
      in both cases.
    devices: The devices of this process that compute. Each has a copy of the
      model. None: the GPUs that the cluster spec gives to this task.
    start_timeout_secs: Seconds to wait for the other tasks to start.
    recovery_timeout_secs: Seconds to wait for the restart of a parameter server
      that was lost. If it is not 0, the block must make its updates in a
      function that `driver.recovering` calls. 0: the loss ends training.
    log: Receives each line of the log of a serving task (a parameter server or
      an in-graph worker), and in the chief a line about the replicas.

  Yields:
    The driver, in the chief.

  Raises:
    cluster.ClusterError: If cluster, task and rule do not fit together.
    TypeError, ValueError: If an argument or the replica is not supported. The
      message says what is expected.
    RuntimeError: If an earlier training of this process failed, if another task
      has ended, or if it has other versions of TensorFlow, Keras or this
      library.
    TimeoutError: If another task does not start in time.
  """
  arguments.check(
    start_timeout_secs=start_timeout_secs,
    recovery_timeout_secs=recovery_timeout_secs,
    log=log,
  )
  rule = _clipping(
    roles.check_rule(rule),
    clip_replica_norm=clip_replica_norm,
    clip_mean_norm=clip_mean_norm,
  )
  roles.check_replication(replication)
  arguments.check_builder(
    "replica_fn", replica_fn, "builds the replica", keras.Model
  )
  arguments.check_builder(
    "optimizer_fn",
    optimizer_fn,
    "makes the optimizer, such as `lambda: keras.optimizers.Adam()`",
    keras.optimizers.Optimizer,
  )
  part = roles.take(
    replication=replication,
    cluster=cluster,
    devices=devices,
    start_timeout_secs=start_timeout_secs,
    recovery_timeout_secs=recovery_timeout_secs,
    log=log,
    caller="run",
  )
  update_options.check(rule, part.num_replicas)
  part.check_joining(rule)
  new_rule = update_options.rule_fn(rule, part.num_replicas)
  common = {}
  if variable_averages is not None:
    common["variable_averages"] = variable_averages
  sent = {
    "replica_fn": replica_fn,
    "optimizer_fn": optimizer_fn,
    "rule": rule,
    "replication": replication,
    "devices": devices,
    "start_timeout_secs": start_timeout_secs,
    "recovery_timeout_secs": recovery_timeout_secs,
  }
  part.call_workers(_contribute, {**sent, **common})
  driver = part.driver(
    functools.partial(_replica, replica_fn, part),
    lambda: new_rule(optimizer_fn(), **common),
  )
  if not driver.is_chief:
    part.contribute(driver)
  with interrupts.sigterm_raises(), driver:
    if part.is_replicated:
      log(part.describe(rule))
    yield driver
  part.end()


def _clipping(
  rule: update_options.UpdateSettings, **norms: float | None
) -> update_options.UpdateSettings:
  """Returns the rule with the arguments of `join` that limit norms.

  Args:
    rule: The update rule.
    **norms: `clip_replica_norm` and `clip_mean_norm`, as `join` gets them.

  Raises:
    ValueError: If the rule has such a limit already, cannot have it, or the
      limit is not positive.
  """
  changes = {}
  for name, norm in norms.items():
    if norm is None:
      continue
    setting = "clip_norm" if name == "clip_mean_norm" else name
    if name == "clip_mean_norm" and rule.is_periodic:
      raise ValueError(
        "`clip_mean_norm` must be None with a rule of `Periodic`: replicas clip"
        f" the gradients of their own steps. Received: {norm}."
      )
    if (other := getattr(rule, setting)) is not None:
      raise ValueError(
        f"`{name}` must be None, as `rule` has {setting}={other}. Received:"
        f" {norm}."
      )
    changes[setting] = norm
  return dataclasses.replace(rule, **changes)


def _contribute(**given) -> NoReturn:
  """Takes part in the second or a later training of the chief.

  A worker calls it when the chief calls `join` again. It never returns: at the
  end of the training, `Part.contribute` raises an exception, with which the
  worker goes back to wait for the next training.

  Args:
    **given: The arguments of the chief's call of `join`.
  """
  with join(**given):
    raise AssertionError("a worker trains inside `join`")


def run(
  replica_fn: Callable[[], model_replica.Replica],
  optimizer_fn: Callable[[], rule_base.Optimizer],
  *,
  max_steps: int,
  train_dir: str | os.PathLike[str] | None = None,
  log_every_steps: int | None = 10,
  summary_every_steps: int | None = 100,
  checkpoint_every_secs: float | None = 600.0,
  table_writer: str = "chief",
  recovery_timeout_secs: float = 600.0,
  **settings: Any,
) -> Trained:
  """Trains a replica on a cluster, or in this process alone.

  The chief logs, and writes checkpoints and summaries for TensorBoard. The call
  returns in the chief only. A parameter server serves, and another worker
  computes gradients, inside this call until the chief's process ends; then the
  process exits. The chief may call `run` again, and the other tasks take part
  again.

  Args:
    replica_fn: Builds the replica, in the same way in all tasks.
    optimizer_fn: Makes the optimizer, as `join` documents it.
    max_steps: The global step at which training ends: the number of updates,
      including those of earlier runs with the same `train_dir`.
    train_dir: The directory for checkpoints and summaries. If it has a
      checkpoint, training resumes from it. None: nothing is written.
    log_every_steps: The number of updates between two lines of the log. None:
      no lines.
    summary_every_steps: The number of updates between two summaries. None: no
      summaries.
    checkpoint_every_secs: Seconds between two checkpoints. One is also written
      at the end. None: only the one at the end.
    table_writer: Who writes the rows of tables to checkpoints: "chief" or "ps",
      as `Session` documents it.
    recovery_timeout_secs: Seconds to wait for the restart of a parameter server
      that was lost. Training then resumes from the newest checkpoint of
      `train_dir`, or from the beginning if there is none. 0: the loss ends
      training.
    **settings: Other keyword arguments of `join`, such as `rule`.

  Returns:
    The trained values, the loss and the metrics.

  Raises:
    TypeError, ValueError: If an argument or the replica is not supported.
    FloatingPointError: If a gradient or a loss is not finite.
    KeyboardInterrupt: If interrupted. A checkpoint is written first.
    RuntimeError: If another task ended the training, or in the cases that
      `join` lists.
    TimeoutError: If another task does not start in time, or a lost parameter
      server is not restarted in time.
    checkpoints.CheckpointError: If the checkpoint in `train_dir` is one of
      another model.
  """
  settings["recovery_timeout_secs"] = recovery_timeout_secs
  arguments.check(table_writer=table_writer)
  with join(replica_fn, optimizer_fn, **settings) as driver:
    arguments.make_directory(train_dir)
    roles.check_tables_are_saved(driver, train_dir)

    def train() -> Trained:
      driver.stop_at(max_steps)
      session = training.Session(
        train_dir,
        state=driver.store,
        max_steps=max_steps,
        log_every_steps=log_every_steps,
        summary_every_steps=summary_every_steps,
        checkpoint_every_secs=checkpoint_every_secs,
        table_writer=table_writer,
        is_optional=driver_base.is_optional,
      )
      driver.on_leave = session.save
      steps = _Steps(
        driver,
        session.restore_or_initialize(),
        [max_steps, log_every_steps, summary_every_steps],
      )
      step = session.run(
        steps,
        report=lambda: map(str, driver.recoveries()),
        wake=driver.interrupt,
      )
      averages = {}
      if settings.get("variable_averages") is not None:
        averages = driver.values(averaged=True)
      rows = driver.row_updates()
      if log_every_steps is not None and sum(rows.values()):
        settings.get("log", print)(roles.describe_load(rows))
      return Trained(
        step, steps.loss, steps.metrics, driver.values(), averages, rows
      )

    return driver.recovering(train)


class _Steps:
  """The step function of `run`, which makes one or several updates per call.

  A call makes no more updates than are left until the next line of the log, the
  next summary or the end of the training.

  Attributes:
    loss: The loss of the last update; NaN before the first.
    metrics: The metrics of the last update by name.
  """

  def __init__(
    self, driver: driver_base.Driver, step: int, stops: Sequence[int | None]
  ):
    self.loss = float("nan")
    self.metrics: dict[str, float] = {}
    self._driver = driver
    self._step = step
    self._stops = stops

  def __call__(self) -> training.StepResult:
    limits = [reports.steps_until_due(self._step, n) for n in self._stops]
    result = self._driver.step(int(min(limits)))
    self._step, self.loss = result.global_step, result.loss
    self.metrics = dict(result.metrics)
    return result


def _replica(
  replica_fn: Callable[[], model_replica.Replica], part: roles.Part
) -> model_replica.Replica:
  """Builds the replica, and gives it the devices of this task if it has none.

  Args:
    replica_fn: The user's function, which builds the replica.
    part: The role of this process, with its devices.

  Raises:
    TypeError: If the result of `replica_fn` is not a replica.
    cluster.ClusterError: If the cluster spec places layers on devices, and the
      replica does not.
  """
  replica = replica_fn()
  if not isinstance(replica, model_replica.Replica):
    raise TypeError(
      "`replica_fn` must return a `tf_replicas.Replica`, such as one of"
      " `keras_replica` or `module_replica`. Received:"
      f" {replica!r:.200}."
    )
  if part.role is not None and part.role[0].layers and replica.layers is None:
    spec = part.role[0]
    raise cluster_module.ClusterError(
      f"{spec.where}`layers` must be absent unless the replica places its"
      " layers: give `keras_replica` the result of `place_layers`. Received:"
      f" {dict(spec.layers)}."
    )
  if part.devices and not replica.devices:
    replica = dataclasses.replace(replica, devices=part.devices)
  return replica
