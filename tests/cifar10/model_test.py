"""Tests of `cifar10.model`."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from cifar10 import inputs
from cifar10 import model
from cifar10 import sources

NUM_PARAMETERS = 1_068_298


@pytest.fixture(scope="module")
def network():
  return model.build(seed=1)


def values(network):
  return {v.path: tf.constant(v.numpy()) for v in network.variables}


def noise(num_images, seed=0):
  return tf.random.stateless_normal([num_images, 24, 24, 3], [seed, 1])


def test_parameters_per_layer(network):
  assert network.count_params() == NUM_PARAMETERS
  counts = {
    layer.name: layer.count_params()
    for layer in network.layers
    if layer.weights
  }
  assert counts == {
    "conv1": 4_864,
    "conv2": 102_464,
    "local3": 885_120,
    "local4": 73_920,
    "softmax_linear": 1_930,
  }


def test_first_block_pools_first_and_second_normalises_first(network):
  shapes = [(layer.name, layer.output.shape[1:]) for layer in network.layers]
  assert shapes == [
    ("images", (24, 24, 3)),
    ("conv1", (24, 24, 64)),
    ("pool1", (12, 12, 64)),
    ("norm1", (12, 12, 64)),
    ("conv2", (12, 12, 64)),
    ("norm2", (12, 12, 64)),
    ("pool2", (6, 6, 64)),
    ("flatten", (2304,)),
    ("local3", (384,)),
    ("local4", (192,)),
    ("softmax_linear", (10,)),
  ]


def test_equals_the_tutorials_graph(network):
  """The same arithmetic written with TensorFlow's primitives."""
  w = values(network)

  def conv(x, name):
    x = tf.nn.conv2d(x, w[f"{name}/kernel"], 1, "SAME") + w[f"{name}/bias"]
    return tf.nn.relu(x)

  def dense(x, name):
    return x @ w[f"{name}/kernel"] + w[f"{name}/bias"]

  def pool(x):
    return tf.nn.max_pool2d(x, 3, 2, "SAME")

  def norm(x):
    return tf.nn.local_response_normalization(
      x, 4, bias=1.0, alpha=0.001 / 9.0, beta=0.75
    )

  images = noise(3)
  x = norm(pool(conv(images, "conv1")))
  x = pool(norm(conv(x, "conv2")))
  x = tf.nn.relu(dense(tf.reshape(x, [3, -1]), "local3"))
  logits = dense(tf.nn.relu(dense(x, "local4")), "softmax_linear")
  np.testing.assert_allclose(network(images), logits, atol=1e-5)


@pytest.mark.parametrize(
  "layer, stddev, bias",
  [
    ("conv1", 0.05, 0.0),
    ("conv2", 0.05, 0.1),
    ("local3", 0.04, 0.1),
    ("local4", 0.04, 0.1),
    ("softmax_linear", 1 / 192, 0.0),
  ],
)
def test_initial_values(network, layer, stddev, bias):
  initial = values(network)
  np.testing.assert_array_equal(
    initial[f"{layer}/bias"], tf.fill(initial[f"{layer}/bias"].shape, bias)
  )
  kernel = initial[f"{layer}/kernel"].numpy()
  # Cut off at two standard deviations, as TF1 does it, without rescaling:
  # what is left has 0.8796 of the standard deviation.
  assert np.max(np.abs(kernel)) <= 2 * stddev
  tolerance = 5 / np.sqrt(kernel.size)
  assert np.std(kernel) / stddev == pytest.approx(0.8796, abs=tolerance)
  assert np.mean(kernel) / stddev == pytest.approx(0.0, abs=tolerance)


def test_same_seed_same_weights(network):
  again, other = values(model.build(seed=1)), values(model.build(seed=2))
  for path, value in values(network).items():
    np.testing.assert_array_equal(again[path], value)
    if path.endswith("kernel"):
      assert np.any(other[path] != value)


def test_loss_of_known_logits():
  logits = tf.constant([[0.0] * 10, [np.log(9.0)] + [0.0] * 9], tf.float16)
  # ln 10 for the first, and ln(18 / 9) = ln 2 for the second.
  value = model.loss(logits, tf.constant([4, 0]))
  assert value.dtype == tf.float32
  assert float(value) == pytest.approx((np.log(10) + np.log(2)) / 2, abs=1e-3)


def test_smoothed_labels_are_those_of_keras():
  logits = tf.random.stateless_normal([5, 10], [1, 2])
  labels = tf.constant([0, 3, 9, 3, 1])
  value = model.loss(logits, labels, label_smoothing=0.1)
  expected = keras.losses.CategoricalCrossentropy(
    from_logits=True, label_smoothing=0.1
  )(tf.one_hot(labels, 10), logits)
  assert float(value) == pytest.approx(float(expected), rel=1e-5)


