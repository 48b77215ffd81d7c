"""Batch normalization's statistics under every update rule, in one process."""

import functools

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests.rules.asynchronous import async_replicas_test
from tests.rules.sync import sync_replicas_test
from tests.support import stores
from tests.support import word_model
from tf_replicas.drivers import mirrored
from tf_replicas.drivers import one_machine
from tf_replicas.replica import model_replica
from tf_replicas.rules import results
from tf_replicas.rules.asynchronous import async_replicas
from tf_replicas.rules.asynchronous import staleness
from tf_replicas.rules.sync import sync_replicas
from tf_replicas.runtime import own_variables
from tf_replicas.store import moving_averages

BATCH = 12
SGD = keras.optimizers.SGD
STATISTICS = ("norm/moving_mean", "norm/moving_variance")


def _dataset_fn(num_shards, shard_index, start_example):
  """Every shard is its part of the same batches, with values of its own."""
  share = BATCH // num_shards
  begin = shard_index * share

  def batch(number):
    seed = tf.stack([tf.constant(7, tf.int64), number])
    x = tf.random.stateless_normal([BATCH, 3], seed)
    x += tf.range(BATCH, dtype=tf.float32)[:, None]
    y = tf.sin(tf.reduce_sum(x, axis=1, keepdims=True))
    return x[begin : begin + share], y[begin : begin + share]

  numbers = tf.data.Dataset.range(start_example // BATCH, 10**6)
  return numbers.map(batch)


def _replica(devices=(), *, is_synchronized=False):
  """A small network with a normalization in its middle."""
  keras.utils.set_random_seed(5)
  inputs = keras.Input([3])
  x = keras.layers.Dense(4, use_bias=False, name="first")(inputs)
  x = keras.layers.BatchNormalization(
    momentum=0.5, synchronized=is_synchronized, name="norm"
  )(x)
  x = keras.layers.Dense(1, name="last")(keras.layers.ReLU()(x))
  model = keras.Model(inputs, x)

  def loss_fn(parameters, x, y):
    count = len(model.trainable_variables)
    outputs, states = model.stateless_call(
      parameters[:count], parameters[count:], x, training=True
    )
    return tf.reduce_mean(tf.square(outputs - y)), states

  return model_replica.Replica(
    model.trainable_variables,
    loss_fn,
    _dataset_fn,
    devices,
    statistics=model.non_trainable_variables,
    is_synchronized=is_synchronized,
  )


def _devices(number):
  return [stores.device(n) for n in range(number)]


def _trained(driver, steps=3):
  for _ in range(steps):
    driver.step()
  return word_model.state_of(driver)


def _one_machine(num_towers=0, **options):
  return one_machine.OneMachine(
    lambda: _replica(_devices(num_towers), **options),
    lambda: word_model.rule(SGD(0.05, momentum=0.9)),
  )


def _mirrored(number, *, rule=None, **options):
  return mirrored.Mirrored(
    lambda: _replica(**options),
    lambda n: word_model.rule(SGD(0.05, momentum=0.9), n, **(rule or {})),
    _devices(number),
  )


@functools.cache
def _one_device():
  return _trained(_one_machine())


class EquivalenceTest(stores.TestCase):
  """N x B equals one x N * B, synchronized; how far off it is otherwise."""

  @parameterized.product(number=[2, 3], make=[_one_machine, _mirrored])
  def test_synchronized(self, number, make):
    one = _one_device()
    many = _trained(make(number, is_synchronized=True))
    word_model.assert_close(many, one, rtol=1e-4, atol=1e-5)
    for name in STATISTICS:
      self.assertGreater(np.abs(one[f"variables/{name}"]).max(), 0.5)
      self.assertGreater(
        np.abs(one[f"averages/{name}"] - one[f"variables/{name}"]).max(), 0.01
      )


class HandNumbersTest(stores.TestCase):
  """A batch normalization by itself: {0, 2} and {4, 6}, or all four."""

  def _moves(self, num_towers, is_synchronized):
    norm = keras.layers.BatchNormalization(
      momentum=0.5, synchronized=is_synchronized
    )
    norm.build([None, 1])

    def loss_fn(parameters, x):
      outputs, states = norm.stateless_call(
        parameters[:2], parameters[2:], x, training=True
      )
      return tf.reduce_sum(outputs**2), states

    replica = model_replica.Replica(
      norm.trainable_variables,
      loss_fn,
      _dataset_fn,
      _devices(num_towers),
      statistics=norm.non_trainable_variables,
      is_synchronized=is_synchronized,
    )
    values = [tf.identity(v) for v in replica.shared]
    batch = (tf.constant([[0.0], [2.0], [4.0], [6.0]]),)
    result = tf.function(replica.gradients, autograph=False)(values, batch)
    return [float(m[0]) for m in result.gradients[2:]]

  @parameterized.parameters(
    # From 0 half way to the mean 3, from 1 half way to the variance 5.
    (0, False, [-1.5, -2.0]),
    (2, True, [-1.5, -2.0]),
    # Each part has variance 1: that of the parts' means, 4, is missing.
    (2, False, [-1.5, 0.0]),
  )
  def test_moves(self, num_towers, is_synchronized, expected):
    moves = self._moves(num_towers, is_synchronized)
    np.testing.assert_allclose(moves, expected, atol=1e-6)


VALUES = {"w": np.float32([1.0, 1.0]), "moving": np.float32([10.0, 10.0])}


def _moves(replica, moving):
  """To 9, 8 and 6: the differences 1, 2 and 4 from 10."""
  return [tf.ones([2]), moving - (10 - 2.0**replica)]


class SynchronousTest(stores.TestCase):
  def _train(self, count, num_replicas, *, start=(), steps=1, **options):
    def compute(replica, step, parameters, number):
      del step, number
      loss = tf.constant(0.5) * options.get("loss_scale", 1.0)
      move, moved = _moves(replica, parameters[1])
      return [move * options.get("loss_scale", 1.0), moved], loss, 10

    training = sync_replicas_test.Training(
      sync_replicas.SyncReplicasOptimizer(
        SGD(0.5),
        count,
        num_replicas,
        variable_averages=moving_averages.MovingAverages(
          0.5, num_updates_aware=False
        ),
        **options,
      ),
      compute,
      values=VALUES,
      is_sparse=[False, False],
    )
    training.start(*start)
    try:
      training.steps(steps)
    finally:
      training.stop()
    state = training.store.state()
    return [
      float(state[f"{kind}/{name}"][0])
      for kind in ("variables", "averages")
      for name in VALUES
    ]

  def test_mean(self):
    w, moving, w_average, moving_average = self._train(3, 3)
    self.assertEqual((w, w_average), (0.5, 0.75))
    np.testing.assert_allclose(moving, 10 - 7 / 3, rtol=1e-6)
    np.testing.assert_allclose(moving_average, 10 - 7 / 6, rtol=1e-6)

  @parameterized.named_parameters(
    ("chief", (), 9),
    ("first_of_those_used", (1, 2), 8),
    ("only_one", (2,), 6),
  )
  def test_chief(self, start, expected):
    count = len(start) or 3
    found = self._train(count, 3, start=start, has_chief_statistics=True)
    np.testing.assert_allclose(found[1], expected, rtol=1e-6)
    np.testing.assert_allclose(found[3], (10 + expected) / 2, rtol=1e-6)

  def test_the_sums_of_metrics_are_those_of_all(self):
    """The library's own variables without gradients are not the chief's."""

    def compute(replica, step, parameters, number):
      del step, number
      gradients = [*_moves(replica, parameters[1]), -tf.ones([2])]
      return gradients, tf.constant(0.5), 10

    training = sync_replicas_test.Training(
      sync_replicas.SyncReplicasOptimizer(
        SGD(0.5), 3, has_chief_statistics=True
      ),
      compute,
      values=VALUES | {own_variables.METRIC_SUMS: np.zeros([2], "float32")},
      is_sparse=[False] * 3,
    )
    training.start()
    try:
      training.steps(2)
    finally:
      training.stop()
    values = training.values()
    np.testing.assert_allclose(values["moving"], [9, 9], rtol=1e-6)
    np.testing.assert_allclose(values[own_variables.METRIC_SUMS], [2, 2])

  def test_several_batches_of_the_chief_count_as_one(self):
    found = self._train(4, 1, has_chief_statistics=True)
    np.testing.assert_allclose(found[1], 9, rtol=1e-6)

  def test_neither_scaled_nor_clipped(self):
    found = self._train(
      2, 2, loss_scale=64.0, clip_replica_norm=0.5, clip_mean_norm=0.1
    )
    self.assertAlmostEqual(found[0], 1 - 0.5 * 0.1 / 2**0.5, places=6)
    np.testing.assert_allclose(found[1], 8.5, rtol=1e-6)

  def test_what_is_not_finite_is_refused_whole(self):
    def compute(replica, step, parameters, number):
      del step, number
      bad = float("nan") if replica else 0.0
      return [tf.ones([2]), parameters[1] * bad], tf.constant(0.5), 10

    training = sync_replicas_test.Training(
      sync_replicas.SyncReplicasOptimizer(SGD(0.5), 2),
      compute,
      values=VALUES,
      is_sparse=[False, False],
    )
    training.start()
    with self.assertRaises(results.NonFiniteGradientError):
      training.steps(1)
    training.stop()
    for path, value in training.values().items():
      np.testing.assert_array_equal(value, VALUES[path])


class AsynchronousTest(stores.TestCase):
  @parameterized.parameters((True, 9.0), (False, 5.0))
  def test_nothing_is_lost(self, has_chief_statistics, expected):
    """All read 10; each then moves it down by 1, 2 or 4."""
    training = async_replicas_test.Training(
      lambda: async_replicas.AsyncReplicasOptimizer(
        SGD(0.5),
        3,
        policies=[staleness.drop_stale(1)],
        use_locking=True,
        has_chief_statistics=has_chief_statistics,
        loss_scale=1.0,
      ),
      3,
      values=VALUES,
    )
    read = [training.pull(replica) for replica in range(3)]
    # The last is two updates late, and refused as a whole.
    admitted = [
      training.apply(r, read[r][0], _moves(r, read[r][1][1]))[0]
      for r in (2, 0, 1)
    ]
    self.assertEqual(admitted, [True, True, False])
    values = training.values()
    np.testing.assert_array_equal(values["w"], [0.0, 0.0])
    np.testing.assert_array_equal(values["moving"], [expected, expected])

  @parameterized.parameters((True, 9.0), (False, 7.0))
  def test_of_an_update_of_two(self, has_chief_statistics, expected):
    """Softsync: a mean of 1 and 5, or of the chief's 1 all its way."""
    training = async_replicas_test.Training(
      lambda: async_replicas.AsyncReplicasOptimizer(
        SGD(0.5),
        2,
        gradients_per_update=2,
        use_locking=True,
        has_chief_statistics=has_chief_statistics,
      ),
      2,
      values=VALUES,
    )
    read = [training.pull(replica) for replica in range(2)]
    for r in range(2):
      before = read[r][1][1]
      training.apply(r, read[r][0], [tf.ones([2]), (1 + 4 * r) + 0 * before])
    self.assertEqual(training.values()["moving"][0], expected)


if __name__ == "__main__":
  absltest.main()
