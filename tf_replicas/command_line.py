"""What the binaries of all programs share: flags, one-line errors, their mains.

A training binary defines flags, says how to run and what to train, and calls
`train`; an evaluation binary calls `evaluate`. What a program trains, it has
flags of its own for. Nothing here imports TensorFlow before a task needs it.
"""

import dataclasses
import functools
import os
import sys
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import NoReturn
from typing import TypeVar

from absl import app
from absl import flags
from absl import logging

from tf_replicas import cluster
from tf_replicas import launcher
from tf_replicas import prepared_datasets
from tf_replicas import processes
from tf_replicas import program
from tf_replicas import update_flags
from tf_replicas import update_settings

FLAGS = flags.FLAGS

# `--help` shows the flags of the binary, also those that it has from here.
flags.disclaim_key_flags()

_OPTIONS = (
  "train_dir",
  "log_every_steps",
  "summary_every_steps",
  "histograms",
  "checkpoint_every_steps",
  "checkpoint_every_secs",
  "keep_checkpoints",
  "intra_op_threads",
)
_CLUSTER_OPTIONS = (
  "replication",
  "replicas_to_aggregate",
  "start_timeout_secs",
  "lost_after_secs",
  "emulate_gpus",
  "timeline",
)
_UPDATE_SETTINGS = tuple(
  field.name
  for field in dataclasses.fields(update_settings.UpdateSettings)
  if field.name != "rules"
)
_SHORTEST_SECS = 0.001

_Config = TypeVar("_Config")
_Result = TypeVar("_Result")


def define_training_flags(train_dir: str) -> None:
  """The flags of every training binary; `--help` shows them.

  Args:
    train_dir: Where it trains unless told otherwise.
  """
  flags.DEFINE_string("train_dir", train_dir, "Checkpoints and logs")
  define_count(
    "batch_size", None, "Images in one tower's batch; default: the recipe's"
  )
  define_count("micro_batches", 1, "Parts in which a tower computes its batch")
  flags.DEFINE_integer(
    "seed", 0, "Decides initial weights, order and distortions"
  )
  define_count("log_every_steps", 10, "Steps between log lines")
  flags.DEFINE_alias("log_frequency", "log_every_steps")
  define_count("summary_every_steps", 100, "Steps between TensorBoard points")
  flags.DEFINE_boolean(
    "histograms", False, "Also write histograms of the variables"
  )
  define_count("checkpoint_every_steps", None, "Steps between checkpoints")
  flags.DEFINE_float(
    "checkpoint_every_secs",
    600,
    "Seconds between checkpoints",
    lower_bound=_SHORTEST_SECS,
  )
  define_count("keep_checkpoints", 5, "Number of newest checkpoints to keep")
  define_count(
    "intra_op_threads", None, "Threads of one op; default: cores / tasks here"
  )
  flags.DEFINE_boolean("dry_run", False, "Check and describe, start nothing")


def define_towers_flags() -> None:
  """The further flags of a binary that trains with several towers."""
  _define_device_flags()
  define_count("num_gpus", None, "Towers, on GPUs 0 to N - 1; default: 1")


def define_cluster_flags() -> None:
  """The further flags of a binary that trains on a cluster."""
  _define_device_flags()
  flags.DEFINE_string(
    "job_name", None, "This task's job; default: start all tasks"
  )
  flags.DEFINE_integer("task_index", None, "This task's index in its job")
  flags.DEFINE_enum(
    "replication",
    program.BETWEEN_GRAPH,
    [program.BETWEEN_GRAPH, program.IN_GRAPH],
    "A client in every worker, or one client for all workers",
  )
  flags.DEFINE_integer(
    "replicas_to_aggregate",
    None,
    "Gradients averaged in one update; default: one of every replica",
  )
  update_flags.define()
  flags.DEFINE_boolean("timeline", False, "Record what every task does when")
  flags.DEFINE_float("start_timeout_secs", 120, "Wait so long for other tasks")
  flags.DEFINE_float(
    "lost_after_secs",
    20,
    "A worker silent for so long is lost (not: mirrored)",
    lower_bound=2,
  )


