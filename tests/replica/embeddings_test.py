"""Tests for replica.embeddings: the layer, and tables for custom code."""

import contextlib
import tempfile

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

import tf_replicas
from tests.support import optimizers
from tf_replicas.drivers import one_machine
from tf_replicas.replica import embeddings
from tf_replicas.replica import keras_models
from tf_replicas.replica import model_replica
from tf_replicas.replica import module_models
from tf_replicas.rules.sync import sync_replicas
from tf_replicas.runtime import resources
from tf_replicas.session import checkpoints
from tf_replicas.session import training
from tf_replicas.store import tables

ROWS, COLUMNS, BATCH = 50, 4, 8


def _data(step=0):
  rng = np.random.default_rng(step)
  ids = rng.integers(0, ROWS // 2, (BATCH, 3))
  return ids.astype("int32"), rng.normal(size=(BATCH, 1)).astype("float32")


def dataset_fn(num_shards, shard_index, start_example):
  """The same batches in every run."""
  del num_shards, shard_index
  first = int(start_example) // BATCH
  batches = [_data(first + i) for i in range(20)]
  return tf.data.Dataset.from_tensor_slices(
    tuple(np.stack(part) for part in zip(*batches, strict=True))
  ).repeat()


def _model(embedding=embeddings.Embedding, **arguments):
  inputs = keras.Input((3,), dtype="int32")
  arguments = {
    "embeddings_initializer": keras.initializers.RandomNormal(seed=4),
    "name": "words",
    **arguments,
  }
  hidden = embedding(ROWS, COLUMNS, **arguments)(inputs)
  hidden = keras.layers.GlobalAveragePooling1D()(hidden)
  dense = keras.layers.Dense(
    1, kernel_initializer=keras.initializers.GlorotUniform(seed=5), name="out"
  )
  return keras.Model(inputs, dense(hidden))


def _home(num_tasks=1):
  """A context in which this process is all PS tasks."""
  return tables.home(
    tables.Home(
      resources.new_namespace(), num_tasks, lambda task: "/device:CPU:0"
    )
  )


def _keras_replica():
  return keras_models.keras_replica(
    _model(), keras.losses.MeanSquaredError(), dataset_fn
  )


class _Module(tf.Module):
  def __init__(self):
    super().__init__()
    self.words = embeddings.Table(
      ROWS,
      COLUMNS,
      name="words/embeddings",
      initializer=keras.initializers.RandomNormal(seed=4),
    )
    first = keras.initializers.GlorotUniform(seed=5)((COLUMNS, 1))
    self.kernel = tf.Variable(first, name="kernel")
    self.bias = tf.Variable(tf.zeros([1]), name="bias")


def _loss(module, ids, labels):
  rows = embeddings.lookup(module.words, ids)
  outputs = tf.reduce_mean(rows, axis=1) @ module.kernel + module.bias
  return tf.reduce_mean(tf.square(outputs - labels))


def _module_replica():
  return module_models.module_replica(_Module(), _loss, dataset_fn)


def _plain_replica():
  module = _Module()

  def loss_fn(parameters, ids, labels):
    _, kernel, bias = parameters
    rows = embeddings.lookup(module.words, ids)
    outputs = tf.reduce_mean(rows, axis=1) @ kernel + bias
    return tf.reduce_mean(tf.square(outputs - labels))

  variables = [module.words.variable, module.kernel, module.bias]
  return model_replica.Replica(variables, loss_fn, dataset_fn)


def _driver(replica_fn=_keras_replica, optimizer=None, **options):
  optimizer = optimizer or keras.optimizers.SGD(0.5)
  return one_machine.OneMachine(
    replica_fn,
    lambda: sync_replicas.SyncReplicasOptimizer(optimizer, 1, **options),
  )


def _table(driver):
  return driver.store.row_tensors()["variables/words/embeddings"].read(0, ROWS)


def _reference(first, optimizer, steps):
  """The table after steps of Keras with dense gradients."""
  model = _model(keras.layers.Embedding)
  model.get_layer("words").embeddings.assign(first)
  for step in range(steps):
    ids, labels = _data(step)
    with tf.GradientTape() as tape:
      loss = tf.reduce_mean(tf.square(model(ids) - labels))
    gradients = tape.gradient(loss, model.trainable_variables)
    # Keras 3.15 does not sum rows of the same index before it squares them.
    dense = [tf.convert_to_tensor(g) for g in gradients]
    optimizer.apply(dense, model.trainable_variables)
  return model.get_layer("words").embeddings.numpy()


class TrainingTest(parameterized.TestCase):
  @parameterized.product(
    replica_fn=[_keras_replica, _module_replica, _plain_replica],
    optimizer=["SGD", "Adagrad"],
  )
  def test_equals_keras(self, replica_fn, optimizer):
    driver = _driver(replica_fn, optimizers.make(optimizer, 0.5))
    first = _table(driver)
    losses = [driver.step().loss for _ in range(4)]
    expected = _reference(first, optimizers.make(optimizer, 0.5), 4)
    self.assertFalse(np.allclose(first, expected))
    np.testing.assert_allclose(_table(driver), expected, rtol=1e-5, atol=1e-6)
    self.assertLess(losses[-1], losses[0])

  @parameterized.parameters(
    {"clip_replica_norm": 0.1}, {"clip_mean_norm": 0.1}, {"loss_scale": 64.0}
  )
  def test_options(self, **options):
    driver = _driver(**options)
    first = _table(driver)
    losses = [driver.step().loss for _ in range(3)]
    optimizer = keras.optimizers.SGD(0.5)
    if "loss_scale" not in options:
      optimizer = keras.optimizers.SGD(0.5, global_clipnorm=0.1)
    expected = _reference(first, optimizer, 3)
    np.testing.assert_allclose(_table(driver), expected, rtol=1e-5, atol=1e-6)
    self.assertNotEqual(losses[0], losses[1])

  def test_micro_batches_and_towers(self):
    def replica_fn(**more):
      return keras_models.keras_replica(
        _model(), keras.losses.MeanSquaredError(), dataset_fn, **more
      )

    results = []
    for more in ({}, {"micro_batches": 2}, {"devices": ["/device:CPU:0"] * 2}):
      driver = _driver(lambda more=more: replica_fn(**more))
      for _ in range(3):
        driver.step()
      results.append(_table(driver))
    for other in results[1:]:
      np.testing.assert_allclose(other, results[0], rtol=1e-5, atol=1e-6)

  def _saved(self):
    """Trains twice; the directory, and the table at the end."""
    directory = tempfile.mkdtemp()

    def train(steps):
      driver = _driver(optimizer=optimizers.make("Adagrad", 0.5))
      session = training.Session(
        directory, state=driver.store, max_steps=steps, keep_checkpoints=1
      )
      session.run(driver.step)
      return _table(driver)

    train(2)
    return directory, train(4)

  def test_a_checkpoint_has_the_table(self):
    directory, resumed = self._saved()
    whole = _driver(optimizer=optimizers.make("Adagrad", 0.5))
    for _ in range(4):
      whole.step()
    np.testing.assert_allclose(resumed, _table(whole), rtol=1e-6)
    # Only the newest checkpoint is kept, with its table.
    names = {p.split(".data")[0] for p in tf.io.gfile.listdir(directory)}
    self.assertContainsSubset({"model.ckpt-4", "model.ckpt-4.tables"}, names)
    self.assertNotIn("model.ckpt-2.tables", names)

  def test_a_checkpoint_may_have_no_tables(self):
    """As after a training in one process, where no layer became a table."""
    directory = self.enter_context(tempfile.TemporaryDirectory())
    model = _model()
    values = {
      "global_step": np.int64(1),
      "variables/words/embeddings": model.get_layer("words").get_weights()[0],
    }
    checkpoints.save(directory, values)
    before = model.get_weights()
    embeddings.load_tables(model, directory)
    for one, other in zip(model.get_weights(), before, strict=True):
      np.testing.assert_array_equal(one, other)

  def test_loads_tables_of_a_checkpoint(self):
    directory, expected = self._saved()
    model = _model()  # As in another process, which evaluates.
    self.assertEqual(model.get_layer("words").embeddings.shape, (ROWS, COLUMNS))
    embeddings.load_tables(model, directory)
    np.testing.assert_array_equal(
      model.get_layer("words").embeddings.numpy(), expected
    )

  def test_a_table_of_another_name_is_not_ignored(self):
    """As Keras names a layer if another model was made before."""
    directory, _ = self._saved()
    model = _model(name="words_1")
    before = model.get_layer("words_1").get_weights()[0]
    with self.assertRaisesRegex(
      checkpoints.CheckpointError,
      "under their names.* words/embeddings, .*words_1/embeddings",
    ):
      embeddings.load_tables(model, directory)
    np.testing.assert_array_equal(
      model.get_layer("words_1").get_weights()[0], before
    )

  def test_a_checkpoint_needs_the_table(self):
    directory, _ = self._saved()
    for path in tf.io.gfile.glob(f"{directory}/*.tables.index"):
      tf.io.gfile.remove(path)
    driver = _driver(optimizer=optimizers.make("Adagrad", 0.5))
    with self.assertRaisesRegex(
      checkpoints.CheckpointError, "tables: files are missing"
    ):
      training.Session(
        directory, state=driver.store, max_steps=9
      ).restore_or_initialize()

  def test_loads_tables_where_they_are(self):
    made = []

    def replica_fn():
      made.append(_model())
      return keras_models.keras_replica(
        made[0], keras.losses.MeanSquaredError(), dataset_fn
      )

    driver = _driver(replica_fn)
    driver.step()
    (model,) = made
    ids, _ = _data()
    looked_up = model(ids)  # From the store.
    embeddings.load_tables(model)
    self.assertEqual(model.get_layer("words").embeddings.shape, (ROWS, COLUMNS))
    np.testing.assert_allclose(model(ids), looked_up, rtol=1e-6)
    exported = tempfile.mkdtemp()
    model.export(exported, verbose=False)
    loaded = tf.saved_model.load(exported)
    np.testing.assert_allclose(loaded.serve(ids), looked_up, rtol=1e-6)

  def test_loads_averages(self):
    """From the store, and from a checkpoint."""
    directory = tempfile.mkdtemp()
    averages = tf_replicas.MovingAverages(0.5)
    made = []

    def replica_fn():
      made.append(_model())
      return keras_models.keras_replica(
        made[-1], keras.losses.MeanSquaredError(), dataset_fn
      )

    driver = _driver(replica_fn, variable_averages=averages)
    shadow = tf.Variable(_table(driver))
    for step in range(1, 4):
      driver.step()
      averages.update([(shadow, tf.constant(_table(driver)))], step)
    training.Session(directory, state=driver.store, max_steps=3).save()
    self.assertFalse(np.allclose(shadow, _table(driver), atol=1e-3))
    other = _model()
    for arguments in ((made[0],), (other, directory)):
      embeddings.load_tables(*arguments, averaged=True)
      found = arguments[0].get_layer("words").embeddings.numpy()
      np.testing.assert_allclose(found, shadow, rtol=1e-5, atol=1e-6)
    embeddings.load_tables(other, directory)
    np.testing.assert_array_equal(
      other.get_layer("words").embeddings.numpy(), _table(driver)
    )

  def test_some_variables_only_are_averaged(self):
    driver = _driver(
      variable_averages=tf_replicas.MovingAverages(0.5),
      variables_to_average=["out/kernel"],
    )
    self.assertEqual(
      [*driver.store.row_tensors()], ["variables/words/embeddings"]
    )
    self.assertIn("averages/out/kernel", driver.store.state())

  def test_refuses_an_id_out_of_range(self):
    def bad(*args):
      return dataset_fn(*args).map(lambda ids, y: (ids + ROWS, y))

    def replica_fn():
      return keras_models.keras_replica(
        _model(), keras.losses.MeanSquaredError(), bad
      )

    driver = _driver(replica_fn)
    with self.assertRaisesRegex(
      tf.errors.InvalidArgumentError, r"words/embeddings must be in \[0, 50\)"
    ):
      driver.step()


class LayerTest(parameterized.TestCase):
  def test_without_a_driver_it_is_that_of_keras(self):
    keras.utils.set_random_seed(3)
    ours = embeddings.Embedding(ROWS, COLUMNS, mask_zero=True)
    keras.utils.set_random_seed(3)
    theirs = keras.layers.Embedding(ROWS, COLUMNS, mask_zero=True)
    ids, _ = _data()
    np.testing.assert_array_equal(ours(ids), theirs(ids))
    np.testing.assert_array_equal(
      ours.compute_mask(ids), theirs.compute_mask(ids)
    )

  def test_trains_with_keras(self):
    ours, theirs = _model(), _model(keras.layers.Embedding)
    theirs.set_weights(ours.get_weights())
    losses = []
    for model in (ours, theirs):
      model.compile(keras.optimizers.Adam(0.1), "mse")
      losses.append([model.train_on_batch(*_data(i)) for i in range(3)])
    np.testing.assert_allclose(*losses, rtol=1e-6)

  def test_is_saved_with_its_arguments(self):
    layer = embeddings.Embedding(
      ROWS, COLUMNS, partition="range", combiner="sum"
    )
    copied = keras.layers.deserialize(keras.layers.serialize(layer))
    self.assertEqual(copied.partition, "range")
    self.assertEqual(copied.combiner, "sum")

  @parameterized.parameters(False, True)
  def test_combines_sparse_ids(self, is_table):
    inputs = keras.Input((3,), dtype="int32", sparse=True)
    with _home() if is_table else contextlib.nullcontext():
      layer = embeddings.Embedding(
        ROWS, COLUMNS, combiner="mean", embeddings_initializer="ones"
      )
      outputs = layer(inputs)
    self.assertEqual(outputs.shape, (None, COLUMNS))
    if is_table:
      tables.rows_of(layer.table).initialize()
    # Sparse tensors leave out what is not there, rather than 0.
    ids = tf.sparse.from_dense(tf.constant([[1, 2, 0], [0, 0, 0]]))
    found = keras.Model(inputs, outputs)(ids)
    np.testing.assert_array_equal(found, [[1.0] * COLUMNS, [0.0] * COLUMNS])

  @parameterized.parameters(
    ({"embeddings_regularizer": "l2"}, "`embeddings_regularizer` must be None"),
    ({"embeddings_constraint": "max_norm"}, "`embeddings_constraint` must be"),
    ({"lora_rank": 2}, "`lora_rank` must be None"),
    ({"weights": np.zeros((ROWS, COLUMNS))}, "`weights` of .* must be None"),
    ({"embeddings_initializer": "orthogonal"}, "draws every row by itself"),
    ({"combiner": "max"}, "`combiner` must be one of sum, mean, sqrtn"),
    ({"combiner": "sum", "mask_zero": True}, "`mask_zero` must be False"),
    ({"partition": "hash"}, "`partition` must be one of modulo, range"),
  )
  def test_refuses(self, arguments, message):
    with _home(num_tasks=2), self.assertRaisesRegex(ValueError, message):
      _model(**arguments)

  def test_refuses_to_share_its_weight_with_a_layer(self):
    with _home():
      layer = embeddings.Embedding(ROWS, COLUMNS, name="words")
      layer.build()
    with self.assertRaisesRegex(
      AttributeError, "`embeddings` of the layer 'words' must not be used"
    ):
      keras.ops.matmul(tf.ones([2, COLUMNS]), tf.transpose(layer.embeddings))
    tables.rows_of(layer.table).initialize()
    self.assertEqual(embeddings.lookup(layer, [1]).shape, [1, COLUMNS])

  @parameterized.parameters(0, 2.5, True)
  def test_refuses_rows(self, rows):
    with self.assertRaisesRegex(ValueError, "`num_rows` must be a positive"):
      embeddings.Table(rows, 2, name="a")

  def test_large_layers_of_keras_are_replaced(self):
    size = ROWS * COLUMNS * 4
    plain = keras.layers.Embedding
    for min_bytes, is_replaced in ((size, True), (size + 1, False)):
      with _home(), embeddings.replacing(min_bytes):
        layer = _model(plain).get_layer("words")
      self.assertEqual(isinstance(layer, embeddings.Embedding), is_replaced)
      self.assertEqual(
        tables.rows_of(layer.weights[0]) is not None, is_replaced
      )
    with embeddings.replacing(size):  # No driver builds the model.
      layer = _model(plain).get_layer("words")
    self.assertIs(type(layer), plain)
    self.assertIs(type(_model(plain).get_layer("words")), plain)

  def test_a_large_layer_of_a_subclass_is_refused(self):
    class Own(keras.layers.Embedding):
      pass

    size = ROWS * COLUMNS * 4
    with (
      _home(),
      embeddings.replacing(size),
      self.assertRaisesRegex(
        ValueError,
        "the layer 'words' must be a `tf_replicas.Embedding` .*"
        f"`min_table_bytes=None`.* Received: Own, of {size} bytes.$",
      ) as caught,
    ):
      _model(Own)
    self.assertNotIn("\n", str(caught.exception))
    for min_bytes in (size + 1, None):
      with _home(), embeddings.replacing(min_bytes):
        self.assertIs(type(_model(Own).get_layer("words")), Own)
    with embeddings.replacing(size):  # No driver builds the model.
      self.assertIs(type(_model(Own).get_layer("words")), Own)
    with _home(), embeddings.replacing(size):  # This subclass keeps its rows.
      layer = _model().get_layer("words")
    self.assertIsNotNone(tables.rows_of(layer.weights[0]))

  def test_a_replaced_layer_trains(self):
    def replica_fn():
      with embeddings.replacing(1):
        model = _model(keras.layers.Embedding)
      loss = keras.losses.MeanSquaredError()
      return keras_models.keras_replica(model, loss, dataset_fn)

    driver = _driver(replica_fn)
    first = _table(driver)
    for _ in range(3):
      driver.step()
    expected = _reference(first, keras.optimizers.SGD(0.5), 3)
    np.testing.assert_allclose(_table(driver), expected, rtol=1e-5, atol=1e-6)

  @parameterized.parameters(
    (
      {"weights": np.zeros((ROWS, COLUMNS))},
      "`set_weights` must not be called",
    ),
    ({"embeddings_regularizer": "l2"}, "`embeddings_regularizer` must be None"),
    ({"embeddings_constraint": "max_norm"}, "`embeddings_constraint` must be"),
    ({"lora_rank": 2}, "`lora_rank` must be None"),
    ({"dtype": "int8_from_float32"}, "`quantization` must be None"),
  )
  def test_refuses_in_a_layer_that_is_replaced(self, arguments, message):
    with (
      self.assertRaisesRegex(
        ValueError, f"{message}.* an embedding of at least `min_table_bytes`"
      ),
      _home(),
      embeddings.replacing(1),
    ):
      _model(keras.layers.Embedding, **arguments)

  def test_refuses_to_load_a_layer_that_is_replaced(self):
    with tempfile.TemporaryDirectory() as directory:
      path = f"{directory}/model.keras"
      _model(keras.layers.Embedding).save(path)
      with (
        self.assertRaisesRegex(
          ValueError, "no weights must be loaded .* 'words'"
        ),
        _home(),
        embeddings.replacing(1),
      ):
        keras.saving.load_model(path)

  def test_floats_as_ids(self):
    with _home():
      small = embeddings.Embedding(ROWS, COLUMNS)
      small.build()
      large = embeddings.Embedding((1 << 24) + 1, 1)
      large.build()
    tables.rows_of(small.table).initialize()
    self.assertEqual(small(tf.constant([[1.0]])).shape, [1, 1, COLUMNS])
    with self.assertRaisesRegex(TypeError, "must be integers. Received: float"):
      large(tf.constant([[1.0]]))


if __name__ == "__main__":
  absltest.main()
