"""Tests of `store.moving_averages`."""

import numpy as np
import pytest
import tensorflow as tf

from tf_replicas.store import moving_averages


@pytest.mark.parametrize(
  ("step", "expected"),
  [(0, 1 / 10), (1, 2 / 11), (2, 3 / 12), (3, 4 / 13), (10**9, 0.9999)],
)
def test_effective_decay(step, expected):
  decay = moving_averages.effective_decay(0.9999, step)
  assert decay.dtype == tf.float64
  np.testing.assert_allclose(decay, expected, rtol=1e-15)


def test_effective_decay_is_at_most_the_decay():
  np.testing.assert_allclose(
    moving_averages.effective_decay(0.15, tf.Variable(3, dtype=tf.int64)),
    0.15,
  )


def test_moving_average_update():
  update = moving_averages.moving_average_update(
    tf.constant([10.0, 20.0]), tf.constant([20.0, 0.0]), 0.75
  )
  np.testing.assert_allclose(update, [12.5, 15.0])


def test_equal_shadow_stays_equal_to_the_last_bit():
  value = tf.constant(np.random.default_rng(0).normal(size=1000), tf.float32)
  update = moving_averages.moving_average_update(value, value, 0.9999)
  np.testing.assert_array_equal(update, value)


def test_small_rate_is_not_rounded_in_float32():
  update = moving_averages.moving_average_update(
    tf.constant(0.0), tf.constant(1.0), 0.9999
  )
  np.testing.assert_allclose(update, 1e-4, rtol=1e-7)


@pytest.mark.parametrize("in_graph", [False, True])
def test_three_steps_by_hand(in_graph):
  variable = tf.Variable([1.0, -2.0])
  shadow = tf.Variable(variable)  # Starts at the initial value.
  global_step = tf.Variable(0, dtype=tf.int64)
  averages = moving_averages.MovingAverages()

  def step(value):
    variable.assign(value)
    global_step.assign_add(1)
    averages.update([(shadow, variable)], global_step)

  if in_graph:
    step = tf.function(step)
  step(tf.constant([2.0, 0.0]))
  # 2/11 * 1 + 9/11 * 2 and 2/11 * -2 + 9/11 * 0
  np.testing.assert_allclose(shadow, [20 / 11, -4 / 11], rtol=1e-6)
  step(tf.constant([4.0, 0.0]))
  # 3/12 * 20/11 + 9/12 * 4 and 3/12 * -4/11
  np.testing.assert_allclose(shadow, [38 / 11, -1 / 11], rtol=1e-6)
  step(tf.constant([0.0, 13.0]))
  # 4/13 * 38/11 and 4/13 * -1/11 + 9/13 * 13
  np.testing.assert_allclose(shadow, [152 / 143, 9 - 4 / 143], rtol=1e-6)


def test_without_num_updates_the_decay_is_constant():
  shadow = tf.Variable(1.0, dtype=tf.float64)
  averages = moving_averages.MovingAverages(0.9, num_updates_aware=False)
  averages.update([(shadow, tf.constant(2.0, tf.float64))], 1)
  np.testing.assert_allclose(shadow, 1.1)


@pytest.mark.parametrize("is_aware", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.05, 0.5, 0.9, 0.999])
def test_decay_between_is_the_product_of_decays(decay, is_aware):
  averages = moving_averages.MovingAverages(decay, num_updates_aware=is_aware)
  decays = [float(averages.decay_at(step)) for step in range(1, 121)]
  for begin in (0, 1, 5, 8, 9, 30, 78, 100):
    ends = [begin, begin + 1, begin + 3, 79, 80, 120]
    ends = [end for end in ends if end >= begin]
    product = averages.decay_between(
      tf.fill([len(ends)], tf.constant(begin, tf.int64)), tf.constant(ends)
    )
    assert product.dtype == tf.float64
    expected = [np.prod(decays[begin:end]) for end in ends]
    np.testing.assert_allclose(product, expected, rtol=1e-13)


def test_decay_between_of_many_updates():
  averages = moving_averages.MovingAverages(0.9999)
  decays = [float(averages.decay_at(step)) for step in range(80_001, 95_001)]
  product = averages.decay_between(80_000, 95_000)
  np.testing.assert_allclose(product, np.prod(decays), rtol=1e-11)


def test_decay_between_of_no_updates():
  averages = moving_averages.MovingAverages(0.5)
  product = averages.decay_between(tf.constant([7, 20]), 5)
  np.testing.assert_array_equal(product, [1.0, 1.0])


def test_agrees_with_the_average_of_tf1():
  variable = tf.Variable(1.0)
  shadow = tf.Variable(variable)
  step = tf.Variable(0, dtype=tf.int64)
  theirs = tf.train.ExponentialMovingAverage(0.999, num_updates=step)
  theirs.apply([variable])
  ours = moving_averages.MovingAverages(0.999)
  for value in np.random.default_rng(1).normal(size=20):
    variable.assign(value)
    step.assign_add(1)
    theirs.apply([variable])
    ours.update([(shadow, variable)], step)
    np.testing.assert_allclose(
      shadow, theirs.average(variable), rtol=1e-5, err_msg=f"step {int(step)}"
    )


def test_update_runs_on_the_device_of_the_shadow():
  shadow = tf.Variable(1.0)
  device = shadow.device
  averages = moving_averages.MovingAverages()

  @tf.function
  def update(value):
    averages.update([(shadow, value)], 1)

  graph = update.get_concrete_function(tf.TensorSpec([])).graph
  subtractions = [op for op in graph.get_operations() if op.type == "Sub"]
  assert device and device in [op.device for op in subtractions]


@pytest.mark.parametrize("decay", [-0.1, 1.0, 2.0])
def test_decay_out_of_range(decay):
  with pytest.raises(ValueError, match=r"`decay` must be in \[0, 1\)"):
    moving_averages.MovingAverages(decay)
