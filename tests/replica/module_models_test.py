"""Tests for replica.module_models."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from absl.testing import absltest
from absl.testing import parameterized

from tests.support import stores
from tf_replicas.drivers import one_machine
from tf_replicas.replica import keras_models
from tf_replicas.replica import model_replica
from tf_replicas.replica import module_models
from tf_replicas.rules.sync import sync_replicas
from tf_replicas.session import checkpoints

BATCH = 8


class Plain(tf.Module):
  """Variables of one name, a counter, and a method that is a function."""

  def __init__(self):
    super().__init__()
    self.weights = [
      tf.Variable(tf.reshape(tf.linspace(-1.0, 1.0, 12), [3, 4])),
      tf.Variable(tf.ones([4, 1])),
    ]
    self.mean = tf.Variable(tf.zeros([4]), trainable=False)
    self.calls = tf.Variable(0, trainable=False, dtype=tf.int64)
    self.note = tf.Variable("unused", trainable=False)

  @tf.function
  def __call__(self, x):
    hidden = x @ self.weights[0]
    self.mean.assign(0.5 * self.mean + 0.5 * tf.reduce_mean(hidden, axis=0))
    self.calls.assign_add(1)
    return tf.tanh(hidden) @ self.weights[1]


def _loss_fn(module, x, y):
  error = module(x) - y
  if tf.reduce_mean(y) > 1e6:  # Needs AutoGraph.
    error = tf.zeros_like(error)
  return tf.reduce_mean(error**2), {"largest": tf.reduce_max(tf.abs(error))}


def _batch():
  x = tf.reshape(tf.linspace(-2.0, 2.0, BATCH * 3), [BATCH, 3])
  return x, tf.reduce_sum(x, axis=1, keepdims=True)


def _dataset_fn(num_shards, index, start):
  del num_shards, index, start
  return tf.data.Dataset.from_tensors(_batch()).repeat()


def _values(replica):
  return [tf.identity(v) for v in replica.shared]


def _gradients(replica, values):
  """By the values given, in a function as in a driver."""
  function = tf.function(replica.gradients, autograph=False)
  return function(values, _batch())


def _driver(replica_fn):
  return one_machine.OneMachine(
    replica_fn,
    lambda: sync_replicas.SyncReplicasOptimizer(keras.optimizers.SGD(0.1), 1),
  )


class ModuleReplicaTest(stores.TestCase):
  def test_gradients_are_those_of_the_module(self):
    module = Plain()
    before = [v.numpy() for v in module.trainable_variables]
    replica = module_models.module_replica(module, _loss_fn, _dataset_fn)
    got = _gradients(replica, _values(replica))
    other = Plain()
    with tf.GradientTape() as tape:
      loss, _ = _loss_fn(other, *_batch())
    self.assertAlmostEqual(float(got.loss), float(loss), places=5)
    expected = tape.gradient(loss, other.weights)
    for one, theirs in zip(got.gradients[:2], expected, strict=True):
      np.testing.assert_allclose(one, theirs, atol=1e-5)
    self.assertEqual(int(got.num_examples), BATCH)
    for one, old in zip(module.trainable_variables, before, strict=True):
      np.testing.assert_array_equal(one, old)

  def test_they_are_computed_from_the_parameters(self):
    module = Plain()
    module(_batch()[0])  # Traces its function with its own variables.
    replica = module_models.module_replica(module, _loss_fn, _dataset_fn)
    values = _values(replica)
    values[1] = 3 * values[1]
    other = Plain()
    other.weights[1].assign(3 * other.weights[1])
    loss, _ = _loss_fn(other, *_batch())
    self.assertAlmostEqual(
      float(_gradients(replica, values).loss), float(loss), places=4
    )

  def test_paths_are_those_of_the_attributes(self):
    replica = module_models.module_replica(Plain(), _loss_fn, _dataset_fn)
    self.assertEqual(
      [v.path for v in replica.variables], ["weights/0", "weights/1"]
    )
    # A string is no number, so it is not shared.
    self.assertEqual([v.path for v in replica.statistics], ["calls", "mean"])
    self.assertEqual(replica.metrics, ("largest",))

  def test_averages_and_counters_move(self):
    module = Plain()
    with _driver(
      lambda: module_models.module_replica(module, _loss_fn, _dataset_fn)
    ) as driver:
      for _ in range(3):
        result = driver.step()
      values = driver.values()
    self.assertEqual(int(module.calls), 0)
    self.assertEqual(int(values["calls"]), 3)
    self.assertGreater(np.abs(values["mean"]).max(), 0.1)
    self.assertEqual(list(result.metrics), ["largest"])
    module_models.load_into_module(module, values)
    self.assertEqual(int(module.calls), 3)
    np.testing.assert_array_equal(module.weights[0], values["weights/0"])

  def test_towers_and_micro_batches_share_a_batch(self):
    whole = module_models.module_replica(Plain(), _loss_fn, _dataset_fn)
    cut = module_models.module_replica(
      Plain(),
      _loss_fn,
      _dataset_fn,
      devices=[stores.device(0), stores.device(1)],
      micro_batches=2,
    )
    one = _gradients(whole, _values(whole))
    other = _gradients(cut, _values(cut))
    np.testing.assert_allclose(one.gradients[0], other.gradients[0], atol=1e-5)
    self.assertEqual(int(other.num_examples), BATCH)

  def test_generators_draw_anew(self):
    class Noisy(Plain):
      def __init__(self):
        super().__init__()
        self.generator = tf.random.Generator.from_seed(1)

    def loss_fn(module, x, y):
      return tf.reduce_mean((module(x) - y + module.generator.normal([])) ** 2)

    replica = module_models.module_replica(Noisy(), loss_fn, _dataset_fn)
    values = _values(replica)
    function = tf.function(replica.gradients, autograph=False)
    losses = {float(function(values, _batch()).loss) for _ in range(4)}
    self.assertLen(losses, 4)

  def test_a_module_is_built_by_the_first_batch(self):
    class Lazy(tf.Module):
      def __init__(self):
        super().__init__()
        self.kernel = None

      def __call__(self, x):
        if self.kernel is None:
          self.kernel = tf.Variable(tf.random.normal([x.shape[1], 1]))
        return x @ self.kernel

    replica = module_models.module_replica(Lazy(), _loss_fn, _dataset_fn)
    self.assertEqual([v.shape for v in replica.variables], [[3, 1]])

  def test_a_batch_in_a_dict(self):
    def dataset_fn(num_shards, index, start):
      data = _dataset_fn(num_shards, index, start)
      return data.map(lambda x, y: {"target": y, "input": x})

    replica = module_models.module_replica(
      Plain(), lambda m, d: _loss_fn(m, d["input"], d["target"]), dataset_fn
    )
    batch = next(iter(dataset_fn(1, 0, 0)))
    got = tf.function(replica.gradients)(_values(replica), batch)
    loss, _ = _loss_fn(Plain(), *_batch())
    self.assertAlmostEqual(float(got.loss), float(loss), places=5)


class LibrariesTest(stores.TestCase):
  def test_sonnet_averages_are_those_of_one_process(self):
    snt = pytest.importorskip("sonnet", reason="needs dm-sonnet")

    class Network(snt.Module):
      def __init__(self):
        super().__init__()
        self.layer = snt.Linear(4, w_init=snt.initializers.Constant(0.3))
        self.norm = snt.BatchNorm(True, True)

      def __call__(self, x):
        return self.norm(self.layer(x), is_training=True)

    def loss_fn(module, x, y):
      return tf.reduce_mean((tf.reduce_sum(module(x), 1, True) - y) ** 2)

    plain, optimizer = Network(), snt.optimizers.Momentum(0.1, 0.9)
    for _ in range(4):
      with tf.GradientTape() as tape:
        loss = loss_fn(plain, *_batch())
      variables = plain.trainable_variables
      optimizer.apply(tape.gradient(loss, variables), variables)
    driver = one_machine.OneMachine(
      lambda: module_models.module_replica(Network(), loss_fn, _dataset_fn),
      lambda: sync_replicas.SyncReplicasOptimizer(
        snt.optimizers.Momentum(0.1, 0.9), 1
      ),
    )
    with driver:
      for _ in range(4):
        driver.step()
      trained = Network()
      trained(_batch()[0])
      module_models.load_into_module(trained, driver.values())
    for one, other in zip(plain.variables, trained.variables, strict=True):
      np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)

  @parameterized.parameters(keras, tf_keras)
  def test_keras_models(self, library):
    layers = library.layers

    def new_model():
      return library.Sequential(
        [
          library.Input([3]),
          layers.Dense(4, kernel_initializer="ones", name="hidden"),
          layers.BatchNormalization(momentum=0.5, name="norm"),
          layers.Dropout(0.0, name="dropout"),
          layers.Dense(1, kernel_initializer="ones", name="output"),
        ],
        name="model",
      )

    def loss_fn(model, x, y):
      return tf.reduce_mean((model(x, training=True) - y) ** 2)

    replica = module_models.module_replica(new_model(), loss_fn, _dataset_fn)
    got = _gradients(replica, _values(replica))
    plain = new_model()
    with tf.GradientTape() as tape:
      loss = loss_fn(plain, *_batch())
    expected = tape.gradient(loss, plain.trainable_variables)
    self.assertAlmostEqual(float(got.loss), float(loss), places=4)
    count = len(expected)
    for one, other in zip(got.gradients[:count], expected, strict=True):
      np.testing.assert_allclose(one, other, atol=1e-4)
    with _driver(
      lambda: module_models.module_replica(new_model(), loss_fn, _dataset_fn)
    ) as driver:
      driver.step()
      trained = new_model()
      module_models.load_into_module(trained, driver.values())
    np.testing.assert_allclose(
      trained.layers[1].moving_mean, plain.layers[1].moving_mean, atol=1e-4
    )

  @parameterized.product(
    library=[keras, tf_keras], optimizers=[keras, tf_keras]
  )
  def test_constraints(self, library, optimizers):
    """The only weight is pulled down, and must not become negative."""

    class Network(tf.Module):
      def __init__(self):
        super().__init__()
        self.layer = library.layers.Dense(
          1, kernel_initializer="ones", kernel_constraint="non_neg"
        )
        self.layer.build([None, 3])

    def loss_fn(module, x, y):
      del x, y
      return tf.reduce_sum(module.layer(tf.ones([1, 3])))

    driver = one_machine.OneMachine(
      lambda: module_models.module_replica(Network(), loss_fn, _dataset_fn),
      lambda: sync_replicas.SyncReplicasOptimizer(
        optimizers.optimizers.SGD(2.0), 1
      ),
    )
    with driver:
      driver.step()
      kernel, bias = map(np.asarray, driver.values().values())
    if kernel.size < bias.size:
      kernel, bias = bias, kernel
    np.testing.assert_array_equal(kernel, np.zeros([3, 1]))
    np.testing.assert_array_equal(bias, [-2.0])

  def test_tf1_model_function(self):
    v1 = tf.compat.v1

    def model_fn(x, y):
      kernel = v1.get_variable(
        "kernel", [3, 1], initializer=v1.zeros_initializer
      )
      mean = v1.get_variable(
        "mean", [], initializer=v1.zeros_initializer, trainable=False
      )
      update = mean.assign(tf.reduce_mean(x) + 1.0)
      v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, update)
      with v1.variable_scope("deep"):
        bias = v1.get_variable("bias", [1], initializer=v1.zeros_initializer)
      outputs = x @ kernel + bias
      return tf.reduce_mean((outputs - y) ** 2), {"outputs": outputs[0, 0]}

    with _driver(
      lambda: module_models.model_fn_replica(
        model_fn, _dataset_fn, micro_batches=2
      )
    ) as driver:
      losses = [driver.step().loss for _ in range(20)]
      values = driver.values()
    self.assertEqual(sorted(values), ["deep/bias", "kernel", "mean"])
    self.assertLess(losses[-1], 0.1 * losses[0])
    self.assertAlmostEqual(float(values["mean"]), 1.0, places=5)


class RefusalTest(stores.TestCase):
  def _check(self, error, words, module, loss_fn=_loss_fn):
    with self.assertRaisesRegex(error, words) as caught:
      module_models.module_replica(module, loss_fn, _dataset_fn)
    self.assertNotIn("\n", str(caught.exception))

  def test_what_is_no_module(self):
    self._check(TypeError, "`module` must be a `tf.Module`.*3", 3)
    self._check(
      TypeError, "`loss_fn` must be a function.*'mse'", Plain(), "mse"
    )

  def test_a_loss_that_does_not_depend_on_it(self):
    self._check(
      ValueError,
      "depends on none of its 2 trainable variables",
      Plain(),
      lambda m, x, y: tf.reduce_mean(x),
    )
    self._check(
      ValueError,
      "a module that has none",
      tf.Module(),
      lambda m, x, y: tf.reduce_mean(x),
    )

  def test_variables_of_others(self):
    other = tf.Variable(1.0, name="elsewhere")
    self._check(
      ValueError,
      "must use only variables of the module.*elsewhere:0",
      Plain(),
      lambda m, x, y: _loss_fn(m, x, y)[0] * other,
    )

  @parameterized.parameters(
    (lambda m, x, y: (m(x) - y)[:, 0], r"scalar.*shape \(8,\)"),
    (lambda m, x, y: (_loss_fn(m, x, y)[0], m(x)), r"\(loss, metrics\)"),
    (lambda m, x, y: (_loss_fn(m, x, y)[0], {"a": m(x)}), "scalars.*'a'"),
  )
  def test_what_is_no_loss(self, loss_fn, words):
    self._check(ValueError, words, Plain(), loss_fn)

  def test_keras_replica_names_the_function_to_use(self):
    model = tf_keras.Sequential([tf_keras.layers.Dense(1)])
    with self.assertRaisesRegex(TypeError, "use `tf_replicas.module_replica`"):
      keras_models.keras_replica(model, lambda y, o: 0.0, _dataset_fn)

  def test_a_loss_of_the_models_own_variables_is_refused_by_a_replica(self):
    module = Plain()
    replica = model_replica.Replica(
      module.trainable_variables,
      lambda parameters, x, y: _loss_fn(module, x, y)[0],
      _dataset_fn,
    )
    with self.assertRaisesRegex(ValueError, "`tf_replicas.module_replica`"):
      _gradients(replica, _values(replica))

  def test_values_of_another_module(self):
    with self.assertRaisesRegex(checkpoints.CheckpointError, "weights/0"):
      module_models.load_into_module(Plain(), {"other": np.zeros([2])})


if __name__ == "__main__":
  absltest.main()
