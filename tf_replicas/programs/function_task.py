"""One task of a `LocalTraining`: runs a function that comes by a pipe.

The process gets the pipe as an inherited file descriptor, whose number is its
only argument. A `Job` comes in, `Message`s go out. The parent holds the other
end: when that is closed, the process ends.
"""

import linecache
import multiprocessing.connection
import os
import pickle
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
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
  """What a task shall do.

  Attributes:
    call: (function, args, kwargs) by cloudpickle.
    sources: The source text of code that no file has, such as a notebook's, for
      tracebacks: entries of `linecache.cache`.
  """

  call: bytes
  sources: Mapping[str, tuple]


class Message(NamedTuple):
  """What a task tells.

  Attributes:
    kind: REPORT and RETURNED are sent by the chief only.
    content: Of a report and what was returned, the value by cloudpickle; of
      RAISED, the traceback as text.
  """

  kind: str
  content: bytes | str


class _Channel:
  """The task's end of the pipe."""

  def __init__(
    self, connection: multiprocessing.connection.Connection, *, is_chief: bool
  ):
    self._connection = connection
    self._is_chief = is_chief
    self._lock = threading.Lock()

  def send_value(self, kind: str, value: object) -> None:
    """Sends a value if this is the chief."""
    if self._is_chief:
      import cloudpickle

      self.send(Message(kind, cloudpickle.dumps(value)))

  def send(self, message: Message) -> None:
    """Sends a message."""
    with self._lock:
      self._connection.send_bytes(pickle.dumps(tuple(message)))

  def end_with_parent(self) -> None:
    """Waits until the parent has ended; then ends this process."""
    try:
      self._connection.recv_bytes()
    except (EOFError, OSError):
      time.sleep(_ORPHAN_SECS)
      os._exit(1)


_channel: _Channel | None = None


def report(metrics: object) -> None:
  """Sends metrics from the function of a `LocalTraining` while it runs.

  The process that started the training gets them by iterating over it. Only
  those of the chief are sent. In the other tasks, and in a process that no
  `LocalTraining` has started, this does nothing, so that the same function also
  runs elsewhere.

  Args:
    metrics: What to send, such as a dict of numbers.

  Raises:
    OSError: If that process has ended.
    Exception: As cloudpickle raises, if `metrics` cannot be pickled.
  """
  if _channel is not None:
    _channel.send_value(REPORT, metrics)


def code_of_file(
  constructor: Callable[..., types.CodeType], arguments: tuple, name: str
) -> types.CodeType:
  """A pickled code object, with the file name that it had.

  Args:
    constructor: Makes the code object.
    arguments: Of `constructor`.
    name: The file name.
  """
  return constructor(*arguments).replace(co_filename=name)


def main() -> NoReturn:
  """Receives a job, does it, and ends the process; 1 if it raised."""
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
