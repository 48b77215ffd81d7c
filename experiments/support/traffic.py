"""Measures what the tasks of a local cluster send and compute, from outside.

The numbers of bytes are read with `ss` (package iproute2), the processor times
from /proc.
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
from experiments.support import slow_down

PARAMETER_BYTES = 4 * 1_068_298
_TIMEOUT_SECS = 600


class Traffic(NamedTuple):
  """What was measured of a training between two of its steps.

  Attributes:
    bytes_per_step: Bytes by (sending task, receiving task). A task is named
      like "ps 0".
    cpu_secs_per_step: Seconds of processor time, by task.
    steps_per_sec: Steps per second between the two steps.
    start_secs: Seconds from the start of the program to its first log line.
  """

  bytes_per_step: dict[tuple[str, str], float]
  cpu_secs_per_step: dict[str, float]
  steps_per_sec: float
  start_secs: float

  def of(self, task: str) -> float:
    """Returns the bytes per step that a task sends and receives together."""
    return sum(n for pair, n in self.bytes_per_step.items() if task in pair)


def tasks_of(launcher: int) -> dict[int, str]:
  """Finds the tasks that a launcher has started on this machine.

  Args:
    launcher: The process id of the launcher.

  Returns:
    The names of the tasks, such as "ps 0", by process id.
  """
  names = {}
  for pid, arguments in slow_down.descendants(launcher).items():
    flags = dict(a.split("=", 1) for a in arguments if "=" in a)
    if "--job_name" in flags:
      names[pid] = f"{flags['--job_name']} {flags['--task_index']}"
  return names


def sent(tasks: dict[int, str]) -> dict[tuple[str, str], int]:
  """Returns the bytes that tasks have sent so far, for each pair of tasks.

  Args:
    tasks: The names of the tasks by process id. Any other process is called
      "outside".

  Returns:
    Bytes by (sending task, receiving task).
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
  """Returns the seconds of processor time that each task has used so far.

  Args:
    tasks: The names of the tasks by process id.
  """
  used = {}
  for pid, task in tasks.items():
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    user, system = map(int, fields.split()[11:13])
    used[task] = (user + system) / os.sysconf("SC_CLK_TCK")
  return used


def measure(arguments: Sequence[str], *, first: int, last: int) -> Traffic:
  """Trains the CIFAR-10 network, and measures traffic between two steps.

  Args:
    arguments: Flags of `cifar10.distributed_train`. They must make it log every
      step.
    first: The step at which the measurement begins, or the next one that has a
      log line of its own.
    last: The step at which it ends, or the next one with a log line.

  Raises:
    RuntimeError: If training failed or took too long, with all that it printed.
    FileNotFoundError: If the program `ss` is not installed.
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
