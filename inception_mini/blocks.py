"""Makes the parts of Inception v3: stem, blocks, grid reductions, heads.

The parts follow Szegedy et al. 2015 (arXiv:1512.00567), section 6 and table 1.
The numbers of channels are those of the TF1 program
(`inception_model.inception_v3`) times a factor, the width. Each convolution is
followed by batch normalization without scale, and by ReLU. A grid is the height
and width of the features.
"""

from collections.abc import Iterator
from typing import NamedTuple

import keras

BATCH_NORM_EPSILON = 1e-3

# The smallest height and width that the stem leaves of the grid, and the
# smallest image size from which on the stem is the original's.
MIN_GRID = 16
MIN_VALID_SIZE = 171

_CHANNELS_STEP = 8


class Stem(NamedTuple):
  """The settings by which the network depends on the size of the images.

  The stem is the first layers of the network: five convolutions and up to two
  pools. A grid reduction is a later group of layers that halves the height and
  width of the features. Strides and pools that are named here halve them too.

  Attributes:
    padding: The padding in the stem and in both grid reductions: `valid` or
      `same`.
    conv_halves: Whether the first convolution has stride 2 instead of 1.
    pool1_halves: Whether there is a pool of stride 2 after the third
      convolution.
    pool2_halves: Whether there is a pool of stride 2 after the fifth
      convolution.
  """

  padding: str
  conv_halves: bool
  pool1_halves: bool
  pool2_halves: bool


