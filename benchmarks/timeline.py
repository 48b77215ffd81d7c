"""Measures what the flag `--timeline` costs a training, in examples per second.

  python -m benchmarks.timeline [--rounds=3] [--output=FILE]

The CIFAR-10 program runs on 1 PS (parameter server) and 2 workers with batches
of 64, with the flag and without it in turn. The ratio within a round is what
counts.
"""

import argparse
import tempfile

from benchmarks import ratios
from benchmarks import stored
from experiments.support import programs

_BATCH_SIZE = 64
_LOG_EVERY_STEPS = 50
_STEPS = 250


def rate(*more: str) -> float:
  """Returns the examples/sec of a training of the CIFAR-10 program.

  Args:
    *more: More flags of the program.
  """
  with tempfile.TemporaryDirectory() as directory:
    output = programs.output(
      "cifar10.distributed_train",
      f"--cluster_spec={programs.write_spec(directory, workers=2)}",
      f"--train_dir={directory}/run",
      "--dataset=synthetic",
      f"--batch_size={_BATCH_SIZE}",
      f"--max_steps={_STEPS}",
      f"--log_every_steps={_LOG_EVERY_STEPS}",
      *more,
    )
  return programs.examples_per_sec(output)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("--output", help="File for the results, as JSON")
  arguments = parser.parse_args()
  rounds = []
  for number in range(arguments.rounds):
    rounds.append({"without": rate(), "with a timeline": rate("--timeline")})
    print(f"round {number}: {rounds[-1]}", flush=True)
  results = {
    "ratios": ratios.compare(rounds, [("with a timeline", "without")]),
    "examples_per_sec": rounds,
  }
  stored.write(arguments.output, results)


if __name__ == "__main__":
  main()
