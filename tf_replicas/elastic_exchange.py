"""One replica's exchange with the centre, made where the centre lives.

The replica's copy travels to the PS tasks. There, under one lock, the centre
moves a part of the way towards it; the centre as it was before travels back,
and the replica moves as far towards that.
"""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_replicas import mean_update
from tf_replicas import packing
from tf_replicas import parameter_store
from tf_replicas import resources

# (position among the variables that are contributed to, shard number)
_Shard = tuple[int, int]


class _Group(NamedTuple):
  """Shards that travel together, to and from PS task `task`."""

  task: int
  shards: list[_Shard]
  items: list[packing.Item]


class ElasticExchange:
  """Exchanges of several replicas, one after the other."""

  def __init__(
    self,
    store: parameter_store.ParameterStore,
    update: mean_update.MeanUpdate,
  ):
    """Creates the lock on PS task 0, or attaches to it.

    Args:
      store: Holds the centre.
      update: Moves it by a part of its distances from a copy.
    """
    self._store = store
    self._update = update
    self._groups = []
    for task in range(store.num_tasks):
      shards = store.contributed_shards(task)
      items = [store.item(store.contributed[p], number) for p, number in shards]
      for group in packing.groups(items):
        self._groups.append(
          _Group(task, [shards[i] for i in group], [items[i] for i in group])
        )
    with tf.device(store.device_of_task(0)):
      self._lock = resources.Mutex("elastic/lock")

  @tf.autograph.experimental.do_not_convert
  def __call__(
    self,
    parameters: Sequence[tf.Tensor],
    version: tf.Tensor,
    statistics_rate: float | tf.Tensor,
  ) -> list[tf.Tensor]:
    """Makes one exchange; to be used inside a `tf.function`.

    Args:
      parameters: The replica's copy, one tensor per element of the store's
        `contributed`.
      version: int64 scalar, the exchanges before this one.
      statistics_rate: Scalar: the part of the way that statistics move.

    Returns:
      The centre just before it, as many tensors.
    """
    sent = self._send(parameters)

    def exchange():
      before = self._read()

      def distances(task):
        shards = self._store.contributed_shards(task)
        distances = [before[shard] - sent[shard] for shard in shards]
        return [
          d if position < len(self._store.trainable) else statistics_rate * d
          for d, (position, _) in zip(distances, shards, strict=True)
        ]

      self._update([True] * len(parameters), version, distances, 1)
      return self._pack(before)

    return self._join(self._lock.hold(exchange, after=list(sent.values())))

  def _send(self, parameters) -> dict[_Shard, tf.Tensor]:
    """The shards of the replica's copy, where those of the centre are."""
    split = [
      self._store.split(index, value)
      for index, value in zip(self._store.contributed, parameters, strict=True)
    ]
    sent = {}
    for task, shards, items in self._groups:
      packed = packing.pack([split[p][number] for p, number in shards])
      with tf.device(self._store.device_of_task(task)):
        tensors = packing.unpack(tf.identity(packed), items)
      sent.update(zip(shards, tensors, strict=True))
    return sent

  def _read(self) -> dict[_Shard, tf.Tensor]:
    """The shards of the centre, where they are."""
    values = {}
    for task, shards, _ in self._groups:
      with tf.device(self._store.device_of_task(task)):
        for position, number in shards:
          variables = self._store.variables(self._store.contributed[position])
          values[position, number] = variables[number].read_value()
    return values

  def _pack(self, values: dict[_Shard, tf.Tensor]) -> list[tf.Tensor]:
    packed = []
    for task, shards, _ in self._groups:
      with tf.device(self._store.device_of_task(task)):
        packed.append(packing.pack([values[shard] for shard in shards]))
    return packed

  def _join(self, packed: list[tf.Tensor]) -> list[tf.Tensor]:
    """Whole variables, where the replica is."""
    values = {}
    for tensor, (_, shards, items) in zip(packed, self._groups, strict=True):
      values.update(zip(shards, packing.unpack(tensor, items), strict=True))
    whole = []
    for position, index in enumerate(self._store.contributed):
      shards = self._store.shards[index]
      parts = [values[position, number] for number in range(len(shards))]
      whole.append(parameter_store.join(parts, shards))
    return whole
