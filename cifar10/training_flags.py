"""Defines the flags for the settings of a CIFAR-10 training.

All training programs of the package have these flags.
"""

from absl import flags

from cifar10 import config as config_lib
from tf_replicas import cluster
from tf_replicas.programs import fields
from tf_replicas.programs import run_options

FLAGS = flags.FLAGS

# Settings whose flags have no default, since the recipe decides it.
_OF_RECIPES = (
  "batch_size",
  "num_epochs",
  "learning_rate",
  "warmup_epochs",
  "momentum",
  "compute_dtype",
)


def define() -> None:
  """Defines the flags for what is trained: data, network and optimizer.

  All training programs of the package have these flags.
  """
  group = config_lib.GROUP
  fields.define_flags(config_lib.Config, [group], unset=_OF_RECIPES)
  fields.define_flag(
    "scale_learning_rate",
    bool,
    False,
    "Multiply the learning rate by the batches in one update, warmed up",
    group=group,
  )


def config(options: run_options.Options) -> config_lib.Config:
  """Makes the settings of a training (a `Config`) from the flags.

  Args:
    options: How the training is run (devices, replicas, update rule). This
      decides the number of examples in an update.

  Returns:
    The settings.

  Raises:
    ValueError: If a flag is invalid, or flags contradict each other.
    cluster.ClusterError: If the recipe, a named set of settings, does not fit
      the placement of variables.
  """
  given = fields.given(config_lib.Config)
  recipe = config_lib.from_recipe(FLAGS.recipe)
  batch_size = given.get("batch_size", recipe.batch_size)
  effective = options.effective_batch(batch_size)
  if FLAGS.scale_learning_rate:
    _check_one_batch_size(options)
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
      " end of the run, needs `--num_epochs`, which says when that is: updates"
      " of different rules have different numbers of examples. Received:"
      f" {options.update}."
    )
  del given["recipe"]
  if "learning_rate" not in given:
    given["learning_rate"] = config_lib.default_rate(
      FLAGS.recipe,
      options,
      batch_size=batch_size,
      dataset=FLAGS.dataset,
      is_scaled_later=FLAGS.scale_learning_rate,
    ).rate
  fitted = config_lib.fit(FLAGS.recipe, given, effective_batch=effective)
  _check_placement(options, fitted)
  _check_momentum(options, fitted)
  return fitted


def _check_one_batch_size(options: run_options.Options) -> None:
  """Checks that `--scale_learning_rate` is used with a fitting update rule.

  The flag multiplies the learning rate by the number of batches whose gradients
  one update uses. So this number must be the same in all updates.

  Raises:
    ValueError: If the number differs between the updates of the update rule.
  """
  update = options.update
  if update.is_periodic or update.then_update:
    raise ValueError(
      "`--scale_learning_rate` needs an `--update` in which every update has"
      f" the gradient of the same number of batches. Received: {update}."
    )


def _check_momentum(
  options: run_options.Options, config: config_lib.Config
) -> None:
  """Checks that `--momentum_correction` is used only with momentum.

  The flag rescales the velocities of gradient descent with momentum when the
  learning rate changes.

  Raises:
    ValueError: If the optimizer has no such velocities.
  """
  has_velocities = config.optimizer == "sgd" and config.momentum
  if options.update.momentum_correction and not has_velocities:
    raise ValueError(
      "`--momentum_correction` needs a recipe with gradient descent, and"
      f" `--momentum`. Received: the optimizer {config.optimizer!r} of the"
      f" recipe {config.recipe} with --momentum={config.momentum}."
    )


def _check_placement(
  options: run_options.Options, config: config_lib.Config
) -> None:
  """Checks that the optimizer Muon is used only with whole variables.

  Muon updates whole matrices, so variables must not be divided among parameter
  servers.

  Raises:
    cluster.ClusterError: If variables would be divided.
  """
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
