"""Computes the state of a synchronous step from replicas' messages.

A step makes one update from the mean of N contributions, each of which is one
replica's gradients. It has N *places*, one for each. The *ledger* records the
state of every replica, and which contributions the step has accepted. The class
`Contributions`, which keeps the ledger in variables on PS task 0, explains the
protocol.

Three pure functions of tensors compute the next ledger: `record` enters one
message of a replica, `settle` gives the free places of the step to waiting
replicas, and `finish` ends the step. This module uses neither queues nor
devices.
"""

import enum
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tf_replicas.rules import protocol
from tf_replicas.rules import results
from tf_replicas.rules import step_token
from tf_replicas.rules.sync import quorum as quorum_lib


class Column(enum.IntEnum):
  """The columns of `Ledger.counts`, which counts contributions by outcome.

  A contribution is one replica's gradients for one update, which averages N of
  them.

  Attributes:
    APPLIED: Contributions that were used in an update.
    SURPLUS: Contributions that were refused because N others came first, or
      because of what happened before their gradients had arrived: their replica
      was lost, exceeded a deadline, or made another offer, as a replica does
      that was started again. Also those that a new chief has dropped.
    LATE: The first of `protocol.MAX_LATE` columns: column `LATE - 1 + k` is for
      contributions that were refused because they were computed from variables
      k steps old. The last of these columns is also for older ones.

  One more column, with the index `MISSED`, counts updates instead: those that
  were made from fewer than N contributions, without this replica.
  """

  APPLIED = 0
  SURPLUS = 1
  LATE = 2


MISSED = Column.LATE + protocol.MAX_LATE
NUM_COLUMNS = MISSED + 1
# `Ledger.tag` of a replica that may compute from variables that a checkpoint
# has replaced. Its next offer is refused.
ABANDONED = -2


class Place(NamedTuple):
  """One of the N places of a step, each of which takes one contribution.

  A contribution is one replica's gradients for one update, which averages N of
  them. The fields are the columns of `Ledger.accepted`. `places` returns a
  `Place` whose fields are whole columns.

  Attributes:
    replica: The index of the replica whose contribution has arrived for the
      place; -1 if none has.
    tag: The integer that identifies this contribution among those of the
      replica; -1 if none has arrived.
  """

  replica: tf.Tensor
  tag: tf.Tensor

  @property
  def is_taken(self) -> tf.Tensor:
    """Whether a contribution (set of gradients) has arrived for the place."""
    return self.replica >= 0


def places(accepted: tf.Tensor) -> Place:
  """Splits `Ledger.accepted` into its columns.

  A step averages N contributions (sets of gradients). It has a place for each,
  and `accepted` has a row for each place.

  Args:
    accepted: int64 [N, 2].

  Returns:
    A `Place` whose fields are int64 [N].
  """
  return Place(accepted[:, 0], accepted[:, 1])


class Ledger(NamedTuple):
  """The state of a synchronous step, as the chief records it.

  A contribution is one replica's gradients for one update. Its tag is an
  integer that identifies it among those of the replica. A step averages N
  contributions of R replicas. A contribution is accepted when it was admitted
  and its gradients have arrived. Tensors are int64 unless noted.

  Attributes:
    status: [R], the `protocol.Status` of each replica.
    tag: [R], the tag of each replica's last contribution; -1 before the first;
      `ABANDONED` (-2) if the replica may compute from variables that a
      checkpoint has replaced.
    accepted: [N, 2], a row for each place of the step, with the fields of
      `Place`: which contribution has arrived for it.
    examples: Scalar, the number of examples in the accepted contributions.
    loss: float64 scalar, the sum of the losses of the accepted contributions.
    delivered_at: float64 scalar, the time at which the latest accepted
      contribution arrived, in seconds since 1970; `step_token.NEVER` if none
      has arrived.
    counts: [R, NUM_COLUMNS], the number of contributions of each replica by
      outcome, since the start of training; `Column` lists the outcomes.
    held_up: float64 [R], for each replica the total time in seconds for which
      steps waited for this replica only.
  """

  status: tf.Tensor
  tag: tf.Tensor
  accepted: tf.Tensor
  examples: tf.Tensor
  loss: tf.Tensor
  delivered_at: tf.Tensor
  counts: tf.Tensor
  held_up: tf.Tensor


