"""Runs one task of the cluster of `experiments.support.race_real`.

`race_real` starts this program once per task.
"""

import pathlib
import sys
import time

import numpy as np

from experiments.support import programs
from experiments.support import race_real


def _data(directory: pathlib.Path, index: int, cell: race_real.Cell):
  """Yields the examples of each batch, after the time that it takes to compute.

  Waits at first until all workers have come so far. A worker that was restarted
  waits until the time at which it shall return.
  """
  from experiments.support import race_task

  kind = race_task.conditions()[cell.condition]
  times = kind.times(cell.workers, cell.seed)
  start = directory / "start"
  absence = kind.absence(cell.workers)
  if start.exists():
    begin = float(start.read_text()) + absence.end * race_real.UNIT_SECS
    time.sleep(max(begin - time.time(), 0.0))
    (directory / "returned").write_text(str(time.time()))
  else:
    (directory / f"ready_{index}").touch()
    while len(list(directory.glob("ready_*"))) < cell.workers:
      time.sleep(0.01)
    if index == 0:
      start.write_text(str(time.time()))
  while True:
    for batch in race_task.batches(cell.workers, cell.seed)[index]:
      time.sleep(times.next_of(index) * race_real.UNIT_SECS)
      yield (batch,)


def _task(directory: pathlib.Path, index: int, cell: race_real.Cell):
  import tensorflow as tf

  from experiments.support import race_task

  def dataset_fn(*_):
    spec = (tf.TensorSpec([race_task.BATCH_SIZE], tf.int64),)
    data = tf.data.Dataset.from_generator(
      lambda: _data(directory, index, cell), output_signature=spec
    )
    options = tf.data.Options()
    # Else the next batch comes while the worker waits for an update.
    options.experimental_optimization.inject_prefetch = False
    return data.with_options(options)

  return race_task.Task(dataset_fn, seed=cell.seed)


def run_client(spec, task, directory: pathlib.Path, text: str) -> None:
  """Trains in this worker; the chief ends it, and stores what it has read.

  Args:
    spec: The cluster.
    task: The task of this process.
    directory: The directory for marks and for the variables.
    text: The cell, as JSON.
  """
  from experiments.support import race_task
  from tf_replicas.drivers import between_graph

  cell = race_real.Cell.from_json(text)
  contestant = race_task.contestant(cell.rule, cell.workers)
  driver = between_graph.BetweenGraph(
    spec,
    task,
    lambda: _task(directory, task.index, cell).replica,
    lambda: contestant.rule(cell.workers, cell.rate),
    lost_after_secs=5.0,
  )
  if driver.is_chief:
    _watch(driver, directory, cell)
  else:
    driver.run_replica()
  driver.close()


def _watch(driver, directory: pathlib.Path, cell: race_real.Cell) -> None:
  """Trains for the time of the cell, and stores the variables at times."""
  from experiments import race

  rows, values, now = [], [], 0.0
  while now < cell.limit:
    driver.step()
    begin = float((directory / "start").read_text())
    now = (time.time() - begin) / race_real.UNIT_SECS
    step, examples = driver.store.counts()
    if not rows or examples >= rows[-1][2] + race.EXAMPLES_APART:
      values.append([np.asarray(v) for v in driver.store.read()])
      rows.append([now, step, examples])
  arrays = {
    f"value_{i}": np.stack(v) for i, v in enumerate(zip(*values, strict=True))
  }
  np.savez(directory / "points.npz", rows=np.array(rows), **arrays)


if __name__ == "__main__":
  programs.be_task(sys.argv[1:], run_client)
