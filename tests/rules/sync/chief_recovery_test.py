"""Tests for rules.sync.chief_recovery."""

import threading
import time
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests.support import stores
from tf_replicas.rules.sync import chief_recovery

# How long a chief would wait for the end of an update, in tests in which it
# need not wait so long; and far less.
_GRACE_SECS, _SOON_SECS = 100.0, 50.0


def _store_and_mark():
  """What a chief attaches to; every call is another chief of one cluster."""
  store = stores.attach([stores.spec("w", [2])], num_tasks=2)
  return store, chief_recovery.UpdateInProgress(store)


class UpdateMarkTest(stores.TestCase):
  def setUp(self):
    super().setUp()
    self.store, self.mark = _store_and_mark()
    self.mark.clear()
    self.store.assign(0, np.zeros(2, "float32"))
    self.store.start()

  def _set_step(self, step):
    self.store.load_state({"global_step": step})

  def _step(self):
    return int(self.store.read_global_step())

  def _begin(self, step):
    begin = tf.function(self.mark.begin, autograph=False)
    return int(begin(tf.constant(step, tf.int64)))

  def _advance(self, step):
    numbers = tf.constant(step, tf.int64), tf.constant(4, tf.int64)
    tf.function(self.store.advance, autograph=False)(*numbers)

  def _succeed(self):
    """A second chief waits for the end; returns for how many seconds."""
    began = time.monotonic()
    is_inconsistent = _store_and_mark()[1].await_end()
    self.assertEqual(
      is_inconsistent, self._step() == chief_recovery.INCONSISTENT
    )
    return time.monotonic() - began

  def _succeed_patiently(self):
    """The same, but the second chief would wait longer than usual."""
    with mock.patch.object(chief_recovery, "_GRACE_SECS", _GRACE_SECS):
      return self._succeed()

  def _succeed_soon(self):
    """The second chief need not wait."""
    self.assertLess(self._succeed_patiently(), _SOON_SECS)

  @parameterized.parameters(0, 1, 7)
  def test_without_an_update_there_is_nothing_to_wait_for(self, step):
    self._set_step(step)
    self._succeed_soon()
    self.assertEqual(self._step(), step)

  @parameterized.parameters(0, 7)
  def test_a_whole_update_is_left_as_it_is(self, step):
    self._set_step(step)
    self.assertEqual(self._begin(step), step)
    self._advance(step)
    self._succeed_soon()
    self.assertEqual(self._step(), step + 1)

  def test_an_update_that_was_cut_off_makes_the_variables_torn(self):
    """The second: the first was whole. The call fails after its mark."""
    self._begin(0)
    self._advance(0)

    @tf.function(autograph=False)
    def half_an_update():
      step = self.mark.begin(self.store.read_global_step())
      with tf.control_dependencies([step]):
        fails = tf.debugging.Assert(tf.equal(step, -9), ["cut off"])
      with tf.control_dependencies([fails]):
        return self.store.advance(tf.identity(step), tf.constant(4, tf.int64))

    with self.assertRaises(tf.errors.InvalidArgumentError):
      half_an_update()
    self.assertEqual(self._step(), 1)
    self._succeed()
    self.assertEqual(self._step(), chief_recovery.INCONSISTENT)
    self._succeed()  # Nor does the next chief find them consistent.
    # No step is negative: it is taken for none of them.
    self.assertLess(chief_recovery.INCONSISTENT, 0)
    # A checkpoint mends it, for this chief and for the next.
    self._set_step(4)
    self._succeed_soon()
    self.assertEqual(self._step(), 4)

  def test_an_update_that_ends_while_the_successor_waits_is_whole(self):
    self._set_step(5)
    self._begin(5)
    ending = threading.Timer(0.5, self._advance, [5])
    ending.daemon = True
    began = time.monotonic()  # Before the timer: a stall makes it wait longer.
    ending.start()
    self.addCleanup(ending.join, 10)
    self._succeed_patiently()
    waited = time.monotonic() - began
    self.assertEqual(self._step(), 6)
    self.assertGreater(waited, 0.2)

  def test_the_update_of_a_large_model_may_take_longer(self):
    self._begin(0)
    with mock.patch.object(chief_recovery, "_GRACE_SECS", 0.0):
      with mock.patch.object(chief_recovery, "_LEAST_BYTES_PER_SEC", 4.0):
        self.assertGreater(self._succeed(), 2.0)  # `w` has 8 bytes.

  def test_a_chief_that_begins_afresh_forgets_what_was_under_way(self):
    self._begin(0)
    _store_and_mark()[1].clear()
    self._succeed_soon()
    self.assertEqual(self._step(), 0)


if __name__ == "__main__":
  absltest.main()
