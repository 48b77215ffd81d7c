"""Between-graph replication: every worker is its own client and program.

Each worker runs this driver. It connects to all parameter servers and to no
other worker, builds the model, and attaches to the shared copy by name.

1. The chief (a `chief` task, else worker 0) publishes what it trains, and the
   others compare. It creates the shared copy and restores a checkpoint if there
   is one; the others wait for that.
2. Every worker loops: pull, compute, hand over (`turns.contribute`); several
   turns per `tf.function` call. On the chief that loop has a thread of its own.
3. The chief's main thread makes the updates (`step`), one call per step.
4. At the end the chief says how it ended and releases every worker that comes
   to `releases.ENDED`. They leave; then it closes the queues and dismisses the
   PS tasks.

Where things live: parameters, slots, averages, queues and counters on the PS
tasks; the model, its data and the inner optimizer's code in each worker.
"""

import functools
import time
from collections.abc import Callable

import tensorflow as tf

from tf_replicas import cluster
from tf_replicas import connection
from tf_replicas import driver
from tf_replicas import membership
from tf_replicas import releases
from tf_replicas import stalls
from tf_replicas import sync_replicas
from tf_replicas import timeline
from tf_replicas import towers
from tf_replicas import training
from tf_replicas import turns

# How many times as long as for another worker to wait for the chief.
_CHIEF_PATIENCE = 10
# How long the batch of a straggler, which nobody waited for, may take.
_LAST_BATCH_SECS = 600.0
# A call takes as many turns as fit, so that the process stays responsive.
_CALL_SECS = 0.5
_MOST_TURNS = 100
_ENDED = (tf.errors.OutOfRangeError, tf.errors.CancelledError)


