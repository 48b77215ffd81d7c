"""Trains twice with data sets that end: those of worker 1 before worker 0's.

The chief prints one line of JSON: for each training the last global step, and
the number of contributions of each replica.
"""

import dataclasses
import json

import keras
import tensorflow as tf

import tf_replicas


class _Line(tf.Module):
  def __init__(self):
    super().__init__()
    self.slope = tf.Variable(0.0)


def _loss_fn(module: _Line, x: tf.Tensor) -> tf.Tensor:
  return tf.reduce_mean(module.slope * x)


def _dataset_fn(num_shards, index, start) -> tf.data.Dataset:
  del num_shards, start
  return tf.data.Dataset.from_tensors(tf.ones([2])).repeat(
    6 if index == 0 else 3
  )


def _replica(on_data_end: str) -> tf_replicas.Replica:
  replica = tf_replicas.module_replica(_Line(), _loss_fn, _dataset_fn)
  return dataclasses.replace(replica, on_data_end=on_data_end)


def _train(on_data_end: str, **rule) -> list:
  counts = []

  def sgd():
    return keras.optimizers.SGD(1.0)

  with tf_replicas.join(
    lambda: _replica(on_data_end), sgd, rule=tf_replicas.Sync(**rule)
  ) as driver:
    session = tf_replicas.Session(None, state=driver.store, max_steps=20)
    step = session.run(driver.step, wake=driver.interrupt)
    counts = [c.applied for c in driver.counts()]
  return [step, *counts]


def main() -> None:
  """Trains until worker 1 has no data, then until no worker has."""
  results = [
    _train("stop", replicas_to_aggregate=2),
    _train("go_on", min_contributions=1),
  ]
  print("RESULT", json.dumps(results), flush=True)


main()
