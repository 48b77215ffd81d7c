"""Trains an Inception on one machine: a device, or a tower on each of several.

  python -m inception_mini.train --recipe=mini --dataset=synthetic \
    --train_dir=/tmp/run [--num_gpus=N | --cluster_spec=FILE]
"""

from collections.abc import Sequence

from inception_mini import training_flags
from tf_replicas import command_line
from tf_replicas import program


def options() -> program.Options:
  """How to train, from the flags."""
  return command_line.towers_options("inception_mini.distributed_train")


def main(argv: Sequence[str]) -> None:
  del argv
  training_flags.train("inception_mini.train", options)


if __name__ == "__main__":
  training_flags.define()
  command_line.define_towers_flags()
  command_line.start(main)
