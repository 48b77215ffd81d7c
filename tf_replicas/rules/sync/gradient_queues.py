"""Sends gradients to the PS tasks: one queue per replica on every task.

A contribution is one replica's gradients for one update, and a tag identifies
it. One element of a queue has the tag of a contribution, and its gradients of
the variables on that PS task. An element arrives whole or not at all, and can
be dropped by its tag. The elements of a step are summed in the order of the
replicas, so that the sum does not depend on the order of arrival.
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple
from typing import TypeVar

import tensorflow as tf

from tf_replicas.rules.sync import ledger
from tf_replicas.runtime import control_flow
from tf_replicas.runtime import packing
from tf_replicas.runtime import resources
from tf_replicas.store import parameter_store

Gradient = parameter_store.Gradient
# Tensors in any `tf.nest` structure.
_Tensors = TypeVar("_Tensors")


class GradientQueues:
  """Sends replicas' gradients to the PS tasks, and sums them there.

  On every PS task, each replica has a queue, `gradients/<replica>`.
  """

  def __init__(
    self,
    store: parameter_store.ParameterStore,
    num_replicas: int,
    is_sparse: Sequence[bool],
    *,
    has_chief_statistics: bool = False,
    namespace: resources.Namespace | None = None,
  ):
    """Creates one queue per replica on every PS task.

    If another process has created queues of these names, uses those.

    Args:
      store: Holds the variables that the gradients belong to.
      num_replicas: The number of replicas.
      is_sparse: For each element of `store.contributed` (the trainable
        variables, then the statistics, which have no gradients), whether its
        gradients are `tf.IndexedSlices`.
      has_chief_statistics: If True, statistics are updated from one replica
        alone: of those with accepted contributions, the one with the smallest
        index; its first contribution is used. If False, from the mean of all
        accepted contributions.
      namespace: The scope of the queues' names. None: the namespace of `store`.
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
        self._store.specs[owners[dense[group[0]]][0]].is_statistic
        for group in parcel.groups
      ],
      sparse=sparse,
      rows=[self._store.wire_item(*owners[i]) for i in sparse],
      dtypes_of_rows=[self._store.item(*owners[i]).dtype for i in sparse],
    )

  def pack(
    self,
    gradients: Sequence[Gradient],
    scalars: resources.Scalars | None = None,
  ) -> list[packing.Bundle]:
    """Packs one set of gradients for sending, on the device that computed it.

    Args:
      gradients: One per element of the store's `contributed`, each of a whole
        variable's shape: the gradients of the trainable variables; then, for
        each variable without gradients, such as a moving mean, its old value
        minus its new value. None: the variable does not change.
      scalars: Scalars that are sent to every PS task with the gradients, which
        saves messages. None: there are none.

    Returns:
      For each PS task, the tensors to send there.

    Raises:
      ValueError: If a gradient is dense where `is_sparse` is True.
    """
    self._check_sparse(gradients)
    by_task = self._store.split_by_task(gradients)
    more = [] if scalars is None else [scalars.vector]
    return [
      packing.bundle([*layout.to_wire(parts), *more])
      for layout, parts in zip(self._layouts, by_task, strict=True)
    ]

  def put(
    self,
    replica: int | tf.Tensor,
    tag: tf.Tensor,
    packed: Sequence[packing.Bundle],
  ) -> list[tf.Tensor]:
    """Sends one set of gradients to the PS tasks.

    Args:
      replica: The index of the replica that sends; a Python int or an int64
        scalar.
      tag: int64 scalar, which identifies the set among those of the replica.
      packed: The result of `pack`.

    Returns:
      One tensor for each PS task that holds variables. They have to be used:
      as the argument `after` of `control_flow.call_on`, they wait until the
      gradients have arrived.
    """
    arrived = []
    for task, bundle in enumerate(packed):
      if not self._layouts[task].num_shards:
        continue

      def land(task=task, bundle=bundle) -> tf.Tensor:
        return self._enqueue(task, replica, tag, bundle.unpack(bundle.packed))

      device = self._store.device_of_task(task)
      arrived.append(control_flow.call_on(device, land))
    return arrived

  def put_with_scalars(
    self,
    packed: Sequence[packing.Bundle],
    scalars: resources.Scalars,
    then: Callable[[tf.Tensor, list[Any]], _Tensors],
  ) -> _Tensors:
    """Sends one set of gradients, and scalars, to the PS tasks.

    Args:
      packed: The result of `pack`, which got the same `scalars`.
      scalars: The first is the index of the replica that sends. The second is
        the tag, which identifies the set among those of the replica.
      then: Continues on PS task 0 when the gradients have arrived on all other
        tasks. It gets a tensor that is there when they have arrived on task 0,
        and the scalars. It returns tensors.

    Returns:
      The tensors of `then`, on PS task 0.
    """

    def land(task: int) -> tuple[tf.Tensor, list[Any]]:
      bundle = packed[task]
      *components, vector = bundle.unpack(bundle.packed)
      replica, tag, *rest = scalars.split(vector)
      arrived = tf.constant(True)
      if self._layouts[task].num_shards:
        arrived = self._enqueue(task, replica, tag, components)
      return arrived, [replica, tag, *rest]

    others = [
      control_flow.call_on(
        self._store.device_of_task(task), lambda task=task: land(task)[0]
      )
      for task in range(1, len(packed))
      if self._layouts[task].num_shards
    ]

    def land_on_first() -> _Tensors:
      arrived, landed = land(0)
      return then(arrived, landed)

    device = self._store.device_of_task(0)
    return control_flow.call_on(device, land_on_first, others)

  def _enqueue(self, task, replica, tag, components) -> tf.Tensor:
    """Puts a set of gradients into the queue of `replica` on a PS task."""

    def enqueue(queue: resources.Queue) -> tf.Tensor:
      return control_flow.done(queue.enqueue([tag, *components]))

    return resources.switch(replica, self._queues[task], enqueue)

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
    """Sums the accepted gradients of one step on a PS task.

    They are taken off the replicas' queues on that task. Gradients that come
    before them in a queue were not accepted, and are dropped. With
    `has_chief_statistics`, only one replica determines a statistic (a variable
    without gradients, such as a moving mean). So that the mean of N
    contributions is the entry of that replica, the sum is N times this entry.

    Args:
      task: The index of the PS task.
      accepted: int64 [N, 2], a row (replica, tag) for each accepted
        contribution (set of gradients). All of these must have arrived. If
        there are fewer than N, the other rows are -1.

    Returns:
      One sum for each element of the store's `contributed_shards(task)`, the
      parts of variables on the task. For a dense variable for which no replica
      had a gradient, it is zeros or a scalar zero.
    """
    layout = self._layouts[task]
    if not layout.num_shards:
      return []
    with tf.device(self._store.device_of_task(task)):
      places = ledger.places(accepted)
      sums = layout.zeros()
      for replica in range(self._num_replicas):
        sums = self._add_taken(task, replica, places, sums)
      return layout.from_wire(sums)

  def _add_taken(self, task, replica, places, sums) -> list[tf.Tensor]:
    """Adds the accepted contributions of one replica to sums on a PS task.

    A contribution is one replica's gradients for one update, here only those of
    the variables on the task. It is one element of the replica's queue on the
    task.

    Args:
      task: The index of the PS task.
      replica: The index of the replica.
      places: The places of the step, with its accepted contributions.
      sums: One tensor per component of an element of the queue, except the tag.

    Returns:
      `sums` plus the accepted contributions of `replica`.
    """
    queue = self._queues[task][replica]
    is_own = places.replica == replica
    num_own = tf.math.count_nonzero(is_own, dtype=tf.int32)
    add = self._layouts[task].adders()

    def weigh(parts, taken):
      """Makes the sum of a statistic N times the entry of one replica.

      With `has_chief_statistics`, the parts of statistics are multiplied by N
      in the first contribution of the accepted replica with the smallest index,
      and by 0 in all others. See `OptimizerRule.weigh_statistics`.
      """
      if not self._has_chief_statistics:
        return parts
      comes_first = tf.reduce_all(
        (places.replica >= replica) | (places.replica < 0)
      )
      count = tf.math.count_nonzero(places.is_taken, dtype=tf.int32)
      weight = tf.where(comes_first & (taken == 0), count, 0)
      kinds = self._layouts[task].is_statistic
      few = zip(parts, kinds, strict=False)
      weighed = [p * tf.cast(weight, p.dtype) if k else p for p, k in few]
      return weighed + parts[len(kinds) :]

    def take(taken, *sums):
      tag, *parts = queue.dequeue()
      is_wanted = tf.reduce_any(is_own & (places.tag == tag))
      parts = weigh(parts, taken)
      sums = tf.cond(
        is_wanted,
        lambda: [a(s, p) for a, s, p in zip(add, sums, parts, strict=True)],
        lambda: [tf.identity(s) for s in sums],
      )
      return [taken + tf.cast(is_wanted, tf.int32), *sums]

    return tf.while_loop(
      lambda taken, *_: taken < num_own,
      take,
      [tf.constant(0), *sums],
      shape_invariants=[
        tf.TensorShape([]),
        *[tf.TensorShape(None)] * len(sums),
      ],
    )[1:]


