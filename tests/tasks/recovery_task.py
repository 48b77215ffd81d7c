"""Trains by `fit`, and kills a parameter server: recovery_task.py ARGUMENTS

ARGUMENTS is a JSON object: `directory`, whether to `kill`, and arguments of
`fit`. The chief prints one line of JSON.
"""

import json
import os
import pathlib
import signal
import sys

import keras
import numpy as np

import tf_replicas
from tf_replicas.cluster import environment

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


def main(directory: str, kill: bool, **arguments) -> None:
  """Trains as the task of the environment."""
  path = pathlib.Path(directory)
  role = environment.role(os.environ)
  assert role is not None
  first_start = not (path / "train").exists()
  if role[1].job == "ps" and role[1].index == 0 and kill and first_start:
    (path / "ps_0.pid").write_text(str(os.getpid()))
  rng = np.random.default_rng(0)
  x = rng.normal(size=[UPDATES_PER_EPOCH * BATCH, 8]).astype(np.float32)
  y = x.sum(axis=1, keepdims=True)
  history = tf_replicas.fit(
    model_fn,
    x,
    y,
    batch_size=BATCH,
    epochs=EPOCHS,
    shuffle=False,
    verbose=0,
    callbacks=[Kill(path)],
    train_dir=str(path / "train"),
    checkpoint_every_secs=1.0,
    recovery_timeout_secs=60.0,
    **arguments,
  )
  result = {
    "history": history.history,
    "weights": [np.asarray(w).tolist() for w in history.model.get_weights()],
  }
  print("RESULT", json.dumps(result))


if __name__ == "__main__":
  main(**json.loads(sys.argv[1]))
