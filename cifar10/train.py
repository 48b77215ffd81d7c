"""Trains CIFAR-10 on one device: the first GPU, or the CPU without one.

python -m cifar10.train --dataset=synthetic --train_dir=/tmp/run
"""

from collections.abc import Sequence

from cifar10 import command_line
from tf_replicas import program


def options() -> program.Options:
  """How to train, from the flags."""
  return command_line.options_from_flags(program.one_machine_spec(0))


def main(argv: Sequence[str]) -> None:
  del argv
  command_line.train("cifar10.train", options)


if __name__ == "__main__":
  command_line.define_training_flags()
  command_line.start(main)
