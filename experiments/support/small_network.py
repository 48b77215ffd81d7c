"""Defines a small network, and pictures to train it on, for experiments.

The network is that of Caffe's `cifar10_full` without normalization: three
convolutions of 5 x 5, each with a pooling layer, and a linear layer. The
pictures are those of the synthetic data set at half their size, 16 x 16, so
that one core computes some hundred gradients of a few pictures per second. With
pictures of this size the network has 81,898 parameters (89,578 with 32 x 32).
"""

import math
from collections.abc import Callable
from collections.abc import Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from cifar10 import config
from cifar10 import synthetic

IMAGE_SIZE = config.RECORD_SIZE // 2
MOMENTUM = 0.9
CHANCE = 1 / config.NUM_CLASSES


class Pictures(NamedTuple):
  """Pictures of a part of the data set, with their classes.

  Attributes:
    images: float32 `[N, 16, 16, 3]`, each of mean 0 and variance 1.
    labels: int64 `[N]`, the classes.
  """

  images: tf.Tensor
  labels: tf.Tensor


def read(split: str) -> Pictures:
  """Reads the pictures of a part of the synthetic data set.

  Args:
    split: `train` (5,000 pictures) or `test` (1,000 pictures).
  """
  images, labels = synthetic.read(split)
  half = tf.nn.avg_pool2d(tf.cast(images, tf.float32), 2, 2, "VALID")
  return Pictures(tf.image.per_image_standardization(half), labels)


def build(seed: int) -> keras.Model:
  """Builds the network, which maps pictures to logits of 10 classes.

  Args:
    seed: Decides the initial weights.

  Returns:
    A model from `[batch, 16, 16, 3]` to `[batch, 10]`.
  """
  layers = keras.layers
  seeds = iter(np.random.SeedSequence(seed).generate_state(4))

  def weights():
    return keras.initializers.HeNormal(seed=int(next(seeds) >> 1))

  x = images = keras.Input([IMAGE_SIZE, IMAGE_SIZE, 3])
  for number, (channels, pool) in enumerate(
    (
      (32, layers.MaxPooling2D),
      (32, layers.AveragePooling2D),
      (64, layers.AveragePooling2D),
    ),
    start=1,
  ):
    x = layers.Conv2D(
      channels,
      5,
      padding="same",
      activation="relu",
      kernel_initializer=weights(),
      name=f"conv{number}",
    )(x)
    x = pool(3, 2, padding="same")(x)
  logits = layers.Dense(
    config.NUM_CLASSES, kernel_initializer=weights(), name="linear"
  )(layers.Flatten()(x))
  return keras.Model(images, logits)


def values(model: keras.Model) -> list[tf.Tensor]:
  """Returns the values of the network's parameters as tensors."""
  return [tf.identity(v.value) for v in model.trainable_variables]


def loss(
  model: keras.Model,
  parameters: Sequence[tf.Tensor],
  pictures: Pictures,
  chosen: tf.Tensor,
) -> tf.Tensor:
  """Computes the mean cross-entropy of some pictures.

  Args:
    model: The network that `build` returned. Its own variables are not read.
    parameters: The values of the parameters, in the order of the network's
      trainable variables.
    pictures: All pictures.
    chosen: The indices of the pictures of the batch, int64 `[batch]`.
  """
  images, labels = (tf.gather(part, chosen) for part in pictures)
  logits, _ = model.stateless_call(parameters, [], images)
  return _cross_entropy(logits, labels)


def evaluate(
  model: keras.Model, parameters: Sequence[tf.Tensor], pictures: Pictures
) -> dict[str, float | None]:
  """Measures how well the network classifies pictures.

  Args:
    model: The network that `build` returned. Its own variables are not read.
    parameters: The values of the parameters.
    pictures: The pictures to classify.

  Returns:
    `precision`: the share of pictures whose class has the largest logit. If the
    parameters are not finite, it is about that of a guess. `loss`: the mean
    cross-entropy; None if it is not finite.
  """
  logits, _ = model.stateless_call(parameters, [], pictures.images)
  is_right = tf.argmax(logits, axis=1) == pictures.labels
  return {
    "precision": float(tf.reduce_mean(tf.cast(is_right, tf.float64))),
    "loss": finite(_cross_entropy(logits, pictures.labels)),
  }


def _cross_entropy(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
  return tf.reduce_mean(
    tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
  )


def finite(value) -> float | None:
  """Converts a number to a float for JSON; None if it is not finite."""
  return float(value) if math.isfinite(value) else None


def batches(
  num_examples: int, batch_size: int, num_batches: int, seed: int
) -> np.ndarray:
  """Draws the examples of each batch, in a new random order in every epoch.

  Batches of another size are made of the same sequence of examples.

  Args:
    num_examples: The number of examples in the data set.
    batch_size: The number of examples in a batch.
    num_batches: The number of batches.
    seed: The seed of the random order.

  Returns:
    The indices of the examples, int64 [num_batches, batch_size].
  """
  count = num_batches * batch_size
  rng = np.random.default_rng(seed)
  epochs = [
    rng.permutation(num_examples) for _ in range(-(-count // num_examples))
  ]
  return np.concatenate(epochs)[:count].reshape([num_batches, batch_size])


def gradients(
  model: keras.Model,
  parameters: Sequence[tf.Tensor],
  pictures: Pictures,
  chosen: tf.Tensor,
) -> tuple[tf.Tensor, list[tf.Tensor]]:
  """Computes the loss of some pictures, and its gradient.

  Args:
    model: The network that `build` returned. Its own variables are not read.
    parameters: The values of the parameters, in the order of the network's
      trainable variables.
    pictures: All pictures.
    chosen: The indices of the pictures of the batch, int64 `[batch]`.

  Returns:
    The mean cross-entropy, and its gradient for each parameter.
  """
  with tf.GradientTape(watch_accessed_variables=False) as tape:
    tape.watch(parameters)
    value = loss(model, parameters, pictures, chosen)
  return value, tape.gradient(value, parameters)


def step_fn(model: keras.Model, pictures: Pictures) -> Callable[..., tuple]:
  """Makes a function for one update by gradient descent with momentum.

  The function works on tensors. So the gradient may be computed from other
  (older) parameters than those that it changes.

  Args:
    model: The network that `build` returned. Its own variables are not read.
    pictures: All pictures.

  Returns:
    A function of (parameters at which the gradient is computed, parameters to
    change, their velocities, indices of pictures, learning rate) that returns
    the loss, the parameters and the velocities after the update

        velocity <- 0.9 velocity - rate gradient
        parameter <- parameter + velocity
  """

  @tf.function(autograph=False)
  def step(seen, parameters, velocities, chosen, rate):
    value, found = gradients(model, seen, pictures, chosen)
    velocities = [
      MOMENTUM * v - rate * g for v, g in zip(velocities, found, strict=True)
    ]
    parameters = [p + v for p, v in zip(parameters, velocities, strict=True)]
    return value, parameters, velocities

  return step


def thin(losses: Sequence[float], num_points: int) -> list[float | None]:
  """Reduces a curve to `num_points` means of equal parts.

  Returns:
    The means; None for a part whose mean is not finite.
  """
  parts = np.array_split(np.asarray(losses), num_points)
  return [finite(part.mean()) for part in parts]
