"""Trains a variational autoencoder, a model with a `train_step` of its own.

It follows the Keras example. Instead of MNIST, the images are bright discs at
random places.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from keras import ops

SIZE = 16
LATENT_DIM = 2


def load_data(num_examples, seed):
  """Makes random images of bright discs.

  Returns:
    Images float32 [num_examples, SIZE, SIZE, 1], with values from 0 to 1.
  """
  rng = np.random.default_rng(seed)
  places = rng.uniform(5, SIZE - 5, [num_examples, 2, 1, 1])
  distance = np.hypot(*np.moveaxis(places - np.mgrid[:SIZE, :SIZE], 1, 0))
  return np.clip(4.0 - distance, 0, 1)[..., np.newaxis].astype("float32")


class Sampling(layers.Layer):
  """A layer that draws a code from the distribution of an encoder."""

  def __init__(self):
    """Makes the layer, which takes its random seeds from a generator."""
    super().__init__()
    self.seed_generator = keras.random.SeedGenerator(1337)

  def call(self, inputs):
    """Draws a sample from a normal distribution.

    Args:
      inputs: The mean, and the logarithm of the variance, of one shape.

    Returns:
      A sample of this shape.
    """
    mean, log_var = inputs
    noise = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
    return mean + ops.exp(0.5 * log_var) * noise


def build_encoder():
  """Makes the encoder, which maps images to random codes.

  Its outputs are the mean, the logarithm of the variance, and a sample.
  """
  inputs = keras.Input([SIZE, SIZE, 1])
  hidden = layers.Conv2D(8, 3, activation="relu", strides=2, padding="same")(
    inputs
  )
  hidden = layers.Flatten()(hidden)
  hidden = layers.Dense(32, activation="relu")(hidden)
  mean = layers.Dense(LATENT_DIM, name="mean")(hidden)
  log_var = layers.Dense(LATENT_DIM, name="log_var")(hidden)
  return keras.Model(inputs, [mean, log_var, Sampling()([mean, log_var])])


def build_decoder():
  """Makes the decoder, which maps codes to images."""
  return keras.Sequential(
    [
      keras.Input([LATENT_DIM]),
      layers.Dense(32, activation="relu"),
      layers.Dense(8 * 8 * 8, activation="relu"),
      layers.Reshape([8, 8, 8]),
      layers.Conv2DTranspose(
        1, 3, activation="sigmoid", strides=2, padding="same"
      ),
    ]
  )


class VAE(keras.Model):
  """A variational autoencoder: an encoder, a decoder and their loss."""

  def __init__(self, encoder, decoder):
    """Stores the encoder and the decoder, and makes the metrics."""
    super().__init__()
    self.encoder = encoder
    self.decoder = decoder
    self.total_loss = keras.metrics.Mean(name="total_loss")
    self.reconstruction_loss = keras.metrics.Mean(name="reconstruction_loss")
    self.kl_loss = keras.metrics.Mean(name="kl_loss")

  @property
  def metrics(self):
    """The metrics that Keras sets to zero at the start of an epoch."""
    return [self.total_loss, self.reconstruction_loss, self.kl_loss]

  def train_step(self, data):
    """Makes one update of both networks from a batch of images."""
    with tf.GradientTape() as tape:
      mean, log_var, code = self.encoder(data)
      images = self.decoder(code)
      reconstruction = keras.losses.binary_crossentropy(data, images)
      reconstruction = ops.mean(ops.sum(reconstruction, axis=(1, 2)))
      kl = -0.5 * (1 + log_var - ops.square(mean) - ops.exp(log_var))
      kl = ops.mean(ops.sum(kl, axis=1))
      loss = reconstruction + kl
    gradients = tape.gradient(loss, self.trainable_weights)
    self.optimizer.apply_gradients(
      zip(gradients, self.trainable_weights, strict=True)
    )
    self.total_loss.update_state(loss)
    self.reconstruction_loss.update_state(reconstruction)
    self.kl_loss.update_state(kl)
    return {
      "loss": self.total_loss.result(),
      "reconstruction_loss": self.reconstruction_loss.result(),
      "kl_loss": self.kl_loss.result(),
    }


def build_model():
  """Makes a compiled variational autoencoder."""
  vae = VAE(build_encoder(), build_decoder())
  vae.compile(optimizer=keras.optimizers.Adam(0.005))
  return vae


images = load_data(1280, seed=1)

vae = build_model()
history = vae.fit(
  images,
  epochs=6,
  batch_size=64,
  verbose=2,
)

losses = history.history["loss"]
decoded = vae.decoder.predict(np.zeros([1, LATENT_DIM]), verbose=0)
print(f"brightest pixel of the decoded mean: {decoded.max():.2f}")
print(f"loss: {losses[0]:.3f} -> {losses[-1]:.3f}")
