"""Runs programs of this project, and reads what they print."""

import contextlib
import datetime
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import NamedTuple
from typing import NoReturn

from experiments.simulator import recorded_run
from experiments.support import slow_down

_ROOT = str(pathlib.Path(__file__).resolve().parents[2])
_PORT = 2222  # Of every task on a host of its own.
_RATE = re.compile(r"\(([\d.]+) examples/sec;")
# What a training prints: (when, step, loss), and in the end (step, examples).
LOG_LINE = re.compile(r"([-\d]+ [:.\d]+): step (\d+), loss = ([\d.]+) \(")
FINISHED = re.compile(r"finished at step (\d+): (\d+) examples")


def output(module: str, *arguments: str) -> str:
  """Runs a program, and returns what it printed to its standard output.

  The program, and those that it starts, can import the packages of this tree.

  Args:
    module: The module of the program, for `python -m`.
    *arguments: The arguments of the program.

  Raises:
    RuntimeError: If the program failed, with all that it printed.
    subprocess.TimeoutExpired: If the program takes longer than 15 minutes.
  """
  paths = filter(None, [os.environ.get("PYTHONPATH")])
  result = subprocess.run(
    [sys.executable, "-m", module, *arguments],
    capture_output=True,
    text=True,
    check=False,
    timeout=900,
    env={**os.environ, "PYTHONPATH": os.pathsep.join([_ROOT, *paths])},
  )
  if result.returncode:
    raise RuntimeError(f"{module} failed:\n{result.stdout}{result.stderr}")
  return result.stdout


def write_spec(
  directory: str, *, workers: int, ps: int = 1, placement: str = "greedy"
) -> str:
  """Writes the spec of a cluster on this machine, and returns its path.

  Args:
    directory: The directory for the file `spec.json`.
    workers: The number of workers.
    ps: The number of PS tasks (parameter servers).
    placement: How variables are placed on the PS tasks, as in a cluster spec.
  """
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
  """What a log line of a training says.

  Attributes:
    when: The local time of the line.
    step: The global step.
    loss: The loss of this step.
  """

  when: datetime.datetime
  step: int
  loss: float


def logged(output: str) -> list[Logged]:
  """Finds the log lines in what a training printed.

  Args:
    output: The text that the training printed.

  Returns:
    The content of each log line, in order.
  """
  return [
    Logged(datetime.datetime.fromisoformat(when), int(step), float(loss))
    for when, step, loss in LOG_LINE.findall(output)
  ]


def examples_per_sec(output: str) -> float:
  """Returns the examples per second of a training, by its log lines.

  It is the harmonic mean over all log lines but the first, which includes the
  start.

  Args:
    output: The text that the training printed.
  """
  rates = [float(rate) for rate in _RATE.findall(output)]
  return statistics.harmonic_mean(rates[1:])


def run_tasks(
  module: str,
  arguments: Sequence[object],
  *,
  document: Mapping[str, object],
  directory: str,
  timeout_secs: float = 600.0,
  environ: Mapping[str, str] | None = None,
  while_running: Callable[..., None] | None = None,
  mbit_per_sec: float | None = None,
) -> None:
  """Runs all tasks of a cluster on this machine, and waits for their end.

  Args:
    module: The program of each task, which calls `be_task`.
    arguments: More arguments of the program.
    document: The cluster spec, decoded from JSON.
    directory: A directory for the spec and the logs of the tasks.
    timeout_secs: The time limit for everything, in seconds.
    environ: The environment of the processes. None: that of this process.
    while_running: Called with the `LocalCluster` after its start, for example
      to kill a task and start it again. None: nothing is called.
    mbit_per_sec: If given, each task has a host of its own in a private
      network, whose link has this rate in each direction, in 10^6 bits per
      second. This needs root.

  Raises:
    PrivateNetworkError: If this machine does not permit a private network.
    RuntimeError: If a task failed, with what all tasks printed.
    TimeoutError: If the tasks take longer than `timeout_secs`.
  """
  from tf_replicas import cluster
  from tf_replicas.cluster import local_cluster
  from tf_replicas.cluster import private_network

  spec = cluster.parse(document)
  with contextlib.ExitStack() as stack:
    network = None
    if mbit_per_sec is None:
      spec = cluster.resolve_ports(spec)
    else:
      network = stack.enter_context(
        private_network.PrivateNetwork(
          list(map(str, spec.tasks())), mbit_per_sec=mbit_per_sec
        )
      )
      spec = spec.with_addresses(
        {t: f"{network.address(str(t))}:{_PORT}" for t in spec.tasks()}
      )
    path = pathlib.Path(directory, "spec.json")
    path.write_text(spec.to_json(), encoding="utf-8")

    def command(task):
      which = [str(path), task.job, str(task.index)]
      words = [sys.executable, "-m", module, *which, *map(str, arguments)]
      return network.command(str(task), words) if network else words

    tasks = stack.enter_context(
      local_cluster.LocalCluster(
        spec, command, log_dir=directory, environ=environ
      )
    )
    # Named, because addresses in a private network do not count as local.
    tasks.start(*sorted(spec.tasks(), key=lambda task: task.job != "ps"))
    if while_running is not None:
      while_running(tasks)
    if tasks.wait(timeout_secs=timeout_secs):
      raise RuntimeError("\n".join(tasks.log(t) for t in spec.tasks()))


