"""Repeats a published experiment with 30 learners and the n-softsync rule.

  python -m experiments.claims.zhang_softsync [--quick]
    [--num_seeds=5] [--output=DIR]

With n-softsync, an update is made of 30 / n gradients, so that gradients are
about n updates late. The experiment is that of Zhang et al. 2015 with CIFAR-10,
scaled down. It has their 30 learners with batches of 4, and a network of the
same kind and size. But the pictures are the 16 x 16 ones of the synthetic data
set, and there are some thousand gradients instead of nearly two million. The
update rule is the library's; one thread plays all learners. `--quick` measures
n = 30 only, and ends so early that training with a rate divided by the
staleness is still behind.
"""

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from experiments.simulator import compute_times
from experiments.support import claims
from experiments.support import one_thread
from experiments.support import small_network
from tf_replicas.replica import model_replica
from tf_replicas.rules import results
from tf_replicas.rules.asynchronous import async_replicas
from tf_replicas.rules.asynchronous import staleness

LEARNERS = 30
BATCH_SIZE = 4
SPLITS = (1, 15, 30)
# Equal machines: their times differ by a tenth.
COMPUTE = compute_times.Lognormal(1.0, 0.1)
# Of 0.001, 0.003 and 0.01 the one at which 1-softsync learns in this short a
# time; synchronous training does at all of them.
RATE = 0.001
NUM_TURNS = 12_000
NUM_TURNS_QUICK = 5_000
# Of a loss curve.
NUM_POINTS = 30


def new_rule(
  gradients_per_update: int, divides: bool
) -> async_replicas.AsyncReplicasOptimizer:
  """Makes the n-softsync rule for 30 learners, with momentum.

  Args:
    gradients_per_update: The number of gradients in an update, 30 / n.
    divides: Whether the learning rate of a gradient is divided by its
      staleness.
  """
  return async_replicas.AsyncReplicasOptimizer(
    keras.optimizers.SGD(RATE, momentum=small_network.MOMENTUM),
    LEARNERS,
    gradients_per_update=gradients_per_update,
    policies=[staleness.staleness_aware()] if divides else [],
  )


