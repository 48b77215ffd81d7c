"""Defines the flags for the settings of an Inception training.

All training programs of this package have these flags.
"""

import dataclasses

from absl import flags

from inception_mini import config as config_lib
from tf_replicas.programs import fields
from tf_replicas.programs import run_options

FLAGS = flags.FLAGS

_HAVE_DEFAULTS = {"train_dir", "seed", "recipe"}


def define() -> None:
  """Defines the flags for what is trained: data, network and optimizer."""
  group = config_lib.GROUP
  names = {field.name for field in dataclasses.fields(config_lib.Config)}
  fields.define_flags(config_lib.Config, [group], unset=names - _HAVE_DEFAULTS)
  flags.DEFINE_alias(
    "initial_learning_rate", "learning_rate", module_name=group
  )


def config(options: run_options.Options) -> config_lib.Config:
  """Makes a `Config`, the settings of a training, from the flags.

  If no learning rate is given, it is `config.default_rate`.

  Args:
    options: How the training is run (devices, replicas, update rule).

  Returns:
    The settings.

  Raises:
    ValueError: If a flag is invalid, or flags contradict each other.
  """
  given = fields.given(config_lib.Config)
  chosen = config_lib.from_recipe(**given)
  if "learning_rate" not in given:
    default = config_lib.default_rate(
      chosen.recipe, options, batch_size=chosen.batch_size
    )
    chosen = dataclasses.replace(chosen, learning_rate=default.rate)
  if chosen.batch_norm_statistics == config_lib.SYNCHRONIZED:
    _check_synchronized(options)
  return chosen


def _check_synchronized(options: run_options.Options) -> None:
  """Checks that batch normalization can be synchronized over towers.

  A tower is a copy of the model. Each tower must be on one device, and all
  towers of a replica must belong to the process that traces the computation.

  Raises:
    ValueError: If that is not so.
  """
  reason = None
  if options.devices_per_tower > 1:
    reason = "`layers` spreads a tower over several devices"
  elif options.is_in_graph and options.num_towers > len(options.replicas):
    reason = "in-graph workers have several towers"
  if reason:
    raise ValueError(
      "`--batch_norm_statistics=synchronized` needs towers (copies of the"
      " model) of one device each, in the worker's own process. Received:"
      f" {reason}."
    )
