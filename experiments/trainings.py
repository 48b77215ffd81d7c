"""Trains on the photographs, and stores which precision the trainings reach.

  python -m experiments.trainings --data_dir=DIR [--rows=NAME,...] [--draw]
    [--output=experiments/results/trainings.json]

A row is a training by a program of `cifar10` or `inception_mini`, whose `eval`
measures its last checkpoint. In some rows, it also measures the checkpoints
while the training goes on, on the same cores. The tables under "Precision" in
docs/results.md say how long they take. Each finished row is stored at once, in
place of an older result of this row. `--draw` trains nothing, and draws
recipes.png beside the file: the precision by epochs of the recipes of
`cifar10`.
`DIR` has CIFAR-10, as TensorFlow Datasets prepares it or in its official binary
layout. `inception_mini` gets its photographs as JPEG files, in shards that
`inception_mini.build_image_data` makes.
"""

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import tensorflow as tf
from absl import flags

from cifar10 import config
from cifar10 import sources
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
    evals: For each measurement after the training, flags of the program `eval`.
    is_watched: Whether checkpoints are measured while the training goes on.
  """

  module: str
  arguments: Sequence[str]
  evals: Sequence[Sequence[str]] = ((),)
  is_watched: bool = False

  @property
  def package(self) -> str:
    """The package of the program: `cifar10` or `inception_mini`."""
    return self.module.partition(".")[0]


_ON_A_CLUSTER = [f"--cluster_spec={_SPEC}", "--max_steps=2000"]
_EVERY_4_EPOCHS = "--checkpoint_every_steps=1563"
_MINI = ["--recipe=mini", "--nodistort_color", "--batch_size=32"]
_EIGHT = [
  "--num_gpus=8",
  "--emulate_gpus",
  "--learning_rate=0.2",
  "--max_steps=1172",
  "--warmup_epochs=0.5",
]
# An update of eight replicas has eight times the images of one replica, so the
# decays are the eighth powers of those of one replica.
_DECAYS = ["--moving_average_decay=0.992", "--batch_norm_decay=0.92"]
# The seeds of the rows of one and of eight replicas.
SEEDS = range(3)
ROWS = {
  "between_graph": Row("cifar10.distributed_train", _ON_A_CLUSTER),
  "in_graph": Row(
    "cifar10.distributed_train", [*_ON_A_CLUSTER, "--replication=in_graph"]
  ),
  "tutorial": Row(
    "cifar10.train",
    ["--num_epochs=20", "--checkpoint_every_steps=782"],
    is_watched=True,
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
  "inception_backup": Row(
    "inception_mini.distributed_train",
    [
      *_MINI,
      "--cluster_spec=cluster_specs/local_2ps_3workers.json",
      "--replicas_to_aggregate=2",
      "--max_steps=6000",
    ],
  ),
  **{
    f"inception_one_seed_{seed}": Row(
      "inception_mini.train",
      [*_MINI, "--learning_rate=0.05", "--max_steps=9375", f"--seed={seed}"],
    )
    for seed in SEEDS
  },
  **{
    f"inception_eight_seed_{seed}": Row(
      "inception_mini.train", [*_MINI, *_EIGHT, *_DECAYS, f"--seed={seed}"]
    )
    for seed in SEEDS
  },
}


def measured(output: str) -> list[tuple[int, float]]:
  """Finds the measurements in what `cifar10.eval` printed.

  Args:
    output: The text that the program `eval` printed.

  Returns:
    (global step, precision @ 1) of each checkpoint that was measured.
  """
  return [(int(s), float(p)) for s, p in _MEASURED.findall(output)]


def make_shards(data_dir: str, directory: str) -> None:
  """Makes the photographs into shards that `inception_mini` reads.

  Args:
    data_dir: The directory of CIFAR-10.
    directory: An empty directory for the shards.

  Raises:
    DataError: If `data_dir` does not have CIFAR-10.
    RuntimeError: If `inception_mini.build_image_data` fails.
  """
  source = sources.find("cifar10", data_dir, download=False)
  with tempfile.TemporaryDirectory() as photos:
    for split in ("train", "test"):
      examples = zip(*source.read(split), strict=True)
      for number, (image, label) in enumerate(examples):
        folder = pathlib.Path(photos, split, f"class_{int(label)}")
        folder.mkdir(parents=True, exist_ok=True)
        encoded = tf.io.encode_jpeg(image, quality=95).numpy()
        (folder / f"{number}.jpeg").write_bytes(encoded)
    programs.output(
      "inception_mini.build_image_data",
      f"--train_directory={photos}/train",
      f"--validation_directory={photos}/test",
      f"--output_directory={directory}",
      "--train_shards=12",
      "--validation_shards=2",
    )


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
    evaluate = f"{row.package}.eval"
    watcher = None
    if row.is_watched:
      command = [sys.executable, "-m", evaluate, *where]
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
        raise RuntimeError(f"{evaluate} failed:\n{log.read_text()}")
    finally:
      if watcher is not None:
        watcher.kill()
        watcher.wait()
    evals = {}
    for more in row.evals:
      words = [*where, "--run_once", *more]
      ((_, precision),) = measured(programs.output(evaluate, *words))
      evals[shlex.join([evaluate, "--run_once", *more])] = precision
    return {
      "command": shlex.join(["python", "-m", row.module, *row.arguments]),
      "minutes": secs / 60,
      "examples_per_sec": programs.examples_per_sec(printed),
      "last_line": programs.FINISHED.search(printed)[0],
      "precision": evals,
      "precision_by_step": measured(log.read_text()) if row.is_watched else [],
    }


def by_epochs(result: Mapping[str, Any]) -> list[tuple[float, float]]:
  """Returns the curve of a row whose checkpoints were measured.

  Args:
    result: The stored result of the row.

  Returns:
    (epochs, precision @ 1) of each checkpoint that was measured.
  """
  step, examples = map(
    int, programs.FINISHED.fullmatch(result["last_line"]).groups()
  )
  epoch = step / examples * config.NUM_EXAMPLES_PER_EPOCH_FOR_TRAIN
  return [(s / epoch, p) for s, p in result["precision_by_step"]]


def draw(stored: Mapping[str, Mapping[str, Any]], path: pathlib.Path) -> None:
  """Draws the precision by epochs of both recipes into a PNG file.

  Args:
    stored: The stored results, by the name of the row.
    path: The path of the file.

  Raises:
    ValueError: If matplotlib is missing.
  """
  claims.require_matplotlib()
  figure, axes = claims.new_figure(7, 4.2)
  for name in ("tutorial", "modern"):
    points = by_epochs(stored[name])
    label = f"{name} (last: {points[-1][1]:.4f})"
    axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
  axes.axhline(0.86, color="grey", linewidth=0.8, linestyle="--")
  axes.text(0.2, 0.863, "86%: the tutorial after 256 epochs", fontsize=8)
  axes.set_xlim(0, None)
  axes.set_ylim(0.4, 0.9)
  axes.set_xlabel("epochs")
  axes.set_ylabel("precision @ 1 on the 10,000 test images")
  axes.set_title("The tutorial's network by two recipes")
  axes.grid(alpha=0.3)
  axes.legend(loc="lower right")
  figure.savefig(path, dpi=120)


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
    if not FLAGS.draw and FLAGS.data_dir is None:
      raise ValueError(
        "`--data_dir` must name the data set. Received: nothing."
      )
    stored = json.loads(path.read_text()) if path.exists() else {}
    if FLAGS.draw:
      missing = sorted({"tutorial", "modern"} - set(stored))
      if missing:
        raise ValueError(
          f"{path} must have the rows `tutorial` and `modern`. Missing:"
          f" {', '.join(missing)}."
        )
      draw(stored, path.with_name("recipes.png"))
      return
  with tempfile.TemporaryDirectory() as shards:
    data = {
      "cifar10": ["--dataset=cifar10", f"--data_dir={FLAGS.data_dir}"],
      "inception_mini": [f"--data_dir={shards}"],
    }
    for name in FLAGS.rows:
      row = ROWS[name]
      if row.package == "inception_mini" and not os.listdir(shards):
        make_shards(FLAGS.data_dir, shards)
      made_with = claims.circumstances(claims.commit())
      stored[name] = {**made_with, **run(row, data[row.package])}
      path.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
      print(f"{name}: {stored[name]['precision']}", flush=True)


if __name__ == "__main__":
  flags.DEFINE_string("data_dir", None, "The data set")
  flags.DEFINE_list("rows", list(ROWS), "What to train")
  flags.DEFINE_boolean("draw", False, "Train nothing; draw the picture")
  flags.DEFINE_string(
    "output", "experiments/results/trainings.json", "The file of the results"
  )
  command_line.start(main)
