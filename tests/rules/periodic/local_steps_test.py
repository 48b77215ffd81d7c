"""Tests for rules.periodic.local_steps.

In most of them a variable is its own gradient and its own loss, so that a step
with rate 0.5 halves it.
"""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests.support import stores
from tf_replicas.replica import model_replica
from tf_replicas.rules.periodic import local_steps

SGD = keras.optimizers.SGD
NAN, INF = float("nan"), float("inf")


def _make(optimizer=None, period=3, loss_scale=None, **more):
  """Local steps, not yet of a store."""
  optimizer = SGD(0.5) if optimizer is None else optimizer
  return local_steps.LocalSteps(
    local_steps.LocalOptimizer(optimizer), period, loss_scale, **more
  )


def _store(trainable=1, statistics=0):
  """A store of scalars."""
  specs = [stores.spec(f"v{i}", []) for i in range(trainable)]
  specs += [
    stores.spec(f"s{i}", [], trainable=False) for i in range(statistics)
  ]
  return stores.attach(specs)


def _ready(optimizer=None, period=3, loss_scale=None, store=None, **more):
  """Local steps of a new training, with the rate told."""
  steps = _make(optimizer, period, loss_scale, **more)
  store = _store() if store is None else store
  steps.build(store, store.namespace)
  steps.initialize()
  steps.refresh()
  return steps


def _train(steps, compute, values, slots=None, **kwargs):
  """One period from `values`, in a graph as replicas have it."""

  @tf.function(autograph=False)
  def period(parameters, slots):
    return steps(compute, parameters, slots, **kwargs)

  slots = steps.new_slots() if slots is None else slots
  return period([tf.constant(v, tf.float32) for v in values], slots)


def _itself(parameters, scale_loss):
  """The gradient of each variable is its value; 4 examples."""
  del scale_loss
  return model_replica.Gradients(
    list(parameters), parameters[0], tf.constant(4, tf.int64)
  )


class Batches:
  """Computes a gradient, a loss and a number of examples each time it is told.

  Attributes:
    drawn: How many batches were used.
  """

  def __init__(self, *batches):
    self.drawn = 0
    self._batches = batches

  def __call__(self, parameters, scale_loss):
    del scale_loss
    gradient, loss, num_examples = tf.numpy_function(
      self._next, [], [tf.float32, tf.float32, tf.int64]
    )
    for tensor in (gradient, loss, num_examples):
      tensor.set_shape([])
    # One batch after the other.
    with tf.control_dependencies(parameters):
      gradient = tf.identity(gradient)
    return model_replica.Gradients([gradient], loss, num_examples)

  def _next(self):
    gradient, loss, num_examples = self._batches[self.drawn]
    self.drawn += 1
    return np.float32(gradient), np.float32(loss), np.int64(num_examples)


