"""Tests for drivers.connection; connections are in between_graph_test."""

import socket
from unittest import mock

import tensorflow as tf
from absl.testing import absltest

from tf_replicas import cluster
from tf_replicas.drivers import connection
from tf_replicas.drivers import server


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


class AnswersTest(absltest.TestCase):
  def test_a_server_of_tensorflow_answers(self):
    started = tf.distribute.Server.create_local_server()
    address = started.target.removeprefix("grpc://")
    self.assertTrue(connection.answers(address))

  def test_a_process_that_stands_still_does_not(self):
    """The system accepts the connection for it."""
    self.enter_context(mock.patch.object(connection, "_ANSWER_SECS", 0.2))
    with socket.create_server(("localhost", 0)) as listener:
      address = f"localhost:{listener.getsockname()[1]}"
      self.assertFalse(connection.answers(address))
      self.assertTrue(connection.listens(address))
      spec = cluster.parse(
        {"cluster": {"ps": [address], "worker": ["localhost:1"]}}
      )
      with self.assertRaisesRegex(TimeoutError, f"ps 0 at {address}: gave up"):
        connection.await_servers(spec, "ps", timeout_secs=0)
    self.assertFalse(connection.listens(address))


class PublicAddressTest(absltest.TestCase):
  """A refused task neither listens nor waits."""

  SPEC = cluster.parse(
    {"cluster": {"ps": ["8.8.8.8:1"], "worker": ["10.0.0.1:2"]}}
  )

  def test_clients_refuse_a_parameter_server(self):
    with self.assertRaisesRegex(cluster.ClusterError, r"cluster\.ps\[0\]"):
      connection.await_servers(self.SPEC, "ps", timeout_secs=0)

  def test_a_parameter_server_refuses_its_own_address(self):
    with self.assertRaisesRegex(cluster.ClusterError, r"8\.8\.8\.8:1"):
      server.serve(self.SPEC, cluster.Task("ps", 0))

  def test_names_that_resolve_later(self):
    spec = cluster.parse(
      {"cluster": {"ps": ["later:1"], "worker": ["10.0.0.1:2"]}}
    )
    found = [(0, 0, 0, "", ("8.8.8.8", 1))]
    looked_up = mock.Mock(side_effect=[OSError("not yet"), found])
    self.enter_context(mock.patch("socket.getaddrinfo", looked_up))
    self.enter_context(mock.patch.object(connection, "answers", lambda _: True))
    with self.assertRaisesRegex(cluster.ClusterError, "later:1, which is 8."):
      connection.await_servers(spec, "ps", timeout_secs=1)


if __name__ == "__main__":
  absltest.main()
