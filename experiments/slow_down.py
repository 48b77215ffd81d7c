"""Makes a process slower than it is, as a busier or an older machine would."""

import os
import pathlib
import signal
import threading
from collections.abc import Sequence

PERIOD_SECS = 0.1


class SlowDown:
  """Stops and continues a process by turns, so that it gets 1 / factor.

  To be used as a context manager; in the end the process goes on as it was.
  """

  def __init__(self, pid: int, factor: float):
    """Says which, and how much.

    Args:
      pid: Of a process that we may signal.
      factor: How many times as long everything takes; at least 1.

    Raises:
      ValueError: If the factor is less than 1.
    """
    if factor < 1:
      raise ValueError(f"`factor` must be at least 1. Received: {factor}.")
    self._pid = pid
    self._runs_secs = PERIOD_SECS / factor
    self._end = threading.Event()
    self._thread = threading.Thread(target=self._take_turns, daemon=True)

  def __enter__(self) -> "SlowDown":
    self._thread.start()
    return self

  def __exit__(self, *error) -> None:
    self._end.set()
    self._thread.join()

  def _take_turns(self) -> None:
    stopped_secs = PERIOD_SECS - self._runs_secs
    try:
      while stopped_secs and not self._end.wait(self._runs_secs):
        os.kill(self._pid, signal.SIGSTOP)
        self._end.wait(stopped_secs)
        os.kill(self._pid, signal.SIGCONT)
    except ProcessLookupError:
      pass  # It has ended.


def child(pid: int, words: Sequence[str]) -> int:
  """The child process of `pid` whose command line has all of these words.

  Raises:
    LookupError: If there is no such child.
  """
  children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text()
  for number in children.split():
    command = pathlib.Path(f"/proc/{number}/cmdline").read_bytes()
    if set(words) <= set(command.decode().split("\0")):
      return int(number)
  raise LookupError(f"process {pid} has no child with {' '.join(words)}")
