"""One task of `benchmarks.lost_updates`, which starts it."""

import json
import pathlib
import sys

from benchmarks import lost_updates
from tf_replicas import cluster
from tf_replicas import processes
from tf_replicas import server

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
  """The sum of a variable that starts at 0."""
  import tensorflow as tf

  from tf_replicas import towers

  return towers.Replica(
    [tf.Variable(tf.zeros([_SIZE]), name="v")],
    lambda parameters, x: tf.reduce_sum(parameters[0]) * x[0],
    lambda *_: tf.data.Dataset.from_tensors((tf.ones([1]),)).repeat(),
  )


def _train(driver, index: int, increments: int, directory) -> None:
  """This worker's share, when all are there."""
  import tensorflow as tf

  from tf_replicas import turns

  batches = iter(driver.replica.dataset_fn())

  @tf.function
  def contribute(step, parameters):
    release, parameters, _ = turns.contribute(
      driver.store,
      driver.optimizer,
      driver.replica,
      batches,
      index,
      parameters,
      step=step,
    )
    return release.global_step, parameters

  @tf.function
  def pull():
    return turns.pull(driver.store, driver.optimizer, index)

  _await(driver.store.is_initialized, "the variables")
  contribute.get_concrete_function(*pull())
  (directory / f"ready_{index}").touch()
  _await(
    lambda: len(list(directory.glob("ready_*"))) == lost_updates.REPLICAS,
    "the other workers to begin",
  )
  read = pull()
  for _ in range(increments):
    read = contribute(*read)


def _await(condition, what: str) -> None:
  from tf_replicas import connection

  connection.await_value(
    condition, timeout_secs=120, what=f"waiting for {what}"
  )


def run_client(spec, task, name, use_locking, increments, directory) -> None:
  """Trains; the chief leaves the final state in the directory."""
  from tf_replicas import async_replicas
  from tf_replicas import between_graph

  driver = between_graph.BetweenGraph(
    spec,
    task,
    _replica,
    lambda: async_replicas.AsyncReplicasOptimizer(
      _optimizer(name), lost_updates.REPLICAS, use_locking=use_locking
    ),
  )
  if driver.is_chief:
    driver.store.load_state({"global_step": lost_updates.FIRST_STEP})
  _train(driver, task.index, increments, directory)
  if driver.is_chief:
    last = lost_updates.FIRST_STEP + lost_updates.REPLICAS * increments
    _await(lambda: driver.global_step == last, "the other workers to end")
    state = {k: v.numpy().tolist() for k, v in driver.store.state().items()}
    (directory / "state.json").write_text(json.dumps(state))
  driver.close()


def main(argv: list[str]) -> None:
  path, job, index, name, use_locking, increments = argv
  spec = cluster.load(path)
  task = cluster.Task(job, int(index))
  if job == "ps":
    server.serve(spec, task, num_clients=len(spec.replicas))
  else:
    how = name, use_locking == "1", int(increments)
    run_client(spec, task, *how, pathlib.Path(path).parent)
  processes.exit_now(0)


if __name__ == "__main__":
  main(sys.argv[1:])
