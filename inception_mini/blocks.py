"""Makes the parts of Inception v3: stem, blocks, grid reductions, heads.

The parts follow Szegedy et al. 2015 (arXiv:1512.00567), section 6 and table 1,
with the numbers of channels of the TF1 program
(`inception_model.inception_v3`). All numbers of channels are multiplied by a
factor, the width. Each convolution is followed by batch normalization without
scale, and ReLU.
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
  """The form of the stem and the grid reductions for an image size.

  The stem is the first layers of the network; a grid reduction is a later layer
  that halves height and width of the features.

  Attributes:
    padding: The padding in the stem and both grid reductions: `valid` or
      `same`.
    conv_halves: Whether the first convolution halves the grid, the height and
      width of the features.
    pool1_halves: Whether a pool after the third convolution halves the grid.
    pool2_halves: Whether a pool after the fifth convolution halves the grid.
  """

  padding: str
  conv_halves: bool
  pool1_halves: bool
  pool2_halves: bool


def stem_of(image_size: int) -> Stem:
  """Chooses the form of the first layers, the stem, for an image size.

  The stem leaves small images a grid (height and width of the features) of
  16x16 or more.

  From 171 pixels on, the stem is the original's, which halves the grid three
  times without padding: 299 pixels give grids of 35, 17 and 8, and 171 give 19,
  9 and 4. Below 171, everything is padded. The stem then halves the grid as
  long as 16x16 or more remain, at most three times: once from 32 pixels on
  (grids of 16, 8 and 4), twice from 64, three times from 128. If the stem
  halves fewer than three times, its first convolution does not halve; if it
  halves once, its second pool is left out.
  """
  if image_size >= MIN_VALID_SIZE:
    return Stem("valid", True, True, True)
  halvings = max(n for n in range(4) if image_size // 2**n >= MIN_GRID)
  return Stem("same", halvings >= 3, halvings >= 1, halvings >= 2)


class Parts:
  """Makes the parts of one Inception network, such as stem and blocks.

  Names of layers begin with the name of their part, so two calls must not use
  the same name.

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
      seeds: Seeds for the initial values; one is taken for each kernel.
      width: Factor of all numbers of channels.
      padding: The padding in stem and grid reductions: `valid` or `same`.
      batch_norm_decay: Decay of the moving means and variances.
      is_synchronized: Whether a batch is normalized by the mean and variance
        over all replicas of a `tf.distribute` strategy.
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
    """Applies convolution, batch normalization and ReLU.

    Args:
      x: Features `[batch, height, width, channels]`.
      channels: The number of output channels, which is multiplied by the width
        of the network.
      size: Height and width of the kernel.
      name: The name with which the names of the layers begin.
      strides: The stride of the convolution.
      padding: `valid` or `same`.
      stddev: The standard deviation of the initial kernel.
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
    """Returns an initializer with a truncated normal distribution.

    Each call uses the next seed of the network.
    """
    return keras.initializers.TruncatedNormal(
      stddev=stddev, seed=next(self._seeds)
    )

  def stem(self, x, plan: Stem):
    """Applies the first layers: five convolutions and up to two pools.

    Args:
      x: Images `[batch, height, width, 3]`.
      plan: Which of the layers exist and halve the height and width.
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
    """Applies a block of the first kind, for the grid of 35x35.

    A grid is height and width of the features in the original network. Four
    branches are joined: a 1x1 convolution, a 5x5 convolution, two 3x3
    convolutions, and a pool.

    Args:
      x: Features `[batch, height, width, channels]`.
      name: The name with which the names of the layers begin.
      pool_channels: The number of channels of the branch with the pool.
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
    """Reduces height and width of the features from 35x35 to 17x17.

    These are the sizes in the original network.
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
    """Applies a block of the second kind, for the grid of 17x17.

    A grid is height and width of the features in the original network. A 7x7
    convolution is replaced by a 1x7 and a 7x1 convolution.

    Args:
      x: Features `[batch, height, width, channels]`.
      name: The name with which the names of the layers begin.
      inner: The number of channels between these convolutions.
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
    """Reduces height and width of the features from 17x17 to 8x8.

    These are the sizes in the original network.
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
    """Applies a block of the third kind, for the grid of 8x8.

    A grid is height and width of the features in the original network. A 3x3
    convolution is replaced by a 1x3 beside a 3x1 convolution.
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
    """Computes the features of the auxiliary head, the second classifier.

    `x` is the features of the blocks in the middle of the network, of height
    and width 17x17 in the original. They are pooled. The last kernel is as
    large as the pooled features, 5x5 in the original. The result is `[batch,
    channels]`.
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
