"""Starts the same script as every task of a cluster on this machine.

  python -m tf_replicas.launch --ps=1 --workers=2 train.py [arguments]

The script calls `tf_replicas.fit` or `tf_replicas.run`, which finds out from
environment variables which task its process is. Each line of output begins with
the name of its task. Ctrl-C ends all tasks.
"""

import argparse
import os
import sys
from typing import NoReturn

from tf_replicas import cluster
from tf_replicas.cluster import environment
from tf_replicas.cluster import isolation
from tf_replicas.programs import launcher


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    "python -m tf_replicas.launch",
    description="Starts a script as every task of a cluster on this machine.",
  )
  for name, default, text in (
    ("ps", 1, "parameter servers"),
    ("workers", 2, "workers"),
    (
      "max_restarts",
      3,
      "how often killed tasks are started again, all tasks together",
    ),
  ):
    parser.add_argument(f"--{name}", type=int, default=default, help=text)
  parser.add_argument(
    "--max_workers",
    type=int,
    help="largest number of workers, if others may join while the script runs;"
    " default: no others",
  )
  for name, text in (
    (
      "cluster_spec",
      "a cluster-spec file, or the name of one that the package holds, such as"
      " local_1ps_2workers; instead of --ps and --workers",
    ),
    ("log_dir", "directory for each task's output; default: not kept"),
    ("timeline", "a directory for timelines; see experiments.timeline"),
  ):
    parser.add_argument(f"--{name}", help=text)
  parser.add_argument(
    "--chief",
    action="store_true",
    help="add a separate task for the chief; in-graph replication needs it",
  )
  parser.add_argument(
    "--preload",
    action="store_true",
    help="import TensorFlow once for all tasks, which then start sooner; not"
    " for scripts that set variables such as TF_ENABLE_ONEDNN_OPTS before they"
    " import it",
  )
  parser.add_argument(
    "--private_network",
    action="store_true",
    help="let nobody else connect to the tasks: run them in a network namespace"
    " of Linux that has only loopback; they then reach no network either",
  )
  parser.add_argument("script", help="the Python file to run")
  parser.add_argument("arguments", nargs=argparse.REMAINDER)
  return parser


def launch(argv: list[str]) -> int:
  """Starts a script as all tasks of a cluster, and waits until they end.

  Args:
    argv: The command line, without the name of the program.

  Returns:
    An exit status. 0 if all tasks succeeded, otherwise that of the first task
    that failed; 130 after Ctrl-C.

  Raises:
    cluster.ClusterError: If the script does not exist, or the cluster spec or
      an option is invalid.
  """
  options = _parser().parse_args(argv)
  if not os.path.isfile(options.script):
    raise cluster.ClusterError(
      "the script must be a Python file that exists. Received:"
      f" {options.script}."
    )
  if options.private_network:
    isolation.leave_networks()
  spec = launcher.local_spec(
    options.cluster_spec or None,
    ps=options.ps,
    workers=options.workers,
    chief=options.chief,
    needs_all=False,
    prefix="--",
  )
  if options.timeline and not spec.num_tasks("ps"):
    raise cluster.ClusterError(
      f"{spec.where}`--timeline` needs a cluster with parameter servers."
      " Received: one without a `ps` task."
    )
  spec.admit(options.max_workers)  # Only checked here.
  variables = {}
  if options.max_workers is not None:
    variables[environment.MAX_WORKERS] = str(options.max_workers)
  if options.timeline:
    variables[environment.TIMELINE] = os.path.abspath(options.timeline)
  return launcher.run_tasks(
    spec,
    lambda path, task: [
      "env",
      f"{environment.CLUSTER_SPEC}={path}",
      f"{environment.TASK}={task.job}:{task.index}",
      sys.executable,
      "-u",
      options.script,
      *options.arguments,
    ],
    preloads=options.preload,
    variables=variables,
    log_dir=options.log_dir,
    echo=launcher.echo,
    max_restarts=options.max_restarts,
  )


def main(argv: list[str] | None = None) -> NoReturn:
  """Starts a script as all tasks of a cluster, waits, and ends the process.

  The exit status is that of `launch`, 2 if the arguments are invalid, or 1 if
  the tasks cannot be started.

  Args:
    argv: The command line, without the name of the program. None: that of this
      process.
  """
  try:
    status = launch(sys.argv[1:] if argv is None else argv)
  except (cluster.ClusterError, OSError, RuntimeError) as error:
    print(f"error: {error}", file=sys.stderr)
    status = 2 if isinstance(error, cluster.ClusterError) else 1
  sys.exit(status)
