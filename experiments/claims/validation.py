"""Compares step rates that the simulator predicts with those of real clusters.

  python -m experiments.claims.validation [--quick]
    [--num_seeds=1] [--output=DIR]

Trains the CIFAR-10 network on real clusters of 1 PS (parameter server) and
several workers on this machine, with `--timeline`. From each half of a record,
`recorded_run.fit` finds how long computing and reading took. From that, the
simulator predicts the steps per second: it adds who waits for whom, and for how
long. Each prediction is compared with the half of the record on which it is
based, so that a machine that becomes slower or faster meanwhile does no harm.
"""

import statistics
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments import simulator
from experiments.simulator import recorded_run
from experiments.support import claims
from experiments.support import programs

_PARAMETER_BYTES = 1_068_298 * 4.0
_SIMULATED_STEPS = 2_000
MOST_ERROR = 0.1


class Setting(NamedTuple):
  """A configuration of the real cluster and of the simulated one.

  Attributes:
    workers: The number of workers.
    rule: The update rule as the simulator takes it.
    flags: Flags that give the training program this update rule.
  """

  workers: int
  rule: simulator.Sync | simulator.Async
  flags: Sequence[str] = ()


SETTINGS = {
  "1 worker, sync": Setting(1, simulator.Sync()),
  "2 workers, sync": Setting(2, simulator.Sync()),
  "2 workers, sync, in-graph": Setting(
    2, simulator.Sync(), ["--replication=in_graph"]
  ),
  "3 workers, sync": Setting(3, simulator.Sync()),
  "3 workers, first 2": Setting(
    3, simulator.Sync(2), ["--replicas_to_aggregate=2"]
  ),
  "2 workers, async": Setting(2, simulator.Async(), ["--update=async"]),
  "3 workers, async": Setting(3, simulator.Async(), ["--update=async"]),
}
QUICK_SETTINGS = ("2 workers, sync", "2 workers, async")


def record(setting: Setting, num_batches: int, seed: int) -> list:
  """Trains on a real cluster, and returns the events of its timelines.

  Args:
    setting: The number of workers and the update rule.
    num_batches: The number of batches whose gradients are applied.
    seed: The seed of the training.
  """
  per_update = 1
  if isinstance(setting.rule, simulator.Sync):
    per_update = setting.rule.replicas_to_aggregate or setting.workers
  with tempfile.TemporaryDirectory() as directory:
    spec = programs.write_spec(directory, workers=setting.workers)
    programs.output(
      "cifar10.distributed_train",
      "--dataset=synthetic",
      f"--cluster_spec={spec}",
      f"--train_dir={directory}/run",
      "--batch_size=64",
      "--learning_rate=0.01",
      f"--max_steps={num_batches // per_update}",
      f"--seed={seed}",
      "--timeline",
      *setting.flags,
    )
    return recorded_run.read(f"{directory}/run/timeline")


def compare(events: Sequence[recorded_run.Event], rule, seed: int) -> dict:
  """Returns the updates per second of a recorded run: measured and predicted.

  Args:
    events: The events of the whole run.
    rule: The update rule as the simulator takes it.
    seed: The seed of the simulations.

  Returns:
    `measured` and `predicted`: geometric means over both halves of the run.
  """
  ends = np.sort([e.end for e in events if e.kind == "apply"])
  # The first tenth is the start: tracing, connecting.
  first, middle, last = len(ends) // 10, len(ends) * 55 // 100, len(ends) - 1
  measured, predicted = [], []
  for begin, end in ((first, middle), (middle, last)):
    measured.append((end - begin) / (ends[end] - ends[begin]))
    fit = recorded_run.fit(
      [e for e in events if ends[begin] <= e.start and e.end <= ends[end]],
      read_bytes=_PARAMETER_BYTES,
    )
    result = simulator.simulate(fit.cluster, rule, _SIMULATED_STEPS, seed=seed)
    predicted.append(1 / result.step_secs[100:].mean())
  return {
    "measured": statistics.geometric_mean(measured),
    "predicted": statistics.geometric_mean(predicted),
  }


def measure(is_quick: bool, seed: int) -> dict:
  """Trains with every setting, and compares measured and predicted rates.

  With `is_quick`, it uses some of the settings only, and fewer batches. The
  result maps the name of each setting to the result of `compare`.
  """
  num_batches = 200 if is_quick else 800
  return {
    name: compare(record(setting, num_batches, seed), setting.rule, seed)
    for name, setting in SETTINGS.items()
    if not is_quick or name in QUICK_SETTINGS
  }


def find(measurements: Sequence[dict]) -> list[claims.Finding]:
  """Returns the measured numbers of the claim, with the claimed bounds."""
  return [
    claims.Finding(
      f"{name}: predicted of measured updates per second",
      [m[name]["predicted"] / m[name]["measured"] for m in measurements],
      least=1 - MOST_ERROR,
      most=1 + MOST_ERROR,
    )
    for name in measurements[0]
  ]


def draw(measurements: Sequence[dict]):
  """Draws predicted over measured updates per second, a mark per training."""
  figure, axes = claims.new_figure(6.5, 5)
  most = 0.0
  for number, name in enumerate(measurements[0]):
    x = [m[name]["measured"] for m in measurements]
    y = [m[name]["predicted"] for m in measurements]
    most = max(most, *x, *y)
    axes.plot(
      x,
      y,
      claims.MARKERS[number % len(claims.MARKERS)],
      color=claims.COLORS[number % len(claims.COLORS)],
      fillstyle="full" if number < len(claims.MARKERS) else "none",
      label=name,
    )
  line = np.array([0, 1.1 * most])
  axes.plot(line, line, "-", color="black", linewidth=0.8)
  axes.fill_between(
    line,
    line * (1 - MOST_ERROR),
    line * (1 + MOST_ERROR),
    color="#DDDDDD",
    label="within 10%",
  )
  axes.set_xlim(0, line[1])
  axes.set_ylim(0, line[1])
  axes.set_xlabel("measured updates per second")
  axes.set_ylabel("predicted updates per second")
  axes.legend(frameon=False, fontsize=9)
  return figure


CLAIM = claims.Claim(
  name="validation",
  title="What the simulator predicts, and what real clusters do",
  claim=(
    "from how long computing and reading took in a run, the simulator gives"
    " its step rate within 10%, whatever the update rule and the driver"
  ),
  source="our own: what the simulated claims on this page rest on",
  explanation=(
    "Each mark is a training of real processes: how many updates per second it"
    " made, and how many the simulator expected of a cluster with the computing"
    " times and the links that its record shows, each half of the run with its"
    " own. What the simulator adds is who waits for whom, and for how long."
  ),
  measure=measure,
  find=find,
  draw=draw,
)

if __name__ == "__main__":
  claims.start(CLAIM)
