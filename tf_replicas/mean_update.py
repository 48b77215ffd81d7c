"""The mean of N contributions, applied where the variables live.

What the chief's half of a synchronous step does between the last contribution
and the release: on every PS task average, clip by the common norm, apply the
inner optimizer, move the statistics and the averages.

A *statistic* is a variable that no gradient updates: the moving mean or
variance of batch normalization. In place of a gradient a replica contributes
how far its batch moves it down, d = old - new, and the update subtracts the
mean of these, so that N replicas move it to the mean of where each would.
"""

import functools
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence

import tensorflow as tf

from tf_replicas import inner_optimizer
from tf_replicas import moving_averages
from tf_replicas import parameter_store
from tf_replicas import placement


class MeanUpdate:
  """Makes one update from the summed contributions of a step."""

  def __init__(
    self,
    store: parameter_store.ParameterStore,
    inner: inner_optimizer.InnerOptimizer,
    *,
    variable_averages: moving_averages.MovingAverages | None,
    to_average: Iterable[tf.Variable | str] | None = None,
    clip_norm: float | None,
  ):
    """Puts the parts together; creates the averages beside the variables.

    Args:
      store: The variables.
      inner: What applies their mean.
      variable_averages: How the shadows follow, if there are any.
      to_average: Variables that have one, or their paths; all if not given.
      clip_norm: The largest global norm of the mean.

    Raises:
      ValueError: If a variable to average is not in the store.
    """
    self._store = store
    self._inner = inner
    self._variable_averages = variable_averages
    self._clip_norm = clip_norm
    # Position in the store -> the shadows of that variable's shards.
    self._shadows: dict[int, list[tf.Variable]] = {}
    if variable_averages is not None:
      for index in _indices(store, to_average):
        self._shadows[index] = store.create_beside(index, "averages")

  def initialize(self, values: Sequence[tf.Tensor]) -> None:
    """Starts the averages at `values`, one per variable of the store."""
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
    num_contributions: int,
    *,
    per_task: Callable[[int, list[tuple], Callable], None] | None = None,
    rate_factor: tf.Tensor | None = None,
  ) -> tf.Tensor:
    """Makes the update; to be used inside a `tf.function`.

    Args:
      present: Which of the store's `contributed` have a gradient from anyone;
        the others are skipped.
      step: int64 scalar, the global step before the update.
      take_sums: Maps a PS task, on which it is called, to the sums over all
        contributions: one per `store.contributed_shards(task)`.
      num_contributions: What the sums are divided by.
      per_task: Called with a PS task, its (gradient, trainable variable) pairs
        and the function that applies pairs there and makes the rest of the
        update, instead of this function alone.
      rate_factor: Scalar; multiplies the learning rate of this update.

    Returns:
      A tensor; a control dependency on it waits for the whole update.
    """
    tasks = range(self._store.num_tasks)
    means = [
      self._means(task, present, take_sums, num_contributions) for task in tasks
    ]
    moves = [[p for p in pairs if not p[1].trainable] for pairs in means]
    means = [[p for p in pairs if p[1].trainable] for pairs in means]
    if self._clip_norm is not None:
      means = self._clip(means)
    first = next((task for task in tasks if means[task]), 0)

    def apply_on(task, pairs):
      changed = self._inner.apply(
        task, [g for g, _ in pairs], [v for _, v in pairs], step, rate_factor
      )
      if task == first:
        self._inner.commit(changed)
      for mean, variable in moves[task]:
        variable.assign_sub(mean)
      self._update_averages(task, step + 1)

    def apply_on_all_tasks():
      for task, pairs in enumerate(means):
        if per_task is None:
          apply_on(task, pairs)
        else:
          per_task(task, pairs, functools.partial(apply_on, task))

    return _as_unit(apply_on_all_tasks)

  def whole_step(
    self,
    sums: Sequence[parameter_store.Gradient],
    step: tf.Tensor,
    num_examples: tf.Tensor,
    num_contributions: int,
  ) -> tf.Tensor:
    """The update and the step, of a store with one task and no replicas.

    To be used inside a `tf.function`.

    Args:
      sums: One per element of the store's `contributed`: the sum of all
        contributions; None skips the variable.
      step: int64 scalar, the global step before the update.
      num_examples: Scalar, the examples that were used.
      num_contributions: What the sums are divided by.

    Returns:
      The global step after the update, when all of it was made.
    """
    present = [total is not None for total in sums]
    updated = self(present, step, lambda _: sums, num_contributions)
    with tf.control_dependencies([updated]):
      return self._store.advance(step, num_examples)

  def _means(self, task, present, take_sums, num_contributions) -> list[tuple]:
    """(mean gradient, shard variable) pairs of one PS task."""
    shards = self._store.contributed_shards(task)
    pairs = []
    with tf.device(self._store.device_of_task(task)):
      sums = take_sums(task)
      for (position, number), total in zip(shards, sums, strict=True):
        if not present[position]:
          continue
        variable = self._store.variables(self._store.contributed[position])
        variable = variable[number]
        if isinstance(total, tf.IndexedSlices):
          total = _sum_rows(total, variable.shape)
        else:
          total = tf.ensure_shape(total, variable.shape)
        if num_contributions > 1:
          total = scaled(total, 1 / num_contributions)
        pairs.append((total, variable))
    return pairs

  def _clip(self, means) -> list[list[tuple]]:
    """Scales all means by their common norm; only scalars travel."""
    if not any(means):
      return means
    squares = []
    for task, pairs in enumerate(means):
      with tf.device(self._store.device_of_task(task)):
        squares += [_sum_of_squares(g) for g, _ in pairs]
    with tf.device(self._store.device_of_task(0)):
      factor = _clip_factor(squares, self._clip_norm)
    clipped = []
    for task, pairs in enumerate(means):
      with tf.device(self._store.device_of_task(task)):
        clipped.append([(scaled(g, factor), v) for g, v in pairs])
    return clipped

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
      with tf.device(self._store.device_of_task(task)):
        self._variable_averages.update(pairs, step)


