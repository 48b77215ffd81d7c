"""Trains on a table of numbers, integers and words, by preprocessing layers.

It follows the Keras example. Instead of data of patients, the table has four
columns that decide about the label, and one that does not.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

NUMBERS = ("age", "pressure")
WORDS = ("thal", "color")
NUM_EXAMPLES = 1000


def load_table(seed):
  """Makes a random table.

  Returns:
    A dict of the columns by their names, and an array of labels 0 or 1.
  """
  rng = np.random.default_rng(seed)
  table = {
    "age": rng.normal(54, 9, NUM_EXAMPLES).astype("float32"),
    "pressure": rng.normal(131, 17, NUM_EXAMPLES).astype("float32"),
    "vessels": rng.integers(0, 4, NUM_EXAMPLES),
    "thal": rng.choice(["fixed", "normal", "reversible"], NUM_EXAMPLES),
    "color": rng.choice(["red", "green"], NUM_EXAMPLES),
  }
  risk = (table["age"] - 54) / 9 + (table["pressure"] - 131) / 17
  risk += table["vessels"] - 1.5 + 2.0 * (table["thal"] == "reversible")
  risk += rng.normal(0, 0.5, NUM_EXAMPLES)
  return table, (risk > 0.67).astype("float32")


def batches(table, labels):
  """Makes a data set of batches of 64 rows of a table."""
  dataset = tf.data.Dataset.from_tensor_slices((table, labels))
  return dataset.shuffle(NUM_EXAMPLES, seed=3).batch(64)


def build_model():
  """Makes a compiled model that encodes the columns and predicts the label.

  The encoding of a column is adapted to its values in the training data.
  """
  inputs, encoded = {}, []
  for name in NUMBERS:
    inputs[name] = keras.Input([1], name=name)
    normalize = layers.Normalization()
    normalize.adapt(train_table[name][:, np.newaxis])
    encoded.append(normalize(inputs[name]))
  inputs["vessels"] = keras.Input([1], name="vessels", dtype="int64")
  lookup = layers.IntegerLookup(output_mode="one_hot")
  lookup.adapt(train_table["vessels"][:, np.newaxis])
  encoded.append(lookup(inputs["vessels"]))
  for name in WORDS:
    inputs[name] = keras.Input([1], name=name, dtype="string")
    lookup = layers.StringLookup(output_mode="one_hot")
    lookup.adapt(train_table[name])
    encoded.append(lookup(inputs[name]))
  hidden = layers.Concatenate()(encoded)
  hidden = layers.Dense(32, activation="relu")(hidden)
  hidden = layers.Dropout(0.2)(hidden)
  outputs = layers.Dense(1, activation="sigmoid")(hidden)
  model = keras.Model(inputs, outputs)
  model.compile(
    keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy"]
  )
  return model


train_table, train_labels = load_table(seed=1)
train_data = batches(train_table, train_labels)
validation_data = batches(*load_table(seed=2))

model = build_model()
history = model.fit(
  train_data,
  epochs=5,
  validation_data=validation_data,
  verbose=2,
)

patient = {"age": 70.0, "pressure": 160.0, "vessels": 3}
patient |= {"thal": "reversible", "color": "green"}
patient = {k: tf.convert_to_tensor([[v]]) for k, v in patient.items()}
print(f"risk: {float(model.predict(patient, verbose=0)[0, 0]):.3f}")
print(f"validation accuracy: {history.history['val_accuracy'][-1]:.3f}")
