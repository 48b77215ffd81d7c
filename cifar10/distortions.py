"""The tutorial's random distortions, drawn and applied a batch at a time."""

from typing import NamedTuple

import tensorflow as tf

from cifar10 import config

MAX_BRIGHTNESS_DELTA = 63.0
MIN_CONTRAST = 0.2
MAX_CONTRAST = 1.8
# Pixels between a crop and the middle one, at most; all that a record allows.
MAX_SHIFT = (config.RECORD_SIZE - config.IMAGE_SIZE) // 2


class Distortions(NamedTuple):
  """What chance decides about each image of a batch, all `[batch]`.

  Attributes:
    top: Row of the crop's upper left corner; int32 in [0, 8], 4 in the middle.
    left: Its column; int32 in [0, 8].
    flip: Whether the crop is mirrored left to right.
    brightness: Added to every value; in [-63, 63).
    contrast: Factor of the distance to the channel's mean; in [0.2, 1.8).
  """

  top: tf.Tensor
  left: tf.Tensor
  flip: tf.Tensor
  brightness: tf.Tensor
  contrast: tf.Tensor


def draw(
  seed: tf.Tensor, num_images: int, *, max_shift: int | tf.Tensor = MAX_SHIFT
) -> Distortions:
  """Draws independent distortions for a number of images.

  Args:
    seed: `[2]` integers, as of TensorFlow's stateless random ops.
    num_images: Length of each result.
    max_shift: Pixels between a crop and the middle one in each direction, at
      most; in [0, 4], may be a scalar tensor.
  """
  seeds = tf.unstack(tf.random.split(seed, 5), num=5)
  shape = [num_images]
  first, last = MAX_SHIFT - max_shift, MAX_SHIFT + max_shift

  def uniform(seed, low, high, dtype=tf.float32):
    return tf.random.stateless_uniform(shape, seed, low, high, dtype)

  return Distortions(
    top=uniform(seeds[0], first, last + 1, tf.int32),
    left=uniform(seeds[1], first, last + 1, tf.int32),
    flip=uniform(seeds[2], 0.0, 1.0) < 0.5,
    brightness=uniform(seeds[3], -MAX_BRIGHTNESS_DELTA, MAX_BRIGHTNESS_DELTA),
    contrast=uniform(seeds[4], MIN_CONTRAST, MAX_CONTRAST),
  )


def apply(
  images: tf.Tensor, distortions: Distortions, *, colors: bool = True
) -> tf.Tensor:
  """Distorts a batch in the tutorial's order (`cifar10_input.py`).

  Crop, flip, brightness, contrast, standardisation; each does to an image
  what the `tf.image` function of that name does. The last makes the third
  void and leaves little of the fourth; they are kept as the tutorial has
  them.

  Args:
    images: uint8 `[batch, 32, 32, 3]`.
    distortions: One for every image.
    colors: Whether brightness and contrast change.

  Returns:
    float32 `[batch, 24, 24, 3]`.
  """
  crops = _crop_and_flip(
    images, distortions.top, distortions.left, distortions.flip
  )
  crops = tf.cast(crops, tf.float32)
  if colors:
    crops += _per_image(distortions.brightness)
    means = tf.reduce_mean(crops, [1, 2], keepdims=True)
    crops = (crops - means) * _per_image(distortions.contrast) + means
  return tf.image.per_image_standardization(crops)


def distort(images: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
  """Distorts a batch at random: `apply` with what `draw` gives.

  Args:
    images: uint8 `[batch, 32, 32, 3]`, the batch size static.
    seed: `[2]` integers; the same seed distorts in the same way.

  Returns:
    float32 `[batch, 24, 24, 3]`.
  """
  return apply(images, draw(seed, images.shape[0]))


def center(images: tf.Tensor) -> tf.Tensor:
  """Cuts out the middle and standardises it, for evaluation.

  Args:
    images: uint8 `[batch, 32, 32, 3]`.

  Returns:
    float32 `[batch, 24, 24, 3]`.
  """
  first = (config.RECORD_SIZE - config.IMAGE_SIZE) // 2
  last = first + config.IMAGE_SIZE
  crops = images[:, first:last, first:last]
  return tf.image.per_image_standardization(tf.cast(crops, tf.float32))


def _crop_and_flip(
  images: tf.Tensor, top: tf.Tensor, left: tf.Tensor, flip: tf.Tensor
) -> tf.Tensor:
  """Takes each crop's rows, and its columns in the one or other order."""
  offsets = tf.range(config.IMAGE_SIZE)
  rows = top[:, tf.newaxis] + offsets
  columns = left[:, tf.newaxis] + tf.where(
    flip[:, tf.newaxis], tf.reverse(offsets, [0]), offsets
  )
  crops = tf.gather(images, rows, axis=1, batch_dims=1)
  return tf.gather(crops, columns, axis=2, batch_dims=1)


def _per_image(values: tf.Tensor) -> tf.Tensor:
  return values[:, tf.newaxis, tf.newaxis, tf.newaxis]
