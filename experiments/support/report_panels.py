"""Computes the panels of the report: figures with sliders, and the timeline.

A panel is what JSON can hold, and the page's script shows it. All its numbers
are computed here, for every position of its sliders; the script only looks them
up. A *lookup* is a dictionary of two entries: `by` names some controls, and
`of` maps the positions of these controls, such as "0,2", to what is shown then.
"""

import functools
import itertools
import statistics
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments import race
from experiments import simulator
from experiments import timeline as timelines
from experiments.claims import overwrite_and_idle
from experiments.claims import scale_out
from experiments.claims import stale_ball
from experiments.simulator import compute_times
from experiments.support import claims
from experiments.support import plotly_charts

RATES = tuple(round(0.05 * i, 2) for i in range(1, 31))
STALENESS = tuple(range(9))
WORKERS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
BACKUPS = (0, 1, 2, 3, 4)
SLOWER = (1, 2, 5)
BOUNDS = (0, 1, 2, 4, 8, 16)
# The simulated batches of each worker.
_NUM_BATCHES = 30
_DASHES = ("solid", "dash", "dot", "dashdot")
_SYMBOLS = ("circle", "square", "triangle-up", "diamond")
# Those that take long first: the others are drawn over them.
_KINDS = {
  "compute": "computes",
  "wait": "waits",
  "read": "reads parameters",
  "hand_over": "sends gradients",
  "refused": "is refused",
  "apply": "update",
}
_PATTERNS = {"wait": "/", "refused": "x"}
_LASTING = ("compute", "wait")
_KIND_COLORS = {
  "compute": claims.COLORS[0],
  "wait": "#AAAAAA",
  "read": claims.COLORS[4],
  "hand_over": claims.COLORS[2],
  "refused": claims.COLORS[1],
  "apply": claims.COLORS[5],
}


class Control(NamedTuple):
  """Something that a reader can set.

  Attributes:
    name: Its name in lookups.
    label: What it is, for the reader.
    values: Its possible values, in order.
    start: The position of the value that is set at first.
    is_list: Whether it is a list to choose from; else it is a slider.
  """

  name: str
  label: str
  values: Sequence
  start: int
  is_list: bool = False


def _lookup(
  controls: Sequence[Control], by: Sequence[str], make: Callable
) -> dict:
  """Returns a lookup.

  Args:
    controls: The controls of the panel.
    by: The names of the controls on which the result depends.
    make: Called with a value of each of these controls.
  """
  values = [{c.name: c.values for c in controls}[name] for name in by]
  return {
    "by": list(by),
    "of": {
      ",".join(map(str, place)): make(
        *(own[i] for own, i in zip(values, place, strict=True))
      )
      for place in itertools.product(*(range(len(own)) for own in values))
    },
  }


def ball() -> dict:
  """Returns the panel of the stale ball.

  Its controls are the staleness, the rate and the number of workers. See
  `claims.stale_ball`.
  """
  controls = [
    Control("staleness", "Staleness (updates)", STALENESS, 4),
    Control("rate", "Learning rate × curvature", RATES, RATES.index(0.3)),
    Control("workers", "Asynchronous workers", stale_ball.DEVICES, 3),
  ]
  of_workers = {
    count: stale_ball.random_staleness(count, seed=0)
    for count in stale_ball.DEVICES
  }
  limits = {s: stale_ball.largest_stable_rate(s) for s in STALENESS}

  def late(stale, rate):
    return stale_ball.roll(rate, [stale] * stale_ball.NUM_UPDATES)

  def in_random_order(workers, rate, divides=False):
    return stale_ball.roll(rate, of_workers[workers], divides=divides)

  def series(number, name, by, path, limit=lambda *_: "–"):
    def row(*values):
      found = path(*values)
      past = stale_ball.overshoot(found)
      return [[name, _short(past), _short(abs(found[-1])), limit(*values)]]

    return {
      "trace": {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": list(range(stale_ball.NUM_UPDATES + 1)),
        "line": {
          "color": claims.COLORS[number],
          "dash": _DASHES[number],
          "width": 2.5,
        },
      },
      "points": _lookup(
        controls, by, lambda *v: {"y": plotly_charts.numbers(path(*v))}
      ),
      "rows": _lookup(controls, by, row),
    }

  def title(stale, rate):
    past = stale_ball.overshoot(late(stale, rate))
    rests = "comes to rest" if rate < limits[stale] else "never comes to rest"
    within = f"within {stale_ball.NUM_UPDATES} updates"
    how_far = f"swings {_short(past)} past" if past else "does not pass"
    return (
      f"At rate {rate}, gradients that are {stale} updates late: the ball"
      f" {how_far} the minimum {within}, and {rests}"
    )

  return _panel(
    controls,
    _lookup(controls, ["staleness", "rate"], title),
    [
      "Gradients",
      "Way past the minimum (of the start)",
      f"Distance to it after {stale_ball.NUM_UPDATES} updates",
      "It rests below the rate",
    ],
    [
      series(
        0,
        "all equally late",
        ["staleness", "rate"],
        late,
        lambda stale, _: _short(limits[stale]),
      ),
      series(
        1,
        "of the workers, in random order",
        ["workers", "rate"],
        in_random_order,
      ),
      series(
        2,
        "the same at rate / staleness",
        ["workers", "rate"],
        functools.partial(in_random_order, divides=True),
      ),
    ],
    {
      "xaxis": {"title": {"text": "updates"}},
      "yaxis": {"title": {"text": "position"}, "range": [-2.2, 2.2]},
    },
  )


