"""Tests for tf_replicas.driver."""

import keras
import stores
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tf_replicas import async_replicas
from tf_replicas import driver as driver_lib
from tf_replicas import sync_replicas


class Bare(driver_lib.Driver):
  """Has a store and a rule, and remembers how it was closed."""

  is_chief = True

  def __init__(self, optimizer):
    self.store = stores.create({"v": tf.zeros([])})
    self.optimizer = optimizer
    self.closed = []

  def close(self, error=None):
    self.closed.append(error)


def _sync(replicas_to_aggregate, total_num_replicas):
  return sync_replicas.SyncReplicasOptimizer(
    keras.optimizers.SGD(0.1), replicas_to_aggregate, total_num_replicas
  )


class DriverTest(stores.TestCase):
  @parameterized.parameters(
    (lambda: _sync(3, 3), 60),
    (lambda: _sync(2, 3), 90),
    (lambda: _sync(7, 9), 77),
    (lambda: _sync(4, 2), 60),
    (
      lambda: async_replicas.AsyncReplicasOptimizer(
        keras.optimizers.SGD(0.1), 3
      ),
      60,
    ),
  )
  def test_what_backups_drew_was_drawn_too(self, new_rule, expected):
    driver = Bare(new_rule())
    driver.store.load_state({"examples_seen": 60})
    self.assertEqual(int(driver.examples_drawn()), expected)

  def test_leaving_it_closes_it(self):
    with Bare(_sync(1, 1)) as driver:
      self.assertEmpty(driver.closed)
    self.assertEqual(driver.closed, [None])

  def test_an_error_is_told_to_all(self):
    driver = Bare(_sync(1, 1))
    error = ValueError("no")
    with self.assertRaises(ValueError), driver:
      raise error
    self.assertEqual(driver.closed, [error])


if __name__ == "__main__":
  absltest.main()
