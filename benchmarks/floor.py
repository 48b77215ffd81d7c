"""Measures how fast a training step could be on this machine.

  python -m benchmarks.floor [--rounds=6] [--steps=100] [--batch_size=64]
    [--workers=2] [--update=async] [--output=FILE]

1 PS (parameter server) and N workers train the CIFAR-10 tutorial's network on
synthetic images, between-graph and in-graph. They are compared with parts of
their own step:

*   `computing`: N processes compute the gradients, and do nothing with them.
*   `transferring`: the same cluster, with gradients of ones and without images.
    Parameters and gradients are sent, summed, applied and averaged.
*   `floor`: both at the same time, without waiting for each other, until both
    have ended. This is the time of a step that does all its communication while
    it computes. On a cluster of one machine, communication costs processor
    time.

Each process has as many threads as in the training. All clusters stay alive and
take turns, together with `one process`, a plain loop on all cores. A step is N
batches of `--batch_size` images, one of each worker. The single process and a
synchronous cluster make one update of them, an asynchronous cluster makes N; if
the cluster is asynchronous, the single process makes N updates too. The
replicas of a cluster compute one gradient in advance after a turn, so a turn
should have many steps.
"""

import concurrent.futures
import contextlib
import statistics
import sys
from collections.abc import Sequence

from absl import app
from absl import flags

from benchmarks import commits
from benchmarks import live_cluster
from benchmarks import ratios
from benchmarks import stored
from tf_replicas import cluster

FLAGS = flags.FLAGS
flags.DEFINE_integer(
  "rounds", 6, "The number of turns of each kind", lower_bound=2
)
flags.DEFINE_integer(
  "steps", 100, "The number of steps in a turn", lower_bound=1
)
flags.DEFINE_integer("batch_size", 64, "The images of a worker in a step")
flags.DEFINE_integer("workers", 2, "The number of workers")
flags.DEFINE_enum("update", "sync", ["sync", "async"], "The update rule")
flags.DEFINE_string("output", None, "Where to write the results, as JSON")

_ONE = "one process"
_COMPUTING = "computing"
_REPLICATIONS = ("between-graph", "in-graph")


class Kind:
  """The processes that make steps of one kind when they are asked to."""

  def __init__(self, name: str, stack: contextlib.ExitStack):
    """Starts the processes.

    Args:
      name: `one process`, `computing`, or, after "training, " or
        "transferring, ", a replication.
      stack: Ends the processes.
    """
    count = FLAGS.workers
    jobs = {"ps": ["localhost:0"], "worker": ["localhost:0"] * count}
    tasks = [("ps", 0), *(("worker", i) for i in reversed(range(count)))]
    if name.endswith("in-graph"):
      jobs["chief"] = ["localhost:0"]
      tasks.append(("chief", 0))
    spec = cluster.resolve_ports(cluster.parse(jobs))
    if name in (_ONE, _COMPUTING):
      tasks = [("worker", i) for i in range(1 if name == _ONE else count)]

    def command(task):
      settings = [name, FLAGS.update, str(FLAGS.batch_size)]
      what = [*settings, spec.to_json(), task[0], str(task[1])]
      return [sys.executable, "-m", "benchmarks.floor_task", *what]

    commands = [command(task) for task in tasks]
    groups = [[c] for c in commands] if name == _COMPUTING else [commands]
    self.live = [
      stack.enter_context(
        live_cluster.LiveCluster(g, root=commits.ROOT, cwd=commits.ROOT)
      )
      for g in groups
    ]


def measure(kinds: Sequence[Kind], steps: int) -> dict[str, float]:
  """Lets all of `kinds` make steps at the same time, and measures them.

  Args:
    kinds: The processes. They do not wait for those of another kind.
    steps: The number of steps of each kind.

  Returns:
    `millis`, the milliseconds of a step until all have ended, and `cpu_millis`,
    the processor time of all processes per step, in milliseconds.
  """
  live = [each for kind in kinds for each in kind.live]

  def used():
    return sum(sum(each.cpu_secs()) for each in live)

  before = used()
  with concurrent.futures.ThreadPoolExecutor(len(live)) as pool:
    rates = list(pool.map(lambda each: each.updates_per_sec(steps), live))
  cpu_millis = 1e3 * (used() - before) / steps
  return {"millis": 1e3 / min(rates), "cpu_millis": cpu_millis}


def main(argv: list[str]) -> None:
  del argv
  names = [_ONE, _COMPUTING]
  names += [
    f"{w}, {r}" for r in _REPLICATIONS for w in ("training", "transferring")
  ]
  rounds = []
  with contextlib.ExitStack() as stack:
    kinds = {name: [Kind(name, stack)] for name in names}
    for replication in _REPLICATIONS:
      parts = [_COMPUTING, f"transferring, {replication}"]
      kinds[f"floor, {replication}"] = [kinds[part][0] for part in parts]
    for found in kinds.values():
      measure(found, FLAGS.steps)  # A warm-up.
    for number in range(FLAGS.rounds):
      order = list(kinds) if number % 2 else list(kinds)[::-1]
      turn = {name: measure(kinds[name], FLAGS.steps) for name in order}
      rounds.append({name: turn[name] for name in kinds})
      millis = {n: round(at["millis"], 1) for n, at in rounds[-1].items()}
      print(f"round {number}, ms per step: {millis}", flush=True)
  medians = {
    name: {
      what: statistics.median(turn[name][what] for turn in rounds)
      for what in ("millis", "cpu_millis")
    }
    for name in kinds
  }
  for name, at in medians.items():
    print(
      f"{name}: {at['millis']:.1f} ms per step, {at['cpu_millis']:.1f} ms of"
      " processor time"
    )
  rates = [{n: 1e3 / at["millis"] for n, at in turn.items()} for turn in rounds]
  pairs = []
  for replication in _REPLICATIONS:
    training, floor = f"training, {replication}", f"floor, {replication}"
    pairs += [(training, _ONE), (training, floor), (floor, _ONE)]
  results = {
    "ratios_of_rates": ratios.compare(rates, pairs),
    "medians": medians,
    "rounds": rounds,
  }
  stored.write(FLAGS.output, results)


if __name__ == "__main__":
  app.run(main)
