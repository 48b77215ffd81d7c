"""A task of `benchmarks.fit`: python fit_task.py fit|loop"""

import sys
import time
from unittest import mock

import keras
import numpy as np

import tf_replicas
from tf_replicas.fitting import keras_fit

_EPOCHS, _UPDATES = 4, 100
_BATCH = 64


def model_fn() -> keras.Model:
  """A small convolutional network for 32 x 32 images."""
  layers = keras.layers
  model = keras.Sequential(
    [
      keras.Input([32, 32, 3]),
      layers.Conv2D(16, 3, strides=2, activation="relu"),
      layers.Conv2D(32, 3, strides=2, activation="relu"),
      layers.Flatten(),
      layers.Dense(10),
    ]
  )
  loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  model.compile("sgd", loss, metrics=["accuracy"])
  return model


class Times(keras.callbacks.Callback):
  """The time at the end of each epoch."""

  def __init__(self):
    """Has none yet."""
    super().__init__()
    self.ends = []

  def on_epoch_end(self, epoch, logs=None):
    """Notes the time."""
    self.ends.append(time.monotonic())


def loop(self, **arguments) -> None:
  """Takes the place of `fit`'s own loop: only makes updates."""
  del arguments
  step, last = 0, _EPOCHS * _UPDATES
  self._driver.stop_at(last)
  while step < last:
    left = _UPDATES - step % _UPDATES
    step = self._driver.step(left).global_step
    if step % _UPDATES == 0:
      TIMES.ends.append(time.monotonic())


TIMES = Times()
x = np.random.default_rng(0).normal(size=[_UPDATES * _BATCH, 32, 32, 3])
y = np.random.default_rng(1).integers(0, 10, len(x))
run = loop if sys.argv[1] == "loop" else keras_fit._Loop.run
with mock.patch.object(keras_fit._Loop, "run", run):
  tf_replicas.fit(
    model_fn,
    x.astype("float32"),
    y,
    batch_size=_BATCH,
    epochs=_EPOCHS,
    callbacks=[TIMES],
    verbose=0,
  )
secs = TIMES.ends[-1] - TIMES.ends[0]
print("updates/sec", (_EPOCHS - 1) * _UPDATES / secs)
