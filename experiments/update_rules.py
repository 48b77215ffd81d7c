"""Compares the update rules on one data set, with one slow worker.

  python -m experiments.update_rules --data_dir=DIR --output=DIR

Trains the CIFAR-10 tutorial's network by every rule, with the same number of
examples. Each training runs on a cluster of its own on this machine, of 1 PS
(parameter server) and M workers. The last worker is stopped for 4/5 of the time
(`slow_down`), so that it is 5 times slower. Writes update_rules.json and the
table update_rules.md with: examples/sec between the first and the last log
line, updates, staleness, refused gradients, and precision @ 1 of the averaged
variables.
"""

import json
import os
import re
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

from absl import flags

from experiments.support import claims
from experiments.support import programs
from tf_replicas.programs import command_line
from tf_replicas.runtime import processes

FLAGS = flags.FLAGS
_COUNTS = re.compile(
  r"worker (\d+): (\d+) contributions applied, (\d+) refused"
  r"(?:.*; staleness ([\d.]+) on average, 95% at most (\d+), all at most"
  r" (\d+))?"
)
_PRECISION = re.compile(r"precision @ 1 = ([\d.]+)")


class Rule(NamedTuple):
  """An update rule with its settings; a row of the table.

  Attributes:
    name: The name in the table.
    flags: Flags of `cifar10.distributed_train`.
    batches: The number of batches in one update.
  """

  name: str
  flags: Sequence[str]
  batches: int


