"""Finds data sets: TFRecords, TensorFlow Datasets or synthetic images.

The examples of a data set are in several files, the shards.
"""

import concurrent.futures
import dataclasses
import os
import threading
from collections.abc import Callable
from collections.abc import Mapping
from typing import NamedTuple

import tensorflow as tf

from inception_mini import image_processing
from inception_mini import records
from inception_mini import synthetic
from tf_replicas.programs import tfds_builder

DataError = tfds_builder.DataError

# Files whose records are counted at a time.
_PARALLEL_COUNTS = 16
# A count that takes longer, as of ImageNet on a slow disk, prints a line.
_COUNTS_SILENTLY_SECS = 5.0


class Example(NamedTuple):
  """A labeled image, decoded.

  Attributes:
    image: The image, uint8 `[height, width, 3]`.
    label: The label, an int64 scalar.
    boxes: The bounding boxes of N objects, float32 `[N, 4]`: top, left, bottom
      and right edge in fractions of the image's height or width. N is 0 if the
      data set has no boxes.
  """

  image: tf.Tensor
  label: tf.Tensor
  boxes: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Source:
  """A data set of labeled images, for training and for validation.

  The examples are in several files, the shards, and are read when needed. A raw
  example is a stored image that is not decoded yet. `read` and `decode` use
  TensorFlow ops only, so the machine that runs the graph reads the files.

  Attributes:
    name: Name of the data set, as passed to `find`.
    num_classes: Number of classes, including a background class if there is
      one. Labels are in [0, num_classes). None if the files do not say.
    lengths: Maps each subset (`train`, `validation`) to a tuple with the number
      of examples in each of its shards.
    read: Maps a subset and the index of a shard (int64 scalar) to a
      `tf.data.Dataset` of raw examples, always in the same order.
    decode: Maps the components of a raw example to an `Example`.
  """

  name: str
  num_classes: int | None
  lengths: Mapping[str, tuple[int, ...]]
  read: Callable[[str, tf.Tensor], tf.data.Dataset]
  decode: Callable[..., Example]

  @property
  def num_train(self) -> int:
    """Number of training examples, in all shards (files) together."""
    return sum(self.lengths[records.TRAIN])

  @property
  def num_validation(self) -> int:
    """Number of validation examples, in all shards (files) together."""
    return sum(self.lengths[records.VALIDATION])


def find(
  dataset: str,
  data_dir: str | None = None,
  *,
  subsets: tuple[str, ...] = (records.TRAIN, records.VALIDATION),
  download: bool = True,
) -> Source:
  """Finds a data set of labeled images by its name, and checks it.

  Args:
    dataset: `records` (TFRecords in `data_dir`), `synthetic`, or the name of a
      data set of TensorFlow Datasets that has the features `image` and `label`.
      Validation uses the split `validation` of the latter, or `test` if there
      is no such split.
    data_dir: Directory of the data; required for `records`. None: the default
      directory of TensorFlow Datasets.
    subsets: The subsets (`train`, `validation`) that must exist.
    download: Whether TensorFlow Datasets may download a missing data set.

  Returns:
    The data set. Examples are read only when its `read` is called.

  Raises:
    DataError: If there is no such data set, it cannot be loaded, or a file is
      invalid.
  """
  # Absolute, because a remote worker may run in another directory.
  data_dir = os.path.abspath(os.path.expanduser(data_dir)) if data_dir else None
  if dataset == "synthetic":
    return _synthetic()
  if dataset == "records":
    return _records(data_dir, subsets)
  return _tensorflow_dataset(dataset, data_dir, subsets, download)


def _synthetic() -> Source:
  def read(subset, shard):
    data = tf.data.Dataset.from_tensors(shard)
    data = data.map(lambda shard: synthetic.read(subset, shard))
    return data.flat_map(
      lambda *arrays: tf.data.Dataset.from_tensor_slices(arrays)
    )

  def decode(image, label):
    return Example(image, label, tf.zeros([0, 4]))

  return Source(
    "synthetic", synthetic.NUM_CLASSES, synthetic.SHARDS, read, decode
  )


def _records(data_dir: str | None, subsets: tuple[str, ...]) -> Source:
  if not data_dir:
    raise DataError(
      "`data_dir` must be a directory of TFRecord shards for dataset "
      "'records'. Received: none."
    )
  paths = {s: records.find_shards(data_dir, s) for s in subsets}
  lengths = {s: _count(some) for s, some in paths.items()}
  labels_path = os.path.join(data_dir, records.LABELS_FILE)
  num_classes = None
  if os.path.exists(labels_path):
    num_classes = 1 + len(records.read_labels(labels_path))
  return Source(
    "records",
    num_classes,
    lengths,
    _reader(paths, lengths),
    _decode_record,
  )


