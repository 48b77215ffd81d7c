"""Implements between-graph replication: every worker runs a whole program.

Each worker runs this driver, the object that makes its part of the training.
The driver connects to all parameter servers and to no other worker, builds the
model, and attaches by name to the variables on the parameter servers, the
*shared copy*.

1. The chief (a `chief` task, else worker 0) publishes its variables and update
   rule, and the others compare theirs. The chief creates the shared copy and
   restores a checkpoint if there is one. Meanwhile the others wait.
2. Every worker runs a `ReplicaLoop`, which computes and sends gradients,
   several steps per `tf.function` call. On the chief that loop has a thread of
   its own.
3. The chief's main thread makes the updates, one call of `step` for each.
4. At the end the chief announces how training ended, and answers each worker's
   last gradients with a *token* (the answer that lets a replica continue) whose
   global step is `step_token.ENDED`. The workers leave. Then the chief closes
   the queues and tells the PS tasks to end.

Parameters, optimizer slots, averages, queues and counters live on the PS tasks.
The model, its data and the optimizer's code live in each worker.
"""

import contextlib
import math
import time
from collections.abc import Callable
from collections.abc import Iterator

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
from tf_replicas.runtime import put_back as put_back_lib
from tf_replicas.runtime import resources
from tf_replicas.runtime import waiting
from tf_replicas.session import training
from tf_replicas.store import tables

# The chief is lost after this many times `lost_after_secs`.
_CHIEF_PATIENCE = 10
# A call runs as many steps as fit, so that the process can handle signals. On a
# slow network, fewer calls are faster. A call begins and ends with messages,
# which wait behind the parameters of other replicas. And it waits for all
# parameters of its last step: the next step cannot begin with the first ones.
_CALL_SECS = 4.0
_MAX_STEPS = 100
_ENDED = (tf.errors.OutOfRangeError, tf.errors.CancelledError)


