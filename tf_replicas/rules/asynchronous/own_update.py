"""Applies the gradients of one replica to the variables on the PS tasks.

Asynchronous rules use it. Each replica's program sends the gradients to the PS
tasks and corrects them for staleness (updates made since the replica read the
variables), if a policy demands that. It then applies them, optionally under
locks, or adds them to sums until there are enough sets for an update.
`OwnUpdate.pull` reads the variables in a way that suits these updates.
"""

import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import tensorflow as tf

from tf_replicas.rules import step_token
from tf_replicas.rules.asynchronous import staleness as staleness_lib
from tf_replicas.runtime import control_flow
from tf_replicas.runtime import packing
from tf_replicas.runtime import resources
from tf_replicas.store import applier
from tf_replicas.store import parameter_store


class TaskGradients(NamedTuple):
  """One replica's gradients for one PS task, ready to be sent.

  A shard is a part of a variable, or all of it, on the task. A position is an
  index in the list of the task's shards.

  Attributes:
    parcel: Packs and unpacks the dense gradients.
    dense: The positions of the shards with dense gradients.
    sparse: The positions of the shards with sparse gradients.
    bundle: The packed tensors: the dense gradients, then the values and the
      indices of each sparse gradient; for PS task 0 then the scalars, if some
      are sent with the gradients.
  """

  parcel: packing.Parcel
  dense: list[int]
  sparse: list[int]
  bundle: packing.Bundle


