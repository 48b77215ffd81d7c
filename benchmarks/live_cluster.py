"""Runs a cluster that stays alive, and makes updates when it is asked to."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence

from tf_replicas import cluster

_NUMBER = re.compile(r"[\d.]+(e-?\d+)?")
_DIRECTORY = pathlib.Path(__file__).resolve().parent
_END_SECS = 60
_TICKS_PER_SEC = os.sysconf("SC_CLK_TCK")


class LiveCluster:
  """Runs the processes of a cluster, of which the last one is the chief.

  The chief prints "ready" once it has trained for a step. Then, for each number
  in a line of its standard input, it makes so many updates, and prints how many
  seconds they took. The chief ends the training when its input ends. A
  `LiveCluster` is a context manager, which ends the processes.
  """

  def __init__(
    self,
    commands: Sequence[Sequence[str]],
    *,
    root: pathlib.Path,
    cwd: pathlib.Path | None = None,
    ends_by_itself: bool = True,
    environ: Mapping[str, str] | None = None,
  ):
    """Starts the processes, and waits until the chief is ready.

    Args:
      commands: The command line of each process.
      root: The root directory of the tree whose library the processes use.
      cwd: The working directory of the processes. None: that of this process.
      ends_by_itself: Whether all processes end with the chief. Otherwise they
        are killed.
      environ: More environment variables of the processes.
    """
    self._ends_by_itself = ends_by_itself
    self._errors = tempfile.TemporaryFile("w+")  # Of the chief.
    outputs = [subprocess.DEVNULL] * (len(commands) - 1) + [self._errors]
    self._processes = [
      subprocess.Popen(
        command,
        cwd=cwd,
        env={
          **os.environ,
          "PYTHONPATH": str(root),
          "CUDA_VISIBLE_DEVICES": "",
          "TF_CPP_MIN_LOG_LEVEL": "2",
          **(environ or {}),
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
      )
      for command, errors in zip(commands, outputs, strict=True)
    ]
    self._chief = self._processes[-1]
    try:
      self._read("ready")
    except BaseException:
      self._kill()
      raise

  def __enter__(self) -> "LiveCluster":
    return self

  def __exit__(self, *exc_info: object) -> None:
    try:
      self._chief.stdin.close()
      if self._ends_by_itself:
        for process in self._processes:
          process.wait(_END_SECS)
    finally:
      self._kill()

  def _kill(self) -> None:
    for process in self._processes:
      process.kill()
      process.wait()
    self._errors.close()

  def _read(self, expected: str | None = None) -> str:
    """Returns the next line of the chief that is not a log line.

    Args:
      expected: The line to wait for. None: the next line that is a number.

    Raises:
      RuntimeError: If the chief ends before it prints such a line.
    """
    for line in self._chief.stdout:
      line = line.strip()
      if line == expected or (expected is None and _NUMBER.fullmatch(line)):
        return line
    self._errors.seek(0)
    last = self._errors.read().strip().splitlines()[-1:]
    raise RuntimeError(f"the chief ended early: {''.join(last)}")

  @property
  def pids(self) -> list[int]:
    """The process ids of the processes, in the order of their commands."""
    return [process.pid for process in self._processes]

  def cpu_secs(self) -> list[float]:
    """Returns the processor time that each process has used, in seconds."""
    found = []
    for process in self._processes:
      stat = pathlib.Path("/proc", str(process.pid), "stat").read_text()
      user, system = stat.rpartition(")")[2].split()[11:13]
      found.append((int(user) + int(system)) / _TICKS_PER_SEC)
    return found

  def updates_per_sec(self, updates: int) -> float:
    """Lets the cluster make `updates` updates, and returns their rate."""
    print(updates, file=self._chief.stdin, flush=True)
    return updates / float(self._read())


def new_spec() -> cluster.ClusterSpec:
  """Makes the spec of a cluster of 1 PS and 2 workers, at free ports."""
  jobs = {"ps": ["localhost:0"], "worker": ["localhost:0"] * 2}
  return cluster.resolve_ports(cluster.parse(jobs))


def small_model(
  root: pathlib.Path, replication: str, spec: cluster.ClusterSpec
) -> LiveCluster:
  """Starts a cluster of 1 PS and 2 workers that trains a small model.

  Args:
    root: The root directory of the tree whose library the cluster uses.
    replication: `between_graph` or `in_graph`.
    spec: The cluster.
  """
  tasks = [("ps", 0), ("worker", 1), ("worker", 0)]
  if replication == "in_graph":
    tasks.append(("chief", 0))
  return LiveCluster(
    [
      [
        sys.executable,
        str(_DIRECTORY / "paired_task.py"),
        *(",".join(spec.addresses(j)) for j in ("ps", "worker")),
        *(job, str(index), replication),
      ]
      for job, index in tasks
    ],
    root=root,
  )


def serve_turns(make: Callable[[int], object]) -> None:
  """Lets the chief of a `LiveCluster` make updates when it is asked to.

  It says that it is ready. After each line of standard input, it makes that
  many updates, and prints how many seconds they took.

  Args:
    make: Makes a number of updates, and returns when all are done.
  """
  print("ready", flush=True)
  for line in sys.stdin:
    start = time.perf_counter()
    make(int(line))
    print(time.perf_counter() - start, flush=True)
