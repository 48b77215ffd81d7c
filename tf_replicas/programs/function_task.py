"""Runs one task of a `LocalTraining`: a function received over a pipe.

The *parent* is the process that started the training. This process inherits
one end of a pipe as a file descriptor, whose number is its only argument. It
receives a `Job` over the pipe, and sends `Message`s. The parent holds the other
end. Once that end is closed, this process ends, after 10 seconds at most.
"""

import linecache
import multiprocessing.connection
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import NamedTuple
from typing import NoReturn

from tf_replicas.cluster import environment
from tf_replicas.runtime import processes

COMMAND = "from tf_replicas.programs import function_task; function_task.main()"

REPORT = "report"
RETURNED = "returned"
RAISED = "raised"
# How long a task may still run once its parent has ended. SIGTERM comes then
# too, and a chief may save a checkpoint.
_ORPHAN_SECS = 10.0


class Job(NamedTuple):
  """The work that a process of a `LocalTraining` receives over its pipe.

  Attributes:
    call: The tuple (function, args, kwargs), pickled by cloudpickle.
    sources: The source text of code that is in no file, such as the cells of a
      notebook: entries for `linecache.cache`, by file name. Tracebacks show it.
  """

  call: bytes
  sources: Mapping[str, tuple]


class Message(NamedTuple):
  """A message from a task to the parent.

  Attributes:
    kind: `REPORT` (the function has called `report`), `RETURNED` (the function
      has returned) or `RAISED` (the function has raised an exception). Only the
      chief sends `REPORT` and `RETURNED`.
    content: For `REPORT` and `RETURNED`, the value, pickled by cloudpickle. For
      `RAISED`, the traceback as text.
  """

  kind: str
  content: bytes | str


class _Channel:
  """Sends the messages of this task to the parent, over the pipe."""

  def __init__(
    self, connection: multiprocessing.connection.Connection, *, is_chief: bool
  ):
    self._connection = connection
    self._is_chief = is_chief
    self._lock = threading.Lock()

  def send_value(self, kind: str, value: object) -> None:
    """Pickles and sends a value if this task is the chief.

    In other tasks, it does nothing.

    Args:
      kind: The kind of the message: `REPORT` or `RETURNED`.
      value: The value to send.
    """
    if self._is_chief:
      import cloudpickle

      self.send(Message(kind, cloudpickle.dumps(value)))

  def send(self, message: Message) -> None:
    """Sends a message to the parent."""
    with self._lock:
      self._connection.send_bytes(pickle.dumps(tuple(message)))

  def end_with_parent(self) -> None:
    """Waits until the parent has ended, and ends this process after 10 seconds.

    In these 10 seconds, a chief may save a checkpoint. The method runs in a
    thread.
    """
    try:
      self._connection.recv_bytes()
    except (EOFError, OSError):
      time.sleep(_ORPHAN_SECS)
      os._exit(1)


_channel: _Channel | None = None


def report(metrics: object) -> None:
  """Sends metrics from the function of a `LocalTraining` while it runs.

  The process that started the training gets them by iterating over the
  `LocalTraining`. Only the chief sends metrics. In other tasks, and in a
  process that no `LocalTraining` has started, `report` does nothing.

  Args:
    metrics: The object to send, such as a dict of numbers.

  Raises:
    OSError: If the process that started the training has ended.
    Exception: What cloudpickle raises if `metrics` cannot be pickled.
  """
  if _channel is not None:
    _channel.send_value(REPORT, metrics)


def main() -> NoReturn:
  """Receives a job over the inherited pipe, runs it, and ends the process.

  The exit status is 1 if the job cannot be unpickled, its function raises an
  exception (also `SystemExit`), the chief cannot send the result, or the
  function still runs 10 seconds after the parent has ended. Otherwise it is 0,
  unless a signal ends the process.
  """
  global _channel
  descriptor = int(sys.argv[-1])
  os.set_inheritable(descriptor, False)
  connection = multiprocessing.connection.Connection(descriptor)
  job = Job(*pickle.loads(connection.recv_bytes()))
  linecache.cache.update(job.sources)
  role = environment.role(os.environ)
  assert role is not None
  spec, task = role
  _channel = _Channel(connection, is_chief=task == spec.chief)
  threading.Thread(target=_channel.end_with_parent, daemon=True).start()
  with processes.importing_tensorflow():
    import tensorflow  # noqa: F401
  status = 0
  try:
    function, args, kwargs = pickle.loads(job.call)
    _channel.send_value(RETURNED, function(*args, **kwargs))
  except BaseException as error:
    status = 1
    error = error.with_traceback(
      error.__traceback__ and error.__traceback__.tb_next
    )
    text = "".join(traceback.format_exception(error))
    _channel.send(Message(RAISED, text))
  processes.exit_now(status)
