"""The flags that say which Inception is trained, on whatever machines."""

import dataclasses
from collections.abc import Callable
from typing import NoReturn

from absl import flags

from inception_mini import config as config_lib
from inception_mini import workload
from tf_replicas import command_line
from tf_replicas import compute_dtypes
from tf_replicas import program

FLAGS = flags.FLAGS

# `--help` shows the flags of the binary, also those that it has from here.
flags.disclaim_key_flags()

# A setting without a value is the recipe's.
_INTEGERS = {
  "image_size": "Height and width of what the network sees",
  "num_classes": "Logits (background included)",
  "max_steps": "Updates to make",
  "shuffle_examples": "Examples a worker holds to draw the next from",
}
_NUMBERS = {
  "width": "Factor of all numbers of channels",
  "depth": "Factor of the numbers of blocks",
  "dropout": "Share of the features dropped before the logits",
  "learning_rate": "Learning rate at the first step",
  "learning_rate_decay_factor": "Learning rate after a decay / before",
  "num_epochs_per_decay": "Epochs, of all replicas, between decays",
  "warmup_epochs": "Epochs in which the rate rises from 0; 0 is none",
  "moving_average_decay": "Largest decay of the variables' averages",
  "batch_norm_decay": "Decay of moving means and variances",
  "weight_decay": "Factor of half the squared kernels",
  "label_smoothing": "Share of the target that all classes divide",
  "auxiliary_weight": "Factor of the auxiliary loss; 0 leaves the head out",
  "min_crop_area": "Least share of the image in a training crop",
}
_OTHERS = (
  "dataset",
  "data_dir",
  "train_dir",
  "batch_size",
  "seed",
  "distort_color",
  "batch_norm_statistics",
  "compute_dtype",
)


def define() -> None:
  """The flags of every training binary; `--help` shows them."""
  command_line.define_training_flags(config_lib.Config.train_dir)
  flags.DEFINE_string("dataset", None, "records, synthetic or a TFDS name")
  flags.DEFINE_string("data_dir", None, "Where the data set lies")
  flags.DEFINE_enum(
    "recipe", "original", [*config_lib.RECIPES], "Default settings"
  )
  for name, words in _INTEGERS.items():
    flags.DEFINE_integer(name, None, f"{words}; default: the recipe's")
  for name, words in _NUMBERS.items():
    flags.DEFINE_float(name, None, f"{words}; default: the recipe's")
  flags.DEFINE_alias("initial_learning_rate", "learning_rate")
  flags.DEFINE_boolean(
    "distort_color",
    None,
    "Whether training changes colours; default: the recipe's",
  )
  flags.DEFINE_enum(
    "batch_norm_statistics",
    None,
    [*config_lib.BATCH_NORM_STATISTICS],
    "Whose batches move moving means and variances; default: the recipe's",
  )
  flags.DEFINE_enum(
    "compute_dtype",
    None,
    [*compute_dtypes.NAMES],
    "Of the network's arithmetic; default: the recipe's",
  )
  flags.DEFINE_string(
    "pretrained_model_checkpoint_path",
    None,
    "Checkpoint or train directory to fine-tune; its heads are not taken",
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
  given = command_line.given([*_INTEGERS, *_NUMBERS, *_OTHERS])
  config = config_lib.from_recipe(FLAGS.recipe, **given)
  command_line.check_micro_batches(config.batch_size)
  if config.batch_norm_statistics == config_lib.SYNCHRONIZED:
    _check_synchronized(options)
  return dataclasses.replace(options, max_steps=config.max_steps), config


def _check_synchronized(options: program.Options) -> None:
  """Towers compute in lockstep only where the program that traces has them."""
  reason = None
  if options.devices_per_tower > 1:
    reason = "`layers` spreads a tower over several devices"
  elif options.is_in_graph and options.num_towers > len(options.replicas):
    reason = "in-graph workers have several towers"
  if reason:
    raise ValueError(
      "`--batch_norm_statistics=synchronized` needs towers of one device,"
      f" driven by their own process. Received: {reason}."
    )


def _workload(
  options: program.Options, config: config_lib.Config
) -> program.Workload:
  from inception_mini import model
  from inception_mini import sources
  from tf_replicas import checkpoints
  from tf_replicas import fine_tuning

  source = sources.find(
    config.dataset,
    config.data_dir,
    subsets=("train",),
    download=not FLAGS.dry_run,
  )
  try:
    num_classes = model.num_classes(config, source.num_classes)
  except ValueError as error:  # It is the data set's.
    raise sources.DataError(str(error)) from None
  if source.num_train < len(options.replicas):
    raise sources.DataError(
      f"{config.data_dir or config.dataset} must have a training example for"
      f" each of {len(options.replicas)} replicas. Received:"
      f" {source.num_train}."
    )
  pretrained = FLAGS.pretrained_model_checkpoint_path
  # The other tasks may be on machines that do not see it.
  if pretrained is not None and options.task in (None, options.spec.chief):
    if checkpoints.latest(config.train_dir) is None:  # Else it is not read.
      fine_tuning.find(pretrained)
  return workload.make(
    dataclasses.replace(config, num_classes=num_classes),
    source,
    layers=options.spec.layers,
    micro_batches=FLAGS.micro_batches,
    pretrained=pretrained,
  )
