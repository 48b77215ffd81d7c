"""Reports long waits, and gives up lost replicas and a lost chief.

Every ten seconds without an update, the log names the replicas that delay the
step, and why. A replica that sends no heartbeats for too long is declared lost.
Then no update waits for it, and the gradients of another replica may be used in
its place. If a step can only be made with lost replicas, and none of them is
restarted in time, the training ends. The update rule may have a deadline for
its steps. A step that exceeds it goes on with fewer gradients, or the training
ends.
"""

import time
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Sequence

import tensorflow as tf

from tf_replicas.drivers import heartbeats as heartbeats_lib
from tf_replicas.rules import base as rule_base
from tf_replicas.rules import protocol
from tf_replicas.rules import results
from tf_replicas.runtime import processes
from tf_replicas.runtime import waiting
from tf_replicas.session import training

_POLL_SECS = 1.0
_LOG_EVERY_SECS = 10.0
# How long the last batch of a straggler may take.
LAST_BATCH_SECS = 600.0
# How long a training that failed waits for the replicas' last batch.
_FAILED_PATIENCE_SECS = 15.0
_MAX_INTERRUPTS = 5
# A lost replica delays a step only if the step waits for one of these.
_OWES = (protocol.Status.ADMITTED, protocol.Status.COMPUTING)


