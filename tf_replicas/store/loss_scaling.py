"""Scales the loss dynamically, for computation in float16.

float16 has no positive numbers below 6e-8, so small gradients vanish. The loss
is therefore multiplied by a scale before it is differentiated, and the
gradients are divided by the same scale. The scale is kept as large as overflow
permits (Micikevicius et al. 2018, section 3.2;
`keras.optimizers.LossScaleOptimizer`):

1. A replica whose scaled gradients overflow contributes zeros instead, and sets
   a flag.
2. An update with such a contribution is *void*: it halves the scale, and
   changes no variable of the model.
3. After a number of updates without overflow the scale is doubled.

The scale and its counters are *statistics* of the training, variables without
gradients. So replicas read them with the parameters, checkpoints contain them,
and the update rules need no code for them. If a replica's gradients are not
finite at a scale of 1, it contributes them unchanged, which ends the training.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import cast
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tf_replicas.runtime import own_variables
from tf_replicas.store import gradient_math
from tf_replicas.store import parameter_store
from tf_replicas.store import placement

# (move, variable) of a statistic: its old minus its new value, as the mean over
# the contributions.
Move = tuple[parameter_store.Gradient, tf.Variable]


class _State(NamedTuple):
  """Has one field for each variable of the loss scaling.

  A field holds the variable, its path, its value or its change, as the user of
  the object needs it.

  Attributes:
    value: The scale.
    good_updates: The number of updates since the last overflow or doubling.
    growth: The number of updates without overflow after which the scale is
      doubled; constant.
    overflow: A flag. The variable is always 0; a replica whose gradients
      overflowed sends a change of 1 with its gradients.
    void: The number of updates that changed nothing because of an overflow.
  """

  value: Any
  good_updates: Any
  growth: Any
  overflow: Any
  void: Any


_PATHS = _State(*(own_variables.LOSS_SCALE + name for name in _State._fields))


def state(values: Mapping[str, np.ndarray | tf.Tensor]) -> _State:
  """Picks the loss scale and its counters from the tensors of a store.

  Args:
    values: The tensors that `ParameterStore.state` returns, by name.

  Returns:
    The values of these variables, as numbers.
  """
  return _State(*(float(values[f"variables/{path}"]) for path in _PATHS))


class LossScale:
  """Scales the loss of a replica dynamically; passed as `Replica.loss_scale`.

  Attributes:
    variables: The variables of the scaling, which replicas share: five float32
      scalars, in the order of the fields of `_State`. These are the scale; the
      number of updates since the last overflow or doubling; the number of
      updates after which the scale is doubled; the overflow flag; and the
      number of updates that an overflow made void.
  """

  def __init__(self, initial: float = 2.0**15, growth: int = 2000):
    """Makes the variables of the loss scale.

    Args:
      initial: The first scale.
      growth: The number of updates without overflow after which the scale is
        doubled.

    Raises:
      ValueError: If `initial` or `growth` is less than 1.
    """
    for name, value in (("initial", initial), ("growth", growth)):
      if not value >= 1:
        raise ValueError(f"`{name}` must be at least 1. Received: {value}.")
    values = _State(initial, 0.0, growth, 0.0, 0.0)
    self.variables = [
      tf.Variable(value, trainable=False, dtype=tf.float32, name=path)
      for path, value in zip(_PATHS, values, strict=True)
    ]

  def finish(
    self,
    gradients: Sequence[parameter_store.Gradient],
    num_trained: int,
    loss: tf.Tensor,
    state: Sequence[tf.Tensor],
  ) -> tuple[list[parameter_store.Gradient], tf.Tensor]:
    """Computes what a replica contributes to the update after a batch.

    A *move* is the old minus the new value of a statistic, which is a variable
    without gradients.

    Args:
      gradients: The gradients of the scaled loss for `num_trained` variables,
        then the moves of the replica's other statistics.
      num_trained: The number of trained variables.
      loss: float32 scalar, the loss, not scaled.
      state: The values of `variables`.

    Returns:
      A pair: a list, and the loss. The list has the gradients, divided by the
      scale; the moves of the other statistics; and the moves of `variables`. If
      there is an overflow and the scale is above 1, all numbers in the list are
      0 except for the overflow flag, and a loss that is not finite is replaced
      by 0. At a scale of 1 or less, nothing is replaced.
    """
    scale = _State(*state).value
    found = [
      gradient_math.scaled(g, 1 / scale) if i < num_trained else g
      for i, g in enumerate(gradients)
    ]
    is_sound = gradient_math.all_finite(found) & tf.math.is_finite(loss)
    # A scale of 1 cannot be lowered: the numbers themselves are not finite.
    is_kept = is_sound | (scale <= 1)
    zero = tf.zeros([])
    flag = tf.where(is_kept, zero, 1.0)
    moves = _State(zero, zero, zero, flag, zero)
    found = [_where(is_kept, gradient) for gradient in found]
    keeps_loss = is_kept | tf.math.is_finite(loss)
    return [*found, *moves], tf.where(keeps_loss, loss, 0.0)


def _where(
  is_kept: tf.Tensor, gradient: parameter_store.Gradient
) -> parameter_store.Gradient:
  """Returns `gradient` if `is_kept` is true, else zeros of its shape and dtype.

  The result is dense, `tf.IndexedSlices` or None, as `gradient` is.
  """
  if gradient is None:
    return None
  if isinstance(gradient, tf.IndexedSlices):
    zero = tf.zeros([], gradient.values.dtype)
    values = tf.where(is_kept, gradient.values, zero)
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
  return tf.where(is_kept, gradient, tf.zeros([], gradient.dtype))


class ScaledUpdate:
  """Makes or skips an update of the model, and adjusts the loss scale.

  If the gradients of a replica overflowed, the update of the model is skipped.
  Then only the scale and its counters change.

  Attributes:
    exists: Whether the store has the variables of a loss scale.
  """

  def __init__(self, store: parameter_store.ParameterStore):
    """Finds the variables of the loss scale in `store`, if it has them."""
    index_of = {spec.path: i for i, spec in enumerate(store.specs)}
    self.exists = _PATHS.value in index_of
    if self.exists:
      found = (store.variables(index_of[path])[0] for path in _PATHS)
      self._state = _State(*found)

  def split(self, moves: Sequence[Move]) -> tuple[list[Move], list[tf.Tensor]]:
    """Separates the moves of the loss scale's variables from all other moves.

    A move is the old minus the new value of a statistic (a variable without
    gradients), as the mean over the contributions of the replicas.

    Args:
      moves: The (move, variable) pairs of the statistics on one PS task.

    Returns:
      A pair of lists. The first has the pairs of all other statistics. The
      second has one bool scalar: whether any replica's gradients overflowed. It
      is empty if the overflow flag is on another PS task.
    """
    others = [p for p in moves if placement.path_of(p[1]) not in _PATHS]
    flags = [m for m, v in moves if v is self._state.overflow]
    return others, [tf.greater(cast(tf.Tensor, flag), 0) for flag in flags]

  def make(
    self,
    overflow: tf.Tensor,
    apply: Callable[[], None],
    skip: Callable[[], None],
  ) -> None:
    """Calls `apply`, or `skip` if there was an overflow, and adjusts the scale.

    The scale is halved after an overflow, and doubled after a number of updates
    without overflow.

    Args:
      overflow: Bool scalar, whether there was an overflow.
      apply: Makes the update.
      skip: Called in place of `apply` after an overflow.
    """

    def void() -> tf.Tensor:
      skip()
      scale = self._state.value
      scale.assign(tf.maximum(scale.read_value() / 2, 1.0))
      self._state.good_updates.assign(0.0)
      self._state.void.assign_add(1.0)
      return tf.constant(True)

    def made() -> tf.Tensor:
      apply()
      count, growth = self._state.good_updates, self._state.growth

      def grow() -> tf.Tensor:
        scale = self._state.value
        scale.assign(scale.read_value() * 2.0)
        count.assign(0.0)
        return tf.constant(True)

      def stay() -> tf.Tensor:
        # Not the scale: another replica may have halved it meanwhile.
        count.assign_add(1.0)
        return tf.constant(True)

      return tf.cond(count.read_value() + 1 >= growth.read_value(), grow, stay)

    tf.cond(overflow, void, made)
