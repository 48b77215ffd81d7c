"""A log of clicks with a planted signal, made from seeds.

Every user and every item has a hidden vector. A user who is shown an item
clicks with the probability sigmoid(dot product + offset). Users and items
follow a Zipf distribution: few ids are frequent, most are rare.
"""

from typing import NamedTuple

import numpy as np

_COLUMNS = 4
_STRENGTH = 2.5
_OFFSET = -1.0


class Log(NamedTuple):
  """Impressions: a user, an item that was shown, and what came of it.

  Attributes:
    users: int32 [n].
    items: int32 [n].
    clicks: float32 [n], 1 for a click.
    probabilities: float32 [n], of a click, which only the generator knows.
  """

  users: np.ndarray
  items: np.ndarray
  clicks: np.ndarray
  probabilities: np.ndarray


def make(
  num_users: int, num_items: int, num_impressions: int, *, seed: int = 0
) -> Log:
  """Makes a log; the hidden vectors do not depend on `seed`.

  Args:
    num_users: The number of users.
    num_items: The number of items.
    num_impressions: The number of impressions.
    seed: Draws the impressions.
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
  """Computes the area under the ROC curve.

  It is the probability that a click has a higher score than an impression
  without a click.

  Args:
    clicks: [n], 1 or 0.
    scores: [n].
  """
  _, ranks, counts = np.unique(scores, return_inverse=True, return_counts=True)
  # The mean rank of equal scores, from 1.
  mean_ranks = np.cumsum(counts) - (counts - 1) / 2
  total = mean_ranks[ranks][clicks > 0].sum()
  yes = float(np.sum(clicks > 0))
  no = len(clicks) - yes
  return float((total - yes * (yes + 1) / 2) / (yes * no))


def _zipf(rng: np.random.Generator, count: int, size: int) -> np.ndarray:
  """Draws ids in [0, count); id k is drawn 1 / (k + 1) as often as id 0."""
  weights = 1.0 / np.arange(1, count + 1)
  total = np.cumsum(weights)
  found = np.searchsorted(total, rng.random(size) * total[-1])
  return np.minimum(found, count - 1).astype("int32")
