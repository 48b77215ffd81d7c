"""Repeats cells of the race on clusters of real processes.

A batch takes its virtual time, times 0.1 s: the worker sleeps for so long and
then computes the gradient, which takes about 1 ms. So the cores of this machine
are mostly idle, and workers do not slow each other down. Rule, batches, weights
and compute times are those of the virtual run. Reads and writes take the time
that they take. A worker that dies is killed by SIGKILL, and is started again;
the virtual run to compare with gets the time at which it was back.
"""

import dataclasses
import datetime
import json
import os
import pathlib
import tempfile
import time

import numpy as np

from experiments.simulator import recorded_run
from experiments.support import claims
from experiments.support import event_clock
from experiments.support import programs

UNIT_SECS = 0.1
# A real run goes on for so many times the virtual time to the precision.
_LONGER = 1.6
_TIMEOUT_SECS = 600.0
_MEASURED_WORKERS, _MEASURED_STEPS = 4, 4800


@dataclasses.dataclass(frozen=True)
class Cell:
  """A run of the race.

  Attributes:
    rule: The name of the update rule.
    condition: The name of the kind of workers.
    workers: The number of workers.
    rate: The learning rate.
    seed: Decides weights, batches and compute times.
    limit: The virtual time at which the run ends.
  """

  rule: str
  condition: str
  workers: int
  rate: float
  seed: int
  limit: float

  def to_json(self) -> str:
    """Returns the cell as JSON."""
    return json.dumps(dataclasses.asdict(self))

  @classmethod
  def from_json(cls, text: str) -> "Cell":
    """Reads what `to_json` has returned."""
    return cls(**json.loads(text))


def measure(cell: Cell, racer) -> dict:
  """Runs a cell on real processes, and again in virtual time.

  Args:
    cell: The cell.
    racer: A `race.Racer`, for the virtual run.

  Returns:
    The fields of the cell; and `real` and `virtual`, the times to the
    precision, None if it was not reached.

  Raises:
    RuntimeError, TimeoutError: If a process failed, or took too long.
  """
  from experiments.support import race_task

  revision = claims.commit()
  absence = race_task.conditions()[cell.condition].absence(cell.workers)
  with tempfile.TemporaryDirectory() as name:
    directory = pathlib.Path(name)

    def kill_last(tasks) -> None:
      if absence is None:
        return
      begin = float(_await(directory / "start"))
      task = tasks.spec.tasks("worker")[absence.replica]
      time.sleep(max(begin + absence.start * UNIT_SECS - time.time(), 0.0))
      tasks.kill(task)
      tasks.start(task)

    programs.run_tasks(
      "experiments.support.race_real_task",
      [cell.to_json()],
      document={
        "ps": ["localhost:0"],
        "worker": ["localhost:0"] * cell.workers,
      },
      directory=name,
      timeout_secs=_TIMEOUT_SECS,
      while_running=kill_last,
    )
    if absence is not None:
      begin, back = (
        float((directory / name).read_text()) for name in ("start", "returned")
      )
      absence = event_clock.Absence(
        absence.replica,
        absence.start,
        (back - begin) / UNIT_SECS,
        absence.noticed_after,
      )
    real = racer.judge(directory / "points.npz")
  virtual = racer.run(
    race_task.contestant(cell.rule, cell.workers),
    cell.workers,
    cell.condition,
    rate=cell.rate,
    seed=cell.seed,
    limit=race_task.MAX_SECS,
    absence=absence,
  )
  return {
    **dataclasses.asdict(cell),
    "absence": absence and [absence.start, absence.end],
    "real": real,
    "virtual": virtual,
    "commit": revision,
    "date": datetime.date.today().isoformat(),
    "machine": claims.machine(),
    "load": os.getloadavg()[0],
  }


