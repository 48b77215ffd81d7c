"""Simulates what waiting and staleness cost with 10 to 10,000 replicas.

  python -m experiments.claims.scale_out [--quick]
    [--num_seeds=3] [--output=DIR]

A replica by itself makes one contribution (a set of gradients) per second on
average. Efficiency is the rate of applied contributions, divided by the rate of
equally many replicas that never wait.
"""

import math
from collections.abc import Sequence

import numpy as np

from experiments import simulator
from experiments.simulator import compute_times
from experiments.support import claims

REPLICAS = (10, 32, 100, 316, 1000, 3162, 10_000)
BACKUP_SHARE = 0.05
SHIFT, MEAN = 0.8, 0.2
COMPUTE = compute_times.Exponential(MEAN, shift=SHIFT)
# 100 MB of parameters on PS tasks with links of 10 Gbit/s.
LINKS = {
  "read_bytes": 100e6,
  "num_ps": 16,
  "ps_bandwidth": 1.25e9,
  "replica_bandwidth": 1.25e9,
  "latency": 1e-4,
}
LIMIT = LINKS["num_ps"] * LINKS["ps_bandwidth"] / LINKS["read_bytes"]
RULES = {
  "synchronous": (0, "o"),
  "5% are backups": (2, "s"),
  "asynchronous": (1, "^"),
}


def simulate(
  name: str, count: int, is_quick: bool, seed: int, links: dict
) -> dict:
  """Returns efficiency, waiting and staleness of a simulated training.

  The beginning does not count, as all replicas start together: the first tenth
  of synchronous training, the first half of asynchronous training.

  Args:
    name: The update rule, a key of `RULES`.
    count: The number of replicas.
    is_quick: Whether to simulate fewer steps.
    seed: The seed of the compute times.
    links: Arguments of `simulator.Cluster` that describe the links; empty for
      links that take no time.
  """
  cluster = simulator.Cluster(count, COMPUTE, **links)
  num_steps = 200 if is_quick else 400
  first = num_steps // 10
  if name == "asynchronous":
    first = count * (3 if is_quick else 4)
    num_steps = 2 * first
    rule = simulator.Async()
  else:
    backups = round(BACKUP_SHARE * count) if "backups" in name else 0
    rule = simulator.Sync(count - backups)
  result = simulator.simulate(cluster, rule, num_steps, seed=seed)
  secs = result.step_ends[-1] - result.step_ends[first - 1]
  per_step = len(result.staleness) // num_steps
  staleness = result.staleness[first * per_step :]
  throughput = len(staleness) / secs
  return {
    "throughput": float(throughput),
    "efficiency": float(throughput / count),
    "waiting": float(result.wait_secs.mean() / result.step_ends[-1]),
    "staleness": float(staleness.mean()),
    "step_secs": float(secs / (num_steps - first)),
  }


def measure(is_quick: bool, seed: int) -> dict:
  """Simulates all rules and numbers of replicas, with real and ideal links.

  With `is_quick`, it simulates fewer steps and up to 1,000 replicas only. The
  result has the numbers of replicas, and the results of `simulate`: `free` with
  links that take no time, `links` with those of `LINKS`.
  """
  counts = [n for n in REPLICAS if n <= 1000] if is_quick else REPLICAS
  return {
    "replicas": list(counts),
    **{
      kind: {
        name: [simulate(name, n, is_quick, seed, links) for n in counts]
        for name in RULES
      }
      for kind, links in (("free", {}), ("links", LINKS))
    },
  }


def synchronous_efficiency(count: int) -> float:
  """Returns the efficiency of synchronous training by a formula.

  The formula uses the expected maximum of `count` exponential times; links take
  no time.
  """
  harmonic = sum(1 / i for i in range(1, count + 1))
  return 1 / (SHIFT + MEAN * harmonic)


def find(measurements: Sequence[dict]) -> list[claims.Finding]:
  """Returns the numbers that the curves illustrate, without bounds."""
  most = measurements[0]["replicas"][-1]

  def last(kind, name, what):
    return [m[kind][name][-1][what] for m in measurements]

  def to_formula(m):
    ratios = [
      point["efficiency"] / synchronous_efficiency(n)
      for n, point in zip(m["replicas"], m["free"]["synchronous"], strict=True)
    ]
    return max(ratios, key=lambda ratio: abs(math.log(ratio)))

  pairs = zip(
    last("free", "5% are backups", "efficiency"),
    last("free", "synchronous", "efficiency"),
    strict=True,
  )
  return [
    claims.Finding(
      "synchronous, links free: efficiency, of 1 / (0.8 + 0.2 H(n)); the worst",
      [to_formula(m) for m in measurements],
    ),
    claims.Finding(
      f"synchronous, links free: efficiency of {most}",
      last("free", "synchronous", "efficiency"),
    ),
    claims.Finding(
      f"5% are backups, links free: efficiency of {most}, of that without",
      [backup / sync for backup, sync in pairs],
    ),
    claims.Finding(
      f"asynchronous, links free: efficiency of {most}",
      last("free", "asynchronous", "efficiency"),
    ),
    claims.Finding(
      f"asynchronous, links free: mean staleness of {most}, per other replica",
      [s / (most - 1) for s in last("free", "asynchronous", "staleness")],
    ),
    claims.Finding(
      f"asynchronous, {LINKS['num_ps']} PS: throughput of {most}, of what"
      " their links can carry",
      [t / LIMIT for t in last("links", "asynchronous", "throughput")],
    ),
  ]


