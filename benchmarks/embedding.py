"""Compares updates of a large table with those of `ParameterServerStrategy`.

  python -m benchmarks.embedding [--rounds=10] [--updates=100] [--commit=REV]
    [--output=FILE]

The table has 1,000,000 x 32 floats and is on 2 PS tasks (parameter servers). 2
workers use batches of 256 examples of 10 ids, a linear layer, and plain
gradient descent. One cluster of each kind stays alive, and they take turns.
`synchronous` (every update averages the gradients of 2 workers, of 512 examples
in all) and `asynchronous` use this library, between-graph. `strategy` uses
TensorFlow's strategy, with a sharded variable and `tf.nn.embedding_lookup`.
`TF1` uses TF1's `SyncReplicasOptimizer`, with a partitioned variable. `one
process` trains alone, with both cores and one batch of 256 examples per update.
With `--commit`, the library at another commit takes part, too.
Prints the updates per second, the ratios within the rounds (geometric mean and
95% interval), and the processor time of each task per update (median).
"""

import contextlib
import pathlib
import statistics
import sys

from absl import app
from absl import flags

from benchmarks import commits
from benchmarks import live_cluster
from benchmarks import ratios
from benchmarks import stored
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
flags.DEFINE_string(
  "commit", None, "A commit with which this tree is compared, too"
)
flags.DEFINE_string("output", None, "Where to write the raw numbers, as JSON")

_OURS = ("asynchronous", "synchronous")
_KINDS = (*_OURS, "strategy", "TF1", "one process")
_AT_COMMIT = " at the commit"


class Cluster(live_cluster.LiveCluster):
  """Runs a cluster of 2 PS tasks and 2 workers that makes updates when asked.

  Attributes:
    names: The names of the tasks, in the order of `cpu_secs`.
  """

  def __init__(self, kind: str, rows: int, root: pathlib.Path):
    """Starts the processes, and waits until the chief is ready.

    Args:
      kind: One of `_KINDS`: with which rule, or which library, it trains.
      rows: The number of rows of the large matrix that is trained.
      root: The root directory of the tree whose library is used.
    """
    self.names, commands = _commands(kind, rows)
    # The servers of TensorFlow never end by themselves.
    super().__init__(
      commands, root=root, cwd=root, ends_by_itself=kind in _OURS
    )


def _commands(kind: str, rows: int) -> tuple[list[str], list[list[str]]]:
  """Returns the names of the tasks of a new cluster, and their command lines.

  Args:
    kind: One of `_KINDS`: with which rule, or which library, it trains.
    rows: The number of rows of the large matrix that is trained.
  """
  jobs = {"ps": ["localhost:0"] * 2, "worker": ["localhost:0"] * 2}
  if kind == "strategy":
    jobs["chief"] = ["localhost:0"]
  if kind == "one process":
    jobs = {"worker": ["localhost:0"]}
  spec = cluster.resolve_ports(cluster.parse(jobs))
  tasks = [t for t in spec.tasks() if t != spec.chief] + [spec.chief]
  return [str(task) for task in tasks], [
    [
      *(sys.executable, "-m", "benchmarks.embedding_task", kind),
      *(spec.to_json(), task.job, str(task.index), str(rows)),
    ]
    for task in tasks
  ]


def _turn(live: Cluster, updates: int) -> tuple[float, dict[str, float]]:
  """Lets a cluster make updates.

  Returns:
    The updates per second; and for each task, the milliseconds of processor
    time per update.
  """
  before = live.cpu_secs()
  rate = live.updates_per_sec(updates)
  used = zip(before, live.cpu_secs(), strict=True)
  millis = [1e3 * (end - start) / updates for start, end in used]
  return rate, dict(zip(live.names, millis, strict=True))


def _write(
  found: list[dict[str, float]], used: list[dict[str, dict[str, float]]]
) -> None:
  """Writes the results of the rounds so far to `--output`, if given.

  Args:
    found: For each round, the updates per second of each cluster.
    used: For each round and cluster, the milliseconds of processor time per
      update of each task.
  """
  document = {
    "updates": FLAGS.updates,
    "rows": FLAGS.rows,
    "other_commit": FLAGS.commit,
    "updates_per_sec": found,
    "cpu_ms_per_update": used,
  }
  stored.write(FLAGS.output, document)


def main(argv: list[str]) -> None:
  del argv
  found: list[dict[str, float]] = []
  used: list[dict[str, dict[str, float]]] = []
  with contextlib.ExitStack() as stack:
    trees = {kind: (kind, commits.ROOT) for kind in _KINDS}
    if FLAGS.commit:
      tree = stack.enter_context(commits.checked_out(FLAGS.commit))
      for kind in _OURS:
        trees[kind + _AT_COMMIT] = kind, tree
    clusters = {}
    for name, (kind, root) in trees.items():
      live = Cluster(kind, FLAGS.rows, root)
      clusters[name] = stack.enter_context(live)
      live.updates_per_sec(FLAGS.updates)  # A warm-up.
    for number in range(FLAGS.rounds):
      order = list(clusters) if number % 2 else list(clusters)[::-1]
      turns = {name: _turn(clusters[name], FLAGS.updates) for name in order}
      found.append({name: rate for name, (rate, _) in turns.items()})
      used.append({name: millis for name, (_, millis) in turns.items()})
      print(f"round {number}: {found[-1]}", flush=True)
      _write(found, used)
  pairs = [
    ("asynchronous", "strategy"),
    ("asynchronous", "one process"),
    ("synchronous", "asynchronous"),
    ("synchronous", "TF1"),
  ]
  if FLAGS.commit:
    pairs += [(kind, kind + _AT_COMMIT) for kind in _OURS]
  for first, second in pairs:
    mean, low, high = ratios.interval([r[first] / r[second] for r in found])
    print(
      f"{first} / {second}: {mean:.3f} (95%: {low:.3f} to {high:.3f}),"
      f" {len(found)} rounds"
    )
  for name, live in clusters.items():
    medians = {
      task: statistics.median(turn[name][task] for turn in used)
      for task in live.names
    }
    tasks = ", ".join(f"{task} {ms:.2f}" for task, ms in medians.items())
    print(f"{name}: {sum(medians.values()):.1f} ms of CPU per update ({tasks})")


if __name__ == "__main__":
  app.run(main)
