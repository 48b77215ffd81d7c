"""Delivers Ctrl-C and SIGTERM between two training steps.

An interrupt raises KeyboardInterrupt. Inside a Python callback of TensorFlow
2.21, an exception can crash the process. So an interrupt is delayed until the
present step ends, but for a second at most, since a step may wait for other
tasks for ever.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
import types
from collections.abc import Callable
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")

# How long an interrupt waits for the end of a step.
_STEP_SECS = 1.0
# How long a later interrupt waits while the first one is handled, for example
# by saving a checkpoint. A cluster manager may send SIGTERM to a launcher and
# to its tasks, and the launcher passes it on: then the tasks receive it twice.
_SAVE_SECS = 10.0
# How long Python may take to call the handler of a signal.
_HANDLER_SECS = 0.2
# One function per context `deferred`; it raises the interrupt that the context
# delays, if there is one.
_checks: list[Callable[[], None]] = []


def _raise(signum: int, frame: types.FrameType | None) -> None:
  raise KeyboardInterrupt("SIGTERM")


# Handlers that are not the program's own, by signal.
_USUAL = {
  signal.SIGINT: (signal.default_int_handler,),
  signal.SIGTERM: (signal.SIG_DFL, _raise),
  signal.SIGALRM: (signal.SIG_DFL,),
}


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
  """Context in which SIGTERM raises KeyboardInterrupt, as Ctrl-C does.

  So `finally` clauses and context managers run before the process ends. Nothing
  changes if the program has its own handler of SIGTERM, or if this is not the
  main thread.
  """
  with sigterm_calls(_raise):
    yield


@contextlib.contextmanager
def sigterm_calls(
  handler: Callable[[int, types.FrameType | None], object],
) -> Iterator[None]:
  """Context in which SIGTERM calls a function, and does nothing else.

  Nothing changes if the program has its own handler of SIGTERM, or if this is
  not the main thread.

  Args:
    handler: The function, a signal handler.
  """
  is_usual = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
  if not is_usual or not _is_main_thread():
    yield
    return
  signal.signal(signal.SIGTERM, handler)
  try:
    yield
  finally:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def postponed() -> Iterator[None]:
  """Delays the first interrupt until the end of the context.

  An interrupt is Ctrl-C or SIGTERM; both raise KeyboardInterrupt. A second one
  is not delayed. A signal for which the program has its own handler is left to
  that handler. Outside of the main thread nothing changes.
  """
  if not _is_main_thread():
    yield
    return
  pending: list[list[str]] = []

  def interrupt(signum: int, frame: types.FrameType | None) -> None:
    del frame
    pending.append(["SIGTERM"] if signum == signal.SIGTERM else [])
    if len(pending) > 1:
      raise KeyboardInterrupt(*pending.pop())

  before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
  ours = [n for n, handler in before.items() if handler in _USUAL[n]]
  for signum in ours:
    signal.signal(signum, interrupt)
  try:
    yield
  finally:
    for signum in ours:
      signal.signal(signum, before[signum])
  if pending:
    raise KeyboardInterrupt(*pending[0])


def _is_main_thread() -> bool:
  return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def deferred(
  wake: Callable[[], None] | None = None,
) -> Iterator[Callable[[Callable[[], T]], T]]:
  """Delays interrupts until the end of a step, for a second at most.

  An interrupt is Ctrl-C or SIGTERM; both raise KeyboardInterrupt. If another
  interrupt comes before the KeyboardInterrupt of the first, the latter is
  raised at once; but a SIGTERM after a SIGTERM does nothing then, since a
  cluster manager and a launcher may both send one. If it comes afterwards, it
  is delayed too: for ten seconds at most, in which a checkpoint can be saved. A
  signal (SIGINT or SIGTERM) for which the program has its own handler is left
  to that handler. If the program has its own handler of SIGALRM, interrupts are
  not delayed at all. Outside of the main thread nothing changes.

  Args:
    wake: Makes a step that waits in TensorFlow return to Python for a moment,
      so that Python can handle the signal. It is called in another thread.
      None: an interrupt has no effect until such a step returns by itself.

  Yields:
    A function that takes a step function, calls it, and returns its result. It
    raises KeyboardInterrupt instead if there was an interrupt meanwhile, even
    if the step function failed. The context raises it too, at its end or in
    place of an error, if there was an interrupt.
  """
  pending: list[list[str]] = []  # The arguments of a KeyboardInterrupt.
  in_step = threading.Event()
  limit_secs = _STEP_SECS

  def check(*_: object) -> None:
    nonlocal limit_secs
    if pending:
      limit_secs = _SAVE_SECS
      raise KeyboardInterrupt(*pending.pop())

  def interrupt(signum: int, frame: types.FrameType | None) -> None:
    del frame
    arguments = ["SIGTERM"] if signum == signal.SIGTERM else []
    if arguments and pending == [arguments]:
      return
    check()
    pending.append(arguments)
    # Another handler: see `processes.killed_after`.
    if signal.getsignal(signal.SIGALRM) is check:
      signal.setitimer(signal.ITIMER_REAL, limit_secs)
    else:
      check()

  def make(step: Callable[[], T]) -> T:
    in_step.set()
    try:
      result = step()
    except Exception:
      check()
      raise
    finally:
      in_step.clear()
    check()
    return result

  if not _is_main_thread():
    yield make
    return
  before = {n: signal.getsignal(n) for n in _USUAL}
  ours = [n for n, handler in before.items() if handler in _USUAL[n]]
  for signum in ours:
    is_alarm = signum == signal.SIGALRM
    signal.signal(signum, check if is_alarm else interrupt)
  _checks.append(check)
  try:
    with _waking(wake, in_step) if wake else contextlib.nullcontext():
      try:
        yield make
      except Exception:
        check()
        raise
    check()
  finally:
    _checks.pop()
    if signal.SIGALRM in ours:
      signal.setitimer(signal.ITIMER_REAL, 0)
    for signum in ours:
      signal.signal(signum, before[signum])


def raise_delayed() -> None:
  """Raises KeyboardInterrupt if a context `deferred` delays an interrupt.

  A step calls it before work that is useless if training is to end.
  """
  if _checks and _is_main_thread():
    _checks[-1]()


@contextlib.contextmanager
def _waking(
  wake: Callable[[], None], in_step: threading.Event
) -> Iterator[None]:
  """Context in which `wake` is called when a signal arrives during a step.

  Python calls signal handlers only between two bytecodes of the main thread,
  that is, not before a call into TensorFlow returns. But Python writes the
  number of a signal to its wake-up socket at once. A thread of this context
  reads this socket, and calls `wake`.

  Args:
    wake: Makes the step return to Python for a moment.
    in_step: An event that is set while a step runs.
  """
  receiver, sender = socket.socketpair()
  sender.setblocking(False)

  def watch() -> None:
    while receiver.recv(1):
      time.sleep(_HANDLER_SECS)
      if in_step.is_set():
        wake()

  thread = threading.Thread(target=watch, daemon=True)
  thread.start()
  before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
  try:
    yield
  finally:
    signal.set_wakeup_fd(before)
    sender.close()
    thread.join()
    receiver.close()
