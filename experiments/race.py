"""Lets all update rules race to a precision, and says which rule to use when.

  python -m experiments.race --output=DIR [--short] [--rules=NAME;...]
    [--workers=4,8,2] [--conditions=NAME,...] [--real] [--draw]

Every rule of the library trains one network on the synthetic pictures, with 2,
4 and 8 workers that are even or uneven. A *cell* is a rule with a number and a
kind of workers. `search` finds its learning rate with three seeds. Then five
other seeds measure how long the cell takes to a precision of 0.8. Time is
virtual: `support.event_clock` says what is real. `support.race_task` defines
task, rules and workers.

Writes race.json, race.md and race.png. Each finished cell is stored at once,
and cells that are in the file are not measured again. So the command may be
stopped and continued. On one core it takes about four hours. `--short` measures
sync, backup and async with 4 workers and three seeds. `--draw` measures
nothing.

`--real` repeats sync, backup and async on real processes, with 4 workers unless
`--workers` is given, and stores the results in race_real.json. A batch then
takes 0.1 s on average, by sleeping.
`--measure` measures the compute times of the kind `stragglers` on this machine,
and writes race_compute_times.json. The race reads that of `results`.
"""

import datetime
import functools
import json
import math
import os
import time
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from absl import flags

from benchmarks import ratios
from experiments.support import claims
from tf_replicas.programs import command_line
from tf_replicas.runtime import processes

_Point = TypeVar("_Point")

FLAGS = flags.FLAGS
SYNC, BACKUP, ASYNC = "sync", "sync, 1 backup", "async"
_MAIN = (SYNC, BACKUP, ASYNC)
_KEYS = ("rule", "condition", "workers")
SEEDS, SEEDS_SHORT = range(5), range(3)
COLUMNS = (
  "workers",
  "rule",
  "rate",
  "seconds",
  "/ sync",
  "updates",
  "examples",
  "mean staleness",
  "refused",
)
# A search gives up a rate that takes this many times as long as the best.
_PATIENCE = 1.5
# The precision must be reached in so many states of the variables in a row,
# with at least so many examples from one to the next.
IN_A_ROW, EXAMPLES_APART = 3, 256


