"""Who takes part in a training, who is alive, and how it ended.

On every task that serves (each PS; in-graph each worker as well) lives a small
*register*: when each client was last heard of, by that task's own clock, which
process that is, and how training ended. On PS task 0 it also says what the
chief trains, for the others to compare with. A client beats in threads of their
own, one for each register, so that a task which hangs holds up nobody else.

A process that joins takes its client's place from an earlier one. If that lives
after all (it stood still, its machine was cut off, or the same task was started
twice) it finds out with its next beat and ends as if it were dead: it says
nothing to the others.
"""

import contextlib
import functools
import json
import secrets
import threading
import time
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence

import tensorflow as tf

from tf_replicas import connection
from tf_replicas import register as register_lib
from tf_replicas import resources

BEAT_SECS = 1.0
FINISHED = "finished"
_REPLACED = "this process was replaced: another one runs as the same task"
# How long tasks may take to answer a client that leaves.
_ANSWER_SECS = 10.0


class _Place:
  """One serving task as a client sees it, which beats there from now on."""

  def __init__(
    self,
    register: register_lib.Register,
    num_clients: int,
    client: int,
    process: int,
    *,
    is_first: bool,
    log: Callable[[str], None],
  ):
    self._register = register
    self._num_clients = num_clients
    self._client = client
    self._process = process
    # Only PS task 0 says whose place it is; the others hear of whoever comes.
    self._is_first = is_first
    self._has_joined = self._is_taken = False
    # A task that stands still fails nothing: whoever needs it waits.
    self._words = connection.Words(log=log)
    task = tf.DeviceSpec.from_string(register.device)
    self._what = f"waiting for an answer of {task.job} {task.task}"
    self._answered = time.monotonic()
    self._is_left = threading.Event()
    self._beat(True)
    self._thread = connection.Thread(self._keep_beating, on_error=bool)

  def _keep_beating(self) -> None:
    while not self._is_left.wait(BEAT_SECS):
      self._beat(True)
    self._beat(False)
    self._words.stop()

  def _beat(self, is_here: bool) -> None:
    with self._words.during(self._what):
      self._say(is_here)

  def _say(self, is_here: bool) -> None:
    joins = not (self._is_first and self._has_joined)
    try:
      self._is_taken = not self._register.beat(
        self._client, self._process, is_here, joins=joins
      )
      self._has_joined = True
      self._answered = time.monotonic()
    except tf.errors.UnavailableError:
      pass  # It is away; the main thread sees the same where it matters.
    except tf.errors.OpError:
      self._attach_again()

  def _attach_again(self) -> None:
    """A task that was restarted has a new register."""
    try:
      register = register_lib.Register(self._register.device, self._num_clients)
      if register.is_ready():
        self._register = register
    except tf.errors.OpError:
      pass  # It is still away.

  def silence(self) -> float:
    """Seconds since it last answered."""
    return time.monotonic() - self._answered

  def is_taken(self) -> bool:
    """Whether another process has it now; asks if that was long ago."""
    is_old = self.silence() > 2 * BEAT_SECS
    if is_old and not self._is_left.is_set():
      self._say(True)
    return self._is_taken

  def leave(self) -> connection.Thread:
    """Beats no more; returns the thread that says so there."""
    self._is_left.set()
    return self._thread

  def dismiss(self, outcome: str) -> None:
    """Lets the task go, also one that was restarted just now."""
    try:
      self._register.dismiss(outcome)
    except tf.errors.OpError:
      # One that is away has no register, and whoever runs it has to end it.
      try:
        register_lib.Register(self._register.device, self._num_clients).dismiss(
          outcome
        )
      except tf.errors.OpError:
        pass


