"""Starts clusters of real processes for tests."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence

from tf_replicas import cluster
from tf_replicas.cluster import local_cluster
from tf_replicas.runtime import fork_server

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "tasks" / "cluster_task.py"

# In the environment of every task; must occur in no output.
SECRET = "a-secret-of-the-environment"
ENVIRON = {
  **os.environ,
  "TRIAL_TOKEN": SECRET,
  "CUDA_VISIBLE_DEVICES": "",
  "PYTHONPATH": str(ROOT),
  "TF_CPP_MIN_LOG_LEVEL": "3",
}
# The same, but TensorFlow may say all that it says to a user.
SPEAKING_ENVIRON = {
  **os.environ,
  "CUDA_VISIBLE_DEVICES": "",
  "PYTHONPATH": str(ROOT),
}
# Starts the tasks of all trials. It ends with this process.
_fork_server = fork_server.ForkServer(ENVIRON)
# Generous: the machine may be busy. No test waits that long if all is well.
DEADLINE_SECS = 400.0


def document(ps: int, workers: int, chief: int = 0, **variables) -> dict:
  """Returns a cluster spec, as JSON-like dicts, of tasks on this machine.

  Args:
    ps: Number of parameter servers.
    workers: Number of workers.
    chief: Number of `chief` tasks, 0 or 1.
    **variables: Settings in the section `variables` of the spec.
  """
  jobs = {"ps": ps, "worker": workers, "chief": chief}
  return {
    "cluster": {job: ["localhost:0"] * n for job, n in jobs.items() if n},
    "variables": {"on": "ps", "placement": "round_robin", **variables},
  }


@contextlib.contextmanager
def running(
  command: Sequence[object],
  *,
  environ: Mapping[str, str] = ENVIRON,
  deadline_secs: float = DEADLINE_SECS,
  **more,
) -> Iterator[subprocess.Popen]:
  """Runs a program inside this context, which yields the process.

  The program's output can be read from the process. The program is killed at
  the end of the context, or after `deadline_secs`.

  Args:
    command: The command line of the program.
    environ: The environment variables of the program.
    deadline_secs: A time limit in seconds.
    **more: Further arguments of `subprocess.Popen`. By default the program runs
      in the root of the repository, and its stderr is part of its stdout.
  """
  more = {"stderr": subprocess.STDOUT, "cwd": ROOT, **more}
  process = subprocess.Popen(
    command,
    env=dict(environ),
    stdout=subprocess.PIPE,
    text=True,
    **more,
  )
  deadline = threading.Timer(deadline_secs, process.kill)
  deadline.start()
  try:
    yield process
  finally:
    deadline.cancel()
    process.kill()
    process.wait()
    process.stdout.close()


def python(
  *arguments: object,
  cwd: str | os.PathLike = ROOT,
  environ: Mapping[str, str] = ENVIRON,
) -> subprocess.CompletedProcess:
  """Runs a new process of this Python interpreter to its end.

  Args:
    *arguments: The arguments of the interpreter, such as the path of a script.
    cwd: The working directory.
    environ: The environment variables.

  Returns:
    The exit status and the output, as text.
  """
  return subprocess.run(
    [sys.executable, *arguments],
    cwd=cwd,
    env=dict(environ),
    capture_output=True,
    text=True,
    timeout=DEADLINE_SECS,
    check=False,
  )


def read_until(words: str, process: subprocess.Popen) -> str:
  """Returns the output of a process up to the first line that has `words`.

  Raises:
    AssertionError: If the process ends before it prints such a line.
  """
  output = []
  for line in process.stdout:
    output.append(line)
    if words in line:
      return "".join(output)
  raise AssertionError(f"it ended without {words!r}:\n{''.join(output)}")


def descendants(pid: int) -> list[int]:
  """Returns the ids of a process's children, of their children and so on."""
  children = []
  for path in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
    with contextlib.suppress(OSError):  # The thread has just ended.
      children += map(int, path.read_text().split())
  return children + [d for child in children for d in descendants(child)]


def await_output(process: subprocess.Popen) -> None:
  """Waits until the log of a task that has ended has all that it printed.

  A thread of `LocalCluster` copies the output to the log. It may still do so
  when the process has ended.

  Args:
    process: The process of the task, which has ended.
  """
  deadline = time.monotonic() + 30
  while not process.stdout.closed and time.monotonic() < deadline:
    time.sleep(0.01)


