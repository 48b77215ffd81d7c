"""Bytes per step on every connection, against what they must be.

  python -m benchmarks.wire [--ps=1] [--workers=2] [--replicas_to_aggregate=N]

Runs the CIFAR-10 binary and reads the byte counts of its TCP connections twice
with `ss` (package iproute2), between two log lines. What they must be: every
parameter out to every replica once per step, every gradient of an admitted
replica in once, nothing else of that size; no connection between workers, and
none of it through an in-graph client.
"""

import collections
import json
import pathlib
import re
import subprocess
import sys
import tempfile

from absl import app
from absl import flags

FLAGS = flags.FLAGS
flags.DEFINE_integer("ps", 1, "PS tasks")
flags.DEFINE_integer("workers", 2, "Replicas")
flags.DEFINE_integer("replicas_to_aggregate", None, "N; all workers")
flags.DEFINE_enum(
  "replication", "between_graph", ["between_graph", "in_graph"], "Driver"
)
flags.DEFINE_integer("steps", 100, "Steps between the two readings")

PARAMETER_BYTES = 4 * 1_068_298
_WARM_UP_STEPS = 20


def bytes_by_connection(pids: dict[int, str]) -> dict[tuple[str, str], int]:
  """Bytes sent so far, by (sending task, receiving task)."""
  output = subprocess.run(
    ["ss", "-tinpO"], capture_output=True, text=True, check=True
  ).stdout
  ends = {}
  for line in output.splitlines():
    fields = line.split()
    pid = re.search(r"pid=(\d+)", line)
    sent = re.search(r"bytes_sent:(\d+)", line)
    if pid and int(pid.group(1)) in pids:
      count = int(sent.group(1)) if sent else 0
      ends[_port(fields[3]), _port(fields[4])] = pids[int(pid.group(1))], count
  total = collections.Counter()
  for (local, peer), (task, count) in ends.items():
    other = ends.get((peer, local), ("outside", 0))[0]
    total[task, other] += count
  return total


def _port(address: str) -> str:
  return address.rsplit(":", 1)[1]


def measure(train_dir: str) -> dict[tuple[str, str], float]:
  """Bytes per step of every connection between tasks."""
  spec = pathlib.Path(train_dir) / "spec.json"
  jobs = {
    "ps": ["localhost:0"] * FLAGS.ps,
    "worker": ["localhost:0"] * FLAGS.workers,
  }
  spec.write_text(json.dumps(jobs))
  command = [
    sys.executable,
    "-m",
    "cifar10.distributed_train",
    f"--cluster_spec={spec}",
    f"--train_dir={train_dir}/run",
    "--dataset=synthetic",
    "--batch_size=8",
    "--learning_rate=0.01",
    f"--replication={FLAGS.replication}",
    f"--max_steps={_WARM_UP_STEPS + 2 * FLAGS.steps}",
    "--log_every_steps=1",
  ]
  if FLAGS.replicas_to_aggregate:
    command.append(f"--replicas_to_aggregate={FLAGS.replicas_to_aggregate}")
  readings = []
  with subprocess.Popen(
    command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
  ) as process:
    for line in process.stdout:
      step = re.search(r": step (\d+), loss", line)
      if step is None:
        print(line, end="")
      elif int(step.group(1)) in (_WARM_UP_STEPS, _WARM_UP_STEPS + FLAGS.steps):
        readings.append(
          (int(step.group(1)), bytes_by_connection(_tasks(process.pid)))
        )
  if process.returncode:
    raise RuntimeError(f"training failed with status {process.returncode}")
  (first, before), (last, after) = readings
  return {
    key: (after[key] - before.get(key, 0)) / (last - first) for key in after
  }


def _tasks(launcher: int) -> dict[int, str]:
  """The processes that the launcher started, with their tasks' names."""
  children = f"/proc/{launcher}/task/{launcher}/children"
  names = {}
  for pid in pathlib.Path(children).read_text().split():
    arguments = pathlib.Path(f"/proc/{pid}/cmdline").read_text()
    job = re.search(r"--job_name=(\w+)", arguments).group(1)
    index = re.search(r"--task_index=(\d+)", arguments).group(1)
    names[int(pid)] = f"{job} {index}"
  return names


def main(argv: list[str]) -> None:
  del argv
  with tempfile.TemporaryDirectory() as directory:
    rates = measure(directory)
  print(f"parameters: {PARAMETER_BYTES} bytes; per step and connection:")
  for (sender, receiver), rate in sorted(rates.items()):
    print(
      f"{sender:>9} -> {receiver:9} {rate:12.0f} bytes"
      f" = {rate / PARAMETER_BYTES:6.3f} of the parameters"
    )


if __name__ == "__main__":
  app.run(main)
