"""Tests for drivers.watchdog."""

import threading
import time
from unittest import mock

import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tf_replicas.drivers import watchdog
from tf_replicas.rules import protocol
from tf_replicas.rules import results
from tf_replicas.runtime import waiting
from tf_replicas.session import training

Status = protocol.Status
NAMES = ["worker 0", "worker 1"]


def _state(status, *, received=0, needed=2):
  return results.StepStatus(
    received=received,
    needed=needed,
    replicas=[
      results.ReplicaStatus(s, tag=10 * i) for i, s in enumerate(status)
    ],
  )


class DescribeTest(parameterized.TestCase):
  def test_says_who_does_what(self):
    state = _state([Status.DELIVERED, Status.COMPUTING], received=1)
    self.assertEqual(
      watchdog.describe(7, 31.4, state, [0.6, 12.2], NAMES),
      "step 7: waiting for 31 s, 1 of 2 contributions received (worker 0:"
      " delivered, last heartbeat 1 s ago; worker 1: computing, last heartbeat"
      " 12 s ago)",
    )

  @parameterized.parameters(
    (-1, "worker 1: lost, no heartbeat yet"),
    (0, "worker 1: lost, left the training"),
  )
  def test_a_worker_that_is_gone(self, age, expected):
    state = _state([Status.WAITING, Status.LOST])
    self.assertIn(expected, watchdog.describe(1, 10, state, [1.0, age], NAMES))

  def test_nobody_has_delivered(self):
    state = _state([Status.ADMITTED, Status.ADMITTED])
    self.assertIn(
      "0 of 2 contributions received",
      watchdog.describe(1, 10, state, [1.0, 1.0], NAMES),
    )


class FakeOptimizer:
  def __init__(self, state):
    self.state = state
    self.lost = []
    self.expired = []
    self.interrupts = 0
    self.step_timeout_secs = None
    self.min_contributions = None
    self.was_read = threading.Event()

  def status(self):
    self.was_read.set()
    return self.state

  def declare_lost(self, replica, tag):
    self.lost.append((replica, tag))

  def expire(self, step):
    self.expired.append(step)

  def interrupt(self):
    self.interrupts += 1


