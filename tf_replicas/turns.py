"""A replica's turns: compute, hand over, wait, read; over and over.

Where the replica's part of a step is put together from what it computes
(`towers`) and the update rule. Many turns are one call: between two calls of a
function that reaches over tasks pass milliseconds (TensorFlow 2.21).
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_replicas import parameter_store
from tf_replicas import releases
from tf_replicas import timeline
from tf_replicas import towers


class Turn(NamedTuple):
  """A replica's part in one step.

  Attributes:
    release: What `apply_gradients` returned last, with the step that the next
      state is of unless it is negative.
    state: What the replica goes on with.
    computed: float64 scalar, seconds since 1970: it had the last gradients;
      NEVER unless it `is_timed`.
  """

  release: releases.Release
  state: list[tf.Tensor]
  computed: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Turns:
  """The turns of one replica; methods are to be used inside a `tf.function`.

  They hand on a packed `Release`, since few tensors should cross from task to
  task, and the replica's state: one list, [last, *state].

  Attributes:
    store, optimizer, replica, iterator, index: As `contribute` takes them.
    device: Where this replica computes; None is where the function runs.
    recorder: Writes the timeline, if there is to be one.
    name: Of the replica there; a string, or a tensor of one.
  """

  store: parameter_store.ParameterStore
  optimizer: object
  replica: towers.Replica
  iterator: object
  index: int | tf.Tensor
  device: str | None
  recorder: timeline.Recorder | None = None
  name: str | tf.Tensor = ""

  def begin(self) -> list[tf.Tensor]:
    """Reads for the first turn."""
    step, state = begin(self.store, self.optimizer, self.index)
    return [self._pack(releases.first(step)), *state]

  def take(
    self, has_ticket: bool, last: tf.Tensor, *state: tf.Tensor
  ) -> list[tf.Tensor]:
    """Takes one turn, with the last release's ticket or without."""
    last = releases.unpack(last)
    began = None if self.recorder is None else releases.now(*state)
    turn = contribute(
      self.store,
      self.optimizer,
      self.replica,
      self.iterator,
      self.index,
      state,
      step=last.global_step,
      ticket=last.ticket if has_ticket else None,
      is_timed=self.recorder is not None,
    )
    packed = self._pack(turn.release)
    if self.recorder is not None:
      self.recorder.record_turn(
        self.name,
        last.global_step,
        began,
        turn.computed,
        releases.unpack(packed),
        turn.state,
      )
    return [packed, *turn.state]

  def take_some(
    self, has_ticket: bool, most: tf.Tensor, last: tf.Tensor, *state: tf.Tensor
  ) -> list[tf.Tensor]:
    """Takes turns as long as there is a ticket, or as there is none.

    Args:
      has_ticket: Which of these; true of the last release.
      most: int32 scalar, how many turns at most.
      last: The last release, packed.
      *state: What the replica carries.

    Returns:
      How many turns, an int32 scalar, and what `take` returns.
    """

    def goes_on(count, last, *_):
      last = releases.unpack(last)
      is_alike = (last.ticket >= 0) == has_ticket
      return (count < most) & is_alike & (last.global_step != releases.ENDED)

    def take(count, last, *state):
      return [count + 1, *self.take(has_ticket, last, *state)]

    return tf.while_loop(goes_on, take, [tf.constant(0), last, *state])

  def _pack(self, release: releases.Release) -> tf.Tensor:
    with tf.device(self.store.device_of_task(0)):
      packed = release.pack()
    with tf.device(self.device):
      return tf.identity(packed)


def begin(
  store: parameter_store.ParameterStore, optimizer, index: int | tf.Tensor
) -> tuple[tf.Tensor, list[tf.Tensor]]:
  """The global step, and the state that a replica begins with.

  The state is what a replica carries from one contribution to the next: the
  parameters, unless the update rule has a method `begin`, which says what else.
  """
  if hasattr(optimizer, "begin"):
    return optimizer.begin(index)
  return pull(store, optimizer, index)


