"""Measures how training suffers from gradients that are s updates late.

  python -m experiments.claims.staleness_hurts [--quick]
    [--num_seeds=3] [--output=DIR]

A gradient of staleness s is computed from the variables of s updates before.
The updates are made by the library's asynchronous rule. One thread plays s + 1
replicas that take turns (`one_thread`), so that each gradient is exactly s
updates late; the rule itself counts the staleness. The trainings differ only by
the staleness: initial weights, batches, rate and number of updates are equal.
"""

import collections
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from experiments.support import claims
from experiments.support import one_thread
from experiments.support import small_network
from tf_replicas.replica import model_replica
from tf_replicas.rules import results
from tf_replicas.rules.asynchronous import async_replicas

STALENESS = (0, 1, 2, 5, 10, 20)
BATCH_SIZE = 32
# Of 0.001, 0.003, 0.01, 0.03 and 0.1 fresh gradients are best at 0.001 (300
# updates), but those that are 5 updates old or older then do not learn at all.
RATE = 0.0003
NUM_UPDATES = 600
NUM_UPDATES_QUICK = 300
# Over which the staleness rises, where it does, of all updates.
RISE_SHARE = 0.25
# Whether the staleness rises at first -> how it is called.
WAYS = {False: "from the start", True: "rising at first"}
# Of a loss curve.
NUM_POINTS = 25


def turns(
  staleness: int, num_updates: int, rises: bool
) -> tuple[list[int], dict[int, int]]:
  """Returns which replica makes each update, and when replicas join.

  Args:
    staleness: s, how late gradients are in the end, in updates.
    num_updates: The number of updates.
    rises: Whether the staleness rises over the first quarter of the updates.
      The replicas then join one after the other.

  Returns:
    The index of the replica for each update, and for each replica the update
    before which it reads the variables for the first time.
  """
  rise = RISE_SHARE * num_updates if rises else 0
  joins = {
    replica: round(replica * rise / max(staleness, 1))
    for replica in range(staleness + 1)
  }
  order, waiting = [], collections.deque()
  for update in range(num_updates):
    waiting.extend(r for r, begin in joins.items() if begin == update)
    order.append(waiting.popleft())
    waiting.append(order[-1])
  return order, joins


def measure(is_quick: bool, seed: int) -> dict:
  """Trains with every staleness, from the start and rising at first.

  With `is_quick`, it makes fewer updates. The result has losses, precision and
  counted staleness of each training, for `find` and `draw`.
  """
  num_updates = NUM_UPDATES_QUICK if is_quick else NUM_UPDATES
  train_set, test_set = map(small_network.read, ("train", "test"))
  model = small_network.build(seed)
  batches = small_network.batches(
    len(train_set.labels), BATCH_SIZE, num_updates, seed
  )

  def run(staleness, rises):
    replica = model_replica.Replica(
      variables=model.trainable_variables,
      loss_fn=lambda parameters, chosen: small_network.loss(
        model, parameters, train_set, chosen
      ),
      dataset_fn=lambda *_: tf.data.Dataset.from_tensor_slices((batches,)),
    )
    rule = async_replicas.AsyncReplicasOptimizer(
      keras.optimizers.SGD(RATE, momentum=small_network.MOMENTUM), staleness + 1
    )
    order, joins = turns(staleness, num_updates, rises)
    losses, parameters = one_thread.play(
      rule, replica, order, NUM_POINTS, joins
    )
    mean, _, largest = results.summary(results.total(rule.counts()).staleness)
    return {
      # A training ends where it diverges.
      "losses": [*losses, *[None] * (NUM_POINTS - len(losses))],
      "mean_staleness": mean,
      "max_staleness": largest,
      **small_network.evaluate(model, parameters, test_set),
    }

  return {
    "rate": RATE,
    "num_updates": num_updates,
    **{
      name: {str(s): run(s, rises) for s in STALENESS}
      for rises, name in WAYS.items()
    },
  }


