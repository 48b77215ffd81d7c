"""What the tasks of a local cluster send and compute, seen from outside.

Bytes are read with `ss` (package iproute2), processor time from /proc.
"""

import collections
import os
import pathlib
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.support import programs

PARAMETER_BYTES = 4 * 1_068_298
_TIMEOUT_SECS = 600


class Traffic(NamedTuple):
  """What was seen of a training, between two of its steps.

  Attributes:
    bytes_per_step: By (sending task, receiving task), such as "ps 0".
    cpu_secs_per_step: Processor time by task.
    steps_per_sec: Of the same steps.
    start_secs: From the start of the program to the first log line.
  """

  bytes_per_step: dict[tuple[str, str], float]
  cpu_secs_per_step: dict[str, float]
  steps_per_sec: float
  start_secs: float

  def of(self, task: str) -> float:
    """Bytes per step that a task sends and receives."""
    return sum(n for pair, n in self.bytes_per_step.items() if task in pair)


def tasks_of(launcher: int) -> dict[int, str]:
  """By process id the tasks that a program started here, such as "ps 0"."""
  children = f"/proc/{launcher}/task/{launcher}/children"
  names = {}
  for pid in pathlib.Path(children).read_text().split():
    arguments = pathlib.Path(f"/proc/{pid}/cmdline").read_text()
    job = re.search(r"--job_name=(\w+)", arguments).group(1)
    index = re.search(r"--task_index=(\d+)", arguments).group(1)
    names[int(pid)] = f"{job} {index}"
  return names


def sent(tasks: dict[int, str]) -> dict[tuple[str, str], int]:
  """Bytes sent so far, by (sending task, receiving task).

  Args:
    tasks: Their names by process id; any other is called "outside".
  """
  output = subprocess.run(
    ["ss", "-tinpO"], capture_output=True, text=True, check=True
  ).stdout
  ends = {}
  for line in output.splitlines():
    fields = line.split()
    pid = re.search(r"pid=(\d+)", line)
    count = re.search(r"bytes_sent:(\d+)", line)
    if pid and int(pid.group(1)) in tasks:
      number = int(count.group(1)) if count else 0
      ends[_port(fields[3]), _port(fields[4])] = (
        tasks[int(pid.group(1))],
        number,
      )
  total = collections.Counter()
  for (local, peer), (task, number) in ends.items():
    other = ends.get((peer, local), ("outside", 0))[0]
    total[task, other] += number
  return total


def cpu_secs(tasks: dict[int, str]) -> dict[str, float]:
  """Processor time used so far, by task."""
  used = {}
  for pid, task in tasks.items():
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    user, system = map(int, fields.split()[11:13])
    used[task] = (user + system) / os.sysconf("SC_CLK_TCK")
  return used


def measure(arguments: Sequence[str], *, first: int, last: int) -> Traffic:
  """Trains the CIFAR-10 network, and looks twice.

  Args:
    arguments: Of `cifar10.distributed_train`; it is to log every step.
    first, last: The steps between which it is measured; where a line tells of
      several, the next ones.

  Raises:
    RuntimeError: If training failed or took too long, with all that it printed.
    FileNotFoundError: If there is no `ss`.
  """
  if shutil.which("ss") is None:
    raise FileNotFoundError("counting bytes needs `ss`: apt install iproute2")
  printed, readings = [], []
  start, first_line = time.monotonic(), None
  program = "cifar10.distributed_train"
  with programs.started(program, arguments, _TIMEOUT_SECS) as process:
    for line in process.stdout:
      printed.append(line)
      logged = programs.LOG_LINE.search(line)
      if logged is None:
        continue
      first_line = first_line or time.monotonic()
      step = int(logged.group(2))
      if len(readings) < 2 and step >= (first, last)[len(readings)]:
        tasks, now = tasks_of(process.pid), time.monotonic()
        readings.append(((step, now), sent(tasks), cpu_secs(tasks)))
  if process.returncode or len(readings) < 2:
    raise RuntimeError(f"training failed:\n{''.join(printed)}")
  (begin, *before), (end, *after) = readings
  steps, seconds = np.subtract(end, begin)
  num_bytes, cpu = (
    {key: (n - old.get(key, 0)) / steps for key, n in new.items()}
    for old, new in zip(before, after, strict=True)
  )
  return Traffic(num_bytes, cpu, steps / seconds, first_line - start)


def _port(address: str) -> str:
  return address.rsplit(":", 1)[1]
