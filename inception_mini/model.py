"""Builds an Inception v3 of any size, and computes its loss.

The loss is a function of tensors with the values of the parameters, and does
not read the variables of the model.
"""

from collections.abc import Mapping

import keras
import numpy as np
import tensorflow as tf

from inception_mini import blocks
from inception_mini import config
from tf_replicas.programs import compute_dtypes

LOGITS = "logits"
AUXILIARY_LOGITS = "auxiliary_logits"
# The name of each layer of the auxiliary head begins like this.
_AUXILIARY = "auxiliary"

_DEFAULTS = config.Config
_STATISTICS = ("moving_mean", "moving_variance")
# For each block: the channels behind the pool of blocks A, and the inner
# channels of blocks B.
_A_BLOCKS = (32, 64, 64)
_B_BLOCKS = (128, 160, 160, 192)
_NUM_C_BLOCKS = 2


def build(
  num_classes: int,
  *,
  image_size: int = _DEFAULTS.image_size,
  width: float = _DEFAULTS.width,
  depth: float = _DEFAULTS.depth,
  dropout: float = _DEFAULTS.dropout,
  batch_norm_decay: float = _DEFAULTS.batch_norm_decay,
  is_synchronized: bool = False,
  has_auxiliary: bool = True,
  compute_dtype: str = _DEFAULTS.compute_dtype,
  seed: int = 0,
) -> keras.Model:
  """Builds an Inception v3 of any size.

  With the defaults and 1,001 classes, the network is that of the TF1 program
  (`inception_model.inception_v3`; Szegedy et al. 2015, arXiv:1512.00567).

  `blocks.stem_of` describes how the stem, the first layers, depends on the
  image size. With depth d, there are 3 d, 4 d and 2 d blocks of the three
  kinds, rounded, but at least one of each kind. If these are fewer than in the
  original, they are the last ones of each kind. If there are more, the last
  block is repeated.

  The initial kernels have a normal distribution, truncated at two standard
  deviations. As in the TF1 program, the standard deviation is 0.01 for the
  logits and for the last convolution of the auxiliary head, 0.001 for the
  logits of the auxiliary head, and 0.1 for all others.

  Args:
    num_classes: Number of logits.
    image_size: Height and width of the images, 32 to 299.
    width: The factor by which all numbers of channels are multiplied. They are
      rounded to multiples of 8.
    depth: The factor by which the numbers of blocks are multiplied.
    dropout: Fraction of the features that are dropped before the logits; 0 for
      no dropout.
    batch_norm_decay: Decay of the moving means and variances.
    is_synchronized: Whether batch normalization uses the mean and variance of
      the batches of all replicas of the `tf.distribute` strategy, instead of
      those of each replica's own batch.
    has_auxiliary: Whether there is an auxiliary head, a second classifier
      behind the middle blocks, which helps training.
    compute_dtype: `float32`, `bfloat16` or `float16`: the dtype to which the
      layers cast their inputs and parameters. The variables are float32.
    seed: The seed of the initial weights; equal seeds give equal weights.

  Returns:
    A model from float32 images `[batch, size, size, 3]` in [-1, 1] to a
    dictionary: `logits` and, with an auxiliary head, `auxiliary_logits`, both
    `[batch, num_classes]` and of `compute_dtype`.
  """
  dtype = compute_dtypes.policy(compute_dtype)
  seeds = _seeds(seed)
  plan = blocks.stem_of(image_size)
  parts = blocks.Parts(
    seeds=seeds,
    width=width,
    padding=plan.padding,
    batch_norm_decay=batch_norm_decay,
    is_synchronized=is_synchronized,
    dtype=dtype,
  )
  images = keras.Input([image_size, image_size, 3], name="images")
  x = parts.stem(images, plan)
  for i, pool_channels in enumerate(_last(_A_BLOCKS, depth)):
    x = parts.block_a(x, f"a{i}", pool_channels)
  x = parts.reduction_a(x, "reduction_a")
  for i, inner in enumerate(_last(_B_BLOCKS, depth)):
    x = parts.block_b(x, f"b{i}", inner)
  middle = x
  x = parts.reduction_b(x, "reduction_b")
  for i, _ in enumerate(_last((None,) * _NUM_C_BLOCKS, depth)):
    x = parts.block_c(x, f"c{i}")
  x = keras.layers.GlobalAveragePooling2D(dtype=dtype, name="pool")(x)
  if dropout:
    x = keras.layers.Dropout(
      dropout, seed=next(seeds), dtype=dtype, name="dropout"
    )(x)

  def dense(features, name, stddev):
    return keras.layers.Dense(
      num_classes,
      kernel_initializer=parts.normal(stddev),
      dtype=dtype,
      name=name,
    )(features)

  outputs = {LOGITS: dense(x, LOGITS, 0.01)}
  if has_auxiliary:
    features = parts.auxiliary_features(middle, _AUXILIARY)
    outputs[AUXILIARY_LOGITS] = dense(features, AUXILIARY_LOGITS, 0.001)
  return keras.Model(images, outputs, name="inception_mini")


