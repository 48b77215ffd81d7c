"""Measures on real processes what backup workers gain; the simulator beside it.

  python -m experiments.claims.backup_workers [--quick]
    [--num_seeds=2] [--output=DIR]

With N + b workers, a synchronous step takes the first N contributions (sets of
gradients) and does not wait for the other b workers, the backups. The *speed-up
per worker* is t(0) / t(b) * N / (N + b), where t(b) is the time of a step with
b backups. The second factor is there because the backups could have been put to
other use.

How long a batch takes is measured first: 4 asynchronous workers train the
CIFAR-10 network on the cores of this machine, which other programs use too.
Then N + b real processes train synchronously, with times drawn from those that
were measured, scaled to a median of 0.25 s (`timed_training`). The simulator
is fitted to the training without backups, and predicts those with backups.
"""

import math
from collections.abc import Sequence

import numpy as np

from experiments import simulator
from experiments.claims import validation
from experiments.simulator import compute_times
from experiments.support import claims
from experiments.support import programs
from experiments.support import timed_training

NEEDED = 6
BACKUPS = (0, 1, 2, 4)
BACKUPS_QUICK = (0, 2)
_MEASURED_WORKERS = 4
_NUM_ELEMENTS = 1_000_000
_MEDIAN_SECS = 0.25
_SIMULATED_STEPS = 5_000
# Contributions per step that are only simulated, and for how many steps.
LARGER = (20, 50, 100)
_LARGER_STEPS = 1_000


