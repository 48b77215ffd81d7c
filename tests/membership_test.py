"""Tests for tf_replicas.membership; processes are in faults_test."""

import threading
import time
from unittest import mock

import stores
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tf_replicas import connection
from tf_replicas import membership
from tf_replicas import register as register_lib


class DifferencesTest(parameterized.TestCase):
  def test_none(self):
    rows = [["kernel", [2, 3]], ["bias", [3]]]
    self.assertEqual(membership.differences(rows, rows), [])

  def test_another_row(self):
    found = membership.differences([["a", 1], ["b", 2]], [["a", 1], ["b", 3]])
    self.assertEqual(
      found, ["variable 1 is ['b', 2] here and ['b', 3] at the chief"]
    )

  def test_a_tuple_is_as_good_as_a_list(self):
    # What the chief published went through JSON.
    self.assertEqual(membership.differences([("a", 1)], [["a", 1]]), [])

  def test_missing_and_surplus(self):
    self.assertEqual(
      membership.differences([], [["a"]]),
      ["variable 0 is None here and ['a'] at the chief"],
    )
    self.assertEqual(
      membership.differences([["a"]], []),
      ["variable 0 is ['a'] here and None at the chief"],
    )

  def test_at_most_the_limit_are_told(self):
    ours = [[i] for i in range(6)]
    theirs = [[-i - 1] for i in range(6)]
    found = membership.differences(ours, theirs, limit=2)
    self.assertLen(found, 3)
    self.assertEqual(found[2], "and 4 more")
    self.assertLen(membership.differences(ours, theirs, limit=6), 6)


class RegisterTest(stores.TestCase):
  def test_ages(self):
    register = register_lib.Register(stores.device(0), 3)
    self.assertFalse(register.is_ready())
    register.initialize()
    self.assertTrue(register.is_ready())
    self.assertEqual(register.ages(), [-1, -1, -1])
    register.beats.assign(tf.stack([tf.timestamp() - 5.0, 0.0, -1.0]))
    here, left, never = register.ages()
    self.assertBetween(here, 5, 60)
    self.assertEqual((left, never), (0, -1))
    register.beats.assign(tf.fill([3], tf.timestamp() + 5.0))
    self.assertGreater(min(register.ages()), 0)


