r"""Injects faults into real trainings: driver × rule × role × fault × moment.

  python -m benchmarks.fault_matrix --output=experiments/results \
    [--cells=pairs|all|network] [--rounds=1] \
    [--only=in_graph/sync/ps/kill/save]

A cell is a combination of one value of each factor. A run of a cell is a
training by `cifar10.distributed_train` of some seconds, on 2 PS (parameter
servers), a chief and 2 workers, all processes of this machine. The fault is
injected at its moment. The benchmark starts a task again whenever its process
has ended, as a cluster manager does, until the training has finished. A run
survives if

- the training finishes at exactly its last step, in time,
- its last checkpoint has exactly the examples of that many updates,
- the weights are those of an undisturbed training, if the rule is `sync`, which
  needs every replica, and
- every process ends by itself: within 90 s, or after five minutes without a
  client if it is a server that is cut off for good. Only a server (a parameter
  server or an in-graph worker) that was started when the training ended is
  stopped: it would wait for five minutes.

`--cells=pairs` runs few cells, in which every two values of different factors
meet at least once; `--cells=all` runs all. `--cells=network` runs cells with
faults of the network, every task on a host of its own: a partition that heals,
one that does not, and a slow link. It needs root. The command goes on where it
was interrupted: cells that `faults.json` in `--output` has often enough are
left out. It also writes the table `faults.md`.
"""

import collections
import contextlib
import datetime
import itertools
import json
import os
import pathlib
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import numpy as np
from absl import app
from absl import flags

from experiments.support import claims
from experiments.support import programs
from tf_replicas import cluster
from tf_replicas.cluster import local_cluster
from tf_replicas.cluster import private_network
from tf_replicas.drivers import server as server_lib
from tf_replicas.runtime import fork_server
from tf_replicas.runtime import row_files
from tf_replicas.session import checkpoints

FLAGS = flags.FLAGS
flags.DEFINE_string("output", None, "The directory of the results")
flags.DEFINE_integer("seed", 1, "Decides the exact moments of the faults")

# Of the trainings, not of the faults.
TRAINING_SEED = 1
_BATCH_SIZE = 8
_LOST_AFTER_SECS = 3
# Beyond the deadline after which a silent worker is lost.
_STOPPED_SECS = 2.0 * _LOST_AFTER_SECS
_KILLED_SECS = 2.0  # How long a killed task is away.
_CUT_SECS = 10.0  # How long a host is cut off from all others.
# A slow link, in Mbit/s, and how long it is slow.
_SLOW_MBIT, _SLOW_SECS = 1.0, 20.0
_PORT = 7000
_LATE_SECS = 5.0  # A server that was started later may not find its training.
_LEAVE_SECS = 10.0  # How long a task may take to leave after SIGTERM.
_END_SECS = 90.0  # How long processes may take to end after the training.
_DEADLINE_SECS = 300.0  # Of the training.
_MAX_STARTS = 10  # Of each task.
_CHIEF = cluster.Task("chief", 0)
_JOBS = {"ps": 2, "worker": 2, "chief": 1}


class Rule(NamedTuple):
  """An update rule of the matrix.

  Attributes:
    arguments: The flags that choose it; maps the number of replicas to them.
    max_steps: The length of the training, in updates.
    examples: Maps the number of replicas to the batches in one update.
  """

  arguments: Callable[[int], Sequence[str]]
  max_steps: int
  batches: Callable[[int], int]


_RULES = {
  "sync": Rule(lambda n: ["--update=sync"], 60, lambda n: n),
  "backup": Rule(
    lambda n: ["--update=sync", f"--replicas_to_aggregate={n - 1}"],
    60,
    lambda n: n - 1,
  ),
  "async": Rule(lambda n: ["--update=async"], 300, lambda n: 1),
  "bounded_staleness": Rule(
    lambda n: ["--update=bounded_staleness", "--max_staleness=2"],
    300,
    lambda n: 1,
  ),
  "periodic": Rule(
    lambda n: ["--update=model_average", "--period=3"], 30, lambda n: 3 * n
  ),
}
_FACTORS = {
  "driver": ("between_graph", "in_graph"),
  "rule": tuple(_RULES),
  "role": ("worker", "chief", "ps", "all"),
  "fault": ("kill", "stop", "term", "restart", "double"),
  "moment": ("start", "step", "save", "end"),
}


