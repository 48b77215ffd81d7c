"""Compares N replicas of B examples with one of N * B, under batch norm.

  python -m experiments.batch_norm_statistics [--data_dir=DIR]
    [--num_replicas=4] [--batch_size=16] [--output=FILE]

Claim: gradients and moving statistics are the same up to rounding if the
replicas synchronize the moments of batch normalization, and otherwise they
differ, since each replica normalizes by the moments of its own examples. For
one step, the program prints how far the gradients differ, and how far the
changes of the moving statistics do; each difference is a share of the length of
the vector for one replica. With `--output`, it stores them as JSON.
"""

import dataclasses
from collections.abc import Iterator
from collections.abc import Sequence

import numpy as np
from absl import flags

from benchmarks import stored
from inception_mini import config as config_lib
from inception_mini import workload
from tf_replicas.programs import command_line
from tf_replicas.programs import tfds_builder
from tf_replicas.runtime import processes

FLAGS = flags.FLAGS


def define_flags() -> None:
  """Defines the flags of this experiment; `--help` shows them."""
  flags.DEFINE_string(
    "data_dir",
    None,
    "The directory of the TFRecord files; by default the synthetic data set",
  )
  command_line.define_count("num_replicas", 4, "The number of replicas, N")
  command_line.define_count(
    "batch_size", 16, "The number of examples per replica, B"
  )
  flags.DEFINE_float(
    "width", 0.25, "By what all numbers of channels are multiplied"
  )
  flags.DEFINE_float(
    "depth", 0.25, "By what all numbers of blocks are multiplied"
  )
  flags.DEFINE_string("output", None, "The JSON file of the results")


def measure(
  config: config_lib.Config, num_replicas: int
) -> Iterator[tuple[str, float, float]]:
  """Compares several replicas with one, for each kind of batch norm statistics.

  Statistics are the moving means and variances. They are averaged over the
  replicas, or are those of the chief alone, or the moments of a batch are
  synchronized.

  Args:
    config: What is trained, without dropout. Its batch size is that of one
      replica.
    num_replicas: N, the number of replicas. Each computes on one device of this
      process.

  Yields:
    The kind of statistics, the distance of the gradients, and the distance of
    the changes of the statistics. Distances are shares of the length for one
    replica.
  """
  import tensorflow as tf

  devices = [f"/device:CPU:{number}" for number in range(num_replicas)]

  def compute(devices, batch, **settings):
    chosen = dataclasses.replace(config, **settings)
    replica = workload.make(chosen).replica_fn(devices)
    parameters = [tf.identity(v) for v in replica.shared]
    found = tf.function(replica.gradients)(parameters, batch).gradients
    count = len(replica.variables)
    return [
      np.concatenate([np.ravel(value) for value in part])
      for part in (found[:count], found[count:])
    ]

  whole = workload.make(
    dataclasses.replace(config, batch_size=config.batch_size * num_replicas)
  )
  batch = next(iter(whole.replica_fn([]).dataset_fn(1, 0, 0)))
  first = tuple(x[: config.batch_size] for x in batch)
  one = compute([], batch)
  mean = compute(devices, batch)

  def distances(many):
    for ours, theirs in zip(many, one, strict=True):
      yield float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))

  yield config_lib.MEAN, *distances(mean)
  # Gradients are averaged in any case.
  yield config_lib.CHIEF, *distances([mean[0], compute([], first)[1]])
  kind = config_lib.SYNCHRONIZED
  yield kind, *distances(compute(devices, batch, batch_norm_statistics=kind))


def main(argv: Sequence[str]) -> None:
  del argv
  with processes.importing_tensorflow():
    from tf_replicas.runtime import devices

  with processes.one_line_errors(usage=(ValueError, tfds_builder.DataError)):
    config = config_lib.from_recipe(
      "mini",
      dataset="records" if FLAGS.data_dir else "synthetic",
      data_dir=FLAGS.data_dir,
      batch_size=FLAGS.batch_size,
      width=FLAGS.width,
      depth=FLAGS.depth,
      num_classes=11,
      dropout=0.0,
    )
    devices.configure((), num_emulated=FLAGS.num_replicas)
    print(
      f"{FLAGS.num_replicas} x {FLAGS.batch_size} against 1 x"
      f" {FLAGS.num_replicas * FLAGS.batch_size}:"
    )
    distances = {}
    for kind, gradients, statistics in measure(config, FLAGS.num_replicas):
      print(
        f"{kind:12}  gradients {gradients:.1e}  statistics {statistics:.1e}",
        flush=True,
      )
      distances[kind] = {"gradients": gradients, "statistics": statistics}
    stored.write(FLAGS.output, {"distances": distances})


if __name__ == "__main__":
  define_flags()
  command_line.start(main)
