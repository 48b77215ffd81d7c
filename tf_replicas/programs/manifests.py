"""Prints the Kubernetes manifests for all tasks of a cluster spec, as YAML.

  python -m tf_replicas.kubernetes --cluster_spec=FILE --image=IMAGE \\
      --name=NAME -- python train.py [arguments] | kubectl apply -f -

The cluster spec says how many tasks there are, and their GPUs. Its addresses
are replaced by host names inside Kubernetes. The manifests are:

* a ConfigMap with the cluster spec that the tasks read;
* a headless Service, which gives task 1 of `worker` the host name
  `NAME-worker-1.NAME`;
* a NetworkPolicy, by which only tasks of the training reach its tasks;
* a Job for each task, so that tasks may have different resources and a failed
  task is started again under the same name.

A task finds its role in the environment variables of `cluster.environment`.
"""

import argparse
import dataclasses
import re
import shlex
import sys
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import NoReturn

import yaml

from tf_replicas import cluster
from tf_replicas.cluster import environment
from tf_replicas.runtime import processes

_EVALUATOR = cluster.Task("evaluator", 0)
_DIRECTORY, _FILE = "/etc/tf_replicas", "cluster.json"
_CONTAINER = "task"
# The longest name of a host.
_MAX_LENGTH = 63
# The exit status of a task that was started with a mistake.
_USAGE = 2


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    "python -m tf_replicas.kubernetes",
    usage="%(prog)s --cluster_spec=FILE --image=IMAGE --name=NAME [options]"
    " -- COMMAND",
    description="Prints the manifests of a training. COMMAND is what every task"
    " runs, such as `python train.py`.",
    allow_abbrev=False,
  )
  for name, text in (
    ("cluster_spec", "the tasks and their GPUs, as a cluster-spec file"),
    ("image", "image of the containers"),
    ("name", "name of the training, unique in its Kubernetes namespace"),
  ):
    parser.add_argument(f"--{name}", required=True, help=text)
  for name, default, text in (
    ("port", 2222, "port that every task listens on"),
    ("max_restarts", 3, "how often a task that failed is started again"),
  ):
    parser.add_argument(f"--{name}", type=int, default=default, help=text)
  for name, text in (
    ("cpu", "CPUs requested for each task, such as 4"),
    ("memory", "memory requested for each task, such as 8Gi"),
    ("volume", "a PersistentVolumeClaim and its path, such as runs:/runs"),
    ("evaluator", "a command to run in an additional task"),
  ):
    parser.add_argument(f"--{name}", help=text)
  return parser


def manifests(argv: Sequence[str]) -> list[dict]:
  """Makes the Kubernetes manifests of a training.

  Args:
    argv: The command line, without the name of the program.

  Returns:
    A list of manifests, as dicts that JSON can represent: one ConfigMap, one
    Service, one NetworkPolicy, and one Job for each task.

  Raises:
    cluster.ClusterError: If the command line or the cluster spec is invalid.
  """
  options, command = _options(argv)
  spec = _in_cluster(_load(options.cluster_spec), options)
  tasks = {task: command for task in spec.tasks()}
  if options.evaluator:
    try:
      tasks[_EVALUATOR] = shlex.split(options.evaluator)
    except ValueError as error:
      raise cluster.ClusterError(
        f"`--evaluator` must be a command line ({error}). Received:"
        f" {options.evaluator}."
      ) from None
  _check_name(options.name, tasks)
  labels = _labels(options)
  return [
    {
      "apiVersion": "v1",
      "kind": "ConfigMap",
      "metadata": {"name": options.name, "labels": labels},
      "data": {_FILE: spec.to_json() + "\n"},
    },
    {
      "apiVersion": "v1",
      "kind": "Service",
      "metadata": {"name": options.name, "labels": labels},
      "spec": {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": labels,
        "ports": [{"name": "grpc", "port": options.port}],
      },
    },
    {
      "apiVersion": "networking.k8s.io/v1",
      "kind": "NetworkPolicy",
      "metadata": {"name": options.name, "labels": labels},
      "spec": {
        "podSelector": {"matchLabels": labels},
        "policyTypes": ["Ingress"],
        "ingress": [
          {
            "from": [{"podSelector": {"matchLabels": labels}}],
            "ports": [{"protocol": "TCP", "port": options.port}],
          }
        ],
      },
    },
    *[_job(task, spec, tasks[task], options) for task in tasks],
  ]


def _options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
  """Parses the command line of `python -m tf_replicas.kubernetes`.

  Args:
    argv: The command line, without the name of the program.

  Returns:
    The options, and the arguments after `--`: the command that every task runs.

  Raises:
    cluster.ClusterError: If the command is missing or an option is invalid.
  """
  argv = list(argv)
  end = argv.index("--") if "--" in argv else len(argv)
  options, command = _parser().parse_args(argv[:end]), argv[end + 1 :]
  if not command:
    raise cluster.ClusterError(
      "the command of the tasks must follow `--`. Received: none."
    )
  for name, least, most in (("port", 1, 65535), ("max_restarts", 0, 1000)):
    value = getattr(options, name)
    if not least <= value <= most:
      raise cluster.ClusterError(
        f"`--{name}` must be in [{least}, {most}]. Received: {value}."
      )
  if options.volume and not re.fullmatch(r"[^:]+:/.*", options.volume):
    raise cluster.ClusterError(
      "`--volume` must be a claim and a path, such as runs:/runs. Received:"
      f" {options.volume}."
    )
  return options, command


def _load(path: str) -> cluster.ClusterSpec:
  spec = cluster.load(path)
  if not spec.is_distributed:
    raise cluster.ClusterError(
      f"{spec.where}`cluster` must have tasks. Received: none."
    )
  return spec


