"""Trains a GAN: two models, two optimizers, and two critic steps for one.

The generator makes one step while the critic makes two.

Alone:          python examples/gan.py
As a cluster:   python -m tf_replicas.launch --ps=1 --workers=2
                  examples/gan.py
"""

import keras
import numpy as np
import tensorflow as tf

import tf_replicas

dense = keras.layers.Dense
cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)


class Gan(keras.Model):
  """Two networks, of which the generator learns to imitate the data.

  The critic tells generated numbers from those of the data.
  """

  def __init__(self):
    """Makes the generator, the critic and an optimizer for each."""
    super().__init__()
    self.critic = keras.Sequential([dense(16, "relu"), dense(1)])
    self.generator = keras.Sequential([dense(1)])
    self.critic_optimizer = keras.optimizers.Adam(0.01, beta_1=0.5)
    self.generator_optimizer = keras.optimizers.Adam(0.02, beta_1=0.5)

  def call(self, noise: tf.Tensor) -> tf.Tensor:
    """Returns numbers that the generator makes from random noise."""
    return self.generator(noise)

  def train_step(self, real: tf.Tensor) -> dict[str, tf.Tensor]:
    """Trains the critic twice on a batch, then the generator once.

    Each call of `apply` is one update on the parameter servers.
    """
    ones, shape = tf.ones_like(real), [tf.shape(real)[0], 2]
    for _ in range(2):
      made = self(tf.random.normal(shape))
      with tf.GradientTape() as tape:
        critic_loss = cross_entropy(ones, self.critic(real))
        critic_loss += cross_entropy(0.0 * ones, self.critic(made))
      weights = self.critic.trainable_variables
      self.critic_optimizer.apply(tape.gradient(critic_loss, weights), weights)
    with tf.GradientTape() as tape:
      loss = cross_entropy(ones, self.critic(self(tf.random.normal(shape))))
    weights = self.generator.trainable_variables
    self.generator_optimizer.apply(tape.gradient(loss, weights), weights)
    return {"critic": critic_loss, "generator": loss}


def model_fn() -> Gan:
  """Makes a compiled GAN.

  Its two optimizers are attributes, and not arguments of `compile`.
  """
  model = Gan()
  model.compile()
  return model


real = np.random.default_rng(0).normal(4.0, 0.5, [4096, 1]).astype("float32")
history = tf_replicas.fit(model_fn, real, batch_size=64, epochs=8, verbose=2)
made = history.model(tf.random.normal([1000, 2]))
print(
  "mean of the data: 4.0; mean of the generated samples:",
  float(tf.reduce_mean(made)),
)
