"""Defines the settings of an Inception training (`Config`), and constants.

This module does not import TensorFlow, so that a launcher can check its flags
at once.
"""

import dataclasses
import functools
from typing import TypeVar

from tf_replicas.programs import compute_dtypes
from tf_replicas.programs import fields
from tf_replicas.programs import learning_rates
from tf_replicas.programs import run_options
from tf_replicas.programs import schedules

GROUP = "Training"  # The group of the flags in `--help`.
_flag = functools.partial(fields.setting, group=GROUP)

MIN_IMAGE_SIZE = 32
MAX_IMAGE_SIZE = 299

# How the moving means and variances of batch normalization are updated: by the
# mean over replicas; by the chief alone; or by moments computed over all towers
# of a replica, which then also normalize its batch.
MEAN, CHIEF, SYNCHRONIZED = "mean", "chief", "synchronized"
BATCH_NORM_STATISTICS = (MEAN, CHIEF, SYNCHRONIZED)

# An entry overrides the defaults of `Config`, which are the original's.
RECIPES = {
  "original": {},
  # 32-pixel images on a desk: 0.8 million parameters with ten classes.
  # Averages over thousands of steps would outlive such a run, and a crop of
  # a twentieth of 32x32 pixels shows nothing.
  "mini": dict(
    image_size=32,
    width=0.25,
    depth=0.5,
    batch_size=64,
    max_steps=20_000,
    batch_norm_decay=0.99,
    moving_average_decay=0.999,
    min_crop_area=0.4,
    shuffle_examples=10_000,
  ),
}

_Count = TypeVar("_Count")


@dataclasses.dataclass(frozen=True)
class Config:
  """The settings of a training run, apart from the machines that run it.

  The help texts of the fields describe them. The defaults are those of the TF1
  program (`inception_distributed_train`, `inception_model`,
  `image_processing`).

  Raises:
    ValueError: If a setting is out of range.
  """

  dataset: str = _flag(
    "records",
    "records (shards of TFRecords in --data_dir), synthetic or a TFDS name",
  )
  data_dir: str | None = _flag(None, "Directory of the data set")
  train_dir: str = _flag(
    "/tmp/inception_mini_train", "Directory of checkpoints and logs"
  )
  image_size: int = _flag(
    299,
    "Height and width of what the network sees",
    f"[{MIN_IMAGE_SIZE}, {MAX_IMAGE_SIZE}]",
  )
  num_classes: int | None = _flag(
    None,
    "Number of logits, background included; default: the data set's",
    "[2, inf)",
  )
  width: float = _flag(1.0, "Factor of all numbers of channels", "(0, inf)")
  depth: float = _flag(1.0, "Factor of the numbers of blocks", "(0, inf)")
  dropout: float = _flag(
    0.2, "Share of the features dropped before the logits", "[0, 1)"
  )
  batch_size: int = _flag(32, "Images in one tower's batch", fields.COUNT)
  max_steps: int = _flag(1_000_000, "Updates to make", fields.COUNT)
  seed: int = _flag(
    0,
    "Decides initial weights, order of the data, distortions and dropout",
    fields.SEEDS,
  )
  recipe: str = _flag("original", "Default settings", choices=tuple(RECIPES))
  learning_rate: float = _flag(
    0.045,
    "Learning rate at the first step; by default lower for stale gradients",
    "(0, inf)",
  )
  learning_rate_decay_factor: float = _flag(
    0.94, "What each decay multiplies the rate by", "(0, inf)"
  )
  num_epochs_per_decay: float = _flag(
    2.0, "Epochs, of all replicas, between decays", fields.EPOCHS
  )
  warmup_epochs: float = _flag(
    0.0, "Epochs in which the rate rises from 0; 0: none", "[0, 1e9]"
  )
  rmsprop_decay: float = fields.setting(
    0.9, "Decay of RMSProp's mean of squared gradients", "[0, 1)"
  )
  rmsprop_momentum: float = fields.setting(0.9, "Momentum of RMSProp", "[0, 1)")
  rmsprop_epsilon: float = fields.setting(
    1.0, "Added to the mean square before the root is taken", "(0, inf)"
  )
  moving_average_decay: float = _flag(
    0.9999, "Largest decay of the variables' moving averages", "[0, 1)"
  )
  batch_norm_decay: float = _flag(
    0.9997, "Decay of moving means and variances", "[0, 1)"
  )
  batch_norm_statistics: str = _flag(
    MEAN,
    "The moving statistics follow the mean of the replicas in an update, the"
    " chief (replica 0, or the first in an update), or the mean of moments that"
    " the towers of a replica share",
    choices=BATCH_NORM_STATISTICS,
  )
  weight_decay: float = _flag(
    4e-5, "Factor of half the squared kernels in the loss", "[0, inf)"
  )
  label_smoothing: float = _flag(
    0.1, "Share of the target that all classes divide equally", "[0, 1)"
  )
  auxiliary_weight: float = _flag(
    0.4, "Factor of the auxiliary head's loss; 0: no such head", "[0, inf)"
  )
  min_crop_area: float = _flag(
    0.05, "Smallest share of an image's area in a training crop", "(0, 1]"
  )
  distort_color: bool = _flag(True, "Whether training changes colors")
  central_fraction: float = fields.setting(
    0.875, "Share of height and width that evaluation looks at", "(0, 1]"
  )
  shuffle_examples: int = _flag(
    16_384,
    "Encoded examples a worker holds to draw the next from",
    fields.COUNT,
  )
  compute_dtype: str = _flag(
    "float32", "Dtype of the network's arithmetic", choices=compute_dtypes.NAMES
  )
  pretrained_model_checkpoint_path: str | None = _flag(
    None,
    "Checkpoint or train directory to fine-tune; its heads are not restored",
  )

  def __post_init__(self):
    fields.validate(self)