class Racer:
  """Trains in virtual time, and keeps the traced functions of one rule."""

  def __init__(self):
    from experiments.support import race_task

    self._task = race_task.Task()
    self._lib = race_task
    self._key = self._training = None

  def run(
    self,
    contestant,
    workers: int,
    condition: str,
    *,
    rate: float,
    seed: int,
    limit: float,
    absence=None,
  ) -> dict:
    """Trains until the precision is reached, and returns what that took.

    Args:
      contestant: A `race_task.Contestant`.
      workers: The number of workers.
      condition: The name of the kind of workers.
      rate: The learning rate.
      seed: Decides weights, batches and compute times.
      limit: The virtual time at which the training is given up.
      absence: An `event_clock.Absence`; None: that of the kind of workers.

    Returns:
      `seconds`: the virtual time; None if the precision was not reached.
      `updates` and `examples` until then; `staleness`, the mean over all
      gradients, and the share `refused`.
    """
    from tf_replicas.rules import results

    training = self._get(contestant, workers)
    training.rule.set_learning_rate(rate)
    kind = self._lib.conditions()[condition]
    training.start(
      self._task.values(seed),
      self._lib.batches(workers, seed),
      kind.times(workers, seed),
      absence or kind.absence(workers),
    )
    outcome = None
    try:
      outcome = self._first_of(self._points(int(limit)))
    except results.NonFiniteGradientError:
      self.close()  # Its state cannot be used again.
      return {"seed": seed, "seconds": None, "diverged": True}
    total = results.total(training.rule.counts())
    made = max(total.applied + total.refused, 1)
    run = {"seed": seed, "seconds": outcome and outcome.time}
    if outcome:
      run |= {"updates": outcome.updates, "examples": outcome.examples}
    if total.staleness:
      run["staleness"] = round(results.summary(total.staleness)[0], 3)
    run["refused"] = round(total.refused / made, 4)
    training.finish()
    return run

  def _points(self, limit: int):
    """Yields the state of the training at every second of virtual time."""
    for now in range(1, limit + 1):
      self._training.advance(now)
      yield self._training.point()

  def _first_of(self, points: Iterable):
    """Returns the first of `IN_A_ROW` points that all reach the precision.

    Only points with `EXAMPLES_APART` more examples than the one before count,
    so that the criterion does not depend on how often a rule makes updates.

    Args:
      points: `event_clock.Point`s, in the order of time.

    Returns:
      The point; None if there is none.
    """
    return first_in_a_row(
      spaced(points, EXAMPLES_APART),
      lambda p: self._task.precision(p.values) >= self._lib.PRECISION,
      IN_A_ROW,
    )

  def judge(self, path: os.PathLike) -> dict:
    """Finds when a real run has reached the precision.

    Args:
      path: The file that `race_real_task` has written.

    Returns:
      `seconds`, `updates` and `examples`; `seconds` is None if the precision
      was not reached.
    """
    from experiments.support import event_clock

    with np.load(path) as file:
      rows = file["rows"]
      values = [file[f"value_{i}"] for i in range(len(file.files) - 1)]
    found = self._first_of(
      event_clock.Point(float(t), int(updates), int(examples), list(at))
      for (t, updates, examples), *at in zip(rows, *values, strict=True)
    )
    if found is None:
      return {"seconds": None}
    return {
      "seconds": round(found.time, 2),
      "updates": found.updates,
      "examples": found.examples,
    }

  def _get(self, contestant, workers):
    from experiments.support import event_clock

    key = contestant.name, workers
    if key != self._key or contestant.needs:
      self.close()
      self._training = event_clock.Training(
        contestant.rule(workers, self._lib.RATES[0]),
        self._task.replica,
        batches_shape=[self._lib.NUM_BATCHES, self._lib.BATCH_SIZE],
        exchange_secs=self._lib.EXCHANGE_SECS,
        needs=contestant.needs,
      )
      self._key = key
    return self._training

  def close(self) -> None:
    """Closes the last rule, and forgets its functions."""
    if self._training is not None:
      self._training.close()
    self._key = self._training = None


def search(
  run: Callable[[float, int, float], float | None],
  rates: Sequence[float],
  seeds: Sequence[int],
  *,
  limit: float,
) -> tuple[float | None, list[dict]]:
  """Finds the learning rate with which training takes the shortest time.

  It begins with the rate in the middle, or with the nearest that works. Then it
  tries the neighbors of the best rate so far, until both are worse. Every rate
  is tried with the same seeds, and the geometric mean of their times counts. A
  rate is given up when a training takes `_PATIENCE` times as long as those of
  the best rate so far.

  Args:
    run: Maps a rate, a seed and a time limit to the time of a training; None if
      it was not successful within the limit.
    rates: The rates, in increasing order.
    seeds: The seeds.
    limit: The time limit while no rate has been successful.

  Returns:
    The rate, or None if none is successful with all seeds; and what was tried,
    by rate: `rate`, `limit`, and `seconds`, a time for each seed. After a
    training without success, the other seeds were not tried.
  """
  means = {}
  tried = []

  def find(number: int) -> None:
    if number in means or not 0 <= number < len(rates):
      return
    least = min(limit, _PATIENCE * min(means.values(), default=math.inf))
    times: list[float | None] = []
    for seed in seeds:
      times.append(run(rates[number], seed, least))
      if times[-1] is None:
        break
    tried.append({"rate": rates[number], "limit": least, "seconds": times})
    found = [t for t in times if t is not None]
    means[number] = math.inf
    if len(found) == len(seeds):
      means[number] = math.exp(sum(map(math.log, found)) / len(found))

  middle = len(rates) // 2
  for number in sorted(range(len(rates)), key=lambda n: abs(n - middle)):
    find(number)
    if means[number] < math.inf:
      break
  last, best = None, min(means, key=lambda n: means[n])
  while best != last and means[best] < math.inf:
    find(best - 1)
    find(best + 1)
    last, best = best, min(means, key=lambda n: means[n])
  tried.sort(key=lambda one: one["rate"])
  return (rates[best] if means[best] < math.inf else None), tried


