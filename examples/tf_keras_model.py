"""Trains a model of `tf_keras` (Keras 2), with its optimizer, by `run`.

Needs `pip install tf-keras`.

Alone:          python examples/tf_keras_model.py
As a cluster:   python -m tf_replicas.launch --ps=1 --workers=2
                  examples/tf_keras_model.py
"""

import tensorflow as tf
import tf_keras

import tf_replicas


def new_model() -> tf_keras.Model:
  """Makes a model that tells which of three numbers is the largest."""
  return tf_keras.Sequential(
    [
      tf_keras.Input([3]),
      tf_keras.layers.Dense(32, name="hidden"),
      tf_keras.layers.BatchNormalization(momentum=0.9, name="normalization"),
      tf_keras.layers.Dense(3, activation="softmax", name="output"),
    ]
  )


def loss_fn(model: tf_keras.Model, x: tf.Tensor, y: tf.Tensor):
  """Computes the loss, regularizers included, and the accuracy for the log."""
  outputs = model(x, training=True)
  losses = tf_keras.losses.sparse_categorical_crossentropy(y, outputs)
  hits = tf_keras.metrics.sparse_categorical_accuracy(y, outputs)
  loss = tf.add_n([tf.reduce_mean(losses), *model.losses])
  return loss, {"accuracy": tf.reduce_mean(hits)}


def dataset_fn(num_shards, index, start) -> tf.data.Dataset:
  """Makes endless random batches of 32 examples, different in each replica."""
  del num_shards, start
  seeds = tf.data.Dataset.random(seed=index)
  x = seeds.map(lambda seed: tf.random.stateless_normal([32, 3], [seed, 0]))
  return x.map(lambda x: (x, tf.argmax(x, axis=1)))


trained = tf_replicas.run(
  lambda: tf_replicas.module_replica(new_model(), loss_fn, dataset_fn),
  lambda: tf_keras.optimizers.Adam(0.01),
  max_steps=300,
  log_every_steps=100,
)
# From here on there is only the chief.
model = new_model()
tf_replicas.load_into_module(model, trained.values)
model.compile(metrics=["accuracy"], loss="sparse_categorical_crossentropy")
x = tf.random.normal([1000, 3])
print("accuracy:", model.evaluate(x, tf.argmax(x, 1), verbose=0)[1])
