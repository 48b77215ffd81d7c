"""Tests for drivers.server; its clients are in between_graph_test."""

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


if __name__ == "__main__":
  absltest.main()
