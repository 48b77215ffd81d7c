"""Runs one task of a training in this process, or starts all local tasks."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import re
import signal
import tempfile
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from tf_replicas import cluster
from tf_replicas.cluster import isolation
from tf_replicas.cluster import local_cluster
from tf_replicas.programs import run_options
from tf_replicas.runtime import fork_server
from tf_replicas.runtime import noise
from tf_replicas.session import console
from tf_replicas.session import interrupts

_START = re.compile(r"\] training from step (\d+) to (\d+)$")
_PROGRESS = re.compile(
  r"\d: step (\d+), (loss = [^\s,]+).*? \([^()]* sec/batch\)"
  r"(?:; (learning rate [^\s;]+))?"
)


def run(
  options: run_options.Options,
  workload: run_options.Workload | None,
  *,
  command: Callable[[str, cluster.Task, int], Sequence[str]],
) -> int:
  """Runs this process's part of a training until the training ends.

  The process runs the task `options.task`. If that is None and the cluster has
  several tasks, the process starts all tasks of this machine instead, and waits
  for them. In a dry run, it only prints a description of the training.

  Args:
    options: How to run the training.
    workload: What to train; None if the task only serves.
    command: A function of (path of a file with the cluster spec, task, number
      of threads that one op may use). It returns the command line that starts
      the task. The spec in the file has no port 0.

  Returns:
    The exit status of this process.
  """
  if options.dry_run:
    return _describe(options, workload)
  if options.launches:
    return _launch(options, command)
  # This module imports TensorFlow, which the launcher does without.
  from tf_replicas.programs import task_runner

  if options.only_serves:
    return task_runner.serve(options)
  try:
    task_runner.train(options, workload)
  except KeyboardInterrupt as interrupt:
    if options.spec.is_distributed:
      raise
    _say("interrupted")
    return _status(interrupt)
  return 0


def _describe(
  options: run_options.Options, workload: run_options.Workload
) -> int:
  """Does a dry run: prints a description of the training.

  The description has the cluster, the batch size of an update, and the device
  of each variable.

  Returns:
    The exit status 0.
  """
  from tf_replicas.drivers import one_machine
  from tf_replicas.runtime import devices
  from tf_replicas.store import parameter_store

  if options.spec.is_distributed:
    _say(run_options.describe_cluster(options.spec))
  _say(run_options.describe(options, workload))
  tower_devices = []
  if options.devices_per_tower > 1:
    tower_devices = devices.tower_devices(
      options.spec.gpus(options.replicas[0]), emulate=options.emulate_gpus
    )
  replica = workload.replica_fn(tower_devices)
  if options.spec.variables.on == "ps":
    _say(parameter_store.describe(options.spec, replica.shared))
  else:
    gpus = devices.tower_devices(
      options.spec.gpus(options.spec.chief) or (), emulate=options.emulate_gpus
    )
    where = {
      "cpu": one_machine.CPU,
      "gpu": gpus[0],
      "mirrored": "every replica",
    }
    device = where[options.spec.variables.on]
    _say(one_machine.describe(replica.shared, device))
  if tower_devices:
    _say(replica.layers.table(tower_devices))
  return 0


def _launch(
  options: run_options.Options,
  command: Callable[[str, cluster.Task, int], Sequence[str]],
) -> int:
  """Starts every task of this machine and waits until all of them end.

  Args:
    options: How to run the training.
    command: Makes the command line of a task, as documented in `run`.

  Returns:
    The exit status, as `run_tasks` returns it.

  Raises:
    cluster.ClusterError: If no task is on this machine, or a port is in use.
  """
  spec = options.spec
  if not spec.local_tasks():
    raise cluster.ClusterError(
      f"{spec.where}`cluster` must have a task at an address of this machine,"
      " or `--job_name` and `--task_index` must say which task this process is."
      f" Received: {', '.join(spec.address(task) for task in spec.tasks())}."
    )
  if options.private_network:
    if spec.local_tasks() != spec.tasks():
      raise cluster.ClusterError(
        f"{spec.where}`--private_network` needs all tasks on this machine."
        f" Received: {', '.join(spec.address(task) for task in spec.tasks())}."
      )
    isolation.leave_networks()
  if options.is_in_graph and not spec.num_tasks("chief"):
    document = json.loads(spec.to_json())
    document["cluster"]["chief"] = ["localhost:0"]
    spec = cluster.parse(document, spec.source)
  spec = cluster.resolve_ports(spec)
  for task in spec.local_tasks():
    cluster.check_port_free(spec.address(task))
  options = dataclasses.replace(options, spec=spec)
  # The chief says the rest, whoever starts it.
  _say(run_options.describe_cluster(spec))
  with contextlib.closing(_Echo()) as echo:
    return run_tasks(
      spec,
      lambda path, task: command(path, task, options.threads),
      preloads=True,
      log_dir=os.path.join(options.train_dir, "logs"),
      echo=echo,
      max_restarts=3,
    )


def run_tasks(
  spec: cluster.ClusterSpec,
  command: Callable[[str, cluster.Task], Sequence[str]],
  *,
  preloads: bool,
  variables: Mapping[str, str] | None = None,
  **settings: Any,
) -> int:
  """Starts all tasks of this machine and waits until they end.

  Args:
    spec: The cluster, without port 0.
    command: A function of (path of a file with the cluster spec, task). It
      returns the command line that starts the task.
    preloads: Whether TensorFlow is imported only once for all tasks: in a
      process from which the tasks are forked.
    variables: Environment variables of the tasks, in addition to those of this
      process.
    **settings: Other arguments of `LocalCluster`.

  Returns:
    An exit status. 0 if all tasks succeeded, otherwise that of the first task
    that failed. If a signal interrupted this process, 128 + its number.
  """
  environ = {**noise.environ(), **(variables or {})}
  with (
    interrupts.sigterm_raises(),
    tempfile.TemporaryDirectory() as directory,
    fork_server.ForkServer(environ) as server,
  ):
    if settings.get("log_dir") is not None:  # Kept for `tf_replicas.status`.
      directory = os.fspath(settings["log_dir"])
      os.makedirs(directory, exist_ok=True)
    path = os.path.join(directory, "cluster.json")
    pathlib.Path(path).write_text(spec.to_json(), encoding="utf-8")
    if preloads:
      settings["popen"] = server.popen
    tasks = local_cluster.LocalCluster(
      spec, functools.partial(command, path), environ=environ, **settings
    )
    with tasks:
      try:
        tasks.start()
        return tasks.wait()
      except KeyboardInterrupt as interrupt:
        _say("[launcher] interrupted; ending all tasks")
        return _status(interrupt)


def local_spec(
  given: cluster.ClusterSpec | str | None,
  *,
  ps: int,
  workers: int,
  chief: bool,
  needs_all: bool,
  prefix: str = "",
) -> cluster.ClusterSpec:
  """Makes the spec of a cluster on this machine, or completes a given one.

  Args:
    given: A cluster spec, or the path of its file. None: a new spec is made.
    ps: The number of parameter servers of a new spec.
    workers: The number of workers of a new spec.
    chief: Whether a new spec has a separate task for the chief.
    needs_all: Whether all tasks of a given spec must be on this machine. If
      False, one such task is enough.
    prefix: The text before the names `ps` and `workers` in error messages, such
      as "--" for flags.

  Returns:
    The cluster spec. Each port 0 is replaced by a free port.

  Raises:
    cluster.ClusterError: If `ps` or `workers` is less than 1, or `given` is
      invalid or has too few tasks on this machine.
  """
  if given is None:
    for name, value in (("ps", ps), ("workers", workers)):
      if not isinstance(value, int) or value < 1:
        raise cluster.ClusterError(
          f"`{prefix}{name}` must be at least 1. Received: {value!r}."
        )
    jobs = {"ps": ps, "worker": workers, "chief": int(chief)}
    jobs = {job: ["localhost:0"] * n for job, n in jobs.items() if n}
    spec = cluster.parse({"cluster": jobs})
  else:
    is_spec = isinstance(given, cluster.ClusterSpec)
    spec = given if is_spec else cluster.load(given)
  local, tasks = spec.local_tasks(), spec.tasks()
  if not spec.is_distributed or not local or (needs_all and local != tasks):
    found = [spec.address(task) for task in tasks] if spec.jobs else []
    rule = (
      "a task at an address of this machine: correct the addresses, or run this"
      " program on one of their machines"
    )
    if needs_all:
      rule = "all its tasks on this machine, and at least two"
    raise cluster.ClusterError(
      f"{spec.where}`cluster` must have {rule}. Received:"
      f" {', '.join(found) or 'no tasks'}."
    )
  return cluster.resolve_ports(spec)


def _status(interrupt: KeyboardInterrupt) -> int:
  """Returns the exit status of a process that was interrupted.

  It is 128 plus the number of the signal, SIGTERM or SIGINT (Ctrl-C).
  """
  is_sigterm = interrupt.args == ("SIGTERM",)
  return 128 + (signal.SIGTERM if is_sigterm else signal.SIGINT)


def echo(line: str) -> None:
  """Prints a line of a task's output, except routine lines of TensorFlow."""
  if not noise.is_noise(line):
    _say(line)


class _Echo:
  """Prints the output of all tasks, and below it a progress bar on a terminal.

  It is called with each line.
  """

  def __init__(self):
    self._console = console.Console()

  def __call__(self, line: str) -> None:
    """Prints a line of a task's output, and moves the progress bar.

    It does not print routine lines of TensorFlow, which remain in the log files
    of the tasks.
    """
    if noise.is_noise(line):
      return
    self._console.log(line)
    if start := _START.search(line):
      self._console.open_bar(*map(int, start.groups()))
    elif progress := _PROGRESS.search(line):
      step, *notes = progress.groups()
      self._console.move_bar(int(step), ", ".join(filter(None, notes)))

  def close(self) -> None:
    """Ends the progress bar. Its last state stays visible on the terminal."""
    self._console.close_bar()


def _say(line: str) -> None:
  print(line, flush=True)
