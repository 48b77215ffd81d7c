"""Trains CIFAR-10 with several towers on one machine, one on each GPU.

  python -m cifar10.multi_gpu_train --num_gpus=2 --train_dir=/tmp/run

A spec instead of a number says which GPUs, and where the variables live:

  python -m cifar10.multi_gpu_train --dataset=synthetic --emulate_gpus \
    --cluster_spec=cluster_specs/four_towers.json --train_dir=/tmp/run
"""

from collections.abc import Sequence

from absl import flags

from cifar10 import command_line
from tf_replicas import cluster
from tf_replicas import program

FLAGS = flags.FLAGS


def define_flags() -> None:
  """The flags of this binary; `--help` shows them."""
  command_line.define_training_flags()
  command_line.define_device_flags()
  flags.DEFINE_integer("num_gpus", None, "GPUs 0 to N - 1; 1", lower_bound=1)


def options() -> program.Options:
  """How to train, from the flags.

  Raises:
    cluster.ClusterError: If the flags contradict each other, or the spec is
      not of one machine.
  """
  return command_line.options_from_flags(
    _spec(), emulate_gpus=FLAGS.emulate_gpus
  )


def _spec() -> cluster.ClusterSpec:
  if FLAGS.cluster_spec is None:
    return program.one_machine_spec(FLAGS.num_gpus or 1)
  if FLAGS.num_gpus is not None:
    raise cluster.ClusterError(
      "`--num_gpus` must not be given with `--cluster_spec`, which says itself"
      f" which GPUs. Received: {FLAGS.num_gpus}."
    )
  spec = cluster.load(FLAGS.cluster_spec)
  if spec.is_distributed:
    raise cluster.ClusterError(
      f"{spec.source}: `cluster` must be absent for one machine;"
      " cifar10.distributed_train trains on a cluster. Received jobs:"
      f" {', '.join(spec.jobs)}."
    )
  return spec


def main(argv: Sequence[str]) -> None:
  del argv
  command_line.train("cifar10.multi_gpu_train", options)


if __name__ == "__main__":
  define_flags()
  command_line.start(main)
