"""Applies the mean of N contributions on the PS tasks (parameter servers).

A *contribution* is the set of gradients that one replica computed from one
batch. On every PS task, an `Applier` computes the mean gradients, clips them by
their global norm, applies the user's optimizer (the *inner optimizer*), and
updates the statistics and the moving averages. With dynamic loss scaling
(`loss_scaling`), an update changes none of these if a contribution overflowed.
Both synchronous and asynchronous rules use an `Applier`.

A *statistic* is a variable without a gradient, such as the moving mean or
variance of batch normalization. Instead of a gradient, a replica contributes d
= old - new for a statistic. The update subtracts the mean of d over the
contributions, so that the statistic becomes the mean of the replicas' new
values.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_replicas.runtime import own_variables
from tf_replicas.runtime import resources
from tf_replicas.store import alternating_optimizer
from tf_replicas.store import gradient_math
from tf_replicas.store import inner_optimizer
from tf_replicas.store import loss_scaling
from tf_replicas.store import moving_averages
from tf_replicas.store import parameter_store
from tf_replicas.store import placement
from tf_replicas.store import row_averages

# A gradient and its variable, both on one PS task.
Pair = tuple[parameter_store.Gradient, tf.Variable]


class Applier:
  """Makes updates of all variables on the PS tasks (parameter servers).

  An update is made from the sum of several contributions; a contribution is the
  gradients that one replica computed from one batch.

  Attributes:
    inner: The user's optimizer, wrapped so that it updates variables on PS
      tasks.
  """

  def __init__(
    self,
    store: parameter_store.ParameterStore,
    inner: (
      inner_optimizer.InnerOptimizer
      | alternating_optimizer.AlternatingOptimizer
    ),
    *,
    variable_averages: moving_averages.MovingAverages | None,
    to_average: Iterable[tf.Variable | str] | None = None,
    clip_norm: float | None,
  ):
    """Stores the parts of an update, and creates the moving averages.

    Args:
      store: Holds the variables.
      inner: The user's optimizer, which must be built for `store` before the
        first update.
      variable_averages: Updates the moving averages; None for no averages.
      to_average: The variables to average, or their paths. None: all variables
        of the model.
      clip_norm: The largest global norm of the mean gradients; None for no
        clipping.

    Raises:
      ValueError: If a variable to average is not in the store.
    """
    self._store = store
    self.inner = inner
    self._variable_averages = variable_averages
    self._clip_norm = clip_norm
    self._scaled_update = loss_scaling.ScaledUpdate(store)
    # Maps the position in the store to the shadows of the variable's shards.
    self._shadows: dict[int, list[tf.Variable]] = {}
    # The averages of tables, matrices that are updated by row, by position.
    self._tables: dict[int, list[row_averages.AveragedPart]] = {}
    if variable_averages is not None:
      for index in _indices(store, to_average):
        if store.specs[index].table is None:
          self._shadows[index] = store.create_like(index, "averages")
        else:
          self._tables[index] = store.create_row_averages(
            index, variable_averages
          )
    # The same by the path of the part of the table.
    self._averaged_parts = {
      part.path: averaged
      for index, found in self._tables.items()
      for part, averaged in zip(store.variables(index), found, strict=True)
    }

  def initialize(self, values: Sequence[tf.Tensor]) -> None:
    """Sets each moving average to the initial value of its variable.

    The PS tasks compute the initial values of tables, which are large.

    Args:
      values: The initial value of every variable of the store, in the store's
        order. Values of tables, and of variables without a moving average, are
        ignored.

    Raises:
      ValueError: If the moving average of a table does not fit into the memory
        of a PS task.
    """
    for index, found in self._tables.items():
      table = self._store.specs[index].table
      assert table is not None
      table.initialize([averaged.shadow for averaged in found])
    for index, shadows in self._shadows.items():
      for shadow, part in zip(
        shadows, self._store.split(index, values[index]), strict=True
      ):
        shadow.assign(part)

  def __call__(
    self,
    present: Sequence[bool],
    step: tf.Tensor,
    take_sums: Callable[[int], Sequence[parameter_store.Gradient]],
    num_contributions: int | tf.Tensor,
    *,
    locks: Sequence[resources.Mutex] | None = None,
    transform: Callable[[Sequence[Pair]], list[Pair]] | None = None,
    rate_factor: tf.Tensor | None = None,
  ) -> tf.Tensor:
    """Makes one update of all variables; to be used inside a `tf.function`.

    A contribution, below, is what one replica computed from one batch: a
    gradient for each trainable variable, and a difference (old minus new value)
    for each statistic.

    Args:
      present: For each element of `store.contributed`, whether any contribution
        has a gradient or difference for it. Other variables do not change.
      step: int64 scalar, the global step before the update.
      take_sums: Maps the index of a PS task to the sums over all contributions,
        one per element of `store.contributed_shards(task)`. It is called on the
        device of that task.
      num_contributions: The number of contributions, by which sums are divided;
        an int, or a float scalar.
      locks: One lock per PS task, held while the variables of that task change.
        None: no locks.
      transform: Maps the (mean gradient, trainable variable) pairs of a PS task
        to the pairs to apply. It is called on the device of that task, with the
        task's lock held.
      rate_factor: Scalar that multiplies the learning rate of this update.
        None: 1.

    Returns:
      A bool scalar; a control dependency on it waits for the whole update.
    """
    tasks = range(self._store.num_tasks)
    means, moves = [], []
    for task in tasks:
      trained, others = self._means(task, present, take_sums, num_contributions)
      means.append(trained)
      moves.append(others)
    overflows: list[tf.Tensor] = []
    if self._scaled_update.exists:
      for task in tasks:
        with tf.device(self._store.device_of_task(task)):
          moves[task], found = self._scaled_update.split(moves[task])
          overflows += found
    if self._clip_norm is not None:
      means = self._clip(means)

    def apply_on_all_tasks() -> None:
      changed: list[tuple[tf.Variable, tf.Tensor]] = []
      for task in tasks:
        found = self._apply_on(
          task,
          means[task],
          moves[task],
          step,
          lock=None if locks is None else locks[task],
          transform=transform,
          rate_factor=rate_factor,
        )
        changed = changed or found
      # Only now: every task must have read the scalars of before the update.
      self.inner.commit(changed)

    if not overflows:
      return _as_unit(apply_on_all_tasks)
    return _as_unit(
      lambda: self._scaled_update.make(
        overflows[0], apply_on_all_tasks, self.inner.skip
      )
    )

  @property
  def is_by_task(self) -> bool:
    """Whether `on_task` can make updates, one part on each PS task.

    It can if no PS task needs anything of the others to make its part, and all
    variables are on the CPUs of their tasks. The optimizer must be built.
    """
    store = self._store
    return (
      self._clip_norm is None
      and not self._scaled_update.exists
      and self.inner.stays_on_task()
      and not self.inner.has_common_state()
      and all(
        store.device_of_variables(task) == store.device_of_task(task)
        for task in range(store.num_tasks)
      )
    )

  def on_task(
    self,
    task: int,
    present: Sequence[bool],
    step: tf.Tensor,
    take_sums: Callable[[int], Sequence[parameter_store.Gradient]],
    num_contributions: int | tf.Tensor,
    *,
    origins: Sequence[tf.Tensor],
    lock: resources.Mutex | None = None,
    transform: Callable[[Sequence[Pair]], list[Pair]] | None = None,
    rate_factor: tf.Tensor | None = None,
  ) -> tf.Tensor:
    """Makes the part of an update that is on one PS task.

    To be used inside a `tf.function`, and only if `is_by_task`. The other PS
    tasks must make their parts too.

    Args:
      task: The index of the PS task.
      present: See `__call__`.
      step: See `__call__`.
      take_sums: See `__call__`.
      num_contributions: See `__call__`.
      origins: What `inner.read_origins` returned.
      lock: Held while the variables of the task change; None: no lock.
      transform: See `__call__`.
      rate_factor: See `__call__`.

    Returns:
      A bool scalar; a control dependency on it waits for this part.
    """

    def apply() -> None:
      changed = self._apply_on(
        task,
        *self._means(task, present, take_sums, num_contributions),
        step,
        lock=lock,
        transform=transform,
        rate_factor=rate_factor,
        origins=origins,
      )
      assert not changed

    return _as_unit(apply)

  def _apply_on(
    self,
    task: int,
    means: Sequence[Pair],
    moves: Sequence[Pair],
    step: tf.Tensor,
    *,
    lock: resources.Mutex | None,
    transform: Callable[[Sequence[Pair]], list[Pair]] | None,
    rate_factor: tf.Tensor | None,
    origins: Sequence[tf.Tensor] | None = None,
  ) -> list[tuple[tf.Variable, tf.Tensor]]:
    """Changes the variables of one PS task; see `__call__`.

    Args:
      task: The index of the PS task.
      means: The (mean gradient, trainable variable) pairs of the task.
      moves: The (mean of old minus new value, statistic) pairs of the task.
      step: int64 scalar, the global step before the update.
      lock: Held meanwhile; None: no lock.
      transform: Maps `means` to the pairs to apply; None: those of `means`.
      rate_factor: Scalar that multiplies the learning rate; None: 1.
      origins: As for `InnerOptimizer.apply`.

    Returns:
      What `InnerOptimizer.apply` returned.
    """

    def apply() -> list[tuple[tf.Variable, tf.Tensor]]:
      pairs = means if transform is None else transform(means)
      averaged = self._averaged_rows(pairs, step)
      changed = self.inner.apply(
        task,
        [g for g, _ in pairs],
        [v for _, v in pairs],
        step,
        rate_factor,
        origins,
      )
      for mean, variable in moves:
        variable.assign_sub(mean)
      self._update_averages(task, step + 1)
      for part, rows in averaged:
        part.update(rows, step + 1)
      return changed

    def apply_locked() -> list[tf.Tensor]:
      changed = apply()
      # Rules with locks refuse optimizers that change scalars (Nadam).
      assert not changed
      return [tf.constant(True)]

    if lock is None:
      return apply()
    with tf.device(self._store.device_of_task(task)):
      arrived: list[Any] = [getattr(g, "values", g) for g, _ in means]
      lock.hold(apply_locked, after=arrived)
    return []

  def _means(
    self,
    task: int,
    present: Sequence[bool],
    take_sums: Callable[[int], Sequence[parameter_store.Gradient]],
    num_contributions: int | tf.Tensor,
  ) -> tuple[list[Pair], list[Pair]]:
    """Computes the mean over the contributions for every shard on a PS task.

    A shard is a variable or a part of one. For a trainable variable the mean is
    that of gradients; for a statistic, that of old minus new values.

    Args:
      task: The index of the PS task.
      present: For each element of `store.contributed`, whether any contribution
        has a gradient or difference for it.
      take_sums: Maps the index of a PS task to the sums over the contributions,
        one per shard that the task holds.
      num_contributions: The number of contributions in a sum, by which it is
        divided unless the variable has a divisor of its own.

    Returns:
      The (mean, variable of the shard) pairs of trainable variables, and those
      of statistics. Variables that are not `present` are left out.
    """
    shards = self._store.contributed_shards(task)
    trained, statistics = [], []
    with tf.device(self._store.device_of_task(task)):
      sums = take_sums(task)
    with tf.device(self._store.device_of_variables(task)):
      for (position, number), total in zip(shards, sums, strict=True):
        if not present[position]:
          continue
        index = self._store.contributed[position]
        variable = self._store.variables(index)[number]
        if isinstance(total, tf.IndexedSlices):
          is_table = self._store.specs[index].table is not None
          total = gradient_math.sum_rows(
            total, variable.shape, may_be_empty=is_table
          )
          if is_table:
            rows = self._store.count_rows(task, total.indices)
            total = tf.IndexedSlices(total.values, rows, total.dense_shape)
        else:
          total = tf.ensure_shape(total, variable.shape)
        count = self._store.specs[index].divisor or num_contributions
        if tf.is_tensor(count) or count > 1:
          total = gradient_math.scaled(total, 1 / count)
        pairs = trained if variable.trainable else statistics
        pairs.append((total, variable))
    return trained, statistics

  def _clip(self, means: Sequence[Sequence[Pair]]) -> list[list[Pair]]:
    """Clips the mean gradients of all PS tasks to the global norm `clip_norm`.

    The norm is that of all gradients on all tasks. For it, the PS tasks send
    each other only sums of squares, not gradients.

    Args:
      means: For each PS task, its (mean gradient, variable of a shard) pairs.

    Returns:
      The same pairs with clipped gradients, in the same order.
    """
    if not any(means):
      return [list(pairs) for pairs in means]
    squares = []
    for task, pairs in enumerate(means):
      with tf.device(self._store.device_of_variables(task)):
        squares += [gradient_math.sum_of_squares(g) for g, _ in pairs]
    with tf.device(self._store.device_of_task(0)):
      factor = gradient_math.clip_factor(squares, self._clip_norm)
    clipped = []
    for task, pairs in enumerate(means):
      with tf.device(self._store.device_of_variables(task)):
        clipped.append([(gradient_math.scaled(g, factor), v) for g, v in pairs])
    return clipped

  def _averaged_rows(
    self, pairs: Sequence[Pair], step: tf.Tensor
  ) -> list[tuple[row_averages.AveragedPart, row_averages.AveragedRows]]:
    """Computes the averages, before an update, of the rows that it changes.

    Args:
      pairs: The (mean gradient, variable of a shard) pairs of a PS task.
      step: int64 scalar, the global step before the update.

    Returns:
      For each part of a table that is averaged and has a gradient: the object
      that keeps its averages, and the averages of the rows of the gradient.
    """
    found = []
    for gradient, variable in pairs:
      part = self._averaged_parts.get(placement.path_of(variable))
      if part is not None:
        assert isinstance(gradient, tf.IndexedSlices)
        found.append((part, part.caught_up(gradient.indices, step)))
    return found

  def _update_averages(self, task: int, step: tf.Tensor) -> None:
    pairs = [
      (shadow, variable)
      for index, shadows in self._shadows.items()
      for shadow, variable, shard in zip(
        shadows,
        self._store.variables(index),
        self._store.shards[index],
        strict=True,
      )
      if shard.task == task
    ]
    if pairs:
      with tf.device(self._store.device_of_variables(task)):
        self._variable_averages.update(pairs, step)


def _indices(
  store: parameter_store.ParameterStore,
  variables: Iterable[tf.Variable | str] | None,
) -> list[int]:
  """Returns the positions in the store of the variables to average.

  Args:
    store: Holds the variables.
    variables: The variables to average, or their paths. None: all variables of
      the model.

  Raises:
    ValueError: If a variable is not in the store.
  """
  if variables is None:
    specs = enumerate(store.specs)
    return [i for i, spec in specs if not own_variables.is_own(spec.path)]
  index_of = {spec.path: i for i, spec in enumerate(store.specs)}
  indices = []
  for variable in variables:
    path = placement.path_of(variable)
    if path not in index_of:
      raise ValueError(
        "`variables_to_average` must be in the store."
        f" Received: {path!r}; the store has {sorted(index_of)}."
      )
    indices.append(index_of[path])
  return indices


def _as_unit(build: Callable[[], None]) -> tf.Tensor:
  """Makes one tensor that other ops can depend on, to wait for many ops.

  An optimizer returns no tensor on which other ops could depend. So the ops are
  created inside a new `tf.function`, whose call ends only when all of its
  stateful ops have ended.

  Args:
    build: Creates the ops.

  Returns:
    The tensor True, which is computed after all of these ops.
  """

  @tf.function(autograph=False)
  def unit() -> tf.Tensor:
    build()
    return tf.constant(True)

  return unit()
