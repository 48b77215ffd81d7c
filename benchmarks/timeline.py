"""What `--timeline` costs a training, of its examples per second.

  python -m benchmarks.timeline [ROUNDS]

The CIFAR-10 binary on 1 PS and 2 workers of batch 64, with it and without it,
in turn; the ratio within a round is what counts.
"""

import sys
import tempfile

from experiments.support import programs

_BATCH_SIZE = 64
_LOG_EVERY_STEPS = 50
_STEPS = 250


def rate(*more: str) -> float:
  """Examples/sec of a training."""
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
  """Prints both rates, and their ratio."""
  ratios = []
  for number in range(int(rounds)):
    without, with_it = rate(), rate("--timeline")
    ratios.append(with_it / without)
    print(
      f"{number}: {without:.0f}/s without, {with_it:.0f}/s with:"
      f" {ratios[-1]:.3f}",
      flush=True,
    )
  print(f"with a timeline, of without: {programs.spread(ratios)}")


if __name__ == "__main__":
  main(*sys.argv[1:])
