"""The roles of one task: serve, or build and drive the training."""

import contextlib
import functools
import math
from collections.abc import Callable
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tf_replicas import between_graph
from tf_replicas import checkpoints
from tf_replicas import cluster
from tf_replicas import devices
from tf_replicas import in_graph
from tf_replicas import membership
from tf_replicas import mirrored
from tf_replicas import one_machine
from tf_replicas import processes
from tf_replicas import program
from tf_replicas import reports
from tf_replicas import server
from tf_replicas import timeline
from tf_replicas import training
from tf_replicas import update_settings
from tf_replicas import updates

# Names in a checkpoint that a run may lack: the optimizer, the averages or the
# update rule may have changed.
_OPTIONAL = ("slots/", "optimizer/", "averages/", "sums", "async/")

# What data that cannot be read, or a full memory, is reported as; a task that
# is gone is none of these (TensorFlow 2.21).
_OWN_FAILURES = (
  tf.errors.DataLossError,
  tf.errors.InvalidArgumentError,
  tf.errors.OutOfRangeError,
  tf.errors.PermissionDeniedError,
  tf.errors.ResourceExhaustedError,
)


def _say(line: str) -> None:
  print(line, flush=True)


def _configure(options: program.Options) -> list[str]:
  """Chooses this process's devices; the towers' devices on it.

  Raises:
    cluster.ClusterError: If it has not the GPUs that the spec names.
  """
  task = options.task
  gpus = _gpus(options)
  try:
    devices.configure(
      gpus, num_emulated=len(gpus) if options.emulate_gpus else 0
    )
  except ValueError as error:
    raise cluster.ClusterError(str(error)) from None
  tf.config.threading.set_intra_op_parallelism_threads(options.threads)
  if len(gpus) < 1:
    return []
  if options.is_mirrored or not options.spec.is_distributed:
    return devices.tower_devices(gpus, emulate=options.emulate_gpus)
  return devices.tower_devices(
    gpus, emulate=options.emulate_gpus, job=task.job, task=task.index
  )


def _gpus(options: program.Options) -> tuple[int, ...]:
  """The GPUs of this task: those of the spec; else none.

  Tasks of one host never share a GPU unless the spec tells them to. One process
  of its own takes the first GPU, and only if there is one: a spec that names no
  other runs on every machine.
  """
  spec = options.spec
  gpus = spec.gpus(options.task or spec.chief)
  if spec.is_distributed or options.emulate_gpus:
    return gpus or ()
  if gpus not in (None, (0,)):
    return gpus
  return (0,) if tf.config.list_physical_devices("GPU") else ()


def serve(options: program.Options) -> int:
  """Is a PS task, or an in-graph worker, until training ends.

  Returns:
    The exit status: 0 if training ended well.
  """
  _configure(options)
  if options.timeline and options.is_in_graph:
    # What the client has it write goes to a file of this machine.
    timeline.prepare(_timeline_dir(options))
  clients = 1 if options.is_in_graph else len(options.replicas)
  outcome = server.serve(
    options.spec,
    options.task,
    num_clients=clients,
    orphan_timeout_secs=max(
      server.ORPHAN_TIMEOUT_SECS, options.start_timeout_secs
    ),
    log=_say,
  )
  return 0 if outcome == membership.FINISHED else 1


def train(options: program.Options, workload: program.Workload) -> int:
  """Is a client: the chief, or a between-graph worker.

  Returns:
    The exit status.

  Raises:
    FloatingPointError: If a gradient or a loss is not finite.
    RuntimeError: On a worker, if training ended with an error elsewhere.
  """
  tower_devices = _configure(options)
  in_words = functools.partial(_in_words, options)
  with in_words(), _driver(options, workload, tower_devices) as driver:
    with in_words():  # The driver tells them to all tasks.
      if driver.is_chief:
        _drive(driver, options, workload)
      else:
        driver.run_replica()
  return 0


@contextlib.contextmanager
def _in_words(options: program.Options):
  """Makes one line of an error of TensorFlow."""
  try:
    yield
  except tf.errors.OpError as error:
    raise RuntimeError(_words(error, options)) from error


