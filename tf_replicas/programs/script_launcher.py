"""Starts the same script as every task of a cluster on this machine.

  python -m tf_replicas.launch --ps=1 --workers=2 train.py [arguments]

The script calls `tf_replicas.fit`, which finds the role of its task in
environment variables. Each line of output has the name of its task in front.
Ctrl-C ends all tasks.
"""

import argparse
import os
import pathlib
import sys
import tempfile
from typing import NoReturn

from tf_replicas import cluster
from tf_replicas.cluster import environment
from tf_replicas.cluster import local_cluster
from tf_replicas.runtime import noise


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    "python -m tf_replicas.launch",
    description="Starts a script as every task of a cluster on this machine.",
  )
  parser.add_argument("--ps", type=int, default=1, help="parameter servers")
  parser.add_argument("--workers", type=int, default=2, help="workers")
  parser.add_argument(
    "--chief",
    action="store_true",
    help="add a separate task for the chief; in-graph replication needs it",
  )
  parser.add_argument(
    "--cluster_spec",
    help="a cluster-spec file, or the name of one that the package holds, such"
    " as local_1ps_2workers; instead of --ps and --workers",
  )
  parser.add_argument(
    "--log_dir", help="directory for each task's output; default: not kept"
  )
  parser.add_argument(
    "--max_restarts",
    type=int,
    default=3,
    help="how often a worker that a signal killed is started again",
  )
  parser.add_argument(
    "--timeline",
    help="a directory for the timelines of all tasks; see experiments.timeline",
  )
  parser.add_argument("script", help="the Python file to run")
  parser.add_argument("arguments", nargs=argparse.REMAINDER)
  return parser


def _spec(options: argparse.Namespace) -> cluster.ClusterSpec:
  if options.cluster_spec:
    spec = cluster.load(options.cluster_spec)
  else:
    for name in ("ps", "workers"):
      if getattr(options, name) < 1:
        raise cluster.ClusterError(
          f"`--{name}` must be at least 1. Received: {getattr(options, name)}."
        )
    jobs = {
      "ps": ["localhost:0"] * options.ps,
      "worker": ["localhost:0"] * options.workers,
    }
    if options.chief:
      jobs["chief"] = ["localhost:0"]
    spec = cluster.parse({"cluster": jobs})
  if not spec.is_distributed or not spec.local_tasks():
    found = [spec.address(t) for t in spec.tasks()] if spec.jobs else []
    raise cluster.ClusterError(
      f"{spec.where}`cluster` must have a task at an address of this machine:"
      " correct the addresses, or run this program on one of their machines."
      f" Received: {', '.join(found) or 'no tasks'}."
    )
  return cluster.resolve_ports(spec)


def _echo(line: str) -> None:
  """Prints a line of a task, unless it is noise of TensorFlow."""
  if not noise.is_noise(line):
    print(line, flush=True)


def launch(argv: list[str]) -> int:
  """Starts the tasks and waits until they end.

  Args:
    argv: The command line, without the name of the program.

  Returns:
    The exit status: 0 if all tasks succeeded, else that of the first task that
    failed; 130 after Ctrl-C.

  Raises:
    cluster.ClusterError: If the script does not exist, or the cluster spec or
      an option is invalid.
  """
  options = _parser().parse_args(argv)
  if not os.path.isfile(options.script):
    raise cluster.ClusterError(
      f"the script must be a Python file. Received: {options.script}."
    )
  spec = _spec(options)
  if options.timeline and not spec.num_tasks("ps"):
    raise cluster.ClusterError(
      f"{spec.where}`--timeline` needs a cluster with parameter servers."
      " Received: one without a `ps` task."
    )
  settings = {}
  if options.timeline:
    settings[environment.TIMELINE] = os.path.abspath(options.timeline)
  with tempfile.TemporaryDirectory() as directory:
    path = pathlib.Path(directory, "cluster.json")
    path.write_text(spec.to_json(), encoding="utf-8")
    tasks = local_cluster.LocalCluster(
      spec,
      lambda task: [
        "env",
        f"{environment.CLUSTER_SPEC}={path}",
        f"{environment.TASK}={task.job}:{task.index}",
        sys.executable,
        "-u",
        options.script,
        *options.arguments,
      ],
      log_dir=options.log_dir or directory,
      environ={**noise.environ(), **settings},
      echo=_echo,
      max_restarts=options.max_restarts,
    )
    with tasks:
      tasks.start(*sorted(spec.local_tasks(), key=lambda t: t.job != "ps"))
      try:
        return tasks.wait()
      except KeyboardInterrupt:
        print("[launcher] interrupted; ending all tasks", flush=True)
        return 130


def main(argv: list[str] | None = None) -> NoReturn:
  """Runs `launch` and exits with its status; 2 for invalid arguments.

  Args:
    argv: The command line without the name of the program; None for that of
      this process.
  """
  try:
    status = launch(sys.argv[1:] if argv is None else argv)
  except cluster.ClusterError as error:
    print(f"error: {error}", file=sys.stderr)
    status = 2
  sys.exit(status)
