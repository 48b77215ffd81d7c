"""`fit` in one process: against Keras, with callbacks, resumed, refused."""

import functools
import json
import os
import tempfile
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tf_replicas
from tests.fitting import models
from tests.support import counting_layer
from tests.support import stores
from tf_replicas.drivers import one_machine

_QUIET = {"batch_size": 8, "shuffle": False, "verbose": 0}


def _fit(case, **arguments):
  case = models.CASES[case]
  return tf_replicas.fit(
    case.model_fn, **{**case.arguments, **_QUIET, **arguments}
  )


def _keras(case, **arguments):
  case = models.CASES[case]
  model = case.model_fn()
  return model.fit(**{**case.arguments, **_QUIET, **arguments})


@functools.cache
def _two_epochs_of_keras(case):
  """What many tests compare with; do not change its model."""
  return _keras(case, epochs=2)


class _Batches(keras.utils.PyDataset):
  def __init__(self, batches):
    super().__init__(workers=2)
    self._batches = batches
    self.ended = 0

  def __len__(self):
    return len(self._batches)

  def __getitem__(self, index):
    return self._batches[index]

  def on_epoch_end(self):
    self.ended += 1


class _PredictAtTheEnd(keras.callbacks.Callback):
  def __init__(self, x):
    super().__init__()
    self.x, self.predicted = x, None

  def on_train_end(self, logs=None):
    self.predicted = self.model.predict(self.x, verbose=0)


class _Halving(keras.optimizers.schedules.LearningRateSchedule):
  """A schedule that cannot be serialized."""

  def __call__(self, step):
    """Halves the rate after each step."""
    return 0.1 * 0.5 ** keras.ops.cast(step, "float32")


def _scaled_error(factor, y_true, y_pred):
  return factor * keras.ops.mean((y_true - y_pred) ** 2, axis=-1)


class _Error:
  """A function that cannot be serialized."""

  def __call__(self, y_true, y_pred):
    """Returns the largest error of each example."""
    return keras.ops.max(abs(y_true - y_pred), axis=-1)


class _TableCase(stores.TestCase):
  """Data, and a model with a table that this process holds."""

  OPTIONS = {}  # Of the optimizer.

  def _data(self):
    rng = np.random.default_rng(2)
    y = rng.normal(size=(32, 1)).astype("float32")
    return rng.integers(0, 9, (32, 3)), y

  def _model(self, embedding=tf_replicas.Embedding):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
      [
        keras.Input([3], dtype="int64"),
        embedding(20, 2, embeddings_initializer="ones"),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(1),
      ]
    )
    model.compile(keras.optimizers.SGD(0.5, **self.OPTIONS), "mse")
    return model


class AveragedTablesTest(_TableCase):
  """An optimizer with `use_ema`."""

  OPTIONS = {"use_ema": True, "ema_momentum": 0.5}

  def test_equal_those_of_keras(self):
    x, y = self._data()
    callback = _PredictAtTheEnd(x)
    ours = tf_replicas.fit(
      self._model, x, y, callbacks=[callback], **_QUIET
    ).model
    theirs = self._model(keras.layers.Embedding)
    theirs.fit(x, y, **_QUIET)
    expected = theirs.predict(x, verbose=0)
    np.testing.assert_allclose(callback.predicted, expected, rtol=1e-4)
    with self.assertRaisesRegex(ValueError, "`averaged` must be True"):
      tf_replicas.load_tables(ours)
    tf_replicas.load_tables(ours, averaged=True)
    for one, other in zip(
      ours.get_weights(), theirs.get_weights(), strict=True
    ):
      np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(ours.predict(x, verbose=0), expected, rtol=1e-4)


class TablesTest(_TableCase):
  """A callback needs the rows during the training."""

  @parameterized.parameters(
    "on_epoch_end", "on_epoch_begin", "on_train_batch_end", "on_test_end"
  )
  def test_callbacks_load_them_in_every_epoch(self, hook):
    x, y = self._data()
    arguments = {"epochs": 3, "validation_data": (x[:16], y[:16]), **_QUIET}

    def train(fit, *, loads):
      seen = []

      class Rows(keras.callbacks.Callback):
        def note(self, *_, **__):
          if loads:
            tf_replicas.load_tables(self.model)
          seen.append(self.model.get_weights())

      callback = Rows()
      setattr(callback, hook, callback.note)
      return fit(x, y, callbacks=[callback], **arguments), seen

    ours, seen = train(
      functools.partial(tf_replicas.fit, self._model), loads=True
    )
    theirs, expected = train(
      self._model(keras.layers.Embedding).fit, loads=False
    )
    for key, values in theirs.history.items():
      np.testing.assert_allclose(ours.history[key], values, rtol=1e-4)
    self.assertEqual(len(seen), len(expected))
    for found, wanted in zip(sum(seen, []), sum(expected, []), strict=True):
      np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    self.assertEqual(ours.model.get_weights()[0].shape, (0, 2))
    tf_replicas.load_tables(ours.model)
    np.testing.assert_allclose(
      ours.model.predict(x, verbose=0),
      theirs.model.predict(x, verbose=0),
      rtol=1e-4,
    )

  @parameterized.parameters(
    ("SwapEMAWeights", keras.callbacks.SwapEMAWeights),
    (
      r"EarlyStopping\(restore_best_weights=True\)",
      lambda: keras.callbacks.EarlyStopping("loss", restore_best_weights=True),
    ),
    ("ModelCheckpoint", lambda: keras.callbacks.ModelCheckpoint("x.keras")),
    ("BackupAndRestore", lambda: keras.callbacks.BackupAndRestore("x")),
  )
  def test_refuses_callbacks_that_keep_weights(self, words, new_callback):
    with self.assertRaisesRegex(
      ValueError, f"must not have `{words}`.*load_tables"
    ):
      tf_replicas.fit(
        self._model, *self._data(), callbacks=[new_callback()], **_QUIET
      )

  def test_early_stopping_keeps_the_last_weights(self):
    callbacks = [keras.callbacks.EarlyStopping("loss", min_delta=9.0)]
    history = tf_replicas.fit(
      self._model, *self._data(), callbacks=callbacks, epochs=9, **_QUIET
    )
    self.assertLen(history.epoch, 2)