class Message(NamedTuple):
  """One message in the chief's inbox, a queue on PS task 0.

  A contribution is one replica's gradients for one update. All fields are int64
  scalars, except `loss` and `time`, which are float64.

  Attributes:
    kind: A `protocol.MessageType`.
    replica: The index of the replica that the message is about; -1 if it is
      about none (WAKE, EXPIRED).
    tag: The integer that identifies the contribution among those of the
      replica.
    step: The global step of the variables that the replica used; for EXPIRED,
      the step that has exceeded its deadline.
    examples: The number of examples in the replica's batch.
    loss: The mean loss of the replica's batch.
    time: The time at which the chief took the message out of the inbox, in
      seconds since 1970.
  """

  kind: tf.Tensor
  replica: tf.Tensor
  tag: tf.Tensor
  step: tf.Tensor
  examples: tf.Tensor
  loss: tf.Tensor
  time: tf.Tensor


class Replies(NamedTuple):
  """The replies that the chief must send after one message.

  A contribution is one replica's gradients for one update, and its tag an
  integer that identifies it. Both fields are int64 [R], with an element for
  each of the R replicas.

  Attributes:
    verdict: The `protocol.Verdict` to send to the replica as the reply to its
      last contribution; `NONE` to send no reply.
    flush: The tag of a contribution that is void (will not be used) although a
      process still waits for the reply to it. A VOID reply to this tag must be
      sent. -1 if there is no such contribution.
  """

  verdict: tf.Tensor
  flush: tf.Tensor


class Collected(NamedTuple):
  """What `Contributions.collect` returns: the contributions to one step.

  A contribution is one replica's gradients for one update. All fields are
  scalars on PS task 0, except `present`.

  Attributes:
    kind: int64, a `protocol.MessageType`: DELIVERED if the step has all its
      contributions. Otherwise the type of the message that ended the wait
      early: NONFINITE or WAKE.
    replica: int64, the index of the replica that sent the last message.
    step: int64, the global step of the contributions.
    examples: int64, the number of examples in the contributions.
    count: The number of contributions: an int, or a float64 scalar if steps may
      have fewer than N.
    loss: float64, the mean loss of the contributions.
    present: bool [V], for each of the V elements of `store.contributed` (the
      trainable variables, then the variables without gradients), whether any
      replica has a gradient for it.
  """

  kind: tf.Tensor
  replica: tf.Tensor
  step: tf.Tensor
  examples: tf.Tensor
  count: int | tf.Tensor
  loss: tf.Tensor
  present: tf.Tensor


def new_ledger(num_replicas: int, replicas_to_aggregate: int) -> Ledger:
  """Returns the ledger (the recorded state of a step) of a new training.

  All replicas are computing, and no contribution has arrived.

  Args:
    num_replicas: R, the number of replicas.
    replicas_to_aggregate: N, the number of contributions (sets of gradients)
      that a step averages.

  Returns:
    A ledger of NumPy arrays.
  """
  return Ledger(
    status=np.full([num_replicas], protocol.Status.COMPUTING, np.int64),
    tag=np.full([num_replicas], -1, np.int64),
    accepted=np.full([replicas_to_aggregate, 2], -1, np.int64),
    examples=np.int64(0),
    loss=np.float64(0),
    delivered_at=np.float64(step_token.NEVER),
    counts=np.zeros([num_replicas, NUM_COLUMNS], np.int64),
    held_up=np.zeros([num_replicas], np.float64),
  )


def cleared(ledger: Ledger, *, is_restored: bool = False) -> Ledger:
  """Returns the ledger of a step that begins anew, without contributions.

  A contribution is one replica's gradients for one update. Those that the step
  had accepted or admitted, and those that waited, count as refused. This is a
  pure function.

  Args:
    ledger: The recorded state of the step so far.
    is_restored: Whether the variables have been restored from a checkpoint. A
      replica without an open contribution then computes from variables that are
      not in use any more, and its next offer is refused.
  """
  refused = _num_accepted(ledger)
  for status in (protocol.Status.WAITING, protocol.Status.ADMITTED):
    refused += tf.cast(ledger.status == status, tf.int64)
  empty = new_ledger(len(ledger.status), len(ledger.accepted))
  if is_restored:
    tag = tf.where(_is_open(ledger), empty.tag, ABANDONED)
    empty = empty._replace(tag=tag)
  return empty._replace(
    counts=ledger.counts + _in_column(refused, Column.SURPLUS),
    held_up=ledger.held_up,
  )


