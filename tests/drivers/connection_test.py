"""Tests for drivers.connection; connections are in between_graph_test."""

from unittest import mock

from absl.testing import absltest

from tf_replicas.drivers import connection


class RememberedConnectionTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(mock.patch.object(connection, "_connections", []))

  def test_the_same_cluster_is_connected_once(self):
    key = ("client", "worker 0", "host:1", "host:2")
    self.assertFalse(connection.is_connected(key))
    connection.remember(key)
    self.assertTrue(connection.is_connected(key))

  def test_another_cluster_is_refused(self):
    connection.remember(("client", "worker 0", "host:1", "host:2"))
    with self.assertRaisesRegex(RuntimeError, "connected to another cluster"):
      connection.is_connected(("client", "worker 0", "host:1", "host:3"))


if __name__ == "__main__":
  absltest.main()