def measure(
  racer: Racer, rule: str, condition: str, workers: int, seeds: Iterable[int]
) -> dict:
  """Measures a cell: finds its best rate, and trains with every seed.

  Args:
    racer: Trains.
    rule: The name of the update rule.
    condition: The name of the kind of workers.
    workers: The number of workers.
    seeds: The seeds.
  """
  from experiments.support import race_task

  began = time.monotonic()
  contestant = race_task.contestant(rule, workers)

  def run(rate, seed, limit):
    return racer.run(
      contestant, workers, condition, rate=rate, seed=seed, limit=limit
    )

  best, tried = search(
    lambda rate, seed, limit: run(rate, seed, limit)["seconds"],
    race_task.RATES,
    race_task.SEARCH_SEEDS,
    limit=race_task.MAX_SECS,
  )
  runs = []
  if best is not None:
    runs = [run(best, seed, race_task.MAX_SECS) for seed in seeds]
  return {
    "rule": rule,
    "condition": condition,
    "workers": workers,
    "examples_apart": EXAMPLES_APART,
    "rate": best,
    "search": tried,
    "runs": runs,
    "commit": _commit(),
    "date": datetime.date.today().isoformat(),
    "machine": claims.machine(),
    "took_secs": round(time.monotonic() - began, 1),
  }


# Once, at the start: the files may change while the race goes on.
_commit = functools.cache(claims.commit)


def spaced(points: Iterable, examples: int) -> Iterable:
  """Yields the first point, and each that comes long enough after the last.

  Args:
    points: `event_clock.Point`s, in the order of time.
    examples: So many more examples than the last yielded point must a point
      have.
  """
  last = None
  for point in points:
    if last is None or point.examples >= last + examples:
      last = point.examples
      yield point


def first_in_a_row(
  points: Iterable[_Point], passes: Callable[[_Point], bool], count: int
) -> _Point | None:
  """Returns the first of `count` points in a row that all pass a test.

  Of the next `count` points, it tests the last one first. If that one fails, it
  does not test the others, which cannot begin such a row.

  Args:
    points: The points.
    passes: The test, which may be expensive.
    count: The number of points in a row.

  Returns:
    The point; None if there is no such row.
  """
  row: list[_Point] = []  # The next points.
  passed = 0  # So many of them, the first ones, have passed.
  for point in points:
    row.append(point)
    if len(row) < count:
      continue
    untested = row[passed:]
    for number in reversed(range(len(untested))):
      if not passes(untested[number]):
        row = untested[number + 1 :]
        break
    else:
      return row[0]
    passed = len(row)
  return None


# What the numbers say.


def seconds(cell: dict) -> list[float] | None:
  """Returns the times of all seeds; None if a seed missed the precision."""
  values = [run["seconds"] for run in cell["runs"]]
  return None if not values or None in values else values


def ratio(cell: dict, base: dict) -> tuple[float, float, float] | None:
  """Compares the times of two cells, seed by seed.

  A seed decides weights, batches and compute times in both.

  Returns:
    The geometric mean of cell / base with its 95% interval; None if a seed of
    either missed the precision.
  """
  ours, theirs = seconds(cell), seconds(base)
  if ours is None or theirs is None:
    return None
  return ratios.interval([a / b for a, b in zip(ours, theirs, strict=True)])


