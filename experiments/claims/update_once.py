"""Counts how often variables change if every worker calls `apply_gradients`.

  python -m experiments.claims.update_once [--quick]
    [--num_seeds=1] [--output=DIR]

Trains the CIFAR-10 network synchronously on a real cluster of 1 PS (parameter
server) and 3 workers. The counts come from the timelines that its tasks
recorded.
"""

import collections
import tempfile
from collections.abc import Sequence

from experiments import timeline
from experiments.simulator import recorded_run
from experiments.support import claims
from experiments.support import programs

WORKERS = 3
# Steps in the picture.
_DRAWN = 5


def measure(is_quick: bool, seed: int) -> dict:
  """Trains on a cluster, and counts gradients and updates in its timelines.

  With `is_quick`, it makes fewer steps. The result has, for each step, the
  number of gradients handed over and the number of updates, and the events of a
  few steps, for the picture.
  """
  num_steps = 20 if is_quick else 60
  with tempfile.TemporaryDirectory() as directory:
    spec = programs.write_spec(directory, workers=WORKERS)
    programs.output(
      "cifar10.distributed_train",
      "--dataset=synthetic",
      f"--cluster_spec={spec}",
      f"--train_dir={directory}/run",
      "--batch_size=32",
      f"--max_steps={num_steps}",
      f"--seed={seed}",
      "--timeline",
    )
    events = recorded_run.read(f"{directory}/run/timeline")
  hand_overs = collections.Counter(
    e.step for e in events if e.kind == "hand_over"
  )
  updates = collections.Counter(e.step for e in events if e.kind == "apply")
  begin, end = timeline.window(events, _DRAWN)
  return {
    "hand_overs": [hand_overs[step] for step in range(num_steps)],
    "updates": [updates[step] for step in range(num_steps)],
    "window": [begin, end],
    "events": [
      [e.task, e.step, e.kind, e.start, e.end]
      for e in events
      if e.end >= begin and e.start <= end
    ],
  }


def find(measurements: Sequence[dict]) -> list[claims.Finding]:
  """Returns the measured numbers of the claim, with the claimed bounds."""
  return [
    claims.Finding(
      "gradients handed over in a step: the fewest of all steps",
      [min(m["hand_overs"]) for m in measurements],
      least=WORKERS,
    ),
    claims.Finding(
      "the most of all steps",
      [max(m["hand_overs"]) for m in measurements],
      most=WORKERS,
    ),
    claims.Finding(
      "updates of the variables in a step: the fewest of all steps",
      [min(m["updates"]) for m in measurements],
      least=1,
    ),
    claims.Finding(
      "the most of all steps",
      [max(m["updates"]) for m in measurements],
      most=1,
    ),
  ]


def draw(measurements: Sequence[dict]):
  """Draws what each task did in a few steps of the first measured training."""
  events = [recorded_run.Event(*e) for e in measurements[0]["events"]]
  return timeline.draw(events, *measurements[0]["window"])


CLAIM = claims.Claim(
  name="update_once",
  title="Every worker applies, the variables change once",
  claim=(
    "in synchronous training every worker calls `apply_gradients` in every"
    " step, and the variables change once per step"
  ),
  source='"SyncReplicasOptimizer: who updates?", asked again and again',
  explanation=(
    "A few steps of a recorded training, one line per process. Every worker"
    " computes (blue), hands its gradient over (green) and waits (grey). Its"
    " call of `apply_gradients` is an offer, not an update. When the last of"
    " the three gradients is there, the chief has their mean applied (black),"
    " once, where the variables live; then all read the new values."
  ),
  measure=measure,
  find=find,
  draw=draw,
)

if __name__ == "__main__":
  claims.start(CLAIM)
