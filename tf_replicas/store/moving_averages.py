"""Computes exponential moving averages of variables.

Evaluation may use them instead of the variables.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import tensorflow as tf


def effective_decay(
  decay: float | tf.Tensor, step: int | tf.Tensor | tf.Variable
) -> tf.Tensor:
  """Returns the decay to use at a step: `min(decay, (1 + step) / (10 + step))`.

  So the decay is smaller in early steps. TF1's
  `tf.train.ExponentialMovingAverage` does the same if `num_updates` is given.

  Args:
    decay: The largest decay.
    step: The number of updates so far, this one included.

  Returns:
    A float64 scalar. (In float32, 1 - 0.9999 has a relative error of 2e-4.)
  """
  step = _as_float64(step)
  return tf.minimum(_as_float64(decay), (1.0 + step) / (10.0 + step))


def moving_average_update(
  shadow: tf.Tensor, value: tf.Tensor, decay: float | tf.Tensor
) -> tf.Tensor:
  """Returns `decay * shadow + (1 - decay) * value`.

  It is computed as `shadow - (1 - decay) * (shadow - value)`, so that an
  average that equals its variable stays exactly equal.

  Args:
    shadow: The average so far, of a floating dtype.
    value: The new value of the variable, of the shape and dtype of `shadow`.
    decay: The weight of the average so far, in [0, 1]: a scalar, or a tensor
      that can be broadcast to the shape of `shadow`.

  Returns:
    The new average, of the shape and dtype of `shadow`.
  """
  shadow = tf.convert_to_tensor(shadow)
  rate = tf.cast(1.0 - _as_float64(decay), shadow.dtype)
  return shadow - rate * (shadow - value)


class MovingAverages:
  """Updates moving averages of variables, kept in shadow variables.

  Each call of `update` computes

      shadow <- decay * shadow + (1 - decay) * variable

  where `decay` starts low and rises to its final value (`effective_decay`), so
  that early averages are not dominated by the initial weights.

  The owner of the variables creates each shadow with the initial value of its
  variable, saves it as `averages/<path>`, and calls `update` once per step,
  after the variables and the global step have changed. The averages of tables,
  matrices whose rows live on the PS tasks, are updated by row (`row_averages`).

  Attributes:
    decay: The largest decay used.
    num_updates_aware: Whether early steps use a smaller decay.
  """

  def __init__(self, decay: float = 0.9999, *, num_updates_aware: bool = True):
    """Stores the settings.

    Args:
      decay: The largest decay, in [0, 1).
      num_updates_aware: Whether early steps use `effective_decay`; otherwise
        all use `decay`.

    Raises:
      ValueError: If `decay` is not in [0, 1).
    """
    if not 0.0 <= decay < 1.0:
      raise ValueError(f"`decay` must be in [0, 1). Received: {decay}.")
    self.decay = decay
    self.num_updates_aware = num_updates_aware

  def decay_at(self, global_step: int | tf.Tensor | tf.Variable) -> tf.Tensor:
    """Returns the decay for the update that made the global step `global_step`.

    It is a float64 scalar, and smaller in early steps if `num_updates_aware`. A
    subclass that overrides this method must override `decay_between` too.
    """
    decay = tf.constant(self.decay, tf.float64)
    if self.num_updates_aware:
      decay = effective_decay(decay, global_step)
    return decay

  def decay_between(
    self, begin: int | tf.Tensor, end: int | tf.Tensor
  ) -> tf.Tensor:
    """Returns the product of the decays of the updates `begin` + 1 to `end`.

    With it, the average of a variable that none of these updates has changed
    can be computed at once:

        shadow <- variable + product * (shadow - variable)

    Args:
      begin: The global step before the first of these updates: an integer, or a
        tensor of integers.
      end: The global step after the last of them, of the same shape or a
        scalar. The product is 1 if `end` is not larger than `begin`.

    Returns:
      A float64 tensor of the shape of `begin`.
    """
    begin = _as_float64(begin)
    end = tf.maximum(begin, _as_float64(end))
    decay = tf.constant(self.decay, tf.float64)
    product = tf.ones_like(begin)
    if self.num_updates_aware:
      # Up to this step, the decay of step k is (1 + k) / (10 + k).
      last = max(0, math.floor((10 * self.decay - 1) / (1 - self.decay)))
      first, until = tf.minimum(begin, last), tf.minimum(end, last)
      # Of the product of (1 + k) / (10 + k), only 9 factors do not cancel.
      for offset in range(2, 11):
        product *= (first + offset) / (until + offset)
      begin, end = tf.maximum(begin, last), tf.maximum(end, last)
    return product * tf.pow(decay, end - begin)

  def update(
    self,
    pairs: Iterable[tuple[tf.Variable, tf.Variable | tf.Tensor]],
    global_step: int | tf.Tensor | tf.Variable,
  ) -> None:
    """Updates each shadow (the variable of a moving average) on its device.

    If a shadow and its variable are on the same device, only the decay is sent
    there. The method may be used inside a `tf.function`.

    Args:
      pairs: (shadow, variable) pairs.
      global_step: The global step after the update of the variables.
    """
    decay = self.decay_at(global_step)
    for shadow, variable in pairs:
      with tf.device(shadow.device):
        shadow.assign(moving_average_update(shadow, variable, decay))


def _as_float64(number: float | tf.Tensor | tf.Variable) -> tf.Tensor:
  # `tf.cast` would round a Python number to float32 first.
  if not tf.is_tensor(number):
    number = tf.constant(number, tf.float64)
  return tf.cast(number, tf.float64)