def measure_times() -> dict:
  """Measures how long batches take where workers compete for the cores.

  Trains the network of `cifar10` with 4 asynchronous workers on this machine.
  If it has fewer cores, some batches take much longer than others.

  Returns:
    The content of race_compute_times.json; `secs` are the times.
  """
  made_with = claims.circumstances(claims.commit())
  events = programs.record_async(
    _MEASURED_WORKERS,
    f"--max_steps={_MEASURED_STEPS}",
    "--log_every_steps=400",
  )
  ends = [event.end for event in events if event.kind == "compute"]
  start = float(np.quantile(ends, 0.1))  # In the first tenth workers join.
  secs = recorded_run.compute_secs(
    [event for event in events if event.start >= start]
  )
  return {
    "what": (
      "Seconds that each batch of each asynchronous worker on this machine"
      " took, in the order of time."
    ),
    "command": "python -m experiments.race --measure",
    **made_with,
    "secs": [
      [round(float(value), 4) for value in own] for own in secs.values()
    ],
  }


def _await(path: pathlib.Path) -> str:
  """Waits until a file has content, and returns it."""
  end = time.monotonic() + _TIMEOUT_SECS
  while not path.exists() or not (text := path.read_text()):
    if time.monotonic() > end:
      raise TimeoutError(f"{path.name} did not appear")
    time.sleep(0.01)
  return text


def limit(seconds: float) -> float:
  """Returns how long a real run goes on, given its virtual time."""
  return _LONGER * seconds + 10


def table(rows: list[dict]) -> list[str]:
  """Returns the lines of a Markdown table of real and virtual times.

  Both are in virtual seconds: a real time is divided by `UNIT_SECS`.

  Args:
    rows: Results of `measure`.
  """
  lines = [
    f"Times are in virtual seconds, of which one takes {UNIT_SECS:g} s.",
    "",
    "| workers | rule | rate | real time | virtual | real / virtual |"
    " updates: real, virtual | load |",
    "|---|---|---|---|---|---|---|---|",
  ]
  for row in rows:
    real, virtual = row["real"], row["virtual"]
    both = real["seconds"] and virtual["seconds"]
    ratio = f"{real['seconds'] / virtual['seconds']:.2f}" if both else ""
    lines.append(
      f"| {row['workers']}, {row['condition']} | {row['rule']} | {row['rate']}"
      f" | {_secs(real)} | {_secs(virtual)} | {ratio} |"
      f" {real.get('updates', '')}, {virtual.get('updates', '')} |"
      f" {row['load']:.1f} |"
    )
  return lines


def short_table(rows: list[dict]) -> list[str]:
  """Returns a Markdown table of how rules compare with `sync`, and clocks.

  Args:
    rows: Results of `measure`: for each kind of workers one of `sync`, of
      `sync, 1 backup` and of `async`, all with the same number of workers.
  """
  rules = ("sync", "async", "sync, 1 backup")
  found = {(row["condition"], row["rule"]): row for row in rows}
  lines = [
    "| time, divided by that of `sync` | `async`, real | virtual, same seed |"
    " one backup, real | virtual, same seed | seconds per update, real /"
    " virtual: `sync` | `async` | one backup |",
    "|---|---|---|---|---|---|---|---|",
  ]
  quotients = []
  for condition in dict.fromkeys(row["condition"] for row in rows):
    of_rules = [found[condition, rule] for rule in rules]
    cells = [
      _quotient(row[clock]["seconds"], of_rules[0][clock]["seconds"])
      for row in of_rules[1:]
      for clock in ("real", "virtual")
    ]
    clocks = [
      _quotient(_per_update(row["real"]), _per_update(row["virtual"]))
      for row in of_rules
    ]
    quotients += filter(None, clocks)
    columns = [f"{x:.2f}" if x else "not reached" for x in (*cells, *clocks)]
    lines.append(f"| {condition} | {' | '.join(columns)} |")
  mean = np.exp(np.mean(np.log(quotients)))
  near = sum(abs(quotient - 1) < 0.1 for quotient in quotients)
  return [
    *lines,
    "",
    f"Seconds per update, real / virtual: geometric mean {mean:.2f}, from"
    f" {min(quotients):.2f} to {max(quotients):.2f}; less than 10% from 1 in"
    f" {near} of {len(quotients)} cells.",
  ]


def _per_update(run: dict) -> float | None:
  return _quotient(run["seconds"], run.get("updates"))


def _quotient(one: float | None, other: float | None) -> float | None:
  """Returns one / other; None if one of them is missing, as in a failed run."""
  return one / other if one and other else None


def _secs(run: dict) -> str:
  return "not reached" if run["seconds"] is None else f"{run['seconds']:.0f}"
