"""One client for all workers, or one in each: what does the number cost?

  python -m experiments.claims.in_graph_or_between_graph [--quick]
    [--num_seeds=1] [--output=DIR]

Trains the CIFAR-10 network synchronously on real clusters of 1 PS and 1, 2 and
4 workers on this machine, in-graph and between-graph. Counts bytes (needs `ss`)
and processor time of every process.
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
  """Trains on a cluster: rate, start, and the part of who makes the updates."""
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
  """{replication: {workers: what `run` returns}}; `is_quick`: 2 workers."""
  del seed
  num_steps = 30 if is_quick else 100
  numbers = (2,) if is_quick else WORKERS
  return {
    replication: {str(n): run(replication, n, num_steps) for n in numbers}
    for replication in REPLICATIONS
  }


def find(measurements: Sequence[dict]) -> list[claims.Finding]:
  """What the claim says in numbers."""

  def values(replication, workers, field):
    return [m[replication][workers][field] for m in measurements]

  def ratios(above, below):
    return [a / b for a, b in zip(above, below, strict=True)]

  numbers = list(measurements[0][REPLICATIONS[0]])
  most = numbers[-1]
  findings = [
    claims.Finding(
      f"bytes per step through the in-graph client with {most} workers, of the"
      " parameters",
      [
        n / traffic.PARAMETER_BYTES
        for n in values("in_graph", most, "client_bytes")
      ],
      most=0.02,
    ),
    claims.Finding(
      f"processor time per step of the in-graph client with {most} workers, of"
      " all processes'",
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
        f"step rate in-graph of that between-graph, {workers} workers",
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
  """Start, rate and the client's processor time over the number of workers."""
  figure, panels = claims.new_figure(9, 3.2, ncols=3)
  numbers = list(measurements[0][REPLICATIONS[0]])
  titles = (
    ("start_secs", "seconds to the first step"),
    ("steps_per_sec", "updates per second"),
    ("client_cpu_secs", "processor time of the process\nthat makes updates, s"),
  )
  for axes, (field, title) in zip(panels, titles, strict=True):
    for number, replication in enumerate(REPLICATIONS):
      rows = [[m[replication][n][field] for n in numbers] for m in measurements]
      axes.plot(
        [int(n) for n in numbers],
        [sum(column) / len(column) for column in zip(*rows, strict=True)],
        marker=claims.MARKERS[number],
        color=claims.COLOURS[number],
        label=replication.replace("_", "-"),
      )
    axes.set_xticks([int(n) for n in numbers])
    axes.set_xlabel("workers")
    axes.set_ylabel(title)
    axes.set_ylim(bottom=0)
  panels[0].legend(fontsize="small")
  return figure


CLAIM = claims.Claim(
  name="in_graph_or_between_graph",
  title="One client, or one per worker",
  claim=(
    "an in-graph client that only schedules carries no parameters, costs little"
    " with every worker, and is no slower than a client in each worker"
  ),
  source='TF1 "Distributed TensorFlow" how-to: in-graph, between-graph',
  explanation=(
    "In-graph, one client builds the computation of all workers and starts it;"
    " between-graph, every worker builds and starts its own, and the first also"
    " makes the updates. In TF1 everything that one client knew went through"
    " it. Here the workers read and write the parameter servers themselves, so"
    " the client has next to nothing to do in a step; between-graph the process"
    " that makes updates computes gradients as well. All processes share the"
    " cores of this machine, which is why more workers make slower steps."
  ),
  measure=measure,
  find=find,
  draw=draw,
)

if __name__ == "__main__":
  claims.start(CLAIM)
