"""Tests for store.applier."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests.support import optimizers
from tests.support import stores
from tf_replicas.store import applier
from tf_replicas.store import gradient_math
from tf_replicas.store import inner_optimizer
from tf_replicas.store import moving_averages

NUM_TASKS = 2
VALUES = {
  "table": np.ones([4, 2], "float32"),
  "kernel": np.full([2, 2], 2.0, "float32"),
  "bias": np.zeros([2], "float32"),
}


def _take(store, sums):
  """Gives each task its shards of `sums`, as the queues do."""

  def take_sums(task):
    parts = [
      store.split_gradient(index, total) for index, total in enumerate(sums)
    ]
    return [
      tf.zeros([]) if parts[position] is None else parts[position][number]
      for position, number in store.contributed_shards(task)
    ]

  return take_sums


class MeanUpdateTest(stores.TestCase):
  def _update(
    self,
    sums,
    *,
    num_places=2,
    present=None,
    clip_norm=None,
    decay=None,
    optimizer=None,
    step=0,
  ):
    """Makes one update of VALUES; returns what is in the store after it."""
    store = stores.create(VALUES, NUM_TASKS, stores.cut(NUM_TASKS))
    inner = inner_optimizer.InnerOptimizer(
      optimizer or keras.optimizers.SGD(1.0)
    )
    inner.build(store)
    averages = None
    if decay is not None:
      averages = moving_averages.MovingAverages(decay, num_updates_aware=False)
    update = applier.Applier(
      store, inner, variable_averages=averages, clip_norm=clip_norm
    )
    update.initialize(list(VALUES.values()))
    present = present or [True] * len(VALUES)
    take_sums, step = _take(store, sums), tf.constant(step, tf.int64)
    tf.function(
      lambda: update(present, step, take_sums, num_places), autograph=False
    )()
    return {name: value.numpy() for name, value in store.state().items()}

  def test_mean_is_the_sum_over_the_number_of_contributions(self):
    sums = [tf.fill(v.shape, 1.0 + i) for i, v in enumerate(VALUES.values())]
    state = self._update(sums, num_places=4)
    for i, (path, value) in enumerate(VALUES.items()):
      np.testing.assert_allclose(
        state[f"variables/{path}"], value - (1 + i) / 4
      )

  def test_sparse_rows_are_summed_and_divided_by_all(self):
    # Row 1 has three entries of two contributions, row 3 one of one.
    table = tf.IndexedSlices(
      tf.constant([[1.0, 1], [2, 2], [3, 3], [8, 8]]),
      tf.constant([1, 1, 1, 3], tf.int64),
    )
    sums = [table, tf.zeros([2, 2]), tf.zeros([2])]
    state = self._update(sums)
    np.testing.assert_allclose(
      state["variables/table"][:, 0], [1, 1 - 6 / 2, 1, 1 - 8 / 2]
    )

  def test_rows_are_summed_before_a_nonlinear_optimizer_sees_them(self):
    # The square of the sum, not the sum of squares.
    table = tf.IndexedSlices(
      tf.constant([[3.0, 3], [5.0, 5]]), tf.constant([1, 1], tf.int64)
    )
    state = self._update(
      [table, tf.zeros([2, 2]), tf.zeros([2])],
      optimizer=optimizers.make("Adagrad", 1.0, initial_accumulator_value=0.0),
    )
    np.testing.assert_allclose(
      state["slots/adagrad/accumulator/table"][:, 0], [0, 16, 0, 0]
    )

  @parameterized.named_parameters(
    ("long", 5.0, 0.5), ("just_so", 10.0, 1.0), ("short", 100.0, 1.0)
  )
  def test_clips_by_the_norm_over_all_tasks(self, clip_norm, factor):
    # The means: 8 entries of the table 1, 4 of the kernel 4, 2 of the bias:
    # norm^2 = 8 + 64 + 28 = 100.
    sums = [
      tf.fill([4, 2], 2.0),
      tf.fill([2, 2], 8.0),
      tf.fill([2], 2 * np.sqrt(14.0).astype("float32")),
    ]
    state = self._update(sums, clip_norm=clip_norm)
    for total, (path, value) in zip(sums, VALUES.items(), strict=True):
      np.testing.assert_allclose(
        state[f"variables/{path}"], value - factor * total / 2, rtol=1e-5
      )

  def test_clip_counts_a_repeated_row_once(self):
    # As rows summed: norm 2 * 3 / 2 = 3 each column, 3 * sqrt(2) together.
    table = tf.IndexedSlices(
      tf.fill([3, 2], 2.0), tf.constant([0, 0, 0], tf.int64)
    )
    sums = [table, tf.zeros([2, 2]), tf.zeros([2])]
    state = self._update(sums, clip_norm=float(np.sqrt(2)))
    np.testing.assert_allclose(state["variables/table"][0], [0, 0], atol=1e-6)

  def test_a_skipped_variable_keeps_value_slot_and_average(self):
    momentum = keras.optimizers.SGD(1.0, momentum=0.9, weight_decay=0.1)
    state = self._update(
      [tf.ones([4, 2]), None, tf.ones([2])],
      present=[True, False, True],
      decay=0.5,
      optimizer=momentum,
    )
    np.testing.assert_array_equal(state["variables/kernel"], VALUES["kernel"])
    np.testing.assert_array_equal(state["averages/kernel"], VALUES["kernel"])
    np.testing.assert_array_equal(
      state["slots/sgd/momentum/kernel"], np.zeros([2, 2])
    )
    self.assertNotAlmostEqual(state["variables/bias"][0], 0.0)

  @parameterized.parameters(None, 1.0)
  def test_all_skipped(self, clip_norm):
    state = self._update([None] * 3, present=[False] * 3, clip_norm=clip_norm)
    for path, value in VALUES.items():
      np.testing.assert_array_equal(state[f"variables/{path}"], value)

  def test_averages_follow_the_new_values(self):
    sums = [tf.fill(v.shape, 2.0) for v in VALUES.values()]
    state = self._update(sums, decay=0.75)
    for path, value in VALUES.items():
      np.testing.assert_allclose(state[f"variables/{path}"], value - 1)
      np.testing.assert_allclose(state[f"averages/{path}"], value - 0.25)

  @parameterized.parameters(0, 7)
  def test_optimizer_sees_the_step_before_the_update(self, step):
    rates = keras.optimizers.schedules.PiecewiseConstantDecay(
      [0, 6], [1.0, 2.0, 4.0]
    )
    sums = [tf.fill(v.shape, 2.0) for v in VALUES.values()]
    state = self._update(sums, optimizer=keras.optimizers.SGD(rates), step=step)
    np.testing.assert_allclose(
      state["variables/bias"], [-1.0 if step == 0 else -4.0] * 2
    )

  def test_all_tasks_see_the_same_scalar_of_the_optimizer(self):
    """Nadam's product of momenta advances once per update, not per task."""
    store = stores.create(VALUES, NUM_TASKS, stores.cut(NUM_TASKS))
    inner = inner_optimizer.InnerOptimizer(optimizers.make("Nadam", 0.1))
    inner.build(store)
    update = applier.Applier(
      store, inner, variable_averages=None, clip_norm=None
    )
    reference = optimizers.make("Nadam", 0.1)
    expected = [tf.Variable(v) for v in VALUES.values()]
    reference.build(expected)
    for step in range(3):
      sums = [tf.fill(v.shape, 2.0 + step + i) for i, v in enumerate(expected)]
      take_sums, now = _take(store, sums), tf.constant(step, tf.int64)
      tf.function(
        lambda take=take_sums, now=now: update([True] * 3, now, take, 2),
        autograph=False,
      )()
      reference.apply([total / 2 for total in sums], expected)
    state = store.state()
    for path, value in zip(VALUES, expected, strict=True):
      # The shards of either task: they are rows of the variable.
      np.testing.assert_allclose(
        state[f"variables/{path}"], value.numpy(), rtol=1e-6, atol=1e-6
      )


