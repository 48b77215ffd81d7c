"""One replica's gradients, applied where the variables live.

What a replica's half of an asynchronous step does on the PS tasks: send the
gradients there, compensate and apply them, under locks if asked for; and the
read that belongs to it.
"""

import functools
from collections.abc import Sequence

import tensorflow as tf

from tf_replicas import mean_update
from tf_replicas import packing
from tf_replicas import parameter_store
from tf_replicas import resources
from tf_replicas import staleness as staleness_lib


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
  ):
    """Creates the locks and copies on the PS tasks, or attaches to them.

    Args:
      store: The variables.
      update: Applies gradients.
      num_replicas: How many replicas there are.
      policy: What to do about staleness.
      use_locking: Whether one replica at a time updates on a PS task.
      snapshot_reads: Whether reads and updates are atomic.
    """
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
        return [step, *self._store.read(read_shard)]

    step, *values = self._version.hold(read) if self._snapshot_reads else read()
    return step, values

  def __call__(
    self,
    replica: int | tf.Tensor,
    gradients: Sequence[parameter_store.Gradient],
    version: tf.Tensor,
    staleness: tf.Tensor,
  ) -> tf.Tensor:
    """Sends and applies; to be used inside a `tf.function`.

    Args:
      replica: Whose gradients.
      gradients: One per trainable variable, whole or None.
      version: int64 scalar, the updates before this one.
      staleness: int64 scalar.

    Returns:
      A tensor to wait for.
    """
    parts = self._send_gradients(gradients)
    factor = None
    if self._policy.rate_factor is not None:
      factor = self._policy.rate_factor(tf.cast(staleness, tf.float32))

    def make_update():
      return self._update(
        [g is not None for g in gradients],
        version,
        parts.__getitem__,
        1,
        per_task=functools.partial(self._apply_on_task, replica),
        rate_factor=factor,
      )

    if not self._snapshot_reads:
      return make_update()
    arrived = [_values(g) for task in parts for g in task if g is not None]
    (updated,) = self._version.hold(lambda: [make_update()], after=arrived)
    return updated

  def _apply_on_task(self, replica, task, pairs, apply) -> None:
    owners = {
      self._store.variables(index)[number].path: copies
      for (index, number), copies in self._copies.items()
    }

    def body():
      compensated = []
      for gradient, variable in pairs:
        if self._policy.compensate is not None:
          read = resources.select(
            replica, owners[variable.path], lambda copy: copy.read_value()
          )
          gradient = self._policy.compensate(
            gradient, variable.read_value(), read
          )
        compensated.append((gradient, variable))
      apply(compensated)
      return [tf.constant(True)]

    with tf.device(self._store.device_of_task(task)):
      if self._use_locking:
        after = [_values(g) for g, _ in pairs]
        self._locks[task].hold(body, after=after)
      else:
        body()

  def _send_gradients(self, gradients) -> list[list]:
    """By PS task the gradients of its trainable shards, on that task."""
    split = [
      self._store.split_gradient(index, gradient)
      for index, gradient in zip(
        self._store.contributed, gradients, strict=True
      )
    ]
    arrived = []
    for task in range(self._store.num_tasks):
      shards = self._store.contributed_shards(task)
      parts = [split[position][number] for position, number in shards]
      dense = [i for i, g in enumerate(parts) if tf.is_tensor(g)]
      items = [
        self._store.item(self._store.contributed[shards[i][0]], shards[i][1])
        for i in dense
      ]
      device = self._store.device_of_task(task)
      for group in packing.groups(items):
        packed = packing.pack(
          [tf.cast(parts[dense[k]], items[k].dtype) for k in group]
        )
        with tf.device(device):
          packed = tf.identity(packed)
          tensors = packing.unpack(packed, [items[k] for k in group])
        for k, tensor in zip(group, tensors, strict=True):
          parts[dense[k]] = tensor
      arrived.append(parts)
    return arrived


def _assign(variable: tf.Variable, value: tf.Tensor) -> tf.Tensor:
  variable.assign(value)
  return tf.constant(True)


def _values(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
  return getattr(gradient, "values", gradient)
