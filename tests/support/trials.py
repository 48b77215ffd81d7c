"""Clusters of real processes, for tests."""

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

ENVIRON = {
  **os.environ,
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
  """A cluster spec of this machine, with settings of its `variables`."""
  jobs = {"ps": ps, "worker": workers, "chief": chief}
  return {
    "cluster": {job: ["localhost:0"] * n for job, n in jobs.items() if n},
    "variables": {"on": "ps", "placement": "round_robin", **variables},
  }


@contextlib.contextmanager
def running(
  command: Sequence[object], *, environ: Mapping[str, str] = ENVIRON, **more
) -> Iterator[subprocess.Popen]:
  """A program, and all that it prints; killed at the deadline, or at the end.

  Args:
    command: Its command line.
    environ: Its environment.
    **more: Of `subprocess.Popen`; by default it runs in the root of the
      repository, and `stderr` goes where `stdout` does.
  """
  more = {"stderr": subprocess.STDOUT, "cwd": ROOT, **more}
  process = subprocess.Popen(
    command,
    env=dict(environ),
    stdout=subprocess.PIPE,
    text=True,
    **more,
  )
  deadline = threading.Timer(DEADLINE_SECS, process.kill)
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
  """Runs this Python interpreter to its end; its output is text."""
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
  """What it prints, up to the first line with `words`."""
  output = []
  for line in process.stdout:
    output.append(line)
    if words in line:
      return "".join(output)
  raise AssertionError(f"it ended without {words!r}:\n{''.join(output)}")


def descendants(pid: int) -> list[int]:
  """The processes that a process, all its threads and those have started."""
  threads = pathlib.Path(f"/proc/{pid}/task").glob("*/children")
  children = [int(c) for path in threads for c in path.read_text().split()]
  return children + [d for child in children for d in descendants(child)]


class Trial:
  """A scenario of `cluster_task`, or `program`, on a cluster of its own.

  Attributes:
    spec: The cluster.
    directory: Where the tasks leave marks and reports.
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
    """Tells the tasks that something happened."""
    (self.directory / name).touch()

  def await_mark(self, name: str) -> None:
    """Waits until a task, or the test, said that `name` happened."""
    self.await_that(lambda: (self.directory / name).exists(), name)

  def await_log(self, task: cluster.Task, words: str) -> None:
    """Waits until `task` printed `words`."""
    self.await_that(lambda: words in self.tasks.log(task), words)

  def await_end(self, *tasks: cluster.Task) -> None:
    """Waits until these tasks, or all, have ended by themselves."""
    for task in tasks or self.spec.tasks():
      self.await_that(
        lambda task=task: self.tasks.returncode(task) is not None,
        f"the end of {task}",
      )

  def ends_within(self, task: cluster.Task, secs: float) -> bool:
    """Whether `task` ends by itself within `secs`."""
    deadline = time.monotonic() + secs
    while self.tasks.returncode(task) is None:
      if time.monotonic() > deadline:
        return False
      time.sleep(0.05)
    return True

  def await_that(self, condition, what: str) -> None:
    """Polls `condition`.

    Raises:
      TimeoutError: With all logs, at the deadline or once every task has ended.
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

    To leave is a matter of seconds once the training is over.
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
    """Exit status by task."""
    return {str(t): self.tasks.returncode(t) for t in self.spec.tasks()}

  def report(self, name: str = "chief") -> dict:
    """What a task reported."""
    return json.loads((self.directory / f"{name}.json").read_text())

  def log(self, job: str, index: int = 0) -> str:
    """What a task printed."""
    return self.tasks.log(cluster.Task(job, index))

  def kill(self, task: cluster.Task) -> None:
    """Ends a task without a chance to say anything."""
    self.tasks.kill(task, signal.SIGKILL)

  @contextlib.contextmanager
  def replaced(self, task: cluster.Task) -> Iterator[subprocess.Popen]:
    """A second process of `task`, at another port; the first is given."""
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
    """What all tasks printed, for failures."""
    return "\n".join(
      f"--- {task} ({self.tasks.returncode(task)})\n{self.tasks.log(task)}"
      for task in self.spec.tasks()
      if self.tasks.log_path(task).exists()
    )
