"""In-graph replication: one client drives every worker.

The client builds the model once and schedules the replicas' steps on worker
servers through `tf.distribute.coordinator.ClusterCoordinator`; it makes the
updates itself and does not train.

1. The client connects to all PS and worker tasks through
   `tf.distribute.ParameterServerStrategy`, and creates the shared copy.
2. It schedules one closure per worker, a loop of `turns.contribute`. A worker
   that runs it acts as the replica of its own number: it pulls the parameters
   from the PS tasks, computes on its own share of the data, and hands its
   gradients to the PS tasks. None of these bytes pass through the client.
3. The client makes the updates (`step`), one call per step.
4. A worker that dies is noticed by the coordinator, which takes it back when it
   returns at the same address and runs the closure again. Closures run at least
   once; an offer that came to nothing is void.
5. At the end the client releases every replica to `releases.ENDED`, which ends
   the closures, closes the queues, and dismisses the PS and worker tasks.
6. Whenever the client traces a function, or forgets one, TensorFlow 2.21 asks
   every task of the strategy and waits, with Python's lock held: a task that
   stands still would silence the client. So whatever it may need later is
   traced before its first update.

Where things live: as between-graph, but the model's code and the inner
optimizer exist only in the client, the data sets on the workers.
"""

import logging
import threading
from collections.abc import Callable

import tensorflow as tf

from tf_replicas import cluster
from tf_replicas import connection
from tf_replicas import driver
from tf_replicas import membership
from tf_replicas import processes
from tf_replicas import releases
from tf_replicas import stalls
from tf_replicas import sync_replicas
from tf_replicas import timeline
from tf_replicas import towers
from tf_replicas import training
from tf_replicas import turns
from tf_replicas import workarounds