def find(cells: dict[tuple, dict]) -> list[claims.Finding]:
  """Judges the advice: even workers synchronous, uneven asynchronous.

  A training that missed the precision counts with the time at which it was
  given up, which is less than it would have taken. A pair of which both missed
  it gives no finding.

  Args:
    cells: The cells by (rule, condition, workers).
  """
  from experiments.support import race_task

  findings = []
  for condition, workers in sorted({key[1:] for key in cells}):
    pair = [cells.get((rule, condition, workers)) for rule in (ASYNC, SYNC)]
    if None in pair or not all(cell["runs"] for cell in pair):
      continue
    times = [[run["seconds"] for run in cell["runs"]] for cell in pair]
    if (None, None) in zip(*times, strict=True):
      continue
    ours, theirs = (
      [race_task.MAX_SECS if t is None else t for t in own] for own in times
    )
    bound = {"least": 1.0} if condition == "even" else {"most": 1.0}
    findings.append(
      claims.Finding(
        f"{condition}, {workers} workers: seconds of async / sync",
        [a / b for a, b in zip(ours, theirs, strict=True)],
        **bound,
      )
    )
  return findings


def fastest(
  cells: dict[tuple, dict], condition: str, workers: int, rules: Sequence[str]
) -> list[str]:
  """Returns the fastest of some rules, and those that may be as fast.

  A rule may be as fast as the fastest if the 95% interval of the ratio of their
  times includes 1.

  Args:
    cells: The cells by (rule, condition, workers).
    condition: The kind of workers.
    workers: The number of workers.
    rules: The names of the rules to compare.

  Returns:
    The names, the fastest first.
  """
  known = {
    rule: cell
    for rule in rules
    if (cell := cells.get((rule, condition, workers))) and seconds(cell)
  }
  order = sorted(known, key=lambda rule: np.mean(np.log(seconds(known[rule]))))
  return [
    rule for rule in order if ratio(known[rule], known[order[0]])[1] <= 1.0
  ]


def advice(cells: dict[tuple, dict]) -> list[str]:
  """Returns the rule of thumb that the data support, line by line.

  Args:
    cells: The cells by (rule, condition, workers).
  """
  from experiments.support import race_task

  lines = []
  for condition in race_task.conditions():
    for workers in sorted({key[2] for key in cells if key[1] == condition}):
      names = [c.name for c in race_task.contestants(workers)]
      best = fastest(cells, condition, workers, _MAIN)
      every = fastest(cells, condition, workers, names)
      if not best:
        continue
      lines.append(
        f"{condition}, {workers} workers: of sync, backup and async use"
        f" {_either(best)}; of all rules {_either(every)}"
      )
  return lines


def _either(names: Sequence[str]) -> str:
  first, *others = (f"`{name}`" for name in names)
  return first + (
    f" (not clearly slower: {', '.join(others)})" if others else ""
  )


# Table and picture.


def table(cells: dict[tuple, dict], real: Sequence[dict] = ()) -> str:
  """Formats verdict, rule of thumb and all cells as Markdown.

  Args:
    cells: The cells by (rule, condition, workers).
    real: Runs on real processes, as `race_real.measure` returns them.
  """
  from experiments.support import race_real
  from experiments.support import race_task

  findings = find(cells)
  lines = [
    "# The race to a precision",
    "",
    f"Precision @ 1 of {race_task.PRECISION} on 1,000 test pictures,"
    f" in {IN_A_ROW} states in a row, {EXAMPLES_APART} examples apart or more."
    " Seconds are virtual; one is the mean time of"
    " a batch of a usual worker. `±` and the brackets are 95% intervals over"
    " the seeds. Commits:"
    f" {', '.join(sorted({c['commit'] for c in cells.values()}))}; dates:"
    f" {', '.join(sorted({c['date'] for c in cells.values()}))}; machine:"
    f" {'; '.join(sorted({c['machine'] for c in cells.values()}))}. Command:"
    " `python -m experiments.race --output=DIR`.",
    "",
    "## The advice: even workers synchronous, uneven asynchronous",
    "",
    f"Verdict: **{claims.verdict(findings) if findings else 'not measured'}**"
    f" ({len(findings)} pairs of cells).",
    "",
    *(f"- {finding}" for finding in findings),
    "",
    "## Which rule to use",
    "",
    *(f"- {line}" for line in advice(cells)),
    "",
    "## All cells",
    "",
    f"| {' | '.join(COLUMNS)} |",
    "|---" * len(COLUMNS) + "|",
  ]
  for condition in race_task.conditions():
    for workers in (2, 4, 8):
      for contestant in race_task.contestants(workers):
        cell = cells.get((contestant.name, condition, workers))
        if cell:
          base = cells.get((SYNC, condition, workers))
          lines.append(_row(cell, base))
  if real:
    lines += ["", "## On real processes", "", *race_real.table(real)]
  return "\n".join(lines) + "\n"


