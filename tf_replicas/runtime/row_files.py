"""Writes and reads tensors of many rows in blocks of rows.

So a tensor that is too large for this process is never whole in its memory. The
files have the format of a TensorFlow checkpoint, whose tensors are stored in
slices. Any rows can be read, not only the blocks that were written.
"""

import math
import os
import shutil
import tempfile
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple
from typing import Protocol

import numpy as np
import tensorflow as tf

from tf_replicas.runtime import resources

_BLOCK_BYTES = 32 << 20


class Entry(NamedTuple):
  """Describes a tensor in a file.

  Attributes:
    shape: The shape of the whole tensor.
    dtype: The dtype of the tensor.
  """

  shape: tuple[int, ...]
  dtype: tf.DType


class Block(NamedTuple):
  """Holds some consecutive rows of a tensor, to be written to a file.

  Attributes:
    name: The name of the tensor.
    shape: The shape of the whole tensor.
    begin: The index of the first row.
    values: The rows. Tensors are written without a further copy.
  """

  name: str
  shape: tuple[int, ...]
  begin: int
  values: np.ndarray | tf.Tensor


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


def blocks_of(tensors: Mapping[str, Source]) -> Iterator[Block]:
  """Reads tensors, given by name, in blocks of rows."""
  for name, tensor in tensors.items():
    for begin, end in blocks(tensor.shape, tensor.dtype):
      yield Block(name, tensor.shape, begin, tensor.read(begin, end))


def _slice(shape: Sequence[int], begin: int, end: int) -> str:
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


def write(
  prefix: str,
  parts: Iterable[Block],
  whole: Mapping[str, Any] | None = None,
) -> None:
  """Writes tensors, block by block; the files appear when all are complete.

  Args:
    prefix: The path of the files without their extensions.
    parts: The blocks. The blocks of a tensor must cover each of its rows once.
    whole: Further tensors by name, which are not divided into blocks: numbers
      or strings of any shape.
  """
  directory = os.path.dirname(prefix) or "."
  folder = tempfile.mkdtemp(prefix=".rows-", dir=directory)
  written = []
  try:
    with tf.device(None), tf.device(resources.this_device()):
      if whole:
        written.append(os.path.join(folder, "whole"))
        tf.raw_ops.SaveV2(
          prefix=written[-1],
          tensor_names=[*whole],
          shape_and_slices=[""] * len(whole),
          tensors=[tf.convert_to_tensor(value) for value in whole.values()],
        )
      for part in parts:
        written.append(os.path.join(folder, str(len(written))))
        end = part.begin + len(part.values)
        tf.raw_ops.SaveV2(
          prefix=written[-1],
          tensor_names=[part.name],
          shape_and_slices=[_slice(part.shape, part.begin, end)],
          tensors=[part.values],
        )
        del part  # Its memory, before the next block is read.
      tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=written,
        destination_prefix=prefix,
        delete_old_dirs=False,
      )
  finally:
    shutil.rmtree(folder, ignore_errors=True)


def shapes(prefix: str) -> dict[str, Entry]:
  """Returns the shape and dtype of each tensor in the files, by its name.

  Args:
    prefix: The path of the files without their extensions.

  Raises:
    tf.errors.OpError: If the files are missing or damaged.
  """
  reader = tf.train.load_checkpoint(prefix)
  dtypes = reader.get_variable_to_dtype_map()
  return {
    name: Entry(tuple(shape), dtypes[name])
    for name, shape in reader.get_variable_to_shape_map().items()
  }


def read(
  prefix: str, name: str, entry: Entry, begin: int, end: int
) -> tf.Tensor:
  """Reads the rows from `begin` to `end`, exclusive, of a tensor in the files.

  Args:
    prefix: The path of the files without their extensions.
    name: The name of the tensor.
    entry: The shape and dtype of the tensor, as `shapes` returns them.
    begin: The first row.
    end: The row after the last.

  Raises:
    tf.errors.OpError: If the files are missing or damaged.
  """
  with tf.device(None), tf.device(resources.this_device()):
    (values,) = tf.raw_ops.RestoreV2(
      prefix=prefix,
      tensor_names=[name],
      shape_and_slices=[_slice(entry.shape, begin, end)],
      dtypes=[entry.dtype],
    )
    return values
