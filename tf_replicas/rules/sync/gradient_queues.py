"""The bytes of gradients: one queue per replica on every PS task.

An element of a queue is the part of one contribution that concerns the
variables of that PS task, under the contribution's tag: it arrives whole or
not at all, can be dropped by its tag, and is summed in replica order, so that
the sum does not depend on the order of arrival.
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_replicas.rules.sync import ledger
from tf_replicas.runtime import control_flow
from tf_replicas.runtime import packing
from tf_replicas.runtime import resources
from tf_replicas.store import parameter_store

Gradient = parameter_store.Gradient


class GradientQueues:
  """The queues `gradients/<replica>` of every PS task."""

  def __init__(
    self,
    store: parameter_store.ParameterStore,
    num_replicas: int,
    is_sparse: Sequence[bool],
    *,
    has_chief_statistics: bool = False,
    namespace: resources.Namespace | None = None,
  ):
    """Creates the queues, or attaches to them.

    Args:
      store: The variables that the gradients belong to.
      num_replicas: How many replicas there are.
      is_sparse: For each of the store's `contributed` whether its gradients
        come as `tf.IndexedSlices`.
      has_chief_statistics: Whether only the accepted replica with the smallest
        index updates statistics; else the mean of all accepted ones does.
      namespace: Of the queues; that of `store` if not given.
    """
    namespace = namespace or store.namespace
    self._store = store
    self._num_replicas = num_replicas
    self._is_sparse = list(is_sparse)
    self._has_chief_statistics = has_chief_statistics
    self._layouts = [self._layout(t) for t in range(store.num_tasks)]
    self._queues = []
    for task, layout in enumerate(self._layouts):
      dtypes = [tf.int64, *layout.dtypes]
      with tf.device(store.device_of_task(task)):
        self._queues.append(
          [
            namespace.queue(f"gradients/{replica}", dtypes)
            for replica in range(num_replicas)
          ]
        )

  def _layout(self, task: int) -> "_Layout":
    shards = self._store.contributed_shards(task)
    sparse = [i for i, (p, _) in enumerate(shards) if self._is_sparse[p]]
    dense = [i for i in range(len(shards)) if i not in sparse]
    owners = [(self._store.contributed[p], n) for p, n in shards]
    parcel = self._store.parcel(task, dense)
    count = len(self._store.trainable)
    return _Layout(
      num_shards=len(shards),
      dense=dense,
      parcel=parcel,
      dtypes_of_sums=[
        max(
          (self._store.item(*owners[dense[i]]).dtype for i in group),
          key=lambda dtype: dtype.size,
        )
        for group in parcel.groups
      ],
      is_statistic=[
        shards[dense[group[0]]][0] >= count for group in parcel.groups
      ],
      sparse=sparse,
      rows=[self._store.wire_item(*owners[i]) for i in sparse],
      dtypes_of_rows=[self._store.item(*owners[i]).dtype for i in sparse],
    )

  def pack(self, gradients: Sequence[Gradient]) -> list[list[tf.Tensor]]:
    """One set of gradients as it travels, where it was computed.

    Args:
      gradients: One per element of the store's `contributed`, for whole
        variables.

    Returns:
      For each PS task, the tensors to send there.

    Raises:
      ValueError: If a gradient that `is_sparse` announced as sparse is dense.
    """
    self._check_sparse(gradients)
    by_task = self._store.split_by_task(gradients)
    return [
      layout.to_wire(parts)
      for layout, parts in zip(self._layouts, by_task, strict=True)
    ]

  def put(
    self,
    replica: int | tf.Tensor,
    tag: tf.Tensor,
    packed: Sequence[Sequence[tf.Tensor]],
  ) -> list[tf.Tensor]:
    """Sends one set of gradients to the PS tasks.

    Args:
      replica: The sender; a Python int or an int64 scalar.
      tag: int64 scalar, the contribution's tag.
      packed: As `pack` returned it.

    Returns:
      Tensors that depend on the arrival, one per PS task.
    """
    arrived = []
    for task, components in enumerate(packed):
      if not self._layouts[task].num_shards:
        continue
      with tf.device(self._store.device_of_task(task)):
        components = [resources.copy_here(c) for c in (tag, *components)]

        def enqueue(queue, components=components):
          return control_flow.done(queue.enqueue(components))

        arrived.append(resources.switch(replica, self._queues[task], enqueue))
    return arrived

  def _check_sparse(self, gradients: Sequence[Gradient]) -> None:
    for index, gradient, is_sparse in zip(
      self._store.contributed, gradients, self._is_sparse, strict=True
    ):
      if is_sparse and not isinstance(gradient, tf.IndexedSlices | None):
        raise ValueError(
          f"The gradient of {self._store.specs[index].path!r} must be"
          f" `tf.IndexedSlices`, as `is_sparse` says. Received: {gradient}."
        )

  def take_sums(self, task: int, accepted: tf.Tensor) -> list[Gradient]:
    """Takes the accepted contributions off the queues of `task`; sums them.

    Elements of contributions that were not accepted are dropped.

    Args:
      task: The PS task.
      accepted: `Ledger.accepted`, int64 [N, 2]; all of it must have arrived.

    Returns:
      One gradient for each of the store's `contributed_shards(task)`; a scalar
      zero for a dense variable for which no replica had a gradient.
    """
    layout = self._layouts[task]
    if not layout.num_shards:
      return []
    with tf.device(self._store.device_of_task(task)):
      sums = layout.zeros()
      for replica in range(self._num_replicas):
        sums = self._add_taken(task, replica, accepted, sums)
      return layout.from_wire(sums)

  def _add_taken(self, task, replica, accepted, sums) -> list[tf.Tensor]:
    """Adds what `replica` delivered for this step."""
    queue = self._queues[task][replica]
    places = ledger.places(accepted)
    tags = tf.boolean_mask(places.tag, places.replica == replica)
    add = self._layouts[task].adders()
    comes_first = tf.reduce_all(places.replica >= replica)

    def weigh(parts, taken):
      """Multiplies the first contribution's statistics by N, others by 0."""
      if not self._has_chief_statistics:
        return parts
      is_first = comes_first & (taken == 0)
      weight = tf.where(is_first, tf.shape(accepted)[0], 0)
      kinds = self._layouts[task].is_statistic
      few = zip(parts, kinds, strict=False)
      weighed = [p * tf.cast(weight, p.dtype) if k else p for p, k in few]
      return weighed + parts[len(kinds) :]

    def take(taken, *sums):
      tag, *parts = queue.dequeue()
      is_wanted = tf.reduce_any(tags == tag)
      parts = weigh(parts, taken)
      sums = tf.cond(
        is_wanted,
        lambda: [a(s, p) for a, s, p in zip(add, sums, parts, strict=True)],
        lambda: [tf.identity(s) for s in sums],
      )
      return [taken + tf.cast(is_wanted, tf.int32), *sums]

    return tf.while_loop(
      lambda taken, *_: taken < tf.size(tags),
      take,
      [tf.constant(0), *sums],
      shape_invariants=[
        tf.TensorShape([]),
        *[tf.TensorShape(None)] * len(sums),
      ],
    )[1:]


