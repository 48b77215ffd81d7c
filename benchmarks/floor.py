"""Measures how fast a synchronous step could be on this machine.

  python -m benchmarks.floor [--rounds=6] [--updates=100] [--batch_size=64]
    [--workers=2] [--output=FILE]

1 PS (parameter server) and N workers train the CIFAR-10 tutorial's network on
synthetic images, between-graph and in-graph. They are compared with parts of
their own step:

*   `computing`: N processes compute the gradients, and do nothing with them.
*   `transferring`: the same cluster, with gradients of ones and without images.
    Parameters and gradients are sent, summed, applied and averaged.

Each process has as many threads as in the training. All clusters stay alive and
take turns, together with `one process`, a plain loop with the same images per
update on all cores.

A step cannot be shorter than its computing, than its transferring, or than the
processor time of both divided by the number of cores. The largest of the three
is the *floor*: the time of a step that does all its communication while it
computes. On a cluster of one machine, communication costs processor time. The
replicas of a cluster compute one gradient in advance after a turn, so many
updates should make a turn.
"""

import concurrent.futures
import contextlib
import os
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
  "rounds", 6, "The number of turns of each kind", lower_bound=2
)
flags.DEFINE_integer(
  "updates", 100, "The number of updates in a turn", lower_bound=1
)
flags.DEFINE_integer("batch_size", 64, "The images of a worker in an update")
flags.DEFINE_integer("workers", 2, "The number of workers")
flags.DEFINE_string("output", None, "Where to write the results, as JSON")

_ONE = "one process"
_COMPUTING = "computing"
_REPLICATIONS = ("between-graph", "in-graph")


class Kind:
  """The processes that make updates of one kind when they are asked to."""

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
    images = FLAGS.batch_size * (count if name == _ONE else 1)

    def command(task):
      what = [name, str(images), spec.to_json(), task[0], str(task[1])]
      return [sys.executable, "-m", "benchmarks.floor_task", *what]

    commands = [command(task) for task in tasks]
    groups = [[c] for c in commands] if name == _COMPUTING else [commands]
    self._live = [
      stack.enter_context(
        live_cluster.LiveCluster(g, root=commits.ROOT, cwd=commits.ROOT)
      )
      for g in groups
    ]
    self._pool = stack.enter_context(
      concurrent.futures.ThreadPoolExecutor(len(groups))
    )

  def measure(self, updates: int) -> dict[str, float]:
    """Makes updates, and measures them.

    Args:
      updates: The number of updates.

    Returns:
      `millis`, the milliseconds of an update by the clock, and `cpu_millis`,
      the processor time of all processes per update, in milliseconds.
    """

    def used():
      return sum(sum(live.cpu_secs()) for live in self._live)

    before = used()
    rates = self._pool.map(lambda x: x.updates_per_sec(updates), self._live)
    millis = max(1e3 / rate for rate in rates)
    return {"millis": millis, "cpu_millis": 1e3 * (used() - before) / updates}


def floor(
  turn: dict[str, dict[str, float]], replication: str, cores: int
) -> float:
  """Returns the floor of a step in one round, in milliseconds.

  Args:
    turn: What each kind measured.
    replication: `between-graph` or `in-graph`.
    cores: The number of cores.
  """
  parts = [turn[_COMPUTING], turn[f"transferring, {replication}"]]
  busy = sum(part["cpu_millis"] for part in parts) / cores
  return max(busy, *(part["millis"] for part in parts))


def main(argv: list[str]) -> None:
  del argv
  cores = len(os.sched_getaffinity(0))
  names = [_ONE, _COMPUTING]
  names += [
    f"{w}, {r}" for r in _REPLICATIONS for w in ("training", "transferring")
  ]
  rounds = []
  with contextlib.ExitStack() as stack:
    kinds = {name: Kind(name, stack) for name in names}
    for kind in kinds.values():
      kind.measure(FLAGS.updates)  # A warm-up.
    for number in range(FLAGS.rounds):
      order = names if number % 2 else names[::-1]
      turn = {name: kinds[name].measure(FLAGS.updates) for name in order}
      rounds.append({name: turn[name] for name in names})
      millis = {n: round(at["millis"], 1) for n, at in rounds[-1].items()}
      print(f"round {number}, ms per update: {millis}", flush=True)
  medians = {
    name: {
      what: statistics.median(turn[name][what] for turn in rounds)
      for what in ("millis", "cpu_millis")
    }
    for name in names
  }
  for name, at in medians.items():
    print(
      f"{name}: {at['millis']:.1f} ms per update, {at['cpu_millis']:.1f} ms of"
      " processor time"
    )
  rates, pairs = [{} for _ in rounds], []
  for replication in _REPLICATIONS:
    training, lowest = f"training, {replication}", f"floor, {replication}"
    pairs += [(training, _ONE), (training, lowest), (lowest, _ONE)]
    for rate, turn in zip(rates, rounds, strict=True):
      rate[_ONE] = 1e3 / turn[_ONE]["millis"]
      rate[training] = 1e3 / turn[training]["millis"]
      rate[lowest] = 1e3 / floor(turn, replication, cores)
  results = {
    "ratios_of_rates": ratios.compare(rates, pairs),
    "medians": medians,
    "updates_per_sec": rates,
    "rounds": rounds,
  }
  stored.write(FLAGS.output, results)


if __name__ == "__main__":
  app.run(main)
