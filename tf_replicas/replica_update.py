"""One replica's gradients, applied where the variables live.

What a replica's half of an asynchronous step does on the PS tasks: send the
gradients there, compensate and apply them, under locks if asked for, or sum up
several sets first; and the read that belongs to it.
"""

import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_replicas import mean_update
from tf_replicas import packing
from tf_replicas import parameter_store
from tf_replicas import releases
from tf_replicas import resources
from tf_replicas import staleness as staleness_lib


class _Parcels(NamedTuple):
  """One set of gradients for one PS task, ready to travel.

  Attributes:
    owners: (position in the store, shard number) of each gradient.
    items: Shape of each, and as which dtype it travels.
    groups: Positions in `owners` of what is packed together.
    packed: A tensor for each of `groups`.
    others: At its position each one that is not dense, or None.
  """

  owners: list[tuple[int, int]]
  items: list[packing.Item]
  groups: list[list[int]]
  packed: list[tf.Tensor]
  others: list[tf.IndexedSlices | None]


class ReplicaUpdate:
  """Reads and updates of several replicas that do not wait for each other."""

  def __init__(
    self,
    store: parameter_store.ParameterStore,
    update: mean_update.MeanUpdate,
    *,
    num_replicas: int,
    policy: staleness_lib.Policy,
    use_locking: bool,
    snapshot_reads: bool,
    gradients_per_update: int,
  ):
    """Creates the locks and copies on the PS tasks, or attaches to them.

    Args:
      store: The variables.
      update: Applies gradients.
      num_replicas: How many replicas there are.
      policy: What to do about staleness.
      use_locking: Whether one replica at a time updates on a PS task.
      snapshot_reads: Whether reads and updates are atomic.
      gradients_per_update: How many sets of gradients make an update; more
        than one are summed under one lock for all PS tasks. An unfinished sum
        is in checkpoints, and gets lost if training goes on with another
        number.
    """
    self._per_update = gradients_per_update
    self._store = store
    self._update = update
    self._num_replicas = num_replicas
    self._policy = policy
    self._use_locking = use_locking
    self._snapshot_reads = snapshot_reads
    with tf.device(store.device_of_task(0)):
      self._version = resources.Mutex("async/version")
    self._locks = []
    for task in range(store.num_tasks):
      with tf.device(store.device_of_task(task)):
        self._locks.append(resources.Mutex(f"async/lock/{task}"))
    self._make_copies()
    # Position in the store -> the sums for the update to come, by shard.
    self._sums: dict[int, list[tf.Variable]] = {}
    if gradients_per_update > 1:
      # What is in the sums and not in their number must not be saved.
      store.lock = self._version
      kind = f"sums_{gradients_per_update}"
      for index in store.contributed:
        self._sums[index] = store.create_beside(index, kind)

  def initialize(self) -> None:
    """Nothing was summed yet. For the chief of a new training, once."""
    for sums in self._sums.values():
      for total in sums:
        total.assign(tf.zeros(total.shape, total.dtype))

  def _make_copies(self) -> None:
    """What each replica has read, for policies that compensate."""
    self._copies: dict[tuple[int, int], list[tf.Variable]] = {}
    for index in self._store.trainable if self._policy.compensate else ():
      for number, variable in enumerate(self._store.variables(index)):
        with tf.device(variable.device):
          self._copies[index, number] = [
            resources.shared_variable(
              f"async/read/{r}/{variable.path}", variable.shape, variable.dtype
            )
            for r in range(self._num_replicas)
          ]

  @tf.autograph.experimental.do_not_convert
  def pull(self, replica: int | tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """What `ParameterStore.pull` returns; to be used inside a `tf.function`.

    Args:
      replica: Who reads, in [0, total_num_replicas).
    """

    def read_shard(index, number):
      value = self._store.variables(index)[number].read_value()
      copies = self._copies.get((index, number))
      if copies:
        copied = resources.select(
          replica, copies, lambda copy: _assign(copy, value)
        )
        with tf.control_dependencies([copied]):
          value = tf.identity(value)
      return value

    def read():
      step = self._store.read_global_step()
      with tf.control_dependencies([step]):
        values = self._store.read(read_shard, self._store.wire_item)
        return [step, *values]

    step, *values = self._version.hold(read) if self._snapshot_reads else read()
    return step, values

  def __call__(
    self,
    replica: int | tf.Tensor,
    parts: Sequence[Sequence[parameter_store.Gradient]],
    version: tf.Tensor,
    staleness: tf.Tensor,
    pending: tf.Variable,
    finish: Callable[[tf.Tensor | bool], tf.Tensor],
  ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Applies what was sent; to be used inside a `tf.function`.

    Args:
      replica: Whose gradients.
      parts: As `send` returned them.
      version: int64 scalar, the updates before this one.
      staleness: int64 scalar.
      pending: How many sets are summed already; `finish` changes it.
      finish: Called with whether this completed an update; takes note of it.

    Returns:
      What `finish` returned, and, in seconds, when the gradients were
      there and when the update was made.
    """
    present = self._present(parts)
    arrived = [_values(g) for task in parts for g in task if g is not None]
    with tf.device(self._store.device_of_task(0)):
      arrived_at = releases.now(
        *(_values(g) for g in parts[0] if g is not None)
      )
    factor = None
    if self._policy.rate_factor is not None:
      factor = self._policy.rate_factor(tf.cast(staleness, tf.float32))

    def apply_at_once():
      updated = self._update(
        present,
        version,
        parts.__getitem__,
        1,
        per_task=functools.partial(self._apply_on_task, replica),
        rate_factor=factor,
      )
      with tf.control_dependencies([updated]):
        return [finish(True)]

    def add_up():
      is_update = pending.read_value() + 1 >= self._per_update
      summed = self._add(replica, parts, factor)
      with tf.control_dependencies([summed]):
        updated = tf.cond(
          is_update,
          lambda: self._apply_sums(present, version),
          lambda: tf.constant(False),
        )
      with tf.control_dependencies([updated]):
        return [finish(is_update)]

    if self._per_update == 1 and not self._snapshot_reads:
      (step,) = apply_at_once()
    else:
      body = apply_at_once if self._per_update == 1 else add_up
      (step,) = self._version.hold(body, after=arrived)
    with tf.device(self._store.device_of_task(0)):
      return step, arrived_at, releases.now(step)

  def _present(self, parts) -> list[bool]:
    """Which of the store's `contributed` have a gradient."""
    present = [False] * len(self._store.contributed)
    for task, gradients in enumerate(parts):
      shards = self._store.contributed_shards(task)
      for (position, _), gradient in zip(shards, gradients, strict=True):
        present[position] |= gradient is not None
    return present

  def _add(self, replica, parts, factor) -> tf.Tensor:
    """Adds one set of gradients to the sums."""

    @tf.function(autograph=False)
    def add():
      for task, gradients in enumerate(parts):
        with tf.device(self._store.device_of_task(task)):
          shards = self._store.contributed_shards(task)
          for owner, gradient in zip(shards, gradients, strict=True):
            if gradient is not None:
              self._add_one(replica, owner, gradient, factor)
      return tf.constant(True)

    return add()

  def _add_one(self, replica, owner, gradient, factor) -> None:
    position, number = owner
    index = self._store.contributed[position]
    is_trained = position < len(self._store.trainable)
    if self._policy.compensate is not None and is_trained:
      gradient = self._compensated(replica, (index, number), gradient)
    if factor is not None and is_trained:
      gradient *= tf.cast(factor, gradient.dtype)
    self._sums[index][number].assign_add(gradient)

  def _apply_sums(self, present, version) -> tf.Tensor:
    """Applies the mean of what was summed; the sums start again."""

    def take(task):
      taken = []
      for position, number in self._store.contributed_shards(task):
        total = self._sums[self._store.contributed[position]][number]
        value = tf.identity(total.read_value())
        with tf.control_dependencies([value]):
          total.assign(tf.zeros(total.shape, total.dtype))
        taken.append(value)
      return taken

    return self._update(present, version, take, self._per_update)

  def _compensated(self, replica, owner, gradient) -> tf.Tensor:
    """What the policy makes of a gradient of shard `owner`."""
    index, number = owner
    read = resources.select(
      replica, self._copies[owner], lambda copy: copy.read_value()
    )
    now = self._store.variables(index)[number].read_value()
    return self._policy.compensate(gradient, now, read)

  def _apply_on_task(self, replica, task, pairs, apply) -> None:
    owners = {
      self._store.variables(index)[number].path: (index, number)
      for index, number in self._copies
    }

    def body():
      compensated = pairs
      if self._policy.compensate is not None:
        compensated = [
          (
            self._compensated(replica, owners[variable.path], gradient),
            variable,
          )
          for gradient, variable in pairs
        ]
      apply(compensated)
      return [tf.constant(True)]

    with tf.device(self._store.device_of_task(task)):
      if self._use_locking:
        after = [_values(g) for g, _ in pairs]
        self._locks[task].hold(body, after=after)
      else:
        body()

  def pack(
    self, gradients: Sequence[parameter_store.Gradient]
  ) -> list["_Parcels"]:
    """One set of gradients as it travels; to be used inside a `tf.function`.

    Args:
      gradients: One per element of the store's `contributed`, whole or None.

    Returns:
      What is for each PS task, where it was computed.
    """
    split = [
      self._store.split_gradient(index, gradient)
      for index, gradient in zip(
        self._store.contributed, gradients, strict=True
      )
    ]
    parcels = []
    for task in range(self._store.num_tasks):
      shards = self._store.contributed_shards(task)
      parts = [split[position][number] for position, number in shards]
      owners = [(self._store.contributed[p], number) for p, number in shards]
      items = [self._store.wire_item(*owner) for owner in owners]
      dense = [i for i, g in enumerate(parts) if tf.is_tensor(g)]
      groups = [
        [dense[k] for k in group]
        for group in packing.groups([items[i] for i in dense])
      ]
      packed = [
        packing.pack([tf.cast(parts[i], items[i].dtype) for i in group])
        for group in groups
      ]
      others = [None if tf.is_tensor(part) else part for part in parts]
      parcels.append(_Parcels(owners, items, groups, packed, others))
    return parcels

  def send(
    self, parcels: Sequence["_Parcels"]
  ) -> list[list[parameter_store.Gradient]]:
    """Sends what was packed; to be used inside a `tf.function`.

    Returns:
      By PS task the gradients of its `contributed_shards`, on that task.
    """
    arrived = []
    for task, (owners, items, groups, packed, others) in enumerate(parcels):
      parts = list(others)
      with tf.device(self._store.device_of_task(task)):
        for group, tensor in zip(groups, packed, strict=True):
          tensors = packing.unpack(
            tf.identity(tensor), [items[i] for i in group]
          )
          for i, part in zip(group, tensors, strict=True):
            parts[i] = part
      for i, part in enumerate(parts):
        if part is not None:
          parts[i] = self._arrived(owners[i], part)
      arrived.append(parts)
    return arrived

  def _arrived(self, owner, gradient):
    """A gradient on the PS task of `owner`, as the variable's dtype."""
    dtype = self._store.item(*owner).dtype
    sent = tf.cast(_values(gradient), self._store.wire_item(*owner).dtype)
    with tf.device(self._store.variables(owner[0])[owner[1]].device):
      values = tf.cast(tf.identity(sent), dtype)
      if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
      return values


def _assign(variable: tf.Variable, value: tf.Tensor) -> tf.Tensor:
  variable.assign(value)
  return tf.constant(True)


def _values(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
  return getattr(gradient, "values", gradient)
