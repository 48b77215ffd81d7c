"""Measures how often a reader sees a half-applied update.

  python -m experiments.claims.partial_updates [--quick]
    [--num_seeds=2] [--output=DIR]

On a real cluster of 2 PS (parameter servers) and 2 workers, one worker adds 1
to every element of every variable, again and again. The other one reads all
variables. Both do this as fast as they can. Between two updates, all elements
have equal values. If a read gives different values, the reader has seen an
update of which only a part was applied.

Then a single variable of 64 MiB is on one PS task with 8 threads for an
operation. Two workers add to all of its elements at the same time, and a loop
on the PS task reads it. They add by the library's asynchronous rule, with dense
gradients and with sparse ones that have all rows. The same is done in one
process with a variable of TF1, two threads that run TF1's training operation,
and one that reads. TF1's documentation warns of these: without `use_locking`,
"a subset of the elements in a variable may have been updated".
"""

import json
import math
import os
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
# Rows and columns: 64 MiB on one task.
LARGE = (1 << 20, 16)
# With --quick.
LARGE_QUICK = (1 << 16, 16)
NUM_WRITERS = 2
_PS_THREADS = 8
# How the library's rule adds to the large variable: whether the gradients are
# sparse, and the options of the rule. Dense ones come first, since TensorFlow
# treats a variable in another way after the first sparse update.
WAYS = {
  "dense": (False, {}),
  "dense, use_locking": (False, {"use_locking": True}),
  "sparse": (True, {}),
  "sparse, use_locking": (True, {"use_locking": True}),
  "sparse, snapshot_reads": (True, {"snapshot_reads": True}),
}
TF1_WAYS = {"TF1": False, "TF1, use_locking": True}
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
  `large` is the result of `_measure_large`.
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
    found = {
      name: json.loads(pathlib.Path(directory, f"{name}.json").read_text())
      for name in SETTINGS
    }
  return {**found, "large": _measure_large(is_quick)}


def _measure_large(is_quick: bool) -> dict[str, dict]:
  """Reads a large variable while several workers add to it, in all ways.

  Args:
    is_quick: Whether the variable is smaller, and the time shorter.

  Returns:
    For each of `WAYS` and `TF1_WAYS`: `num_reads`; `torn`, the number of reads
    with unequal elements; `changed`, the number of reads that differ from the
    one before; `updates_per_sec`.
  """
  shape, secs = (LARGE_QUICK, 5.0) if is_quick else (LARGE, 20.0)
  with tempfile.TemporaryDirectory() as directory:
    programs.run_tasks(
      "experiments.claims.torn_elements_task",
      [*shape, secs],
      document={
        "ps": ["localhost:0"],
        "worker": ["localhost:0"] * (NUM_WRITERS + 1),
      },
      directory=directory,
      environ={
        **os.environ,
        "TF_NUM_INTRAOP_THREADS": str(_PS_THREADS),
        "TF_NUM_INTEROP_THREADS": str(_PS_THREADS),
      },
    )
    text = pathlib.Path(directory, "found.json").read_text(encoding="utf-8")
  return json.loads(text)


def upper_bound(count: int, num_reads: int) -> float:
  """Returns the share of reads that `count` is consistent with, at most.

  It is the upper end of the one-sided 95% confidence interval of Clopper and
  Pearson (1934): with this share, `count` or fewer reads have a probability of
  5%.

  Args:
    count: How many reads were torn.
    num_reads: The number of reads.
  """
  if count == num_reads:
    return 1.0
  k = np.arange(1, count + 1)
  # log of the binomial coefficients (num_reads over k), from k = 0 on.
  log_ways = np.cumsum([0.0, *np.log((num_reads - k + 1) / k)])
  k = np.arange(count + 1)
  low, high = count / num_reads, 1.0
  for _ in range(60):
    share = (low + high) / 2
    logs = log_ways + k * np.log(share) + (num_reads - k) * np.log1p(-share)
    if np.exp(logs).sum() > 0.05:
      low = share
    else:
      high = share
  return high


