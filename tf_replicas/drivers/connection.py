"""Connects this process to parameter servers, at most once."""

import contextlib
import socket
import time
from collections.abc import Callable

import tensorflow as tf

from tf_replicas import cluster
from tf_replicas.runtime import devices
from tf_replicas.runtime import patches
from tf_replicas.runtime import processes
from tf_replicas.runtime import waiting
from tf_replicas.store import parameter_store

# What a client of HTTP/2 sends first: a text, and an empty SETTINGS frame.
_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _SETTINGS
_ANSWER_SECS = 2.0

_connections: list[tuple[str, ...]] = []


def is_connected(key: tuple[str, ...]) -> bool:
  """Returns whether this process is connected to the cluster `key`.

  A process can be connected to one cluster only. A second connection would
  reset TensorFlow's context, and with it all tensors and functions (seen in
  2.21).

  Args:
    key: Describes the cluster, as for `remember`.

  Returns:
    True if the process is connected to this cluster; False if it is connected
    to none.

  Raises:
    RuntimeError: If the process is connected to another cluster.
  """
  if _connections and key not in _connections:
    raise RuntimeError(
      "this process is connected to another cluster, or by another driver, and"
      " TensorFlow can connect only once: start the second training in another"
      " process"
    )
  return key in _connections


def was_used() -> bool:
  """Returns whether this process was ever connected to parameter servers."""
  return bool(_connections)


def remember(key: tuple[str, ...]) -> None:
  """Records that this process was connected to a cluster, for `is_connected`.

  Args:
    key: The kind of client, such as "in-graph client", then the addresses of
      the tasks that it is connected to.
  """
  _connections.append(key)


def disconnect() -> None:
  """Ends the connection of this process to its cluster, if there is one.

  Call it after the servers were told to end. The process cannot connect again,
  but it can use TensorFlow on its local devices.
  """
  if _connections:
    patches.disconnect()


def connect_client(
  spec: cluster.ClusterSpec,
  task: cluster.Task,
  *,
  timeout_secs: float,
  log: Callable[[str], None] = print,
) -> list[str]:
  """Connects this process to all PS tasks, unless it is connected already.

  TensorFlow gets to know the PS tasks and this process only. If it knew the
  other workers, every worker would wait for all others.

  Args:
    spec: The cluster.
    task: The task of this process.
    timeout_secs: Seconds to wait for the PS tasks.
    log: Receives each line of the log.

  Returns:
    The name of one device of each PS task, in the order of the tasks.

  Raises:
    cluster.ClusterError: If the port of `task` is in use, or a task has a
      public address.
    TimeoutError: If a PS task does not answer in time. (If it ends after it has
      answered, the process exits: see `connecting`.)
    RuntimeError: If this process is connected to another cluster.
  """
  address = spec.address(task)
  servers = spec.addresses("ps")
  key = ("client", str(task), address, *servers)
  if not is_connected(key):
    devices.start_quietly()
    cluster.check_private(spec, [task])
    cluster.check_port_free(address)
    await_servers(spec, "ps", timeout_secs=timeout_secs, log=log)
    with connecting(task, timeout_secs):
      tf.config.experimental_connect_to_cluster(
        tf.train.ClusterSpec({"ps": servers, task.job: {task.index: address}}),
        job_name=task.job,
        task_index=task.index,
      )
      tf.constant(0)  # The first op connects.
    remember(key)
  return [parameter_store.ps_device(i) for i in range(len(servers))]


def connecting(
  task: cluster.Task, timeout_secs: float
) -> contextlib.AbstractContextManager[None]:
  """Context that limits the time in which TensorFlow connects to servers.

  Call `await_servers` first. If a server ends after it has answered, TensorFlow
  2.21 waits for it without a time limit. This context then ends the process
  with an error message and status 1.

  Args:
    task: The task of this process.
    timeout_secs: The time limit in seconds.
  """
  return processes.ended_after(
    timeout_secs, f"{task} connects to servers; one of them may have ended"
  )


def await_servers(
  spec: cluster.ClusterSpec,
  job: str,
  *,
  timeout_secs: float,
  since: float | None = None,
  log: Callable[[str], None] = print,
  is_there: Callable[[str], bool] | None = None,
) -> None:
  """Waits until the server of every task of `job` answers at its address.

  Args:
    spec: The cluster.
    job: The job of the tasks.
    timeout_secs: The time limit in seconds for all tasks together, counted from
      `since`.
    since: A value of `time.monotonic()`. None: now.
    log: Receives each line of the log.
    is_there: A function that takes an address, and returns whether the server
      is there. None: `answers`.

  Raises:
    cluster.ClusterError: If a task has a public address.
    TimeoutError: If a task does not answer in time. The message names the first
      such task.
  """
  cluster.check_private(spec, spec.tasks(job))
  since = time.monotonic() if since is None else since
  for task in spec.tasks(job):
    address = spec.address(task)
    waiting.await_value(
      lambda address=address: (is_there or answers)(address),
      timeout_secs=timeout_secs,
      since=since,
      what=f"waiting for {task} at {address}",
      log=log,
      poll_secs=0.1,
    )
  # Some names may not have been known before.
  cluster.check_private(spec, spec.tasks(job))


def listens(address: str) -> bool:
  """Returns whether a process accepts connections at `address`, "host:port".

  It waits for at most 2 s.
  """
  return _probe(address, lambda _: True)


def answers(address: str) -> bool:
  """Returns whether a gRPC server answers at `address`, "host:port".

  Unlike `listens`, it detects a process that is stopped or about to end: the
  operating system accepts connections for such a process, and TensorFlow 2.21
  would wait for it without a time limit. So the server must answer the
  connection preface of HTTP/2 (RFC 9113, section 3.4), within 2 s.
  """

  def is_answered(probe: socket.socket) -> bool:
    probe.sendall(_PREFACE)
    return bool(probe.recv(1))

  return _probe(address, is_answered)


def _probe(address: str, check: Callable[[socket.socket], bool]) -> bool:
  """Connects to `address`, and returns the result of `check` on the socket.

  Returns False if there is no connection, or if the socket fails in `check`.
  """
  host, _, port = address.rpartition(":")
  try:
    with socket.create_connection(
      (host.strip("[]"), int(port)), timeout=_ANSWER_SECS
    ) as probe:
      return check(probe)
  except OSError:
    return False
