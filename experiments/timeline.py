"""Shows which task of a recorded run computed, waited, or worked in vain.

  python -m cifar10.distributed_train --timeline --train_dir=RUN …
  python -m experiments.timeline --run=RUN [--output=DIR] [--num_steps=12]
    [--first_step=K]

Writes timeline.json, a trace of the whole run for https://ui.perfetto.dev or
chrome://tracing, and timeline.png, a picture of a few steps. Without
`--first_step`, these are steps from the middle of the run. Prints how each task
spent its time. `--run` is a train directory, or a directory with the timeline
files themselves (see `tf_replicas.drivers.timeline`).
"""

import collections
import json
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from absl import flags

from experiments.simulator import recorded_run
from experiments.support import claims
from tf_replicas.programs import command_line
from tf_replicas.runtime import processes

FLAGS = flags.FLAGS
FRESH, STALE, REFUSED = "fresh", "stale", "refused"
# The chief of a synchronous run; it has no turns.
_CHIEF = "chief"
_COLORS = {
  "read": claims.COLORS[4],
  FRESH: claims.COLORS[0],
  STALE: claims.COLORS[3],
  REFUSED: claims.COLORS[1],
  "hand_over": claims.COLORS[2],
  "wait": "#DDDDDD",
  "apply": claims.COLORS[5],
}
_HATCHES = {REFUSED: "////", STALE: "...."}
_LABELS = {
  "read": "reads parameters",
  FRESH: "computes, used fresh",
  STALE: "computes, used k updates late",
  REFUSED: "computes, refused",
  "hand_over": "hands gradients over",
  "wait": "waits",
  "apply": "update",
}


class Turn(NamedTuple):
  """One computation of a gradient by a replica, and how it was used.

  Attributes:
    compute: The recorded event of the computation.
    outcome: FRESH, STALE (applied, but computed from older variables) or
      REFUSED (not applied).
    staleness: The number of updates between the read of the variables and the
      update with this gradient; 0 unless `outcome` is STALE.
  """

  compute: recorded_run.Event
  outcome: str
  staleness: int


def turns(events: Sequence[recorded_run.Event]) -> list[Turn]:
  """Finds out how the gradient of every computation was used.

  The last computations are left out if the record ends before their use.

  Args:
    events: The events of the whole run, ordered by their start.

  Returns:
    One `Turn` per computation, ordered by its start.
  """
  applied = np.sort([e.end for e in events if e.kind == "apply"])
  found = []
  for task, own in _by_task(events).items():
    if task == _CHIEF:
      continue
    read_at, compute = None, None
    for event in own:
      if event.kind == "read":
        read_at = event.start
      elif event.kind == "compute":
        compute = event
      elif compute is not None and event.kind in ("refused", "apply"):
        stale = 0
        if event.kind == "apply" and read_at is not None:
          first, last = np.searchsorted(applied, [read_at, event.end])
          stale = int(last - first)
        outcome = STALE if stale else FRESH
        outcome = REFUSED if event.kind == "refused" else outcome
        found.append(Turn(compute, outcome, stale))
        compute = None
      elif compute is not None and event.kind == "wait":
        # A wait after handing over, where updates are of several.
        if event.start > compute.end:
          found.append(Turn(compute, FRESH, 0))
          compute = None
  return sorted(found, key=lambda turn: turn.compute.start)


def _by_task(events) -> dict[str, list]:
  by_task = collections.defaultdict(list)
  for event in events:
    by_task[event.task].append(event)
  return dict(sorted(by_task.items(), key=lambda item: rank(item[0])))


def rank(task: str) -> tuple:
  """Returns a key that sorts tasks: the chief first, `worker:2` before 10.

  Args:
    task: The name of a task.
  """
  job, _, index = task.partition(":")
  return task != _CHIEF, job, int(index or 0)


def to_trace(events: Sequence[recorded_run.Event]) -> dict:
  """Converts events to the Trace Event Format of Chrome and Perfetto.

  Times are in microseconds since the first event. Each task is a process of the
  trace. The name of a computation says how its gradient was used.

  Args:
    events: The events of the whole run, ordered by their start.
  """
  begin = min(event.start for event in events)
  outcomes = {id(turn.compute): turn for turn in turns(events)}
  trace = []
  for number, (task, own) in enumerate(_by_task(events).items()):
    trace.append(
      {
        "name": "process_name",
        "ph": "M",
        "pid": number,
        "args": {"name": task},
      }
    )
    for event in own:
      turn = outcomes.get(id(event))
      details = {"step": event.step}
      name = event.kind
      if turn is not None:
        name = f"compute ({turn.outcome})"
        details["staleness"] = turn.staleness
      trace.append(
        {
          "name": name,
          "cat": event.kind,
          "ph": "X",
          "pid": number,
          "tid": 0,
          "ts": round((event.start - begin) * 1e6, 1),
          "dur": round((event.end - event.start) * 1e6, 1),
          "args": details,
        }
      )
  return {"traceEvents": trace, "displayTimeUnit": "ms"}


