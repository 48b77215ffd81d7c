"""Simulates a ball that rolls down a bowl, pushed by outdated gradients.

  python -m experiments.claims.stale_ball [--quick]
    [--num_seeds=3] [--output=DIR]

The ball stands for a model with one weight x, whose loss is c * x * x / 2 with
the curvature c. Only the learning rate times c matters. In this module, this
product is called the rate. All distances are shares of the start's distance to
the minimum. All numbers follow from this recursion, so it is an illustration.
"""

from collections.abc import Sequence

import numpy as np

from experiments import simulator
from experiments.simulator import compute_times
from experiments.support import claims

# One step at this rate goes three quarters of the way to the minimum.
TWO_DEVICES_RATE = 0.75
RATE = 0.3
STALENESS = (0, 1, 2, 3, 4, 6, 8)
DEVICES = (1, 2, 4, 8, 16)
NUM_UPDATES = 60


def roll(rate: float, staleness: Sequence[int], *, divides=False) -> np.ndarray:
  """Returns the positions of a ball that gradients of older positions push.

      x[t + 1] = x[t] - rate * x[t - staleness[t]]

  Args:
    rate: The learning rate times the curvature of the bowl.
    staleness: int [T], the staleness of each update. Before the start, the ball
      stood still.
    divides: Whether the rate of an update is divided by its staleness, if that
      is more than 1 (Zhang et al. 2015, section 3).

  Returns:
    float64 [T + 1], beginning with 1.
  """
  path = np.ones([len(staleness) + 1])
  for t, stale in enumerate(staleness):
    factor = rate / max(stale, 1) if divides else rate
    path[t + 1] = path[t] - factor * path[max(t - stale, 0)]
  return path


def overshoot(path: np.ndarray) -> float:
  """Returns how far the ball got past the minimum, which is at 0.

  Args:
    path: The positions of the ball.
  """
  return max(0.0, -float(path.min()))


def largest_stable_rate(staleness: int) -> float:
  """Finds the largest rate at which the ball comes to rest, by bisection.

  Args:
    staleness: By how many updates each gradient is late.
  """
  low, high = 0.0, 2.5
  for _ in range(30):
    middle = (low + high) / 2
    # It rests if all roots of z ** (s + 1) - z ** s + rate are small.
    polynomial = np.zeros([staleness + 2])
    polynomial[0], polynomial[1] = 1.0, -1.0
    polynomial[-1] += middle
    if np.abs(np.roots(polynomial)).max() < 1.0:
      low = middle
    else:
      high = middle
  return low


def stable_rate_formula(staleness: int) -> float:
  """Returns the largest rate at which the ball comes to rest, by a formula.

  For staleness s it is 2 sin(pi / (4 s + 2)) (Levin and May 1976).
  """
  return float(2 * np.sin(np.pi / (4 * staleness + 2)))


def random_staleness(num_devices: int, seed: int) -> list[int]:
  """Simulates in which order devices push the ball: staleness of each update.

  The devices are asynchronous, with exponential compute times.

  Args:
    num_devices: The number of devices.
    seed: The seed of the compute times.

  Returns:
    A list with an entry for each of `NUM_UPDATES` updates.
  """
  cluster = simulator.Cluster(num_devices, compute_times.Exponential(1.0))
  return simulator.simulate(
    cluster, simulator.Async(), NUM_UPDATES, seed=seed
  ).staleness.tolist()


def measure(is_quick: bool, seed: int) -> dict:
  """Simulates all paths of the ball.

  Chance decides only in which order many devices push the ball.

  With `is_quick`, it leaves out the largest number of devices. The result has
  paths, stable rates and overshoots, for `find` and `draw`.
  """
  devices = {}
  for count in DEVICES[:4] if is_quick else DEVICES:
    staleness = random_staleness(count, seed)
    devices[str(count)] = {
      "mean_staleness": float(np.mean(staleness)),
      "fixed": overshoot(roll(RATE, staleness)),
      "divided": overshoot(roll(RATE, staleness, divides=True)),
    }
  return {
    "stale_pair": roll(TWO_DEVICES_RATE, [0, 1]).tolist(),
    "synchronous": roll(TWO_DEVICES_RATE, [0]).tolist(),
    "in_turn": roll(TWO_DEVICES_RATE, [0, 0]).tolist(),
    "paths": {
      str(s): roll(RATE, [s] * NUM_UPDATES).tolist() for s in STALENESS
    },
    "stable": {str(s): largest_stable_rate(s) for s in STALENESS},
    "devices": devices,
  }


