"""Makes a synthetic log of clicks, which a recommender can learn from.

Every user and every item has a hidden vector. A user who is shown an item
clicks with the probability sigmoid(factor * dot product of their vectors +
offset). Users and items follow a Zipf distribution: few ids are frequent, most
are rare.
"""

from typing import NamedTuple

import numpy as np

_COLUMNS = 4
_STRENGTH = 2.5
_OFFSET = -1.0


class Log(NamedTuple):
  """A log of n impressions: cases in which a user was shown an item.

  Attributes:
    users: int32 [n], the id of the user.
    items: int32 [n], the id of the item.
    clicks: float32 [n], 1 if the user clicked on the item, else 0.
    probabilities: float32 [n], the true probability of a click, which a model
      does not see.
  """

  users: np.ndarray
  items: np.ndarray
  clicks: np.ndarray
  probabilities: np.ndarray


def make(
  num_users: int, num_items: int, num_impressions: int, *, seed: int = 0
) -> Log:
  """Makes a random log of which users click on which items.

  Every user and every item has a hidden vector; these determine the clicks.

  Args:
    num_users: The number of users.
    num_items: The number of items.
    num_impressions: The number of impressions: cases in which a user was shown
      an item.
    seed: The seed of the impressions. The hidden vectors do not depend on it.
  """
  hidden = np.random.default_rng(1234)
  users_vectors = hidden.normal(size=(num_users, _COLUMNS))
  items_vectors = hidden.normal(size=(num_items, _COLUMNS))
  rng = np.random.default_rng(seed)
  users = _zipf(rng, num_users, num_impressions)
  items = _zipf(rng, num_items, num_impressions)
  dot = np.sum(users_vectors[users] * items_vectors[items], axis=1)
  score = _STRENGTH * dot / np.sqrt(_COLUMNS) + _OFFSET
  probabilities = 1.0 / (1.0 + np.exp(-score))
  clicks = rng.random(num_impressions) < probabilities
  return Log(
    users,
    items,
    clicks.astype("float32"),
    probabilities.astype("float32"),
  )


def auc(clicks: np.ndarray, scores: np.ndarray) -> float:
  """Computes the area under the ROC curve (AUC).

  The AUC is the probability that an example with a click has a higher score
  than an example without a click.

  Args:
    clicks: [n], 1 for a click, else 0.
    scores: [n], the predicted probability of a click, or any number that
      increases with it.
  """
  _, ranks, counts = np.unique(scores, return_inverse=True, return_counts=True)
  # The mean rank of equal scores, from 1.
  mean_ranks = np.cumsum(counts) - (counts - 1) / 2
  total = mean_ranks[ranks][clicks > 0].sum()
  yes = float(np.sum(clicks > 0))
  no = len(clicks) - yes
  return float((total - yes * (yes + 1) / 2) / (yes * no))


def _zipf(rng: np.random.Generator, count: int, size: int) -> np.ndarray:
  """Draws random ids with a Zipf distribution.

  Id k in [0, count) is drawn 1 / (k + 1) times as often as id 0.

  Args:
    rng: The random generator.
    count: The number of ids.
    size: The number of draws.
  """
  weights = 1.0 / np.arange(1, count + 1)
  total = np.cumsum(weights)
  found = np.searchsorted(total, rng.random(size) * total[-1])
  return np.minimum(found, count - 1).astype("int32")