def define_evaluation_flags(train_dir: str, *, batch_size: int) -> None:
  """The flags of every evaluation binary; `--help` shows them.

  Args:
    train_dir: The run to measure unless told otherwise.
    batch_size: Images at a time unless told otherwise.
  """
  flags.DEFINE_string("train_dir", train_dir, "The run to measure")
  flags.DEFINE_string(
    "eval_dir", None, "Where TensorBoard points go; default: in --train_dir"
  )
  flags.DEFINE_string("dataset", None, "As in training; default: the run's")
  flags.DEFINE_string("data_dir", None, "As in training; default: the run's")
  flags.DEFINE_integer("batch_size", batch_size, "Images at a time")
  flags.DEFINE_boolean("run_once", False, "Measure the newest checkpoint only")
  flags.DEFINE_float("eval_interval_secs", 10, "Seconds between measurements")
  flags.DEFINE_float(
    "timeout_secs",
    None,
    "End after so long without a new checkpoint; default: never",
  )


def define_count(name: str, default: int | None, words: str) -> None:
  """A flag that is an integer of 1 or more."""
  flags.DEFINE_integer(name, default, words, lower_bound=1)


def given(names: Iterable[str]) -> dict[str, object]:
  """The values of those of some flags that have one."""
  values = {name: FLAGS[name].value for name in names}
  return {name: value for name, value in values.items() if value is not None}


def check_micro_batches(batch_size: int) -> None:
  """Raises ValueError unless `--micro_batches` divides a tower's batch."""
  if batch_size % FLAGS.micro_batches:
    raise ValueError(
      f"`--micro_batches` must divide the batch of {batch_size}. Received:"
      f" {FLAGS.micro_batches}."
    )


def start(main: Callable[[Sequence[str]], None]) -> NoReturn:
  """Parses the flags and calls `main`; a mistake in them is one line."""
  # What TensorFlow remarks on its devices, unless somebody asks for it.
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  app.run(main, flags_parser=_parse)


def one_device_options() -> program.Options:
  """How to train on one device, from the flags."""
  return _options(program.one_machine_spec(0))


def towers_options(cluster_module: str) -> program.Options:
  """How to train with several towers, from `define_towers_flags`.

  Args:
    cluster_module: The binary for a spec of several tasks.

  Raises:
    cluster.ClusterError: If the flags contradict each other, or the spec is
      not of one machine.
  """
  return _options(_towers_spec(cluster_module), emulate_gpus=FLAGS.emulate_gpus)


def cluster_options() -> program.Options:
  """How to train on a cluster, from `define_cluster_flags` and TF_CONFIG.

  Raises:
    cluster.ClusterError: For a mistake in them.
  """
  spec, task = program.choose_task(
    FLAGS.cluster_spec, FLAGS.job_name, FLAGS.task_index, dict(os.environ)
  )
  more = {name: FLAGS[name].value for name in _CLUSTER_OPTIONS}
  update = {name: FLAGS[name].value for name in _UPDATE_SETTINGS}
  update["then_update"] = tuple(update["then_update"])
  update = update_settings.UpdateSettings(rules=tuple(FLAGS.update), **update)
  return _options(spec, task, update=update, **more)


def train(
  module: str,
  options_fn: Callable[[], program.Options],
  config_fn: Callable[[program.Options], tuple[program.Options, _Config]],
  workload_fn: Callable[[program.Options, _Config], program.Workload],
) -> NoReturn:
  """Is the `main` of a training binary; ends the process.

  An error that is the user's business is told in one line: any `ValueError` of
  the first two functions, a `prepared_datasets.DataError` of the third.

  Args:
    module: The binary's name, by which it starts further tasks.
    options_fn: Says how to run, by the flags; not for how many steps.
    config_fn: Says what to train, by the flags and the options, and puts the
      length of the run into the options.
    workload_fn: Makes the workload of that, and looks whether its data is
      there, in tasks that need it. It may import TensorFlow.
  """
  with processes.one_line_errors(usage=(ValueError,)):
    options = options_fn()
    program.check(options)
    options, config = config_fn(options)
    program.check(options)  # Also for that length.
  with processes.importing_tensorflow():
    from tf_replicas import checkpoints

  with processes.one_line_errors(
    usage=(
      cluster.ClusterError,
      checkpoints.CheckpointError,
      prepared_datasets.DataError,
    ),
    run_time=program.RUN_TIME_ERRORS,
  ):
    # What is told of a run is told of all its tasks.
    needs_workload = FLAGS.dry_run or not options.only_serves
    status = launcher.run(
      options,
      workload_fn(options, config) if needs_workload else None,
      command=functools.partial(_command, module, sys.argv[1:]),
      is_dry_run=FLAGS.dry_run,
    )
  processes.exit_now(status)


