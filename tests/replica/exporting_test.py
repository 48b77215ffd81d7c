"""Tests for replica.exporting: `tf_replicas.export`."""

import os
import subprocess
import sys
import tempfile

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

import tf_replicas
from tests.support import trials
from tf_replicas.drivers import one_machine
from tf_replicas.replica import embeddings
from tf_replicas.replica import keras_models
from tf_replicas.rules.sync import sync_replicas
from tf_replicas.session import checkpoints
from tf_replicas.session import training
from tf_replicas.store import tables

WORDS, TAGS, COLUMNS = 50, 7, 4
IDS = np.array([[0, 7, 49], [3, 3, 20]], "int32")

# Somebody else, who has TensorFlow and nothing of ours.
_STRANGER = """
import sys
for package in ("tf_replicas", "keras"):
  sys.modules[package] = None
import numpy as np
import tensorflow as tf
model = tf.saved_model.load(sys.argv[1])
ids = np.load(sys.argv[2])
np.save(sys.argv[3], model.serve([ids, ids[:, :1] % 7]))
"""

# Exports a small model first, since the code that runs needs memory too.
_MEASURED = """
import re
import sys
import keras
import tf_replicas

def model_fn(rows):
  inputs = keras.Input([3], dtype="int32")
  words = tf_replicas.Embedding(rows, 64, name="words", combiner="sum")
  return keras.Model(inputs, words(inputs))

def peak():
  # `ru_maxrss` would be that of the parent process, if it is larger.
  with open("/proc/self/status") as file:
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", file.read())[1]) << 10

for rows, train_dir in ((100, sys.argv[1]), (1 << 20, sys.argv[2])):
  before = peak()
  tf_replicas.export(
    lambda: model_fn(rows), train_dir, train_dir + "/exported"
  )
print("BYTES", peak() - before)
"""


def _model(embedding=embeddings.Embedding, words=WORDS):
  """A model with two tables, one of which is used twice."""
  first = keras.Input((3,), dtype="int32", name="first")
  second = keras.Input((1,), dtype="int32", name="second")
  word_rows = embedding(words, COLUMNS, name="words")
  tag_rows = embedding(TAGS, COLUMNS, name="tags")
  hidden = keras.layers.Concatenate(axis=1)(
    [word_rows(first), tag_rows(second), word_rows(second)]
  )
  hidden = keras.layers.Flatten()(keras.layers.Dropout(0.5)(hidden))
  return keras.Model([first, second], keras.layers.Dense(2, name="out")(hidden))


def _keras_model():
  return _model(keras.layers.Embedding)


def _chain(*layers, dtype="int32"):
  """A model of some layers, whose weights have the paths of their layers."""
  outputs = inputs = keras.Input((3,), dtype=dtype)
  for layer in layers:
    outputs = layer(outputs)
  return keras.Model(inputs, outputs)


def _inputs(ids=IDS):
  return [ids, ids[:, :1] % TAGS]


def dataset_fn(*_):
  labels = np.ones([2, 2], "float32")
  return tf.data.Dataset.from_tensors((tuple(_inputs()), labels)).repeat()


def _train(directory):
  """Trains for some steps; the model, whose tables have no rows."""
  models = []

  def replica_fn():
    models.append(_model())
    return keras_models.keras_replica(
      models[-1], keras.losses.MeanSquaredError(), dataset_fn
    )

  optimizer = keras.optimizers.SGD(0.5)
  driver = one_machine.OneMachine(
    replica_fn, lambda: sync_replicas.SyncReplicasOptimizer(optimizer, 1)
  )
  session = training.Session(directory, state=driver.store, max_steps=3)
  session.run(driver.step)
  return models[-1]


class _Array:
  """A tensor that is saved in blocks of rows, from memory."""

  def __init__(self, value):
    self.value, self.shape = value, value.shape
    self.dtype = tf.as_dtype(value.dtype)

  def read(self, begin, end):
    return self.value[begin:end]


class _Counting:
  """A large tensor whose rows have their number in all columns."""

  dtype = tf.float32

  def __init__(self, rows):
    self.shape = (rows, 64)

  def read(self, begin, end):
    numbers = np.arange(begin, end, dtype="float32")
    return np.repeat(numbers[:, None], 64, axis=1)


def _random(*shape):
  seed = sum(shape)
  return np.random.default_rng(seed).normal(size=shape).astype("float32")


def _save(directory, table, others=None, averages=None, name="words"):
  """Writes a checkpoint with one table."""
  rows = {f"variables/{name}/embeddings": _Array(table)}
  if averages is not None:
    rows[f"averages/{name}/embeddings"] = _Array(averages)
  values = {"global_step": np.int64(7), **(others or {})}
  return checkpoints.save(directory, values, row_tensors=rows)


