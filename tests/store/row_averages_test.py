"""Tests for store.row_averages: moving averages of rows on several tasks."""

import tempfile

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests.support import stores
from tf_replicas.runtime import resources
from tf_replicas.session import checkpoints
from tf_replicas.store import applier
from tf_replicas.store import inner_optimizer
from tf_replicas.store import moving_averages
from tf_replicas.store import parameter_store
from tf_replicas.store import placement
from tf_replicas.store import tables

SHAPE = (7, 2)
# Row 0 is never touched, row 1 once, row 2 often; some ids occur twice.
IDS = [[2, 3, 2], [2, 1, 4], [2, 5, 5], [6, 2], [4, 4, 4]] + [
  [2, 3 + step % 4] for step in range(25)
]


def _gradient(step):
  rng = np.random.default_rng(step)
  return rng.normal(size=(len(IDS[step]), SHAPE[1])).astype("float32")


class _Training:
  """A table and its average, updated by SGD on `num_tasks` PS tasks."""

  def __init__(self, averages, num_tasks=2, partition="modulo"):
    self.averages = averages
    self.home = tables.Home(
      resources.new_namespace("averages"), num_tasks, stores.device
    )
    self.variable = tf.Variable(tf.zeros([0, SHAPE[1]]), name="table")
    initializer = keras.initializers.RandomNormal(0.5, 2.0, seed=3)
    tables.attach(
      self.variable, "table", SHAPE, initializer, partition, self.home
    )
    specs = placement.from_variables([self.variable])
    self.store = parameter_store.ParameterStore(
      specs,
      placement.plan(specs, placement.GreedyByBytes(num_tasks)),
      num_tasks=num_tasks,
      device_of_task=stores.device,
      namespace=self.home.namespace,
    )
    inner = inner_optimizer.InnerOptimizer(keras.optimizers.SGD(0.5))
    self._update = applier.Applier(
      self.store, inner, variable_averages=averages, clip_norm=None
    )
    first = [tf.zeros([0, SHAPE[1]])]
    self.store.assign_first(first)
    self._update.initialize(first)
    inner.build(self.store)
    self.store.start()

  @tf.function(autograph=False, reduce_retracing=True)
  def _step(self, ids, values, step):
    by_task = self.store.split_by_task([tf.IndexedSlices(values, ids)])
    made = self._update([True], step, by_task.__getitem__, 1)
    with tf.control_dependencies([made]):
      self.store.advance(step, tf.constant(1))

  def update(self, batch, step=None):
    """Applies the gradient of a batch, as the update that follows `step`."""
    ids = tf.constant(IDS[batch], tf.int64)
    step = tf.constant(batch if step is None else step, tf.int64)
    self._step(ids, tf.constant(_gradient(batch)), step)

  def read(self, kind="averages"):
    return self.store.row_tensors()[f"{kind}/table"].read(0, SHAPE[0])


class _Reference:
  """The same training of an ordinary variable, with its ordinary average."""

  def __init__(self, averages, first):
    self.variable, self.shadow = tf.Variable(first), tf.Variable(first)
    self._averages = averages

  def update(self, batch):
    change = np.zeros(SHAPE, "float32")
    np.add.at(change, IDS[batch], 0.5 * _gradient(batch))
    self.variable.assign_sub(change)
    self._averages.update([(self.shadow, self.variable)], batch + 1)


def _averages(decay, is_aware=True):
  return moving_averages.MovingAverages(decay, num_updates_aware=is_aware)


