"""Trains one model on two devices, each of which runs some of its layers.

Each batch is cut into micro-batches, so that both devices work at the same
time. On a machine without two GPUs, two parts of the CPU take their place.

Alone:          python examples/model_parallel.py
As a cluster:   python -m tf_replicas.launch --ps=1 --workers=2
                  examples/model_parallel.py
"""

import keras
import tensorflow as tf

import tf_replicas

has_gpus = len(tf.config.list_physical_devices("GPU")) >= 2
DEVICES = tf_replicas.devices.tower_devices([0, 1], emulate=not has_gpus)
tf_replicas.devices.configure([0, 1], num_emulated=0 if has_gpus else 2)


def dataset_fn(num_shards, index, start) -> tf.data.Dataset:
  """Makes endless random batches of 32 examples, different in each replica."""
  del num_shards, start
  seeds = tf.data.Dataset.random(seed=index)
  x = seeds.map(lambda seed: tf.random.stateless_normal([32, 3], [seed, 0]))
  return x.map(lambda x: (x, tf.argmax(x, axis=1)))


def replica_fn() -> tf_replicas.Replica:
  """Makes a replica whose model has its layers on two devices.

  The names of the layers decide on which device each layer runs.
  """
  dense = keras.layers.Dense
  model = keras.Sequential(
    [
      keras.Input([3]),
      dense(64, "relu", name="first_1"),
      dense(64, "relu", name="first_2"),
      dense(3, name="last"),
    ]
  )
  layers = tf_replicas.place_layers(model, {"first_*": 0, "last": 1})
  print(layers.table(DEVICES))
  return tf_replicas.keras_replica(
    model,
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    dataset_fn,
    devices=DEVICES,
    layers=layers,
    micro_batches=2,
    metrics={"accuracy": accuracy},
  )


def accuracy(labels: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
  """Computes the fraction of right answers in a batch, for the log."""
  hits = keras.metrics.sparse_categorical_accuracy(labels, outputs)
  return tf.reduce_mean(hits)


trained = tf_replicas.run(
  replica_fn,
  lambda: keras.optimizers.Adam(0.01),
  max_steps=200,
  log_every_steps=100,
)
print("accuracy:", trained.metrics["accuracy"])