class BetweenGraph(driver.Driver):
  """The between-graph driver of one worker.

  Attributes:
    task: Which task this is.
  """

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
    """Connects, builds the replica and attaches to the shared copy.

    Nothing of TensorFlow may be built before the connection stands, hence the
    two functions.

    Args:
      spec: The cluster, ports chosen.
      task: This task, one of `spec.replicas`.
      replica_fn: Builds the replica; the same in every worker.
      optimizer_fn: Builds the update rule; the same in every worker.
      start_timeout_secs: How long to wait for PS tasks and chief.
      lost_after_secs: How long a worker may be silent before its place in a
        step is offered to another.
      timeline_dir: Where to record what this task does when; see `timeline`.
      log: Where words go.

    Raises:
      cluster.ClusterError: If `task` does not train, or its port is in use.
      TimeoutError: If a PS task or the chief does not come in time.
      RuntimeError: If this program builds other variables than the chief's.
    """
    self.task = task
    self.is_chief = task == spec.chief
    self._names = [str(t) for t in spec.replicas]
    self._index = spec.replicas.index(task)
    self._log = log
    self._lost_after_secs = lost_after_secs
    self._recorder = None
    self._timeline_name = f"{task.job}:{task.index}"
    if timeline_dir is not None:
      file = self._timeline_name.replace(":", "_")
      self._recorder = timeline.Recorder(timeline_dir, file)
    self._start_timeout_secs = start_timeout_secs
    devices = connection.connect_client(
      spec, task, timeout_secs=start_timeout_secs, log=log
    )
    self._members = membership.Membership(
      self._index,
      len(self._names),
      devices=devices,
      timeout_secs=start_timeout_secs,
      log=log,
    )
    with self._members.beginning(self.is_chief, log):
      self._build(spec, self._names, replica_fn, optimizer_fn)
      self._agree()
      self.optimizer.build(self.store, is_sparse=towers.sparsity(self.replica))
      if self.is_chief:
        self.optimizer.create([tf.identity(v) for v in self.replica.shared])
    self._thread: connection.Thread | None = None
    self._watch: stalls.Watch | None = None
    self._has_given_up = False

  def step(self, most: int = 1) -> training.StepResult:
    """The chief's: makes an update, or several in one call.

    Args:
      most: How many; see `SyncReplicasOptimizer.apply_updates`. The loss of the
        last and all their examples are in the result.

    Raises:
      FloatingPointError: If a replica computed something not finite.
      RuntimeError: If training was ended elsewhere, or goes on in another
        process that runs as this task.
      Exception: What went wrong in the chief's own replica.
    """
    if self._thread is None:
      self._start()
    return self._make_updates(most)

  def _start(self) -> None:
    """Tells the others to go on, and starts the chief's own replica."""
    self._begin()
    self._members.let_go()
    self._watch = stalls.Watch(
      self.optimizer,
      lambda: self.global_step,
      self._members.ages,
      self._members.outcome,
      self._names,
      lost_after_secs=self._lost_after_secs,
      log=self._log,
    )
    self._thread = connection.Thread(
      self._contribute_until_the_end, on_error=self.optimizer.interrupt
    )

  def run_replica(self) -> int:
    """Everyone else's: contributes until training ends.

    Returns:
      The global step when it ended.

    Raises:
      RuntimeError: If training ended with an error, with its words.
    """
    connection.await_value(
      lambda: self._members.may_go() or self._members.outcome(),
      timeout_secs=self._start_timeout_secs,
      what=f"{self.task} waits for the chief to restore and to begin",
      log=self._log,
    )
    if outcome := self._members.outcome():  # It ended before its first step.
      return self._step_of(outcome)
    watch = stalls.ChiefWatch(
      lambda: self._members.ages()[0],
      self._give_up,
      words_after_secs=self._lost_after_secs,
      lost_after_secs=_CHIEF_PATIENCE * self._lost_after_secs,
      log=self._log,
    )
    try:
      self._contribute_until_the_end()
      outcome = self._await_outcome()
    finally:
      watch.stop()
    return self._step_of(outcome)

  def _step_of(self, outcome: str) -> int:
    """The global step of a training that ended well; raises if it did not."""
    if outcome != membership.FINISHED:
      raise RuntimeError(outcome or "the chief was lost")
    return self.global_step

  def _await_outcome(self) -> str:
    """How training ended; the chief may be just about to say it."""
    connection.await_value(
      lambda: self._members.outcome() or self._has_given_up,
      timeout_secs=10,
      what=f"{self.task} waits for the chief to say how training ended",
      log=self._log,
    )
    return self._members.outcome()

  def _is_over(self) -> bool:
    """Whether nobody counts on this process any more."""
    return self._has_given_up or self._members.is_replaced

  def _give_up(self) -> None:
    self._has_given_up = True
    self.optimizer.give_up(self._index)

  def _agree(self) -> None:
    """Compares with what the chief trains, before anything is made of it."""
    rule, variables = self.optimizer.signature(), self.store.signature()
    if self.is_chief:
      self._members.publish({"rule": rule, "variables": variables})
      return
    theirs = connection.await_value(
      lambda: self._members.published() or self._members.outcome(),
      timeout_secs=self._start_timeout_secs,
      what=f"{self.task} waits for the chief to say what it trains",
      log=self._log,
    )
    if isinstance(theirs, str):  # It has failed.
      self._members.leave()
      raise RuntimeError(theirs)
    found = membership.differences(variables, theirs["variables"])
    if rule != theirs["rule"]:
      found.append(
        f"the update rule is {rule} here and {theirs['rule']} at the chief"
      )
    if found:
      words = f"{self.task} differs from the chief: {'; '.join(found)}"
      self._members.end(words)
      self._members.leave()
      raise RuntimeError(words)

  def _contribute_until_the_end(self) -> None:
    start = int(self.examples_drawn())
    dataset = self.replica.dataset_fn(len(self._names), self._index, start)
    iterator = iter(dataset)

    begin, offer, hand_over = self._turn_fns(iterator)
    most = 1
    try:
      last, *state = begin()
      while True:
        _, step, ticket = last.numpy()[:3]
        if step == releases.ENDED or self._is_over():
          return
        take = offer if ticket < 0 else hand_over
        start = time.monotonic()
        count, last, *state = take(tf.constant(most), last, *state)
        secs = (time.monotonic() - start) / max(int(count), 1)
        most = max(1, min(_MOST_TURNS, int(_CALL_SECS / secs)))
    except _ENDED as error:
      if self._is_over() or self._members.outcome():
        return  # The queues were closed.
      if isinstance(error, tf.errors.CancelledError):
        raise
      raise RuntimeError(
        f"the data set of {self.task} has ended; it must be endless"
      ) from error

  def _turn_fns(self, iterator):
    """The functions for the beginning, and turns without and with a ticket."""
    replicas_turns = turns.Turns(
      self.store,
      self.optimizer,
      self.replica,
      iterator,
      self._index,
      device=tf.constant(0).device,
      recorder=self._recorder,
      name=self._timeline_name,
    )

    # Concrete functions skip what a call spends on looking for a trace.
    def trace(turn, *specs):
      return tf.function(turn, autograph=False).get_concrete_function(*specs)

    first = trace(replicas_turns.begin)
    specs = [tf.TensorSpec([], tf.int32)]
    specs += [tf.TensorSpec(t.shape, t.dtype) for t in first.outputs]
    return first, *(
      trace(functools.partial(replicas_turns.take_some, has_ticket), *specs)
      for has_ticket in (False, True)
    )

  def close(self, error: BaseException | None = None) -> None:
    """See `driver.Driver`."""
    if not self.is_chief:
      membership.take_leave([self._members.leave], log=self._log)
      return
    stalls.end_training(
      self._members,
      self.optimizer,
      self._watch,
      self._have_all_ended,
      error,
      patience_secs=_LAST_BATCH_SECS,
      log=self._log,
    )
    if self._thread is not None and error is None:
      self._thread.raise_error()

  def _have_all_ended(self) -> bool:
    is_own_alive = self._thread is not None and self._thread.is_alive()
    return not self._members.here() and not is_own_alive
