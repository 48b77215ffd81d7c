"""Trains by a loop of one's own, in the role that `tf_replicas.join` finds.

The roles are the chief, the workers and the parameter servers of a cluster.

As a cluster: python -m tf_replicas.launch --ps=1 --workers=2
examples/custom_loop.py

Without a cluster, it needs another update rule, `tf_replicas.Sync()`.
"""

import keras
import tensorflow as tf

import tf_replicas


def new_model() -> keras.Model:
  """Makes a model that tells which of three numbers is the largest."""
  return keras.Sequential(
    [
      keras.Input([3]),
      keras.layers.Dense(32, activation="relu", name="hidden"),
      keras.layers.Dense(3, name="output"),
    ],
    name="classifier",
  )


def dataset_fn(num_shards, index, start) -> tf.data.Dataset:
  """Makes endless random batches of 32 examples, different in each replica."""
  del num_shards, start
  seeds = tf.data.Dataset.random(seed=index)
  x = seeds.map(lambda seed: tf.random.stateless_normal([32, 3], [seed, 0]))
  return x.map(lambda x: (x, tf.argmax(x, axis=1)))


def replica_fn() -> tf_replicas.Replica:
  """Makes a replica: the model, the loss and the data of one worker."""
  loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  return tf_replicas.keras_replica(new_model(), loss, dataset_fn)


with tf_replicas.join(
  replica_fn,
  lambda: keras.optimizers.Adam(0.02),
  rule=tf_replicas.Async("bounded_staleness", max_staleness=4),
) as driver:  # In the chief only: the other tasks end here.
  model = new_model()
  x = tf.random.normal([1000, 3])
  step = 0
  for target in range(50, 2001, 50):
    while step < target:
      step = driver.step(target - step).global_step
    tf_replicas.load_into_keras(model, driver.values())
    is_right = tf.argmax(model(x), axis=1) == tf.argmax(x, axis=1)
    accuracy = float(tf.reduce_mean(tf.cast(is_right, tf.float32)))
    print(f"step {step}: accuracy {accuracy:.3f}")
    if accuracy > 0.95:
      break
print("accuracy:", accuracy)
