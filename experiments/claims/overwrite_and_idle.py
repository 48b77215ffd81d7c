"""Measures who waits for a slow worker, and what its late writes overwrite.

  python -m experiments.claims.overwrite_and_idle [--quick]
    [--num_seeds=2] [--output=DIR]

A real cluster of 1 PS (parameter server) and 3 workers. In each worker, a batch
takes a fixed time to arrive, so that the speed of a worker does not depend on
the cores that all of them share. For one worker this time is five times as long
as for the others.

First, the cluster trains, once synchronously and once asynchronously, and the
recorded timelines say who waited, and how stale gradients were. That follows
from the given times, so it is shown and not judged.

Then every worker reads a variable, waits for its time, and adds 1, again and
again. They do so as a literal write, which assigns what was read plus 1, and by
the asynchronous rule of the library, without options, with `use_locking` and
with `snapshot_reads`; and by the rule without waiting, as fast as they can. If
no write is lost, the variable ends at the number of writes.

The late updates of the recorded asynchronous training also push the ball of
`stale_ball`. That computation is shown and not judged.
"""

import json
import pathlib
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.claims import partial_updates
from experiments.claims import stale_ball
from experiments.claims import straggler
from experiments.simulator import recorded_run
from experiments.support import claims
from experiments.support import programs
from experiments.support import timed_training

FAST = ("worker:0", "worker:1")
SLOW = "worker:2"
# Seconds that a batch takes.
TURN_SECS = {FAST[0]: 0.1, FAST[1]: 0.1, SLOW: 0.5}
RATE = stale_ball.RATE
# How a worker writes -> the options of the asynchronous rule; None: it assigns
# what it has read plus 1. LITERAL_FAST is without the slow worker.
LITERAL, LITERAL_FAST = "assign", "assign, without the slow worker"
WITHOUT_WAITING = "add, without waiting"
WAYS = {
  LITERAL: None,
  LITERAL_FAST: None,
  "add": {},
  "add, use_locking": {"use_locking": True},
  "add, snapshot_reads": {"snapshot_reads": True},
  WITHOUT_WAITING: {},
}
RATES = (0.05, 0.1, 0.2, RATE, 0.4, 0.5)
# In the picture.
SHOWN_SECS = 4.0
_SHOWN_UPDATES = 50
_OF_FAST, _OF_SLOW, _WAITS = claims.COLORS[4], claims.COLORS[1], "#DDDDDD"


class Write(NamedTuple):
  """A recorded update of the variables.

  Attributes:
    task: The worker whose gradient was applied; the chief if the update is made
      of several gradients.
    staleness: The number of updates between the read of the variables from
      which the gradient was computed and this update.
    time: The time of the update, in seconds.
  """

  task: str
  staleness: int
  time: float


def writes(events: Sequence[recorded_run.Event]) -> list[Write]:
  """Finds all updates of the variables in a recorded run, in their order.

  Args:
    events: The events of the whole run, ordered by their start. The step of a
      worker's batch is the number of updates before its read.
  """
  made, read = [], {}
  for event in events:
    if event.kind == "compute":
      read[event.task] = event.step
    elif event.kind == "apply":
      made.append((event.end, event.task, read.get(event.task)))
  return [
    Write(task, 0 if step is None else max(number - step, 0), time)
    for number, (time, task, step) in enumerate(sorted(made))
  ]


def paths(
  order: Sequence[tuple[str, int]], tasks: Sequence[str], rate: float
) -> list[np.ndarray]:
  """Simulates how late updates of some workers push a ball in a bowl.

  The ball stands for a model with one weight, and the minimum is at 0. For each
  update, the ball starts anew at 1, when the worker reads the variables. Then
  it is pushed by all updates in the recorded order, until the worker's own.
  Workers that had read before the start have read 1 too.

  Args:
    order: (task, staleness) of all updates, in their order.
    tasks: The workers whose updates are simulated.
    rate: The learning rate times the curvature of the bowl.

  Returns:
    For each update of these workers, the positions of the ball, float64
    [staleness + 2]: at the read, after each update of other workers, and after
    the update itself.
  """
  return [
    stale_ball.roll(rate, [s for _, s in order[t - stale : t + 1]])
    for t, (task, stale) in enumerate(order)
    if task in tasks and stale <= t
  ]


