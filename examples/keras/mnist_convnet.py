"""Trains a small convolutional network that recognizes shapes.

It follows the Keras example for MNIST. Instead of digits, it has ten random
shapes, moved about and under noise.
"""

import keras
import numpy as np
from keras import layers

NUM_CLASSES = 10
IMAGE_SHAPE = (28, 28, 1)


def load_data(num_examples, seed):
  """Makes random images of ten shapes, and their classes.

  Returns:
    Images float32 [num_examples, 28, 28, 1], and one-hot classes.
  """
  shapes = np.random.default_rng(0).random([NUM_CLASSES, 6, 6]) < 0.5
  shapes = np.kron(shapes, np.ones([4, 4]))
  rng = np.random.default_rng(seed)
  classes = rng.integers(0, NUM_CLASSES, num_examples)
  images = rng.normal(0.2, 0.2, size=[num_examples, 28, 28])
  for image, label in zip(images, classes, strict=True):
    top, left = rng.integers(0, 5, 2)
    image[top : top + 24, left : left + 24] += 0.5 * shapes[label]
  return (
    images[..., np.newaxis].astype("float32"),
    keras.utils.to_categorical(classes, NUM_CLASSES),
  )


def build_model():
  """Makes a compiled network of two convolutions and a classifier."""
  keras.utils.set_random_seed(1)  # The same initial weights in each run.
  model = keras.Sequential(
    [
      keras.Input(IMAGE_SHAPE),
      layers.Conv2D(8, 3, strides=2, activation="relu"),
      layers.MaxPooling2D(2),
      layers.Conv2D(16, 3, activation="relu"),
      layers.MaxPooling2D(2),
      layers.Flatten(),
      layers.Dropout(0.2),
      layers.Dense(NUM_CLASSES, activation="softmax"),
    ]
  )
  model.compile(
    loss="categorical_crossentropy",
    optimizer=keras.optimizers.Adam(0.01),
    metrics=["accuracy"],
  )
  return model


x_train, y_train = load_data(1600, seed=1)
x_test, y_test = load_data(400, seed=2)

model = build_model()
history = model.fit(
  x_train,
  y_train,
  batch_size=64,
  epochs=4,
  validation_split=0.1,
  verbose=2,
)

loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
print(f"test accuracy: {accuracy:.3f}")
