"""Trains CIFAR-10 with several towers on one machine, one on each GPU.

  python -m cifar10.multi_gpu_train --num_gpus=2 --train_dir=/tmp/run

A spec instead of a number says which GPUs, and where the variables live:

  python -m cifar10.multi_gpu_train --dataset=synthetic --emulate_gpus \
    --cluster_spec=cluster_specs/four_towers.json --train_dir=/tmp/run
"""

from collections.abc import Sequence

from cifar10 import training_flags
from tf_replicas import command_line
from tf_replicas import program


def options() -> program.Options:
  """How to train, from the flags."""
  return command_line.towers_options("cifar10.distributed_train")


def main(argv: Sequence[str]) -> None:
  del argv
  training_flags.train("cifar10.multi_gpu_train", options)


if __name__ == "__main__":
  training_flags.define()
  command_line.define_towers_flags()
  command_line.start(main)