def cluster() -> dict:
  """Returns the panel of the simulator.

  Its controls are the numbers of workers and backups, how slow a worker is, and
  the largest allowed staleness. A batch takes the time of `claims.scale_out`,
  and links take no time.
  """
  controls = [
    Control("workers", "Workers", WORKERS, WORKERS.index(8)),
    Control("slower", "The last worker takes … times as long", SLOWER, 2),
    Control("backups", "Backup workers among them", BACKUPS, 1),
    Control("bound", "Largest allowed staleness (updates)", BOUNDS, 3),
  ]

  def series(number, name, by, rule):
    def points(slower, *more):
      found = [_simulated(rule(n, *more), n, slower) for n in WORKERS]
      return {"y": plotly_charts.numbers(run.throughput for run in found)}

    def row(workers, slower, *more):
      run = _simulated(rule(workers, *more), workers, slower)
      refused = run.late.sum() + run.surplus.sum()
      return [
        [
          name,
          _short(run.throughput),
          f"{run.wait_secs.mean() / run.step_ends[-1]:.0%}",
          f"{run.staleness.mean():.1f}",
          f"{refused / (refused + run.applied.sum()):.0%}",
        ]
      ]

    return {
      "trace": {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": list(WORKERS),
        "line": {"color": claims.COLORS[number], "dash": _DASHES[number]},
        "marker": {"symbol": _SYMBOLS[number], "size": 9},
      },
      "points": _lookup(controls, ["slower", *by], points),
      "rows": _lookup(controls, ["workers", "slower", *by], row),
    }

  def title(workers, slower):
    waits = _simulated(simulator.Sync(), workers, slower)
    late = _simulated(simulator.Async(), workers, slower)
    slow = f", one {slower} times slower" if slower > 1 else ""
    return (
      f"{workers} workers{slow}: asynchronous training applies"
      f" {late.throughput / waits.throughput:.2g} times as many gradients as"
      f" synchronous training, {late.staleness.mean():.1f} updates late"
    )

  return _panel(
    controls,
    _lookup(controls, ["workers", "slower"], title),
    [
      "Rule",
      "Gradients applied per second",
      "Time spent waiting",
      "Mean staleness",
      "Batches refused",
    ],
    [
      series(0, "synchronous", [], lambda n: simulator.Sync()),
      series(
        2,
        "with backups",
        ["backups"],
        lambda n, backups: simulator.Sync(max(n - backups, 1)),
      ),
      series(1, "asynchronous", [], lambda n: simulator.Async()),
      series(
        3,
        "staler gradients refused",
        ["bound"],
        lambda n, bound: simulator.Async(max_staleness=bound),
      ),
    ],
    {
      "xaxis": {"title": {"text": "workers"}},
      "yaxis": {
        "title": {"text": "gradients applied per second"},
        "rangemode": "tozero",
      },
    },
    cursor="workers",
  )


@functools.cache
def _simulated(
  rule: simulator.Sync | simulator.Async, workers: int, slower: float
) -> simulator.Result:
  """Simulates a training in which the last worker is slower than the others."""
  cluster = simulator.Cluster(
    workers, scale_out.COMPUTE, slowdown={workers - 1: slower}
  )
  steps = _NUM_BATCHES * (1 if isinstance(rule, simulator.Sync) else workers)
  return simulator.simulate(cluster, rule, steps)


