"""Packs small tensors into one, for transfers between tasks.

Every tensor sent to another task is a remote procedure call, which costs as
much as copying some hundred KiB. So the sender concatenates small tensors of
one dtype, and the receiver splits them. A pack has a limited size, since it can
be sent only when its last tensor is computed: the gradients of the last layers
are sent while those of the first layers are still being computed.
"""

import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import tensorflow as tf

from tf_replicas.runtime import control_flow
from tf_replicas.runtime import resources

SMALL_BYTES = 64 << 10
# The largest size of several tensors that are packed together.
GROUP_BYTES = 256 << 10
# How many groups are on their way at the same time if they are sent in order.
# With one, the network would be idle between two groups.
_AT_ONCE = 4


class Item(NamedTuple):
  """Describes a tensor to transfer to another task.

  Attributes:
    shape: The static shape of the tensor.
    dtype: The dtype in which the tensor is transferred.
  """

  shape: tuple[int, ...]
  dtype: tf.DType

  @property
  def size(self) -> int:
    """Number of elements of the tensor."""
    return tf.TensorShape(self.shape).num_elements()


def groups(items: Sequence[Item]) -> list[list[int]]:
  """Decides which tensors are packed together for a transfer.

  A tensor of more than `SMALL_BYTES` (64 KiB) is a group by itself. Smaller
  tensors of one dtype form groups of at most `GROUP_BYTES` (256 KiB), in the
  order of the tensors.

  Args:
    items: The tensors. Tensors that are computed one after another should be
      neighbors.

  Returns:
    One list per group, with the positions of its tensors in `items`. Every
    position is in one list. The groups are in the order of their first tensors.
  """
  found: list[list[int]] = []
  # The last group of each dtype, and its size.
  last: dict[tf.DType, tuple[list[int], int]] = {}
  for position, item in enumerate(items):
    num_bytes = item.size * item.dtype.size
    if num_bytes > SMALL_BYTES:
      found.append([position])
      continue
    group, size = last.get(item.dtype, ([], 0))
    if not group or size + num_bytes > GROUP_BYTES:
      group, size = [], 0
      found.append(group)
    group.append(position)
    last[item.dtype] = group, size + num_bytes
  return found


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
  """Concatenates the tensors of a group, on the current device.

  Args:
    tensors: One or more tensors of the same dtype.

  Returns:
    A vector with the elements of all tensors; for a single tensor, a copy in
    the tensor's own shape.
  """
  if len(tensors) == 1:
    return tf.identity(tensors[0])
  return tf.concat([tf.reshape(t, [-1]) for t in tensors], axis=0)


def unpack(packed: tf.Tensor, items: Sequence[Item]) -> list[tf.Tensor]:
  """Splits a packed tensor into the tensors that `pack` has concatenated.

  The ops are placed on the current device.

  Args:
    packed: The result of `pack`.
    items: The tensors that were packed, for their shapes.

  Returns:
    The tensors.
  """
  if len(items) == 1:
    return [tf.ensure_shape(packed, items[0].shape)]
  parts = tf.split(packed, [item.size for item in items])
  return [
    tf.reshape(part, item.shape)
    for part, item in zip(parts, items, strict=True)
  ]