class AgainstKerasTest(stores.TestCase):
  """What Keras trains in one process, to float tolerance."""

  @parameterized.parameters(sorted(models.CASES))
  def test_weights_metrics_and_optimizer(self, name):
    case = models.CASES[name]
    ours, theirs = _fit(name, epochs=2), _two_epochs_of_keras(name)
    self.assertEqual(sorted(ours.history), sorted(theirs.history))
    for key, values in theirs.history.items():
      np.testing.assert_allclose(
        ours.history[key], values, rtol=case.tolerance, atol=case.tolerance
      )
    for one, other in zip(
      ours.model.get_weights(), theirs.model.get_weights(), strict=True
    ):
      np.testing.assert_allclose(one, other, atol=case.tolerance)
    for one, other in zip(
      models.optimizer_variables(ours.model),
      models.optimizer_variables(theirs.model),
      strict=True,
    ):
      np.testing.assert_allclose(one, other, atol=case.tolerance)

  def test_loss_scale(self):
    """Void updates change nothing but the scale; Adam does not count them."""
    x, y = models.CASES["half"].arguments.values()
    ours = tf_replicas.fit(
      models.scaled_model, x, y, epochs=4, **_QUIET
    ).model.optimizer
    theirs = models.scaled_model()
    theirs.fit(x, y, epochs=4, **_QUIET)
    theirs = theirs.optimizer
    scale = float(theirs.dynamic_scale)
    self.assertLess(scale, theirs.initial_scale)
    self.assertEqual(float(ours.dynamic_scale), scale)
    iterations = int(theirs.inner_optimizer.iterations)
    self.assertBetween(iterations, 4, 23)  # Of 24 updates, some are void.
    self.assertEqual(int(ours.inner_optimizer.iterations), iterations)
    self.assertEqual(int(ours.step_counter), int(theirs.step_counter))
    for one, other in zip(
      ours.inner_optimizer.variables,
      theirs.inner_optimizer.variables,
      strict=True,
    ):
      np.testing.assert_allclose(one, other, atol=1e-3)

  @parameterized.parameters(False, True)
  def test_validation(self, is_function):
    case = models.CASES["momentum"]
    data = (case.arguments["x"][:20], case.arguments["y"][:20])
    given = (lambda: data) if is_function else data
    ours = _fit("momentum", epochs=3, validation_data=given)
    theirs = _keras("momentum", epochs=3, validation_data=data)
    self.assertIn("val_accuracy", ours.history)
    for key, values in theirs.history.items():
      np.testing.assert_allclose(ours.history[key], values, rtol=1e-5)

  @parameterized.parameters(
    ({"validation_split": 0.3},),
    ({"validation_split": 0.3, "validation_freq": 2},),
    ({"validation_split": 0.3, "validation_freq": [1, 3]},),
    ({"steps_per_epoch": 3},),  # Of six: every second epoch goes on.
  )
  def test_arguments_of_keras(self, more):
    ours = _fit("momentum", epochs=3, **more)
    theirs = _keras("momentum", epochs=3, **more)
    self.assertEqual(sorted(ours.history), sorted(theirs.history))
    for key, values in theirs.history.items():
      np.testing.assert_allclose(ours.history[key], values, rtol=1e-5)

  def test_a_metric_with_a_number_for_each_class(self):
    def model_fn():
      keras.utils.set_random_seed(7)
      model = keras.Sequential(
        [keras.Input([5]), keras.layers.Dense(3, activation="softmax")]
      )
      metrics = [keras.metrics.F1Score()]
      model.compile("sgd", "categorical_crossentropy", metrics=metrics)
      return model

    x, y = models.CASES["momentum"].arguments.values()
    data = {"x": x, "y": np.eye(3, dtype=np.float32)[y]}
    data["validation_data"] = (data["x"][:20], data["y"][:20])
    ours = tf_replicas.fit(model_fn, **data, epochs=2, **_QUIET).history
    theirs = model_fn().fit(**data, epochs=2, **_QUIET).history
    self.assertEqual(sorted(ours), sorted(theirs))
    self.assertEqual(np.shape(ours["f1_score"]), (2, 3))
    for key, values in theirs.items():
      np.testing.assert_allclose(ours[key], values, rtol=1e-5)

  def test_validation_evaluates_as_many_batches_as_it_should(self):
    """The calls of the training function make three batches each here."""
    x = np.arange(8, dtype=np.float32)[:, np.newaxis] * np.ones(4, np.float32)
    settings = {"validation_data": (x, _Y), "validation_steps": 2}
    history = tf_replicas.fit(
      _with(optimizer=keras.optimizers.SGD(0.0)),
      *(x, _Y),
      steps_per_epoch=300,
      **{**_QUIET, **settings, "batch_size": 1},
    )
    model = history.model
    self.assertEqual(model.steps_per_execution, 1)
    expected = np.mean((model(x[:2]) - _Y[:2]) ** 2)
    for found in (
      history.history["val_loss"][0],
      model.evaluate(x, _Y, batch_size=1, steps=2, verbose=0),
    ):
      self.assertAlmostEqual(found, expected, delta=1e-4 * expected)

  @parameterized.parameters((np.int64(2),), ((2,),), ({2},), (range(2, 4),))
  def test_validation_freq(self, given):
    """Keras itself takes integers of Python and lists only."""
    ours = _fit(
      "momentum", validation_split=0.3, epochs=2, validation_freq=given
    )
    self.assertLen(ours.history["val_loss"], 1)

  def test_metrics_of_one_name_at_several_outputs(self):
    """Their variables have the same paths."""

    def model_fn():
      keras.utils.set_random_seed(7)
      inputs = keras.Input([4])
      outputs = {
        name: keras.layers.Dense(1, name=name)(inputs) for name in ("a", "b")
      }
      model = keras.Model(inputs, outputs)
      losses = dict.fromkeys(outputs, "mse")
      metrics = {name: ["mae", "mse"] for name in outputs}
      model.compile("sgd", losses, metrics=metrics)
      return model

    x = models.CASES["own_step"].arguments["x"]
    y = {"a": x[:, :1], "b": x[:, 1:2] * 3.0}
    ours = tf_replicas.fit(model_fn, x, y, epochs=2, **_QUIET)
    theirs = model_fn().fit(x, y, epochs=2, **_QUIET)
    self.assertIn("b_mae", ours.history)
    self.assertEqual(sorted(ours.history), sorted(theirs.history))
    for key, values in theirs.history.items():
      np.testing.assert_allclose(ours.history[key], values, rtol=1e-5)

  @parameterized.parameters("between_graph", "mirrored")
  def test_a_metric_that_is_not_finite_leaves_the_batch_out(self, replication):
    """Examples 8 to 15, of the second batch, have an infinite value."""
    case = models.CASES["own_step"]
    y = case.arguments["y"].copy()
    y[8:16] = 0.0

    def model_fn():
      keras.utils.set_random_seed(7)
      model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])

      def inverse(y_true, y_pred):
        return tf.abs(1 / y_true) + 0 * y_pred

      model.compile("sgd", "mse", metrics=["mae", inverse])
      return model

    arguments = {"x": case.arguments["x"], "y": y, "replication": replication}
    ours = tf_replicas.fit(model_fn, **arguments, **_QUIET).history
    del arguments["replication"]
    theirs = model_fn().fit(**arguments, **_QUIET).history
    for key in ("loss", "mae"):
      np.testing.assert_allclose(ours[key], theirs[key], rtol=1e-5)
    expected = np.mean(np.abs(1 / np.delete(y, slice(8, 16), axis=0)))
    np.testing.assert_allclose(ours["inverse"], [expected], rtol=1e-5)

  def test_integers_that_a_layer_reads(self):
    model_fn = _counting(False)
    ours = tf_replicas.fit(model_fn, _X, _Y, **_QUIET).history
    theirs = model_fn().fit(_X, _Y, **_QUIET).history
    np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-5)

  def test_data_set(self):
    case = models.CASES["momentum"]
    data = tf.data.Dataset.from_tensor_slices(
      (case.arguments["x"], case.arguments["y"])
    ).batch(8)
    ours = tf_replicas.fit(case.model_fn, data, epochs=2, verbose=0)
    theirs = _two_epochs_of_keras("momentum")
    np.testing.assert_allclose(ours.history["loss"], theirs.history["loss"])

  def test_data_set_of_unknown_length(self):
    case = models.CASES["momentum"]
    x, y = case.arguments["x"], case.arguments["y"]
    data = tf.data.Dataset.from_generator(
      lambda: zip(x, y, strict=True),
      output_signature=(tf.TensorSpec([5]), tf.TensorSpec([], tf.int64)),
    ).batch(8)
    ours = tf_replicas.fit(
      case.model_fn, data, epochs=2, steps_per_epoch=6, verbose=0
    )
    theirs = _two_epochs_of_keras("momentum")
    np.testing.assert_allclose(ours.history["loss"], theirs.history["loss"])

  @parameterized.parameters("py dataset", "generator", "iterator")
  def test_batches_of_python_code(self, kind):
    case = models.CASES["momentum"]
    x, y = case.arguments["x"], case.arguments["y"]
    batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, len(x), 8)]
    arguments = {"x": _Batches(batches), "steps_per_epoch": None}
    if kind != "py dataset":
      arguments = {"x": iter(batches * 2), "steps_per_epoch": 6}
    if kind == "generator":
      arguments["x"] = (batch for batch in batches * 2)
    ours = tf_replicas.fit(case.model_fn, **arguments, epochs=2, verbose=0)
    theirs = _two_epochs_of_keras("momentum")
    np.testing.assert_allclose(
      ours.history["loss"], theirs.history["loss"], rtol=1e-6
    )
    if kind == "py dataset":
      self.assertGreaterEqual(arguments["x"].ended, 1)

  def test_excluded_from_weight_decay(self):
    """The bias and the kernel of the second layer."""

    def model_fn():
      keras.utils.set_random_seed(7)
      layers = [keras.layers.Dense(3), keras.layers.Dense(1)]
      model = keras.Sequential([keras.Input([4]), *layers])
      optimizer = keras.optimizers.SGD(0.1, weight_decay=0.5)
      optimizer.exclude_from_weight_decay([layers[1].kernel], ["bias"])
      model.compile(optimizer, "mse")
      return model

    ours = tf_replicas.fit(model_fn, _X, _Y, **_QUIET).model.get_weights()
    theirs = model_fn()
    theirs.fit(_X, _Y, **_QUIET)
    for one, other in zip(ours, theirs.get_weights(), strict=True):
      np.testing.assert_allclose(one, other, rtol=1e-5)

  @parameterized.parameters(
    ({"steps_per_execution": 4},),
    ({"optimizer": lambda: keras.optimizers.SGD(_Halving())},),
    ({"optimizer": lambda: keras.optimizers.SGD(lambda: 0.1)},),
    ({"loss": functools.partial(_scaled_error, 2.0)},),
    ({"metrics": [_Error()]},),
    ({"weighted_metrics": ["mae"]},),
    ({"loss": ["mse"], "loss_weights": [0.5]},),
  )
  def test_arguments_of_compile(self, more):
    data = _X * np.arange(8.0)[:, np.newaxis], _Y
    arguments = {**_QUIET, "batch_size": 2, "epochs": 2}

    def model_fn():
      keras.utils.set_random_seed(7)
      made = dict(more)
      if callable(optimizer := made.get("optimizer")):
        made["optimizer"] = optimizer()
      return _with(**made)()

    ours = tf_replicas.fit(model_fn, *data, **arguments).history
    theirs = model_fn().fit(*data, **arguments).history
    self.assertEqual(sorted(ours), sorted(theirs))
    for key, values in theirs.items():
      np.testing.assert_allclose(ours[key], values, rtol=1e-5)

  def test_function_of_the_input_context(self):
    case = models.CASES["momentum"]

    def data_fn(context):
      self.assertEqual(context.num_input_pipelines, 1)
      x, y = case.arguments["x"], case.arguments["y"]
      return tf.data.Dataset.from_tensor_slices((x, y)).batch(8)

    ours = tf_replicas.fit(
      case.model_fn, data_fn, epochs=2, steps_per_epoch=6, verbose=0
    )
    theirs = _two_epochs_of_keras("momentum")
    np.testing.assert_allclose(ours.history["loss"], theirs.history["loss"])

  def test_a_second_fit_begins_anew(self):
    first, second = _fit("momentum"), _fit("momentum")
    self.assertEqual(first.history, second.history)

  def test_trained_model_evaluates_and_predicts(self):
    case = models.CASES["momentum"]
    model = _fit("momentum").model
    self.assertEqual(model.predict(case.arguments["x"], verbose=0).shape[1], 3)
    x, y = case.arguments["x"], case.arguments["y"]
    model.fit(x, y, verbose=0)  # By Keras alone, as before.

  def test_shuffles_anew_in_every_epoch(self):
    seen = []
    case = models.CASES["momentum"]

    class Data(keras.callbacks.Callback):
      def on_epoch_end(self, epoch, logs=None):
        seen.append(logs["loss"])

    frozen = case.arguments | {"callbacks": [Data()], "epochs": 2}
    tf_replicas.fit(case.model_fn, **frozen, verbose=0, batch_size=8)
    one = list(seen)
    tf_replicas.fit(case.model_fn, **frozen, verbose=0, batch_size=8, seed=1)
    self.assertNotAlmostEqual(one[0], seen[2], places=6)


