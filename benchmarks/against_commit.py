"""Compares the speed of this tree with that of another commit.

  python -m benchmarks.against_commit --commit=REV [--rounds=8] [--output=FILE]

Both trees run the same programs in turn, in interleaved rounds, so that they
meet the same noise. `between_graph` and `in_graph` measure the CIFAR-10 program
on synthetic images (1 PS, that is, parameter server, and 2 workers;
examples/sec), which is started anew in each round. `small_between_graph` and
`small_in_graph` measure a small model of which ten updates are one call
(steps/sec). A round of these starts one cluster of each tree, which take turns
of a second. The rate of a tree in a round is the mean over its turns. (The
speed of a cluster differs by some percent from start to start, so that turns of
one pair of clusters are not independent.)
The ratio within a round is what counts. The program prints the geometric mean
of these ratios and its 95% interval (Student's t, of the logarithms). The raw
numbers go to `FILE` as JSON.
"""

import contextlib
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

from absl import app
from absl import flags

from benchmarks import commits
from benchmarks import live_cluster
from benchmarks import ratios
from benchmarks import stored

FLAGS = flags.FLAGS
flags.DEFINE_string(
  "commit", None, "The commit with which this tree is compared", required=True
)
flags.DEFINE_integer(
  "rounds",
  8,
  "The number of rounds, in each of which all are measured",
  lower_bound=2,
)
flags.DEFINE_list(
  "measures",
  ["between_graph", "in_graph", "small_between_graph", "small_in_graph"],
  "What to measure",
)
flags.DEFINE_string("output", None, "Where to write the raw numbers, as JSON")

_SECS = 300
_BURST = 300  # Updates in a turn of the small model.
_TURNS = 12  # Of each cluster of the small model in a round.


def _run(root: pathlib.Path, *arguments: str) -> str:
  """Runs Python with the library of a tree, and returns what it prints.

  Args:
    root: The root directory of the tree.
    *arguments: The arguments of Python.

  Raises:
    RuntimeError: If Python fails, with what it printed.
  """
  result = subprocess.run(
    [sys.executable, *arguments],
    cwd=root,
    env={**os.environ, "PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": ""},
    capture_output=True,
    text=True,
    timeout=_SECS,
    check=False,
  )
  if result.returncode:
    raise RuntimeError(result.stdout + result.stderr)
  return result.stdout


def examples_per_sec(root: pathlib.Path, replication: str) -> float:
  """Returns the examples/sec of the CIFAR-10 program after the warm-up.

  The rate is the mean of the last four log lines.

  Args:
    root: The root directory of the tree whose program runs.
    replication: `between_graph` or `in_graph`.
  """
  with tempfile.TemporaryDirectory() as directory:
    output = _run(
      root,
      "-m",
      "cifar10.distributed_train",
      f"--cluster_spec={root}/cluster_specs/local_1ps_2workers.json",
      f"--train_dir={directory}/run",
      "--dataset=synthetic",
      "--batch_size=64",
      f"--replication={replication}",
      "--max_steps=250",
      "--log_every_steps=50",
    )
  rates = re.findall(r"([\d.]+) examples/sec", output)
  return statistics.harmonic_mean([float(rate) for rate in rates[-4:]])


def single_rounds(
  trees: dict[str, pathlib.Path], replication: str, rounds: int
) -> list[dict[str, float]]:
  """Measures the CIFAR-10 program of each tree, started anew in each round.

  Args:
    trees: The root directories of the trees by name.
    replication: `between_graph` or `in_graph`.
    rounds: The number of rounds.

  Returns:
    The examples/sec of each tree, per round.
  """
  found = []
  for number in range(rounds):
    order = list(trees) if number % 2 else list(trees)[::-1]
    found.append({t: examples_per_sec(trees[t], replication) for t in order})
    print(f"round {number}, {replication}: {found[-1]}", flush=True)
  return found


def paired_rounds(
  trees: dict[str, pathlib.Path], replication: str, rounds: int
) -> list[dict[str, float]]:
  """Measures the small model on clusters, one per tree, that take turns.

  Args:
    trees: The root directories of the trees by name.
    replication: `between_graph` or `in_graph`.
    rounds: The number of rounds, each of which starts new clusters.

  Returns:
    The steps/sec of each tree, per round.
  """
  found = []
  for number in range(rounds):
    order = list(trees) if number % 2 else list(trees)[::-1]
    with contextlib.ExitStack() as stack:
      models = {
        name: stack.enter_context(
          live_cluster.small_model(
            trees[name], replication, live_cluster.new_spec()
          )
        )
        for name in order
      }
      for model in models.values():
        model.updates_per_sec(_BURST)  # A warm-up.
      turns: dict[str, list[float]] = {name: [] for name in trees}
      for turn in range(_TURNS):
        for name in order if turn % 2 else order[::-1]:
          turns[name].append(models[name].updates_per_sec(_BURST))
    found.append({n: statistics.harmonic_mean(r) for n, r in turns.items()})
    print(f"round {number}, small {replication}: {found[-1]}", flush=True)
  return found


def main(argv: list[str]) -> None:
  del argv
  raw: dict[str, list[dict[str, float]]] = {}
  with commits.checked_out(FLAGS.commit) as other:
    trees = {"this": commits.ROOT, "other": other}
    for name in FLAGS.measures:
      if name.startswith("small_"):
        raw[name] = paired_rounds(
          trees,
          name.removeprefix("small_"),
          FLAGS.rounds,
        )
      else:
        raw[name] = single_rounds(trees, name, FLAGS.rounds)
      mean, low, high = ratios.interval(
        [rates["this"] / rates["other"] for rates in raw[name]]
      )
      print(
        f"{name}: {mean:.3f} (95%: {low:.3f} to {high:.3f}), {len(raw[name])}"
        " rounds",
        flush=True,
      )
  stored.write(FLAGS.output, {"other_commit": FLAGS.commit, "rounds": raw})


if __name__ == "__main__":
  app.run(main)
