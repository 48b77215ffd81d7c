"""Builds the CIFAR-10 tutorial's network, and computes its loss.

The loss is a function of the values of the parameters, plain tensors.
"""

from collections.abc import Mapping

import keras
import numpy as np
import tensorflow as tf

from cifar10 import config
from cifar10 import lrn
from tf_replicas.programs import compute_dtypes

WEIGHT_DECAY = config.Config.weight_decay
DECAYED = ("local3/kernel", "local4/kernel")


def build(*, seed: int = 0, compute_dtype: str = "float32") -> keras.Model:
  """Builds the network of the TF1 tutorial (`cifar10.py: inference`).

  The network has two convolutions, two fully connected layers (called "local"
  in the tutorial) and a linear layer: 1,068,298 parameters. After the first
  convolution, it pools and then normalizes; after the second, it normalizes and
  then pools.

  Args:
    seed: The seed of the initial weights; equal seeds give equal weights.
    compute_dtype: `float32`, `bfloat16` or `float16`: the dtype to which the
      layers cast their inputs and parameters. The variables are float32.

  Returns:
    A model from `[batch, 24, 24, 3]` images to `[batch, 10]` logits, which are
    of `compute_dtype`.
  """
  size = config.IMAGE_SIZE
  dtype = compute_dtypes.policy(compute_dtype)
  seeds = iter(np.random.SeedSequence(seed).generate_state(5))

  def initial(stddev, bias):
    seed = int(next(seeds) >> 1)
    return {
      "kernel_initializer": keras.initializers.TruncatedNormal(
        stddev=stddev, seed=seed
      ),
      "bias_initializer": keras.initializers.Constant(bias),
      "dtype": dtype,
    }

  def conv(name, bias):
    return keras.layers.Conv2D(
      64,
      5,
      padding="same",
      activation="relu",
      name=name,
      **initial(0.05, bias),
    )

  def norm(name):
    return lrn.LocalResponseNormalization(
      depth_radius=4,
      bias=1.0,
      alpha=0.001 / 9.0,
      beta=0.75,
      name=name,
      dtype=dtype,
    )

  def pool(name):
    return keras.layers.MaxPooling2D(
      3, 2, padding="same", name=name, dtype=dtype
    )

  def local(name, units):
    return keras.layers.Dense(
      units, activation="relu", name=name, **initial(0.04, 0.1)
    )

  images = keras.Input([size, size, 3], name="images")
  x = conv("conv1", bias=0.0)(images)
  x = norm("norm1")(pool("pool1")(x))
  x = conv("conv2", bias=0.1)(x)
  x = pool("pool2")(norm("norm2")(x))
  x = keras.layers.Flatten(name="flatten", dtype=dtype)(x)
  x = local("local3", 384)(x)
  x = local("local4", 192)(x)
  logits = keras.layers.Dense(
    config.NUM_CLASSES, name="softmax_linear", **initial(1 / 192.0, 0.0)
  )(x)
  return keras.Model(images, logits, name="cifar10")


def probabilities(
  network: keras.Model, views: tf.Tensor, num_views: int = 1
) -> tf.Tensor:
  """Computes the probability of each class for images.

  A view is a crop of an image, possibly mirrored. The probabilities are
  averaged over all views of an image.

  Args:
    network: A network made by `build`.
    views: The views, `[num_views * batch, 24, 24, 3]`: the first view of every
      image, then the next view of every image, as `distortions.views` returns
      them.
    num_views: Number of views of each image.

  Returns:
    Probabilities, float32 `[batch, 10]`.
  """
  each = tf.nn.softmax(tf.cast(network(views, training=False), tf.float32))
  each = tf.reshape(each, [num_views, -1, config.NUM_CLASSES])
  return tf.reduce_mean(each, axis=0)


def loss(
  logits: tf.Tensor, labels: tf.Tensor, *, label_smoothing: float = 0.0
) -> tf.Tensor:
  """Computes the mean cross-entropy of a batch, in float32.

  Args:
    logits: The network's outputs, `[batch, 10]`, of any floating point type.
    labels: The true classes, `[batch]` integers in [0, 9].
    label_smoothing: Share of the target probability that is spread over all
      classes.
  """
  if label_smoothing:
    targets = tf.one_hot(labels, config.NUM_CLASSES)
    targets *= 1.0 - label_smoothing
    targets += label_smoothing / config.NUM_CLASSES
    return tf.reduce_mean(
      tf.nn.softmax_cross_entropy_with_logits(
        targets, tf.cast(logits, tf.float32)
      )
    )
  return tf.reduce_mean(
    tf.nn.sparse_softmax_cross_entropy_with_logits(
      labels, tf.cast(logits, tf.float32)
    )
  )


def weight_decay(
  parameters: Mapping[str, tf.Tensor], *, factor: float = WEIGHT_DECAY
) -> tf.Tensor:
  """Computes the weight decay: factor * 1/2 * sum of squared weights.

  Only the kernels of `local3` and `local4` decay, as in the tutorial's code
  (its text says that all variables do).

  Args:
    parameters: Values of variables by path. Only those of `DECAYED` are read.
    factor: The factor of the sum.
  """
  return factor * tf.add_n(
    [tf.nn.l2_loss(tf.cast(parameters[path], tf.float32)) for path in DECAYED]
  )


def total_loss(
  model: keras.Model,
  parameters: Mapping[str, tf.Tensor],
  images: tf.Tensor,
  labels: tf.Tensor,
  *,
  training: bool = True,
  decay_factor: float = WEIGHT_DECAY,
  label_smoothing: float = 0.0,
) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
  """Computes the loss of a batch, with weight decay, for given parameters.

  The network and the weight decay use the very same tensors, so parameters that
  live on another machine are fetched once.

  Args:
    model: A network made by `build`. Its own trainable weights are not read.
    parameters: The values of all trainable variables by `variable.path`; watch
      these to take gradients. Values of non-trainable variables may be
      included; otherwise the model's own values are used.
    images: Distorted images, `[batch, 24, 24, 3]`.
    labels: The true classes, `[batch]` integers in [0, 9].
    training: The argument `training` of the layers.
    decay_factor: Factor of the weight decay.
    label_smoothing: Share of the target probability that is spread over all
      classes.

  Returns:
    The scalar loss, and the new non-trainable values by path (none for this
    network).
  """
  trainable = [parameters[v.path] for v in model.trainable_variables]
  states = model.non_trainable_variables
  logits, updates = model.stateless_call(
    trainable,
    [parameters.get(v.path, v.value) for v in states],
    images,
    training=training,
  )
  total = loss(logits, labels, label_smoothing=label_smoothing)
  total += weight_decay(parameters, factor=decay_factor)
  return total, {v.path: u for v, u in zip(states, updates, strict=True)}
