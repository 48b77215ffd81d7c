"""Trains a small model, as a user's program would, for the launcher's tests.

python launcher_task.py SPEC DIRECTORY MAX_STEPS [dry_run] [emulate_gpus]
  [JOB INDEX]
"""

import sys

from tf_replicas import cluster
from tf_replicas.programs import launcher
from tf_replicas.programs import run_options
from tf_replicas.runtime import processes


def _replica(devices):
  from tests.support import word_model

  # The batch of one tower is a quarter of the model's.
  towers = max(1, len(devices))

  def dataset_fn(num_shards, shard_index, start_example):
    data = word_model.dataset_fn(num_shards, shard_index, 0)
    batch = word_model.BATCH // 4 * towers
    return data.unbatch().skip(start_example // num_shards).batch(batch)

  return word_model.replica(devices, dataset_fn=dataset_fn)


def _optimizer(new_rule):
  import keras

  import tf_replicas

  averages = tf_replicas.MovingAverages(0.9)
  return new_rule(keras.optimizers.SGD(1.0), variable_averages=averages)


def main(argv):
  path, directory, max_steps, *rest = argv
  flags = [word for word in rest if word in ("dry_run", "emulate_gpus")]
  job = [word for word in rest if word not in flags]

  def command(path, task, threads):
    del threads
    arguments = [path, directory, max_steps, *flags]
    return [
      sys.executable,
      *sys.argv[:1],
      *arguments,
      task.job,
      str(task.index),
    ]

  with processes.one_line_errors(
    usage=(cluster.ClusterError,), run_time=run_options.RUN_TIME_ERRORS
  ):
    options = run_options.Options(
      spec=cluster.load(path),
      task=cluster.Task(job[0], int(job[1])) if job else None,
      train_dir=directory,
      dry_run="dry_run" in flags,
      emulate_gpus="emulate_gpus" in flags,
      intra_op_threads=1,
    )
    workload = run_options.Workload(
      _replica, _optimizer, _rate, batch_size=3, max_steps=int(max_steps)
    )
    status = launcher.run(options, workload, command=command)
  processes.exit_now(status)


def _rate(examples_seen):
  return 0.5 if examples_seen < 100 else 0.25


if __name__ == "__main__":
  main(sys.argv[1:])
