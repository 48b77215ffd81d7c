"""The bytes of gradients: one queue per replica on every PS task.

An element of a queue is the part of one contribution that concerns the
variables of that PS task, under the contribution's tag: it arrives whole or
not at all, can be thrown away by its tag, and is summed in replica order, so
that the sum does not depend on who came first.
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_replicas import packing
from tf_replicas import parameter_store
from tf_replicas import resources

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
  ):
    """Creates the queues, or attaches to them.

    Args:
      store: The variables that the gradients belong to.
      num_replicas: How many replicas there are.
      is_sparse: For each of the store's `contributed` whether its gradients
        come as `tf.IndexedSlices`.
      has_chief_statistics: Whether of what is contributed to statistics only
        the first one taken counts, in place of all.
    """
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
            resources.Queue(f"gradients/{replica}", dtypes)
            for replica in range(num_replicas)
          ]
        )

  def _layout(self, task: int) -> "_Layout":
    shards = self._store.contributed_shards(task)
    owners = [(self._store.contributed[p], number) for p, number in shards]
    items = [self._store.wire_item(*owner) for owner in owners]
    dense = [
      i
      for i, (position, _) in enumerate(shards)
      if not self._is_sparse[position]
    ]
    count = len(self._store.trainable)
    groups = [
      [some[i] for i in group]
      for some in (
        [i for i in dense if shards[i][0] < count],
        [i for i in dense if shards[i][0] >= count],
      )
      for group in packing.groups([items[i] for i in some])
    ]
    return _Layout(
      shards=shards,
      items=items,
      dtypes_of_sums=[self._store.item(*owner).dtype for owner in owners],
      groups=groups,
      is_statistic=[shards[group[0]][0] >= count for group in groups],
      sparse=[i for i in range(len(shards)) if i not in dense],
    )

  def pack(self, gradients: Sequence[Gradient]) -> list[list[tf.Tensor]]:
    """One set of gradients as it travels, where it was computed.

    Args:
      gradients: One per element of the store's `contributed`, for whole
        variables.

    Returns:
      What is for each PS task.

    Raises:
      ValueError: For a dense gradient of what was announced as sparse.
    """
    self._check_sparse(gradients)
    by_shard = [
      self._store.split_gradient(index, gradient)
      for index, gradient in zip(
        self._store.contributed, gradients, strict=True
      )
    ]
    return [
      layout.to_wire([by_shard[position][n] for position, n in layout.shards])
      for layout in self._layouts
    ]

  def put(
    self,
    replica: int | tf.Tensor,
    tag: tf.Tensor,
    packed: Sequence[Sequence[tf.Tensor]],
  ) -> list[tf.Tensor]:
    """Sends one set of gradients to the PS tasks.

    Args:
      replica: Whose it is; a Python int or an int64 scalar.
      tag: int64 scalar, the contribution's tag.
      packed: As `pack` returned it.

    Returns:
      Tensors that depend on the arrival, one per PS task.
    """
    arrived = []
    for task, components in enumerate(packed):
      if not self._layouts[task].shards:
        continue
      with tf.device(self._store.device_of_task(task)):
        components = [resources.land(c) for c in (tag, *components)]

        def enqueue(queue, components=components):
          with tf.control_dependencies([queue.enqueue(components)]):
            return tf.constant(True)

        arrived.append(resources.select(replica, self._queues[task], enqueue))
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

    Leftovers of contributions that came to nothing are thrown away.

    Args:
      task: The PS task.
      accepted: int64 [N, 2], (replica, tag) of what to take; all of it must
        have arrived.

    Returns:
      One gradient for each of the store's `contributed_shards(task)`; a scalar
      zero for a dense variable that nobody had a gradient for.
    """
    layout = self._layouts[task]
    if not layout.shards:
      return []
    with tf.device(self._store.device_of_task(task)):
      sums = layout.zeros()
      for replica in range(self._num_replicas):
        sums = self._add_taken(task, replica, accepted, sums)
      return layout.from_wire(sums)

  def _add_taken(self, task, replica, accepted, sums) -> list[tf.Tensor]:
    """Adds what `replica` delivered for this step."""
    queue = self._queues[task][replica]
    tags = tf.boolean_mask(accepted[:, 1], accepted[:, 0] == replica)
    add = self._layouts[task].adders()
    comes_first = tf.reduce_all(accepted[:, 0] >= replica)

    def weigh(parts, taken):
      """The first one's statistics stand for those of all."""
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

  First the dense ones, small ones packed together, then values and indices of
  each sparse one.

  Attributes:
    shards: (position in the store's `contributed`, shard number) of each.
    items: Shape of each, and as which dtype it travels.
    dtypes_of_sums: As which dtype each is summed.
    groups: Positions in `shards` of what is packed together.
    is_statistic: Of each group, whether it belongs to statistics.
    sparse: Positions in `shards` of the sparse ones.
  """

  shards: list[tuple[int, int]]
  items: list[packing.Item]
  dtypes_of_sums: list[tf.DType]
  groups: list[list[int]]
  is_statistic: list[bool]
  sparse: list[int]

  @property
  def dtypes(self) -> list[tf.DType]:
    """The dtype of each component of an element."""
    dtypes = [self.items[group[0]].dtype for group in self.groups]
    for i in self.sparse:
      dtypes += [self.items[i].dtype, tf.int64]
    return dtypes

  def adders(self) -> list[Callable]:
    """How each component of an element is added to its sum."""
    return [_add] * len(self.groups) + [_append] * (2 * len(self.sparse))

  def zeros(self) -> list[tf.Tensor]:
    """Sums of nothing; a dense one is a scalar, which adds to any shape."""
    zeros = [tf.zeros([], self._dtype_of_sum(g)) for g in self.groups]
    for i in self.sparse:
      zeros += self._no_rows(i, self.dtypes_of_sums[i])
    return zeros

  def _dtype_of_sum(self, group: list[int]) -> tf.DType:
    return max((self.dtypes_of_sums[i] for i in group), key=lambda d: d.size)

  def _no_rows(self, i: int, dtype: tf.DType) -> list[tf.Tensor]:
    shape = self.items[i].shape
    return [tf.zeros([0, *shape[1:]], dtype), tf.zeros([0], tf.int64)]

  def to_wire(self, gradients: Sequence[Gradient]) -> list[tf.Tensor]:
    """Lays out one gradient per shard; None travels as zeros or as no rows."""
    components = []
    for group in self.groups:
      if all(gradients[i] is None for i in group):
        components.append(tf.zeros([], self.items[group[0]].dtype))
        continue
      components.append(
        packing.pack([self._dense(i, gradients[i]) for i in group])
      )
    for i in self.sparse:
      if gradients[i] is None:
        components += self._no_rows(i, self.items[i].dtype)
      else:
        values = tf.cast(gradients[i].values, self.items[i].dtype)
        components += [values, tf.cast(gradients[i].indices, tf.int64)]
    return components

  def _dense(self, i: int, gradient: Gradient) -> tf.Tensor:
    shape, dtype = self.items[i]
    if gradient is None:
      return tf.zeros(shape, dtype)
    return tf.cast(tf.convert_to_tensor(gradient), dtype)

  def from_wire(self, sums: Sequence[tf.Tensor]) -> list[Gradient]:
    """One gradient per shard again.

    What nobody had a gradient for is zeros of a packed group, and a scalar
    zero where it travels alone.
    """
    gradients: list[Gradient] = [None] * len(self.shards)
    for group, total in zip(self.groups, sums, strict=False):
      items = [self.items[i] for i in group]
      parts = [total]
      if len(group) > 1:
        total += tf.zeros([sum(item.size for item in items)], total.dtype)
        parts = packing.unpack(total, items)
      for i, part in zip(group, parts, strict=True):
        gradients[i] = tf.cast(part, self.dtypes_of_sums[i])
    rows = iter(sums[len(self.groups) :])
    for i in self.sparse:
      gradients[i] = tf.IndexedSlices(next(rows), next(rows))
    return gradients


def _add(total: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
  return total + tf.cast(part, total.dtype)


def _append(total: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
  return tf.concat([total, tf.cast(part, total.dtype)], axis=0)


def all_finite(
  gradients: Sequence[Gradient], wire_dtype: tf.DType | None = None
) -> tf.Tensor:
  """Whether every number in `gradients` is finite, also when it arrives.

  The sum of squares answers it for next to nothing; only where that is not
  finite, which huge but finite numbers cause too, each number is looked at.

  Args:
    gradients: Of any kind.
    wire_dtype: As which those of float32 travel, if not as they are.

  Returns:
    A bool scalar.
  """
  tensors = [
    g.values if isinstance(g, tf.IndexedSlices) else g
    for g in gradients
    if g is not None
  ]
  if wire_dtype is not None:
    tensors = [
      tf.cast(t, wire_dtype) if t.dtype == tf.float32 else t for t in tensors
    ]
  if not tensors:
    return tf.constant(True)
  squares = [tf.cast(tf.nn.l2_loss(t), tf.float32) for t in tensors]
  return tf.cond(
    tf.math.is_finite(tf.add_n(squares)),
    lambda: tf.constant(True),
    lambda: tf.reduce_all(
      [tf.reduce_all(tf.math.is_finite(t)) for t in tensors]
    ),
  )
