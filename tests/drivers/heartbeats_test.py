"""Tests for drivers.heartbeats; processes are in faults_test."""

import threading
import time
from unittest import mock

import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests.support import stores
from tf_replicas.drivers import heartbeat_table
from tf_replicas.drivers import heartbeats
from tf_replicas.runtime import waiting


def _row(path, size=3, tasks=(0,), **more):
  """An element of `ParameterStore.signature`."""
  row = {"path": path, "shape": [size], "dtype": "float32", "ps": list(tasks)}
  return row | more


class DifferencesTest(parameterized.TestCase):
  def test_none(self):
    rows = [_row("kernel"), _row("bias")]
    self.assertEqual(heartbeats.differences(rows, rows), [])

  def test_another_row(self):
    found = heartbeats.differences(
      [_row("a"), _row("b")], [_row("a"), _row("b", 4, [0, 1])]
    )
    self.assertEqual(
      found,
      [
        "variable 1 is b (shape [3], float32, on ps 0) here and"
        " b (shape [4], float32, on ps 0, 1) at the chief"
      ],
    )

  def test_a_table_divided_differently(self):
    ours, theirs = (_row("t", rows=how) for how in ("modulo", "range"))
    self.assertEqual(
      heartbeats.differences([ours], [theirs]),
      [
        "variable 0 is t (shape [3], float32, on ps 0, rows divided by"
        " 'modulo') here and t (shape [3], float32, on ps 0, rows divided by"
        " 'range') at the chief"
      ],
    )

  def test_missing_and_surplus(self):
    row = "a (shape [3], float32, on ps 0)"
    self.assertEqual(
      heartbeats.differences([], [_row("a")]),
      [f"variable 0 is absent here and {row} at the chief"],
    )
    self.assertEqual(
      heartbeats.differences([_row("a")], []),
      [f"variable 0 is {row} here and absent at the chief"],
    )

  def test_at_most_the_limit_are_told(self):
    ours = [_row("a", i) for i in range(6)]
    theirs = [_row("b", i) for i in range(6)]
    found = heartbeats.differences(ours, theirs, limit=2)
    self.assertLen(found, 3)
    self.assertEqual(found[2], "and 4 more")
    self.assertLen(heartbeats.differences(ours, theirs, limit=6), 6)


def _table(device):
  return heartbeat_table.HeartbeatTable(device, stores.namespace())


def _heartbeats(client, **options):
  return heartbeats.Heartbeats(client, namespace=stores.namespace(), **options)


class ClientsTest(stores.TestCase):
  def test_fewer_than_there_are(self):
    """The last client's heartbeats would be lost: it would wait in vain."""
    _table(stores.device(0)).initialize(1)
    with self.assertRaisesRegex(
      ValueError, "`num_clients` of .*at least 2, as .*number 1. Received: 1"
    ):
      _heartbeats(
        1, devices=[stores.device(0)], timeout_secs=5, log=lambda _: None
      )


class TableTest(stores.TestCase):
  def test_ages(self):
    table = _table(stores.device(0))
    self.assertFalse(table.is_ready())
    table.initialize(3)
    self.assertTrue(table.is_ready())
    self.assertEqual(table.ages(), [-1, -1, -1])
    table.beats.assign(tf.stack([tf.timestamp() - 5.0, 0.0, -1.0]))
    here, left, never = table.ages()
    self.assertBetween(here, 5, 60)
    self.assertEqual((left, never), (0, -1))
    table.beats.assign(tf.fill([3], tf.timestamp() + 5.0))
    self.assertGreater(min(table.ages()), 0)


