"""Compares training on one machine with Keras' `fit` and with strategies.

  python -m benchmarks.one_machine [--rounds=3] [--batch_size=128] [--towers=2]
    [--output=FILE]

The network is that of the CIFAR-10 tutorial. Every row of the result is a
process of its own with equal network, synthetic images and global batch. Rows
take turns, and the ratio within a round is what counts. Towers (copies of the
model) and strategies run on logical CPU devices.

The rows "one device" and "towers" are this project's programs as they are, with
log lines, summaries and moving averages. `fit` has the moving averages of its
optimizer, the TensorBoard callback, and TensorFlow's own local response
normalization; `fit, our LRN` has that of this project, and `fit auto` compiles
with XLA. The strategies train in a plain loop on this project's network with
its normalization and its moving averages, without summaries. The last row
prepares batches and does nothing with them.
"""

import os
import re
import sys
import tempfile
import time

from absl import app
from absl import flags

from benchmarks import ratios
from benchmarks import stored
from experiments.support import programs

FLAGS = flags.FLAGS
flags.DEFINE_integer(
  "rounds", 3, "The number of rounds, in each of which all are measured"
)
flags.DEFINE_integer(
  "batch_size", 128, "The number of images in a step, over all towers"
)
flags.DEFINE_integer(
  "towers", 2, "The number of towers, each on a logical device"
)
flags.DEFINE_integer(
  "steps", 150, "The number of steps that are measured, after 30 others"
)
flags.DEFINE_string(
  "row",
  None,
  "Measure only this row, in this process; the program itself uses this",
)
flags.DEFINE_string("output", None, "Where to write the results, as JSON")

_WARM_UP_STEPS = 30
_ROWS = (
  "one device",
  "towers",
  "fit",
  "fit, our LRN",
  "fit auto",
  "CentralStorageStrategy",
  "MirroredStrategy",
  "input on one core",
)
_DECAY = 0.004
_AVERAGES_DECAY = 0.9999


def ours(num_towers: int) -> float:
  """Returns the examples/sec of this project's program after the warm-up.

  Args:
    num_towers: The number of towers, copies of the model on one device each.
  """
  with tempfile.TemporaryDirectory() as train_dir:
    output = programs.output(
      "cifar10.multi_gpu_train",
      "--dataset=synthetic",
      "--emulate_gpus",
      f"--num_gpus={num_towers}",
      f"--train_dir={train_dir}",
      f"--batch_size={FLAGS.batch_size // num_towers}",
      f"--max_steps={_WARM_UP_STEPS + FLAGS.steps}",
      f"--log_every_steps={_WARM_UP_STEPS}",
    )
  return programs.examples_per_sec(output)


def fit(jit_compile: bool | str, *, has_our_lrn: bool) -> float:
  """Returns the examples/sec of `keras.Model.fit`.

  Args:
    jit_compile: The argument of `compile`: whether XLA compiles the step.
    has_our_lrn: Whether the network has this project's local response
      normalization. Otherwise, it has that of TensorFlow.
  """
  import keras

  from benchmarks import plain_network
  from cifar10 import lrn
  from cifar10 import model as model_lib

  def configure(layer):
    settings = layer.get_config()
    if f"{layer.name}/kernel" in model_lib.DECAYED:
      settings["kernel_regularizer"] = keras.regularizers.L2(_DECAY / 2)
    return settings

  class Clock(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
      if batch + 1 == _WARM_UP_STEPS:
        self.start = time.perf_counter()

  model = plain_network.build(
    lrn.LocalResponseNormalization
    if has_our_lrn
    else plain_network.Normalization,
    configure,
  )
  model.compile(
    keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=_AVERAGES_DECAY),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    jit_compile=jit_compile,
  )
  clock = Clock()
  with tempfile.TemporaryDirectory() as log_dir:
    model.fit(
      _dataset(),
      steps_per_epoch=_WARM_UP_STEPS + FLAGS.steps,
      callbacks=[
        clock,
        keras.callbacks.TensorBoard(log_dir, update_freq=100),
      ],
      verbose=2,
    )
    seconds = time.perf_counter() - clock.start
  return FLAGS.steps * FLAGS.batch_size / seconds