class Membership:
  """A client's view of the registers.

  Attributes:
    client: This client's number.
  """

  def __init__(
    self,
    client: int,
    num_clients: int,
    *,
    devices: Sequence[str],
    timeout_secs: float = 60.0,
    log: Callable[[str], None] = print,
  ):
    """Attaches to the registers of all serving tasks and starts to beat.

    Args:
      client: Which client this is, in [0, num_clients).
      num_clients: How many clients there are.
      devices: One device of each serving task; the first is PS task 0.
      timeout_secs: How long to wait for the registers to be there.
      log: Where words go.

    Raises:
      TimeoutError: If one is not.
    """
    self.client = client
    process = secrets.randbelow(1 << 62) + 1
    self._ending = "PS task 0 was lost"
    registers = [
      register_lib.Register(device, num_clients) for device in devices
    ]
    self._first = registers[0]
    for device, register in zip(devices, registers, strict=True):
      connection.await_value(
        register.is_ready,
        timeout_secs=timeout_secs,
        what=f"waiting for the register of {device}",
        log=log,
      )
    self._places = [
      _Place(r, num_clients, client, process, is_first=i == 0, log=log)
      for i, r in enumerate(registers)
    ]

  @property
  def is_replaced(self) -> bool:
    """Whether another process has taken this client's place."""
    return self._places[0].is_taken()

  def raise_if_replaced(self) -> None:
    """Raises `RuntimeError` if it is."""
    if self.is_replaced:
      raise RuntimeError(_REPLACED)

  def silences(self) -> list[float]:
    """Seconds since each serving task last answered this client."""
    return [place.silence() for place in self._places]

  def ages(self) -> list[float]:
    """Seconds since each client's last beat; -1: never came, 0: has left."""
    return self._first.ages()

  def trace_ahead(self) -> None:
    """Traces what may be called while a task stands still; see `in_graph`."""
    self.ages()
    self.outcome()

  def here(self) -> list[int]:
    """The other clients that beat."""
    return [
      client
      for client, age in enumerate(self.ages())
      if client != self.client and 0 < age < 5 * BEAT_SECS
    ]

  def publish(self, signature: object) -> None:
    """The chief's: says what it trains. Others compare with it."""
    self._first.signature.assign(json.dumps(signature))

  def published(self) -> object | None:
    """What the chief trains, or None as long as it has not said."""
    text = self._first.signature.numpy().decode()
    return json.loads(text) if text else None

  def let_go(self) -> None:
    """The chief's: everything has its first value; others may begin."""
    self._first.may_go.assign(True)

  def may_go(self) -> bool:
    """Whether the chief has let the others begin."""
    return bool(self._first.may_go.numpy())

  def outcome(self) -> str:
    """How training ended: `FINISHED`, what went wrong, or "" if it goes on.

    For a process that was replaced it has ended.
    """
    return _REPLACED if self.is_replaced else self._outcome()

  def _outcome(self) -> str:
    return self._first.outcome.numpy().decode()

  def raise_if_ended(self) -> None:
    """Raises `RuntimeError` with how training ended, if it has ended."""
    outcome = self.outcome()
    if outcome:
      raise RuntimeError(outcome)

  def end(self, outcome: str) -> None:
    """Says how training ended, unless that was said before."""
    self._ending = outcome
    if not self.outcome():
      self._first.outcome.assign(outcome)
      resources.await_assigned([self._first.outcome])

  @contextlib.contextmanager
  def beginning(self, is_chief: bool, log: Callable[[str], None]):
    """Around what builds a training: if the chief fails, all hear of it.

    A restarted one's failure is its own; the others wait for the next.
    """
    try:
      yield
    except Exception as error:
      if is_chief and not self.is_replaced and not self.may_go():
        outcome = outcome_of(error)
        stages = [lambda: self.end(outcome), self.leave]
        stages.append(lambda: self.dismiss(timeout_secs=10))
        take_leave(stages, log=log)
      raise

  def leave(self) -> None:
    """Says that this client needs nothing any more."""
    _await_answers([place.leave() for place in self._places])

  def dismiss(
    self, *, timeout_secs: float, clock: Callable[[], float] = time.monotonic
  ) -> list[int]:
    """The chief's last act: lets the serving tasks go once the others left.

    Args:
      timeout_secs: How long to wait for clients that still beat.
      clock: Time in seconds.

    Returns:
      The clients that had not left.
    """
    deadline = clock() + timeout_secs
    try:
      while (here := self.here()) and clock() <= deadline:
        time.sleep(0.05)
      outcome = self._outcome()
    except tf.errors.OpError:  # Who is left must not wait for PS task 0.
      here, outcome = [], self._ending
    first, *others = self._places
    # PS task 0 last: the others may still have to look something up there.
    for places in others, [first]:
      _await_answers(
        [
          connection.Thread(
            functools.partial(place.dismiss, outcome), on_error=bool
          )
          for place in places
        ]
      )
    return here


def _await_answers(threads: Sequence[connection.Thread]) -> None:
  """Waits for threads that ask tasks, of which one may hang."""
  deadline = time.monotonic() + _ANSWER_SECS
  for thread in threads:
    thread.join(max(deadline - time.monotonic(), 0.0))


def take_leave(
  stages: Iterable[Callable[[], None]], *, log: Callable[[str], None]
) -> bool:
  """Does one after the other.

  What one stage cannot reach is no reason to leave others waiting.

  Returns:
    Whether all reached what they needed.
  """
  is_done = True
  for stage in stages:
    try:
      stage()
    except tf.errors.OpError as unreachable:
      words = unreachable.message.splitlines()[0]
      log(f"could not take leave in order: {words}")
      is_done = False
  return is_done


def outcome_of(error: BaseException | None) -> str:
  """How training ended, in one line."""
  if error is None:
    return FINISHED
  return " ".join(str(error).split()) or type(error).__name__


def differences(
  ours: Sequence[Sequence], theirs: Sequence[Sequence], limit: int = 3
) -> list[str]:
  """Says how two lists of (name, …) rows differ, in order; at most `limit`.

  Args:
    ours: Rows here.
    theirs: Rows of the chief.
    limit: How many differences to tell.
  """
  found = []
  for number in range(max(len(ours), len(theirs))):
    mine = list(ours[number]) if number < len(ours) else None
    other = list(theirs[number]) if number < len(theirs) else None
    if mine != other:
      found.append(f"variable {number} is {mine} here and {other} at the chief")
  if len(found) > limit:
    found[limit:] = [f"and {len(found) - limit} more"]
  return found
