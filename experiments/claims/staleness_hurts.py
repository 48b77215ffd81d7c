"""Measures how training suffers from gradients that are s updates late.

  python -m experiments.claims.staleness_hurts [--quick]
    [--num_seeds=3] [--output=DIR]

A gradient of staleness s is computed from the variables of s updates before.
The trainings differ only by the staleness: initial weights, batches, rate and
number of updates are equal. There is one replica. The variables that it reads
are kept in a queue of s + 1 versions.
"""

import collections
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from experiments.support import claims
from experiments.support import small_network

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


def schedule(staleness: int, num_updates: int, rises: bool) -> list[int]:
  """Returns how late the gradient of each update is, in updates.

  It is the age of the variables from which the gradient is computed.

  Args:
    staleness: The age in the end, in updates. There are no variables older than
      the initial ones.
    num_updates: The number of updates, and the length of the result.
    rises: Whether the age rises over the first quarter of the updates.
  """
  rise = RISE_SHARE * num_updates if rises else 1
  return [
    min(update, staleness, int(staleness * update / rise))
    for update in range(num_updates)
  ]


def train(step, parameters, batches, ages: Sequence[int], rate: float) -> tuple:
  """Trains a network with stale gradients.

  Args:
    step: A function as `small_network.step_fn` returns it.
    parameters: The initial parameters.
    batches: For each update, the indices of its examples.
    ages: For each update, how many updates ago the parameters were read from
      which its gradient is computed.
    rate: The learning rate.

  Returns:
    The losses of all updates, and the parameters at the end.
  """
  versions = collections.deque([parameters], maxlen=max(ages) + 1)
  velocities = [tf.zeros_like(p) for p in parameters]
  rate = tf.constant(rate)
  losses = []
  for batch, age in zip(batches, ages, strict=True):
    loss, parameters, velocities = step(
      versions[-1 - age], versions[-1], velocities, batch, rate
    )
    versions.append(parameters)
    losses.append(float(loss))
  return losses, parameters


def measure(is_quick: bool, seed: int) -> dict:
  """Trains with every staleness, from the start and rising at first.

  With `is_quick`, it makes fewer updates. The result has losses and precision
  of each training, for `find` and `draw`.
  """
  num_updates = NUM_UPDATES_QUICK if is_quick else NUM_UPDATES
  train_set, test_set = map(small_network.read, ("train", "test"))
  model = small_network.build(seed)
  step = small_network.step_fn(model, train_set)
  batches = small_network.batches(
    len(train_set.labels), BATCH_SIZE, num_updates, seed
  )

  def run(staleness, rises):
    losses, parameters = train(
      step,
      small_network.values(model),
      batches,
      schedule(staleness, num_updates, rises),
      RATE,
    )
    return {
      "losses": small_network.thin(losses, NUM_POINTS),
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
    )
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
        f"staleness {name}: the most that a larger one of"
        f" {', '.join(map(str, STALENESS))} gained on the next smaller",
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
    "After as many updates at the same rate a network is the worse, the older"
    " the variables were that its gradients were computed from; also when the"
    " staleness rises slowly."
  ),
  source="Chen et al. 2016, section 2.1 (MNIST)",
  explanation=(
    "In asynchronous training a gradient is applied to variables that others"
    " have changed since it was computed. Here nothing else is asynchronous:"
    " one replica computes each gradient with the variables of exactly s"
    " updates ago, so that staleness alone can make a difference. In one series"
    " it is there at once, in the other it rises over the first quarter of"
    " the training, for the beginning is the most sensitive. Scaled down: the"
    " original read handwritten digits; here it is 16 x 16 pictures of the"
    " synthetic data set, a network of 81,898 parameters, batches of"
    f" {BATCH_SIZE}, momentum 0.9 and {NUM_UPDATES} updates. The rate is a"
    " third of what is best for fresh gradients; at that one a staleness of 5"
    " was enough for nothing to be learned."
  ),
  measure=measure,
  find=find,
  draw=draw,
)

if __name__ == "__main__":
  claims.start(CLAIM)