class MembershipTest(stores.TestCase):
  def _members(self, count):
    devices = [stores.device(0), stores.device(1)]
    for device in devices:
      register_lib.Register(device, count).initialize()
    members = []
    for client in range(count):
      members.append(
        membership.Membership(client, count, devices=devices, timeout_secs=10)
      )
      self.addCleanup(members[-1].leave)
    return members

  def test_beats_from_the_start_until_it_leaves(self):
    chief, other = self._members(2)
    self.assertGreater(chief.ages()[1], 0)
    other.leave()
    self.assertEqual(chief.ages()[1], 0)
    self.assertGreater(other.ages()[0], 0)

  def test_who_joins_takes_the_place_of_an_earlier_process(self):
    with mock.patch.object(membership, "BEAT_SECS", 0.05):
      chief, first = self._members(2)
      devices = [stores.device(0), stores.device(1)]
      second = membership.Membership(1, 2, devices=devices)
    self.addCleanup(second.leave)
    connection.await_value(
      lambda: first.is_replaced, timeout_secs=30, what="waiting for a beat"
    )
    self.assertIn("replaced", first.outcome())
    with self.assertRaisesRegex(RuntimeError, "replaced"):
      first.raise_if_replaced()
    first.end("it failed")
    first.leave()
    self.assertGreater(chief.ages()[1], 0)
    for member in (chief, second):
      self.assertFalse(member.is_replaced)
      self.assertEqual(member.outcome(), "")

  def test_who_stood_still_asks_before_it_does_anything(self):
    beat_secs = 3600  # It is not to ask by itself.
    with mock.patch.object(membership, "BEAT_SECS", beat_secs):
      _, first = self._members(2)
      (place, *_) = first._places
      place._is_left.set()  # Its own beats end.
      place._thread.join(30)
      place._is_left.clear()
      second = membership.Membership(
        1, 2, devices=[stores.device(0), stores.device(1)]
      )
      self.addCleanup(second.leave)
      self.assertFalse(first.is_replaced)
      place._answered -= 3 * beat_secs
      self.assertTrue(first.is_replaced)

  def test_a_join_that_failed_is_tried_again(self):
    beat, failures = register_lib.Register.beat, [tf.errors.UnavailableError]

    def failing_beat(register, *args, joins):
      if failures and joins and register.device == stores.device(0):
        raise failures.pop()(None, None, "away")
      return beat(register, *args, joins=joins)

    chief, first = self._members(2)
    with mock.patch.object(register_lib.Register, "beat", failing_beat):
      second = membership.Membership(
        1, 2, devices=[stores.device(0), stores.device(1)]
      )
      self.addCleanup(second.leave)
      connection.await_value(
        lambda: first.is_replaced, timeout_secs=30, what="waiting for a beat"
      )
    self.assertEmpty(failures)
    self.assertFalse(second.is_replaced)
    self.assertFalse(chief.is_replaced)

  def test_registers_that_never_come(self):
    with self.assertRaisesRegex(TimeoutError, "register of .*CPU:3"):
      membership.Membership(0, 1, devices=[stores.device(3)], timeout_secs=0.1)

  def test_what_the_chief_publishes_reaches_the_others(self):
    chief, other = self._members(2)
    self.assertIsNone(other.published())
    chief.publish([["kernel", [2, 3]]])
    self.assertEqual(other.published(), [["kernel", [2, 3]]])

  def test_the_first_outcome_stays(self):
    chief, other = self._members(2)
    self.assertEqual(other.outcome(), "")
    chief.end("worker 1 failed")
    chief.end(membership.FINISHED)
    self.assertEqual(other.outcome(), "worker 1 failed")

  def test_dismissal_reaches_every_task_and_waits_for_the_others(self):
    chief, other = self._members(2)
    chief.end(membership.FINISHED)
    other.leave()
    self.assertEqual(chief.dismiss(timeout_secs=10), [])
    for task in range(2):
      register = register_lib.Register(stores.device(task), 2)
      self.assertTrue(bool(register.dismissed))
      self.assertEqual(register.outcome.numpy(), b"finished")

  def test_dismissal_names_who_had_not_left(self):
    chief, _ = self._members(2)
    start = time.monotonic()
    self.assertEqual(chief.dismiss(timeout_secs=0.2), [1])
    self.assertLess(time.monotonic() - start, 20)

  def test_a_task_that_hangs_holds_up_nothing_else(self):
    hangs, is_over = threading.Event(), threading.Event()
    timer = threading.Timer(60, is_over.set)
    timer.start()
    self.addCleanup(timer.cancel)
    self.addCleanup(is_over.set)

    def may_hang(call):
      def hanging(register, *args, **kwargs):
        if hangs.is_set() and register.device == stores.device(1):
          is_over.wait()
        return call(register, *args, **kwargs)

      return hanging

    for name in ("beat", "dismiss"):
      call = may_hang(getattr(register_lib.Register, name))
      self.enter_context(mock.patch.object(register_lib.Register, name, call))
    for name, secs in (("BEAT_SECS", 0.05), ("_ANSWER_SECS", 0.2)):
      self.enter_context(mock.patch.object(membership, name, secs))
    (chief,) = self._members(1)
    first = register_lib.Register(stores.device(0), 1)
    hangs.set()
    connection.await_value(
      lambda: chief.silences()[1] > 0.5,
      timeout_secs=30,
      what="waiting for silence",
    )
    before = float(first.beats[0])
    connection.await_value(
      lambda: float(first.beats[0]) > before,
      timeout_secs=30,
      what="waiting for a beat",
    )
    chief.end(membership.FINISHED)
    chief.leave()
    chief.dismiss(timeout_secs=10)
    self.assertFalse(is_over.is_set())
    self.assertEqual(first.ages(), [0])
    self.assertTrue(bool(first.dismissed))


if __name__ == "__main__":
  absltest.main()
