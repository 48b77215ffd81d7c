"""Makes a process slower, as if it ran on a busier or an older machine."""

import os
import pathlib
import signal
import threading
import time
from collections.abc import Sequence

# Well below what is to be slowed down, a batch or a message.
PERIOD_SECS = 0.05


class SlowDown:
  """Slows a process down by stopping and continuing it in turn.

  The process runs for 1 / `factor` of the time. A `SlowDown` is to be used as a
  context manager. When the context is left, the process runs at full speed
  again.
  """

  def __init__(self, pid: int, factor: float):
    """Stores which process is to be slowed down, and by how much.

    Args:
      pid: The id of a process to which this user may send signals.
      factor: By what the time of everything that the process does is
        multiplied; at least 1.

    Raises:
      ValueError: If the factor is less than 1.
    """
    if factor < 1:
      raise ValueError(f"`factor` must be at least 1. Received: {factor}.")
    self._pid = pid
    self._factor = factor
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
    # How long it is to be stopped for what it ran; it runs and is stopped
    # longer than told, as this thread has to wait for a core.
    owed_secs = 0.0
    resumed = time.monotonic()
    try:
      while self._factor > 1 and not self._end.wait(self._runs_secs):
        os.kill(self._pid, signal.SIGSTOP)
        stopped = time.monotonic()
        owed_secs += (stopped - resumed) * (self._factor - 1)
        self._end.wait(max(owed_secs, 0.0))
        os.kill(self._pid, signal.SIGCONT)
        resumed = time.monotonic()
        owed_secs -= resumed - stopped
    except ProcessLookupError:
      pass  # It has ended.


def descendants(pid: int) -> dict[int, list[str]]:
  """Finds the children of a process, their children, and so on.

  Args:
    pid: The id of the process.

  Returns:
    The command line of each descendant, as a list of arguments, by process id.
    A process that has just ended may be missing.
  """
  found = {}
  for path in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
    for number in map(int, path.read_text().split()):
      try:
        command = pathlib.Path(f"/proc/{number}/cmdline").read_bytes()
        found[number] = command.decode().split("\0")
        found |= descendants(number)
      except FileNotFoundError:
        pass  # It has ended.
  return found


def descendant(pid: int, words: Sequence[str]) -> int:
  """Finds a descendant of a process by words of its command line.

  Args:
    pid: The id of the process.
    words: Arguments that must all be in the descendant's command line.

  Returns:
    The id of the descendant.

  Raises:
    LookupError: If there is no such descendant.
  """
  for number, command in descendants(pid).items():
    if set(words) <= set(command):
      return number
  raise LookupError(
    f"no process that process {pid} has started has the arguments"
    f" {' '.join(words)}"
  )
