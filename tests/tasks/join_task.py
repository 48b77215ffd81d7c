"""Counts how often `fit` uses each example: python join_task.py DIRECTORY

Then it trains a second model.

Each use of an example adds 1 to a weight of its own. Every task says in
DIRECTORY when gradients of its replica were applied, and stops after 100
batches until there is a file `go on`. The chief prints one line of JSON.
"""

import itertools
import json
import os
import pathlib
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tf_replicas
from tf_replicas.cluster import environment

DIRECTORY = pathlib.Path(sys.argv[1])
NUM_EXAMPLES, BATCH_SIZE, NUM_EPOCHS = 240, 4, 10
_COUNT = itertools.count()


class Uses(keras.layers.Layer):
  """Looks up the weight of each example, once for each use."""

  def build(self, input_shape):
    """Makes the weights, which are zero."""
    self.counts = self.add_weight(shape=(NUM_EXAMPLES,), initializer="zeros")

  def call(self, numbers):
    """Returns the weights of the examples."""
    numbers = tf.numpy_function(_waited, [numbers], tf.int64)
    return tf.gather(self.counts, tf.ensure_shape(numbers, [None]))


def _waited(numbers: np.ndarray) -> np.ndarray:
  count = next(_COUNT)
  if count >= 2:  # The gradients of earlier batches were applied.
    (DIRECTORY / os.environ[environment.TASK]).touch()
  if count >= 100:
    while not (DIRECTORY / "go on").exists():
      time.sleep(0.05)
  return numbers


def model_fn() -> keras.Model:
  """Makes a model whose weights gradient descent increases by 1 per use."""
  inputs = keras.Input((), dtype="int64")
  model = keras.Model(inputs, Uses()(inputs))
  model.compile(keras.optimizers.SGD(float(BATCH_SIZE)), _negative)
  return model


def _second_model() -> keras.Model:
  model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
  model.compile("sgd", "mse")
  return model


def _negative(labels: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
  del labels
  return -values


def main() -> None:
  """Trains, and prints how often each example was used."""
  numbers = np.arange(NUM_EXAMPLES)
  history = tf_replicas.fit(
    model_fn,
    numbers,
    np.zeros(NUM_EXAMPLES, np.float32),
    batch_size=BATCH_SIZE,
    epochs=NUM_EPOCHS,
    rule=tf_replicas.Async(),
    verbose=0,
  )
  (weights,) = history.model.get_weights()
  second = tf_replicas.fit(
    _second_model,
    np.ones([40, 1], np.float32),
    np.zeros(40, np.float32),
    batch_size=BATCH_SIZE,
    epochs=2,
    rule=tf_replicas.Async(),
    verbose=0,
  )
  applied = {name: c.applied for name, c in history.contributions.items()}
  result = {
    "uses": np.rint(weights).astype(int).tolist(),
    "applied": applied,
    "second": sum(c.applied for c in second.contributions.values()),
  }
  print("RESULT", json.dumps(result), flush=True)


main()
