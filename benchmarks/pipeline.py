"""Compares a model on one device with one split over several and pipelined.

  python -m benchmarks.pipeline [--rounds=5] [--batch_size=128]
    [--layers='{"conv1": 0, "conv2": 1}'] [--micro_batches=1,2,4,8]
    [--output=FILE]

Computes gradients in one process on logical CPU devices, and prints two tables.
Rows take turns, so that all of them meet the same noise; the ratio to the first
row counts.

1. The CIFAR-10 network on random images. An op has one thread. A logical CPU
   device is not a core: independent ops of one device, such as the two
   gradients of a convolution, run side by side too. So the table also says how
   many cores computed, and for how much of a step ops of several devices ran at
   once.
2. Devices of a fixed speed, each of which does one thing at a time, like a GPU:
   they sleep. This table shows the schedule alone, whatever else the machine
   does. K parts of a batch on D devices can at most be K D / (K + D - 1) times
   as fast as one device.
"""

import json
import statistics
import threading
import time
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf
from absl import app
from absl import flags

from benchmarks import ratios
from benchmarks import stored
from cifar10 import model as model_lib
from tf_replicas.replica import model_parallel
from tf_replicas.replica import model_replica

FLAGS = flags.FLAGS
flags.DEFINE_integer(
  "rounds", 5, "The number of rounds, in each of which all are measured"
)
flags.DEFINE_integer("steps", 4, "The number of steps in a measurement")
flags.DEFINE_integer("batch_size", 128, "The number of images in a step")
flags.DEFINE_string(
  "layers",
  '{"conv1": 0, "conv2": 1}',
  "The section `layers` of a cluster spec, as JSON",
)
flags.DEFINE_list(
  "micro_batches",
  ["1", "2", "4", "8"],
  "Numbers of parts into which a batch is divided",
)
flags.DEFINE_string("output", None, "Where to write the results, as JSON")

# Of the second table; a part's backward pass takes twice its forward pass.
_FIXED_EXAMPLES = 16
_FIXED_LAYERS_PER_DEVICE = 3
_SECS_PER_EXAMPLE = 0.004
_MAX_DEVICES = 4


class Row:
  """A row of the results: one way to compute gradients, and its rates."""

  def __init__(
    self,
    name: str,
    replica: model_replica.Replica,
    batch: Sequence[np.ndarray],
    steps: int,
  ):
    self.name = name
    self.rates, self.cores, self.overlaps = [], [], []
    self._steps, self._examples = steps, len(batch[0])
    values = [np.asarray(v) for v in replica.variables]
    self._arguments = [tf.constant(x) for x in [*values, *batch]]

    def step(*arguments):
      return replica.gradients(
        arguments[: len(values)], arguments[len(values) :]
      )

    self._step = tf.function(step).get_concrete_function(*self._arguments)
    self._step(*self._arguments)

  def measure(self) -> None:
    start, cpu_start = time.perf_counter(), time.process_time()
    for _ in range(self._steps):
      result = self._step(*self._arguments)
    result.loss.numpy()
    secs = time.perf_counter() - start
    self.rates.append(self._steps * self._examples / secs)
    self.cores.append((time.process_time() - cpu_start) / secs)

  def measure_overlap(self) -> None:
    """Measures for how much of a step ops of several devices run at once."""
    # A session tells when each op ran on which device.
    metadata = tf.compat.v1.RunMetadata()
    options = tf.compat.v1.RunOptions(
      trace_level=tf.compat.v1.RunOptions.FULL_TRACE
    )
    config = tf.compat.v1.ConfigProto(
      device_count={"CPU": _MAX_DEVICES}, intra_op_parallelism_threads=1
    )
    feeds = {
      x.name: value.numpy()
      for x, value in zip(self._step.inputs, self._arguments, strict=True)
    }
    fetches = [x.name for x in self._step.outputs]
    with tf.Graph().as_default() as graph:
      graph_def = self._step.graph.as_graph_def()
      tf.graph_util.import_graph_def(graph_def, name="")
    with tf.compat.v1.Session(graph=graph, config=config) as session:
      session.run(fetches, feeds)
      session.run(fetches, feeds, options, metadata)
    changes = []
    for number, device in enumerate(metadata.step_stats.dev_stats):
      for op in device.node_stats:
        # Sending and receiving are waiting, not computing.
        if not op.timeline_label.split(" = ")[-1].startswith(
          ("_Send", "_Recv")
        ):
          begin = op.all_start_micros
          changes.append((begin, number, 1))
          changes.append((begin + op.op_end_rel_micros, number, -1))
    running = [0] * len(metadata.step_stats.dev_stats)
    several, last = 0, None
    for when, number, change in sorted(changes):
      if sum(count > 0 for count in running) > 1:
        several += when - last
      running[number] += change
      last = when
    self.overlaps.append(several / (last - min(changes)[0]))

  def ratio(self, other: "Row") -> str:
    """Formats the ratio of this row's rates to those of another row.

    It is the median over rounds, with the least and the largest ratio.
    """
    return ratios.in_words(self._ratios(other))

  def results(self, other: "Row") -> dict[str, object]:
    """Returns the ratios to the rates of another row, and all that is known."""
    return {
      "ratio": ratios.spread(self._ratios(other)),
      "examples_per_sec": self.rates,
      "cores": self.cores,
      "overlaps": self.overlaps,
    }

  def _ratios(self, other: "Row") -> list[float]:
    pairs = zip(self.rates, other.rates, strict=True)
    return [mine / its for mine, its in pairs]