def stem_of(image_size: int) -> Stem:
  """Chooses the settings of the stem (the first layers) for an image size.

  From 171 pixels on, the stem is that of the original Inception v3. It halves
  the height and width of the features three times, without padding. After the
  stem and after each of the two grid reductions, the features measure 35x35,
  17x17 and 8x8 for images of 299 pixels, and 19x19, 9x9 and 4x4 for 171 pixels.

  Below 171 pixels, all layers have padding `same`. The stem then halves three
  times from 128 pixels on, twice from 64 and once from 32, so that 16x16 or
  more remain. An image of 32 pixels has features of 16x16, 8x8 and 4x4.

  Args:
    image_size: Height and width of the images in pixels, at least 32.

  Returns:
    The settings of the stem and of the padding.
  """
  if image_size >= MIN_VALID_SIZE:
    return Stem("valid", True, True, True)
  halvings = max(n for n in range(4) if image_size // 2**n >= MIN_GRID)
  return Stem("same", halvings >= 3, halvings >= 1, halvings >= 2)


class Parts:
  """Adds parts, such as the stem and the blocks, to one Inception network.

  Most methods apply new Keras layers to features `[batch, height, width,
  channels]` and return the new features. Their argument `name` is a prefix of
  the names of these layers, so each call in a network needs another `name`.

  Attributes:
    dtype: The Keras dtype policy of all layers.
  """

  def __init__(
    self,
    *,
    seeds: Iterator[int],
    width: float,
    padding: str,
    batch_norm_decay: float,
    is_synchronized: bool = False,
    dtype: str = "float32",
  ):
    """Stores the settings that all parts of the network share.

    Args:
      seeds: Seeds of the initial values. Each kernel takes the next one.
      width: The factor by which all numbers of channels are multiplied.
      padding: The padding in the stem and in the grid reductions: `valid` or
        `same`.
      batch_norm_decay: Decay of the moving means and variances.
      is_synchronized: Whether batch normalization uses the mean and variance of
        the batches of all replicas of the `tf.distribute` strategy, instead of
        those of each replica's own batch.
      dtype: The Keras dtype policy of all layers, such as `mixed_bfloat16`.
    """
    self.dtype = dtype
    self._seeds = seeds
    self._width = width
    self._padding = padding
    self._batch_norm_decay = batch_norm_decay
    self._is_synchronized = is_synchronized

  def channels(self, number: int) -> int:
    """Multiplies a number of channels by the width of the network.

    The result is rounded to a multiple of 8, and is at least 8.
    """
    steps = int(number * self._width / _CHANNELS_STEP + 0.5)
    return max(1, steps) * _CHANNELS_STEP

  def conv(
    self,
    x,
    channels: int,
    size: int | tuple[int, int],
    name: str,
    *,
    strides: int = 1,
    padding: str = "same",
    stddev: float = 0.1,
  ):
    """Applies a convolution, batch normalization and ReLU.

    Args:
      x: Features `[batch, height, width, channels]`.
      channels: The number of output channels in the original network. It is
        multiplied by the width factor of this network.
      size: Height and width of the kernel.
      name: Prefix of the names of the new layers.
      strides: The stride of the convolution.
      padding: `valid` or `same`.
      stddev: The standard deviation of the initial kernel.

    Returns:
      The new features.
    """
    x = keras.layers.Conv2D(
      self.channels(channels),
      size,
      strides,
      padding,
      use_bias=False,
      kernel_initializer=self.normal(stddev),
      dtype=self.dtype,
      name=f"{name}_conv",
    )(x)
    x = keras.layers.BatchNormalization(
      momentum=self._batch_norm_decay,
      epsilon=BATCH_NORM_EPSILON,
      scale=False,
      synchronized=self._is_synchronized,
      dtype=self.dtype,
      name=f"{name}_norm",
    )(x)
    return keras.layers.ReLU(dtype=self.dtype, name=f"{name}_relu")(x)

  def normal(self, stddev: float) -> keras.initializers.Initializer:
    """Returns a truncated normal initializer with the network's next seed."""
    return keras.initializers.TruncatedNormal(
      stddev=stddev, seed=next(self._seeds)
    )

  def stem(self, x, plan: Stem):
    """Applies the first layers: five convolutions and up to two pools.

    Args:
      x: Images `[batch, height, width, 3]`.
      plan: Which pools exist, and whether the first convolution has stride 2.
        Its `padding` is not used: `Parts` has been given the padding.

    Returns:
      Features `[batch, height, width, channels]`.
    """
    padding = self._padding
    strides = 2 if plan.conv_halves else 1
    x = self.conv(x, 32, 3, "conv0", strides=strides, padding=padding)
    x = self.conv(x, 32, 3, "conv1", padding=padding)
    x = self.conv(x, 64, 3, "conv2")
    if plan.pool1_halves:
      x = self._max_pool(x, "pool1")
    x = self.conv(x, 80, 1, "conv3")
    x = self.conv(x, 192, 3, "conv4", padding=padding)
    if plan.pool2_halves:
      x = self._max_pool(x, "pool2")
    return x

  def block_a(self, x, name: str, pool_channels: int):
    """Applies a block of the first kind, used before the first grid reduction.

    The original network has 35x35 features here. The outputs of four branches
    are concatenated: a 1x1 convolution, a 5x5 convolution, two 3x3
    convolutions, and a pool.

    Args:
      x: Features `[batch, height, width, channels]`.
      name: Prefix of the names of the new layers.
      pool_channels: The number of channels of the branch with the pool, before
        it is multiplied by the width factor.

    Returns:
      Features of the same height and width.
    """
    one = self.conv(x, 64, 1, f"{name}_1x1")
    five = self.conv(x, 48, 1, f"{name}_5x5_0")
    five = self.conv(five, 64, 5, f"{name}_5x5_1")
    three = self.conv(x, 64, 1, f"{name}_3x3_0")
    three = self.conv(three, 96, 3, f"{name}_3x3_1")
    three = self.conv(three, 96, 3, f"{name}_3x3_2")
    pool = self._average_pool(x, name)
    pool = self.conv(pool, pool_channels, 1, f"{name}_pool_1x1")
    return self._join([one, five, three, pool], name)

  def reduction_a(self, x, name: str):
    """Halves the height and width of the features for the first time.

    In the original network, the height and width go from 35 to 17.

    Args:
      x: Features `[batch, height, width, channels]`.
      name: Prefix of the names of the new layers.

    Returns:
      The smaller features.
    """
    three = self.conv(
      x, 384, 3, f"{name}_3x3", strides=2, padding=self._padding
    )
    double = self.conv(x, 64, 1, f"{name}_double_0")
    double = self.conv(double, 96, 3, f"{name}_double_1")
    double = self.conv(
      double, 96, 3, f"{name}_double_2", strides=2, padding=self._padding
    )
    return self._join([three, double, self._max_pool(x, f"{name}_pool")], name)

  def block_b(self, x, name: str, inner: int):
    """Applies a block of the second kind, used between the grid reductions.

    The original network has 17x17 features here. In the place of 7x7
    convolutions, the block has pairs of a 1x7 and a 7x1 convolution.

    Args:
      x: Features `[batch, height, width, channels]`.
      name: Prefix of the names of the new layers.
      inner: The number of channels between the convolutions of a branch, before
        it is multiplied by the width factor.

    Returns:
      Features of the same height and width.
    """
    one = self.conv(x, 192, 1, f"{name}_1x1")
    seven = self.conv(x, inner, 1, f"{name}_7x7_0")
    seven = self.conv(seven, inner, (1, 7), f"{name}_7x7_1")
    seven = self.conv(seven, 192, (7, 1), f"{name}_7x7_2")
    double = self.conv(x, inner, 1, f"{name}_double_0")
    double = self.conv(double, inner, (7, 1), f"{name}_double_1")
    double = self.conv(double, inner, (1, 7), f"{name}_double_2")
    double = self.conv(double, inner, (7, 1), f"{name}_double_3")
    double = self.conv(double, 192, (1, 7), f"{name}_double_4")
    pool = self._average_pool(x, name)
    pool = self.conv(pool, 192, 1, f"{name}_pool_1x1")
    return self._join([one, seven, double, pool], name)

  def reduction_b(self, x, name: str):
    """Halves the height and width of the features for the second time.

    In the original network, the height and width go from 17 to 8.

    Args:
      x: Features `[batch, height, width, channels]`.
      name: Prefix of the names of the new layers.

    Returns:
      The smaller features.
    """
    halve = dict(strides=2, padding=self._padding)
    three = self.conv(x, 192, 1, f"{name}_3x3_0")
    three = self.conv(three, 320, 3, f"{name}_3x3_1", **halve)
    seven = self.conv(x, 192, 1, f"{name}_7x7_0")
    seven = self.conv(seven, 192, (1, 7), f"{name}_7x7_1")
    seven = self.conv(seven, 192, (7, 1), f"{name}_7x7_2")
    seven = self.conv(seven, 192, 3, f"{name}_7x7_3", **halve)
    return self._join([three, seven, self._max_pool(x, f"{name}_pool")], name)

  def block_c(self, x, name: str):
    """Applies a block of the third kind, used after the second grid reduction.

    The original network has 8x8 features here. In the place of some 3x3
    convolutions, the block has a 1x3 and a 3x1 convolution side by side, whose
    outputs are concatenated.

    Args:
      x: Features `[batch, height, width, channels]`.
      name: Prefix of the names of the new layers.

    Returns:
      Features of the same height and width.
    """
    one = self.conv(x, 320, 1, f"{name}_1x1")
    three = self.conv(x, 384, 1, f"{name}_3x3_0")
    three = self._split(three, f"{name}_3x3")
    double = self.conv(x, 448, 1, f"{name}_double_0")
    double = self.conv(double, 384, 3, f"{name}_double_1")
    double = self._split(double, f"{name}_double")
    pool = self._average_pool(x, name)
    pool = self.conv(pool, 192, 1, f"{name}_pool_1x1")
    return self._join([one, three, double, pool], name)

  def auxiliary_features(self, x, name: str):
    """Computes the features for the auxiliary head, a second classifier.

    The features are pooled, and then reduced to a height and width of 1 by a
    convolution whose kernel is as large as they are.

    Args:
      x: The features after the blocks of the second kind, `[batch, height,
        width, channels]`; 17x17 in the original network.
      name: Prefix of the names of the new layers.

    Returns:
      Features `[batch, channels]`.
    """
    x = keras.layers.AveragePooling2D(
      5, 3, "valid", dtype=self.dtype, name=f"{name}_pool"
    )(x)
    x = self.conv(x, 128, 1, f"{name}_0")
    grid = tuple(x.shape[1:3])
    x = self.conv(x, 768, grid, f"{name}_1", padding="valid", stddev=0.01)
    return keras.layers.Flatten(dtype=self.dtype, name=f"{name}_flatten")(x)

  def _split(self, x, name: str):
    wide = self.conv(x, 384, (1, 3), f"{name}_1x3")
    high = self.conv(x, 384, (3, 1), f"{name}_3x1")
    return self._join([wide, high], name)

  def _max_pool(self, x, name: str):
    return keras.layers.MaxPooling2D(
      3, 2, self._padding, dtype=self.dtype, name=name
    )(x)

  def _average_pool(self, x, name: str):
    return keras.layers.AveragePooling2D(
      3, 1, "same", dtype=self.dtype, name=f"{name}_pool"
    )(x)

  def _join(self, branches, name: str):
    return keras.layers.Concatenate(dtype=self.dtype, name=name)(branches)