# Faults of the network, and the roles and moments with which they are run.
_NETWORK = [
  ("worker", "cut", "step"),
  ("worker", "cut", "start"),
  ("worker", "cut_for_good", "step"),
  ("worker", "slow", "step"),
  ("ps", "cut", "step"),
  ("ps", "cut", "save"),
  ("ps", "slow", "step"),
]


class Cell(NamedTuple):
  """A combination of one value of each factor."""

  driver: str
  rule: str
  role: str
  fault: str
  moment: str

  def __str__(self) -> str:
    return "/".join(self)


class Failed(Exception):
  """Reports that a training did not survive a fault as it should."""


def all_cells() -> list[Cell]:
  """Returns all combinations of the factors' values."""
  return [Cell(*values) for values in itertools.product(*_FACTORS.values())]


def network_cells() -> list[Cell]:
  """Returns the cells with faults of the network."""
  cells = []
  for driver, rule in itertools.product(_FACTORS["driver"], _RULES):
    for role, fault, moment in _NETWORK:
      # Else updates need the worker that is gone.
      if fault != "cut_for_good" or rule in ("backup", "async"):
        cells.append(Cell(driver, rule, role, fault, moment))
  return cells


def covering_cells() -> list[Cell]:
  """Returns few cells, in which every two values of two factors meet."""

  def pairs(cell: Cell) -> set[tuple]:
    return set(itertools.combinations(enumerate(cell), 2))

  cells = all_cells()
  random.Random(0).shuffle(cells)
  left = set().union(*map(pairs, cells))
  chosen = []
  while left:
    best = max(cells, key=lambda cell: len(pairs(cell) & left))
    chosen.append(best)
    left -= pairs(best)
  return sorted(chosen)