def _expected(directory, model=_keras_model):
  """The outputs of a model that has all rows in memory."""
  model = model()
  tf_replicas.load_tables(model, directory)
  saved = checkpoints.read(checkpoints.latest(directory))
  for weight in model.weights:
    if f"variables/{weight.path}" in saved:
      weight.assign(saved[f"variables/{weight.path}"])
  return model(_inputs()).numpy()


def _rows_in(directory):
  """The numbers of rows of the shards, which are variables of 4 columns."""
  listed = tf.train.list_variables(f"{directory}/variables/variables")
  return sorted(s[0] for _, s in listed if len(s) == 2 and s[1] == COLUMNS)


class ExportTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.train_dir = tempfile.mkdtemp()
    cls.trained = _train(cls.train_dir)

  def setUp(self):
    super().setUp()
    self.path = os.path.join(tempfile.mkdtemp(), "parent", "model")

  @parameterized.named_parameters(
    ("trained", lambda self: self.trained),
    ("own", lambda _: _model()),
    ("own_of_keras", lambda _: _keras_model()),
    ("function", lambda _: _model),
    ("function_of_keras", lambda _: _keras_model),
  )
  def test_serves_what_the_model_computes(self, model_of):
    model = model_of(self)
    found = tf_replicas.export(
      model, self.train_dir, self.path, max_shard_bytes=20 * COLUMNS * 4
    )
    self.assertEqual(found, f"{self.train_dir}/model.ckpt-3")
    self.assertEqual(os.listdir(os.path.dirname(self.path)), ["model"])
    loaded = tf.saved_model.load(self.path)
    expected = _expected(self.train_dir)
    np.testing.assert_allclose(loaded.serve(_inputs()), expected, rtol=1e-5)
    signature = loaded.signatures["serving_default"]
    first, second = map(tf.constant, _inputs())
    (outputs,) = signature(first=first, second=second).values()
    np.testing.assert_allclose(outputs, expected, rtol=1e-5)
    # The stand-ins of both tables in `variables`, and the shards.
    self.assertEqual(_rows_in(self.path), [0, 0, 7, 10, 20, 20])

  def test_the_model_stays_as_it_was(self):
    for model in (self.trained, _keras_model()):
      layer = model.get_layer("words")
      weights = [(weight, weight.value) for weight in model.weights]
      kind, rows = type(layer), tables.rows_of(layer._embeddings)
      tf_replicas.export(model, self.train_dir, tempfile.mkdtemp())
      self.assertIs(type(layer), kind)
      self.assertIs(tables.rows_of(layer._embeddings), rows)
      for weight, value in weights:
        self.assertIs(weight.value, value)
        self.assertEqual(weight.shape, tuple(value.shape))

  def test_a_part_of_the_model(self):
    whole = _model()
    ids = keras.Input((3,), dtype="int32")
    tower = keras.Model(ids, whole.get_layer("words")(ids))
    tf_replicas.export(tower, self.train_dir, self.path)
    loaded = tf.saved_model.load(self.path)
    tf_replicas.load_tables(whole, self.train_dir)
    np.testing.assert_array_equal(loaded.serve(IDS), tower(IDS))

  def test_an_id_out_of_range_is_named(self):
    tf_replicas.export(
      self.trained, self.train_dir, self.path, max_shard_bytes=400
    )
    loaded = tf.saved_model.load(self.path)
    for bad in (-1, WORDS):
      ids = np.array([[0, 1, bad]], "int32")
      message = r"of words/embeddings must be in \[0, 50\)"
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, message):
        loaded.serve(_inputs(ids))

  def test_needs_nothing_but_tensorflow(self):
    tf_replicas.export(
      _model, self.train_dir, self.path, max_shard_bytes=20 * COLUMNS * 4
    )
    folder = tempfile.mkdtemp()
    np.save(f"{folder}/ids.npy", IDS)
    command = [sys.executable, "-c", _STRANGER, self.path]
    names = [f"{folder}/ids.npy", f"{folder}/outputs.npy"]
    subprocess.run([*command, *names], check=True, env=trials.ENVIRON)
    np.testing.assert_allclose(
      np.load(names[1]), _expected(self.train_dir), rtol=1e-5
    )

  def test_the_graph_restores_the_shards(self):
    """Programs that know no objects restore them by ops of the graph."""
    tf_replicas.export(
      _model, self.train_dir, self.path, max_shard_bytes=20 * COLUMNS * 4
    )
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
      graph = v1.saved_model.load(session, ["serve"], self.path)
      signature = graph.signature_def["serving_default"]
      first, second = _inputs()
      feeds = {"first": first, "second": second}
      outputs = session.run(
        [spec.name for spec in signature.outputs.values()],
        {signature.inputs[name].name: ids for name, ids in feeds.items()},
      )
    np.testing.assert_allclose(outputs[0], _expected(self.train_dir), rtol=1e-5)

  def test_refuses_another_model(self):
    for model, message in (
      (
        lambda: _model(words=60),
        r"embeddings has shape \[50, 4\] in the checkpoint and \[60, 4\] in",
      ),
      (
        lambda: _chain(keras.layers.Dense(2, name="other"), dtype="float32"),
        "other/bias is not in the checkpoint; other/kernel is not in",
      ),
      (
        lambda: _chain(embeddings.Embedding(9, 2, name="no")),
        "no/embeddings is not in the checkpoint",
      ),
    ):
      for each in (model, model()):
        with self.assertRaisesRegex(checkpoints.CheckpointError, message) as e:
          tf_replicas.export(each, self.train_dir, self.path)
        self.assertNotIn("\n", str(e.exception))
    self.assertFalse(os.path.exists(self.path))

  def test_refuses_bad_arguments(self):
    def refuses(kind, message, model=_model, **arguments):
      arguments = {"train_dir": self.train_dir, "path": self.path, **arguments}
      with self.assertRaisesRegex(kind, message):
        tf_replicas.export(model, **arguments)

    empty = tempfile.mkdtemp()
    refuses(
      checkpoints.MissingCheckpointError, "No checkpoint file", train_dir=empty
    )
    refuses(FileExistsError, "`path` must not exist", path=self.train_dir)
    refuses(FileExistsError, "`path` must be a directory", path=__file__)
    for size in (0, 1.5, True):
      refuses(ValueError, "`max_shard_bytes` must be", max_shard_bytes=size)
    refuses(TypeError, "`model` must be a model of Keras 3", model=7)
    refuses(TypeError, "`model` must be a model of Keras 3", model=lambda: 7)
    refuses(ValueError, "`model` must be built", model=keras.Sequential())
    self.assertFalse(os.path.exists(self.path))