class ClippedTest(absltest.TestCase):
  def test_a_row_that_occurs_twice_counts_once(self):
    """(6, 0), (0, 8) and 0: the norm is 10, and not the root of 68."""
    slices = tf.IndexedSlices(
      tf.constant([[2.0, 0.0], [0.0, 8.0], [4.0, 0.0]]),
      tf.constant([3, 1, 3], tf.int64),
      tf.constant([5, 2], tf.int64),
    )
    gradients = gradient_math.clipped(
      [slices, None, tf.zeros([2], tf.float64)], [[5, 2], [1], [2]], 1.0
    )
    self.assertIsNone(gradients[1])
    self.assertEqual(gradients[2].dtype, tf.float64)
    dense = tf.convert_to_tensor(gradients[0])
    np.testing.assert_allclose(
      dense, [[0, 0], [0, 0.8], [0, 0], [0.6, 0], [0, 0]], rtol=1e-6
    )

  def test_what_is_short_stays(self):
    (gradient,) = gradient_math.clipped([tf.constant([3.0, 4.0])], [[2]], 5.0)
    np.testing.assert_allclose(gradient, [3, 4])

  def test_a_finite_gradient_stays_finite(self):
    (gradient,) = gradient_math.clipped([tf.constant([3e30, 4e30])], [[2]], 1.0)
    np.testing.assert_allclose(gradient, [0.6, 0.8], rtol=1e-6)

  def test_no_gradients(self):
    self.assertEqual(gradient_math.clipped([None], [[2]], 1.0), [None])


class ScaledTest(absltest.TestCase):
  def test_none(self):
    self.assertIsNone(gradient_math.scaled(None, 2.0))

  def test_dense_keeps_its_dtype(self):
    result = gradient_math.scaled(tf.ones([2], tf.float16), 0.5)
    self.assertEqual(result.dtype, tf.float16)
    np.testing.assert_array_equal(result, [0.5, 0.5])

  def test_slices(self):
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([3]))
    result = gradient_math.scaled(slices, tf.constant(4.0))
    np.testing.assert_array_equal(result.values, [[4, 4]])
    np.testing.assert_array_equal(result.indices, [3])


if __name__ == "__main__":
  absltest.main()