class FixedSpeed(keras.layers.Layer):
  """Layer that occupies a device for a fixed time per example.

  The backward pass takes twice as long as the forward pass.
  """

  def __init__(self, device: threading.Lock, **kwargs):
    super().__init__(**kwargs)
    self._device = device

  def build(self, input_shape):
    self.scale = self.add_weight(shape=[], initializer="ones")

  def call(self, x):
    @tf.custom_gradient
    def work(x):
      def gradient(upstream):
        return self._occupy(upstream, 2 * _SECS_PER_EXAMPLE)

      return self._occupy(x, _SECS_PER_EXAMPLE), gradient

    return work(x * self.scale)

  def _occupy(self, x, secs):
    def sleep(x):
      with self._device:
        time.sleep(secs * len(x))
      return x

    # Two stateful ops of one function would never run at once.
    y = tf.numpy_function(sleep, [x], x.dtype, stateful=False)
    return tf.ensure_shape(y, x.shape)


def cifar10_row(name: str, layers: dict[str, int], micro_batches: int) -> Row:
  """Makes a row that really computes gradients of the CIFAR-10 network.

  If the network is split but not pipelined, it prints where the layers are.

  Args:
    name: The name of the row.
    layers: Maps patterns of layer names to device numbers.
    micro_batches: The number of parts of the batch; 1: not pipelined.
  """
  model = model_lib.build()
  paths = [v.path for v in model.trainable_variables]

  def loss_fn(parameters, images, labels):
    named = dict(zip(paths, parameters, strict=True))
    return model_lib.total_loss(model, named, images, labels)[0]

  random = np.random.default_rng(0)
  images = random.normal(size=[FLAGS.batch_size, 24, 24, 3])
  labels = random.integers(0, 10, [FLAGS.batch_size], "int32")
  replica = _replica(model, loss_fn, layers, micro_batches)
  if micro_batches == 1 and layers:
    print(replica.layers.table(replica.devices), end="\n\n")
  return Row(name, replica, [images.astype("float32"), labels], FLAGS.steps)


