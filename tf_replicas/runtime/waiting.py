"""Polls and waits with log messages, in threads that report their errors."""

import contextlib
import math
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")
_LOG_EVERY_SECS = 10.0
_WAKE_SECS = 0.5


def await_value(
  poll: Callable[[], T | None],
  *,
  timeout_secs: float,
  what: str,
  log: Callable[[str], None] = print,
  poll_secs: float = 0.05,
  since: float | None = None,
) -> T:
  """Polls until there is a value, and logs the wait every ten seconds.

  Args:
    poll: Returns the value, or something false while there is none.
    timeout_secs: The time limit in seconds.
    what: Describes the wait in log messages and in the error, such as "worker
      1: waiting for the chief".
    log: Takes log messages.
    poll_secs: Seconds between two polls.
    since: The value of `time.monotonic()` at the start of the wait; None: the
      wait starts now.

  Returns:
    The value.

  Raises:
    TimeoutError: If there is no value after `timeout_secs`.
  """
  logged = time.monotonic()
  start = logged if since is None else since
  while not (value := poll()):
    now = time.monotonic()
    if now - start > timeout_secs:
      raise TimeoutError(f"{what}: gave up after {timeout_secs:.0f} s")
    if now - logged > _LOG_EVERY_SECS:
      log(f"{what}: {now - start:.0f} s so far")
      logged = now
    time.sleep(poll_secs)
  return value


class RaisingThread:
  """Runs a function in a thread; `join` raises the error that ended it.

  Python 3.12.0 and 3.12.1 start no thread in functions of `atexit`. There, the
  constructor calls the function itself.
  """

  # Whether the function ends by itself.
  _ends = True

  def __init__(
    self,
    run: Callable[[], None],
    *,
    on_error: Callable[[], object],
    daemon: bool = True,
  ):
    """Starts the thread.

    Args:
      run: The function that the thread calls.
      on_error: Called in the thread if `run` raises an error, for example to
        wake another thread that waits and will then call `join`.
      daemon: Whether the process may end before the thread.
    """
    self._error: BaseException | None = None
    # After an interrupt of its `join`, a thread of Python 3.11 counts as ended.
    self._ended = threading.Event()

    def guarded() -> None:
      try:
        run()
      except BaseException as error:  # pylint: disable=broad-except
        self._error = error
        on_error()
      finally:
        self._ended.set()

    self._thread = threading.Thread(target=guarded, daemon=daemon)
    try:
      self._thread.start()
    except RuntimeError as error:
      if "at interpreter shutdown" not in str(error) or not self._ends:
        raise
      guarded()

  def is_alive(self) -> bool:
    """Returns whether the thread is running."""
    return not self._ended.is_set()

  def raise_error(self) -> None:
    """Raises the error that ended the thread, if any, and only once."""
    if self._error is not None:
      error, self._error = self._error, None
      raise error

  def join(self, timeout_secs: float | None = None) -> None:
    """Waits for the end of the thread, and raises its error, if any.

    An error is raised only once.

    Args:
      timeout_secs: The longest wait in seconds; None for no limit.
    """
    if timeout_secs is not None:
      self._ended.wait(timeout_secs)
    else:
      # The kernel may give a signal to another thread than the main thread.
      # Python then calls the handler once the main thread has woken up.
      while not self._ended.wait(_WAKE_SECS):
        pass
    self.raise_error()


class PollingThread(RaisingThread):
  """Calls a function periodically in a thread; `join` raises its error."""

  _ends = False

  def __init__(
    self,
    poll: Callable[[], bool | None],
    *,
    period_secs: float,
    at_stop: Callable[[], None] | None = None,
    on_error: Callable[[], object] = bool,
  ):
    """Starts the thread.

    Args:
      poll: Called in the thread after each period. A true result ends the
        thread.
      period_secs: Seconds to wait before each call.
      at_stop: Called in the thread at its end, if the end was requested by
        `stop` or `request_stop`.
      on_error: Called in the thread after `poll` or `at_stop` has raised an
        error.
    """
    self._is_stopping = threading.Event()

    def run():
      while not self._is_stopping.wait(period_secs):
        if poll():
          return
      if at_stop is not None:
        at_stop()

    super().__init__(run, on_error=on_error)

  def request_stop(self) -> None:
    """Makes the thread stop polling soon, without waiting for its end."""
    self._is_stopping.set()

  def stop(self) -> None:
    """Stops the polling, waits for the thread, and raises its error, if any."""
    self.request_stop()
    self.join()


class WaitLogger(PollingThread):
  """Logs, from a thread, that a wait in another thread still continues.

  It logs one message every ten seconds by default.
  """

  def __init__(
    self,
    *,
    every_secs: float = _LOG_EVERY_SECS,
    log: Callable[[str], None] = print,
    limit_secs: Callable[[], float] = lambda: math.inf,
    on_limit: Callable[[str], None] = print,
  ):
    """Starts the thread.

    Args:
      every_secs: Seconds between two messages about one wait.
      log: Takes log messages.
      limit_secs: Returns the time limit of a wait in seconds.
      on_limit: Called with a message while a wait lasts longer than that.
    """
    self._every_secs = every_secs
    self._log = log
    self._limit_secs = limit_secs
    self._on_limit = on_limit
    self._wait: tuple[str, float] | None = None
    self._logged = time.monotonic()
    super().__init__(self._watch, period_secs=min(every_secs, 1.0))

  @contextlib.contextmanager
  def during(self, what: str) -> Iterator[None]:
    """Context for a wait: messages are logged until the context is left.

    Args:
      what: Describes the wait; every message begins with it.
    """
    self._wait = (what, time.monotonic())
    try:
      yield
    finally:
      self._wait = None

  def _watch(self) -> None:
    now, wait = time.monotonic(), self._wait
    if wait is None:
      return
    what, since = wait
    limit_secs = self._limit_secs()
    if now - since > limit_secs:
      self._on_limit(f"{what}: gave up after {limit_secs:.0f} s")
    if now - max(self._logged, since) >= self._every_secs:
      self._log(f"{what}: {now - since:.0f} s so far")
      self._logged = now
