"""Measures how often an asynchronous reader sees a half-applied update.

  python -m experiments.claims.partial_updates [--quick]
    [--num_seeds=1] [--output=DIR]

On a real cluster of 2 PS (parameter servers) and 2 workers, one worker adds 1
to every element of every variable, again and again. The other one reads all
variables. Both do this as fast as they can. Between two updates, all elements
have equal values. If a read gives different values, the reader has seen an
update of which only a part was applied.
"""

import json
import pathlib
import tempfile
from collections.abc import Sequence

import numpy as np

from experiments.support import claims
from experiments.support import programs

# What `AsyncReplicasOptimizer` is given.
SETTINGS = {
  "neither": {},
  "use_locking": {"use_locking": True},
  "snapshot_reads": {"snapshot_reads": True},
}
# Elements, float32. Each PS task holds one of the large ones, half of the
# small ones, and one half of the one that is large enough to be cut in two.
MIN_SHARD_BYTES = 1 << 20
SIZES = {
  "cut": 1 << 19,
  "large_0": 1 << 18,
  "large_1": 1 << 18,
  **{f"small_{number}": 64 for number in range(6)},
}
# The least share of the reads that counts as seen.
LEAST_SHARE = 0.001
_PS = 2
_WHERE = {
  "anywhere": "of the whole model",
  "in_cut": "of a variable cut in two",
  "in_whole": "of a variable on one task",
}


def torn(ranges: np.ndarray, names: Sequence[str]) -> dict[str, float]:
  """Returns which share of the reads saw a half-applied update, and where.

  Args:
    ranges: [reads, variables, 2], the least and the largest element of each
      variable in each read.
    names: The names of the variables, keys of `SIZES`.

  Returns:
    Shares of the reads. `anywhere`: the elements of all variables together
    differed. `in_cut`: the elements of the variable that is cut in two
    differed. `in_whole`: the elements of another variable differed. And
    `apart`: the largest number of updates between the oldest and the newest
    element of one read.
  """
  ranges = np.asarray(ranges)
  lows, highs = ranges[:, :, 0], ranges[:, :, 1]
  is_cut = np.array([name == "cut" for name in names])
  differs = lows < highs
  apart = highs.max(axis=1) - lows.min(axis=1)
  return {
    "anywhere": float(np.mean(apart > 0)),
    "in_cut": float(np.mean(differs[:, is_cut].any(axis=1))),
    "in_whole": float(np.mean(differs[:, ~is_cut].any(axis=1))),
    "apart": float(apart.max()),
  }


def measure(is_quick: bool, seed: int) -> dict:
  """Reads variables under each setting of the rule, in turn, on one cluster.

  With `is_quick`, it makes fewer reads. `seed` is not used. The result has, for
  each setting, the result of `torn`, and the reads and updates per second.
  """
  del seed
  num_reads = 300 if is_quick else 2000
  document = {
    "cluster": {
      "ps": ["localhost:0"] * _PS,
      "worker": ["localhost:0"] * 2,
    },
    "variables": {
      "on": "ps",
      "placement": "partitioned",
      "min_shard_bytes": MIN_SHARD_BYTES,
    },
  }
  with tempfile.TemporaryDirectory() as directory:
    programs.run_tasks(
      "experiments.claims.partial_updates_task",
      [num_reads],
      document=document,
      directory=directory,
    )
    return {
      name: json.loads(pathlib.Path(directory, f"{name}.json").read_text())
      for name in SETTINGS
    }


