"""Finds out whether any update rule diverges with default settings.

  python -m experiments.default_rates --output=DIR [--workers=2,4]
    [--seeds=0,1,2,3,4] [--rules=NAME,...] [--batch_size=64] [--steps=300]

Trains the CIFAR-10 tutorial's network on the synthetic data set by every rule
with 2 and 4 workers, and evaluates it. Each run is a cluster of its own on this
machine, and no learning rate is given. All rules get as many examples as
`--steps` synchronous updates of all workers. Writes default_rates.json and the
table default_rates.md. Runs that are in the file already are not repeated, so
that the command may be stopped, and continued with more seeds.
"""

import collections
import json
import math
import os
import re
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

from absl import flags

from experiments.support import claims
from experiments.support import programs
from tf_replicas.programs import command_line
from tf_replicas.programs import update_options
from tf_replicas.runtime import processes

FLAGS = flags.FLAGS
_RATE = re.compile(r"learning rate ([\d.e-]+) \(.*expected staleness ([\d.]+);")
_PRECISION = re.compile(r"precision @ 1 = ([\d.]+)")
# What makes two runs the same one.
_KEYS = ("rule", "workers", "batch_size", "steps", "seed")


class Rule(NamedTuple):
  """An update rule with its settings; a row of the table.

  Attributes:
    name: The name in the table, and for the flag `--rules`.
    settings: Flags of `cifar10.distributed_train`, by name.
  """

  name: str
  settings: dict[str, object]