def race_of(cells: Mapping[tuple, dict]) -> dict:
  """Returns the panel of the race: one kind and number of workers at a time.

  Args:
    cells: The cells by (rule, condition, workers), as `race.read` returns them.
  """
  kinds = list(dict.fromkeys(key[1] for key in cells))
  counts = sorted({key[2] for key in cells})
  controls = [
    Control("kind", "Kind of workers", kinds, 0, is_list=True),
    Control("workers", "Workers", counts, len(counts) // 2),
  ]

  def ordered(kind, workers):
    own = [cell for key, cell in cells.items() if key[1:] == (kind, workers)]
    return sorted(own, key=lambda c: np.mean(race.seconds(c) or np.inf))

  def points(kind, workers):
    base = cells.get((race.SYNC, kind, workers))
    found = [
      (cell["rule"], race.ratio(cell, base))
      for cell in ordered(kind, workers)
      if base
    ]
    found = [(rule, ratio) for rule, ratio in found if ratio]
    return {
      "y": [rule for rule, _ in found],
      "x": plotly_charts.numbers(middle for _, (middle, _, _) in found),
      "error_x": {
        "type": "data",
        "array": plotly_charts.numbers(high - m for _, (m, _, high) in found),
        "arrayminus": plotly_charts.numbers(
          m - low for _, (m, low, _) in found
        ),
      },
    }

  def rows(kind, workers):
    base = cells.get((race.SYNC, kind, workers))
    return [race.texts(cell, base)[1:] for cell in ordered(kind, workers)]

  def title(kind, workers):
    names = [cell["rule"] for cell in ordered(kind, workers)]
    best = [f"“{n}”" for n in race.fastest(cells, kind, workers, names)]
    if not best:
      return f"{workers} workers, {kind}: no rule reaches the precision"
    words = f"{workers} workers, {kind}: {best[0]} is the fastest"
    if len(best) > 4:
      return f"{words}, but {len(best) - 1} others are not clearly slower"
    return words + (
      f"; not clearly slower: {', '.join(best[1:])}" if best[1:] else ""
    )

  return _panel(
    controls,
    _lookup(controls, ["kind", "workers"], title),
    list(race.COLUMNS[1:]),
    [
      {
        "trace": {
          "type": "scatter",
          "mode": "markers",
          "name": "seconds / those of sync",
          "marker": {"color": claims.COLORS[0], "size": 9},
        },
        "points": _lookup(controls, ["kind", "workers"], points),
        "rows": _lookup(controls, ["kind", "workers"], rows),
      }
    ],
    {
      "xaxis": {
        "title": {"text": "seconds / those of sync"},
        "type": "log",
        "tickvals": [0.25, 0.5, 1, 2, 4],
        "range": [-0.8, 0.65],
      },
      "yaxis": {"autorange": "reversed", "automargin": True},
      "shapes": [_line(1.0)],
    },
  )


def timeline(measurement: Mapping) -> dict:
  """Returns the animated timeline of a synchronous and an asynchronous run.

  These are the recorded runs of `claims.overwrite_and_idle`, if their events
  are stored. Otherwise they are simulated.

  Args:
    measurement: A measurement of that claim.
  """
  runs = {name: measurement[name].get("events") for name in ("sync", "async")}
  is_recorded = all(runs.values())
  if not is_recorded:
    runs = {
      "sync": _simulated_events(simulator.Sync()),
      "async": _simulated_events(simulator.Async()),
    }
  secs = overwrite_and_idle.SHOWN_SECS
  waiting = {
    name: sum(
      end - start
      for task, kind, start, end in events
      if kind == "wait" and task in overwrite_and_idle.FAST
    )
    / (secs * len(overwrite_and_idle.FAST))
    for name, events in runs.items()
  }
  sending = statistics.median(
    end - start
    for _, kind, start, end in itertools.chain(*runs.values())
    if kind == "hand_over"
  )
  origin = (
    "Recorded on real processes, whose batches take a given time"
    if is_recorded
    else "Simulated: no recorded run is stored"
  )
  return {
    "title": "With one slow worker, the fast ones wait for"
    f" {waiting['sync']:.0%} of the time in synchronous training, and for"
    f" {waiting['async']:.0%} in asynchronous training",
    "note": f"{origin}. {overwrite_and_idle.SLOW} is the slow worker. Playing"
    " shows everything four times slower. Sending gradients takes"
    f" {1e3 * sending:.1f} ms (median), so it is only a thin line.",
    "secs": secs,
    "kinds": _KINDS,
    "runs": {
      name: {
        "title": words,
        "tasks": sorted({event[0] for event in runs[name]}),
        "events": runs[name],
        "chart": _gantt(runs[name], secs),
      }
      for name, words in (("sync", "Synchronous"), ("async", "Asynchronous"))
    },
  }


def _simulated_events(rule: simulator.Sync | simulator.Async) -> list[list]:
  """Simulates the cluster of `overwrite_and_idle` for as long as is shown."""
  fast, _, slow = overwrite_and_idle.TURN_SECS.values()
  cluster = simulator.Cluster(
    3, compute_times.Constant(fast), slowdown={2: slow / fast}, latency=0.001
  )
  secs = overwrite_and_idle.SHOWN_SECS
  # More updates than there is time for.
  run = simulator.simulate(cluster, rule, int(3 * secs / fast), records=True)
  return [
    [e.task, e.kind, round(e.start, 4), round(min(e.end, secs), 4)]
    for e in sorted(run.events, key=lambda event: event.start)
    if e.start < secs
  ]


def _gantt(events: Sequence[Sequence], secs: float) -> dict:
  """Returns a chart in which each task has a row, and each event is a bar."""
  data = []
  for kind, words in _KINDS.items():
    own = [e for e in events if e[1] == kind and e[3] > e[2]]
    if own:
      color = _KIND_COLORS[kind]
      data.append(
        {
          "type": "bar",
          "orientation": "h",
          "name": words,
          "y": [task for task, *_ in own],
          "base": [start for *_, start, _ in own],
          "x": plotly_charts.numbers(end - start for *_, start, end in own),
          "width": 0.45 if kind == "wait" else 0.8,
          "marker": {
            "color": color,
            "pattern": {"shape": _PATTERNS.get(kind, "")},
            "line": {"color": color, "width": 0 if kind in _LASTING else 2},
          },
          "hovertemplate": f"%{{y}} {words}<br>%{{x:.4f}} s<extra></extra>",
        }
      )
  tasks = sorted({task for task, *_ in events}, key=timelines.rank)
  return {
    "data": data,
    "layout": {
      "barmode": "overlay",
      "xaxis": {"title": {"text": "seconds"}, "range": [0, secs]},
      "yaxis": {
        "categoryorder": "array",
        "categoryarray": tasks[::-1],
        "automargin": True,
      },
      # It covers what has not happened yet.
      "shapes": [
        {
          "type": "rect",
          "yref": "paper",
          "x0": secs,
          "x1": secs,
          "y0": 0,
          "y1": 1,
          "fillcolor": "rgba(255,255,255,0.85)",
          "line": {"width": 1, "color": "black"},
        }
      ],
    },
  }


def _panel(
  controls: Sequence[Control],
  title: dict,
  columns: Sequence[str],
  series: Sequence[dict],
  layout: dict,
  cursor: str | None = None,
) -> dict:
  """Returns a panel.

  Args:
    controls: What the reader can set.
    title: A lookup of the title.
    columns: The heads of the table.
    series: For each curve, its `trace`, and lookups of its `points` and of its
      `rows` of the table.
    layout: The layout of the chart.
    cursor: The name of a control; a vertical line shows its value.
  """
  if cursor:
    layout = {**layout, "shapes": [_line(0.0)]}
  return {
    "controls": [
      {**c._asdict(), "values": list(map(str, c.values))} for c in controls
    ],
    "title": title,
    "columns": list(columns),
    "series": list(series),
    "layout": layout,
    "cursor": cursor,
  }


def _line(x: float) -> dict:
  """Returns a vertical line through a whole chart."""
  return {
    "type": "line",
    "yref": "paper",
    "x0": x,
    "x1": x,
    "y0": 0,
    "y1": 1,
    "line": {"color": "grey", "width": 1.5, "dash": "dot"},
  }


def _short(value: float) -> str:
  return "over 1000" if value > 1000 else f"{value:.3g}"
