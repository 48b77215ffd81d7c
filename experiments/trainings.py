"""Trains on the photographs, and stores which precision the trainings reach.

  python -m experiments.trainings --data_dir=DIR [--rows=NAME,...]
    [--output=experiments/results/trainings.json]

A row is a training by a program of this project. `cifar10.eval` measures its
last checkpoint. In some rows, it also measures the checkpoints while the
training goes on, on the same cores. The table "Precision" in docs/results.md
says how long they take. Each finished row is stored at once, in place of an
older result of this row.
`DIR` has the data set as TensorFlow Datasets prepares it.
"""

import json
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

from absl import flags

from experiments.support import claims
from experiments.support import programs
from tf_replicas.programs import command_line
from tf_replicas.runtime import processes

FLAGS = flags.FLAGS
_SPEC = "cluster_specs/local_1ps_2workers.json"
_TRAINING_SECS = 4 * 3600.0
_WATCHER_SECS = 1800.0
_MEASURED = re.compile(
  r"evaluating \S*-(\d+).*?precision @ 1 = ([\d.]+)", re.DOTALL
)


class Row(NamedTuple):
  """A training, and what is measured of it.

  Attributes:
    module: The program that trains.
    arguments: Its flags, except for the directories and the data set.
    evals: For each measurement after the training, flags of `cifar10.eval`.
    is_watched: Whether checkpoints are measured while the training goes on.
  """

  module: str
  arguments: Sequence[str]
  evals: Sequence[Sequence[str]] = ((),)
  is_watched: bool = False


_ON_A_CLUSTER = [f"--cluster_spec={_SPEC}", "--max_steps=2000"]
_EVERY_4_EPOCHS = "--checkpoint_every_steps=1563"
ROWS = {
  "between_graph": Row("cifar10.distributed_train", _ON_A_CLUSTER),
  "in_graph": Row(
    "cifar10.distributed_train", [*_ON_A_CLUSTER, "--replication=in_graph"]
  ),
  "modern": Row(
    "cifar10.train",
    ["--recipe=modern", _EVERY_4_EPOCHS],
    [[], ["--views=2"], ["--views=6"], ["--eval_data=train_eval"]],
    is_watched=True,
  ),
  "modern_10_epochs": Row(
    "cifar10.train", ["--recipe=modern", "--num_epochs=10"]
  ),
}


def measured(output: str) -> list[tuple[int, float]]:
  """Finds the measurements in what `cifar10.eval` printed.

  Args:
    output: The text that the program printed.

  Returns:
    (global step, precision @ 1) of each checkpoint that was measured.
  """
  return [(int(s), float(p)) for s, p in _MEASURED.findall(output)]


def run(row: Row, data: Sequence[str]) -> dict[str, object]:
  """Trains as a row says, and measures the checkpoints.

  Args:
    row: The row.
    data: The flags that name the data set.

  Returns:
    The commands, the time, and what was measured.

  Raises:
    RuntimeError: If a program fails, with what it printed.
  """
  with tempfile.TemporaryDirectory() as directory:
    where = [f"--train_dir={directory}/run", *data]
    log = pathlib.Path(directory, "eval.log")
    watcher = None
    if row.is_watched:
      command = [sys.executable, "-m", "cifar10.eval", *where]
      with log.open("w", encoding="utf-8") as file:
        watcher = subprocess.Popen(command, stdout=file, stderr=file)
    start = time.monotonic()
    try:
      with programs.started(
        row.module, [*row.arguments, *where], _TRAINING_SECS
      ) as process:
        printed = process.communicate()[0]
      secs = time.monotonic() - start
      if process.returncode:
        raise RuntimeError(f"{row.module} failed:\n{printed}")
      # It ends after the last checkpoint.
      if watcher is not None and watcher.wait(_WATCHER_SECS):
        raise RuntimeError(f"cifar10.eval failed:\n{log.read_text()}")
    finally:
      if watcher is not None:
        watcher.kill()
        watcher.wait()
    evals = {}
    for more in row.evals:
      words = [*where, "--run_once", *more]
      ((_, precision),) = measured(programs.output("cifar10.eval", *words))
      evals[shlex.join(["cifar10.eval", "--run_once", *more])] = precision
    return {
      "command": shlex.join(["python", "-m", row.module, *row.arguments]),
      "minutes": secs / 60,
      "examples_per_sec": programs.examples_per_sec(printed),
      "last_line": programs.FINISHED.search(printed)[0],
      "precision": evals,
      "precision_by_step": measured(log.read_text()) if row.is_watched else [],
    }


def main(argv: Sequence[str]) -> None:
  del argv
  path = pathlib.Path(FLAGS.output)
  with processes.one_line_errors(usage=(ValueError,)):
    unknown = sorted(set(FLAGS.rows) - set(ROWS))
    if unknown:
      raise ValueError(
        f"`--rows` must name some of {', '.join(ROWS)}. Received:"
        f" {', '.join(unknown)}."
      )
  stored = json.loads(path.read_text()) if path.exists() else {}
  data = ["--dataset=cifar10", f"--data_dir={FLAGS.data_dir}"]
  for name in FLAGS.rows:
    made_with = claims.circumstances(claims.commit())
    stored[name] = {**made_with, **run(ROWS[name], data)}
    path.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    print(f"{name}: {stored[name]['precision']}", flush=True)


if __name__ == "__main__":
  flags.DEFINE_string("data_dir", None, "The data set", required=True)
  flags.DEFINE_list("rows", list(ROWS), "What to train")
  flags.DEFINE_string(
    "output", "experiments/results/trainings.json", "The file of the results"
  )
  command_line.start(main)