class WatchTest(parameterized.TestCase):
  """The clock is the test's; the thread looks more often than otherwise."""

  def setUp(self):
    super().setUp()
    self.enter_context(mock.patch.object(watchdog, "_POLL_SECS", 0.05))

  def _watch(self, state, ages, now, outcome=lambda: "", **more):
    self.optimizer = FakeOptimizer(state)
    self.lines = []
    self.logged = threading.Event()

    def log(line):
      self.lines.append(line)
      self.logged.set()

    times = iter([0.0])
    watch = watchdog.StepWatchdog(
      self.optimizer,
      lambda: 3,
      lambda: ages,
      outcome,
      NAMES,
      lost_after_secs=20.0,
      restart_timeout_secs=600.0,
      **{"log": log, "clock": lambda: next(times, now), **more},
    )
    self.addCleanup(watch.stop)
    return watch

  def test_wakes_the_chief_as_long_as_it_has_something_else_to_do(self):
    polls = iter([True, True, True])
    watch = self._watch(
      _state([Status.COMPUTING] * 2),
      [1.0, 1.0],
      0.0,
      must_wake=lambda: next(polls, False),
    )
    waiting.await_value(
      lambda: self.optimizer.interrupts == 3, timeout_secs=60, what="waiting"
    )
    time.sleep(0.2)
    self.assertEqual(self.optimizer.interrupts, 3)
    self.assertTrue(watch.is_alive())

  def test_its_own_error_reaches_the_chief(self):
    def full(*_):
      raise OSError("no space left")

    watch = self._watch(
      _state([Status.COMPUTING] * 2), [1.0, 1.0], 15.0, log=full
    )
    waiting.await_value(
      lambda: self.optimizer.interrupts, timeout_secs=60, what="the error"
    )
    with self.assertRaisesRegex(OSError, "no space left"):
      watch.raise_error()

  def test_goes_on_after_a_failure_that_passes(self):
    """As when a parameter server cannot be reached for a moment."""
    failures = iter([tf.errors.UnavailableError(None, None, "cut")] * 2)
    looks = []

    def outcome():
      for failure in failures:
        raise failure
      looks.append(1)
      return "the end" if len(looks) == 2 else ""

    watch = self._watch(
      _state([Status.COMPUTING] * 2), [1.0, 1.0], 0.0, outcome
    )
    waiting.await_value(
      lambda: len(looks) > 3, timeout_secs=60, what="four more looks"
    )
    watch.stop()
    self.assertEqual(self.optimizer.interrupts, 3)

  def test_speaks_when_a_step_takes_long(self):
    state = _state([Status.WAITING, Status.COMPUTING])
    self._watch(state, [1.0, 2.0], now=15.0)
    self.assertTrue(self.logged.wait(20))
    self.assertIn("step 3: waiting for 15 s", self.lines[0])
    self.assertEqual(self.optimizer.lost, [])

  def test_those_that_may_join_are_not_waited_for(self):
    state = _state([Status.WAITING, Status.COMPUTING])
    self._watch(state, [1.0, -1.0], now=15.0, joining={1})
    waiting.await_value(
      lambda: self.optimizer.lost, timeout_secs=60, what="the declaration"
    )
    self.assertNotIn("no heartbeat yet;", "".join(self.lines))

  def _watch_deadline(self, least, *, is_awaited=True, **more):
    """The step waits for the second replica for 15 s; the deadline is 12 s."""
    state = _state([Status.DELIVERED, Status.ADMITTED], received=1)
    times = [0.0]
    watch = self._watch(
      state, [1.0, 1.0], now=0.0, clock=lambda: times[0], **more
    )
    self.optimizer.step_timeout_secs = 12.0
    self.optimizer.min_contributions = least
    if is_awaited:
      watch.begin()
    times[0] = 15.0
    return watch

  def test_a_step_goes_on_after_its_deadline(self):
    watch = self._watch_deadline(1)
    waiting.await_value(
      lambda: self.optimizer.expired, timeout_secs=60, what="the deadline"
    )
    watch.stop()
    self.assertEqual(self.optimizer.expired, [3])  # Once.
    (line,) = [line for line in self.lines if "step_timeout_secs" in line]
    self.assertIn("step 3: 1 of 2 contributions after 15 s", line)
    self.assertIn("missing: worker 1. Updates go on", line)
    watch.raise_if_expired()

  def test_a_training_ends_if_too_few_have_contributed(self):
    watch = self._watch_deadline(2)
    waiting.await_value(
      lambda: self.optimizer.interrupts, timeout_secs=60, what="the deadline"
    )
    self.assertEqual(self.optimizer.expired, [])
    with self.assertRaisesRegex(TimeoutError, "`min_contributions` needs 2"):
      watch.raise_if_expired()
    watch.progress()  # The missing contribution came at the last moment.
    watch.raise_if_expired()

  @parameterized.parameters(
    (False, 0.0),  # The chief saves a checkpoint, for example.
    (True, 60.0),  # Tasks may still start.
  )
  def test_a_deadline_does_not_count(self, is_awaited, start_timeout_secs):
    watch = self._watch_deadline(
      1, is_awaited=is_awaited, start_timeout_secs=start_timeout_secs
    )
    self.assertTrue(self.logged.wait(20))
    watch.stop()
    self.assertEqual(self.optimizer.expired, [])

  def _watch_long(self, ages, *, needed=2, least=None, waited=700.0, **more):
    """The chief has waited for `waited` seconds; 600 s are allowed."""
    state = _state([Status.WAITING, Status.COMPUTING], needed=needed)
    times = [0.0]
    watch = self._watch(state, ages, now=0.0, clock=lambda: times[0], **more)
    self.optimizer.min_contributions = least
    watch.begin()
    times[0] = waited
    return watch

  @parameterized.parameters(
    (700.0, "no heartbeat for 700 s"),
    (0.0, "left the training"),
    (-1.0, "no heartbeat yet"),
  )
  def test_a_training_ends_if_lost_replicas_do_not_return(self, age, why):
    watch = self._watch_long([1.0, age])
    waiting.await_value(
      lambda: self.optimizer.interrupts, timeout_secs=60, what="the end"
    )
    with self.assertRaises(training.StepExpired) as raised:
      watch.raise_if_expired()
    self.assertIn(f"lost replicas: worker 1 ({why})", str(raised.exception))

  @parameterized.parameters(
    dict(ages=[1.0, 2.0]),  # A replica that only takes long.
    dict(ages=[1.0, 700.0], needed=1),
    dict(ages=[1.0, 700.0], needed=3),  # The first makes all contributions.
    dict(ages=[1.0, 700.0], waited=500.0),
    dict(ages=[1.0, 700.0], least=1),
    dict(ages=[1.0, -1.0], start_timeout_secs=900.0),
  )
  def test_a_training_does_not_end(self, ages, **options):
    watch = self._watch_long(ages, **options)
    self.assertTrue(self.logged.wait(20))
    watch.stop()
    watch.raise_if_expired()
    self.assertEqual(self.optimizer.interrupts, 0)

  @parameterized.product(
    status=[Status.ADMITTED, Status.COMPUTING],
    silence=[(25.0, "no heartbeat for 25 s"), (0, "left the training")],
    follows=[
      (1, "uses another replica's gradient instead"),
      (2, "waits for it"),
    ],
  )
  def test_gives_up_a_replica_that_is_silent_or_has_left(
    self, status, silence, follows
  ):
    age, lines = silence
    needed, what = follows
    watch = self._watch(
      _state([Status.WAITING, status], needed=needed), [1.0, age], now=30.0
    )
    self.assertTrue(self.logged.wait(20))
    watch.stop()  # It tells the rule after it has logged.
    self.assertIn(f"worker 1: {lines}; step 3 {what}. If", self.lines[0])
    self.assertEqual(self.optimizer.lost[0], (1, 10))

  @parameterized.parameters((25.0, 1), (-1, 1), (-1, None))
  def test_updates_may_do_without_a_replica(self, age, least):
    """A replica that has not come yet is lost only where that is allowed."""
    times = [0.0]
    watch = self._watch(
      _state([Status.WAITING, Status.COMPUTING]),
      [1.0, age],
      now=0.0,
      clock=lambda: times[0],
    )
    self.optimizer.min_contributions = least
    times[0] = 30.0
    self.assertTrue(self.logged.wait(20))
    watch.stop()
    if least is None:
      self.assertEqual(self.optimizer.lost, [])
    else:
      self.assertIn("from step 3 on, updates do not wait for it", self.lines[0])
      self.assertEqual(self.optimizer.lost[0], (1, 10))

  def test_logs_a_lost_replica_once(self):
    """The rule may learn of it late, as long as no update is being made."""
    watch = self._watch(
      _state([Status.WAITING, Status.ADMITTED]), [1.0, 0], now=30.0
    )
    waiting.await_value(
      lambda: len(self.optimizer.lost) > 2, timeout_secs=60, what="three looks"
    )
    watch.stop()
    lost = [line for line in self.lines if "step 3 waits for it" in line]
    self.assertLen(lost, 1)

  @parameterized.parameters(Status.WAITING, Status.DELIVERED, Status.LOST)
  def test_a_replica_that_owes_nothing_is_not_given_up(self, status):
    self._watch(_state([status, Status.WAITING]), [99.0, 1.0], now=30.0)
    self.assertTrue(self.logged.wait(20))
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
    waiting.await_value(
      lambda: len(looks) > 2, timeout_secs=60, what="three looks"
    )
    watch.stop()

  def test_is_silent_while_steps_end(self):
    self._look_after_a_step(_state([Status.ADMITTED] * 2), [1.0, 1.0], 15.0)
    self.assertEqual(self.lines, [])
    self.assertFalse(self.optimizer.was_read.is_set())

  def test_gives_up_a_lost_replica_also_while_steps_end(self):
    """Else it would count as under way for ever."""
    state = _state([Status.DELIVERED, Status.ADMITTED])
    self._look_after_a_step(state, [1.0, 25.0], 30.0)
    (lines,) = self.lines
    self.assertIn("worker 1: no heartbeat for 25 s", lines)
    self.assertEqual(self.optimizer.lost, [(1, 10)])