def short_table(cells: dict[tuple, dict]) -> list[str]:
  """Formats sync, backup and async, and the verdict on the advice, as Markdown.

  Args:
    cells: The cells by (rule, condition, workers).

  Returns:
    The lines: a sentence, and a table.
  """
  findings = find(cells)
  verdict = claims.verdict(findings) if findings else "not measured"
  dates = sorted({cell["date"] for cell in cells.values()})
  when = " to ".join(dict.fromkeys([dates[0], dates[-1]]))
  lines = [
    f"Verdict on the advice: **{verdict}** ({len(findings)} pairs of cells,"
    f" measured on {when}). The numbers of `{SYNC}` are seconds of virtual"
    f" time; those of `{BACKUP}` and `{ASYNC}` are times, divided by those of"
    f" `{SYNC}`.",
    "",
    f"| kind | workers | `{SYNC}` | `{BACKUP}` | `{ASYNC}` | the advice is"
    " | fastest of the three, or not clearly slower |",
    "|---|---|---|---|---|---|---|",
  ]
  for condition in dict.fromkeys(key[1] for key in cells):
    for workers in sorted({key[2] for key in cells if key[1] == condition}):
      three = {rule: cells.get((rule, condition, workers)) for rule in _MAIN}
      base = three[SYNC]
      shown = {
        rule: texts(cell, base)[3 if rule == SYNC else 4] if cell else ""
        for rule, cell in three.items()
      }
      best = fastest(cells, condition, workers, _MAIN)
      lines.append(
        f"| {condition} | {workers} | {' | '.join(shown.values())}"
        f" | {_advice_is(three[ASYNC], base, condition)}"
        f" | {', '.join(f'`{rule}`' for rule in best)} |"
      )
  return lines


def _advice_is(cell: dict | None, base: dict | None, condition: str) -> str:
  """Returns whether the usual advice is true for a kind of workers.

  Args:
    cell: The cell of async.
    base: The cell of sync.
    condition: The kind of workers.
  """
  found = cell and base and ratio(cell, base)
  if not found or found[1] <= 1.0 <= found[2]:
    return "not decided"
  is_async_slower = found[1] > 1.0
  return str(is_async_slower == (condition == "even")).lower()


def texts(cell: dict, base: dict | None) -> list[str]:
  """Formats the numbers of a cell, for `COLUMNS`.

  Args:
    cell: The cell.
    base: The cell of `sync` with the same workers, to compare with.
  """
  where = f"{cell['workers']}, {cell['condition']}"
  runs = [run for run in cell["runs"] if run["seconds"] is not None]
  if seconds(cell) is None:
    count = f"{len(runs)} of {len(cell['runs'])} seeds" if runs else "never"
    return [where, cell["rule"], str(cell["rate"]), count, *[""] * 5]

  def mean(name):
    values = [run[name] for run in runs if name in run]
    return float(np.mean(values)) if values else 0.0

  middle, low, _ = ratios.interval_of_mean(seconds(cell))
  against = ""
  if base and (found := ratio(cell, base)):
    against = "{:.2f} [{:.2f}, {:.2f}]".format(*found)
  return [
    where,
    cell["rule"],
    str(cell["rate"]),
    f"{middle:.0f} ± {middle - low:.0f}",
    against,
    f"{mean('updates'):.0f}",
    f"{mean('examples'):.0f}",
    f"{mean('staleness'):.1f}",
    f"{mean('refused'):.0%}",
  ]


