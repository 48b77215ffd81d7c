"""What the binaries' command lines share: flags, settings, one-line errors.

A binary defines its flags, says where it trains, and calls `train`.
"""

import dataclasses
import functools
import os
import sys
from collections.abc import Callable
from collections.abc import Sequence
from typing import NoReturn

from absl import app
from absl import flags
from absl import logging

from cifar10 import config as config_lib
from cifar10 import workload
from tf_replicas import cluster
from tf_replicas import launcher
from tf_replicas import program

FLAGS = flags.FLAGS

# `--help` shows the flags of the binary, also those that it has from here.
flags.disclaim_key_flags()

# A setting without a value is the recipe's.
_SETTINGS = (
  "dataset",
  "data_dir",
  "train_dir",
  "batch_size",
  "num_epochs",
  "seed",
  "learning_rate",
  "warmup_epochs",
  "momentum",
  "compute_dtype",
)
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
_SHORTEST_SECS = 0.001


def define_training_flags() -> None:
  """The flags of every training binary; `--help` shows them."""
  flags.DEFINE_string("dataset", "cifar10", "cifar10, synthetic or a TFDS name")
  flags.DEFINE_string("data_dir", None, "Where the data set lies")
  flags.DEFINE_string("train_dir", "/tmp/cifar10_train", "Checkpoints and logs")
  _define_count("batch_size", None, "Images of one tower's batch; the recipe's")
  _define_count("micro_batches", 1, "Parts in which a tower takes its batch")
  _define_count("max_steps", None, "Updates to make; wins over --num_epochs")
  flags.DEFINE_float(
    "num_epochs", None, "Of 50,000 images, a whole run; the recipe's"
  )
  flags.DEFINE_enum("recipe", "tutorial", [*config_lib.RECIPES], "Settings")
  flags.DEFINE_float("learning_rate", None, "At the first step; the recipe's")
  flags.DEFINE_boolean(
    "scale_learning_rate",
    False,
    "Learning rate times the batches in one update, after a warm-up",
  )
  flags.DEFINE_float("warmup_epochs", None, "To the full rate; the recipe's")
  flags.DEFINE_float("momentum", None, "Of the optimizer; the recipe's")
  flags.DEFINE_enum(
    "compute_dtype",
    None,
    [*config_lib.COMPUTE_DTYPES],
    "Of the network's arithmetic; the recipe's",
  )
  flags.DEFINE_integer("seed", 0, "Of weights, order and distortions")
  _define_count("log_every_steps", 10, "Steps between log lines")
  flags.DEFINE_alias("log_frequency", "log_every_steps")
  _define_count("summary_every_steps", 100, "Between TensorBoard points")
  flags.DEFINE_boolean("histograms", False, "Of the variables, to TensorBoard")
  _define_count("checkpoint_every_steps", None, "Between checkpoints")
  flags.DEFINE_float(
    "checkpoint_every_secs",
    600,
    "Between checkpoints",
    lower_bound=_SHORTEST_SECS,
  )
  _define_count("keep_checkpoints", 5, "How many of the newest stay")
  _define_count("intra_op_threads", None, "Threads of one op")
  flags.DEFINE_boolean("dry_run", False, "Check and describe, start nothing")


def define_device_flags() -> None:
  """The flags of a binary that can train on several devices."""
  flags.DEFINE_string("cluster_spec", None, "Path of a cluster-spec JSON")
  flags.DEFINE_boolean("emulate_gpus", False, "CPU devices stand in for GPUs")


def start(main: Callable[[Sequence[str]], None]) -> NoReturn:
  """Parses the flags and calls `main`; a mistake in them is one line."""
  # What TensorFlow remarks on its devices, unless somebody asks for it.
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  app.run(main, flags_parser=_parse)


