"""Watches the variables while every worker calls `apply_gradients`.

  python -m experiments.claims.update_once [--quick]
    [--num_seeds=2] [--output=DIR]

Trains on a real cluster of 1 PS (parameter server) and 3 workers. The gradients
of the three workers are 1, 10 and 100 for every parameter. So the values of the
variable say which gradients it has received: after k synchronous updates, at a
learning rate of 3, it must be -111 k, and after a single gradient alone it
would be something else. A loop on the PS task reads the variable all the time
and notes each value that it finds. The same is done with asynchronous updates,
at a learning rate of 1, where every gradient must be seen by itself.
"""

import json
import pathlib
import tempfile
from collections.abc import Sequence

import numpy as np

from experiments.support import claims
from experiments.support import programs

# The gradient of each worker.
GRADIENTS = (1.0, 10.0, 100.0)
UPDATES = ("sync", "async")
RATES = {"sync": float(len(GRADIENTS)), "async": 1.0}
# How long a batch takes.
BATCH_SECS = 0.05
NUM_ELEMENTS = 100
# In the picture.
_SHOWN = 5


def measure(is_quick: bool, seed: int) -> dict:
  """Trains synchronously and asynchronously, and watches the variable.

  With `is_quick`, it makes fewer steps. `seed` is not used. The result maps
  `sync` and `async` to: `num_updates`; `applied`, the number of gradients of
  each worker; `num_reads`, from the first update on; `mixed`, the number of
  reads that found unequal elements; `values`, each value that was found, as
  often as the variable changed; `secs`, when it was found first.
  """
  del seed
  num_steps = 50 if is_quick else 200
  found = {}
  for update in UPDATES:
    with tempfile.TemporaryDirectory() as directory:
      programs.run_tasks(
        "experiments.claims.update_once_task",
        [update, num_steps * (1 if update == "sync" else len(GRADIENTS))],
        document={
          "ps": ["localhost:0"],
          "worker": ["localhost:0"] * len(GRADIENTS),
        },
        directory=directory,
      )
      path = pathlib.Path(directory, "found.json")
      found[update] = json.loads(path.read_text(encoding="utf-8"))
  return found


def changes(run: dict) -> np.ndarray:
  """Returns by how much each change of the variable reduced it.

  Args:
    run: What was found in a training, as `measure` returns it.

  Returns:
    float64 [n]. Two changes that no read separated are one.
  """
  return -np.diff(run["values"])


def foreign(run: dict, step: float) -> float:
  """Returns the share of changes that no whole number of updates explains.

  Args:
    run: What was found in a training, as `measure` returns it.
    step: What one update changes. Several updates may have been made between
      two reads.
  """
  own = changes(run)
  return float(np.mean((own <= 0) | (own % step != 0)))


def find(measurements: Sequence[dict]) -> list[claims.Finding]:
  """Returns the measured numbers of the claim, with the claimed bounds."""

  def each(update, value):
    return [float(value(m[update])) for m in measurements]

  step = sum(GRADIENTS)
  return [
    claims.Finding(
      "synchronous: gradients applied per worker and update, as the library"
      " counts them, the fewest",
      each("sync", lambda run: min(run["applied"]) / run["num_updates"]),
    ),
    claims.Finding(
      "the same, the most",
      each("sync", lambda run: max(run["applied"]) / run["num_updates"]),
    ),
    claims.Finding(
      "synchronous: reads of the variable per update",
      each("sync", lambda run: run["num_reads"] / run["num_updates"]),
      least=20,
    ),
    claims.Finding(
      "synchronous: changes of the variable that were seen, per update",
      each("sync", lambda run: len(changes(run)) / run["num_updates"]),
      most=1,
    ),
    claims.Finding(
      "synchronous: share of these changes that are not a whole number of"
      f" means of all gradients (times the rate: {step:.0f})",
      each("sync", lambda run: foreign(run, step)),
      most=0,
    ),
    claims.Finding(
      "synchronous: whole change of the variable, divided by that of as many"
      " updates with all gradients",
      each(
        "sync", lambda run: changes(run).sum() / (step * run["num_updates"])
      ),
      least=1,
      most=1,
    ),
    claims.Finding(
      "asynchronous: share of the changes that were a single gradient",
      each("async", lambda run: np.isin(changes(run), GRADIENTS).mean()),
    ),
  ]


def draw(measurements: Sequence[dict]):
  """Draws the value of the variable over time, for both kinds of updates."""
  figure, panels = claims.new_figure(9, 3.4, ncols=2)
  for axes, update in zip(panels, UPDATES, strict=True):
    run = measurements[0][update]
    count = _SHOWN * (1 if update == "sync" else len(GRADIENTS))
    begin = len(run["values"]) // 2
    part = slice(begin, begin + count + 1)
    secs, values = np.array(run["secs"][part]), np.array(run["values"][part])
    axes.step(
      1000 * (secs - secs[0]),
      values - values[0],
      where="post",
      color=claims.COLORS[0],
    )
    axes.set_xlabel("milliseconds")
    axes.set_ylabel("value of the variable (change)")
    axes.grid(alpha=0.3)
    each = "an update" if update == "sync" else "a gradient"
    axes.set_title(f"{update}: a step is {each}, or several", fontsize="medium")
  return figure


CLAIM = claims.Claim(
  name="update_once",
  title="Every worker applies, the variables change once",
  claim=(
    "in synchronous training, every worker calls `apply_gradients` in every"
    " step, but the variables change once per step, by the mean of all"
    " gradients"
  ),
  source='"SyncReplicasOptimizer: who updates?", asked again and again',
  explanation=(
    "The three workers have the gradients 1, 10 and 100, so that the value of"
    " the variable shows which gradients it has received. A loop on the"
    " parameter server reads the variable many times per update. In synchronous"
    " training (left), every change is the mean of all three gradients: a call"
    " of `apply_gradients` offers a gradient, and when the last of the three"
    " has arrived, the chief applies their mean once. In asynchronous training"
    " (right), every gradient changes the variable by itself. Between two calls"
    " of the loop the variable is not read, so that some steps of the curves"
    " are several updates at once. The library's own counts are shown and not"
    " judged: only what the loop has read decides."
  ),
  measure=measure,
  find=find,
  draw=draw,
)

if __name__ == "__main__":
  claims.start(CLAIM)