def in_order(
  store: parameter_store.ParameterStore,
  pairs: Iterable[tuple[parameter_store.Gradient, object]],
) -> tuple[list[parameter_store.Gradient], list[parameter_store.Gradient]]:
  """Sorts one replica's contribution by its variables.

  Args:
    store: Holds them.
    pairs: (gradient, variable) pairs, of a statistic (old - new, variable); a
      variable may be given by its path.

  Returns:
    One for each trainable variable and one for each statistic, in the order of
    `store.contributed`; None where there is none.

  Raises:
    ValueError: If a variable is not in the store.
  """
  by_path = dict.fromkeys(store.specs[i].path for i in store.contributed)
  for gradient, variable in pairs:
    path = placement.path_of(variable)
    if path not in by_path:
      raise ValueError(
        "`grads_and_vars` must name variables of the store. Received:"
        f" {path!r}."
      )
    by_path[path] = gradient
  ordered, count = list(by_path.values()), len(store.trainable)
  return ordered[:count], ordered[count:]


def _indices(
  store: parameter_store.ParameterStore,
  variables: Iterable[tf.Variable | str] | None,
) -> list[int]:
  """Positions of `variables` in the store."""
  if variables is None:
    return list(range(len(store.specs)))
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


def _as_unit(stage: Callable[[], None]) -> tf.Tensor:
  """Runs the ops of `stage`; a control dependency on the result waits for all.

  Optimizers return nothing that one could wait for; a call of a function is
  over only when all its stateful ops are.
  """

  @tf.function(autograph=False)
  def unit():
    stage()
    return tf.constant(True)

  return unit()


def scaled(
  gradient: parameter_store.Gradient, factor: float | tf.Tensor
) -> parameter_store.Gradient:
  """`factor` times a gradient of any kind."""
  if gradient is None:
    return None
  if isinstance(gradient, tf.IndexedSlices):
    values = gradient.values * tf.cast(factor, gradient.values.dtype)
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
  return gradient * tf.cast(factor, gradient.dtype)


def clipped(
  gradients: Sequence[parameter_store.Gradient],
  shapes: Sequence[Sequence[int]],
  clip_norm: float,
) -> list[parameter_store.Gradient]:
  """Gradients scaled down to a global norm, rows that occur twice summed.

  Args:
    gradients: Of whole variables; may be None.
    shapes: Of the variables.
    clip_norm: The largest norm. (That of `tf.clip_by_global_norm` is too small
      for `tf.IndexedSlices` in which a row occurs twice.)
  """
  gradients = [
    _sum_rows(g, tf.TensorShape(shape))
    if isinstance(g, tf.IndexedSlices)
    else g
    for g, shape in zip(gradients, shapes, strict=True)
  ]
  squares = [_sum_of_squares(g) for g in gradients if g is not None]
  if not squares:
    return gradients
  factor = _clip_factor(squares, clip_norm)
  return [None if g is None else scaled(g, factor) for g in gradients]


def _sum_of_squares(gradient) -> tf.Tensor:
  """In float64, where no finite float32 is too large."""
  values = getattr(gradient, "values", gradient)
  return tf.reduce_sum(tf.square(tf.cast(values, tf.float64)))


def _clip_factor(squares: Sequence[tf.Tensor], clip_norm: float) -> tf.Tensor:
  norm = tf.sqrt(tf.add_n(squares))
  return tf.cast(clip_norm / tf.maximum(norm, clip_norm), tf.float32)


def _sum_rows(gradient: tf.IndexedSlices, shape) -> tf.IndexedSlices:
  """Sums what concerns the same row, so that each row occurs once."""
  rows, where = tf.unique(gradient.indices)
  values = tf.math.unsorted_segment_sum(gradient.values, where, tf.size(rows))
  # Keras 3.15 fails on slices without rows, which a shard may well get:
  # "indices[0] = 0 is not in [0, 0)". A row of zeros says the same.
  num_missing = tf.cast(tf.size(rows) == 0, tf.int32)
  rows = tf.pad(rows, [[0, num_missing]])
  values = tf.pad(values, [[0, num_missing]] + [[0, 0]] * (len(shape) - 1))
  values = tf.ensure_shape(values, [None, *shape[1:]])
  return tf.IndexedSlices(values, rows, tf.constant(shape.as_list(), tf.int64))