def find(measurements: Sequence[dict]) -> list[claims.Finding]:
  """Returns the measured numbers of the claim, with the claimed bounds."""

  def each(setting, field):
    return [m[setting][field] for m in measurements]

  def per_sec(setting, field):
    return [m[setting][field] / m["neither"][field] for m in measurements]

  return [
    claims.Finding(
      "share of the reads that see half of an update, with neither option",
      each("neither", "anywhere"),
      least=LEAST_SHARE,
    ),
    claims.Finding(
      "the same with `use_locking`",
      each("use_locking", "anywhere"),
      least=LEAST_SHARE,
    ),
    claims.Finding(
      "the same with `snapshot_reads`",
      each("snapshot_reads", "anywhere"),
      most=0.0,
    ),
    claims.Finding(
      "share of the reads that see half of an update of a variable that lives"
      " on one task, the most of all three",
      [max(m[name]["in_whole"] for name in SETTINGS) for m in measurements],
      most=0.0,
    ),
    claims.Finding(
      "updates between the oldest and the newest element of one read, at most",
      each("neither", "apart"),
    ),
    claims.Finding(
      "reads per second with `snapshot_reads`, of those with neither",
      per_sec("snapshot_reads", "reads_per_sec"),
    ),
    claims.Finding(
      "updates per second with `snapshot_reads`, of those with neither",
      per_sec("snapshot_reads", "updates_per_sec"),
    ),
  ]


def draw(measurements: Sequence[dict]):
  """Draws how often reads saw half an update, and the speed of both workers."""
  figure, (shares, rates) = claims.new_figure(
    10, 3.8, ncols=2, width_ratios=[3, 2]
  )
  _draw_bars(
    shares,
    [[m[name] for m in measurements] for name in SETTINGS],
    {field: f"half an update {where}" for field, where in _WHERE.items()},
    scale=100.0,
  )
  shares.set_ylabel("reads (%)")
  _draw_bars(
    rates,
    [[m[name] for m in measurements] for name in SETTINGS],
    {"reads_per_sec": "reads", "updates_per_sec": "updates"},
  )
  rates.set_ylabel("per second")
  return figure


def _draw_bars(axis, settings, labels, scale=1.0) -> None:
  """Draws a group of bars for each setting of the rule.

  A bar is the median over seeds; dots show the value of each seed.

  Args:
    axis: The axes to draw on.
    settings: For each setting, its measurements, one per seed.
    labels: Maps the field of a measurement to the label of its bar.
    scale: A factor for all values.
  """
  width = 0.8 / len(labels)
  for number, (field, label) in enumerate(labels.items()):
    for place, measurements in enumerate(settings):
      values = [scale * m[field] for m in measurements]
      x = place + (number - (len(labels) - 1) / 2) * width
      axis.bar(
        x,
        np.median(values),
        width,
        color=claims.COLORS[number],
        hatch=("", "//", "..")[number],
        edgecolor="white",
        label=label if place == 0 else None,
      )
      axis.plot([x] * len(values), values, "k.", markersize=4)
      axis.annotate(
        f"{np.median(values):.3g}",
        (x, max(values)),
        textcoords="offset points",
        xytext=(0, 4),
        ha="center",
        fontsize=9,
      )
  axis.set_xticks(range(len(settings)), SETTINGS)
  axis.margins(y=0.15)
  axis.legend(
    loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=9
  )


CLAIM = claims.Claim(
  name="partial_updates",
  title="Half-applied updates, seen by a reader",
  claim=(
    "an asynchronous replica may read a model to which half of an update was"
    " applied, with `use_locking` as without, for that keeps updates from each"
    " other and not from reads; a variable that lives on one task is whole in"
    " any case; with `snapshot_reads` the whole model is"
  ),
  source="the documentation of `use_locking` in TF1, and our own",
  explanation=(
    "One process adds 1 to every number of a model, over and over; another"
    " reads the whole model, over and over. Whoever reads between two updates"
    " gets the same number everywhere. Whoever reads while an update is being"
    " made gets, say, 41 here and 42 there: half of the model is older than the"
    " other half. The bars on the left say how often that happens: anywhere in"
    " the model, within the one variable whose two halves live on different"
    " parameter servers, and within a variable that lives on one. A lock that"
    " only updates take, as `use_locking` has it, changes nothing for the"
    " reader. With `snapshot_reads` reads and updates take the same lock, and"
    " the bars on the right say what waiting for each other costs."
  ),
  measure=measure,
  find=find,
  draw=draw,
)

if __name__ == "__main__":
  claims.start(CLAIM)
