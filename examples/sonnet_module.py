"""Trains a Sonnet module with batch normalization by Sonnet's optimizer.

Needs `pip install dm-sonnet`.

Alone:          python examples/sonnet_module.py
As a cluster:   python -m tf_replicas.launch --ps=1 --workers=2
                  examples/sonnet_module.py
"""

import sonnet as snt
import tensorflow as tf

import tf_replicas


class Classifier(snt.Module):
  """A module that tells which of three numbers is the largest."""

  def __init__(self):
    """Makes the layers, whose variables are made with the first batch."""
    super().__init__()
    self.hidden = snt.Linear(32)
    self.normalization = snt.BatchNorm(create_scale=True, create_offset=True)
    self.output = snt.Linear(3)

  def __call__(self, x: tf.Tensor, *, is_training: bool) -> tf.Tensor:
    """Computes three logits, the largest for the largest number."""
    x = self.normalization(self.hidden(x), is_training=is_training)
    return self.output(tf.nn.relu(x))


def loss_fn(module: Classifier, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
  """Computes the mean loss of a batch of inputs `x` and classes `y`."""
  logits = module(x, is_training=True)
  losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
  return tf.reduce_mean(losses)


def dataset_fn(num_shards, index, start) -> tf.data.Dataset:
  """Makes endless random batches of 32 examples, different in each replica."""
  del num_shards, start
  seeds = tf.data.Dataset.random(seed=index)
  x = seeds.map(lambda seed: tf.random.stateless_normal([32, 3], [seed, 0]))
  return x.map(lambda x: (x, tf.argmax(x, axis=1)))


trained = tf_replicas.run(
  lambda: tf_replicas.module_replica(Classifier(), loss_fn, dataset_fn),
  lambda: snt.optimizers.Adam(0.01),
  max_steps=300,
  log_every_steps=100,
)
# From here on there is only the chief.
classifier = Classifier()
x = tf.random.normal([1000, 3])
classifier(x, is_training=True)  # Makes the variables.
tf_replicas.load_into_module(classifier, trained.values)
is_right = tf.argmax(classifier(x, is_training=False), 1) == tf.argmax(x, 1)
print("accuracy:", float(tf.reduce_mean(tf.cast(is_right, tf.float32))))
