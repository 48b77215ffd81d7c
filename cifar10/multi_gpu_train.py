r"""Trains CIFAR-10 on several GPUs of one machine.

  python -m cifar10.multi_gpu_train --num_gpus=2 --train_dir=/tmp/run

Each GPU has a copy of the network, a tower, which computes the gradients of a
part of each batch. A cluster spec instead of a number says which GPUs are used,
and where the variables are:

  python -m cifar10.multi_gpu_train --dataset=synthetic --emulate_gpus \
    --cluster_spec=cluster_specs/four_towers.json --train_dir=/tmp/run
"""

from collections.abc import Sequence

from cifar10 import config as config_lib
from cifar10 import training_flags
from cifar10 import workload
from tf_replicas import cluster
from tf_replicas.programs import command_line
from tf_replicas.programs import run_options

CLUSTER_MODULE = "cifar10.distributed_train"


def train(
  config: config_lib.Config,
  spec: cluster.ClusterSpec | None = None,
  **options: object,
) -> run_options.Outcome:
  """Trains CIFAR-10 on the GPUs of one machine, in this process.

  It serves notebooks and tests.

  Args:
    config: The settings of the training.
    spec: The devices, and the placement of variables, such as
      `run_options.one_machine_spec(2)` for two GPUs. None trains on one device.
    **options: Fields of `run_options.Options`, such as `emulate_gpus`.

  Returns:
    The global step reached, and the loss of the last update.

  Raises:
    ValueError: If an argument is out of range.
    Exception: Any exception of `task_runner.train` or `sources.find`.
  """
  spec = spec or run_options.one_machine_spec(0)
  return workload.train(
    config, run_options.Options(spec, config.train_dir, **options)
  )


def main(argv: Sequence[str]) -> None:
  del argv
  command_line.train(
    "cifar10.multi_gpu_train",
    lambda: command_line.towers_options(CLUSTER_MODULE),
    training_flags.config,
    workload.make,
  )


if __name__ == "__main__":
  training_flags.define()
  command_line.define_towers_flags()
  command_line.start(main)
