"""Tests for replica.keras_models."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest

import tf_replicas
from tests.support import counting_layer
from tests.support import stores
from tf_replicas.drivers import one_machine
from tf_replicas.replica import keras_models
from tf_replicas.rules.sync import sync_replicas
from tf_replicas.session import checkpoints
from tf_replicas.session import evaluation
from tf_replicas.store import moving_averages

BATCH = 32
_LOSS = keras.losses.MeanSquaredError()


def _model(*layers, seed=1):
  """The same paths each time, so that values of one fit another."""
  keras.utils.set_random_seed(seed)
  return keras.Sequential(
    [
      keras.Input([3]),
      keras.layers.Dense(8, kernel_regularizer="l2", name="hidden"),
      *layers,
      keras.layers.Dense(1, name="output"),
    ],
    name="model",
  )


def _normalization():
  return keras.layers.BatchNormalization(name="normalization", momentum=0.5)


def _dropout():
  return keras.layers.Dropout(0.5, name="dropout")


def _dataset_fn(num_shards, shard_index, start_example):
  del num_shards, shard_index, start_example

  def batch(number):
    seed = tf.stack([number, tf.constant(1, tf.int64)])
    x = tf.random.stateless_normal([BATCH, 3], seed, mean=2.0)
    return x, tf.reduce_sum(x, axis=1, keepdims=True)

  return tf.data.Dataset.range(10**6).map(batch)


def _values(variables):
  return [tf.identity(v) for v in variables]


def _state(driver):
  """All tensors of a checkpoint, by name."""
  return {name: np.asarray(v) for name, v in driver.store.state().items()}


def _first_batch():
  return next(iter(_dataset_fn(1, 0, 0)))


class KerasReplicaTest(stores.TestCase):
  def test_the_loss_and_gradient_are_those_of_keras(self):
    model = _model(_normalization())
    replica = keras_models.keras_replica(model, _LOSS, _dataset_fn)
    x, y = _first_batch()
    got = replica.gradients(_values(replica.shared), (x, y))
    with tf.GradientTape() as tape:  # This moves the model's own statistics.
      loss = _LOSS(y, model(x, training=True)) + tf.add_n(model.losses)
    expected = tape.gradient(loss, [v.value for v in model.trainable_variables])
    self.assertGreater(float(tf.add_n(model.losses)), 0.0)
    self.assertAlmostEqual(float(got.loss), float(loss), places=5)
    number = len(expected)
    for one, other in zip(got.gradients[:number], expected, strict=True):
      np.testing.assert_allclose(one, other, atol=1e-5)

  def test_statistics_move_as_keras_moves_them(self):
    model = _model(_normalization())
    replica = keras_models.keras_replica(model, _LOSS, _dataset_fn)
    before = _values(replica.statistics)
    x, y = _first_batch()
    got = replica.gradients(_values(replica.shared), (x, y))
    ways = got.gradients[len(replica.variables) :]
    self.assertEqual([len(w) for w in ways], [8, 8])
    model(x, training=True)
    for old, way, new in zip(before, ways, replica.statistics, strict=True):
      np.testing.assert_allclose(old - way, new, atol=1e-5)

  def test_dropout_differs_from_gradient_to_gradient(self):
    replica = keras_models.keras_replica(_model(_dropout()), _LOSS, _dataset_fn)
    self.assertEmpty(replica.statistics)
    values = _values(replica.shared)

    @tf.function
    def loss():
      return replica.gradients(values, _first_batch()).loss

    self.assertLen({float(loss()) for _ in range(5)}, 5)

  def test_a_loss_scale_is_taken_out_again(self):
    model = _model(_normalization())
    plain = keras_models.keras_replica(model, _LOSS, _dataset_fn)
    scale = tf_replicas.LossScale(64.0)
    scaled = keras_models.keras_replica(
      model, _LOSS, _dataset_fn, loss_scale=scale
    )
    self.assertEqual(len(scaled.shared), len(plain.shared) + 5)
    batch = _first_batch()
    expected = plain.gradients(_values(plain.shared), batch)
    got = scaled.gradients(_values(scaled.shared), batch)
    self.assertAlmostEqual(float(got.loss), float(expected.loss), places=5)
    self.assertEqual([float(move) for move in got.gradients[-5:]], [0.0] * 5)
    for one, other in zip(got.gradients[:-5], expected.gradients, strict=True):
      np.testing.assert_allclose(one, other, atol=1e-5)

  def test_an_overflow_in_float16_makes_the_update_void(self):
    model = keras.Sequential(
      [keras.Input([3]), keras.layers.Dense(1, dtype="mixed_float16")]
    )
    driver = one_machine.OneMachine(
      lambda: keras_models.keras_replica(
        model,
        _LOSS,
        _dataset_fn,
        loss_scale=tf_replicas.LossScale(2.0**30),
      ),
      lambda: sync_replicas.SyncReplicasOptimizer(keras.optimizers.SGD(0.1), 1),
    )
    with driver:
      before = _state(driver)
      driver.step()
      after = _state(driver)
      evaluation.load_into_keras(model, driver.values())  # Without the scale.
    changed = {n for n in before if not np.array_equal(before[n], after[n])}
    self.assertContainsSubset(
      {"variables/loss_scale/value", "variables/loss_scale/void"}, changed
    )
    self.assertEqual(after["variables/loss_scale/value"], 2.0**29)
    for path in (v.path for v in model.variables):
      self.assertNotIn(f"variables/{path}", changed)

  def test_a_model_without_any_of_these(self):
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    replica = keras_models.keras_replica(model, _LOSS, _dataset_fn)
    got = replica.gradients(_values(replica.shared), _first_batch())
    self.assertEqual([g.shape for g in got.gradients], [(3, 1), (1,)])

  def test_its_loss_and_its_layers_may_need_autograph(self):
    def mapped(row):
      if tf.reduce_sum(row) > 1e6:
        row = tf.zeros_like(row)
      return row

    def loss(labels, outputs):
      total = _LOSS(labels, outputs)
      if total > 1e6:
        total = tf.zeros_like(total)
      return total

    class Mapping(keras.layers.Layer):
      def call(self, inputs):
        return tf.map_fn(mapped, inputs)

    expected = keras_models.keras_replica(_model(), _LOSS, _dataset_fn)
    replica = keras_models.keras_replica(_model(Mapping()), loss, _dataset_fn)
    values = _values(replica.shared)

    @tf.function(autograph=False)
    def losses():
      return [
        r.gradients(values, _first_batch()).loss for r in (expected, replica)
      ]

    np.testing.assert_allclose(*losses(), rtol=1e-6)

  def test_its_public_name_is_the_function(self):
    for _ in range(2):
      self.assertIs(tf_replicas.keras_replica, keras_models.keras_replica)

  def test_a_model_that_is_not_built(self):
    model = keras.Sequential([keras.layers.Dense(1)])
    with self.assertRaisesRegex(ValueError, "`model` must be built"):
      keras_models.keras_replica(model, _LOSS, _dataset_fn)

  def test_a_model_whose_call_has_no_training_argument(self):
    class Plain(keras.Model):
      def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

      def call(self, inputs):
        return self.dense(inputs)

    model = Plain()
    x, y = _first_batch()
    model(x)
    replica = keras_models.keras_replica(model, _LOSS, _dataset_fn)
    got = replica.gradients(_values(replica.shared), (x, y))
    self.assertAlmostEqual(float(got.loss), float(_LOSS(y, model(x))), places=5)

  def test_inputs_in_a_dict(self):
    inputs = {name: keras.Input([3], name=name) for name in "ab"}
    outputs = keras.layers.Dense(1)(inputs["a"] + inputs["b"])
    model = keras.Model(inputs, outputs)
    replica = keras_models.keras_replica(model, _LOSS, _dataset_fn)
    x, y = _first_batch()
    x = {"a": x, "b": 2 * x}
    got = replica.gradients(_values(replica.shared), (x, y))
    self.assertAlmostEqual(float(got.loss), float(_LOSS(y, model(x))), places=5)
    self.assertEqual(int(got.num_examples), BATCH)

  def test_metrics_are_means_of_what_was_applied(self):
    def mean_error(labels, outputs):
      return tf.reduce_mean(tf.abs(labels - outputs))

    metrics = {"error": mean_error, "nan": lambda y, o: tf.constant(np.nan)}
    for layers in ([], [_normalization()]):
      model = _model(*layers)
      replica = keras_models.keras_replica(
        model, _LOSS, _dataset_fn, metrics=metrics
      )
      driver = one_machine.OneMachine(
        lambda replica=replica: replica,
        lambda: sync_replicas.SyncReplicasOptimizer(
          keras.optimizers.SGD(0.01), 1
        ),
      )
      expected = mean_error(
        _first_batch()[1], model(_first_batch()[0], training=True)
      )
      with driver:
        first, second = driver.step(), driver.step()
        self.assertNotIn("metrics/sums", driver.values())
      self.assertEqual(list(first.metrics), ["error"])  # What is a number.
      self.assertAlmostEqual(first.metrics["error"], float(expected), places=5)
      self.assertNotEqual(first.metrics, second.metrics)

  def test_integers_may_be_read_but_not_assigned(self):
    def gradients(counts):
      model = _model(counting_layer.Counting(counts), _dropout())
      replica = keras_models.keras_replica(model, _LOSS, _dataset_fn)
      return replica.gradients(_values(replica.shared), _first_batch())

    gradients(counts=False)
    with self.assertRaisesRegex(ValueError, "only variables of floating dtype"):
      gradients(counts=True)

  def test_a_loss_by_name_and_another_model_are_refused(self):
    with self.assertRaisesRegex(TypeError, "`loss` must be a fun.*'mse'"):
      keras_models.keras_replica(_model(), "mse", _dataset_fn)
    with self.assertRaisesRegex(TypeError, "Keras 3.*tensorflow.*Module"):
      keras_models.keras_replica(tf.Module(), _LOSS, _dataset_fn)

  def test_a_loss_per_example_is_refused(self):
    replica = keras_models.keras_replica(
      _model(), keras.losses.mean_squared_error, _dataset_fn
    )
    with self.assertRaisesRegex(ValueError, r"scalar.*shape \(32,\)"):
      replica.gradients(_values(replica.shared), _first_batch())


class TrainedTest(stores.TestCase):
  def setUp(self):
    super().setUp()
    self.model = _model(_normalization(), _dropout())
    self.driver = one_machine.OneMachine(
      lambda: keras_models.keras_replica(self.model, _LOSS, _dataset_fn),
      lambda: sync_replicas.SyncReplicasOptimizer(
        keras.optimizers.Adam(0.02),
        1,
        variable_averages=moving_averages.MovingAverages(0.9),
      ),
    )

  def test_what_was_trained_serves_in_another_model(self):
    first = self.driver.values()
    with self.driver as driver:
      for _ in range(300):
        driver.step()
      values = driver.values()
      averages = driver.values(averaged=True)
    self.assertEqual(values.keys(), averages.keys())
    np.testing.assert_array_equal(
      first["model/hidden/kernel"], self.model.layers[0].kernel
    )
    self.assertGreater(values["model/normalization/moving_mean"].std(), 0.1)
    self.assertGreater(
      np.abs(
        values["model/hidden/kernel"] - averages["model/hidden/kernel"]
      ).max(),
      0.0,
    )
    x, y = _first_batch()
    losses = []
    for trained in (first, values, averages):
      other = _model(_normalization(), _dropout(), seed=2)
      evaluation.load_into_keras(other, trained)
      losses.append(float(_LOSS(y, other(x, training=False))))
    self.assertLess(losses[1], 0.2 * losses[0])
    self.assertLess(losses[2], 0.2 * losses[0])

  def test_values_of_another_model_are_refused(self):
    other = _model()
    with self.assertRaisesRegex(checkpoints.CheckpointError, "normalization"):
      evaluation.load_into_keras(other, self.driver.values())


if __name__ == "__main__":
  absltest.main()
