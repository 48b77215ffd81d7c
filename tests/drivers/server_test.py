"""Tests for drivers.server; its clients are in between_graph_test."""

import os
import signal
import threading
import time
from unittest import mock

from absl.testing import absltest

from tests.support import stores
from tf_replicas import cluster
from tf_replicas.drivers import heartbeat_table
from tf_replicas.drivers import heartbeats
from tf_replicas.drivers import server
from tf_replicas.runtime import resources
from tf_replicas.runtime import waiting

SPEC = cluster.parse(
  {
    "cluster": {
      "ps": ["localhost:1"],
      "worker": ["localhost:2", "localhost:3", "localhost:4"],
    },
    "variables": {"on": "ps", "placement": "round_robin"},
  }
)
PS = cluster.Task("ps", 0)


class ServeTest(stores.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(
      mock.patch.object(server, "connect_server", lambda *_: stores.device(0))
    )

  def _serve(self, names):
    """Serves in a thread; returns it, its outcomes, and the tables."""
    outcomes = []
    tables = [
      heartbeat_table.HeartbeatTable(
        stores.device(0), resources.Namespace(name)
      )
      for name in names
    ]
    thread = waiting.RaisingThread(
      lambda: outcomes.append(
        server.serve(SPEC, PS, namespaces=names, log=lambda _: None)
      ),
      on_error=bool,
    )
    waiting.await_value(
      lambda: all(table.is_ready() for table in tables),
      timeout_secs=60,
      what="waiting for the tables",
    )
    return thread, outcomes, tables

  def test_ends_when_all_trainings_have_dismissed_it(self):
    thread, outcomes, (first, second) = self._serve(["serve/a", "serve/b"])
    self.assertEqual(second.ages(), [-1] * 3)  # As many as the spec has.
    second.dismiss("worker 1 failed")
    thread.join(1)
    self.assertEmpty(outcomes)
    first.dismiss(heartbeats.FINISHED)
    thread.join(60)
    self.assertEqual(outcomes, ["worker 1 failed"])

  def test_all_finished(self):
    thread, outcomes, tables = self._serve(["serve/c", "serve/d"])
    for table in tables:
      table.dismiss(heartbeats.FINISHED)
    thread.join(60)
    self.assertEqual(outcomes, [heartbeats.FINISHED])

  def test_no_heartbeat(self):
    with self.assertRaisesRegex(
      TimeoutError, "ps 0: no client heartbeat for 0 s"
    ):
      server.serve(
        SPEC,
        PS,
        namespaces=["serve/e"],
        orphan_timeout_secs=0.1,
        log=lambda _: None,
      )

  def test_no_training(self):
    with self.assertRaisesRegex(ValueError, "`namespaces`.*none"):
      server.serve(SPEC, PS, namespaces=[])


class SigtermTest(stores.TestCase):
  """The signal ends a parameter server, but not at once."""

  def setUp(self):
    super().setUp()
    self.enter_context(
      mock.patch.object(server, "connect_server", lambda *_: stores.device(0))
    )
    self.enter_context(
      mock.patch.object(server, "_end_by_sigterm", self._note_end)
    )
    self.ended = threading.Event()
    self.lines = []

  def _note_end(self):
    self.ended.set()

  def _serve(self, name, act, task=PS):
    """Serves in this thread; `act` gets the table, in another thread."""
    table = heartbeat_table.HeartbeatTable(
      stores.device(0), resources.Namespace(name)
    )

    def play():
      waiting.await_value(
        table.is_ready, timeout_secs=60, what="waiting for the table"
      )
      # Until `serve` has a handler, the signal would end the test's process.
      waiting.await_value(
        lambda: signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL,
        timeout_secs=60,
        what="waiting for the handler",
      )
      act(table)

    thread = waiting.RaisingThread(play, on_error=bool)
    server.serve(SPEC, task, namespaces=[name], log=self.lines.append)
    thread.join(60)

  def test_ends_when_a_checkpoint_was_saved(self):
    def act(table):
      table.beat(0, 1, True)
      for _ in range(2):  # From a cluster manager and from a launcher.
        os.kill(os.getpid(), signal.SIGTERM)
      waiting.await_value(
        lambda: table.beat(0, 1, True).leaves, timeout_secs=60, what="waiting"
      )
      self.assertFalse(self.ended.is_set())
      table.release()

    self._serve("sigterm/a", act)
    self.assertTrue(self.ended.is_set())
    self.assertIn("ps 0 received SIGTERM", self.lines[-1])

  @mock.patch.object(server, "_LEAVE_SECS", 0.5)
  def test_ends_without_a_checkpoint_in_the_end(self):
    def act(table):
      os.kill(os.getpid(), signal.SIGTERM)
      while not self.ended.is_set():
        table.beat(0, 1, True)
        time.sleep(0.1)

    self._serve("sigterm/b", lambda table: (table.beat(0, 1, True), act(table)))
    self.assertTrue(self.ended.is_set())

  def test_ends_at_once_if_nobody_can_save(self):
    self._serve("sigterm/c", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    self.assertTrue(self.ended.is_set())
    self.assertNotIn("received", self.lines[-1])

  def test_a_training_that_has_finished_ends_as_usual(self):
    def act(table):
      table.beat(0, 1, True)
      os.kill(os.getpid(), signal.SIGTERM)
      table.dismiss(heartbeats.FINISHED)

    self._serve("sigterm/d", act)
    self.assertFalse(self.ended.is_set())


if __name__ == "__main__":
  absltest.main()