def test_weight_decay_is_half_the_squares_of_two_kernels():
  parameters = {
    "conv1/kernel": tf.fill([5, 5, 3, 64], 7.0),
    "local3/kernel": tf.constant([[1.0, 2.0], [3.0, 4.0]]),
    "local3/bias": tf.constant([100.0, 100.0]),
    "local4/kernel": tf.constant([[5.0], [-6.0]]),
    "softmax_linear/kernel": tf.fill([192, 10], 8.0),
  }
  # 0.004 / 2 * (1 + 4 + 9 + 16 + 25 + 36)
  assert float(model.weight_decay(parameters)) == pytest.approx(0.182)
  assert float(model.weight_decay(parameters, factor=0.0)) == 0.0


def test_total_loss_uses_the_values_it_is_given(network):
  images, labels = noise(4), tf.constant([0, 1, 2, 3])
  other = model.build(seed=2)
  total, updates = model.total_loss(network, values(other), images, labels)
  expected = model.loss(other(images), labels) + model.weight_decay(
    values(other)
  )
  assert float(total) == pytest.approx(float(expected), rel=1e-6)
  assert updates == {}


def test_first_loss_is_the_tutorials(network):
  # ln 10, and 0.004 / 2 * 0.7737 * 0.04^2 * 958,464 of weight decay; the
  # tutorial's first line says 4.68.
  images, labels = noise(64), tf.range(64) % 10
  total, _ = model.total_loss(network, values(network), images, labels)
  assert float(total) == pytest.approx(4.68, abs=0.03)


def test_gradients_reach_every_parameter(network):
  parameters = values(network)
  with tf.GradientTape() as tape:
    tape.watch(parameters)
    total, _ = model.total_loss(
      network, parameters, noise(4), tf.constant([0, 1, 2, 3])
    )
  for gradient in tape.gradient(total, parameters).values():
    assert np.all(np.isfinite(gradient))
    assert np.any(gradient != 0)


@pytest.mark.parametrize(
  "compute_dtype, error", [("bfloat16", 0.3), ("float16", 0.15)]
)
def test_half_precision_is_of_the_arithmetic_alone(compute_dtype, error):
  images, labels = noise(8), tf.range(8)

  def loss_and_gradients(network):
    parameters = values(network)
    with tf.GradientTape() as tape:
      tape.watch(parameters)
      total, _ = model.total_loss(network, parameters, images, labels)
    return total, tape.gradient(total, parameters)

  network = model.build(seed=1, compute_dtype=compute_dtype)
  assert {layer.output.dtype for layer in network.layers[1:]} == {compute_dtype}
  assert {weight.dtype for weight in network.weights} == {"float32"}
  total, gradients = loss_and_gradients(network)
  exact_total, exact = loss_and_gradients(model.build(seed=1))
  assert total.dtype == tf.float32
  assert float(total) == pytest.approx(float(exact_total), abs=0.02)
  for path, gradient in gradients.items():
    assert gradient.dtype == tf.float32
    difference = tf.norm(gradient - exact[path]) / tf.norm(exact[path])
    assert 0 < float(difference) < error, path


def test_total_loss_returns_state_updates():
  images = keras.Input([4])
  x = keras.layers.BatchNormalization(momentum=0.5, name="bn")(images)
  x = keras.layers.Dense(3, name="local3")(x)
  outputs = keras.layers.Dense(10, name="local4")(x)
  network = keras.Model(images, outputs)
  batch = tf.constant([[2.0] * 4, [4.0] * 4])

  def updated_mean(parameters):
    _, updates = model.total_loss(
      network, parameters, batch, tf.constant([0, 1])
    )
    return updates["bn/moving_mean"]

  parameters = {v.path: v.value for v in network.trainable_variables}
  # Half the old value, 0 in the model and 8 as given, and half of mean 3.
  np.testing.assert_allclose(updated_mean(parameters), [1.5] * 4)
  given = parameters | {"bn/moving_mean": tf.fill([4], 8.0)}
  np.testing.assert_allclose(updated_mean(given), [5.5] * 4)
  np.testing.assert_array_equal(network.get_layer("bn").moving_mean, [0.0] * 4)


def test_learns_a_batch_by_heart():
  network = model.build(seed=3)
  dataset = inputs.train_dataset(
    sources.find("synthetic"), batch_size=16, seed=0
  )
  images, labels = next(iter(dataset))
  weights = [v.value for v in network.trainable_variables]

  @tf.function
  def step():
    parameters = {v.path: v.value for v in network.trainable_variables}
    with tf.GradientTape() as tape:
      total, _ = model.total_loss(
        network, parameters, images, labels, decay_factor=0.0
      )
    for variable, gradient in zip(
      weights, tape.gradient(total, weights), strict=True
    ):
      variable.assign_sub(0.05 * gradient)
    return total

  losses = [float(step()) for _ in range(40)]
  assert losses[0] == pytest.approx(np.log(10), abs=0.1)
  assert losses[-1] < 0.5 * losses[0]
