"""The flags that say what of CIFAR-10 is trained, on whatever machines."""

import dataclasses
from collections.abc import Callable
from typing import NoReturn

from absl import flags

from cifar10 import config as config_lib
from cifar10 import workload
from tf_replicas import cluster
from tf_replicas import command_line
from tf_replicas import compute_dtypes
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


def define() -> None:
  """The flags of every training binary; `--help` shows them."""
  command_line.define_training_flags(config_lib.Config.train_dir)
  flags.DEFINE_string("dataset", "cifar10", "cifar10, synthetic or a TFDS name")
  flags.DEFINE_string("data_dir", None, "Where the data set lies")
  command_line.define_count(
    "max_steps", None, "Updates to make; default: those of --num_epochs"
  )
  flags.DEFINE_float(
    "num_epochs",
    None,
    "Length of the run, of 50,000 images each; default: the recipe's",
  )
  flags.DEFINE_enum(
    "recipe", "tutorial", [*config_lib.RECIPES], "Default settings"
  )
  flags.DEFINE_float(
    "learning_rate", None, "The highest one; default: the recipe's"
  )
  flags.DEFINE_boolean(
    "scale_learning_rate",
    False,
    "Multiply the learning rate by the batches in one update, warmed up",
  )
  flags.DEFINE_float(
    "warmup_epochs", None, "Until the full rate; default: the recipe's"
  )
  flags.DEFINE_float(
    "momentum", None, "Of the optimizer; default: the recipe's"
  )
  flags.DEFINE_enum(
    "compute_dtype",
    None,
    [*compute_dtypes.NAMES],
    "Of the network's arithmetic; default: the recipe's",
  )


def train(module: str, options_fn: Callable[[], program.Options]) -> NoReturn:
  """Is the `main` of a training binary; ends the process.

  Args:
    module: The binary's name.
    options_fn: Says how to run, by the flags.
  """
  command_line.train(module, options_fn, _config, _workload)


def _config(
  options: program.Options,
) -> tuple[program.Options, config_lib.Config]:
  """The options with the length of the run, and what to train."""
  config = _fit(options)
  _check_placement(options, config)
  whole_run = config_lib.num_examples(config)
  options = dataclasses.replace(
    options,
    max_steps=config.max_steps,
    max_examples=whole_run if FLAGS.max_steps is None else None,
  )
  return options, config


def _fit(options: program.Options) -> config_lib.Config:
  """What to train; the options decide how many examples an update has."""
  given = command_line.given(_SETTINGS)
  recipe = config_lib.from_recipe(FLAGS.recipe)
  batch_size = given.get("batch_size", recipe.batch_size)
  command_line.check_micro_batches(batch_size)
  effective = options.effective_batch(batch_size)
  if FLAGS.scale_learning_rate:
    update = options.update
    if update.is_periodic or update.then_update:
      raise ValueError(
        "`--scale_learning_rate` needs an `--update` whose updates are all of"
        f" as many batches, by one gradient. Received: {update}."
      )
    given["learning_rate_scale"] = effective / batch_size
  elif FLAGS.warmup_epochs and recipe.schedule == "staircase":
    raise ValueError(
      f"`--warmup_epochs` needs `--scale_learning_rate` with the recipe"
      f" {FLAGS.recipe}, whose rate starts at its highest. Received:"
      f" {FLAGS.warmup_epochs}."
    )
  has_cycle = recipe.schedule == "one_cycle" and "num_epochs" not in given
  if options.update.then_update and has_cycle:
    raise ValueError(
      f"`--then_update` with the recipe {FLAGS.recipe}, whose rate is 0 at the"
      " end of the run, needs `--num_epochs` for that: updates of different"
      f" rules have different numbers of examples. Received: {options.update}."
    )
  return config_lib.fit(
    FLAGS.recipe, given, effective_batch=effective, max_steps=FLAGS.max_steps
  )


def _check_placement(
  options: program.Options, config: config_lib.Config
) -> None:
  """Muon makes the update of a whole matrix, which no PS task may have."""
  spec = options.spec
  is_cut = (
    spec.variables.on == "ps"
    and spec.variables.placement == "partitioned"
    and spec.num_tasks("ps") > 1
  )
  if is_cut and config.optimizer == "muon":
    raise cluster.ClusterError(
      f"{spec.where}`variables.placement` must be 'greedy' or 'round_robin' for"
      f" the recipe {config.recipe}, whose optimizer needs whole variables."
      f" Received: {spec.variables.placement!r}."
    )


def _workload(
  options: program.Options, config: config_lib.Config
) -> program.Workload:
  from cifar10 import sources

  try:
    sources.find(config.dataset, config.data_dir, download=not FLAGS.dry_run)
  except sources.NotPreparedError:
    # Of a dry run, which has only this to say of it.
    print(f"{config.dataset} is not there yet; training will download it")
  return workload.make(
    config,
    layers=options.spec.layers,
    micro_batches=FLAGS.micro_batches,
    used_share=options.used_share,
  )
