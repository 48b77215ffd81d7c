"""Tests moving averages of a table under asynchronous updates."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests.rules.asynchronous import async_replicas_test
from tests.support import stores
from tf_replicas.rules.asynchronous import async_replicas
from tf_replicas.store import moving_averages
from tf_replicas.store import placement
from tf_replicas.store import tables

_SHAPE = (9, 2)


class _Training(async_replicas_test.Training):
  """Clients that train a table and an ordinary variable of the same shape."""

  def _specs(self, values):
    home = tables.Home(stores.namespace(), 2, stores.device)
    table = tf.Variable(tf.zeros([0, _SHAPE[1]]), name="table")
    zeros = keras.initializers.Zeros()
    tables.attach(table, "table", _SHAPE, zeros, "modulo", home)
    own = tf.Variable(values["own"], name="own")
    return placement.from_variables([table, own])

  def read(self, kind):
    """Returns both variables, or their averages."""
    row_tensor = self.stores[0].row_tensors()[f"{kind}/table"]
    state = self.stores[0].state()
    return row_tensor.read(0, _SHAPE[0]), state[f"{kind}/own"].numpy()


def _rule(**options):
  return lambda: async_replicas.AsyncReplicasOptimizer(
    keras.optimizers.SGD(0.5),
    2,
    variable_averages=moving_averages.MovingAverages(0.5),
    **options,
  )


def _values():
  zeros = np.zeros(_SHAPE, "float32")
  return {"table": zeros, "own": zeros}


def _gradients(ids, values):
  shape = tf.constant(_SHAPE, tf.int64)
  slices = tf.IndexedSlices(values, tf.constant(ids, tf.int64), shape)
  return [slices, tf.convert_to_tensor(slices)]


class RowAveragesTest(stores.TestCase):
  @parameterized.parameters({"use_locking": False}, {"use_locking": True})
  def test_equals_the_average_of_an_ordinary_variable(self, **options):
    training = _Training(
      _rule(**options), 2, values=_values(), is_sparse=[True, False]
    )
    rng = np.random.default_rng(1)
    pulled = [training.pull(replica)[0] for replica in range(2)]
    for number in range(16):
      replica = number % 2  # Each gradient is stale by one update.
      ids = [8, number % 4, 8]
      values = tf.constant(rng.normal(size=(3, 2)), tf.float32)
      training.apply(replica, pulled[replica], _gradients(ids, values))
      pulled[replica] = training.pull(replica)[0]
      if number % 3 == 0:
        table, own = training.read("averages")
        np.testing.assert_allclose(table, own, rtol=1e-5, atol=1e-6)
    rows, _ = training.read("variables")
    table, own = training.read("averages")
    np.testing.assert_allclose(table, own, rtol=1e-5, atol=1e-6)
    self.assertFalse(np.allclose(table[8], rows[8], atol=1e-3))

  def test_updates_at_the_same_time_keep_averages_among_the_rows(self):
    """Rows only fall, so that averages are between the first and last rows."""
    training = _Training(_rule(), 2, values=_values(), is_sparse=[True, False])

    def compute(replica, values):
      del values
      return _gradients([replica, 4], tf.ones([2, 2]))

    training.run(compute, 20)
    rows, _ = training.read("variables")
    averages, _ = training.read("averages")
    np.testing.assert_allclose(rows[[0, 1, 4], 0], [-10.0, -10.0, -20.0])
    self.assertTrue(np.all(averages <= 0))
    self.assertTrue(np.all(averages >= rows))
    # They follow: 40 updates with a decay of at most 0.5.
    np.testing.assert_allclose(averages, rows, atol=4.0)


if __name__ == "__main__":
  absltest.main()
