"""Runs a task of `benchmarks.fit`: python fit_task.py fit|loop PORT EPOCHS

The chief connects to the benchmark, which listens on PORT. Before each epoch
the benchmark tells the chief that the epoch may begin. After it, the chief
tells the benchmark the updates per second.
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
  """Keras callback that waits for the benchmark before each epoch.

  After the epoch, it sends the updates per second to the benchmark.
  """

  def on_train_begin(self, logs=None):
    """Connects to the benchmark, which listens on a port of this machine."""
    del logs
    self._benchmark = connection.Client(("localhost", int(sys.argv[2])))

  def on_epoch_begin(self, epoch, logs=None):
    """Waits until the benchmark says that the epoch may begin."""
    del epoch, logs
    self._benchmark.recv()
    self._start = time.perf_counter()

  def on_epoch_end(self, epoch, logs=None):
    """Sends the updates per second of the epoch to the benchmark."""
    del epoch, logs
    self._benchmark.send(_UPDATES / (time.perf_counter() - self._start))


def loop(self, **arguments) -> None:
  """Makes updates only, in the place of the training loop of `fit`.

  Args:
    self: The object whose method `run` this function replaces.
    **arguments: The arguments of that method, which are not used.
  """
  del arguments
  self._driver.stop_at(self._epochs * _UPDATES)
  turns, step = Turns(), 0
  turns.on_train_begin()
  for epoch in range(self._epochs):
    turns.on_epoch_begin(epoch)
    while step < (epoch + 1) * _UPDATES:
      left = (epoch + 1) * _UPDATES - step
      step = self._driver.step(left).global_step
    turns.on_epoch_end(epoch)


x = np.random.default_rng(0).normal(size=[_UPDATES * _BATCH, 32, 32, 3])
y = np.random.default_rng(1).integers(0, 10, len(x))
run = loop if sys.argv[1] == "loop" else keras_fit._Loop.run
with mock.patch.object(keras_fit._Loop, "run", run):
  tf_replicas.fit(
    model_fn,
    x.astype("float32"),
    y,
    batch_size=_BATCH,
    epochs=int(sys.argv[3]),
    callbacks=[Turns()],
    verbose=0,
  )