def from_recipe(recipe: str, **given) -> Config:
  """Makes a `Config` from a recipe, a named set of settings.

  Args:
    recipe: Key of `RECIPES`.
    **given: Fields of `Config` that override those of the recipe.

  Returns:
    The settings.

  Raises:
    ValueError: If the recipe is unknown or a setting is out of range.
  """
  return Config(**{**RECIPES.get(recipe, {}), **given, "recipe": recipe})


def default_rate(
  recipe: str, options: run_options.Options, *, batch_size: int
) -> learning_rates.Default:
  """Computes the learning rate to use if the user gives none.

  The rate is that of the recipe (a named set of settings), divided by 1 + the
  expected staleness of the gradients, in updates. The staleness depends on the
  update rule and on the number of replicas. For `staleness_aware`, which itself
  divides the rate by the staleness, the divisor is smaller.

  The rate does not depend on the batch size: RMSProp divides gradients by their
  own size, and with batches of half the recipe's size the same rate was best
  (`README.md`). `batch_size` is only used to report the number of examples in a
  gradient.

  Args:
    recipe: Key of `RECIPES`.
    options: How the training is run, with the update rule and the replicas.
    batch_size: Number of images in the batch of one tower, a copy of the model.

  Returns:
    The rate, in the field `rate`, and what it was computed from: the rate of
    the recipe, the number of examples in a gradient, the expected staleness and
    the kind of update. If there are several kinds of updates, the result is for
    the one with the lowest rate.
  """
  return learning_rates.default(
    options,
    recipe=f"--recipe={recipe}",
    rate=from_recipe(recipe).learning_rate,
    recipe_batch=None,
    batch_size=batch_size,
  )


def learning_rate(
  config: Config, examples_seen: _Count, *, num_examples_per_epoch: int
) -> _Count:
  """Computes the learning rate at a point of the training.

  The rate falls in steps:

      rate = initial * factor ^ floor(examples_seen / (epochs * per_epoch))

  During the first `warmup_epochs`, this value is multiplied by a factor that
  rises linearly from 0 to 1.

  The schedule counts the examples of all replicas, and not the updates, so that
  it does not depend on the number of replicas. For this purpose, the TF1
  program divided by `num_replicas_to_aggregate`.

  Args:
    config: The settings: `learning_rate` (`initial` above),
      `learning_rate_decay_factor` (`factor`), `num_epochs_per_decay` (`epochs`)
      and `warmup_epochs`.
    examples_seen: Number of examples in all updates so far, an int or an
      integer tensor.
    num_examples_per_epoch: Size of the training set (`per_epoch` above).

  Returns:
    The learning rate: a float, or a float64 tensor if `examples_seen` is a
    tensor.
  """
  warm, decay = (
    schedules.num_examples(epochs, num_examples_per_epoch)
    for epochs in (config.warmup_epochs, config.num_epochs_per_decay)
  )
  factor = config.learning_rate_decay_factor
  falling = schedules.staircase(examples_seen, factor, decay)
  return config.learning_rate * falling * schedules.share(examples_seen, warm)
