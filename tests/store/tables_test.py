"""Tests for store.tables: rows on several tasks."""

import contextlib
import os
import tempfile

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests.support import optimizers
from tests.support import stores
from tf_replicas.runtime import resources
from tf_replicas.runtime import row_files
from tf_replicas.store import inner_optimizer
from tf_replicas.store import parameter_store
from tf_replicas.store import placement
from tf_replicas.store import tables

SHAPE = (2500, 3)
initializers = keras.initializers


def _home(num_tasks):
  return tables.Home(
    resources.new_namespace("tables"), num_tasks, stores.device
  )


def _variable(
  num_tasks=2, partition="modulo", initializer=None, shape=SHAPE, path="table"
):
  """What stands for a new table of `num_tasks` parts."""
  variable = tf.Variable(tf.zeros([0, shape[1]]), name=path)
  if initializer is None:
    initializer = initializers.RandomNormal(0.5, 2.0, seed=3)
  home = _home(num_tasks)
  tables.attach(variable, path, shape, initializer, partition, home)
  return variable


def _rows(*args, **kwargs):
  rows = tables.rows_of(_variable(*args, **kwargs))
  rows.initialize()
  return rows


def _all(rows):
  return tables.RowTensor(rows, rows.parts).read(0, rows.shape[0])


class RowsTest(parameterized.TestCase):
  @parameterized.product(partition=["modulo", "range"], num_tasks=[1, 2, 3, 4])
  def test_every_row_has_one_place(self, partition, num_tasks):
    rows = tables.rows_of(_variable(num_tasks, partition, shape=(11, 3)))
    numbers, within = rows.place(tf.range(11, dtype=tf.int64))
    places = set(zip(numbers.numpy(), within.numpy(), strict=True))
    expected = {
      (n, i) for n, size in enumerate(rows.sizes) for i in range(size)
    }
    self.assertEqual(places, expected)
    self.assertEqual(sum(rows.sizes), 11)
    self.assertLessEqual(max(rows.sizes) - min(rows.sizes), 1)
    if partition == "range":
      self.assertEqual(sorted(numbers.numpy()), list(numbers.numpy()))
    else:
      self.assertEqual(
        list(numbers.numpy()), [i % num_tasks for i in range(11)]
      )

  @parameterized.parameters(
    (initializers.RandomUniform(-2.0, 1.0, seed=1), 2, "modulo"),
    (initializers.RandomNormal(0.5, 2.0, seed=1), 3, "range"),
    (initializers.TruncatedNormal(0.5, 2.0, seed=1), 4, "modulo"),
    (initializers.GlorotUniform(seed=1), 2, "range"),
    (initializers.HeNormal(seed=1), 3, "modulo"),
    (
      initializers.VarianceScaling(
        2.0, "fan_out", "untruncated_normal", seed=1
      ),
      4,
      "range",
    ),
  )
  def test_first_values_do_not_depend_on_the_parts(
    self, initializer, num_tasks, partition
  ):
    """A block of rows is drawn in the same way, whichever parts take it."""
    one = _all(_rows(1, "range", initializer))
    other = _all(_rows(num_tasks, partition, initializer))
    np.testing.assert_array_equal(one, other)
    # They are distributed as those of Keras are.
    theirs = initializer(SHAPE).numpy()
    self.assertAlmostEqual(one.mean(), theirs.mean(), delta=0.1 * theirs.std())
    self.assertAlmostEqual(one.std(), theirs.std(), delta=0.05 * theirs.std())
    self.assertAlmostEqual(one.max(), theirs.max(), delta=1.5 * theirs.std())
    self.assertGreater(len(np.unique(one)), 0.99 * one.size)

  @parameterized.parameters(("zeros", 0.0), ("ones", 1.0))
  def test_constants(self, name, value):
    found = _all(_rows(2, initializer=initializers.get(name)))
    np.testing.assert_array_equal(found, np.full(SHAPE, value))

  @parameterized.parameters(
    initializers.Orthogonal(seed=1),
    initializers.Identity(),
    initializers.RandomUniform(seed=keras.random.SeedGenerator(1)),
    lambda shape, dtype=None: tf.zeros(shape),
  )
  def test_refuses_an_initializer_of_whole_tables(self, initializer):
    with self.assertRaisesRegex(ValueError, "draws every row by itself"):
      _variable(initializer=initializer)

  def test_refuses_a_second_table_of_the_path(self):
    home = _home(1)
    for context in (
      contextlib.nullcontext(),
      self.assertRaisesRegex(ValueError, "distinct paths.*'a' twice"),
    ):
      with context:
        variable = tf.Variable(tf.zeros([0, 2]))
        tables.attach(
          variable, "a", (3, 2), initializers.Zeros(), "range", home
        )

  def test_refuses_what_fits_no_task(self):
    variable = _variable(shape=(10**11, 64), initializer=initializers.Zeros())
    message = "'table' needs 11920.9 GiB of memory on .* are available"
    with self.assertRaisesRegex(ValueError, message):
      tables.rows_of(variable).initialize()

  def test_reads_and_assigns_blocks(self):
    rows = _rows(3)
    tensor = tables.RowTensor(rows, rows.parts)
    before = _all(rows)
    values = np.arange(12, dtype="float32").reshape(4, 3)
    tensor.assign(1001, values)
    np.testing.assert_array_equal(tensor.read(1000, 1006)[1:5], values)
    after = _all(rows)
    np.testing.assert_array_equal(after[:1001], before[:1001])
    np.testing.assert_array_equal(after[1005:], before[1005:])


