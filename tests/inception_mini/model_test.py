"""Tests of `inception_mini.model` and `inception_mini.blocks`."""

import collections
import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from inception_mini import blocks
from inception_mini import config
from inception_mini import model

NUM_PARAMETERS = 27_182_194
# Without the heads; what Keras's own implementation has.
NUM_TRUNK_PARAMETERS = 21_802_784


@pytest.fixture(scope="module")
def original():
  return model.build(1001)


@pytest.fixture(scope="module")
def small():
  return model.build(5, image_size=32, width=0.1, depth=0.3, dropout=0.5)


@pytest.fixture(scope="module")
def batch():
  images = tf.random.stateless_uniform([6, 32, 32, 3], [0, 1], -1.0, 1.0)
  return images, tf.constant([0, 1, 2, 3, 4, 0], tf.int64)


def values(network):
  return {v.path: tf.constant(v.numpy()) for v in network.trainable_variables}


def convolutions(network):
  """Kernel shape, strides and padding of the trunk's convolutions.

  A 1x1 kernel needs none.
  """
  return [
    (
      tuple(layer.kernel.shape),
      layer.strides,
      layer.padding if layer.kernel_size != (1, 1) else None,
    )
    for layer in network.layers
    if isinstance(layer, keras.layers.Conv2D)
    and not layer.name.startswith("auxiliary")
  ]


def grids(network, size):
  """Height and channels of what the blocks and reductions give."""
  names = [f"a{i}" for i in range(9)] + ["reduction_a"]
  names += [f"b{i}" for i in range(9)] + ["reduction_b"]
  names += [f"c{i}" for i in range(9)]
  shapes = {layer.name: layer.output.shape for layer in network.layers}
  found = [shapes[name] for name in names if name in shapes]
  assert all(shape[1] == shape[2] for shape in found)
  return [shape[1] for shape in found] if size else [s[3] for s in found]


class TestOriginal:
  def test_number_of_parameters(self, original):
    assert original.count_params() == NUM_PARAMETERS
    heads = {
      layer.name: layer.count_params()
      for layer in original.layers
      if layer.count_params() and layer.name.startswith(("logits", "auxiliary"))
    }
    assert heads == {
      "logits": 2048 * 1001 + 1001,
      "auxiliary_0_conv": 768 * 128,
      "auxiliary_0_norm": 3 * 128,
      "auxiliary_1_conv": 5 * 5 * 128 * 768,
      "auxiliary_1_norm": 3 * 768,
      "auxiliary_logits": 768 * 1001 + 1001,
    }
    trunk = original.count_params() - sum(heads.values())
    assert trunk == NUM_TRUNK_PARAMETERS

  def test_trunk_is_that_of_keras(self, original):
    reference = keras.applications.InceptionV3(
      weights=None, include_top=False, input_shape=(299, 299, 3)
    )
    assert reference.count_params() == NUM_TRUNK_PARAMETERS
    assert collections.Counter(convolutions(original)) == collections.Counter(
      convolutions(reference)
    )

    def joined(network):
      return collections.Counter(
        layer.output.shape
        for layer in network.layers
        if isinstance(layer, keras.layers.Concatenate)
      )

    assert joined(original) == joined(reference)

  def test_grids_and_channels(self, original):
    assert grids(original, True) == [35] * 3 + [17] * 5 + [8] * 3
    assert grids(original, False) == (
      [256, 288, 288, 768, 768, 768, 768, 768, 1280, 2048, 2048]
    )

  def test_batch_normalisation(self, original):
    norms = [
      layer
      for layer in original.layers
      if isinstance(layer, keras.layers.BatchNormalization)
    ]
    assert len(norms) == 94 + 2
    for norm in norms:
      assert (norm.scale, norm.center) == (False, True)
      assert (norm.epsilon, norm.momentum) == (1e-3, 0.9997)


class TestStem:
  @pytest.mark.parametrize(
    "size, halvings, padding",
    [
      (32, 1, "same"),
      (63, 1, "same"),
      (64, 2, "same"),
      (127, 2, "same"),
      (128, 3, "same"),
      (170, 3, "same"),
      (171, 3, "valid"),
      (299, 3, "valid"),
    ],
  )
  def test_halves_as_often_as_the_image_allows(self, size, halvings, padding):
    stem = blocks.stem_of(size)
    assert stem.padding == padding
    assert sum(stem[1:]) == halvings

  @pytest.mark.parametrize(
    "size, expected",
    [
      (32, [16, 8, 8, 4, 4]),
      (33, [17, 9, 9, 5, 5]),
      (64, [16, 8, 8, 4, 4]),
      (128, [16, 8, 8, 4, 4]),
      (171, [19, 9, 9, 4, 4]),
    ],
  )
  def test_grids(self, size, expected):
    network = model.build(2, image_size=size, width=0.01, depth=0.1)
    assert grids(network, True) == expected