def find(measurements: Sequence[dict]) -> list[claims.Finding]:
  """Returns the numbers that the picture illustrates, without bounds."""

  def each(value):
    return [value(m) for m in measurements]

  def growth(m):
    lows = [overshoot(np.array(path)) for path in m["paths"].values()]
    return min(np.diff(lows))

  def worst_ratio(m):
    ratios = [m["stable"][str(s)] / stable_rate_formula(s) for s in STALENESS]
    return max(ratios, key=lambda ratio: abs(ratio - 1))

  def most_devices(name):
    return each(lambda m: list(m["devices"].values())[-1][name])

  last = list(measurements[0]["devices"])[-1]
  return [
    claims.Finding(
      "way past the minimum after two devices have applied steps from t0",
      each(lambda m: overshoot(np.array(m["stale_pair"]))),
      "of the start",
    ),
    claims.Finding(
      "way past the minimum if their mean is applied, or if one device reads"
      " after the step of the other",
      each(
        lambda m: max(
          overshoot(np.array(m[name])) for name in ("synchronous", "in_turn")
        )
      ),
      "of the start",
    ),
    claims.Finding(
      f"smallest growth of the way past the minimum between neighbors of the"
      f" stalenesses"
      f" {', '.join(map(str, STALENESS))}",
      each(growth),
      "of the start",
    ),
    claims.Finding(
      "largest rate at which the ball comes to rest, divided by"
      " 2 sin(pi / (4 s + 2)); the worst of all s",
      each(worst_ratio),
    ),
    claims.Finding(
      f"{last} devices in random order: way past the minimum at a fixed rate",
      most_devices("fixed"),
      "of the start",
    ),
    claims.Finding(
      f"{last} devices in random order: the same at rate / staleness",
      each(lambda m: _divided_share(list(m["devices"].values())[-1])),
      "of that",
    ),
  ]


def _divided_share(device: dict) -> float:
  return device["divided"] / device["fixed"]


def draw(measurements: Sequence[dict]):
  """Draws paths of the ball, its stable rates and overshoots, in four plots."""
  figure, axes = claims.new_figure(10, 7.6, nrows=2, ncols=2)
  _draw_bowl(axes[0, 0], measurements[0])
  _draw_paths(axes[0, 1], measurements[0])
  _draw_limits(axes[1, 0], measurements[0])
  _draw_devices(axes[1, 1], measurements)
  for axis in axes.flat:
    axis.grid(alpha=0.3)
  return figure


def _draw_bowl(axis, m) -> None:
  x = np.linspace(-0.8, 1.15, 200)
  axis.plot(x, x * x / 2, color="grey")
  for name, label, color, marker, height in (
    ("synchronous", "synchronous: the mean (drawn higher)", 2, "s", 0.13),
    ("stale_pair", "asynchronous: both write", 1, "o", 0.0),
  ):
    path = np.array(m[name])
    color = claims.COLORS[color]
    axis.plot(
      path,
      path * path / 2 + height,
      color=color,
      marker=marker,
      markersize=9,
      linestyle="--",
      label=label,
    )
    for t, place in enumerate(path):
      axis.annotate(
        f"t{t}",
        (place, place * place / 2 + height),
        textcoords="offset points",
        xytext=(0, 11),
        ha="center",
        color=color,
      )
  axis.axvline(0.0, color="black", linewidth=0.8)
  axis.set_ylim(-0.05, 0.85)
  axis.set_xlabel("position (of the start's distance to the minimum)")
  axis.set_ylabel("loss (of curvature × start²)")
  axis.set_title("Two devices read at t0, write at t1 and t2")
  axis.legend(loc="upper left", fontsize=9)


