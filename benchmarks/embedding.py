"""Compares updates of a large table with those of `ParameterServerStrategy`.

  python -m benchmarks.embedding [--rounds=10] [--updates=100] [--output=FILE]

The table has 1,000,000 x 32 floats and is on 2 PS tasks (parameter servers). 2
workers use batches of 256 examples of 10 ids, a linear layer, and plain
gradient descent. One cluster of each kind stays alive, and they take turns.
`synchronous` (every update averages the gradients of 2 workers, of 512 examples
in all) and `asynchronous` use this library, between-graph. `strategy` uses
TensorFlow's strategy, with a sharded variable and `tf.nn.embedding_lookup`.
Prints the updates per second, and the ratios within the rounds: geometric mean
and 95% interval.
"""

import contextlib
import json
import pathlib
import sys

from absl import app
from absl import flags

from benchmarks import live_cluster
from benchmarks import ratios
from tf_replicas import cluster

FLAGS = flags.FLAGS
flags.DEFINE_integer(
  "rounds", 10, "The number of turns of each cluster", lower_bound=2
)
flags.DEFINE_integer(
  "updates", 100, "The number of updates in a turn", lower_bound=1
)
flags.DEFINE_integer(
  "rows", 1_000_000, "The number of rows of the table", lower_bound=1
)
flags.DEFINE_string("output", None, "Where to write the raw numbers, as JSON")

_KINDS = ("asynchronous", "synchronous", "strategy")
_ROOT = pathlib.Path(__file__).resolve().parents[1]


def _cluster(kind: str, rows: int) -> live_cluster.LiveCluster:
  """Starts a cluster of 2 PS tasks and 2 workers that makes updates when asked.

  Args:
    kind: One of `_KINDS`: with which rule, or which library, it trains.
    rows: The number of rows of the large matrix that is trained.
  """
  jobs = {"ps": ["localhost:0"] * 2, "worker": ["localhost:0"] * 2}
  is_strategy = kind == "strategy"
  if is_strategy:
    jobs["chief"] = ["localhost:0"]
  spec = cluster.resolve_ports(cluster.parse(jobs))
  tasks = [t for t in spec.tasks() if t != spec.chief] + [spec.chief]
  return live_cluster.LiveCluster(
    [
      [
        *(sys.executable, "-m", "benchmarks.embedding_task", kind),
        *(spec.to_json(), task.job, str(task.index), str(rows)),
      ]
      for task in tasks
    ],
    root=_ROOT,
    cwd=_ROOT,
    ends_by_itself=not is_strategy,  # Its servers never end by themselves.
  )


def main(argv: list[str]) -> None:
  del argv
  found: list[dict[str, float]] = []
  with contextlib.ExitStack() as stack:
    clusters = {}
    for kind in _KINDS:
      clusters[kind] = stack.enter_context(_cluster(kind, FLAGS.rows))
      clusters[kind].updates_per_sec(FLAGS.updates)  # A warm-up.
    for number in range(FLAGS.rounds):
      order = _KINDS if number % 2 else _KINDS[::-1]
      found.append(
        {k: clusters[k].updates_per_sec(FLAGS.updates) for k in order}
      )
      print(f"round {number}: {found[-1]}", flush=True)
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