class RemoteWritersTest(parameterized.TestCase):
  @parameterized.product(partition=["modulo", "range"], num_tasks=[1, 3])
  def test_the_tasks_write_what_others_read(self, partition, num_tasks):
    rows = _rows(num_tasks, partition)
    tensor = tables.RowTensor(rows, rows.parts)
    self.assertEqual(tensor.num_parts, num_tasks)
    prefix = os.path.join(tempfile.mkdtemp(), "tables")
    writers = tensor.remote_writers("variables/a")
    self.assertLen(writers, num_tasks)  # Of one block each.
    row_files.write(prefix, writers, num_threads=num_tasks)
    ((name, entry),) = row_files.shapes(prefix).items()
    self.assertEqual((name, entry.shape), ("variables/a", tensor.shape))
    found = row_files.read(prefix, name, entry, 5, 2000)
    np.testing.assert_array_equal(found, tensor.read(5, 2000))


class LookupTest(parameterized.TestCase):
  @parameterized.product(
    partition=["modulo", "range"],
    num_tasks=[1, 3],
    is_function=[False, True],
  )
  def test_gradient_has_each_row_once(self, partition, num_tasks, is_function):
    variable = _variable(num_tasks, partition)
    rows = tables.rows_of(variable)
    rows.initialize()
    ids = tf.constant([[7, 2000, 7], [0, 2499, 1]])

    def step():
      with tf.GradientTape() as tape:
        found = tables.gather(variable, ids)
        loss = tf.reduce_sum(found * found)
      return found, tape.gradient(loss, variable)

    if is_function:
      step = tf.function(step, autograph=False)
    found, gradient = step()
    expected = _all(rows)[ids.numpy()]
    np.testing.assert_array_equal(found, expected)
    self.assertIsInstance(gradient, tf.IndexedSlices)
    got = dict(
      zip(gradient.indices.numpy(), gradient.values.numpy(), strict=True)
    )
    self.assertCountEqual(got, [7, 2000, 0, 2499, 1])
    for row, value in got.items():
      count = int(np.sum(ids.numpy() == row))
      np.testing.assert_allclose(value, 2 * count * _all(rows)[row], rtol=1e-6)

  def test_gradients_of_two_lookups(self):
    variable = _variable()
    rows = tables.rows_of(variable)
    rows.initialize()
    with tf.GradientTape() as tape:
      one = tables.gather(variable, tf.constant([3, 4]))
      two = tables.gather(variable, tf.constant([[4], [5]], tf.int64))
      loss = tf.reduce_sum(one) + 2 * tf.reduce_sum(two)
    gradient = tape.gradient(loss, variable)
    total = np.zeros(SHAPE)
    np.add.at(total, gradient.indices.numpy(), gradient.values.numpy())
    self.assertEqual(list(total[2:7, 0]), [0, 1, 3, 2, 0])

  def test_ragged_ids(self):
    variable = _variable()
    rows = tables.rows_of(variable)
    rows.initialize()
    found = tables.gather(variable, tf.ragged.constant([[1], [], [2, 3]]))
    self.assertEqual(found.row_lengths().numpy().tolist(), [1, 0, 2])
    np.testing.assert_array_equal(found.flat_values, _all(rows)[1:4])

  @parameterized.product(
    combiner=["sum", "mean", "sqrtn"],
    kind=["ragged", "sparse", "dense", "nested"],
    is_table=[True, False],
  )
  def test_combines(self, combiner, kind, is_table):
    variable = _variable()
    rows = tables.rows_of(variable)
    rows.initialize()
    values = _all(rows)
    if not is_table:
      variable = tf.Variable(values)
    bags = [[4, 7], [4, 2000], [2, 2]]
    if kind != "dense":
      bags = [[4, 7, 4], [], [2000]]
    ids = tf.ragged.constant(bags, dtype=tf.int64)
    if kind == "dense":
      ids = ids.to_tensor()
    elif kind == "sparse":
      ids = ids.to_sparse()
    elif kind == "nested":
      ids = tf.RaggedTensor.from_row_lengths(ids, [1, 0, 2])
    with tf.GradientTape() as tape:
      found = tables.gather(variable, ids, combiner)
      if kind == "nested":
        self.assertEqual(found.row_lengths().numpy().tolist(), [1, 0, 2])
        found = found.flat_values
      weights = tf.constant([[1.0], [10.0], [100.0]])
      loss = tf.reduce_sum(found * weights)
    expected, slopes = np.zeros([3, 3]), np.zeros(SHAPE)
    for number, bag in enumerate(bags):
      divisor = {"sum": 1, "mean": len(bag), "sqrtn": len(bag) ** 0.5}[combiner]
      for i in bag:
        expected[number] += values[i] / divisor
        slopes[i] += 10.0**number / divisor
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    gradient = tape.gradient(loss, variable)
    total = np.zeros(SHAPE)
    np.add.at(total, gradient.indices.numpy(), gradient.values.numpy())
    np.testing.assert_allclose(total, slopes, rtol=1e-5)

  @parameterized.product(
    combiner=["sum", "mean", "sqrtn"], kind=["ragged", "sparse", "dense"]
  )
  def test_combines_with_weights_as_tensorflow_does(self, combiner, kind):
    variable = _variable()
    rows = tables.rows_of(variable)
    rows.initialize()
    ids = tf.ragged.constant([[4, 7], [], [2000]], dtype=tf.int64)
    weights = tf.ragged.constant([[0.5, 2.0], [], [3.0]])
    if kind == "dense":
      ids = tf.constant([[4, 7], [4, 4], [2000, 1]])
      weights = tf.constant([[0.5, 2.0], [1.0, 0.0], [3.0, -1.0]])
    sparse = [
      tf.RaggedTensor.from_tensor(t).to_sparse()
      if kind == "dense"
      else t.to_sparse()
      for t in (ids, weights)
    ]
    if kind == "sparse":
      ids, weights = sparse
    found = tables.gather(variable, ids, combiner, weights)
    expected = tf.nn.embedding_lookup_sparse(
      tf.constant(_all(rows)), *sparse, combiner=combiner
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)

  @parameterized.parameters(
    (None, tf.ones([1, 2]), "must be None without a `combiner`"),
    ("sum", tf.ones([2]), "must have the structure and shape of the ids"),
    ("sum", tf.sparse.eye(1, 2), "must have the structure and shape"),
  )
  def test_refuses_weights(self, combiner, weights, message):
    ids = tf.constant([[1, 2]])
    with self.assertRaisesRegex(ValueError, message):
      tables.gather(_variable(), ids, combiner, weights)

  @parameterized.parameters(
    (tf.constant([1]), "max", ValueError, "one of sum, mean, sqrtn, or None"),
    (tf.constant(1), "sum", ValueError, "a dense tensor of at least 1"),
    (tf.ones([1]), "sum", TypeError, "must be integers"),
    (tf.sparse.eye(2), None, TypeError, "where the ids .* are sparse"),
    (
      tf.sparse.expand_dims(tf.sparse.eye(2), 0),
      "sum",
      ValueError,
      "a sparse tensor of 2 dimensions",
    ),
  )
  def test_refuses_to_combine(self, ids, combiner, kind, message):
    with self.assertRaisesRegex(kind, message):
      tables.gather(_variable(), ids, combiner)

  def test_no_ids(self):
    variable = _variable()
    tables.rows_of(variable).initialize()
    found = tables.gather(variable, tf.zeros([0, 4], tf.int64))
    self.assertEqual(found.shape, [0, 4, 3])

  @parameterized.parameters(-1, 2500)
  def test_refuses_an_id_out_of_range(self, bad):
    variable = _variable()
    tables.rows_of(variable).initialize()
    message = r"the ids of rows of table must be in \[0, 2500\). Received:"
    with self.assertRaisesRegex(
      tf.errors.InvalidArgumentError, message
    ) as caught:
      tf.function(tables.gather)(variable, tf.constant([0, bad]))
    line = f"the ids of rows of table must be in [0, 2500). Received: {bad}"
    self.assertEqual(tables.bad_ids(caught.exception), line)
    self.assertEqual(tables.bad_ids(tf.errors.OpError(None, None, "", 1)), "")

  def test_refuses_ids_that_are_no_integers(self):
    message = "'table' must be integers. Received: float32"
    with self.assertRaisesRegex(TypeError, message):
      tables.gather(_variable(), tf.constant([1.0]))

  def test_refuses_after_the_end(self):
    variable = _variable()
    tables.rows_of(variable).home.is_open = False
    with self.assertRaisesRegex(RuntimeError, "load_tables"):
      tables.gather(variable, tf.constant([1]))