def find(measurements: Sequence[dict]) -> list[claims.Finding]:
  """Returns the measured numbers of the claim, with the claimed bounds."""

  def precisions(m, name):
    return [m[name][str(s)]["precision"] for s in STALENESS]

  findings = [
    claims.Finding(
      f"fresh gradients at rate {measurements[0]['rate']}: precision",
      [precisions(m, WAYS[False])[0] for m in measurements],
      least=0.8,
    ),
    claims.Finding(
      f"staleness {STALENESS[-1]} from the start: mean staleness that the rule"
      " counted",
      [
        m[WAYS[False]][str(STALENESS[-1])]["mean_staleness"]
        for m in measurements
      ],
      "updates",
    ),
  ]
  for name in WAYS.values():
    findings += [
      claims.Finding(
        f"staleness {STALENESS[-1]} {name}: precision lost",
        [
          precisions(m, name)[0] - precisions(m, name)[-1] for m in measurements
        ],
        least=0.01,
      ),
      # Of 1,000 pictures 0.95 has a standard error of 0.007.
      claims.Finding(
        f"staleness {name}: largest gain of precision from one of"
        f" {', '.join(map(str, STALENESS))} to the next larger",
        [max(np.diff(precisions(m, name))) for m in measurements],
        most=0.02,
      ),
    ]
  return findings


def draw(measurements: Sequence[dict]):
  """Draws the precision over staleness, and the losses of the first seed."""
  figure, axes = claims.new_figure(12, 4.2, ncols=3)
  _draw_precision(axes[0], measurements)
  for axis, name in zip(axes[1:], WAYS.values(), strict=True):
    _draw_losses(axis, measurements[0], name)
  for axis in axes:
    axis.grid(alpha=0.3)
  return figure


def _draw_precision(axis, measurements) -> None:
  for number, name in enumerate(WAYS.values()):
    values = np.array(
      [[m[name][str(s)]["precision"] for s in STALENESS] for m in measurements]
    )
    middle = np.median(values, axis=0)
    axis.errorbar(
      STALENESS,
      middle,
      yerr=[middle - values.min(0), values.max(0) - middle],
      color=claims.COLORS[1 - number],
      marker=claims.MARKERS[number],
      linestyle=("-", "--")[number],
      capsize=4,
      label=f"stale {name}",
    )
  axis.axhline(small_network.CHANCE, color="grey", linestyle=":")
  axis.text(0, small_network.CHANCE + 0.01, "a guess", color="grey", fontsize=8)
  axis.set_ylim(0, 1.02)
  axis.set_xlabel("staleness (updates)")
  axis.set_ylabel("precision @ 1 on 1,000 other pictures")
  axis.set_title(f"After {measurements[0]['num_updates']} updates")
  axis.legend(fontsize=9)


def _draw_losses(axis, m, name) -> None:
  points = m["num_updates"] * np.arange(1, NUM_POINTS + 1) / NUM_POINTS
  for staleness, color, marker in zip(
    STALENESS, claims.COLORS, claims.MARKERS, strict=True
  ):
    axis.plot(
      points,
      np.array(m[name][str(staleness)]["losses"], dtype=float),
      color=color,
      marker=marker,
      markersize=4,
      markevery=3,
      label=staleness,
    )
  axis.set_ylim(0, 4)
  axis.set_xlabel("updates")
  axis.set_ylabel("training loss (nats)")
  axis.set_title(f"Stale {name}")
  axis.legend(title="staleness", fontsize=8, ncols=2)


CLAIM = claims.Claim(
  name="staleness_hurts",
  title="Staleness hurts",
  claim=(
    "after the same number of updates at the same rate, a network is worse if"
    " its gradients were computed from older variables, even if the staleness"
    " rises slowly"
  ),
  source="Chen et al. 2016, section 2.1 (MNIST)",
  explanation=(
    "In asynchronous training, a gradient is applied to variables that others"
    " have changed since it was computed. Here, every gradient is exactly s"
    " updates old, and nothing else differs. The updates are made by the"
    " library's asynchronous rule; s + 1 replicas take turns. In one series the"
    " staleness is s from the start. In the other, replicas join one after the"
    " other, so that it rises over the first quarter of the training, because"
    " the beginning is the most sensitive. The training is smaller than the"
    " original, which used handwritten digits: 16 x 16 pictures of the"
    " synthetic data set, a network of 81,898 parameters, batches of"
    f" {BATCH_SIZE}, momentum 0.9 and {NUM_UPDATES} updates. The rate is a"
    " third of the best one for fresh gradients, with which nothing was learned"
    " at a staleness of 5 or more. A staleness of 1 costs no more than chance"
    " does."
  ),
  measure=measure,
  find=find,
  draw=draw,
)

if __name__ == "__main__":
  claims.start(CLAIM)
