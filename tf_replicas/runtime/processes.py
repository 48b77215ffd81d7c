"""Ends a process, imports TensorFlow quietly, and shortens error messages.

This module does not import TensorFlow.
"""

import atexit
import contextlib
import faulthandler
import gc
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from collections.abc import Iterator
from typing import NoReturn

# Parts of TensorFlow's error messages about its graphs (2.21).
_GRAPH_DETAILS = (
  r"\[\[[^\[\]]*\]\]",
  r"\{\{function_node .*?\}\}",
  r"Graph execution error:",
  r"Detected at node \S+ defined at \(most recent call last\):"
  r"\s*<stack traces unavailable>",
  r"Error in user-defined function passed to \S+ transformation with iterator:"
  r" \S+:(?=\s)",
  r"\[Op:\w*\]( name:)?",
)


# The longest alarm, about 31 years: `signal.alarm` takes an int of C.
_MAX_ALARM_SECS = 1e9


@contextlib.contextmanager
def one_line_errors(
  usage: tuple[type[BaseException], ...],
  run_time: tuple[type[BaseException], ...] = (),
) -> Iterator[None]:
  """Context in which expected errors end the process with a one-line message.

  Other errors keep their traceback.

  Args:
    usage: Types of errors in the user's input, which give exit status 2.
    run_time: Types of expected errors at run time, which give exit status 1.
  """
  try:
    yield
  except usage as error:
    status, message = 2, str(error)
  except run_time as error:
    status, message = 1, str(error) or type(error).__name__
  else:
    return
  print(f"error: {' '.join(message.split())}", file=sys.stderr, flush=True)
  exit_now(status)


def print_stacks_on_request() -> None:
  """Makes the signal SIGUSR1 print the Python stacks of all threads.

  They are printed to the standard error, even if the process hangs in
  TensorFlow. Nothing changes if the program has its own handler of SIGUSR1.
  """
  output = sys.__stderr__
  if output is None or signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL:
    return
  with contextlib.suppress(OSError, ValueError):  # It is no file.
    faulthandler.register(signal.SIGUSR1, file=output)


def shortened(message: str) -> str:
  """Shortens an error message of TensorFlow to one line of 400 characters.

  It removes the names of graph nodes and of stages of data sets, which do not
  help a user and may come before the cause.

  Args:
    message: The message.
  """
  for pattern in _GRAPH_DETAILS:
    message = re.sub(pattern, " ", message)
  return " ".join(message.split())[:400]


@contextlib.contextmanager
def importing_tensorflow() -> Iterator[None]:
  """Context in which TensorFlow is imported silently, in 3/4 of the usual time.

  TensorFlow 2.21 writes to stderr when it is imported, at every log level;
  within the context, stderr is discarded. Half of the saved time comes from
  disabling garbage collection, half from hiding matplotlib, which Keras would
  import for its plotting functions. These functions do not work in this
  process, but it can import matplotlib later.
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


@contextlib.contextmanager
def killed_after(secs: float) -> Iterator[None]:
  """Context that kills this process if it is not left within a time limit.

  The operating system ends the process by SIGALRM. This works even if
  TensorFlow 2.21 waits for a task that hangs, and holds Python's lock.

  Args:
    secs: The time limit in seconds.
  """
  handler = None
  if threading.current_thread() is threading.main_thread():
    # A handler in Python would not run then.
    handler = signal.signal(signal.SIGALRM, signal.SIG_DFL)
  signal.alarm(int(min(secs, _MAX_ALARM_SECS)) + 1)
  try:
    yield
  finally:
    signal.alarm(0)
    if handler is not None:
      signal.signal(signal.SIGALRM, handler)


@contextlib.contextmanager
def ended_after(secs: float, what: str) -> Iterator[None]:
  """Context that ends this process if it is not left within a time limit.

  Use it for calls that have no time limit of their own, and that release
  Python's lock while they wait. After the limit, the process prints one line
  and exits with status 1. Functions registered by `at_exit` are not called.

  Args:
    secs: The time limit in seconds.
    what: What the process waits for; begins the error message.
  """

  def end() -> None:
    line = f"error: {what}: gave up after {secs:.0f} s"
    print(line, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)

  timer = threading.Timer(min(secs, threading.TIMEOUT_MAX), end)
  timer.daemon = True
  timer.start()
  try:
    yield
  finally:
    timer.cancel()


_at_exit: list[Callable[[], object]] = []


def at_exit(function: Callable[[], object]) -> None:
  """Registers a function to call once at the end of this process.

  `exit_now` calls the function too. A process that a signal ends does not call
  it, nor does a forked child.

  Args:
    function: The function. An exception that it raises is printed.
  """
  own, was_called = os.getpid(), False

  def run() -> None:
    nonlocal was_called
    if not was_called and os.getpid() == own:
      was_called = True
      function()

  _at_exit.append(run)
  atexit.register(run)


def exit_now(status: int) -> NoReturn:
  """Ends the process without the tear-down of TensorFlow 2.21.

  The tear-down releases remote handles one by one. If the servers of these
  handles are gone, the tear-down takes long, logs errors or, rarely, never
  ends. The functions that were registered by `at_exit` are called first.

  Args:
    status: The exit status.
  """
  for thread in threading.enumerate():
    if thread is not threading.current_thread() and not thread.daemon:
      with contextlib.suppress(RuntimeError):  # The thread has not started.
        thread.join(timeout=5.0)
  while _at_exit:
    try:
      _at_exit.pop()()
    except Exception:
      traceback.print_exc()
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status)
