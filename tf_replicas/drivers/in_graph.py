"""Implements in-graph replication, where one client drives every worker.

The client builds the model once and schedules the replicas' steps on worker
servers through `tf.distribute.coordinator.ClusterCoordinator`. The client makes
the updates itself, and computes no gradients.

1. The client connects to all PS and worker tasks through
   `tf.distribute.ParameterServerStrategy`, and creates the variables on the PS
   tasks.
2. The client schedules one closure per worker, a `ReplicaLoop`. Worker w runs
   it as replica w: it pulls the parameters from the PS tasks, computes on its
   own share of the data, and hands its gradients to the PS tasks. None of these
   bytes pass through the client.
3. The client makes the updates, one call of `step` for each.
4. The coordinator detects that a worker died, uses the worker again when it is
   restarted at the same address, and runs the closure again. A closure may thus
   run several times. If it ended after it had announced its gradients to the
   client and before it sent them, the announcement is ignored.
5. At the end the client answers every replica's last gradients with a *token*
   (the answer that lets a replica continue) whose global step is
   `step_token.ENDED`, which ends the closures. Then it closes the queues and
   tells the PS and worker tasks to end.
6. Whenever the client traces a function, or deletes one, TensorFlow 2.21 calls
   every task of the strategy and waits, with Python's interpreter lock held: a
   task that hangs would freeze the client. So the client traces its functions
   before its first update, except those of Keras for validation.

Variables and queues live on the PS tasks. The model's code and the optimizer
exist only in the client, and the data sets on the workers.
"""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable

import tensorflow as tf

from tf_replicas import cluster
from tf_replicas.drivers import base as driver_base
from tf_replicas.drivers import connection
from tf_replicas.drivers import heartbeats
from tf_replicas.drivers import replica_loop
from tf_replicas.drivers import watchdog
from tf_replicas.replica import model_replica
from tf_replicas.rules import base as rule_base
from tf_replicas.rules import step_token
from tf_replicas.runtime import datasets
from tf_replicas.runtime import devices
from tf_replicas.runtime import patches
from tf_replicas.runtime import processes
from tf_replicas.runtime import put_back as put_back_lib
from tf_replicas.runtime import waiting
from tf_replicas.store import tables

# How often to look whether a closure failed.
_POLL_SECS = 0.2
# How long the end of a training waits for the others if a worker is gone.
_PATIENCE_SECS = 15.0
# How long the client may trace its functions at most, besides waiting.
_TRACING_SECS = 600.0


@dataclasses.dataclass
class _Workers:
  """The workers of the cluster that this process, the client, drives.

  Attributes:
    coordinator: Runs closures on the workers.
    are_busy: Whether a driver uses the workers.
  """

  coordinator: tf.distribute.coordinator.ClusterCoordinator
  are_busy: bool = False


# The workers of the cluster that this process is connected to, if any.
_workers: dict[tuple[str, ...], _Workers] = {}


