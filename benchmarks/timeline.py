"""Measures what the flag `--timeline` costs a training, in examples per second.

  python -m benchmarks.timeline [ROUNDS]

The CIFAR-10 program runs on 1 PS (parameter server) and 2 workers with batches
of 64, with the flag and without it in turn. The ratio within a round is what
counts.
"""

import sys
import tempfile

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


def main(rounds: str = "3") -> None:
  """Measures the examples/sec without and with `--timeline`, in turn.

  It prints both rates and their ratio.

  Args:
    rounds: The number of rounds, as text.
  """
  ratios = []
  for number in range(int(rounds)):
    without, with_it = rate(), rate("--timeline")
    ratios.append(with_it / without)
    print(
      f"{number}: {without:.0f}/s without, {with_it:.0f}/s with:"
      f" {ratios[-1]:.3f}",
      flush=True,
    )
  print(f"rate with a timeline / without: {programs.spread(ratios)}")


if __name__ == "__main__":
  main(*sys.argv[1:])