class PeriodTest(stores.TestCase):
  @parameterized.parameters((1, 4.0), (2, 2.0), (3, 1.0))
  def test_takes_as_many_steps_as_the_period_has(self, period, expected):
    local = _train(_ready(period=period), _itself, [8.0])
    self.assertEqual(stores.numpy(local.parameters), [expected])
    self.assertEqual(int(local.num_examples), 4 * period)

  def test_each_gradient_is_of_where_the_step_before_led(self):
    local = _train(_ready(), _itself, [8.0], wants_totals=True)
    self.assertEqual(stores.numpy(local.totals), [8.0 + 4.0 + 2.0])

  def test_loss_is_the_mean_over_examples_and_not_over_batches(self):
    batches = Batches((0.0, 1.0, 1), (0.0, 2.0, 2), (0.0, 7.0, 5))
    local = _train(_ready(), batches, [0.0])
    # (1 * 1 + 2 * 2 + 7 * 5) / 8.
    self.assertEqual(float(local.loss), 5.0)
    self.assertEqual(local.loss.dtype, tf.float64)
    self.assertEqual(int(local.num_examples), 8)
    self.assertEqual(batches.drawn, 3)

  def test_sums_no_gradients_unless_they_are_wanted(self):
    self.assertEmpty(_train(_ready(), _itself, [8.0]).totals)

  def test_slots_outlast_a_period(self):
    """Gradients of 1, rate 0.5, momentum 0.5: by -.5, -.75, -.875, -.9375."""
    steps = _ready(SGD(0.5, momentum=0.5), period=2)
    batches = Batches(*[(1.0, 0.0, 1)] * 6)
    first = _train(steps, batches, [10.0])
    np.testing.assert_allclose(first.parameters, [10 - 1.25])
    second = _train(steps, batches, first.parameters, first.slots)
    np.testing.assert_allclose(second.parameters, [10 - 3.0625])
    # New slots forget it all.
    third = _train(steps, batches, [10.0])
    np.testing.assert_allclose(third.parameters, [10 - 1.25])

  def test_a_variable_without_gradient_stays_and_has_no_total(self):
    def compute(parameters, scale_loss):
      del scale_loss
      gradients = [None, parameters[1]]
      return model_replica.Gradients(gradients, 0.0, tf.constant(1, tf.int64))

    steps = _ready(SGD(0.5, weight_decay=0.1), 1, store=_store(trainable=2))
    local = _train(steps, compute, [8.0, 10.0], wants_totals=True)
    self.assertEqual(float(local.parameters[0]), 8.0)
    self.assertNotEqual(float(local.parameters[1]), 10.0)
    self.assertIsNone(local.totals[0])
    self.assertEqual(float(local.totals[1]), 10.0)

  def test_a_constraint_holds_after_each_step(self):
    """8 becomes 4, but at least 5; then 2.5, but at least 5."""
    spec = stores.spec("v0", [])._replace(
      constraint=lambda value: tf.maximum(value, 5.0)
    )
    steps = _ready(period=2, store=stores.attach([spec]))
    local = _train(steps, _itself, [8.0], wants_totals=True)
    self.assertEqual(stores.numpy(local.parameters), [5.0])
    self.assertEqual(stores.numpy(local.totals), [8.0 + 5.0])

  def test_rows_of_a_sparse_gradient_are_summed(self):
    def compute(parameters, scale_loss):
      del parameters, scale_loss
      rows = tf.IndexedSlices(
        tf.constant([[1.0], [2.0], [4.0]]),
        tf.constant([2, 0, 2]),
        tf.constant([3, 1]),
      )
      return model_replica.Gradients([rows], 0.0, tf.constant(1, tf.int64))

    steps = _ready(
      period=2, loss_scale=2.0, store=stores.attach([stores.spec("t", [3, 1])])
    )
    local = _train(steps, compute, [np.ones([3, 1])], wants_totals=True)
    # Half of each, for the scale; twice, for the batches.
    np.testing.assert_allclose(local.totals[0], [[2.0], [0.0], [5.0]])
    np.testing.assert_allclose(local.parameters[0], [[0.0], [1.0], [-1.5]])


class StatisticsTest(stores.TestCase):
  def _compute(self, parameters, scale_loss):
    """The statistic moves a quarter of the way to 0."""
    del scale_loss
    return model_replica.Gradients(
      [parameters[0], parameters[1] / 4],
      parameters[0],
      tf.constant(1, tf.int64),
    )

  def test_move_as_told_whatever_rate_scale_and_force_are(self):
    store = _store(statistics=1)
    steps = _ready(SGD(0.5), period=2, loss_scale=8.0, store=store)
    local = _train(
      steps,
      self._compute,
      [8.0, 16.0],
      pull_back=lambda parameter, i: 100 * parameter,
      wants_totals=True,
    )
    self.assertEqual(float(local.parameters[1]), 9.0)  # 16, 12, 9.
    self.assertEqual(float(local.totals[1]), 7.0)