def draw(measurements: Sequence[dict]):
  """Draws efficiency, throughput, waiting and staleness over the replicas."""
  figure, axes = claims.new_figure(10.5, 8, nrows=2, ncols=2)
  with_links = "100 MB on 16 PS tasks with 10 Gbit/s each"
  for name, (color, marker) in RULES.items():
    style = {"color": claims.COLORS[color], "marker": marker, "label": name}
    _plot(axes[0, 0], measurements, "free", name, "efficiency", style)
    _plot(axes[0, 1], measurements, "links", name, "throughput", style)
    _plot(axes[1, 0], measurements, "free", name, "waiting", style)
  for kind, label, style in (
    ("free", "links cost nothing", {"color": claims.COLORS[0], "marker": "o"}),
    (
      "links",
      with_links,
      {
        "color": claims.COLORS[1],
        "marker": "s",
        "markersize": 11,
        "markerfacecolor": "none",
        "linestyle": ":",
      },
    ),
  ):
    style = {"label": label, **style}
    _plot(axes[1, 1], measurements, kind, "asynchronous", "staleness", style)
  for axis, label, title in zip(
    axes.flat,
    (
      "efficiency",
      "contributions applied per s",
      "share of a replica's time spent waiting",
      "mean staleness (updates)",
    ),
    (
      "Efficiency, if links cost nothing",
      f"Throughput, {with_links}",
      "Waiting, if links cost nothing",
      "Staleness of asynchronous training",
    ),
    strict=True,
  ):
    axis.set_xscale("log")
    axis.set_xlabel("replicas")
    axis.set_ylabel(label)
    axis.set_title(title)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=9)
  axes[0, 0].set_ylim(0, 1.1)
  axes[1, 0].set_ylim(0, 1.0)
  axes[0, 1].set_yscale("log")
  axes[1, 1].set_yscale("log")
  axes[0, 1].axhline(LIMIT, color="grey", linestyle=":")
  axes[0, 1].text(10, LIMIT * 1.07, "what the links carry", fontsize=8)
  axes[0, 1].set_ylim(top=2 * LIMIT)
  return figure


def _plot(axis, measurements, kind, name, what, style) -> None:
  """Draws the median of a number over seeds, over the number of replicas.

  Bars show the least and the largest value of all seeds.

  Args:
    axis: The axes to draw on.
    measurements: Results of `measure`, one per seed.
    kind: `free` or `links`, the kind of the links.
    name: The update rule.
    what: The name of the number, such as `efficiency`.
    style: Arguments of the plot.
  """
  values = np.array(
    [[point[what] for point in m[kind][name]] for m in measurements]
  )
  middle = np.median(values, axis=0)
  axis.errorbar(
    measurements[0]["replicas"],
    middle,
    yerr=[middle - values.min(0), values.max(0) - middle],
    capsize=3,
    **style,
  )


CLAIM = claims.Claim(
  name="scale_out",
  title="From 10 to 10,000 replicas: an illustration",
  claim=(
    "The more replicas there are, the longer synchronous training waits."
    " Backups regain much of this time. Asynchronous training does not wait,"
    " but its gradients are stale. In the end, the links of the parameter"
    " servers limit both."
  ),
  source=(
    "Dutta et al. 2018, section 3 (order statistics); Abadi et al. 2016 (OSDI),"
    " section 6.3"
  ),
  explanation=(
    "These curves are simulated. Staleness, the efficiency without links, and"
    " the limit of the links follow from how the simulator is built, so they"
    " are no evidence; they show how large the effects are. A batch takes 0.8 s"
    " and an exponentially distributed time of 0.2 s on average. A synchronous"
    " step takes as long as the slowest of n batches, which grows with the"
    " logarithm of n. If a step does not wait for the slowest 5%, it hardly"
    " depends on n. Asynchronous replicas do not wait, but between the read and"
    " the update of a replica, all others make one update each. In the plot at"
    " the top right, parameters and gradients need time on the links. From some"
    " number of replicas on, more replicas only wait for the parameter servers."
  ),
  measure=measure,
  find=find,
  draw=draw,
  is_illustration=True,
)

if __name__ == "__main__":
  claims.start(CLAIM)