class Training:
  """One training, whose tasks are started again when they end.

  Attributes:
    train_dir: The directory of its checkpoints.
    restarts: How often each task was started again, by name; without the first
      start and that which is a part of the fault.
    max_steps: The global step at which it finishes.
    examples_of_step: The number of examples in an update.
  """

  def __init__(
    self,
    cell: Cell,
    directory: str,
    server: fork_server.ForkServer,
    network: private_network.PrivateNetwork | None = None,
    *,
    max_steps: int | None = None,
    length: int = 1,
    log_every_steps: int = 1,
    checkpoint_every_steps: int | None = None,
    max_starts: int = _MAX_STARTS,
  ):
    """Prepares a training, and starts nothing yet.

    Args:
      cell: The cell that the training belongs to.
      directory: A directory for its files only.
      server: Starts processes.
      network: A network with a host for each task. None: all tasks are on this
        machine.
      max_steps: The length of the training. None: that of the cell's rule,
        times `length`.
      length: A factor of the length.
      log_every_steps: The chief logs every so many steps.
      checkpoint_every_steps: The chief saves every so many steps. None: six
        times in the training.
      max_starts: How often each task may be started.
    """
    self._cell = cell
    self._max_starts = max_starts
    self._network = network
    self._directory = pathlib.Path(directory)
    self.train_dir = self._directory / "train"
    rule = _RULES[cell.rule]
    self.max_steps = max_steps or length * rule.max_steps
    save_every = checkpoint_every_steps or self.max_steps // 6
    addresses = {
      job: [
        f"{network.address(f'{job}{i}')}:{_PORT}" if network else "localhost:0"
        for i in range(count)
      ]
      for job, count in _JOBS.items()
    }
    self._spec = cluster.resolve_ports(cluster.parse(addresses))
    self.num_replicas = _JOBS["worker"] + (cell.driver == "between_graph")
    self.examples_of_step = _BATCH_SIZE * rule.batches(self.num_replicas)
    self._elsewhere: cluster.Task | None = None

    def command(task: cluster.Task) -> list[str]:
      command = [
        *[sys.executable, "-m", "cifar10.distributed_train"],
        f"--cluster_spec={self._spec_path(task)}",
        f"--train_dir={self.train_dir}",
        f"--replication={cell.driver}",
        "--dataset=synthetic",
        f"--batch_size={_BATCH_SIZE}",
        f"--seed={TRAINING_SEED}",
        f"--max_steps={self.max_steps}",
        f"--log_every_steps={log_every_steps}",
        f"--checkpoint_every_steps={save_every}",
        f"--lost_after_secs={_LOST_AFTER_SECS}",
        *["--start_timeout_secs=40", "--recovery_timeout_secs=40"],
        *rule.arguments(self.num_replicas),
        *[f"--job_name={task.job}", f"--task_index={task.index}"],
      ]
      return network.command(_host(task), command) if network else command

    self._tasks = local_cluster.LocalCluster(
      self._spec,
      command,
      log_dir=self._directory,
      environ={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
      # A process of the server cannot enter a host of the network.
      **({} if network else {"popen": server.popen}),
    )
    self._started: dict[cluster.Task, float] = {}  # By `time.time`.
    self._starts: collections.Counter[cluster.Task] = collections.Counter()
    self.restarts: collections.Counter[str] = collections.Counter()
    # Older processes of tasks that were started a second time.
    self._doubled: dict[cluster.Task, Any] = {}
    # Tasks that may not be started again now.
    self._held: set[cluster.Task] = set()
    self._deadline = 0.0

  def _spec_path(self, task: cluster.Task) -> pathlib.Path:
    """Writes the spec that a task reads, and returns its path.

    The second process of a task listens at another port, as it would on another
    machine, if other tasks do not have to reach it.
    """
    spec, name = self._spec, "spec.json"
    if task == self._elsewhere:
      document = json.loads(spec.to_json())
      document["cluster"][task.job][task.index] = "localhost:0"
      spec = cluster.resolve_ports(cluster.parse(document))
      name = f"second_{_host(task)}.json"
    path = self._directory / name
    path.write_text(spec.to_json())
    return path

  def run(self, fault: Callable[["Training"], None] | None) -> None:
    """Runs the training to its end.

    Args:
      fault: Called after the start; waits for its moment, and injects the
        fault. None: nothing is injected.

    Raises:
      Failed: If the training did not survive.
    """
    self._deadline = time.monotonic() + _DEADLINE_SECS
    with self.started():
      if fault is not None:
        fault(self)
      self.await_that(self.has_finished, "the end of the training")
      self._stop_late_servers()
      self._deadline = time.monotonic() + _END_SECS
      if self._cell.fault == "cut_for_good":
        self._deadline += server_lib.ORPHAN_TIMEOUT_SECS
      self.await_that(lambda: not self._running(), "the end of all tasks")
    self._check()

  @contextlib.contextmanager
  def started(self) -> Iterator[None]:
    """Context that starts all tasks, and kills those left at its end."""
    with self._tasks:
      try:
        self._start(*sorted(self._spec.tasks(), key=lambda t: t.job != "ps"))
        yield
      finally:
        for process in self._doubled.values():
          process.kill()

  def _start(self, *tasks: cluster.Task) -> None:
    for task in tasks:
      self._starts[task] += 1
      if self._starts[task] > self._max_starts:
        raise Failed(
          f"{task} ended {self._max_starts} times: {self._last(task)}"
        )
      self._started[task] = time.time()
      self._tasks.start(task)

  def _last(self, task: cluster.Task) -> str:
    lines = self._tasks.log(task).splitlines()
    return lines[-1] if lines else "no output"

  def _stop_late_servers(self) -> None:
    """Stops servers that were started when the training ended."""
    path = self.train_dir / checkpoints.FINISHED
    late = path.stat().st_mtime - _LATE_SECS
    for task in self._tasks.running():
      if self._is_server(task) and self._started[task] > late:
        if self._starts[task] > 1:
          self._tasks.kill(task)

  def _is_server(self, task: cluster.Task) -> bool:
    is_driven = self._cell.driver == "in_graph" and task.job == "worker"
    return task.job == "ps" or is_driven

  def _check(self) -> None:
    finished = checkpoints.read_finished(self.train_dir)
    assert finished is not None
    if finished.global_step != self.max_steps:
      raise Failed(f"it ended at step {finished.global_step}")
    step = self.check_examples()
    if step != self.max_steps:
      raise Failed(f"the last checkpoint is of step {step}")

  def check_examples(self) -> int:
    """Checks that the last checkpoint has the examples of all its updates.

    Returns:
      The global step of the checkpoint.
    """
    saved = self.last_checkpoint()
    step, used = int(saved["global_step"]), int(saved["examples_seen"])
    if used != step * self.examples_of_step:
      raise Failed(
        f"{used} examples were used at step {step}, not"
        f" {step * self.examples_of_step}"
      )
    return step

  def last_checkpoint(self) -> dict[str, np.ndarray]:
    """Returns the tensors of the newest checkpoint, by name."""
    path = checkpoints.latest(self.train_dir)
    if path is None:
      raise Failed("there is no checkpoint")
    return checkpoints.read(path)

  def has_finished(self) -> bool:
    """Returns whether the training has reached its last step."""
    return (self.train_dir / checkpoints.FINISHED).exists()

  def logged(self) -> list[programs.Logged]:
    """Returns what the log lines of the chief say, in their order."""
    path = self._tasks.log_path(_CHIEF)
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return programs.logged(text)

  def steps(self) -> list[int]:
    """Returns the global steps in the chief's log, in its order."""
    return [line.step for line in self.logged()]

  def is_saving(self) -> bool:
    """Returns whether files of an incomplete checkpoint exist."""
    if not self.train_dir.exists():
      return False
    names = os.listdir(self.train_dir)
    return any(name.startswith(row_files.UNFINISHED) for name in names)

  def _running(self) -> list[str]:
    running = list(map(str, self._tasks.running()))
    for task, process in self._doubled.items():
      if process.poll() is None:
        running.append(f"the first {task}")
    return running

  def await_that(
    self, condition: Callable[[], bool], what: str, poll_secs: float = 0.05
  ) -> None:
    """Waits for a condition, and starts tasks again that have ended.

    Raises:
      Failed: If the condition does not hold in time.
    """
    while not condition():
      if time.monotonic() > self._deadline:
        running = ", ".join(self._running())
        raise Failed(f"waited in vain for {what}; still running: {running}")
      self._start_again()
      time.sleep(poll_secs)

  def _start_again(self) -> None:
    if self.has_finished():
      return
    for task in self._spec.tasks():
      if task in self._held or self._tasks.returncode(task) is None:
        continue
      first = self._doubled.get(task)
      if first is not None and first.poll() is None:
        continue  # One of the two lives.
      self._elsewhere = None
      self.restarts[str(task)] += 1
      self._start(task)

  def tasks_of(self, role: str, dice: random.Random) -> list[cluster.Task]:
    """Returns the tasks that a fault hits: one of a role, or all."""
    if role == "all":
      return sorted(self._spec.tasks(), key=lambda task: task.job != "ps")
    return [dice.choice(self._spec.tasks(role))]

  def inject(self, fault: str, tasks: Sequence[cluster.Task]) -> float:
    """Injects a fault into the processes of `tasks`, and undoes it.

    Returns:
      How many seconds it took until the last of these processes had left, if
      they were asked to leave; else 0.
    """
    live = [t for t in tasks if self._tasks.returncode(t) is None]
    if self._network is not None:
      self._disturb(self._network, fault, _host(tasks[0]))
      return 0.0
    if fault == "double":
      for task in live:
        self._doubled[task] = self._tasks._processes[task]
        self._elsewhere = None if self._is_server(task) else task
        self._start(task)
      return 0.0
    if fault == "stop":
      for task in live:
        self._tasks.kill(task, signal.SIGSTOP)
      self._pause(_STOPPED_SECS)
      for task in live:
        self._tasks.kill(task, signal.SIGCONT)
      return 0.0
    self._held = set(live)
    since = time.monotonic()
    for task in live:
      is_asked = fault == "term"
      self._tasks.kill(task, signal.SIGTERM if is_asked else signal.SIGKILL)
    self._await_exit(live)
    secs = time.monotonic() - since
    if fault == "kill":
      self._pause(_KILLED_SECS)
    self._held = set()
    if not self.has_finished():
      self._start(*live)
    return secs if fault == "term" else 0.0

  def _disturb(
    self, network: private_network.PrivateNetwork, fault: str, host: str
  ) -> None:
    """Injects a fault of the network, and undoes it unless it is for good."""
    if fault == "slow":
      network.limit(host, _SLOW_MBIT)
      self._pause(_SLOW_SECS)
      network.limit(host, None)
      return
    network.cut(host)
    if fault == "cut":
      self._pause(_CUT_SECS)
      network.mend(host)

  def _await_exit(self, tasks: Sequence[cluster.Task]) -> None:
    deadline = time.monotonic() + _LEAVE_SECS
    while any(self._tasks.returncode(task) is None for task in tasks):
      if time.monotonic() > deadline:
        raise Failed(f"it did not leave within {_LEAVE_SECS:.0f} s")
      self._start_again()
      time.sleep(0.02)

  def _pause(self, secs: float) -> None:
    until = time.monotonic() + secs
    while time.monotonic() < until:
      self._start_again()
      time.sleep(0.05)


def _host(task: cluster.Task) -> str:
  return f"{task.job}{task.index}"


def _await_moment(training: Training, moment: str, dice: random.Random) -> None:
  """Waits until the moment of a fault."""
  if moment == "start":
    until = time.monotonic() + dice.uniform(0, 5)
    training.await_that(
      lambda: time.monotonic() > until or bool(training.steps()), moment
    )
    return
  first = training.max_steps // (6 if moment == "save" else 4)
  if moment == "end":
    first = training.max_steps - dice.randrange(2)
  training.await_that(
    lambda: (
      max(training.steps(), default=0) >= first or training.has_finished()
    ),
    moment,
    poll_secs=0.005,
  )
  if moment == "save":
    training.await_that(
      lambda: training.is_saving() or training.has_finished(),
      "a checkpoint",
      poll_secs=0.0005,
    )
  else:
    time.sleep(dice.uniform(0, 0.3 if moment == "step" else 0.1))


def run(
  cell: Cell,
  dice: random.Random,
  server: fork_server.ForkServer,
  undisturbed: dict[str, np.ndarray] | None,
) -> dict[str, Any]:
  """Runs a cell once, and returns what happened."""
  directory = tempfile.mkdtemp(prefix="faults")
  stack = contextlib.ExitStack()
  network = None
  if cell in network_cells():
    network = stack.enter_context(_network_of_tasks())
  training = Training(cell, directory, server, network)
  result: dict[str, Any] = {
    "survived": True,
    "reason": "",
    "leave_secs": 0.0,
    "missed": False,
  }
  at = {"step": 0, "wall": time.time()}

  def fault(training: Training) -> None:
    _await_moment(training, cell.moment, dice)
    at["step"] = max(training.steps(), default=0)
    at["wall"] = time.time()
    result["missed"] = training.has_finished()
    tasks = training.tasks_of(cell.role, dice)
    result["tasks"] = list(map(str, tasks))
    result["leave_secs"] = round(training.inject(cell.fault, tasks), 2)

  since = time.monotonic()
  try:
    with stack:
      training.run(fault)
    if undisturbed is not None:
      result["difference"] = _difference(
        training.last_checkpoint(), undisturbed
      )
      if result["difference"] > 1e-5:
        raise Failed(f"the weights differ by {result['difference']:.2g}")
  except (Failed, checkpoints.CheckpointError) as failure:
    result |= {"survived": False, "reason": str(failure), "logs": directory}
  logged = training.logged()
  steps = [line.step for line in logged]
  if result["survived"]:
    times = [line.when.timestamp() for line in logged]
    later = [at["wall"], *(time for time in times if time > at["wall"])]
    gaps = [after - before for before, after in itertools.pairwise(later)]
    # None: the training had made all steps.
    result["pause_secs"] = round(max(gaps), 2) if gaps else None
  result |= {
    "step": at["step"],
    "steps_again": sum(
      max(0, before - after + 1) for before, after in itertools.pairwise(steps)
    ),
    "restarts": dict(training.restarts),
    "secs": round(time.monotonic() - since, 1),
  }
  if result["survived"]:
    with contextlib.suppress(OSError):
      shutil.rmtree(directory)
  return result


def _difference(
  values: dict[str, np.ndarray], others: dict[str, np.ndarray]
) -> float:
  """Returns the largest difference of a variable, relative to its largest."""
  names = [name for name in values if name.startswith("variables/")]
  return max(
    float(np.abs(values[n] - others[n]).max() / np.abs(others[n]).max())
    for n in names
  )


def _undisturbed(
  driver: str, server: fork_server.ForkServer, *, has_network: bool
) -> dict[str, np.ndarray]:
  """Returns the last checkpoint of a synchronous training without faults."""
  cell = Cell(driver, "sync", "worker", "none", "none")
  with (
    tempfile.TemporaryDirectory(prefix="faults") as directory,
    _network_of_tasks() if has_network else contextlib.nullcontext() as network,
  ):
    training = Training(cell, directory, server, network)
    training.run(None)
    return training.last_checkpoint()


def _network_of_tasks() -> private_network.PrivateNetwork:
  hosts = [f"{job}{i}" for job in _JOBS for i in range(_JOBS[job])]
  return private_network.PrivateNetwork(hosts)


def table(results: dict[str, list[dict[str, Any]]]) -> str:
  """Returns the Markdown table of all cells that were run."""
  lines = [
    "| driver | rule | role | fault | moment | runs | survived | longest pause"
    " after the fault in seconds: median of the runs (longest) | most updates"
    " made again | tasks that ended by themselves |",
    "|---|---|---|---|---|---|---|---|---|---|",
  ]
  for name in sorted(results):
    runs = results[name]
    ended = sorted({task for r in runs for task in r["restarts"]})
    columns = [*name.split("/"), *_columns(runs), ", ".join(ended) or "none"]
    lines.append(f"| {' | '.join(columns).replace('_', ' ')} |")
  return "\n".join(lines)


def counts(results: dict[str, list[dict[str, Any]]]) -> str:
  """Returns a Markdown table: how much of the matrix was run how often."""
  lines = [
    "| cells | in all | run at least once | fewest runs of a cell | runs |"
    " failed | the fault came after the end |",
    "|---|---|---|---|---|---|---|",
  ]
  matrix = list(all_cells())
  for words, cells in (
    *(
      (driver.replace("_", "-"), [c for c in matrix if c.driver == driver])
      for driver in _FACTORS["driver"]
    ),
    ("of both: `--cells=pairs`", covering_cells()),
    ("faults of the network: `--cells=network`", network_cells()),
  ):
    runs = [results.get(str(cell), []) for cell in cells]
    made = [run for of_cell in runs for run in of_cell]
    columns = [
      words,
      len(runs),
      sum(bool(of_cell) for of_cell in runs),
      min(map(len, runs)),
      len(made),
      sum(not run["survived"] for run in made),
      sum(run["missed"] for run in made),
    ]
    lines.append(f"| {' | '.join(map(str, columns))} |")
  return "\n".join(lines)


def summary(results: dict[str, list[dict[str, Any]]]) -> str:
  """Returns a Markdown table by driver, role and fault.

  A row combines the cells of all rules and moments.
  """
  groups: dict[Cell, list[dict[str, Any]]] = {}
  for name, runs in results.items():
    cell = Cell(*name.split("/"))._replace(rule="", moment="")
    groups.setdefault(cell, []).extend(runs)
  lines = [
    "| driver | role | fault | runs | survived | longest pause after the fault"
    " in seconds: median of the runs (longest) | most updates made again |",
    "|---|---|---|---|---|---|---|",
  ]
  for cell in sorted(groups):
    columns = [cell.driver, cell.role, cell.fault, *_columns(groups[cell])]
    lines.append(f"| {' | '.join(columns).replace('_', ' ')} |")
  return "\n".join(lines)


def _columns(runs: list[dict[str, Any]]) -> list[str]:
  """Returns what both tables say of some runs.

  Runs whose fault came after the end do not count.
  """
  runs = [run for run in runs if not run["missed"]]
  secs = [s for r in runs if (s := r.get("pause_secs")) is not None]
  return [
    str(len(runs)),
    str(sum(r["survived"] for r in runs)),
    f"{statistics.median(secs):.1f} ({max(secs):.1f})" if secs else "",
    str(max((r["steps_again"] for r in runs), default="")),
  ]


_CELLS = {
  "pairs": covering_cells,
  "all": all_cells,
  "network": network_cells,
}


def _read(path: pathlib.Path) -> dict[str, Any]:
  if path.exists():
    return json.loads(path.read_text(encoding="utf-8"))
  return {"command": "python -m benchmarks.fault_matrix", "cells": {}}


def _write(directory: pathlib.Path, document: dict[str, Any]) -> None:
  directory.mkdir(parents=True, exist_ok=True)
  path = directory / "faults.json"
  temporary = path.with_suffix(".tmp")
  temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
  os.replace(temporary, path)
  cells = document["cells"]
  (directory / "faults.md").write_text(
    f"{counts(cells)}\n\n{summary(cells)}\n\nThe runs by cell:\n\n"
    f"{table(cells)}\n",
    encoding="utf-8",
  )


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    sys.exit(f"unknown argument: {argv[1]}")
  if FLAGS.only:
    cells = [Cell(*name.split("/")) for name in FLAGS.only]
    known = {*all_cells(), *network_cells()}
    unknown = [str(cell) for cell in cells if cell not in known]
    if unknown:
      sys.exit(f"--only: no such cell: {', '.join(unknown)}")
  else:
    cells = _CELLS[FLAGS.cells]()
  directory = pathlib.Path(FLAGS.output)
  document = _read(directory / "faults.json")
  _write(directory, document)
  environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
  if set(cells) & set(network_cells()) and private_network.obstacle():
    sys.exit(private_network.obstacle())
  failures = 0
  with contextlib.ExitStack() as stack:
    server = stack.enter_context(fork_server.ForkServer(environ))
    # The numbers of threads differ, and so the order of additions.
    undisturbed: dict[tuple[str, bool], dict[str, np.ndarray]] = {}
    for number in range(FLAGS.rounds):
      for cell in cells:
        runs = document["cells"].setdefault(str(cell), [])
        if len(runs) > number:
          continue
        kind = cell.driver, cell in network_cells()
        if cell.rule == "sync" and kind not in undisturbed:
          undisturbed[kind] = _undisturbed(
            cell.driver, server, has_network=kind[1]
          )
        dice = random.Random(f"{FLAGS.seed} {cell} {number}")
        reference = undisturbed[kind] if cell.rule == "sync" else None
        result = run(cell, dice, server, reference)
        logs = result.pop("logs", None)  # A directory of this machine.
        result |= {
          "commit": claims.commit(),
          "date": datetime.date.today().isoformat(),
          "machine": claims.machine(),
        }
        runs.append(result)
        _write(directory, document)
        failures += not result["survived"]
        verdict = "survived"
        if not result["survived"]:
          verdict = f"{result['reason']}; logs: {logs}"
        print(f"{cell} {result['secs']:.0f} s: {verdict}", flush=True)
        if failures and not FLAGS.keep_going:
          sys.exit(1)
  if failures:
    sys.exit(f"{failures} runs failed")


if __name__ == "__main__":
  flags.DEFINE_enum(
    "cells", "pairs", ["pairs", "all", "network"], "The cells to run"
  )
  flags.DEFINE_list("only", [], "Cells to run instead, by name")
  flags.DEFINE_integer("rounds", 1, "Runs of each cell, in all", lower_bound=1)
  flags.DEFINE_bool("keep_going", True, "Go on after a run that failed")
  flags.mark_flag_as_required("output")
  app.run(main)
