"""Measures which share of a step local response normalization takes.

  python -m benchmarks.normalization [--rounds=10] [--output=FILE]

The step is the computation of the gradients of the CIFAR-10 tutorial's network
for a batch of 128 images, in this process. The network has this project's
normalization, TensorFlow's, or none. The three take turns, so that all meet the
same noise.
"""

import argparse
import time

import keras
import tensorflow as tf

from benchmarks import plain_network
from benchmarks import ratios
from benchmarks import stored
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


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--rounds", type=int, default=10)
  parser.add_argument("--output", help="File for the results, as JSON")
  arguments = parser.parse_args()
  steps = {
    "without": gradient_step(plain_network.build(_Nothing)),
    "ours": gradient_step(model_lib.build()),
    "TensorFlow's": gradient_step(plain_network.build()),
  }
  for step in steps.values():
    step()
  times = {name: [] for name in steps}
  for _ in range(arguments.rounds):
    for name, step in steps.items():
      start = time.perf_counter()
      for _ in range(STEPS):
        gradients = step()
      gradients[0].numpy()
      times[name].append((time.perf_counter() - start) / STEPS * 1e3)
  shares = {}
  for name, values in times.items():
    shares[name] = share = ratios.spread(
      [
        1 - without / value
        for without, value in zip(times["without"], values, strict=True)
      ]
    )
    print(
      f"{name:14}{ratios.spread(values)['median']:8.1f} ms,"
      f" {share['median']:6.1%} of it normalization"
      f" ({share['min']:.1%} to {share['max']:.1%})"
    )
  results = {"share_of_normalization": shares, "millis_per_step": times}
  stored.write(arguments.output, results)


if __name__ == "__main__":
  main()