class SeveralDevicesTest(stores.TestCase):
  """44 examples by 8, which 3 devices cannot share out evenly."""

  @parameterized.parameters(
    ("between_graph", "constrained"),
    ("between_graph", "several_outputs"),
    ("mirrored", "own_step"),
    ("mirrored", "recurrent"),
  )
  def test_train_as_one(self, replication, name):
    self._assert_train_as_one(replication, name)

  @pytest.mark.exhaustive
  @parameterized.parameters(
    ("between_graph", "momentum"),
    ("between_graph", "own_step"),
    ("between_graph", "recurrent"),
    ("mirrored", "constrained"),
    ("mirrored", "momentum"),
    ("mirrored", "several_outputs"),
  )
  def test_more_train_as_one(self, replication, name):
    self._assert_train_as_one(replication, name)

  def _assert_train_as_one(self, replication, name):
    case = models.CASES[name]
    # Keras' means of the losses by output are means over batches, or here over
    # pieces, and not over examples: these must be equally large.
    count = 2 if name == "several_outputs" else 3
    devices = [stores.device(i) for i in range(count)]
    ours = _fit(name, epochs=2, replication=replication, devices=devices)
    theirs = _two_epochs_of_keras(name)
    self.assertEqual(sorted(ours.history), sorted(theirs.history))
    for key, values in theirs.history.items():
      np.testing.assert_allclose(
        ours.history[key], values, rtol=1e-4, atol=1e-4
      )
    for one, other in zip(
      [*ours.model.get_weights(), *models.optimizer_variables(ours.model)],
      [*theirs.model.get_weights(), *models.optimizer_variables(theirs.model)],
      strict=True,
    ):
      np.testing.assert_allclose(one, other, atol=case.tolerance)

  @parameterized.parameters(2, 3)
  def test_batches_of_a_static_size(self, count):
    """40 examples by 8, of which no batch is smaller."""
    data = {k: v[:40] for k, v in models.CASES["momentum"].arguments.items()}
    ours = _fit(
      "momentum", **data, devices=[stores.device(i) for i in range(count)]
    )
    theirs = _keras("momentum", **data)
    for key, values in theirs.history.items():
      np.testing.assert_allclose(ours.history[key], values, rtol=1e-4)

  @parameterized.parameters("between_graph", "mirrored")
  def test_what_callbacks_assign_reaches_every_device(self, replication):
    class Change(keras.callbacks.Callback):
      def on_epoch_end(self, epoch, logs=None):
        for variable in self.model.trainable_variables:
          variable.assign(variable * 0.5)
        self.model.optimizer.learning_rate = 0.05

    arguments = {"epochs": 3}
    ours = _fit(
      "momentum",
      callbacks=[Change()],
      replication=replication,
      devices=[stores.device(i) for i in range(2)],
      **arguments,
    )
    theirs = _keras("momentum", callbacks=[Change()], **arguments)
    for key, values in theirs.history.items():
      np.testing.assert_allclose(ours.history[key], values, rtol=1e-4)


