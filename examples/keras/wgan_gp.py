"""Trains a Wasserstein GAN with a gradient penalty, by two optimizers.

It follows the Keras example. Instead of Fashion-MNIST, the images are bright
discs at random places. The measure of success is how far the mean of generated
images is from that of real images.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from keras import ops

SIZE = 12
NOISE_DIM = 8


def load_data(num_examples, seed):
  """Makes random images of bright discs.

  Returns:
    Images float32 [num_examples, SIZE, SIZE, 1], with values from -1 to 1.
  """
  rng = np.random.default_rng(seed)
  places = rng.uniform(4.5, SIZE - 5.5, [num_examples, 2, 1, 1])
  distance = np.hypot(*np.moveaxis(places - np.mgrid[:SIZE, :SIZE], 1, 0))
  bright = 2.0 * np.clip(4.0 - distance, 0, 1) - 1.0
  return bright[..., np.newaxis].astype("float32")


def build_critic():
  """Makes the critic, which maps images to scores of how real they look.

  The scores are unbounded numbers [batch, 1].
  """
  return keras.Sequential(
    [
      keras.Input([SIZE, SIZE, 1]),
      layers.Conv2D(8, 5, strides=2, padding="same"),
      layers.LeakyReLU(0.2),
      layers.Flatten(),
      layers.Dense(1),
    ]
  )


def build_generator():
  """Makes the generator, which maps random noise to images."""
  return keras.Sequential(
    [
      keras.Input([NOISE_DIM]),
      layers.Dense(6 * 6 * 8, use_bias=False),
      layers.BatchNormalization(),
      layers.LeakyReLU(0.2),
      layers.Reshape([6, 6, 8]),
      layers.UpSampling2D(2),
      layers.Conv2D(1, 3, padding="same", activation="tanh"),
    ]
  )


class WGAN(keras.Model):
  """A Wasserstein GAN: a critic, a generator and their training.

  A step of training makes several updates of the critic, then one of the
  generator.
  """

  def __init__(self, critic, generator, critic_steps=2, penalty_weight=10.0):
    """Stores critic and generator, and how the critic is trained."""
    super().__init__()
    self.critic = critic
    self.generator = generator
    self.critic_steps = critic_steps
    self.penalty_weight = penalty_weight
    self.seed_generator = keras.random.SeedGenerator(1)

  def compile(self, critic_optimizer, generator_optimizer):
    """Stores the optimizers of critic and generator."""
    super().compile()
    self.critic_optimizer = critic_optimizer
    self.generator_optimizer = generator_optimizer

  def gradient_penalty(self, real, fake):
    """Computes a term of the critic's loss.

    The term keeps the norm of the critic's gradient near 1 at points between
    real and fake images.
    """
    share = keras.random.uniform(
      [ops.shape(real)[0], 1, 1, 1], seed=self.seed_generator
    )
    mixed = real + share * (fake - real)
    with tf.GradientTape() as tape:
      tape.watch(mixed)
      score = self.critic(mixed, training=True)
    gradients = tape.gradient(score, mixed)
    norm = ops.sqrt(1e-12 + ops.sum(ops.square(gradients), axis=(1, 2, 3)))
    return ops.mean(ops.square(norm - 1.0))

  def generate(self, batch_size):
    """Generates images from random noise, with the generator as in training."""
    noise = keras.random.normal(
      [batch_size, NOISE_DIM], seed=self.seed_generator
    )
    return self.generator(noise, training=True)

  def train_step(self, real):
    """Makes the updates of critic and generator for a batch of real images."""
    batch_size = ops.shape(real)[0]
    for _ in range(self.critic_steps):
      with tf.GradientTape() as tape:
        fake = self.generate(batch_size)
        critic_loss = ops.mean(self.critic(fake, training=True))
        critic_loss -= ops.mean(self.critic(real, training=True))
        penalty = self.gradient_penalty(real, fake)
        loss = critic_loss + self.penalty_weight * penalty
      weights = self.critic.trainable_weights
      gradients = tape.gradient(loss, weights)
      self.critic_optimizer.apply_gradients(
        zip(gradients, weights, strict=True)
      )
    with tf.GradientTape() as tape:
      fake = self.generate(batch_size)
      generator_loss = -ops.mean(self.critic(fake, training=True))
    weights = self.generator.trainable_weights
    gradients = tape.gradient(generator_loss, weights)
    self.generator_optimizer.apply_gradients(
      zip(gradients, weights, strict=True)
    )
    return {"critic_loss": critic_loss, "generator_loss": generator_loss}


class Monitor(keras.callbacks.Callback):
  """A callback that records how far generated images are from real images."""

  def __init__(self):
    """Makes an empty list for the distances of all epochs."""
    super().__init__()
    self.distances = []

  def on_epoch_end(self, epoch, logs=None):
    """Records how far the mean of generated images is from the data's mean.

    Keras calls it after every epoch.
    """
    made = self.model.generator(
      keras.random.normal([128, NOISE_DIM], seed=epoch), training=False
    )
    difference = ops.convert_to_numpy(made).mean(axis=0) - images.mean(axis=0)
    self.distances.append(float(np.abs(difference).mean()))


def build_model():
  """Makes a compiled Wasserstein GAN."""
  wgan = WGAN(build_critic(), build_generator())
  wgan.compile(
    critic_optimizer=keras.optimizers.Adam(0.002, beta_1=0.5, beta_2=0.9),
    generator_optimizer=keras.optimizers.Adam(0.002, beta_1=0.5, beta_2=0.9),
  )
  return wgan


images = load_data(1280, seed=1)
monitor = Monitor()

wgan = build_model()
history = wgan.fit(
  images,
  batch_size=64,
  epochs=8,
  callbacks=[monitor],
  verbose=2,
)

made = wgan.generator.predict(np.zeros([1, NOISE_DIM]), verbose=0)
print(f"pixels of a generated image: {made.min():.2f} to {made.max():.2f}")
print(f"distance: {monitor.distances[0]:.3f} -> {monitor.distances[-1]:.3f}")
