r"""Trains an Inception on one machine, on one device or on several.

  python -m inception_mini.train --recipe=mini --dataset=synthetic \
    --train_dir=/tmp/run [--num_gpus=N | --cluster_spec=FILE]

With several devices, each has a tower: a copy of the network that computes the
gradients of its own batch.
"""

from collections.abc import Sequence

from inception_mini import config as config_lib
from inception_mini import training_flags
from inception_mini import workload
from tf_replicas import cluster
from tf_replicas.programs import command_line
from tf_replicas.programs import run_options

CLUSTER_MODULE = "inception_mini.distributed_train"


def train(
  config: config_lib.Config,
  spec: cluster.ClusterSpec | None = None,
  **options: object,
) -> run_options.Outcome:
  """Trains an Inception in this process, on this machine.

  For use in notebooks and tests.

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
    "inception_mini.train",
    lambda: command_line.towers_options(CLUSTER_MODULE),
    training_flags.config,
    workload.make,
  )


if __name__ == "__main__":
  training_flags.define()
  command_line.define_towers_flags()
  command_line.start(main)
