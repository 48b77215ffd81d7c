"""Measures whether k replicas can use k times the learning rate.

  python -m experiments.claims.linear_scaling [--quick]
    [--num_seeds=3] [--output=DIR]

It also measures four mistakes that are easily made
(`experiments.support.scaling_remarks`). k synchronous replicas with batches of
16 are computed as one replica with a batch of 16 k, which is equivalent
(`tests/equivalence_test.py`).
"""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from experiments.support import claims
from experiments.support import scaling_remarks
from experiments.support import small_network

REPLICAS = (1, 4, 16)
BATCH_SIZE = 16
# Of 0.0003, 0.001 and 0.003 the one at which one replica is the best after 4
# epochs.
RATE = 0.0003
EPOCHS = 6
EPOCHS_QUICK = 3
WARM_UP_EPOCHS = 1
WAYS = ("rate as it is", "rate x k", "rate x k, warm-up")
# Of a loss curve.
NUM_POINTS = 24


def rates(way: str, num_replicas: int, num_updates: int, epochs: int) -> list:
  """Returns the learning rate of every update.

  Args:
    way: One of `WAYS`: the rate of one replica; k times this rate; or a
      warm-up, in which the rate rises linearly during the first epoch from that
      of one replica to k times as much (Goyal et al. 2017, section 2.2).
    num_replicas: k, the number of replicas.
    num_updates: The number of updates in all epochs.
    epochs: The number of epochs.
  """
  if way == WAYS[0]:
    return [RATE] * num_updates
  scaled = RATE * num_replicas
  if way == WAYS[1]:
    return [scaled] * num_updates
  rise = WARM_UP_EPOCHS / epochs * num_updates
  return [
    RATE + (scaled - RATE) * min(update / rise, 1.0)
    for update in range(num_updates)
  ]


def measure(is_quick: bool, seed: int) -> dict:
  """Trains with one replica and with several; measures the remarks on scaling.

  These are four remarks of Goyal et al. 2017
  (`experiments.support.scaling_remarks`). With `is_quick`, it trains for fewer
  epochs. The result has losses and precisions for each learning rate and number
  of replicas, and the numbers of the remarks.
  """
  epochs = EPOCHS_QUICK if is_quick else EPOCHS
  train, test = map(small_network.read, ("train", "test"))
  model = small_network.build(seed)
  step = small_network.step_fn(model, train)

  def run(way, num_replicas):
    batch_size = BATCH_SIZE * num_replicas
    num_updates = epochs * len(train.labels) // batch_size
    batches = small_network.batches(
      len(train.labels), batch_size, num_updates, seed
    )
    parameters = small_network.values(model)
    velocities = [tf.zeros_like(p) for p in parameters]
    losses = []
    for batch, rate in zip(
      batches, rates(way, num_replicas, num_updates, epochs), strict=True
    ):
      loss, parameters, velocities = step(
        parameters, parameters, velocities, batch, tf.constant(rate)
      )
      losses.append(float(loss))
    return {
      "losses": small_network.thin(losses, NUM_POINTS),
      **small_network.evaluate(model, parameters, test),
    }

  one = run(WAYS[0], 1)
  return {
    "rate": RATE,
    "epochs": epochs,
    "runs": {
      way: {str(k): one if k == 1 else run(way, k) for k in REPLICAS}
      for way in WAYS
    },
    "remarks": scaling_remarks.measure(
      model, small_network.values(model), train, seed
    ),
  }


def find(measurements: Sequence[dict]) -> list[claims.Finding]:
  """Returns the measured numbers of the claim, with the claimed bounds."""
  most = str(REPLICAS[-1])

  def each(value):
    return [value(m) for m in measurements]

  def precision(m, way, k):
    return m["runs"][way][k]["precision"]

  def below_one(m, way, k):
    return precision(m, way, "1") - precision(m, way, k)

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
        each(lambda m, k=k: below_one(m, WAYS[2], str(k))),
        most=0.03,
      )
      for k in REPLICAS[1:]
    ),
    claims.Finding(
      f"{most} replicas: precision that warm-up costs",
      each(lambda m: precision(m, WAYS[1], most) - precision(m, WAYS[2], most)),
      most=0.02,
    ),
    *scaling_remarks.find([m["remarks"] for m in measurements]),
  ]


def draw(measurements: Sequence[dict]):
  """Draws the precision over the number of replicas, and losses over epochs."""
  figure, axes = claims.new_figure(10, 4.2, ncols=2)
  for number, way in enumerate(WAYS):
    values = np.array(
      [
        [m["runs"][way][str(k)]["precision"] for k in REPLICAS]
        for m in measurements
      ]
    )
    middle = np.median(values, axis=0)
    style = {
      "color": claims.COLORS[number],
      "marker": claims.MARKERS[number],
      "linestyle": ("-", "--", "-.")[number],
      "label": way,
    }
    axes[0].errorbar(
      REPLICAS,
      middle,
      yerr=[middle - values.min(0), values.max(0) - middle],
      capsize=3,
      **style,
    )
    _plot_losses(axes[1], measurements[0], way, REPLICAS[-1], style)
  alone = {"color": "black", "linestyle": ":", "label": "one replica"}
  _plot_losses(axes[1], measurements[0], WAYS[0], 1, alone)
  axes[0].set_xscale("log", base=2)
  axes[0].set_xticks(REPLICAS, [str(k) for k in REPLICAS])
  axes[0].set_ylim(0, 1.02)
  axes[0].set_xlabel(f"replicas k, with {BATCH_SIZE} pictures each")
  axes[0].set_ylabel("precision @ 1 on 1,000 other pictures")
  axes[0].set_title(f"After {measurements[0]['epochs']} epochs")
  axes[1].set_ylim(0, 4)
  axes[1].set_xlabel("epochs")
  axes[1].set_ylabel("training loss (nats)")
  axes[1].set_title(f"{REPLICAS[-1]} replicas")
  for axis in axes:
    axis.grid(alpha=0.3)
    axis.legend(fontsize=9)
  return figure


def _plot_losses(axis, m, way, num_replicas, style) -> None:
  points = m["epochs"] * np.arange(1, NUM_POINTS + 1) / NUM_POINTS
  losses = np.array(m["runs"][way][str(num_replicas)]["losses"], dtype=float)
  axis.plot(points, losses, markersize=4, markevery=3, **style)


CLAIM = claims.Claim(
  name="linear_scaling",
  title="k replicas, k times the rate",
  claim=(
    "k synchronous replicas at k times the learning rate, which is approached"
    " gradually, get in as many epochs to the precision of one; at its rate"
    " they do not. And four remarks: scaling the loss is not scaling the rate,"
    " momentum must follow the rate, gradients are divided by the examples of"
    " all replicas, and all share one shuffle per epoch."
  ),
  source="Goyal et al. 2017, sections 2 and 3",
  explanation=(
    "With k replicas an epoch has k times fewer updates, so that each should be"
    " k times as large: the linear scaling rule. At the beginning the network"
    " changes too fast for that, so the rate rises over the first epoch."
    " The remarks are about mistakes that no error message tells of; each is"
    f" shown by a number. Scaled down: {EPOCHS} epochs of 5,000 synthetic"
    " pictures of 16 x 16 with a network of 81,898 parameters, momentum 0.9; k"
    " replicas are computed as one with all their pictures."
  ),
  measure=measure,
  find=find,
  draw=draw,
)

if __name__ == "__main__":
  claims.start(CLAIM)
