"""What one training run is made of: a frozen `Config` and its constants.

Imports no TensorFlow, so that a launcher can check its flags at once.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple
from typing import TypeVar

from tf_replicas import compute_dtypes
from tf_replicas import run_settings
from tf_replicas import schedules

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

# Of an image, that evaluation may take the mean probabilities of: the middle
# one; that and its mirror image; those and a smaller and a larger pair.
VIEWS = (1, 2, 6)

# Before a scaled rate is reached (Goyal et al. 2017, section 2.2).
WARMUP_EPOCHS = 5.0
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

_Count = TypeVar("_Count")


class CropSizes(NamedTuple):
  """Heights and widths of what is cut out of images, then resized to 24.

  Attributes:
    evaluation: From the middle, for evaluation.
    smallest: For training, where each image draws its own.
    largest: The other end of that range.
  """

  evaluation: float
  smallest: float
  largest: float


@dataclasses.dataclass(frozen=True)
class Config:
  """Everything a training run depends on, apart from the machines.

  The defaults are those of the TF1 tutorial (`cifar10.py`,
  `cifar10_train.py`).

  Attributes:
    dataset: `cifar10`, `synthetic` or the name of a TensorFlow data set.
    data_dir: Where the data set lies or is downloaded to; None leaves the
      choice to TensorFlow Datasets.
    train_dir: Where checkpoints and summaries go.
    batch_size: Images of one tower's batch.
    max_steps: Updates of the variables after which training ends.
    seed: 0 or more. Decides initial weights, order of the data and distortions.
    recipe: Key of `RECIPES` that these settings started from.
    num_epochs: Passes over the 50,000 training images of CIFAR-10 that make a
      whole run; as many examples of another data set.
    optimizer: One of `OPTIMIZERS`: stochastic gradient descent, or Muon (Jordan
      et al. 2024), which makes the update of a matrix or kernel orthogonal and
      leaves biases and the last layer to Adam, at a tenth of the rate.
    schedule: One of `SCHEDULES`, see `learning_rate`.
    learning_rate: The highest, for one replica.
    learning_rate_scale: Multiplies it; the number of synchronous replicas, for
      the linear scaling rule (Goyal et al. 2017).
    warmup_epochs: Passes before the rate is at its highest.
    learning_rate_decay_factor: What each decay multiplies the rate by.
    num_epochs_per_decay: Passes over the training set between decays.
    momentum: Of the optimizer; 0 is plain gradient descent.
    label_smoothing: Share of the target spread over all classes.
    distort_colors: Whether training images change in brightness and contrast.
    crop_size: Height and width of what evaluation cuts out of the middle of an
      image of 32, and resizes to the 24 of the network.
    min_crop_size: Of what training cuts out; each image draws its own.
    max_crop_size: The other end of that range.
    centered_share: Last part of the run, in [0, 1], in which training crops
      are like those of evaluation: near the middle of an image, and of about
      that size.
    moving_average_decay: Largest decay of the variables' moving averages.
    weight_decay: Factor of half the squared weights in the loss, for the
      layers that decay.
    decoupled_weight_decay: Of Muon: each update first takes this share, times
      the rate, off the matrices that it makes orthogonal updates of
      (Loshchilov & Hutter 2019).
    compute_dtype: One of `compute_dtypes.NAMES`.
  """

  dataset: str = "cifar10"
  data_dir: str | None = None
  train_dir: str = "/tmp/cifar10_train"
  batch_size: int = 128
  max_steps: int = 1_000_000
  seed: int = 0
  recipe: str = "tutorial"
  num_epochs: float = 256.0
  optimizer: str = "sgd"
  schedule: str = "staircase"
  learning_rate: float = 0.1
  learning_rate_scale: float = 1.0
  warmup_epochs: float = 0.0
  learning_rate_decay_factor: float = 0.1
  num_epochs_per_decay: float = 350.0
  momentum: float = 0.0
  label_smoothing: float = 0.0
  distort_colors: bool = True
  crop_size: float = IMAGE_SIZE
  min_crop_size: float = IMAGE_SIZE
  max_crop_size: float = IMAGE_SIZE
  centered_share: float = 0.0
  moving_average_decay: float = 0.9999
  weight_decay: float = 0.004
  decoupled_weight_decay: float = 0.0
  compute_dtype: str = "float32"

  def __post_init__(self):
    run_settings.require(
      "dataset", self.dataset, bool(self.dataset), "not empty"
    )
    run_settings.require(
      "train_dir", self.train_dir, bool(self.train_dir), "not empty"
    )
    run_settings.require(
      "batch_size", self.batch_size, self.batch_size >= 1, "positive"
    )
    run_settings.require_seed(self.seed)
    run_settings.require(
      "max_steps", self.max_steps, self.max_steps >= 1, "positive"
    )
    for name, choices in (
      ("recipe", sorted(RECIPES)),
      ("compute_dtype", compute_dtypes.NAMES),
      ("optimizer", OPTIMIZERS),
      ("schedule", SCHEDULES),
    ):
      value = getattr(self, name)
      run_settings.require(
        name, value, value in choices, "one of " + ", ".join(choices)
      )
    for name in (
      "learning_rate",
      "learning_rate_decay_factor",
      "learning_rate_scale",
    ):
      value = getattr(self, name)
      run_settings.require(
        name, value, 0 < value < math.inf, "positive and finite"
      )
    run_settings.require_epochs("num_epochs_per_decay", self)
    run_settings.require_epochs("num_epochs", self)
    for name in ("momentum", "moving_average_decay", "label_smoothing"):
      value = getattr(self, name)
      run_settings.require(name, value, 0 <= value < 1, "in [0, 1)")
    for name in ("weight_decay", "decoupled_weight_decay"):
      value = getattr(self, name)
      run_settings.require(
        name, value, 0 <= value < math.inf, "at least 0 and finite"
      )
    run_settings.require(
      "decoupled_weight_decay",
      self.decoupled_weight_decay,
      self.optimizer == "muon" or not self.decoupled_weight_decay,
      f"0 with the optimizer {self.optimizer!r}",
    )
    for name, least in (
      ("crop_size", 1),
      ("min_crop_size", 1),
      ("max_crop_size", self.min_crop_size),
    ):
      value = getattr(self, name)
      run_settings.require(
        name,
        value,
        least <= value <= RECORD_SIZE,
        f"in [{least}, {RECORD_SIZE}]",
      )
    run_settings.require(
      "centered_share",
      self.centered_share,
      0 <= self.centered_share <= 1,
      "in [0, 1]",
    )
    run_settings.require(
      "warmup_epochs",
      self.warmup_epochs,
      0 <= self.warmup_epochs <= self.num_epochs
      and _num_examples(self.warmup_epochs) < _num_examples(self.num_epochs),
      f"in [0, {self.num_epochs}), the epochs of the run, by an example less"
      " at least",
    )


def from_recipe(recipe: str, **settings) -> Config:
  """Makes a `Config` from a recipe's settings.

  Args:
    recipe: Key of `RECIPES`.
    **settings: Fields of `Config`; they win over the recipe's.

  Raises:
    ValueError: If the recipe is unknown or a setting is out of range.
  """
  return Config(**{**RECIPES.get(recipe, {}), **settings, "recipe": recipe})


def learning_rate(
  config: Config,
  examples_seen: _Count,
  *,
  num_examples_per_epoch: int = NUM_EXAMPLES_PER_EPOCH_FOR_TRAIN,
) -> _Count:
  """Returns the rate after some examples.

  Counting examples and not steps keeps the schedule right for any number
  of replicas (the tutorial's multi-GPU program once got that wrong). With
  epochs e and s = `learning_rate_scale`:

      staircase: rate * factor ^ floor(e / num_epochs_per_decay), which rises
        from once to s times that in the first `warmup_epochs`
      one_cycle: rate * s at the end of `warmup_epochs`; it rises linearly from
        0 to there, and falls linearly to 0 at `num_epochs` (after Smith 2018)

  Args:
    config: Holds all these.
    examples_seen: Examples in all updates so far: an int, or an integer
      tensor, for which the result is a float64 tensor.
    num_examples_per_epoch: Size of the training set.
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
  """The examples of a whole run."""
  return _num_examples(config.num_epochs)


def _num_examples(epochs: float) -> int:
  return schedules.num_examples(epochs, NUM_EXAMPLES_PER_EPOCH_FOR_TRAIN)


def centered_from(config: Config) -> int | None:
  """The example from which on crops are near the middle; None: none."""
  if not config.centered_share:
    return None
  return round(num_examples(config) * (1.0 - config.centered_share))


def crop_sizes(config: Config) -> CropSizes | None:
  """What is resized to 24; None: crops are of 24, and nothing is resized."""
  sizes = CropSizes(
    config.crop_size, config.min_crop_size, config.max_crop_size
  )
  return None if set(sizes) == {IMAGE_SIZE} else sizes


def fit(
  recipe: str,
  settings: Mapping[str, object],
  *,
  effective_batch: int,
  max_steps: int | None,
) -> Config:
  """A recipe fitted to the length of a run.

  Its warm-up is as long a part of the run as in the recipe, and one cycle ends
  with the run. A rate that is scaled up is warmed up in any case, for an eighth
  of the run at most.

  Args:
    recipe: Key of `RECIPES`.
    settings: Fields of `Config` that are given; they stay.
    effective_batch: Examples of an update.
    max_steps: The updates of the run; None takes those of `num_epochs`.

  Raises:
    ValueError: If a setting is out of range.
  """
  base = from_recipe(recipe)
  fitted = {"num_epochs": base.num_epochs, **settings}
  is_cycle = base.schedule == "one_cycle"
  length = math.inf
  if max_steps is not None:
    length = max_steps * effective_batch / NUM_EXAMPLES_PER_EPOCH_FOR_TRAIN
    if is_cycle and "num_epochs" not in settings:
      fitted["num_epochs"] = length
  if "warmup_epochs" not in settings:
    share = base.warmup_epochs / base.num_epochs
    fitted["warmup_epochs"] = share * fitted["num_epochs"]
    if not share and fitted.get("learning_rate_scale", 1.0) > 1.0:
      length = min(length, fitted["num_epochs"])
      fitted["warmup_epochs"] = min(WARMUP_EPOCHS, length / 8)
  config = from_recipe(recipe, **fitted)
  if max_steps is None:
    max_steps = math.ceil(num_examples(config) / effective_batch)
  return dataclasses.replace(config, max_steps=max_steps)