class ShardsTest(parameterized.TestCase):
  def _filled(self, shape=(25, 3), **arguments):
    """Shards of a table, whose rows they have, and the table."""
    table = np.random.default_rng(1).normal(size=shape).astype("float32")
    shards = tables.Shards("table", shape, tf.float32, **arguments)
    for variable, (begin, end) in zip(
      shards.variables, shards.ranges, strict=True
    ):
      variable.assign(table[begin:end])
    return shards, table

  @parameterized.parameters((12, 25), (40, 9), (120, 3), (1000, 1), (5, 25))
  def test_looks_up_rows(self, max_bytes, count):
    shards, table = self._filled(max_bytes=max_bytes)
    self.assertLen(shards.variables, count)
    self.assertEqual(shards.names, [f"table/shard_{n}" for n in range(count)])
    whole = tf.Variable(table)
    ids = tf.constant([[24, 0, 9], [9, 10, 23]])
    with tables.looked_up_in_shards([(whole, shards)]):
      self.assertFalse(tables.has_rows(whole))
      whole.assign(tf.zeros_like(whole))
      found = tf.function(tables.gather, autograph=False)(whole, ids)
    self.assertTrue(tables.has_rows(whole))
    self.assertEqual(found.shape, (2, 3, 3))
    np.testing.assert_array_equal(found, table[ids])
    none = shards.gather(tf.zeros([0], tf.int64))
    self.assertEqual(none.shape, (0, 3))

  def test_large_shards_are_whole_blocks_of_files(self):
    shape = 1 << 20, 64  # 256 MiB, in blocks of 131,072 rows.
    shards = tables.Shards("table", shape, tf.float32, 100 << 20)
    self.assertEqual(
      shards.ranges, [(0, 393216), (393216, 786432), (786432, 1 << 20)]
    )

  @parameterized.parameters(-1, 25)
  def test_refuses_an_id_out_of_range(self, bad):
    shards, _ = self._filled(max_bytes=120)
    message = rf"of table must be in \[0, 25\). Received:\]? \[?{bad}"
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, message):
      tf.function(shards.gather, autograph=False)(
        tf.constant([0, bad], tf.int64)
      )


