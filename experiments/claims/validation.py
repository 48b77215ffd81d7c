"""Compares predictions of the simulator with real clusters it has not seen.

  python -m experiments.claims.validation [--quick]
    [--num_seeds=2] [--output=DIR]

One real training, synchronous with 2 workers, is recorded. From its timeline,
`recorded_run.fit` finds the times of computing, reading and updating. That is
all that the simulator gets. It then predicts the step rate of other real
trainings: another run of the same kind, twice as many workers, other update
rules, and both. These trainings are measured and compared.

Parameters and gradients of 4 MB travel between real processes; computing a
gradient is replaced by waiting for drawn times (`timed_training`), so that each
worker has the speed of a machine of its own.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments import simulator
from experiments.simulator import compute_times
from experiments.simulator import recorded_run
from experiments.support import claims
from experiments.support import timed_training

NUM_ELEMENTS = 1_000_000
COMPUTE = compute_times.Lognormal(0.2, 0.3)
FITTED = "2 workers, sync"
_SIMULATED_STEPS = 2_000
_SECS = 20.0
MOST_ERROR = 0.1


class Setting(NamedTuple):
  """A configuration of the real cluster and of the simulated one.

  Attributes:
    workers: The number of workers.
    rule: The update rule as the simulator takes it.
  """

  workers: int
  rule: simulator.Sync | simulator.Async


SETTINGS = {
  FITTED: Setting(2, simulator.Sync()),
  "2 workers, sync, another run": Setting(2, simulator.Sync()),
  "4 workers, sync": Setting(4, simulator.Sync()),
  "4 workers, first 3": Setting(4, simulator.Sync(3)),
  "2 workers, async": Setting(2, simulator.Async()),
  "4 workers, async": Setting(4, simulator.Async()),
}
QUICK_SETTINGS = (FITTED, "4 workers, sync")


def record(setting: Setting, seed: int, secs: float = _SECS) -> list:
  """Trains on a real cluster, and returns the events of its timelines.

  Args:
    setting: The number of workers and the update rule.
    seed: The seed of the compute times.
    secs: About how long the training takes.
  """
  is_sync = isinstance(setting.rule, simulator.Sync)
  per_worker = round(secs / 0.2)
  draws = compute_times.Draws(COMPUTE, setting.workers, seed)
  everyone = np.arange(setting.workers)
  times = np.transpose([draws.next(everyone) for _ in range(per_worker)])
  return timed_training.train(
    times.tolist(),
    round(secs / 0.3) if is_sync else per_worker * setting.workers,
    update="sync" if is_sync else "async",
    replicas_to_aggregate=setting.rule.replicas_to_aggregate
    if is_sync
    else None,
    num_elements=NUM_ELEMENTS,
  )


def step_ends(events: Sequence[recorded_run.Event]) -> np.ndarray:
  """Returns the times of the updates, without the first tenth: float64 [n].

  The first tenth is the start: tracing, connecting.

  Args:
    events: The events of the whole run.
  """
  ends = np.sort([e.end for e in events if e.kind == "apply"])
  return ends[len(ends) // 10 :]


def step_rate(events: Sequence[recorded_run.Event]) -> float:
  """Returns the updates per second of a recorded run.

  Args:
    events: The events of the whole run.
  """
  ends = step_ends(events)
  return float((len(ends) - 1) / (ends[-1] - ends[0]))


def fit(events: Sequence[recorded_run.Event]) -> simulator.Cluster:
  """Finds the simulated cluster that behaves like a recorded run.

  Args:
    events: The events of the whole run.
  """
  begin = step_ends(events)[0]
  return recorded_run.fit(
    [e for e in events if e.start >= begin], read_bytes=4.0 * NUM_ELEMENTS
  ).cluster


def like(cluster: simulator.Cluster, workers: int) -> simulator.Cluster:
  """Returns a cluster of another size with workers of the same kind.

  All workers are equal there, with the mean speed of the given workers: what
  differed in a short record was chance.

  Args:
    cluster: The result of `fit`.
    workers: The number of workers.
  """
  factors = [cluster.slowdown[n] for n in range(cluster.num_replicas)]
  mean = statistics.geometric_mean(factors)
  secs = np.array(cluster.compute.secs) * mean
  return dataclasses.replace(
    cluster,
    num_replicas=workers,
    compute=compute_times.Empirical(tuple(secs.tolist())),
    slowdown={},
  )


def predict(cluster: simulator.Cluster, setting: Setting, seed: int) -> float:
  """Predicts the updates per second of another training on such machines.

  Args:
    cluster: The result of `fit`.
    setting: The number of workers and the update rule of the other training.
    seed: The seed of the simulation.
  """
  other = like(cluster, setting.workers)
  result = simulator.simulate(other, setting.rule, _SIMULATED_STEPS, seed=seed)
  return float(1 / result.step_secs[100:].mean())


def measure(is_quick: bool, seed: int) -> dict:
  """Trains with every setting, and predicts all of them from the first.

  With `is_quick`, it uses some of the settings only, and shorter trainings. The
  result maps the name of each setting to `measured` and `predicted` updates per
  second.
  """
  names = QUICK_SETTINGS if is_quick else SETTINGS
  secs = _SECS / 2 if is_quick else _SECS
  cluster, rows = None, {}
  for number, name in enumerate(names):
    setting = SETTINGS[name]
    # No two trainings have the same times.
    events = record(setting, 100 * seed + number, secs)
    if cluster is None:
      cluster = fit(events)
    rows[name] = {
      "measured": step_rate(events),
      "predicted": predict(cluster, setting, 100 * seed + number),
    }
  return rows


def find(measurements: Sequence[dict]) -> list[claims.Finding]:
  """Returns the measured numbers of the claim, with the claimed bounds."""
  findings = []
  for name in measurements[0]:
    bounds = (
      {}
      if name == FITTED
      else {"least": 1 - MOST_ERROR, "most": 1 + MOST_ERROR}
    )
    words = " (the training that was fitted, not judged)"
    findings.append(
      claims.Finding(
        f"{name}: predicted divided by measured updates per second"
        f"{words if name == FITTED else ''}",
        [m[name]["predicted"] / m[name]["measured"] for m in measurements],
        **bounds,
      )
    )
  return findings


def draw(measurements: Sequence[dict]):
  """Draws predicted over measured updates per second, a mark per training."""
  figure, axes = claims.new_figure(6.5, 5)
  most, least = 0.0, np.inf
  for number, name in enumerate(measurements[0]):
    x = [m[name]["measured"] for m in measurements]
    y = [m[name]["predicted"] for m in measurements]
    most, least = max(most, *x, *y), min(least, *x, *y)
    axes.plot(
      x,
      y,
      claims.MARKERS[number % len(claims.MARKERS)],
      color=claims.COLORS[number % len(claims.COLORS)],
      fillstyle="full" if number < len(claims.MARKERS) else "none",
      label=f"{name} (fitted)" if name == FITTED else name,
    )
  line = np.array([0.8 * least, 1.25 * most])
  axes.plot(line, line, "-", color="black", linewidth=0.8)
  axes.fill_between(
    line,
    line * (1 - MOST_ERROR),
    line * (1 + MOST_ERROR),
    color="#DDDDDD",
    label="within 10%",
  )
  axes.set_xscale("log")
  axes.set_yscale("log")
  axes.set_xlim(*line)
  axes.set_ylim(*line)
  axes.set_xlabel("measured updates per second")
  axes.set_ylabel("predicted updates per second")
  axes.legend(frameon=False, fontsize=9)
  return figure


CLAIM = claims.Claim(
  name="validation",
  title="What the simulator predicts, and what real clusters do",
  claim=(
    "from one recorded training with 2 synchronous workers, the simulator"
    " predicts the step rate of other trainings within 10%: of another run, of"
    " twice as many workers, and of other update rules"
  ),
  source="our own: the simulated experiments on this page rely on it",
  explanation=(
    "Each mark is a training of real processes: how many updates per second it"
    " made, and how many the simulator predicted. The simulator knows one"
    " training only, with 2 synchronous workers. It was fitted to the times"
    " that this training needed for computing, reading and updating. This"
    " training does not count for the verdict. The other trainings were not"
    " used for the fit. Each worker waits for a drawn time instead of"
    " computing, so that it has the speed of a machine of its own; 4 MB of"
    " parameters and gradients travel between real processes, which share the"
    " cores of one machine."
  ),
  measure=measure,
  find=find,
  draw=draw,
)

if __name__ == "__main__":
  claims.start(CLAIM)