class _Event(NamedTuple):
  """The meaning of one message to the chief, for each of R replicas.

  A contribution is one replica's gradients for one update. All fields are bool
  [R], and false for all replicas that the message is not about.

  Attributes:
    is_offer: The replica offers a contribution.
    is_late: The replica offers a contribution computed from variables of an
      earlier step.
    is_delivered: The gradients of an admitted contribution have arrived.
    is_void: The gradients of a contribution have arrived, but it is not the
      replica's last contribution.
    is_lost: The replica is lost, and was not waiting for a reply.
  """

  is_offer: tf.Tensor
  is_late: tf.Tensor
  is_delivered: tf.Tensor
  is_void: tf.Tensor
  is_lost: tf.Tensor


def record(
  ledger: Ledger,
  message: Message,
  step: tf.Tensor,
  *,
  can_skip: bool = False,
) -> tuple[Ledger, Replies]:
  """Enters one message in the ledger, the recorded state of a step.

  This is a pure function.

  Args:
    ledger: The ledger before the message.
    message: A message from the chief's inbox.
    step: int64 scalar, the current global step.
    can_skip: Whether a step may have fewer than N contributions. Replicas that
      are lost, or that have sent nothing when the message EXPIRED comes, are
      then marked as skipped: the step does without them.

  Returns:
    The ledger after the message; and the replies that follow from the message
    alone. `settle` and `finish` return all other replies.
  """
  # The chief may have gone back to an older checkpoint. What was computed from
  # variables before that is then not of this training any more.
  is_abandoned = _is_sender(ledger, message) & (ledger.tag == ABANDONED)
  is_abandoned = (message.step > step) | tf.reduce_any(is_abandoned)
  steps_late = tf.where(
    is_abandoned, tf.int64.max, tf.maximum(step - message.step, 0)
  )
  event = _interpret(ledger, message, steps_late > 0)
  was_admitted = ledger.status == protocol.Status.ADMITTED
  # A lost replica that delivers later is rejected.
  gave_up_place = event.is_lost & was_admitted
  was_waiting = ledger.status == protocol.Status.WAITING
  is_replaced = event.is_offer & (was_admitted | was_waiting)

  status = _set(ledger.status, event.is_offer, protocol.Status.WAITING)
  status = _set(status, event.is_late, protocol.Status.COMPUTING)
  gone = protocol.Status.SKIPPED if can_skip else protocol.Status.LOST
  status = _set(status, event.is_lost, gone)
  status = _set(status, event.is_delivered, protocol.Status.DELIVERED)
  if can_skip:
    # A report of an earlier step comes too late.
    is_skipped = tf.logical_not(is_waiting(ledger))
    is_skipped &= message.kind == protocol.MessageType.EXPIRED
    is_skipped &= message.step == step
    status = _set(status, is_skipped, protocol.Status.SKIPPED)
    gave_up_place |= is_skipped & was_admitted
  is_surplus = gave_up_place | is_replaced
  late_column = Column.LATE - 1 + tf.minimum(steps_late, protocol.MAX_LATE)
  recorded = _accept(ledger, message, event.is_delivered)._replace(
    status=status,
    tag=_set(ledger.tag, event.is_offer, message.tag),
    # Few messages change the counts, which are by far the largest part.
    counts=tf.cond(
      tf.reduce_any(event.is_late | is_surplus),
      lambda: (
        ledger.counts
        + _in_column(event.is_late, late_column)
        + _in_column(is_surplus, Column.SURPLUS)
      ),
      lambda: ledger.counts,
    ),
  )

  none = tf.fill(ledger.status.shape, tf.cast(protocol.Verdict.NONE, tf.int64))
  flush = _set(none, event.is_void, message.tag)
  flush = tf.where(
    (event.is_offer & _is_open(ledger)) | gave_up_place, ledger.tag, flush
  )
  verdict = _set(none, event.is_late, protocol.Verdict.RELEASE)
  return recorded, Replies(verdict, flush)