class InGraph(driver.Driver):
  """The in-graph driver.

  Attributes:
    task: Which task this is.
    is_chief: True; the client makes the updates.
  """

  is_chief = True

  def __init__(
    self,
    spec: cluster.ClusterSpec,
    task: cluster.Task,
    replica_fn: Callable[[], towers.Replica],
    optimizer_fn: Callable[[], sync_replicas.SyncReplicasOptimizer],
    *,
    start_timeout_secs: float = 120.0,
    lost_after_secs: float = 20.0,
    timeline_dir: str | None = None,
    log: Callable[[str], None] = print,
  ):
    """Connects and creates the shared copy; as `BetweenGraph`.

    Args:
      spec: The cluster, ports chosen.
      task: The client's task; its address, if the spec names one, is used.
      replica_fn: Builds the replica.
      optimizer_fn: Builds the update rule.
      start_timeout_secs: How long to wait for PS and worker tasks.
      lost_after_secs: How long a worker may not answer before its place in a
        step is offered to another.
      timeline_dir: Where every task records what it does when, each on its own
        machine; see `timeline`.
      log: Where words go.

    Raises:
      TimeoutError: If a task does not answer in time.
    """
    self.task = task
    self._log = log
    self._lost_after_secs = lost_after_secs
    self._workers = spec.tasks("worker")
    self._recorder = None
    if timeline_dir is not None:
      self._recorder = timeline.Recorder(timeline_dir, "workers")
    self._names = [str(w) for w in self._workers]
    for job in ("ps", "worker"):
      connection.await_servers(
        spec, job, timeout_secs=start_timeout_secs, log=log
      )
    self._coordinator = _connect(spec)
    self._members = membership.Membership(
      0,
      1,
      devices=[
        f"/job:{t.job}/task:{t.index}/device:CPU:0"
        for job in ("ps", "worker")
        for t in spec.tasks(job)
      ],
      timeout_secs=start_timeout_secs,
      log=log,
    )
    with self._members.beginning(self.is_chief, log):
      self._build(spec, self._names, replica_fn, optimizer_fn)
      self.optimizer.build(self.store, is_sparse=towers.sparsity(self.replica))
      self.optimizer.create([tf.identity(v) for v in self.replica.shared])
    self._watch: stalls.Watch | None = None
    self._is_closing = threading.Event()

  def step(self, most: int = 1) -> training.StepResult:
    """Makes an update, or several in one call.

    Args:
      most: How many; see `SyncReplicasOptimizer.apply_updates`. The loss of the
        last and all their examples are in the result.

    Raises:
      FloatingPointError: If a replica computed something not finite.
      RuntimeError: If training was ended elsewhere, or goes on in another
        process that runs as this task.
    """
    if self._watch is None:
      self._start()
    return self._make_updates(most)

  def _start(self) -> None:
    self._begin()
    self._watch = stalls.Watch(
      self.optimizer,
      lambda: self.global_step,
      self._ages,
      self._members.outcome,
      self._names,
      lost_after_secs=self._lost_after_secs,
      log=self._log,
    )
    self.store.state()
    self.optimizer.trace_ahead()
    self._members.trace_ahead()
    self._contribute = tf.function(
      self._contribute_until_the_end, autograph=False
    )
    self._iterators = iter(
      self._coordinator.create_per_worker_dataset(self._dataset_fn)
    )
    for _ in self._workers:
      self._coordinator.schedule(self._contribute, args=(self._iterators,))
    self._thread = connection.Thread(
      self._watch_closures, on_error=self.optimizer.interrupt
    )

  def _contribute_until_the_end(self, iterator) -> tf.Tensor:
    """What a worker runs: one contribution after the other, until it is ended.

    A loop in the graph, so that a worker goes on without asking the client. A
    contribution without a ticket comes first, and again whenever the ticket was
    lost.
    """
    index = tf.distribute.coordinator.experimental_get_current_worker_index
    name = tf.strings.join(["worker:", tf.strings.as_string(index())])
    replicas_turns = turns.Turns(
      self.store,
      self.optimizer,
      self.replica,
      iterator,
      index(),
      device=None,
      recorder=self._recorder,
      name=name,
    )
    has_tickets = self.optimizer.has_tickets
    no_limit = tf.constant(tf.int32.max)

    def go_on(*state):
      state = replicas_turns.take(False, *state)
      if has_tickets:
        _, *state = replicas_turns.take_some(True, no_limit, *state)
      return state

    state = tf.while_loop(
      lambda last, *_: releases.unpack(last).global_step != releases.ENDED,
      go_on,
      replicas_turns.begin(),
    )
    return state[0]

  def _watch_closures(self) -> None:
    """Raises what went wrong on a worker, other than its own end."""
    while not self._is_closing.wait(0.2):
      self._coordinator.done()

  def _dataset_fn(self) -> tf.data.Dataset:
    """Runs on a worker, again when that was restarted."""
    index = tf.distribute.coordinator.experimental_get_current_worker_index
    start = self.examples_drawn()
    return self.replica.dataset_fn(len(self._workers), index(), start)

  def _ages(self) -> list[float]:
    """Seconds since each worker last answered."""
    silences = self._members.silences()[-len(self._workers) :]
    return [max(silence, 1e-3) for silence in silences]

  def close(self, error: BaseException | None = None) -> None:
    """Ends the training and dismisses every task."""
    self._is_closing.set()
    # Closures that fail for a lost worker would be tried again for ever.
    stalls.end_training(
      self._members,
      self.optimizer,
      self._watch,
      self._coordinator.done,
      error,
      log=self._log,
    )


def _connect(
  spec: cluster.ClusterSpec,
) -> tf.distribute.coordinator.ClusterCoordinator:
  workarounds.keep_cancellation_to_its_thread()
  workarounds.end_executors_quietly()
  tf.get_logger().addFilter(_in_one_line)
  resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
    tf.train.ClusterSpec(spec.as_dict()), rpc_layer="grpc"
  )
  strategy = tf.distribute.ParameterServerStrategy(resolver)
  return tf.distribute.coordinator.ClusterCoordinator(strategy)


def _in_one_line(record: logging.LogRecord) -> bool:
  """Shortens what the coordinator logs of a lost task: pages, each time."""
  if record.filename == "cluster_coordinator.py":
    record.msg, record.args = processes.shortened(record.getMessage()), ()
  return True
