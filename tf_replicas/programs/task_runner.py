"""Runs one task of a training in this process.

A task either serves (`serve`: a parameter server or an in-graph worker) or
trains (`train`: the chief or another worker). A *driver* is the object that
runs this task's part of a training. A *contribution* is what a replica sends
for one update, such as a gradient.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tf_replicas import cluster
from tf_replicas.drivers import base as driver_base
from tf_replicas.drivers import between_graph
from tf_replicas.drivers import in_graph
from tf_replicas.drivers import mirrored
from tf_replicas.drivers import one_machine
from tf_replicas.drivers import server
from tf_replicas.drivers import timeline
from tf_replicas.programs import gpu_check
from tf_replicas.programs import run_options
from tf_replicas.programs import update_options
from tf_replicas.rules import results
from tf_replicas.runtime import devices
from tf_replicas.runtime import processes
from tf_replicas.session import checkpoints
from tf_replicas.session import interrupts
from tf_replicas.session import reports
from tf_replicas.session import training

# What TensorFlow 2.21 raises for unreadable data or a full memory, and not for
# a lost task.
_OWN_FAILURES = (
  tf.errors.DataLossError,
  tf.errors.InvalidArgumentError,
  tf.errors.OutOfRangeError,
  tf.errors.PermissionDeniedError,
  tf.errors.ResourceExhaustedError,
)


def _say(line: str) -> None:
  print(line, flush=True)


def _configure(options: run_options.Options) -> list[str]:
  """Configures the devices and threads that TensorFlow uses in this task.

  Args:
    options: How to run the training.

  Returns:
    The names of this task's GPUs, or of the CPU devices that replace them. Each
    has a tower, which is a copy of the model. Empty if the task has no GPUs.

  Raises:
    cluster.ClusterError: If a GPU that the cluster spec names does not exist.
  """
  task = options.task
  gpus = _gpus(options)
  is_ps = task is not None and task.job == "ps"
  # The check names GPUs that need not exist, but variables need a device.
  is_named_only = options.check_gpu and not (options.emulate_gpus or is_ps)
  num_emulated = 0
  if options.emulate_gpus or (options.check_gpu and is_ps):
    num_emulated = len(gpus)
  if num_emulated and is_ps:
    num_emulated += 1  # Its CPU is in use too: see `devices.gpu_of_task`.
  try:
    devices.configure(() if is_named_only else gpus, num_emulated=num_emulated)
  except ValueError as error:
    raise cluster.ClusterError(str(error)) from None
  if options.log_device_placement:
    tf.debugging.set_log_device_placement(True)
  if options.threads != os.cpu_count():  # TensorFlow's default.
    tf.config.threading.set_intra_op_parallelism_threads(options.threads)
  if len(gpus) < 1:
    return []
  if options.is_mirrored or not options.spec.is_distributed:
    return devices.tower_devices(gpus, emulate=options.emulate_gpus)
  return devices.tower_devices(
    gpus, emulate=options.emulate_gpus, job=task.job, task=task.index
  )


def _gpus(options: run_options.Options) -> tuple[int, ...]:
  """Returns the numbers of the GPUs that this task uses.

  In a cluster, these are the GPUs that the spec gives to the task; none if it
  gives none. Without a cluster, these are the GPUs that the spec names. If it
  names none, or only GPU 0, this is GPU 0 if the machine has a GPU, and none
  otherwise.

  Args:
    options: How to run the training.
  """
  spec = options.spec
  gpus = spec.gpus(options.task or spec.chief)
  if spec.is_distributed or options.emulate_gpus or options.check_gpu:
    return gpus or ()
  if gpus not in (None, (0,)):
    return gpus
  return (0,) if devices.find_gpus() else ()


def serve(options: run_options.Options) -> int:
  """Serves as a parameter server or an in-graph worker until training ends.

  Args:
    options: How to run the training. `options.task` is the task of this
      process.

  Returns:
    An exit status: 0 if training ended without an error, otherwise 1.
  """
  _configure(options)
  return server.serve_training(
    options.spec,
    options.task,
    replication=options.replication,
    start_timeout_secs=options.start_timeout_secs,
    timeline_dir=_timeline_dir(options),
    log=_say,
  )


def train(
  options: run_options.Options, workload: run_options.Workload
) -> run_options.Outcome:
  """Trains in this process, alone or as the chief or a worker of a cluster.

  Args:
    options: How to run the training. In a cluster, `options.task` is the task
      of this process.
    workload: What to train.

  Returns:
    The global step at the end and, in the chief, the loss of the last update.

  Raises:
    cluster.ClusterError: If a GPU of the spec does not exist, or if the options
      do not say to train in this process.
    checkpoints.CheckpointError: If the checkpoint in the train directory is one
      of another model.
    FloatingPointError: If a gradient or a loss is not finite.
    KeyboardInterrupt: If interrupted. A checkpoint is saved first.
    RuntimeError: If TensorFlow fails; in a worker other than the chief, also if
      training ended with an error.
    TimeoutError: If another task does not start in time, or if an update waited
      longer than the update rule allows.
  """
  if options.dry_run or options.launches:
    raise cluster.ClusterError(
      "to train in this process, `dry_run` must be False, and `task` must say"
      " which task of a cluster this process is. Received:"
      f" dry_run={options.dry_run}, task={options.task}."
    )
  tower_devices = _configure(options)
  one_line = functools.partial(_one_line_errors, options)
  with one_line(), _driver(options, workload, tower_devices) as driver:
    with one_line():  # The driver sends the line to all tasks.
      if driver.is_chief:
        with interrupts.sigterm_raises(), _advising(workload):
          if options.check_gpu:
            workload = dataclasses.replace(workload, max_steps=1)
          _say_what(driver, options, workload)
          return driver.recovering(
            functools.partial(_drive, driver, options, workload)
          )
      return run_options.Outcome(driver.run_replica(), None)


@contextlib.contextmanager
def _one_line_errors(options: run_options.Options) -> Iterator[None]:
  """Makes a context that turns a `tf.errors.OpError` into a `RuntimeError`.

  The message of the `RuntimeError` is one line.

  Args:
    options: How to run the training.
  """
  try:
    yield
  except tf.errors.OpError as error:
    raise RuntimeError(_one_line(error, options)) from error


@contextlib.contextmanager
def _advising(workload: run_options.Workload) -> Iterator[None]:
  """Makes a context that adds advice to the error of a training that diverges.

  Such an error is a FloatingPointError: a loss or a gradient is not finite. The
  advice is `workload.divergence_advice`, such as a lower learning rate.

  Args:
    workload: What is trained.
  """
  try:
    yield
  except FloatingPointError as error:
    if workload.divergence_advice:
      error.args = (f"{error}; {workload.divergence_advice}",)
    raise


def _one_line(error: tf.errors.OpError, options: run_options.Options) -> str:
  """Returns a line about an error of TensorFlow.

  In a cluster, the line names this task, and says whether this task failed or
  another task could not be reached.
  """
  where = f" in {options.task}" if options.spec.is_distributed else ""
  what = f"TensorFlow failed{where}"
  # A restarted task that lacks a resource raises `NotFoundError`, as does a
  # missing file.
  is_own = isinstance(error, _OWN_FAILURES) or "No such file" in error.message
  if where and not is_own:
    what = f"{options.task} lost touch with the cluster"
  return processes.shortened(f"{what}: {error.message}")


def _driver(
  options: run_options.Options,
  workload: run_options.Workload,
  tower_devices: list[str],
) -> driver_base.Driver:
  """Builds the driver that the options ask for.

  Args:
    options: How to run the training.
    workload: What to train.
    tower_devices: The result of `_configure`.
  """
  if options.is_mirrored:
    return mirrored.Mirrored(
      functools.partial(workload.replica_fn, []),
      lambda num_replicas: workload.optimizer_fn(
        update_options.rule_fn(options.update, num_replicas)
      ),
      tower_devices,
      spec=options.spec,
      task=options.task,
      start_timeout_secs=options.start_timeout_secs,
      log=_say,
    )
  optimizer_fn = functools.partial(
    workload.optimizer_fn,
    update_options.rule_fn(options.update, len(options.replicas)),
  )
  driver_class = between_graph.BetweenGraph
  if options.is_in_graph:
    driver_class = in_graph.InGraph
    # The towers are those of the workers; the driver adds job and task.
    gpus = options.spec.gpus(options.replicas[0])
    tower_devices = []
    if gpus:
      tower_devices = devices.tower_devices(gpus, emulate=options.emulate_gpus)
  replica_fn = functools.partial(workload.replica_fn, tower_devices)
  if not options.spec.is_distributed:
    where = one_machine.CPU
    if options.spec.variables.on == "gpu":
      where = tower_devices[0]
    return one_machine.OneMachine(
      replica_fn, optimizer_fn, device_of_variables=where
    )
  return driver_class(
    options.spec,
    options.task,
    replica_fn,
    optimizer_fn,
    start_timeout_secs=options.start_timeout_secs,
    lost_after_secs=options.lost_after_secs,
    timeline_dir=_timeline_dir(options),
    recovery_timeout_secs=options.recovery_timeout_secs,
    log=_say,
  )


def _timeline_dir(options: run_options.Options) -> str | None:
  """Returns the directory of this task's timeline.

  A timeline is a file that records what a replica does when. Returns None if
  the options ask for none.
  """
  if not options.timeline:
    return None
  return timeline.directory_of(options.train_dir)


def _say_what(
  driver: driver_base.Driver,
  options: run_options.Options,
  workload: run_options.Workload,
) -> None:
  """Prints a description of the training, and the device of each variable."""
  _say(driver.store.table())
  layers = driver.replica.layers
  if layers is not None and layers.num_devices > 1:
    _say(layers.table(driver.replica.devices))
  _say(run_options.describe(options, workload))


def _drive(
  driver: driver_base.Driver,
  options: run_options.Options,
  workload: run_options.Workload,
) -> run_options.Outcome:
  """Trains as the chief.

  It restores the newest checkpoint, or initializes the variables if there is
  none. Then it makes updates until the last step, and saves checkpoints.

  Args:
    driver: The driver of the chief.
    options: How to run the training.
    workload: What to train.

  Returns:
    The global step at the end, and the loss of the last update (None if no
    update was left to make).
  """
  max_steps = _max_steps(driver.store, options, workload)
  driver.stop_at(max_steps)
  session = training.Session(
    options.train_dir,
    state=driver.store,
    max_steps=max_steps,
    log_every_steps=options.log_every_steps,
    summary_every_steps=options.summary_every_steps,
    checkpoint_every_steps=options.checkpoint_every_steps,
    checkpoint_every_secs=options.checkpoint_every_secs,
    keep_checkpoints=options.keep_checkpoints,
    is_optional=driver_base.is_optional,
  )
  driver.on_leave = session.save
  step = session.restore_or_initialize()
  if workload.initialize is not None:
    if step == 0:
      workload.initialize(driver.store)
    else:
      _say(f"resuming at step {step}; initial values are ignored")
  if step < max_steps:  # Otherwise the record of the finished run stays.
    _check_rate(driver.store, options, workload, max_steps - step)
    workload.on_start()
  steps = _Steps(driver, workload, options, max_steps)
  step = session.run(
    steps,
    report=lambda: [
      *report(driver.counts(), driver.replica_names),
      *map(str, driver.recoveries()),
    ],
    wake=driver.interrupt,
  )
  if options.check_gpu:
    _say(gpu_check.report(options))
  return run_options.Outcome(step, steps.loss)


def _check_rate(
  store: driver_base.TrainedState,
  options: run_options.Options,
  workload: run_options.Workload,
  left: int,
) -> None:
  """Raises CheckpointError if a resumed training has the learning rate 0.

  This happens if the learning-rate schedule is for a shorter training.

  Args:
    store: Holds the number of examples seen so far.
    options: How to run the training.
    workload: What to train; it has the schedule.
    left: The number of updates left to make, for the error message.
  """
  seen = int(store.examples_seen.read_value())
  rate_fn = workload.learning_rate_fn
  # A new training may begin with 0, to warm up.
  if seen and rate_fn is not None and not rate_fn(seen):
    raise checkpoints.CheckpointError(
      f"{options.train_dir}: the schedule of the learning rate must not end"
      f" before the training. Received: a rate of 0 after {seen} examples, with"
      f" {left} updates left to make."
    )


def _max_steps(
  store: driver_base.TrainedState,
  options: run_options.Options,
  workload: run_options.Workload,
) -> int:
  """Computes the global step at which training stops.

  The length of the training may be given as a number of examples. Then the
  result depends on the global step and the number of examples so far. They come
  from `store`, or from the newest checkpoint if its global step is larger.

  Args:
    store: Holds the variables.
    options: How to run the training.
    workload: What to train, and for how long.
  """
  step, seen = store.counts()
  if workload.max_steps is None:
    saved = checkpoints.read_newest(options.train_dir, checkpoints.read)
    if saved is not None and saved["global_step"] > step:
      step, seen = int(saved["global_step"]), int(saved["examples_seen"])
  return workload.last_step(options, step=step, seen=seen)


class _Steps:
  """The step function of a training, which `Session.run` calls again and again.

  Each call sets the learning rate, makes one or several updates, and returns
  their result. When a summary is due, the result also has the numbers of
  contributions of each replica that were used and refused.

  Attributes:
    loss: The loss of the last update; None before the first.
  """

  def __init__(
    self,
    driver: driver_base.Driver,
    workload: run_options.Workload,
    options: run_options.Options,
    max_steps: int,
  ):
    self.loss: float | None = None
    self._driver = driver
    self._step = int(driver.store.read_global_step())
    self._learning_rate_fn = workload.learning_rate_fn
    self._every = options.summary_every_steps
    self._stops = (
      options.log_every_steps,
      options.summary_every_steps,
      options.checkpoint_every_steps,
    )
    self._max_steps = max_steps
    self._batch = options.effective_batch(workload.batch_size)
    self._has_histograms = options.histograms
    self._summarize = None
    if options.histograms and workload.summary_fn is not None:
      self._summarize = workload.summary_fn()
    self._examples_seen = int(driver.store.examples_seen.read_value())

  def _max_updates(self) -> int:
    """Returns the largest number of updates that the next call may make.

    It must not go beyond the next change of the learning rate, the next line of
    the log, summary or checkpoint, or the end of the training.
    """
    limits = [reports.steps_until_due(self._step, n) for n in self._stops]
    return updates_at_one_rate(
      self._learning_rate_fn,
      self._examples_seen,
      self._batch,
      min(self._max_steps - self._step, *limits),
    )

  def __call__(self) -> training.StepResult:
    if self._learning_rate_fn is not None:
      rate = self._learning_rate_fn(self._examples_seen)
      self._driver.set_learning_rate(rate)
    result = self._driver.step(self._max_updates())
    self.loss = result.loss
    self._examples_seen += result.num_examples
    previous, self._step = self._step, result.global_step
    if not reports.is_due(previous, self._step, self._every):
      return result
    return self._with_counts(result)

  def _with_counts(self, result: training.StepResult) -> training.StepResult:
    """Adds scalars, histograms and images for TensorBoard to a step's result.

    They are the numbers of contributions of each replica that were used and
    refused, and the staleness of these contributions. If the options ask for
    histograms, there are also histograms of the variables, and what the
    `summary_fn` of the workload returns.
    """
    scalars, histograms = dict(result.scalars), {}
    counts = self._driver.counts()
    for name, count in zip(self._driver.replica_names, counts, strict=True):
      prefix = f"contributions/{name.replace(' ', '_')}"
      scalars[f"{prefix}/applied"] = count.applied
      scalars[f"{prefix}/surplus"] = count.surplus
      scalars[f"{prefix}/straggler_wait_secs"] = count.straggler_wait_secs
      if count.missed:
        scalars[f"{prefix}/missed"] = count.missed
      for k, late in enumerate(count.late, start=1):
        if late:
          scalars[f"{prefix}/late_by_{k}"] = late
      if count.staleness:
        histograms[f"{prefix}/staleness"] = _spread_out(count.staleness)
    if not self._has_histograms:
      return result._replace(scalars=scalars, histograms=histograms)
    values = {
      name: np.asarray(value)
      for name, value in self._driver.store.state().items()
      if name.startswith("variables/")
    }
    histograms |= values
    images = {}
    if self._summarize is not None:
      more = self._summarize(
        {name.partition("/")[2]: value for name, value in values.items()}
      )
      scalars |= more.scalars
      histograms |= more.histograms
      images = more.images
    return result._replace(
      scalars=scalars, histograms=histograms, images=images
    )


def updates_at_one_rate(
  learning_rate_fn: Callable[[int], float] | None,
  seen: int,
  batch: int,
  limit: int,
) -> int:
  """Returns the number of updates until the learning rate changes.

  Args:
    learning_rate_fn: Maps a number of examples seen to a learning rate. None:
      the rate never changes.
    seen: The number of examples seen so far.
    batch: The number of examples in one update.
    limit: The largest number to return.

  Returns:
    The number of the next updates that all have the same learning rate: at
    least 1 and at most `limit`.
  """
  if learning_rate_fn is None:
    return limit
  rate = learning_rate_fn(seen)
  rates = (learning_rate_fn(seen + k * batch) for k in range(1, limit))
  return next((k for k, r in enumerate(rates, 1) if r != rate), limit)


def _spread_out(counts: Sequence[int], limit: int = 1000) -> np.ndarray:
  """Returns an array in which the number k occurs `counts[k]` times.

  TensorBoard makes a histogram of such an array. If the array would have more
  than about `limit` elements, all counts are scaled down.

  Args:
    counts: How often each number from 0 on occurs.
    limit: The approximate largest number of elements.
  """
  counts = np.asarray(counts)
  share = min(1.0, limit / counts.sum())
  return np.repeat(np.arange(len(counts)), np.ceil(counts * share).astype(int))


def report(counts: Sequence[results.Counts], names: Sequence[str]) -> list[str]:
  """Describes what happened to the contributions of every replica.

  Args:
    counts: One entry per replica: the numbers of its contributions that were
      used or refused.
    names: The names of the replicas, in the same order.

  Returns:
    One line per replica. It has the numbers of its contributions that were
    applied and refused, and the staleness of those that were applied: the
    number of updates between reading the variables and applying the gradients.
  """
  lines = []
  for name, count in zip(names, counts, strict=True):
    late = ", ".join(
      f"{n} late by {k}" for k, n in enumerate(count.late, start=1) if n
    )
    line = (
      f"{name}: {count.applied} contributions applied, {count.refused} refused"
      f" ({count.surplus} surplus{', ' + late if late else ''})"
    )
    if count.staleness:
      mean, percentile_95, largest = results.summary(count.staleness)
      line += (
        f"; staleness {mean:.2f} on average, 95% at most {percentile_95},"
        f" all at most {largest}"
      )
    if count.missed:
      line += f"; {count.missed} updates made without it"
    if count.straggler_wait_secs:
      line += f"; updates waited {count.straggler_wait_secs:.1f} s for it alone"
    lines.append(line)
  return lines