def _interpret(ledger: Ledger, message: Message, is_late: tf.Tensor) -> _Event:
  """Finds out what a message to the chief means for each replica.

  Args:
    ledger: The recorded state of the step before the message.
    message: The message.
    is_late: bool scalar, whether the message is about variables of another
      step.
  """
  this = _is_sender(ledger, message)
  is_last = ledger.tag == message.tag
  was_admitted = ledger.status == protocol.Status.ADMITTED
  is_offer = this & (message.kind == protocol.MessageType.OFFER)
  is_delivery = this & (message.kind == protocol.MessageType.DELIVERED)
  is_loss = this & (message.kind == protocol.MessageType.LOST)
  return _Event(
    is_offer=is_offer,
    is_late=is_offer & is_late,
    is_delivered=is_delivery & is_last & was_admitted,
    is_void=is_delivery & ~is_last,
    is_lost=is_loss & is_last & ~is_waiting(ledger),
  )


def _is_sender(ledger: Ledger, message: Message) -> tf.Tensor:
  """Returns, as bool [R], which of the R replicas a message is about."""
  replicas = tf.range(ledger.status.shape[0], dtype=tf.int64)
  return replicas == message.replica


def _accept(
  ledger: Ledger, message: Message, is_delivered: tf.Tensor
) -> Ledger:
  """Records that a contribution has arrived, in the first open place.

  A contribution is one replica's gradients for one update. A step averages N of
  them, and has a place for each. If this contribution is the last of the N, the
  time since the arrival of the one before is added to `Ledger.held_up` of the
  replica.

  Args:
    ledger: The recorded state of the step before the arrival.
    message: The message that reports the arrival.
    is_delivered: bool [R], true for the replica whose contribution has arrived;
      nothing changes if all are false.

  Returns:
    The ledger after the arrival.
  """
  num_places = ledger.accepted.shape[0]
  has_delivered = tf.reduce_any(is_delivered)
  place = _count(places(ledger.accepted).is_taken)
  row = (tf.range(num_places, dtype=tf.int64) == place) & has_delivered
  was_awaited = is_delivered & (place == num_places - 1)
  was_awaited &= ledger.delivered_at != step_token.NEVER
  waited = message.time - ledger.delivered_at

  def if_delivered(value):
    return tf.where(has_delivered, value, tf.zeros_like(value))

  return ledger._replace(
    accepted=tf.where(
      row[:, None],
      tf.stack(Place(message.replica, message.tag))[None],
      ledger.accepted,
    ),
    examples=ledger.examples + if_delivered(message.examples),
    loss=ledger.loss + if_delivered(message.loss),
    delivered_at=tf.where(has_delivered, message.time, ledger.delivered_at),
    held_up=ledger.held_up
    + tf.where(was_awaited, waited, tf.zeros([], tf.float64)),
  )


def num_needed(ledger: Ledger, quorum: quorum_lib.Quorum) -> int | tf.Tensor:
  """Computes how many contributions the step needs.

  A contribution is one replica's gradients for one update. A step needs N of
  them. It needs fewer only if `quorum` allows it, N is at most the number of
  replicas, and replicas are skipped (`protocol.Status.SKIPPED`): then it needs
  the number that `quorum` gives for the replicas that are not skipped.

  Args:
    ledger: The recorded state of the step.
    quorum: How many contributions an update needs, by the number of replicas.

  Returns:
    An int, or an int64 scalar.
  """
  num_places = int(ledger.accepted.shape[0] or 0)
  num_replicas = int(ledger.status.shape[0] or 0)
  if not quorum.can_shrink or num_places > num_replicas:
    return num_places
  status = tf.convert_to_tensor(ledger.status)
  here = _count(status != protocol.Status.SKIPPED)
  return tf.clip_by_value(quorum.of(here), quorum.least, num_places)


