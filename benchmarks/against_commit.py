"""Speed of this tree against another commit of this repository.

  python -m benchmarks.against_commit --commit=REV [--rounds=8] [--output=FILE]

Both trees run the same programs in turn, in interleaved rounds, so that they
meet the same noise: the CIFAR-10 binary on synthetic images (1 PS, 2 workers,
examples/sec), and a small model of which ten updates are one call (steps/sec).
The ratio within a round is what counts; printed are its geometric mean and the
95% interval of that (Student's t, of the logarithms). The raw numbers go to
`FILE` as JSON.
"""

import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

from absl import app
from absl import flags

from benchmarks import ratios

FLAGS = flags.FLAGS
flags.DEFINE_string("commit", None, "The other commit", required=True)
flags.DEFINE_integer("rounds", 8, "How often each is measured", lower_bound=2)
flags.DEFINE_list(
  "measures",
  ["between_graph", "in_graph", "small_between_graph", "small_in_graph"],
  "What to measure",
)
flags.DEFINE_string("output", None, "Where to write the raw numbers, as JSON")

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_SECS = 300


def _run(root: pathlib.Path, *arguments: str) -> str:
  """Runs Python in a tree; what it prints."""
  result = subprocess.run(
    [sys.executable, *arguments],
    cwd=root,
    env={**os.environ, "PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": ""},
    capture_output=True,
    text=True,
    timeout=_SECS,
    check=False,
  )
  if result.returncode:
    raise RuntimeError(result.stdout + result.stderr)
  return result.stdout


def examples_per_sec(root: pathlib.Path, replication: str) -> float:
  """Of the CIFAR-10 binary, by its log lines after the warm-up."""
  with tempfile.TemporaryDirectory() as directory:
    output = _run(
      root,
      "-m",
      "cifar10.distributed_train",
      f"--cluster_spec={root}/cluster_specs/local_1ps_2workers.json",
      f"--train_dir={directory}/run",
      "--dataset=synthetic",
      "--batch_size=64",
      f"--replication={replication}",
      "--max_steps=250",
      "--log_every_steps=50",
    )
  rates = re.findall(r"([\d.]+) examples/sec", output)
  return statistics.harmonic_mean([float(rate) for rate in rates[-4:]])


def steps_per_sec(root: pathlib.Path, replication: str) -> float:
  """Of the small model, ten updates per call."""
  program = (
    "from benchmarks import small_model as m; "
    "secs = m.measure('benchmarks.small_model_task', "
    f"{replication!r}, 10); print('ms', secs)"
  )
  (secs,) = re.findall(r"ms ([\d.]+)", _run(root, "-c", program))
  return 1000 / float(secs)


def measure(root: pathlib.Path, name: str) -> float:
  """One measurement of what `--measures` calls `name`."""
  if name.startswith("small_"):
    return steps_per_sec(root, name.removeprefix("small_"))
  return examples_per_sec(root, name)


def main(argv: list[str]) -> None:
  del argv
  raw: dict[str, list[dict[str, float]]] = {}
  with tempfile.TemporaryDirectory() as directory:
    other = pathlib.Path(directory, "tree")
    git = ["git", "-C", str(_ROOT), "worktree"]
    subprocess.run(
      [*git, "add", "--quiet", "--detach", other, FLAGS.commit], check=True
    )
    try:
      trees = {"this": _ROOT, "other": other}
      for number in range(FLAGS.rounds):
        for name in FLAGS.measures:
          order = list(trees) if number % 2 else list(trees)[::-1]
          rates = {tree: measure(trees[tree], name) for tree in order}
          raw.setdefault(name, []).append(rates)
          ratio = rates["this"] / rates["other"]
          print(
            f"round {number}, {name}: {rates['this']:.1f} against"
            f" {rates['other']:.1f}: {ratio:.3f}",
            flush=True,
          )
    finally:
      subprocess.run([*git, "remove", "--force", other], check=True)
  for name, rounds in raw.items():
    mean, low, high = ratios.interval([r["this"] / r["other"] for r in rounds])
    print(f"{name}: {mean:.3f} (95%: {low:.3f} to {high:.3f})")
  if FLAGS.output:
    document = {"commit": FLAGS.commit, "rounds": raw}
    pathlib.Path(FLAGS.output).write_text(json.dumps(document, indent=2))


if __name__ == "__main__":
  app.run(main)
