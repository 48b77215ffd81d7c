"""What one training run is made of: a frozen `Config` and its constants.

Imports no TensorFlow, so that a launcher can check its flags at once.
"""

import dataclasses
import math
from typing import TypeVar

from tf_replicas import compute_dtypes
from tf_replicas import run_settings
from tf_replicas import schedules

MIN_IMAGE_SIZE = 32
MAX_IMAGE_SIZE = 299

# Whose batches move batch normalization's statistics; the last also says whose
# examples a batch is normalized by: those of all towers of a replica.
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
  """Everything a training run depends on, apart from the machines.

  The defaults are those of the TF1 program (`inception_distributed_train`,
  `inception_model`, `image_processing`).

  Attributes:
    dataset: `records` (shards of TFRecords in `data_dir`), `synthetic` or the
      name of a TensorFlow data set.
    data_dir: Where the data set lies or is downloaded to.
    train_dir: Where checkpoints and summaries go.
    image_size: Height and width of what the network sees.
    num_classes: Number of logits, the background included where there is one;
      None is what the data set says.
    width: Factor of every number of channels.
    depth: Factor of the number of Inception blocks of each kind.
    dropout: Share of the features that training drops before the logits.
    batch_size: Images of one tower's batch.
    max_steps: Updates of the variables after which training ends.
    seed: Decides initial weights, order of the data, distortions, dropout.
    recipe: Key of `RECIPES` that these settings started from.
    learning_rate: At the first step.
    learning_rate_decay_factor: What each decay multiplies the rate by.
    num_epochs_per_decay: Passes over the training set between decays.
    warmup_epochs: Passes in which the rate rises linearly from 0; 0 is none.
    rmsprop_decay: Of RMSProp's mean of squared gradients.
    rmsprop_momentum: Of RMSProp.
    rmsprop_epsilon: Added to the mean square before the root is taken.
    moving_average_decay: Largest decay of the variables' moving averages.
    batch_norm_decay: Of batch normalisation's moving statistics.
    batch_norm_statistics: One of `BATCH_NORM_STATISTICS`: the statistics move
      to the mean of what the replicas in an update saw; or as the chief saw it
      (replica 0, or the first of those used); or to the mean, of moments that
      the towers of a replica share.
    weight_decay: Factor of half the squared kernels in the loss.
    label_smoothing: Share of the target that all classes divide equally.
    auxiliary_weight: Factor of the auxiliary head's loss; 0 leaves the head
      out of the network.
    min_crop_area: Smallest share of an image's area that a training crop has.
    distort_color: Whether training changes colours.
    central_fraction: Share of height and width that evaluation looks at.
    shuffle_examples: Encoded examples a worker holds to draw the next from.
    compute_dtype: One of `compute_dtypes.NAMES`.
  """

  dataset: str = "records"
  data_dir: str | None = None
  train_dir: str = "/tmp/inception_mini_train"
  image_size: int = 299
  num_classes: int | None = None
  width: float = 1.0
  depth: float = 1.0
  dropout: float = 0.2
  batch_size: int = 32
  max_steps: int = 1_000_000
  seed: int = 0
  recipe: str = "original"
  learning_rate: float = 0.045
  learning_rate_decay_factor: float = 0.94
  num_epochs_per_decay: float = 2.0
  warmup_epochs: float = 0.0
  rmsprop_decay: float = 0.9
  rmsprop_momentum: float = 0.9
  rmsprop_epsilon: float = 1.0
  moving_average_decay: float = 0.9999
  batch_norm_decay: float = 0.9997
  batch_norm_statistics: str = MEAN
  weight_decay: float = 4e-5
  label_smoothing: float = 0.1
  auxiliary_weight: float = 0.4
  min_crop_area: float = 0.05
  distort_color: bool = True
  central_fraction: float = 0.875
  shuffle_examples: int = 16_384
  compute_dtype: str = "float32"

  def __post_init__(self):
    def require(rule, holds, *names):
      for name in names:
        run_settings.require(
          name, getattr(self, name), holds(getattr(self, name)), rule
        )

    require("not empty", bool, "dataset", "train_dir")
    require(
      f"in [{MIN_IMAGE_SIZE}, {MAX_IMAGE_SIZE}]",
      lambda value: MIN_IMAGE_SIZE <= value <= MAX_IMAGE_SIZE,
      "image_size",
    )
    require("at least 2", lambda v: v is None or v >= 2, "num_classes")
    require(
      "one of " + ", ".join(sorted(RECIPES)), RECIPES.__contains__, "recipe"
    )
    require(
      "one of " + ", ".join(compute_dtypes.NAMES),
      compute_dtypes.NAMES.__contains__,
      "compute_dtype",
    )
    require(
      "one of " + ", ".join(BATCH_NORM_STATISTICS),
      BATCH_NORM_STATISTICS.__contains__,
      "batch_norm_statistics",
    )
    require("at least 1", lambda v: v >= 1, *_COUNTS)
    require("positive and finite", lambda v: 0 < v < math.inf, *_POSITIVE)
    require(
      "at least 0 and finite", lambda v: 0 <= v < math.inf, *_NOT_NEGATIVE
    )
    require("in [0, 1)", lambda v: 0 <= v < 1, *_SHARES)
    run_settings.require_epochs("num_epochs_per_decay", self)
    if self.warmup_epochs:
      run_settings.require_epochs("warmup_epochs", self)
    run_settings.require_seed(self.seed)
    require("in (0, 1]", lambda v: 0 < v <= 1, *_PARTS)


_COUNTS = ("batch_size", "max_steps", "shuffle_examples")
_POSITIVE = (
  "width",
  "depth",
  "learning_rate",
  "learning_rate_decay_factor",
  "rmsprop_epsilon",
)
_NOT_NEGATIVE = ("weight_decay", "auxiliary_weight")
_SHARES = (
  "dropout",
  "rmsprop_decay",
  "rmsprop_momentum",
  "moving_average_decay",
  "batch_norm_decay",
  "label_smoothing",
)
_PARTS = ("min_crop_area", "central_fraction")


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
  config: Config, examples_seen: _Count, *, num_examples_per_epoch: int
) -> _Count:
  """Returns the rate after some examples; it falls in steps.

  Counting examples of all replicas and not steps is what the original's
  division by `num_replicas_to_aggregate` stood for.

      rate = initial * factor ^ floor(examples_seen / (epochs * per_epoch))

  It rises linearly from 0 to that in the first `warmup_epochs`.

  Args:
    config: Holds `learning_rate`, `learning_rate_decay_factor`,
      `num_epochs_per_decay` and `warmup_epochs`.
    examples_seen: Examples in all updates so far: an int, or an integer
      tensor, for which the result is a float64 tensor.
    num_examples_per_epoch: Size of the training set.
  """
  warm, decay = (
    schedules.num_examples(epochs, num_examples_per_epoch)
    for epochs in (config.warmup_epochs, config.num_epochs_per_decay)
  )
  factor = config.learning_rate_decay_factor
  falling = schedules.staircase(examples_seen, factor, decay)
  return config.learning_rate * falling * schedules.share(examples_seen, warm)
