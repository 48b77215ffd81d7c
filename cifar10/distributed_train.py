r"""Trains CIFAR-10 with several replicas on parameter servers.

This command runs a whole cluster on this machine:

  python -m cifar10.distributed_train --dataset=synthetic \
    --cluster_spec=cluster_specs/local_1ps_2workers.json --train_dir=/tmp/run

If the cluster is on several machines, each task is started by the same command
with --job_name and --task_index, or with TF_CONFIG in the environment.
"""

from collections.abc import Sequence

from cifar10 import training_flags
from cifar10 import workload
from tf_replicas.programs import command_line


def main(argv: Sequence[str]) -> None:
  del argv
  command_line.train(
    "cifar10.distributed_train",
    command_line.cluster_options,
    training_flags.config,
    workload.make,
  )


if __name__ == "__main__":
  training_flags.define()
  command_line.define_cluster_flags()
  command_line.start(main)
