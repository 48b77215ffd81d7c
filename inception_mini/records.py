"""Reads and writes TFRecords of labeled images, in the TF1 program's format.

A shard is one of the files of a data set, with a name such as
`train-00000-of-00128`. Each record of it is a `tf.train.Example` with the
feature keys of the TF1 program (`build_imagenet_data`, `image_processing`), so
ImageNet files made for that program can be used. Labels start at 1; 0 is
reserved for a background class.
"""

import os
import re
import struct
from collections.abc import Sequence
from typing import BinaryIO
from typing import NamedTuple

import tensorflow as tf
from google.protobuf import message

from tf_replicas.programs import tfds_builder

DataError = tfds_builder.DataError

TRAIN = "train"
VALIDATION = "validation"
LABELS_FILE = "labels.txt"

ENCODED = "image/encoded"
FORMAT = "image/format"
HEIGHT = "image/height"
WIDTH = "image/width"
COLORSPACE = "image/colorspace"
CHANNELS = "image/channels"
FILENAME = "image/filename"
LABEL = "image/class/label"
TEXT = "image/class/text"
SYNSET = "image/class/synset"
BOX_LABEL = "image/object/bbox/label"
# In the order that TensorFlow's image ops want.
BOX_EDGES = tuple(
  f"image/object/bbox/{edge}" for edge in ("ymin", "xmin", "ymax", "xmax")
)

# A record consists of its length, a checksum of the length, the data, and a
# checksum of the data.
_LENGTH = struct.Struct("<Q")
_BEFORE_DATA = _LENGTH.size + 4
_AROUND_DATA = _BEFORE_DATA + 4


class Stored(NamedTuple):
  """The features of a stored example that training uses.

  The image is not decoded yet.

  Attributes:
    encoded: The bytes of a JPEG or PNG file, a scalar string.
    label: The label, an int64 scalar.
    boxes: The bounding boxes of N objects, float32 `[N, 4]`: top, left, bottom
      and right edge in fractions of the image's height or width.
  """

  encoded: tf.Tensor
  label: tf.Tensor
  boxes: tf.Tensor


def shard_name(subset: str, index: int, num_shards: int) -> str:
  """Returns the file name of a shard, one of the files of a data set.

  Args:
    subset: `train` or `validation`.
    index: The index of the shard, from 0 on.
    num_shards: The number of shards of the subset.
  """
  return f"{subset}-{index:05d}-of-{num_shards:05d}"


def find_shards(data_dir: str, subset: str) -> list[str]:
  """Lists the paths of all shards (TFRecord files) of a subset, in order.

  Args:
    data_dir: Directory of the shards.
    subset: `train` or `validation`.

  Raises:
    DataError: If there are no shards, some are missing, or the file names
      disagree about the number of shards.
  """
  pattern = re.compile(re.escape(subset) + r"-\d{5}-of-(\d{5})")
  try:
    found = {f: m for f in os.listdir(data_dir) if (m := pattern.fullmatch(f))}
  except OSError as error:
    raise DataError(
      f"`data_dir` must be a directory of TFRecord shards. Received: "
      f"{data_dir!r}, {error.strerror}."
    ) from None
  totals = {int(match[1]) for match in found.values()}
  if len(totals) != 1:
    what = "none" if not totals else f"sets of {sorted(totals)} shards"
    raise DataError(
      f"{data_dir} must hold one set of shards such as "
      f"{shard_name(subset, 0, 2)}. Received: {what}."
    )
  (total,) = totals
  names = [shard_name(subset, i, total) for i in range(total)]
  missing = [name for name in names if name not in found]
  if missing:
    raise DataError(
      f"{data_dir} must hold all {total} {subset} shards. Received: "
      f"{len(missing)} are missing; the first is {missing[0]}."
    )
  return [os.path.join(data_dir, name) for name in names]


def count_records(path: str) -> int:
  """Counts the records of a TFRecord file, and checks the first one.

  It reads the lengths of all records, but only the contents of the first.

  Args:
    path: The path of the file.

  Returns:
    The number of records.

  Raises:
    DataError: If the file cannot be read or ends inside a record, or if its
      first record is not a `tf.train.Example` of an image with a label.
  """
  try:
    size = os.path.getsize(path)
    # Unbuffered: a buffer's worth would be read at each record.
    with open(path, "rb", buffering=0) as file:
      position = count = 0
      while position < size:
        file.seek(position)
        length = file.read(_LENGTH.size)
        if len(length) < _LENGTH.size:
          break
        if not count:
          _check_example(file, _LENGTH.unpack(length)[0], path)
        position += _AROUND_DATA + _LENGTH.unpack(length)[0]
        count += 1
  except OSError as error:
    raise DataError(f"{path} cannot be read: {error.strerror}.") from None
  if position != size:
    raise DataError(
      f"{path} must consist of whole TFRecords. Received: it ends inside "
      f"record {count}."
    )
  return count


