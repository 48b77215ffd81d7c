"""Runs one task of the cluster of `experiments.claims.overwrite_and_idle`.

That experiment starts this program once per task.
"""

import sys
import time

from experiments.claims import overwrite_and_idle
from experiments.support import programs


def _replica(secs: float):
  """Returns a model with one weight, whose batches take `secs` to arrive."""
  import tensorflow as tf

  from tf_replicas.replica import model_replica

  def batches():
    while True:
      time.sleep(secs)
      yield ([1.0],)

  def dataset_fn(*_):
    signature = (tf.TensorSpec([1], tf.float32),)
    dataset = tf.data.Dataset.from_generator(
      batches, output_signature=signature
    )
    options = tf.data.Options()
    # Else the next batch comes while the worker waits for an update.
    options.experimental_optimization.inject_prefetch = False
    return dataset.with_options(options)

  return model_replica.Replica(
    [tf.Variable(1.0, name="x")],
    lambda parameters, batch: tf.square(parameters[0]) / 2 * batch[0],
    dataset_fn,
  )


def _optimizer(update: str):
  import keras

  import tf_replicas

  sgd = keras.optimizers.SGD(overwrite_and_idle.RATE)
  count = len(overwrite_and_idle.TURN_SECS)
  if update == "sync":
    return tf_replicas.SyncReplicasOptimizer(sgd, count)
  return tf_replicas.AsyncReplicasOptimizer(sgd, count)


def run_client(spec, task, directory, update: str, num_steps: str) -> None:
  """Trains in this worker; the chief ends it after `num_steps` updates.

  Args:
    spec: The cluster.
    task: The task of this process.
    directory: The directory for the timelines.
    update: `sync` or `async`.
    num_steps: The number of updates, as text.
  """
  from tf_replicas.drivers import between_graph

  secs = overwrite_and_idle.TURN_SECS[f"{task.job}:{task.index}"]
  driver = between_graph.BetweenGraph(
    spec,
    task,
    lambda: _replica(secs),
    lambda: _optimizer(update),
    timeline_dir=str(directory / "timeline"),
  )
  if driver.is_chief:
    while driver.step().global_step < int(num_steps):
      pass
  else:
    driver.run_replica()
  driver.close()


if __name__ == "__main__":
  programs.be_task(sys.argv[1:], run_client)