def is_complete(ledger: Ledger, quorum: quorum_lib.Quorum) -> tf.Tensor:
  """Returns, as a bool scalar, whether the step has all its contributions.

  A contribution is one replica's gradients for one update. The step is not
  complete while a contribution that it has admitted has not arrived.

  Args:
    ledger: The recorded state of the step.
    quorum: How many contributions an update needs, by the number of replicas.
  """
  is_taken = places(ledger.accepted).is_taken
  if not quorum.can_shrink:
    return tf.reduce_all(is_taken)
  is_enough = _count(is_taken) >= num_needed(ledger, quorum)
  # The share may have shrunk after the admission.
  return is_enough & ~tf.reduce_any(ledger.status == protocol.Status.ADMITTED)


def is_waiting(ledger: Ledger) -> tf.Tensor:
  """Returns, as bool [R], which of the R replicas wait for a reply.

  A replica waits from its offer of gradients until they are admitted, and again
  from their arrival on the PS tasks until the chief lets it continue.

  Args:
    ledger: The recorded state of the step.
  """
  return (ledger.status == protocol.Status.WAITING) | (
    ledger.status == protocol.Status.DELIVERED
  )


def _is_open(ledger: Ledger) -> tf.Tensor:
  """Returns, as bool [R], which of the R replicas have an open contribution.

  A contribution is one replica's gradients for one update. It is open from the
  replica's offer until the step has used or refused it.

  Args:
    ledger: The recorded state of the step.
  """
  is_open = ledger.status >= protocol.Status.WAITING
  return is_open & (ledger.status < protocol.Status.LOST)


def settle(
  ledger: Ledger, quorum: quorum_lib.Quorum
) -> tuple[Ledger, tf.Tensor]:
  """Gives the free places of the step to waiting replicas.

  A step averages N contributions (sets of gradients), and has a place for each.
  This is a pure function.

  Args:
    ledger: The recorded state of the step.
    quorum: How many contributions an update needs, by the number of replicas.

  Returns:
    The new ledger; and int64 [R], for each of the R replicas the
    `protocol.Verdict` to send as the reply to its last contribution. ADMIT: the
    replica was waiting and has got a place. CONTINUE: its gradients have
    arrived, and it has got another place of the same step, which happens only
    if there are more places than replicas. NONE: no reply.
  """
  num_replicas = ledger.status.shape[0]
  num_places = ledger.accepted.shape[0]
  waiting = ledger.status == protocol.Status.WAITING
  if num_places <= num_replicas:  # Each replica at most once.
    waiting &= _num_accepted(ledger) == 0
  free = num_needed(ledger, quorum) - _count(places(ledger.accepted).is_taken)
  free -= _count(ledger.status == protocol.Status.ADMITTED)
  admit = _first(waiting, free)
  again = tf.zeros_like(admit)
  if num_places > num_replicas:
    again = ledger.status == protocol.Status.DELIVERED
    again = _first(again, free - _count(admit))
  ledger = ledger._replace(
    status=_set(ledger.status, admit | again, protocol.Status.ADMITTED),
    tag=ledger.tag + tf.cast(again, tf.int64),
  )
  verdict = tf.fill([num_replicas], tf.cast(protocol.Verdict.NONE, tf.int64))
  verdict = _set(verdict, admit, protocol.Verdict.ADMIT)
  return ledger, _set(verdict, again, protocol.Verdict.CONTINUE)


def _count(condition: tf.Tensor) -> tf.Tensor:
  return tf.reduce_sum(tf.cast(condition, tf.int64))


def _first(condition: tf.Tensor, limit: tf.Tensor) -> tf.Tensor:
  """Returns a copy of `condition` with at most `limit` true elements.

  The first `limit` true elements stay true; the others become false.
  """
  return condition & (tf.cumsum(tf.cast(condition, tf.int64)) <= limit)


def _num_accepted(ledger: Ledger) -> tf.Tensor:
  """Counts the contributions of each replica that have arrived for the step.

  A contribution is one replica's gradients for one update.

  Args:
    ledger: The recorded state of the step.

  Returns:
    int64 [R].
  """
  owners = places(ledger.accepted).replica  # Open places, -1, are left out.
  return tf.math.unsorted_segment_sum(
    tf.ones_like(owners), owners, ledger.status.shape[0]
  )


