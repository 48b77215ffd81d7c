"""Compares one client for all workers with one client in each worker.

  python -m experiments.claims.in_graph_or_between_graph [--quick]
    [--num_seeds=5] [--output=DIR]

A client is a process that builds graphs and runs them. In-graph there is one
for all workers; between-graph each worker is one. Trains the CIFAR-10 network
synchronously in both ways, on real clusters of 1 PS (parameter server) and 1, 2
and 4 workers on this machine. Measures the bytes (needs `ss`) and the processor
time of every process.
"""

import tempfile
from collections.abc import Sequence

from experiments.support import claims
from experiments.support import programs
from experiments.support import traffic

WORKERS = (1, 2, 4)
REPLICATIONS = ("in_graph", "between_graph")
BATCH_SIZE = 16
_WARM_UP_STEPS = 10


def run(replication: str, workers: int, num_steps: int) -> dict:
  """Trains on a cluster, and measures rate, start and the load of the client.

  The client is the process that has the updates made.

  Args:
    replication: `in_graph` or `between_graph`.
    workers: The number of workers.
    num_steps: The number of steps that are measured.
  """
  last = _WARM_UP_STEPS + num_steps
  with tempfile.TemporaryDirectory() as directory:
    spec = programs.write_spec(directory, workers=workers)
    measured = traffic.measure(
      [
        f"--cluster_spec={spec}",
        f"--train_dir={directory}/run",
        "--dataset=synthetic",
        f"--replication={replication}",
        f"--batch_size={BATCH_SIZE}",
        # Some more, for all tasks must be there when it is looked at.
        f"--max_steps={last + 10}",
        "--log_every_steps=1",
      ],
      first=_WARM_UP_STEPS,
      last=last,
    )
  client = "chief 0" if replication == "in_graph" else "worker 0"
  return {
    "start_secs": measured.start_secs,
    "steps_per_sec": measured.steps_per_sec,
    "client_cpu_secs": measured.cpu_secs_per_step[client],
    "client_bytes": measured.of(client),
    "cpu_secs": sum(measured.cpu_secs_per_step.values()),
  }


def measure(is_quick: bool, seed: int) -> dict:
  """Trains in both ways with all numbers of workers.

  With `is_quick`, it uses 2 workers only, and fewer steps. The order of both
  ways changes with every `seed`. The result is a map from replication to a map
  from the number of workers to the result of `run`.
  """
  num_steps = 30 if is_quick else 100
  numbers = (2,) if is_quick else WORKERS
  found: dict = {replication: {} for replication in REPLICATIONS}
  for number, workers in enumerate(numbers):
    is_reversed = (seed + number) % 2
    for replication in REPLICATIONS[::-1] if is_reversed else REPLICATIONS:
      found[replication][str(workers)] = run(replication, workers, num_steps)
  return found


def find(measurements: Sequence[dict]) -> list[claims.Finding]:
  """Returns the measured numbers of the claim, with the claimed bounds."""

  def values(replication, workers, field):
    return [m[replication][workers][field] for m in measurements]

  def ratios(above, below):
    return [a / b for a, b in zip(above, below, strict=True)]

  numbers = list(measurements[0][REPLICATIONS[0]])
  most = numbers[-1]
  findings = [
    claims.Finding(
      f"bytes per step through the in-graph client with {most} workers, divided"
      " by those of the parameters",
      [
        n / traffic.PARAMETER_BYTES
        for n in values("in_graph", most, "client_bytes")
      ],
      most=0.02,
    ),
    claims.Finding(
      f"processor time per step of the in-graph client with {most} workers,"
      " divided by that of all processes",
      ratios(
        values("in_graph", most, "client_cpu_secs"),
        values("in_graph", most, "cpu_secs"),
      ),
      most=0.1,
    ),
  ]
  for workers in numbers:
    findings.append(
      claims.Finding(
        f"step rate in-graph, divided by that between-graph, {workers} workers",
        ratios(
          values("in_graph", workers, "steps_per_sec"),
          values("between_graph", workers, "steps_per_sec"),
        ),
        least=0.85,
      )
    )
  for replication in REPLICATIONS:
    findings.append(
      claims.Finding(
        f"seconds to the first step with {most} workers, {replication}",
        values(replication, most, "start_secs"),
        "s",
      )
    )
  return findings


def draw(measurements: Sequence[dict]):
  """Draws start time, step rate and processor time of the process with updates.

  This process, the client, is the one that has the updates made.
  """
  figure, panels = claims.new_figure(9, 3.2, ncols=3)
  numbers = list(measurements[0][REPLICATIONS[0]])
  titles = (
    ("start_secs", "Start", "seconds to the first step"),
    ("steps_per_sec", "Speed", "updates per second"),
    (
      "client_cpu_secs",
      "Load of the updating process",
      "processor time per step (s)",
    ),
  )
  for axes, (field, title, label) in zip(panels, titles, strict=True):
    for number, replication in enumerate(REPLICATIONS):
      rows = [[m[replication][n][field] for n in numbers] for m in measurements]
      axes.plot(
        [int(n) for n in numbers],
        [sum(column) / len(column) for column in zip(*rows, strict=True)],
        marker=claims.MARKERS[number],
        color=claims.COLORS[number],
        label=replication.replace("_", "-"),
      )
    axes.set_xticks([int(n) for n in numbers])
    axes.set_xlabel("workers")
    axes.set_ylabel(label)
    axes.set_title(title, fontsize="medium")
    axes.set_ylim(bottom=0)
  panels[0].legend(fontsize="small")
  return figure


CLAIM = claims.Claim(
  name="in_graph_or_between_graph",
  title="One client, or one per worker",
  claim=(
    "an in-graph client carries no parameters, costs little processor time"
    " for each worker, and is at most 15% slower than a client in each worker"
  ),
  source='TF1 "Distributed TensorFlow" how-to: in-graph, between-graph',
  explanation=(
    "In in-graph replication, one client builds the computation of all"
    " workers and starts it. In between-graph replication, every worker builds"
    " and starts its own, and the first worker also makes the updates. Here,"
    " workers read and write the variables on the parameter servers themselves"
    " in both cases, so that the in-graph client has little to do in a step."
    " In between-graph replication, the process that makes the updates"
    " computes gradients as well. All processes share the cores of this"
    " machine, so steps are slower with more workers."
  ),
  measure=measure,
  find=find,
  draw=draw,
)

if __name__ == "__main__":
  claims.start(CLAIM)
