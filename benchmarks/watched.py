"""Measures whether `tf_replicas.status --watch` slows a training down.

  python -m benchmarks.watched [--rounds=3] [--turns=8] [--output=FILE]

A cluster of 1 parameter server and 2 workers trains the small model of
`benchmarks.small_model`. Meanwhile the cluster is watched, with one reading per
second. The watching process is stopped in every second turn, so that watched
and unwatched turns of the same cluster alternate. A round starts a new cluster.
"""

import json
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import threading

from absl import app
from absl import flags

from benchmarks import live_cluster
from benchmarks import ratios
from benchmarks import stored

FLAGS = flags.FLAGS
flags.DEFINE_integer("rounds", 3, "The number of clusters", lower_bound=2)
flags.DEFINE_integer("turns", 8, "Pairs of turns of each cluster")
flags.DEFINE_integer("updates", 1000, "Updates in one turn")
flags.DEFINE_string("output", None, "The file for the raw numbers, as JSON")

_ROOT = pathlib.Path(__file__).resolve().parents[1]


def one_round() -> dict[str, list[float]]:
  """Starts a cluster, and measures its rate with and without the watching.

  Returns:
    The updates/sec of each turn, "watched" and "unwatched".
  """
  spec = live_cluster.new_spec()
  rates: dict[str, list[float]] = {"watched": [], "unwatched": []}
  with tempfile.TemporaryDirectory() as directory:
    path = pathlib.Path(directory, "cluster.json")
    path.write_text(spec.to_json(), encoding="utf-8")
    command = [sys.executable, "-m", "tf_replicas.status", "--watch"]
    command += [f"--cluster_spec={path}", "--interval_secs=1", "--json"]
    with live_cluster.small_model(_ROOT, "between_graph", spec) as model:
      watch = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
      assert watch.stdout is not None
      try:
        for _ in range(2):
          assert json.loads(watch.stdout.readline())["global_step"] > 0
        # A full pipe would stop it.
        threading.Thread(target=watch.stdout.read, daemon=True).start()
        model.updates_per_sec(FLAGS.updates)  # A warm-up.
        for turn in range(FLAGS.turns):
          for name in sorted(rates, reverse=bool(turn % 2)):
            is_watched = name == "watched"
            watch.send_signal(signal.SIGCONT if is_watched else signal.SIGSTOP)
            rates[name].append(model.updates_per_sec(FLAGS.updates))
      finally:
        watch.kill()
        watch.wait()
  return rates


def main(argv: list[str]) -> None:
  del argv
  rounds = [one_round() for _ in range(FLAGS.rounds)]
  found = []
  for rates in rounds:
    means = {n: statistics.harmonic_mean(r) for n, r in rates.items()}
    found.append(means["watched"] / means["unwatched"])
    print(f"{means}: ratio {found[-1]:.3f}", flush=True)
  mean, low, high = ratios.interval(found)
  print(f"watched / unwatched: {mean:.3f} (95%: {low:.3f} to {high:.3f})")
  stored.write(FLAGS.output, {"ratio": [mean, low, high], "rounds": rounds})


if __name__ == "__main__":
  app.run(main)
