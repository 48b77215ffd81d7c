r"""Trains an Inception with several replicas on parameter servers.

This command runs a whole cluster on this machine:

  python -m inception_mini.distributed_train --recipe=mini --data_dir=DIR \
    --cluster_spec=cluster_specs/local_2ps_3workers.json \
    --replicas_to_aggregate=2 --train_dir=/tmp/run

Here one of the 3 replicas is a backup: an update uses the gradients of the 2
replicas that are first. If the cluster is on several machines, start each task
by the same command with --job_name and --task_index, or with TF_CONFIG in the
environment.

The program follows TF1's `inception_distributed_train`.
"""

from collections.abc import Sequence

from absl import flags

from inception_mini import training_flags
from inception_mini import workload
from tf_replicas.programs import command_line
from tf_replicas.programs import update_options


def main(argv: Sequence[str]) -> None:
  del argv
  command_line.train(
    "inception_mini.distributed_train",
    command_line.cluster_options,
    training_flags.config,
    workload.make,
  )


if __name__ == "__main__":
  training_flags.define()
  command_line.define_cluster_flags()
  flags.DEFINE_alias(
    "num_replicas_to_aggregate",
    "replicas_to_aggregate",
    module_name=update_options.GROUP,
  )
  command_line.start(main)
