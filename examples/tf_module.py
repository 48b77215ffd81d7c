"""Trains a `tf.Module` with a loss function of its own by `tf_replicas.run`.

Alone:          python examples/tf_module.py
As a cluster:   python -m tf_replicas.launch --ps=1 --workers=2
                  examples/tf_module.py
"""

import keras
import tensorflow as tf

import tf_replicas


class Classifier(tf.Module):
  """A module of two layers that tells which of three numbers is the largest."""

  def __init__(self):
    """Makes the variables of both layers."""
    super().__init__()
    self.hidden = tf.Variable(tf.random.normal([3, 32], stddev=0.5))
    self.output = tf.Variable(tf.random.normal([32, 3], stddev=0.2))

  @tf.function
  def __call__(self, x: tf.Tensor) -> tf.Tensor:
    """Computes three logits, the largest for the largest number."""
    return tf.nn.relu(x @ self.hidden) @ self.output


def loss_fn(module: Classifier, x: tf.Tensor, y: tf.Tensor):
  """Computes the mean loss of a batch, and the accuracy for the log."""
  logits = module(x)
  losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
  is_right = tf.equal(tf.argmax(logits, axis=1), y)
  accuracy = tf.reduce_mean(tf.cast(is_right, tf.float32))
  return tf.reduce_mean(losses), {"accuracy": accuracy}


def dataset_fn(num_shards, index, start) -> tf.data.Dataset:
  """Makes endless random batches of 32 examples, different in each replica."""
  del num_shards, start
  seeds = tf.data.Dataset.random(seed=index)
  x = seeds.map(lambda seed: tf.random.stateless_normal([32, 3], [seed, 0]))
  return x.map(lambda x: (x, tf.argmax(x, axis=1)))


trained = tf_replicas.run(
  lambda: tf_replicas.module_replica(Classifier(), loss_fn, dataset_fn),
  lambda: keras.optimizers.Adam(0.01),
  max_steps=300,
  log_every_steps=100,
)
# From here on there is only the chief.
classifier = Classifier()
tf_replicas.load_into_module(classifier, trained.values)
x = tf.constant([[0.1, 0.9, 0.2], [0.8, 0.1, 0.3]])
print("largest:", tf.argmax(classifier(x), axis=1).numpy())
print("accuracy:", trained.metrics["accuracy"])
