"""Runs one task of the small model for `benchmarks.against_commit`.

  python benchmarks/paired_task.py PS WORKERS JOB INDEX REPLICATION

It uses the library of the tree that PYTHONPATH names: that of this commit, or
of an earlier one. For every number in a line of its standard input, the chief
makes so many updates, ten per call, and prints how many seconds they took. The
chief ends the training when its input ends.
"""

import pathlib
import sys
import time

import small_model  # Beside this script: the same model for both trees.

import tf_replicas

# An editable installation would lend an earlier tree the packages that it
# lacks, so an attempt to import them does not tell.
if (pathlib.Path(tf_replicas.__file__).parent / "drivers").is_dir():
  from tf_replicas.drivers import between_graph
  from tf_replicas.drivers import in_graph
  from tf_replicas.drivers import server
  from tf_replicas.replica import model_replica
  from tf_replicas.rules.sync import sync_replicas
else:  # Commit 0490651.
  from tf_replicas import between_graph
  from tf_replicas import in_graph
  from tf_replicas import server
  from tf_replicas import sync_replicas
  from tf_replicas import towers as model_replica

import keras

from tf_replicas import cluster


def serve_rounds(driver) -> None:
  """Makes as many updates as each line of standard input says.

  After each line, it prints the seconds that these updates took.

  Args:
    driver: The chief's driver of the training.
  """
  driver.step(1)
  print("ready", flush=True)
  for line in sys.stdin:
    last = driver.global_step + int(line)
    start = time.perf_counter()
    step = driver.global_step
    while step < last:
      step = driver.step(min(small_model.PER_CALL, last - step)).global_step
    print(time.perf_counter() - start, flush=True)


def main(argv: list[str]) -> None:
  ps, workers, job, index, replication = argv
  jobs = {"ps": ps.split(","), "worker": workers.split(",")}
  spec = cluster.parse(jobs)
  task = cluster.Task(job, int(index))
  is_in_graph = replication == "in_graph"
  if job == "ps" or (is_in_graph and job == "worker"):
    clients = 1 if is_in_graph else len(spec.replicas)
    server.serve(spec, task, num_clients=clients)
    return
  count = spec.num_tasks("worker")
  driver_class = in_graph.InGraph if is_in_graph else between_graph.BetweenGraph
  driver = driver_class(
    spec,
    task,
    lambda: small_model.replica(model_replica.Replica),
    lambda: sync_replicas.SyncReplicasOptimizer(
      keras.optimizers.SGD(0.01), count, count
    ),
  )
  if driver.is_chief:
    serve_rounds(driver)
  else:
    driver.run_replica()
  driver.close()


if __name__ == "__main__":
  main(sys.argv[1:])
