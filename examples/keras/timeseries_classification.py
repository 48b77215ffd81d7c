"""Trains a classifier of time series with convolutions.

It follows the Keras example. Instead of the noise of engines, it has waves of a
random phase under noise. The waves of class 1 are faster than those of class 0.
Callbacks keep the best model, lower the learning rate, and stop early.
"""

import os
import tempfile

import keras
import numpy as np
from keras import layers

LENGTH = 64


def load_data(num_examples, seed):
  """Makes random waves of two classes, under noise.

  Returns:
    Series float32 [num_examples, LENGTH, 1], and classes [num_examples].
  """
  rng = np.random.default_rng(seed)
  classes = rng.integers(0, 2, num_examples)
  periods = np.where(classes, 9.0, 12.0)[:, np.newaxis]
  phases = rng.uniform(0, 2 * np.pi, [num_examples, 1])
  series = np.sin(2 * np.pi * np.arange(LENGTH) / periods + phases)
  series += rng.normal(0, 0.5, series.shape)
  return series[..., np.newaxis].astype("float32"), classes


def build_model():
  """Makes a compiled classifier of time series.

  It has three convolutions with batch normalization, whose outputs are averaged
  over the time.
  """
  inputs = keras.Input([LENGTH, 1])
  hidden = inputs
  for _ in range(3):
    hidden = layers.Conv1D(16, 5, padding="same")(hidden)
    hidden = layers.BatchNormalization(momentum=0.9)(hidden)
    hidden = layers.ReLU()(hidden)
  hidden = layers.GlobalAveragePooling1D()(hidden)
  outputs = layers.Dense(2, activation="softmax")(hidden)
  model = keras.Model(inputs, outputs)
  model.compile(
    optimizer=keras.optimizers.Adam(0.005),
    loss="sparse_categorical_crossentropy",
    metrics=["sparse_categorical_accuracy"],
  )
  return model


x_train, y_train = load_data(1200, seed=1)
x_test, y_test = load_data(400, seed=2)
best = os.path.join(tempfile.mkdtemp(), "best_model.keras")
callbacks = [
  keras.callbacks.ModelCheckpoint(
    best, save_best_only=True, monitor="val_loss"
  ),
  keras.callbacks.ReduceLROnPlateau(
    monitor="val_loss", factor=0.5, patience=2, min_lr=0.0001
  ),
  keras.callbacks.EarlyStopping(monitor="val_loss", patience=5),
]

model = build_model()
history = model.fit(
  x_train,
  y_train,
  batch_size=64,
  epochs=8,
  callbacks=callbacks,
  validation_split=0.2,
  verbose=2,
)

model = keras.models.load_model(best)
loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
print(f"test accuracy: {accuracy:.3f}")