class LossScaleTest(stores.TestCase):
  def test_a_dynamic_one_is_refused(self):
    """Its scale would never change, also if the gradients overflow."""
    specs = [stores.spec("v0", []), stores.spec("loss_scale/value", [])]
    store = stores.attach(specs)
    with self.assertRaisesRegex(ValueError, "`loss_scale`.*a `LossScale`"):
      _make().build(store, store.namespace)

  def test_is_taken_out_of_gradients_and_totals_and_not_of_the_loss(self):
    def compute(parameters, scale_loss):
      del scale_loss
      return model_replica.Gradients(
        [1024 * parameters[0]], parameters[0], tf.constant(1, tf.int64)
      )

    steps = _ready(loss_scale=1024.0)
    local = _train(steps, compute, [8.0], wants_totals=True)
    self.assertEqual(stores.numpy(local.parameters), [1.0])
    self.assertEqual(stores.numpy(local.totals), [14.0])
    np.testing.assert_allclose(local.loss, 14 / 3)

  @parameterized.parameters((None, 3.0), (1024.0, 3072.0))
  def test_multiplies_the_loss_that_is_differentiated(self, scale, expected):
    scaled = []

    def compute(parameters, scale_loss):
      scaled.append(scale_loss(tf.constant(3.0)))
      return model_replica.Gradients(
        [scaled[-1]], parameters[0], tf.constant(1, tf.int64)
      )

    steps = _ready(SGD(1.0), period=1, loss_scale=scale)
    local = _train(steps, compute, [8.0], wants_totals=True)
    self.assertLen(scaled, 1)
    # What multiplied the loss divides the gradient.
    self.assertEqual(stores.numpy(local.totals), [3.0])
    factor = 1.0 if scale is None else scale
    self.assertEqual(factor * 3.0, expected)


class PullBackTest(stores.TestCase):
  def test_is_added_to_the_gradient_of_the_variable_that_it_is_for(self):
    steps = _ready(SGD(1.0), period=1, store=_store(trainable=2))

    def compute(parameters, scale_loss):
      del parameters, scale_loss
      gradients = [tf.constant(1.0), tf.constant(2.0)]
      return model_replica.Gradients(gradients, 0.0, tf.constant(1, tf.int64))

    local = _train(
      steps,
      compute,
      [10.0, 20.0],
      pull_back=lambda parameter, i: 0.25 * parameter * (i + 1),
      wants_totals=True,
    )
    # 10 - (1 + 2.5), 20 - (2 + 10).
    self.assertEqual(stores.numpy(local.parameters), [6.5, 8.0])
    # It is no part of what the batches say.
    self.assertEqual(stores.numpy(local.totals), [1.0, 2.0])

  def test_is_of_where_the_copy_is_at_each_step(self):
    steps = _ready(SGD(1.0), period=2)
    batches = Batches((0.0, 0.0, 1), (0.0, 0.0, 1))
    local = _train(
      steps, batches, [8.0], pull_back=lambda parameter, i: 0.5 * parameter
    )
    self.assertEqual(stores.numpy(local.parameters), [2.0])

  def test_a_variable_without_gradient_is_not_pulled(self):
    def compute(parameters, scale_loss):
      del scale_loss
      gradients = [None, parameters[1]]
      return model_replica.Gradients(gradients, 0.0, tf.constant(1, tf.int64))

    local = _train(
      _ready(period=1, store=_store(trainable=2)),
      compute,
      [8.0, 8.0],
      pull_back=lambda parameter, i: parameter,
    )
    self.assertEqual(stores.numpy(local.parameters), [8.0, 0.0])


class NotFiniteTest(stores.TestCase):
  @parameterized.named_parameters(
    ("gradient_nan", (NAN, 1.0)),
    ("gradient_infinite", (-INF, 1.0)),
    ("loss_nan", (1.0, NAN)),
    ("loss_infinite", (1.0, INF)),
  )
  def test_ends_the_period_and_shows_in_the_loss(self, bad):
    batches = Batches((1.0, 1.0, 2), (*bad, 2), *[(1.0, 1.0, 2)] * 3)
    local = _train(_ready(period=5), batches, [0.0])
    self.assertEqual(batches.drawn, 2)
    self.assertEqual(int(local.num_examples), 4)
    self.assertTrue(np.isnan(float(local.loss)))

  def test_in_the_last_batch_shows_as_well(self):
    batches = Batches((1.0, 1.0, 2), (1.0, 1.0, 2), (NAN, 1.0, 2))
    local = _train(_ready(), batches, [0.0])
    self.assertTrue(np.isnan(float(local.loss)))