def measure(is_quick: bool, seed: int) -> dict:
  """Trains synchronously, and by n-softsync with a fixed and a divided rate.

  The divided rate is the learning rate divided by the staleness of a gradient.

  With `is_quick`, it uses n = 30 only, and fewer gradients. The result has
  losses, precision and staleness of each training, for `find` and `draw`.
  """
  num_turns = NUM_TURNS_QUICK if is_quick else NUM_TURNS
  train, test = (small_network.read(split) for split in ("train", "test"))
  model = small_network.build(seed)

  def run(rule, order, batch_size):
    chosen = small_network.batches(
      len(train.labels), batch_size, len(order), seed
    )
    replica = model_replica.Replica(
      variables=model.trainable_variables,
      loss_fn=lambda parameters, chosen: small_network.loss(
        model, parameters, train, chosen
      ),
      dataset_fn=lambda *_: tf.data.Dataset.from_tensor_slices((chosen,)),
    )
    losses, parameters = one_thread.play(rule, replica, order, NUM_POINTS)
    return {
      "losses": losses,
      "diverged": len(losses) < NUM_POINTS,
      "staleness": list(results.total(rule.counts()).staleness),
      **small_network.evaluate(model, parameters, test),
    }

  order = one_thread.finishing_order(COMPUTE, LEARNERS, num_turns, seed)
  # 30 replicas with 4 pictures each are one with 120.
  num_steps = num_turns // LEARNERS
  synchronous = run(new_rule(1, False), [0] * num_steps, LEARNERS * BATCH_SIZE)
  rows = []
  for n in SPLITS[-1:] if is_quick else SPLITS:
    for divides in (False, True):
      row = run(new_rule(LEARNERS // n, divides), order, BATCH_SIZE)
      rows.append({"n": n, "divides": divides, **row, **_summary(row, n)})
  return {
    "rate": RATE,
    "num_examples": num_turns * BATCH_SIZE,
    "synchronous": synchronous,
    "softsync": rows,
  }


def _summary(row: dict, n: int) -> dict:
  """Summarizes how stale the gradients of a training were.

  Args:
    row: The result of the training.
    n: The number n of n-softsync.
  """
  counts = row["staleness"]
  mean, most_of, largest = results.summary(counts)
  return {
    "mean_staleness": mean,
    "staleness_of_95_percent": most_of,
    "max_staleness": largest,
    "share_beyond_2n": sum(counts[2 * n + 1 :]) / sum(counts),
  }


def find(measurements: Sequence[dict]) -> list[claims.Finding]:
  """Returns the measured numbers of the claim, with the claimed bounds."""

  def each(value, divides=True, n=None):
    """Returns, for each measurement, the largest value of its rows.

    Args:
      value: Called with a row and its measurement; returns a number.
      divides: Whether to use rows whose rate is divided by the staleness.
      n: Uses only rows with this n of n-softsync; None: all.
    """
    return [
      max(
        value(row, m)
        for row in m["softsync"]
        if row["divides"] == divides and n in (None, row["n"])
      )
      for m in measurements
    ]

  def below(row, m):
    return m["synchronous"]["precision"] - row["precision"]

  def off(row, m):
    return abs(row["mean_staleness"] / row["n"] - 1)

  findings = [
    claims.Finding(
      "relative difference of the mean staleness of n-softsync from n, at most",
      each(off),
    ),
    claims.Finding(
      "share of gradients staler than 2 n; the worst n",
      each(lambda row, m: row["share_beyond_2n"]),
    ),
    claims.Finding(
      f"synchronous at rate {measurements[0]['rate']}: precision",
      [m["synchronous"]["precision"] for m in measurements],
      least=0.8,
    ),
  ]
  numbers = sorted({row["n"] for row in measurements[0]["softsync"]})
  if 1 in numbers:
    findings += [
      claims.Finding(
        "1-softsync: the largest staleness",
        each(lambda row, m: row["max_staleness"], n=1),
        "updates",
      ),
      claims.Finding(
        "1-softsync at the fixed rate: precision below synchronous",
        each(below, divides=False, n=1),
        most=0.05,
      ),
    ]
  for n in (n for n in numbers if n > 1):
    findings.append(
      claims.Finding(
        f"{n}-softsync at the fixed rate: precision (a guess: 0.1)",
        each(lambda row, m: row["precision"], divides=False, n=n),
        most=0.2,
      )
    )
  for n in numbers:
    findings.append(
      claims.Finding(
        f"{n}-softsync at rate / staleness: precision below synchronous",
        each(below, n=n),
        most=0.05,
      )
    )
  return findings


def draw(measurements: Sequence[dict]):
  """Draws the staleness of gradients, and the losses and precisions reached."""
  figure, axes = claims.new_figure(9.2, 5.7, nrows=2, ncols=3)
  first = measurements[0]
  rows = [row for row in first["softsync"] if row["divides"]]
  for axis in axes[0, len(rows) :]:
    axis.set_axis_off()
  for axis, row in zip(axes[0], rows, strict=False):
    _draw_staleness(axis, row)
  _draw_losses(axes[1, 0], first, divides=False)
  _draw_losses(axes[1, 1], first, divides=True)
  _draw_precision(axes[1, 2], measurements)
  for axis in axes.flat:
    axis.grid(alpha=0.3)
  return figure


def _draw_staleness(axis, row) -> None:
  counts = np.array(row["staleness"])
  n = row["n"]
  axis.bar(
    np.arange(len(counts)), counts / counts.sum(), color=claims.COLORS[0]
  )
  axis.axvline(n, color=claims.COLORS[1], linestyle="--", label=f"n = {n}")
  axis.axvline(
    2 * n, color=claims.COLORS[2], linestyle=":", label=f"2 n = {2 * n}"
  )
  axis.set_xlim(-1, 2 * n + 1)
  # Room for the legend above the bars.
  axis.set_ylim(0, 1.5 * counts.max() / counts.sum())
  ticks = axis.get_yticks()
  axis.set_yticks(ticks[(ticks <= 1) & (ticks <= axis.get_ylim()[1])])
  axis.set_xlabel("staleness (updates)")
  axis.set_ylabel("share of gradients")
  axis.set_title(f"{n}-softsync: mean {row['mean_staleness']:.2f}")
  axis.legend(fontsize=9, loc="upper left", ncols=2, columnspacing=1.0)


def _draw_losses(axis, m, *, divides) -> None:
  curves = [("synchronous", m["synchronous"])]
  curves += [
    (f"{row['n']}-softsync", row)
    for row in m["softsync"]
    if row["divides"] == divides
  ]
  points = m["num_examples"] / 1000 * np.arange(1, NUM_POINTS + 1) / NUM_POINTS
  colors = [claims.COLORS[-1], *claims.COLORS]
  for (name, row), color, marker in zip(
    curves, colors, claims.MARKERS, strict=False
  ):
    losses = row["losses"]
    axis.plot(
      points[: len(losses)],
      losses,
      color=color,
      marker=marker,
      markersize=4,
      markevery=3,
      label=f"{name} (ended: not finite)" if row["diverged"] else name,
    )
  axis.axhline(np.log(10), color="grey", linestyle=":")
  axis.text(
    0.99,
    np.log(10) + 0.05,
    "a guess",
    transform=axis.get_yaxis_transform(),
    ha="right",
    color="grey",
    fontsize=8,
  )
  axis.set_ylim(0, 4)
  axis.set_xlabel("training examples (thousand)")
  axis.set_ylabel("training loss (nats)")
  axis.set_title("rate / staleness" if divides else "fixed rate")
  axis.legend(fontsize=8)


def _draw_precision(axis, measurements) -> None:
  numbers = sorted({row["n"] for row in measurements[0]["softsync"]})
  for divides, name, color, hatch, shift in (
    (False, "fixed rate", 1, "//", -0.2),
    (True, "rate / staleness", 0, "", 0.2),
  ):
    values = np.array(
      [
        [row["precision"] for row in m["softsync"] if row["divides"] == divides]
        for m in measurements
      ]
    )
    middle = np.median(values, axis=0)
    axis.bar(
      np.arange(len(numbers)) + shift,
      middle,
      0.4,
      yerr=[middle - values.min(0), values.max(0) - middle]
      if len(values) > 1
      else None,
      color=claims.COLORS[color],
      hatch=hatch,
      edgecolor="white",
      ecolor="black",
      capsize=4,
      label=name,
    )
  synchronous = np.median([m["synchronous"]["precision"] for m in measurements])
  axis.axhline(synchronous, color="black", linestyle="--", label="synchronous")
  axis.axhline(small_network.CHANCE, color="grey", linestyle=":")
  axis.set_xticks(range(len(numbers)), [f"n = {n}" for n in numbers])
  axis.set_ylim(0, 1.35)
  axis.set_yticks(np.arange(0, 1.01, 0.2))
  axis.set_ylabel("precision @ 1, other pictures")
  axis.set_title("At the end")
  axis.legend(fontsize=7, loc="upper center", ncols=2)


CLAIM = claims.Claim(
  name="zhang_softsync",
  title="Thirty learners: the rate must fall with the staleness",
  claim=(
    "With 30 learners and an update for each 30 / n gradients, training at a"
    " fixed rate fails for n = 15 and 30, but not for n = 1. If the rate is"
    " divided by the staleness, training gets about as far as synchronous"
    " training for every n."
  ),
  source="Zhang et al. 2015, Staleness-aware async-SGD, CIFAR-10",
  explanation=(
    "Thirty learners compute all the time, and none of them waits. With n = 1,"
    " the variables change when thirty gradients have arrived, as in"
    " synchronous training. With n = 30, they change with every gradient,"
    " which was computed from the variables before the last 29 changes. Then"
    " there are thirty times as many updates of the same size, all from old"
    " variables, which is too much. Dividing each update by its staleness"
    " compensates for both. The experiment is smaller than the original: a"
    " network like that of Caffe with pictures of 16 x 16 pixels, the"
    f" synthetic data set, and {NUM_TURNS * BATCH_SIZE:,} examples. One thread"
    " plays all learners, in an order that follows from compute times with a"
    " standard deviation of 10%. That gradients are about n updates old, and"
    " hardly ever more than 2 n, follows from that, so these numbers are not"
    " judged. Reads, staleness, rates and updates are those of the library's"
    " rule. For n = 1, both rates are nearly the same rule: they differ only"
    " for gradients that are two updates old, which are few. So if their"
    " precisions differ much, chance is large. At the chosen rate, 1-softsync"
    " learns in this short time. At three times this rate, synchronous training"
    " was as good, but even 1-softsync failed. 30 synchronous replicas with 4"
    " pictures each are computed as one replica with 120 pictures."
  ),
  measure=measure,
  find=find,
  draw=draw,
)

if __name__ == "__main__":
  claims.start(CLAIM)