class CheckpointTest(parameterized.TestCase):
  """Exports of checkpoints that were not trained."""

  def setUp(self):
    super().setUp()
    self.train_dir, self.path = tempfile.mkdtemp(), tempfile.mkdtemp()

  def _serve(self, model, ids, **arguments):
    tf_replicas.export(
      model, self.train_dir, self.path, max_shard_bytes=160, **arguments
    )
    loaded = tf.saved_model.load(self.path)
    return loaded.serve(ids)

  @parameterized.product(
    kind=["dense", "ragged", "sparse"], combiner=["sum", "mean", "sqrtn"]
  )
  def test_combines(self, kind, combiner):
    table = _random(WORDS, COLUMNS)
    _save(self.train_dir, table)
    ragged = tf.ragged.constant([[4, 49], [], [20, 20, 1]], dtype=tf.int32)
    ids = {"dense": tf.constant(IDS), "ragged": ragged}
    ids["sparse"] = ragged.to_sparse()
    options = {} if kind == "dense" else {kind: True}

    def model_fn():
      inputs = keras.Input((None,), dtype="int32", name="ids", **options)
      layer = embeddings.Embedding(
        WORDS, COLUMNS, name="words", combiner=combiner
      )
      return keras.Model({"ids": inputs}, layer(inputs))

    found = self._serve(model_fn, {"ids": ids[kind]})
    expected = tables.gather(tf.Variable(table), ids[kind], combiner)
    np.testing.assert_allclose(found, expected, rtol=1e-6)

  def test_a_model_class_with_weighted_lookups(self):
    table = _random(WORDS, COLUMNS)
    _save(self.train_dir, table, name="mine/words")

    class Mine(keras.Model):
      def __init__(self):
        super().__init__(name="mine")
        self.words = keras.layers.Embedding(WORDS, COLUMNS, name="words")

      def build(self, shape):
        self.words.build(shape)
        self.built = True

      def call(self, ids):
        weights = tf.constant([[1.0, 2.0, 3.0]])
        return tf_replicas.lookup(self.words, ids, "sum", weights)

    def model_fn():
      model = Mine()
      model.build((None, 3))
      return model

    signature = [tf.TensorSpec([1, 3], tf.int64)]
    found = self._serve(
      model_fn, np.array([[5, 20, 49]]), input_signature=signature
    )
    expected = table[5] + 2 * table[20] + 3 * table[49]
    np.testing.assert_allclose(found, expected[None], rtol=1e-5)

  def _averages(self):
    values = {name: _random(n, COLUMNS) for n, name in ((50, "v"), (51, "a"))}
    values["a"] = values["a"][:50]
    others = {
      "variables/scale/scale": np.float32([2.0]),
      "averages/scale/scale": np.float32([3.0]),
    }
    _save(self.train_dir, values["v"], others, averages=values["a"])

    class Scale(keras.layers.Layer):
      def build(self, _):
        self.scale = self.add_weight(shape=(1,), name="scale")

      def call(self, rows):
        return rows * self.scale

    def model_fn():
      inputs = keras.Input((3,), dtype="int32")
      rows = embeddings.Embedding(WORDS, COLUMNS, name="words")(inputs)
      return keras.Model(inputs, Scale(name="scale")(rows))

    return values, model_fn

  def test_without_averages(self):
    values, model_fn = self._averages()
    found = self._serve(model_fn, IDS)
    np.testing.assert_allclose(found, 2 * values["v"][IDS], rtol=1e-6)

  def test_averages(self):
    values, model_fn = self._averages()
    found = self._serve(model_fn, IDS, averaged=True)
    np.testing.assert_allclose(found, 3 * values["a"][IDS], rtol=1e-6)

  def test_averages_of_none_are_the_variables(self):
    table = _random(WORDS, COLUMNS)
    _save(self.train_dir, table)
    layer = embeddings.Embedding(WORDS, COLUMNS, name="words")
    model = _chain(layer)
    found = self._serve(model, IDS, averaged=True)
    np.testing.assert_array_equal(found, table[IDS])

  def test_a_table_that_was_trained_as_an_ordinary_variable(self):
    table = _random(WORDS, COLUMNS)
    values = {"global_step": np.int64(7), "variables/words/embeddings": table}
    checkpoints.save(self.train_dir, values)

    def model_fn():
      layer = embeddings.Embedding(WORDS, COLUMNS, name="words")
      return _chain(layer)

    np.testing.assert_array_equal(self._serve(model_fn, IDS), table[IDS])

  def test_a_model_without_tables(self):
    kernel = _random(3, 2)
    values = {"variables/out/kernel": kernel, "variables/out/bias": kernel[0]}
    checkpoints.save(self.train_dir, {"global_step": np.int64(7), **values})
    scale = keras.layers.Rescaling(0.5)
    out = keras.layers.Dense(2, name="out")
    model = _chain(scale, out, dtype="float32")
    x = np.float32([[4.0, 5.0, 6.0]])
    expected = 0.5 * x @ kernel + kernel[0]
    np.testing.assert_allclose(self._serve(model, x), expected, rtol=1e-5)

  def test_weights_that_are_not_trained_may_be_of_the_model(self):
    table = _random(WORDS, COLUMNS)
    _save(self.train_dir, table)
    out = keras.layers.Dense(
      1, name="fixed", kernel_initializer="ones", trainable=False
    )
    layer = embeddings.Embedding(WORDS, COLUMNS, name="words")
    model = _chain(layer, out)
    found = self._serve(model, IDS)
    expected = table[IDS].sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(found, expected, rtol=1e-5)

  def test_damaged_rows_end_in_one_line(self):
    path = _save(self.train_dir, _random(WORDS, COLUMNS))
    (data,) = tf.io.gfile.glob(f"{path}.tables.data-*")
    with open(data, "wb") as file:
      file.write(b"short")
    layer = embeddings.Embedding(WORDS, COLUMNS, name="words")
    model = _chain(layer)
    with self.assertRaisesRegex(
      checkpoints.UnreadableCheckpointError, r"\.tables is damaged"
    ) as caught:
      tf_replicas.export(model, self.train_dir, self.path)
    self.assertNotIn("\n", str(caught.exception))
    self.assertEmpty(os.listdir(self.path))


def test_needs_memory_for_a_few_blocks_only(tmp_path):
  """The second table has 256 MiB."""
  directories = []
  for rows in (100, 1 << 20):
    directories.append(str(tmp_path / str(rows)))
    name = "variables/words/embeddings"
    values = {"global_step": np.int64(7)}
    checkpoints.save(
      directories[-1], values, row_tensors={name: _Counting(rows)}
    )
  result = trials.python("-c", _MEASURED, *directories)
  assert result.returncode == 0, result.stdout + result.stderr
  grown = int(result.stdout.rpartition("BYTES ")[2])
  assert grown < 128 << 20
  ids = tf.constant([[0, 1, (1 << 20) - 1], [5, 500_000, 400_000]])
  loaded = tf.saved_model.load(f"{directories[1]}/exported")
  found = loaded.serve(ids)
  sums = tf.reduce_sum(tf.cast(ids, tf.float32), axis=1)
  np.testing.assert_array_equal(found, tf.repeat(sums[:, None], 64, axis=1))


if __name__ == "__main__":
  absltest.main()