def strategy(name: str) -> float:
  """Returns the examples/sec of a loop around `run` of a TensorFlow strategy.

  Args:
    name: `MirroredStrategy` or `CentralStorageStrategy`.
  """
  import keras
  import tensorflow as tf

  from cifar10 import model as model_lib
  from tf_replicas.runtime import devices
  from tf_replicas.store import moving_averages

  numbers = range(FLAGS.towers)
  devices.configure(numbers, num_emulated=FLAGS.towers)
  names = devices.tower_devices(numbers, emulate=True)
  if name == "MirroredStrategy":
    scope = tf.distribute.MirroredStrategy(
      names, cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
  else:
    scope = tf.distribute.experimental.CentralStorageStrategy(
      compute_devices=names, parameter_device="/device:CPU:0"
    )
  with scope.scope():
    model = model_lib.build()
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
  paths = [v.path for v in model.trainable_variables]
  averages = moving_averages.MovingAverages(_AVERAGES_DECAY)
  with tf.device("/device:CPU:0"):
    pairs = [
      (tf.Variable(tf.convert_to_tensor(v)), v.value)
      for v in model.trainable_variables
    ]

  def replica_step(images, labels):
    with tf.GradientTape() as tape:
      parameters = [tf.convert_to_tensor(v) for v in model.trainable_variables]
      tape.watch(parameters)
      loss, _ = model_lib.total_loss(
        model, dict(zip(paths, parameters, strict=True)), images, labels
      )
      part = loss / FLAGS.towers
    # Keras' optimizer adds up the gradients of all replicas itself.
    optimizer.apply(tape.gradient(part, parameters), model.trainable_variables)
    return loss

  @tf.function
  def step(batch, number):
    losses = scope.run(replica_step, args=batch)
    averages.update(pairs, number)
    return scope.reduce(tf.distribute.ReduceOp.MEAN, losses, axis=None)

  batches = iter(scope.experimental_distribute_dataset(_dataset()))
  for number in range(_WARM_UP_STEPS + FLAGS.steps):
    if number == _WARM_UP_STEPS:
      start = time.perf_counter()
    loss = float(step(next(batches), tf.constant(number)))
  del loss
  return FLAGS.steps * FLAGS.batch_size / (time.perf_counter() - start)


def input_alone() -> float:
  """Returns the images/sec that the input pipeline prepares on one core."""
  os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
  batches = iter(_dataset())
  for number in range(_WARM_UP_STEPS + FLAGS.steps):
    if number == _WARM_UP_STEPS:
      start = time.perf_counter()
    next(batches)
  return FLAGS.steps * FLAGS.batch_size / (time.perf_counter() - start)


def _dataset():
  from cifar10 import inputs
  from cifar10 import sources

  source = sources.find("synthetic")
  return inputs.train_dataset(source, batch_size=FLAGS.batch_size, seed=0)


def measure(row: str) -> float:
  """Returns the examples/sec of a row of the result, in its own process."""
  if row == "one device":
    return ours(1)
  if row == "towers":
    return ours(FLAGS.towers)
  output = programs.output(
    "benchmarks.one_machine", *sys.argv[1:], f"--row={row}"
  )
  return float(re.search(r"examples_per_sec ([\d.]+)", output).group(1))


def _measure_here(row: str) -> float:
  if row.startswith("input"):
    return input_alone()
  if row.startswith("fit"):
    return fit(
      "auto" if row == "fit auto" else False, has_our_lrn="our LRN" in row
    )
  return strategy(row)


def main(argv: list[str]) -> None:
  del argv
  if FLAGS.row is not None:
    print(f"examples_per_sec {_measure_here(FLAGS.row):.1f}", flush=True)
    return
  rounds = []
  for number in range(FLAGS.rounds):
    rounds.append({})
    for row in _ROWS if number % 2 else _ROWS[::-1]:
      rounds[-1][row] = measure(row)
      print(f"round {number}: {row} {rounds[-1][row]:.0f}/s", flush=True)
  rates = {row: ratios.spread([r[row] for r in rounds]) for row in _ROWS}
  for row, at in rates.items():
    print(f"{row}: {at['median']:.0f} examples/sec", flush=True)
  pairs = [(name, row) for row in _ROWS for name in _ROWS[:2] if name != row]
  results = {
    "ratios": ratios.compare(rounds, pairs),
    "examples_per_sec": rates,
    "rounds": rounds,
  }
  stored.write(FLAGS.output, results)


if __name__ == "__main__":
  app.run(main)
