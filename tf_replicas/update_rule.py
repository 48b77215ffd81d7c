"""What all update rules share: the inner optimizer, and a replica's gradients.

An *update rule* decides when and how gradients reach the variables. It has a
half for replicas (`scale_loss`, `apply_gradients`) and one for the chief
(`apply_update`); which driver runs them it never learns.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence

import tensorflow as tf

from tf_replicas import inner_optimizer
from tf_replicas import mean_update
from tf_replicas import moving_averages
from tf_replicas import parameter_store

WIRE_DTYPES = ("float16", "bfloat16")


def check_replicas(rule: "UpdateRule", names: Sequence[str]) -> None:
  """Checks that a rule is for as many replicas as there are.

  Raises:
    ValueError: If it is not: it would wait for those that are missing, or
      leave out who is one too many.
  """
  if rule.total_num_replicas != len(names):
    raise ValueError(
      f"`total_num_replicas` must be {len(names)}, as there are"
      f" {', '.join(names)}. Received: {rule.total_num_replicas}."
    )


class UpdateRule:
  """The base of the optimizer wrappers.

  Attributes:
    refresh_every: How many steps a replica makes from what it read once.
    inner: The inner optimizer, bound to the store.
    update: Applies gradients to the variables, once `bind` was called.
    variable_averages: How the shadow averages follow, if there are any.
    wire_dtype: As what float32 parameters and gradients travel, for the driver
      to tell the store; None: as they are.
    used_share: How much of what the replicas draw is used, if they are alike.
    name: Names the rule, and its summaries.
  """

  refresh_every = 1
  used_share = 1.0

  def __init__(
    self,
    optimizer: object,
    *,
    variable_averages: moving_averages.MovingAverages | None = None,
    variables_to_average: Iterable[tf.Variable | str] | None = None,
    clip_replica_norm: float | None = None,
    clip_mean_norm: float | None = None,
    has_chief_statistics: bool = False,
    loss_scale: float | None = None,
    wire_dtype: str | None = None,
    name: str,
  ):
    """Wraps `optimizer`.

    Args:
      optimizer: The inner optimizer: a Keras 3 optimizer, or any object with
        `apply(gradients, variables)` or `apply_gradients(pairs)`.
      variable_averages: Keeps shadow averages, updated after every update and
        before the replicas go on.
      variables_to_average: Variables, or their paths; all if not given.
      clip_replica_norm: Each replica's gradients are scaled down to this
        global norm before they leave it.
      clip_mean_norm: What is applied is scaled down to this global norm.
      has_chief_statistics: Whether statistics follow one replica alone.
      loss_scale: `scale_loss` multiplies by it and `apply_gradients` divides
        by it, for float16 computation.
      wire_dtype: `float16` or `bfloat16`; see `ParameterStore`.
      name: Names the rule, and its summaries.

    Raises:
      TypeError, ValueError: If an argument is of no use.
    """
    check_positive("clip_replica_norm", clip_replica_norm)
    check_positive("clip_mean_norm", clip_mean_norm)
    check_positive("loss_scale", loss_scale)
    if variables_to_average is not None and variable_averages is None:
      raise ValueError("`variables_to_average` needs `variable_averages`.")
    if wire_dtype not in (None, *WIRE_DTYPES):
      raise ValueError(
        f"`wire_dtype` must be one of {', '.join(WIRE_DTYPES)}, or None."
        f" Received: {wire_dtype!r}."
      )
    self.inner = inner_optimizer.InnerOptimizer(optimizer)
    self.variable_averages = variable_averages
    self.wire_dtype = wire_dtype
    self.name = name
    self._to_average = variables_to_average
    self._clip_replica_norm = clip_replica_norm
    self._clip_mean_norm = clip_mean_norm
    self.has_chief_statistics = has_chief_statistics
    self._loss_scale = loss_scale

  def bind(self, store: parameter_store.ParameterStore) -> None:
    """Says which variables this is about; creates their averages."""
    self._store = store
    self.update = mean_update.MeanUpdate(
      store,
      self.inner,
      variable_averages=self.variable_averages,
      to_average=self._to_average,
      clip_norm=self._clip_mean_norm,
    )

  def create(self, values: Sequence[tf.Tensor]) -> None:
    """The chief's: gives everything its first value, unless it has one.

    Args:
      values: Of the variables, in the store's order.
    """
    is_new = not self._store.is_initialized()
    if is_new:
      self.initialize(values)
    self.make_ready(is_chief=True)
    if is_new:
      # The global step comes last: it tells others that all is there.
      self._store.start()
    else:
      self.take_over()

  def initialize(self, values: Sequence[tf.Tensor]) -> None:
    """Gives everything but the slots and the global step its first value."""
    for index, value in enumerate(values):
      self._store.assign(index, value)
    self.update.initialize(values)

  def make_ready(self, *, is_chief: bool) -> None:
    """Builds the inner optimizer; the chief first."""
    self.inner.build(self._store, is_chief=is_chief)

  def take_over(self) -> None:
    """A restarted chief's: goes on where the earlier one was."""
    # Whose `apply_update` may live on at the PS; this ends it.
    self.interrupt()

  def begin_updates(self) -> None:
    """The chief's, before its first update: of a store that is whole."""

  def trace_ahead(self) -> None:
    """Traces what may be called while a task stands still; see `in_graph`."""
    self.counts()
    self.ledger()
    self.end_replicas.get_concrete_function()

  def interrupt(self) -> None:
    """Makes `apply_update`, waiting in another thread, raise `Interrupted`."""
    raise NotImplementedError

  def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
    """What to differentiate instead of `loss`; see `loss_scale`."""
    return loss if self._loss_scale is None else loss * self._loss_scale

  def finish_gradients(
    self,
    gradients: Sequence[parameter_store.Gradient],
    replica: int | None = None,
  ) -> list[parameter_store.Gradient]:
    """A replica's gradients of the scaled loss as they leave it.

    Args:
      gradients: One per element of the store's `contributed`.
      replica: Whose, where all N replicas enter every mean with no chief to
        choose whose statistics count.
    """
    count = len(self._store.trainable)
    gradients, moves = list(gradients[:count]), list(gradients[count:])
    if self._loss_scale is not None:
      factor = 1 / self._loss_scale
      gradients = [mean_update.scaled(g, factor) for g in gradients]
    if self._clip_replica_norm is not None:
      shapes = [self._store.specs[i].shape for i in self._store.trainable]
      gradients = mean_update.clipped(
        gradients, shapes, self._clip_replica_norm
      )
    if replica is None:
      return [*gradients, *moves]
    weight = 0 if replica else self.replicas_to_aggregate
    return self.with_chief_statistics([*gradients, *moves], weight)

  def with_chief_statistics(
    self, gradients: Sequence[parameter_store.Gradient], weight: int | tf.Tensor
  ) -> list[parameter_store.Gradient]:
    """The same, statistics times `weight` if they follow one replica alone.

    Args:
      gradients: One per element of the store's `contributed`.
      weight: Of that replica as many as an update is the mean of, so that its
        statistics go all their way; of the others 0.
    """
    if not self.has_chief_statistics:
      return list(gradients)
    count = len(self._store.trainable)
    moves = [mean_update.scaled(m, weight) for m in gradients[count:]]
    return [*gradients[:count], *moves]

  def in_order(
    self, grads_and_vars: Iterable[tuple[parameter_store.Gradient, object]]
  ) -> list[parameter_store.Gradient]:
    """One finished gradient, or None, per element of `store.contributed`.

    Args:
      grads_and_vars: (gradient, variable) pairs; gradients of the variable's
        shape, dense, `tf.IndexedSlices` or None; a variable may be given by
        its path. Variables left out have none. Of a statistic, in place of a
        gradient, old less new value (see `mean_update`).

    Raises:
      ValueError: If a variable is not in the store.
    """
    gradients, moves = mean_update.in_order(self._store, grads_and_vars)
    return self.finish_gradients([*gradients, *moves])

  def set_learning_rate(self, rate: float) -> None:
    """Sets the inner Keras optimizer's rate, from the next update on."""
    self.inner.optimizer.learning_rate = rate


