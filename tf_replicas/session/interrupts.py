"""Delivers Ctrl-C and SIGTERM between two training steps, or after an end.

Raising an exception inside a Python callback of TensorFlow 2.21 can crash it,
so an interrupt waits until the step ends. A step may wait for other tasks for
ever, so an interrupt waits for a second at most.
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
# How long Python may take to call the handler of a signal.
_HANDLER_SECS = 0.2


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

  So what has been begun is ended in order. Nothing changes if the program has
  its own handler of SIGTERM, or outside of the main thread.
  """
  is_usual = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
  if not is_usual or not _is_main_thread():
    yield
    return
  signal.signal(signal.SIGTERM, _raise)
  try:
    yield
  finally:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def postponed() -> Iterator[None]:
  """Delays the first interrupt until the end of the context.

  An interrupt is Ctrl-C or SIGTERM; both raise KeyboardInterrupt. A second one
  is not delayed. If the program has its own handler of a signal, that signal is
  left to this handler. Outside of the main thread nothing changes.
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

  An interrupt is Ctrl-C or SIGTERM; both raise KeyboardInterrupt. A second
  interrupt is not delayed. No interrupt is delayed if the program has its own
  handler of SIGALRM. If the program has its own handler of SIGINT or SIGTERM,
  that signal is left to this handler. Outside of the main thread nothing
  changes.

  Args:
    wake: Makes a step that waits in TensorFlow return to Python for a moment.
      It is called in another thread. Without it an interrupt does not reach
      such a step.

  Yields:
    A function that calls a given step function, returns its result, and raises
    KeyboardInterrupt if there was an interrupt meanwhile, also if the step
    function fails.
  """
  pending: list[list[str]] = []  # The arguments of a KeyboardInterrupt.
  in_step = threading.Event()

  def check(*_: object) -> None:
    if pending:
      raise KeyboardInterrupt(*pending.pop())

  def interrupt(signum: int, frame: types.FrameType | None) -> None:
    del frame
    check()
    pending.append(["SIGTERM"] if signum == signal.SIGTERM else [])
    # Another handler: see `processes.killed_after`.
    if signal.getsignal(signal.SIGALRM) is check:
      signal.setitimer(signal.ITIMER_REAL, _STEP_SECS)
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
  try:
    with _waking(wake, in_step) if wake else contextlib.nullcontext():
      yield make
    check()
  finally:
    if signal.SIGALRM in ours:
      signal.setitimer(signal.ITIMER_REAL, 0)
    for signum in ours:
      signal.signal(signum, before[signum])


@contextlib.contextmanager
def _waking(
  wake: Callable[[], None], in_step: threading.Event
) -> Iterator[None]:
  """Context in which `wake` is called when a signal arrives during a step.

  Python calls signal handlers in the main thread between two bytecodes, so not
  before a call into TensorFlow returns. The wake-up socket of Python receives
  the number of a signal at once, and a thread of this context reads it.

  Args:
    wake: Makes the step return to Python.
    in_step: Is set while a step runs.
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
