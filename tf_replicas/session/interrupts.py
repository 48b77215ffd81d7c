"""Delivers Ctrl-C and SIGTERM between two training steps.

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
  usual = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGALRM: signal.SIG_DFL,
  }
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

  if threading.current_thread() is not threading.main_thread():
    yield make
    return
  ours = [n for n, handler in usual.items() if signal.getsignal(n) is handler]
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
      signal.signal(signum, usual[signum])


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