class Bundle(NamedTuple):
  """A list of tensors, packed by `bundle` to be sent to another device.

  Attributes:
    packed: The tensors to send. If some tensors of the list were joined to a
      vector of bytes, this vector comes first.
    specs: The shape and dtype of each tensor of the list.
    together: The positions in the list of the tensors that were joined; empty
      if there are none. The vector begins with their sizes in bytes if one of
      the sizes is known only at run time.
  """

  packed: list[tf.Tensor]
  specs: list[tf.TensorSpec]
  together: list[int]

  def unpack(self, sent: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Undoes `bundle`, on the current device.

    Args:
      sent: Copies of `packed` on this device.

    Returns:
      The tensors that were passed to `bundle`.
    """
    if not self.together:
      return list(sent)
    tensors: dict[int, tf.Tensor] = {}
    joined, *alone = sent
    count = len(self.together)
    num_bytes: Any = [_num_bytes(self.specs[i]) for i in self.together]
    if None in num_bytes:
      begin = count * tf.int64.size
      header = tf.TensorSpec([count], tf.int64)
      num_bytes, joined = _from_bytes(joined[:begin], header), joined[begin:]
    parts = tf.split(joined, num_bytes, num=count)
    for i, part in zip(self.together, parts, strict=True):
      tensors[i] = _from_bytes(part, self.specs[i])
    rest = iter(alone)
    return [
      tensors[i] if i in tensors else next(rest) for i in range(len(self.specs))
    ]


def bundle(tensors: Sequence[tf.Tensor]) -> Bundle:
  """Packs a list of tensors to be sent to another device.

  Tensors of at most `SMALL_BYTES` (64 KiB), and those whose first dimension is
  known only at run time, are joined to one vector of bytes, on the current
  device. Every other tensor is sent by itself.

  Args:
    tensors: Tensors of any dtypes whose elements have a fixed size (not
      strings, for example).

  Returns:
    The packed tensors.
  """
  specs = [tf.TensorSpec(t.shape, t.dtype) for t in tensors]
  together = [
    i for i, spec in enumerate(specs) if _has_rows(spec) or _is_small(spec)
  ]
  if len(together) < 2:
    return Bundle(list(tensors), specs, [])
  packed = [t for i, t in enumerate(tensors) if i not in together]
  parts = [_to_bytes(tensors[i]) for i in together]
  if None in [_num_bytes(specs[i]) for i in together]:
    num_bytes = tf.stack([tf.size(part, tf.int64) for part in parts])
    parts.insert(0, _to_bytes(num_bytes))
  packed.insert(0, tf.concat(parts, axis=0))
  return Bundle(packed, specs, together)


def _has_rows(spec: tf.TensorSpec) -> bool:
  """Returns whether the first dimension, and no other, is not static."""
  shape = spec.shape
  if not shape.rank or shape[0] is not None:
    return False
  return shape[1:].is_fully_defined()


def _num_bytes(spec: tf.TensorSpec) -> int | None:
  size = spec.shape.num_elements()
  return None if size is None else size * spec.dtype.size


def _is_small(spec: tf.TensorSpec) -> bool:
  num_bytes = _num_bytes(spec)
  return num_bytes is not None and num_bytes <= SMALL_BYTES


def _to_bytes(tensor: tf.Tensor) -> tf.Tensor:
  """Returns the bytes of a tensor, uint8 [n]."""
  return tf.reshape(tf.bitcast(tensor, tf.uint8), [-1])


def _from_bytes(part: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
  """Undoes `_to_bytes` for a tensor like `spec`."""
  shape = [-1 if n is None else n for n in spec.shape]
  if spec.dtype.size > 1:
    shape.append(spec.dtype.size)
  tensor = tf.bitcast(tf.reshape(part, shape), spec.dtype)
  return tf.ensure_shape(tensor, spec.shape)


class Parcel:
  """Packs a list of tensors for a transfer to another device, and unpacks it.

  `pack`, called on the sender's device, casts the tensors and concatenates
  small ones. `unpack`, called on the receiver's device, splits them and casts
  them back. The list always has the same shapes and dtypes.

  Attributes:
    items: The shape of each tensor, and its dtype during the transfer.
    groups: For each packed tensor, the positions in `items` of the tensors that
      it consists of.
  """

  def __init__(
    self,
    items: Sequence[Item],
    dtypes: Sequence[tf.DType],
    kinds: Sequence[int] | None = None,
  ):
    """Decides which of the tensors are packed together.

    Args:
      items: The shape of each tensor, and its dtype during the transfer.
      dtypes: The dtype of each tensor after the transfer.
      kinds: A number for each tensor. Only tensors with the same number are
        packed together. None: all tensors are of the same kind.
    """
    self.items = list(items)
    self._dtypes = list(dtypes)
    kinds = kinds or [0] * len(self.items)
    self.groups = [
      [alike[i] for i in group]
      for kind in sorted(set(kinds))
      for alike in [[i for i, k in enumerate(kinds) if k == kind]]
      for group in groups([self.items[i] for i in alike])
    ]

  def pack(self, tensors: Sequence[tf.Tensor | None]) -> list[tf.Tensor]:
    """Packs tensors for the transfer, on the current device.

    Args:
      tensors: One per element of `items`. A tensor that is None is sent as
        zeros, and a group whose tensors are all None as a scalar zero.

    Returns:
      One tensor per group.
    """
    return [
      self._pack([(i, tensors[i]) for i in group]) for group in self.groups
    ]

  def _pack(self, pairs: Sequence[tuple[int, tf.Tensor | None]]) -> tf.Tensor:
    """Packs one group: (position in `items`, tensor or None) pairs."""
    if all(tensor is None for _, tensor in pairs):
      return tf.zeros([], self.items[pairs[0][0]].dtype)
    return pack([self._to_wire(i, tensor) for i, tensor in pairs])

  def fetch(
    self,
    device: str,
    read: Callable[[int], tf.Tensor],
    *,
    in_order: bool = False,
    after: Sequence[tf.Tensor] = (),
    message: Callable[[], tf.Tensor] | None = None,
  ) -> tuple[list[tf.Tensor], tf.Tensor | None]:
    """Reads tensors on another device, and copies them to the current one.

    Args:
      device: The device of the tensors.
      read: Maps a position in `items` to the tensor. It is called on `device`.
      in_order: Whether a group of tensors is read only when at most three
        others are on their way. Over a slow network, the first tensors then
        arrive first, and ops that need only these begin before the others
        arrive. A message to `device` is sent for every group except the first
        four. False: all groups are read at once.
      after: Tensors to wait for before anything is read.
      message: Returns one more tensor, which is sent along with the first
        tensors. It is called on `device`, and computed before anything is read.
        None: no such tensor is sent.

    Returns:
      One tensor per element of `items`, of the dtype after the transfer; and
      the tensor of `message`, or None.
    """
    if not self.groups and message is None:
      return [], None
    at_once = _AT_ONCE if in_order else len(self.groups)
    bundles: list[Bundle] = []

    def read_first() -> list[tf.Tensor]:
      more = [] if message is None else [message()]
      with tf.control_dependencies(more):
        groups = [self._read(group, read) for group in self.groups[:at_once]]
      bundles.append(bundle([*groups, *more]))
      return bundles[-1].packed

    sent = control_flow.call_on(device, read_first, after)
    # Drop control inputs: they would be copied to this device as well.
    with tf.control_dependencies(None):
      if at_once < len(self.groups):
        sent = [resources.copy_here(tensor) for tensor in sent]
      arrived = bundles[-1].unpack(sent)
      told = None if message is None else arrived.pop()
      for group in self.groups[at_once:]:
        with tf.control_dependencies([arrived[-_AT_ONCE]]):
          goes_on = tf.constant(True)
        read_next = functools.partial(self._read, group, read)
        packed = control_flow.call_on(device, read_next, [goes_on])
        arrived.append(resources.copy_here(packed))
      return self.unpack(arrived), told

  def _read(
    self, group: Sequence[int], read: Callable[[int], tf.Tensor]
  ) -> tf.Tensor:
    """Reads and packs the tensors at some positions in `items`."""
    return self._pack([(i, read(i)) for i in group])

  def _to_wire(self, i: int, tensor: tf.Tensor | None) -> tf.Tensor:
    shape, dtype = self.items[i]
    if tensor is None:
      return tf.zeros(shape, dtype)
    return tf.cast(tf.convert_to_tensor(tensor), dtype)

  def unpack(
    self, packed: Sequence[tf.Tensor], *, has_scalars: bool = False
  ) -> list[tf.Tensor]:
    """Splits what `pack` has packed into single tensors, on the current device.

    Args:
      packed: The result of `pack`.
      has_scalars: Whether a group may be a scalar zero, because all of its
        tensors were None. The result for such a group is that scalar if the
        group has one tensor; otherwise it is zeros of each tensor's shape.

    Returns:
      One tensor per element of `items`, of the dtype after the transfer.
    """
    tensors: list[tf.Tensor] = [None] * len(self.items)
    for group, together in zip(self.groups, packed, strict=True):
      items = [self.items[i] for i in group]
      if has_scalars and len(group) > 1:
        size = sum(item.size for item in items)
        together += tf.zeros([size], together.dtype)
      is_alone = has_scalars and len(group) == 1
      parts = [together] if is_alone else unpack(together, items)
      for i, part in zip(group, parts, strict=True):
        tensors[i] = tf.cast(part, self._dtypes[i])
    return tensors
