"""Programs of this project, run by others of it."""

import contextlib
import datetime
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import NamedTuple
from typing import NoReturn

from experiments.support import slow_down

_RATE = re.compile(r"\(([\d.]+) examples/sec;")
# What a training prints: (when, step, loss), and in the end (step, examples).
LOG_LINE = re.compile(r"([-\d]+ [:.\d]+): step (\d+), loss = ([\d.]+) \(")
FINISHED = re.compile(r"finished at step (\d+): (\d+) examples")


def output(module: str, *arguments: str) -> str:
  """What a program printed to its standard output.

  Raises:
    RuntimeError: If it failed, with all that it printed.
    subprocess.TimeoutExpired: If it takes longer than ten minutes.
  """
  result = subprocess.run(
    [sys.executable, "-m", module, *arguments],
    capture_output=True,
    text=True,
    check=False,
    timeout=600,
  )
  if result.returncode:
    raise RuntimeError(f"{module} failed:\n{result.stdout}{result.stderr}")
  return result.stdout


def write_spec(
  directory: str, *, workers: int, ps: int = 1, placement: str = "greedy"
) -> str:
  """Writes a cluster spec of this machine there; returns its path."""
  spec = {
    "cluster": {
      "ps": ["localhost:0"] * ps,
      "worker": ["localhost:0"] * workers,
    },
    # Small enough pieces for the networks of this project.
    "variables": {
      "on": "ps",
      "placement": placement,
      "min_shard_bytes": 65536,
    },
  }
  path = os.path.join(directory, "spec.json")
  with open(path, "w", encoding="utf-8") as file:
    json.dump(spec, file)
  return path


class Logged(NamedTuple):
  """A log line of a training."""

  when: datetime.datetime
  step: int
  loss: float


def logged(output: str) -> list[Logged]:
  """The log lines that a training printed."""
  return [
    Logged(datetime.datetime.fromisoformat(when), int(step), float(loss))
    for when, step, loss in LOG_LINE.findall(output)
  ]


def examples_per_sec(output: str) -> float:
  """The rate of a training by its log lines but the first, of its start."""
  rates = [float(rate) for rate in _RATE.findall(output)]
  return statistics.harmonic_mean(rates[1:])


def spread(values: Sequence[float]) -> str:
  """Median, least and largest of what was measured in several rounds."""
  return (
    f"{statistics.median(values):.2f} (median of {len(values)},"
    f" {min(values):.2f} to {max(values):.2f})"
  )


def run_tasks(
  module: str,
  arguments: Sequence[object],
  *,
  document: Mapping[str, object],
  directory: str,
  timeout_secs: float = 240.0,
  environ: Mapping[str, str] | None = None,
) -> None:
  """Runs every task of a local cluster to its end.

  Args:
    module: What each is, a program that calls `be_task`.
    arguments: For it.
    document: The cluster spec, as of a file.
    directory: For the spec and the logs of the tasks.
    timeout_secs: How long all of it may take.
    environ: Of the processes; this one's if not given.

  Raises:
    RuntimeError: If a task failed, with what all of them printed.
    TimeoutError: If they take too long.
  """
  from tf_replicas import cluster
  from tf_replicas.cluster import local_cluster

  spec = cluster.resolve_ports(cluster.parse(document))
  path = pathlib.Path(directory, "spec.json")
  path.write_text(spec.to_json(), encoding="utf-8")

  def command(task):
    which = [str(path), task.job, str(task.index)]
    return [sys.executable, "-m", module, *which, *map(str, arguments)]

  with local_cluster.LocalCluster(
    spec, command, log_dir=directory, environ=environ
  ) as tasks:
    tasks.start()
    if tasks.wait(timeout_secs=timeout_secs):
      raise RuntimeError("\n".join(tasks.log(t) for t in spec.tasks()))


def be_task(argv: Sequence[str], run_client: Callable[..., None]) -> NoReturn:
  """What a program does that `run_tasks` starts.

  Args:
    argv: Its arguments.
    run_client: For all but PS tasks: called with the spec, the task, the
      directory and the arguments given to `run_tasks`.
  """
  from tf_replicas import cluster
  from tf_replicas.drivers import server
  from tf_replicas.runtime import processes

  path, job, index, *arguments = argv
  spec = cluster.load(path)
  task = cluster.Task(job, int(index))
  if job == "ps":
    server.serve(spec, task, num_clients=len(spec.replicas))
  else:
    run_client(spec, task, pathlib.Path(path).parent, *arguments)
  processes.exit_now(0)


def step_rate(lines: Sequence[Logged]) -> float:
  """Steps per second from the first of these lines to the last."""
  seconds = (lines[-1].when - lines[0].when).total_seconds()
  return (lines[-1].step - lines[0].step) / seconds


def train(
  module: str,
  arguments: Sequence[str],
  slow_downs: Mapping[int, float],
  timeout_secs: float = 1800.0,
) -> str:
  """What a training on a local cluster printed, with some workers slowed down.

  Args:
    module: Its program.
    arguments: Its flags.
    slow_downs: By worker how many times as long everything takes it, from the
      first log line on.
    timeout_secs: How long all of it may take.

  Raises:
    RuntimeError: If it failed or took too long, with all that it printed.
    LookupError: If there is no such worker.
  """
  printed = []
  with started(module, arguments, timeout_secs) as process:
    _read_until(LOG_LINE, process, printed)
    with contextlib.ExitStack() as slowed:
      for worker, factor in slow_downs.items():
        words = ["--job_name=worker", f"--task_index={worker}"]
        pid = slow_down.child(process.pid, words)
        slowed.enter_context(slow_down.SlowDown(pid, factor))
      _read_until(FINISHED, process, printed)
    printed += process.stdout
  output = "".join(printed)
  if process.returncode:
    raise RuntimeError(f"training failed:\n{output}")
  return output


@contextlib.contextmanager
def started(
  module: str, arguments: Sequence[str], timeout_secs: float
) -> Iterator[subprocess.Popen]:
  """A program of which all that it prints can be read; ended at a deadline."""
  command = [sys.executable, "-m", module, *arguments]
  with subprocess.Popen(
    command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
  ) as process:
    deadline = threading.Timer(timeout_secs, process.terminate)
    deadline.start()
    try:
      yield process
    except BaseException:
      process.terminate()
      raise
    finally:
      deadline.cancel()


def _read_until(pattern, process, printed: list[str]) -> None:
  for line in process.stdout:
    printed.append(line)
    if pattern.search(line):
      return
  raise RuntimeError(f"training failed:\n{''.join(printed)}")