def be_task(argv: Sequence[str], run_client: Callable[..., None]) -> NoReturn:
  """Makes this process a task of the cluster that `run_tasks` has started.

  A PS task serves until the training ends. Any other task calls `run_client`.
  Then the process exits.

  Args:
    argv: The command-line arguments of this process.
    run_client: Called with the cluster spec, the task, the directory and the
      arguments that were given to `run_tasks`.
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


def await_condition(condition: Callable[[], object], what: str) -> None:
  """Waits, in a task, until something is true.

  Args:
    condition: Returns whether it is true.
    what: What is waited for, for the log and the error.

  Raises:
    TimeoutError: If it is not true within two minutes.
  """
  from tf_replicas.runtime import waiting

  waiting.await_value(
    condition, timeout_secs=120, what=f"waiting for {what}", poll_secs=0.01
  )


def barrier(directory: pathlib.Path, name: str, index: int, count: int) -> None:
  """Waits, in a worker, until all workers have come to the same place.

  Args:
    directory: A directory for a file of each worker.
    name: The name of the place.
    index: The index of this worker.
    count: The number of workers.

  Raises:
    TimeoutError: If a worker does not come within two minutes.
  """
  directory.joinpath(f"{name}.{index}").touch()
  await_condition(
    lambda: len(list(directory.glob(f"{name}.*"))) == count,
    f"the other workers, {name}",
  )


def record_async(workers: int, *arguments: str) -> list[recorded_run.Event]:
  """Trains the network of `cifar10` asynchronously, and records the timeline.

  Args:
    workers: The number of workers.
    *arguments: More flags of `cifar10.distributed_train`.

  Returns:
    The events of all tasks, ordered by their start.
  """
  with tempfile.TemporaryDirectory() as directory:
    spec = write_spec(directory, workers=workers)
    output(
      "cifar10.distributed_train",
      "--dataset=synthetic",
      f"--cluster_spec={spec}",
      f"--train_dir={directory}/run",
      "--update=async",
      "--batch_size=16",
      *arguments,
      "--timeline",
    )
    return recorded_run.read(f"{directory}/run/timeline")


def step_rate(lines: Sequence[Logged]) -> float:
  """Returns the steps per second from the first to the last of `lines`."""
  seconds = (lines[-1].when - lines[0].when).total_seconds()
  return (lines[-1].step - lines[0].step) / seconds


def train(
  module: str,
  arguments: Sequence[str],
  slow_downs: Mapping[int, float],
  timeout_secs: float = 1800.0,
) -> str:
  """Trains on a local cluster with slow workers, and returns what was printed.

  Args:
    module: The module of the training program.
    arguments: The flags of the program.
    slow_downs: Maps the index of a worker to the factor by which it is slowed
      down, from the first log line on.
    timeout_secs: The time limit for everything, in seconds.

  Raises:
    RuntimeError: If the training failed or took too long, with all that it
      printed.
    LookupError: If there is no such worker.
  """
  printed = []
  with started(module, arguments, timeout_secs) as process:
    _read_until(LOG_LINE, process, printed)
    with contextlib.ExitStack() as slowed:
      for worker, factor in slow_downs.items():
        words = ["--job_name=worker", f"--task_index={worker}"]
        pid = slow_down.descendant(process.pid, words)
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
  """Context in which a program runs; it yields the process.

  All that the program prints can be read from the `stdout` of the process. The
  process is ended if it runs longer than `timeout_secs`, or if the context is
  left by an error.

  Args:
    module: The module of the program, for `python -m`.
    arguments: The arguments of the program.
    timeout_secs: The time limit in seconds.
  """
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