def window(
  events: Sequence[recorded_run.Event],
  num_steps: int,
  first_step: int | None = None,
) -> tuple[float, float]:
  """Returns the times between which some consecutive updates were made.

  Args:
    events: The events of the whole run.
    num_steps: The number of updates.
    first_step: The index of the first update. None: the updates are in the
      middle of the run.

  Returns:
    The begin and the end, in seconds on the clock of the events.

  Raises:
    ValueError: If no update was recorded, or `first_step` is too large.
  """
  ends = np.sort([e.end for e in events if e.kind == "apply"])
  begin = min(event.start for event in events)
  if not len(ends):
    raise ValueError("The timeline must have updates. Received: none.")
  if first_step is None:
    first_step = max(0, (len(ends) - num_steps) // 2)
  if first_step >= len(ends):
    raise ValueError(
      f"`--first_step` must be less than the number of updates, {len(ends)}."
      f" Received: {first_step}."
    )
  last = min(first_step + num_steps, len(ends)) - 1
  start = ends[first_step - 1] if first_step else begin
  return float(start), float(ends[last])


def draw(events: Sequence[recorded_run.Event], begin: float, end: float):
  """Draws what each task did in a part of a run, as a Gantt chart.

  Args:
    events: The events of the whole run, ordered by their start.
    begin: The time at which the chart begins, in seconds.
    end: The time at which the chart ends, in seconds.

  Returns:
    A `matplotlib.figure.Figure`.
  """
  outcomes = {id(turn.compute): turn for turn in turns(events)}
  by_task = _by_task(events)
  figure, axes = claims.new_figure(11, 1.9 + 0.55 * len(by_task))
  seen = set()
  for row, own in enumerate(by_task.values()):
    for event in own:
      if event.end < begin or event.start > end or event.kind == "refused":
        continue
      kind, label = event.kind, ""
      turn = outcomes.get(id(event))
      if event.kind == "compute":
        kind = turn.outcome if turn else FRESH
        label = str(turn.staleness) if kind == STALE else ""
      seen.add(kind)
      left, right = max(event.start, begin), min(event.end, end)
      axes.barh(
        row,
        (right - left) * 1e3,
        left=(left - begin) * 1e3,
        height=0.45 if kind == "wait" else 0.8,
        color=_COLORS[kind],
        hatch=_HATCHES.get(kind),
        edgecolor="white" if kind in _HATCHES else _COLORS[kind],
        linewidth=0.3,
      )
      if label and (right - left) > 0.02 * (end - begin):
        axes.text(
          ((left + right) / 2 - begin) * 1e3,
          row,
          label,
          ha="center",
          va="center",
          fontsize=8,
          bbox=dict(facecolor="white", edgecolor="none", pad=0.8),
        )
  for event in events:
    if event.kind == "apply" and begin <= event.end <= end:
      axes.axvline(
        (event.end - begin) * 1e3, color="black", linewidth=0.5, alpha=0.4
      )
  axes.set_yticks(range(len(by_task)), by_task)
  axes.invert_yaxis()
  axes.set_xlim(0, (end - begin) * 1e3)
  axes.set_xlabel("milliseconds; a thin line is an update of the variables")
  from matplotlib import patches

  axes.legend(
    handles=[
      patches.Patch(
        facecolor=_COLORS[kind],
        hatch=_HATCHES.get(kind),
        edgecolor="white" if kind in _HATCHES else _COLORS[kind],
        label=words,
      )
      for kind, words in _LABELS.items()
      if kind in seen
    ],
    loc="lower center",
    bbox_to_anchor=(0.5, 1.0),
    ncols=4,
    frameon=False,
    fontsize=9,
  )
  return figure


def shares(events: Sequence[recorded_run.Event]) -> list[str]:
  """Describes, in a line of text per task, how each task spent its time.

  Args:
    events: The events of the whole run, ordered by their start.
  """
  spent = collections.defaultdict(collections.Counter)
  outcomes = collections.defaultdict(list)
  for turn in turns(events):
    outcomes[turn.compute.task].append(turn)
  for event in events:
    spent[event.task][event.kind] += event.end - event.start
  lines = []
  for task, own in _by_task(events).items():
    whole = max(e.end for e in own) - own[0].start
    parts = [
      f"{kind.replace('_', ' ')} {secs / whole:.0%}"
      for kind, secs in spent[task].most_common()
      if kind != "refused"
    ]
    line = f"{task}: {', '.join(parts)} of {whole:.1f} s"
    if outcomes[task]:
      counts = collections.Counter(turn.outcome for turn in outcomes[task])
      mean = np.mean([turn.staleness for turn in outcomes[task]])
      line += (
        f"; {len(outcomes[task])} batches, {counts[REFUSED]} refused,"
        f" {counts[STALE]} stale (staleness {mean:.2f} on average)"
      )
    lines.append(line)
  return lines


def _main() -> None:
  with processes.one_line_errors(usage=(ValueError,), run_time=(OSError,)):
    directory = FLAGS.run
    if os.path.isdir(os.path.join(directory, "timeline")):
      directory = os.path.join(directory, "timeline")
    events = recorded_run.read(directory)
    span = window(events, FLAGS.num_steps, FLAGS.first_step)
    output = FLAGS.output or directory
    os.makedirs(output, exist_ok=True)
    path = os.path.join(output, "timeline")
    with open(path + ".json", "w", encoding="utf-8") as file:
      json.dump(to_trace(events), file)
    print("\n".join(shares(events)))
    claims.require_matplotlib()
    draw(events, *span).savefig(path + ".png", dpi=110)
    print(f"{path}.png, {path}.json (for https://ui.perfetto.dev)")


if __name__ == "__main__":
  flags.DEFINE_string(
    "run", None, "The train directory of a run with --timeline"
  )
  flags.DEFINE_string(
    "output", None, "The directory for the files; by default that of the record"
  )
  flags.DEFINE_integer(
    "num_steps", 12, "The number of updates in the picture", lower_bound=1
  )
  flags.DEFINE_integer(
    "first_step",
    None,
    "The first update in the picture; by default in the middle",
    lower_bound=0,
  )
  flags.mark_flag_as_required("run")
  command_line.start(lambda argv: _main())
