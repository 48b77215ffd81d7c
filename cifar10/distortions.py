"""Draws and applies the CIFAR-10 tutorial's random distortions of images.

All images of a batch are distorted at the same time. Crops may also have other
sizes than the tutorial's 24 pixels, and are then resized to 24.
"""

from typing import NamedTuple

import tensorflow as tf

from cifar10 import config

MAX_BRIGHTNESS_DELTA = 63.0
MIN_CONTRAST = 0.2
MAX_CONTRAST = 1.8
# Largest distance, in pixels, between a crop of 24 and the middle crop.
MAX_SHIFT = (config.RECORD_SIZE - config.IMAGE_SIZE) // 2
# Pixels between the sizes of the crops of two views of an image.
_VIEW_STEP = 2
# As a share of an image's height: some float32 roundings, far below a pixel.
_EDGE = 3e-7


class Distortions(NamedTuple):
  """Random numbers that distort the images of a batch.

  Each field is a tensor `[batch]`.

  Attributes:
    size: Height and width of the crop in pixels, float32; 24 if the crop is not
      resized.
    top: The row of the crop's upper left corner. Int32 in [0, 8], with 4 for
      the middle crop; float32 if crops are resized.
    left: The column of the crop's upper left corner, like `top`.
    flip: Whether the crop is mirrored left to right, bool.
    brightness: Number added to every value of the image; float32 in [-63, 63).
    contrast: Factor of the distance of each value from the mean of its color
      channel; float32 in [0.2, 1.8).
  """

  size: tf.Tensor
  top: tf.Tensor
  left: tf.Tensor
  flip: tf.Tensor
  brightness: tf.Tensor
  contrast: tf.Tensor


def draw(
  seed: tf.Tensor,
  num_images: int,
  *,
  max_shift: int | tf.Tensor = MAX_SHIFT,
  sizes: tuple[float | tf.Tensor, float | tf.Tensor] | None = None,
) -> Distortions:
  """Draws random numbers that distort each of a number of images.

  Args:
    seed: `[2]` integers, as for TensorFlow's stateless random ops.
    num_images: The number of images.
    max_shift: Largest distance, in pixels, between a crop and the middle crop
      in each direction; an int or a scalar tensor. It must be in [0, 4] without
      `sizes`. With `sizes`, crops never go beyond the edges of the image.
    sizes: Sizes of the smallest and the largest crop, numbers or scalar
      tensors. None if crops are not resized.
  """
  seeds = tf.unstack(tf.random.split(seed, 5), num=5)
  shape = [num_images]

  def uniform(seed, low, high, dtype=tf.float32):
    return tf.random.stateless_uniform(shape, seed, low, high, dtype)

  if sizes is None:
    size = tf.fill(shape, float(config.IMAGE_SIZE))
    first, last = MAX_SHIFT - max_shift, MAX_SHIFT + max_shift
    top, left = (uniform(s, first, last + 1, tf.int32) for s in seeds[:2])
  else:
    smallest, largest = (tf.cast(size, tf.float32) for size in sizes)
    size = uniform(tf.random.fold_in(seed, 5), smallest, largest)
    middle = (config.RECORD_SIZE - size) / 2
    reach = tf.minimum(middle, tf.cast(max_shift, tf.float32))
    top, left = (middle + reach * uniform(s, -1.0, 1.0) for s in seeds[:2])
  return Distortions(
    size=size,
    top=top,
    left=left,
    flip=uniform(seeds[2], 0.0, 1.0) < 0.5,
    brightness=uniform(seeds[3], -MAX_BRIGHTNESS_DELTA, MAX_BRIGHTNESS_DELTA),
    contrast=uniform(seeds[4], MIN_CONTRAST, MAX_CONTRAST),
  )


def apply(
  images: tf.Tensor, distortions: Distortions, *, colors: bool = True
) -> tf.Tensor:
  """Distorts a batch of images in the tutorial's order (`cifar10_input.py`).

  The order is crop, flip, brightness, contrast, standardization. Each
  distortion does to an image what the `tf.image` function of that name does.
  Standardization cancels the change of brightness and most of the change of
  contrast; they are kept because the tutorial has them.

  Args:
    images: Images, uint8 `[batch, 32, 32, 3]`.
    distortions: The random numbers that determine the distortions.
    colors: Whether brightness and contrast change.

  Returns:
    Distorted, standardized images, float32 `[batch, 24, 24, 3]`.
  """
  size, *place = distortions[:4]
  if distortions.top.dtype.is_integer:
    crops = _cut(images, *place)
  else:
    crops = _cut_and_resize(images, size, *place)
  if colors:
    crops += _per_image(distortions.brightness)
    means = tf.reduce_mean(crops, [1, 2], keepdims=True)
    crops = (crops - means) * _per_image(distortions.contrast) + means
  return tf.image.per_image_standardization(crops)


