"""Generates a small synthetic data set that a network can learn.

There are ten classes: each of five textures in red and in cyan. The distortions
of training do not change the class: crops, mirroring, other proportions, and
hue shifts by up to a fifth of the color circle. Noise and random brightness
prevent a network from recognizing the class by a single pixel. There is no
background class: labels start at 0.
"""

import math

import tensorflow as tf

NUM_CLASSES = 10
IMAGE_SIZE = 40
# Maps each subset to the number of examples in each of its shards.
SHARDS = {"train": (625,) * 8, "validation": (500,) * 2}

_SEEDS = {"train": (2017, 1), "validation": (2017, 2)}
_NUM_TEXTURES = 5
_RED = (36.0, -18.0, -18.0)


def read(subset: str, shard: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """Generates the images and labels of one shard, a part of the data set.

  Each call with the same arguments gives the same images. All shards are drawn
  from one distribution with different seeds. In each shard, the numbers of
  examples of two classes differ by at most 1.

  Args:
    subset: `train` or `validation`.
    shard: Index of the shard, an int64 scalar.

  Returns:
    Images, uint8 `[N, 40, 40, 3]`, and labels, int64 `[N]`.
  """
  size = SHARDS[subset][0]
  labels = (tf.range(size, dtype=tf.int64) + shard) % NUM_CLASSES
  seed = tf.random.fold_in(tf.constant(_SEEDS[subset]), shard)
  seeds = tf.unstack(tf.random.split(seed, 4), num=4)
  sign = tf.where(labels < _NUM_TEXTURES, 1.0, -1.0)
  color = sign[:, tf.newaxis] * tf.constant(_RED)
  light = tf.random.stateless_uniform([size, 1, 1, 1], seeds[0], 96.0, 160.0)
  clean = light + color[:, tf.newaxis, tf.newaxis]
  clean += 50.0 * _texture(labels % _NUM_TEXTURES, seeds[1])[..., tf.newaxis]
  noise = tf.random.stateless_uniform(tf.shape(clean), seeds[2], -30.0, 30.0)
  return tf.cast(tf.clip_by_value(clean + noise, 0.0, 255.0), tf.uint8), labels


def _texture(kind: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
  """Generates a random texture for each of N images.

  The five kinds are horizontal, vertical and diagonal stripes, checks, and no
  texture. Periods are 4 to 8 pixels.

  Args:
    kind: The kind of texture of each image, integers `[N]` in [0, 4].
    seed: `[2]` integers, the seed of phases and periods.

  Returns:
    The textures, `[N, 40, 40]` in [-1, 1].
  """
  size = tf.shape(kind)[0]
  draws = tf.random.stateless_uniform([4, size, 1, 1], seed)
  pixels = tf.range(IMAGE_SIZE, dtype=tf.float32)
  rows, columns = pixels[:, tf.newaxis], pixels[tf.newaxis]
  pace = 2.0 * math.pi * (0.125 + 0.125 * draws[0])
  phases = 2.0 * math.pi * draws[1:3]
  # Mirroring turns one diagonal into the other, so they are one class.
  slant = tf.where(draws[3] < 0.5, rows + columns, rows - columns)
  lying = tf.sin(pace * rows + phases[0]) + 0.0 * columns
  standing = tf.sin(pace * columns + phases[1]) + 0.0 * rows
  slanting = tf.sin(pace * slant * math.sqrt(0.5) + phases[0])
  textures = tf.stack(
    [lying, standing, slanting, lying * standing, 0.0 * lying], axis=1
  )
  return tf.gather(textures, kind, batch_dims=1)
