"""Follows the advisor's advice on real clusters, and measures what it gains.

  python -m experiments.claims.advice [--quick] [--num_seeds=2] [--output=DIR]

Real trainings are recorded, one in each situation of `SITUATIONS`. The advisor
(`experiments.advise`) reads the timeline of each, and predicts gains. Of each
kind of advice (another rule, backup workers, more PS tasks), the one with the
largest predicted gain is followed: another real training is run as it says. The
gain is the examples applied per second, divided by those of the recorded
training.

Computing a gradient is replaced by waiting for drawn times (`timed_training`),
so that each worker has the speed of a machine of its own. The recorded training
and those that follow advice have the same times. Parameters and gradients
travel between real processes. Some situations use a private network of limited
links, which needs root.
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple

from experiments import advise
from experiments import simulator
from experiments.claims import validation
from experiments.simulator import compute_times
from experiments.simulator import recorded_run
from experiments.support import claims
from experiments.support import timed_training

MOST_ERROR = 0.15
_WORKERS = 4
_MEDIAN_SECS = 0.2
_BATCHES = 60  # About so many of each worker are used in a training.


class Situation(NamedTuple):
  """A training for which advice is sought.

  Attributes:
    rule: The update rule.
    times: The distribution of the seconds of a batch.
    slowest: The factor by which the last worker is slower than the others.
    num_elements: The number of parameters, float32.
    mbit_per_sec: The rate of each task's link; None: the loopback device.
  """

  rule: simulator.Sync | simulator.Async
  times: compute_times.Distribution
  slowest: float = 1.0
  num_elements: int = 250_000
  mbit_per_sec: float | None = None


SITUATIONS = {
  "uneven batches, sync": Situation(
    simulator.Sync(), compute_times.Lognormal(_MEDIAN_SECS, 0.6)
  ),
  "one slow worker, sync": Situation(
    simulator.Sync(), compute_times.Lognormal(_MEDIAN_SECS, 0.2), slowest=2.5
  ),
  "links of 200 Mbit/s, sync": Situation(
    simulator.Sync(),
    compute_times.Lognormal(_MEDIAN_SECS, 0.2),
    num_elements=1_000_000,
    mbit_per_sec=200.0,
  ),
  "links of 200 Mbit/s, async": Situation(
    simulator.Async(),
    compute_times.Lognormal(_MEDIAN_SECS, 0.2),
    num_elements=1_000_000,
    mbit_per_sec=200.0,
  ),
}
_MARKERS = {"rule": "o", "backups": "s", "ps": "^"}
_QUICK = ("uneven batches, sync",)


def record(
  situation: Situation,
  rule: simulator.Sync | simulator.Async,
  num_ps: int,
  *,
  seed: int,
  batches: int,
) -> list[recorded_run.Event]:
  """Trains on a real cluster, and returns the events of its timelines.

  Args:
    situation: The workers and the links.
    rule: The update rule.
    num_ps: The number of PS tasks.
    seed: The seed of the compute times.
    batches: The mean number of batches of each worker that are used.
  """
  per_update = _per_update(rule)
  return timed_training.train_by(
    rule,
    situation.times,
    _WORKERS,
    batches * _WORKERS // per_update,
    seed=seed,
    slowdown={_WORKERS - 1: situation.slowest},
    num_elements=situation.num_elements,
    num_ps=num_ps,
    mbit_per_sec=situation.mbit_per_sec,
  )


def _per_update(rule: simulator.Sync | simulator.Async) -> int:
  """Returns the number of contributions in an update."""
  if isinstance(rule, simulator.Sync):
    return rule.replicas_to_aggregate or _WORKERS
  return 1


def throughput(
  events: Sequence[recorded_run.Event], rule: simulator.Sync | simulator.Async
) -> float:
  """Returns the contributions applied per second.

  Args:
    events: The events of the whole run.
    rule: The update rule of the run.
  """
  return validation.step_rate(events) * _per_update(rule)


def best_of_each_kind(
  advice: Sequence[advise.Advice],
) -> dict[str, advise.Advice]:
  """Returns, for each kind, the advice with the largest predicted gain.

  Args:
    advice: What the advisor found, the largest gain first.
  """
  found = {}
  for each in advice:
    found.setdefault(each.option.kind, each)
  return found


def measure(is_quick: bool, seed: int) -> dict:
  """Records each situation, and follows the advice for it.

  With `is_quick`, it takes one situation, and shorter trainings. The result
  maps each situation and kind of advice to what was changed, and to the
  predicted and the measured gain.
  """
  batches = _BATCHES // 4 if is_quick else _BATCHES
  found = {}
  for number, (title, situation) in enumerate(SITUATIONS.items()):
    if is_quick and title not in _QUICK:
      continue

    def train(rule, num_ps, situation=situation, number=number):
      return record(
        situation,
        rule,
        num_ps,
        seed=len(SITUATIONS) * seed + number,
        batches=batches,
      )

    events = train(situation.rule, 1)
    before = throughput(events, situation.rule)
    fit = recorded_run.fit(
      advise.without_start(events), read_bytes=4.0 * situation.num_elements
    )
    advice = advise.advise(fit.cluster, advise.recorded_rule(events))
    rows = {}
    for kind, each in best_of_each_kind(advice).items():
      rule = each.option.rule
      followed = train(rule, each.option.cluster.num_ps)
      rows[kind] = {
        "change": each.option.what,
        "predicted": each.gain,
        "measured": throughput(followed, rule) / before,
      }
      print(f"{title}: {kind}: {rows[kind]}", file=sys.stderr, flush=True)
    found[title] = rows
  return found


def is_recommended(change: dict) -> bool:
  """Returns whether the advisor finds that a change is worth it.

  Args:
    change: The predicted and the measured gain.
  """
  return change["predicted"] >= advise.LEAST_GAIN


def is_near(change: dict) -> bool:
  """Returns whether a change gains about what is predicted.

  Args:
    change: The predicted and the measured gain.
  """
  return abs(change["measured"] / change["predicted"] - 1) <= MOST_ERROR


def _shares(
  what: str, changes: Sequence[Sequence[dict]]
) -> list[claims.Finding]:
  """Counts the changes that gain about what is predicted.

  Args:
    what: Which changes these are.
    changes: The changes of each measurement.

  Returns:
    One finding; none if a measurement has no such change.
  """
  if not all(changes):
    return []
  near = [sum(map(is_near, own)) for own in changes]
  counts = ", ".join(
    f"{count} of {len(own)}" for count, own in zip(near, changes, strict=True)
  )
  return [
    claims.Finding(
      f"share within {MOST_ERROR:.0%}, {what} ({counts})",
      [count / len(own) for count, own in zip(near, changes, strict=True)],
    )
  ]


def find(measurements: Sequence[dict]) -> list[claims.Finding]:
  """Returns the measured numbers of the claim, with the claimed bounds."""
  every = [
    [change for rows in m.values() for change in rows.values()]
    for m in measurements
  ]
  findings = [
    *_shares(
      f"of the changes with a predicted gain of {advise.LEAST_GAIN} or more",
      [[c for c in own if is_recommended(c)] for own in every],
    ),
    *_shares(
      "of the other changes, which the advisor does not recommend",
      [[c for c in own if not is_recommended(c)] for own in every],
    ),
  ]
  for title, rows in measurements[0].items():
    for kind in rows:
      pairs = [m[title][kind] for m in measurements]
      changes = " or ".join(sorted({p["change"] for p in pairs}))
      gains = ", ".join(
        f"{p['measured']:.3f} for {p['predicted']:.3f}" for p in pairs
      )
      what = (
        f"{title}: {changes}: measured gain divided by the predicted one"
        f" (measured {gains})"
      )
      bounds = {"least": 1 - MOST_ERROR, "most": 1 + MOST_ERROR}
      if not any(map(is_recommended, pairs)):
        what, bounds = f"{what} (not recommended, not judged)", {}
      findings.append(
        claims.Finding(
          what, [p["measured"] / p["predicted"] for p in pairs], **bounds
        )
      )
  return findings


def draw(measurements: Sequence[dict]):
  """Draws measured over predicted gains, a mark per training."""
  figure, axes = claims.new_figure(9.5, 5)
  most, least = 1.0, 1.0
  for color, (title, rows) in zip(
    claims.COLORS, measurements[0].items(), strict=False
  ):
    for kind in rows:
      x = [m[title][kind]["predicted"] for m in measurements]
      y = [m[title][kind]["measured"] for m in measurements]
      most, least = max(most, *x, *y), min(least, *x, *y)
      axes.plot(
        x,
        y,
        _MARKERS[kind],
        color=color,
        fillstyle="none",
        label=f"{title}: {'PS tasks' if kind == 'ps' else kind}",
      )
  claims.draw_equality(axes, least, most, MOST_ERROR)
  axes.axvline(
    advise.LEAST_GAIN,
    color="black",
    linestyle=":",
    label=f"recommended from {advise.LEAST_GAIN} on",
  )
  axes.set_xlabel("predicted gain (examples/s)")
  axes.set_ylabel("measured gain")
  axes.legend(
    frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1, 1)
  )
  return figure


CLAIM = claims.Claim(
  name="advice",
  title="What the advisor promises, and what following its advice gains",
  claim=(
    "the gain of a change that the advisor recommends (another update rule,"
    " backup workers, more PS tasks) is within 15% of the gain that it predicts"
    " from one recorded run"
  ),
  source="our own: `experiments.advise`",
  explanation=(
    "Each mark is a piece of advice that was followed on real processes: the"
    " gain that the advisor predicted from the timeline of one training, and"
    " the gain that was measured. A gain is the number of examples that are"
    " applied per second, divided by that of the recorded training; below 1 it"
    " is a loss. Of each kind of advice, the best one was followed, even if it"
    " gains nothing. The advisor recommends a change only if its predicted gain"
    f" is {advise.LEAST_GAIN} or more, so only these changes are judged. Each"
    " worker waits for a drawn time instead of computing;"
    " parameters and gradients travel between real processes. The compute times"
    " are the same in both trainings. Earlier runs of these trainings served to"
    " develop the simulator. Where the predicted gain is small, a measured loss"
    " can be within 15% of it."
  ),
  measure=measure,
  find=find,
  draw=draw,
)

if __name__ == "__main__":
  claims.start(CLAIM)
