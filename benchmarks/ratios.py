"""Compares rates that were measured in interleaved rounds."""

import math
import statistics
from collections.abc import Mapping
from collections.abc import Sequence

# Quantiles 0.975 of Student's t, by degrees of freedom.
_T = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31}
_T |= {9: 2.26, 10: 2.23, 11: 2.20, 12: 2.18, 13: 2.16, 14: 2.14, 15: 2.13}
_T |= {16: 2.12, 17: 2.11, 18: 2.10}


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
  """Returns the geometric mean of ratios, and the ends of its 95% interval."""
  logs = [math.log(ratio) for ratio in ratios]
  error = statistics.stdev(logs) / math.sqrt(len(logs))
  half = _T.get(len(logs) - 1, 2.1) * error
  mean = statistics.mean(logs)
  return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


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
    # Rounded down, which makes the interval a little wider.
    half = _T[min(math.floor(freedom + 1e-9), max(_T))] * math.sqrt(total)
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
