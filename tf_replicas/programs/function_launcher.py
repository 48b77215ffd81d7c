"""Starts one function as all tasks of a cluster on this machine.

This is for notebooks, and for scripts that compare trainings. The caller need
not start processes. It gets what the function returns or raises in them.
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
# Enough to read what a task has sent before its end.
_READ_SECS = 5.0
# The lines of a task's output that its error shows.
_LINES = 20


class LocalTrainingError(RuntimeError):
  """Raised if a `LocalTraining` failed, or was ended before it was complete.

  If a task failed, the message has its traceback, or the last lines of its
  output.

  Attributes:
    task: The first task that failed. None if no task failed, and the training
      was ended by `close`.
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
  `python -m tf_replicas.launch`. It receives the function over a pipe, pickled
  by cloudpickle, so the function may be defined in a notebook. The function
  runs in every task. In parameter servers, and in workers other than the chief,
  its call of `fit` does not return, and ends the process. The result of the
  training is what the function returns in the chief.

  All processes end at the end of the `with` block. They also end when this
  process ends, even if it is killed. No file is written.
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
      function: The function that each task calls. If it uses functions and
        classes of the main module, such as those of a notebook, they are sent
        too. The tasks import those of other modules.
      args: The arguments of `function`. cloudpickle must be able to pickle
        them.
      kwargs: The keyword arguments of `function`.
      ps: The number of parameter servers.
      workers: The number of workers. Without a `chief` task, the first worker
        is the chief.
      chief: Whether there is a separate task for the chief, in addition to the
        workers. In-graph replication, where the chief drives all workers, needs
        one.
      cluster: A cluster spec, or the path of its file. It replaces `ps`,
        `workers` and `chief`.
      max_restarts: The largest number of restarts, of all tasks together, of
        workers and parameter servers that a signal has killed.
      log: Called with each line that a task prints, which then begins with the
        name of the task. It is called in other threads.

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

    If the chief is in a call of `tf_replicas.fit` with a `train_dir`, it saves
    a checkpoint first.
    """
    self._closing.set()
    if self._supervisor.ident is not None:
      self._ended.wait()

  def __iter__(self) -> Iterator[Any]:
    """Yields each object that the chief gives to `tf_replicas.report`.

    It waits for the next one, and ends when the training ends.

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
      timeout_secs: The time limit in seconds; None: no limit.

    Returns:
      What the function returned in the chief.

    Raises:
      LocalTrainingError: If a task failed, or if the training was ended by
        `close`.
      RuntimeError: If the processes were not started.
      TimeoutError: If the training takes longer than `timeout_secs`. It then
        goes on, and `result` may be called again.
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

    It runs in a thread. It keeps an error, and `result` raises it.
    """
    try:
      with self._fork_server, self._tasks:
        self._tasks.start()
        failure = self._await_end()
      # A process that a task has forked may keep its pipe open.
      deadline = time.monotonic() + _READ_SECS
      for listener in self._listeners:
        listener.join(max(0.0, deadline - time.monotonic()))
      if self._returned is not None:
        self._error = None
      elif self._error is None:
        self._error = self._unexplained(failure)
    except BaseException as error:  # `result` raises it.
      self._error = error
    self._ended.set()
    self._reports.put(None)

  def _await_end(self) -> tuple[cluster_module.Task, int] | None:
    """Waits until all tasks have ended, or `close` is called.

    When a task has failed or the chief has ended, it waits for the other tasks
    for at most 15 seconds.

    Returns:
      (task, exit status) of the first task that failed; None if no task failed.
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
    """Makes the error of a training that sent neither a result nor an error.

    Args:
      failure: (task, exit status) of a task that failed. None if no task
        failed, and the training was ended by `close`.
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

    The value of the context is a list with one file descriptor. The process of
    the task is started inside the context, and inherits this descriptor. When
    the context ends, a thread begins to listen at the other end of the pipe.
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
    """Sends the job to the process of a task, and handles its messages.

    It runs in a thread, and returns when the process has ended.

    Args:
      task: The task of the process.
      connection: The end of the pipe that this process keeps.
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
  """Returns the source text of the cells of a notebook.

  IPython registers it in `linecache.cache`, under invented file names. The
  tasks need it to show lines of the notebook in tracebacks.

  Returns:
    The entries of `linecache.cache` for these file names. Empty outside of a
    notebook.
  """
  return {
    name: entry
    for name, entry in linecache.cache.items()
    if len(entry) == 4 and entry[1] is None
  }
