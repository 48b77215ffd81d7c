"""Updates per second of a large table: ours and `ParameterServerStrategy`.

  python -m benchmarks.embedding [--rounds=10] [--updates=100] [--output=FILE]

A table of 1,000,000 x 32 floats on 2 PS tasks, 2 workers, batches of 256
examples of 10 ids, a linear layer, and plain gradient descent. One cluster of
each kind stays alive, and they take turns: `synchronous` (every update
averages 2 contributions, of 512 examples in all) and `asynchronous` are ours,
between-graph; `strategy` has a sharded variable and `tf.nn.embedding_lookup`.
Printed are the updates per second, and the ratios within the rounds: geometric
mean and 95% interval.
"""

import json
import os
import pathlib
import subprocess
import sys

from absl import app
from absl import flags

from benchmarks import ratios
from tf_replicas import cluster

FLAGS = flags.FLAGS
flags.DEFINE_integer("rounds", 10, "How many turns of each", lower_bound=2)
flags.DEFINE_integer("updates", 100, "Updates in a turn", lower_bound=1)
flags.DEFINE_integer("rows", 1_000_000, "Rows of the table", lower_bound=1)
flags.DEFINE_string("output", None, "Where to write the raw numbers, as JSON")

_KINDS = ("asynchronous", "synchronous", "strategy")
_ROOT = pathlib.Path(__file__).resolve().parents[1]
_END_SECS = 60


class _Cluster:
  """A live cluster of one kind; a context."""

  def __init__(self, kind: str, rows: int):
    jobs = {"ps": ["localhost:0"] * 2, "worker": ["localhost:0"] * 2}
    self._is_strategy = kind == "strategy"
    if self._is_strategy:
      jobs["chief"] = ["localhost:0"]
    spec = cluster.resolve_ports(cluster.parse(jobs))
    tasks = [t for t in spec.tasks() if t != spec.chief] + [spec.chief]
    self._processes = [
      subprocess.Popen(
        [
          *(sys.executable, "-m", "benchmarks.embedding_task", kind),
          *(spec.to_json(), task.job, str(task.index), str(rows)),
        ],
        cwd=_ROOT,
        env={
          **os.environ,
          "PYTHONPATH": str(_ROOT),
          "CUDA_VISIBLE_DEVICES": "",
          "TF_CPP_MIN_LOG_LEVEL": "2",
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
      )
      for task in tasks
    ]
    self._chief = self._processes[-1]
    self._read("ready")

  def __enter__(self) -> "_Cluster":
    return self

  def __exit__(self, *exc_info: object) -> None:
    try:
      self._chief.stdin.close()
      if not self._is_strategy:  # Its servers never end by themselves.
        for process in self._processes:
          process.wait(_END_SECS)
    finally:
      for process in self._processes:
        process.kill()
        process.wait()

  def _read(self, expected: str = "") -> str:
    """The next line that is `expected`, or a number."""
    for line in self._chief.stdout:
      line = line.strip()
      if line == expected or (
        not expected and line.replace(".", "", 1).isdigit()
      ):
        return line
    raise RuntimeError("the chief ended early")

  def rate(self, updates: int) -> float:
    """Makes so many updates; returns how many were made per second."""
    print(updates, file=self._chief.stdin, flush=True)
    return updates / float(self._read())


def main(argv: list[str]) -> None:
  del argv
  found: list[dict[str, float]] = []
  clusters: dict[str, _Cluster] = {}
  try:
    for kind in _KINDS:
      clusters[kind] = _Cluster(kind, FLAGS.rows)
      clusters[kind].rate(FLAGS.updates)  # A warm-up.
    for number in range(FLAGS.rounds):
      order = _KINDS if number % 2 else _KINDS[::-1]
      found.append({k: clusters[k].rate(FLAGS.updates) for k in order})
      print(f"round {number}: {found[-1]}", flush=True)
  finally:
    for one in clusters.values():
      one.__exit__(None, None, None)
  for first, second in (
    ("asynchronous", "strategy"),
    ("synchronous", "asynchronous"),
  ):
    mean, low, high = ratios.interval([r[first] / r[second] for r in found])
    print(
      f"{first} / {second}: {mean:.3f} (95%: {low:.3f} to {high:.3f}),"
      f" {len(found)} rounds"
    )
  if FLAGS.output:
    document = {
      "updates": FLAGS.updates,
      "rows": FLAGS.rows,
      "updates_per_sec": found,
    }
    pathlib.Path(FLAGS.output).write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
  app.run(main)
