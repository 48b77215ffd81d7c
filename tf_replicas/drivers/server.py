"""Runs a parameter server, or a worker that another process drives.

The process connects to the server that it runs before any other process does.
Otherwise the server can crash when several processes connect to it for the
first time at once. (In TensorFlow 2.21 `EagerServiceImpl::CreateContext`
replaces the collective executor manager while no context exists yet.)

A parameter server that receives SIGTERM, for example because its machine is
needed for other work, does not end at once. It tells the chief, which saves a
checkpoint, so that hardly an update is lost. Then, or after eight seconds, it
ends. (A replica that updates the variables by itself may make updates between
the checkpoint and the end.)
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence
from typing import NoReturn

import tensorflow as tf

from tf_replicas import cluster
from tf_replicas.cluster import exposure
from tf_replicas.drivers import heartbeat_table
from tf_replicas.drivers import heartbeats
from tf_replicas.drivers import timeline
from tf_replicas.runtime import devices
from tf_replicas.runtime import processes
from tf_replicas.runtime import resources
from tf_replicas.session import interrupts

ORPHAN_TIMEOUT_SECS = 300.0
# How long a parameter server that received SIGTERM waits for a checkpoint.
_LEAVE_SECS = 8.0
_CHIEF = 0  # The number of the chief among the clients.


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

  A parameter server that receives SIGTERM goes on until the chief has saved a
  checkpoint, but for at most eight seconds; then the signal ends it, unless all
  trainings have ended well. This needs that `serve` is called in the main
  thread, and that the program has no handler of SIGTERM of its own.

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
  heard = looked = time.monotonic()
  ages: list[list[float]] = []
  asked = threading.Event()
  with interrupts.sigterm_calls(lambda *_: asked.set()):
    leaves_since = None
    while not all(bool(table.dismissed.numpy()) for table in tables):
      # Not more often: to read the ages takes milliseconds of processor time.
      is_due = time.monotonic() - looked >= heartbeats.BEAT_SECS
      is_asked = asked.is_set()
      if is_due or is_asked:
        looked = time.monotonic()
        ages = [table.ages() for table in tables]
        if any(_is_alive(age) for of_table in ages for age in of_table):
          heard = looked
      if time.monotonic() - heard > orphan_timeout_secs:
        raise TimeoutError(
          f"{task}: no client heartbeat for {orphan_timeout_secs:.0f} s; the"
          " task ends"
        )
      if is_asked:
        has_chief = any(_is_alive(of_table[_CHIEF]) for of_table in ages)
        if task.job != "ps" or not has_chief:  # Nothing is or can be saved.
          break
        if leaves_since is None:
          leaves_since = time.monotonic()
          log(f"{task} received SIGTERM; it ends after a checkpoint")
          for table in tables:
            table.leaves.assign(True)
        if time.monotonic() - leaves_since > _LEAVE_SECS:
          break
      time.sleep(0.2)
    time.sleep(0.3)  # The chief still waits for the answer to its last call.
    outcomes = [table.outcome.numpy().decode() for table in tables]
    errors = [text for text in outcomes if text != heartbeats.FINISHED]
  if asked.is_set() and errors:
    _end_by_sigterm()
  return (errors or outcomes)[0]


def serve_training(
  spec: cluster.ClusterSpec,
  task: cluster.Task,
  *,
  replication: str,
  start_timeout_secs: float,
  timeline_dir: str | None = None,
  log: Callable[[str], None] = print,
) -> int:
  """Serves one training until it ends, as the whole work of a process.

  Args:
    spec: The cluster.
    task: The task of this process: a parameter server or an in-graph worker.
    replication: "between_graph" or "in_graph".
    start_timeout_secs: Seconds that the tasks may take to start. This task
      gives up if it gets no heartbeat for so long, but not within five minutes.
    timeline_dir: The directory for timelines, the files that record what each
      replica does when. None: no timelines.
    log: Receives each line of the log.

  Returns:
    An exit status: 0 if training ended without an error, otherwise 1.

  Raises:
    cluster.ClusterError, TimeoutError: As `serve` raises them.
  """
  is_in_graph = replication == "in_graph"
  if timeline_dir and is_in_graph:
    # The client makes this task write a file on this machine.
    timeline.prepare(timeline_dir)
  outcome = serve(
    spec,
    task,
    num_clients=1 if is_in_graph else None,
    orphan_timeout_secs=max(ORPHAN_TIMEOUT_SECS, start_timeout_secs),
    log=log,
  )
  return 0 if outcome == heartbeats.FINISHED else 1


def _is_alive(age: float) -> bool:
  """Returns whether a client with a heartbeat of this age is alive.

  Args:
    age: Seconds since the last heartbeat, as `HeartbeatTable.ages` returns it.
  """
  return 0 < age < heartbeats.ALIVE_SECS


def _end_by_sigterm() -> NoReturn:
  """Ends this process by SIGTERM, so that its exit status tells the reason."""
  sys.stdout.flush()
  sys.stderr.flush()
  os.kill(os.getpid(), signal.SIGTERM)
  os._exit(128 + signal.SIGTERM)  # The signal does not end process 1.
