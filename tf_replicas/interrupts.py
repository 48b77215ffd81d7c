"""Ctrl-C and SIGTERM while steps are made: heard between two of them, and soon.

TensorFlow 2.21 may crash where Python that it calls raises, hence between two.
A step may wait for ever, for others, hence soon.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")

# How long an interrupt waits for the end of a step.
_STEP_SECS = 1.0
# How long a signal's handler may take to begin.
_HANDLER_SECS = 0.2


@contextlib.contextmanager
def deferred(
  wake: Callable[[], None] | None = None,
) -> Iterator[Callable[[Callable[[], T]], T]]:
  """Lets an interrupt wait for the end of a step, for a second at most.

  A second interrupt does not wait, nor does any if the program uses SIGALRM
  itself. SIGTERM is a KeyboardInterrupt too, unless the program has its own
  way. Outside of the main thread nothing changes.

  Args:
    wake: Makes a step that waits in TensorFlow return to Python for a moment;
      called in another thread. Without it such a step hears no signal.

  Yields:
    What makes a step, given as a function, and raises KeyboardInterrupt after
    it if there was an interrupt.
  """
  usual = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGALRM: signal.SIG_DFL,
  }
  pending = []
  in_step = threading.Event()

  def check(*_):
    if pending:
      raise KeyboardInterrupt(*pending.pop())

  def interrupt(signum, frame):
    check()
    pending.append(["SIGTERM"] if signum == signal.SIGTERM else [])
    if signal.SIGALRM in ours:
      signal.setitimer(signal.ITIMER_REAL, _STEP_SECS)
    else:
      check()

  def make(step):
    in_step.set()
    try:
      result = step()
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
  """Wakes a step that a signal's handler has to wait for.

  Python calls handlers in the main thread, between two of its instructions, so
  not before a call of TensorFlow returns. The number of the signal is written
  to the wake-up socket at once.
  """
  receiver, sender = socket.socketpair()
  sender.setblocking(False)

  def watch():
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
