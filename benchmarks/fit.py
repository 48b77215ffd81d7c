"""Compares `tf_replicas.fit` with a plain loop of updates.

  python -m benchmarks.fit [--rounds=12] [--turns=12] [--output=FILE]

Both train the same compiled model with the same data, on 1 PS (parameter
server) and 2 workers: one by `fit` without callbacks that look at batches, the
other by calls of `driver.step` alone. A round starts a cluster for each, and
the two take turns of one epoch, so that they meet the same noise. The speed of
a cluster differs by some percent from start to start, so a round counts once:
by the ratio of the mean updates per second of its turns, without the first.
Prints the geometric mean of the ratios, and its 95% interval. The raw numbers
go to `FILE`.
"""

import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import connection

from absl import app
from absl import flags

from benchmarks import ratios

_ROUNDS = flags.DEFINE_integer(
  "rounds", 12, "The number of pairs of clusters", lower_bound=2
)
_TURNS = flags.DEFINE_integer(
  "turns", 12, "The number of epochs of each cluster", lower_bound=2
)
_OUTPUT = flags.DEFINE_string(
  "output", None, "The file for the raw numbers, as JSON"
)

_ROOT = pathlib.Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def training(mode: str, epochs: int) -> Iterator[connection.Connection]:
  """Context in which a cluster trains; it yields a connection to the chief.

  Anything sent by this connection lets the chief begin the next epoch. The
  chief answers with the updates per second of the epoch.

  Args:
    mode: "fit" or "loop": how the cluster trains.
    epochs: The number of epochs.
  """
  with connection.Listener(("localhost", 0)) as listener:
    process = subprocess.Popen(
      [
        *(sys.executable, "-m", "tf_replicas.launch", "--workers=2"),
        str(_ROOT / "benchmarks" / "fit_task.py"),
        *(mode, str(listener.address[1]), str(epochs)),
      ],
      cwd=_ROOT,
      env={**os.environ, "PYTHONPATH": str(_ROOT), "CUDA_VISIBLE_DEVICES": ""},
      stdout=subprocess.DEVNULL,
    )
    try:
      with listener.accept() as chief:
        yield chief
      process.wait(60)
    finally:
      process.terminate()
      process.wait()


def take_turns(count: int) -> dict[str, list[float]]:
  """Starts a cluster that uses `fit` and one that uses the loop.

  Args:
    count: The number of epochs of each.

  Returns:
    For "fit" and "loop", the updates per second of the epochs but the first.
  """
  rates = {"fit": [], "loop": []}
  with training("fit", count) as fit, training("loop", count) as loop:
    for number in range(count):
      pairs = [("fit", fit), ("loop", loop)]
      for mode, chief in pairs if number % 2 else pairs[::-1]:
        chief.send(True)
        rates[mode].append(chief.recv())
  return {mode: found[1:] for mode, found in rates.items()}


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
  if _OUTPUT.value:
    text = json.dumps({"rounds": rounds}, indent=1) + "\n"
    pathlib.Path(_OUTPUT.value).write_text(text, encoding="utf-8")


if __name__ == "__main__":
  app.run(main)