def undone(rolled: Sequence[np.ndarray]) -> float:
  """Returns which share of the progress of other workers late updates undo.

  The progress of other workers is the distance by which the ball came closer to
  the minimum between a worker's read and the moment before its update. That
  update undoes the distance by which it moves the ball away again.

  Args:
    rolled: Paths of the ball, as `paths` returns them.

  Returns:
    The sum of the undone distances as a share of the sum of the progress; 0
    without progress.
  """
  won = sum(path[0] - abs(path[-2]) for path in rolled)
  lost = sum(max(abs(path[-1]) - abs(path[-2]), 0.0) for path in rolled)
  return float(lost / won) if won > 0 else 0.0


def measure(is_quick: bool, seed: int) -> dict:
  """Trains and writes in all ways, and summarizes what was recorded.

  With `is_quick`, it makes fewer updates. `seed` is not used. The result maps
  `sync` and `async` to what `summary` returns for this run, and `writes` to
  what `_write` returns.
  """
  del seed
  return {
    "sync": summary(_train("sync", 10 if is_quick else 40)),
    "async": summary(_train("async", 100 if is_quick else 450)),
    "writes": _write(4.0 if is_quick else 10.0),
  }


def _train(update: str, num_steps: int) -> list[recorded_run.Event]:
  """Trains on a real cluster, and returns the recorded events.

  Args:
    update: `sync` or `async`.
    num_steps: The number of updates.
  """
  return timed_training.train(
    [[secs] for secs in TURN_SECS.values()], num_steps, update=update
  )


def _write(secs: float) -> dict[str, dict]:
  """Lets the workers add 1 to a variable in all ways, on one cluster.

  Args:
    secs: For how long they do so in each way.

  Returns:
    For each of `WAYS`, `writes`, the number of writes of each worker, and
    `value`, the value of the variable afterwards.
  """
  with tempfile.TemporaryDirectory() as directory:
    programs.run_tasks(
      "experiments.claims.overwrite_and_idle_task",
      [secs],
      document={
        "ps": ["localhost:0"],
        "worker": ["localhost:0"] * len(TURN_SECS),
      },
      directory=directory,
    )
    text = pathlib.Path(directory, "written.json").read_text(encoding="utf-8")
  return json.loads(text)


def lost(measurement: dict, way: str) -> float:
  """Returns the share of all writes that the variable does not contain.

  Args:
    measurement: The result of `measure`.
    way: How the workers wrote, one of `WAYS`.
  """
  found = measurement["writes"][way]
  return 1 - found["value"] / sum(found["writes"])


def most_lost(measurement: dict, way: str) -> float:
  """Returns the largest share of lost writes with which a measurement agrees.

  Args:
    measurement: The result of `measure`.
    way: How the workers wrote, one of `WAYS`.
  """
  writes = sum(measurement["writes"][way]["writes"])
  lost_writes = round(lost(measurement, way) * writes)
  return partial_updates.upper_bound(lost_writes, writes)


def summary(events: Sequence[recorded_run.Event]) -> dict:
  """Summarizes a recorded run, after all workers have computed once.

  Args:
    events: The events of the whole run, ordered by their start.

  Returns:
    `waiting`: for each worker, the share of the time that it waited.
    `turn_secs`: the mean seconds between two updates of a task. `order`: (task,
    staleness) of all updates. `waits` and `updates`: those of a few seconds in
    the middle of the run.
  """
  begin = max(
    min(e.end for e in events if e.kind == "compute" and e.task == task)
    for task in TURN_SECS
  )
  made = [w for w in writes(events) if w.time > begin]
  start = max((begin + made[-1].time - SHOWN_SECS) / 2, begin)
  end = start + SHOWN_SECS

  def shown(time):
    return round(min(max(time, start), end) - start, 4)

  return {
    "waiting": {
      task: 1 - straggler.busy_share(events, task, begin) for task in TURN_SECS
    },
    "turn_secs": {
      task: _turn_secs(made, task) for task in sorted({w.task for w in made})
    },
    "order": [[w.task, w.staleness] for w in made],
    "waits": [
      [e.task, shown(e.start), shown(e.end)]
      for e in events
      if e.kind == "wait" and e.start < end and e.end > start
    ],
    "updates": [
      [w.task, w.staleness, shown(w.time)]
      for w in made
      if start <= w.time <= end
    ],
    "events": [
      [e.task, e.kind, shown(e.start), shown(e.end)]
      for e in events
      if e.start < end and e.end > start
    ],
  }


def _turn_secs(made: Sequence[Write], task: str) -> float:
  times = [w.time for w in made if w.task == task]
  return (times[-1] - times[0]) / max(len(times) - 1, 1)


def _of_fast(by_task: dict[str, float]) -> float:
  return sum(by_task[task] for task in FAST) / len(FAST)


