"""Measures which share of a step local response normalization takes.

  python -m benchmarks.normalization [ROUNDS]

The step is the computation of the gradients of the CIFAR-10 tutorial's network
for a batch of 128 images, in this process. The network has this project's
normalization, TensorFlow's, or none. The three take turns, so that all meet the
same noise.
"""

import statistics
import sys
import time

import keras
import tensorflow as tf

from benchmarks import plain_network
from cifar10 import model as model_lib

BATCH = 128
STEPS = 10


class _Nothing(keras.layers.Layer):
  def call(self, x):
    return x


def gradient_step(model: keras.Model):
  """Returns a function that computes the network's gradients for one batch."""
  paths = [v.path for v in model.trainable_variables]
  parameters = [tf.convert_to_tensor(v) for v in model.trainable_variables]
  images = tf.random.stateless_normal([BATCH, 24, 24, 3], [1, 2])
  labels = tf.range(BATCH, dtype=tf.int64) % 10

  @tf.function
  def step(images, *parameters):
    with tf.GradientTape(watch_accessed_variables=False) as tape:
      tape.watch(parameters)
      loss, _ = model_lib.total_loss(
        model, dict(zip(paths, parameters, strict=True)), images, labels
      )
    return tape.gradient(loss, parameters)

  return lambda: step(images, *parameters)


def main(rounds: int) -> None:
  steps = {
    "without": gradient_step(plain_network.build(_Nothing)),
    "ours": gradient_step(model_lib.build()),
    "TensorFlow's": gradient_step(plain_network.build()),
  }
  for step in steps.values():
    step()
  times = {name: [] for name in steps}
  for _ in range(rounds):
    for name, step in steps.items():
      start = time.perf_counter()
      for _ in range(STEPS):
        gradients = step()
      gradients[0].numpy()
      times[name].append((time.perf_counter() - start) / STEPS * 1e3)
  for name, values in times.items():
    shares = [
      1 - without / value
      for without, value in zip(times["without"], values, strict=True)
    ]
    print(
      f"{name:14}{statistics.median(values):8.1f} ms,"
      f" {statistics.median(shares):6.1%} of it normalization"
      f" ({min(shares):.1%} to {max(shares):.1%})"
    )


if __name__ == "__main__":
  main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
