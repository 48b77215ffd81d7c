"""Runs one task that trains the small model with this library.

`benchmarks.small_model` starts this program once per task.
"""

import sys
import time

from benchmarks import small_model
from tf_replicas import cluster
from tf_replicas.drivers import server


def run_client(
  spec, task, replication: str, most_per_call: int, steps: int
) -> None:
  """Trains the small model; the chief prints the milliseconds of a step.

  Args:
    spec: The cluster.
    task: The task of this process.
    replication: `between_graph` or `in_graph`.
    most_per_call: The largest number of updates per call.
    steps: The number of updates that are measured.
  """
  import keras

  from tf_replicas.drivers import between_graph
  from tf_replicas.drivers import in_graph
  from tf_replicas.replica import model_replica
  from tf_replicas.rules.sync import sync_replicas

  workers = spec.num_tasks("worker")
  drivers = {
    "between_graph": between_graph.BetweenGraph,
    "in_graph": in_graph.InGraph,
  }
  driver = drivers[replication](
    spec,
    task,
    lambda: small_model.replica(model_replica.Replica),
    lambda: sync_replicas.SyncReplicasOptimizer(
      keras.optimizers.SGD(0.01), workers, workers
    ),
  )
  if not driver.is_chief:
    driver.run_replica()
    driver.close()
    return

  def step_until(last):
    step = driver.global_step
    while step < last:
      step = driver.step(min(most_per_call, last - step)).global_step

  warm_up = min(steps, small_model.WARM_UP_STEPS)
  step_until(warm_up)
  start = time.perf_counter()
  step_until(warm_up + steps)
  seconds = time.perf_counter() - start
  print(f"ms_per_step {seconds / steps * 1e3:.3f}", flush=True)
  driver.close()


def main(argv: list[str]) -> None:
  ps, workers, job, index, replication, most_per_call, *steps = argv
  jobs = {"ps": ps.split(","), "worker": workers.split(",")}
  spec = cluster.parse(jobs)
  task = cluster.Task(job, int(index))
  in_graph = replication == "in_graph"
  if job == "ps" or (in_graph and job == "worker"):
    clients = 1 if in_graph else len(spec.replicas)
    server.serve(spec, task, num_clients=clients)
  else:
    # The client's own address does not matter in-graph: nobody calls it first.
    steps = int(steps[0]) if steps else small_model.STEPS
    run_client(spec, task, replication, int(most_per_call), steps)


if __name__ == "__main__":
  main(sys.argv[1:])
