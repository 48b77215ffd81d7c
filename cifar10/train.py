"""Trains CIFAR-10 on one device: the first GPU, or the CPU if there is no GPU.

python -m cifar10.train --dataset=synthetic --train_dir=/tmp/run
"""

from collections.abc import Sequence

from cifar10 import config as config_lib
from cifar10 import training_flags
from cifar10 import workload
from tf_replicas.programs import command_line
from tf_replicas.programs import run_options


def train(config: config_lib.Config, **options: object) -> run_options.Outcome:
  """Trains CIFAR-10 on one device, in this process.

  It serves notebooks and tests.

  Args:
    config: The settings of the training.
    **options: Fields of `run_options.Options`, such as `log_every_steps`.

  Returns:
    The global step reached, and the loss of the last update.

  Raises:
    ValueError: If an argument is out of range.
    Exception: Any exception of `task_runner.train` or `sources.find`.
  """
  spec = run_options.one_machine_spec(0)
  return workload.train(
    config, run_options.Options(spec, config.train_dir, **options)
  )


def main(argv: Sequence[str]) -> None:
  del argv
  command_line.train(
    "cifar10.train",
    command_line.one_device_options,
    training_flags.config,
    workload.make,
  )


if __name__ == "__main__":
  training_flags.define()
  command_line.define_one_device_flags()
  command_line.start(main)