class InGraph(driver_base.ParameterServerDriver):
  """The driver of the client, the process that drives all in-graph workers.

  The process may train several times on the same cluster, one training after
  the other. Each training needs a driver and a namespace. The driver of the
  training before must have been closed without an error.

  Attributes:
    is_chief: True, since the client makes the updates.
  """

  is_chief = True
  _may_data_end = False

  def __init__(
    self,
    spec: cluster.ClusterSpec,
    task: cluster.Task,
    replica_fn: Callable[[], model_replica.Replica],
    optimizer_fn: Callable[[], rule_base.UpdateRule],
    *,
    start_timeout_secs: float = 120.0,
    lost_after_secs: float = 20.0,
    timeline_dir: str | None = None,
    namespace: str = "",
    joined: heartbeats.Heartbeats | None = None,
    recovery_timeout_secs: float = 0.0,
    log: Callable[[str], None] = print,
  ):
    """Connects to all tasks, builds the model and creates the variables.

    The model must not be built before the process is connected. So the
    arguments are functions that build replica and rule, not these objects.

    Args:
      spec: The cluster. No port may be 0: `cluster.resolve_ports` replaces such
        ports.
      task: The client's task. If `spec` has an address for it, the client uses
        that address.
      replica_fn: Builds the replica.
      optimizer_fn: Builds the update rule.
      start_timeout_secs: Seconds to wait for the PS and worker tasks.
      lost_after_secs: Seconds without an answer after which a worker counts as
        lost. Then a step uses the gradients of another replica in its place.
      timeline_dir: The directory for timelines, the files that record what each
        replica does when. The client and every worker write them, each on its
        machine. None: no timelines.
      namespace: The name of the training. It must be one of the names that the
        PS and worker tasks serve; with `joined`, it may be any name.
      joined: The heartbeats of this process, if it takes part in a series of
        trainings, as `driver_base.Options` documents; None otherwise.
      recovery_timeout_secs: Seconds to wait for the restart of a parameter
        server that was lost. If it is not restarted in time, training ends with
        an error. If it is, the client has to restore a checkpoint: see
        `recover`. 0: the loss ends training at once.
      log: Receives each line of the log.

    Raises:
      TimeoutError: If a task does not answer in time.
      RuntimeError: If another driver of this process uses the workers, or the
        process is connected to another cluster.
      ValueError: If the model was built before the process was connected, the
        rule is for another number of replicas, or `namespace` is invalid.
    """
    self._tasks = spec.tasks("worker")
    self._workers = _connect(spec, start_timeout_secs, log)
    self._coordinator = self._workers.coordinator
    super().__init__(
      spec,
      task,
      replica_fn,
      optimizer_fn,
      replicas=self._tasks,
      client=0,
      devices=_serving_devices(spec),
      timeline_file="workers",
      options=driver_base.Options(
        start_timeout_secs=start_timeout_secs,
        lost_after_secs=lost_after_secs,
        timeline_dir=timeline_dir,
        namespace=namespace,
        joined=joined,
        log=log,
        recovery_timeout_secs=recovery_timeout_secs,
      ),
    )
    self._workers.are_busy = True

  def run_replica(self) -> int:
    """Always raises RuntimeError: this process is the chief.

    The workers do not call it either. They are servers, and have no driver.
    """
    self._check_role(needs_chief=False)

  def _start_replicas(self) -> waiting.RaisingThread:
    options = self._options
    secs = max(options.start_timeout_secs, options.recovery_timeout_secs)
    # A worker that hangs would keep the client waiting, with Python's lock.
    with processes.killed_after(2 * secs + _TRACING_SECS):
      self.store.state()
      self.store.row_updates()
      for tensor in self.store.row_tensors().values():
        tensor.trace()
      self.rule.trace_ahead()
      self._heartbeats.trace_ahead()
      self._run_loop_fn = tf.function(self._run_loop, autograph=False)
      self._iterators = iter(
        self._coordinator.create_per_worker_dataset(self._dataset_fn)
      )
      for _ in self._tasks:
        self._coordinator.schedule(self._run_loop_fn, args=(self._iterators,))
    # Raises what failed on a worker, other than its own death.
    return waiting.PollingThread(
      self._have_loops_ended,
      period_secs=_POLL_SECS,
      on_error=self.rule.interrupt,
    )

  def _have_loops_ended(self) -> bool:
    """Returns whether the loops of all workers have ended.

    Raises:
      RuntimeError: If a batch has an id that is not a row of a table.
      Exception: If a loop failed for another reason.
    """
    try:
      return self._is_done()
    except tf.errors.InvalidArgumentError as error:
      if line := tables.bad_ids(error):
        raise RuntimeError(f"{line}, in a batch of a worker") from None
      raise
    except tf.errors.OutOfRangeError:
      raise RuntimeError(
        "the data set of a worker has ended; it must be endless"
      ) from None

  def _is_done(self) -> bool:
    """Returns whether all loops have ended; raises the error that ended one."""
    try:
      return self._coordinator.done()
    except Exception as error:
      raise patches.original_error(error) from None

  def _have_workers_ended(self) -> bool:
    """Returns whether the loops have ended, or the processes of all workers.

    (If only some of these processes have ended, their loops are begun again on
    the other workers, and end there.)
    """
    ended = self._heartbeats.unreachable_workers()
    return len(ended) == len(self._tasks) or self._is_done()

  def _run_loop(self, iterator) -> tf.Tensor:
    """Computes and sends gradients on one worker until training ends.

    It is traced as one `tf.function`, a closure that the coordinator schedules
    on each worker. Normally, a step asks the client for admission before it
    sends its gradients. It does not ask if the reply to the step before it has
    already said that they will be used.

    Args:
      iterator: The iterator over the worker's batches.

    Returns:
      The last token (the reply of the update rule to gradients), packed in one
      tensor. It says that training has ended.
    """
    index = tf.distribute.coordinator.experimental_get_current_worker_index
    put_back = None
    if self.rule.repeats_refused:
      put_back = put_back_lib.PutBack(iterator.element_spec, device="CPU:0")
    loop = replica_loop.ReplicaLoop(
      self.rule,
      self.replica,
      iterator,
      index(),
      device=None,
      recorder=self._recorder,
      name=tf.strings.join(["worker:", tf.strings.as_string(index())]),
      put_back=put_back,
    )
    no_limit = tf.constant(tf.int32.max)

    def go_on(*state):
      state = loop.run_one(*state, is_preadmitted=False)
      if self.rule.preadmits:
        _, *state = loop.run_many(no_limit, *state, is_preadmitted=True)
      return state

    def is_open(token, *_):
      token = step_token.LAYOUT.unpack(token)
      return token.global_step != step_token.ENDED

    state = tf.while_loop(is_open, go_on, loop.begin())
    return state[0]

  def _dataset_fn(self) -> tf.data.Dataset:
    """Builds the data set of the worker that runs this function.

    Each worker runs it once. A worker that was restarted runs it again.
    """
    index = tf.distribute.coordinator.experimental_get_current_worker_index
    start = self.examples_drawn()
    dataset = self.replica.dataset_fn(len(self._tasks), index(), start)
    return datasets.untuned(dataset)

  def _abandon(self) -> None:
    """Ends the closures that use the lost parameter servers.

    It also ends the coordinator. `_reconnect` makes a new one, since a
    coordinator runs no closures after the loss of a parameter server
    (TensorFlow 2.21).

    Raises:
      RuntimeError: If a thread does not end within 30 s.
    """
    if isinstance(self._thread, waiting.PollingThread):
      self._thread.request_stop()
    super()._abandon()
    patches.end_coordinator(self._coordinator)

  def _reconnect(self) -> None:
    connection.await_servers(
      self._spec, "worker", timeout_secs=self._options.recovery_timeout_secs
    )
    super()._reconnect()
    self._coordinator = self._workers.coordinator = patches.new_coordinator(
      self._coordinator
    )

  def _ages(self) -> list[float]:
    """Returns the seconds since each worker last answered."""
    silences = self._heartbeats.silences()[-len(self._tasks) :]
    return [max(silence, 1e-3) for silence in silences]

  def close(self, error: BaseException | None = None) -> None:
    """Ends the training for all tasks.

    It also tells the PS and worker tasks to end. In a series of trainings, it
    does so only if there was an error.

    Args:
      error: The error because of which training ends early, if any. All tasks
        are told about it.
    """
    self._home.is_open = False
    if isinstance(self._thread, waiting.PollingThread):
      self._thread.request_stop()
    since = time.monotonic()

    def have_ended() -> bool:
      if self._have_workers_ended():
        return True
      # The loop of a worker that is gone is begun again and again.
      is_one_gone = max(self._ages()) > heartbeats.ALIVE_SECS
      if is_one_gone and time.monotonic() - since > _PATIENCE_SECS:
        raise TimeoutError(
          f"waiting for the workers' last batch: {_PATIENCE_SECS:.0f} s, and"
          " one of them does not answer"
        )
      return False

    watchdog.end_training(
      self._heartbeats,
      self.rule,
      self._watchdog,
      have_ended,
      error,
      patience_secs=watchdog.LAST_BATCH_SECS,
      stays=self._options.joined is not None,
      log=self._log,
    )
    if error is None:
      with contextlib.suppress(tf.errors.OpError):
        self._workers.are_busy = not self._is_done()