class StepWatchdog(waiting.PollingThread):
  """A thread of the chief that logs long waits and declares replicas lost."""

  def __init__(
    self,
    rule: rule_base.UpdateRule,
    global_step: Callable[[], int],
    ages: Callable[[], Sequence[float]],
    outcome: Callable[[], str],
    names: Sequence[str],
    *,
    lost_after_secs: float,
    restart_timeout_secs: float,
    must_wake: Callable[[], bool] = lambda: False,
    joining: Collection[int] = (),
    start_timeout_secs: float = 0.0,
    log: Callable[[str], None] = print,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Starts the thread that watches the replicas.

    Args:
      rule: The update rule.
      global_step: Returns the global step.
      ages: Returns the seconds since the last heartbeat of each replica. -1:
        there was no heartbeat yet. 0: the replica has left, which counts as
        lost.
      outcome: Returns why the training must stop, or "" while it goes on. While
        it returns a reason, the wait for an update is interrupted.
      names: The replicas' names.
      lost_after_secs: Seconds without a heartbeat after which a replica is
        declared lost.
      restart_timeout_secs: Seconds that a step waits for a lost replica to be
        restarted, if it cannot be made without one. Then the training ends.
      must_wake: Returns whether the thread that waits for an update has
        something else to do. While it returns True, that wait is interrupted.
      joining: The indices of the replicas that need not come at all.
      start_timeout_secs: The first step has at least so many seconds, whatever
        the deadline of the update rule and `restart_timeout_secs` are.
      log: Receives each line of the log.
      clock: Returns the time in seconds.
    """
    self._rule = rule
    self._global_step = global_step
    self._ages = ages
    self._outcome = outcome
    self._must_wake = must_wake
    self._names = list(names)
    self._lost_after_secs = lost_after_secs
    self._restart_timeout_secs = restart_timeout_secs
    self._joining = joining
    self._log = log
    self._clock = clock
    self._since = self._logged = self._checked = self._began = clock()
    # The tag with which each lost replica was logged.
    self._lost: dict[int, int] = {}
    self._is_awaited = False
    self._least_secs = start_timeout_secs
    self._expired_step: int | None = None
    self._expiry: training.StepExpired | None = None
    super().__init__(
      self._poll, period_secs=_POLL_SECS, on_error=rule.interrupt
    )

  def begin(self) -> None:
    """Tells the watchdog that the chief begins to wait for an update.

    The deadline of the update rule counts from now on.
    """
    self._since = self._clock()
    self._is_awaited = True

  def progress(self) -> None:
    """Tells the watchdog that an update was made.

    The time without an update counts from now on. The deadline of the update
    rule does not count before the next call of `begin`.
    """
    self._is_awaited = False
    self._least_secs = 0.0
    self._expiry = None  # The step was made after all.
    self._since = self._logged = self._clock()

  def raise_if_expired(self) -> None:
    """Raises `training.StepExpired` if training must end.

    That is so if a step had too few contributions at its deadline, or if lost
    replicas without which a step cannot be made were not restarted in time.
    """
    if self._expiry is not None:
      raise self._expiry

  def _poll(self) -> None:
    """Checks once whether the main thread has to wake, and how the step goes.

    An error of TensorFlow wakes the main thread too: it meets the same failure,
    or the failure has passed by then.
    """
    try:
      has_ended = bool(self._outcome())
      if has_ended or self._must_wake():
        self._rule.interrupt()
      if not has_ended:
        self._check_step()
    except tf.errors.OpError:
      self._rule.interrupt()

  def _check_step(self) -> None:
    """Checks for a long wait, for lost replicas and for a missed deadline."""
    now = self._clock()
    waited = now - self._since
    # A lost replica must not count as computing, even while steps are made.
    is_due = now - self._checked >= self._lost_after_secs
    is_long = waited >= min(_LOG_EVERY_SECS, self._lost_after_secs)
    timeout_secs = self._rule.step_timeout_secs
    is_expired = (
      timeout_secs is not None
      and self._is_awaited
      and waited >= max(timeout_secs, self._least_secs)
    )
    if not (is_long or is_due or is_expired):
      return
    self._checked = now
    step = self._global_step()
    status = self._rule.status()
    ages = self._ages()
    self._declare_lost(step, status, ages)
    if is_expired and self._expired_step != step:
      self._expire(step, waited, status)
    limit_secs = max(self._restart_timeout_secs, self._least_secs)
    if self._is_awaited and waited >= limit_secs:
      self._end_if_lost(step, waited, status, ages)
    if now - self._logged >= _LOG_EVERY_SECS:
      self._logged = now
      self._log(describe(step, waited, status, ages, self._names))

  def _declare_lost(
    self, step: int, status: results.StepStatus, ages: Sequence[float]
  ) -> None:
    least = self._rule.min_contributions
    can_skip = least is not None and least < status.needed
    is_started = self._clock() - self._began >= self._lost_after_secs
    for replica, ((doing, tag), age) in enumerate(
      zip(status.replicas, ages, strict=True)
    ):
      name = self._names[replica]
      may_join = replica in self._joining
      may_be_late = can_skip or may_join
      # Those of the cluster spec have some time to start.
      is_absent = age < 0 and (may_join or (can_skip and is_started))
      is_lost = self._is_away(age) or is_absent
      if is_lost and doing in _OWES:
        is_expected = age >= 0 or not may_join
        is_known = self._lost.get(replica) == tag
        self._lost[replica] = tag
        if is_expected and not is_known:
          away = sum(map(self._is_away, ages))
          follows = f"step {step} uses another replica's gradient instead"
          if len(ages) - away < status.needed <= len(ages):
            follows = f"step {step} waits for it"
          if can_skip:
            follows = f"from step {step} on, updates do not wait for it"
          self._log(
            f"{name}: {_absence(age)}; {follows}. If the task is dead, restart"
            " it: it joins again"
          )
        self._rule.declare_lost(replica, tag)
      elif may_be_late and not is_lost and replica in self._lost:
        if doing not in (protocol.Status.LOST, protocol.Status.SKIPPED):
          del self._lost[replica]
          self._log(f"{name}: takes part from step {step} on")

  def _is_away(self, age: float) -> bool:
    """Returns whether a replica has left, or been silent for too long.

    Args:
      age: The seconds since its last heartbeat, as in `__init__`.
    """
    return age == 0 or age > self._lost_after_secs

  def _expire(
    self, step: int, waited_secs: float, status: results.StepStatus
  ) -> None:
    """Lets a step go on that has exceeded its deadline, or ends the training.

    The step goes on if it has enough contributions without those that are
    missing.

    Args:
      step: The global step.
      waited_secs: Seconds since the chief began to wait for the update.
      status: The number of contributions that the step has, and what each
        replica does.
    """
    missing = [
      name
      for name, (doing, _) in zip(self._names, status.replicas, strict=True)
      if doing not in (protocol.Status.WAITING, protocol.Status.DELIVERED)
    ]
    least = self._rule.min_contributions or status.needed
    found = (
      f"step {step}: {status.received} of {status.needed} contributions after"
      f" {waited_secs:.0f} s, more than `step_timeout_secs`; missing:"
      f" {', '.join(missing) or 'none'}"
    )
    if status.received >= least:
      self._expired_step = step
      self._rule.expire(step)
      self._log(
        f"{found}. Updates go on without these replicas until they contribute"
        " again"
      )
      return
    self._expiry = training.StepExpired(
      f"{found}. `min_contributions` needs {least}, so the training ends"
    )
    self._rule.interrupt()

  def _end_if_lost(
    self,
    step: int,
    waited_secs: float,
    status: results.StepStatus,
    ages: Sequence[float],
  ) -> None:
    """Ends the training if the step cannot be made without lost replicas.

    Args:
      step: The global step.
      waited_secs: Seconds since the chief began to wait for the update.
      status: The number of contributions that the step needs.
      ages: The seconds since the last heartbeat of each replica, as in
        `__init__`.
    """
    lost = [
      f"{name} ({_absence(age)})"
      for name, age in zip(self._names, ages, strict=True)
      if age < 0 or self._is_away(age)
    ]
    needed = self._rule.min_contributions or status.needed
    if needed > len(ages):  # One replica makes several contributions.
      needed = 1
    if len(ages) - len(lost) >= needed:
      return
    self._expiry = training.StepExpired(
      f"step {step} waits for {waited_secs:.0f} s, and cannot be made without"
      f" lost replicas: {', '.join(lost)}. They were not restarted within"
      f" {self._restart_timeout_secs:.0f} s, so the training ends"
    )
    self._rule.interrupt()


class ChiefWatchdog(waiting.PollingThread):
  """A thread of a worker that watches whether the chief is alive.

  Without it, a worker that waits for the next update could not tell a slow
  chief from a dead one. The thread logs that the chief sends no heartbeats.
  After a while it gives the chief up, by calling `on_lost`.
  """

  def __init__(
    self,
    age: Callable[[], float],
    on_lost: Callable[[], None],
    *,
    log_after_secs: float,
    lost_after_secs: float,
    log: Callable[[str], None] = print,
  ):
    """Starts the thread that watches the chief.

    Args:
      age: Returns the seconds since the chief's last heartbeat, or 0 once the
        chief has left.
      on_lost: Called when the chief is lost, and then again every second. It
        has to end the waits of this worker.
      log_after_secs: Seconds without a heartbeat after which to log that.
      lost_after_secs: Seconds without a heartbeat after which the chief counts
        as lost.
      log: Receives each line of the log.
    """
    self._age = age
    self._on_lost = on_lost
    self._log_after_secs = log_after_secs
    self._lost_after_secs = lost_after_secs
    self._log = log
    self._logged = -_LOG_EVERY_SECS
    super().__init__(self._poll, period_secs=_POLL_SECS)

  def _poll(self) -> bool:
    """Checks once whether the chief is silent or lost.

    Returns:
      Whether the thread must stop, because it cannot read heartbeats any more.
    """
    try:
      age = self._age()
      if age > self._lost_after_secs:
        self._on_lost()
        return False
    except tf.errors.OpError:
      return True  # The main thread meets the same failure.
    now = time.monotonic()
    is_silent = age > self._log_after_secs
    if is_silent and now - self._logged >= _LOG_EVERY_SECS:
      self._logged = now
      self._log(
        f"the chief: {_silence(age)}. If it is dead, restart it: this worker"
        f" gives up in {self._lost_after_secs - age:.0f} s"
      )
    return False


def describe(
  step: int,
  waited_secs: float,
  status: results.StepStatus,
  ages: Sequence[float],
  names: Sequence[str],
) -> str:
  """Describes in one line how long the chief has waited for an update, and why.

  Args:
    step: The global step.
    waited_secs: Seconds since the last update.
    status: The number of contributions that the update has and needs, and what
      each replica does.
    ages: The seconds since the last heartbeat of each replica. -1: there was no
      heartbeat yet. 0: the replica has left.
    names: The replicas' names.
  """
  replicas = []
  for name, (doing, _), age in zip(names, status.replicas, ages, strict=True):
    heard = f"last heartbeat {age:.0f} s ago" if age > 0 else _absence(age)
    replicas.append(f"{name}: {doing.name.lower()}, {heard}")
  return (
    f"step {step}: waiting for {waited_secs:.0f} s, {status.received} of"
    f" {status.needed} contributions received ({'; '.join(replicas)})"
  )


def _silence(age: float) -> str:
  return f"no heartbeat for {age:.0f} s"


def _absence(age: float) -> str:
  """Says in a phrase why a replica counts as lost.

  Args:
    age: The seconds since its last heartbeat. -1: there was no heartbeat yet.
      0: the replica has left.
  """
  if age > 0:
    return _silence(age)
  return "no heartbeat yet" if age < 0 else "left the training"


def end_training(
  heartbeats: heartbeats_lib.Heartbeats,
  rule: rule_base.UpdateRule,
  watch: StepWatchdog | None,
  have_ended: Callable[[], bool],
  error: BaseException | None,
  *,
  patience_secs: float = _FAILED_PATIENCE_SECS,
  stays: bool = False,
  log: Callable[[str], None] = print,
) -> None:
  """Ends the training for all tasks. Only the chief calls this.

  It announces how training ended, waits until the replicas have stopped, closes
  the queues of the rule, and tells the serving tasks (parameter servers and
  in-graph workers) to end. If another process has replaced this one as the
  chief, it only stops the heartbeats of this process.

  Args:
    heartbeats: The chief's heartbeats.
    rule: The update rule.
    watch: The watchdog of the steps; None if no step was made.
    have_ended: Returns whether all replicas have ended.
    error: The error that ended the training early; None if there was none. All
      tasks are told about it.
    patience_secs: Seconds to wait until the replicas have stopped, if there was
      no error. After an error, it waits for 15 s.
    stays: Whether there may be another training. If so, and if there was no
      error, the chief goes on to send heartbeats, and the serving tasks are not
      told to end.
    log: Receives each line of the log.
  """
  stop_watch = [] if watch is None else [watch.stop]
  if heartbeats.is_replaced:  # The training belongs to another process now.
    heartbeats_lib.run_all([*stop_watch, heartbeats.leave], log=log)
    return
  if error is not None:
    patience_secs = _FAILED_PATIENCE_SECS
  outcome = heartbeats_lib.outcome_of(error)
  if not heartbeats_lib.run_all([lambda: heartbeats.end(outcome)], log=log):
    patience_secs = 1.0  # The replicas cannot be told.

  def end_replicas():
    _end_replicas(rule, have_ended, timeout_secs=patience_secs, log=log)

  heartbeats_lib.run_all([*stop_watch, end_replicas, rule.close], log=log)
  if error is not None or not stays:
    stages = [
      heartbeats.leave,
      lambda: heartbeats.shut_down_servers(timeout_secs=10),
    ]
    heartbeats_lib.run_all(stages, log=log)


def _end_replicas(
  rule: rule_base.UpdateRule,
  have_ended: Callable[[], bool],
  *,
  timeout_secs: float,
  log: Callable[[str], None],
) -> None:
  """Tells every replica to stop after its batch, and waits for that.

  If they do not stop in time, it logs that, and returns. (Closing the queues
  would stop the replicas too, but by an error. After an error, a later call of
  the process may fail as well: TensorFlow 2.21 says "this error cancels all
  future operations".)

  Args:
    rule: The update rule.
    have_ended: Returns whether all replicas have stopped.
    timeout_secs: Seconds to wait until they have stopped.
    log: Receives each line of the log.
  """
  answering = waiting.RaisingThread(rule.end_replicas, on_error=bool)
  try:
    waiting.await_value(
      have_ended,
      timeout_secs=timeout_secs,
      what="waiting for the workers' last batch",
      log=log,
    )
  except (TimeoutError, tf.errors.OpError) as error:
    message = processes.shortened(str(error))
    log(
      "not all workers have stopped in time, or it is not known whether they"
      f" have ({message}); shutting down anyway. End their processes if they"
      " still run."
    )
  for _ in range(_MAX_INTERRUPTS):
    # Again and again: `end_replicas` ignores interrupts from before it began.
    rule.interrupt()
    answering.join(timeout_secs=1)
    if not answering.is_alive():
      return
