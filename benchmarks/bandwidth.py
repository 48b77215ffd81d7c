"""Measures training over a network of limited bandwidth, against its peers.

  python -m benchmarks.bandwidth [--models=cifar10,inception_mini]
    [--rates=1000,200,50] [--rounds=3] [--kinds=…] [--commit=REV]
    [--output=FILE]

1 PS (parameter server) and 2 workers are on hosts of their own: network
namespaces of this machine, each with a link of limited rate (`tc … tbf`).
Needs root, and the packages iproute2 and util-linux. In a round, a cluster of
each kind is started in turn, and measured at every rate; the ratio within a
round is what counts. `benchmarks.bandwidth_task` says what trains. With
`--commit`, the library of another commit takes part too.

An update of the synchronous kinds has a batch of each worker, and an update of
the asynchronous kinds has a batch of one worker; compared are the images per
second. Each process has one thread per op, as if each worker had a core of its
own.

For each kind of ours, the time of a step (a batch of each worker) is compared
with the larger of *computing*, the time in which two processes compute the
gradients at the same time, and *transferring*: the bytes of the parameters and
gradients of all replicas, divided by the rate of the link of the PS task.
"""

import concurrent.futures
import contextlib
import itertools
import os
import pathlib
import platform
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from absl import app
from absl import flags

from benchmarks import bandwidth_kinds
from benchmarks import commits
from benchmarks import live_cluster
from benchmarks import ratios
from benchmarks import stored
from tf_replicas import cluster
from tf_replicas.cluster import private_network

FLAGS = flags.FLAGS
flags.DEFINE_list(
  "models",
  ["cifar10", "inception_mini"],
  "The networks that are trained;"
  " `cifar10:1` is `cifar10` with 1 image per worker",
)
flags.DEFINE_list("rates", ["1000", "200", "50"], "The links' rates in Mbit/s")
flags.DEFINE_list(
  "kinds", None, "What trains, by the names in `KINDS`; by default, everything"
)
flags.DEFINE_integer(
  "rounds", 3, "The number of rounds, in each of which all are measured"
)
flags.DEFINE_float(
  "turn_secs", 5.0, "About how long a turn takes, in seconds", lower_bound=0.1
)
flags.DEFINE_string("commit", None, "Another commit that takes part")
flags.DEFINE_string("output", None, "Where to write the raw numbers, as JSON")

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_HOSTS = ("ps", "worker0", "worker1", "client")
# A cluster has a port on each host, and another for PS tasks.
_FIRST_PORT, _PORTS = 3000, 1000


# Of computing alone, which has a batch of each worker in a step, too.
_NO_KIND = bandwidth_kinds.Kind("computing", is_ours=False)


def _start(
  network: private_network.PrivateNetwork,
  kind: bandwidth_kinds.Kind,
  model: str,
  port: int,
  root: pathlib.Path,
) -> live_cluster.LiveCluster:
  """Starts a cluster of 1 PS and 2 workers on the hosts of a network."""
  has_client = kind.kind.startswith("in_graph") or kind.kind == "strategy"
  workers = [f"worker{i}" for i in range(bandwidth_kinds.WORKERS)]
  jobs = {"worker": workers}
  if kind.kind != "mirrored":
    jobs["ps"] = workers if kind.is_beside else ["ps"]
  if has_client:
    jobs["chief"] = ["client"]
  addresses = {
    job: [
      f"{network.address(host)}:{port + _PORTS * (job == 'ps')}"
      for host in hosts
    ]
    for job, hosts in jobs.items()
  }
  spec = cluster.parse(
    {
      "cluster": addresses,
      "variables": {"on": "ps", "placement": "partitioned"},
    }
    if kind.is_beside
    else addresses
  )
  chief = cluster.Task("chief" if has_client else "worker", 0)
  tasks = [task for task in spec.tasks() if task != chief] + [chief]
  return live_cluster.LiveCluster(
    [
      network.command(
        jobs[task.job][task.index],
        [
          *(sys.executable, str(_ROOT / "benchmarks" / "bandwidth_task.py")),
          *(kind.kind, model, spec.to_json(), task.job, str(task.index)),
        ],
      )
      for task in tasks
    ],
    root=root,
    cwd=root,
    ends_by_itself="," in kind.kind,  # Peers never end by themselves.
    environ=_ENVIRON,
  )


