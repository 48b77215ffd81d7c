"""Writes and reads tensors of many rows in blocks of rows.

So a tensor that is too large for this process is never whole in its memory. The
files have the format of a TensorFlow checkpoint, whose tensors are stored in
slices. Any rows can be read, not only the blocks that were written.

A tensor may also be stored in *strides*: if it has P of them, stride p has the
rows p, p + P, p + 2P and so on, under the name `<name>.stride_<p>_of_<P>`. Each
of P processes can then write its stride in blocks.
"""

import contextlib
import functools
import glob
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from concurrent import futures
from typing import Any
from typing import NamedTuple
from typing import Protocol

import numpy as np
import tensorflow as tf

from tf_replicas.runtime import local_session
from tf_replicas.runtime import resources

# How names of directories begin that hold unfinished files.
UNFINISHED = ".rows-"
# The key under which a checkpoint says which object has which variables.
OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_BLOCK_BYTES = 32 << 20
_STRIDE = re.compile(r"(.*)\.stride_\d+_of_(\d+)", re.DOTALL)


class Entry(NamedTuple):
  """Describes a tensor in a file.

  Attributes:
    shape: The shape of the whole tensor.
    dtype: The dtype of the tensor.
    num_strides: The number of strides in which its rows are stored.
  """

  shape: tuple[int, ...]
  dtype: tf.DType
  num_strides: int = 1


class Source(Protocol):
  """Interface of a tensor that is read in blocks of rows.

  Attributes:
    shape: The shape of the whole tensor.
    dtype: The dtype of the tensor.
  """

  shape: tuple[int, ...]
  dtype: tf.DType

  def read(self, begin: int, end: int) -> np.ndarray | tf.Tensor:
    """Returns the rows of the tensor from `begin` to `end`, exclusive."""
    ...


def blocks(shape: Sequence[int], dtype: tf.DType) -> Iterator[tuple[int, int]]:
  """Divides the rows of a tensor into blocks of at most 32 MiB.

  A row that is larger is a block by itself.

  Args:
    shape: The shape of the whole tensor.
    dtype: The dtype of the tensor.

  Yields:
    The (first row, row after the last) of each block, in order.
  """
  row_bytes = max(1, math.prod(shape[1:]) * dtype.size)
  count = max(1, _BLOCK_BYTES // row_bytes)
  for begin in range(0, shape[0], count):
    yield begin, min(begin + count, shape[0])


def stride_name(name: str, number: int, count: int) -> str:
  """Returns the name under which one stride of a tensor is stored.

  Args:
    name: The name of the tensor.
    number: The index of the first row of the stride.
    count: The number of strides.
  """
  return f"{name}.stride_{number}_of_{count}"


def slice_of(shape: Sequence[int], begin: int, end: int) -> str:
  """Returns the text by which TensorFlow's checkpoint ops name a tensor's rows.

  Args:
    shape: The shape of the whole tensor.
    begin: The first row.
    end: The row after the last.

  Returns:
    Text such as "10 4 0,5:-": rows 0 to 4 of a tensor of shape [10, 4].
  """
  rest = ":".join(["-"] * (len(shape) - 1))
  sizes = " ".join(map(str, shape))
  return f"{sizes} {begin},{end - begin}" + (f":{rest}" if rest else "")


def save(
  path: str | tf.Tensor,
  name: str | tf.Tensor,
  place: str | tf.Tensor,
  rows: tf.Tensor | np.ndarray,
) -> tf.Operation | None:
  """Writes some consecutive rows of a tensor to a file.

  Inside a `tf.function`, it returns an op on the current device, which runs
  only if a result of the function depends on it. Otherwise this process writes
  the file.

  Args:
    path: The path of the file, without an extension.
    name: The name of the tensor.
    place: Which rows they are, as `slice_of` says it.
    rows: The rows.
  """

  def write_rows(rows: Any) -> Any:
    return tf.raw_ops.SaveV2(
      prefix=path, tensor_names=[name], shape_and_slices=[place], tensors=[rows]
    )

  if tf.executing_eagerly():
    return local_session.run(write_rows, rows)
  return write_rows(rows)


def save_whole(path: str, values: Mapping[str, Any]) -> None:
  """Writes tensors that are not divided into blocks to a file.

  Args:
    path: The path of the file, without an extension.
    values: The tensors by name: numbers or strings of any shape.
  """

  def write_tensors(*tensors: tf.Tensor) -> tf.Operation:
    return tf.raw_ops.SaveV2(
      prefix=path,
      tensor_names=[*values],
      shape_and_slices=[""] * len(values),
      tensors=tensors,
    )

  local_session.run(write_tensors, *values.values())


def local_writers(
  tensors: Mapping[str, Source],
) -> Iterator[Callable[[str], object]]:
  """Yields functions for `write` that read tensors in blocks, and write these.

  Args:
    tensors: The tensors by name.
  """

  def copy(name: str, begin: int, end: int, path: str) -> None:
    tensor = tensors[name]
    place = slice_of(tensor.shape, begin, end)
    save(path, name, place, tensor.read(begin, end))

  for name, tensor in tensors.items():
    for begin, end in blocks(tensor.shape, tensor.dtype):
      yield functools.partial(copy, name, begin, end)


def write(
  prefix: str,
  writers: Iterable[Callable[[str], object]],
  *,
  num_threads: int = 1,
) -> None:
  """Writes tensors, block by block; the files appear when all are complete.

  Files of the same prefix are removed first, since they may be more than the
  new ones.

  Args:
    prefix: The path of the files without their extensions.
    writers: Functions that each write some rows by `save`, or tensors by
      `save_whole`, to the path that is their argument. Together they must write
      each row of a tensor once.
    num_threads: The number of functions that are called at the same time.

  Raises:
    FileNotFoundError: If a function has written nothing that this process sees.
  """
  directory = os.path.dirname(os.path.abspath(prefix))
  folder = tempfile.mkdtemp(prefix=UNFINISHED, dir=directory)
  # Processes of other users may have to write to it too.
  os.chmod(folder, os.stat(directory).st_mode & 0o777)

  def run(numbered: tuple[int, Callable[[str], object]]) -> str:
    number, writer = numbered
    path = os.path.join(folder, str(number))
    with tf.device(None), tf.device(resources.this_device()):
      writer(path)
    if not os.path.exists(path + ".index"):
      raise FileNotFoundError(
        f"{path}.index does not exist after it was written"
      )
    return path

  try:
    if num_threads == 1:
      written = list(map(run, enumerate(writers)))
    else:
      with futures.ThreadPoolExecutor(num_threads) as pool:
        written = list(pool.map(run, enumerate(writers)))
    remove(prefix)
    local_session.run(
      lambda: tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=written,
        destination_prefix=prefix,
        delete_old_dirs=False,
      )
    )
  finally:
    shutil.rmtree(folder, ignore_errors=True)


