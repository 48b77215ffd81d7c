"""A small data set that is made on the spot and can be learned.

Ten classes: one of five textures, in red or in cyan. They survive what
training does to images (small crops, mirroring, other proportions, hue moved
by a fifth of the circle), and noise and random brightness keep single pixels
from giving the class away. No background class: labels start at 0.
"""

import math

import tensorflow as tf

NUM_CLASSES = 10
IMAGE_SIZE = 40
# By subset, examples of each shard.
SHARDS = {"train": (625,) * 8, "validation": (500,) * 2}

_SEEDS = {"train": (2017, 1), "validation": (2017, 2)}
_NUM_TEXTURES = 5
_RED = (36.0, -18.0, -18.0)


def read(subset: str, shard: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """Makes one shard; the same one every time.

  All are drawn from one distribution with different seeds and hold the
  classes equally often, give or take one.

  Args:
    subset: `train` or `validation`.
    shard: Which one; int64 scalar.

  Returns:
    uint8 images `[N, 40, 40, 3]` and int64 labels `[N]`.
  """
  size = SHARDS[subset][0]
  labels = (tf.range(size, dtype=tf.int64) + shard) % NUM_CLASSES
  seed = tf.random.fold_in(tf.constant(_SEEDS[subset]), shard)
  seeds = tf.unstack(tf.random.split(seed, 4), num=4)
  sign = tf.where(labels < _NUM_TEXTURES, 1.0, -1.0)
  colour = sign[:, tf.newaxis] * tf.constant(_RED)
  light = tf.random.stateless_uniform([size, 1, 1, 1], seeds[0], 96.0, 160.0)
  clean = light + colour[:, tf.newaxis, tf.newaxis]
  clean += 50.0 * _texture(labels % _NUM_TEXTURES, seeds[1])[..., tf.newaxis]
  noise = tf.random.stateless_uniform(tf.shape(clean), seeds[2], -30.0, 30.0)
  return tf.cast(tf.clip_by_value(clean + noise, 0.0, 255.0), tf.uint8), labels


def _texture(kind: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
  """`[N, 40, 40]` in [-1, 1]: stripes lying, standing or slanting, or checks.

  The fifth kind is none at all. Periods are 4 to 8 pixels.
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
