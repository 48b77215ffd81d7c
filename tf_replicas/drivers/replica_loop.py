"""The loop of one replica: compute, hand over, wait, read.

One call makes many steps, since a call of a function that spans several tasks
costs milliseconds (TensorFlow 2.21).
"""

import dataclasses
from collections.abc import Iterator

import tensorflow as tf

from tf_replicas.drivers import timeline
from tf_replicas.replica import model_replica
from tf_replicas.rules import base as rule_base
from tf_replicas.rules import step_token


@dataclasses.dataclass(frozen=True)
class ReplicaLoop:
  """The steps of one replica; its methods are used inside a `tf.function`.

  Each step takes and returns one list of tensors, [token, *state]: the packed
  `StepToken`, since few tensors should cross from task to task, and the state
  of the update rule.

  Attributes:
    rule: The update rule.
    replica: Computes the gradients.
    iterator: Over the replica's batches.
    index: Which replica this is; an int or an int64 scalar.
    ps_device: The device of PS task 0, where tokens are packed.
    device: Where this replica computes; None: where the function runs.
    recorder: Writes the timeline; None: there is none.
    name: The replica's name in the timeline; a string or a string tensor.
  """

  rule: rule_base.UpdateRule
  replica: model_replica.Replica
  iterator: Iterator
  index: int | tf.Tensor
  ps_device: str
  device: str | None
  recorder: timeline.Recorder | None = None
  name: str | tf.Tensor = ""

  def begin(self) -> list[tf.Tensor]:
    """[token, *state] before the first step."""
    begun = self.rule.begin(self.index)
    return [self._pack(begun.token), *begun.state]

  def run_one(
    self, is_preadmitted: bool, token: tf.Tensor, *state: tf.Tensor
  ) -> list[tf.Tensor]:
    """Runs one step.

    Args:
      is_preadmitted: Whether the token admits the contribution in advance.
      token: The packed token of the last step.
      *state: The state of the update rule.

    Returns:
      [token, *state] after the step.
    """
    last = step_token.LAYOUT.unpack(token)
    began = None if self.recorder is None else step_token.now(*state)
    step = self.rule.contribute(
      self._compute,
      self.index,
      state,
      token=last if is_preadmitted else last._replace(preadmitted_tag=None),
      records_times=self.recorder is not None,
    )
    packed = self._pack(step.token)
    if self.recorder is not None:
      self.recorder.record_step(
        self.name,
        last.global_step,
        began,
        step.computed,
        step_token.LAYOUT.unpack(packed),
        step.state,
      )
    return [packed, *step.state]

  def run_many(
    self,
    is_preadmitted: bool,
    max_steps: tf.Tensor,
    token: tf.Tensor,
    *state: tf.Tensor,
  ) -> list[tf.Tensor]:
    """Runs steps while each token admits in advance, or while none does.

    Args:
      is_preadmitted: Which of the two; must be true of `token`.
      max_steps: int32 scalar, how many steps at most.
      token: The packed token of the last step.
      *state: The state of the update rule.

    Returns:
      [number of steps as an int32 scalar, token, *state].
    """

    def goes_on(count, token, *_):
      last = step_token.LAYOUT.unpack(token)
      has_tag = last.preadmitted_tag != step_token.NO_TAG
      is_same = has_tag == is_preadmitted
      is_open = last.global_step != step_token.ENDED
      return (count < max_steps) & is_same & is_open

    def run(count, token, *state):
      return [count + 1, *self.run_one(is_preadmitted, token, *state)]

    return tf.while_loop(goes_on, run, [tf.constant(0), token, *state])

  def _compute(self, parameters, scale_loss) -> model_replica.Gradients:
    return self.replica.gradients(parameters, next(self.iterator), scale_loss)

  def _pack(self, token: step_token.StepToken) -> tf.Tensor:
    with tf.device(self.ps_device):
      packed = step_token.LAYOUT.pack(token)
    with tf.device(self.device):
      return tf.identity(packed)