class HeartbeatsTest(stores.TestCase):
  def _clients(self, count):
    devices = [stores.device(0), stores.device(1)]
    for device in devices:
      _table(device).initialize(count)
    clients = []
    for client in range(count):
      clients.append(_heartbeats(client, devices=devices, timeout_secs=10))
      self.addCleanup(clients[-1].leave)
    return clients

  def test_beats_from_the_start_until_it_leaves(self):
    chief, other = self._clients(2)
    self.assertGreater(chief.ages()[1], 0)
    other.leave()
    self.assertEqual(chief.ages()[1], 0)
    self.assertGreater(other.ages()[0], 0)

  def test_a_restarted_server_begins_another_generation(self):
    chief, other = self._clients(2)
    first = chief.generation
    self.assertEqual((other.generation, chief.find_lost()), (first, []))
    _table(stores.device(1)).initialize(2)
    for client in (chief, other):
      self.assertEqual(client.find_lost(), ["/device:CPU:1"])
      client.attach_again(10)
      self.assertEqual(client.find_lost(), [])
    self.assertNotEqual(chief.generation, first)
    self.assertEqual(chief.generation, other.generation)
    self.assertGreater(min(_table(stores.device(1)).ages()), 0)

  def test_what_the_first_server_has_lost_is_published_again(self):
    chief, other = self._clients(2)
    chief.publish({"rule": 1})
    chief.begin_next(b"a call")
    _table(stores.device(0)).initialize(2)
    chief.attach_again(10)
    other.attach_again(10)
    self.assertEqual(other.number(), heartbeat_table.NOT_BEGUN)
    chief.publish({"rule": 2})
    self.assertEqual(
      (other.number(), other.call(), other.published()),
      (2, b"a call", {"rule": 2}),
    )

  def test_a_process_that_joins_replaces_an_earlier_one(self):
    with mock.patch.object(heartbeats, "BEAT_SECS", 0.05):
      chief, first = self._clients(2)
      devices = [stores.device(0), stores.device(1)]
      second = _heartbeats(1, devices=devices)
    self.addCleanup(second.leave)
    waiting.await_value(
      lambda: first.is_replaced, timeout_secs=30, what="waiting for a beat"
    )
    self.assertIn("replaced", first.outcome())
    with self.assertRaisesRegex(RuntimeError, "replaced"):
      first.raise_if_replaced()
    first.end("it failed")
    first.leave()
    self.assertGreater(chief.ages()[1], 0)
    for client in (chief, second):
      self.assertFalse(client.is_replaced)
      self.assertEqual(client.outcome(), "")

  def test_a_process_that_was_stopped_asks_first(self):
    beat_secs = 3600  # It is not to ask by itself.
    with mock.patch.object(heartbeats, "BEAT_SECS", beat_secs):
      _, first = self._clients(2)
      (link, *_) = first._links
      link._thread.stop()  # No more heartbeats of its own.
      second = _heartbeats(1, devices=[stores.device(0), stores.device(1)])
      self.addCleanup(second.leave)
      self.assertFalse(first.is_replaced)
      link._answered -= 3 * beat_secs
      self.assertTrue(first.is_replaced)

  def test_a_join_that_failed_is_tried_again(self):
    beat, failures = (
      heartbeat_table.HeartbeatTable.beat,
      [tf.errors.UnavailableError],
    )

    def failing_beat(table, *args, joins, **more):
      if failures and joins and table.device == stores.device(0):
        raise failures.pop()(None, None, "away")
      return beat(table, *args, joins=joins, **more)

    chief, first = self._clients(2)
    with mock.patch.object(
      heartbeat_table.HeartbeatTable, "beat", failing_beat
    ):
      second = _heartbeats(1, devices=[stores.device(0), stores.device(1)])
      self.addCleanup(second.leave)
      waiting.await_value(
        lambda: first.is_replaced, timeout_secs=30, what="waiting for a beat"
      )
    self.assertEmpty(failures)
    self.assertFalse(second.is_replaced)
    self.assertFalse(chief.is_replaced)

  def test_tables_that_never_come(self):
    with self.assertRaisesRegex(TimeoutError, "heartbeat table .* on .*CPU:3"):
      _heartbeats(0, devices=[stores.device(3)], timeout_secs=0.1)

  def test_what_the_chief_publishes_reaches_the_others(self):
    chief, other = self._clients(2)
    self.assertIsNone(other.published())
    chief.publish([["kernel", [2, 3]]])
    self.assertEqual(other.published(), [["kernel", [2, 3]]])

  def test_the_first_outcome_stays(self):
    chief, other = self._clients(2)
    self.assertEqual(other.outcome(), "")
    chief.end("worker 1 failed")
    chief.end(heartbeats.FINISHED)
    self.assertEqual(other.outcome(), "worker 1 failed")

  def test_dismissal_reaches_every_task_and_waits_for_the_others(self):
    chief, other = self._clients(2)
    chief.end(heartbeats.FINISHED)
    other.leave()
    self.assertEqual(chief.shut_down_servers(timeout_secs=10), [])
    for task in range(2):
      table = _table(stores.device(task))
      self.assertTrue(bool(table.dismissed))
      self.assertEqual(table.outcome.numpy(), b"finished")

  # A heartbeat of its own might be under way, and say what no longer holds.
  @mock.patch.object(heartbeats, "BEAT_SECS", 3600)
  def test_trainings_follow_each_other(self):
    chief, other = self._clients(2)
    self.assertEqual(other.number(), heartbeat_table.NOT_BEGUN)
    chief.begin_series()
    self.assertEqual((other.number(), other.call()), (1, b""))
    chief.publish({"rule": 1})
    chief.open_training()
    chief.end(heartbeats.FINISHED)
    other.raise_if_ended_early()
    other.rest()
    self.assertEqual(chief.here(), [])
    chief.begin_next(b"call")
    self.assertEqual((other.number(), other.call()), (2, b"call"))
    self.assertEqual((other.outcome(), other.is_open()), ("", False))
    self.assertIsNone(other.published())
    chief.begin_series()  # By a restarted process: it has begun already.
    self.assertEqual(other.number(), 2)
    other.resume()
    self.assertEqual(chief.here(), [1])

  def test_dismissal_waits_for_those_that_rest(self):
    chief, other = self._clients(2)
    chief.end(heartbeats.FINISHED)
    other.rest()
    chief.end_series(heartbeats.FINISHED)
    self.assertEqual(other.number(), heartbeats.OVER)
    self.assertEqual(chief.shut_down_servers(timeout_secs=0.2), [1])
    other.leave()
    self.assertEqual(chief.shut_down_servers(timeout_secs=10), [])

  def test_an_error_ends_a_series_after_a_training(self):
    chief, other = self._clients(2)
    chief.end(heartbeats.FINISHED)
    other.end_series("the chief was lost")
    with self.assertRaisesRegex(RuntimeError, "the chief was lost"):
      chief.raise_if_ended_early()

  def test_dismissal_names_the_clients_that_had_not_left(self):
    chief, _ = self._clients(2)
    start = time.monotonic()
    self.assertEqual(chief.shut_down_servers(timeout_secs=0.2), [1])
    self.assertLess(time.monotonic() - start, 20)

  def test_a_task_that_hangs_holds_up_nothing_else(self):
    hangs, is_over = threading.Event(), threading.Event()
    timer = threading.Timer(60, is_over.set)
    timer.start()
    self.addCleanup(timer.cancel)
    self.addCleanup(is_over.set)

    def may_hang(call):
      def hanging(table, *args, **kwargs):
        if hangs.is_set() and table.device == stores.device(1):
          is_over.wait()
        return call(table, *args, **kwargs)

      return hanging

    for name in ("beat", "dismiss"):
      call = may_hang(getattr(heartbeat_table.HeartbeatTable, name))
      self.enter_context(
        mock.patch.object(heartbeat_table.HeartbeatTable, name, call)
      )
    for name, secs in (("BEAT_SECS", 0.05), ("_ANSWER_SECS", 0.2)):
      self.enter_context(mock.patch.object(heartbeats, name, secs))
    (chief,) = self._clients(1)
    first = _table(stores.device(0))
    hangs.set()
    waiting.await_value(
      lambda: chief.silences()[1] > 0.5,
      timeout_secs=30,
      what="waiting for silence",
    )
    before = float(first.beats[0])
    waiting.await_value(
      lambda: float(first.beats[0]) > before,
      timeout_secs=30,
      what="waiting for a beat",
    )
    chief.end(heartbeats.FINISHED)
    chief.leave()
    chief.shut_down_servers(timeout_secs=10)
    # The chief has left the calls behind that took longer than 0.2 s.
    waiting.await_value(
      lambda: first.ages() == [0] and bool(first.dismissed),
      timeout_secs=30,
      what="waiting for the last calls",
    )
    self.assertFalse(is_over.is_set())


if __name__ == "__main__":
  absltest.main()
