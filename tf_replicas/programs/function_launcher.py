"""Starts one function as all tasks of a cluster on this machine.

This is for notebooks, and for scripts that compare trainings. The library
starts and ends the processes. The caller receives what the function returns or
raises.
"""

import collections
import contextlib
import linecache
import math
import multiprocessing
import os
import pickle
import queue
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from tf_replicas import cluster as cluster_module
from tf_replicas.cluster import environment
from tf_replicas.cluster import local_cluster
from tf_replicas.programs import function_task
from tf_replicas.programs import launcher
from tf_replicas.programs import pickles
from tf_replicas.runtime import fork_server
from tf_replicas.runtime import noise

# The time for other tasks to report their own errors after one has failed, and
# for them to end once the chief's function has returned.
_LAST_SECS = 15.0
_POLL_SECS = 0.05
# The lines of a task's output that its error shows.
_LINES = 20


class LocalTrainingError(RuntimeError):
  """Raised if a `LocalTraining` failed or was ended early.

  If a task failed, the message has its traceback or its last lines of output.

  Attributes:
    task: The first task that failed; None if the training was ended early.
  """

  def __init__(self, message: str, task: cluster_module.Task | None = None):
    super().__init__(message)
    self.task = task


class LocalTraining:
  """Runs a function as every task of a cluster on this machine.

      def train(rate):
        history = tf_replicas.fit(model_fn, x, y, rule=tf_replicas.Sync())
        return history.history

      with tf_replicas.LocalTraining(train, args=(0.1,), workers=3) as training:
        for metrics in training:  # What `train` gives to `tf_replicas.report`.
          print(metrics)
        history = training.result()

  Each task is a process that finds its role in environment variables, as under
  `python -m tf_replicas.launch`. Each process receives the function, pickled by
  cloudpickle, over a pipe, so the function may be defined in a notebook. The
  function runs in every task. In parameter servers and workers, `fit` ends the
  process. The result is what the function returns in the chief.

  All processes end at the end of the `with` block, or when this process ends,
  even if it is killed. No file is written.
  """

  def __init__(
    self,
    function: Callable[..., object],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    ps: int = 1,
    workers: int = 2,
    chief: bool = False,
    cluster: cluster_module.ClusterSpec | str | None = None,
    max_restarts: int = 3,
    log: Callable[[str], None] = print,
  ):
    """Prepares the training; the `with` statement starts its processes.

    Args:
      function: The function that each task calls. Functions and classes of the
        main module, such as a notebook's, are sent by value; the tasks import
        those of other modules.
      args: The arguments of `function`, which cloudpickle can pickle.
      kwargs: The keyword arguments of `function`.
      ps: Number of parameter servers.
      workers: Number of workers. Without a `chief` task, the first worker is
        the chief.
      chief: Whether there is a separate task for the chief, which makes the
        updates. In-graph replication, where the chief drives all workers, needs
        one.
      cluster: A cluster spec or the path of one, instead of `ps`, `workers` and
        `chief`.
      max_restarts: How often a worker that a signal killed is started again.
      log: Called, in other threads, with each line that a task prints, preceded
        by the name of the task.

    Raises:
      ImportError: If cloudpickle is not installed.
      TypeError: If `function` is not callable, or if `function` or its
        arguments cannot be pickled.
      cluster.ClusterError: If the cluster is invalid, or not all its tasks are
        on this machine.
    """
    if not callable(function):
      raise TypeError(
        f"`function` must be callable: each task calls it. Received:"
        f" {function!r}."
      )
    self._job = pickle.dumps(
      tuple(
        function_task.Job(
          _pickled(function, args, kwargs or {}), _sources_without_a_file()
        )
      )
    )
    spec = launcher.local_spec(
      cluster, ps=ps, workers=workers, chief=chief, needs_all=True
    )
    self._chief = spec.chief
    self._log = log
    self._lines: collections.deque[str] = collections.deque(maxlen=200)
    self._pipes: dict[cluster_module.Task, int] = {}
    self._listeners: list[threading.Thread] = []
    self._reports: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    self._returned: bytes | None = None
    self._error: BaseException | None = None
    self._closing = threading.Event()
    self._ended = threading.Event()
    environ = {
      **noise.environ(),
      environment.CLUSTER_SPEC: spec.to_json(),
      "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
    }
    self._fork_server = fork_server.ForkServer(environ)
    self._tasks = local_cluster.LocalCluster(
      spec,
      self._command,
      log_dir=None,
      environ=environ,
      echo=self._echo,
      max_restarts=max_restarts,
      inherited=self._pipe,
      popen=self._fork_server.popen,
    )
    # This thread starts the tasks: the kernel ends them with the thread that
    # started them.
    self._supervisor = threading.Thread(target=self._supervise, daemon=True)

  def __enter__(self) -> "LocalTraining":
    """Starts the processes of all tasks, and returns this object.

    Raises:
      RuntimeError: If this `LocalTraining` was started before.
    """
    if self._supervisor.ident is not None:
      raise RuntimeError(
        "a `LocalTraining` runs once: make another one for another training"
      )
    try:
      self._supervisor.start()
    except BaseException:  # Such as Ctrl-C: the block is not entered.
      self._closing.set()
      raise
    return self

  def __exit__(self, *_) -> None:
    self.close()

  def close(self) -> None:
    """Ends all processes of the training that still run.

    If the chief is inside `tf_replicas.fit`, and `fit` writes checkpoints, it
    saves one first.
    """
    self._closing.set()
    if self._supervisor.ident is not None:
      self._ended.wait()

  def __iter__(self) -> Iterator[Any]:
    """Yields what the chief reports with `tf_replicas.report`, as it arrives.

    The iteration ends when the training ends.

    Raises:
      LocalTrainingError: After the last report, if the training failed.
      RuntimeError: If the processes were not started.
    """
    self._check_started()
    while (content := self._reports.get()) is not None:
      yield pickle.loads(content)
    self._reports.put(None)
    if self._error is not None:
      raise self._error

  def result(self, timeout_secs: float | None = None) -> Any:
    """Waits for the end of the training and returns its result.

    Args:
      timeout_secs: The longest time to wait, in seconds; None waits forever.

    Returns:
      What the function returned in the chief.

    Raises:
      LocalTrainingError: If a task failed, or the training was ended early.
      RuntimeError: If the processes were not started.
      TimeoutError: If the training takes longer. The training continues.
    """
    self._check_started()
    if not self._ended.wait(timeout_secs):
      raise TimeoutError(f"the training still ran after {timeout_secs:g} s")
    if self._error is not None:
      raise self._error
    assert self._returned is not None
    return pickle.loads(self._returned)

  def _check_started(self) -> None:
    if self._supervisor.ident is None:
      raise RuntimeError(
        "the processes start when a `with` statement enters this"
        " `LocalTraining`. Received: a call before that."
      )

  def _supervise(self) -> None:
    """Starts the tasks, waits for the end of the training, and ends the tasks.

    This is the function of a thread. Errors are kept for `result` to raise.
    """
    try:
      with self._fork_server, self._tasks:
        self._tasks.start()
        failure = self._await_end()
      for listener in self._listeners:
        listener.join()
      if self._returned is not None:
        self._error = None
      elif self._error is None:
        self._error = self._unexplained(failure)
    except BaseException as error:  # `result` raises it.
      self._error = error
    self._ended.set()
    self._reports.put(None)

  def _await_end(self) -> tuple[cluster_module.Task, int] | None:
    """Waits until the training ends, a task fails or `close` is called.

    When a task has failed or the chief has ended, the other tasks get 15
    seconds to end too.

    Returns:
      The first task that failed and its exit status; None if no task failed.
    """
    failure, deadline = None, math.inf
    while not self._closing.wait(_POLL_SECS) and time.monotonic() < deadline:
      if failure is None:
        failure = self._tasks.poll()
      is_over = failure or self._tasks.returncode(self._chief) is not None
      if is_over and deadline == math.inf:
        deadline = time.monotonic() + _LAST_SECS
      if not self._tasks.running():
        break
    return failure

  def _unexplained(
    self, failure: tuple[cluster_module.Task, int] | None
  ) -> LocalTrainingError:
    """Returns an error for a training that left neither a result nor an error.

    Args:
      failure: A task whose process failed, and its exit status. None if the
        training was ended early.
    """
    if failure is None:
      return LocalTrainingError(
        "the training was ended before its function returned in the chief,"
        f" {self._chief}"
      )
    task, code = failure
    lines = [line for line in self._lines if line.startswith(f"[{task}] ")]
    message = f"{task} {local_cluster.describe(code)}"
    if lines:
      message += ". Its last lines:\n" + "\n".join(lines[-_LINES:])
    return LocalTrainingError(message, task)

  def _command(self, task: cluster_module.Task) -> list[str]:
    return [
      "env",
      f"{environment.TASK}={task.job}:{task.index}",
      *(sys.executable, "-u", "-c", function_task.COMMAND),
      str(self._pipes[task]),
    ]

  @contextlib.contextmanager
  def _pipe(self, task: cluster_module.Task) -> Iterator[Sequence[int]]:
    """Opens a pipe to the process of a task, as a context manager.

    The context yields a list with one file descriptor. The task's process is
    started inside the context and inherits this descriptor. After the context,
    a thread listens at the other end of the pipe.
    """
    ours, theirs = multiprocessing.Pipe()
    self._pipes[task] = theirs.fileno()
    with theirs:
      yield [theirs.fileno()]
    listener = threading.Thread(
      target=self._listen, args=(task, ours), daemon=True
    )
    listener.start()
    self._listeners.append(listener)

  def _listen(self, task: cluster_module.Task, connection: Any) -> None:
    """Sends the job to a task's process and handles the process's messages.

    This is the function of a thread. It returns when the process has ended.

    Args:
      task: The task of the process.
      connection: This process's end of the pipe to the task's process.
    """
    with connection, contextlib.suppress(EOFError, OSError):
      connection.send_bytes(self._job)
      while True:
        kind, content = pickle.loads(connection.recv_bytes())
        if kind == function_task.REPORT:
          self._reports.put(content)
        elif kind == function_task.RETURNED:
          self._returned = content
        elif self._error is None and not self._closing.is_set():
          self._error = LocalTrainingError(f"{task} failed:\n{content}", task)
          self._closing.set()

  def _echo(self, line: str) -> None:
    if not noise.is_noise(line):
      self._lines.append(line)
      self._log(line)


def _pickled(
  function: Callable[..., object],
  args: Sequence[object],
  kwargs: Mapping[str, object],
) -> bytes:
  call = function, tuple(args), dict(kwargs)
  try:
    return pickles.dumps(call, "`LocalTraining` needs")
  except ImportError:
    raise
  except Exception as error:
    raise TypeError(
      "`function` and its arguments must be what cloudpickle can pickle, with"
      f" all that they use. Received: {function!r}, and the error: {error}"
    ) from error


def _sources_without_a_file() -> dict[str, tuple]:
  """Returns the source text of a notebook's cells, as IPython registers it.

  The tasks need this text for tracebacks. The result maps invented file names
  to entries of `linecache.cache`.
  """
  return {
    name: entry
    for name, entry in linecache.cache.items()
    if len(entry) == 4 and entry[1] is None
  }
