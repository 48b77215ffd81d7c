"""Runs a whole cluster as processes of this machine.

The module does for one machine what a cluster manager does for many: every task
is a process with its own log file. All processes end when the training ends,
when one of them fails, or when their parent process ends for any reason.
"""

import contextlib
import ctypes
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from tf_replicas import cluster

_PR_SET_PDEATHSIG = 1
# The time for other tasks to report their own errors after one has failed.
_LAST_ERRORS_SECS = 15.0
_GRACE_SECS = 5.0
# The time for other tasks to end after the chief has ended the training.
_AFTER_CHIEF_SECS = 60.0


class LocalCluster:
  """Starts, watches and ends the processes of a cluster on this machine.

  As a context manager, it ends all processes when the context is left.

  Attributes:
    spec: The cluster.
    log_dir: The directory of the tasks' output, in files `<job>_<index>.log`.
      None: no logs are kept.
  """

  def __init__(
    self,
    spec: cluster.ClusterSpec,
    command: Callable[[cluster.Task], Sequence[str]],
    *,
    log_dir: str | os.PathLike[str] | None,
    environ: Mapping[str, str] | None = None,
    echo: Callable[[str], None] | None = None,
    max_restarts: int = 0,
    inherited: Callable[
      [cluster.Task], contextlib.AbstractContextManager[Sequence[int]]
    ] = lambda task: contextlib.nullcontext(()),
    popen: Callable[..., Any] = lambda command, *, env, pass_fds: None,
  ):
    """Prepares the cluster. Call `start` to start its tasks.

    Args:
      spec: The cluster. All ports must be chosen: none may be 0.
      command: Returns the command line of a task.
      log_dir: The directory of the tasks' logs, made if it is missing. None: no
        logs are kept.
      environ: The tasks' environment; by default that of this process.
      echo: Called with every line of output, prefixed with its task.
      max_restarts: The largest number of restarts, of all tasks together. A
        worker or a parameter server is restarted if any signal killed it. The
        chief is restarted only if SIGALRM killed it: a task sets this alarm for
        itself, in case it hangs in TensorFlow. With mirrored variables, no task
        is restarted, since a new process could not join the all-reduce.
      inherited: Maps a task to a context manager that yields the file
        descriptors that the task inherits besides its output. The context is
        entered before `command` is called, and left once the task has started.
      popen: Called in place of `subprocess.Popen` to start a process; it
        returns None if it cannot, and then `subprocess.Popen` is called. An
        example, which also documents the arguments, is
        `fork_server.ForkServer.popen`.

    Raises:
      cluster.ClusterError: If `max_restarts` is negative.
    """
    if max_restarts < 0:
      raise cluster.ClusterError(
        f"`max_restarts` must be at least 0. Received: {max_restarts}."
      )
    self.spec = spec
    self.log_dir = None if log_dir is None else pathlib.Path(log_dir)
    if self.log_dir is not None:
      self.log_dir.mkdir(parents=True, exist_ok=True)
    self._command = command
    self._environ = dict(os.environ if environ is None else environ)
    self._echo = echo or (lambda line: None)
    is_mirrored = spec.variables.on == "mirrored"
    self._restarts_left = 0 if is_mirrored else max_restarts
    self._inherited = inherited
    self._popen = popen
    self._processes: dict[cluster.Task, subprocess.Popen] = {}
    self._readers: list[threading.Thread] = []

  def __enter__(self) -> "LocalCluster":
    return self

  def __exit__(self, *_) -> None:
    self.stop()

  def start(self, *tasks: cluster.Task) -> None:
    """Starts tasks on this machine.

    Args:
      *tasks: The tasks. If none is given, all tasks whose address is on this
        machine are started, the parameter servers first.
    """
    if not tasks:
      tasks = tuple(
        sorted(self.spec.local_tasks(), key=lambda t: t.job != "ps")
      )
    for task in tasks:
      with self._inherited(task) as descriptors:
        command = list(self._command(task))
        process = self._popen(
          command, env=self._environ, pass_fds=descriptors
        ) or subprocess.Popen(
          command,
          stdin=subprocess.DEVNULL,
          stdout=subprocess.PIPE,
          stderr=subprocess.STDOUT,
          env=self._environ,
          text=True,
          errors="replace",
          pass_fds=descriptors,
          start_new_session=True,  # Ctrl-C is for the launcher to handle.
          preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )
      self._processes[task] = process
      if self.log_dir is not None:
        self.log_path(task).touch()
      reader = threading.Thread(
        target=self._read, args=(task, process), daemon=True
      )
      reader.start()
      self._readers.append(reader)

  def _read(self, task: cluster.Task, process: subprocess.Popen) -> None:
    path = os.devnull if self.log_dir is None else self.log_path(task)
    with process.stdout, open(path, "a", encoding="utf-8") as log:
      for line in process.stdout:
        log.write(line)
        log.flush()
        self._echo(f"[{task}] {line.rstrip()}")

  def log_path(self, task: cluster.Task) -> pathlib.Path:
    """Returns the path of a task's log file."""
    assert self.log_dir is not None, "no logs are kept"
    return self.log_dir / f"{task.job}_{task.index}.log"

  def log(self, task: cluster.Task) -> str:
    """Returns the text that a task has printed so far."""
    return self.log_path(task).read_text(encoding="utf-8")

  def pid(self, task: cluster.Task) -> int:
    """Returns the id of the process that was last started for a task."""
    return self._processes[task].pid

  def returncode(self, task: cluster.Task) -> int | None:
    """Returns a task's exit status; None if it runs or was never started.

    If a signal killed the task, the status is the negative signal number.
    """
    process = self._processes.get(task)
    return None if process is None else process.poll()

  def kill(
    self, task: cluster.Task, sig: signal.Signals = signal.SIGKILL
  ) -> None:
    """Sends a signal to the process of a task.

    After SIGKILL, it waits until the process has ended.
    """
    process = self._processes[task]
    process.send_signal(sig)
    if sig == signal.SIGKILL:
      process.wait()

  def running(self) -> list[cluster.Task]:
    """Returns the tasks that were started and whose process has not ended."""
    return [t for t, p in self._processes.items() if p.poll() is None]

  def poll(self) -> tuple[cluster.Task, int] | None:
    """Looks for tasks that have failed, and restarts some of them.

    The argument `max_restarts` of the constructor says which are restarted.

    Returns:
      A task that has failed and was not restarted, with its exit status as
      `returncode` returns it; None if there is no such task.
    """
    for task, process in list(self._processes.items()):
      code = process.poll()
      if code and not self._restart(task, code):
        return task, code
    return None

  def wait(self, timeout_secs: float | None = None) -> int:
    """Waits until all tasks have ended. If a task fails, ends all others.

    Tasks that still run a minute after the chief has ended well are stopped.

    Returns:
      0 if all tasks ended well, or still ran a minute after the chief had ended
      well. Otherwise, the exit status of the chief if that is positive, since
      the chief's own error says the most; if not, the status of the task that
      failed first. For a task that a signal killed, the status is 128 + the
      signal number.

    Raises:
      TimeoutError: If tasks still run after `timeout_secs` seconds. All tasks
        are stopped then.
    """
    deadline = None
    if timeout_secs is not None:
      deadline = time.monotonic() + timeout_secs
    finished = None  # When the chief was seen to have ended well.
    while True:
      now = time.monotonic()
      if finished is None and self.returncode(self.spec.chief) == 0:
        finished = now
      if finished is not None and now > finished + _AFTER_CHIEF_SECS:
        running = ", ".join(map(str, self.running()))
        self._echo(
          f"[launcher] the chief has ended; stopping what still runs: {running}"
        )
        self.stop()
        return 0
      failure = self.poll()
      if failure is not None:
        task, code = failure
        self._echo(f"[launcher] {task} {describe(code)}; ending the others")
        self._await_all(_LAST_ERRORS_SECS)
        for other in self.running():
          self._echo(f"[launcher] {other} is still running; stopping it")
        self.stop()
        # The chief's own error says more than what it caused elsewhere.
        of_chief = self.returncode(self.spec.chief) or 0
        code = of_chief if of_chief > 0 else code
        return code if code > 0 else 128 - code
      if all(process.poll() == 0 for process in self._processes.values()):
        self._join_readers()
        return 0
      if deadline is not None and time.monotonic() > deadline:
        running = ", ".join(map(str, self.running()))
        self.stop()
        raise TimeoutError(f"{running} still ran after {timeout_secs:.0f} s")
      time.sleep(0.05)

  def _await_all(self, timeout_secs: float) -> None:
    deadline = time.monotonic() + timeout_secs
    while time.monotonic() < deadline:
      if all(p.poll() is not None for p in self._processes.values()):
        return
      time.sleep(0.05)

  def _restart(self, task: cluster.Task, code: int) -> bool:
    """Restarts a task that a signal has killed, if it may be restarted.

    The chief is restarted only if SIGALRM killed it, an alarm that it sets for
    itself in case it hangs in TensorFlow. No task is restarted after
    `max_restarts` restarts.

    Args:
      task: A task that has failed.
      code: The exit status of the task, negative if a signal killed it.

    Returns:
      Whether the task was restarted.
    """
    is_replaceable = task != self.spec.chief or code == -signal.SIGALRM
    if code > 0 or not is_replaceable or not self._restarts_left:
      return False
    self._restarts_left -= 1
    self._echo(f"[launcher] {task} {describe(code)}; restarting it")
    self.start(task)
    return True

  def stop(self, grace_secs: float = _GRACE_SECS) -> None:
    """Ends all running tasks: by SIGTERM, and after `grace_secs` by SIGKILL.

    The chief is ended first and has `2 * grace_secs`, since it may save a
    checkpoint, for which the parameter servers must run. If the chief ends
    without an error, it tells the other tasks to end too. If the chief is not a
    task of this machine, it may save a checkpoint as well: then the parameter
    servers are ended first, and have `2 * grace_secs`. Otherwise they are
    killed at once, after the other tasks.

    Args:
      grace_secs: Seconds between SIGTERM and SIGKILL.
    """
    chief = self._processes.get(self.spec.chief)
    if chief is not None and chief.poll() is None:
      _end([chief], 2 * grace_secs)
      self._await_all(1.0)
    servers = [p for task, p in self._processes.items() if task.job == "ps"]
    others = [p for task, p in self._processes.items() if task.job != "ps"]
    if chief is None:
      _end(servers, 2 * grace_secs)
    _end(others, grace_secs)
    _end(servers, 0.0)
    self._join_readers()

  def _join_readers(self) -> None:
    for reader in self._readers:
      reader.join(timeout=5.0)


def _end(processes: Iterable[subprocess.Popen], grace_secs: float) -> None:
  """Ends processes by SIGTERM, or after `grace_secs` seconds by SIGKILL."""
  running = [p for p in processes if p.poll() is None]
  for process in running:
    process.terminate()
  deadline = time.monotonic() + grace_secs
  for process in running:
    try:
      process.wait(max(deadline - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
      process.kill()
      process.wait()


def describe(code: int) -> str:
  """Describes a nonzero exit status of a `subprocess` in words."""
  if code < 0:
    return f"was killed by {signal.Signals(-code).name}"
  return f"failed with exit status {code}"


def _die_with_parent() -> None:
  """Makes Linux send this process SIGTERM when its parent process ends.

  It is called in a new process before the program of the task starts.
  """
  ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