def evaluate(evaluate_fn: Callable[[], _Result | None]) -> _Result:
  """Is the `main` of an evaluation binary, up to what it says at its end.

  Without `--run_once` it waits for a run that has not begun.

  Args:
    evaluate_fn: Measures by the flags; returns None if there was no checkpoint
      in time. An error that is the user's business is told in one line.

  Returns:
    What `evaluate_fn` returned.
  """
  with processes.importing_tensorflow():
    import tensorflow as tf

    from tf_replicas import devices
    from tf_replicas import evaluation

  with processes.one_line_errors(
    usage=(ValueError, prepared_datasets.DataError),
    run_time=program.RUN_TIME_ERRORS,
  ):
    # Takes as much GPU memory as it needs, for training may run beside it.
    devices.configure(None)
    result = None
    if FLAGS.run_once:
      # Before data is looked for, or fetched, that nothing would be done with.
      evaluation.newest_checkpoint(FLAGS.train_dir)
    if FLAGS.run_once or evaluation.await_run(
      FLAGS.train_dir, timeout_secs=FLAGS.timeout_secs
    ):
      try:
        result = evaluate_fn()
      except tf.errors.OpError as error:
        # Of data that cannot be read, or of a full memory.
        words = processes.shortened(f"TensorFlow failed: {error.message}")
        raise RuntimeError(words) from error
    if result is None:
      raise TimeoutError(f"No checkpoint file found in {FLAGS.train_dir}")
    return result


def _define_device_flags() -> None:
  flags.DEFINE_string("cluster_spec", None, "Path of a cluster-spec JSON")
  flags.DEFINE_boolean("emulate_gpus", False, "CPU devices stand in for GPUs")


def _options(
  spec: cluster.ClusterSpec, task: cluster.Task | None = None, **more
) -> program.Options:
  common = {name: FLAGS[name].value for name in _OPTIONS}
  # `config_fn` replaces the number of steps: it may depend on all the others.
  return program.Options(spec=spec, task=task, max_steps=1, **common, **more)


def _towers_spec(cluster_module: str) -> cluster.ClusterSpec:
  if FLAGS.cluster_spec is None:
    return program.one_machine_spec(FLAGS.num_gpus or 1)
  if FLAGS.num_gpus is not None:
    raise cluster.ClusterError(
      "`--num_gpus` must not be given with `--cluster_spec`, which says itself"
      f" which GPUs. Received: {FLAGS.num_gpus}."
    )
  spec = cluster.load(FLAGS.cluster_spec)
  if spec.is_distributed:
    raise cluster.ClusterError(
      f"{spec.source}: `cluster` must be absent for one machine;"
      f" {cluster_module} trains on a cluster. Received jobs:"
      f" {', '.join(spec.jobs)}."
    )
  return spec


def _parse(argv: Sequence[str]) -> list[str]:
  with processes.one_line_errors(usage=(flags.Error,)):
    rest = FLAGS(argv)
    if len(rest) > 1:
      raise flags.Error(f"Unknown arguments: {' '.join(rest[1:])}")
  if not FLAGS["verbosity"].present:
    logging.set_verbosity(logging.WARNING)
  return rest


def _command(
  module: str,
  arguments: Sequence[str],
  path: str,
  task: cluster.Task,
  threads: int,
) -> list[str]:
  """The command line of one task; later flags override earlier ones."""
  return [
    sys.executable,
    "-m",
    module,
    *arguments,
    f"--cluster_spec={path}",
    f"--job_name={task.job}",
    f"--task_index={task.index}",
    f"--intra_op_threads={threads}",
  ]
