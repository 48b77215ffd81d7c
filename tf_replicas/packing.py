"""Small tensors travel together.

Every tensor that crosses from one task to another is a call of its own, which
costs as much as copying some hundred KiB. So small tensors of one dtype are
laid end to end before they leave, and cut apart where they arrive.
"""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

SMALL_BYTES = 64 << 10


class Item(NamedTuple):
  """A tensor that is to travel: its static shape and its dtype."""

  shape: tuple[int, ...]
  dtype: tf.DType

  @property
  def size(self) -> int:
    """How many elements it has."""
    return tf.TensorShape(self.shape).num_elements()


def groups(items: Sequence[Item]) -> list[list[int]]:
  """Which tensors travel together: positions in `items`, each once."""
  together: dict[tf.DType, list[int]] = {}
  alone = []
  for position, item in enumerate(items):
    if item.size * item.dtype.size > SMALL_BYTES:
      alone.append([position])
    else:
      together.setdefault(item.dtype, []).append(position)
  return [*together.values(), *alone]


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
  """One tensor for all of a group; on the current device."""
  if len(tensors) == 1:
    return tf.identity(tensors[0])
  return tf.concat([tf.reshape(t, [-1]) for t in tensors], axis=0)


def unpack(packed: tf.Tensor, items: Sequence[Item]) -> list[tf.Tensor]:
  """The tensors of a group again; on the current device."""
  if len(items) == 1:
    return [tf.ensure_shape(packed, items[0].shape)]
  parts = tf.split(packed, [item.size for item in items])
  return [
    tf.reshape(part, item.shape)
    for part, item in zip(parts, items, strict=True)
  ]