class OwnUpdate:
  """Reads and updates the variables for replicas of an asynchronous rule.

  Each replica applies its own gradients, without waiting for other replicas.
  """

  def __init__(
    self,
    store: parameter_store.ParameterStore,
    update: applier.Applier,
    *,
    num_replicas: int,
    policy: staleness_lib.Policy,
    use_locking: bool,
    snapshot_reads: bool,
    gradients_per_update: int,
  ):
    """Creates locks and variables on the PS tasks.

    If another process has created objects of these names, uses those. The
    variables hold the values that each replica read last, if the policy needs
    them, and the sums of gradients, if an update applies several sets.

    Args:
      store: Holds the variables.
      update: Applies gradients to the variables.
      num_replicas: The number of replicas.
      policy: Decides what to do about stale gradients, those computed from old
        variables.
      use_locking: Whether only one replica at a time updates the variables of a
        PS task.
      snapshot_reads: Whether each update, each read of all variables, and the
        read for a checkpoint (`store.state`), is atomic.
      gradients_per_update: The number of sets of gradients in an update. If it
        is more than 1, sets are summed under one lock for all PS tasks.
        Checkpoints include an unfinished sum, which is lost if training resumes
        with another number.
    """
    self._per_update = gradients_per_update
    self._store = store
    self._update = update
    self._num_replicas = num_replicas
    self._policy = policy
    self._use_locking = use_locking
    self._snapshot_reads = snapshot_reads
    with tf.device(store.device_of_task(0)):
      self._version = store.namespace.mutex("async/version")
    self._locks = []
    for task in range(store.num_tasks):
      with tf.device(store.device_of_task(task)):
        self._locks.append(store.namespace.mutex(f"async/lock/{task}"))
    self._make_copies()
    # Maps the position in the store to the sums for the next update, by shard.
    self._sums: dict[int, list[tf.Variable]] = {}
    self._has_sum = [False] * len(store.contributed)
    if snapshot_reads or gradients_per_update > 1:
      # Hold the lock while saving: a checkpoint must have no half update, and
      # the sums and their count must agree.
      store.lock = self._version
    if gradients_per_update > 1:
      kind = f"sums_{gradients_per_update}"
      for index in store.contributed:
        self._sums[index] = store.create_like(index, kind)

  def initialize(self) -> None:
    """Sets the sums of gradients for the next update to 0.

    The chief calls it once, in a new training.
    """
    for sums in self._sums.values():
      for total in sums:
        total.assign(tf.zeros(total.shape, total.dtype))

  def _make_copies(self) -> None:
    """Creates variables for the values that each replica read last.

    They exist only if the policy corrects stale gradients. There is one per
    replica and shard (part of a trainable variable), on the shard's PS task.
    """
    self._copies: dict[tuple[int, int], list[tf.Variable]] = {}
    for index in self._store.trainable if self._policy.compensate else ():
      for number, variable in enumerate(self._store.variables(index)):
        with tf.device(variable.device):
          self._copies[index, number] = [
            self._store.namespace.variable(
              f"async/read/{r}/{variable.path}", variable.shape, variable.dtype
            )
            for r in range(self._num_replicas)
          ]

  @tf.autograph.experimental.do_not_convert
  def pull(
    self, replica: int | tf.Tensor, token: step_token.StepToken | None = None
  ) -> tuple[step_token.StepToken, list[tf.Tensor]]:
    """Reads the variables for a replica; to be used inside a `tf.function`.

    If the policy corrects stale gradients, a copy of the values that the
    replica reads is also kept on the PS tasks. `GradientRule.pull` documents
    the arguments and the result.
    """

    def read_shard(index, number):
      value = self._store.variables(index)[number].read_value()
      copies = self._copies.get((index, number))
      if copies:
        copied = resources.switch(
          replica,
          copies,
          lambda copy: control_flow.done(copy.assign(value, read_value=False)),
        )
        with tf.control_dependencies([copied]):
          value = tf.identity(value)
      return value

    def read():
      return step_token.pull(
        token,
        functools.partial(
          self._store.pull,
          read_shard,
          in_order=not self._snapshot_reads,  # Else the lock is held longer.
        ),
      )

    return self._version.hold(read) if self._snapshot_reads else read()

  def __call__(
    self,
    replica: int | tf.Tensor,
    parts: Sequence[Sequence[parameter_store.Gradient]],
    version: tf.Tensor,
    staleness: tf.Tensor,
    pending: tf.Variable,
    finish: Callable[[tf.Tensor | bool], tf.Tensor],
  ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Applies one replica's gradients, or adds them to the sums for an update.

    To be used inside a `tf.function`.

    Args:
      replica: The index of the replica that computed the gradients.
      parts: The gradients on the PS tasks, as `send` returns them.
      version: int64 scalar, the number of updates before this one.
      staleness: int64 scalar, the number of updates since the replica read the
        variables.
      pending: int64 scalar variable, the number of sets of gradients in the
        sums. `finish` changes it.
      finish: Counts this set of gradients. It is called once, with a bool or a
        bool tensor: whether the set completed an update.

    Returns:
      The result of `finish`; and two times, in float64 seconds since 1970: when
      the gradients had arrived on PS task 0, and when they had been applied or
      added to the sums.
    """
    present = self._present(parts)
    arrived = [_values(g) for task in parts for g in task if g is not None]
    with tf.device(self._store.device_of_task(0)):
      arrived_at = step_token.now(
        *(_values(g) for g in parts[0] if g is not None)
      )
    factor = self._rate_factor(staleness)

    def apply_at_once():
      updated = self._update(
        present,
        version,
        parts.__getitem__,
        1,
        locks=self._locks if self._use_locking else None,
        transform=functools.partial(self._compensate_all, replica),
        rate_factor=factor,
      )
      with tf.control_dependencies([updated]):
        return [finish(True)]

    def add_up():
      is_update = pending.read_value() + 1 >= self._per_update
      summed = self._add(replica, parts, factor)
      with tf.control_dependencies([summed]):
        updated = control_flow.run_if(
          is_update, lambda: self._apply_sums(present, version)
        )
      with tf.control_dependencies([updated]):
        return [finish(is_update)]

    if self._per_update == 1 and not self._snapshot_reads:
      (step,) = apply_at_once()
    else:
      body = apply_at_once if self._per_update == 1 else add_up
      (step,) = self._version.hold(body, after=arrived)
    with tf.device(self._store.device_of_task(0)):
      return step, arrived_at, step_token.now(step)

  @property
  def is_by_task(self) -> bool:
    """Whether `apply_by_task` can apply gradients.

    It can if an update has one set of gradients, no lock is held while replicas
    read the variables, and `Applier.is_by_task` is True.
    """
    is_single = self._per_update == 1 and not self._snapshot_reads
    return is_single and self._update.is_by_task

  def pack_decision(
    self,
    replica: int | tf.Tensor,
    admitted: tf.Tensor,
    version: tf.Tensor,
    staleness: tf.Tensor,
  ) -> tf.Tensor:
    """Packs all that the PS tasks must know to apply gradients, or not to.

    To be used inside a `tf.function`, on PS task 0.

    Args:
      replica: The index of the replica that computed the gradients.
      admitted: bool scalar, whether the gradients are applied.
      version: int64 scalar, the number of updates before this one.
      staleness: int64 scalar, the number of updates since the replica read the
        variables.

    Returns:
      The argument `decision` of `apply_by_task`, an int64 vector: `replica`,
      `admitted` (0 or 1), `version`, `staleness`, and what
      `InnerOptimizer.read_origins` returns.
    """
    origins = self._update.inner.read_origins()
    replica, admitted = (tf.cast(x, tf.int64) for x in (replica, admitted))
    return tf.stack([replica, admitted, version, staleness, *origins])

  def apply_by_task(
    self,
    by_task: Sequence[TaskGradients],
    first: Sequence[Any],
    decision: tf.Tensor,
  ) -> list[tf.Tensor]:
    """Sends and applies one replica's gradients, by one call on each PS task.

    This needs the fewest messages between tasks: each gets its gradients and
    `decision`, and says when it has finished. It is possible only if
    `is_by_task`. To be used inside a `tf.function`.

    Args:
      by_task: The result of `pack`.
      first: The gradients on PS task 0, which `land` returned there.
      decision: What `pack_decision` returned.

    Returns:
      For each PS task that has variables, a bool scalar, which is available
      when the task has finished.
    """
    present = self._present(
      [
        self._by_shard(task, gradients, [*gradients.dense, *gradients.sparse])
        for task, gradients in enumerate(by_task)
      ]
    )

    def apply_on(task: int) -> tf.Tensor:
      landed = self.land(task, by_task[task])[0] if task else first
      gradients = self._by_shard(task, by_task[task], landed)
      replica, admitted, version, staleness, *origins = tf.unstack(decision)

      def apply() -> tf.Tensor:
        return self._update.on_task(
          task,
          present,
          version,
          lambda _: gradients,
          1,
          origins=origins,
          lock=self._locks[task] if self._use_locking else None,
          transform=functools.partial(self._compensate_all, replica),
          rate_factor=self._rate_factor(staleness),
        )

      return control_flow.run_if(admitted > 0, apply)

    return self._store.call_on_tasks(apply_on)

  def _rate_factor(self, staleness: tf.Tensor) -> tf.Tensor | None:
    """Returns what the policy multiplies the learning rate by; None: nothing.

    Args:
      staleness: int64 scalar, the number of updates since the replica read the
        variables.
    """
    if self._policy.rate_factor is None:
      return None
    return self._policy.rate_factor(tf.cast(staleness, tf.float32))

  def _present(self, parts) -> list[bool]:
    """Finds out for which variables a replica has gradients.

    Args:
      parts: For each PS task, one gradient or None per shard (part of a
        variable).

    Returns:
      One bool per element of the store's `contributed` (the trainable
      variables, then the variables without gradients): whether any of its
      shards has a gradient.
    """
    present = [False] * len(self._store.contributed)
    for task, gradients in enumerate(parts):
      shards = self._store.contributed_shards(task)
      for (position, _), gradient in zip(shards, gradients, strict=True):
        present[position] |= gradient is not None
    return present

  def _add(self, replica, parts, factor) -> tf.Tensor:
    """Adds one replica's gradients to the sums for the next update.

    Args:
      replica: The index of the replica.
      parts: For each PS task, one gradient or None per shard (part of a
        variable).
      factor: Scalar by which gradients of trainable variables are multiplied;
        or None.

    Returns:
      A tensor; a control dependency on it waits until the gradients are added.
    """

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
    """Applies the means of the summed gradients, and sets the sums to 0.

    The sets of gradients that were summed may have gradients for different
    variables. So every variable is updated for which any set that was traced in
    this process had a gradient. The sums of other variables are kept.

    Args:
      present: For each element of the store's `contributed` (the trainable
        variables, then the variables without gradients), whether the last set
        has a gradient.
      version: int64 scalar, the number of updates before this one.

    Returns:
      The result of the `Applier`. A control dependency on it waits for the
      update.
    """
    self._has_sum = [
      a or b for a, b in zip(self._has_sum, present, strict=True)
    ]
    present = list(self._has_sum)

    def take(task):
      taken = []
      for position, number in self._store.contributed_shards(task):
        total = self._sums[self._store.contributed[position]][number]
        value = tf.identity(total.read_value())
        if present[position]:
          with tf.control_dependencies([value]):
            total.assign(tf.zeros(total.shape, total.dtype))
        taken.append(value)
      return taken

    return self._update(present, version, take, self._per_update)

  def _compensated(self, replica, owner, gradient) -> tf.Tensor:
    """Corrects a stale gradient of a shard by the policy's `compensate`.

    A shard is a part of a variable, or all of it, on a PS task. The policy gets
    the shard's present value and the value that the replica read.

    Args:
      replica: The index of the replica that computed the gradient.
      owner: The position of the variable in the store, and the number of the
        shard.
      gradient: The gradient of the shard.
    """
    index, number = owner
    read = resources.switch(
      replica, self._copies[owner], lambda copy: copy.read_value()
    )
    now = self._store.variables(index)[number].read_value()
    return self._policy.compensate(gradient, now, read)

  def _compensate_all(
    self, replica: int | tf.Tensor, pairs: Sequence[applier.Pair]
  ) -> list[applier.Pair]:
    """Corrects all stale gradients of one PS task, if the policy does so.

    Args:
      replica: The index of the replica that computed the gradients.
      pairs: (gradient, variable) pairs.

    Returns:
      The pairs with the corrected gradients, or unchanged.
    """
    if self._policy.compensate is None:
      return list(pairs)
    owners = {
      self._store.variables(index)[number].path: (index, number)
      for index, number in self._copies
    }
    return [
      (self._compensated(replica, owners[variable.path], gradient), variable)
      for gradient, variable in pairs
    ]

  def pack(
    self,
    gradients: Sequence[parameter_store.Gradient],
    scalars: resources.Scalars | None = None,
  ) -> list[TaskGradients]:
    """Packs a replica's gradients for sending; inside a `tf.function`.

    Args:
      gradients: One per element of the store's `contributed` (the trainable
        variables, then the variables without gradients), each of a whole
        variable's shape, or None.
      scalars: Scalars that are sent to PS task 0 along with the gradients,
        which saves a message. None: there are none.

    Returns:
      For each PS task, the packed gradients to send there. They are still on
      the current device.
    """
    by_task = []
    split: list[list[Any]] = self._store.split_by_task(gradients)
    for task, parts in enumerate(split):
      dense = [i for i, g in enumerate(parts) if isinstance(g, tf.Tensor)]
      parcel = self._store.parcel(task, dense)
      tensors = parcel.pack([parts[i] for i in dense])
      sparse = [
        i for i, g in enumerate(parts) if isinstance(g, tf.IndexedSlices)
      ]
      for i in sparse:
        item = self._store.wire_item(*self._owner(task, i))
        tensors += [
          tf.cast(parts[i].values, item.dtype),
          tf.cast(parts[i].indices, tf.int64),
        ]
      if scalars is not None and task == 0:
        tensors.append(scalars.vector)
      bundle = packing.bundle(tensors)
      by_task.append(TaskGradients(parcel, dense, sparse, bundle))
    return by_task

  def send(
    self, by_task: Sequence[TaskGradients]
  ) -> tuple[list[list[parameter_store.Gradient]], tf.Tensor | None]:
    """Sends packed gradients to the PS tasks; inside a `tf.function`.

    Args:
      by_task: The result of `pack`.

    Returns:
      For each PS task, one gradient or None per shard (part of a variable) that
      replicas contribute to, on that task; and the vector of the scalars that
      `pack` got, on PS task 0. The vector is None if there were no scalars.
    """
    arrived = []
    vector = None
    for task, gradients in enumerate(by_task):
      landed, scalars = [], []
      if gradients.bundle.packed:
        landed, scalars = control_flow.call_on(
          self._store.device_of_task(task),
          functools.partial(self.land, task, gradients),
        )
      arrived.append(self._by_shard(task, gradients, landed))
      if scalars:
        (vector,) = scalars
    return arrived, vector

  def _by_shard(
    self, task: int, gradients: TaskGradients, landed: Sequence[Any]
  ) -> list[Any]:
    """Returns one gradient or None per shard (part of a variable) on a PS task.

    Args:
      task: The PS task.
      gradients: The packed gradients.
      landed: The gradients that `land` returned, or what stands for each.
    """
    shards = self._store.contributed_shards(task)
    parts: list[Any] = [None] * len(shards)
    for i, gradient in zip(
      [*gradients.dense, *gradients.sparse], landed, strict=True
    ):
      parts[i] = gradient
    return parts

  def land(
    self, task: int, gradients: TaskGradients
  ) -> tuple[list[Any], list[tf.Tensor]]:
    """Unpacks gradients on their PS task; to be used within `call_on`.

    Args:
      task: The PS task.
      gradients: The packed gradients.

    Returns:
      A pair of lists. The first has the dense gradients, then the sparse ones.
      The second has the vector of the scalars; it is empty if there are none.
    """
    parcel, _, sparse, bundle = gradients
    tensors = bundle.unpack(bundle.packed)
    count = len(parcel.groups)
    landed: list[Any] = parcel.unpack(tensors[:count])
    end = count + 2 * len(sparse)
    pairs = zip(tensors[count:end:2], tensors[count + 1 : end : 2], strict=True)
    for i, (values, indices) in zip(sparse, pairs, strict=True):
      item = self._store.item(*self._owner(task, i))
      shape = tf.constant(item.shape, tf.int64)
      values = tf.cast(values, item.dtype)
      landed.append(tf.IndexedSlices(values, indices, shape))
    return landed, tensors[end:]

  def _owner(self, task: int, i: int) -> tuple[int, int]:
    """Returns (variable's position in `store.specs`, number of the shard).

    Args:
      task: The index of the PS task.
      i: The position among the shards of this task that replicas contribute to.
    """
    position, number = self._store.contributed_shards(task)[i]
    return self._store.contributed[position], number


def _values(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
  return getattr(gradient, "values", gradient)
