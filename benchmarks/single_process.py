"""Trains the CIFAR-10 network in one process with all cores, for comparison.

`benchmarks.throughput` starts this program. It is a plain loop, as a careful
user would write it without this project: one `tf.function` per step with
gradient, update and moving averages. It has the input pipeline and the global
batch of the programs that it is compared with.
"""

import sys
import time

import keras
import tensorflow as tf

from cifar10 import config as config_lib
from cifar10 import inputs
from cifar10 import model as model_lib
from cifar10 import sources


def main(batch_size: int, warm_up_steps: int, steps: int) -> None:
  config = config_lib.Config(dataset="synthetic", batch_size=batch_size)
  model = model_lib.build(seed=0)
  optimizer = keras.optimizers.SGD(config.learning_rate)
  averages = tf.train.ExponentialMovingAverage(config.moving_average_decay)
  variables = [v.value for v in model.trainable_variables]
  paths = [v.path for v in model.trainable_variables]

  @tf.function
  def step(images, labels):
    with tf.GradientTape() as tape:
      parameters = [tf.convert_to_tensor(v) for v in variables]
      tape.watch(parameters)
      loss, _ = model_lib.total_loss(
        model,
        dict(zip(paths, parameters, strict=True)),
        images,
        labels,
        decay_factor=config.weight_decay,
      )
    gradients = tape.gradient(loss, parameters)
    optimizer.apply(gradients, model.trainable_variables)
    averages.apply(variables)
    return loss

  source = sources.find("synthetic")
  batches = iter(inputs.train_dataset(source, batch_size=batch_size, seed=0))
  start = 0.0
  for number in range(warm_up_steps + steps):
    if number == warm_up_steps:
      start = time.perf_counter()
    loss = step(*next(batches))
  loss.numpy()
  seconds = time.perf_counter() - start
  print(f"examples_per_sec {steps * batch_size / seconds:.1f}", flush=True)


if __name__ == "__main__":
  main(*map(int, sys.argv[1:]))