class _Updates:
  """An inner optimizer on a table of two parts and a dense variable."""

  def __init__(self, optimizer, partition="modulo"):
    self.table = _variable(partition=partition, shape=(9, 3))
    self.rows = tables.rows_of(self.table)
    dense = tf.Variable(tf.ones([4]), name="dense")
    specs = placement.from_variables([self.table, dense])
    self.store = parameter_store.ParameterStore(
      specs,
      placement.plan(specs, placement.GreedyByBytes(2)),
      num_tasks=2,
      device_of_task=stores.device,
      namespace=self.rows.home.namespace,
    )
    self.store.assign_first([tf.zeros([0, 3]), tf.ones([4])])
    self.store.start()
    self.inner = inner_optimizer.InnerOptimizer(optimizer)
    self.inner.build(self.store)

  def apply(self, gradient, step=0):
    """Applies a gradient of the table, and one of ones to `dense`."""
    self._apply(gradient.values, gradient.indices, tf.constant(step, tf.int64))

  @tf.function(autograph=False)
  def _apply(self, values, indices, step):
    by_task = self.store.split_by_task(
      [tf.IndexedSlices(values, indices), tf.ones([4])]
    )
    changed = []
    for task, parts in enumerate(by_task):
      variables = [
        self.store.variables(self.store.contributed[position])[number]
        for position, number in self.store.contributed_shards(task)
      ]
      changed = self.inner.apply(task, parts, variables, step)
    self.inner.commit(changed)


