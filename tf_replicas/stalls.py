"""Says what a step waits for when it takes long, and gives up lost replicas.

Nothing waits without words: every ten seconds without an update the log names
who holds the step up and why. A replica that is silent for too long is declared
lost, so that another may take its place, and nobody waits for it.
"""

import threading
import time
from collections.abc import Callable
from collections.abc import Sequence

import tensorflow as tf

from tf_replicas import connection
from tf_replicas import ledger
from tf_replicas import membership
from tf_replicas import processes
from tf_replicas import sync_replicas

# How long a training that failed waits for the replicas' last batch.
_HURRY_SECS = 15.0
_MOST_INTERRUPTS = 5


class Watch:
  """Watches the steps of one training from the chief, in a thread."""

  def __init__(
    self,
    optimizer: sync_replicas.SyncReplicasOptimizer,
    global_step: Callable[[], int],
    ages: Callable[[], Sequence[float]],
    outcome: Callable[[], str],
    names: Sequence[str],
    *,
    lost_after_secs: float,
    words_every_secs: float = 10.0,
    log: Callable[[str], None] = print,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Starts to watch.

    Args:
      optimizer: Whose ledger to read.
      global_step: The step that is being made.
      ages: Seconds since each replica was last heard of; -1: never, 0: it has
        left, which makes it lost at once.
      outcome: How training has ended, or "": a worker may end it as well.
      names: The replicas' names.
      lost_after_secs: Silence after which a replica counts as lost.
      words_every_secs: How often to speak while a step does not end.
      log: Where words go.
      clock: Time in seconds.
    """
    self._optimizer = optimizer
    self._global_step = global_step
    self._ages = ages
    self._outcome = outcome
    self._names = list(names)
    self._lost_after_secs = lost_after_secs
    self._words_every_secs = words_every_secs
    self._log = log
    self._clock = clock
    self._since = self._said = self._looked = clock()
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._watch, daemon=True)
    self._thread.start()

  def progress(self) -> None:
    """To be called after every update, or every few."""
    self._since = self._said = self._clock()

  def stop(self) -> None:
    """Ends the watch."""
    self._stop.set()
    self._thread.join()

  def _watch(self) -> None:
    while not self._stop.wait(1.0):
      if self._has_ended():
        self._optimizer.interrupt()
        return
      now = self._clock()
      waited = now - self._since
      # Also while steps end, who is lost must not count as under way.
      is_due = now - self._looked >= self._lost_after_secs
      is_long = waited >= min(self._words_every_secs, self._lost_after_secs)
      if not (is_long or is_due):
        continue
      self._looked = now
      try:
        step = self._global_step()
        state = self._optimizer.ledger()
        ages = self._ages()
        self._give_up_lost(step, state, ages)
      except tf.errors.OpError:
        return  # The main thread meets the same failure.
      if now - self._said >= self._words_every_secs:
        self._said = now
        self._log(describe(step, waited, state, ages, self._names))

  def _has_ended(self) -> bool:
    try:
      return bool(self._outcome())
    except tf.errors.OpError:
      return True  # The main thread meets the same failure.

  def _give_up_lost(
    self, step: int, state: ledger.Ledger, ages: Sequence[float]
  ) -> None:
    for replica, (status, age) in enumerate(
      zip(state.status, ages, strict=True)
    ):
      has_left = age == 0
      silent = has_left or age > self._lost_after_secs
      if silent and status in (
        ledger.Status.ADMITTED,
        ledger.Status.COMPUTING,
      ):
        words = "has left" if has_left else f"was not heard of for {age:.0f} s"
        self._log(
          f"{self._names[replica]} {words}: its place in step {step} is offered"
          " to others"
        )
        self._optimizer.declare_lost(replica, int(state.tag[replica]))


def _end_replicas(
  optimizer,
  have_ended: Callable[[], bool],
  *,
  timeout_secs: float,
  log: Callable[[str], None] = print,
) -> None:
  """Tells every replica to stop after its batch, and waits for that.

  To close the queues would do, but who then comes to them fails, and so may,
  in the process that called it, whatever is called next (TensorFlow 2.21: "this
  error cancels all future operations").

  Args:
    optimizer: The update rule.
    have_ended: Whether all have.
    timeout_secs: How long to wait.
    log: Where words go.
  """
  answering = connection.Thread(optimizer.end_replicas, on_error=bool)
  try:
    connection.await_value(
      have_ended,
      timeout_secs=timeout_secs,
      what="waiting for the workers' last batch",
      log=log,
    )
  except (TimeoutError, tf.errors.OpError) as error:
    words = processes.shortened(str(error))
    log(f"the workers did not end in order: {words}")
  for _ in range(_MOST_INTERRUPTS):
    optimizer.interrupt()  # It heeds what comes after it has begun.
    answering.join(timeout_secs=1)
    if not answering.is_alive():
      return


def end_training(
  members: membership.Membership,
  optimizer,
  watch: Watch | None,
  have_ended: Callable[[], bool],
  error: BaseException | None,
  *,
  patience_secs: float = _HURRY_SECS,
  log: Callable[[str], None] = print,
) -> None:
  """The chief's: ends the replicas, leaves, and dismisses the serving tasks.

  Args:
    members: Of the cluster.
    optimizer: The update rule.
    watch: What watched the steps; None if it made none.
    have_ended: Whether all replicas have.
    error: What ended the training early, told to everyone.
    patience_secs: How long a last batch may take, if nothing did.
    log: Where words go.
  """
  if members.is_replaced:  # The training is another's now.
    if watch is not None:
      watch.stop()
    membership.take_leave([members.leave], log=log)
    return
  if error is not None:
    patience_secs = _HURRY_SECS
  outcome = membership.outcome_of(error)
  if not membership.take_leave([lambda: members.end(outcome)], log=log):
    patience_secs = 1.0  # Nobody can be told to end.
  stages = []
  if watch is not None:
    stages.append(watch.stop)
  stages += [
    lambda: _end_replicas(
      optimizer, have_ended, timeout_secs=patience_secs, log=log
    ),
    optimizer.close,
    members.leave,
    lambda: members.dismiss(timeout_secs=10),
  ]
  membership.take_leave(stages, log=log)


class ChiefWatch:
  """Watches the chief from a worker, in a thread.

  A worker that waits for the chief's next update cannot tell a slow chief from
  a dead one; this says which, and ends the wait if no chief comes back.
  """

  def __init__(
    self,
    age: Callable[[], float],
    on_lost: Callable[[], None],
    *,
    words_after_secs: float,
    lost_after_secs: float,
    words_every_secs: float = 10.0,
    log: Callable[[str], None] = print,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Starts to watch.

    Args:
      age: Seconds since the chief was last heard of; 0 once it has left.
      on_lost: Called when it is given up, and every second from then on.
      words_after_secs: Silence after which the log tells of it.
      lost_after_secs: Silence after which it is given up.
      words_every_secs: How often to speak.
      log: Where words go.
      clock: Time in seconds.
    """
    self._age = age
    self._on_lost = on_lost
    self._words_after_secs = words_after_secs
    self._lost_after_secs = lost_after_secs
    self._words_every_secs = words_every_secs
    self._log = log
    self._clock = clock
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._watch, daemon=True)
    self._thread.start()

  def stop(self) -> None:
    """Ends the watch."""
    self._stop.set()
    self._thread.join()

  def _watch(self) -> None:
    said = -self._words_every_secs
    while not self._stop.wait(1.0):
      try:
        age = self._age()
        if age > self._lost_after_secs:
          self._on_lost()
          continue
      except tf.errors.OpError:
        return  # The main thread meets the same failure.
      now = self._clock()
      is_silent = age > self._words_after_secs
      if is_silent and now - said >= self._words_every_secs:
        said = now
        self._log(
          f"the chief was not heard of for {age:.0f} s; waiting for its restart"
          f" until {self._lost_after_secs:.0f} s"
        )


def describe(
  step: int,
  waited_secs: float,
  state: ledger.Ledger,
  ages: Sequence[float],
  names: Sequence[str],
) -> str:
  """One line on what a step waits for."""
  delivered = int((state.accepted[:, 0] >= 0).sum())
  parts = []
  for name, status, age in zip(names, state.status, ages, strict=True):
    heard = "never heard of" if age < 0 else f"last heard {age:.0f} s ago"
    if age == 0:
      heard = "has left"
    parts.append(f"{name}: {ledger.Status(status).name.lower()}, {heard}")
  return (
    f"step {step} waits since {waited_secs:.0f} s with {delivered} of"
    f" {len(state.accepted)} contributions ({'; '.join(parts)})"
  )
