"""What recording a timeline costs, of a replica's step.

  python -m benchmarks.timeline [ROUNDS]

Seconds of writing a turn down, by 2,000 of them, against seconds of a step of
the CIFAR-10 network with batch 64 in a process of its own, in turn.
"""

import re
import statistics
import sys
import tempfile
import time

import tensorflow as tf

from experiments import programs
from tf_replicas import releases
from tf_replicas import timeline

_BATCH_SIZE = 64
_TURNS = 2_000


def turn_secs() -> float:
  """Seconds that it takes to write one turn down."""
  with tempfile.TemporaryDirectory() as directory:
    recorder = timeline.Recorder(directory, "worker_0")

    @tf.function(autograph=False)
    def turn(began):
      release = releases.Release(
        1,
        tf.constant(8, tf.int64),
        tf.constant(-1, tf.int64),
        releases.pack_times(began + 0.12, began + 0.2, 0, began + 0.31),
      )
      recorder.record_turn(
        "worker:0",
        tf.constant(7, tf.int64),
        began,
        began + 0.1,
        release,
        [tf.zeros([])],
      )
      return began

    @tf.function(autograph=False)
    def nothing(began):
      return began

    def secs(function):
      began = releases.now()
      function(began)
      start = time.perf_counter()
      for _ in range(_TURNS):
        function(began)
      return (time.perf_counter() - start) / _TURNS

    return secs(turn) - secs(nothing)


def step_secs() -> float:
  """Seconds of a step of the network in a process with all cores."""
  output = programs.output(
    "benchmarks.single_process", str(_BATCH_SIZE), "20", "100"
  )
  rate = re.search(r"examples_per_sec ([\d.]+)", output).group(1)
  return _BATCH_SIZE / float(rate)


def main(rounds: str = "3") -> None:
  """Prints both, and their ratio."""
  shares = []
  for number in range(int(rounds)):
    turn, step = turn_secs(), step_secs()
    shares.append(turn / step)
    print(
      f"{number}: {turn * 1e6:.0f} us a turn, {step * 1e3:.1f} ms a step:"
      f" {shares[-1]:.2%}",
      flush=True,
    )
  print(f"median {statistics.median(shares):.2%} of a step")


if __name__ == "__main__":
  main(*sys.argv[1:])
