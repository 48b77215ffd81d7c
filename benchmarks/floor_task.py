"""Runs one process of `benchmarks.floor`.

  python -m benchmarks.floor_task KIND UPDATE BATCH_SIZE SPEC JOB INDEX

For every number in a line of its standard input, it makes that many steps, and
prints how many seconds they took. It ends when its input ends. In a cluster,
only the chief does this.
"""

import json
import sys
from collections.abc import Callable

import keras
import tensorflow as tf

from benchmarks import live_cluster
from cifar10 import config as config_lib
from cifar10 import workload
from tf_replicas import cluster
from tf_replicas.drivers import between_graph
from tf_replicas.drivers import in_graph
from tf_replicas.drivers import server
from tf_replicas.programs import run_options
from tf_replicas.replica import model_replica
from tf_replicas.rules import base as rule_base
from tf_replicas.rules.asynchronous import async_replicas
from tf_replicas.rules.sync import sync_replicas
from tf_replicas.store import moving_averages

_RATE = 0.01
_DECAY = 0.9999
_PER_CALL = 10
_DRIVERS = {
  "between-graph": between_graph.BetweenGraph,
  "in-graph": in_graph.InGraph,
}


def serve(make_steps: Callable[[int], object]) -> None:
  """Makes steps when asked to, after some that trace all functions."""
  make_steps(_PER_CALL)
  live_cluster.serve_turns(make_steps)


def tutorial(batch_size: int) -> model_replica.Replica:
  """Returns a replica of the CIFAR-10 program, with synthetic images."""
  config = config_lib.Config(dataset="synthetic", batch_size=batch_size)
  options = run_options.Options(run_options.one_machine_spec(0), ".")
  return workload.make(config, options).replica_fn([])


def without_computing(batch_size: int) -> model_replica.Replica:
  """Returns a replica with the same variables, and gradients of ones.

  Args:
    batch_size: The number of examples in a batch, which are not used.
  """

  def loss_fn(parameters, examples):
    del examples
    return tf.add_n([tf.reduce_sum(p) for p in parameters])

  def dataset_fn(num_shards, shard_index, start_example):
    del num_shards, shard_index, start_example
    return tf.data.Dataset.from_tensors(tf.zeros([batch_size])).repeat()

  return model_replica.Replica(
    tutorial(batch_size).variables, loss_fn, dataset_fn
  )


def computing(batch_size: int) -> Callable[[int], object]:
  """Makes the function that computes gradients, and does nothing with them.

  Args:
    batch_size: The number of examples in a batch.

  Returns:
    A function that computes the gradients of a number of batches.
  """
  replica = tutorial(batch_size)
  batches = iter(replica.dataset_fn(1, 0, 0))
  parameters = [tf.convert_to_tensor(v) for v in replica.variables]

  @tf.function
  def compute(count):
    def one(number, total):
      found = replica.gradients(parameters, next(batches))
      # One element of each gradient is used, since TensorFlow computes only
      # what is used.
      parts = [tf.reshape(gradient, [-1])[0] for gradient in found.gradients]
      return number + 1, total + tf.add_n(parts)

    start = (tf.constant(0), tf.constant(0.0))
    return tf.while_loop(lambda number, _: number < count, one, start)

  return lambda count: compute(tf.constant(count))[1].numpy()


def one_process(batch_size: int) -> Callable[[int], object]:
  """Makes the function that trains in this process alone.

  Args:
    batch_size: The number of examples in a batch.

  Returns:
    A function that makes a number of updates, with moving averages.
  """
  replica = tutorial(batch_size)
  batches = iter(replica.dataset_fn(1, 0, 0))
  optimizer = keras.optimizers.SGD(_RATE)
  averages = tf.train.ExponentialMovingAverage(_DECAY)
  variables = [v.value for v in replica.variables]

  @tf.function
  def step(*batch):
    parameters = [tf.convert_to_tensor(v) for v in variables]
    found = replica.gradients(parameters, batch)
    optimizer.apply(found.gradients, replica.variables)
    averages.apply(variables)
    return found.loss

  def update(count):
    for _ in range(count):
      loss = step(*next(batches))
    return loss.numpy()

  return update


def new_rule(update: str, count: int) -> rule_base.OptimizerRule:
  """Returns a rule for plain gradient descent, with moving averages.

  Args:
    update: `sync` or `async`.
    count: The number of replicas.
  """
  optimizer = keras.optimizers.SGD(_RATE)
  averages = moving_averages.MovingAverages(_DECAY)
  if update == "async":
    return async_replicas.AsyncReplicasOptimizer(
      optimizer, count, variable_averages=averages
    )
  return sync_replicas.SyncReplicasOptimizer(
    optimizer, count, count, variable_averages=averages
  )


def run_cluster_task(
  replication: str,
  update: str,
  new_replica: Callable[[], model_replica.Replica],
  spec: cluster.ClusterSpec,
  task: cluster.Task,
) -> None:
  """Runs a task of a cluster that trains.

  Args:
    replication: One of `_DRIVERS`.
    update: `sync` or `async`.
    new_replica: Makes the replica.
    spec: The cluster.
    task: The task of this process.
  """
  is_in_graph = replication == "in-graph"
  if task.job == "ps" or (is_in_graph and task.job == "worker"):
    clients = 1 if is_in_graph else len(spec.replicas)
    server.serve(spec, task, num_clients=clients)
    return
  count = spec.num_tasks("worker")
  driver = _DRIVERS[replication](
    spec, task, new_replica, lambda: new_rule(update, count)
  )
  if not driver.is_chief:
    driver.run_replica()
  else:
    updates = count if update == "async" else 1  # In a step.

    def make_steps(steps):
      step = driver.global_step
      last = step + steps * updates
      driver.stop_at(last)  # Asynchronous replicas would go on.
      while step < last:
        most = min(_PER_CALL * updates, last - step)
        step = driver.step(most).global_step

    serve(make_steps)
  driver.close()


def main(argv: list[str]) -> None:
  kind, update, batch_size, document, job, index = argv
  size = int(batch_size)
  spec = cluster.parse(json.loads(document))
  if kind == "one process":
    count = spec.num_tasks("worker")
    if update == "async":
      make_updates = one_process(size)
      serve(lambda steps: make_updates(steps * count))
    else:
      serve(one_process(size * count))
    return
  what, _, replication = kind.partition(", ")
  driver = (replication or "between-graph").replace("-", "_")
  options = run_options.Options(spec, ".", replication=driver)
  tf.config.threading.set_intra_op_parallelism_threads(options.threads)
  if what == "computing":
    serve(computing(size))
    return
  make = without_computing if what == "transferring" else tutorial
  task = cluster.Task(job, int(index))
  run_cluster_task(replication, update, lambda: make(size), spec, task)


if __name__ == "__main__":
  main(sys.argv[1:])
