"""Packs the fields of a `NamedTuple` into one tensor.

Every tensor sent to another task is a remote procedure call, so scalars that
belong together are sent as one vector. A `Layout` knows the position and dtype
of every field in the vector. No other code uses these positions.
"""

import itertools
from collections.abc import Sequence
from typing import Annotated
from typing import cast
from typing import Generic
from typing import get_type_hints
from typing import NamedTuple
from typing import TypeVar

import numpy as np
import tensorflow as tf

R = TypeVar("R", bound=tuple)


# Types of fields: scalars, and the dtype with which they are unpacked.
Int = Annotated[tf.Tensor | int, tf.int64]
Float = Annotated[tf.Tensor | float, tf.float64]


class _Field(NamedTuple):
  dtype: tf.DType
  size: int | None  # None for a scalar, else the length of a vector.


class Layout(Generic[R]):
  """Packs a record (a `NamedTuple` of tensors) into a vector, and unpacks it.

  Attributes:
    dtype: The dtype of the vector. It must represent the values of all fields
      exactly; float64 does so for integers up to 2^53, such as microseconds
      since 1970.
    size: The length of the vector.
  """

  def __init__(self, record: type[R], dtype: tf.DType, **sizes: int):
    """Decides where each field of a record is in the vector.

    Args:
      record: A `NamedTuple` class, each of whose fields is annotated with its
        dtype, such as `Int` or `Annotated[tf.Tensor, tf.bool]`.
      dtype: The dtype of the vector.
      **sizes: The lengths of the fields that are vectors. All other fields are
        scalars.
    """
    self.dtype = dtype
    self._record = record
    hints = get_type_hints(record, include_extras=True)
    self._fields = [
      _Field(hint.__metadata__[0], sizes.get(name))
      for name, hint in hints.items()
    ]
    self.size = sum(field.size or 1 for field in self._fields)

  def pack(self, record: R) -> tf.Tensor:
    """Packs all fields of a record into one vector, on the current device.

    Args:
      record: A record of tensors or numbers.

    Returns:
      A tensor of `dtype` and shape [size].
    """
    parts: list[tf.Tensor] = []
    scalars: list[tf.Tensor] = []

    def end_scalars() -> None:
      if scalars:
        parts.append(tf.stack(scalars))
        scalars.clear()

    for field, value in zip(self._fields, record, strict=True):
      value = tf.cast(value, self.dtype)
      if field.size is None:
        scalars.append(value)
      else:
        end_scalars()
        parts.append(tf.ensure_shape(value, [field.size]))
    end_scalars()
    return parts[0] if len(parts) == 1 else tf.concat(parts, axis=0)

  def unpack(self, vector: tf.Tensor) -> R:
    """Splits a vector that `pack` has made into the fields of a record.

    Args:
      vector: A tensor of `dtype` and shape [size].

    Returns:
      A record of tensors of the fields' dtypes.
    """
    values: list[tf.Tensor] = []
    begin = 0
    for size, run in itertools.groupby(field.size for field in self._fields):
      count = len(list(run))
      if size is None:  # One op for all scalars of the run.
        end = begin + count
        part = vector if count == self.size else vector[begin:end]
        values += cast(list, tf.unstack(part, num=count))
        begin = end
        continue
      for _ in range(count):
        values.append(vector[begin : begin + size])
        begin += size
    fields: list = [
      tf.cast(value, field.dtype)
      for value, field in zip(values, self._fields, strict=True)
    ]
    return self._record(*fields)

  def unpack_rows(self, rows: np.ndarray) -> list[R]:
    """Splits each row of an array into the fields of a record.

    Args:
      rows: An array of shape [n, size], whose rows are packed records.

    Returns:
      n records. A scalar field is a Python number, a vector field an array.
    """
    return [self._unpack_row(row) for row in rows]

  def _unpack_row(self, row: Sequence[float]) -> R:
    values: list[float | np.ndarray] = []
    begin = 0
    for field in self._fields:
      end = begin + (field.size or 1)
      value = np.asarray(row[begin:end]).astype(field.dtype.as_numpy_dtype)
      values.append(value if field.size is not None else value[0].item())
      begin = end
    return self._record(*values)