def _in_column(values: tf.Tensor, column: int | tf.Tensor) -> tf.Tensor:
  """Makes an int64 [R, NUM_COLUMNS] tensor that is zero except in one column.

  It is to be added to `Ledger.counts`, which has a row per replica.

  Args:
    values: [R], the values in the column.
    column: The index of the column.
  """
  is_column = tf.one_hot(column, NUM_COLUMNS, dtype=tf.int64)
  return tf.cast(values, tf.int64)[:, None] * is_column


def _set(
  values: tf.Tensor, where: tf.Tensor, value: int | tf.Tensor
) -> tf.Tensor:
  """Returns a copy of `values`, int64, with `value` where `where` is true."""
  return tf.where(where, tf.cast(value, tf.int64), values)


def finish(
  ledger: Ledger, *, can_skip: bool = False
) -> tuple[Ledger, tf.Tensor]:
  """Ends the step: counts the outcomes of contributions, and clears the step.

  A contribution is one replica's gradients for one update. This is a pure
  function.

  Args:
    ledger: The recorded state of the step.
    can_skip: Whether a step may have fewer than N contributions. If this one
      has, it is counted as missed by the replicas that were skipped.

  Returns:
    The ledger of the next step; and int64 [R], for each of the R replicas the
    `protocol.Verdict` to send as the reply to its last contribution. A replica
    that waits gets RELEASE, or CONTINUE if every step needs every replica (N is
    at least R). Other replicas get NONE.
  """
  num_replicas = ledger.status.shape[0]
  num_places = ledger.accepted.shape[0]
  waits = is_waiting(ledger)
  is_surplus = ledger.status == protocol.Status.WAITING
  counts = _in_column(_num_accepted(ledger), Column.APPLIED)
  counts += _in_column(is_surplus, Column.SURPLUS)
  if can_skip:
    is_missed = ledger.status == protocol.Status.SKIPPED
    is_missed &= ~tf.reduce_all(places(ledger.accepted).is_taken)
    counts += _in_column(is_missed, MISSED)
  status, verdict = protocol.Status.COMPUTING, protocol.Verdict.RELEASE
  tag = ledger.tag
  if num_places >= num_replicas:
    status, verdict = protocol.Status.ADMITTED, protocol.Verdict.CONTINUE
    tag += tf.cast(waits, tf.int64)
  none = tf.fill([num_replicas], tf.cast(protocol.Verdict.NONE, tf.int64))
  return (
    Ledger(
      status=_set(ledger.status, waits, status),
      tag=tag,
      accepted=-tf.ones_like(ledger.accepted),
      examples=tf.zeros_like(ledger.examples),
      loss=tf.zeros_like(ledger.loss),
      delivered_at=tf.constant(step_token.NEVER, tf.float64),
      counts=ledger.counts + counts,
      held_up=ledger.held_up,
    ),
    _set(none, waits, verdict),
  )


def step_status(state: Ledger) -> results.StepStatus:
  """Reports from the ledger which contributions to the step have arrived.

  Args:
    state: The recorded state of the step, as NumPy arrays.

  Returns:
    The number of contributions (sets of gradients) that have arrived, the
    number N of a full step, and the status and last tag of each replica.
  """
  rows = zip(state.status.tolist(), state.tag.tolist(), strict=True)
  return results.StepStatus(
    received=int(places(state.accepted).is_taken.sum()),
    needed=len(state.accepted),
    replicas=[
      results.ReplicaStatus(protocol.Status(status), tag)
      for status, tag in rows
    ],
  )


def counts_from_ledger(state: Ledger) -> list[results.Counts]:
  """Reports how many contributions of each replica were used or refused.

  A contribution is one replica's gradients for one update.

  Args:
    state: The ledger, as NumPy arrays.

  Returns:
    One `Counts` per replica, for the time since the start of training.
  """
  rows = zip(state.counts.tolist(), state.held_up.tolist(), strict=True)
  return [
    results.Counts(
      applied, surplus, tuple(late), straggler_wait_secs=secs, missed=missed
    )
    for (applied, surplus, *late, missed), secs in rows
  ]