_ENVIRON = {"TF_NUM_INTRAOP_THREADS": "1", "OMP_NUM_THREADS": "1"}


class _Computing:
  """As many processes as workers, which compute at the same time."""

  def __init__(self, model: str, stack: contextlib.ExitStack):
    self._each = [
      stack.enter_context(
        live_cluster.LiveCluster(
          [
            [
              *(sys.executable, str(_ROOT / "benchmarks/bandwidth_task.py")),
              *("computing", model, '{"worker": ["localhost:1"]}'),
              *("worker", "0"),
            ]
          ],
          root=_ROOT,
          cwd=_ROOT,
          environ=_ENVIRON,
        )
      )
      for _ in range(bandwidth_kinds.WORKERS)
    ]

  def updates_per_sec(self, updates: int) -> float:
    """Returns how many gradients per second the slowest process computes."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
      rates = pool.map(lambda c: c.updates_per_sec(updates), self._each)
      return min(rates)


def describe(model: str) -> bandwidth_kinds.Network:
  """Builds a network in another process, and describes it."""
  program = (
    "import bandwidth_task; network = bandwidth_task.build({model!r});"
    " print(sum(v.shape.num_elements() for v in network.variables),"
    " len(network.labels))"
  )
  result = subprocess.run(
    [sys.executable, "-c", program.format(model=model)],
    cwd=_ROOT,
    env={
      **os.environ,
      "PYTHONPATH": os.pathsep.join([str(_ROOT), str(_ROOT / "benchmarks")]),
      "CUDA_VISIBLE_DEVICES": "",
    },
    stdout=subprocess.PIPE,
    text=True,
    check=True,
  )
  return bandwidth_kinds.Network(*map(int, result.stdout.split()[-2:]))


def _turn(
  hosts: private_network.PrivateNetwork,
  trained: live_cluster.LiveCluster | _Computing,
  kind: bandwidth_kinds.Kind,
  network: bandwidth_kinds.Network,
  mbit_per_sec: int,
) -> dict[str, float]:
  """Lets a cluster train, for about the time of a turn.

  Returns:
    `images_per_sec`; and the megabytes per step (a batch of each worker) that
    the PS task, or else worker 0, sends and receives.
  """
  secs = max(
    bandwidth_kinds.transferring_secs(kind, network, mbit_per_sec), 0.2
  )
  batches = 1 if kind.is_async else bandwidth_kinds.WORKERS
  steps = max(3, round(FLAGS.turn_secs / secs))
  updates = steps * bandwidth_kinds.WORKERS // batches
  host = "worker0" if kind.kind == "mirrored" or kind.is_beside else "ps"
  before = hosts.traffic(host)
  rate = trained.updates_per_sec(updates)
  after = hosts.traffic(host)
  # The turn makes one update more, which it does not time.
  measured = (updates + 1) * batches / bandwidth_kinds.WORKERS
  return {
    "images_per_sec": rate * batches * network.batch,
    "sent_mb": (after.sent - before.sent) / measured / 1e6,
    "received_mb": (after.received - before.received) / measured / 1e6,
  }


def measure(
  model: str,
  network: bandwidth_kinds.Network,
  kinds: Mapping[str, bandwidth_kinds.Kind],
  rates: Sequence[int],
  tree: pathlib.Path | None,
) -> Iterator[dict[str, dict[str, dict[str, float]]]]:
  """Measures all kinds with one network, in rounds.

  Yields:
    For each round, the result of `_turn` by name of the kind and by rate.
  """
  ports = itertools.count(_FIRST_PORT)
  with private_network.PrivateNetwork(_HOSTS) as hosts:
    for number in range(FLAGS.rounds):
      names = [bandwidth_kinds.COMPUTING, *kinds]
      turns: dict[str, dict[str, dict[str, float]]] = {}
      for name in names if number % 2 else names[::-1]:
        kind = kinds.get(name, _NO_KIND)
        for host in hosts.hosts:
          hosts.limit(host, None)
        with contextlib.ExitStack() as stack:
          trained: live_cluster.LiveCluster | _Computing
          if name == bandwidth_kinds.COMPUTING:
            trained = _Computing(model, stack)
          else:
            root = tree if kind.is_of_commit and tree else _ROOT
            trained = stack.enter_context(
              _start(hosts, kind, model, next(ports), root)
            )
          turns[name] = {}
          for rate in rates:
            for host in hosts.hosts:
              hosts.limit(host, rate)
            turn = _turn(hosts, trained, kind, network, rate)
            turns[name][str(rate)] = turn
        print(
          f"{model}, round {number}: {name}, images/s at Mbit/s: "
          + ", ".join(
            f"{turn['images_per_sec']:.1f} at {rate}"
            for rate, turn in turns[name].items()
          ),
          flush=True,
        )
      yield turns


def report(
  model: str,
  network: bandwidth_kinds.Network,
  kinds: Mapping[str, bandwidth_kinds.Kind],
  found: Sequence[Mapping[str, Mapping[str, Mapping[str, float]]]],
) -> None:
  """Prints a table for each rate, and what the ratios are.

  Args:
    model: The name of the network.
    network: The network.
    kinds: What was measured, by name.
    found: What `measure` yielded.
  """
  for rate in found[0][bandwidth_kinds.COMPUTING]:
    rounds = [{n: t[rate] for n, t in turns.items()} for turns in found]
    print(f"\n{model}, {network.parameters} parameters, {rate} Mbit/s")
    print(
      f"{'':32}{'images/s':>10}{'ms/step':>9}{'computing':>11}"
      f"{'transferring':>14}{'step / larger':>24}{'MB out':>8}{'MB in':>8}"
    )
    images = bandwidth_kinds.WORKERS * network.batch
    computing = [
      images / turns[bandwidth_kinds.COMPUTING]["images_per_sec"]
      for turns in rounds
    ]
    for name, kind in kinds.items():
      speeds = [turns[name]["images_per_sec"] for turns in rounds]
      transferring = bandwidth_kinds.transferring_secs(kind, network, int(rate))
      shares = bandwidth_kinds.shares_of_least_time(
        rounds, name, network, int(rate)
      )
      print(
        f"{name:32}{statistics.median(speeds):10.1f}"
        f"{images / statistics.median(speeds) * 1e3:9.0f}"
        f"{statistics.median(computing) * 1e3:11.0f}{transferring * 1e3:14.0f}"
        f"{ratios.in_words(shares):>24}"
        f"{statistics.median(t[name]['sent_mb'] for t in rounds):8.1f}"
        f"{statistics.median(t[name]['received_mb'] for t in rounds):8.1f}"
      )
    for name, kind in kinds.items():
      for peer, other in kinds.items():
        if not kind.is_peer and other.is_peer:
          if kind.is_async == other.is_async:
            quotients = [
              t[name]["images_per_sec"] / t[peer]["images_per_sec"]
              for t in rounds
            ]
            print(f"{name} / {peer}: {ratios.in_words(quotients)}")


def main(argv: list[str]) -> None:
  del argv
  reason = private_network.obstacle()
  if reason:
    sys.exit(reason)
  # So that the clusters and the network are removed.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
  kinds = {
    name: kind
    for name, kind in bandwidth_kinds.KINDS.items()
    if (FLAGS.kinds is None or name in FLAGS.kinds)
    and (FLAGS.commit or not kind.is_of_commit)
  }
  rates = [int(rate) for rate in FLAGS.rates]
  document: dict[str, Any] = {
    "kernel": platform.release(),
    "other_commit": FLAGS.commit,
    "networks": {},
  }
  with contextlib.ExitStack() as stack:
    tree = None
    if FLAGS.commit:
      tree = stack.enter_context(commits.checked_out(FLAGS.commit))
    for model in FLAGS.models:
      network = describe(model)
      rounds = []
      for turns in measure(model, network, kinds, rates, tree):
        rounds.append(turns)
        document["networks"][model] = {**network._asdict(), "rounds": rounds}
        stored.write(FLAGS.output, document)
      report(model, network, kinds, rounds)


if __name__ == "__main__":
  app.run(main)