def find(measurements: Sequence[dict]) -> list[claims.Finding]:
  """Returns the measured numbers of the claim, with the claimed bounds."""

  def each(setting, field):
    return [m[setting][field] for m in measurements]

  def per_sec(setting, field):
    return [m[setting][field] / m["neither"][field] for m in measurements]

  def share(way):
    return [
      m["large"][way]["torn"] / m["large"][way]["num_reads"]
      for m in measurements
    ]

  whole = [
    way
    for way, (is_sparse, options) in WAYS.items()
    if not is_sparse or "snapshot_reads" in options
  ]
  large = [
    claims.Finding(
      "64 MiB on one task, two writers: share of the reads with unequal"
      " elements, TF1's variable without `use_locking`",
      share("TF1"),
      least=LEAST_SHARE,
    ),
    claims.Finding("the same with `use_locking`", share("TF1, use_locking")),
    *(
      claims.Finding(
        f"the same by the library's rule ({way})",
        share(way),
        most=0 if way in whole else math.inf,
      )
      for way in WAYS
    ),
    *(
      claims.Finding(
        f"{way}: reads that found another value than the read before",
        [float(m["large"][way]["changed"]) for m in measurements],
        least=10,
      )
      for way in WAYS
    ),
    *(
      claims.Finding(
        f"{way}: upper limit of the share of reads with unequal elements"
        " (95% confidence)",
        [
          upper_bound(m["large"][way]["torn"], m["large"][way]["num_reads"])
          for m in measurements
        ],
      )
      for way in whole
    ),
  ]
  return [
    claims.Finding(
      "share of the reads that see half of an update, without options",
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
      "share of the reads that see half of an update of a variable on one task,"
      " the most of all three settings",
      [max(m[name]["in_whole"] for name in SETTINGS) for m in measurements],
      most=0.0,
    ),
    claims.Finding(
      "most updates between the oldest and the newest element of one read",
      each("neither", "apart"),
    ),
    claims.Finding(
      "reads per second with `snapshot_reads`, divided by those without"
      " options",
      per_sec("snapshot_reads", "reads_per_sec"),
    ),
    claims.Finding(
      "updates per second with `snapshot_reads`, divided by those without"
      " options",
      per_sec("snapshot_reads", "updates_per_sec"),
    ),
    *large,
  ]


def draw(measurements: Sequence[dict]):
  """Draws how often reads saw half an update, and the speed of both workers."""
  figure, (shares, rates, large) = claims.new_figure(
    13, 3.8, ncols=3, width_ratios=[3, 2, 2]
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
  ways = [*TF1_WAYS, *WAYS]
  torn_shares = [
    [100 * m["large"][w]["torn"] / m["large"][w]["num_reads"] for w in ways]
    for m in measurements
  ]
  large.barh(
    range(len(ways)), np.median(torn_shares, axis=0), color=claims.COLORS[1]
  )
  large.set_yticks(range(len(ways)), ways, fontsize=8)
  large.invert_yaxis()
  large.set_xlabel("reads with unequal elements (%)")
  large.set_title("one variable of 64 MiB, two writers", fontsize=9)
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
  axis.set_xticks(range(len(settings)), SETTINGS, fontsize=8)
  axis.margins(y=0.15)
  axis.legend(
    loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=9
  )


CLAIM = claims.Claim(
  name="partial_updates",
  title="Half-applied updates, seen by a reader",
  claim=(
    "an asynchronous replica may read a model of which only a part has been"
    " updated, even with `use_locking`, because this option does not stop"
    " reads. With `snapshot_reads`, it sees every update as a whole or not at"
    " all. TF1's warning, that a subset of the elements of one variable may"
    " have been updated, is true of TF1's variables. In this library, no reader"
    " sees half of a dense update of a variable that is on one task"
  ),
  source="the documentation of `use_locking` in TF1, and our own",
  explanation=(
    "Some processes repeatedly add 1 to every number of a model. Another"
    " process repeatedly reads the model. A read between two updates finds the"
    " same number everywhere. A read during an update finds, for example, 41"
    " in one place and 42 in another. The bars on the left show how often this"
    " happens: anywhere in the model, in the variable whose two halves are on"
    " different parameter servers, and in a variable on one parameter server."
    " With `use_locking`, updates exclude each other, but not reads. With"
    " `snapshot_reads`, reads and updates take the same lock. The middle shows"
    " the speeds, which were measured one after the other: with other load,"
    " they may differ by more than the lock costs. On the right, two workers"
    " add to one variable of 64 MiB at the same time. A variable of TF1 is"
    " changed in place while others read it. Each read copies it in one pass,"
    " and the copy's smallest and largest element are compared. The library's"
    " variables are locked during a dense update, so that a read waits, and no"
    " read with unequal elements was seen. The table gives an upper limit of"
    " their share (95% confidence). A sparse update (of rows) does not exclude"
    " reads of the same variable, with or without `use_locking`, so the"
    " warning is true for it. With `snapshot_reads`, none of these reads had"
    " unequal elements either."
  ),
  measure=measure,
  find=find,
  draw=draw,
)

if __name__ == "__main__":
  claims.start(CLAIM)
