"""Defines the loop in which a replica computes gradients and sends them.

One call of a `tf.function` makes many steps. A call for each step would be
slower: a call of a function that runs on several tasks costs milliseconds
(TensorFlow 2.21).
"""

import dataclasses
from collections.abc import Iterator
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_replicas.drivers import timeline
from tf_replicas.replica import model_replica
from tf_replicas.rules import base as rule_base
from tf_replicas.rules import step_token
from tf_replicas.runtime import put_back as put_back_lib


class _Step(NamedTuple):
  """What a step has made.

  Attributes:
    token: The answer of the update rule to the gradients, packed.
    state: The state of the update rule after the step.
    kept: What is needed to put the batch back: a bool scalar, whether the
      gradients were refused and no update was made since; then the tensors of
      the batch. Empty if batches are not put back.
  """

  token: tf.Tensor
  state: Sequence[tf.Tensor]
  kept: list[tf.Tensor]


@dataclasses.dataclass(frozen=True)
class ReplicaLoop:
  """Makes the steps of one replica, inside a `tf.function`.

  In a step, the replica computes gradients, sends them, waits for the answer
  and reads the variables. Each step takes and returns a list of tensors,
  [token, *state]. The *token* is the answer of the update rule to the gradients
  of the step before: a `StepToken`, packed into one tensor. The *state* is what
  the update rule carries from step to step, such as the parameters.

  Normally, a step asks for admission before it sends its gradients. If the
  token *admits* the next gradients *in advance*, the step sends them without
  asking.

  Attributes:
    rule: The update rule.
    replica: Computes the gradients.
    iterator: The iterator over the replica's batches.
    index: The number of this replica; an int or an int64 scalar.
    device: The device where this replica computes; None: where the function
      runs.
    recorder: Writes the timeline, a file of what the replica does when; None:
      there is no timeline.
    name: The replica's name in the timeline; a string or a string tensor.
    put_back: Holds a batch that the next step has to use again: the gradients
      of the step before were refused, and no update was made since. None: each
      step uses a new batch.
  """

  rule: rule_base.UpdateRule
  replica: model_replica.Replica
  iterator: Iterator
  index: int | tf.Tensor
  device: str | None
  recorder: timeline.Recorder | None = None
  name: str | tf.Tensor = ""
  put_back: put_back_lib.PutBack | None = None

  def begin(self) -> list[tf.Tensor]:
    """Reads the parameters, and makes the input of the first step.

    Returns:
      [token, *state].
    """
    begun = self.rule.begin(self.index)
    with tf.device(self.device):
      packed = step_token.LAYOUT.pack(begun.token)
    if self.put_back is not None:
      # An earlier loop may have left a batch.
      with tf.control_dependencies([self.put_back.clear()]):
        packed = tf.identity(packed)
    return [packed, *begun.state]

  def run_one(
    self, token: tf.Tensor, *state: tf.Tensor, is_preadmitted: bool
  ) -> list[tf.Tensor]:
    """Computes and sends the gradients of one batch, and waits for the answer.

    Args:
      token: The token of the step before.
      *state: The state of the update rule after the step before.
      is_preadmitted: Whether `token` admits the gradients in advance. It must
        be known when the function is traced.

    Returns:
      [token, *state] after this step.
    """
    step = self._run_step(token, state, is_preadmitted=is_preadmitted)
    return [self._after_put(step.token, step.kept), *step.state]

  def run_many(
    self,
    max_steps: tf.Tensor,
    token: tf.Tensor,
    *state: tf.Tensor,
    is_preadmitted: bool,
  ) -> list[tf.Tensor]:
    """Runs several steps, either all admitted in advance or none of them.

    It stops when the next step is not of the same kind, at the end of the
    training, or after `max_steps`.

    Args:
      max_steps: int32 scalar, the largest number of steps.
      token: The token of the step before.
      *state: The state of the update rule after the step before.
      is_preadmitted: Whether the steps are those that are admitted in advance.
        Then `token` must admit the first one.

    Returns:
      [number of steps made as an int32 scalar, token, *state].
    """

    def goes_on(count, kept, token, *_):
      del kept
      last = step_token.LAYOUT.unpack(token)
      has_tag = last.preadmitted_tag != step_token.NO_TAG
      is_same = has_tag == is_preadmitted
      is_open = last.global_step != step_token.ENDED
      return (count < max_steps) & is_same & is_open

    # A refusal ends a loop of steps that were admitted in advance. So it is
    # enough to keep the batch of the last step, and to put it back after the
    # loop. Putting it back within each step made short steps 3% longer.
    put_back = self.put_back if is_preadmitted else None

    def run(count, kept, token, *state):
      if put_back is None:
        one = self.run_one(token, *state, is_preadmitted=is_preadmitted)
        return [count + 1, kept, *one]
      step = self._run_step(token, state, is_preadmitted=is_preadmitted)
      return [count + 1, step.kept, step.token, *step.state]

    kept, shapes = [], []
    if put_back is not None:
      with tf.device(self.device):
        kept = [tf.constant(False), *put_back.no_batch()]
      shapes = [tf.TensorShape([]), *put_back.loop_shapes]
    count, kept, packed, *after = tf.while_loop(
      goes_on,
      run,
      [tf.constant(0), kept, token, *state],
      shape_invariants=[
        tf.TensorShape([]),
        shapes,
        token.shape,
        *(tensor.shape for tensor in state),
      ],
    )
    return [count, self._after_put(packed, kept), *after]

  def _run_step(
    self, token: tf.Tensor, state: Sequence[tf.Tensor], *, is_preadmitted: bool
  ) -> _Step:
    """Makes a step, as `run_one` says, and does not put its batch back."""
    last = step_token.LAYOUT.unpack(token)
    began = None if self.recorder is None else step_token.now(*state)
    batches = []

    def compute(parameters, scale_loss) -> model_replica.Gradients:
      batches.append(self._next_batch(is_preadmitted=is_preadmitted))
      return self.replica.gradients(parameters, batches[-1], scale_loss)

    step = self.rule.contribute(
      compute,
      self.index,
      state,
      token=last if is_preadmitted else last._replace(preadmitted_tag=None),
      records_times=self.recorder is not None,
    )
    with tf.device(self.device):
      packed = step_token.LAYOUT.pack(step.token)
    reply = step.token
    if self.recorder is not None:
      self.recorder.record_step(
        self.name,
        last.global_step,
        began,
        step.computed,
        reply,
        step.state,
      )
    kept = []
    if self.put_back is not None:
      (batch,) = batches
      with tf.device(self.device):
        is_same = reply.global_step == last.global_step
        is_refused = reply.admitted == 0
        kept = [is_refused & is_same, *self.put_back.flatten(batch)]
    return _Step(packed, step.state, kept)

  def _after_put(
    self, packed: tf.Tensor, kept: Sequence[tf.Tensor]
  ) -> tf.Tensor:
    """Puts a batch back if it is wanted, and returns `packed` after that.

    Args:
      packed: The token after the step, packed.
      kept: The attribute `kept` of the step.
    """
    if self.put_back is None or not kept:
      return packed
    is_wanted, *tensors = kept
    put = self.put_back.put(tensors, is_wanted)
    with tf.device(self.device), tf.control_dependencies([put]):
      return tf.identity(packed)  # Else the next step may not find the batch.

  def _next_batch(self, *, is_preadmitted: bool) -> object:
    # The answer that refuses a batch admits nothing in advance, so the next
    # step, which uses the batch again, is one that asks.
    if self.put_back is None or is_preadmitted:
      return next(self.iterator)
    return self.put_back.take(self.iterator)
