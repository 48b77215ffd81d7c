"""How a process ends, and what it says; nothing here needs TensorFlow."""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def one_line_errors(
  usage: tuple[type[BaseException], ...],
  run_time: tuple[type[BaseException], ...] = (),
) -> Iterator[None]:
  """Ends the process with one line for an error that is the user's business.

  Args:
    usage: Errors in what the user gave: exit status 2.
    run_time: Errors on the way: exit status 1.
  """
  try:
    yield
  except usage as error:
    status, words = 2, str(error)
  except run_time as error:
    status, words = 1, str(error) or type(error).__name__
  else:
    return
  print(f"error: {' '.join(words.split())}", file=sys.stderr, flush=True)
  exit_now(status)


def shortened(words: str) -> str:
  """The beginning of a long message, in one line."""
  return " ".join(words.split())[:400]


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
  """Hides what native code writes to stderr, for imports of TensorFlow.

  TensorFlow 2.21 logs there at import whatever its log level.
  """
  sys.stderr.flush()
  saved = os.dup(2)
  devnull = os.open(os.devnull, os.O_WRONLY)
  os.dup2(devnull, 2)
  os.close(devnull)
  try:
    yield
  finally:
    os.dup2(saved, 2)
    os.close(saved)


def exit_now(status: int) -> None:
  """Ends the process without TensorFlow's tear-down.

  Remote handles would be released one by one to servers that may be gone,
  which can take long, log errors or, rarely, never end (TensorFlow 2.21).
  """
  for thread in threading.enumerate():
    if thread is not threading.current_thread() and not thread.daemon:
      with contextlib.suppress(RuntimeError):  # It is just being started.
        thread.join(timeout=5.0)
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status)
