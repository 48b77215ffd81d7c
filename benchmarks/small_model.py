"""Compares the step rate of a small model with TF1's `SyncReplicasOptimizer`.

  python -m benchmarks.small_model [--rounds=3] [--output=FILE]

Both implementations, TF1's and this library's, train one network on real
processes of this machine, 1 PS (parameter server) and 2 workers. They take
turns; the ratio within one round is what counts. This library makes ten updates
per call, as its programs do between two lines of their logs, and then one per
call.
"""

import argparse
import re
import sys
import tempfile
import time

import numpy as np

SHAPES = ((32, 64), (64, 64), (64, 10))
BATCH = 16
WARM_UP_STEPS = 50
STEPS = 500
PER_CALL = 10


def batch() -> tuple[np.ndarray, np.ndarray]:
  """Returns one batch of noise: float32 [16, 32] and int64 [16]."""
  rng = np.random.default_rng(0)
  return (
    rng.standard_normal((BATCH, SHAPES[0][0]), np.float32),
    rng.integers(0, SHAPES[-1][1], BATCH),
  )


def initial(number: int, shape: tuple[int, int]) -> np.ndarray:
  """Returns the initial random value of the weight matrix with this number.

  Args:
    number: The number of the layer, which is the seed.
    shape: The shape of the matrix.
  """
  rng = np.random.default_rng(number)
  return rng.standard_normal(shape, np.float32) * 0.1


def replica(make):
  """Makes a replica that trains the small network.

  Args:
    make: The class `Replica` of the library, possibly of another commit.
  """
  import tensorflow as tf

  variables = []
  for number, shape in enumerate(SHAPES):
    variables += [
      tf.Variable(initial(number, shape), name=f"w{number}"),
      tf.Variable(tf.zeros(shape[1]), name=f"b{number}"),
    ]

  def loss_fn(parameters, x, y):
    for w, b in zip(parameters[::2], parameters[1::2], strict=True):
      x = x @ w + b
      if w is not parameters[-2]:
        x = tf.nn.relu(x)
    return tf.reduce_mean(
      tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=x)
    )

  def dataset_fn(num_shards, shard, start):
    del num_shards, shard, start
    return tf.data.Dataset.from_tensors(batch()).repeat()

  return make(variables, loss_fn, dataset_fn)


def run(
  module: str, spec, replication: str = "between_graph", most_per_call: int = 1
) -> float:
  """Trains the small model with one library, and returns milliseconds per step.

  Args:
    module: The program of each task, which uses TF1 or this library.
    spec: The cluster.
    replication: `between_graph` or `in_graph`.
    most_per_call: The largest number of updates per call.
  """
  from tf_replicas.cluster import local_cluster

  def command(task):
    addresses = [",".join(spec.addresses(job)) for job in ("ps", "worker")]
    return [
      sys.executable,
      "-m",
      module,
      *addresses,
      task.job,
      str(task.index),
      replication,
      str(most_per_call),
    ][: 7 if module.endswith("v1_sync_replicas") else None]

  with tempfile.TemporaryDirectory() as log_dir:
    with local_cluster.LocalCluster(spec, command, log_dir=log_dir) as tasks:
      tasks.start()
      deadline = time.monotonic() + 180
      while time.monotonic() < deadline:
        text = tasks.log(spec.chief)
        found = re.search(r"ms_per_step ([\d.]+)", text)
        if found:
          return float(found.group(1))
        if tasks.returncode(spec.chief):
          raise RuntimeError(text)
        time.sleep(0.1)
  raise TimeoutError(f"{module} did not finish")


def measure(
  module: str, replication: str = "between_graph", most_per_call: int = 1
) -> float:
  """Trains the small model on a new cluster; returns milliseconds per step.

  The cluster has one PS task, two workers and, in-graph, a chief.

  Args:
    module: The program of each task, which uses TF1 or this library.
    replication: `between_graph` or `in_graph`.
    most_per_call: The largest number of updates per call.
  """
  from tf_replicas import cluster

  jobs = {"ps": ["localhost:0"], "worker": ["localhost:0"] * 2}
  if replication == "in_graph":
    jobs["chief"] = ["localhost:0"]
  spec = cluster.resolve_ports(cluster.parse(jobs))
  return run(module, spec, replication, most_per_call)


def main() -> None:
  from benchmarks import ratios
  from benchmarks import stored

  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("--output", help="File for the results, as JSON")
  arguments = parser.parse_args()
  # Name -> arguments of `measure`.
  kinds = {"TF1 SyncReplicasOptimizer": ("benchmarks.v1_sync_replicas",)}
  for most, suffix in ((PER_CALL, ""), (1, ", one per call")):
    for replication in ("between_graph", "in_graph"):
      name = replication.replace("_", "-") + suffix
      kinds[name] = ("benchmarks.small_model_task", replication, most)
  names = list(kinds)
  print(f"{'round':6}" + "".join(f"{name:>34}" for name in names))
  rounds = []
  for number in range(arguments.rounds):
    order = names if number % 2 else names[::-1]
    found = {name: measure(*kinds[name]) for name in order}
    row = [found[name] for name in names]
    rounds.append({name: 1e3 / found[name] for name in names})
    cells = [f"{t:.2f} ms ({row[0] / t:.2f})" for t in row]
    print(f"{number:<6}" + "".join(f"{c:>34}" for c in cells), flush=True)
  pairs = [(name, names[0]) for name in names[1:]]
  results = {
    "ratios": ratios.compare(rounds, pairs),
    "millis_per_step": {
      name: ratios.spread([1e3 / steps[name] for steps in rounds])
      for name in names
    },
    "steps_per_sec": rounds,
  }
  stored.write(arguments.output, results)


if __name__ == "__main__":
  main()
