"""Tests for store.loss_scaling."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests.support import stores
from tf_replicas.replica import model_replica
from tf_replicas.store import applier
from tf_replicas.store import inner_optimizer
from tf_replicas.store import loss_scaling
from tf_replicas.store import placement

NUM_TASKS = 3
W = np.array([1.0, 2.0], np.float32)


def _replica(loss_scale, factor=1.0):
  """A replica with a statistic; the loss is `factor` times the sum of w."""
  return model_replica.Replica(
    [tf.Variable(W, name="w")],
    lambda parameters, x: (
      factor * tf.reduce_sum(parameters[0]) * tf.reduce_mean(x),
      [parameters[1] + 1.0],
    ),
    lambda *_: None,
    statistics=[tf.Variable(0.0, trainable=False, name="count")],
    loss_scale=loss_scale,
  )


def _values(replica):
  return [v.numpy() for v in replica.shared]


class ReplicaTest(stores.TestCase):
  def _gradients(self, initial, factor=1.0):
    replica = _replica(loss_scaling.LossScale(initial), factor)
    return replica.gradients(_values(replica), (tf.ones([4]),))

  def test_gradients_are_those_of_the_loss_itself(self):
    result = self._gradients(2.0**10)
    np.testing.assert_array_equal(result.gradients[0], [1.0, 1.0])
    self.assertEqual([float(m) for m in result.gradients[1:]], [-1, *[0] * 5])
    self.assertEqual(float(result.loss), 3.0)

  def test_an_overflow_contributes_nothing_but_its_flag(self):
    result = self._gradients(2.0**100, 2.0**100)  # float32 ends at 2 ** 128.
    np.testing.assert_array_equal(result.gradients[0], [0.0, 0.0])
    moves = [float(m) for m in result.gradients[1:]]
    self.assertEqual(moves, [0, 0, 0, 0, 1, 0])
    self.assertEqual(float(result.loss), 3 * 2.0**100)

  def test_what_a_scale_of_one_cannot_mend_is_reported(self):
    gradient = self._gradients(1.0, float("nan")).gradients[0]
    self.assertTrue(np.isnan(gradient).all())

  @parameterized.parameters(({"initial": 0.5},), ({"growth": 0},))
  def test_refuses(self, arguments):
    (name,) = arguments
    with self.assertRaisesRegex(ValueError, f"`{name}` must be at least 1"):
      loss_scaling.LossScale(**arguments)


class UpdateTest(stores.TestCase):
  """On three PS tasks, with Adam, whose first step is its rate."""

  def _training(self, growth):
    loss_scale = loss_scaling.LossScale(4.0, growth)
    shared = _replica(loss_scale).shared
    store = stores.attach(
      placement.from_variables(shared), NUM_TASKS, stores.cut(NUM_TASKS)
    )
    for index, value in enumerate(v.numpy() for v in shared):
      store.assign(index, value)
    inner = inner_optimizer.InnerOptimizer(keras.optimizers.Adam(0.5))
    inner.build(store)
    store.start()
    update = applier.Applier(
      store, inner, variable_averages=None, clip_norm=None
    )

    @tf.function(autograph=False)
    def make(flag):
      step = store.read_global_step()
      sums = [tf.fill([2], 1e4), -1.0, 0.0, 0.0, 0.0, flag, 0.0]
      by_task = store.split_by_task([tf.convert_to_tensor(s) for s in sums])
      done = update([True] * 7, step, lambda task: by_task[task], 1)
      with tf.control_dependencies([done]):
        store.advance(step, 1)

    def state_after(flag):
      make(tf.constant(flag))
      state = {k: np.asarray(v) for k, v in store.state().items()}
      return state, loss_scaling.state(state)

    return state_after

  def test_a_void_update_changes_the_scale_alone(self):
    state_after = self._training(growth=2)
    state, scale = state_after(1.0)
    np.testing.assert_array_equal(state["variables/w"], W)
    self.assertEqual(state["variables/count"], 0)
    self.assertEqual((scale.value, scale.void), (2.0, 1.0))
    self.assertEqual(scale.overflow, 0.0)
    state, scale = state_after(0.0)
    # Adam counts from the first update that was made.
    np.testing.assert_allclose(state["variables/w"], W - 0.5, rtol=1e-5)
    self.assertEqual(state["variables/count"], 1)
    self.assertEqual((scale.value, scale.good_updates), (2.0, 1.0))

  def test_grows_after_good_updates_and_not_below_one(self):
    state_after = self._training(growth=2)
    values = [state_after(flag)[1].value for flag in (0, 0, 0, 1, 0, 0, 0.5)]
    self.assertEqual(values, [4, 8, 8, 4, 4, 8, 4])
    for _ in range(4):
      _, scale = state_after(1.0)
    self.assertEqual((scale.value, scale.void), (1.0, 6.0))


if __name__ == "__main__":
  absltest.main()
