"""Tests for tf_replicas.stalls."""

import threading
import time
from unittest import mock

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from tf_replicas import connection
from tf_replicas import ledger
from tf_replicas import stalls

Status = ledger.Status
NAMES = ["worker 0", "worker 1"]


def _ledger(status, *, num_places=2, accepted=()):
  state = ledger.new_ledger(len(status), num_places)
  rows = state.accepted.copy()
  for place, row in enumerate(accepted):
    rows[place] = row
  return state._replace(
    status=np.array(status, np.int64),
    tag=np.arange(len(status)) * 10,
    accepted=rows,
  )


class DescribeTest(parameterized.TestCase):
  def test_says_who_does_what(self):
    state = _ledger([Status.DELIVERED, Status.COMPUTING], accepted=[(0, 0)])
    self.assertEqual(
      stalls.describe(7, 31.4, state, [0.6, 12.2], NAMES),
      "step 7 waits since 31 s with 1 of 2 contributions (worker 0:"
      " delivered, last heard 1 s ago; worker 1: computing, last heard 12 s"
      " ago)",
    )

  @parameterized.parameters(
    (-1, "worker 1: lost, never heard of"), (0, "worker 1: lost, has left")
  )
  def test_who_is_not_there(self, age, expected):
    state = _ledger([Status.WAITING, Status.LOST])
    self.assertIn(expected, stalls.describe(1, 10, state, [1.0, age], NAMES))

  def test_nobody_has_delivered(self):
    state = _ledger([Status.ADMITTED, Status.ADMITTED])
    self.assertIn(
      "with 0 of 2 contributions",
      stalls.describe(1, 10, state, [1.0, 1.0], NAMES),
    )


class FakeOptimizer:
  def __init__(self, state):
    self.state = state
    self.lost = []
    self.was_read = threading.Event()

  def ledger(self):
    self.was_read.set()
    return self.state

  def declare_lost(self, replica, tag):
    self.lost.append((replica, tag))


class WatchTest(parameterized.TestCase):
  """The clock is the test's; the thread looks once a real second."""

  def _watch(self, state, ages, now, outcome=lambda: ""):
    self.optimizer = FakeOptimizer(state)
    self.words = []
    self.spoken = threading.Event()

    def log(line):
      self.words.append(line)
      self.spoken.set()

    times = iter([0.0])
    watch = stalls.Watch(
      self.optimizer,
      lambda: 3,
      lambda: ages,
      outcome,
      NAMES,
      lost_after_secs=20.0,
      log=log,
      clock=lambda: next(times, now),
    )
    self.addCleanup(watch.stop)
    return watch

  def test_speaks_when_a_step_takes_long(self):
    state = _ledger([Status.WAITING, Status.COMPUTING])
    self._watch(state, [1.0, 2.0], now=15.0)
    self.assertTrue(self.spoken.wait(20))
    self.assertIn("step 3 waits since 15 s", self.words[0])
    self.assertEqual(self.optimizer.lost, [])

  @parameterized.product(
    status=[Status.ADMITTED, Status.COMPUTING],
    silence=[(25.0, "was not heard of for 25 s"), (0, "has left")],
  )
  def test_gives_up_who_is_silent_or_has_left(self, status, silence):
    age, words = silence
    self._watch(_ledger([Status.WAITING, status]), [1.0, age], now=30.0)
    self.assertTrue(self.spoken.wait(20))
    self.assertIn(f"worker 1 {words}: its place in step 3 is", self.words[0])
    self.assertEqual(self.optimizer.lost[0], (1, 10))

  @parameterized.parameters(Status.WAITING, Status.DELIVERED, Status.LOST)
  def test_who_owes_nothing_is_not_given_up(self, status):
    self._watch(_ledger([status, Status.WAITING]), [99.0, 1.0], now=30.0)
    self.assertTrue(self.spoken.wait(20))
    self.assertEqual(self.optimizer.lost, [])

  def _look_after_a_step(self, state, ages, now):
    """A step ends before the first look; waits for two."""
    has_ended, looks = threading.Event(), []

    def outcome():
      has_ended.wait(60)
      looks.append(now)
      return ""

    watch = self._watch(state, ages, now, outcome)
    watch.progress()
    has_ended.set()
    connection.await_value(
      lambda: len(looks) > 2, timeout_secs=60, what="three looks"
    )
    watch.stop()

  def test_is_silent_while_steps_end(self):
    self._look_after_a_step(_ledger([Status.ADMITTED] * 2), [1.0, 1.0], 15.0)
    self.assertEqual(self.words, [])
    self.assertFalse(self.optimizer.was_read.is_set())

  def test_gives_up_who_is_lost_also_while_steps_end(self):
    """Else it would count as under way for ever."""
    state = _ledger([Status.DELIVERED, Status.ADMITTED])
    self._look_after_a_step(state, [1.0, 25.0], 30.0)
    (words,) = self.words
    self.assertIn("worker 1 was not heard of for 25 s", words)
    self.assertEqual(self.optimizer.lost, [(1, 10)])


class Noted:
  """Stands in for anything: notes which of its methods were called."""

  is_replaced = False

  def __init__(self):
    self.calls = []

  def __getattr__(self, name):
    return lambda *_, **__: self.calls.append(name)


class EndTrainingTest(parameterized.TestCase):
  def test_who_was_replaced_ends_nothing(self):
    told = Noted()
    told.is_replaced = True
    error = RuntimeError("replaced")
    stalls.end_training(told, told, told, lambda: False, error)
    self.assertEqual(told.calls, ["stop", "leave"])

  @parameterized.parameters(
    (None, 0.2), (KeyboardInterrupt(), 600.0), (ValueError("bad"), 600.0)
  )
  def test_waits_for_a_last_batch_but_not_after_an_error(self, error, patience):
    self.enter_context(mock.patch.object(stalls, "_HURRY_SECS", 0.2))
    told, words, start = Noted(), [], time.monotonic()
    stalls.end_training(
      told,
      told,
      told,
      lambda: False,
      error,
      patience_secs=patience,
      log=words.append,
    )
    self.assertBetween(time.monotonic() - start, 0.2, 12)
    self.assertIn("the workers did not end in order", words[0])
    self.assertEqual(
      [call for call in told.calls if call != "end_replicas"],
      ["end", "stop", "interrupt", "close", "leave", "dismiss"],
    )

  def test_goes_on_when_the_last_batch_is_over(self):
    told, words = Noted(), []
    ended = iter([False, False, True])
    stalls.end_training(
      told,
      told,
      told,
      lambda: next(ended),
      None,
      patience_secs=600,
      log=words.append,
    )
    self.assertEqual(words, [])


if __name__ == "__main__":
  absltest.main()
