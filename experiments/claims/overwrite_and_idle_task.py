"""Runs one task of the cluster of `experiments.claims.overwrite_and_idle`.

That experiment starts this program once per task.
"""

import json
import os
import pathlib
import sys
import time
from collections.abc import Callable

from experiments.claims import overwrite_and_idle
from experiments.support import programs

_NUM_WORKERS = len(overwrite_and_idle.TURN_SECS)


def _rule(options):
  import keras

  import tf_replicas

  return tf_replicas.AsyncReplicasOptimizer(
    keras.optimizers.SGD(1.0), _NUM_WORKERS, **options
  )


def _replica():
  """Returns a replica with one variable, whose gradient is never asked for."""
  import tensorflow as tf

  from tf_replicas.replica import model_replica

  return model_replica.Replica(
    [tf.Variable(0.0, name="x")],
    lambda parameters, batch: parameters[0] * batch[0],
    lambda *_: tf.data.Dataset.from_tensors((tf.ones([1]),)).repeat(),
  )


def _turn(store, rule, replica: int, secs: float) -> Callable[[], None]:
  """Makes a function that reads the variable, waits, and adds 1.

  Args:
    store: The parameter store with the variable.
    rule: The asynchronous rule that adds; None to assign what was read plus 1.
    replica: The index of this worker.
    secs: How long it waits.
  """
  import tensorflow as tf

  (variable,) = store.variables(0)
  path = store.specs[0].path

  if rule is None:

    @tf.function(autograph=False)
    def read():
      return tf.constant(0, tf.int64), [variable.read_value()]

    @tf.function(autograph=False)
    def write(step, value):
      variable.assign(value + 1.0)
      return step

  else:

    @tf.function(autograph=False)
    def read():
      token, values = rule.pull_contributed(replica)
      return token.global_step, values

    @tf.function(autograph=False)
    def write(step, value):
      del value
      return rule.apply_gradients(
        [(tf.constant(-1.0), path)], replica=replica, local_step=step
      ).global_step

  def turn() -> None:
    step, (value,) = read()
    value.numpy()
    time.sleep(secs)
    write(step, value).numpy()

  return turn


def run_client(spec, task, directory: pathlib.Path, secs: str) -> None:
  """Adds 1 to the variable in all ways; the chief stores how it ended.

  Args:
    spec: The cluster.
    task: The task of this process.
    directory: The directory of the file `written.json`.
    secs: For how long to do so in each way, as text.
  """
  from tf_replicas.drivers import between_graph

  driver = between_graph.BetweenGraph(spec, task, _replica, lambda: _rule({}))
  programs.await_condition(driver.store.is_initialized, "the variable")
  turn_secs = list(overwrite_and_idle.TURN_SECS.values())
  is_slow = f"{task.job}:{task.index}" == overwrite_and_idle.SLOW
  found = {}
  for number, (way, options) in enumerate(overwrite_and_idle.WAYS.items()):
    rule = None
    if options is not None:
      rule = _rule(options)
      rule.build(driver.store)
    is_fast = way == overwrite_and_idle.WITHOUT_WAITING
    wait_secs = 0.0 if is_fast else turn_secs[task.index]
    turn = _turn(driver.store, rule, task.index, wait_secs)
    takes_part = way != overwrite_and_idle.LITERAL_FAST or not is_slow
    if takes_part:
      turn()  # Traces the functions.
    programs.barrier(directory, f"{number}-traced", task.index, _NUM_WORKERS)
    if driver.is_chief:
      driver.store.assign(0, 0.0)
    programs.barrier(directory, f"{number}-begin", task.index, _NUM_WORKERS)
    count, end = 0, time.monotonic() + float(secs)
    while takes_part and time.monotonic() < end:
      turn()
      count += 1
    part = directory / f"{number}.{task.index}.part"
    part.write_text(str(count), encoding="utf-8")
    os.replace(part, directory / f"{number}-count.{task.index}")
    programs.barrier(directory, f"{number}-end", task.index, _NUM_WORKERS)
    found[way] = {
      "writes": [
        int((directory / f"{number}-count.{index}").read_text())
        for index in range(len(turn_secs))
      ],
      "value": float(driver.store.read()[0]),
    }
    programs.barrier(directory, f"{number}-read", task.index, _NUM_WORKERS)
  if driver.is_chief:
    (directory / "written.json").write_text(json.dumps(found))
  driver.close()


if __name__ == "__main__":
  programs.be_task(sys.argv[1:], run_client)
