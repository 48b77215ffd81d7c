"""Starts and ends a local cluster again and again, and checks that it ends.

  python -m benchmarks.start_stop [--times=60] [--workers=3] [--output=FILE]

The cluster has 1 PS (parameter server) and N workers that attach to it at once,
and makes five steps each time. The program fails at the first cluster that does
not end by itself with status 0 and without a process left. TensorFlow's own
server crashed in about one of five such starts.
"""

import os
import pathlib
import sys
import tempfile
import time

from absl import app
from absl import flags

from benchmarks import ratios
from benchmarks import stored
from tf_replicas import cluster
from tf_replicas.cluster import local_cluster

FLAGS = flags.FLAGS
flags.DEFINE_integer("times", 60, "How often the cluster is started")
flags.DEFINE_integer(
  "workers", 3, "The number of workers, which attach at the same time"
)
flags.DEFINE_string(
  "replication", "between_graph", "The driver of the training"
)
flags.DEFINE_string("output", None, "Where to write the results, as JSON")


def start_once(directory: str) -> float:
  """Runs one cluster from start to end, and returns the seconds it took.

  Args:
    directory: An empty directory for the files of the cluster.

  Raises:
    RuntimeError: If a task fails, or a process is left.
  """
  jobs = {"ps": ["localhost:0"], "worker": ["localhost:0"] * FLAGS.workers}
  if FLAGS.replication == "in_graph":
    jobs["chief"] = ["localhost:0"]
  spec = cluster.resolve_ports(cluster.parse(jobs))
  path = pathlib.Path(directory) / "spec.json"
  path.write_text(spec.to_json())

  def command(task):
    return [
      sys.executable,
      "-m",
      "benchmarks.small_model_task",
      *[",".join(spec.addresses(job)) for job in ("ps", "worker")],
      task.job,
      str(task.index),
      FLAGS.replication,
      "1",  # Update per call.
      "5",
    ]

  start = time.monotonic()
  with local_cluster.LocalCluster(spec, command, log_dir=directory) as tasks:
    tasks.start()
    pids = [tasks.pid(task) for task in spec.tasks()]
    status = tasks.wait(timeout_secs=120)
    if status:
      logs = "\n".join(tasks.log(task) for task in spec.tasks())
      raise RuntimeError(f"a task ended with status {status}:\n{logs}")
  # Each task leads a session, of which its own processes are.
  if left := [pid for pid in _processes() if _session(pid) in pids]:
    raise RuntimeError(f"processes {left} are left")
  return time.monotonic() - start


def _processes() -> list[int]:
  return [int(p.name) for p in pathlib.Path("/proc").glob("[0-9]*")]


def _session(pid: int) -> int | None:
  try:
    return os.getsid(pid)
  except ProcessLookupError:  # It has just ended.
    return None


def main(argv: list[str]) -> None:
  del argv
  seconds = []
  for number in range(FLAGS.times):
    with tempfile.TemporaryDirectory() as directory:
      seconds.append(start_once(directory))
    print(f"{number + 1} of {FLAGS.times}: {seconds[-1]:.1f} s", flush=True)
  print(
    f"{FLAGS.times} starts and ends without a failure or a process left;"
    f" {min(seconds):.1f} to {max(seconds):.1f} s each"
  )
  stored.write(
    FLAGS.output,
    {
      "times": FLAGS.times,
      "spread_of_secs": ratios.spread(seconds),
      "secs": seconds,
    },
  )


if __name__ == "__main__":
  app.run(main)