def _count(paths: list[str]) -> tuple[int, ...]:
  line = f"counting the examples of {len(paths)} files like {paths[0]}"
  patience = threading.Timer(_COUNTS_SILENTLY_SECS, print, [line])
  patience.start()
  try:
    with concurrent.futures.ThreadPoolExecutor(_PARALLEL_COUNTS) as pool:
      lengths = tuple(pool.map(records.count_records, paths))
  finally:
    patience.cancel()
  if not sum(lengths):
    raise DataError(
      f"At least one of the {len(paths)} files like {paths[0]} must hold "
      "examples. Received: no examples."
    )
  return lengths


def _decode_record(serialized: tf.Tensor) -> Example:
  stored = records.parse(serialized)
  image = image_processing.decode(stored.encoded)
  return Example(image, stored.label, stored.boxes)


def _reader(
  paths: Mapping[str, list[str]], lengths: Mapping[str, tuple[int, ...]]
):
  def read(subset, shard):
    path = tf.gather(tf.constant(paths[subset]), shard)
    length = tf.gather(tf.constant(lengths[subset], tf.int64), shard)
    # TensorFlow's own error would not name the file. So reading stops at a
    # damaged record, and the element after it raises an error with the name.
    whole = tf.data.TFRecordDataset(path).ignore_errors(log_warning=True)
    beyond = tf.data.Dataset.from_tensors(path).map(_unreadable)
    # If the file cannot be opened, `ignore_errors` would never end. So opening
    # is tried first, without it.
    opened = tf.data.FixedLengthRecordDataset(path, 1).take(1)
    opened = opened.filter(lambda _: False)
    return opened.concatenate(whole).concatenate(beyond).take(length)

  return read


def _unreadable(path: tf.Tensor) -> tf.Tensor:
  """Returns a scalar that raises an error with a path when it is evaluated.

  It is put behind the records of a file in a dataset, and evaluated only if the
  file has fewer records than expected.

  Args:
    path: The path of the file, a scalar string.
  """
  message = "cannot be read to its end: a record is damaged or missing"
  with tf.control_dependencies([tf.debugging.Assert(False, [path, message])]):
    return tf.identity(path)


def _tensorflow_dataset(name, data_dir, subsets, download) -> Source:
  builder = tfds_builder.builder(
    name,
    data_dir,
    download=download,
    others="records, synthetic",
    advice="Give a `data_dir` that TensorFlow Datasets has prepared.",
  )
  import tensorflow_datasets as tfds

  info = builder.info
  num_classes = _num_classes(name, info)
  splits = {
    records.TRAIN: "train",
    records.VALIDATION: "validation" if "validation" in info.splits else "test",
  }
  paths, lengths = {}, {}
  for subset in subsets:
    split = info.splits.get(splits[subset])
    if split is None or not split.num_examples:
      raise DataError(
        f"Data set {name!r} must have examples in split "
        f"{splits[subset]!r}. Received splits: {', '.join(info.splits)}."
      )
    paths[subset] = [str(path) for path in split.filepaths]
    lengths[subset] = tuple(split.shard_lengths)
  if info.file_format != tfds.core.FileFormat.TFRECORD:
    raise DataError(
      f"Data set {name!r} must be prepared as TFRecords. Received: "
      f"{info.file_format.value}."
    )

  @tf.autograph.experimental.do_not_convert
  def decode(serialized):
    features = info.features.deserialize_example(
      serialized, decoders={"image": tfds.decode.SkipDecoding()}
    )
    return Example(
      image_processing.decode(features["image"]),
      tf.cast(features["label"], tf.int64),
      tf.zeros([0, 4]),
    )

  return Source(name, num_classes, lengths, _reader(paths, lengths), decode)


def _num_classes(name: str, info) -> int:
  """Checks the features of a data set, and returns its number of classes.

  Args:
    name: The name of the data set.
    info: The `DatasetInfo` of TensorFlow Datasets.

  Raises:
    DataError: If the data set has no feature `image` with images, or no feature
      `label` with classes.
  """
  features = dict(info.features.items())
  image, label = features.get("image"), features.get("label")
  shape = getattr(image, "shape", None)
  if shape is None or len(shape) != 3 or shape[-1] not in (1, 3, None):
    raise DataError(
      f"`image` of data set {name!r} must have shape (height, width, 3). "
      f"Received: {shape}."
    )
  classes = getattr(label, "num_classes", None)
  if classes is None:
    raise DataError(
      f"`label` of data set {name!r} must be one of several classes. "
      f"Received: {label!r}."
    )
  return classes
