"""Compares rates that were measured in interleaved rounds."""

import math
import statistics
from collections.abc import Mapping
from collections.abc import Sequence

# Quantiles 0.975 of Student's t. The first has one degree of freedom.
_T = (
  *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262),
  *(2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101),
)


def student_t(freedom: float) -> float:
  """Returns the quantile 0.975 of Student's t.

  Args:
    freedom: The degrees of freedom, at least 1. They are rounded down, and
      those above 18 count as 18; both make an interval a little wider.
  """
  return _T[min(math.floor(freedom + 1e-9), len(_T)) - 1]


def interval_of_mean(values: Sequence[float]) -> tuple[float, float, float]:
  """Returns the mean, and the ends of its 95% interval by Student's t.

  Args:
    values: At least two independent values.
  """
  error = statistics.stdev(values) / math.sqrt(len(values))
  half = student_t(len(values) - 1) * error
  mean = statistics.mean(values)
  return mean, mean - half, mean + half


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
  """Returns the geometric mean of ratios, and the ends of its 95% interval.

  Args:
    ratios: At least two independent ratios.
  """
  mean, low, high = map(
    math.exp, interval_of_mean([math.log(ratio) for ratio in ratios])
  )
  return mean, low, high


def of_means(
  values: Sequence[float], others: Sequence[float]
) -> tuple[float, float, float]:
  """Returns the ratio of two geometric means, and the ends of its 95% interval.

  The interval is that of Welch (1947), of the logarithms: the two samples need
  not have the same variance.

  Args:
    values: Positive numbers, at least two.
    others: The numbers whose mean is the divisor, at least two.
  """
  logs = [[math.log(x) for x in numbers] for numbers in (values, others)]
  errors = [statistics.variance(xs) / len(xs) for xs in logs]
  total = sum(errors)
  mean = statistics.mean(logs[0]) - statistics.mean(logs[1])
  half = 0.0
  if total:
    freedom = total**2 / sum(
      error**2 / (len(xs) - 1) for error, xs in zip(errors, logs, strict=True)
    )
    half = student_t(freedom) * math.sqrt(total)
  return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def spread(values: Sequence[float]) -> dict[str, float]:
  """Returns the median, the smallest and the largest of some values.

  Args:
    values: The values, at least one.

  Returns:
    The three under the names `median`, `min` and `max`.
  """
  return {
    "median": statistics.median(values),
    "min": min(values),
    "max": max(values),
  }


def in_words(values: Sequence[float]) -> str:
  """Formats the median, and in parentheses the smallest and the largest value.

  Args:
    values: The values, at least one.
  """
  return spread_in_words(spread(values))


def spread_in_words(at: Mapping[str, float]) -> str:
  """Formats a result of `spread`, as `in_words` does."""
  return f"{at['median']:.2f} ({at['min']:.2f} to {at['max']:.2f})"


def compare(
  rounds: Sequence[Mapping[str, float]], pairs: Sequence[tuple[str, str]]
) -> dict[str, dict[str, float]]:
  """Divides rates by others of the same round, and prints the ratios.

  Args:
    rounds: For each round, the rates by name.
    pairs: Names of a rate and of the one by which it is divided.

  Returns:
    For each pair, under the name "NAME / OTHER", the `spread` of the ratios.
  """
  found = {}
  for name, other in pairs:
    ratios = [rates[name] / rates[other] for rates in rounds]
    found[f"{name} / {other}"] = spread(ratios)
    print(
      f"{name} / {other}: {in_words(ratios)}, {len(ratios)} rounds",
      flush=True,
    )
  return found