def num_classes(settings: config.Config, of_data: int | None) -> int:
  """Returns the number of classes (logits) of the network to train.

  It is `settings.num_classes` or, if that is None, the number of classes of the
  data set.

  Args:
    settings: The settings of the training.
    of_data: Number of classes of the data set; None if unknown.

  Raises:
    ValueError: If both numbers are unknown, or the number in the settings is
      smaller than that of the data set.
  """
  chosen = settings.num_classes or of_data
  if chosen is None or chosen < (of_data or 0):
    rule = "given, as the data set does not say"
    if chosen is not None:
      rule = f"at least {of_data}, as the data set has so many"
    raise ValueError(f"`num_classes` must be {rule}. Received: {chosen}.")
  return chosen


def of_config(
  settings: config.Config, classes_of_data: int | None = None
) -> keras.Model:
  """Builds the network that the settings of a training describe.

  Args:
    settings: The settings of the training.
    classes_of_data: Number of classes of the data set; None if unknown.

  Raises:
    ValueError: If neither the settings nor the data set give a number of
      classes, or the number in the settings is smaller than that of the data
      set.
  """
  return build(
    num_classes(settings, classes_of_data),
    image_size=settings.image_size,
    width=settings.width,
    depth=settings.depth,
    dropout=settings.dropout,
    batch_norm_decay=settings.batch_norm_decay,
    is_synchronized=settings.batch_norm_statistics == config.SYNCHRONIZED,
    has_auxiliary=settings.auxiliary_weight > 0,
    compute_dtype=settings.compute_dtype,
    seed=settings.seed,
  )


def is_statistic(path: str) -> bool:
  """Returns whether a variable is a moving mean or variance.

  Args:
    path: The Keras path of the variable, `variable.path`.
  """
  return path.rpartition("/")[2] in _STATISTICS


def is_head(path: str) -> bool:
  """Returns whether fine-tuning initializes a variable anew.

  True for the variables of the logits and of the auxiliary head (the second
  classifier), as in TF-Slim's recipes for fine-tuning. The shape of the
  auxiliary head's kernels also depends on the size of the images.

  Args:
    path: The Keras path of the variable, `variable.path`.
  """
  layer = path.partition("/")[0]
  return layer == LOGITS or layer.startswith(_AUXILIARY)


def loss(
  logits: tf.Tensor,
  labels: tf.Tensor,
  *,
  label_smoothing: float = _DEFAULTS.label_smoothing,
) -> tf.Tensor:
  """Computes the mean cross-entropy with smoothed labels.

  The target for the class of the label is 1 - s + s / classes, and for every
  other class s / classes (Szegedy et al. 2015, section 7).

  Args:
    logits: The network's outputs, `[batch, classes]`, of any floating point
      type.
    labels: The true classes, `[batch]` integers in [0, classes).
    label_smoothing: The s above, in [0, 1).

  Returns:
    A float32 scalar, the mean over the batch.
  """
  logits = tf.cast(logits, tf.float32)
  targets = tf.one_hot(
    labels,
    logits.shape[-1],
    on_value=1.0 - label_smoothing + label_smoothing / logits.shape[-1],
    off_value=label_smoothing / logits.shape[-1],
  )
  return tf.reduce_mean(
    tf.nn.softmax_cross_entropy_with_logits(targets, logits)
  )


