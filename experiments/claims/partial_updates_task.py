"""Runs one task of the cluster of `experiments.claims.partial_updates`.

That experiment starts this program once per task.
"""

import json
import os
import pathlib
import sys
import time

from experiments.claims import partial_updates
from experiments.support import programs

_WRITER, _READER = 0, 1
# Before the count, so that both are under way.
_FIRST_READS = 20


def _rule(options):
  import keras

  from tf_replicas.rules.asynchronous import async_replicas

  return async_replicas.AsyncReplicasOptimizer(
    keras.optimizers.SGD(1.0), 2, **options
  )


def _replica():
  """Returns a replica with variables that start at 0.

  The replica is never asked for a gradient.
  """
  import tensorflow as tf

  from tf_replicas.replica import model_replica

  return model_replica.Replica(
    [
      tf.Variable(tf.zeros([size]), name=name)
      for name, size in partial_updates.SIZES.items()
    ],
    lambda values, x: tf.add_n([tf.reduce_sum(v) for v in values]) * x[0],
    lambda *_: tf.data.Dataset.from_tensors((tf.ones([1]),)).repeat(),
  )


def _write(store, rule, has_begun: pathlib.Path, has_ended) -> None:
  """Adds 1 to all variables, again and again, until the reader has ended.

  Args:
    store: The parameter store with the variables.
    rule: The update rule.
    has_begun: A file that is created after the first update.
    has_ended: Returns whether the reader has ended.
  """
  import tensorflow as tf

  gradients = [(-tf.ones(spec.shape), spec.path) for spec in store.specs]

  @tf.function
  def add():
    return rule.apply_gradients(
      gradients, replica=_WRITER, local_step=store.read_global_step()
    ).global_step

  add().numpy()
  has_begun.touch()
  while not has_ended():
    add().numpy()


def _read(store, rule, num_reads: int) -> dict[str, float]:
  """Reads all variables again and again while the other worker updates them.

  Args:
    store: The parameter store with the variables.
    rule: The update rule.
    num_reads: The number of reads.

  Returns:
    The result of `partial_updates.torn`, and the reads and updates per second.
  """
  import tensorflow as tf

  @tf.function
  def look():
    token, values = rule.pull_contributed(_READER)
    ranges = [[tf.reduce_min(v), tf.reduce_max(v)] for v in values]
    return token.global_step, tf.convert_to_tensor(ranges)

  for _ in range(_FIRST_READS):
    first, _ = look()
  first, start = int(first), time.monotonic()
  ranges = []
  for _ in range(num_reads):
    last, extremes = look()
    ranges.append(extremes.numpy())
  secs = time.monotonic() - start
  return {
    **partial_updates.torn(ranges, [spec.path for spec in store.specs]),
    "reads_per_sec": num_reads / secs,
    "updates_per_sec": (int(last) - first) / secs,
  }


def run_client(spec, task, directory: pathlib.Path, num_reads: str) -> None:
  """Writes or reads in this worker, under every setting of the update rule.

  The worker that reads leaves its numbers in a file per setting.

  Args:
    spec: The cluster.
    task: The task of this process.
    directory: The directory of these files.
    num_reads: The number of reads per setting, as text.
  """
  from tf_replicas.drivers import between_graph

  driver = between_graph.BetweenGraph(spec, task, _replica, lambda: _rule({}))
  programs.await_condition(driver.store.is_initialized, "the variables")
  for name, options in partial_updates.SETTINGS.items():
    # Their variables, locks and counts are one and the same.
    rule = _rule(options)
    rule.build(driver.store)
    has_begun, numbers = directory / f"{name}.begun", directory / f"{name}.json"
    if task.index == _WRITER:
      _write(driver.store, rule, has_begun, numbers.exists)
    else:
      programs.await_condition(has_begun.exists, "the first update")
      found = json.dumps(_read(driver.store, rule, int(num_reads)))
      unfinished = numbers.with_suffix(".part")
      unfinished.write_text(found, encoding="utf-8")
      os.replace(unfinished, numbers)
  driver.close()


if __name__ == "__main__":
  programs.be_task(sys.argv[1:], run_client)
