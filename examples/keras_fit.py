"""Trains a compiled Keras model by `tf_replicas.fit`.

Alone:               python examples/keras_fit.py
As a cluster:        python -m tf_replicas.launch --ps=1 --workers=2
                       examples/keras_fit.py
With a backup:       python -m tf_replicas.launch --ps=1 --workers=3
                       examples/keras_fit.py --replicas_to_aggregate=2

With a backup worker, an update takes the first 2 of 3 workers' gradients.
"""

import argparse

import keras
import numpy as np

import tf_replicas


def model_fn() -> keras.Model:
  """Makes a compiled model of two layers.

  It tells which of three numbers is the largest.
  """
  model = keras.Sequential(
    [
      keras.Input([3]),
      keras.layers.Dense(32, activation="relu"),
      keras.layers.Dense(3, activation="softmax"),
    ]
  )
  model.compile(
    keras.optimizers.Adam(0.01),
    "sparse_categorical_crossentropy",
    metrics=["accuracy"],
  )
  return model


parser = argparse.ArgumentParser()
parser.add_argument("--replicas_to_aggregate", type=int)
parser.add_argument("--train_dir", help="where to save checkpoints")
parser.add_argument("--save_to", help="where to save the model, as .keras")
options = parser.parse_args()

x = np.random.default_rng(0).normal(size=[4096, 3]).astype("float32")
y = x.argmax(axis=1)

history = tf_replicas.fit(
  model_fn,
  x[:3072],
  y[:3072],
  batch_size=64,
  epochs=4,
  validation_data=(x[3072:], y[3072:]),
  rule=tf_replicas.Sync(replicas_to_aggregate=options.replicas_to_aggregate),
  train_dir=options.train_dir,
  verbose=2,
)
# From here on there is only the chief.
if options.save_to:
  history.model.save(options.save_to)
print("accuracy:", history.history["val_accuracy"][-1])
