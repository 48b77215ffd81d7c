"""A small network, and pictures to train it on, for experiments with rules.

The network is that of Caffe's `cifar10_full` without normalisation: three
convolutions of 5 x 5, each with a pooling layer, and a linear one. The pictures
are those of the synthetic data set at half their size, 16 x 16, so that one
core makes some hundred gradients of a few pictures per second; so there are
81,898 parameters (89,578 with 32 x 32).
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
  """A part of the data set.

  Attributes:
    images: float32 `[N, 16, 16, 3]`, each of mean 0 and variance 1.
    labels: int64 `[N]`.
  """

  images: tf.Tensor
  labels: tf.Tensor


def read(split: str) -> Pictures:
  """The pictures of `train` (5,000) or `test` (1,000)."""
  images, labels = synthetic.read(split)
  half = tf.nn.avg_pool2d(tf.cast(images, tf.float32), 2, 2, "VALID")
  return Pictures(tf.image.per_image_standardization(half), labels)


def build(seed: int) -> keras.Model:
  """The network, from `[batch, 16, 16, 3]` pictures to `[batch, 10]` logits.

  Args:
    seed: Decides the initial weights.
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
  """The initial parameters."""
  return [tf.identity(v.value) for v in model.trainable_variables]


def loss(
  model: keras.Model,
  parameters: Sequence[tf.Tensor],
  pictures: Pictures,
  chosen: tf.Tensor,
) -> tf.Tensor:
  """The mean cross-entropy of some pictures.

  Args:
    model: What `build` returned; its own variables are not read.
    parameters: In the order of its trainable variables.
    pictures: All.
    chosen: Indices of those that count, int64 `[batch]`.
  """
  images, labels = (tf.gather(part, chosen) for part in pictures)
  logits, _ = model.stateless_call(parameters, [], images)
  return _cross_entropy(logits, labels)


def evaluate(
  model: keras.Model, parameters: Sequence[tf.Tensor], pictures: Pictures
) -> dict[str, float | None]:
  """How good these parameters are.

  Returns:
    `precision`, the share of pictures whose class has the largest logit, which
    is about that of a guess if parameters are not finite; `loss`, the mean
    cross-entropy, or None if that is not finite.
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
  """The same for JSON: None if it is not finite."""
  return float(value) if math.isfinite(value) else None


def batches(
  num_examples: int, batch_size: int, num_batches: int, seed: int
) -> np.ndarray:
  """Indices of examples: one permutation per epoch, end to end.

  Batches of another size are of the same sequence.

  Returns:
    int64 [num_batches, batch_size].
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
  """What `loss` returns, and its gradient."""
  with tf.GradientTape(watch_accessed_variables=False) as tape:
    tape.watch(parameters)
    value = loss(model, parameters, pictures, chosen)
  return value, tape.gradient(value, parameters)


def step_fn(model: keras.Model, pictures: Pictures) -> Callable[..., tuple]:
  """One update of gradient descent with momentum, on tensors.

  Returns:
    A function of (parameters that the gradient is of, parameters to change,
    their velocities, indices of pictures, learning rate) that returns the loss,
    the parameters and the velocities after the update

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
  """Means of equal parts of a curve; None where one is not finite."""
  parts = np.array_split(np.asarray(losses), num_points)
  return [finite(part.mean()) for part in parts]