def rules(workers: int) -> list[Rule]:
  """Returns every update rule, with the settings that it needs.

  Args:
    workers: The number of workers, on which some settings depend.
  """
  return [
    Rule("sync", {}),
    Rule("sync_backup", {"replicas_to_aggregate": workers - 1}),
    *(
      Rule(name, {"update": name, **needed})
      for name, needed in (
        ("async", {}),
        ("bounded_staleness", {"max_staleness": 1}),
        ("drop_stale", {"max_staleness": workers - 1}),
        ("staleness_aware", {}),
        ("delay_compensated", {"delay_compensation": 0.04}),
        ("softsync", {"softsync_n": workers // 2}),
        ("model_average", {"period": 10}),
        ("elastic_average", {}),
        ("accumulated_gradients", {}),
      )
    ),
  ]


def examples_of_update(rule: Rule, workers: int, batch_size: int) -> int:
  """Returns the number of examples in one update of a rule.

  Args:
    rule: The update rule.
    workers: The number of workers.
    batch_size: The number of examples in a batch of one worker.
  """
  given = {k: v for k, v in rule.settings.items() if k != "update"}
  names = (str(rule.settings.get("update", update_options.SYNC)),)
  settings = update_options.UpdateSettings(names, **given)
  count = update_options.replicas_to_aggregate(settings, workers)
  return count * settings.local_steps * batch_size


def measure(rule: Rule, workers: int, seed: int, directory: str) -> dict:
  """Trains by a rule, evaluates, and returns an entry of the result file.

  A training that fails gives an entry too, with its last line of output as
  `error`.

  Args:
    rule: The update rule.
    workers: The number of workers.
    seed: The seed of the training.
    directory: An empty directory for the files of the training.
  """
  batch_size = FLAGS.batch_size
  size = examples_of_update(rule, workers, batch_size)
  updates = math.ceil(FLAGS.steps * workers * batch_size / size)
  arguments = [
    "--dataset=synthetic",
    f"--train_dir={directory}/run",
    f"--cluster_spec={programs.write_spec(directory, workers=workers)}",
    f"--batch_size={batch_size}",
    f"--max_steps={updates}",
    f"--seed={seed}",
    f"--log_every_steps={max(1, updates // 20)}",
    *(f"--{name}={value}" for name, value in rule.settings.items()),
  ]
  run = {
    "rule": rule.name,
    "workers": workers,
    "batch_size": batch_size,
    "steps": FLAGS.steps,
    "seed": seed,
    "updates": updates,
    "examples": updates * size,
    **claims.circumstances(claims.commit()),
  }
  with programs.started(
    "cifar10.distributed_train", arguments, FLAGS.timeout_secs
  ) as process:
    output = process.communicate()[0]
  rate = _RATE.search(output)
  losses = [line.loss for line in programs.logged(output)]
  run |= {
    "learning_rate": float(rate[1]) if rate else None,
    "staleness": float(rate[2]) if rate else None,
    "loss_max": max(losses, default=None),
    "loss_last": losses[-1] if losses else None,
    "precision": None,
    "error": None,
  }
  if process.returncode:
    last = output.strip().splitlines()[-1]
    if "diverged" not in last:
      raise RuntimeError(f"{rule.name}, seed {seed} failed: {last}")
    run["error"] = last
    return run
  evaluated = programs.output(
    "cifar10.eval", f"--train_dir={directory}/run", "--run_once"
  )
  run["precision"] = float(_PRECISION.search(evaluated)[1])
  return run


def table(runs: Sequence[dict]) -> str:
  """Formats the runs as a Markdown table.

  A line summarizes the runs of one rule with one batch size and one number of
  workers, which differ by their seeds.

  Args:
    runs: Entries of the result file, as `measure` returns them.
  """
  lines = [
    "| workers | batch | rule | learning rate | updates | examples | seeds |"
    " precision @ 1: least, median, most | largest logged loss | diverged |",
    "|---|---|---|---|---|---|---|---|---|---|",
  ]
  cells = collections.defaultdict(list)
  for run in runs:
    cells[run["workers"], run["batch_size"], run["rule"], run["steps"]] += [run]
  for (workers, batch_size, rule, _), same in cells.items():
    found = sorted(r["precision"] for r in same if r["precision"] is not None)
    precision = "–"
    if found:
      middle = found[len(found) // 2]
      precision = f"{found[0]:.3f}, {middle:.3f}, {found[-1]:.3f}"
    losses = [r["loss_max"] for r in same if r["loss_max"] is not None]
    rates = [r["learning_rate"] for r in same if r["learning_rate"] is not None]
    rate = max(rates, default=math.nan)
    lines.append(
      f"| {workers} | {batch_size} | {rule} | {rate:.4g} |"
      f" {same[0]['updates']} | {same[0]['examples']} |"
      f" {', '.join(str(r['seed']) for r in same)} | {precision} |"
      f" {max(losses, default=math.nan):.2f} |"
      f" {sum(r['error'] is not None for r in same)} of {len(same)} |"
    )
  return "\n".join(lines) + "\n"


def _write(path: str, runs: Sequence[dict]) -> None:
  with open(path + ".json", "w", encoding="utf-8") as file:
    json.dump({"runs": list(runs)}, file, indent=1)
    file.write("\n")
  with open(path + ".md", "w", encoding="utf-8") as file:
    file.write(table(runs))


def _read(path: str) -> list[dict]:
  try:
    with open(path + ".json", encoding="utf-8") as file:
      return json.load(file)["runs"]
  except FileNotFoundError:
    return []


def main(argv: Sequence[str]) -> None:
  del argv
  os.makedirs(FLAGS.output, exist_ok=True)
  path = os.path.join(FLAGS.output, "default_rates")
  with processes.one_line_errors(
    usage=(ValueError,), run_time=(RuntimeError, OSError)
  ):
    # All rules with a seed before the next: a part says something of each.
    for seed in map(int, FLAGS.seeds):
      for workers in map(int, FLAGS.workers):
        for rule in rules(workers):
          values = rule.name, workers, FLAGS.batch_size, FLAGS.steps, seed
          runs = _read(path)
          is_chosen = not FLAGS.rules or rule.name in FLAGS.rules
          if not is_chosen or any(
            tuple(run[key] for key in _KEYS) == values for run in runs
          ):
            continue
          with tempfile.TemporaryDirectory() as directory:
            run = measure(rule, workers, seed, directory)
          print(table([run]).splitlines()[-1], flush=True)
          if run["error"]:
            print(run["error"], flush=True)
          _write(path, [*_read(path), run])


if __name__ == "__main__":
  flags.DEFINE_string(
    "output", "/tmp/experiments", "The directory for the files"
  )
  flags.DEFINE_list("workers", ["2", "4"], "Numbers of workers to measure")
  flags.DEFINE_list("seeds", ["0", "1", "2", "3", "4"], "Seeds to train with")
  flags.DEFINE_list("rules", [], "Names of the rules to measure; if empty, all")
  command_line.define_count(
    "batch_size", 64, "The number of images in a batch of one worker"
  )
  command_line.define_count(
    "steps",
    300,
    "The number of synchronous updates of all workers with as many examples",
  )
  flags.DEFINE_float(
    "timeout_secs", 1800, "The time limit of a training, in seconds"
  )
  command_line.start(main)
