"""Measures the time that a backup worker saves when one worker is slow.

Worker 3 takes 0.2 s for each batch. The first updates need a gradient of each
of the 4 workers. Then the rule changes, and an update takes the gradients of
the first 3 workers that have computed one.

As a cluster:   python -m tf_replicas.launch --ps=1 --workers=4
                  examples/backup_workers.py
"""

import os
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tf_replicas
from tf_replicas.cluster import environment

SLOW_WORKER, SECS, SWITCH_AT, STEPS = 3, 0.2, 12, 60


def dataset_fn(num_shards, shard_index, start) -> tf.data.Dataset:
  """Makes endless random batches of 32 examples, slowly in worker 3."""
  del num_shards, start

  def batch(seed):
    if shard_index == SLOW_WORKER:
      seed = tf.numpy_function(
        lambda x: (time.sleep(SECS), x)[1], [seed], "int64"
      )
    x = tf.random.stateless_normal([32, 3], tf.stack([tf.reshape(seed, []), 0]))
    return x, tf.reduce_sum(x, axis=1, keepdims=True)

  return tf.data.Dataset.random(seed=shard_index).map(batch)


def replica_fn() -> tf_replicas.Replica:
  """Makes a replica: the model, the loss and the data of one worker."""
  model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
  return tf_replicas.keras_replica(
    model, keras.losses.MeanSquaredError(), dataset_fn
  )


def rule_fn() -> tf_replicas.SwitchingOptimizer:
  """Makes the update rule, which changes at a step of the training.

  Updates average the gradients of all 4 workers before that step, and of the
  first 3 of 4 workers afterwards.
  """
  sgd = keras.optimizers.SGD(0.05)
  rules = [tf_replicas.SyncReplicasOptimizer(sgd, n, 4) for n in (4, 3)]
  condition = tf_replicas.switch_conditions.at_step(SWITCH_AT)
  return tf_replicas.SwitchingOptimizer(rules, condition)


role = environment.role(os.environ)
if role is None or role[0].num_tasks("worker") != 4:
  sys.exit("start this with 4 workers: see the first lines of the file")
spec, task = role
if task.job == "ps":
  tf_replicas.serve(spec, task, num_clients=4)
else:
  with tf_replicas.BetweenGraph(spec, task, replica_fn, rule_fn) as driver:
    if driver.is_chief:
      times = [time.monotonic() for _ in range(STEPS) if driver.step()]
      secs = np.diff(times)
      all_4 = np.mean(secs[: SWITCH_AT - 1])
      first_3 = np.mean(secs[SWITCH_AT:])
      print(f"4 of 4: {all_4:.3f} s per step; 3 of 4: {first_3:.3f} s per step")
      print(f"the backup worker saves {1 - first_3 / all_4:.0%} of the time")
    else:
      driver.run_replica()
tf_replicas.exit_now(0)
