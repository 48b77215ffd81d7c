"""Trains CIFAR-10 on one device: the first GPU, or the CPU without one.

python -m cifar10.train --dataset=synthetic --train_dir=/tmp/run
"""

from collections.abc import Sequence

from cifar10 import training_flags
from tf_replicas import command_line


def main(argv: Sequence[str]) -> None:
  del argv
  training_flags.train("cifar10.train", command_line.one_device_options)


if __name__ == "__main__":
  training_flags.define()
  command_line.start(main)