class _Directories(stores.TestCase):
  """Gives tests a directory of their own."""

  def directory(self):
    """A new directory, deleted after the test."""
    directory = tempfile.TemporaryDirectory()
    self.addCleanup(directory.cleanup)
    return directory.name


class Sampling(keras.layers.Layer):
  """Draws from the distribution that the encoder describes."""

  def __init__(self):
    """Makes the seed, a state of the layer."""
    super().__init__()
    self.seed_generator = keras.random.SeedGenerator(1)

  def call(self, inputs):
    """Maps mean and logarithm of the variance to a sample."""
    mean, log_var = inputs
    noise = keras.random.normal(keras.ops.shape(mean), seed=self.seed_generator)
    return mean + keras.ops.exp(0.5 * log_var) * noise


class Autoencoder(keras.Model):
  """A variational autoencoder without `call`, as in Keras' examples."""

  def __init__(self):
    """Makes encoder, decoder and the trackers of two losses."""
    super().__init__()
    inputs = keras.Input([8])
    moments = [keras.layers.Dense(2)(inputs) for _ in range(2)]
    self.encoder = keras.Model(inputs, [*moments, Sampling()(moments)])
    self.decoder = keras.Sequential([keras.Input([2]), keras.layers.Dense(8)])
    self.trackers = [keras.metrics.Mean(name=name) for name in ("all", "kl")]

  @property
  def metrics(self):
    """The trackers."""
    return self.trackers

  def train_step(self, data):
    """Takes the inputs alone, without a tuple around them."""
    with tf.GradientTape() as tape:
      mean, log_var, sample = self.encoder(data)
      error = keras.ops.mean((self.decoder(sample) - data) ** 2)
      kl = mean**2 + keras.ops.exp(log_var) - 1 - log_var
      kl = 0.01 * keras.ops.mean(kl)
      loss = error + kl
    gradients = tape.gradient(loss, self.trainable_weights)
    self.optimizer.apply_gradients(
      zip(gradients, self.trainable_weights, strict=True)
    )
    for tracker, value in zip(self.trackers, [loss, kl], strict=True):
      tracker.update_state(value)
    return {"loss": self.trackers[0].result(), "kl": self.trackers[1].result()}


