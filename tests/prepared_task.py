"""Prepares a data set of its own, then chooses its devices; for a test.

python prepared_task.py DATA_DIR
"""

import sys

import grey  # noqa: F401, registers itself
import tensorflow as tf

from tf_replicas import devices
from tf_replicas import prepared_datasets


def main():
  found = prepared_datasets.builder(
    "grey", sys.argv[1], download=True, others="none", advice=""
  )
  devices.configure([0, 1], num_emulated=2)
  tf.config.threading.set_intra_op_parallelism_threads(1)
  images = found.as_dataset(split="train", batch_size=-1)["image"]
  print(sorted(images.numpy()[:, 0, 0, 0]), tf.config.list_logical_devices())


if __name__ == "__main__":
  main()