class _Layout(NamedTuple):
  """How the gradients of one PS task are laid out in an element of a queue.

  First the dense ones as a `packing.Parcel`, then values and indices of each
  sparse one.

  Attributes:
    num_shards: How many gradients there are.
    dense: The positions of the dense ones.
    parcel: How these travel.
    dtypes_of_sums: For each group of `parcel`, the dtype in which it is summed.
    is_statistic: For each group of `parcel`, whether it belongs to statistics.
    sparse: The positions of the sparse ones.
    rows: The shape of the variable of each of these, and the dtype as which its
      rows travel.
    dtypes_of_rows: The dtype in which each of these is summed.
  """

  num_shards: int
  dense: list[int]
  parcel: packing.Parcel
  dtypes_of_sums: list[tf.DType]
  is_statistic: list[bool]
  sparse: list[int]
  rows: list[packing.Item]
  dtypes_of_rows: list[tf.DType]

  @property
  def dtypes(self) -> list[tf.DType]:
    """The dtype of each component of an element."""
    items = self.parcel.items
    dtypes = [items[group[0]].dtype for group in self.parcel.groups]
    for item in self.rows:
      dtypes += [item.dtype, tf.int64]
    return dtypes

  def adders(self) -> list[Callable]:
    """How each component of an element is added to its sum."""
    num_groups = len(self.parcel.groups)
    return [_add] * num_groups + [_append] * (2 * len(self.sparse))

  def zeros(self) -> list[tf.Tensor]:
    """Empty sums; a dense one is a scalar, which adds to any shape."""
    zeros = [tf.zeros([], dtype) for dtype in self.dtypes_of_sums]
    for item, dtype in zip(self.rows, self.dtypes_of_rows, strict=True):
      zeros += _no_rows(item.shape, dtype)
    return zeros

  def to_wire(self, gradients: Sequence[Gradient]) -> list[tf.Tensor]:
    """Lays out one gradient per shard; None travels as zeros or as no rows."""
    components = self.parcel.pack([gradients[i] for i in self.dense])
    for i, item in zip(self.sparse, self.rows, strict=True):
      if gradients[i] is None:
        components += _no_rows(item.shape, item.dtype)
      else:
        values = tf.cast(gradients[i].values, item.dtype)
        components += [values, tf.cast(gradients[i].indices, tf.int64)]
    return components

  def from_wire(self, sums: Sequence[tf.Tensor]) -> list[Gradient]:
    """One gradient per shard again.

    A variable without any gradient gets zeros if it travels in a group, and a
    scalar zero if it travels alone.
    """
    gradients: list[Gradient] = [None] * self.num_shards
    num_groups = len(self.parcel.groups)
    dense = self.parcel.unpack(sums[:num_groups], has_scalars=True)
    for i, gradient in zip(self.dense, dense, strict=True):
      gradients[i] = gradient
    rows = iter(sums[num_groups:])
    for i in self.sparse:
      gradients[i] = tf.IndexedSlices(next(rows), next(rows))
    return gradients


def _no_rows(shape: Sequence[int], dtype: tf.DType) -> list[tf.Tensor]:
  """Values and indices of a sparse gradient without rows."""
  return [tf.zeros([0, *shape[1:]], dtype), tf.zeros([0], tf.int64)]


def _add(total: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
  return total + tf.cast(part, total.dtype)


def _append(total: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
  return tf.concat([total, tf.cast(part, total.dtype)], axis=0)