def expected_waiting(measurement: dict) -> float:
  """Returns which share of a synchronous step the fast workers should wait.

  A synchronous step takes as long as a turn of the slow worker. How long a turn
  of either kind of worker takes without waiting is known from the asynchronous
  training.

  Args:
    measurement: The result of `measure`.
  """
  turn_secs = measurement["async"]["turn_secs"]
  return 1 - _of_fast(turn_secs) / turn_secs[SLOW]


def staleness(measurement: dict, tasks: Sequence[str]) -> float:
  """Returns the mean staleness of the asynchronous updates of some workers.

  Args:
    measurement: The result of `measure`.
    tasks: The workers.
  """
  order = measurement["async"]["order"]
  return float(np.mean([stale for task, stale in order if task in tasks]))


def find(measurements: Sequence[dict]) -> list[claims.Finding]:
  """Returns the measured numbers of the claim, with the claimed bounds."""

  def each(value):
    return [value(m) for m in measurements]

  def undone_by(tasks):
    return each(lambda m: undone(paths(m["async"]["order"], tasks, RATE)))

  def waiting(update):
    return each(lambda m: _of_fast(m[update]["waiting"]))

  return [
    claims.Finding(
      "synchronous: share of the time that the fast workers wait",
      waiting("sync"),
    ),
    claims.Finding(
      "this share minus the one that follows from the turns of the workers",
      each(lambda m: _of_fast(m["sync"]["waiting"]) - expected_waiting(m)),
    ),
    claims.Finding(
      "asynchronous: share of the time that the fast workers wait",
      waiting("async"),
    ),
    claims.Finding(
      "asynchronous: mean staleness of the slow worker's gradients",
      each(lambda m: staleness(m, [SLOW])),
      "updates",
    ),
    claims.Finding(
      "asynchronous: mean staleness of the fast workers' gradients",
      each(lambda m: staleness(m, FAST)),
      "updates",
    ),
    claims.Finding(
      "share of the writes that are lost if a worker assigns what it has read"
      " plus its step (the literal write)",
      each(lambda m: lost(m, LITERAL)),
      least=0.1,
    ),
    claims.Finding(
      "the same with the two fast workers alone",
      each(lambda m: lost(m, LITERAL_FAST)),
    ),
    *(
      claims.Finding(
        f"share of the writes that are lost by the library's rule ({way})",
        each(lambda m, way=way: lost(m, way)),
        most=0.0,
      )
      for way, options in WAYS.items()
      if options is not None
    ),
    claims.Finding(
      f"upper limit of this share ({WITHOUT_WAITING}; 95% confidence)",
      each(lambda m: most_lost(m, WITHOUT_WAITING)),
    ),
    claims.Finding(
      "computed for one weight: the share of the others' progress since its"
      f" read that a late step of the slow worker undoes, at rate {RATE}",
      undone_by([SLOW]),
    ),
    claims.Finding("the same for a fast worker", undone_by(FAST)),
  ]


def draw(measurements: Sequence[dict]):
  """Draws who waits for the slow worker, and what its late updates undo."""
  figure, axes = claims.new_figure(10, 9.4, nrows=3, ncols=2)
  first = measurements[0]
  _draw_turns(axes[0, 0], first["sync"], "Synchronous: the fast workers wait")
  _draw_turns(axes[0, 1], first["async"], "Asynchronous: no worker waits")
  _draw_lost(axes[1, 0], measurements)
  axes[1, 1].axis("off")
  _draw_ball(axes[2, 0], first["async"]["order"])
  _draw_undone(axes[2, 1], measurements)
  return figure


def _draw_lost(axis, measurements) -> None:
  shares = np.array([[lost(m, way) for way in WAYS] for m in measurements])
  axis.barh(
    range(len(WAYS)), 100 * np.median(shares, axis=0), color=claims.COLORS[1]
  )
  axis.set_yticks(range(len(WAYS)), WAYS)
  axis.invert_yaxis()
  axis.set_xlim(0, 100)
  axis.set_xlabel("writes that are lost (%)")
  axis.set_title("Lost writes")


def _draw_turns(axis, run, title: str) -> None:
  for row, task in enumerate(TURN_SECS):
    color = _OF_SLOW if task == SLOW else _OF_FAST
    axis.barh(row, SHOWN_SECS, height=0.7, color=color)
    for _, start, end in (w for w in run["waits"] if w[0] == task):
      axis.barh(row, end - start, left=start, height=0.72, color=_WAITS)
    before = 0.0
    for _, stale, time in (u for u in run["updates"] if u[0] == task):
      axis.plot([time, time], [row - 0.35, row + 0.35], color="black")
      if task == SLOW and time - before > 0.05 * SHOWN_SECS:
        axis.text((before + time) / 2, row, stale, ha="center", va="center")
      before = time
  for _, _, time in (u for u in run["updates"] if u[0] not in TURN_SECS):
    axis.axvline(time, color="black")
  axis.set_yticks(range(len(TURN_SECS)), [*FAST, f"{SLOW}, slow"])
  axis.invert_yaxis()
  axis.set_xlim(0, SHOWN_SECS)
  axis.set_xlabel("seconds; gray: waits; black line: update")
  axis.set_title(title)


