"""The network and its loss, as functions of plain tensors."""

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
# By block: channels behind the pool of A, inner channels of B.
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

  With the defaults and 1,001 classes it is the network of the TF1 program
  (`inception_model.inception_v3`; Szegedy et al. 2015, arXiv:1512.00567).
  See `blocks.stem_of` for how the stem follows the image size; depth d
  makes d * 3, d * 4 and d * 2 blocks of the three kinds, rounded and at least
  one, namely the last ones of the original; what goes beyond repeats its
  last. Initial kernels are normal, cut at two standard deviations: 0.1, of
  the heads 0.01 and 0.001, as there.

  Args:
    num_classes: Number of logits.
    image_size: Height and width of the images, 32 to 299.
    width: Factor of all numbers of channels; these become multiples of 8.
    depth: Factor of the number of blocks.
    dropout: Share of features dropped before the logits; 0 leaves it out.
    batch_norm_decay: Of the moving statistics.
    is_synchronized: Whether moments are those of all replicas of a
      `tf.distribute` strategy, inside of one.
    has_auxiliary: Whether there is an auxiliary head.
    compute_dtype: `float32`, `bfloat16` or `float16`: what the layers cast
      their inputs and their parameters to. The variables are float32.
    seed: The same seed gives the same initial weights.

  Returns:
    A model from float32 images `[batch, size, size, 3]` in [-1, 1] to a
    dictionary: `logits`, and `auxiliary_logits` if there is that head, both
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
  """The number of logits that a run's settings ask for.

  Args:
    settings: Of the run; its `num_classes` wins.
    of_data: The number of the data set, if it has one.

  Raises:
    ValueError: If the number of classes is unknown, or the settings
      say fewer than the data set.
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
  """Builds the network that a run's settings ask for.

  Args:
    settings: Of the run.
    classes_of_data: As for `num_classes`.

  Raises:
    ValueError: As `num_classes`.
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
  """Whether a variable's path is that of a moving mean or variance."""
  return path.rpartition("/")[2] in _STATISTICS


def is_head(path: str) -> bool:
  """Whether a variable is of what another task makes anew.

  That is the logits, and the auxiliary head: the kernels of that depend on the
  size of the images too. TF-Slim's recipes for fine-tuning leave out the same.
  """
  layer = path.partition("/")[0]
  return layer == LOGITS or layer.startswith(_AUXILIARY)


def loss(
  logits: tf.Tensor,
  labels: tf.Tensor,
  *,
  label_smoothing: float = _DEFAULTS.label_smoothing,
) -> tf.Tensor:
  """Returns the mean cross-entropy with smoothed labels, in float32.

  The target of the label is 1 - s + s / classes, of every other class
  s / classes (Szegedy et al. 2015, section 7).

  Args:
    logits: `[batch, classes]`, of any floating point type.
    labels: `[batch]` integers in [0, classes).
    label_smoothing: The s above.
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
  """Returns factor * 1/2 * sum of squares of all kernels.

  Args:
    parameters: Values by path; only paths that end in `/kernel` decay.
    factor: Of the whole sum.
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
  """Computes the loss from given parameter values.

  The network and the weight decay use the very same tensors, so parameters
  that live on another machine are fetched once.

  Args:
    model: What `build` returned; its own trainable weights are not read.
    parameters: Every trainable value by `variable.path`; watch these to
      take gradients. Non-trainable values may be among them, those that
      are not come from the model.
    images: `[batch, size, size, 3]`.
    labels: `[batch]` integers.
    training: Passed on to the layers.
    dropout_seed: `[2]` integers that decide what is dropped; None takes the
      model's own state, which stays the same unless somebody assigns to it
      the value returned.
    label_smoothing: See `loss`.
    auxiliary_weight: Factor of the auxiliary head's loss, if it is there.
    decay_factor: See `weight_decay`.

  Returns:
    The scalar loss, and the new non-trainable values by path: the moving
    statistics (see `is_statistic`) and the state of the dropout.
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
  """An endless supply of different seeds."""
  generator = np.random.default_rng(seed)
  while True:
    yield int(generator.integers(2**31))


def _last(originals: tuple, depth: float) -> tuple:
  """Settings of the blocks of one kind, for a depth."""
  number = max(1, int(len(originals) * depth + 0.5))
  return (
    originals[-number:]
    if number <= len(originals)
    else originals + originals[-1:] * (number - len(originals))
  )