def remove(prefix: str) -> None:
  """Removes the files that `write` has made, if there are any.

  Args:
    prefix: The path of the files without their extensions.
  """
  for name in (prefix + ".index", *data_files(prefix)):
    with contextlib.suppress(FileNotFoundError):
      os.remove(name)


def data_files(prefix: str) -> list[str]:
  """Returns the paths of those files of a checkpoint that have the tensors.

  Args:
    prefix: The path of the files without their extensions.
  """
  return glob.glob(glob.escape(prefix) + ".data-?????-of-?????")


def shapes(prefix: str) -> dict[str, Entry]:
  """Returns the shape and dtype of each tensor in the files, by its name.

  Args:
    prefix: The path of the files without their extensions.

  Raises:
    tf.errors.OpError: If the files are missing or damaged.
  """
  reader = tf.train.load_checkpoint(prefix)
  dtypes = reader.get_variable_to_dtype_map()
  found = {}
  for stored, shape in reader.get_variable_to_shape_map().items():
    stride = _STRIDE.fullmatch(stored)
    name, count = (stride[1], int(stride[2])) if stride else (stored, 1)
    num_rows = found[name].shape[0] if name in found else 0
    whole = (num_rows + shape[0], *shape[1:])
    found[name] = Entry(whole, dtypes[stored], count)
  return found


def read(
  prefix: str, name: str, entry: Entry, begin: int, end: int
) -> np.ndarray | tf.Tensor:
  """Reads the rows from `begin` to `end`, exclusive, of a tensor in the files.

  Args:
    prefix: The path of the files without their extensions.
    name: The name of the tensor.
    entry: The description of the tensor, as `shapes` returns it.
    begin: The first row.
    end: The row after the last.

  Raises:
    tf.errors.OpError: If the files are missing or damaged.
  """
  count = entry.num_strides
  if count == 1:
    return _restore(
      prefix, name, slice_of(entry.shape, begin, end), entry.dtype
    )
  rows = np.empty((end - begin, *entry.shape[1:]), entry.dtype.as_numpy_dtype)
  for number in range(count):
    size = len(range(number, entry.shape[0], count))
    first, last = (max(0, -(-(row - number) // count)) for row in (begin, end))
    if first < last:
      place = slice_of((size, *entry.shape[1:]), first, last)
      stored = stride_name(name, number, count)
      rows[first * count + number - begin :: count] = _restore(
        prefix, stored, place, entry.dtype
      )
  return rows


def _restore(prefix: str, name: str, place: str, dtype: tf.DType) -> tf.Tensor:
  with tf.device(None), tf.device(resources.this_device()):
    (values,) = tf.raw_ops.RestoreV2(
      prefix=prefix,
      tensor_names=[name],
      shape_and_slices=[place],
      dtypes=[dtype],
    )
    return values
