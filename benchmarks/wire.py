"""Measures the bytes per step on every connection of a cluster.

  python -m benchmarks.wire [--ps=1] [--workers=2] [--replicas_to_aggregate=N]
    [--output=FILE] [-- --wire_dtype=bfloat16 …]

Runs the CIFAR-10 program, with the flags that follow `--`, and reads the byte
counts of its TCP connections twice with `ss` (package iproute2), between two
log lines. The bytes should be: every parameter out to every replica once per
step, every gradient of an admitted replica in once, and nothing else of that
size; no connection between workers, and none of these bytes through an in-graph
client. A run adds its result to `FILE`.
"""

import json
import pathlib
import re
import tempfile

from absl import app
from absl import flags

from benchmarks import stored
from experiments.support import programs
from experiments.support import traffic

FLAGS = flags.FLAGS
flags.DEFINE_integer("ps", 1, "The number of PS tasks (parameter servers)")
flags.DEFINE_integer("workers", 2, "The number of workers")
flags.DEFINE_integer(
  "replicas_to_aggregate",
  None,
  "The number of gradients in an update; by default all workers'",
)
flags.DEFINE_enum(
  "replication",
  "between_graph",
  ["between_graph", "in_graph"],
  "The driver of the training",
)
flags.DEFINE_integer(
  "steps", 100, "The number of steps between the two readings"
)
flags.DEFINE_string("output", None, "The file for the results, as JSON")

_WARM_UP_STEPS = 20


def main(argv: list[str]) -> None:
  with tempfile.TemporaryDirectory() as directory:
    spec = programs.write_spec(directory, ps=FLAGS.ps, workers=FLAGS.workers)
    arguments = [
      f"--cluster_spec={spec}",
      f"--train_dir={directory}/run",
      "--dataset=synthetic",
      "--batch_size=8",
      "--learning_rate=0.01",
      f"--replication={FLAGS.replication}",
      f"--max_steps={_WARM_UP_STEPS + 2 * FLAGS.steps}",
      "--log_every_steps=1",
      *argv[1:],
    ]
    if FLAGS.replicas_to_aggregate:
      count = FLAGS.replicas_to_aggregate
      arguments.append(f"--replicas_to_aggregate={count}")
    measured = traffic.measure(
      arguments, first=_WARM_UP_STEPS, last=_WARM_UP_STEPS + FLAGS.steps
    )
  print(
    f"parameters: {traffic.PARAMETER_BYTES} bytes; per step and connection:"
  )
  for (sender, receiver), count in sorted(measured.bytes_per_step.items()):
    print(
      f"{sender:>9} -> {receiver:9} {count:12.0f} bytes"
      f" = {count / traffic.PARAMETER_BYTES:6.3f} of the parameters"
    )
  if FLAGS.output:
    path = pathlib.Path(FLAGS.output)
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    shares = {
      f"{sender} to {receiver}": count / traffic.PARAMETER_BYTES
      for (sender, receiver), count in sorted(measured.bytes_per_step.items())
    }
    run = {
      **stored.CIRCUMSTANCES,
      "share_of_parameter_bytes": shares,
      "from_ps_to_all_workers": _total(shares, "ps", "worker"),
      "from_all_workers_to_ps": _total(shares, "worker", "ps"),
    }
    text = json.dumps({"runs": [*runs, run]}, indent=1) + "\n"
    path.write_text(text, encoding="utf-8")


def _total(shares: dict[str, float], sender: str, receiver: str) -> float:
  """Returns the sum over all connections from tasks of one job to another.

  Args:
    shares: The bytes of each connection, divided by those of the parameters.
    sender: The job of the sender.
    receiver: The job of the receiver.
  """
  between = re.compile(rf"{sender} \d+ to {receiver} \d+")
  return sum(share for name, share in shares.items() if between.fullmatch(name))


if __name__ == "__main__":
  app.run(main)
