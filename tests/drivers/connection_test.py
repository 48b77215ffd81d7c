"""Tests for drivers.connection; connections are in between_graph_test."""

import contextlib
import socket
import subprocess
import sys
from unittest import mock

import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests.support import trials
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


class ConnectingTest(parameterized.TestCase):
  @parameterized.parameters(
    "connection.connect_client(spec, spec.chief, timeout_secs=4)",
    "in_graph.connect_client(spec, timeout_secs=4)",
  )
  def test_a_server_that_ends_while_a_task_connects_ends_the_task(self, call):
    """TensorFlow would wait for it without a time limit."""
    program = f"""
import sys
from tf_replicas import cluster
from tf_replicas.drivers import connection
from tf_replicas.drivers import in_graph
spec = cluster.parse({{"ps": [sys.argv[1]], "worker": [sys.argv[2]]}})
# Each probe waits for its one answer, however slow the test is.
connection._ANSWER_SECS = {trials.DEADLINE_SECS}
{call}
"""
    answered = []
    with contextlib.ExitStack() as stack:
      jobs = ["ps", "worker"] if call.startswith("in_graph") else ["ps"]
      servers = [
        stack.enter_context(socket.create_server(("localhost", 0)))
        for _ in jobs
      ]
      addresses = [f"localhost:{s.getsockname()[1]}" for s in servers]
      process = subprocess.Popen(
        [sys.executable, "-c", program, *addresses, "localhost:1"],
        stderr=subprocess.PIPE,
        text=True,
        env=trials.SPEAKING_ENVIRON,
      )
      self.addCleanup(process.kill)
      for listener in servers:
        listener.settimeout(trials.DEADLINE_SECS)
        answered.append(listener.accept()[0])
        answered[-1].sendall(connection._SETTINGS)
    _, error = process.communicate(timeout=trials.DEADLINE_SECS)
    for probe in answered:
      probe.close()
    self.assertEqual(process.returncode, 1)
    self.assertIn(
      "connects to servers; one of them may have ended: gave up after 4 s",
      error.splitlines()[-1],
    )
    self.assertNotIn("cuInit", error)  # That the machine has no GPU.


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
