"""How a process begins and ends, and what it says; needs no TensorFlow."""

import contextlib
import gc
import os
import re
import sys
import threading
from collections.abc import Iterator

# Parts of TensorFlow's messages (2.21).
_OF_THE_GRAPH = (
  r"\[\[[^\[\]]*\]\]",
  r"\{\{function_node .*?\}\}",
  r"Graph execution error:",
  r"Detected at node \S+ defined at \(most recent call last\):"
  r"\s*<stack traces unavailable>",
  r"Error in user-defined function passed to \S+ transformation with iterator:"
  r" \S+:(?=\s)",
  r"\[Op:\w*\]( name:)?",
)


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
  """The beginning of a long message of TensorFlow, in one line.

  Without the nodes of graphs and the stages of data sets that it mentions,
  which tell a user nothing and may come before what does.
  """
  for pattern in _OF_THE_GRAPH:
    words = re.sub(pattern, " ", words)
  return " ".join(words.split())[:400]


@contextlib.contextmanager
def importing_tensorflow() -> Iterator[None]:
  """For the import of TensorFlow: without remarks, in 3/4 of the time.

  TensorFlow 2.21 writes to stderr at import whatever its log level. Half of
  what is saved is Python's garbage collection, which goes through all that was
  imported again and again, and the other half matplotlib, which Keras imports
  if it is installed, for functions of its own that plot. Those do not work in
  this process; matplotlib itself can be imported afterwards.
  """
  sys.stderr.flush()
  saved = os.dup(2)
  devnull = os.open(os.devnull, os.O_WRONLY)
  os.dup2(devnull, 2)
  os.close(devnull)
  collects = gc.isenabled()
  gc.disable()
  blocked = sys.modules.setdefault("matplotlib", None) is None
  try:
    yield
  finally:
    if blocked:
      sys.modules.pop("matplotlib", None)
    gc.freeze()
    if collects:
      gc.enable()
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
