"""Measures whether k replicas can use k times the learning rate.

  python -m experiments.claims.linear_scaling [--quick]
    [--num_seeds=2] [--output=DIR]

k workers with batches of 16 train a network synchronously by `tf_replicas.fit`,
each in a process of its own, with 1 PS (parameter server). All trainings of one
number of workers are made by one script (`linear_scaling_task`), which the
launcher starts. It also measures four mistakes that are easily made
(`experiments.support.scaling_remarks`).
"""

import json
import pathlib
import tempfile
from collections.abc import Sequence

import numpy as np

from experiments.support import claims
from experiments.support import programs
from experiments.support import scaling_remarks
from experiments.support import small_network

REPLICAS = (1, 4, 8)
REPLICAS_QUICK = (1, 2)
BATCH_SIZE = 16
# A multiple of all global batches.
NUM_EXAMPLES = 4096
# Of 0.0003, 0.001 and 0.003 the one at which one replica is the best after 4
# epochs.
RATE = 0.0003
EPOCHS = 6
EPOCHS_QUICK = 2
WARM_UP_EPOCHS = 1
WAYS = ("rate as it is", "rate x k", "rate x k, warm-up")
MOST_LOST = 0.01


def measure(is_quick: bool, seed: int) -> dict:
  """Trains with one replica and with several; measures the remarks on scaling.

  These are four remarks of Goyal et al. 2017
  (`experiments.support.scaling_remarks`). With `is_quick`, it trains for fewer
  epochs and with fewer replicas. The result has the losses of all epochs and
  the precision, for each learning rate and number of replicas, and the numbers
  of the remarks.
  """
  epochs = EPOCHS_QUICK if is_quick else EPOCHS
  runs = {
    str(k): _train(k, epochs, seed)
    for k in (REPLICAS_QUICK if is_quick else REPLICAS)
  }
  model = small_network.build(seed)
  return {
    "rate": RATE,
    "epochs": epochs,
    "runs": {
      way: {k: found[WAYS[0] if k == "1" else way] for k, found in runs.items()}
      for way in WAYS
    },
    "remarks": scaling_remarks.measure(
      model, small_network.values(model), small_network.read("train"), seed
    ),
  }


def _train(num_replicas: int, epochs: int, seed: int) -> dict[str, dict]:
  """Trains on real processes, in all ways.

  Args:
    num_replicas: k, the number of workers.
    epochs: The number of epochs.
    seed: The seed of the initial weights and of the order of the examples.

  Returns:
    For each of `WAYS` (one replica: the first one only), `losses`, the training
    loss of each epoch, and `precision`.
  """
  task = pathlib.Path(__file__).with_name("linear_scaling_task.py")
  with tempfile.TemporaryDirectory() as directory:
    path = pathlib.Path(directory, "found.json")
    programs.output(
      "tf_replicas.launch",
      "--ps=1",
      f"--workers={num_replicas}",
      str(task),
      str(path),
      str(num_replicas),
      str(epochs),
      str(seed),
    )
    return json.loads(path.read_text(encoding="utf-8"))


def find(measurements: Sequence[dict]) -> list[claims.Finding]:
  """Returns the measured numbers of the claim, with the claimed bounds."""
  several = [k for k in measurements[0]["runs"][WAYS[0]] if k != "1"]
  most = several[-1]

  def each(value):
    return [value(m) for m in measurements]

  def precision(m, way, k):
    return m["runs"][way][k]["precision"]

  def below_one(m, way, k):
    return precision(m, way, "1") - precision(m, way, k)

  def last_loss(m, way, k):
    return m["runs"][way][k]["losses"][-1]

  return [
    claims.Finding(
      f"one replica at rate {measurements[0]['rate']}: precision",
      each(lambda m: precision(m, WAYS[0], "1")),
      least=0.8,
    ),
    claims.Finding(
      f"{most} replicas at the same rate: precision lost",
      each(lambda m: below_one(m, WAYS[0], most)),
      least=0.03,
    ),
    *(
      claims.Finding(
        f"{k} replicas at {k} times the rate, with warm-up: precision lost",
        each(lambda m, k=k: below_one(m, WAYS[2], k)),
        most=MOST_LOST,
      )
      for k in several
    ),
    claims.Finding(
      f"{most} replicas at {most} times the rate, without warm-up: precision"
      " lost",
      each(lambda m: below_one(m, WAYS[1], most)),
    ),
    claims.Finding(
      f"{most} replicas at {most} times the rate, with warm-up: training loss"
      " of the last epoch, divided by that of one replica",
      each(lambda m: last_loss(m, WAYS[2], most) / last_loss(m, WAYS[0], "1")),
    ),
    *scaling_remarks.find([m["remarks"] for m in measurements]),
  ]