class Trial:
  """A cluster of real processes that plays a scenario for one test.

  A scenario is a function of `cluster_task`, or of another program, which every
  task calls. Test and tasks tell each other that something has happened by
  marks, which are empty files.

  Attributes:
    spec: The cluster.
    directory: The directory of the marks, and of the reports of the tasks.
    tasks: The running processes.
  """

  def __init__(
    self,
    scenario: str,
    document: Mapping,
    directory: pathlib.Path,
    *,
    program: pathlib.Path = PROGRAM,
    replication: str = "between_graph",
    max_restarts: int = 0,
    prefix: Callable[[cluster.Task], list[str]] = lambda task: [],
    **options,
  ):
    self.spec = cluster.resolve_ports(cluster.parse(document))
    self.directory = directory

    def command(task):
      arguments = {
        "spec": json.loads(self.spec.to_json()),
        "directory": str(directory),
        "replication": replication,
        "options": options,
      }
      start = [sys.executable, "-u", str(program), scenario]
      start += [json.dumps(arguments), task.job, str(task.index)]
      return [*prefix(task), *start]

    self.tasks = local_cluster.LocalCluster(
      self.spec,
      command,
      log_dir=directory / "logs",
      environ=ENVIRON,
      max_restarts=max_restarts,
      popen=_fork_server.popen,
    )
    self._deadline = time.monotonic() + DEADLINE_SECS

  def mark(self, name: str) -> None:
    """Tells the tasks that something has happened, by an empty file.

    Args:
      name: What has happened: the name of the file.
    """
    (self.directory / name).touch()

  def await_mark(self, name: str) -> None:
    """Waits until a task, or the test, has said that something has happened.

    Args:
      name: What has to happen, as given to `mark`.
    """
    self.await_that(lambda: (self.directory / name).exists(), name)

  def await_log(self, task: cluster.Task, words: str) -> None:
    """Waits until `task` has printed text that contains `words`."""
    self.await_that(lambda: words in self.tasks.log(task), words)

  def await_end(self, *tasks: cluster.Task) -> None:
    """Waits until tasks have ended by themselves, and their logs are complete.

    Args:
      *tasks: The tasks; all tasks of the cluster if none are given.
    """
    for task in tasks or self.spec.tasks():
      self.await_that(
        lambda task=task: self.tasks.returncode(task) is not None,
        f"the end of {task}",
      )
      await_output(self.tasks._processes[task])

  def ends_within(self, task: cluster.Task, secs: float) -> bool:
    """Returns whether `task` ends by itself in the next `secs` seconds.

    If it does, its log is complete then.
    """
    deadline = time.monotonic() + secs
    while self.tasks.returncode(task) is None:
      if time.monotonic() > deadline:
        return False
      time.sleep(0.05)
    await_output(self.tasks._processes[task])
    return True

  def await_that(self, condition, what: str) -> None:
    """Waits until a condition holds.

    Args:
      condition: Returns whether the condition holds.
      what: What is waited for, for the error message.

    Raises:
      TimeoutError: If the condition does not hold at the deadline of the trial,
        or once every task has ended. The message has the output of all tasks.
    """
    while True:
      codes = [self.tasks.returncode(task) for task in self.spec.tasks()]
      if condition():
        return
      if None not in codes or time.monotonic() > self._deadline:
        self.tasks.stop(grace_secs=1.0)  # They say where they were.
        raise TimeoutError(f"waited in vain for {what}\n{self.all_logs()}")
      time.sleep(0.05)

  def await_success(self) -> None:
    """Waits until every task has ended by itself, with status 0.

    A task must end within 30 seconds after the end of the training.
    """
    self.await_that(
      lambda: (self.directory / "over").exists() or any(self.codes().values()),
      "the end of the training",
    )
    if not any(self.codes().values()):
      self._deadline = min(self._deadline, time.monotonic() + 30)
      self.await_end()
    assert not any(self.codes().values()), self.all_logs()

  def codes(self) -> dict[str, int | None]:
    """Returns the exit status of each task; None if the task still runs."""
    return {str(t): self.tasks.returncode(t) for t in self.spec.tasks()}

  def report(self, name: str = "chief") -> dict:
    """Returns what a task has reported to the test.

    Args:
      name: Name of the report, such as "chief".
    """
    return json.loads((self.directory / f"{name}.json").read_text())

  def log(self, job: str, index: int = 0) -> str:
    """Returns what the task with this job and index has printed."""
    return self.tasks.log(cluster.Task(job, index))

  def kill(self, task: cluster.Task) -> None:
    """Ends the process of a task at once, by SIGKILL."""
    self.tasks.kill(task, signal.SIGKILL)

  @contextlib.contextmanager
  def replaced(self, task: cluster.Task) -> Iterator[subprocess.Popen]:
    """Starts a second process of a task, while the first one still runs.

    The second process listens at another port. The context yields the first
    process, and ends it.
    """
    first = self.tasks._processes[task]
    spec = json.loads(self.spec.to_json())
    spec["cluster"][task.job][task.index] = "localhost:0"
    self.spec = cluster.resolve_ports(cluster.parse(spec))
    self.tasks.start(task)
    try:
      yield first
    finally:
      first.kill()
      first.wait()

  def all_logs(self) -> str:
    """Returns the output of all tasks, for messages about failures."""
    return "\n".join(
      f"--- {task} ({self.tasks.returncode(task)})\n{self.tasks.log(task)}"
      for task in self.spec.tasks()
      if self.tasks.log_path(task).exists()
    )
