"""Prepares a data set, and then configures TensorFlow's devices, for a test.

python prepared_task.py DATA_DIR
"""

import sys

import tensorflow as tf

from tests.support import grey  # noqa: F401, registers itself
from tf_replicas.programs import tfds_builder
from tf_replicas.runtime import devices


def main():
  found = tfds_builder.builder(
    "grey", sys.argv[1], download=True, others="none", advice=""
  )
  devices.configure([0, 1], num_emulated=2)
  tf.config.threading.set_intra_op_parallelism_threads(1)
  images = found.as_dataset(split="train", batch_size=-1)["image"]
  print(sorted(images.numpy()[:, 0, 0, 0]), tf.config.list_logical_devices())


if __name__ == "__main__":
  main()
