"""Tests for the elastic exchange of rules.periodic.sync_rounds."""

import threading

import numpy as np
import tensorflow as tf
from absl.testing import absltest

from tests.support import stores
from tf_replicas.rules.periodic import sync_rounds
from tf_replicas.store import applier
from tf_replicas.store import inner_optimizer

VALUES = {
  "big": np.arange(12, dtype="float32").reshape(4, 3),
  "row": np.float32([1.0, 2.0]),
  "double": np.float64([5.0]),
  "scalar": np.float32(-1.0),
}
RATE = 0.25


class ElasticExchangeTest(stores.TestCase):
  def _store(self):
    """The center, and the update of one client of it."""
    store = stores.create(VALUES, 2, stores.cut(2))
    inner = inner_optimizer.InnerOptimizer(sync_rounds.MoveToward(RATE))
    inner.build(store)
    update = applier.Applier(
      store, inner, variable_averages=None, clip_norm=None
    )
    return store, update

  def test_center_moves_and_was_what_comes_back(self):
    store, update = self._store()
    exchange = tf.function(
      sync_rounds.ElasticExchange(store, update), autograph=False
    )
    before = stores.numpy(store.read())
    copy = [tf.constant(v * 3 + 1) for v in VALUES.values()]
    back = exchange(copy, tf.constant(0, tf.int64), RATE)
    for old, own, told, now in zip(
      before, copy, back, store.read(), strict=True
    ):
      np.testing.assert_array_equal(told, old)
      np.testing.assert_allclose(now, old + RATE * (own - old), rtol=1e-6)

  def test_one_after_the_other(self):
    """Each is held up in its midst until the other had time to come in."""
    store, update = self._store()
    barrier, came_in = threading.Barrier(2), threading.Event()
    inside, most = [0], [0]

    def linger():
      inside[0] += 1
      most[0] = max(most[0], inside[0])
      if inside[0] > 1:
        came_in.set()
      came_in.wait(0.5)
      inside[0] -= 1
      return 0

    def slow_update(*arguments):
      with tf.control_dependencies([tf.py_function(linger, [], tf.int32)]):
        return update(*arguments)

    results = []

    def run(factor):
      meet = sync_rounds.ElasticExchange(store, slow_update)
      exchange = tf.function(
        lambda copy, step: meet(copy, step, RATE), autograph=False
      )
      copy = [tf.constant(v * factor) for v in VALUES.values()]
      step = tf.constant(0, tf.int64)
      concrete = exchange.get_concrete_function(copy, step)
      barrier.wait(60)
      results.append((copy[1].numpy(), concrete(copy, step)[1].numpy()))

    threads = [
      threading.Thread(target=run, args=(f,), daemon=True) for f in (3.0, -5.0)
    ]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join(60)
    self.assertEqual(most, [1])
    results.sort(key=lambda result: abs(result[1] - VALUES["row"]).max())
    (first, told), (second, told_later) = results
    np.testing.assert_array_equal(told, VALUES["row"])
    center = told + RATE * (first - told)
    np.testing.assert_allclose(told_later, center, rtol=1e-6)
    center = center + RATE * (second - center)
    np.testing.assert_allclose(store.read()[1], center, rtol=1e-6)


if __name__ == "__main__":
  absltest.main()
