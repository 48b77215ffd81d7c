"""Finds the cluster of a Slurm job step, and the task of this process in it.

`srun` numbers the processes of a step; the number of a process is its rank. The
first `TF_REPLICAS_NUM_PS` processes (default 1) are the parameter servers. All
others are workers, and the first worker is the chief. Without parameter
servers, the variables are mirrored: every worker holds all of them.

Process r listens on the port P + r of its node, where P is
`TF_REPLICAS_BASE_PORT`. By default P follows from the number of the job, so
that 200 successive jobs may share a node: P is 12000 + 100 * (job % 200). These
ports are below those that Linux gives to outgoing connections.
"""

import re
from collections.abc import Mapping

from tf_replicas.cluster import spec as cluster_spec
from tf_replicas.cluster import validation

NUM_PS = "TF_REPLICAS_NUM_PS"
BASE_PORT = "TF_REPLICAS_BASE_PORT"
# In a batch script, which is no step, Slurm sets only `SLURM_NTASKS`.
_NUM_TASKS = "SLURM_STEP_NUM_TASKS"
_DISTRIBUTION = "SLURM_DISTRIBUTION"
_PORTS_FROM, _PORTS_PER_JOB, _JOBS_PER_NODE = 12000, 100, 200


def role(
  environ: Mapping[str, str],
) -> tuple[cluster_spec.ClusterSpec, cluster_spec.Task] | None:
  """Reads the cluster and the task of this process from Slurm's variables.

  Args:
    environ: The environment variables.

  Returns:
    The cluster and the task; None if this process does not belong to a Slurm
    step of several processes.

  Raises:
    ClusterError: If a variable is missing or malformed, if there would be no
      worker, or if Slurm distributes the processes over the nodes in an unknown
      order.
  """
  num_tasks = _number(environ, _NUM_TASKS, 1)
  if num_tasks == 1:
    return None
  rank = _number(environ, "SLURM_PROCID")
  num_ps = _number(environ, NUM_PS, 1)
  if num_ps >= num_tasks:
    raise validation.mistake(
      NUM_PS,
      f"must leave at least one of the {num_tasks} processes of the Slurm step"
      " as a worker",
      num_ps,
    )
  job = _number(environ, "SLURM_JOB_ID")
  port = _PORTS_FROM + job % _JOBS_PER_NODE * _PORTS_PER_JOB
  port = _number(environ, BASE_PORT, port)
  if not 0 < port <= 65536 - num_tasks:
    raise validation.mistake(
      BASE_PORT,
      f"must be the first of {num_tasks} successive ports up to 65535",
      port,
    )
  hosts = _hosts(environ, num_tasks, rank)
  addresses = [f"{host}:{port + r}" for r, host in enumerate(hosts)]
  document: dict[str, dict] = {"cluster": {"worker": addresses[num_ps:]}}
  if num_ps:
    document["cluster"]["ps"] = addresses[:num_ps]
  else:
    document["variables"] = {"on": "mirrored"}
  # Each process sees its own only, and counts them from 0.
  if gpus := list(range(_gpus_per_task(environ))):
    tasks = [f"worker:{index}" for index in range(num_tasks - num_ps)]
    document["devices"] = {task: {"gpus": gpus} for task in tasks}
  spec = cluster_spec.parse(document, "Slurm")
  if rank < num_ps:
    return spec, cluster_spec.Task("ps", rank)
  return spec, cluster_spec.Task("worker", rank - num_ps)


def host_names(text: str) -> list[str]:
  """Returns the names in a host list, like `scontrol show hostnames`.

  The program `scontrol` is often missing in a container of a job.

  Args:
    text: A host list of Slurm, such as "login,node[01-03,07]".

  Returns:
    The names, such as ["login", "node01", "node02", "node03", "node07"].
  """
  return [
    name
    for pattern in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", text)
    for name in _expand(pattern)
  ]


def _expand(pattern: str) -> list[str]:
  """Returns the host names that a pattern such as "node[01-03,07]" stands for.

  Outside of brackets the pattern must have no commas.
  """
  match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", pattern)
  if match is None:
    return [pattern]
  prefix, ranges, rest = match.groups()
  names = []
  for numbers in ranges.split(","):
    first, _, last = numbers.partition("-")
    for number in range(int(first), int(last or first) + 1):
      digits = str(number).zfill(len(first))
      names += [f"{prefix}{digits}{end}" for end in _expand(rest)]
  return names


def _hosts(environ: Mapping[str, str], num_tasks: int, rank: int) -> list[str]:
  """Returns the host name of every process of a Slurm step, ordered by rank.

  Args:
    environ: The environment variables.
    num_tasks: The number of processes of the step.
    rank: The rank (number within the step) of this process, whose node is known
      and is compared with the result.

  Raises:
    ClusterError: If a variable of Slurm is missing or malformed, or if the
      processes are distributed over the nodes in an unknown order.
  """
  name = "SLURM_STEP_NODELIST"
  text = _text(environ, name)
  try:
    hosts = host_names(text)
  except ValueError:
    raise validation.mistake(
      name, "must be a host list, such as node[01-03,07]", text
    ) from None
  name = "SLURM_STEP_TASKS_PER_NODE"
  counts: list[int] = []
  for part in _text(environ, name).split(","):
    match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part)
    counts += [int(match[1])] * int(match[2] or 1) if match else []
  if len(counts) != len(hosts) or sum(counts) != num_tasks:
    raise validation.mistake(
      name,
      f"must give the {len(hosts)} nodes of the step {num_tasks} processes in"
      " all, such as 2(x3),1",
      environ[name],
    )
  places = [(i, n) for n, count in enumerate(counts) for i in range(count)]
  if environ.get(_DISTRIBUTION, "").startswith("cyclic"):
    places.sort()
  nodes = [node for _, node in places]
  here = _number(environ, "SLURM_NODEID")
  if rank >= num_tasks or nodes[rank] != here:
    raise validation.mistake(
      _DISTRIBUTION,
      f"must be block or cyclic: process {rank} is on node {here} of the step",
      environ.get(_DISTRIBUTION),
    )
  return [hosts[node] for node in nodes]


def _gpus_per_task(environ: Mapping[str, str]) -> int:
  """Returns the number of GPUs that Slurm gives to each process.

  It is the number of the option `--gpus-per-task`, or 0 without this option.
  """
  name = "SLURM_GPUS_PER_TASK"
  value = environ.get(name, "").rpartition(":")[2]  # After the kind of GPU.
  return _number({name: value}, name, 0)


def _text(environ: Mapping[str, str], name: str) -> str:
  if not environ.get(name):
    raise cluster_spec.ClusterError(
      f"`{name}` must be set in a Slurm step. Received: none."
    )
  return environ[name]


def _number(
  environ: Mapping[str, str], name: str, default: int | None = None
) -> int:
  if default is not None and not environ.get(name):
    return default
  text = _text(environ, name)
  if not text.isdecimal():
    raise validation.mistake(name, "must be a number", text)
  return int(text)
