"""Generates a small synthetic data set that a network can learn.

The ten classes of images are stripes in one of five colors, vertical or
horizontal. Color and direction survive cropping, mirroring and changes of
brightness and contrast. Gray stripes in the other direction, a random tint and
noise keep single pixels and mean colors from revealing the class.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cifar10 import config

if TYPE_CHECKING:
  import tensorflow as tf

NUM_TRAIN = 5_000
NUM_TEST = 1_000

_SIZES = {"train": NUM_TRAIN, "test": NUM_TEST}
_SEEDS = {"train": (2016, 1), "test": (2016, 2)}
# Five of the six diagonals of an icosahedron: lines in color space, each 63
# degrees from every other, as far apart as possible.
_COLORS = (
  (0.0, 0.53, 0.85),
  (0.0, 0.53, -0.85),
  (0.53, 0.85, 0.0),
  (0.53, -0.85, 0.0),
  (0.85, 0.0, 0.53),
)


def read(split: str) -> tuple[tf.Tensor, tf.Tensor]:
  """Generates the training or the test set, with the same images every time.

  Both sets are drawn from one distribution with different seeds. In each set,
  all classes are equally frequent. The sets share no image.

  Args:
    split: `train` or `test`.

  Returns:
    Images, uint8 `[N, 32, 32, 3]`, and labels, int64 `[N]`.
  """
  import tensorflow as tf

  size = _SIZES[split]
  labels = tf.range(size, dtype=tf.int64) % config.NUM_CLASSES
  seeds = tf.unstack(tf.random.split(tf.constant(_SEEDS[split]), 5))
  color = tf.gather(tf.constant(_COLORS), labels % len(_COLORS))
  colored = _wave(seeds[0], size)[:, :, tf.newaxis] * color[:, tf.newaxis]
  grey = tf.tile(0.4 * _wave(seeds[1], size)[:, :, tf.newaxis], [1, 1, 3])
  lies = (labels >= len(_COLORS))[:, tf.newaxis, tf.newaxis]
  down = tf.where(lies, colored, grey)
  across = tf.where(lies, grey, colored)
  tint = tf.random.stateless_uniform([size, 1, 1, 3], seeds[2], 88.0, 168.0)
  clean = tint + 40.0 * (down[:, :, tf.newaxis] + across[:, tf.newaxis])
  noisy = clean + _noise(seeds[3], tf.shape(clean))
  return tf.cast(tf.clip_by_value(noisy, 0.0, 255.0), tf.uint8), labels


def _wave(seed: tf.Tensor, size: int) -> tf.Tensor:
  """Returns random sine waves of 32 pixels, `[size, 32]`: one per image.

  Each wave has a random phase and height, and a period of 4 to 8 pixels.
  """
  import tensorflow as tf

  draws = tf.random.stateless_uniform([3, size, 1], seed)
  frequency = 2.0 * math.pi * (0.125 + 0.125 * draws[0])
  phase = 2.0 * math.pi * draws[1]
  height = 0.5 + draws[2]
  pixels = tf.range(config.RECORD_SIZE, dtype=tf.float32)
  return height * tf.sin(frequency * pixels + phase)


def _noise(seed: tf.Tensor, shape: tf.Tensor) -> tf.Tensor:
  import tensorflow as tf

  return tf.random.stateless_uniform(shape, seed, -30.0, 30.0)