def _draw_ball(axis, order) -> None:
  """Draws the positions of the ball after each of some recorded updates.

  The first of these updates is the one that follows an update of the slow
  worker, after which this worker reads the variables.

  Args:
    axis: The axes to draw on.
    order: (task, staleness) of all updates, in their order.
  """
  first = [task for task, _ in order].index(SLOW) + 1
  order = order[first : first + _SHOWN_UPDATES]
  path = stale_ball.roll(RATE, [stale for _, stale in order])
  axis.plot(path, color=_OF_FAST, label="after each update")
  late = [t + 1 for t, (task, _) in enumerate(order) if task == SLOW]
  axis.plot(
    late,
    path[late],
    "s",
    color=_OF_SLOW,
    label="after an update of the slow worker",
  )
  axis.axhline(0.0, color="black", linewidth=0.8)
  axis.set_xlabel("asynchronous updates, in the recorded order")
  axis.set_ylabel("position (1: the start)")
  axis.set_title(f"The ball, pushed in that order, rate {RATE}")
  axis.legend(frameon=False, fontsize=9)
  axis.grid(alpha=0.3)


def _draw_undone(axis, measurements) -> None:
  for tasks, label, color, marker in (
    ([SLOW], "the slow worker", _OF_SLOW, "s"),
    (FAST, "a fast worker", _OF_FAST, "o"),
  ):
    shares = np.array(
      [
        [undone(paths(m["async"]["order"], tasks, rate)) for rate in RATES]
        for m in measurements
      ]
    )
    middle = np.median(shares, axis=0)
    axis.errorbar(
      RATES,
      100 * middle,
      yerr=100 * np.array([middle - shares.min(0), shares.max(0) - middle]),
      color=color,
      marker=marker,
      capsize=4,
      label=label,
    )
  axis.set_ylim(bottom=-1)
  axis.set_xlabel("learning rate × curvature")
  axis.set_ylabel("undone of the progress of others (%)")
  axis.set_title("What a write undoes")
  axis.legend(frameon=False, fontsize=9)
  axis.grid(alpha=0.3)


CLAIM = claims.Claim(
  name="overwrite_and_idle",
  title="Waiting for a slow worker, or overwritten by it",
  claim=(
    "If workers wrote back what they had read plus their step, late writes"
    " would overwrite the work of others. With gradient descent, the library"
    " adds, and loses no write."
  ),
  source="beginners' explanations of distributed training",
  explanation=(
    "Two workers need a tenth of a second for a gradient, the third needs five"
    " times as long. At the top left, they train synchronously. A black line is"
    " an update, which needs a gradient of each of them, and the fast workers"
    " wait (gray) for most of the time. At the top right, they train"
    " asynchronously and do not wait. While the slow worker computes, the"
    " others change the variables; the number on its bar is the number of these"
    " updates. The waiting times and the age of the gradients follow from the"
    " chosen times, so they are shown and not judged. The middle row shows"
    " whether a late write overwrites these updates. Every worker adds 1"
    " repeatedly. If no write is lost, the last value of the variable is the"
    " number of writes. If a worker literally assigns what it has read plus 1,"
    " most writes are lost. Two equal workers alone lose half of theirs,"
    " because they write at the same time. The asynchronous rule adds the step"
    " to the present value, and lost none here, with and without its options."
    " With the options, workers wait between their writes, so that there are"
    " fewer than 200 of them, and a loss of 2% could remain unseen. (Optimizers"
    " with momentum can lose"
    " concurrent updates without `use_locking`: see `benchmarks.lost_updates`.)"
    " The last row is computed, and does not"
    " count for the verdict. It shows a ball, which stands for a model with one"
    " weight and the minimum at"
    " 0. Steps push the ball in the recorded order of reads and updates. A late"
    " step is added, although it was computed for an old position. With large"
    " steps, the slow worker pushes it past the minimum, and undoes a part of"
    " the progress of the others."
  ),
  measure=measure,
  find=find,
  draw=draw,
)

if __name__ == "__main__":
  claims.start(CLAIM)