class RowAveragesTest(parameterized.TestCase):
  # With a decay of 0.5, it is constant from step 8 on; with 0.99, from 890 on.
  @parameterized.parameters(
    (_averages(0.5), "modulo", 2),
    (_averages(0.5), "range", 2),
    (_averages(0.99), "modulo", 2),
    (_averages(0.8, False), "range", 1),
  )
  def test_equals_the_average_of_an_ordinary_variable(
    self, averages, partition, num_tasks
  ):
    training = _Training(averages, num_tasks, partition)
    reference = _Reference(averages, training.read("variables"))
    np.testing.assert_array_equal(training.read(), reference.shadow)
    for batch in range(len(IDS)):
      training.update(batch)
      reference.update(batch)
      np.testing.assert_allclose(
        training.read(), reference.shadow, rtol=1e-5, atol=1e-6
      )
    np.testing.assert_allclose(
      training.read("variables"), reference.variable, rtol=1e-5, atol=1e-6
    )
    self.assertFalse(np.allclose(training.read()[2], reference.variable[2]))

  def test_an_update_writes_the_averages_of_its_rows_only(self):
    training = _Training(_averages(0.5))
    for batch in range(4):
      training.update(batch)
    shadows = training.store.specs[0].table.averages
    # Rows 0, 2, 4, 6 are on the first task.
    self.assertEqual(list(shadows[0].steps.numpy()), [0, 4, 2, 4])
    self.assertEqual(list(shadows[1].steps.numpy()), [2, 1, 3])
    before = [part.shadow.numpy() for part in shadows]
    training.read()
    training.update(4)  # Of row 4.
    changed = [
      np.any(old != part.shadow.numpy(), axis=1).tolist()
      for old, part in zip(before, shadows, strict=True)
    ]
    self.assertEqual(changed, [[False, False, True, False], [False] * 3])

  def test_a_late_update_counts_once(self):
    """Update 2 of a row ends after update 3, which did not see its change."""
    training = _Training(_averages(0.5, False))
    first = training.read("variables")[2]
    training.update(0)
    one = training.read("variables")[2]
    training.update(2, step=2)
    two = training.read("variables")[2]
    training.update(1, step=1)
    training.store.global_step.assign(3)
    average = (first + one) / 2
    average = (average + one) / 2  # Update 2.
    average = (average + two) / 2  # Update 3.
    np.testing.assert_allclose(training.read()[2], average, rtol=1e-5)
    training.store.global_step.assign(4)
    average = (average + training.read("variables")[2]) / 2
    np.testing.assert_allclose(training.read()[2], average, rtol=1e-5)

  def test_a_large_gap(self):
    """The average of a row that is touched again long afterwards."""
    averages = _averages(0.999)
    training = _Training(averages)
    training.update(1)
    last = 12_345
    value, shadow = training.read("variables")[1], training.read()[1]
    decay = np.prod([averages.decay_at(k).numpy() for k in range(2, last + 1)])
    caught_up = value + decay * (shadow - value)
    training.update(1, step=last)
    new = training.read("variables")[1]
    expected = new + averages.decay_at(last + 1).numpy() * (caught_up - new)
    np.testing.assert_allclose(training.read()[1], expected, rtol=1e-5)

  @parameterized.parameters((1, "modulo"), (3, "modulo"), (2, "range"))
  def test_goes_on_from_a_checkpoint(self, num_tasks, partition):
    averages = _averages(0.5)
    whole = _Training(averages)
    for batch in range(6):
      whole.update(batch)
    tensors = whole.store.row_tensors()
    self.assertCountEqual(tensors, ["variables/table", "averages/table"])
    path = checkpoints.save(
      tempfile.mkdtemp(),
      whole.store.state(),
      row_tensors=tensors,
      written_by_ps=num_tasks > 1,
    )
    resumed = _Training(averages, num_tasks, partition)
    checkpoints.restore(
      path, resumed.store, row_tensors=resumed.store.row_tensors()
    )
    np.testing.assert_allclose(resumed.read(), whole.read(), rtol=1e-6)
    for batch in range(6, 12):
      whole.update(batch)
      resumed.update(batch)
    np.testing.assert_allclose(
      resumed.read(), whole.read(), rtol=1e-5, atol=1e-6
    )

  def test_starts_at_the_restored_rows(self):
    """If the checkpoint has no average of the table."""
    old = _Training(None)
    for batch in range(3):
      old.update(batch)
    path = checkpoints.save(
      tempfile.mkdtemp(), old.store.state(), row_tensors=old.store.row_tensors()
    )
    new = _Training(_averages(0.5))
    restored = checkpoints.restore(
      path,
      new.store,
      is_optional=lambda name: name.startswith("averages/"),
      row_tensors=new.store.row_tensors(),
    )
    self.assertEqual(restored.from_variables, ("averages/table",))
    self.assertEqual((restored.fresh, restored.ignored), ((), ()))
    np.testing.assert_array_equal(new.read(), old.read("variables"))
    reference = _Reference(new.averages, old.read("variables"))
    for batch in range(3, 6):
      new.update(batch)
      reference.update(batch)
    np.testing.assert_allclose(
      new.read(), reference.shadow, rtol=1e-5, atol=1e-6
    )

  def test_lookups_read_averages_outside_of_the_training(self):
    training = _Training(_averages(0.5))
    for batch in range(3):
      training.update(batch)
    ids = tf.constant([2, 0, 5])
    np.testing.assert_array_equal(
      tables.gather(training.variable, ids),
      training.read("variables")[ids.numpy()],
    )
    training.home.reads_averages = True
    np.testing.assert_array_equal(
      tables.gather(training.variable, ids), training.read()[ids.numpy()]
    )
    with tables.placeholders([(training.variable, tf.zeros([0, 2]))]):
      found = tables.gather(training.variable, ids)
    np.testing.assert_array_equal(
      found, training.read("variables")[ids.numpy()]
    )

  def test_refuses_an_average_that_fits_no_task(self):
    home = tables.Home(resources.new_namespace("large"), 2, stores.device)
    zeros = keras.initializers.Zeros()
    shape = (10**11, 64)
    rows = tables.Rows("table", shape, tf.float32, zeros, "modulo", home)
    message = "average of the table 'table' needs 11920.9 GiB of memory on"
    with self.assertRaisesRegex(ValueError, message):
      rows.initialize(rows.parts)


if __name__ == "__main__":
  absltest.main()
