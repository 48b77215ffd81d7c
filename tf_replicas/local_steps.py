"""Several batches of one replica, applied to a copy of its own.

What replicas do between two meetings in `periodic_averaging`. The copy stays on
the worker; all that comes from PS task 0 is the learning rate, once per period,
and the word that training is over.
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_replicas import gradient_queues
from tf_replicas import local_optimizer
from tf_replicas import mean_update
from tf_replicas import parameter_store
from tf_replicas import resources
from tf_replicas import towers
from tf_replicas import update_rule

Parameters = Sequence[tf.Tensor]


class Local(NamedTuple):
  """What a period led to.

  Attributes:
    parameters: The copy after it, a tensor per variable that is contributed
      to: the trainable ones, then statistics.
    slots: The local optimizer's state after it.
    totals: The sum of all gradients, and how far statistics went in all, a
      tensor each; None for a variable without any.
    loss: float64 scalar, the mean over all examples; NaN if a number was not
      finite.
    num_examples: int64 scalar.
  """

  parameters: list[tf.Tensor]
  slots: list[tf.Tensor]
  totals: list[tf.Tensor | None]
  loss: tf.Tensor
  num_examples: tf.Tensor


class _Progress(NamedTuple):
  """What goes from batch to batch."""

  parameters: list[tf.Tensor]
  slots: list[tf.Tensor]
  totals: list[tf.Tensor]
  loss: tf.Tensor
  num_examples: tf.Tensor
  count: tf.Tensor
  may_go_on: tf.Tensor


class LocalSteps:
  """The local steps of all replicas of one training.

  Attributes:
    period: How many batches a replica trains on between two meetings.
  """

  def __init__(
    self,
    optimizer: local_optimizer.LocalOptimizer,
    period: int,
    loss_scale: float | None = None,
  ):
    """Puts the parts together.

    Args:
      optimizer: Makes each step.
      period: How many steps are made.
      loss_scale: What gradients are divided by.

    Raises:
      TypeError, ValueError: If an argument is of no use.
    """
    update_rule.check_count("period", period)
    update_rule.check_positive("loss_scale", loss_scale)
    self.period = period
    self._optimizer = optimizer
    self._loss_scale = loss_scale
    self._told: float | None = None

  def build(self, store: parameter_store.ParameterStore) -> None:
    """Attaches to, or creates, the objects on PS task 0."""
    self._optimizer.build(store)
    self._num_trainable = len(store.trainable)
    with tf.device(store.device_of_task(0)):
      self._rate = resources.shared_variable("local/rate", [], tf.float32)
      self._has_ended = resources.shared_variable("local/ended", [], tf.bool)

  def new_slots(self) -> list[tf.Tensor]:
    """The local optimizer's state before the first step."""
    return self._optimizer.new_state()

  # The chief's.

  @property
  def learning_rate(self) -> float:
    """The rate that this client would tell."""
    return self._optimizer.learning_rate

  def set_learning_rate(self, rate: float) -> None:
    """Changes it; `refresh` tells the replicas."""
    self._optimizer.learning_rate = rate

  def initialize(self) -> None:
    """For the chief of a new training, once."""
    self._has_ended.assign(False)

  def refresh(self) -> float:
    """Tells the replicas the learning rate if it is a new one; returns it."""
    rate = self.learning_rate
    if rate != self._told:
      self._rate.assign(rate)
      self._told = rate
    return rate

  def end(self) -> None:
    """Lets every replica end its period after the batch it is at."""
    self._has_ended.assign(True)

  # The replica's.

  def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
    """What to differentiate instead of `loss`."""
    return loss if self._loss_scale is None else loss * self._loss_scale

  def __call__(
    self,
    compute: Callable[[Parameters], towers.Gradients],
    parameters: Parameters,
    slots: Sequence[tf.Tensor],
    *,
    pull_back: Callable[[tf.Tensor, int], tf.Tensor] | None = None,
    wants_totals: bool = False,
  ) -> Local:
    """Trains on the batches of one period; inside a `tf.function`.

    Stops early at a gradient or a loss that is not finite, and when training
    is over.

    Args:
      compute: The gradients of the next batch, of the scaled loss.
      parameters: One tensor per variable that is contributed to.
      slots: As `new_slots` or the last period returned them.
      pull_back: Maps a parameter and its position to what is added to its
        gradient.
      wants_totals: Whether to sum the gradients.
    """
    rate = tf.identity(self._rate.read_value())
    has_gradient: list[bool] = []

    def one_batch(progress):
      has_ended = tf.identity(self._has_ended.read_value())
      result = compute(progress.parameters)
      gradients = self._finish(result.gradients)
      # The same for every batch, and known once this is traced.
      has_gradient[:] = [gradient is not None for gradient in gradients]
      is_sound = tf.math.is_finite(result.loss)
      is_sound &= gradient_queues.all_finite(gradients)
      totals = progress.totals
      if wants_totals:
        totals = [
          total if gradient is None else total + gradient
          for total, gradient in zip(totals, gradients, strict=True)
        ]
      parameters, slots = self._step(progress, gradients, rate, pull_back)
      loss = tf.cast(result.loss, tf.float64)
      loss *= tf.cast(result.num_examples, tf.float64)
      nan = tf.constant(float("nan"), tf.float64)
      return [
        _Progress(
          parameters,
          slots,
          totals,
          progress.loss + tf.where(is_sound, loss, nan),
          progress.num_examples + result.num_examples,
          progress.count + 1,
          is_sound & ~has_ended,
        )
      ]

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
    """Parameters and slots after one step; statistics just move."""
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
    """Gradients as they are applied: dense, and of the loss itself."""
    count = self._num_trainable
    return [
      *map(self._finish_one, gradients[:count]),
      *gradients[count:],  # The moves of statistics.
    ]

  def _finish_one(self, gradient: parameter_store.Gradient) -> tf.Tensor | None:
    if gradient is None:
      return None
    if self._loss_scale is not None:
      gradient = mean_update.scaled(gradient, 1 / self._loss_scale)
    return tf.convert_to_tensor(gradient)