class OtherModelsTest(stores.TestCase):
  """Models of Keras' examples, which draw random numbers or look words up."""

  def test_variational_autoencoder(self):
    def model_fn():
      model = Autoencoder()
      model.compile(keras.optimizers.Adam(0.01))
      return model

    x = np.random.default_rng(0).normal(size=[64, 2]) @ np.ones([2, 8])
    history = tf_replicas.fit(
      model_fn, x, batch_size=16, epochs=30, verbose=0
    ).history
    self.assertEqual(sorted(history), ["kl", "loss"])
    self.assertLess(history["loss"][-1], 0.5 * history["loss"][0])
    for kl, loss in zip(history["kl"], history["loss"], strict=True):
      self.assertBetween(kl, 0, loss)

  def test_preprocessing_layers(self):
    words = np.array([["red"], ["green"], ["blue"]] * 16)

    def model_fn():
      lookup = keras.layers.StringLookup(
        vocabulary=["red", "green", "blue"], output_mode="one_hot"
      )
      inputs = keras.Input([1], dtype="string")
      outputs = keras.layers.Dense(1, activation="sigmoid")(lookup(inputs))
      model = keras.Model(inputs, outputs)
      model.compile(
        keras.optimizers.Adam(0.1),
        "binary_crossentropy",
        metrics=["accuracy"],
      )
      return model

    history = tf_replicas.fit(
      model_fn, words, words == "red", batch_size=16, epochs=10, verbose=0
    ).history
    self.assertEqual(history["accuracy"][-1], 1.0)

  def test_layers_made_in_build_have_the_same_names_every_time(self):
    class Late(keras.Model):
      def build(self, input_shape):
        self.inner = keras.layers.Dense(1)
        self.inner.build(input_shape)

      def call(self, inputs):
        return self.inner(inputs)

    def model_fn():
      model = Late()
      model.compile("sgd", "mse")
      return model

    paths = []
    for _ in range(2):
      model = tf_replicas.fit(model_fn, _X, _Y, **_QUIET).model
      paths.append([v.path for v in model.variables])
    self.assertEqual(*paths)

  @parameterized.parameters(False, True)
  def test_gradients_are_applied_without_their_variables(self, is_built):
    """To the variables for which the optimizer was built."""

    def apply(model, data):
      with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(data[0]) ** 2)
      model.optimizer.apply(tape.gradient(loss, model.trainable_variables))
      return {"loss": loss}

    def model_fn(is_built=is_built):
      keras.utils.set_random_seed(7)
      model = OwnStep(apply)
      model(tf.zeros([1, 4]))
      model.compile(keras.optimizers.Adam(0.01))
      if is_built:
        model.optimizer.build(model.trainable_variables)
      return model

    ours = tf_replicas.fit(model_fn, _X, _Y, epochs=2, **_QUIET).model
    theirs = model_fn(is_built=True)
    theirs.fit(_X, _Y, epochs=2, **_QUIET)
    for one, other in zip(
      ours.get_weights(), theirs.get_weights(), strict=True
    ):
      np.testing.assert_allclose(one, other, atol=1e-5)