def straggler_secs(num_batches: int, seed: int) -> list[float]:
  """Measures how long batches take on a machine with few cores.

  Args:
    num_batches: The number of batches of all workers together.
    seed: The seed of the training.

  Returns:
    The seconds of each batch, without the first fifth of the training.
  """
  events = programs.record_async(
    _MEASURED_WORKERS,
    "--learning_rate=0.005",
    f"--max_steps={num_batches}",
    f"--seed={seed}",
  )
  computed = [e.end - e.start for e in events if e.kind == "compute"]
  return computed[len(computed) // 5 :]


def measure(is_quick: bool, seed: int) -> dict:
  """Measures times of batches, and then step times with several backups.

  With `is_quick`, it makes fewer and shorter trainings. The result has the
  seconds of the measured batches, for each number of backups the mean seconds
  of a step, measured and simulated, and for each number of contributions per
  step the simulated best speed-up per worker.
  """
  num_steps = 40 if is_quick else 80
  secs = straggler_secs(400 if is_quick else 1_200, seed)
  scaled = np.array(secs) * _MEDIAN_SECS / np.median(secs)
  cluster, rows = None, {}
  for backups in BACKUPS_QUICK if is_quick else BACKUPS:
    total = NEEDED + backups
    events = timed_training.train_by(
      simulator.Sync(NEEDED),
      compute_times.Empirical(tuple(scaled)),
      total,
      num_steps,
      seed=seed,
      num_elements=_NUM_ELEMENTS,
    )
    if cluster is None:
      cluster = validation.fit(events, _NUM_ELEMENTS)
    simulated = simulator.simulate(
      validation.like(cluster, total),
      simulator.Sync(NEEDED),
      _SIMULATED_STEPS,
      seed=seed,
    )
    rows[str(backups)] = {
      "measured": 1 / validation.step_rate(events),
      "simulated": float(simulated.step_secs[10:].mean()),
    }
  secs = [round(s, 4) for s in secs]
  return {
    "straggler_secs": secs,
    "steps": rows,
    "simulated_speedups": {
      str(needed): simulated_speedup(secs, needed, seed)
      for needed in (NEEDED, *LARGER)
    },
  }


def speedups(measurement: dict, kind: str) -> dict[int, float]:
  """Computes the speed-up per worker for each number of backups.

  Args:
    measurement: The result of `measure`.
    kind: `measured` or `simulated`.

  Returns:
    t(0) / t(b) * N / (N + b) for each b.
  """
  rows = measurement["steps"]
  return {
    int(b): rows["0"][kind] / row[kind] * NEEDED / (NEEDED + int(b))
    for b, row in rows.items()
  }


def find(measurements: Sequence[dict]) -> list[claims.Finding]:
  """Returns the measured numbers of the claim, with the claimed bounds."""

  def each(value):
    return [float(value(m)) for m in measurements]

  backups = [b for b in map(int, measurements[0]["steps"]) if b]
  return [
    claims.Finding(
      "measured batches: 95th percentile divided by the median",
      each(lambda m: _tail(m["straggler_secs"])),
    ),
    *(
      claims.Finding(
        f"{b} backup{'s' * (b > 1)}: step time divided by that without",
        each(
          lambda m, b=b: (
            m["steps"][str(b)]["measured"] / m["steps"]["0"]["measured"]
          )
        ),
        most=0.99,
      )
      for b in backups
    ),
    claims.Finding(
      "best speed-up per worker with backups",
      each(lambda m: max(speedups(m, "measured")[b] for b in backups)),
      least=1.0,
    ),
    claims.Finding(
      "number of backups with the best speed-up per worker",
      each(lambda m: max(backups, key=speedups(m, "measured").__getitem__)),
    ),
    *(
      claims.Finding(
        f"{b} backup{'s' * (b > 1)}: simulated divided by measured step time",
        each(
          lambda m, b=b: (
            m["steps"][str(b)]["simulated"] / m["steps"][str(b)]["measured"]
          )
        ),
      )
      for b in backups
    ),
    *(
      claims.Finding(
        f"simulated, {needed} contributions per step: best speed-up per worker",
        each(lambda m, n=needed: m["simulated_speedups"][n]),
      )
      for needed in measurements[0]["simulated_speedups"]
    ),
  ]


def simulated_speedup(secs: Sequence[float], needed: int, seed: int) -> float:
  """Simulates the best speed-up per worker with some backups.

  Links are never congested.

  Args:
    secs: The seconds of batches, from which those of the workers are drawn.
    needed: N, the number of contributions per step.
    seed: The seed of the simulation.
  """
  times = compute_times.Empirical(tuple(secs))

  def step_secs(backups: int) -> float:
    result = simulator.simulate(
      simulator.Cluster(needed + backups, times),
      simulator.Sync(needed),
      _LARGER_STEPS,
      seed=seed,
    )
    return float(result.step_secs.mean())

  alone = step_secs(0)
  return max(
    alone / step_secs(b) * needed / (needed + b)
    for b in sorted({1, 2, *(math.ceil(needed * s) for s in (0.05, 0.1, 0.2))})
  )


def _tail(secs: Sequence[float]) -> float:
  return float(np.percentile(secs, 95) / np.median(secs))


def draw(measurements: Sequence[dict]):
  """Draws the measured times of batches, step times, and speed-ups."""
  figure, (left, middle, right) = claims.new_figure(12, 3.6, ncols=3)
  secs = [np.array(m["straggler_secs"]) for m in measurements]
  left.hist(
    np.concatenate([own / np.median(own) for own in secs]),
    bins=60,
    color=claims.COLORS[4],
  )
  left.set_xlabel("time of a batch (of the median)")
  left.set_ylabel("batches")
  tail = np.median([_tail(own) for own in secs])
  left.set_title(f"Measured batches: 95% below {tail:.2f}")
  for number, kind in enumerate(("measured", "simulated")):
    backups = [int(b) for b in measurements[0]["steps"]]
    for axis, value in (
      (middle, lambda m, b, kind=kind: m["steps"][str(b)][kind]),
      (right, lambda m, b, kind=kind: speedups(m, kind)[b]),
    ):
      rows = np.array([[value(m, b) for b in backups] for m in measurements])
      center = np.median(rows, axis=0)
      axis.errorbar(
        backups,
        center,
        yerr=[center - rows.min(0), rows.max(0) - center],
        color=claims.COLORS[number],
        marker=claims.MARKERS[number],
        linestyle=("-", "--")[number],
        capsize=4,
        label=kind,
      )
  right.axhline(1.0, color="black", linewidth=0.8)
  for axis, label, title in (
    (middle, "mean step (s)", "Time of a step"),
    (right, "speed-up per worker", "Speed-up, with the backups as a cost"),
  ):
    axis.set_xlabel(f"backup workers, {NEEDED} contributions per step")
    axis.set_ylabel(label)
    axis.set_ylim(bottom=0)
    axis.set_title(title)
    axis.legend(frameon=False, loc="lower left")
    axis.grid(alpha=0.3)
  return figure


CLAIM = claims.Claim(
  name="backup_workers",
  title="Backup workers on real processes",
  claim=(
    f"with {NEEDED} contributions per step, a few backup workers make"
    " synchronous steps shorter, by more than their share of the machines"
  ),
  source="Chen et al. 2016, sections 2.2 and 4",
  explanation=(
    "A synchronous step takes as long as its slowest worker. With backup"
    f" workers, a step takes the first {NEEDED} sets of gradients and does not"
    " wait for the rest. The left plot shows how long batches took on 4"
    " asynchronous workers on this machine. The other plots show real"
    f" processes, {NEEDED} workers and up to {BACKUPS[-1]} backups. The times"
    " of their batches are drawn from those in the left plot. The right plot"
    " counts the backups as a cost: above 1, the backups are worth more than"
    " their share of the machines. The simulator was fitted to the real"
    " training without backups; its other points are predictions. The verdict"
    f" is one on {NEEDED} contributions per step, where a backup is a large"
    " share of the machines, and on the measured distribution, which has no"
    " heavy tail (the first number of the table). With the same times and more"
    " contributions per step, the simulator finds that backups are worth more"
    " than their share (the last numbers; links that are never congested)."
    " Other distributions give other results: `backup_curves`"
    " simulates four, with 50 contributions per step, and finds best speed-ups"
    " per worker between 1.14 and 2.7."
  ),
  measure=measure,
  find=find,
  draw=draw,
)

if __name__ == "__main__":
  claims.start(CLAIM)
