"""Tests for rules.step_token."""

import time

import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tf_replicas.rules import step_token


def _token(admitted, step, tag, times):
  """A token, as an update rule makes it."""
  return step_token.StepToken(
    admitted, tf.constant(step, tf.int64), tf.constant(tag, tf.int64), times
  )


def _first(step):
  """The token that a replica begins with."""
  return step_token.first(tf.constant(step, tf.int64))


def _slow(log):
  """A tensor that takes a while; `log` gets the time when it is computed."""

  def work():
    time.sleep(0.2)
    log.append(time.time())
    return np.float32(3.0)

  return tf.numpy_function(work, [], tf.float32)


class PackTest(parameterized.TestCase):
  @parameterized.parameters((1, 5, -1), (0, -1, -1), (1, 2**40 + 1, 2**52 + 3))
  def test_unpacking_gives_every_field_back_exactly(self, admitted, step, tag):
    times = tf.constant([2**51 + 1, 2, 0, 2**52 + 7], tf.int64)
    packed = step_token.LAYOUT.pack(_token(admitted, step, tag, times))
    self.assertEqual(packed.dtype, tf.int64)
    unpacked = step_token.LAYOUT.unpack(packed)
    self.assertEqual(int(unpacked.admitted), admitted)
    self.assertEqual(int(unpacked.global_step), step)
    self.assertEqual(int(unpacked.preadmitted_tag), tag)
    np.testing.assert_array_equal(unpacked.times, times)

  def test_the_first_token_admits_nothing(self):
    first = _first(7)
    self.assertEqual(int(first.admitted), 0)
    self.assertEqual(int(first.global_step), 7)
    self.assertEqual(int(first.preadmitted_tag), -1)
    np.testing.assert_array_equal(first.times, [0, 0, 0, 0])

  def test_the_first_token_is_packed_as_all_others(self):
    packed = step_token.LAYOUT.pack(_first(7))
    np.testing.assert_array_equal(packed, [0, 7, -1, 0, 0, 0, 0])

  def test_no_step_has_the_number_of_the_end(self):
    self.assertLess(step_token.ENDED, 0)


class TimesTest(parameterized.TestCase):
  def test_are_packed_in_microseconds_in_the_order_of_the_fields(self):
    times = step_token.pack_times(
      admitted=1.0, delivered=2.5, applied=0.000003, released=4.0
    )
    self.assertEqual(times.dtype, tf.int64)
    np.testing.assert_array_equal(times, [1000000, 2500000, 3, 4000000])

  def test_a_missing_time_is_zero(self):
    times = step_token.pack_times(delivered=2.0)
    np.testing.assert_array_equal(times, [0, 2000000, 0, 0])

  def test_a_time_of_today_is_exact_to_the_microsecond(self):
    secs = tf.constant(1_700_000_000.123457, tf.float64)
    self.assertEqual(int(step_token.microseconds(secs)), 1_700_000_000_123_457)

  @parameterized.parameters((1.4e-6, 1), (1.6e-6, 2), (0.0, 0))
  def test_microseconds_are_rounded(self, secs, expected):
    secs = tf.constant(secs, tf.float64)
    self.assertEqual(int(step_token.microseconds(secs)), expected)

  def test_now_is_the_time_of_this_machine(self):
    before = time.time()
    now = float(step_token.now())
    self.assertBetween(now, before - 1e-3, time.time() + 1e-3)

  def test_now_waits_for_its_arguments(self):
    log = []
    now = tf.function(lambda: step_token.now(_slow(log)), autograph=False)()
    self.assertGreaterEqual(float(now), log[0] - 1e-3)

  def test_clocked_waits_for_all_tensors(self):
    log = []

    def both():
      return step_token.clocked((_slow(log), [tf.constant(1.0), None]))

    now, (slow, (one, nothing)) = tf.function(both, autograph=False)()
    self.assertGreaterEqual(float(now), log[0] - 1e-3)
    self.assertEqual((float(slow), float(one)), (3.0, 1.0))
    self.assertIsNone(nothing)

  def test_clocked_tensors_are_used_after_the_clock_was_read(self):
    log, slow = [], []

    def use(value):
      log.append(time.time())
      return value

    @tf.function(autograph=False)
    def run(one):
      # `one` is computed at once, but is clocked with a slow tensor.
      now, (_, one) = step_token.clocked((_slow(slow), one))
      return now, tf.numpy_function(use, [one], tf.float32, stateful=False)

    now, _ = run(tf.constant(1.0))
    self.assertLen(log, 1)
    self.assertGreaterEqual(log[0], float(now) - 1e-3)


if __name__ == "__main__":
  absltest.main()
