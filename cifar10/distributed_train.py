"""Trains CIFAR-10 with several replicas on parameter servers.

A whole cluster on this machine:

  python -m cifar10.distributed_train --dataset=synthetic \
    --cluster_spec=cluster_specs/local_1ps_2workers.json --train_dir=/tmp/run

One task of a cluster on many: the same with --job_name and --task_index, or
with TF_CONFIG in the environment.
"""

import os
from collections.abc import Sequence

from absl import flags

from cifar10 import command_line
from tf_replicas import program

FLAGS = flags.FLAGS


def define_flags() -> None:
  """The flags of this binary; `--help` shows them."""
  command_line.define_training_flags()
  command_line.define_device_flags()
  flags.DEFINE_string("job_name", None, "This task's job; none starts all")
  flags.DEFINE_integer("task_index", None, "This task's index in its job")
  flags.DEFINE_enum(
    "replication",
    program.BETWEEN_GRAPH,
    [program.BETWEEN_GRAPH, program.IN_GRAPH],
    "Every worker its own client, or one client for all",
  )
  flags.DEFINE_integer(
    "replicas_to_aggregate", None, "Contributions in one update; all replicas"
  )
  flags.DEFINE_float("start_timeout_secs", 120, "Wait for the other tasks")
  flags.DEFINE_float("lost_after_secs", 20, "Silence that makes a worker lost")


def options() -> program.Options:
  """How to train, from the flags and TF_CONFIG."""
  spec, task = program.choose_task(
    FLAGS.cluster_spec, FLAGS.job_name, FLAGS.task_index, dict(os.environ)
  )
  return command_line.options_from_flags(
    spec,
    task,
    replication=FLAGS.replication,
    replicas_to_aggregate=FLAGS.replicas_to_aggregate,
    start_timeout_secs=FLAGS.start_timeout_secs,
    lost_after_secs=FLAGS.lost_after_secs,
    emulate_gpus=FLAGS.emulate_gpus,
  )


def main(argv: Sequence[str]) -> None:
  del argv
  command_line.train("cifar10.distributed_train", options)


if __name__ == "__main__":
  define_flags()
  command_line.start(main)
