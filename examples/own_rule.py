"""An update rule of one's own: each replica votes on the sign of the gradient.

A replica sends the signs of its gradient, and an update is their mean, after
signSGD (Bernstein et al. 2018). Clipping, backup workers and checkpoints are
those of `SyncReplicasOptimizer`. For a rule from scratch, see CONTRIBUTING.md.

Alone:          python examples/own_rule.py
As a cluster:   python -m tf_replicas.launch --ps=1 --workers=3
                  examples/own_rule.py
"""

import keras
import tensorflow as tf

import tf_replicas
from tf_replicas.programs import update_options


class SignSgd(tf_replicas.SyncReplicasOptimizer):
  """Averages the signs of N gradients."""

  def finish_gradients(self, gradients):
    """What a replica sends: signs, and statistics as they are."""
    finished = super().finish_gradients(gradients)
    count = len(self._store.trainable)
    signs = [g if g is None else tf.sign(g) for g in finished[:count]]
    return [*signs, *finished[count:]]


def make(settings, num_replicas: int, optimizer, **common) -> SignSgd:
  """Wraps the rule around an optimizer."""
  needed = update_options.replicas_to_aggregate(settings, num_replicas)
  return SignSgd(optimizer, needed, num_replicas, name="sign_sgd", **common)


update_options.RULES["sign_sgd"] = update_options.Rule(
  make, waits_for_several=True
)


def dataset_fn(num_shards, index, start) -> tf.data.Dataset:
  """Endless batches of 32 examples, other ones in each replica."""
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
