"""Runs somebody's optimizer on a replica's own copy of the variables.

The copy and the slots are tensors that a replica carries from batch to batch,
since a worker of the in-graph driver has no variables of its own. Keras'
`stateless_apply` would do, but refuses to with TensorFlow (Keras 3.15).
"""

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tf_replicas import inner_optimizer
from tf_replicas import parameter_store
from tf_replicas import resources
from tf_replicas import workarounds


class LocalOptimizer:
  """A Keras optimizer without variables: state in, state out."""

  def __init__(self, optimizer: keras.optimizers.Optimizer):
    """Wraps `optimizer`, which must not be built yet.

    Raises:
      TypeError: If it is not a Keras optimizer.
      ValueError: If its learning rate is not a number, or if it does what the
        update rule should do.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
      raise TypeError(
        f"`optimizer` must be a Keras optimizer. Received: {optimizer!r}."
      )
    _check(optimizer)
    if not isinstance(optimizer._learning_rate, keras.Variable):
      raise ValueError(
        "`optimizer` must have a number as its learning rate; the chief may"
        f" change it. Received: {optimizer._learning_rate!r}."
      )
    self.optimizer = optimizer

  @property
  def learning_rate(self) -> float:
    """The rate in this client; `apply` takes it as an argument."""
    return float(self.optimizer._learning_rate.numpy())

  @learning_rate.setter
  def learning_rate(self, rate: float) -> None:
    self.optimizer.learning_rate = rate

  def copy(self) -> "LocalOptimizer":
    """An optimizer with the same settings, and nothing in common."""
    made = type(self.optimizer).from_config(self.optimizer.get_config())
    name = "_exclude_from_weight_decay_pattern"  # Not in the configuration.
    if hasattr(self.optimizer, name):
      setattr(made, name, getattr(self.optimizer, name))
    return LocalOptimizer(made)

  def build(self, store: parameter_store.ParameterStore) -> None:
    """Prepares for the whole trainable variables of `store`."""
    if self.optimizer.built:
      raise ValueError(
        "`optimizer` must not be built yet, for its slots belong to each"
        f" replica. Received: {self.optimizer!r}."
      )
    specs = [store.specs[index] for index in store.trainable]
    with tf.init_scope(), tf.device("/device:CPU:0"):
      # Never assigned: only a pattern.
      self._patterns = [
        resources.SharedVariable(
          name=spec.path, shape=spec.shape, dtype=spec.dtype, trainable=True
        )
        for spec in specs
      ]
      self.optimizer.build(self._patterns)
    self._state = [
      variable
      for variable in self.optimizer.variables
      if variable is not self.optimizer._learning_rate
    ]
    self._first = [variable.numpy() for variable in self._state]

  def new_state(self) -> list[tf.Tensor]:
    """Slots and count of steps before the first one."""
    return [_constant(value) for value in self._first]

  def apply(
    self,
    gradients: Sequence[tf.Tensor | None],
    parameters: Sequence[tf.Tensor],
    state: Sequence[tf.Tensor],
    rate: tf.Tensor,
  ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """One step of the optimizer.

    Args:
      gradients: One per parameter, dense; None leaves the parameter alone.
      parameters: One tensor per trainable variable of the store.
      state: As `new_state` or an earlier call returned it.
      rate: The learning rate, a scalar.

    Returns:
      The parameters and the state after it.
    """
    cells = [
      inner_optimizer.Cell(value, like)
      for value, like in zip(parameters, self._patterns, strict=True)
    ]
    slots = [inner_optimizer.Cell(value) for value in state]
    pairs = [
      (gradient, cell)
      for gradient, cell in zip(gradients, cells, strict=True)
      if gradient is not None
    ]
    if not pairs:
      return list(parameters), list(state)
    with workarounds.outside_strategy(), keras.StatelessScope() as scope:
      scope.add_update((self.optimizer._learning_rate, rate))
      for update in zip(self._state, slots, strict=True):
        scope.add_update(update)
      self.optimizer.apply(*zip(*pairs, strict=True))
      new = [scope.get_current_value(variable) for variable in self._state]
    return [cell.value for cell in cells], [_value(slot) for slot in new]


def _value(slot) -> tf.Tensor:
  """A slot's value; what Keras assigns itself is a tensor already."""
  return slot.value if isinstance(slot, inner_optimizer.Cell) else slot


def _constant(value: np.ndarray) -> tf.Tensor:
  """`value`, which is mostly all the same, without its bytes in the graph."""
  first = value.flat[0] if value.size else 0
  if np.all(value == first):
    return tf.fill(value.shape, tf.constant(first, value.dtype))
  return tf.constant(value)


# They hold other optimizers, or (Keras 3.15) slots that take their first value
# or their name from a variable.
_NOT_ON_TENSORS = (
  keras.optimizers.LossScaleOptimizer,
  keras.optimizers.MultiOptimizer,
  keras.optimizers.Adafactor,
  keras.optimizers.ScheduleFreeAdamW,
)


def _check(optimizer: keras.optimizers.Optimizer) -> None:
  if isinstance(optimizer, _NOT_ON_TENSORS):
    raise ValueError(
      "`optimizer` must be one that works on tensors alone."
      f" Received: {type(optimizer).__name__}."
    )
  for option, instead in (
    ("use_ema", "give `variable_averages` to the wrapper"),
    ("gradient_accumulation_steps", "raise `period`"),
    ("loss_scale_factor", "give `loss_scale` to the wrapper"),
  ):
    value = getattr(optimizer, option, None)
    if value:
      raise ValueError(
        f"`optimizer` must not use `{option}`; {instead}."
        f" Received: {option}={value}."
      )
