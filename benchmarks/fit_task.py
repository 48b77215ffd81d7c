"""Runs a task of `benchmarks.fit`: python fit_task.py PORT TURNS

The chief connects to the benchmark, which listens on PORT. After each turn, the
chief sends the updates per second of `fit` and of the loop.
"""

import sys
import time
from multiprocessing import connection
from unittest import mock

import keras
import numpy as np

import tf_replicas
from tf_replicas.fitting import keras_fit

_UPDATES, _BATCH = 400, 64  # Updates in an epoch, examples in an update.


def model_fn() -> keras.Model:
  """Builds and compiles a small convolutional network for 32 x 32 images."""
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


class Turns(keras.callbacks.Callback):
  """Keras callback that makes the updates of every second epoch by itself.

  `fit` makes those of the others. After each such pair of epochs, the callback
  sends the updates per second of both to the benchmark.
  """

  def __init__(self, training: keras_fit._Loop):
    """Connects to the benchmark, which listens on a port of this machine.

    Args:
      training: What `fit` does in the chief.
    """
    super().__init__()
    self._training = training
    self._benchmark = connection.Client(("localhost", int(sys.argv[1])))

  def on_epoch_begin(self, epoch, logs=None):
    """Begins an epoch of `fit`, or ends one and makes the updates of the next.

    The time of `fit` is all that passes between, also at the end of its epoch.
    """
    del logs
    now = time.perf_counter()
    if epoch % 2 == 0:
      self._start = now
      return
    rates = {"fit": _UPDATES / (now - self._start)}
    step, end = epoch * _UPDATES, (epoch + 1) * _UPDATES
    while step < end:
      step = self._training._driver.step(end - step).global_step
    rates["loop"] = _UPDATES / (time.perf_counter() - now)
    self._training._step = step  # So `fit` has nothing to do in this epoch.
    self._benchmark.send(rates)


_run = keras_fit._Loop.run


def run(self, **arguments):
  """Calls the method `run` of `fit`, with the callback `Turns`."""
  self._callbacks = [Turns(self)]
  return _run(self, **arguments)


x = np.random.default_rng(0).normal(size=[_UPDATES * _BATCH, 32, 32, 3])
y = np.random.default_rng(1).integers(0, 10, len(x))
with mock.patch.object(keras_fit._Loop, "run", run):
  tf_replicas.fit(
    model_fn,
    x.astype("float32"),
    y,
    batch_size=_BATCH,
    epochs=2 * int(sys.argv[2]),
    verbose=0,
  )