def _slices(ids, columns=3):
  rng = np.random.default_rng(sum(ids))
  values = rng.normal(size=(len(ids), columns)).astype("float32")
  return tf.IndexedSlices(tf.constant(values), tf.constant(ids, tf.int64))


class UpdateTest(parameterized.TestCase):
  @parameterized.parameters(
    *("sgd", "momentum", "adagrad", "adam", "amsgrad", "rmsprop"),
    *("adadelta", "adamax", "nadam", "ftrl", "lion", "decay"),
    # An optimizer sees rows of a part, however they came there.
    ("adam", "range"),
  )
  def test_only_touched_rows_change(self, name, partition="modulo"):
    o = keras.optimizers
    make = {
      "sgd": lambda: o.SGD(0.5),
      "momentum": lambda: o.SGD(0.5, momentum=0.9, nesterov=True),
      "adagrad": lambda: optimizers.make("Adagrad", 0.5),
      "adam": lambda: o.Adam(0.1),
      "amsgrad": lambda: o.Adam(0.1, amsgrad=True),
      "rmsprop": lambda: o.RMSprop(0.1, momentum=0.5, centered=True),
      "adadelta": lambda: o.Adadelta(0.5),
      "adamax": lambda: o.Adamax(0.1),
      "nadam": lambda: o.Nadam(0.1),
      "ftrl": lambda: optimizers.make(
        "Ftrl", 0.1, l1_regularization_strength=0.01
      ),
      "lion": lambda: o.Lion(0.1),
      "decay": lambda: o.AdamW(0.1, weight_decay=0.1),
    }[name]
    updates = _Updates(make(), partition)
    before = _all(updates.rows)
    dense = {i: tf.Variable(before[i]) for i in range(9)}
    # One optimizer per row, as rows are to be independent of each other.
    references = {i: make() for i in range(9)}
    for step, ids in enumerate([[1, 4, 8], [1, 2], [4, 1, 2, 8]]):
      gradient = _slices(ids)
      updates.apply(gradient, step)
      for row, value in zip(ids, gradient.values, strict=True):
        own = references[row]
        if not own.built:
          own.build([dense[row]])
        own.iterations.assign(step)
        if name == "nadam":
          # The product of all updates so far, not of those of the row.
          own._u_product.assign(_nadam_product(own, step))
        own.apply([value], [dense[row]])
    after = _all(updates.rows)
    for row in (0, 3, 5, 6, 7):
      np.testing.assert_array_equal(after[row], before[row])
    for row in (1, 2, 4, 8):
      self.assertFalse(np.allclose(after[row], before[row]))
      np.testing.assert_allclose(
        after[row], dense[row].numpy(), rtol=1e-5, atol=1e-6, err_msg=str(row)
      )

  @parameterized.parameters("sgd", "adagrad")
  def test_equals_the_update_of_the_whole_table(self, name):
    make = {
      "sgd": lambda: keras.optimizers.SGD(0.5),
      "adagrad": lambda: optimizers.make("Adagrad", 0.5),
    }[name]
    updates, dense = _Updates(make()), make()
    whole = tf.Variable(_all(updates.rows))
    for step, ids in enumerate([[1, 4, 8], [1, 2], [0, 1, 2, 8]]):
      gradient = _slices(ids)
      updates.apply(gradient, step)
      gradient = tf.IndexedSlices(
        gradient.values, gradient.indices, tf.constant([9, 3], tf.int64)
      )
      dense.apply([tf.convert_to_tensor(gradient)], [whole])
    np.testing.assert_allclose(
      _all(updates.rows), whole.numpy(), rtol=1e-6, atol=1e-6
    )

  def test_a_part_without_rows(self):
    updates = _Updates(keras.optimizers.Adam(0.1))
    before = _all(updates.rows)
    updates.apply(_slices([0, 2]))  # Nothing for the second part.
    updates.apply(_slices([]), 1)
    after = _all(updates.rows)
    np.testing.assert_array_equal(after[1::2], before[1::2])
    self.assertFalse(np.allclose(after[0], before[0]))

  def test_slots_are_saved_by_rows(self):
    updates = _Updates(optimizers.make("Adagrad", 0.5, 0.25))
    names = ["variables/table", "slots/adagrad/accumulator/table"]
    tensors = updates.store.row_tensors()
    self.assertCountEqual(tensors, names)
    self.assertNotIn("variables/table", updates.store.state())
    gradient = _slices([8, 3])
    updates.apply(gradient)
    slot = tensors[names[1]].read(0, 9)
    expected = np.full([9, 3], 0.25, "float32")
    expected[[8, 3]] += np.square(gradient.values)
    np.testing.assert_allclose(slot, expected, rtol=1e-6)

  @parameterized.parameters(
    ("Lamb", {}, "each element of a variable.*Lamb"),
    ("Muon", {}, "each element of a variable.*Muon"),
    ("Adafactor", {}, "Adafactor"),
    ("SGD", {"clipnorm": 1.0}, "clip_mean_norm.*clipnorm=1.0"),
  )
  def test_refuses(self, name, arguments, message):
    optimizer = optimizers.make(name, **arguments)
    with self.assertRaisesRegex(ValueError, message):
      _Updates(optimizer)

  def test_refuses_another_library(self):
    class Own:
      def apply(self, gradients, variables):
        """Does nothing."""

    with self.assertRaisesRegex(ValueError, "Keras 3 where there are tables"):
      _Updates(Own())


