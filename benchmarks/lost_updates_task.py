"""Runs one task of the cluster of `benchmarks.lost_updates`.

That benchmark starts this program once per task.
"""

import json
import sys

from benchmarks import lost_updates
from experiments.support import programs

_SIZE = 100


def _optimizer(name: str):
  import keras

  if name == "adam":
    return keras.optimizers.Adam(
      lost_updates.RATE,
      beta_1=lost_updates.BETA,
      beta_2=lost_updates.BETA,
      epsilon=lost_updates.EPSILON,
    )
  momentum = lost_updates.MOMENTUM if name == "momentum" else 0.0
  return keras.optimizers.SGD(lost_updates.RATE, momentum=momentum)


def _replica():
  """Returns a replica whose loss is the sum of a variable that starts at 0.

  So its gradient is always one.
  """
  import tensorflow as tf

  from tf_replicas.replica import model_replica

  return model_replica.Replica(
    [tf.Variable(tf.zeros([_SIZE]), name="v")],
    lambda parameters, x: tf.reduce_sum(parameters[0]) * x[0],
    lambda *_: tf.data.Dataset.from_tensors((tf.ones([1]),)).repeat(),
  )


def _train(driver, index: int, increments: int, directory) -> None:
  """Makes this worker's updates, once all workers are ready.

  Args:
    driver: The driver of the between-graph training.
    index: The index of this worker.
    increments: The number of updates of this worker.
    directory: The directory where workers leave a file when they are ready.
  """
  import tensorflow as tf

  from tf_replicas.drivers import replica_loop

  batches = iter(driver.replica.dataset_fn())

  loop = replica_loop.ReplicaLoop(
    driver.rule,
    driver.replica,
    batches,
    index,
    device=None,
  )
  begin = tf.function(loop.begin)
  contribute = tf.function(
    lambda *carried: loop.run_one(*carried, is_preadmitted=False)
  )
  _await(driver.store.is_initialized, "the variables")
  contribute.get_concrete_function(*begin())
  (directory / f"ready_{index}").touch()
  _await(
    lambda: len(list(directory.glob("ready_*"))) == lost_updates.REPLICAS,
    "the other workers to begin",
  )
  carried = begin()
  for _ in range(increments):
    carried = contribute(*carried)


def _await(condition, what: str) -> None:
  from tf_replicas.runtime import waiting

  waiting.await_value(condition, timeout_secs=120, what=f"waiting for {what}")


def run_client(
  spec, task, directory, name: str, use_locking: str, increments: str
) -> None:
  """Trains in this worker; the chief writes the final state to a file.

  Args:
    spec: The cluster.
    task: The task of this process.
    directory: The directory of the file, `state.json`.
    name: The optimizer.
    use_locking: "1" if updates of one variable exclude each other, else "0".
    increments: The number of updates of each worker, as text.
  """
  from tf_replicas.drivers import between_graph
  from tf_replicas.rules.asynchronous import async_replicas

  driver = between_graph.BetweenGraph(
    spec,
    task,
    _replica,
    lambda: async_replicas.AsyncReplicasOptimizer(
      _optimizer(name),
      lost_updates.REPLICAS,
      use_locking=bool(int(use_locking)),
    ),
  )
  if driver.is_chief:
    driver.store.load_state({"global_step": lost_updates.FIRST_STEP})
  _train(driver, task.index, int(increments), directory)
  if driver.is_chief:
    last = lost_updates.FIRST_STEP + lost_updates.REPLICAS * int(increments)
    _await(lambda: driver.global_step == last, "the other workers to end")
    state = {k: v.numpy().tolist() for k, v in driver.store.state().items()}
    (directory / "state.json").write_text(json.dumps(state))
  driver.close()


if __name__ == "__main__":
  programs.be_task(sys.argv[1:], run_client)