class CallbacksTest(_Directories):
  """Keras' callbacks run as in `keras.Model.fit`."""

  def _both(self, new_callbacks, epochs=4):
    arguments = {"epochs": epochs}
    ours = _fit("momentum", callbacks=new_callbacks(), **arguments)
    theirs = _keras("momentum", callbacks=new_callbacks(), **arguments)
    self.assertEqual(sorted(ours.history), sorted(theirs.history))
    for key, values in theirs.history.items():
      np.testing.assert_allclose(ours.history[key], values, rtol=1e-5)
    return ours

  def test_early_stopping_restores_the_best_weights(self):
    ours = self._both(
      lambda: [
        keras.callbacks.EarlyStopping(
          "loss", min_delta=10.0, patience=1, restore_best_weights=True
        )
      ]
    )
    self.assertLen(ours.epoch, 2)

  def test_averaged_weights_validate(self):
    def fit(train):
      x, y = models.CASES["averaged"].arguments.values()
      return train(
        "averaged",
        epochs=2,
        validation_data=(x[:20], y[:20]),
        callbacks=[keras.callbacks.SwapEMAWeights(swap_on_epoch=True)],
      ).history

    ours, theirs = fit(_fit), fit(_keras)
    for key, values in theirs.items():
      np.testing.assert_allclose(ours[key], values, rtol=1e-5)

  def test_rates(self):
    self._both(
      lambda: [
        keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (1 + epoch)),
        keras.callbacks.ReduceLROnPlateau("loss", min_delta=1.0, patience=1),
      ]
    )

  def test_batches_and_weights(self):
    class Clip(keras.callbacks.Callback):
      """Sees every batch, and assigns weights."""

      batches = 0

      def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        kernel = self.model.trainable_variables[0]
        kernel.assign(keras.ops.clip(kernel, -0.3, 0.3))

    clips = []

    def new():
      clips.append(Clip())
      return [clips[-1]]

    self._both(new)
    self.assertEqual([clip.batches for clip in clips], [24, 24])

  def test_a_function_sees_the_weights_after_each_batch(self):
    kernels = []

    def new():
      seen = []

      def note(batch, logs):
        seen.append(np.asarray(callback.model.trainable_variables[0]))

      callback = keras.callbacks.LambdaCallback(on_train_batch_end=note)
      kernels.append(seen)
      return [callback]

    self._both(new, epochs=2)
    self.assertLen(kernels[0], 12)
    np.testing.assert_allclose(*kernels, atol=1e-5)

  def test_a_callback_of_keras_with_an_own_hook_sees_each_batch(self):
    """Keras' own hook would do nothing, as it writes after an epoch."""
    directory = self.enter_context(tempfile.TemporaryDirectory())
    kernels = []

    class Noting(keras.callbacks.ModelCheckpoint):
      def on_train_batch_end(self, batch, logs=None):
        kernels[-1].append(np.asarray(self.model.trainable_variables[0]))

    def new():
      kernels.append([])
      return [Noting(directory + "/{epoch}.keras")]

    self._both(new, epochs=2)
    self.assertLen(kernels[0], 12)
    np.testing.assert_allclose(*kernels, atol=1e-5)

  @parameterized.parameters(False, True)
  def test_averaged_weights_validate_and_change_nothing(self, swap_on_epoch):
    x, y = models.CASES["averaged"].arguments.values()
    settings = {"epochs": 4, "validation_data": (x[:20], y[:20])}
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=swap_on_epoch)
    with_swaps = _fit("averaged", **settings, callbacks=[swap])
    without = _fit("averaged", **settings)
    self.assertEqual(with_swaps.history["loss"], without.history["loss"])
    self.assertNotEqual(
      with_swaps.history["val_loss"], without.history["val_loss"]
    )

  def test_an_epoch_without_updates_logs_the_metrics_before(self):
    """Asynchronous updates may run ahead of the epochs; here all six do."""
    step, seen = one_machine.OneMachine.step, []

    def run_ahead(driver, max_updates=1):
      del max_updates
      return [step(driver) for _ in range(6)][-1]

    logs = keras.callbacks.LambdaCallback(
      on_epoch_end=lambda epoch, logs: seen.append(dict(logs))
    )
    with (
      mock.patch.object(one_machine.OneMachine, "step", run_ahead),
      self.assertLogs(level="WARNING") as warned,
    ):
      history = _fit(
        "momentum", epochs=3, steps_per_epoch=2, callbacks=[logs]
      ).history
    self.assertLen(seen, 3)
    self.assertEqual(seen[1:], [seen[0]] * 2)
    self.assertEqual(history["loss"], [seen[0]["loss"]] * 3)
    self.assertGreater(history["loss"][0], 0.1)
    lines = [s for s in warned.output if "repeats the metrics" in s]
    self.assertLen(lines, 1)
    self.assertIn("epoch 2 repeats the metrics of the epoch before", lines[0])

  def test_files(self):
    directory = self.directory()

    def new():
      return [
        keras.callbacks.ModelCheckpoint(directory + "/{epoch}.keras"),
        keras.callbacks.CSVLogger(directory + "/log.csv"),
        keras.callbacks.TensorBoard(directory + "/board"),
      ]

    ours = _fit("momentum", callbacks=new(), epochs=2)
    loaded = keras.models.load_model(directory + "/2.keras")
    for one, other in zip(
      loaded.get_weights(), ours.model.get_weights(), strict=True
    ):
      np.testing.assert_array_equal(one, other)


