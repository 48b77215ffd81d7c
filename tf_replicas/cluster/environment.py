"""Reads the cluster, and the task of this process, from its environment.

`python -m tf_replicas.launch` sets `TF_REPLICAS_CLUSTER_SPEC` (the path of a
cluster spec in which all ports are chosen, or the spec itself, as JSON) and
`TF_REPLICAS_TASK` (such as `worker:1`). Other platforms set `TF_CONFIG`, and
Slurm its own variables. Of these three sources, the first that is set counts.
`TF_CONFIG={}` means that the process belongs to no cluster.

`TF_REPLICAS_ALLOW_PUBLIC_ADDRESSES=1` accepts addresses in public networks.

`TF_REPLICAS_MAX_WORKERS` is the largest number of workers, if others than those
of the cluster may join the training. It must be the same for all tasks.

`TF_REPLICAS_TIMELINE` is the directory in which all tasks record their
timelines: what each task did from when to when. If the variable is not set, no
timelines are recorded.
"""

import dataclasses
from collections.abc import Mapping

from tf_replicas.cluster import slurm
from tf_replicas.cluster import spec as cluster_spec

CLUSTER_SPEC = "TF_REPLICAS_CLUSTER_SPEC"
TASK = "TF_REPLICAS_TASK"
TIMELINE = "TF_REPLICAS_TIMELINE"
MAX_WORKERS = "TF_REPLICAS_MAX_WORKERS"
ALLOW_PUBLIC = "TF_REPLICAS_ALLOW_PUBLIC_ADDRESSES"


def role(
  environ: Mapping[str, str],
) -> tuple[cluster_spec.ClusterSpec, cluster_spec.Task] | None:
  """Returns the cluster and the task of this process.

  Args:
    environ: The environment variables.

  Returns:
    The cluster and the task; None if no variable says that this process belongs
    to a cluster.

  Raises:
    ClusterError: If an environment variable is malformed, or if only one of
      `TF_REPLICAS_CLUSTER_SPEC` and `TF_REPLICAS_TASK` is set.
  """
  found = _role(environ)
  if found is None:
    return None
  spec, job, index = found
  spec = settle(spec, environ)
  task = cluster_spec.task_from_flags(spec, job, index)
  return spec.with_joined(task), task


def settle(
  spec: cluster_spec.ClusterSpec, environ: Mapping[str, str]
) -> cluster_spec.ClusterSpec:
  """Returns a cluster spec with the settings of the environment variables.

  These are the largest number of workers, and whether addresses in public
  networks are accepted.

  Args:
    spec: The cluster spec, from whatever source.
    environ: The environment variables.

  Raises:
    ClusterError: If a variable is malformed, or does not fit the cluster.
  """
  max_workers = environ.get(MAX_WORKERS)
  if max_workers:
    if not max_workers.isdecimal():
      raise cluster_spec.ClusterError(
        f"`{MAX_WORKERS}` must be a number of workers. Received:"
        f" {max_workers!r}."
      )
    spec = spec.admit(int(max_workers))
  if environ.get(ALLOW_PUBLIC) == "1":
    spec = dataclasses.replace(spec, allow_public_addresses=True)
  return spec


def _role(
  environ: Mapping[str, str],
) -> tuple[cluster_spec.ClusterSpec, str, int] | None:
  given = [name for name in (CLUSTER_SPEC, TASK) if environ.get(name)]
  if not given:
    if environ.get("TF_CONFIG", "").strip():
      found = cluster_spec.from_tf_config(environ)
    else:
      found = slurm.role(environ)
    if found is None:
      return None
    spec, task = found
    return spec, task.job, task.index
  if len(given) == 1:
    missing = TASK if given == [CLUSTER_SPEC] else CLUSTER_SPEC
    raise cluster_spec.ClusterError(
      f"`{missing}` must be set if `{given[0]}` is. Received: none."
    )
  job, _, index = environ[TASK].partition(":")
  if not index.isdecimal():
    raise cluster_spec.ClusterError(
      f"`{TASK}` must be a job and an index, such as worker:1. Received:"
      f" {environ[TASK]!r}."
    )
  text = environ[CLUSTER_SPEC]
  if text.lstrip().startswith("{"):
    spec = cluster_spec.loads(text, CLUSTER_SPEC)
  else:
    spec = cluster_spec.load(text)
  return spec, job, int(index)
