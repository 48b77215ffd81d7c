"""Computes local response normalization as a product with a banded matrix.

On a CPU, `tf.nn.local_response_normalization` takes a fifth to a third of the
time of a step of the tutorial's network. The sums over neighboring channels
equal a product with a banded matrix of ones. If there are few channels, the
product takes more arithmetic than TensorFlow's op, but far less time.
"""

import keras
import tensorflow as tf

# From here on `tf.nn`'s sliding sum is as fast as the dense product. With
# as many values as [128, 12, 12, 64] has, on 2 CPU cores, forward and
# backward took, banded against tf.nn: 5 and 20 ms for 64 channels, 15 and
# 22 for 512, 27 and 36 for 1024, 50 and 47 for 2048. Powers other than
# 0.5, 0.75 and 1 are slower and break even at 512.
MAX_BANDED_CHANNELS = 512


def local_response_normalization(
  inputs: tf.Tensor,
  *,
  depth_radius: int = 5,
  bias: float = 1.0,
  alpha: float = 1.0,
  beta: float = 0.5,
) -> tf.Tensor:
  """Divides each value by a norm of its neighbors across channels.

      s = bias + alpha * sum of inputs^2 over channels c - r ... c + r
      output = inputs / s^beta

  Values and gradients are those of `tf.nn.local_response_normalization`
  (Krizhevsky et al. 2012, section 3.3), whose default arguments this function
  shares.

  Args:
    inputs: A floating-point tensor `[..., channels]` with a static number of
      channels. Inputs in float16 or bfloat16 are computed in float32.
    depth_radius: Number r of channels on either side that are summed.
    bias: The offset that keeps `s` away from zero.
    alpha: Factor of the sum of squares.
    beta: The exponent of `s`.

  Returns:
    A tensor of the shape and dtype of `inputs`.

  Raises:
    ValueError: If `depth_radius` is negative or the number of channels is not
      known.
  """
  if depth_radius < 0:
    raise ValueError(
      f"`depth_radius` must be at least 0. Received: {depth_radius}."
    )
  inputs = tf.convert_to_tensor(inputs)
  channels = inputs.shape[-1] if inputs.shape.rank else None
  if channels is None:
    raise ValueError(
      "`inputs` must have a static last dimension. Received shape: "
      f"{inputs.shape}."
    )
  dtype = inputs.dtype
  if dtype in (tf.float16, tf.bfloat16):
    inputs = tf.cast(inputs, tf.float32)
  # tf.nn's kernel knows no float64.
  if channels <= MAX_BANDED_CHANNELS or dtype == tf.float64:
    outputs = _banded(inputs, depth_radius, bias, alpha, beta)
  else:
    outputs = tf.reshape(
      tf.nn.local_response_normalization(
        tf.reshape(inputs, [-1, 1, 1, channels]),
        depth_radius,
        bias,
        alpha,
        beta,
      ),
      tf.shape(inputs),
    )
    outputs.set_shape(inputs.shape)
  return tf.cast(outputs, dtype)


@keras.saving.register_keras_serializable(package="cifar10")
class LocalResponseNormalization(keras.layers.Layer):
  """A Keras layer that normalizes each value by its neighboring channels.

  It calls `local_response_normalization`.

  Attributes:
    options: The keyword arguments for this function.
  """

  def __init__(
    self,
    *,
    depth_radius: int = 5,
    bias: float = 1.0,
    alpha: float = 1.0,
    beta: float = 0.5,
    **kwargs,
  ):
    super().__init__(**kwargs)
    self.options = dict(
      depth_radius=depth_radius, bias=bias, alpha=alpha, beta=beta
    )

  def call(self, inputs):
    return local_response_normalization(inputs, **self.options)

  def compute_output_shape(self, input_shape):
    return input_shape

  def get_config(self):
    return {**super().get_config(), **self.options}


def _banded(
  inputs: tf.Tensor,
  depth_radius: int,
  bias: float,
  alpha: float,
  beta: float,
) -> tf.Tensor:
  """Computes the local response normalization by a banded matrix.

  `inputs` is float32 or float64 `[..., channels]`.
  `local_response_normalization` documents the other arguments. With S the
  symmetric band matrix, b = beta, s = bias + alpha S x^2 and y = x s^-b, the
  gradient of sum(g y) with respect to x is

      g s^-b - 2 alpha b x S (g y / s)
  """
  channels = inputs.shape[-1]
  radius = min(depth_radius, channels - 1)
  band = alpha * tf.linalg.band_part(
    tf.ones([channels, channels], inputs.dtype), radius, radius
  )

  def sum_neighbors(x):
    # One matrix product and not one per leading index.
    flat = tf.matmul(tf.reshape(x, [-1, channels]), band)
    return tf.reshape(flat, tf.shape(x))

  @tf.custom_gradient
  def normalize(x):
    s = bias + sum_neighbors(tf.square(x))
    scale = _inverse_power(s, beta)
    y = x * scale

    def gradient(upstream):
      through_s = sum_neighbors(upstream * y / s)
      return upstream * scale - (2.0 * beta) * x * through_s

    return y, gradient

  outputs = normalize(inputs)
  outputs.set_shape(inputs.shape)
  return outputs


def _inverse_power(x: tf.Tensor, exponent: float) -> tf.Tensor:
  """Computes x^-exponent, by roots where possible, which are much faster."""
  if exponent == 0.5:
    return tf.math.rsqrt(x)
  if exponent == 0.75:
    root = tf.math.rsqrt(x)
    return root * tf.sqrt(root)
  if exponent == 1.0:
    return tf.math.reciprocal(x)
  return tf.pow(x, -exponent)