def _words(error: tf.errors.OpError, options: program.Options) -> str:
  """TensorFlow's own are pages long, and name no task."""
  where = f" in {options.task}" if options.spec.is_distributed else ""
  what = f"TensorFlow failed{where}"
  # What a restarted task has not is `NotFoundError` too, as is a missing file.
  is_own = isinstance(error, _OWN_FAILURES) or "No such file" in error.message
  if where and not is_own:
    what = f"{options.task} lost touch with the cluster"
  return processes.shortened(f"{what}: {error.message}")


def _driver(
  options: program.Options,
  workload: program.Workload,
  tower_devices: list[str],
):
  """The driver of this combination; `program.check` has refused others."""
  if options.is_mirrored:
    return mirrored.Mirrored(
      functools.partial(workload.replica_fn, []),
      lambda num_replicas: workload.optimizer_fn(
        update_settings.rule_fn(options.update, num_replicas, num_replicas)
      ),
      tower_devices,
      spec=options.spec,
      task=options.task,
      start_timeout_secs=options.start_timeout_secs,
      log=_say,
    )
  if not options.spec.is_distributed:
    return one_machine.OneMachine(
      functools.partial(workload.replica_fn, tower_devices),
      functools.partial(
        workload.optimizer_fn, update_settings.rule_fn(options.update, 1, 1)
      ),
    )
  if options.is_in_graph:
    # The towers are the workers', whose job the closure's device names.
    first = options.replicas[0]
    gpus = options.spec.gpus(first) or ()
    tower_devices = (
      devices.tower_devices(gpus, emulate=options.emulate_gpus) if gpus else []
    )
  driver_class = (
    in_graph.InGraph if options.is_in_graph else between_graph.BetweenGraph
  )
  return driver_class(
    options.spec,
    options.task,
    functools.partial(workload.replica_fn, tower_devices),
    functools.partial(
      workload.optimizer_fn,
      update_settings.rule_fn(
        options.update,
        options.replicas_to_aggregate or len(options.replicas),
        len(options.replicas),
      ),
    ),
    start_timeout_secs=options.start_timeout_secs,
    lost_after_secs=options.lost_after_secs,
    timeline_dir=_timeline_dir(options),
    log=_say,
  )


def _timeline_dir(options: program.Options) -> str | None:
  """Where this task records what it does when, if it is to."""
  if not options.timeline:
    return None
  return timeline.directory_of(options.train_dir)


def _drive(driver, options: program.Options, workload) -> None:
  """The chief's: the session around the driver's steps."""
  _say(driver.store.table())
  layers = driver.replica.layers
  if layers is not None and layers.num_devices > 1:
    _say(layers.table(driver.replica.devices))
  _say(program.describe(options, workload))
  max_steps = _max_steps(driver.store, options, workload)
  driver.optimizer.stop_at(max_steps)
  session = training.Session(
    options.train_dir,
    state=driver.store,
    max_steps=max_steps,
    log_every_steps=options.log_every_steps,
    summary_every_steps=options.summary_every_steps,
    checkpoint_every_steps=options.checkpoint_every_steps,
    checkpoint_every_secs=options.checkpoint_every_secs,
    keep_checkpoints=options.keep_checkpoints,
    is_optional=lambda name: name.startswith(_OPTIONAL),
  )
  step = session.restore_or_initialize()
  if workload.initialize is not None:
    if step == 0:
      workload.initialize(driver.store)
    else:
      _say(f"goes on from step {step}; values for a new training stay unused")
  if step < max_steps:  # Else what is there stays as it was made.
    _check_rate(driver.store, options, workload, max_steps - step)
    workload.on_start()
  names, wake = [], None
  if options.spec.variables.on == "ps":  # Else no step waits for offers.
    names = [str(replica) for replica in options.replicas]
    wake = driver.optimizer.interrupt
  steps = _Steps(driver, workload, names, options, max_steps)
  session.run(
    steps,
    report=lambda: report(driver.optimizer.counts(), names),
    wake=wake,
  )


def _check_rate(store, options: program.Options, workload, left: int) -> None:
  """Refuses to go on where the rate has come down to nothing."""
  seen = int(store.examples_seen.read_value())
  rate_fn = workload.learning_rate_fn
  # A new training may well begin with nothing.
  if seen and rate_fn is not None and not rate_fn(seen):
    raise checkpoints.CheckpointError(
      f"{options.train_dir}: after {seen} examples the schedule of the learning"
      " rate must not be at its end, 0, as it is for a run of this length."
      f" Received: {left} updates left to make."
    )