def distort(images: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
  """Distorts images at random and standardizes them, for training.

  Each image gets its own random crop, mirroring, brightness and contrast. Then
  it is standardized to mean 0 and standard deviation 1.

  Args:
    images: Images, uint8 `[batch, 32, 32, 3]`, with a static batch size.
    seed: `[2]` integers; equal seeds give equal distortions.

  Returns:
    Distorted, standardized images, float32 `[batch, 24, 24, 3]`.
  """
  return apply(images, draw(seed, images.shape[0]))


def center(images: tf.Tensor, size: float = config.IMAGE_SIZE) -> tf.Tensor:
  """Cuts out the middle of images and standardizes it, for evaluation.

  Args:
    images: Images, uint8 `[batch, 32, 32, 3]`.
    size: Height and width of the crop, which is resized unless this is 24.

  Returns:
    Standardized crops, float32 `[batch, 24, 24, 3]`.
  """
  first = (config.RECORD_SIZE - size) / 2
  if size == config.IMAGE_SIZE:
    middle = slice(int(first), int(first) + config.IMAGE_SIZE)
    crops = tf.cast(images[:, middle, middle], tf.float32)
  else:
    every = tf.zeros(tf.shape(images)[:1])
    corner = first + every
    crops = _cut_and_resize(images, size + every, corner, corner, every > 0)
  return tf.image.per_image_standardization(crops)


def views(
  images: tf.Tensor, size: float = config.IMAGE_SIZE, num_views: int = 1
) -> tf.Tensor:
  """Makes several views of the middle of each image, for evaluation.

  A view is a crop, possibly mirrored.

  Args:
    images: Images, uint8 `[batch, 32, 32, 3]`.
    size: Height and width of the crop of the first view. With 6 views, there
      are also crops 2 pixels smaller and larger.
    num_views: Number of views, one of `config.VIEWS`. If there are several, the
      second half of the views are mirror images of the first half.

  Returns:
    Standardized crops, float32 `[num_views * batch, 24, 24, 3]`: first the
    first view of every image, which is the result of `center`; then the second
    view of every image; and so on.

  Raises:
    ValueError: If `num_views` is not one of `config.VIEWS`.
  """
  if num_views not in config.VIEWS:
    raise ValueError(
      f"`num_views` must be one of {config.VIEWS}. Received: {num_views}."
    )
  sizes = [size]
  if num_views == 6:
    sizes += [size - _VIEW_STEP, min(size + _VIEW_STEP, config.RECORD_SIZE)]
  crops = [center(images, each) for each in sizes]
  if num_views > 1:
    crops += [tf.reverse(crop, axis=[2]) for crop in crops]
  return tf.concat(crops, axis=0)


def _cut(images, top, left, flip) -> tf.Tensor:
  """Cuts out a 24x24 crop of each image, and mirrors some of the crops.

  Args:
    images: Images, uint8 `[batch, 32, 32, 3]`.
    top: Row of each crop's upper left corner.
    left: Column of each crop's upper left corner.
    flip: Whether each crop is mirrored.
  """
  offsets = tf.range(config.IMAGE_SIZE)
  rows = top[:, tf.newaxis] + offsets
  columns = left[:, tf.newaxis] + tf.where(
    flip[:, tf.newaxis], tf.reverse(offsets, [0]), offsets
  )
  crops = tf.gather(images, rows, axis=1, batch_dims=1)
  crops = tf.gather(crops, columns, axis=2, batch_dims=1)
  return tf.cast(crops, tf.float32)


def _cut_and_resize(images, size, top, left, flip) -> tf.Tensor:
  """Cuts out a crop of each image, mirrors some, and resizes all to 24x24.

  The interpolation is bilinear. The corner pixels of a result are those of the
  crop.

  Args:
    images: Images, uint8 `[batch, 32, 32, 3]`.
    size: Height and width of each crop.
    top: Row of each crop's upper left corner.
    left: Column of each crop's upper left corner.
    flip: Whether each crop is mirrored.
  """
  right = left + size - 1
  left, right = tf.where(flip, right, left), tf.where(flip, left, right)
  boxes = tf.stack([top, left, top + size - 1, right], axis=1)
  boxes /= config.RECORD_SIZE - 1
  return tf.image.crop_and_resize(
    images,
    # A row that rounding puts outside the image would be black.
    tf.clip_by_value(boxes, _EDGE, 1 - _EDGE),
    tf.range(tf.shape(images)[0]),
    [config.IMAGE_SIZE] * 2,
  )


def _per_image(values: tf.Tensor) -> tf.Tensor:
  return values[:, tf.newaxis, tf.newaxis, tf.newaxis]