def train(
  module: str, choose_options: Callable[[], program.Options]
) -> NoReturn:
  """Is the `main` of a training binary; ends the process.

  Args:
    module: The binary's name, by which it starts further tasks.
    choose_options: Says how to run, by the flags. A `ValueError` is told in
      one line.
  """
  with program.one_line_errors(usage=(ValueError,)):
    options = choose_options()
    program.check(options)
    config = config_from_flags(options)
    whole_run = config_lib.num_examples(config)
    options = dataclasses.replace(
      options,
      max_steps=config.max_steps,
      max_examples=whole_run if FLAGS.max_steps is None else None,
    )
  program.exit_now(
    run(
      config,
      options,
      command=functools.partial(_command, module, sys.argv[1:]),
      micro_batches=FLAGS.micro_batches,
      is_dry_run=FLAGS.dry_run,
    )
  )


def config_from_flags(options: program.Options) -> config_lib.Config:
  """What to train, from the flags of `define_training_flags`.

  Args:
    options: How; they decide how many examples an update has.
  """
  given = {name: FLAGS[name].value for name in _SETTINGS}
  given = {k: v for k, v in given.items() if v is not None}
  recipe = config_lib.from_recipe(FLAGS.recipe)
  batch_size = given.get("batch_size", recipe.batch_size)
  if batch_size % FLAGS.micro_batches:
    raise ValueError(
      f"`--micro_batches` must divide the batch of {batch_size}. Received:"
      f" {FLAGS.micro_batches}."
    )
  effective = options.effective_batch(batch_size)
  if FLAGS.scale_learning_rate:
    given["learning_rate_scale"] = effective / batch_size
  elif FLAGS.warmup_epochs and recipe.schedule == "staircase":
    raise ValueError(
      f"`--warmup_epochs` needs `--scale_learning_rate` with the recipe"
      f" {FLAGS.recipe}, whose rate starts at its highest. Received:"
      f" {FLAGS.warmup_epochs}."
    )
  return config_lib.fit(
    FLAGS.recipe, given, effective_batch=effective, max_steps=FLAGS.max_steps
  )


def options_from_flags(
  spec: cluster.ClusterSpec, task: cluster.Task | None = None, **more
) -> program.Options:
  """How to train, from the flags of `define_training_flags`.

  Args:
    spec: The devices, or the cluster.
    task: Which task of a cluster this process is; None for one machine.
    **more: Further fields of `program.Options`.
  """
  common = {name: FLAGS[name].value for name in _OPTIONS}
  # `train` replaces the number of steps: it may depend on all the others.
  return program.Options(spec=spec, task=task, max_steps=1, **common, **more)


def run(
  config: config_lib.Config,
  options: program.Options,
  *,
  command: Callable[[str, cluster.Task, int], Sequence[str]],
  micro_batches: int = 1,
  is_dry_run: bool = False,
) -> int:
  """Plays this process's role, and tells the user's errors in one line.

  Args:
    config: What to train; recorded in its directory when training begins.
    options: How.
    command: As `launcher.run` has it.
    micro_batches: In how many parts a tower takes its batch.
    is_dry_run: Whether to say what would be run, and nothing more.

  Returns:
    The exit status.
  """
  with program.quiet_stderr():
    from cifar10 import sources
    from tf_replicas import checkpoints

  with program.one_line_errors(
    usage=(
      cluster.ClusterError,
      checkpoints.CheckpointError,
      sources.DataError,
    ),
    run_time=program.RUN_TIME_ERRORS,
  ):
    sources.find(config.dataset, config.data_dir)
    return launcher.run(
      options,
      workload.make(
        config, layers=options.spec.layers, micro_batches=micro_batches
      ),
      command=command,
      is_dry_run=is_dry_run,
    )


def _parse(argv: Sequence[str]) -> list[str]:
  with program.one_line_errors(usage=(flags.Error,)):
    rest = FLAGS(argv)
    if len(rest) > 1:
      raise flags.Error(f"Unknown arguments: {' '.join(rest[1:])}")
  if not FLAGS["verbosity"].present:
    logging.set_verbosity(logging.WARNING)
  return rest


def _define_count(name: str, default: int | None, words: str) -> None:
  flags.DEFINE_integer(name, default, words, lower_bound=1)


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