def rules(workers: int) -> list[Rule]:
  """Returns the update rules to compare.

  Args:
    workers: The number of workers, on which some settings depend.
  """
  most = 2 * (workers - 1)
  parts = max(1, workers // 2)
  return [
    Rule("sync", [], workers),
    Rule(
      "sync with a backup",
      [f"--replicas_to_aggregate={workers - 1}"],
      workers - 1,
    ),
    Rule("async", ["--update=async"], 1),
    Rule(
      "bounded_staleness, 1",
      ["--update=bounded_staleness", "--max_staleness=1"],
      1,
    ),
    Rule(
      "bounded_staleness, 3",
      ["--update=bounded_staleness", "--max_staleness=3"],
      1,
    ),
    Rule(
      f"drop_stale, {most}",
      ["--update=drop_stale", f"--max_staleness={most}"],
      1,
    ),
    Rule("staleness_aware", ["--update=staleness_aware"], 1),
    Rule(
      "delay_compensated, 0.04",
      ["--update=delay_compensated", "--delay_compensation=0.04"],
      1,
    ),
    Rule(
      f"softsync, {parts}",
      ["--update=softsync", f"--softsync_n={parts}"],
      workers // parts,
    ),
    Rule(
      "model_average, every 20 steps",
      ["--update=model_average", "--period=20"],
      20 * workers,
    ),
    Rule(
      "elastic_average, every 10 steps",
      ["--update=elastic_average", "--period=10"],
      10,
    ),
    Rule(
      "accumulated_gradients, every 10 steps",
      ["--update=accumulated_gradients", "--period=10"],
      10,
    ),
  ]


def measure(rule: Rule, workers: int, directory: str) -> dict:
  """Trains by an update rule, evaluates, and returns the results.

  Args:
    rule: The update rule.
    workers: The number of workers, of which the last one is slow.
    directory: An empty directory for the files of the training.

  Returns:
    A row of the table of results, as a dictionary.

  Raises:
    RuntimeError: If a program failed, with what it printed.
  """
  spec = programs.write_spec(directory, workers=workers)
  made_with = claims.circumstances(claims.commit())
  data = [f"--dataset={FLAGS.dataset}", f"--train_dir={directory}/run"]
  if FLAGS.data_dir:
    data.append(f"--data_dir={FLAGS.data_dir}")
  update = rule.batches * FLAGS.batch_size
  steps = max(1, round(FLAGS.num_examples / update))
  log_every = max(1, steps // 20)
  output = programs.train(
    "cifar10.distributed_train",
    [
      *data,
      f"--cluster_spec={spec}",
      f"--batch_size={FLAGS.batch_size}",
      f"--max_steps={steps}",
      f"--log_every_steps={log_every}",
      "--learning_rate=0.1",  # The same for all.
      *rule.flags,
    ],
    slow_downs={workers - 1: FLAGS.slow_down},
  )
  evaluated = programs.output(
    "cifar10.eval", f"--train_dir={directory}/run", "--run_once"
  )
  steps_per_sec = programs.step_rate(programs.logged(output))
  counts = _COUNTS.findall(output)
  # Of the replicas that have applied gradients.
  staleness = [list(map(float, c[3:])) for c in counts if c[3]]
  weights = [int(c[1]) for c in counts if c[3]]
  step, examples = map(int, programs.FINISHED.search(output).groups())
  return {
    "rule": rule.name,
    "workers": workers,
    "examples_per_sec": steps_per_sec * update,
    "updates": step,
    "examples": examples,
    "applied": [int(c[1]) for c in counts],
    "refused": [int(c[2]) for c in counts],
    "staleness_mean": sum(
      s[0] * n for s, n in zip(staleness, weights, strict=True)
    )
    / max(1, sum(weights)),
    "staleness_95": max((s[1] for s in staleness), default=0),
    "staleness_max": max((s[2] for s in staleness), default=0),
    "precision": float(_PRECISION.search(evaluated).group(1)),
    **made_with,
  }


def table(rows: Sequence[dict]) -> str:
  """Formats the results of the rules as a Markdown table.

  Args:
    rows: Results as `measure` returns them.
  """
  lines = [
    "| workers | rule | examples/sec | updates | staleness: mean, 95%, max |"
    " refused | applied of the slow one | precision @ 1 |",
    "|---|---|---|---|---|---|---|---|",
  ]
  for row in rows:
    staleness = (
      f"{row['staleness_mean']:.2f}, {row['staleness_95']:.0f},"
      f" {row['staleness_max']:.0f}"
    )
    share = row["applied"][-1] / max(1, sum(row["applied"]))
    lines.append(
      f"| {row['workers']} | {row['rule']} | {row['examples_per_sec']:.0f} |"
      f" {row['updates']} | {staleness} | {sum(row['refused'])} |"
      f" {share:.0%} | {row['precision']:.4f} |"
    )
  return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> None:
  del argv
  with processes.one_line_errors(
    usage=(ValueError,), run_time=(RuntimeError, LookupError, OSError)
  ):
    chosen = [
      (int(workers), rule)
      for workers in FLAGS.workers
      for rule in rules(int(workers))
      if not FLAGS.rules or rule.name in FLAGS.rules
    ]
    os.makedirs(FLAGS.output, exist_ok=True)
    rows = []
    for workers, rule in chosen:
      with tempfile.TemporaryDirectory() as directory:
        rows.append(measure(rule, workers, directory))
      print(table(rows[-1:]).splitlines()[-1], flush=True)
      _write(rows)  # Each took minutes.


def _write(rows: Sequence[dict]) -> None:
  report = {
    "num_examples": FLAGS.num_examples,
    "batch_size": FLAGS.batch_size,
    "slow_down": FLAGS.slow_down,
    "rows": rows,
  }
  path = os.path.join(FLAGS.output, "update_rules")
  with open(path + ".json", "w", encoding="utf-8") as file:
    json.dump(report, file, indent=1)
    file.write("\n")
  with open(path + ".md", "w", encoding="utf-8") as file:
    file.write(table(rows))


if __name__ == "__main__":
  flags.DEFINE_string(
    "dataset", "cifar10", "The data set: cifar10 or synthetic"
  )
  flags.DEFINE_string("data_dir", None, "The directory of the data set")
  flags.DEFINE_string(
    "output", "/tmp/experiments", "The directory for the files"
  )
  flags.DEFINE_list("workers", ["2", "4"], "Numbers of workers to measure")
  flags.DEFINE_list("rules", [], "Names of the rules to measure; if empty, all")
  command_line.define_count(
    "num_examples", 100_000, "The number of examples of each training"
  )
  command_line.define_count(
    "batch_size", 64, "The number of images in a batch of one worker"
  )
  flags.DEFINE_float("slow_down", 5, "By what factor the last worker is slower")
  command_line.start(main)
