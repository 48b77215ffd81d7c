"""Defines the cluster spec: the tasks, their addresses and their devices.

A cluster is a set of tasks (processes). A job is a set of tasks with the same
role: `ps` (parameter servers), `worker`, `chief`. A cluster spec is a JSON
document with up to four sections:

    {
      "cluster":   {"ps": ["localhost:0"], "worker": ["localhost:0"]},
      "devices":   {"worker": {"gpus": [0]}, "worker:1": {"gpus": [1, 2]}},
      "variables": {"on": "ps", "placement": "greedy"},
      "layers":    {"conv*": 0, "local*": 1}
    }

One more key, `"allow_public_addresses": true`, accepts addresses in public
networks. The map under "cluster" alone is a valid document too, and so is a
whole TF_CONFIG. A document without a cluster describes one process, which is
called worker 0 (`"devices": {"worker": {"gpus": [0, 1]}}`). Port 0 stands for a
free port, which `resolve_ports` chooses when the whole cluster is started on
one machine. The rules for documents are in `tf_replicas.cluster.validation`.
This module does not import TensorFlow, so that a launcher starts at once.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping

from tf_replicas.cluster import addresses
from tf_replicas.cluster import validation

ClusterError = validation.ClusterError


@dataclasses.dataclass(frozen=True, order=True)
class Task:
  """One process of the cluster: the task number `index` of the job `job`."""

  job: str
  index: int

  def __str__(self) -> str:
    return f"{self.job} {self.index}"


@dataclasses.dataclass(frozen=True)
class VariablesSpec:
  """Says where the variables of the model live: the section `variables`.

  Attributes:
    on: "ps": on the parameter servers. "mirrored": each device that trains has
      a copy of every variable, and all copies stay equal. "cpu" or "gpu", for
      one process: there is one copy of each variable, in CPU memory or on the
      process's first GPU, for all towers (copies of the model, one on each of
      its devices).
    placement: How variables are distributed over several parameter servers:
      "round_robin", "greedy" (by bytes) or "partitioned" (large variables are
      split into shards).
    min_shard_bytes: The smallest mean size, in bytes, of the shards of a
      partitioned variable.
    num_shards: The largest number of shards of a partitioned variable; None:
      the number of parameter servers.
  """

  on: str = "cpu"
  placement: str = "greedy"
  min_shard_bytes: int = 262144
  num_shards: int | None = None


@dataclasses.dataclass(frozen=True)
class ClusterSpec:
  """Describes a cluster: a checked spec, which `load` and `parse` return.

  Attributes:
    jobs: Maps each job to a map from task index to "host:port". Evaluators are
      not in the map, as they run no server. It is empty if the spec describes
      one process.
    devices: Maps "job" or "job:index" to the numbers of the GPUs that the tasks
      may use; see `gpus`.
    variables: Where the variables live.
    layers: Maps a pattern of layer names to the number of a device within a
      tower (a copy of the model on its devices).
    allow_public_addresses: Whether addresses in public networks are accepted;
      see `exposure.check_private`.
    max_workers: The largest number of workers that may train at the same time,
      if workers that the spec does not list may join the training; 0 if none
      may join. It is not part of the document; `admit` sets it.
    source: What error messages call the document: a file name, "TF_CONFIG", or
      "" if it has no name.
  """

  jobs: Mapping[str, Mapping[int, str]]
  devices: Mapping[str, tuple[int, ...]] = dataclasses.field(
    default_factory=dict
  )
  variables: VariablesSpec = VariablesSpec()
  layers: Mapping[str, int] = dataclasses.field(default_factory=dict)
  allow_public_addresses: bool = False
  max_workers: int = 0
  source: str = dataclasses.field(default="", compare=False)

  @property
  def is_distributed(self) -> bool:
    """Whether the spec describes a cluster, and not a single process."""
    return bool(self.jobs)

  @property
  def chief(self) -> Task:
    """Task that initializes variables, and writes checkpoints and summaries.

    It is the task `chief` if there is one, else worker 0. A spec may list only
    this process and the ps tasks; then worker 0 may be the chief although
    `tasks` does not list it.
    """
    tasks = self.tasks()
    if "chief" in self.jobs:
      return Task("chief", 0)
    return tasks[0] if len(tasks) == 1 else Task("worker", 0)

  @property
  def replicas(self) -> tuple[Task, ...]:
    """Tasks that train in between-graph mode, the chief first if there is one.

    In this mode, every worker is a client that builds and runs its own graph.
    Workers that may join, but that the spec does not list, are included.
    """
    workers = sorted((*self.tasks("worker"), *self.joining))
    return (*self.tasks("chief"), *workers)

  @property
  def joining(self) -> tuple[Task, ...]:
    """Workers that may join the training, but that the spec does not list."""
    listed = self.jobs.get("worker", {})
    numbers = (i for i in range(self.max_workers) if i not in listed)
    return tuple(Task("worker", i) for i in numbers)

  def tasks(self, job: str | None = None) -> tuple[Task, ...]:
    """Returns the tasks of `job`, or of all jobs if `job` is None.

    Jobs are in the order of the document, and the tasks of a job are in
    ascending order of index.
    """
    jobs = self.jobs or {"worker": {0: ""}}
    return tuple(
      Task(name, index)
      for name, indices in jobs.items()
      for index in indices
      if job in (None, name)
    )

  def num_tasks(self, job: str) -> int:
    """Returns the number of tasks of `job`, or 0 if there is no such job."""
    return len(self.tasks(job))

  def address(self, task: Task) -> str:
    """Returns the address "host:port" of `task`.

    Raises:
      ClusterError: If the cluster has no such task.
    """
    try:
      return self.jobs[task.job][task.index]
    except KeyError:
      raise _no_such_task(self, task) from None

  def addresses(self, job: str) -> list[str]:
    """Returns the addresses of the tasks of `job`; [] if it has no tasks."""
    return list(self.jobs.get(job, {}).values())

  def gpus(self, task: Task) -> tuple[int, ...] | None:
    """Returns the numbers of the GPUs that `task` may use.

    The entry of a task in `devices`, such as "worker:1", overrides the entry of
    its job.

    Returns:
      The numbers. If there is no entry: () for a ps task, which then uses no
      GPU, and None for other tasks.
    """
    default = () if task.job == "ps" else None
    by_job = self.devices.get(task.job, default)
    return self.devices.get(f"{task.job}:{task.index}", by_job)

  @property
  def where(self) -> str:
    """Prefix of error messages about this spec, such as "spec.json: ".

    It is empty if the document has no name.
    """
    return f"{self.source}: " if self.source else ""

  def local_tasks(self, own: Task | None = None) -> tuple[Task, ...]:
    """Returns the tasks on this machine.

    These are the tasks whose hosts `addresses.is_local` finds here.

    Args:
      own: A task that is known to be on this machine, such as that of this
        process. All tasks with the same host are then on this machine too.
        None: no task is known.
    """
    if not self.is_distributed:
      return self.tasks()

    def host(task: Task) -> str:
      found = addresses.split(self.address(task))
      assert found is not None
      return addresses.canonical_host(found[0])

    known = None if own is None else host(own)
    return tuple(
      task
      for task in self.tasks()
      if host(task) == known or addresses.is_local(host(task))
    )

  def with_addresses(self, changed: Mapping[Task, str]) -> "ClusterSpec":
    """Returns a copy of the spec in which some tasks have other addresses.

    Args:
      changed: Maps tasks of the cluster to their new addresses "host:port".

    Raises:
      ClusterError: If there is no such task, or an address is not valid.
    """
    jobs = {job: dict(tasks) for job, tasks in self.jobs.items()}
    for task, address in changed.items():
      self.address(task)
      jobs[task.job][task.index] = address
    try:
      jobs = validation.check_jobs(jobs, "cluster")
    except ClusterError as error:
      raise _with_source(error, self.source) from None
    return dataclasses.replace(self, jobs=jobs)

  def admit(self, max_workers: int | None) -> "ClusterSpec":
    """Returns a copy of the spec that lets further workers join the training.

    The workers that may join have the indices below `max_workers` that the spec
    does not list.

    Args:
      max_workers: The largest number of workers. All tasks must be given the
        same number. None: no further workers may join, and this spec itself is
        returned.

    Raises:
      ClusterError: If the spec has no parameter servers, or lists more than
        `max_workers` workers.
    """
    if max_workers is None:
      return self
    if not self.num_tasks("ps"):
      raise _mistake(
        self,
        "`max_workers` needs variables on parameter servers, which workers can"
        " join at any time",
        max_workers,
      )
    least = self.num_tasks("worker")
    if not isinstance(max_workers, int) or max_workers < max(least, 1):
      rule = (
        f"`max_workers` must be at least the {least} workers of the cluster"
      )
      raise _mistake(self, rule, max_workers)
    return dataclasses.replace(self, max_workers=max_workers)

  def with_joined(
    self, task: Task, address: str | None = None
  ) -> "ClusterSpec":
    """Returns a copy of the spec that also lists `task`, if `task` is joining.

    `task` is the task of this process. If it is one of `joining`, the copy
    lists it. Otherwise this spec itself is returned.

    Args:
      task: The task of this process.
      address: The address of the task. None: a free port of this machine, with
        the host name by which parameter servers can reach it.
    """
    if task not in self.joining:
      return self
    if address is None:
      host = addresses.host_toward(self.addresses("ps")[0])
      (port,) = addresses.free_ports(1, taken=set())
      address = f"{host}:{port}"
    workers = {**self.jobs.get("worker", {}), task.index: address}
    jobs = {**self.jobs, "worker": dict(sorted(workers.items()))}
    return dataclasses.replace(self, jobs=jobs)

  def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
    """Returns the jobs in the form that `tf.train.ClusterSpec` takes.

    Returns:
      Maps each job to the list of its addresses. If the spec lists only some
      tasks of a job, maps the job to a map from task index to address instead.
    """
    return {
      job: list(ts.values()) if list(ts) == [*range(len(ts))] else dict(ts)
      for job, ts in self.jobs.items()
    }

  def tf_config(self, task: Task) -> str:
    """Returns the value of TF_CONFIG for the process of a task.

    It contains only what TensorFlow knows, `cluster` and `task`. Devices,
    variables and layers are left out.

    Args:
      task: A task of the cluster, or an evaluator.

    Raises:
      ClusterError: If `task` is neither.
    """
    if task.job != "evaluator" and task not in self.tasks():
      raise _no_such_task(self, task)
    this = {"type": task.job, "index": task.index}
    return json.dumps({"cluster": self.as_dict(), "task": this})

  def to_json(self) -> str:
    """Returns this spec as a JSON document, which `loads` reads again."""
    devices = {key: {"gpus": list(gpus)} for key, gpus in self.devices.items()}
    variables = dataclasses.asdict(self.variables)
    if self.variables.on != "ps":
      variables = {"on": self.variables.on}
    document = {
      "cluster": self.as_dict(),
      "devices": devices,
      "variables": variables,
      "layers": dict(self.layers),
    }
    if self.allow_public_addresses:
      document[validation.ALLOW_PUBLIC] = True
    return json.dumps(document, indent=2)


# The specs that the package holds, which `load` finds by name.
_PACKAGED = pathlib.Path(__file__).parent.parent / "cluster_specs"


def load(path: str | os.PathLike[str]) -> ClusterSpec:
  """Reads the cluster spec in a file.

  Args:
    path: The path of a file, or the name of a spec that the package contains,
      such as `local_1ps_2workers`. If both exist, the file is read.

  Returns:
    The checked spec.

  Raises:
    ClusterError: If the file cannot be read or is not a valid cluster spec.
  """
  source = os.fspath(path)
  if source.isidentifier() and not os.path.exists(source):
    path = _PACKAGED / f"{source}.json"
    if not path.is_file():
      names = ", ".join(sorted(file.stem for file in _PACKAGED.glob("*.json")))
      raise ClusterError(
        f"a cluster spec must be a file, or one of {names}. Received: {source}."
      )
  try:
    text = pathlib.Path(path).read_text(encoding="utf-8-sig")
  except (OSError, ValueError) as error:  # ValueError: not UTF-8.
    reason = getattr(error, "strerror", None) or error
    rule = f"must be a readable text file ({reason})"
    name = source if source.isprintable() else repr(source)
    raise ClusterError(f"{name}: {rule}") from None
  return loads(text, source)


def loads(text: str, source: str = "") -> ClusterSpec:
  """Reads the cluster spec in `text`, a JSON document.

  Args:
    text: The document.
    source: What error messages call the document, for instance a file name.

  Returns:
    The checked spec.

  Raises:
    ClusterError: If `text` is not a valid cluster spec.
  """
  return _parse_text(text, source)[0]


def parse(document: Mapping[str, object], source: str = "") -> ClusterSpec:
  """Checks a document decoded from JSON, and makes a `ClusterSpec` of it.

  Args:
    document: A cluster spec, a map from job to addresses, or a TF_CONFIG.
    source: What error messages call the document, for instance a file name.

  Returns:
    The checked spec.

  Raises:
    ClusterError: If the document is not valid. The message names the place of
      the first mistake, the rule and the value.
  """
  return _parse(document, source)[0]


def from_tf_config(
  environ: Mapping[str, str],
) -> tuple[ClusterSpec, Task] | None:
  """Reads the cluster, and the task of this process, from TF_CONFIG.

  The job `master` is renamed to `chief`. An evaluator may be the task of this
  process, but is never part of the cluster. Keys that platforms add
  (`environment`, `rpc_layer`, ...) are ignored.

  Args:
    environ: The environment variables.

  Returns:
    The cluster and the task. None if TF_CONFIG is unset or empty, or describes
    a single process: it has no cluster, and its task is not an evaluator.

  Raises:
    ClusterError: If TF_CONFIG is not a valid document, or has a cluster but no
      task.
  """
  source = "TF_CONFIG"
  text = environ.get(source, "").strip()
  if not text:
    return None
  spec, task = _parse_text(text, source)
  if not spec.is_distributed and (task is None or task.job != "evaluator"):
    return None
  if task is None:
    raise ClusterError(
      f'{source}: must have the key "task", with the "type" and the "index" of'
      " this process"
    )
  _check_ports_chosen(spec, task)
  return spec, task


def task_from_flags(
  spec: ClusterSpec, job_name: str, task_index: int | None = None
) -> Task:
  """Returns the task of this process, which its flags name.

  Args:
    spec: The cluster.
    job_name: A job of the cluster, or "evaluator".
    task_index: The index of the task within the job. It may be None if the job
      has only one task, or for an evaluator.

  Raises:
    ClusterError: If the cluster has no such task. Also if it has several tasks
      and one of them has port 0: other processes could not find that task.
  """
  job = validation.canonical_job(job_name)
  if job == "evaluator":  # It stands in no spec.
    if task_index is not None and task_index < 0:
      raise _mistake(spec, "`task_index` must be >= 0", task_index)
    return Task(job, task_index or 0)
  tasks = (*spec.tasks(job), *spec.joining)
  indices = [task.index for task in tasks if task.job == job]
  if not indices:
    jobs = dict.fromkeys(task.job for task in spec.tasks())
    rule = f"`job_name` must be one of {validation.quoted(jobs)}"
    raise _mistake(spec, rule, job_name)
  if task_index is None and len(indices) == 1:
    task_index = indices[0]
  if task_index not in indices:
    raise _mistake(
      spec,
      f"`task_index` must be one of {', '.join(map(str, indices))} for "
      f'job "{job}"',
      task_index,
    )
  task = Task(job, task_index)
  _check_ports_chosen(spec, task)
  return task


def resolve_ports(spec: ClusterSpec) -> ClusterSpec:
  """Returns a copy of the spec with a free port in the place of each port 0.

  The ports are free on this machine, and differ from each other and from the
  ports of all other tasks on this machine. Another program may still take a
  port before the task's server uses it; see `check_port_free`.

  Raises:
    ClusterError: If a task on another machine has port 0.
  """
  unresolved = _tasks_with_port_0(spec)
  local_tasks = spec.local_tasks() if unresolved else ()
  for task in unresolved:
    if task not in local_tasks:
      raise _mistake(
        spec,
        f"cluster.{task.job}[{task.index}]: must have a port other "
        "than 0, as its host is another machine",
        spec.address(task),
      )
  taken = {addresses.split(spec.address(task))[1] for task in local_tasks}
  ports = addresses.free_ports(len(unresolved), taken=taken)
  return spec.with_addresses(
    {
      task: addresses.with_port(spec.address(task), port)
      for task, port in zip(unresolved, ports, strict=True)
    }
  )


def check_port_free(address: str) -> None:
  """Checks that a server can be started on the port of `address`.

  Called before a TensorFlow server is started, as the error message of
  TensorFlow 2.21 says only "Could not start gRPC server".

  Args:
    address: The address "host:port" of a task on this machine.

  Raises:
    ClusterError: If the address is invalid, its port is in use, or this user
      may not use it.
  """
  host_and_port = addresses.split(address)
  if host_and_port is None:
    raise validation.mistake("", f"`address` {addresses.RULE}", address)
  try:
    addresses.bound_socket(host_and_port[1]).close()
  except OSError as error:
    raise validation.mistake(
      "", f"`address` must have a port that is free ({error.strerror})", address
    ) from None


def _parse(document: object, source: str) -> tuple[ClusterSpec, Task | None]:
  try:
    parts = validation.check(document)
  except ClusterError as error:
    raise _with_source(error, source) from None
  spec = ClusterSpec(
    jobs=parts.jobs,
    devices=parts.devices,
    layers=parts.layers,
    variables=VariablesSpec(**parts.variables),
    allow_public_addresses=parts.allow_public_addresses,
    source=source,
  )
  return spec, parts.task and Task(*parts.task)


def _parse_text(text: str, source: str) -> tuple[ClusterSpec, Task | None]:
  try:
    document = validation.decode(text)
  except ClusterError as error:
    raise _with_source(error, source) from None
  return _parse(document, source)


def _with_source(error: ClusterError, source: str) -> ClusterError:
  return ClusterError(f"{source}: {error}") if source else error


def _mistake(spec: ClusterSpec, rule: str, received: object) -> ClusterError:
  error = validation.mistake("", rule, received)
  return _with_source(error, spec.source)


def _no_such_task(spec: ClusterSpec, task: Task) -> ClusterError:
  return _mistake(spec, "`task` must be a task of the cluster", str(task))


def _check_ports_chosen(spec: ClusterSpec, task: Task) -> None:
  """Checks that no task of a cluster of several tasks has port 0.

  Called where tasks are started one by one. If a task chose a free port for
  itself, the other tasks could not find it.

  Args:
    spec: The cluster.
    task: The task of this process. Nothing is checked for an evaluator, which
      does not talk to the other tasks.

  Raises:
    ClusterError: If a task has port 0.
  """
  if len(spec.tasks()) > 1 and task.job != "evaluator":
    for unknown in _tasks_with_port_0(spec):
      raise _mistake(
        spec,
        f"cluster.{unknown.job}[{unknown.index}]: must have a port "
        "other than 0 when tasks are started one by one",
        spec.address(unknown),
      )


def _tasks_with_port_0(spec: ClusterSpec) -> list[Task]:
  return [
    Task(job, index)
    for job, tasks in spec.jobs.items()
    for index, address in tasks.items()
    if addresses.split(address)[1] == 0
  ]
