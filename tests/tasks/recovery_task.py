"""Trains, and kills a parameter server: recovery_task.py fit|run ARGUMENTS

ARGUMENTS is a JSON object: `directory`, whether to `kill`, and arguments of
`fit` or `run`. With `cuts` of `run`, a call of the chief fails instead, as if
its connection had been interrupted. The chief prints one line of JSON.
"""

import json
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

import tf_replicas
from tf_replicas.cluster import environment
from tf_replicas.drivers import base as driver_base

UPDATES_PER_EPOCH, EPOCHS, BATCH = 20, 2, 32
KILLED_AFTER = 10


class Kill(keras.callbacks.Callback):
  """Kills parameter server 0 once, after some batches of the first epoch."""

  def __init__(self, directory: pathlib.Path):
    """Stores the directory of the file with the process id."""
    super().__init__()
    self._pid = directory / "ps_0.pid"

  def on_batch_end(self, batch: int, logs: dict | None = None) -> None:
    """Kills the process whose id the file has, and removes the file."""
    if batch >= KILLED_AFTER and self._pid.exists():
      pid = int(self._pid.read_text())
      self._pid.unlink()
      os.kill(pid, signal.SIGKILL)


def model_fn() -> keras.Model:
  """Builds a small model with a slot per variable."""
  keras.utils.set_random_seed(1)
  layers = [keras.Input([8]), keras.layers.Dense(4), keras.layers.Dense(1)]
  model = keras.Sequential(layers)
  optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
  model.compile(optimizer, "mse", metrics=["mae"])
  return model


def table_model_fn() -> keras.Model:
  """Builds a model with a table, whose rows are on the parameter servers."""
  keras.utils.set_random_seed(1)
  table = tf_replicas.Embedding(1000, 4, embeddings_initializer="ones")
  layers = [keras.Input([8], dtype="int32"), table, keras.layers.Flatten()]
  model = keras.Sequential([*layers, keras.layers.Dense(1)])
  optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
  model.compile(optimizer, "mse", metrics=["mae"])
  return model


def is_victim(path: pathlib.Path) -> bool:
  """Returns whether this process is the first one of parameter server 0."""
  role = environment.role(os.environ)
  assert role is not None
  is_first = not (path / "train").exists()
  return role[1].job == "ps" and role[1].index == 0 and is_first


def fit(directory: str, kill: bool, has_table=False, **arguments) -> dict:
  """Trains by `fit` as the task of the environment."""
  path = pathlib.Path(directory)
  if kill and is_victim(path):
    (path / "ps_0.pid").write_text(str(os.getpid()))
  rng = np.random.default_rng(0)
  x = rng.normal(size=[UPDATES_PER_EPOCH * BATCH, 8]).astype(np.float32)
  y = x.sum(axis=1, keepdims=True)
  if has_table:
    x = np.abs(x * 300).astype(np.int32) % 1000
  history = tf_replicas.fit(
    table_model_fn if has_table else model_fn,
    x,
    y,
    batch_size=BATCH,
    epochs=EPOCHS,
    shuffle=False,
    verbose=0,
    validation_data=(x[:BATCH], y[:BATCH]),
    callbacks=[Kill(path)],
    train_dir=str(path / "train"),
    checkpoint_every_secs=1.0,
    **arguments,
  )
  return {
    "history": history.history,
    "weights": [
      np.asarray(w).tolist() for w in history.model.layers[-1].get_weights()
    ],
  }


class Line(tf.Module):
  """The linear function to learn."""

  def __init__(self):
    """Starts at 0."""
    super().__init__()
    self.slope = tf.Variable(tf.zeros([8]))


def _die_after_a_checkpoint(train_dir: pathlib.Path) -> None:
  while not list(train_dir.glob("*.index")):
    time.sleep(0.05)
  time.sleep(0.3)
  os.kill(os.getpid(), signal.SIGKILL)


def _cut_once(step: Callable, number: int) -> Callable:
  """Returns a `step` of a driver that fails once, after so many updates."""
  left = [number]

  def stepping(driver, *arguments):
    result = step(driver, *arguments)
    if left and result.global_step >= left[0]:
      left.clear()
      message = "Connection reset by peer, /job:ps/replica:0/task:0"
      raise tf.errors.UnavailableError(None, None, message)
    return result

  return stepping


def run(directory: str, kill: bool, cuts: bool = False, **arguments) -> dict:
  """Trains by `run` as the task of the environment."""
  path = pathlib.Path(directory)
  if cuts:
    driver = driver_base.ParameterServerDriver
    driver.step = _cut_once(driver.step, 700)
  if kill and is_victim(path):
    threading.Thread(
      target=_die_after_a_checkpoint, args=[path / "train"], daemon=True
    ).start()
  target = tf.range(1.0, 9.0)
  trained = tf_replicas.run(
    lambda: tf_replicas.module_replica(
      Line(),
      lambda line, x: tf.reduce_mean((line.slope * x - target * x) ** 2),
      lambda *_: tf.data.Dataset.from_tensors(tf.ones([4, 8])).repeat(),
    ),
    lambda: keras.optimizers.SGD(1e-3, momentum=0.9),
    max_steps=1500,
    train_dir=str(path / "train"),
    checkpoint_every_secs=0.5,
    **arguments,
  )
  return {
    "history": {"step": [trained.global_step], "loss": [trained.loss]},
    "weights": [trained.values["slope"].tolist()],
  }


if __name__ == "__main__":
  trained = {"fit": fit, "run": run}[sys.argv[1]](**json.loads(sys.argv[2]))
  print("RESULT", json.dumps(trained))
