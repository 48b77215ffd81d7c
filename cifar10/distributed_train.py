"""Trains CIFAR-10 with several replicas on parameter servers.

A whole cluster on this machine:

  python -m cifar10.distributed_train --dataset=synthetic \
    --cluster_spec=cluster_specs/local_1ps_2workers.json --train_dir=/tmp/run

One task of a cluster on many: the same with --job_name and --task_index, or
with TF_CONFIG in the environment.
"""

import functools
import os
import sys

from absl import app
from absl import flags
from absl import logging

from cifar10 import config as config_lib
from tf_replicas import cluster
from tf_replicas import launcher
from tf_replicas import program

FLAGS = flags.FLAGS


def define_flags() -> None:
  """The flags of this binary; `--help` shows them."""
  flags.DEFINE_string("dataset", "cifar10", "cifar10, synthetic or a TFDS name")
  flags.DEFINE_string("data_dir", None, "Where the data set lies")
  flags.DEFINE_string("train_dir", "/tmp/cifar10_train", "Checkpoints and logs")
  flags.DEFINE_integer("batch_size", 128, "Images of one tower's batch")
  flags.DEFINE_integer("max_steps", 100_000, "Updates to make")
  flags.DEFINE_enum("recipe", "tutorial", [*config_lib.RECIPES], "Settings")
  flags.DEFINE_float("learning_rate", None, "At the first step")
  flags.DEFINE_float("momentum", None, "Of the optimizer")
  flags.DEFINE_integer("seed", 0, "Of weights, order and distortions")
  flags.DEFINE_string("cluster_spec", None, "Path of a cluster-spec JSON")
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
  flags.DEFINE_integer("log_every_steps", 10, "Steps between log lines")
  flags.DEFINE_integer("summary_every_steps", 100, "Between TensorBoard points")
  flags.DEFINE_boolean("histograms", False, "Of the variables, to TensorBoard")
  flags.DEFINE_integer("checkpoint_every_steps", None, "Between checkpoints")
  flags.DEFINE_float("checkpoint_every_secs", 600, "Between checkpoints")
  flags.DEFINE_integer("keep_checkpoints", 5, "How many of the newest stay")
  flags.DEFINE_float("start_timeout_secs", 120, "Wait for the other tasks")
  flags.DEFINE_float("lost_after_secs", 20, "Silence that makes a worker lost")
  flags.DEFINE_integer("intra_op_threads", None, "Threads of one op")
  flags.DEFINE_boolean("emulate_gpus", False, "CPU devices stand in for GPUs")
  flags.DEFINE_boolean("dry_run", False, "Check and describe, start nothing")


def options_from_flags() -> program.Options:
  """How to run, from the flags."""
  spec, task = program.choose_task(
    FLAGS.cluster_spec, FLAGS.job_name, FLAGS.task_index, dict(os.environ)
  )
  return program.Options(
    spec=spec,
    task=task,
    train_dir=FLAGS.train_dir,
    max_steps=FLAGS.max_steps,
    replication=FLAGS.replication,
    replicas_to_aggregate=FLAGS.replicas_to_aggregate,
    log_every_steps=FLAGS.log_every_steps,
    summary_every_steps=FLAGS.summary_every_steps,
    histograms=FLAGS.histograms,
    checkpoint_every_steps=FLAGS.checkpoint_every_steps,
    checkpoint_every_secs=FLAGS.checkpoint_every_secs,
    keep_checkpoints=FLAGS.keep_checkpoints,
    start_timeout_secs=FLAGS.start_timeout_secs,
    lost_after_secs=FLAGS.lost_after_secs,
    intra_op_threads=FLAGS.intra_op_threads,
    emulate_gpus=FLAGS.emulate_gpus,
  )


def config_from_flags() -> config_lib.Config:
  """What to train, from the flags."""
  given = {
    name: FLAGS[name].value
    for name in ("learning_rate", "momentum")
    if FLAGS[name].value is not None
  }
  return config_lib.from_recipe(
    FLAGS.recipe,
    dataset=FLAGS.dataset,
    data_dir=FLAGS.data_dir,
    train_dir=FLAGS.train_dir,
    batch_size=FLAGS.batch_size,
    max_steps=FLAGS.max_steps,
    seed=FLAGS.seed,
    **given,
  )


def workload(config: config_lib.Config) -> program.Workload:
  """The network, its data and its update rule."""
  return program.Workload(
    replica_fn=functools.partial(_replica, config),
    optimizer_fn=functools.partial(_optimizer, config),
    learning_rate_fn=functools.partial(config_lib.learning_rate, config),
    batch_size=config.batch_size,
  )


def _replica(config, devices):
  # TensorFlow is imported only by the tasks that compute.
  import tf_replicas
  from cifar10 import inputs
  from cifar10 import model as model_lib
  from cifar10 import sources

  source = sources.find(config.dataset, config.data_dir)
  model = model_lib.build(seed=config.seed)
  paths = [variable.path for variable in model.trainable_variables]

  def loss_fn(parameters, images, labels):
    loss, _ = model_lib.total_loss(
      model,
      dict(zip(paths, parameters, strict=True)),
      images,
      labels,
      decay_factor=config.weight_decay,
    )
    return loss

  def dataset_fn(num_shards, shard_index, start_example):
    return inputs.train_dataset(
      source,
      batch_size=config.batch_size * max(1, len(devices)),
      seed=config.seed,
      num_shards=num_shards,
      shard_index=shard_index,
      start_example=start_example,
    )

  return tf_replicas.Replica(
    model.trainable_variables, loss_fn, dataset_fn, devices
  )


def _optimizer(config, replicas_to_aggregate, total_num_replicas):
  import keras

  import tf_replicas

  return tf_replicas.SyncReplicasOptimizer(
    keras.optimizers.SGD(config.learning_rate, momentum=config.momentum),
    replicas_to_aggregate,
    total_num_replicas,
    variable_averages=tf_replicas.MovingAverages(config.moving_average_decay),
  )


def _command(argv, path: str, task: cluster.Task, threads: int) -> list[str]:
  """The command line of one task; later flags override earlier ones."""
  return [
    sys.executable,
    "-m",
    "cifar10.distributed_train",
    *argv[1:],
    f"--cluster_spec={path}",
    f"--job_name={task.job}",
    f"--task_index={task.index}",
    f"--intra_op_threads={threads}",
  ]


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
  if not FLAGS["verbosity"].present:
    logging.set_verbosity(logging.WARNING)
  with program.one_line_errors(usage=(ValueError,)):
    config = config_from_flags()
    options = options_from_flags()
    program.check(options)
  program.exit_now(train(config, options))


def train(config: config_lib.Config, options: program.Options) -> int:
  """Plays this process's role, and tells the user's errors in one line.

  Returns:
    The exit status.
  """
  with program.quiet_stderr():
    from cifar10 import sources
    from tf_replicas import checkpoints

  with program.one_line_errors(
    usage=(
      cluster.ClusterError,
      checkpoints.CheckpointError,
      sources.DataError,
    ),
    run_time=program.RUN_TIME_ERRORS,
  ):
    sources.find(config.dataset, config.data_dir)
    if options.task in (None, options.spec.chief) and not FLAGS.dry_run:
      config_lib.record(config)
    return launcher.run(
      options,
      workload(config),
      command=functools.partial(_command, sys.argv),
      is_dry_run=FLAGS.dry_run,
    )


if __name__ == "__main__":
  define_flags()
  app.run(main)
