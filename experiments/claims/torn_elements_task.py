"""Runs one task of a cluster of `experiments.claims.partial_updates`.

The experiment starts this program once per task. Two workers add 1 to all
elements of a large variable. The last worker lets the PS task read it, and then
repeats the experiment in its own process with a variable of TF1.
"""

import itertools
import json
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence

import numpy as np

from experiments.claims import partial_updates
from experiments.support import programs

_READER = partial_updates.NUM_WRITERS
_NUM_REPLICAS = partial_updates.NUM_WRITERS + 1
_READS_PER_CALL = 10


def _rule(options):
  import keras

  from tf_replicas.rules.asynchronous import async_replicas

  return async_replicas.AsyncReplicasOptimizer(
    keras.optimizers.SGD(1.0), _NUM_REPLICAS, **options
  )


def _replica(shape: Sequence[int]):
  """Returns a replica with one variable, whose gradient is never asked for.

  Args:
    shape: The shape of the variable.
  """
  import tensorflow as tf

  from tf_replicas.replica import model_replica

  return model_replica.Replica(
    [tf.Variable(tf.zeros(shape), name="x")],
    lambda parameters, batch: tf.reduce_sum(parameters[0]) * batch[0],
    lambda *_: tf.data.Dataset.from_tensors((tf.ones([1]),)).repeat(),
  )


def _adder(store, rule, replica: int, is_sparse: bool) -> Callable[[], None]:
  """Makes a function that adds 1 to all elements.

  Args:
    store: The parameter store with the variable.
    rule: The asynchronous update rule.
    replica: The index of this worker.
    is_sparse: Whether the gradient is sparse. It has all rows.
  """
  import tensorflow as tf

  (variable,) = store.variables(0)

  @tf.function(autograph=False)
  def add():
    gradient = -tf.ones(variable.shape)
    if is_sparse:
      gradient = tf.IndexedSlices(
        gradient, tf.range(variable.shape[0]), variable.shape
      )
    return rule.apply_gradients(
      [(gradient, store.specs[0].path)],
      replica=replica,
      local_step=store.read_global_step(),
    ).global_step

  return lambda: add().numpy()


def _reader(store, rule, is_snapshot: bool) -> Callable[[], list]:
  """Makes a function that reads the variable several times.

  Args:
    store: The parameter store with the variable.
    rule: The asynchronous update rule.
    is_snapshot: Whether to read by the rule, as a replica does, and not on the
      PS task.

  Returns:
    A function that returns the least and the largest element of each read.
  """
  import tensorflow as tf

  (variable,) = store.variables(0)

  @tf.function(autograph=False)
  def read():
    if is_snapshot:
      _, (value,) = rule.pull_contributed(_READER)
      return tf.stack([[tf.reduce_min(value), tf.reduce_max(value)]])
    with tf.device(store.device_of_task(0)):
      ranges = []
      for _ in range(_READS_PER_CALL):
        with tf.control_dependencies(ranges[-1:]):
          value = variable.read_value()
        # One after the other: the longer a read takes, the more it may see.
        low = tf.reduce_min(value)
        with tf.control_dependencies([low]):
          high = tf.reduce_max(value)
        ranges.append(tf.stack([low, high]))
      return tf.stack(ranges)

  return lambda: read().numpy().tolist()


def _tf1(shape: Sequence[int], secs: float, use_locking: bool) -> dict:
  """Adds to a variable of TF1 and reads it, in threads of this process.

  Args:
    shape: The shape of the variable.
    secs: For how long.
    use_locking: The argument of TF1's training operation.

  Returns:
    What was found, as `_summary` returns it.
  """
  import tensorflow as tf

  v1 = tf.compat.v1
  with tf.Graph().as_default(), tf.device("/device:CPU:0"):
    variable = v1.get_variable(
      "x", shape, initializer=v1.zeros_initializer(), use_resource=False
    )
    gradient = v1.placeholder(tf.float32, shape)
    add = tf.raw_ops.ApplyGradientDescent(
      var=variable._ref(), alpha=1.0, delta=gradient, use_locking=use_locking
    ).op
    # A copy, made in one pass: its extremes are those of one read.
    value = tf.cast(variable.read_value(), tf.float64)
    low, high = tf.reduce_min(value), tf.reduce_max(value)
    with v1.Session() as session:
      session.run(variable.initializer)
      feed = {gradient: -np.ones(shape, np.float32)}
      counts = [0] * partial_updates.NUM_WRITERS
      end = time.monotonic() + secs

      def write(index):
        while time.monotonic() < end:
          session.run(add, feed)
          counts[index] += 1

      writers = [
        threading.Thread(target=write, args=[index])
        for index in range(partial_updates.NUM_WRITERS)
      ]
      for writer in writers:
        writer.start()
      rows = []
      while time.monotonic() < end:
        rows.append([float(x) for x in session.run([low, high])])
      for writer in writers:
        writer.join()
  return _summary(rows, sum(counts) / secs)


def _summary(rows: Sequence[Sequence[float]], updates_per_sec: float) -> dict:
  """Summarizes what was read, for `partial_updates`.

  Args:
    rows: The least and the largest element of each read.
    updates_per_sec: The updates of all writers per second.
  """
  return {
    "num_reads": len(rows),
    "torn": sum(low < high for low, high in rows),
    "changed": sum(a != b for a, b in itertools.pairwise(rows)),
    "updates_per_sec": updates_per_sec,
  }


def run_client(
  spec, task, directory: pathlib.Path, rows: str, columns: str, secs: str
) -> None:
  """Adds or reads in this worker, in every way.

  Args:
    spec: The cluster.
    task: The task of this process.
    directory: The directory of the file `found.json`.
    rows: The number of rows of the variable, as text.
    columns: The number of columns, as text.
    secs: For how long to do so in each way, as text.
  """
  from tf_replicas.drivers import between_graph

  shape, duration = [int(rows), int(columns)], float(secs)
  driver = between_graph.BetweenGraph(
    spec, task, lambda: _replica(shape), lambda: _rule({})
  )
  programs.await_condition(driver.store.is_initialized, "the variable")
  found = {}
  for number, (way, how) in enumerate(partial_updates.WAYS.items()):
    is_sparse, options = how
    rule = _rule(options)
    rule.build(driver.store)
    is_reader = task.index == _READER
    if is_reader:
      work = _reader(driver.store, rule, "snapshot_reads" in options)
    else:
      work = _adder(driver.store, rule, task.index, is_sparse)
    work()  # Traces the function.
    programs.barrier(directory, f"{number}-begin", task.index, _NUM_REPLICAS)
    count, ranges, end = 0, [], time.monotonic() + duration
    while time.monotonic() < end:
      result = work()
      count += 1
      if is_reader:
        ranges += result
    part = directory / f"{number}.{task.index}.part"
    part.write_text(str(count), encoding="utf-8")
    os.replace(part, directory / f"{number}-count.{task.index}")
    programs.barrier(directory, f"{number}-end", task.index, _NUM_REPLICAS)
    if is_reader:
      updates = sum(
        int((directory / f"{number}-count.{index}").read_text())
        for index in range(partial_updates.NUM_WRITERS)
      )
      found[way] = _summary(ranges, updates / duration)
  if task.index == _READER:
    for way, use_locking in partial_updates.TF1_WAYS.items():
      found[way] = _tf1(shape, duration, use_locking)
    (directory / "found.json").write_text(json.dumps(found))
  programs.barrier(directory, "written", task.index, _NUM_REPLICAS)
  driver.close()


if __name__ == "__main__":
  programs.be_task(sys.argv[1:], run_client)
