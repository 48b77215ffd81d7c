"""Averages ratios of rates that were measured in interleaved rounds."""

import math
import statistics

# Quantiles 0.975 of Student's t, by degrees of freedom.
_T = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31}
_T |= {9: 2.26, 10: 2.23, 11: 2.20, 12: 2.18, 13: 2.16, 14: 2.14, 15: 2.13}


def interval(ratios: list[float]) -> tuple[float, float, float]:
  """Returns the geometric mean of ratios, and the ends of its 95% interval."""
  logs = [math.log(ratio) for ratio in ratios]
  error = statistics.stdev(logs) / math.sqrt(len(logs))
  half = _T.get(len(logs) - 1, 2.1) * error
  mean = statistics.mean(logs)
  return math.exp(mean), math.exp(mean - half), math.exp(mean + half)