def _check_example(file: BinaryIO, length: int, path: str) -> None:
  """Checks that the first record of a file is an example of a labeled image.

  Args:
    file: The open file. Its position changes.
    length: The number of bytes of the record's data, as the file says. If the
      file is shorter, nothing is checked.
    path: The path of the file.

  Raises:
    DataError: If the record is something else.
  """
  if length > os.path.getsize(path):
    return  # The caller finds that the file ends inside the record.
  file.seek(_BEFORE_DATA)
  if not _is_labeled_image(file.read(length)):
    raise DataError(
      f"{path} must hold `tf.train.Example`s with {ENCODED} and {LABEL}."
      " Received: another first record."
    )


def _is_labeled_image(serialized: bytes) -> bool:
  """Returns whether `parse` can parse a record.

  It runs no TensorFlow op, which would initialize the devices before the
  program has chosen its GPUs.

  Args:
    serialized: The record.
  """
  try:
    feature = tf.train.Example.FromString(serialized).features.feature
  except message.DecodeError:
    return False
  edges = [feature[key] for key in BOX_EDGES]
  return (
    len(feature[ENCODED].bytes_list.value) == 1
    and len(feature[LABEL].int64_list.value) == 1
    and {e.WhichOneof("kind") for e in edges} <= {None, "float_list"}
    and len({len(e.float_list.value) for e in edges}) == 1
  )


def read_labels(path: str) -> list[str]:
  """Reads the names of labels from a text file with one label per line.

  The first line names label 1.

  Raises:
    DataError: If the file cannot be read, is empty or names a label twice.
  """
  try:
    with open(path, encoding="utf-8") as file:
      labels = [line.strip() for line in file if line.strip()]
  except (OSError, UnicodeDecodeError) as error:
    raise DataError(f"{path} cannot be read: {error}.") from None
  twice = sorted({label for label in labels if labels.count(label) > 1})
  if not labels or twice:
    raise DataError(
      f"{path} must name every label once, one in a line. Received: "
      f"{repr(twice[0]) + ' twice' if twice else 'no label'}."
    )
  return labels


def serialize(
  encoded: bytes,
  *,
  file_format: str,
  height: int,
  width: int,
  label: int,
  text: str,
  filename: str,
  boxes: Sequence[Sequence] = (),
  synset: str = "",
) -> bytes:
  """Makes the record of an image: a serialized `tf.train.Example`.

  Args:
    encoded: The bytes of the image file.
    file_format: `JPEG` or `PNG`.
    height: Height in pixels.
    width: Width in pixels.
    label: Number of the label, from 1 on.
    text: Name of the label.
    filename: Name of the image file, without directory.
    boxes: The bounding boxes of objects, each as top, left, bottom and right
      edge in fractions of the image's height or width. Further elements of a
      box are ignored.
    synset: The identifier of the class in ImageNet; empty for other images.
  """

  def integers(*values):
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))

  def strings(*values):
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))

  def floats(values):
    return tf.train.Feature(float_list=tf.train.FloatList(value=values))

  feature = {
    HEIGHT: integers(height),
    WIDTH: integers(width),
    COLORSPACE: strings(b"RGB"),
    CHANNELS: integers(3),
    LABEL: integers(label),
    TEXT: strings(text.encode(errors="surrogateescape")),
    FORMAT: strings(file_format.encode()),
    FILENAME: strings(filename.encode(errors="surrogateescape")),
    ENCODED: strings(encoded),
    BOX_LABEL: integers(*[label] * len(boxes)),
  }
  if synset:
    feature[SYNSET] = strings(synset.encode())
  for i, key in enumerate(BOX_EDGES):
    feature[key] = floats([box[i] for box in boxes])
  features = tf.train.Features(feature=feature)
  return tf.train.Example(features=features).SerializeToString()


def parse(serialized: tf.Tensor | bytes) -> Stored:
  """Parses a record, and returns the features that training uses.

  Args:
    serialized: The record, a scalar string with a `tf.train.Example`.

  Raises:
    tf.errors.InvalidArgumentError: If it is not a `tf.train.Example`, or has no
      image or no label.
  """
  features = {
    ENCODED: tf.io.FixedLenFeature([], tf.string),
    LABEL: tf.io.FixedLenFeature([], tf.int64),
    **{key: tf.io.VarLenFeature(tf.float32) for key in BOX_EDGES},
  }
  values = tf.io.parse_single_example(serialized, features)
  edges = [tf.sparse.to_dense(values[key]) for key in BOX_EDGES]
  return Stored(values[ENCODED], values[LABEL], tf.stack(edges, axis=-1))