def connect_client(
  spec: cluster.ClusterSpec,
  *,
  timeout_secs: float,
  log: Callable[[str], None] = print,
) -> list[str]:
  """Connects this process to all PS and worker tasks, at the first call.

  Args:
    spec: The cluster.
    timeout_secs: Seconds to wait for the tasks.
    log: Receives each line of the log.

  Returns:
    The name of one device of each PS task, then of one of each worker.

  Raises:
    TimeoutError: If a task does not answer in time.
    RuntimeError: If a driver of this process uses the workers, or if the
      process is connected to another cluster.
  """
  _connect(spec, timeout_secs, log)
  return _serving_devices(spec)


def _serving_devices(spec: cluster.ClusterSpec) -> list[str]:
  return [
    f"/job:{t.job}/task:{t.index}/device:CPU:0"
    for job in ("ps", "worker")
    for t in spec.tasks(job)
  ]


def _connect(
  spec: cluster.ClusterSpec, timeout_secs: float, log: Callable[[str], None]
) -> _Workers:
  """Connects to the tasks of `spec`, and returns the workers for a new driver.

  Later calls for the same cluster use the connection that exists.

  Raises:
    TimeoutError: If a task does not answer in time.
    RuntimeError: If another driver uses the workers, or if this process is
      connected to another cluster.
  """
  addresses = [spec.address(t) for j in ("ps", "worker") for t in spec.tasks(j)]
  key = ("in-graph client", *addresses)
  if not connection.is_connected(key):
    devices.start_quietly()
    for job in ("ps", "worker"):
      connection.await_servers(spec, job, timeout_secs=timeout_secs, log=log)
    patches.keep_cancellation_to_its_thread()
    patches.end_executors_quietly()
    tf.get_logger().addFilter(_in_one_line)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
      tf.train.ClusterSpec(spec.as_dict()), rpc_layer="grpc"
    )
    with connection.connecting(spec.chief, timeout_secs):
      strategy = tf.distribute.ParameterServerStrategy(resolver)
    _workers[key] = _Workers(
      tf.distribute.coordinator.ClusterCoordinator(strategy)
    )
    connection.remember(key)
  if _workers[key].are_busy:
    raise RuntimeError(
      "another driver of this process uses the workers, and a worker runs one"
      " training at a time: close that driver first, or train on other workers"
    )
  return _workers[key]


def _in_one_line(record: logging.LogRecord) -> bool:
  """Shortens TensorFlow's log message about a lost task, which is pages long.

  It is a filter of a logger: it changes `record`, and returns True, so that the
  logger keeps the record.
  """
  if record.filename == "cluster_coordinator.py":
    record.msg, record.args = processes.shortened(record.getMessage()), ()
  return True