class ResumeTest(_Directories):
  """`train_dir` holds the training."""

  def test_goes_on_after_whole_epochs(self):
    directory = self.directory()
    _fit("momentum", epochs=1, train_dir=directory)
    rest = _fit("momentum", epochs=3, train_dir=directory)
    whole = _fit("momentum", epochs=3)
    self.assertEqual(rest.epoch, [1, 2])
    for key, values in whole.history.items():
      np.testing.assert_allclose(rest.history[key], values[1:], rtol=1e-6)

  def test_goes_on_within_an_epoch(self):
    directory = self.directory()

    class Interrupt(keras.callbacks.Callback):
      def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
          raise KeyboardInterrupt

    with self.assertRaises(KeyboardInterrupt):
      _fit("momentum", epochs=2, train_dir=directory, callbacks=[Interrupt()])
    rest = _fit("momentum", epochs=2, train_dir=directory)
    whole = _fit("momentum", epochs=2)
    self.assertEqual(rest.epoch, [0, 1])
    for key, values in whole.history.items():
      np.testing.assert_allclose(rest.history[key], values, rtol=1e-6)

  @parameterized.parameters("momentum", "adversaries")
  def test_goes_on_after_the_loss_of_a_parameter_server(self, name):
    """The state is kept here: a driver does this in the midst of an epoch."""
    recovering = one_machine.OneMachine.recovering
    calls = []

    def losing_once(driver, function):
      calls.append(function)
      found = recovering(driver, function)
      return found if len(calls) != 3 else recovering(driver, function)

    whole = _fit(name)
    with mock.patch.object(one_machine.OneMachine, "recovering", losing_once):
      interrupted = _fit(name)
    self.assertGreater(len(calls), 3)
    self.assertEqual(interrupted.history, whole.history)

  def test_initial_epoch_is_that_of_the_first_run(self):
    directory = self.directory()

    class Interrupt(keras.callbacks.Callback):
      def on_train_batch_end(self, batch, logs=None):
        if self.epoch == 4 and batch == 2:
          raise KeyboardInterrupt

      def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    arguments = {"initial_epoch": 3, "epochs": 6}
    saved = {**arguments, "train_dir": directory}
    with self.assertRaises(KeyboardInterrupt):
      _fit("momentum", **saved, callbacks=[Interrupt()])
    lines = []
    rest = _fit("momentum", **saved, log=lines.append)
    self.assertIn("goes on at epoch 5: `initial_epoch`, 3,", "".join(lines))
    whole = _fit("momentum", **arguments)
    self.assertEqual((whole.epoch, rest.epoch), ([3, 4, 5], [4, 5]))
    for key, values in whole.history.items():
      np.testing.assert_allclose(rest.history[key], values[1:], rtol=1e-6)
    self.assertEqual(_fit("momentum", **saved).epoch, [])

  def test_keras_trains_a_resumed_model_from_its_first_epoch(self):
    directory = self.directory()
    _fit("momentum", epochs=1, train_dir=directory)
    model = _fit("momentum", epochs=2, train_dir=directory).model
    x, y = models.CASES["momentum"].arguments.values()
    self.assertEqual(model.fit(x, y, verbose=0).epoch, [0])


class OwnStep(models.Subclassed):
  """Its `train_step` does what `do` says."""

  def __init__(self, do):
    """Keeps what to do."""
    super().__init__()
    self.do = do
    self.foreign = tf.Variable(1.0, name="mine")

  def train_step(self, data):
    """Calls `do`."""
    return self.do(self, data)


def _read_foreign(model, data):
  loss = model.foreign * tf.reduce_mean(data[0])
  model.optimizer.apply([tf.fill([4, 6], loss)], model.trainable_variables[:1])
  return {"loss": loss}


def _counting(counts):
  def model_fn():
    keras.utils.set_random_seed(7)
    layers = [counting_layer.Counting(counts), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input([4]), *layers])
    model.compile("sgd", "mse")
    return model

  return model_fn


def _own(do):
  def model_fn():
    model = OwnStep(do)
    model(tf.zeros([1, 4]))
    model.compile("sgd", "mse")
    return model

  return model_fn


def _with(**arguments):
  def model_fn():
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    model.compile(**({"optimizer": "sgd", "loss": "mse"} | arguments))
    return model

  return model_fn


_X, _Y = np.ones([8, 4], np.float32), np.ones([8, 1], np.float32)


class _SetRate(keras.callbacks.Callback):
  """Sets the rate of one of two optimizers."""

  def on_epoch_end(self, epoch, logs=None):
    """Sets it."""
    self.model.critic_optimizer.learning_rate = 0.001