def _draw_paths(axis, m) -> None:
  shown = ("0", "1", "2", "4", "6")
  for stale, color, style in zip(
    shown,
    claims.COLORS,
    ("-", "--", "-.", ":", (0, (5, 1, 1, 1))),
    strict=False,
  ):
    axis.plot(m["paths"][stale], color=color, linestyle=style, label=stale)
  axis.axhline(0.0, color="black", linewidth=0.8)
  axis.set_xlim(0, 40)
  axis.set_ylim(-2.2, 2.2)
  axis.set_xlabel("updates")
  axis.set_ylabel("position (of the start)")
  axis.set_title(f"The same staleness for all updates, rate {RATE}")
  axis.legend(title="staleness", ncols=5, fontsize=8, loc="lower center")


def _draw_limits(axis, m) -> None:
  s = np.arange(0, max(STALENESS) + 1)
  axis.plot(
    s,
    [stable_rate_formula(k) for k in s],
    color="grey",
    label="2 sin(π / (4 s + 2))",
  )
  axis.plot(
    STALENESS,
    list(m["stable"].values()),
    linestyle="",
    marker="o",
    color=claims.COLORS[0],
    label="found",
  )
  axis.axhline(RATE, color=claims.COLORS[1], linestyle=":")
  axis.text(5.2, RATE + 0.03, f"rate {RATE}, as above", color=claims.COLORS[1])
  axis.set_ylim(0, 2.1)
  axis.set_xlabel("staleness s (updates)")
  axis.set_ylabel("learning rate × curvature")
  axis.set_title("Above the line the ball never comes to rest")
  axis.legend()


def _draw_devices(axis, measurements) -> None:
  counts = [int(count) for count in measurements[0]["devices"]]
  for name, label, color, marker in (
    ("fixed", "fixed rate", 1, "o"),
    ("divided", "rate / staleness", 0, "s"),
  ):
    values = np.array(
      [[d[name] for d in m["devices"].values()] for m in measurements]
    )
    middle = np.median(values, axis=0)
    axis.errorbar(
      counts,
      middle,
      yerr=[middle - values.min(0), values.max(0) - middle],
      color=claims.COLORS[color],
      marker=marker,
      capsize=4,
      label=label,
    )
  axis.set_xscale("log", base=2)
  axis.set_xticks(counts, [str(count) for count in counts])
  axis.set_yscale("symlog", linthresh=0.1)
  axis.set_ylim(bottom=-0.02)
  axis.set_xlabel("asynchronous devices, exponential compute times")
  axis.set_ylabel("overshoot (of the start)")
  axis.set_title(f"Random staleness, {NUM_UPDATES} updates, rate {RATE}")
  axis.legend()


CLAIM = claims.Claim(
  name="stale_ball",
  title="The stale ball: an illustration",
  claim=(
    "Gradients that were computed from old variables push past the minimum,"
    " and farther if they are older. A learning rate divided by the staleness"
    " makes this distance much smaller."
  ),
  source=(
    "beginners' explanations of asynchronous training; limits: Levin and May"
    " 1976; remedy: Zhang et al. 2015, section 3"
  ),
  explanation=(
    "A ball in a bowl stands for a model with one weight, and the bottom for"
    " the best value. A gradient says how steep the bowl is at the place where"
    " it was computed. Two devices read the weight at the time t0, and both"
    " compute a step of three quarters of the way to the bottom. If the mean of"
    " both steps is applied, the ball comes close to the bottom. If both are"
    " applied one after the other, the ball goes one and a half times the way"
    " to the bottom, because the second step was computed for a place that the"
    " ball has left. The more updates there are between the read of a device"
    " and its step, the farther the ball swings. With too many, it never comes"
    " to rest. The ball obeys one formula, and all numbers follow from it. So"
    " they show what staleness does to one weight, and prove nothing about"
    " networks; `staleness_hurts` trains one."
  ),
  measure=measure,
  find=find,
  draw=draw,
  is_illustration=True,
)

if __name__ == "__main__":
  claims.start(CLAIM)