class TestScaling:
  def test_depth_takes_the_last_blocks_and_repeats_the_last(self):
    assert model._last((1, 2, 3, 4), 0.5) == (3, 4)
    assert model._last((1, 2, 3, 4), 0.01) == (4,)
    assert model._last((1, 2, 3, 4), 1.5) == (1, 2, 3, 4, 4, 4)

  def test_channels_are_multiples_of_8(self):
    def channels(width, number):
      parts = blocks.Parts(
        seeds=iter([]), width=width, padding="same", batch_norm_decay=0.9
      )
      return parts.channels(number)

    assert channels(1.0, 80) == 80
    assert channels(0.5, 80) == 40
    assert channels(0.3, 64) == 16
    assert channels(0.001, 64) == 8

  def test_a_model_for_the_desk_is_small(self):
    settings = config.from_recipe("mini")
    network = model.of_config(settings, 11)
    assert network.count_params() == 829_286
    assert network.count_params() < 1_700_000

  def test_the_number_of_classes_may_be_given(self):
    settings = config.from_recipe("mini", num_classes=3, auxiliary_weight=0.0)
    outputs = model.of_config(settings, 3).output
    assert {name: x.shape for name, x in outputs.items()} == {
      "logits": (None, 3)
    }


@pytest.mark.parametrize("given, of_data", [(None, None), (3, 5)])
def test_refuses_too_few_classes(given, of_data):
  settings = config.from_recipe("mini", num_classes=given)
  with pytest.raises(ValueError, match="`num_classes` must be "):
    model.of_config(settings, of_data)


def test_seed_decides_initial_weights(small):
  arguments = dict(image_size=32, width=0.1, depth=0.3)
  again = model.build(5, **arguments, seed=0)
  other = model.build(5, **arguments, seed=1)
  first = small.get_layer("conv0_conv").kernel.numpy()
  np.testing.assert_array_equal(first, again.get_layer("conv0_conv").kernel)
  assert np.abs(first - other.get_layer("conv0_conv").kernel).max() > 0.01


def test_kernels_start_different_from_each_other(small):
  kernels = [v.numpy().ravel()[:5] for v in small.trainable_variables]
  kernels = [tuple(k) for k in kernels if np.any(k)]
  assert len(set(kernels)) == len(kernels)


def test_states_are_told_apart_by_path(small):
  states = {v.path for v in small.non_trainable_variables}
  statistics = {path for path in states if model.is_statistic(path)}
  assert len(states - statistics) == 1  # What dropout draws from.
  assert "conv0_norm/moving_mean" in statistics
  assert not any(model.is_statistic(v.path) for v in small.trainable_variables)


def test_paths_are_unique(original):
  paths = [v.path for v in original.variables]
  assert len(set(paths)) == len(paths)