class RefusedTest(stores.TestCase):
  """Mistakes end in one line that names argument, rule and value."""

  @parameterized.parameters(
    (_own(_read_foreign), "only variables that the model tracks.*mine"),
    (_counting(True), "only variables of floating dtype.*of dtype int32"),
    (_own(lambda model, data: {}), "must apply gradients.*no call of `apply`"),
    (lambda: 3, "must return a model of Keras 3.*builtins.int"),
    (lambda: keras.Sequential([keras.layers.Dense(1)]), "a compiled model"),
    (_with(run_eagerly=True), "run_eagerly=False"),
    (_with(jit_compile=True), "jit_compile='auto'` or False"),
    (
      lambda: _with(
        optimizer=keras.optimizers.SGD(
          0.1, use_ema=True, ema_overwrite_frequency=3
        )
      )(),
      "`ema_overwrite_frequency=None`.*Received: 3",
    ),
    (
      lambda: _with(
        optimizer=keras.optimizers.SGD(0.1, gradient_accumulation_steps=4)
      )(),
      "`gradient_accumulation_steps=None`.*replicas_to_aggregate",
    ),
    (_with()(), "`model_fn` must be a function"),
  )
  def test_model(self, model_fn, words):
    with self.assertRaisesRegex((TypeError, ValueError), words):
      tf_replicas.fit(model_fn, _X, _Y, verbose=0)

  @parameterized.product(
    reduction=["sum", None, "mean_with_sample_weight"],
    replication=["between_graph", "mirrored"],
  )
  def test_losses_that_are_no_means(self, reduction, replication):
    def model_fn():
      keras.utils.set_random_seed(7)
      loss = keras.losses.MeanSquaredError(reduction=reduction)
      return _with(loss=loss)()

    def fit(count, **arguments):
      devices = [stores.device(i) for i in range(count)]
      return tf_replicas.fit(
        model_fn,
        _X,
        _Y,
        devices=devices,
        replication=replication,
        **arguments,
        **_QUIET,
      )

    weights = np.arange(8.0)
    with self.assertRaisesRegex(
      ValueError, f"means over the.*2 parts.*: Mean.*reduction={reduction!r}"
    ):
      fit(2, sample_weight=weights)
    ours = fit(1, sample_weight=weights).model.get_weights()
    theirs = model_fn()
    theirs.fit(_X, _Y, sample_weight=weights, **_QUIET)
    np.testing.assert_allclose(ours[0], theirs.get_weights()[0], rtol=1e-5)
    if reduction == "mean_with_sample_weight":
      fit(2)

  @parameterized.parameters(
    ({"x": "text"}, "`x` and `y` must be arrays.*Received: a str"),
    ({"x": _X, "y": _Y[:3]}, r"equally many examples. Received: \[3, 8\]"),
    ({"x": _X[:0], "y": _Y[:0]}, "must have examples"),
    (
      {"x": _X, "y": _Y, "batch_size": 0},
      "`batch_size` must be an integer of at least 1",
    ),
    ({"x": _X, "sample_weight": _Y}, "`sample_weight` needs `y`"),
    ({"x": _X, "y": _Y, "rule": "sync"}, "`rule` must be made by"),
    ({"x": _X, "y": _Y, "replication": "x"}, "must be one of between_graph"),
    (
      {"x": tf.data.Dataset.from_tensors((_X, _Y)), "y": _Y},
      "`y` must not be given",
    ),
    (
      {"x": tf.data.Dataset.from_tensors((_X, _Y)).repeat()},
      "`steps_per_epoch` must be given.*endless",
    ),
    ({"x": lambda context: 3, "steps_per_epoch": 1}, "must return a `tf.data"),
    ({"x": lambda context: 3}, "`steps_per_epoch` must be given"),
    ({"x": iter([(_X, _Y)])}, "`steps_per_epoch` must be given.*list_iterator"),
    ({"x": iter([])}, "`x` must have batches. Received: none"),
    ({"x": iter([3]), "steps_per_epoch": 1}, r"must yield tuples.*Received: 3"),
    (
      {"x": iter([(_X, _Y)]), "steps_per_epoch": 2},
      "must yield a batch for each step.*ended after 1 batches",
    ),
    (
      {"x": iter([(_X, _Y), (_X,)]), "steps_per_epoch": 2},
      "must yield tuples of arrays.*later",
    ),
    ({"x": iter([(_X, _Y)]), "y": _Y}, "`y` must not be given"),
    (
      {
        "x": iter([(_X, _Y)]),
        "steps_per_epoch": 1,
        "replication": "mirrored",
      },
      'only with `replication="between_graph"`.*Received: a list_iterator',
    ),
  )
  def test_data(self, arguments, words):
    with self.assertRaisesRegex((TypeError, ValueError), words):
      tf_replicas.fit(_with(), **arguments, verbose=0)

  @parameterized.parameters(
    ({"rule": tf_replicas.Async()}, "must be made by `Sync`.*3 times"),
    (
      {"callbacks": [_SetRate()], "epochs": 2},
      "several optimizers that take turns must not be set",
    ),
  )
  def test_with_several_optimizers(self, arguments, words):
    with self.assertRaisesRegex(ValueError, words):
      _fit("adversaries", **arguments)

  @parameterized.parameters(
    (
      {"validation_data": lambda context: 3},
      "`validation_data` must be a func",
    ),
    ({"validation_data": lambda: 3}, r"must be \(x, y\).*Received: a int"),
    (
      {
        "rule": tf_replicas.Async(),
        "callbacks": [keras.callbacks.SwapEMAWeights()],
      },
      "must not have `SwapEMAWeights`.*`Async`",
    ),
    ({"validation_freq": {}}, "must be an integer of at least 1, or a list"),
    ({"validation_freq": {1: 2}}, "must be an integer of at least 1, or a"),
    ({"validation_freq": "12"}, "must be an integer of at least 1, or a list"),
  )
  def test_validation(self, arguments, words):
    with self.assertRaisesRegex((TypeError, ValueError), words):
      tf_replicas.fit(_with(), _X, _Y, **arguments, verbose=0)

  def test_an_op_that_fails_in_validation(self):
    def model_fn():
      layers = [keras.Input([3], dtype="int32"), keras.layers.Embedding(9, 1)]
      model = keras.Sequential([*layers, keras.layers.Flatten()])
      model.compile("sgd", "mse")
      return model

    x, y = np.zeros([8, 3], np.int32), np.zeros([8, 3], np.float32)
    with self.assertRaisesRegex(ValueError, "^an op of the model or") as raised:
      tf_replicas.fit(model_fn, x, y, validation_data=(x + 9, y), verbose=0)
    self.assertNotIn("\n", str(raised.exception))

  def test_not_a_number_ends_the_training(self):
    bad = np.full([8, 4], np.nan, np.float32)
    with pytest.raises(
      tf_replicas.NonFiniteGradientError, match="this process"
    ):
      tf_replicas.fit(_with(), bad, _Y, verbose=0)

  def test_data_sets_with_tables_before_joining_a_cluster(self):
    variable = tf.Variable(1.0)
    dataset = tf.data.Dataset.from_tensors((_X, _Y))
    used = dataset.map(lambda x, y: (variable * x, y))
    config = {
      "cluster": {"ps": ["localhost:1"], "worker": ["localhost:2"]},
      "task": {"type": "worker", "index": 0},
    }
    with mock.patch.dict(os.environ, TF_CONFIG=json.dumps(config)):
      for arguments, name in (
        ({"x": used}, "x"),
        ({"x": dataset, "validation_data": used}, "validation_data"),
      ):
        with self.assertRaisesRegex(ValueError, f"`{name}` must not use"):
          tf_replicas.fit(_with(), **arguments)

  def test_a_cluster_without_tasks(self):
    spec = tf_replicas.cluster.parse({"devices": {"worker": {"gpus": [0]}}})
    with self.assertRaisesRegex(ValueError, "`cluster` must name tasks"):
      tf_replicas.fit(_with(), _X, _Y, cluster=spec)

  def test_a_cluster_without_a_role(self):
    spec = tf_replicas.cluster.parse(
      {"cluster": {"ps": ["localhost:1"], "worker": ["localhost:2"]}}
    )
    with self.assertRaisesRegex(ValueError, "tf_replicas.launch"):
      tf_replicas.fit(_with(), _X, _Y, cluster=spec)
