"""Runs a parameter server, or a worker that another process drives.

The process connects to the server that it runs before any other process does.
Otherwise the server can crash when several processes connect to it for the
first time at once. (In TensorFlow 2.21 `EagerServiceImpl::CreateContext`
replaces the collective executor manager while no context exists yet.)
"""

import time
from collections.abc import Callable
from collections.abc import Sequence

import tensorflow as tf

from tf_replicas import cluster
from tf_replicas.cluster import exposure
from tf_replicas.drivers import heartbeat_table
from tf_replicas.drivers import heartbeats
from tf_replicas.runtime import devices
from tf_replicas.runtime import processes
from tf_replicas.runtime import resources

ORPHAN_TIMEOUT_SECS = 300.0


def connect_server(spec: cluster.ClusterSpec, task: cluster.Task) -> str:
  """Starts the TensorFlow server of this process, and connects to it.

  Args:
    spec: The cluster.
    task: The task as which this process serves.

  Returns:
    The name of the server's CPU device.

  Raises:
    cluster.ClusterError: If the port of `task` is in use, or its address is
      public.
  """
  devices.start_quietly()
  address = spec.address(task)
  cluster.check_private(spec, [task])
  cluster.check_port_free(address)
  tf.config.experimental_connect_to_cluster(
    tf.train.ClusterSpec({task.job: {task.index: address}}),
    job_name=task.job,
    task_index=task.index,
  )
  device = f"/job:{task.job}/task:{task.index}/device:CPU:0"
  with tf.device(device):
    # Without a first op the server would never start.
    tf.constant(1.0).numpy()
  return device


def serve(
  spec: cluster.ClusterSpec,
  task: cluster.Task,
  *,
  num_clients: int | None = None,
  orphan_timeout_secs: float = ORPHAN_TIMEOUT_SECS,
  namespaces: Sequence[str] = ("",),
  log: Callable[[str], None] = print,
) -> str:
  """Serves until the chiefs of all trainings have told this task to end.

  Args:
    spec: The cluster.
    task: The task of this process: a parameter server or an in-graph worker.
    num_clients: The number of clients, which are the tasks that train. None:
      the number of chief and worker tasks in `spec`. Needed only if `spec`
      leaves out some of these tasks.
    orphan_timeout_secs: A time limit in seconds. If no client sends a heartbeat
      for so long, the task gives up.
    namespaces: The names of all trainings to serve. Each training is one
      driver's `namespace`.
    log: Receives each line of the log.

  Returns:
    How training ended: `heartbeats.FINISHED`, or an error in one line. With
    several trainings, the first error, or `heartbeats.FINISHED` if there was
    none.

  Raises:
    cluster.ClusterError: If the port is in use, or the address is public.
    TimeoutError: If no client sent a heartbeat for `orphan_timeout_secs`.
    ValueError: If there are no `namespaces`, or one is invalid.
  """
  names = [resources.Namespace(name) for name in namespaces]
  if not names:
    raise ValueError("`namespaces` must name the trainings. Received: none.")
  processes.print_stacks_on_request()
  device = connect_server(spec, task)
  tables = [heartbeat_table.HeartbeatTable(device, name) for name in names]
  for table in tables:
    table.initialize(num_clients or len(spec.replicas))
  log(f"{task} serves at {spec.address(task)}")
  if task == spec.tasks("ps")[0]:  # Once in a cluster.
    log(exposure.warning(task))
  heard = time.monotonic()
  while not all(bool(table.dismissed.numpy()) for table in tables):
    ages = [age for table in tables for age in table.ages()]
    if any(0 < age < heartbeats.ALIVE_SECS for age in ages):
      heard = time.monotonic()
    if time.monotonic() - heard > orphan_timeout_secs:
      raise TimeoutError(
        f"{task}: no client heartbeat for {orphan_timeout_secs:.0f} s; the task"
        " ends"
      )
    time.sleep(0.2)
  time.sleep(0.3)  # The chief still waits for the answer to its last call.
  outcomes = [table.outcome.numpy().decode() for table in tables]
  errors = [text for text in outcomes if text != heartbeats.FINISHED]
  return (errors or outcomes)[0]
