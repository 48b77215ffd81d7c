"""Draws the precision over epochs of several trainings in one picture.

  python -m experiments.recipes --runs=tutorial=DIR,modern=DIR
    [--max_epochs=20] [--output=experiments/results/recipes.png]

Claim (the TF1 tutorial's network, better trained): with a modern recipe, the
network reaches a precision in far fewer epochs than by the tutorial's recipe,
which took 256 epochs to 86% (docstring of `cifar10_train.py`).

The program reads what `cifar10.eval`, running beside each training on one
device, wrote for TensorBoard. It draws the picture and writes its numbers as
JSON beside it.
"""

import json
import os
from collections.abc import Sequence

from absl import flags

from cifar10 import config as config_lib
from tf_replicas.programs import command_line
from tf_replicas.programs import run_config
from tf_replicas.runtime import processes

FLAGS = flags.FLAGS
TAG = "precision @ 1"


def define_flags() -> None:
  """Defines the flags of this experiment; `--help` shows them."""
  flags.DEFINE_list("runs", None, "NAME=TRAIN_DIR for each run", required=True)
  flags.DEFINE_float("max_epochs", None, "The epoch at which the axis ends")
  flags.DEFINE_string(
    "output",
    "experiments/results/recipes.png",
    "The picture; its numbers go to a JSON file beside it",
  )


def curve(train_dir: str) -> list[tuple[float, float]]:
  """Returns the precision of every checkpoint of a run that was evaluated.

  Args:
    train_dir: The train directory of the run.

  Returns:
    (epochs, precision @ 1) pairs, by epochs.

  Raises:
    ValueError: If no checkpoint was evaluated.
  """
  from tensorboard.backend.event_processing import event_accumulator

  eval_dir = os.path.join(train_dir, "eval")
  every = {event_accumulator.TENSORS: 0}  # Else a random ten.
  events = event_accumulator.EventAccumulator(eval_dir, every)
  if os.path.isdir(eval_dir):
    events.Reload()
  if TAG not in events.Tags()["tensors"]:
    raise ValueError(
      f"{eval_dir} must hold measurements of `cifar10.eval`. Received: none."
    )
  config = run_config.of_run(config_lib.Config, train_dir)
  epoch = config_lib.NUM_EXAMPLES_PER_EPOCH_FOR_TRAIN / config.batch_size
  points = {
    event.step / epoch: float(_scalar(event.tensor_proto))
    for event in events.Tensors(TAG)
  }
  return sorted(points.items())


def _scalar(proto):
  from tensorboard.util import tensor_util

  return tensor_util.make_ndarray(proto)


def draw(curves: dict[str, list], path: str, max_epochs: float | None) -> None:
  """Draws the precision over epochs of all runs into a PNG file.

  Args:
    curves: (epochs, precision) pairs by the name of the run.
    path: The path of the file.
    max_epochs: Where the axis of epochs ends; None: after the last point.
  """
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(figsize=(7, 4.2), dpi=120)
  for name, points in curves.items():
    label = f"{name} (last: {points[-1][1]:.4f})"
    axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
  axes.axhline(0.86, color="grey", linewidth=0.8, linestyle="--")
  axes.text(0.2, 0.863, "86%: the tutorial after 256 epochs", fontsize=8)
  axes.set_xlim(0, max_epochs)
  axes.set_ylim(0.4, 0.9)
  axes.set_xlabel("epochs")
  axes.set_ylabel("precision @ 1 on the 10,000 test images")
  axes.set_title("The tutorial's network by two recipes")
  axes.grid(alpha=0.3)
  axes.legend(loc="lower right")
  figure.tight_layout()
  figure.savefig(path)


def main(argv: Sequence[str]) -> None:
  del argv
  with processes.one_line_errors(usage=(ValueError,)):
    curves = {}
    for run in FLAGS.runs:
      name, _, train_dir = run.partition("=")
      if not train_dir:
        raise ValueError(f"`--runs` must be NAME=TRAIN_DIR. Received: {run!r}.")
      points = curve(train_dir)
      if FLAGS.max_epochs is not None:
        points = [p for p in points if p[0] <= FLAGS.max_epochs + 0.01]
      curves[name] = points
  os.makedirs(os.path.dirname(FLAGS.output) or ".", exist_ok=True)
  with open(
    os.path.splitext(FLAGS.output)[0] + ".json", "w", encoding="utf-8"
  ) as file:
    json.dump(curves, file, indent=1)
  draw(curves, FLAGS.output, FLAGS.max_epochs)
  for name, points in curves.items():
    print(f"{name}: {points[-1][1]:.4f} after {points[-1][0]:.1f} epochs")


if __name__ == "__main__":
  define_flags()
  command_line.start(main)
