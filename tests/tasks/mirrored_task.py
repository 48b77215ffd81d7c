"""Runs one process of a test of mirrored variables, which plays a scenario.

  python mirrored_task.py SCENARIO SPEC DIRECTORY INDEX

SCENARIO is the name of a function of this file. SPEC is the path of a
cluster-spec JSON. The chief writes its report into the directory.
"""

import dataclasses
import json
import os
import pathlib
import signal
import sys

import keras
import numpy as np
import tensorflow as tf

from tests.support import fast_start  # noqa: F401, before what imports TensorFlow
from tests.support import word_model
from tf_replicas import cluster
from tf_replicas.drivers import mirrored
from tf_replicas.rules import results
from tf_replicas.runtime import processes
from tf_replicas.session import checkpoints

NUM_STEPS = 3
RATE = 0.25
# Before the variables come from somewhere; see `differing`.
SEEDS = (3, 4)


def sgd():
  """Makes the Keras optimizer. Its learning rate is set before every step."""
  return keras.optimizers.SGD(0.5, momentum=0.9)


def _driver(here, replica_fn=None, **options):
  spec, task, _ = here
  seed = SEEDS[task.index]
  return mirrored.Mirrored(
    replica_fn or (lambda: word_model.replica(seed=seed)),
    lambda number: word_model.rule(sgd(), number, clip_mean_norm=0.3),
    spec=spec,
    task=task,
    **{"start_timeout_secs": 60, **options},
  )


def _train(here, driver, steps=NUM_STEPS):
  """Trains for some updates, and writes losses and variables to files.

  The chief makes the updates. The other processes follow it.

  Args:
    here: The cluster, the task of this process, and the directory of the files.
    driver: The driver of this process.
    steps: Number of updates.
  """
  directory = here[-1]
  try:
    if not driver.is_chief:
      step = driver.run_replica()
      (directory / "follower").write_text(str(step))
      state = {k: v.tolist() for k, v in word_model.state_of(driver).items()}
      (directory / "follower.json").write_text(json.dumps(state))
      return
    losses = []
    for _ in range(steps):
      driver.set_learning_rate(RATE)
      losses.append(driver.step().loss)
    state = {k: v.tolist() for k, v in word_model.state_of(driver).items()}
    report = {"losses": losses, "state": state}
    (directory / "chief.json").write_text(json.dumps(report))
  except Exception as error:
    driver.close(error)
    raise
  driver.close()


def resume(here):
  """A scenario: training resumes from a checkpoint that the chief reads."""
  driver = _driver(here)
  if driver.is_chief:
    path = checkpoints.latest(str(here[-1]))
    checkpoints.restore(path, driver.store)
  _train(here, driver)


def fresh(here):
  """A scenario: training begins with the chief's initial values.

  The models of the other processes have other initial values.
  """
  _train(here, _driver(here))


def not_finite(here):
  """A scenario: worker 1's gradient is infinite in the third step.

  No process may apply this gradient.
  """
  loss_fn, dataset_fn = word_model.poisoned("gradient", step=2, shard=1)
  driver = _driver(
    here, lambda: word_model.replica(loss_fn=loss_fn, dataset_fn=dataset_fn)
  )
  try:
    _train(here, driver)
  except results.NonFiniteGradientError as error:
    state = word_model.state_of(driver)
    assert all(np.all(np.isfinite(value)) for value in state.values())
    assert driver.global_step == 2
    print(error, flush=True)


def failing_chief(here):
  """A scenario: the chief ends the training with an error after a step."""
  driver = _driver(here)
  if not driver.is_chief:
    driver.run_replica()
    return
  driver.step()
  driver.close(OSError("disk full"))


def unfit_chief(here):
  """A scenario: the chief ends the training with an error before a step."""
  driver = _driver(here)
  if not driver.is_chief:
    driver.run_replica()
    return
  driver.close(OSError("no such checkpoint"))


def differing(here):
  """A scenario: a variable of worker 1 has another shape than the chief's.

  The driver must refuse this.
  """
  task = here[1]

  def replica_fn():
    replica = word_model.replica()
    if task.index:
      other = tf.Variable(tf.ones([3]), name="unused")
      replica = dataclasses.replace(
        replica, variables=[*replica.variables[:3], other]
      )
    return replica

  _driver(here, replica_fn)


def missing(here):
  """A scenario: the other process of the training is never started."""
  _driver(here, start_timeout_secs=3)


def killed(here):
  """A scenario: worker 1 is killed between two steps."""
  _die(here, mortal=1)


def killed_chief(here):
  """A scenario: worker 0, the chief, is killed between two steps."""
  _die(here, mortal=0)


def stopped(here):
  """A scenario: worker 1 is stopped, but not killed, between two steps."""
  _die(here, mortal=1, by=signal.SIGSTOP)


def _die(here, mortal, by=signal.SIGKILL):
  driver = _driver(here)
  is_mortal = here[1].index == mortal
  make_step, steps = driver._make_step, []

  def step():
    if is_mortal and len(steps) == 3:
      os.kill(os.getpid(), by)
    steps.append(make_step())
    return steps[-1]

  driver._make_step = step
  if not driver.is_chief:
    driver.run_replica()
  while True:
    driver.step()


def main(argv):
  scenario, path, directory, index = argv
  here = (
    cluster.load(path),
    cluster.Task("worker", int(index)),
    pathlib.Path(directory),
  )
  status = 0
  try:
    globals()[scenario](here)
  except (RuntimeError, TimeoutError) as error:
    print(f"error: {error}", flush=True)
    status = 1
  except Exception as error:
    print(f"{type(error).__name__}: {error}"[:2000], flush=True)
    status = 3
  processes.exit_now(status)


if __name__ == "__main__":
  main(sys.argv[1:])