class Noted:
  """Stands in for anything: notes which of its methods were called."""

  is_replaced = False

  def __init__(self):
    self.calls = []

  def __getattr__(self, name):
    return lambda *_, **__: self.calls.append(name)


class EndTrainingTest(parameterized.TestCase):
  def test_a_replaced_process_ends_nothing(self):
    told = Noted()
    told.is_replaced = True
    error = RuntimeError("replaced")
    watchdog.end_training(told, told, told, lambda: False, error)
    self.assertEqual(told.calls, ["stop", "leave"])

  @parameterized.parameters(
    (None, 0.2), (KeyboardInterrupt(), 600.0), (ValueError("bad"), 600.0)
  )
  def test_waits_for_a_last_batch_but_not_after_an_error(self, error, patience):
    self.enter_context(
      mock.patch.object(watchdog, "_FAILED_PATIENCE_SECS", 0.2)
    )
    told, lines, start = Noted(), [], time.monotonic()
    watchdog.end_training(
      told,
      told,
      told,
      lambda: False,
      error,
      patience_secs=patience,
      log=lines.append,
    )
    self.assertBetween(time.monotonic() - start, 0.2, 12)
    self.assertIn("not all workers have stopped", lines[0])
    self.assertEqual(
      [call for call in told.calls if call != "end_replicas"],
      ["end", "stop", "interrupt", "close", "leave", "shut_down_servers"],
    )

  def test_goes_on_when_the_last_batch_is_over(self):
    told, lines = Noted(), []
    ended = iter([False, False, True])
    watchdog.end_training(
      told,
      told,
      told,
      lambda: next(ended),
      None,
      patience_secs=600,
      log=lines.append,
    )
    self.assertEqual(lines, [])


if __name__ == "__main__":
  absltest.main()