def fixed_speed_row(name: str, num_devices: int, micro_batches: int) -> Row:
  """Makes a row with emulated devices of a fixed speed, which sleep.

  Args:
    name: The name of the row.
    num_devices: The number of devices, with equally many layers on each.
    micro_batches: The number of parts of the batch; 1: not pipelined.
  """
  locks = [threading.Lock() for _ in range(num_devices)]
  x = inputs = keras.Input([1])
  for number, lock in enumerate(locks):
    for i in range(_FIXED_LAYERS_PER_DEVICE):
      x = FixedSpeed(lock, name=f"on{number}_{i}")(x)
  model = keras.Model(inputs, x)

  def loss_fn(parameters, x):
    outputs, _ = model.stateless_call(parameters, [], x)
    return tf.reduce_mean(tf.square(outputs))

  layers = {f"on{number}_*": number for number in range(num_devices)}
  replica = _replica(model, loss_fn, layers, micro_batches)
  return Row(name, replica, [np.ones([_FIXED_EXAMPLES, 1], "float32")], 1)


def _replica(model, loss_fn, layers, micro_batches):
  placed = model_parallel.place_layers(model, layers)
  return model_replica.Replica(
    model.trainable_variables,
    loss_fn,
    lambda *_: None,
    [f"/device:CPU:{i}" for i in range(placed.num_devices)],
    layers=placed,
    micro_batches=micro_batches,
  )


def compare_cifar10(
  layers: dict[str, int], micro_batches: list[int]
) -> dict[str, dict]:
  """Measures and prints the first table.

  Args:
    layers: The device of each layer; those before it are on the same device.
    micro_batches: The numbers of parts of the batch.

  Returns:
    For each row the ratio to the first row, and the rates.
  """
  rows = [cifar10_row("unsplit", {}, 1)]
  for number in micro_batches:
    name = "split" if number == 1 else f"pipelined, {number} parts"
    rows.append(cifar10_row(name, layers, number))
  for _ in range(FLAGS.rounds):
    for row in rows:
      row.measure()
      row.measure_overlap()
  print(f"{'':20}{'examples/sec':>14}{'ratio':>22}{'cores':>8}{'overlap':>9}")
  for row in rows:
    print(
      f"{row.name:20}{statistics.median(row.rates):>14.0f}"
      f"{row.ratio(rows[0]):>22}{statistics.median(row.cores):>8.2f}"
      f"{statistics.median(row.overlaps):>9.0%}"
    )
  return {row.name: row.results(rows[0]) for row in rows}


def compare_fixed_speed(micro_batches: list[int]) -> dict[str, dict]:
  """Measures and prints the second table.

  Args:
    micro_batches: The numbers of parts of the batch.

  Returns:
    For each row the ratio to the first row of its devices, and the rates.
  """
  found = {}
  print(f"\n{'fixed speed':20}{'ratio':>22}{'at most':>9}")
  for devices in range(2, _MAX_DEVICES + 1):
    rows = [
      fixed_speed_row(f"{devices} devices, {number} parts", devices, number)
      for number in sorted({1, *micro_batches})
    ]
    for _ in range(FLAGS.rounds):
      for row in rows:
        row.measure()
    for number, row in zip(sorted({1, *micro_batches}), rows, strict=True):
      most = number * devices / (number + devices - 1)
      print(f"{row.name:20}{row.ratio(rows[0]):>22}{most:>9.2f}")
      found[row.name] = {**row.results(rows[0]), "at_most": most}
  return found


def main(argv: list[str]) -> None:
  del argv
  layers = json.loads(FLAGS.layers)
  micro_batches = [int(number) for number in FLAGS.micro_batches]
  cpu = tf.config.list_physical_devices("CPU")[0]
  logical = [tf.config.LogicalDeviceConfiguration()] * _MAX_DEVICES
  tf.config.set_logical_device_configuration(cpu, logical)
  tf.config.threading.set_intra_op_parallelism_threads(1)
  # Those that sleep, or wait for a device that does, need one each.
  tf.config.threading.set_inter_op_parallelism_threads(32)
  results = {
    "cifar10": compare_cifar10(layers, micro_batches),
    "fixed_speed": compare_fixed_speed(micro_batches),
  }
  stored.write(FLAGS.output, results)


if __name__ == "__main__":
  app.run(main)
