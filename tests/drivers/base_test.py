"""Tests for drivers.base."""

import keras
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests.support import stores
from tf_replicas.drivers import base as driver_base
from tf_replicas.rules.asynchronous import async_replicas
from tf_replicas.rules.sync import sync_replicas


class Bare(driver_base.Driver):
  """Has a store and a rule, and remembers how it was closed."""

  def __init__(self, rule, *, is_chief=True):
    self.is_chief = is_chief
    self.store = stores.create({"v": tf.zeros([])})
    self.rule = rule
    self.closed = []

  def step(self, max_updates=1):
    self._check_role(needs_chief=True)
    return max_updates

  def run_replica(self):
    self._check_role(needs_chief=False)
    return 0

  def set_learning_rate(self, rate):
    self.rule.set_learning_rate(rate)

  @property
  def accepted_fraction(self):
    return self.rule.accepted_fraction

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

  def test_only_the_chief_steps(self):
    driver = Bare(_sync(1, 1), is_chief=False)
    self.assertEqual(driver.run_replica(), 0)
    with self.assertRaisesRegex(RuntimeError, "must call `run_replica`"):
      driver.step()

  def test_the_chief_is_no_other_replica(self):
    driver = Bare(_sync(1, 1))
    self.assertEqual(driver.step(3), 3)
    with self.assertRaisesRegex(RuntimeError, "is not for the chief"):
      driver.run_replica()


if __name__ == "__main__":
  absltest.main()