def _max_steps(store, options: program.Options, workload) -> int:
  """The step to stop at: where the examples to come make `max_examples`."""
  if options.max_examples is None:
    return options.max_steps
  step = int(store.read_global_step())
  seen = int(store.examples_seen.read_value())
  path = checkpoints.latest(options.train_dir)
  if path:
    saved = checkpoints.read(path)
    if saved["global_step"] > step:
      step, seen = int(saved["global_step"]), int(saved["examples_seen"])
  left = max(0, options.max_examples - seen)
  return step + math.ceil(left / options.effective_batch(workload.batch_size))


class _Steps:
  """The driver's step, with the learning rate set and the counts told."""

  def __init__(
    self,
    driver,
    workload: program.Workload,
    names: list[str],
    options: program.Options,
    max_steps: int,
  ):
    self._driver = driver
    self._step = int(driver.store.read_global_step())
    self._learning_rate_fn = workload.learning_rate_fn
    self._names = names
    self._every = options.summary_every_steps
    self._stops = (
      options.log_every_steps,
      options.summary_every_steps,
      options.checkpoint_every_steps,
    )
    self._max_steps = max_steps
    self._batch = options.effective_batch(workload.batch_size)
    self._has_histograms = options.histograms
    self._examples_seen = int(driver.store.examples_seen.read_value())

  def _most(self) -> int:
    """Updates to make before something is due, or the rate changes."""
    most = self._max_steps - self._step
    for every in self._stops:
      most = min(most, reports.steps_until_due(self._step, every))
    return updates_at_one_rate(
      self._learning_rate_fn, self._examples_seen, self._batch, most
    )

  def __call__(self) -> training.StepResult:
    if self._learning_rate_fn is not None:
      rate = self._learning_rate_fn(self._examples_seen)
      self._driver.optimizer.set_learning_rate(rate)
    if self._names:
      result = self._driver.step(self._most())
    else:  # Nobody else makes these.
      result = self._driver.step()
    self._examples_seen += result.num_examples
    previous, self._step = self._step, result.global_step
    if not reports.is_due(previous, self._step, self._every):
      return result
    scalars, histograms = dict(result.scalars), {}
    counts = self._driver.optimizer.counts()
    for name, count in zip(self._names, counts, strict=True):
      prefix = f"contributions/{name.replace(' ', '_')}"
      scalars[f"{prefix}/applied"] = count.applied
      scalars[f"{prefix}/surplus"] = count.surplus
      scalars[f"{prefix}/held_up_secs"] = count.held_up_secs
      for k, late in enumerate(count.late, start=1):
        if late:
          scalars[f"{prefix}/late_by_{k}"] = late
      if count.staleness:
        histograms[f"{prefix}/staleness"] = _spread_out(count.staleness)
    if self._has_histograms:
      for name, value in self._driver.store.state().items():
        if name.startswith("variables/"):
          histograms[name] = np.asarray(value)
    return result._replace(scalars=scalars, histograms=histograms)


def updates_at_one_rate(
  learning_rate_fn: Callable[[int], float] | None,
  seen: int,
  batch: int,
  most: int,
) -> int:
  """How many updates in a row have the learning rate of the next one.

  Args:
    learning_rate_fn: Maps the examples seen to a rate; None: it never changes.
    seen: Examples seen so far.
    batch: Examples of one update.
    most: How many are of interest.
  """
  if learning_rate_fn is None:
    return most
  rate = learning_rate_fn(seen)
  rates = (learning_rate_fn(seen + k * batch) for k in range(1, most))
  return next((k for k, r in enumerate(rates, 1) if r != rate), most)


def _spread_out(counts: Sequence[int], most: int = 1000) -> np.ndarray:
  """Values k, each about as often as `counts[k]` says; `most` at most."""
  counts = np.asarray(counts)
  share = min(1.0, most / counts.sum())
  return np.repeat(np.arange(len(counts)), np.ceil(counts * share).astype(int))


def report(counts: list[updates.Counts], names: list[str]) -> list[str]:
  """One line per replica on what became of its contributions."""
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
      mean, most_of, largest = updates.summary(count.staleness)
      line += (
        f"; staleness {mean:.2f} on average, 95% at most {most_of}, all at"
        f" most {largest}"
      )
    if count.held_up_secs:
      line += f"; updates waited {count.held_up_secs:.1f} s for it alone"
    lines.append(line)
  return lines