def _check_name(name: str, tasks: Iterable[cluster.Task]) -> None:
  """Checks the name of a training, with which its tasks' host names begin.

  Args:
    name: The name of the training.
    tasks: The tasks of the training.

  Raises:
    cluster.ClusterError: If `name` cannot be part of a host name, or if a host
      name would be too long.
  """
  longest = max((_host(name, task) for task in tasks), key=len)
  pattern = "[a-z]([-a-z0-9]*[a-z0-9])?"
  if not re.fullmatch(pattern, name) or len(longest) > _MAX_LENGTH:
    raise cluster.ClusterError(
      "`--name` must have lower-case letters, digits and hyphens only, begin"
      " with a letter, not end with a hyphen, and be short enough for"
      f" {longest!r} to have at most {_MAX_LENGTH} characters. Received:"
      f" {name!r}."
    )


def _in_cluster(
  spec: cluster.ClusterSpec, options: argparse.Namespace
) -> cluster.ClusterSpec:
  """Converts the user's cluster spec to the one that the tasks read.

  The addresses become host names inside Kubernetes. The GPUs of each task are
  numbered from 0, since a container sees only the GPUs of its task.

  Args:
    spec: The user's cluster spec.
    options: The options of the command line.
  """
  name = options.name
  addresses = {
    task: f"{_host(name, task)}.{name}:{options.port}" for task in spec.tasks()
  }
  gpus = {f"{t.job}:{t.index}": spec.gpus(t) or () for t in spec.tasks()}
  return dataclasses.replace(
    spec.with_addresses(addresses),
    devices={key: tuple(range(len(value))) for key, value in gpus.items()},
  )


def _host(name: str, task: cluster.Task) -> str:
  return f"{name}-{task.job}-{task.index}"


def _labels(options: argparse.Namespace) -> dict[str, str]:
  return {
    "app.kubernetes.io/name": "tf-replicas",
    "app.kubernetes.io/instance": options.name,
  }


def _job(
  task: cluster.Task,
  spec: cluster.ClusterSpec,
  command: list[str],
  options: argparse.Namespace,
) -> dict:
  """Makes the manifest of the Kubernetes Job that runs one task.

  Args:
    task: The task.
    spec: The cluster spec inside Kubernetes.
    command: The command that the task runs.
    options: The options of the command line.
  """
  host = _host(options.name, task)
  labels = {**_labels(options), "app.kubernetes.io/component": task.job}
  return {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": host, "labels": labels},
    "spec": {
      "backoffLimit": options.max_restarts,
      "podFailurePolicy": {
        "rules": [
          {
            "action": "FailJob",
            "onExitCodes": {
              "containerName": _CONTAINER,
              "operator": "In",
              "values": [_USAGE],
            },
          },
          # An evicted pod is replaced, however often.
          {
            "action": "Ignore",
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
          },
        ]
      },
      "template": {
        "metadata": {"labels": labels},
        "spec": {
          "hostname": host,
          "subdomain": options.name,
          # The Job makes a new pod, and keeps the log of this one.
          "restartPolicy": "Never",
          # Otherwise the command would be process 1 of its container, and
          # SIGTERM would not end a worker: the kernel ignores signals to
          # process 1 for which it has no handler.
          "shareProcessNamespace": True,
          "containers": [_container(task, spec, command, options)],
          "volumes": list(_volumes(options)),
        },
      },
    },
  }


def _container(
  task: cluster.Task,
  spec: cluster.ClusterSpec,
  command: list[str],
  options: argparse.Namespace,
) -> dict:
  requests = {"cpu": options.cpu, "memory": options.memory}
  resources = {"requests": {k: v for k, v in requests.items() if v}}
  if gpus := spec.gpus(task):
    resources["limits"] = {"nvidia.com/gpu": len(gpus)}
  variables = {
    environment.CLUSTER_SPEC: f"{_DIRECTORY}/{_FILE}",
    environment.TASK: f"{task.job}:{task.index}",
    "PYTHONUNBUFFERED": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
  }
  mounts = [{"name": "cluster", "mountPath": _DIRECTORY, "readOnly": True}]
  if options.volume:
    path = options.volume.partition(":")[2]
    mounts.append({"name": "volume", "mountPath": path})
  return {
    "name": _CONTAINER,
    "image": options.image,
    "command": command,
    "env": [{"name": k, "value": v} for k, v in variables.items()],
    "ports": [{"name": "grpc", "containerPort": options.port}],
    "resources": resources,
    "volumeMounts": mounts,
  }


def _volumes(options: argparse.Namespace) -> Iterator[dict]:
  yield {"name": "cluster", "configMap": {"name": options.name}}
  if options.volume:
    claim = options.volume.partition(":")[0]
    yield {"name": "volume", "persistentVolumeClaim": {"claimName": claim}}


class _Dumper(yaml.SafeDumper):
  """A YAML dumper whose output is easy to read.

  It writes strings of several lines as blocks, and uses no aliases.
  """

  def ignore_aliases(self, data) -> bool:
    """Returns True: an object that occurs again is written in full again."""
    return True


def _represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
  style = "|" if "\n" in text else None
  return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent)


def main(argv: list[str] | None = None) -> NoReturn:
  """Prints the Kubernetes manifests as YAML and ends the process.

  The exit status is 0, or 2 if the arguments are invalid.

  Args:
    argv: The command line, without the name of the program. None: that of this
      process.
  """
  with processes.one_line_errors((cluster.ClusterError,)):
    documents = manifests(sys.argv[1:] if argv is None else argv)
    yaml.dump_all(documents, sys.stdout, Dumper=_Dumper, sort_keys=False)
  sys.exit(0)
