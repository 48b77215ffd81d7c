"""Makes local steps: a replica trains its own copy of the variables.

A replica makes local steps between two exchanges with the shared variables, as
`periodic_averaging` explains; these steps are a *period*. The copy of the
variables, and the slots of the optimizer, are tensors that a replica carries
from batch to batch, since a worker of the in-graph driver has no variables of
its own. Only two things are read from PS task 0: the learning rate, once per
period, and the flag that ends training, once per batch.
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import cast
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tf_replicas.replica import model_replica
from tf_replicas.rules import base as rule_base
from tf_replicas.runtime import keras_internals
from tf_replicas.runtime import own_variables
from tf_replicas.runtime import patches
from tf_replicas.runtime import resources
from tf_replicas.store import gradient_math
from tf_replicas.store import inner_optimizer
from tf_replicas.store import parameter_store

Parameters = Sequence[tf.Tensor]


class LocalOptimizer:
  """Applies a Keras optimizer as a function of tensors, without variables.

  A call takes the optimizer's state as tensors, and returns the new state.
  `stateless_apply` of a Keras optimizer has this purpose too, but it does not
  work with TensorFlow (Keras 3.15).

  Attributes:
    optimizer: The Keras optimizer.
  """

  def __init__(self, optimizer: keras.optimizers.Optimizer):
    """Wraps `optimizer`, a Keras optimizer that is not built yet.

    Raises:
      TypeError: If `optimizer` is not a Keras optimizer.
      ValueError: If its learning rate is not a number, or if it has an option
        that is not supported.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
      raise TypeError(
        f"`optimizer` must be a Keras optimizer. Received: {optimizer!r}."
      )
    _check(optimizer)
    rate = keras_internals.learning_rate(optimizer)
    if not isinstance(rate, keras.Variable):
      raise ValueError(
        "`optimizer` must have a number as its learning rate; the chief may"
        f" change it. Received: {rate!r}."
      )
    self.optimizer = optimizer

  @property
  def learning_rate(self) -> float:
    """The learning rate that is stored in the Keras optimizer; can be set.

    It has no effect on `apply`, which takes the rate to use as an argument.
    """
    return float(self.optimizer.learning_rate)

  @learning_rate.setter
  def learning_rate(self, rate: float) -> None:
    self.optimizer.learning_rate = rate

  def copy(self) -> "LocalOptimizer":
    """Makes a `LocalOptimizer` with equal settings and its own Keras optimizer.

    The new Keras optimizer is not built yet.
    """
    return LocalOptimizer(keras_internals.copy_of(self.optimizer))

  def build(self, store: parameter_store.ParameterStore) -> None:
    """Builds the Keras optimizer for the trainable variables of `store`.

    Raises:
      ValueError: If the optimizer is built already.
    """
    if self.optimizer.built:
      raise ValueError(
        "`optimizer` must not be built yet, for its slots belong to each"
        f" replica. Received: {self.optimizer!r}."
      )
    specs = [store.specs[index] for index in store.trainable]
    namespace = store.namespace.child("patterns")
    with tf.init_scope(), tf.device("/device:CPU:0"):
      # Templates of the variables: they have shapes, and never a value.
      self._patterns = [
        namespace.variable(
          spec.path, spec.shape, spec.dtype, True, spec.constraint
        )
        for spec in specs
      ]
      self.optimizer.build(self._patterns)
    self._state = [
      variable
      for variable in self.optimizer.variables
      if variable is not keras_internals.learning_rate(self.optimizer)
    ]
    self._first = [variable.numpy() for variable in self._state]

  def new_state(self) -> list[tf.Tensor]:
    """Returns the optimizer's state before the first step, as tensors.

    The state consists of the slots and the step count, but not the learning
    rate.
    """
    return [_constant(value) for value in self._first]

  def apply(
    self,
    gradients: Sequence[tf.Tensor | None],
    parameters: Sequence[tf.Tensor],
    state: Sequence[tf.Tensor],
    rate: tf.Tensor,
  ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Makes one step of the optimizer.

    Args:
      gradients: One dense gradient per parameter; None leaves the parameter
        unchanged.
      parameters: One tensor per trainable variable of the parameter store.
      state: The optimizer's state that `new_state` or the last `apply`
        returned.
      rate: Scalar, the learning rate.

    Returns:
      The parameters and the state after the step.
    """
    cells = [
      inner_optimizer.TensorVariable(value, like)
      for value, like in zip(parameters, self._patterns, strict=True)
    ]
    slots = [inner_optimizer.TensorVariable(value) for value in state]
    pairs = [
      (gradient, cell)
      for gradient, cell in zip(gradients, cells, strict=True)
      if gradient is not None
    ]
    if not pairs:
      return list(parameters), list(state)
    with patches.outside_strategy(), keras.StatelessScope() as scope:
      scope.add_update((keras_internals.learning_rate(self.optimizer), rate))
      for update in zip(self._state, slots, strict=True):
        scope.add_update(update)
      self.optimizer.apply(*zip(*pairs, strict=True))
      new = [scope.get_current_value(variable) for variable in self._state]
    return [cell.value for cell in cells], [_value(slot) for slot in new]


class Local(NamedTuple):
  """The result of a *period*, a replica's local steps between two exchanges.

  In a period, a replica trains its own copy of the variables. Then it exchanges
  values with the shared variables.

  Attributes:
    parameters: The replica's copy after the period, one tensor per element of
      the store's `contributed`: the trainable variables, then *statistics*
      (variables without gradients, such as moving means).
    slots: The local optimizer's state after the period.
    totals: One sum over the batches of the period for each parameter: of its
      gradients, or of old minus new values for a statistic. None for a
      parameter that has no gradients. An empty list if sums were not requested.
    loss: float64 scalar, the mean loss over all examples; NaN if a loss or a
      gradient was not finite.
    num_examples: int64 scalar, the number of examples.
  """

  parameters: list[tf.Tensor]
  slots: list[tf.Tensor]
  totals: list[tf.Tensor | None]
  loss: tf.Tensor
  num_examples: tf.Tensor


class _Progress(NamedTuple):
  """The state of a replica's local training between two batches of a period.

  A period is the local steps between two exchanges with the shared variables.
  `Local` documents the fields that are not listed here.

  Attributes:
    loss: float64 scalar, the sum of the losses of all examples so far.
    count: int32 scalar, the number of steps so far in this period.
    may_go_on: bool scalar, whether another step may follow.
  """

  parameters: list[tf.Tensor]
  slots: list[tf.Tensor]
  totals: list[tf.Tensor]
  loss: tf.Tensor
  num_examples: tf.Tensor
  count: tf.Tensor
  may_go_on: tf.Tensor


class LocalSteps:
  """Trains a replica's own copy of the variables for a number of batches.

  Attributes:
    period: The number of local steps, one per batch, between two exchanges with
      the shared variables.
  """

  def __init__(
    self,
    optimizer: LocalOptimizer,
    period: int,
    loss_scale: float | None = None,
    clip_norm: float | None = None,
  ):
    """Stores the settings of a replica's local training.

    Args:
      optimizer: The optimizer that makes each local step.
      period: The number of local steps between two exchanges with the shared
        variables.
      loss_scale: A constant by which the loss is multiplied and the gradients
        are divided, for float16 computation. None: no scale.
      clip_norm: The global norm to which the gradients of a step are clipped.
        None: no clipping.

    Raises:
      TypeError, ValueError: If an argument is invalid.
    """
    rule_base.check_count("period", period)
    rule_base.check_positive("loss_scale", loss_scale)
    rule_base.check_positive("clip_replica_norm", clip_norm)
    self.period = period
    self._optimizer = optimizer
    self._loss_scale = loss_scale
    self._clip_norm = clip_norm
    self._told: float | None = None

  def build(
    self,
    store: parameter_store.ParameterStore,
    namespace: resources.Namespace,
  ) -> None:
    """Builds the optimizer; creates two shared variables on PS task 0.

    These are the learning rate, and the flag that ends training. If another
    process has created them in `namespace`, attaches to them.

    Args:
      store: The parameter store, which holds the shared variables.
      namespace: The scope of the names of the two variables.

    Raises:
      ValueError: If the replica scales its loss dynamically.
    """
    if any(s.path.startswith(own_variables.LOSS_SCALE) for s in store.specs):
      raise ValueError(
        "`loss_scale` of the replica must be None with an update rule whose"
        " replicas train copies of the variables: give the constant"
        " `loss_scale` to the rule. Received: a `LossScale`."
      )
    self._optimizer.build(store)
    self._num_trainable = len(store.trainable)
    with tf.device(store.device_of_task(0)):
      self._rate = namespace.variable("local/rate", [], tf.float32)
      self._has_ended = namespace.variable("local/ended", [], tf.bool)

  def new_slots(self) -> list[tf.Tensor]:
    """Returns the local optimizer's state before the first step, as tensors."""
    return self._optimizer.new_state()

  # The chief's half.

  @property
  def learning_rate(self) -> float:
    """The learning rate that is stored in this process, a float.

    Only that of the chief is used: `refresh` writes it to PS task 0, where the
    replicas read it.
    """
    return self._optimizer.learning_rate

  def set_learning_rate(self, rate: float) -> None:
    """Sets the learning rate in this process.

    A later call of `refresh` sends it to the replicas.
    """
    self._optimizer.learning_rate = rate

  def initialize(self) -> None:
    """Sets the flag on PS task 0 that ends all local training to False.

    The chief calls it once, in a new training.
    """
    self._has_ended.assign(False)

  def refresh(self) -> float:
    """Writes the learning rate to PS task 0 if it has changed.

    Replicas read it from there at the beginning of a period (the local steps
    between two exchanges).

    Returns:
      The learning rate.
    """
    rate = self.learning_rate
    if rate != self._told:
      self._rate.assign(rate)
      self._told = rate
    return rate

  def end(self) -> None:
    """Makes every replica end its local training after one more batch at most.

    Sets a flag on PS task 0. A replica reads it at the beginning of a batch,
    and stops after that batch if it was set. So a replica finishes the batch
    that it has begun, and makes at most one more.
    """
    self._has_ended.assign(True)

  # The replica's half.

  def _scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
    return loss if self._loss_scale is None else loss * self._loss_scale

  def __call__(
    self,
    compute: rule_base.ComputeFn,
    parameters: Parameters,
    slots: Sequence[tf.Tensor],
    *,
    pull_back: Callable[[tf.Tensor, int], tf.Tensor] | None = None,
    wants_totals: bool = False,
  ) -> Local:
    """Trains a replica's copy for one period; inside a `tf.function`.

    A period is `period` local steps, one per batch. It ends early after a batch
    whose loss or gradient is not finite, and when training has ended.

    Args:
      compute: Computes the gradients of the next batch from the parameters.
      parameters: The replica's copy, one tensor per element of the store's
        `contributed` (the trainable variables, then the variables without
        gradients).
      slots: The optimizer's state that `new_slots` or the last call returned.
      pull_back: Maps a trainable parameter and its position in `parameters` to
        a term that is added to its gradient. None: nothing is added.
      wants_totals: Whether to sum the gradients, for `Local.totals`.

    Returns:
      The replica's copy and the optimizer's state after the period, with the
      loss and the number of examples.
    """
    rate = tf.identity(self._rate.read_value())
    has_gradient: list[bool] = []

    def one_batch(progress):
      has_ended = tf.identity(self._has_ended.read_value())
      result = compute(progress.parameters, self._scale_loss)
      gradients = self._finish(result.gradients)
      # The same for every batch, and known once this is traced.
      has_gradient[:] = [gradient is not None for gradient in gradients]
      stepped = self._step(progress, gradients, rate, pull_back)
      return [_add_batch(progress, stepped, result, gradients, has_ended)]

    first = _Progress(
      list(parameters),
      list(slots),
      [tf.zeros_like(p) for p in parameters] if wants_totals else [],
      loss=tf.constant(0.0, tf.float64),
      num_examples=tf.constant(0, tf.int64),
      count=tf.constant(0),
      may_go_on=tf.constant(True),
    )
    (last,) = tf.while_loop(
      lambda progress: (progress.count < self.period) & progress.may_go_on,
      one_batch,
      [first],
    )
    return Local(
      last.parameters,
      last.slots,
      [t if has_gradient[i] else None for i, t in enumerate(last.totals)],
      last.loss / tf.cast(last.num_examples, tf.float64),
      last.num_examples,
    )

  def _step(
    self, progress: _Progress, gradients, rate, pull_back
  ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Makes one local step: trains a replica's copy on one batch.

    Args:
      progress: The state of the local training before the step.
      gradients: The gradient of each parameter, or None; for a statistic (a
        variable without gradients), its old minus its new value.
      rate: Scalar, the learning rate.
      pull_back: Maps a trainable parameter and its position to a term that is
        added to its gradient; or None.

    Returns:
      The parameters and the optimizer's state after the step.
    """
    count = self._num_trainable
    trained, statistics = (
      progress.parameters[:count],
      progress.parameters[count:],
    )
    gradients, moves = gradients[:count], gradients[count:]
    if pull_back is not None:
      gradients = [
        None if gradient is None else gradient + pull_back(parameter, i)
        for i, (gradient, parameter) in enumerate(
          zip(gradients, trained, strict=True)
        )
      ]
    trained, slots = self._optimizer.apply(
      gradients, trained, progress.slots, rate
    )
    statistics = [
      value if move is None else value - move
      for value, move in zip(statistics, moves, strict=True)
    ]
    return [*trained, *statistics], slots

  def _finish(
    self, gradients: Sequence[parameter_store.Gradient]
  ) -> list[tf.Tensor | None]:
    """Makes gradients dense, removes the loss scale, and clips them.

    The entries of statistics (variables without gradients) are only made dense.
    """
    dense = [None if g is None else tf.convert_to_tensor(g) for g in gradients]
    count = self._num_trainable
    trained, moves = dense[:count], dense[count:]  # Moves of statistics.
    if self._loss_scale is not None:
      trained = [gradient_math.scaled(g, 1 / self._loss_scale) for g in trained]
    if self._clip_norm is not None:
      trained = gradient_math.clipped(trained, [()] * count, self._clip_norm)
    return [*cast(list[tf.Tensor | None], trained), *moves]


def _add_batch(
  progress: _Progress,
  stepped: tuple[list[tf.Tensor], list[tf.Tensor]],
  result: model_replica.Gradients,
  gradients: Sequence[tf.Tensor | None],
  has_ended: tf.Tensor,
) -> _Progress:
  """Returns the state of a replica's local training after one more batch.

  Args:
    progress: The state before the batch.
    stepped: The parameters and the slots after the batch.
    result: The gradients, the loss and the number of examples of the batch.
    gradients: The gradients as they were applied.
    has_ended: bool scalar, whether training has ended.
  """
  is_sound = tf.math.is_finite(result.loss)
  is_sound &= gradient_math.all_finite(gradients)
  loss = tf.cast(result.loss, tf.float64)
  loss *= tf.cast(result.num_examples, tf.float64)
  nan = tf.constant(float("nan"), tf.float64)
  totals = progress.totals and [
    total if gradient is None else total + gradient
    for total, gradient in zip(progress.totals, gradients, strict=True)
  ]
  parameters, slots = stepped
  return _Progress(
    parameters,
    slots,
    totals,
    progress.loss + tf.where(is_sound, loss, nan),
    progress.num_examples + result.num_examples,
    progress.count + 1,
    is_sound & ~has_ended,
  )


def _value(slot: tf.Tensor | inner_optimizer.TensorVariable) -> tf.Tensor:
  """Returns the tensor that a slot of the optimizer holds.

  A slot that Keras has assigned in a step is a tensor already.
  """
  return (
    slot.value if isinstance(slot, inner_optimizer.TensorVariable) else slot
  )


def _constant(value: np.ndarray) -> tf.Tensor:
  """Converts a NumPy array to a tensor.

  If all elements are equal, uses `tf.fill`, so that the graph need not hold
  them.
  """
  first = value.flat[0] if value.size else 0
  if np.all(value == first):
    return tf.fill(value.shape, tf.constant(first, value.dtype))
  return tf.constant(value)


# Optimizers that hold other optimizers, or (Keras 3.15) slots that take their
# first value or their name from a variable.
_NOT_ON_TENSORS = keras_internals.optimizer_classes(
  "LossScaleOptimizer", "MultiOptimizer", "Adafactor", "ScheduleFreeAdamW"
)


def _check(optimizer: keras.optimizers.Optimizer) -> None:
  if isinstance(optimizer, _NOT_ON_TENSORS):
    raise ValueError(
      "`optimizer` must be able to keep its state in tensors alone, as replicas"
      " have no variables."
      f" Received: {type(optimizer).__name__}."
    )
  inner_optimizer.check_options(
    optimizer, gradient_accumulation_steps="raise `period`"
  )