def _nadam_product(optimizer, step):
  """Nadam's product of momenta before the update `step`."""
  product = 1.0
  for t in range(1, step + 1):
    product *= optimizer.beta_1 * (1.0 - 0.5 * 0.96**t)
  return product


class PlacementTest(absltest.TestCase):
  def test_a_table_is_on_all_tasks(self):
    updates = _Updates(keras.optimizers.SGD(0.1))
    (first, second), (dense,) = updates.store.shards
    self.assertEqual((first.task, second.task), (0, 1))
    self.assertEqual((first.shape, second.shape), ((5, 3), (4, 3)))
    self.assertEqual(dense.shape, (4,))
    self.assertEqual(updates.store.table_paths, ["table"])
    self.assertEqual(updates.store.signature()[0]["rows"], "modulo")

  def test_nothing_of_a_table_is_pulled(self):
    updates = _Updates(keras.optimizers.SGD(0.1))
    _, (table, dense) = updates.store.pull()
    self.assertEqual(table.shape, [0, 3])
    self.assertEqual(dense.shape, [4])

  def test_refuses_a_frozen_table(self):
    variable = tf.Variable(tf.zeros([0, 2]), trainable=False)
    tables.attach(
      variable, "a", (3, 2), initializers.Zeros(), "range", _home(1)
    )
    with self.assertRaisesRegex(ValueError, "'a' must be trainable"):
      placement.from_variables([variable])


if __name__ == "__main__":
  absltest.main()
