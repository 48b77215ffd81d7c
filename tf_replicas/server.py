"""Be one serving task of a cluster until training ends.

A parameter server, or an in-graph worker. It is its own first client: a bare
`tf.distribute.Server` can crash when several clients attach to it for the first
time at once (seen on TensorFlow 2.21: `EagerServiceImpl::CreateContext`
replaces the collective executor manager while no context exists yet).
"""

import time
from collections.abc import Callable

import tensorflow as tf

from tf_replicas import cluster
from tf_replicas import membership
from tf_replicas import register as register_lib

ORPHAN_TIMEOUT_SECS = 300.0


def connect_server(spec: cluster.ClusterSpec, task: cluster.Task) -> str:
  """Starts this task's server; returns its device.

  Raises:
    cluster.ClusterError: If its port is in use.
  """
  address = spec.address(task)
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
  num_clients: int,
  orphan_timeout_secs: float = ORPHAN_TIMEOUT_SECS,
  log: Callable[[str], None] = print,
  clock: Callable[[], float] = time.monotonic,
) -> str:
  """Serves until the chief dismisses this task.

  Args:
    spec: The cluster.
    task: This task.
    num_clients: How many clients take part.
    orphan_timeout_secs: How long to serve without a sign of life of any
      client.
    log: Where words go.
    clock: Time in seconds.

  Returns:
    How training ended: `membership.FINISHED` or what went wrong.

  Raises:
    cluster.ClusterError: If the port is in use.
    TimeoutError: If no client was heard of for `orphan_timeout_secs`.
  """
  register = register_lib.Register(connect_server(spec, task), num_clients)
  register.initialize()
  log(f"{task} serves at {spec.address(task)}")
  last_sign = clock()
  while not bool(register.dismissed.numpy()):
    if any(0 < age < 5 * membership.BEAT_SECS for age in register.ages()):
      last_sign = clock()
    if clock() - last_sign > orphan_timeout_secs:
      raise TimeoutError(
        f"{task} heard of no client for {orphan_timeout_secs:.0f} s"
      )
    time.sleep(0.2)
  time.sleep(0.3)  # The chief's last call is still to be answered.
  return register.outcome.numpy().decode()