def contribute(
  store: parameter_store.ParameterStore,
  optimizer,
  replica: towers.Replica,
  iterator,
  index: int | tf.Tensor,
  state: Sequence[tf.Tensor],
  *,
  step: tf.Tensor,
  ticket: tf.Tensor | None = None,
  is_timed: bool = False,
) -> Turn:
  """A replica's part in one step; to be used inside a `tf.function`.

  Computes, hands the gradient to the update rule, again with the same
  parameters if the rule wants more for this step, and pulls the parameters to
  go on with: their bytes leave as soon as the rule lets the replica go on. A
  rule with `refresh_every` lets it keep what it has instead, unless the new
  ticket is -1.

  Args:
    store: Holds the parameters.
    optimizer: The update rule; one that has a method `contribute` does all this
      its own way.
    replica: What to compute.
    iterator: Over the replica's batches.
    index: Which replica this is.
    state: As `begin` or the last call returned it: one tensor per element of
      the store's `contributed`, unless the rule has a way of its own.
    step: int64 scalar, the global step that it is of.
    ticket: That of the last release, unless -1.
    is_timed: Whether to look at the clock, for which others have to wait.
  """
  if hasattr(optimizer, "contribute"):
    return optimizer.contribute(
      lambda parameters: replica.gradients(
        parameters, next(iterator), optimizer.scale_loss
      ),
      index,
      state,
      step=step,
      ticket=ticket,
      is_timed=is_timed,
    )
  parameters = state
  paths = [store.specs[i].path for i in store.contributed]

  def one_batch(ticket):
    batch = next(iterator)
    result = replica.gradients(parameters, batch, optimizer.scale_loss)
    gradients = result.gradients
    computed = tf.constant(releases.NEVER, tf.float64)
    if is_timed:
      computed, (gradients, _) = releases.clocked((gradients, result.loss))
    release = optimizer.apply_gradients(
      zip(gradients, paths, strict=True),
      replica=index,
      local_step=step,
      loss=result.loss,
      num_examples=result.num_examples,
      ticket=ticket,
    )
    return release, computed

  release, computed = one_batch(ticket)
  if optimizer.replicas_to_aggregate > optimizer.total_num_replicas:
    release, computed = tf.while_loop(
      lambda last, _: (last.global_step == step) & (last.ticket >= 0),
      lambda last, _: one_batch(last.ticket),
      (release, computed),
    )
  kept = step, list(parameters)
  return Turn(*go_on(store, optimizer, index, release, kept), computed)


def go_on(
  store: parameter_store.ParameterStore,
  optimizer,
  index: int | tf.Tensor,
  release,
  kept: tuple[tf.Tensor, list[tf.Tensor]] | None = None,
):
  """The release, with the step of the parameters to go on with, and these.

  Args:
    store: Holds the parameters.
    optimizer: The update rule.
    index: Which replica this is.
    release: What `apply_gradients` returned.
    kept: What was pulled last, for a rule with `refresh_every`.
  """

  def read_anew():
    return pull(store, optimizer, index)

  with tf.control_dependencies([release.global_step]):
    if optimizer.refresh_every == 1:
      now, parameters = read_anew()
    else:
      is_due = tf.identity(release.ticket) < 0
      now, parameters = tf.cond(is_due, read_anew, lambda: kept)
  # A replica that was refused may be let go while an update is being made.
  with tf.device(store.device_of_task(0)):
    ended = release.global_step < 0
    step = tf.where(ended, release.global_step, now)
  return release._replace(global_step=step), parameters


def pull(
  store: parameter_store.ParameterStore,
  optimizer=None,
  index: int | tf.Tensor = 0,
) -> tuple[tf.Tensor, list[tf.Tensor]]:
  """The global step, and the parameters: one per `store.contributed`.

  An update rule that has a way of its own to read has a method `pull`.
  """
  if hasattr(optimizer, "pull"):
    step, values = optimizer.pull(index)
  else:
    step, values = store.pull()
  return step, [values[i] for i in store.contributed]
