"""What one training run is made of: a frozen `Config` and its constants.

Imports no TensorFlow, so that a launcher can check its flags at once.
"""

import dataclasses
import json
import os
from typing import TypeVar

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

# An entry overrides the defaults of `Config`, which are the tutorial's.
RECIPES = {"tutorial": {}}

_RECORD = "config.json"

_Count = TypeVar("_Count")


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
    seed: Decides initial weights, order of the data and distortions.
    recipe: Key of `RECIPES` that these settings started from.
    learning_rate: At the first step.
    learning_rate_decay_factor: What each decay multiplies the rate by.
    num_epochs_per_decay: Passes over the training set between decays.
    momentum: Of the optimizer; 0 is plain gradient descent.
    moving_average_decay: Largest decay of the variables' moving averages.
    weight_decay: Factor of half the squared weights in the loss, for the
      layers that decay.
  """

  dataset: str = "cifar10"
  data_dir: str | None = None
  train_dir: str = "/tmp/cifar10_train"
  batch_size: int = 128
  max_steps: int = 1_000_000
  seed: int = 0
  recipe: str = "tutorial"
  learning_rate: float = 0.1
  learning_rate_decay_factor: float = 0.1
  num_epochs_per_decay: float = 350.0
  momentum: float = 0.0
  moving_average_decay: float = 0.9999
  weight_decay: float = 0.004

  def __post_init__(self):
    _require("dataset", self.dataset, bool(self.dataset), "not empty")
    _require("train_dir", self.train_dir, bool(self.train_dir), "not empty")
    _require("batch_size", self.batch_size, self.batch_size >= 1, "positive")
    _require("max_steps", self.max_steps, self.max_steps >= 1, "positive")
    _require(
      "recipe",
      self.recipe,
      self.recipe in RECIPES,
      "one of " + ", ".join(sorted(RECIPES)),
    )
    for name in (
      "learning_rate",
      "learning_rate_decay_factor",
      "num_epochs_per_decay",
    ):
      _require(name, getattr(self, name), getattr(self, name) > 0, "positive")
    for name in ("momentum", "moving_average_decay"):
      value = getattr(self, name)
      _require(name, value, 0 <= value < 1, "in [0, 1)")
    _require(
      "weight_decay", self.weight_decay, self.weight_decay >= 0, "at least 0"
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


def record(config: Config) -> None:
  """Writes the settings into the run's directory, for `of_run`."""
  os.makedirs(config.train_dir, exist_ok=True)
  path = os.path.join(config.train_dir, _RECORD)
  temporary = f"{path}.tmp"
  with open(temporary, "w", encoding="utf-8") as file:
    json.dump(dataclasses.asdict(config), file, indent=2)
  os.replace(temporary, path)


def of_run(train_dir: str, **settings) -> Config:
  """The settings that a run was last started with.

  Args:
    train_dir: The run's directory; the defaults hold where it has no record.
    **settings: What to take instead.

  Raises:
    ValueError: If the record is damaged.
  """
  path = os.path.join(train_dir, _RECORD)
  if os.path.exists(path):
    try:
      with open(path, encoding="utf-8") as file:
        recorded = json.load(file)
      return Config(**{**recorded, "train_dir": train_dir, **settings})
    except (TypeError, ValueError) as error:
      raise ValueError(f"{path} is damaged: {error}") from None
  return Config(train_dir=train_dir, **settings)


def learning_rate(
  config: Config,
  examples_seen: _Count,
  *,
  num_examples_per_epoch: int = NUM_EXAMPLES_PER_EPOCH_FOR_TRAIN,
) -> _Count:
  """Returns the rate after some examples; it falls in steps.

  Counting examples and not steps keeps the schedule right for any number
  of replicas (the tutorial's multi-GPU program once got that wrong).

      rate = initial * factor ^ floor(examples_seen / (epochs * per_epoch))

  Args:
    config: Holds `learning_rate`, `learning_rate_decay_factor` and
      `num_epochs_per_decay`.
    examples_seen: Examples in all updates so far: an int, or an integer
      tensor, for which the result is a float64 tensor.
    num_examples_per_epoch: Size of the training set.
  """
  examples_per_decay = round(
    config.num_epochs_per_decay * num_examples_per_epoch
  )
  num_decays = (examples_seen / examples_per_decay) // 1
  return config.learning_rate * config.learning_rate_decay_factor**num_decays


def _require(name: str, value: object, holds: bool, rule: str) -> None:
  if not holds:
    raise ValueError(f"`{name}` must be {rule}. Received: {value!r}.")
