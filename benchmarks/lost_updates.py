"""Counts the updates that asynchronous training without locks loses.

  python -m benchmarks.lost_updates [INCREMENTS] [--runs=1] [--output=FILE]

1 PS (parameter server) and 3 workers are a process each. Every worker reads the
variable and applies a gradient of ones, INCREMENTS (1,000) times, as fast as it
can. Two workers that change a value at the same time may lose a change. The
final values of the variable, and of the slots of the optimizer, tell how many
updates they have got.
"""

import argparse
import json
import pathlib
import tempfile
from collections.abc import Mapping

import numpy as np

from benchmarks import stored
from experiments.support import programs

REPLICAS = 3
INCREMENTS = 1000
OPTIMIZERS = ("sgd", "momentum", "adam")
RATE = 2.0**-10
# Slots that forget nothing, or little, so that each update shows in them.
MOMENTUM = 1.0
BETA = 1 - 2.0**-12
EPSILON = 1e-7
# So late that Adam's corrections of its start, 1 - BETA ** step, are 1. Else
# the order in which replicas got their step numbers would matter.
FIRST_STEP = 1 << 20


def alone(name: str, updates: int) -> dict[str, np.ndarray]:
  """Computes what updates by one replica alone make of variable and slots.

  Args:
    name: The optimizer, one of `OPTIMIZERS`.
    updates: The number of updates.

  Returns:
    For the variable and each slot, by its name in checkpoints, the value after
    every update: float32 [1 + updates].
  """
  names = {
    "sgd": ["variables/v"],
    "momentum": ["variables/v", "slots/sgd/momentum/v"],
    "adam": ["variables/v", "slots/adam/momentum/v", "slots/adam/velocity/v"],
  }
  rate, rest = np.float32(RATE), np.float32(1 - BETA)
  value = first = second = np.float32(0)
  rows = [(value, first, second)]
  for _ in range(updates):
    if name == "adam":
      first += (1 - first) * rest
      second += (1 - second) * rest
      value -= rate * first / (np.sqrt(second) + np.float32(EPSILON))
    else:
      first = first * np.float32(MOMENTUM if name == "momentum" else 0) - rate
      value += first
    rows.append((value, first, second))
  columns = np.transpose(rows)
  return dict(zip(names[name], columns[: len(names[name])], strict=True))


def measure(
  name: str,
  *,
  use_locking: bool,
  increments: int = INCREMENTS,
  environ: Mapping[str, str] | None = None,
) -> dict[str, float]:
  """Trains on a new cluster, and returns how many updates were lost.

  Args:
    name: The optimizer, one of `OPTIMIZERS`.
    use_locking: Whether updates of one variable exclude each other.
    increments: The number of updates that each worker makes.
    environ: The environment of the processes. None: that of this process.

  Returns:
    The number of lost updates for the variable and each slot, by name: the
    number of all updates less the number of updates by which one replica alone
    comes to its value.
  """
  with tempfile.TemporaryDirectory() as directory:
    programs.run_tasks(
      "benchmarks.lost_updates_task",
      [name, int(use_locking), increments],
      document={"ps": ["localhost:0"], "worker": ["localhost:0"] * REPLICAS},
      directory=directory,
      environ=environ,
    )
    state = json.loads((pathlib.Path(directory) / "state.json").read_text())
  updates = REPLICAS * increments
  return {
    key: updates - count(np.float32(state[key]), values)
    for key, values in alone(name, updates).items()
  }


def count(found: np.ndarray, values: np.ndarray) -> float:
  """Returns after how many updates by one replica the values are `found`.

  The number is interpolated for each element; the result is the mean over all
  elements.

  Args:
    found: The values of the elements of a variable.
    values: The value after every update, by one replica alone.
  """
  numbers = np.arange(len(values))
  return float(np.mean(np.interp(np.abs(found), np.abs(values), numbers)))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("increments", type=int, nargs="?", default=INCREMENTS)
  parser.add_argument("--runs", type=int, default=1)
  parser.add_argument("--output", help="File for the results, as JSON")
  arguments = parser.parse_args()
  increments = arguments.increments
  updates = REPLICAS * increments
  print(f"{REPLICAS} workers, {increments} updates each; lost of {updates}:")
  runs = []
  for _ in range(arguments.runs):
    runs.append({})
    for name in OPTIMIZERS:
      for use_locking in (True, False):
        lost = measure(name, use_locking=use_locking, increments=increments)
        cells = [f"{k} {v:.1f} ({v / updates:.2%})" for k, v in lost.items()]
        how = "locking" if use_locking else "no locking"
        print(f"{name:9} {how:11} {', '.join(cells)}", flush=True)
        runs[-1][f"{name}, {how}"] = lost
    stored.write(arguments.output, {"updates": updates, "lost_updates": runs})


if __name__ == "__main__":
  main()
