"""How long one batch takes: distributions, and reproducible draws from them."""

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import numpy as np


class Distribution(Protocol):
  """Seconds that a replica computes for one batch."""

  def sample(self, rng: np.random.Generator, shape: tuple[int, ...]):
    """Independent draws: float64 of `shape`, seconds.

    The first rows do not depend on how many follow, so that clusters of
    different sizes can be compared on the same draws.
    """


@dataclasses.dataclass(frozen=True)
class Constant:
  """Always `secs`."""

  secs: float

  def sample(self, rng, shape):
    del rng
    return np.full(shape, self.secs, np.float64)


@dataclasses.dataclass(frozen=True)
class Exponential:
  """`shift` plus an exponential time of mean `mean`."""

  mean: float
  shift: float = 0.0

  def sample(self, rng, shape):
    return self.shift + rng.exponential(self.mean, shape)


@dataclasses.dataclass(frozen=True)
class Normal:
  """Normal, with what would be negative taken as zero."""

  mean: float
  deviation: float

  def sample(self, rng, shape):
    return np.maximum(rng.normal(self.mean, self.deviation, shape), 0.0)


@dataclasses.dataclass(frozen=True)
class Lognormal:
  """Its logarithm is normal; the median is `median`."""

  median: float
  sigma: float

  def sample(self, rng, shape):
    return self.median * rng.lognormal(0.0, self.sigma, shape)


@dataclasses.dataclass(frozen=True)
class Pareto:
  """`shift` + `scale` * X, where P(X > x) = x ** -`exponent` for x >= 1."""

  shift: float
  scale: float
  exponent: float

  def sample(self, rng, shape):
    return self.shift + self.scale * (1.0 + rng.pareto(self.exponent, shape))


@dataclasses.dataclass(frozen=True)
class Mixture:
  """Mostly `usual`; a batch in `slow_fraction` of all cases is `slow`."""

  usual: Distribution
  slow: Distribution
  slow_fraction: float

  def sample(self, rng, shape):
    choice, usual, slow = rng.spawn(3)
    return np.where(
      choice.random(shape) < self.slow_fraction,
      self.slow.sample(slow, shape),
      self.usual.sample(usual, shape),
    )


@dataclasses.dataclass(frozen=True)
class Empirical:
  """Draws with replacement from what was measured."""

  secs: tuple[float, ...]

  def sample(self, rng, shape):
    return np.asarray(self.secs)[rng.integers(0, len(self.secs), shape)]


class Draws:
  """The compute times of M replicas, each a sequence of its own.

  The k-th batch of a replica takes the same time whatever the others do and in
  whatever order the draws are asked for.
  """

  _BLOCK = 16

  def __init__(
    self,
    distribution: Distribution,
    num_replicas: int,
    seed: int,
    slowdown: Mapping[int, float] | None = None,
  ):
    """Begins all sequences.

    Args:
      distribution: Of one batch.
      num_replicas: M.
      seed: Of all sequences.
      slowdown: By what the times of a replica are multiplied, if not by 1.
    """
    self._distribution = distribution
    self._seed = seed
    self._factors = np.ones([num_replicas, 1])
    for replica, factor in (slowdown or {}).items():
      self._factors[replica] = factor
    self._drawn = np.zeros([num_replicas], np.int64)
    self._blocks = {}

  def next(self, replicas: np.ndarray) -> np.ndarray:
    """The next compute time of each of `replicas`, all different.

    Args:
      replicas: int64 [n].

    Returns:
      float64 [n], seconds.
    """
    block, column = np.divmod(self._drawn[replicas], self._BLOCK)
    self._drawn[replicas] += 1
    numbers = np.unique(block)
    if len(numbers) == 1:
      return self._block(int(numbers[0]))[replicas, column]
    times = np.empty(len(replicas))
    for number in numbers:
      here = block == number
      times[here] = self._block(int(number))[replicas[here], column[here]]
    return times

  def next_of(self, replica: int) -> float:
    """The next compute time of one replica, seconds."""
    block, column = divmod(int(self._drawn[replica]), self._BLOCK)
    self._drawn[replica] += 1
    return float(self._block(block)[replica, column])

  def _block(self, number: int) -> np.ndarray:
    if number not in self._blocks:
      oldest = int(self._drawn.min() - 1) // self._BLOCK
      for old in [n for n in self._blocks if n < oldest]:
        del self._blocks[old]
      rng = np.random.default_rng([self._seed, number])
      shape = (len(self._drawn), self._BLOCK)
      self._blocks[number] = self._factors * self._distribution.sample(
        rng, shape
      )
    return self._blocks[number]
