"""Trains by an own update rule: replicas vote on the sign of the gradient.

A replica sends the signs of its gradient, and an update is the mean of these
signs, after signSGD (Bernstein et al. 2018). Clipping, backup workers and
checkpoints work as in `SyncReplicasOptimizer`, from which the rule is derived.
CONTRIBUTING.md explains how to write a rule from scratch.

Alone:          python examples/own_rule.py
As a cluster:   python -m tf_replicas.launch --ps=1 --workers=3
                  examples/own_rule.py
"""

import keras
import tensorflow as tf

import tf_replicas
from tf_replicas.programs import update_options


class SignSgd(tf_replicas.SyncReplicasOptimizer):
  """An update rule that averages the signs of N replicas' gradients."""

  def finish_gradients(self, gradients):
    """Replaces gradients by their signs, before a replica sends them.

    The entries of statistics (variables without gradients) are not changed.
    """
    finished = super().finish_gradients(gradients)
    count = len(self._store.trainable)
    signs = [g if g is None else tf.sign(g) for g in finished[:count]]
    return [*signs, *finished[count:]]


def make(settings, num_replicas: int, optimizer, **common) -> SignSgd:
  """Makes the update rule, for the table `update_options.RULES`.

  Args:
    settings: The settings of the rule, such as the number of gradients in an
      update.
    num_replicas: The number of replicas.
    optimizer: The optimizer that applies the averaged signs.
    **common: Arguments that all rules have.
  """
  needed = update_options.replicas_to_aggregate(settings, num_replicas)
  return SignSgd(optimizer, needed, num_replicas, name="sign_sgd", **common)


update_options.RULES["sign_sgd"] = update_options.Rule(
  make, waits_for_several=True
)


def dataset_fn(num_shards, index, start) -> tf.data.Dataset:
  """Makes endless random batches of 32 examples, different in each replica."""
  del num_shards, start
  seeds = tf.data.Dataset.random(seed=index)
  x = seeds.map(lambda seed: tf.random.stateless_normal([32, 3], [seed, 0]))
  return x.map(lambda x: (x, tf.reduce_sum(x, axis=1, keepdims=True)))


trained = tf_replicas.run(
  lambda: tf_replicas.keras_replica(
    keras.Sequential([keras.Input([3]), keras.layers.Dense(1)]),
    keras.losses.MeanSquaredError(),
    dataset_fn,
  ),
  lambda: keras.optimizers.SGD(0.01),
  rule=update_options.UpdateSettings(rules=("sign_sgd",)),
  max_steps=300,
  log_every_steps=100,
)
for path, value in trained.values.items():
  print(path, value.ravel())  # The kernel should be 1, and the bias 0.
print("loss:", trained.loss)