def _row(cell: dict, base: dict | None) -> str:
  return "".join(f"| {v} " if v else "| " for v in texts(cell, base)) + "|"


def draw(cells: dict[tuple, dict]):
  """Draws for each kind of workers the times of the rules relative to sync.

  Args:
    cells: The cells by (rule, condition, workers).
  """
  from experiments.support import race_task

  kinds = list(race_task.conditions())
  figure, axes = claims.new_figure(12, 4.2, ncols=len(kinds), sharey=True)
  measured = {rule for rule, _, _ in cells}
  names = [c.name for c in race_task.contestants(4) if c.name in measured]
  for axis, condition in zip(axes, kinds, strict=True):
    for number, workers in enumerate((2, 4, 8)):
      for row, name in enumerate(names):
        cell = cells.get((name, condition, workers))
        base = cells.get((SYNC, condition, workers))
        found = cell and base and ratio(cell, base)
        if not found:
          continue
        middle, low, high = found
        axis.errorbar(
          middle,
          row + 0.22 * (number - 1),
          xerr=[[middle - low], [high - middle]],
          color=claims.COLORS[number],
          marker=claims.MARKERS[number],
          markersize=5,
          capsize=2,
          linewidth=1,
          label=f"{workers} workers" if not row else None,
        )
    axis.axvline(1.0, color="grey", linewidth=1)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks := (0.25, 0.5, 1, 2), map(str, ticks))
    axis.set_xlim(0.17, 3.2)
    axis.set_title(condition)
    axis.set_xlabel("seconds / those of sync")
    axis.grid(alpha=0.3)
  axes[0].set_yticks(range(len(names)), names)
  axes[0].invert_yaxis()
  if cells:
    figure.legend(
      *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3
    )
  figure.suptitle(
    f"Time to a precision of {race_task.PRECISION}, with 95% intervals"
    f" (left of the line: faster than sync)"
  )
  return figure


# Files.


def read(path: str) -> dict[tuple, dict]:
  """Reads the cells of a result file, by (rule, condition, workers).

  Args:
    path: The file; it need not exist.
  """
  try:
    with open(path, encoding="utf-8") as file:
      cells = json.load(file)["cells"]
  except FileNotFoundError:
    return {}
  return {tuple(cell[key] for key in _KEYS): cell for cell in cells}


def write(path: str, cells: dict[tuple, dict]) -> None:
  """Writes all cells to a file, one line each.

  Args:
    path: The file, which is replaced as a whole.
    cells: The cells by (rule, condition, workers).
  """
  from experiments.support import race_task

  task = {
    name.lower(): getattr(race_task, name)
    for name in (
      "PRECISION",
      "BATCH_SIZE",
      "EXCHANGE_SECS",
      "MAX_SECS",
      "RATES",
      "SEARCH_SEEDS",
    )
  }
  rows = ",\n".join(json.dumps(cell) for cell in cells.values())
  text = f'{{"task": {json.dumps(task)},\n"cells": [\n{rows}\n]}}\n'
  with open(path + ".new", "w", encoding="utf-8") as file:
    file.write(text)
  os.replace(path + ".new", path)


def _keys() -> list[tuple[str, str, int]]:
  """Returns the chosen cells, those of the most important rules first."""
  from experiments.support import race_task

  names = [c.name for c in race_task.contestants(4)]
  if FLAGS.rules:
    names = [name for name in names if name in FLAGS.rules.split(";")]
  groups = [name for name in names if name in _MAIN], names
  keys = [
    (name, condition, int(workers))
    for group in groups
    for workers in FLAGS.workers
    for name in group
    for condition in FLAGS.conditions or race_task.conditions()
  ]
  return list(dict.fromkeys(keys))


