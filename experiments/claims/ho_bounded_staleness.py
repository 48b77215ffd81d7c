"""Draws the error against time for several bounds of the staleness.

  python -m experiments.claims.ho_bounded_staleness [--quick]
    [--num_seeds=5] [--output=DIR]

The central figure of Ho et al. 2013 (quality against time under stale
synchronous parallel training), with the library's rules in virtual time and
with the network of the race: 8 workers whose compute times were measured on
real stragglers, and the learning rate that is best for bound 0.
"""

from collections.abc import Sequence

import numpy as np

from experiments.simulator import compute_times
from experiments.support import claims
from experiments.support import error_curves

WORKERS = 8
RATES = (0.0075, 0.015, 0.03, 0.06)
ERROR = 0.2
SECS, SECS_QUICK = 160, 16
_EVERY = 2
BOUNDS = (0, 2, 8)
RULES = {
  **{
    f"bound {bound}": {"rules": ("bounded_staleness",), "max_staleness": bound}
    for bound in BOUNDS
  },
  "no bound": {"rules": ("async",)},
}


def measure(is_quick: bool, seed: int) -> dict:
  """Trains with every bound for an equal virtual time, and measures errors.

  With `is_quick`, it trains for a shorter time.
  """
  from experiments.support import race_task

  times = list(range(0, (SECS_QUICK if is_quick else SECS) + 1, _EVERY))
  rows = error_curves.measure_rates(
    RULES,
    RATES,
    workers=WORKERS,
    times=times,
    compute=lambda: compute_times.Draws(
      race_task.measured(),
      WORKERS,
      seed,
      block=race_task.TIMES_IN_A_ROW,
    ),
    seed=seed,
  )
  return {"times": times, "rates": rows}


def _at_best_rate(measurements: Sequence[dict]) -> list[dict]:
  """Returns the curves of each seed at the rate that is best for bound 0."""
  rate = error_curves.best_rate(measurements, f"bound {BOUNDS[0]}")
  return [
    {"times": m["times"], "rules": m["rates"][str(rate)]} for m in measurements
  ]


def _time(m: dict, rule: str) -> float:
  return error_curves.time_to(m["times"], m["rules"][rule]["errors"], ERROR)


def _error_at(m: dict, rule: str, updates: float) -> float:
  row = m["rules"][rule]
  return float(np.interp(updates, row["updates"], row["errors"]))


def find(measurements: Sequence[dict]) -> list[claims.Finding]:
  """Returns the measured numbers of the claim, with the claimed bounds."""
  rate = error_curves.best_rate(measurements, f"bound {BOUNDS[0]}")
  measurements = _at_best_rate(measurements)
  first, *others = (f"bound {bound}" for bound in BOUNDS)
  last = others[-1]

  def updates(m, rule):
    return m["rules"][rule]["updates"][-1]

  def lost(m):
    # Half of the updates of the slowest rule: the error still falls there.
    count = min(updates(m, rule) for rule in RULES) / 2
    return _error_at(m, last, count) - _error_at(m, first, count)

  return [
    claims.Finding(
      f"updates with {last} / with {first}, in the same time",
      [updates(m, last) / updates(m, first) for m in measurements],
      least=1.0,
    ),
    claims.Finding(
      f"error with {last} less that with {first}, after the same number of"
      " updates",
      [lost(m) for m in measurements],
      least=0.0,
    ),
    *(
      claims.Finding(
        f"time to an error of {ERROR} with {rule} / with {first}",
        [_time(m, rule) / _time(m, first) for m in measurements],
        most=1.0,
      )
      for rule in others
    ),
    *(
      claims.Finding(
        f"time to an error of {ERROR} without bound / with {rule}",
        [_time(m, "no bound") / _time(m, rule) for m in measurements],
        least=1.0,
      )
      for rule in others
    ),
    claims.Finding("learning rate, the best one for bound 0", [rate]),
  ]


def draw(measurements: Sequence[dict]):
  """Draws the errors over time: the median and the range over the seeds."""
  figure, axes = claims.new_figure(7, 4.5)
  measurements = _at_best_rate(measurements)
  curves = {
    rule: np.array([m["rules"][rule]["errors"] for m in measurements])
    for rule in RULES
  }
  error_curves.draw(axes, measurements[0]["times"], curves)
  axes.axhline(ERROR, color="grey", linestyle=":")
  return figure


CLAIM = claims.Claim(
  name="ho_bounded_staleness",
  title="Quality against time with a bound on the staleness",
  claim=(
    "A bound on the staleness lets workers with stragglers make more updates in"
    " the same time than a barrier in every step (bound 0). An update is worth"
    " less then, and yet a given error is reached sooner than with the barrier,"
    " and not later than without any bound."
  ),
  source=(
    "Ho et al. 2013, More effective distributed ML via a stale synchronous"
    " parallel parameter server"
  ),
  explanation=(
    f"{WORKERS} workers train the network of the race in virtual time. Their"
    " compute times are drawn from measured stragglers. Each gradient is"
    " applied as it arrives; with bound s, no replica is more than s steps"
    " ahead of the slowest. Of the learning rates"
    f" {', '.join(map(str, RATES))}, all bounds have the one with which bound 0"
    " ends with the smallest mean error."
    " Lines are medians over the seeds, bands the range. The paper trains topic"
    " models and matrix factorizations on up to 32 machines; its parameter"
    " servers cache variables in the workers, which this library does not do."
  ),
  measure=measure,
  find=find,
  draw=draw,
)

if __name__ == "__main__":
  claims.start(CLAIM)
