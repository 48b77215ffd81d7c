"""Measures how stale the gradients of each layer are in asynchronous training.

  python -m experiments.claims.staleness_by_layer [--quick] [--num_seeds=3]
    [--output=DIR]

Chen et al. 2016 (section 2.1, figure 1) trained an Inception network of 18
layers asynchronously on 40 machines. The gradients of the top layer had a mean
staleness of about 14.5, and those of the bottom layer of about 39. This
experiment shows the same with 8 real workers and 18 layers that sleep
(`support.layer_task`), with TF1's asynchronous training and with this
library's. The numbers follow from the times for which the layers sleep and from
how the library counts, so it is an illustration.
"""

import json
import pathlib
import tempfile
from collections.abc import Sequence

from experiments.support import claims
from experiments.support import programs

WORKERS = 8
LAYERS = 18
BACKWARD = 2.0  # How many times as long as the forward pass it takes.
STEPS = 60
_KINDS = ("tf1", "ours")
_LABELS = {"tf1": "TF1: applied as computed", "ours": "ours: sent together"}
# The staleness of the top layer, divided by that of the bottom layer: in the
# paper, and as it follows from the times of the layers. TF1 applies the
# gradient of the top layer after the whole forward pass and one layer's
# backward pass, and that of the bottom layer after both passes.
PAPER = 14.5 / 39
BY_TIMES = (LAYERS + BACKWARD) / (LAYERS * (1 + BACKWARD))


def train(kind: str, steps: int) -> list[float]:
  """Trains on real processes, and returns the mean staleness of each layer.

  Args:
    kind: `tf1` or `ours`.
    steps: The number of steps of each worker.

  Returns:
    The staleness by layer; the bottom layer, which computes first, is first.
  """
  with tempfile.TemporaryDirectory() as directory:
    programs.run_tasks(
      "experiments.support.layer_task",
      [kind, steps],
      document={
        "ps": ["localhost:0"],
        "worker": ["localhost:0"] * WORKERS,
      },
      directory=directory,
    )
    return json.loads(pathlib.Path(directory, "staleness.json").read_text())


def measure(is_quick: bool, seed: int) -> dict:
  """Trains by both kinds of updates; with `is_quick`, for fewer steps."""
  del seed  # Just the number of the repetition.
  steps = STEPS // 2 if is_quick else STEPS
  return {kind: train(kind, steps) for kind in _KINDS}


def find(measurements: Sequence[dict]) -> list[claims.Finding]:
  """Returns the measured numbers, without bounds."""
  top = {k: [m[k][-1] / m[k][0] for m in measurements] for k in _KINDS}
  return [
    claims.Finding(
      "TF1: staleness of the bottom layer divided by the number of the other"
      " workers",
      [m["tf1"][0] / (WORKERS - 1) for m in measurements],
    ),
    claims.Finding(
      "TF1: staleness of the top layer divided by that of the bottom layer"
      f" (by the chosen times {BY_TIMES:.2f}, in the paper {PAPER:.2f})",
      top["tf1"],
    ),
    claims.Finding(
      "this library: staleness of the top layer divided by that of the bottom"
      " layer",
      top["ours"],
    ),
    claims.Finding(
      "this library: staleness of the bottom layer divided by the number of the"
      " other workers",
      [m["ours"][0] / (WORKERS - 1) for m in measurements],
    ),
  ]


def draw(measurements: Sequence[dict]):
  """Draws the staleness of each layer, a line per training."""
  figure, axes = claims.new_figure(7, 4.5)
  for number, kind in enumerate(_KINDS):
    for m in measurements:
      axes.plot(
        range(len(m[kind])),
        m[kind],
        "-" + claims.MARKERS[number],
        color=claims.COLORS[number],
        label=_LABELS[kind] if m is measurements[0] else None,
      )
  axes.axhline(
    WORKERS - 1, color="black", linewidth=0.8, label="the other workers"
  )
  axes.set_ylim(0, 1.25 * (WORKERS - 1))
  axes.set_xlabel("layer (0 is the bottom layer, which computes first)")
  axes.set_ylabel("mean staleness of its gradients (updates)")
  axes.legend(frameon=False, loc="lower left")
  return figure


CLAIM = claims.Claim(
  name="staleness_by_layer",
  title="How stale the gradients of each layer are: an illustration",
  claim=(
    "In asynchronous training as TF1 had it, the gradients of the bottom layer"
    " have a staleness of the number of the other workers, and those of the top"
    " layer a smaller one. In this library, which sends all gradients together,"
    " every layer is as stale as TF1's bottom layer."
  ),
  source=(
    "Chen et al. 2016, section 2.1, for the first sentence; our own for the"
    " second"
  ),
  explanation=(
    "TF1 reads all variables when a step begins, and applies the gradient of a"
    " layer as soon as it is computed. Backpropagation computes that of the top"
    " layer first, so fewer updates of other workers come in between."
    f" The {WORKERS} workers are real processes, and each layer sleeps instead"
    " of computing: in the backward pass twice as long as in the forward pass,"
    " as is usual in convolutional networks. The numbers follow from this"
    " choice, so there is no verdict. Let the forward pass of a layer take one"
    f" unit of time. Then a step of all {LAYERS} layers takes"
    f" {LAYERS * (1 + BACKWARD):.0f} units, and TF1"
    " applies the gradient of the top layer after"
    f" {LAYERS + BACKWARD:.0f} of them: a share of"
    f" {BY_TIMES:.2f}. That the paper found the same ratio says that its"
    " network had about such times, and nothing more. This library counts one"
    " update for all layers, so they are equally stale by construction. Each"
    " update adds 1 to a counter"
    " of its layer, and the version that it was computed from to a sum, on the"
    " parameter server; so these two numbers tell the mean staleness. The paper"
    " trained an Inception network of 18 layers with 40 workers."
  ),
  measure=measure,
  find=find,
  draw=draw,
  is_illustration=True,
)

if __name__ == "__main__":
  claims.start(CLAIM)
