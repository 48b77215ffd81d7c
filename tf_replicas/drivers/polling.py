"""A thread that polls until it is stopped."""

import threading
from collections.abc import Callable

from tf_replicas.runtime import waiting


class PollingThread(waiting.RaisingThread):
  """A thread that calls a function periodically; `join` raises its error."""

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
      poll: Called after each period. A true result ends the thread.
      period_secs: Seconds to wait before each call.
      at_stop: Called last, if a stop was requested.
      on_error: Called after `poll` or `at_stop` has raised an error.
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
    """Makes the polling end soon, without waiting for its end."""
    self._is_stopping.set()

  def stop(self) -> None:
    """Ends the polling, waits for its end, and raises its error, if any."""
    self.request_stop()
    self.join()