def draw(measurements: Sequence[dict]):
  """Draws the precision over the number of replicas, and losses over epochs."""
  figure, axes = claims.new_figure(10, 4.2, ncols=2)
  replicas = list(measurements[0]["runs"][WAYS[0]])
  for number, way in enumerate(WAYS):
    values = np.array(
      [[m["runs"][way][k]["precision"] for k in replicas] for m in measurements]
    )
    middle = np.median(values, axis=0)
    style = {
      "color": claims.COLORS[number],
      "marker": claims.MARKERS[number],
      "linestyle": ("-", "--", "-.")[number],
      "label": way,
    }
    axes[0].errorbar(
      [int(k) for k in replicas],
      middle,
      yerr=[middle - values.min(0), values.max(0) - middle],
      capsize=3,
      **style,
    )
    _plot_losses(axes[1], measurements[0], way, replicas[-1], style)
  alone = {"color": "black", "linestyle": ":", "label": "one replica"}
  _plot_losses(axes[1], measurements[0], WAYS[0], "1", alone)
  axes[0].set_xscale("log", base=2)
  axes[0].set_xticks([int(k) for k in replicas], replicas)
  axes[0].set_ylim(0, 1.02)
  axes[0].set_xlabel(f"replicas k, with {BATCH_SIZE} pictures each")
  axes[0].set_ylabel("precision @ 1 on 1,000 other pictures")
  axes[0].set_title(f"After {measurements[0]['epochs']} epochs")
  axes[1].set_ylim(0, 4)
  axes[1].set_xlabel("epochs")
  axes[1].set_ylabel("training loss (nats)")
  axes[1].set_title(f"{replicas[-1]} replicas")
  for axis in axes:
    axis.grid(alpha=0.3)
    axis.legend(fontsize=9)
  return figure


def _plot_losses(axis, m, way, num_replicas, style) -> None:
  losses = np.array(m["runs"][way][num_replicas]["losses"], dtype=float)
  axis.plot(range(1, len(losses) + 1), losses, markersize=4, **style)


CLAIM = claims.Claim(
  name="linear_scaling",
  title="k replicas, k times the rate",
  claim=(
    "k synchronous replicas at k times the learning rate, with a warm-up, reach"
    " the precision of one replica after as many epochs; at the rate of one"
    " replica they do not"
  ),
  source="Goyal et al. 2017, sections 2 and 3",
  explanation=(
    "With k replicas, an epoch has k times fewer updates, so that each should"
    " be k times as large: the linear scaling rule. At the beginning, the"
    " network changes too fast for such large updates, so the rate rises"
    " linearly during the first epoch (warm-up). This small network does not"
    " need it: without a warm-up, it loses no more precision. After the last"
    " epoch, the training loss of several replicas is still the larger one;"
    " the precision shows little of that, because it is nearly 1. Every"
    " replica is a process of its own. The paper adds four remarks about"
    " mistakes that cause no error message: scaling the loss is not the same"
    " as scaling the rate; momentum must be corrected when the rate changes;"
    " gradients must be divided by the examples of all replicas; all replicas"
    " must share one shuffle. Remarks 1 and 3 are identities, and so is the"
    " first number of remark 2, which is a property of Keras' momentum. So"
    " these numbers are shown without bounds; the others depend on the"
    f" library. The training is small: {EPOCHS} epochs of {NUM_EXAMPLES:,}"
    " synthetic pictures of 16 x 16, a network of 81,898 parameters, momentum"
    " 0.9."
  ),
  measure=measure,
  find=find,
  draw=draw,
)

if __name__ == "__main__":
  claims.start(CLAIM)
