"""Finds images: CIFAR-10 files, TensorFlow Datasets, or synthetic images.

A launcher checks the data without TensorFlow, which takes seconds to import.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cifar10 import config
from cifar10 import synthetic
from tf_replicas.programs import tfds_builder

if TYPE_CHECKING:
  import tensorflow as tf

RECORDS_PER_FILE = 10_000
RECORD_BYTES = 1 + 3 * config.RECORD_SIZE**2
TRAIN_FILES = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
TEST_FILES = ("test_batch.bin",)
SUBDIRECTORY = "cifar-10-batches-bin"

DataError = tfds_builder.DataError
NotPreparedError = tfds_builder.NotPreparedError

_IMAGE_SHAPE = (config.RECORD_SIZE, config.RECORD_SIZE, 3)


@dataclasses.dataclass(frozen=True)
class Source:
  """A training set and a test set of images, which are read when needed.

  Attributes:
    name: Name of the data set, as passed to `find`.
    num_train: Number of training examples.
    num_test: Number of test examples.
    read: Maps `train` or `test` to all images, uint8 `[N, 32, 32, 3]`, and
      labels, int64 `[N]`, of that set. The function uses TensorFlow ops only,
      so that inside a graph the machine that runs the graph does the reading.
  """

  name: str
  num_train: int
  num_test: int
  read: Callable[[str], tuple[tf.Tensor, tf.Tensor]]


def find(
  dataset: str, data_dir: str | None = None, *, download: bool = True
) -> Source:
  """Finds a data set of images by its name, and checks it.

  `cifar10` is read in the official binary layout if `data_dir`, or its
  subdirectory `cifar-10-batches-bin`, holds any file of that layout. All other
  data sets except `synthetic` are left to TensorFlow Datasets.

  Args:
    dataset: `cifar10`, `synthetic`, or another TensorFlow data set with
      features `image` (32x32x3) and `label` (10 classes).
    data_dir: Directory to look in; None is the default of TensorFlow Datasets.
    download: Whether TensorFlow Datasets may download a missing data set.

  Returns:
    The data set. Examples are read only when its `read` is called.

  Raises:
    DataError: If there is no such data set, it cannot be loaded, or a file is
      invalid.
  """
  if dataset == "synthetic":
    return Source(
      dataset, synthetic.NUM_TRAIN, synthetic.NUM_TEST, synthetic.read
    )
  # Absolute, because a remote worker may run in another directory.
  data_dir = os.path.abspath(os.path.expanduser(data_dir)) if data_dir else None
  if dataset == "cifar10" and data_dir:
    for directory in (data_dir, os.path.join(data_dir, SUBDIRECTORY)):
      paths = [os.path.join(directory, f) for f in TRAIN_FILES + TEST_FILES]
      if any(os.path.exists(path) for path in paths):
        return _record_files(dataset, paths)
  return _tensorflow_dataset(dataset, data_dir, download)


def decode_records(contents: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """Decodes records of CIFAR-10's official binary layout.

  A record is a byte with the label and then 1024 bytes of red, 1024 of green
  and 1024 of blue, each row by row.

  Args:
    contents: The contents of a file: a scalar string of whole records.

  Returns:
    Images, uint8 `[N, 32, 32, 3]`, and labels, int64 `[N]`.
  """
  import tensorflow as tf

  records = tf.reshape(tf.io.decode_raw(contents, tf.uint8), [-1, RECORD_BYTES])
  planes = tf.reshape(records[:, 1:], [-1, 3, *_IMAGE_SHAPE[:2]])
  return tf.transpose(planes, [0, 2, 3, 1]), tf.cast(records[:, 0], tf.int64)


def _record_files(name: str, paths: Sequence[str]) -> Source:
  for path in paths:
    _check_records(path)
  splits = {
    "train": paths[: len(TRAIN_FILES)],
    "test": paths[len(TRAIN_FILES) :],
  }

  def read(split):
    import tensorflow as tf

    parts = [decode_records(tf.io.read_file(path)) for path in splits[split]]
    images, labels = zip(*parts, strict=True)
    return tf.concat(images, 0), tf.concat(labels, 0)

  return Source(
    name,
    RECORDS_PER_FILE * len(splits["train"]),
    RECORDS_PER_FILE * len(splits["test"]),
    read,
  )


def _check_records(path: str) -> None:
  """Checks that a CIFAR-10 file has the right size and no label above 9.

  Raises:
    DataError: If the size is wrong, or a label is above 9.
  """
  expected = RECORDS_PER_FILE * RECORD_BYTES
  if not os.path.exists(path):
    raise DataError(
      f"`{path}` must be a file of {expected} bytes, as other files of the "
      "binary CIFAR-10 layout lie beside it. Received: no such file."
    )
  size = os.path.getsize(path)
  if size != expected:
    raise DataError(
      f"`{path}` must hold {RECORDS_PER_FILE} records of {RECORD_BYTES} "
      f"bytes, {expected} in all. Received: {size} bytes."
    )
  try:
    labels = np.memmap(path, np.uint8, "r")[::RECORD_BYTES]
  except OSError as error:
    raise DataError(f"`{path}` cannot be read: {error.strerror}.") from error
  wrong = np.flatnonzero(labels >= config.NUM_CLASSES)
  if wrong.size:
    raise DataError(
      f"The label of record {wrong[0]} of `{path}` must be in [0, "
      f"{config.NUM_CLASSES - 1}]. Received: {labels[wrong[0]]}."
    )


def _tensorflow_dataset(
  name: str, data_dir: str | None, download: bool
) -> Source:
  builder = tfds_builder.builder(
    name,
    data_dir,
    download=download,
    others="cifar10, synthetic",
    advice=(
      f"Give a `data_dir` that holds {TRAIN_FILES[0]} to {TRAIN_FILES[-1]} and"
      f" {TEST_FILES[0]} (or {SUBDIRECTORY} with them), or one that TensorFlow"
      " Datasets has prepared."
    ),
  )
  _check_features(name, builder.info)

  def read(split):
    import tensorflow as tf

    data = builder.as_dataset(split=split, batch_size=-1, shuffle_files=False)
    return data["image"], tf.cast(data["label"], tf.int64)

  splits = builder.info.splits
  return Source(
    name, splits["train"].num_examples, splits["test"].num_examples, read
  )


def _check_features(name: str, info) -> None:
  """Checks the features and splits of a data set before it is read.

  Images must be 32x32x3, labels must have 10 classes, and there must be a
  training and a test split.

  Args:
    name: The name of the data set.
    info: Its description by TensorFlow Datasets.

  Raises:
    DataError: If a feature is missing or different, or a split is missing.
  """
  features = dict(info.features.items())
  image, label = features.get("image"), features.get("label")
  if image is None or image.shape != _IMAGE_SHAPE:
    raise DataError(
      f"`image` of data set {name!r} must have shape {_IMAGE_SHAPE}. "
      f"Received: {getattr(image, 'shape', None)}."
    )
  classes = getattr(label, "num_classes", None)
  if classes != config.NUM_CLASSES:
    raise DataError(
      f"`label` of data set {name!r} must have {config.NUM_CLASSES} classes. "
      f"Received: {classes}."
    )
  for split in ("train", "test"):
    if split not in info.splits or not info.splits[split].num_examples:
      raise DataError(
        f"Data set {name!r} must have examples in split {split!r}. "
        f"Received splits: {', '.join(info.splits)}."
      )