class TestLoss:
  def test_smoothed_cross_entropy_by_hand(self):
    logits = np.array([[1.0, 2.0, 4.0, 0.0]], np.float32)
    log_p = logits[0] - np.log(np.sum(np.exp(logits[0])))
    target = np.array([0.025, 0.025, 0.925, 0.025])
    loss = model.loss(tf.constant(logits), tf.constant([2]))
    np.testing.assert_allclose(loss, -np.sum(target * log_p), rtol=1e-6)

  def test_without_smoothing_it_is_plain(self):
    logits = tf.random.stateless_normal([4, 3], [0, 1])
    labels = tf.constant([0, 2, 1, 1])
    plain = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    loss = model.loss(logits, labels, label_smoothing=0.0)
    np.testing.assert_allclose(loss, tf.reduce_mean(plain), rtol=1e-6)

  def test_is_in_float32(self):
    logits = tf.zeros([1, 4], tf.float16)
    assert model.loss(logits, tf.constant([1])).dtype == tf.float32

  def test_all_kernels_decay_and_nothing_else(self, small):
    parameters = values(small)
    expected = 0.0
    for path, value in parameters.items():
      assert path.endswith(("/kernel", "/bias", "/beta"))
      if path.endswith("/kernel"):
        expected += 4e-5 * 0.5 * np.sum(value.numpy() ** 2)
    np.testing.assert_allclose(
      model.weight_decay(parameters), expected, rtol=1e-5
    )

  def test_total_is_the_sum_of_its_parts(self, small, batch):
    images, labels = batch
    outputs = small(images, training=False)
    parameters = values(small)
    total, _ = model.total_loss(
      small,
      parameters,
      images,
      labels,
      training=False,
      label_smoothing=0.2,
      auxiliary_weight=0.3,
      decay_factor=0.01,
    )
    parts = (
      model.loss(outputs["logits"], labels, label_smoothing=0.2)
      + 0.3
      * model.loss(outputs["auxiliary_logits"], labels, label_smoothing=0.2)
      + model.weight_decay(parameters, factor=0.01)
    )
    np.testing.assert_allclose(total, parts, rtol=1e-5)

  def test_starts_where_the_original_starts(self, original):
    """Its log showed 13 to 14: ln 1001, 0.4 of that, and the decay."""
    decay = model.weight_decay(values(original))
    start = 1.4 * np.log(1001) + float(decay)
    assert 13.0 < start < 14.0

  def test_reads_no_trainable_weight_of_the_model(self, small, batch):
    parameters = {p: v + 0.05 for p, v in values(small).items()}
    loss, _ = model.total_loss(
      small, parameters, *batch, training=False, auxiliary_weight=0.0
    )
    mine, _ = model.total_loss(
      small, values(small), *batch, training=False, auxiliary_weight=0.0
    )
    assert abs(float(loss) - float(mine)) > 1e-3

  def test_every_parameter_has_a_gradient(self, small, batch):
    parameters = values(small)
    with tf.GradientTape() as tape:
      tape.watch(parameters)
      loss, _ = model.total_loss(small, parameters, *batch)
    gradients = tape.gradient(loss, parameters)
    for path, gradient in gradients.items():
      assert gradient is not None, path
      assert np.isfinite(gradient.numpy()).all(), path


class TestStates:
  def test_moving_statistics_follow_the_batch(self, small, batch):
    images, _ = batch
    _, updates = model.total_loss(small, values(small), *batch)
    assert set(updates) == {v.path for v in small.non_trainable_variables}
    x = small.get_layer("conv0_conv")(images).numpy()
    np.testing.assert_allclose(
      updates["conv0_norm/moving_mean"],
      (1 - 0.9997) * x.mean((0, 1, 2)),
      atol=1e-7,
    )
    np.testing.assert_allclose(
      updates["conv0_norm/moving_variance"],
      0.9997 + (1 - 0.9997) * x.var((0, 1, 2)),
      rtol=1e-5,
    )

  def test_statistics_may_be_given(self, small, batch):
    path = "conv0_norm/moving_mean"
    given = tf.ones_like(values(small)["conv0_norm/beta"])
    _, updates = model.total_loss(
      small, {**values(small), path: given}, *batch, training=False
    )
    np.testing.assert_array_equal(updates[path], given)

  def test_dropout_follows_its_seed(self, small, batch):
    def loss(seed):
      seed = None if seed is None else tf.constant(seed, tf.int32)
      return float(
        model.total_loss(small, values(small), *batch, dropout_seed=seed)[0]
      )

    assert loss([1, -2]) == loss([1, -2])
    assert loss([1, -2]) != loss([1, 3])
    assert loss(None) == loss(None)  # Nothing was assigned to the model.

  def test_evaluation_drops_nothing(self, small, batch):
    def loss(seed):
      return model.total_loss(
        small,
        values(small),
        *batch,
        training=False,
        dropout_seed=tf.constant(seed),
      )[0].numpy()

    assert loss([1, 2]) == loss([3, 4])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_may_compute_in_half_precision(small, batch, dtype):
  half = model.build(
    5, image_size=32, width=0.1, depth=0.3, dropout=0.0, compute_dtype=dtype
  )
  assert {v.dtype for v in half.variables} == {"float32"}
  assert half(batch[0])["logits"].dtype == dtype
  loss, updates = model.total_loss(half, values(half), *batch)
  assert loss.dtype == tf.float32
  assert {u.dtype for u in updates.values()} == {tf.float32}
  whole = model.build(5, image_size=32, width=0.1, depth=0.3, dropout=0.0)
  expected, _ = model.total_loss(whole, values(whole), *batch)
  np.testing.assert_allclose(loss, expected, rtol=0.02)


def test_defaults_are_those_of_the_settings():
  defaults = {f.name: f.default for f in dataclasses.fields(config.Config)}
  assert model.total_loss.__kwdefaults__["label_smoothing"] == 0.1
  assert (
    model.total_loss.__kwdefaults__["decay_factor"] == defaults["weight_decay"]
  )
