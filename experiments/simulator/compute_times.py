"""Draws how long the computation of one batch takes, from distributions."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Protocol

import numpy as np


class Distribution(Protocol):
  """Interface of a distribution of the seconds that one batch takes."""

  def sample(self, rng: np.random.Generator, shape: tuple[int, ...]):
    """Returns independent draws: float64 of `shape`, in seconds.

    The first rows do not depend on how many rows follow, so that clusters of
    different sizes can be compared with equal draws.

    Args:
      rng: The source of random numbers.
      shape: The shape of the result.
    """


@dataclasses.dataclass(frozen=True)
class Constant:
  """Distribution in which every batch takes `secs` seconds."""

  secs: float

  def sample(self, rng, shape):
    del rng
    return np.full(shape, self.secs, np.float64)


@dataclasses.dataclass(frozen=True)
class Exponential:
  """Distribution of `shift` plus exponential seconds of mean `mean`."""

  mean: float
  shift: float = 0.0

  def sample(self, rng, shape):
    return self.shift + rng.exponential(self.mean, shape)


@dataclasses.dataclass(frozen=True)
class Normal:
  """Normal distribution of seconds, in which negative draws become zero."""

  mean: float
  deviation: float

  def sample(self, rng, shape):
    return np.maximum(rng.normal(self.mean, self.deviation, shape), 0.0)


@dataclasses.dataclass(frozen=True)
class Lognormal:
  """Lognormal distribution of seconds, with the median `median`.

  The logarithm of a draw has the standard deviation `sigma`.
  """

  median: float
  sigma: float

  def sample(self, rng, shape):
    return self.median * rng.lognormal(0.0, self.sigma, shape)


@dataclasses.dataclass(frozen=True)
class Pareto:
  """Distribution of `shift` + `scale` * X seconds, with a random number X.

  X has a Pareto distribution: P(X > x) = x ** -`exponent` for x >= 1.
  """

  shift: float
  scale: float
  exponent: float

  def sample(self, rng, shape):
    return self.shift + self.scale * (1.0 + rng.pareto(self.exponent, shape))


@dataclasses.dataclass(frozen=True)
class Mixture:
  """Mixture of two distributions: some batches are slow, all others usual.

  A batch is slow with the probability `slow_fraction`.
  """

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
  """Distribution that draws, with replacement, from measured seconds `secs`."""

  secs: tuple[float, ...]

  def sample(self, rng, shape):
    return np.asarray(self.secs)[rng.integers(0, len(self.secs), shape)]


@dataclasses.dataclass(frozen=True)
class Recorded:
  """Measured seconds of several replicas, replayed in the order of measurement.

  A row of draws begins at a random place of a random replica, so that slow
  times last as long as they did. After its last measurement, a replica begins
  again with its first.

  Attributes:
    replicas: The seconds of each replica, in the order of time.
  """

  replicas: tuple[tuple[float, ...], ...]

  def sample(self, rng, shape):
    *rows, columns = shape
    sampled = np.empty([math.prod(rows), columns])
    for row in sampled:
      secs = np.asarray(self.replicas[rng.integers(len(self.replicas))])
      start = rng.integers(len(secs))
      row[:] = secs[(start + np.arange(columns)) % len(secs)]
    return sampled.reshape(shape)


class Draws:
  """Draws the compute times of M replicas, each from a sequence of its own.

  The k-th batch of a replica takes the same time, whatever the other replicas
  do, and in whatever order the draws are made.
  """

  def __init__(
    self,
    distribution: Distribution,
    num_replicas: int,
    seed: int,
    slowdown: Mapping[int, float] | None = None,
    block: int = 16,
  ):
    """Prepares the sequences of all replicas.

    Args:
      distribution: The distribution of the seconds that one batch takes.
      num_replicas: M, the number of replicas.
      seed: The seed of all sequences.
      slowdown: Maps the index of a replica to the factor by which its times are
        multiplied. The factor of all other replicas is 1.
      block: How many times of each replica are drawn in one row.
    """
    self._block_size = block
    self._distribution = distribution
    self._seed = seed
    self._factors = np.ones([num_replicas, 1])
    for replica, factor in (slowdown or {}).items():
      self._factors[replica] = factor
    self._drawn = np.zeros([num_replicas], np.int64)
    self._blocks = {}

  def next(self, replicas: np.ndarray) -> np.ndarray:
    """Returns the next compute time of each of some replicas.

    Args:
      replicas: int64 [n], distinct indices of replicas.

    Returns:
      float64 [n], seconds.
    """
    block, column = np.divmod(self._drawn[replicas], self._block_size)
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
    """Returns the next compute time of the replica `replica`, in seconds."""
    block, column = divmod(int(self._drawn[replica]), self._block_size)
    self._drawn[replica] += 1
    return float(self._block(block)[replica, column])

  def _block(self, number: int) -> np.ndarray:
    if number not in self._blocks:
      oldest = int(self._drawn.min() - 1) // self._block_size
      for old in [n for n in self._blocks if n < oldest]:
        del self._blocks[old]
      rng = np.random.default_rng([self._seed, number])
      shape = (len(self._drawn), self._block_size)
      self._blocks[number] = self._factors * self._distribution.sample(
        rng, shape
      )
    return self._blocks[number]