class EndTest(stores.TestCase):
  def test_ends_after_the_batch_it_is_at(self):
    steps = _ready(period=5)
    steps.end()
    local = _train(steps, _itself, [8.0])
    self.assertEqual(stores.numpy(local.parameters), [4.0])
    self.assertEqual(int(local.num_examples), 4)
    self.assertTrue(np.isfinite(float(local.loss)))

  def test_ends_in_the_midst_of_a_period(self):
    """Whether it had looked before it was told is chance."""
    steps = _ready(period=50)
    drawn = []

    def end_at_the_second():
      drawn.append(1)
      if len(drawn) == 2:
        steps.end()
      return np.float32(0.0)

    def compute(parameters, scale_loss):
      del scale_loss
      with tf.control_dependencies(parameters):
        loss = tf.numpy_function(end_at_the_second, [], tf.float32)
      loss.set_shape([])
      return model_replica.Gradients(
        [loss + parameters[0]], loss, tf.constant(1, tf.int64)
      )

    local = _train(steps, compute, [8.0])
    self.assertBetween(int(local.num_examples), 2, 3)
    self.assertLen(drawn, int(local.num_examples))

  def test_is_over_for_the_replicas_of_every_client(self):
    store = _store()
    chief, replica = _ready(store=store), _make()
    replica.build(store, store.namespace)
    chief.end()
    self.assertEqual(int(_train(replica, _itself, [8.0]).num_examples), 4)

  def test_a_new_training_has_not_ended(self):
    steps = _ready()
    steps.end()
    steps.initialize()
    self.assertEqual(int(_train(steps, _itself, [8.0]).num_examples), 12)


class ClipNormTest(stores.TestCase):
  def test_gradients_of_each_step_are_scaled_down(self):
    steps = _ready(SGD(0.5), period=2, store=_store(2), clip_norm=5.0)
    local = _train(steps, _itself, [6.0, 8.0])
    # The norm is 10, then 7.5: each step takes off 2.5.
    np.testing.assert_allclose(local.parameters, [3.0, 4.0], rtol=1e-6)


class LearningRateTest(stores.TestCase):
  def _clients(self):
    """The chief's, and a replica's whose own rate is another."""
    store = _store()
    chief = _ready(SGD(0.5), period=1, store=store)
    replica = _make(SGD(0.125), period=1)
    replica.build(store, store.namespace)
    return chief, replica

  def test_is_that_of_the_chief(self):
    _, replica = self._clients()
    local = _train(replica, _itself, [8.0])
    self.assertEqual(stores.numpy(local.parameters), [4.0])

  def test_a_new_one_counts_when_the_chief_has_told(self):
    chief, replica = self._clients()
    chief.set_learning_rate(0.25)
    self.assertEqual(chief.learning_rate, 0.25)
    local = _train(replica, _itself, [8.0])
    self.assertEqual(stores.numpy(local.parameters), [4.0])
    self.assertEqual(chief.refresh(), 0.25)
    local = _train(replica, _itself, [8.0])
    self.assertEqual(stores.numpy(local.parameters), [6.0])

  def test_a_replica_that_sets_one_changes_nothing(self):
    _, replica = self._clients()
    replica.set_learning_rate(0.0)
    local = _train(replica, _itself, [8.0])
    self.assertEqual(stores.numpy(local.parameters), [4.0])


class RefusalTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("no_batches", {"period": 0}, ValueError, "`period`.*at least 1.*: 0"),
    ("half", {"period": 1.5}, TypeError, "`period`.*integer.*: 1.5"),
    ("truth", {"period": True}, TypeError, "`period`.*integer.*True"),
    ("clip", {"clip_norm": 0.0}, ValueError, "`clip_replica_norm`.*0.0"),
    ("scale", {"loss_scale": 0.0}, ValueError, "`loss_scale`.*positive.*0.0"),
    ("nan", {"loss_scale": NAN}, ValueError, "`loss_scale`.*positive.*nan"),
  )
  def test_refuses(self, arguments, error, message):
    with self.assertRaisesRegex(error, message):
      _make(**arguments)

  def test_says_how_long_a_period_is(self):
    self.assertEqual(_make(period=7).period, 7)


if __name__ == "__main__":
  absltest.main()