class BetweenGraph(driver_base.ParameterServerDriver):
  """The driver that runs one worker's part of a between-graph training.

  In between-graph replication, every worker is a process that builds the model
  and attaches to the variables on the parameter servers.

  Several trainings may run on one cluster, and in one process, at once. Each of
  them needs a driver and a namespace, which is a prefix of the names of its
  variables. The parameter servers must know all namespaces: see `server.serve`.
  """

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
    """Connects to the cluster, builds the model and attaches to the variables.

    The model must not be built before the process is connected. So the
    arguments are functions that build replica and rule, not these objects.

    Args:
      spec: The cluster. No port may be 0: `cluster.resolve_ports` replaces such
        ports.
      task: The task of this process, one of `spec.replicas`.
      replica_fn: Builds the replica, in the same way in every worker.
      optimizer_fn: Builds the update rule, in the same way in every worker.
      start_timeout_secs: Seconds to wait for the PS tasks and the chief.
      lost_after_secs: Seconds without a heartbeat after which a worker counts
        as lost: no step waits for it until it is restarted.
      timeline_dir: The directory for the timeline, a file that records what
        this task does when. None: no timeline.
      namespace: The name of the training, the same in every worker. Trainings
        of different names share nothing. It must be one of the names that the
        PS tasks serve; with `joined`, it may be any name.
      joined: The heartbeats of this process, if it takes part in a series of
        trainings, as `driver_base.Options` documents; None otherwise.
      recovery_timeout_secs: Seconds to wait for the restart of a parameter
        server that was lost. If it is not restarted in time, training ends with
        an error. If it is, the chief has to restore a checkpoint: see
        `recover`. 0: the loss ends training at once.
      log: Receives each line of the log.

    Raises:
      cluster.ClusterError: If `task` does not train, or its port is in use.
      TimeoutError: If a PS task or the chief does not answer in time.
      RuntimeError: If this program builds other variables, or another update
        rule, than the chief, or the process is connected to another cluster.
      ValueError: If the model was built before the process was connected, the
        rule is for another number of replicas, or `namespace` is invalid.
    """
    if task not in spec.replicas:
      raise cluster.ClusterError(
        f"{spec.where}`task` must be a worker or the chief. Received: {task}."
      )
    numbers = [t.index for t in spec.replicas if t.job == "worker"]
    if numbers != [*range(len(numbers))]:
      raise cluster.ClusterError(
        f"{spec.where}`worker` must list all workers for between-graph"
        " replication, as the number of replicas follows from it. Received:"
        f" workers {numbers}."
      )
    self.is_chief = task == spec.chief
    self._index = spec.replicas.index(task)
    self._has_given_up = False
    self._has_data = True
    # Shared by all data sets of one structure, as a queue is never removed.
    self._put_back: put_back_lib.PutBack | None = None
    self._timeline_name = f"{task.job}:{task.index}"
    devices = connection.connect_client(
      spec, task, timeout_secs=start_timeout_secs, log=log
    )
    super().__init__(
      spec,
      task,
      replica_fn,
      optimizer_fn,
      replicas=spec.replicas,
      client=self._index,
      devices=devices,
      timeline_file=f"{task.job}_{task.index}",
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

  def _ages(self) -> list[float]:
    # `serve` may have been called with a larger number of clients.
    ages = self._heartbeats.ages()[: len(self.replica_names)]
    if self.replica.on_data_end == "error":
      return ages
    # A replica without data has left, although its task may be alive.
    ended = self._ended.numpy()
    return [0.0 if e else age for e, age in zip(ended, ages, strict=True)]

  def _attach(self) -> None:
    """Attaches to the shared variables, and to a flag for each replica.

    The flags, on PS task 0, say whether the data set of each replica has ended.
    In a new training, the chief also initializes the variables and the flags. A
    chief that takes over the training of an earlier chief keeps their values.
    """
    super()._attach()
    count = len(self.replica_names)
    with tf.device(self.store.device_of_task(0)):
      self._ended = self._home.namespace.variable("ended", [count], tf.bool)
    if self.is_chief and not bool(self._ended.is_initialized()):
      self._ended.assign(tf.zeros([count], tf.bool))

  def _end_data(self) -> None:
    """Records that this task's data have ended, and wakes the chief."""

    def record():
      own = tf.IndexedSlices(tf.constant([True]), tf.constant([self._index]))
      with tf.device(self.store.device_of_task(0)):
        return self._ended.scatter_update(own)

    resources.remote_reader(record)()
    self._log(f"{self.task}: its data have ended")
    self.rule.interrupt()

  def _check_data(self) -> None:
    """Declares replicas lost whose data have ended.

    Raises:
      training.DataEnded: If too few replicas have data for an update.
    """
    if self.replica.on_data_end == "error":
      return
    have_ended = self._ended.numpy()
    total, ended = len(have_ended), int(have_ended.sum())
    needed = self.rule.min_contributions or self.rule.replicas_to_aggregate
    if self.replica.on_data_end == "stop":
      needed = total
    elif needed > total:  # Each replica contributes several times.
      needed = 1
    # Workers that may join have no data before they join.
    if may_join := self._spec.joining:
      ages = self._heartbeats.ages()
      indices = map(self._spec.replicas.index, may_join)
      total -= sum(ages[i] == -1 and not have_ended[i] for i in indices)
    if ended and total - ended < needed:
      raise training.DataEnded(
        f"the data of {ended} of {total} replicas have ended"
      )
    replicas = self.rule.status().replicas if ended else []
    for index, (_, tag) in enumerate(replicas):
      if have_ended[index]:
        self.rule.declare_lost(index, tag)

  def _start_replicas(self) -> waiting.RaisingThread:
    self._heartbeats.open_training()
    return waiting.RaisingThread(self._run_loop, on_error=self.rule.interrupt)

  def run_replica(self) -> int:
    """Contributes gradients until training ends.

    All workers except the chief call this. It first waits until the chief has
    initialized or restored the variables.

    Returns:
      The global step when training ended.

    Raises:
      RuntimeError: If this task is the chief, if training ended with an error,
        or if the chief is lost.
      TimeoutError: If the chief does not initialize the variables in time, or
        a lost parameter server is not restarted in time.
    """
    self._check_role(needs_chief=False)
    return self.recovering(self._contribute)

  def _contribute(self) -> int:
    """Contributes gradients until training ends, in a worker that is no chief.

    Waits first until the chief has initialized or restored the variables. Does
    not recover from the loss of a parameter server, as `run_replica` does.

    Returns:
      The global step when training ended.

    Raises:
      tf.errors.OpError: If a parameter server is lost.
      RuntimeError: If training ended with an error, or if the chief is lost.
      TimeoutError: If the chief does not initialize the variables in time.
    """
    waiting.await_value(
      lambda: self._heartbeats.is_open() or self._heartbeats.outcome(),
      timeout_secs=max(
        self._options.start_timeout_secs, self._options.recovery_timeout_secs
      ),
      what=f"{self.task} waits for the chief to initialize or restore",
      log=self._log,
    )
    if outcome := self._heartbeats.outcome():  # It ended before its first step.
      return self._final_step(outcome)
    lost_after_secs = self._options.lost_after_secs
    watch = watchdog.ChiefWatchdog(
      lambda: self._heartbeats.ages()[0],
      self._give_up,
      log_after_secs=lost_after_secs,
      lost_after_secs=_CHIEF_PATIENCE * lost_after_secs,
      log=self._log,
    )
    try:
      self._run_loop()
      outcome = self._await_outcome()
    finally:
      watch.stop()
    return self._final_step(outcome)

  def _final_step(self, outcome: str) -> int:
    """Returns the global step at the end of a training that has finished.

    Args:
      outcome: How training ended: `heartbeats.FINISHED`, or an error in one
        line, or "" if the chief was lost.

    Raises:
      RuntimeError: If training ended with an error, or the chief was lost.
    """
    if not outcome:
      secs = _CHIEF_PATIENCE * self._options.lost_after_secs
      raise RuntimeError(
        f"the chief was lost: no heartbeat for {secs:.0f} s; restart it, and"
        f" then {self.task}"
      )
    if outcome != heartbeats.FINISHED:
      raise RuntimeError(outcome)
    return self.global_step

  def _await_outcome(self) -> str:
    """Waits until the chief announces how training ended.

    Returns:
      `heartbeats.FINISHED`, or an error in one line, or "" if the chief was
      lost.

    Raises:
      TimeoutError: If the chief announces nothing for 600 s, although it sends
        heartbeats and this task has data. (It may be saving a checkpoint.)
    """
    waiting.await_value(
      lambda: self._heartbeats.outcome() or self._has_given_up,
      # Without data, this task waits for the others.
      timeout_secs=watchdog.LAST_BATCH_SECS if self._has_data else math.inf,
      what=f"{self.task} waits for the chief to say how training ended",
      log=self._log,
    )
    return self._heartbeats.outcome()

  def _find_lost(self, error: tf.errors.OpError) -> list[str]:
    """See `ParameterServerDriver._find_lost`.

    If the chief could not reach a parameter server, it may have closed the
    queues before it could tell this task to attach again. So after the error
    that a closed queue causes, this task waits for that, for at most
    `recovery_timeout_secs`.
    """
    if not self.is_chief and _is_of_closed_queue(error):
      with contextlib.suppress(TimeoutError):
        waiting.await_value(
          lambda: (
            self._heartbeats.find_lost()
            or self._must_stop()
            or self._heartbeats.outcome()
          ),
          timeout_secs=self._options.recovery_timeout_secs,
          what=f"{self.task} waits for the chief, which closed a queue",
          log=self._log,
        )
    return super()._find_lost(error)

  def _must_stop(self) -> bool:
    """Returns whether this process must stop before the training ends.

    It must stop if the chief is lost, or if another process has replaced this
    one, which means that it runs as the same task and started later.
    """
    return self._has_given_up or self._heartbeats.is_replaced

  def _give_up(self) -> None:
    self._has_given_up = True
    self.rule.release_replica(self._index)

  def _run_loop(self) -> None:
    """Computes and sends the gradients of this task until training ends.

    Raises:
      RuntimeError: If the data set of this task ends, or if a batch has an id
        that is not a row of a table.
      tf.errors.OpError: If a parameter server is lost.
    """
    try:
      while self._run_from_here():
        pass
    except tf.errors.InvalidArgumentError as error:
      if line := tables.bad_ids(error):
        raise RuntimeError(f"{line}, in a batch of {self.task}") from None
      raise
    except _ENDED as error:
      if self._must_stop() or self._heartbeats.outcome():
        return  # The queues were closed.
      # The chief may have closed the queues as a parameter server was lost.
      if _is_of_closed_queue(error) or self._heartbeats.find_lost():
        raise
      if self.replica.on_data_end == "error":
        raise RuntimeError(
          f"the data set of {self.task} has ended; it must be endless"
        ) from error
      self._has_data = False
      self._end_data()

  def _run_from_here(self) -> bool:
    """Computes gradients of batches from the training's present position on.

    Returns:
      True if the chief has restored a checkpoint, so that the global step went
      back. The caller must then open the data set at the new position. False if
      training has ended, or if this process must stop.
    """
    (token, *state), run_asking, run_preadmitted = self._begin()
    max_steps, newest = 1, 0
    while True:
      (last,) = step_token.LAYOUT.unpack_rows(token.numpy()[None])
      if last.global_step == step_token.ENDED or self._must_stop():
        return False
      if self.rule.repeats_refused and 0 <= last.global_step < newest:
        return True
      newest = max(newest, last.global_step)
      has_tag = last.preadmitted_tag != step_token.NO_TAG
      run = run_asking
      if has_tag:
        assert run_preadmitted is not None, self.rule
        run = run_preadmitted
      start = time.monotonic()
      count, token, *state = run(tf.constant(max_steps), token, *state)
      if has_tag:  # Only the last step of a call may have been refused.
        newest = max(newest, last.global_step + int(count) - 1)
      secs = (time.monotonic() - start) / max(int(count), 1)
      max_steps = max(1, min(_MAX_STEPS, int(_CALL_SECS / secs)))

  def _begin(
    self,
  ) -> tuple[list[tf.Tensor], Callable, Callable | None]:
    """Opens the data set where the training is, and reads the parameters.

    With a rule that repeats refused batches, the first batch must belong to the
    update for which the parameters were read. A gradient that an earlier
    process of this task has sent may still complete an update before they are
    read. Then the data set is opened again, at the new position.

    Returns:
      The result of `ReplicaLoop.begin`; and the traced functions that make
      steps, as `_step_fns` returns them.
    """
    start = int(self.examples_drawn())
    begin, asking, preadmitted = self._step_fns(self._iterator(start))
    begun = begin()
    now = int(self.examples_drawn())
    if self.rule.repeats_refused and now != start:
      begin, asking, preadmitted = self._step_fns(self._iterator(now))
      begun = begin()
    return begun, asking, preadmitted

  def _iterator(self, start: int) -> Iterator:
    """Opens this task's data set, from the example of position `start` on."""
    if self._leases is not None and self.replica.leased is not None:
      dataset = self.replica.leased.dataset_fn(self._leases.numbers())
    else:
      count = len(self.replica_names)
      dataset = self.replica.dataset_fn(count, self._index, start)
    return iter(datasets.untuned(dataset))

  def _step_fns(self, iterator) -> tuple[Callable, Callable, Callable | None]:
    """Traces the functions that make the steps of this task's replica.

    Normally, a step asks the chief for admission before it sends its gradients.
    A step is *admitted in advance* if the reply to the step before it has
    already said that its gradients will be used.

    Args:
      iterator: The iterator over this task's batches.

    Returns:
      Three traced functions. The first is `ReplicaLoop.begin`. The second is
      `ReplicaLoop.run_many` for steps that ask. The third is the same for steps
      that are admitted in advance, or None if the rule never does that.
    """
    if self.rule.repeats_refused and (
      self._put_back is None
      or self._put_back.element_spec != iterator.element_spec
    ):
      self._put_back = put_back_lib.PutBack(
        iterator.element_spec, device=resources.this_device()
      )
    loop = replica_loop.ReplicaLoop(
      self.rule,
      self.replica,
      iterator,
      self._index,
      device=tf.constant(0).device,
      recorder=self._recorder,
      name=self._timeline_name,
      put_back=self._put_back,
    )

    # Concrete functions skip what a call spends on looking for a trace.
    def trace(function, *specs):
      function = tf.function(function, autograph=False)
      return function.get_concrete_function(*specs)

    begin = trace(loop.begin)
    specs = [tf.TensorSpec([], tf.int32)]
    specs += [tf.TensorSpec(t.shape, t.dtype) for t in begin.outputs]
    run_asking = trace(
      lambda *carried: loop.run_many(*carried, is_preadmitted=False), *specs
    )
    run_preadmitted = None
    if self.rule.preadmits:
      run_preadmitted = trace(
        lambda *carried: loop.run_many(*carried, is_preadmitted=True), *specs
      )
    return begin, run_asking, run_preadmitted

  def close(self, error: BaseException | None = None) -> None:
    """Takes this task out of the training. In the chief, ends it for all tasks.

    Args:
      error: The error because of which training ends early, if any. The chief
        tells all tasks about it.
    """
    self._home.is_open = False
    if not self.is_chief:
      beats = self._heartbeats
      stays = self._options.joined is not None and error is None
      end = beats.rest if stays else beats.leave
      heartbeats.run_all([end], log=self._log)
      return
    watchdog.end_training(
      self._heartbeats,
      self.rule,
      self._watchdog,
      self._have_all_ended,
      error,
      patience_secs=watchdog.LAST_BATCH_SECS,
      stays=self._options.joined is not None,
      log=self._log,
    )
    if self._thread is not None and error is None:
      self._thread.raise_error()

  def _have_all_ended(self) -> bool:
    is_own_alive = self._thread is not None and self._thread.is_alive()
    return not self._heartbeats.here() and not is_own_alive


def _is_of_closed_queue(error: tf.errors.OpError) -> bool:
  """Returns whether an op failed because a queue was closed.

  The end of a data set is an `OutOfRangeError` too, with another message.
  """
  return isinstance(error, tf.errors.CancelledError) or (
    isinstance(error, tf.errors.OutOfRangeError)
    and "is closed and has insufficient" in error.message
  )
