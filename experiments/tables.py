"""Writes the tables of README and docs that come from stored results.

  python -m experiments.tables

A page has such a table between two comments,

    <!-- generated: NAME -->
    <!-- end -->

where NAME is a key of `TABLES`. Run the command after results have changed: a
test fails if a page is not up to date. `experiments.numbers` looks for no
sources of the numbers in between. Text around a table that quotes its numbers
names it as their source: `table NAME`.
"""

import json
import re
import statistics
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

from benchmarks import ratios
from benchmarks import tables as benchmark_tables
from experiments import numbers
from experiments import race
from experiments import trainings
from experiments import update_rules
from experiments.claims import validation
from experiments.support import race_real

_RESULTS = numbers.ROOT / "experiments" / "results"
_BLOCK = re.compile(
  r"(<!-- generated: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL
)


_BENCHMARKS = (
  benchmark_tables.bandwidth,
  benchmark_tables.bandwidth_peers,
  benchmark_tables.before_and_now,
  benchmark_tables.embedding,
  benchmark_tables.embedding_cpu,
  benchmark_tables.embedding_ratios,
  benchmark_tables.equivalence,
  benchmark_tables.fault_runs,
  benchmark_tables.faults,
  benchmark_tables.floor,
  benchmark_tables.floor_ratios,
  benchmark_tables.least_time,
  benchmark_tables.lost_updates,
  benchmark_tables.other_speeds,
  benchmark_tables.overlap,
  benchmark_tables.readme,
  benchmark_tables.scale,
  benchmark_tables.traffic,
  benchmark_tables.two_way,
)


_TRAININGS = {
  "between_graph": "The tutorial's network, between-graph: 2,000 updates of 2 x"
  " 128 images",
  "in_graph": "The same, in-graph",
  "tutorial": "The tutorial's network, one device, 20 epochs",
  "modern": "The tutorial's network with `--recipe=modern`, one device, 40"
  " epochs",
  "modern_10_epochs": "The same with 10 epochs",
  "inception_backup": "`inception_mini`, 2 PS and 3 workers, one of them a"
  " backup: 6,000 updates of 2 x 32 images, 7.7 epochs",
}
# How an evaluation differs from that of one view of each test image.
_VIEWS = {
  "": "",
  "--views=2": " with two views",
  "--views=6": " with six views",
  "--eval_data=train_eval": " on the 50,000 training images",
}


def _stored_trainings() -> dict[str, dict[str, Any]]:
  path = _RESULTS / "trainings.json"
  return json.loads(path.read_text(encoding="utf-8"))


def _trainings() -> list[str]:
  rows = _stored_trainings()
  lines = ["| what | command | precision @ 1 | date |", "|---|---|---|---|"]
  for name, what in _TRAININGS.items():
    if name not in rows:
      continue
    row = rows[name]
    found = [
      f"{precision:.4f}{_VIEWS[command.partition('--run_once')[2].strip()]}"
      for command, precision in row["precision"].items()
    ]
    lines.append(
      f"| {what} | `{row['command']}` | {', '.join(found)} | {row['date']} |"
    )
  return lines


def _one_or_eight() -> list[str]:
  rows = _stored_trainings()
  ones, eights = (
    [
      next(iter(rows[f"inception_{count}_seed_{s}"]["precision"].values()))
      for s in trainings.SEEDS
    ]
    for count in ("one", "eight")
  )
  lost = [100 * (a - b) for a, b in zip(ones, eights, strict=True)]
  lines = ["| seed | one | eight | points lost |", "|---|---|---|---|"]
  for row in zip(trainings.SEEDS, ones, eights, lost, strict=True):
    lines.append("| {} | {:.4f} | {:.4f} | {:.2f} |".format(*row))
  mean, least, most = ratios.interval_of_mean(lost)
  lines.append(
    f"| mean | {statistics.mean(ones):.4f} | {statistics.mean(eights):.4f}"
    f" | {mean:.2f} [{least:.2f}, {most:.2f}] |"
  )
  return lines


def _batch_norm_statistics() -> list[str]:
  path = _RESULTS / "batch_norm_statistics.json"
  distances = json.loads(path.read_text(encoding="utf-8"))["distances"]
  return [
    "| | gradient of the step | movement of the statistics |",
    "|---|---|---|",
    *(
      f"| `{kind}` | {of['gradients']:.2g} | {of['statistics']:.2g} |"
      for kind, of in distances.items()
    ),
  ]


def _update_rules() -> list[str]:
  path = _RESULTS / "update_rules.json"
  rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
  return update_rules.table([r for r in rows if r["workers"] == 4]).splitlines()


def _validation() -> list[str]:
  path = _RESULTS / "validation.json"
  return validation.table(json.loads(path.read_text(encoding="utf-8")))


def _race() -> list[str]:
  return race.short_table(race.read(str(_RESULTS / "race.json")))


def _race_real() -> list[str]:
  path = _RESULTS / "race_real.json"
  text = path.read_text(encoding="utf-8")
  return race_real.short_table(json.loads(text)["runs"])


# Each makes the lines of a block.
TABLES: dict[str, Callable[[], Sequence[str]]] = {
  "batch_norm_statistics": _batch_norm_statistics,
  "one_or_eight": _one_or_eight,
  "race": _race,
  "race_real": _race_real,
  "trainings": _trainings,
  "update_rules": _update_rules,
  "validation": _validation,
  **{make.__name__: make for make in _BENCHMARKS},
}


def fill(text: str) -> str:
  """Returns a page with all its blocks as the stored results are now.

  Args:
    text: The page.

  Raises:
    KeyError: If a block has a name that is not in `TABLES`.
  """

  def block(match: re.Match) -> str:
    begin, name, end = match.groups()
    return "\n".join([begin, *TABLES[name](), "", end])

  return _BLOCK.sub(block, text)


def main() -> None:
  for page, text in numbers.pages().items():
    if (filled := fill(text)) != text:
      (numbers.ROOT / page).write_text(filled, encoding="utf-8")
      print(page)


if __name__ == "__main__":
  main()
