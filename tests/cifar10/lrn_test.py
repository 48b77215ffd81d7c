"""Tests of `cifar10.lrn` against TensorFlow's own normalisation."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from cifar10 import lrn

TUTORIAL = dict(depth_radius=4, bias=1.0, alpha=0.001 / 9.0, beta=0.75)


def normal(shape, seed, dtype=tf.float32):
  return tf.random.stateless_normal(shape, [seed, 0], dtype=dtype)


def values_and_gradients(function, inputs):
  """Outputs, and the gradient of their product with fixed noise."""
  upstream = tf.cast(normal(inputs.shape, 99), inputs.dtype)
  with tf.GradientTape() as tape:
    tape.watch(inputs)
    outputs = function(inputs)
  return outputs, tape.gradient(outputs, inputs, upstream)


def assert_equals_tf(inputs, atol=1e-5, **options):
  actual = values_and_gradients(
    lambda x: lrn.local_response_normalization(x, **options), inputs
  )
  expected = values_and_gradients(
    lambda x: tf.nn.local_response_normalization(x, **options), inputs
  )
  for ours, theirs in zip(actual, expected, strict=True):
    assert ours.dtype == inputs.dtype
    np.testing.assert_allclose(ours, theirs, atol=atol)


@pytest.mark.parametrize(
  "shape", [[2, 3, 3, 64], [1, 1, 1, 1], [3, 5, 7, 13], [2, 1, 4, 3]]
)
@pytest.mark.parametrize("depth_radius", [0, 1, 4, 20])
def test_equals_tf_for_any_shape_and_radius(shape, depth_radius):
  options = TUTORIAL | dict(depth_radius=depth_radius)
  assert_equals_tf(normal(shape, 1), **options)
  # Large values make the sum outweigh the bias.
  assert_equals_tf(100 * normal(shape, 2), atol=1e-4, **options)


@pytest.mark.parametrize("beta", [0.25, 0.5, 0.75, 1.0, 1.3])
def test_equals_tf_for_any_power(beta):
  assert_equals_tf(normal([2, 4, 4, 16], 3), alpha=0.3, bias=2.0, beta=beta)


def test_has_the_defaults_of_tf():
  assert_equals_tf(normal([2, 4, 4, 16], 4))


@pytest.mark.parametrize("channels", [512, 513])
def test_equals_tf_on_both_sides_of_the_limit(channels):
  assert_equals_tf(normal([1, 2, 2, channels], 5), **TUTORIAL)


@pytest.mark.parametrize("channels", [16, 600])
def test_empty_batch(channels):
  outputs = lrn.local_response_normalization(tf.zeros([0, 2, 2, channels]))
  assert outputs.shape == [0, 2, 2, channels]


def test_gradient_is_the_slope():
  inputs = normal([2, 2, 6], 6, tf.float64)
  slopes, differences = tf.test.compute_gradient(
    lambda x: lrn.local_response_normalization(x, alpha=0.4, depth_radius=2),
    [inputs],
  )
  np.testing.assert_allclose(slopes[0], differences[0], atol=1e-6)


def test_second_derivative_is_the_slope_of_the_gradient():
  def gradient(x):
    with tf.GradientTape() as tape:
      tape.watch(x)
      y = lrn.local_response_normalization(x, alpha=0.4, depth_radius=1)
    return tape.gradient(y, x)

  slopes, differences = tf.test.compute_gradient(
    gradient, [normal([1, 5], 7, tf.float64)]
  )
  np.testing.assert_allclose(slopes[0], differences[0], atol=1e-6)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_half_precision_rounds_only_inputs_and_outputs(dtype):
  inputs = tf.cast(30 * normal([2, 3, 3, 64], 8), dtype)
  actual = lrn.local_response_normalization(inputs, **TUTORIAL)
  exact = lrn.local_response_normalization(
    tf.cast(inputs, tf.float32), **TUTORIAL
  )
  assert actual.dtype == dtype
  np.testing.assert_array_equal(
    tf.cast(actual, tf.float32), tf.cast(tf.cast(exact, dtype), tf.float32)
  )


@pytest.mark.parametrize(
  "channels, jit_compile", [(16, False), (16, True), (600, False)]
)
def test_in_a_function_with_an_unknown_batch_size(channels, jit_compile):
  @tf.function(
    input_signature=[tf.TensorSpec([None, 3, 3, channels])],
    jit_compile=jit_compile,
  )
  def normalize(x):
    outputs = lrn.local_response_normalization(x, **TUTORIAL)
    assert outputs.shape.as_list() == [None, 3, 3, channels]
    return outputs

  inputs = normal([2, 3, 3, channels], 9)
  np.testing.assert_allclose(
    normalize(inputs),
    tf.nn.local_response_normalization(inputs, **TUTORIAL),
    atol=1e-6,
  )


def test_layer_survives_being_saved(tmp_path):
  model = keras.Sequential(
    [keras.Input([3, 3, 8]), lrn.LocalResponseNormalization(**TUTORIAL)]
  )
  model.save(tmp_path / "model.keras")
  loaded = keras.saving.load_model(tmp_path / "model.keras")
  inputs = normal([2, 3, 3, 8], 10)
  np.testing.assert_array_equal(loaded(inputs), model(inputs))
  assert loaded.layers[0].options == TUTORIAL
  np.testing.assert_allclose(
    model(inputs),
    tf.nn.local_response_normalization(inputs, **TUTORIAL),
    atol=1e-6,
  )


def test_refuses_a_negative_radius():
  with pytest.raises(ValueError, match="`depth_radius` must be .*: -1"):
    lrn.local_response_normalization(tf.zeros([1, 4]), depth_radius=-1)


def test_refuses_unknown_channels():
  @tf.function(input_signature=[tf.TensorSpec([1, 2, 2, None])])
  def normalize(x):
    return lrn.local_response_normalization(x)

  with pytest.raises(ValueError, match="static last dimension"):
    normalize.get_concrete_function()