def weight_decay(
  parameters: Mapping[str, tf.Tensor],
  *,
  factor: float = _DEFAULTS.weight_decay,
) -> tf.Tensor:
  """Computes the weight decay: factor * 1/2 * sum of squares of all kernels.

  Args:
    parameters: Maps the paths of variables to their values. Only variables
      whose path ends in `/kernel` are used.
    factor: The factor of the sum.

  Returns:
    A scalar.
  """
  return factor * tf.add_n(
    [
      tf.nn.l2_loss(tf.cast(value, tf.float32))
      for path, value in parameters.items()
      if path.endswith("/kernel")
    ]
  )


def total_loss(
  model: keras.Model,
  parameters: Mapping[str, tf.Tensor],
  images: tf.Tensor,
  labels: tf.Tensor,
  *,
  training: bool = True,
  dropout_seed: tf.Tensor | None = None,
  label_smoothing: float = _DEFAULTS.label_smoothing,
  auxiliary_weight: float = _DEFAULTS.auxiliary_weight,
  decay_factor: float = _DEFAULTS.weight_decay,
) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
  """Computes the loss of a batch, with weight decay, for given parameters.

  The network and the weight decay use the same tensors. So parameters on
  another machine are fetched once.

  Args:
    model: A network made by `build`. Its own trainable weights are not read.
    parameters: Maps `variable.path` of all trainable variables to tensors with
      their values; watch these to take gradients. Values of non-trainable
      variables may be included; otherwise the model's own values are used.
    images: Images in [-1, 1], `[batch, size, size, 3]`.
    labels: The true classes, `[batch]` integers.
    training: The argument `training` of the layers.
    dropout_seed: `[2]` integers, the seed of dropout. None: the seed is the
      state of the model's dropout layer. This state changes only if the caller
      assigns the returned value to it.
    label_smoothing: The fraction of the target that all classes share equally.
    auxiliary_weight: Factor of the loss of the auxiliary head (the second
      classifier), if the network has one.
    decay_factor: Factor of the weight decay.

  Returns:
    The scalar loss; and a map from the paths of the non-trainable variables to
    their new values: the moving means and variances, and the state of dropout.
  """
  states = model.non_trainable_variables

  def state(variable):
    if variable.path in parameters:
      return parameters[variable.path]
    if dropout_seed is not None and not is_statistic(variable.path):
      return tf.cast(tf.reshape(dropout_seed, [2]), variable.dtype)
    return variable.value

  outputs, updates = model.stateless_call(
    [parameters[v.path] for v in model.trainable_variables],
    [state(v) for v in states],
    images,
    training=training,
  )
  total = loss(outputs[LOGITS], labels, label_smoothing=label_smoothing)
  if AUXILIARY_LOGITS in outputs:
    total += auxiliary_weight * loss(
      outputs[AUXILIARY_LOGITS], labels, label_smoothing=label_smoothing
    )
  total += weight_decay(parameters, factor=decay_factor)
  return total, {v.path: u for v, u in zip(states, updates, strict=True)}


def _seeds(seed: int):
  """Yields an endless sequence of random seeds.

  Args:
    seed: Determines the sequence.
  """
  generator = np.random.default_rng(seed)
  while True:
    yield int(generator.integers(2**31))


def _last(originals: tuple, depth: float) -> tuple:
  """Chooses the blocks of one kind for a network of a given depth.

  Args:
    originals: The settings of each block of this kind in the original network.
    depth: The factor by which the number of blocks is multiplied.

  Returns:
    The settings of each block of the new network, at least one: the last of
    `originals`, or all of them and then copies of the last one.
  """
  number = max(1, int(len(originals) * depth + 0.5))
  return (
    originals[-number:]
    if number <= len(originals)
    else originals + originals[-1:] * (number - len(originals))
  )
