"""Defines the settings of a CIFAR-10 training (`Config`), and constants.

TensorFlow is not imported, so that a launcher can check its flags at once.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import NamedTuple
from typing import TypeVar

from tf_replicas.programs import compute_dtypes
from tf_replicas.programs import fields
from tf_replicas.programs import learning_rates
from tf_replicas.programs import run_options
from tf_replicas.programs import schedules

GROUP = "Training"  # The group of the flags in `--help`.
_flag = functools.partial(fields.setting, group=GROUP)

NUM_CLASSES = 10
RECORD_SIZE = 32  # Height and width of a stored image.
IMAGE_SIZE = 24  # Height and width of what the network sees.
NUM_EXAMPLES_PER_EPOCH_FOR_TRAIN = 50_000
NUM_EXAMPLES_PER_EPOCH_FOR_EVAL = 10_000
LABELS = (
  "airplane",
  "automobile",
  "bird",
  "cat",
  "deer",
  "dog",
  "frog",
  "horse",
  "ship",
  "truck",
)

# The numbers of views of an image whose probabilities evaluation may average:
# the middle crop; this crop and its mirror image; these two and two such pairs
# of a smaller and a larger crop.
VIEWS = (1, 2, 6)

# Epochs of warm-up before a scaled rate is reached (Goyal et al. 2017, section
# 2.2).
WARMUP_EPOCHS = 5.0
# The part of a recipe's batch and rate at which gradient descent learns the
# synthetic data set with every seed (experiments.default_rates). At the whole
# rate of the tutorial, two of five seeds ended below a precision of 0.8.
SYNTHETIC_SHARE = 0.5
OPTIMIZERS = ("sgd", "muon")
SCHEDULES = ("staircase", "one_cycle")

# An entry overrides the defaults of `Config`, which are the tutorial's.
RECIPES = {
  "tutorial": {},
  "modern": {
    "optimizer": "muon",
    "learning_rate": 0.02,
    "momentum": 0.9,
    "schedule": "one_cycle",
    "num_epochs": 40.0,
    "warmup_epochs": 4.0,
    "label_smoothing": 0.1,
    "weight_decay": 0.0,
    "decoupled_weight_decay": 0.1,
    "distort_colors": False,
    "crop_size": 29.0,
    "min_crop_size": 22.0,
    "max_crop_size": 32.0,
    "centered_share": 0.15,
    "moving_average_decay": 0.999,
    "compute_dtype": "bfloat16",
  },
}

_SIZES = f"[1, {RECORD_SIZE}]"

_Count = TypeVar("_Count")


class CropSizes(NamedTuple):
  """Side lengths of the square crops that are cut out of images, in pixels.

  Crops are then resized to the 24 x 24 pixels that the network takes.

  Attributes:
    evaluation: The size in evaluation, which crops the middle of an image.
    smallest: The smallest size in training, which draws a random size for each
      image.
    largest: The largest size in training.
  """

  evaluation: float
  smallest: float
  largest: float


@dataclasses.dataclass(frozen=True)
class Config:
  """The settings of a training run, apart from the machines that run it.

  The defaults are those of the TF1 tutorial (`cifar10.py`, `cifar10_train.py`).

  Raises:
    ValueError: If a setting is out of range.
  """

  dataset: str = _flag("cifar10", "cifar10, synthetic or a TFDS name")
  data_dir: str | None = _flag(
    None, "Directory of the data set; default: that of TFDS"
  )
  train_dir: str = _flag(
    "/tmp/cifar10_train", "Directory of checkpoints and logs"
  )
  batch_size: int = _flag(128, "Images in one tower's batch", fields.COUNT)
  max_steps: int | None = _flag(
    None, "Updates to make; default: those of --num_epochs", fields.COUNT
  )
  seed: int = _flag(
    0,
    "Decides initial weights, order of the data and distortions",
    fields.SEEDS,
  )
  recipe: str = _flag("tutorial", "Default settings", choices=tuple(RECIPES))
  num_epochs: float = _flag(
    256.0, "Length of the run in epochs of 50,000 images", fields.EPOCHS
  )
  # Muon (Jordan et al. 2024) makes the update of a matrix or kernel orthogonal
  # and leaves biases and the last layer to Adam, at a tenth of the rate.
  optimizer: str = fields.setting("sgd", "The optimizer", choices=OPTIMIZERS)
  schedule: str = fields.setting(
    "staircase", "See `learning_rate`", choices=SCHEDULES
  )
  learning_rate: float = _flag(
    0.1,
    "The highest rate; by default lower for smaller batches and stale"
    " gradients",
    "(0, inf)",
  )
  learning_rate_scale: float = fields.setting(
    1.0,
    "Multiplies the rate; the number of synchronous replicas, for the linear"
    " scaling rule (Goyal et al. 2017)",
    "(0, inf)",
  )
  warmup_epochs: float = _flag(0.0, "Epochs until the highest rate", "[0, inf)")
  learning_rate_decay_factor: float = fields.setting(
    0.1, "What each decay multiplies the rate by", "(0, inf)"
  )
  num_epochs_per_decay: float = fields.setting(
    350.0, "Epochs between decays", fields.EPOCHS
  )
  momentum: float = _flag(0.0, "Momentum of the optimizer", "[0, 1)")
  label_smoothing: float = fields.setting(
    0.0, "Share of the target spread over all classes", "[0, 1)"
  )
  distort_colors: bool = fields.setting(
    True, "Whether training changes brightness and contrast"
  )
  crop_size: float = fields.setting(
    IMAGE_SIZE,
    "Pixels that evaluation cuts out of the middle of 32, and resizes to 24",
    _SIZES,
  )
  min_crop_size: float = fields.setting(
    IMAGE_SIZE, "Pixels that training cuts out, at least", _SIZES
  )
  max_crop_size: float = fields.setting(
    IMAGE_SIZE, "Pixels that training cuts out, at most", _SIZES
  )
  centered_share: float = fields.setting(
    0.0,
    "Last part of the run, in which training crops are near the middle and of"
    " about the size of evaluation's",
    "[0, 1]",
  )
  moving_average_decay: float = fields.setting(
    0.9999, "Largest decay of the variables' moving averages", "[0, 1)"
  )
  weight_decay: float = fields.setting(
    0.004,
    "Factor of half the squared weights in the loss, for layers that decay",
    "[0, inf)",
  )
  # Before each update, Muon subtracts this share, times the learning rate, from
  # the matrices whose updates it makes orthogonal (Loshchilov & Hutter 2019).
  decoupled_weight_decay: float = fields.setting(
    0.0, "Decoupled weight decay of Muon's matrices", "[0, inf)"
  )
  compute_dtype: str = _flag(
    "float32", "Dtype of the network's arithmetic", choices=compute_dtypes.NAMES
  )

  def __post_init__(self):
    fields.validate(self)
    fields.require(
      "decoupled_weight_decay",
      self.decoupled_weight_decay,
      self.optimizer == "muon" or not self.decoupled_weight_decay,
      f"0 with the optimizer {self.optimizer!r}",
    )
    fields.require(
      "max_crop_size",
      self.max_crop_size,
      self.max_crop_size >= self.min_crop_size,
      f"at least `min_crop_size`, {self.min_crop_size}",
    )
    fields.require(
      "warmup_epochs",
      self.warmup_epochs,
      self.warmup_epochs <= self.num_epochs
      and _num_examples(self.warmup_epochs) < _num_examples(self.num_epochs),
      f"in [0, {self.num_epochs}), and at least one example less than the run",
    )


def from_recipe(recipe: str, **given) -> Config:
  """Makes a `Config` from a recipe, a named set of settings.

  Args:
    recipe: Key of `RECIPES`.
    **given: Fields of `Config` that override those of the recipe.

  Raises:
    ValueError: If the recipe is unknown or a setting is out of range.
  """
  return Config(**{**RECIPES.get(recipe, {}), **given, "recipe": recipe})


def default_rate(
  recipe: str,
  options: run_options.Options,
  *,
  batch_size: int,
  dataset: str,
  is_scaled_later: bool = False,
) -> learning_rates.Default:
  """Computes the default learning rate: that of a run for which none is given.

  It depends on the recipe (a named set of settings), the batch size, the update
  rule and the number of replicas.

  Args:
    recipe: Key of `RECIPES`.
    options: How the training is run, with the update rule and the replicas.
    batch_size: Number of images in the batch of one tower, a copy of the model.
    dataset: The name of the data set.
    is_scaled_later: Whether the caller will multiply the rate by the number of
      batches in an update, as `Config.learning_rate_scale`.

  Returns:
    The default rate, and what it was computed from.
  """
  base = from_recipe(recipe)
  name, rate = f"--recipe={recipe}", base.learning_rate
  # The size of Muon's updates does not depend on that of the gradients.
  batch = base.batch_size if base.optimizer == "sgd" else None
  if dataset == "synthetic" and batch is not None:
    name += " on the synthetic data set"
    rate, batch = rate * SYNTHETIC_SHARE, round(batch * SYNTHETIC_SHARE)
  return learning_rates.default(
    options,
    recipe=name,
    rate=rate,
    recipe_batch=batch,
    batch_size=batch_size,
    is_scaled_later=is_scaled_later,
  )


def learning_rate(
  config: Config,
  examples_seen: _Count,
  *,
  num_examples_per_epoch: int = NUM_EXAMPLES_PER_EPOCH_FOR_TRAIN,
) -> _Count:
  """Computes the learning rate at a point of the training.

  A schedule that counts examples instead of steps is right for any number of
  replicas (the tutorial's multi-GPU program once got that wrong). With the
  number e of epochs so far and s = `learning_rate_scale`:

      staircase: rate * factor ^ floor(e / num_epochs_per_decay), times a scale
        that rises linearly from 1 to s in the first `warmup_epochs`
      one_cycle: rises linearly from 0 to rate * s at the end of
        `warmup_epochs`, then falls linearly to 0 at `num_epochs` (after Smith
        2018)

  Args:
    config: The settings, which contain the schedule.
    examples_seen: Number of examples in all updates so far: an int, or an
      integer tensor, for which the result is a float64 tensor.
    num_examples_per_epoch: Size of the training set.

  Returns:
    The learning rate, a float or a scalar tensor.
  """
  warm, end, decay = (
    schedules.num_examples(epochs, num_examples_per_epoch)
    for epochs in (
      config.warmup_epochs,
      config.num_epochs,
      config.num_epochs_per_decay,
    )
  )
  warmed = schedules.share(examples_seen, warm)
  if config.schedule == "one_cycle":
    left = schedules.share(end - examples_seen, end - warm)
    return config.learning_rate * config.learning_rate_scale * warmed * left
  scale = 1.0 + (config.learning_rate_scale - 1.0) * warmed
  factor = config.learning_rate_decay_factor
  falling = schedules.staircase(examples_seen, factor, decay)
  return config.learning_rate * falling * scale


def num_examples(config: Config) -> int:
  """Returns the number of examples that a whole run uses.

  Args:
    config: The settings of the run.
  """
  return _num_examples(config.num_epochs)


def _num_examples(epochs: float) -> int:
  return schedules.num_examples(epochs, NUM_EXAMPLES_PER_EPOCH_FOR_TRAIN)


def centered_from(config: Config) -> int | None:
  """Returns the point of a run from which training uses centered crops.

  In the last part of a run, training crops are near the middle of an image, as
  in evaluation. `config.centered_share` is the share of this part in the run.

  Returns:
    The number of examples used before this part; None if there is no such part.
  """
  if not config.centered_share:
    return None
  return round(num_examples(config) * (1.0 - config.centered_share))


def crop_sizes(config: Config) -> CropSizes | None:
  """Returns the sizes of the square crops that are cut out of images.

  The network takes squares of 24 x 24 pixels. Crops of other sizes are resized
  to that.

  Returns:
    The sizes; None if all crops have 24 pixels, so that none is resized.
  """
  sizes = CropSizes(
    config.crop_size, config.min_crop_size, config.max_crop_size
  )
  return None if set(sizes) == {IMAGE_SIZE} else sizes


def fit(
  recipe: str, given: Mapping[str, object], *, effective_batch: int
) -> Config:
  """Makes a `Config` from a recipe, with a schedule that fits the run's length.

  A recipe is a named set of settings. The warm-up is the first part of the run,
  in which the learning rate rises. It gets the same share of the run as in the
  recipe. If the recipe has none, but `given` has a `learning_rate_scale` above
  1, there is a warm-up of at most an eighth of the run. The schedule
  "one_cycle" ends when the run ends.

  Args:
    recipe: Key of `RECIPES`.
    given: Fields of `Config`, used as they are in place of those of the recipe.
    effective_batch: Number of examples in an update.

  Raises:
    ValueError: If a setting is out of range.
  """
  base = from_recipe(recipe)
  fitted = {"num_epochs": base.num_epochs, **given}
  is_cycle = base.schedule == "one_cycle"
  max_steps = given.get("max_steps")
  length = math.inf
  if max_steps is not None:
    length = max_steps * effective_batch / NUM_EXAMPLES_PER_EPOCH_FOR_TRAIN
    if is_cycle and "num_epochs" not in given:
      fitted["num_epochs"] = length
  if "warmup_epochs" not in given:
    share = base.warmup_epochs / base.num_epochs
    fitted["warmup_epochs"] = share * fitted["num_epochs"]
    if not share and fitted.get("learning_rate_scale", 1.0) > 1.0:
      length = min(length, fitted["num_epochs"])
      fitted["warmup_epochs"] = min(WARMUP_EPOCHS, length / 8)
  return from_recipe(recipe, **fitted)
