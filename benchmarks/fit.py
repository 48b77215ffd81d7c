"""Compares `tf_replicas.fit` with a plain loop of updates.

  python -m benchmarks.fit [--rounds=10] [--turns=20] [--output=FILE]

A cluster of 1 PS (parameter server) and 2 workers trains a compiled model.
`fit`, without callbacks that look at batches, makes the updates of every second
epoch. Calls of `driver.step` alone make those of the others, on the same
cluster: the speed of a cluster differs by some percent from start to start. A
round is one cluster, and counts once: by the ratio of the mean updates per
second of its turns, without the first. Prints the geometric mean of the ratios,
and its 95% interval. The raw numbers go to `FILE`.
"""

import contextlib
import os
import pathlib
import statistics
import subprocess
import sys
import threading
from multiprocessing import connection

from absl import app
from absl import flags

from benchmarks import ratios
from benchmarks import stored

_ROUNDS = flags.DEFINE_integer(
  "rounds", 10, "The number of clusters", lower_bound=2
)
_TURNS = flags.DEFINE_integer(
  "turns", 20, "The number of pairs of epochs of each cluster", lower_bound=2
)
_OUTPUT = flags.DEFINE_string(
  "output", None, "The file for the raw numbers, as JSON"
)

_ROOT = pathlib.Path(__file__).resolve().parents[1]


def take_turns(count: int) -> dict[str, list[float]]:
  """Starts a cluster in which `fit` and the loop take turns.

  Args:
    count: The number of turns of each.

  Returns:
    For "fit" and "loop", the updates per second of the turns but the first.
  """
  with connection.Listener(("localhost", 0)) as listener:
    process = subprocess.Popen(
      [
        *(sys.executable, "-m", "tf_replicas.launch", "--workers=2"),
        str(_ROOT / "benchmarks" / "fit_task.py"),
        *(str(listener.address[1]), str(count)),
      ],
      cwd=_ROOT,
      env={**os.environ, "PYTHONPATH": str(_ROOT), "CUDA_VISIBLE_DEVICES": ""},
      stdout=subprocess.DEVNULL,
    )

    def wake():
      process.wait()
      with contextlib.suppress(OSError):  # If the chief did connect.
        connection.Client(listener.address).close()

    threading.Thread(target=wake, daemon=True).start()
    try:
      with listener.accept() as chief:
        turns = [chief.recv() for _ in range(count)]
      process.wait(60)
    finally:
      process.terminate()
      process.wait()
  return {mode: [t[mode] for t in turns[1:]] for mode in ("fit", "loop")}


def main(argv: list[str]) -> None:
  del argv
  rounds = []
  for number in range(_ROUNDS.value):
    turns = take_turns(_TURNS.value)
    rounds.append({mode: statistics.mean(turns[mode]) for mode in turns})
    rounds[-1]["turns"] = turns
    ratio = rounds[-1]["fit"] / rounds[-1]["loop"]
    print(f"round {number}: {ratio:.3f}", flush=True)
  mean, low, high = ratios.interval([r["fit"] / r["loop"] for r in rounds])
  print(f"fit / loop: {mean:.3f} (95%: {low:.3f} to {high:.3f})")
  stored.write(_OUTPUT.value, {"ratio": [mean, low, high], "rounds": rounds})


if __name__ == "__main__":
  app.run(main)