def _race(path: str) -> None:
  """Measures all chosen cells that are not in the file yet."""
  import tensorflow as tf

  tf.config.threading.set_intra_op_parallelism_threads(1)
  tf.config.threading.set_inter_op_parallelism_threads(1)
  _commit()
  seeds = SEEDS_SHORT if FLAGS.short else SEEDS
  racer = Racer()
  for key in _keys():
    cells = read(path)
    if key not in cells:
      cells[key] = measure(racer, *key, seeds)
      write(path, cells)
      print(_row(cells[key], cells.get((SYNC, *key[1:]))), flush=True)
  racer.close()


def _read_real(path: str) -> list[dict]:
  try:
    with open(path + "_real.json", encoding="utf-8") as file:
      return json.load(file)["runs"]
  except FileNotFoundError:
    return []


def _repeat(path: str) -> None:
  """Repeats sync, backup and async on real processes, and stores the results.

  Runs that are in the file are not repeated.
  """
  from experiments.support import race_real
  from experiments.support import race_task

  racer = Racer()
  for workers in map(int, FLAGS.workers):
    for rule in FLAGS.rules.split(";") if FLAGS.rules else _MAIN:
      for condition in FLAGS.conditions or race_task.conditions():
        runs = _read_real(path)
        if (rule, condition, workers) in [
          tuple(run[key] for key in _KEYS) for run in runs
        ]:
          continue
        cell = read(path + ".json").get((rule, condition, workers))
        if not cell or not cell["runs"] or not cell["runs"][0]["seconds"]:
          continue
        run = race_real.measure(
          race_real.Cell(
            rule=rule,
            condition=condition,
            workers=workers,
            rate=cell["rate"],
            seed=cell["runs"][0]["seed"],
            limit=race_real.limit(cell["runs"][0]["seconds"]),
          ),
          racer,
        )
        print(race_real.table([run])[-1], flush=True)
        text = ",\n".join(json.dumps(r) for r in [*runs, run])
        with open(path + "_real.json", "w", encoding="utf-8") as file:
          file.write(f'{{"runs": [\n{text}\n]}}\n')
  racer.close()


def main(argv: Sequence[str]) -> None:
  del argv
  with processes.one_line_errors(
    usage=(ValueError, LookupError), run_time=(RuntimeError, OSError)
  ):
    claims.require_matplotlib()
    os.makedirs(FLAGS.output, exist_ok=True)
    path = os.path.join(FLAGS.output, "race")
    if FLAGS.measure:
      from experiments.support import race_real

      times = race_real.measure_times()
      with open(path + "_compute_times.json", "w", encoding="utf-8") as file:
        json.dump(times, file)
      return
    if FLAGS.real and not FLAGS["workers"].present:
      FLAGS.workers = ["4"]
    if FLAGS.short:
      FLAGS.workers = ["4"]
      FLAGS.rules = ";".join(_MAIN)
      path += "_short"
    if FLAGS.real:
      _repeat(path)
    elif not FLAGS.draw:
      _race(path + ".json")
    cells = read(path + ".json")
    with open(path + ".md", "w", encoding="utf-8") as file:
      file.write(text := table(cells, _read_real(path)))
    draw(cells).savefig(path + ".png", dpi=110)
    print(text)


if __name__ == "__main__":
  flags.DEFINE_string(
    "output", "/tmp/experiments", "The directory for the files"
  )
  flags.DEFINE_list("workers", ["4", "8", "2"], "Numbers of workers")
  flags.DEFINE_list("conditions", [], "Kinds of workers; if empty, all")
  flags.DEFINE_string("rules", "", "Names of rules, by semicolon; empty: all")
  flags.DEFINE_boolean("short", False, "Measure less, for a first look")
  flags.DEFINE_boolean("real", False, "Repeat cells on real processes")
  flags.DEFINE_boolean(
    "measure", False, "Measure the compute times of the kind `stragglers`"
  )
  flags.DEFINE_boolean("draw", False, "Measure nothing; write table, picture")
  command_line.start(main)