def check_count(name: str, value: int) -> None:
  """Raises TypeError or ValueError unless `value` is an integer from 1 on."""
  if isinstance(value, bool) or not isinstance(value, int):
    raise TypeError(f"`{name}` must be an integer. Received: {value!r}.")
  if value < 1:
    raise ValueError(f"`{name}` must be at least 1. Received: {value}.")


def check_positive(name: str, value: float | None) -> None:
  """Raises ValueError unless `value` is positive or None."""
  if value is not None and not value > 0:
    raise ValueError(f"`{name}` must be positive. Received: {value}.")


def repeat(
  body: Callable[[], tuple[tf.Tensor, tf.Tensor]],
  most: tf.Tensor,
  *,
  secs: float,
) -> tf.Tensor:
  """Calls in the graph, one after the other; all on the present device.

  Args:
    body: Returns a row, float64 [width], and whether to call it again.
    most: int32 scalar, how often at most; once in any case.
    secs: After which it is not called again.

  Returns:
    The rows, float64 [number of calls, width].
  """

  def call(count, _, end, rows):
    row, goes_on = body()
    goes_on &= (count + 1 < most) & (tf.timestamp() < end)
    return count + 1, goes_on, end, rows.write(count, row)

  most = tf.identity(most)
  rows = tf.TensorArray(tf.float64, size=0, dynamic_size=True)
  *_, rows = tf.while_loop(
    lambda _, goes_on, *rest: goes_on,
    call,
    (0, True, tf.timestamp() + secs, rows),
  )
  return rows.stack()
