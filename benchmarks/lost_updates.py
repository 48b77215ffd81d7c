"""What asynchronous updates lose without locking: increments, counted.

  python -m benchmarks.lost_updates [INCREMENTS]

1 PS and 3 workers, each a process; every worker reads and applies a gradient
of ones as often as told (1,000 times), as fast as it can. The variable, and
the slots of the optimizer, tell how many of the updates they have seen.
"""

import json
import pathlib
import sys
import tempfile
from collections.abc import Mapping

import numpy as np

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
  """What `updates` updates in a row make, by the name in checkpoints.

  Args:
    name: One of `OPTIMIZERS`.
    updates: How many.

  Returns:
    float32 [1 + updates] each: the value after every update.
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
  """Trains on a fresh cluster.

  Args:
    name: One of `OPTIMIZERS`.
    use_locking: Whether updates of one variable exclude each other.
    increments: How many updates each worker makes.
    environ: Of the processes; this one's if not given.

  Returns:
    The updates that did not arrive, by the name of the variable or slot: how
    many less, made by one replica alone, lead to its value.
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
  """After how many updates the values were `found`; the mean over these."""
  numbers = np.arange(len(values))
  return float(np.mean(np.interp(np.abs(found), np.abs(values), numbers)))


def main(increments: int) -> None:
  updates = REPLICAS * increments
  print(f"{REPLICAS} workers, {increments} updates each; lost of {updates}:")
  for name in OPTIMIZERS:
    for use_locking in (True, False):
      lost = measure(name, use_locking=use_locking, increments=increments)
      cells = [f"{k} {v:.1f} ({v / updates:.2%})" for k, v in lost.items()]
      how = "locking" if use_locking else "no locking"
      print(f"{name:9} {how:11} {', '.join(cells)}", flush=True)


if __name__ == "__main__":
  main(int(sys.argv[1]) if len(sys.argv) > 1 else INCREMENTS)
