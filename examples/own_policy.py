"""Trains with an own policy for stale gradients: older ones make smaller steps.

The staleness of a gradient is the number of updates made since its variables
were read. The learning rate is divided by the square root of the staleness plus
1, and gradients that are more than 9 updates old are dropped. A policy consists
of a few functions of the staleness.

As a cluster:   python -m tf_replicas.launch --ps=1 --workers=2
                  examples/own_policy.py

Without a cluster, no gradient is stale, and an asynchronous rule is refused.
"""

import keras
import tensorflow as tf

import tf_replicas
from tf_replicas.programs import update_options

by_root = tf_replicas.staleness.Policy(
  "by_root",
  admits=lambda staleness: staleness <= 9,
  rate_factor=lambda staleness: tf.math.rsqrt(staleness + 1.0),
)
# Its name makes it a rule that `Async` and `--update` take.
update_options.RULES["by_root"] = update_options.RULES["async"]._replace(
  policy=lambda settings: by_root
)


def dataset_fn(num_shards, index, start) -> tf.data.Dataset:
  """Makes endless random batches of 32 examples, different in each replica."""
  del num_shards, start
  seeds = tf.data.Dataset.random(seed=index)
  x = seeds.map(lambda seed: tf.random.stateless_normal([32, 3], [seed, 0]))
  return x.map(lambda x: (x, tf.reduce_sum(x, axis=1, keepdims=True)))


def replica_fn() -> tf_replicas.Replica:
  """Makes a replica: the model, the loss and the data of one worker."""
  model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
  return tf_replicas.keras_replica(
    model, keras.losses.MeanSquaredError(), dataset_fn
  )


with tf_replicas.join(
  replica_fn,
  lambda: keras.optimizers.SGD(0.05),
  rule=tf_replicas.Async("by_root"),
) as driver:  # In the chief only: the other tasks end here.
  driver.stop_at(400)
  while (result := driver.step(400)).global_step < 400:
    pass
  for name, count in zip(driver.replica_names, driver.counts(), strict=True):
    # How many gradients were 0, 1, 2, ... updates old.
    print(f"{name}: staleness {count.staleness}, {count.refused} refused")
print("loss:", result.loss)