class _Layout(NamedTuple):
  """The layout of one replica's gradients in an element of a queue.

  The gradients are those of the variables on one PS task. The dense gradients
  come first, packed by a `packing.Parcel` into groups. The values and the
  indices of each sparse gradient follow. A position is an index in the list of
  the task's shards (parts of variables).

  Attributes:
    num_shards: The number of shards on the task; each has one gradient.
    dense: The positions of the shards with dense gradients.
    parcel: Packs the dense gradients.
    dtypes_of_sums: For each group of `parcel`, the dtype in which it is summed.
    is_statistic: For each group of `parcel`, whether it consists of statistics
      (variables without gradients, such as moving means).
    sparse: The positions of the shards with sparse gradients.
    rows: For each sparse gradient, the shape of its variable, and the dtype in
      which its rows are sent.
    dtypes_of_rows: For each sparse gradient, the dtype in which it is summed.
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
    """The dtypes of the tensors in an element of a queue, except its tag.

    An element has one replica's gradients for a PS task. The tag, which
    identifies them, is its first tensor.
    """
    items = self.parcel.items
    dtypes = [items[group[0]].dtype for group in self.parcel.groups]
    for item in self.rows:
      dtypes += [item.dtype, tf.int64]
    return dtypes

  def adders(self) -> list[Callable]:
    """Returns the functions that add an element of a queue to the sums.

    There is one function per component of an element. It maps (sum, component)
    to the new sum. Dense gradients are added; rows of sparse gradients are
    appended.
    """
    num_groups = len(self.parcel.groups)
    return [_add] * num_groups + [_append] * (2 * len(self.sparse))

  def zeros(self) -> list[tf.Tensor]:
    """Returns the initial sums, one per component of an element of a queue.

    For dense gradients they are scalar zeros, which can be added to any shape.
    For sparse gradients they are tensors without rows.
    """
    zeros = [tf.zeros([], dtype) for dtype in self.dtypes_of_sums]
    for item, dtype in zip(self.rows, self.dtypes_of_rows, strict=True):
      zeros += _no_rows(item.shape, dtype)
    return zeros

  def to_wire(self, gradients: Sequence[Gradient]) -> list[tf.Tensor]:
    """Packs one gradient per shard into the components of a queue's element.

    A shard is a part of a variable, or all of it, on the PS task. A gradient
    that is None is sent as zeros or, if it is sparse, as no rows.
    """
    components = self.parcel.pack([gradients[i] for i in self.dense])
    for i, item in zip(self.sparse, self.rows, strict=True):
      if gradients[i] is None:
        components += _no_rows(item.shape, item.dtype)
      else:
        values = tf.cast(gradients[i].values, item.dtype)
        components += [values, tf.cast(gradients[i].indices, tf.int64)]
    return components

  def from_wire(self, sums: Sequence[tf.Tensor]) -> list[Gradient]:
    """Unpacks sums of elements of queues into one gradient per shard.

    A shard is a part of a variable, or all of it, on the PS task. If no replica
    had a gradient for a dense variable, its result is zeros, or a scalar zero
    if the variable is alone in its group.

    Args:
      sums: One tensor per component of an element.
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
  """Returns the values and indices of a sparse gradient without rows."""
  return [tf.zeros([0, *shape[1:]], dtype), tf.zeros([0], tf.int64)]


def _add(total: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
  return total + tf.cast(part, total.dtype)


def _append(total: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
  return tf.concat([total, tf.cast(part, total.dtype)], axis=0)
