"""Computes the state of a synchronous step from replicas' messages.

The *ledger* records the state of every replica and which contributions (sets of
gradients) the step has accepted. `contributions`, which explains the protocol,
keeps it in variables on PS task 0. Three pure functions of tensors compute the
next ledger: `record` enters one message of a replica, `settle` gives the free
places of the step (one for each contribution that it averages) to waiting
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
  them. APPLIED counts contributions used in an update. SURPLUS counts those
  refused because N others came first, and those whose replica was lost after
  they had been admitted. From `LATE` on, column `LATE - 1 + k` counts the
  contributions that were refused because they were computed from variables k
  steps old; column `LATE - 1 + protocol.MAX_LATE` counts older ones too. The
  last column, `MISSED`, counts the updates that were made from fewer
  contributions than usual, without the replica.
  """

  APPLIED = 0
  SURPLUS = 1
  LATE = 2


MISSED = Column.LATE + protocol.MAX_LATE
NUM_COLUMNS = MISSED + 1


class Place(NamedTuple):
  """One place of a step, which takes one of the N contributions it averages.

  A contribution is one replica's gradients for one update. The fields are those
  of a row of `Ledger.accepted`. `places` returns a `Place` whose fields have
  the values of all rows.

  Attributes:
    replica: The index of the replica whose contribution was delivered for the
      place; -1 if the place is open.
    tag: The tag that identifies this contribution; -1 if the place is open.
  """

  replica: tf.Tensor
  tag: tf.Tensor

  @property
  def is_taken(self) -> tf.Tensor:
    """Whether a contribution (set of gradients) was delivered for the place."""
    return self.replica >= 0


def places(accepted: tf.Tensor) -> Place:
  """Splits `Ledger.accepted`, which has a row per place, into its columns.

  A place takes one of the N contributions (sets of gradients) that a step
  averages.

  Args:
    accepted: int64 [N, 2].

  Returns:
    A `Place` whose fields are int64 [N].
  """
  return Place(accepted[:, 0], accepted[:, 1])


class Ledger(NamedTuple):
  """The state of a synchronous step, as the chief records it.

  A contribution is one replica's gradients for one update, identified by an
  integer tag. A step averages N contributions of R replicas. Tensors are int64
  unless noted.

  Attributes:
    status: [R], the `protocol.Status` of each replica.
    tag: [R], the tag of each replica's last contribution; -1 before the first.
    accepted: [N, 2], a `Place` for each contribution of the step.
    examples: Scalar, the number of examples in the accepted contributions.
    loss: float64 scalar, the sum of the losses of the accepted contributions.
    delivered_at: float64 scalar, when the last accepted contribution arrived,
      in seconds since 1970; `step_token.NEVER` if none has.
    counts: [R, NUM_COLUMNS], the number of contributions of each replica by
      outcome; `Column` lists the outcomes.
    held_up: float64 [R], the seconds for which steps waited for each replica
      alone.
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

  All fields are int64 scalars, except `loss` and `time`, which are float64.

  Attributes:
    kind: A `protocol.MessageType`.
    replica: The index of the replica that the message is about; -1 for WAKE.
    tag: The tag that identifies the contribution (that replica's gradients for
      one update).
    step: The global step of the variables that the replica used.
    examples: The number of examples in the replica's batch.
    loss: The mean loss of the replica's batch.
    time: When `collect` took the message, in seconds since 1970.
  """

  kind: tf.Tensor
  replica: tf.Tensor
  tag: tf.Tensor
  step: tf.Tensor
  examples: tf.Tensor
  loss: tf.Tensor
  time: tf.Tensor


class Replies(NamedTuple):
  """The replies that one message to the chief causes; int64 [R] each.

  A contribution is one of the R replicas' gradients for one update.

  Attributes:
    verdict: The `protocol.Verdict` for the last contribution of each replica,
      or NONE.
    flush: For each replica, the tag of a void (unused) contribution for whose
      reply some process still waits, so that a VOID reply must be sent; or -1.
  """

  verdict: tf.Tensor
  flush: tf.Tensor


class Collected(NamedTuple):
  """The contributions that the chief has collected for a step.

  A contribution is one replica's gradients for one update.
  `Contributions.collect` returns this. All fields are scalars on PS task 0,
  except `present`.

  Attributes:
    kind: int64, a `protocol.MessageType`: DELIVERED when the step is complete,
      else the type of the message that ended the wait early (NONFINITE, WAKE).
    replica: int64, the index of the replica that sent the last message.
    step: int64, the global step of the contributions.
    examples: int64, the number of examples in the contributions.
    count: The number of contributions: an int, or float64.
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
  """Returns the ledger, the recorded state of a step, before any message.

  All replicas are computing, and the step has no contribution yet.

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


class _Event(NamedTuple):
  """The meaning of one message to the chief, for each of R replicas.

  All fields are bool [R], and true at most for the replica that the message is
  about. A contribution is one replica's gradients for one update.

  Attributes:
    is_offer: The replica offers a contribution.
    is_late: The replica offers a contribution computed from variables of an
      earlier step.
    is_delivered: An admitted contribution of the replica has arrived.
    is_void: A contribution has arrived that is not the replica's last one.
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
    can_skip: Whether a step may have fewer contributions: none of replicas
      that are lost or from which none came before the deadline (EXPIRED).

  Returns:
    The ledger after the message, and the replies to send now. All other replies
    result from `settle` and `finish`.
  """
  steps_late = tf.maximum(step - message.step, 0)
  event = _interpret(ledger, message, steps_late > 0)
  was_admitted = ledger.status == protocol.Status.ADMITTED
  # A lost replica that delivers later is rejected.
  gave_up_place = event.is_lost & was_admitted

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
  late_column = Column.LATE - 1 + tf.minimum(steps_late, protocol.MAX_LATE)
  recorded = _accept(ledger, message, event.is_delivered)._replace(
    status=status,
    tag=_set(ledger.tag, event.is_offer, message.tag),
    # Few messages change the counts, which are by far the largest part.
    counts=tf.cond(
      tf.reduce_any(event.is_late | gave_up_place),
      lambda: (
        ledger.counts
        + _in_column(event.is_late, late_column)
        + _in_column(gave_up_place, Column.SURPLUS)
      ),
      lambda: ledger.counts,
    ),
  )

  is_open = ledger.status >= protocol.Status.WAITING
  is_open &= ledger.status < protocol.Status.LOST
  none = tf.fill(ledger.status.shape, tf.cast(protocol.Verdict.NONE, tf.int64))
  flush = _set(none, event.is_void, message.tag)
  flush = tf.where(
    (event.is_offer & is_open) | gave_up_place, ledger.tag, flush
  )
  verdict = _set(none, event.is_late, protocol.Verdict.RELEASE)
  return recorded, Replies(verdict, flush)


def _interpret(ledger: Ledger, message: Message, is_late: tf.Tensor) -> _Event:
  """Finds out what a message to the chief means.

  Args:
    ledger: The recorded state of the step before the message.
    message: The message.
    is_late: bool scalar, whether the replica used variables of an earlier step.
  """
  replicas = tf.range(ledger.status.shape[0], dtype=tf.int64)
  this = replicas == message.replica
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


def _accept(
  ledger: Ledger, message: Message, is_delivered: tf.Tensor
) -> Ledger:
  """Records a delivered contribution in the first open place of the step.

  A contribution is one replica's gradients for one update, and a place takes
  one of the N contributions that a step averages.

  Args:
    ledger: The recorded state of the step before the delivery.
    message: The message that reports the delivery.
    is_delivered: bool [R], true for the replica whose contribution has arrived;
      nothing changes if all are false.

  Returns:
    The ledger after the delivery.
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

  A contribution is one replica's gradients for one update. A step of N
  contributions of R replicas needs N, or fewer if `quorum` allows it, N is at
  most R, and some replicas are skipped: then the share of the other replicas
  that `quorum` names.

  Args:
    ledger: The recorded state of the step.
    quorum: How many contributions the step needs, of how many replicas.

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
  """Returns, as a bool scalar, whether the step has its contributions.

  A contribution is one replica's gradients for one update. An admitted one that
  has not arrived is waited for.

  Args:
    ledger: The recorded state of the step.
    quorum: How many contributions the step needs, of how many replicas.
  """
  count = _count(places(ledger.accepted).is_taken)
  is_enough = count >= num_needed(ledger, quorum)
  if not quorum.can_shrink:
    return is_enough
  # The share may have shrunk after the admission.
  return is_enough & ~tf.reduce_any(ledger.status == protocol.Status.ADMITTED)


def is_waiting(ledger: Ledger) -> tf.Tensor:
  """Returns, as bool [R], whether each of R replicas waits for the chief.

  A replica waits until the step admits its gradients, and after they were
  delivered until the chief lets it continue.

  Args:
    ledger: The recorded state of the step.
  """
  return (ledger.status == protocol.Status.WAITING) | (
    ledger.status == protocol.Status.DELIVERED
  )


def settle(
  ledger: Ledger, quorum: quorum_lib.Quorum
) -> tuple[Ledger, tf.Tensor]:
  """Gives the free places of the step to waiting replicas.

  A place takes one of the N contributions (sets of gradients) that a step
  averages. This is a pure function.

  Args:
    ledger: The recorded state of the step.
    quorum: How many contributions the step needs, of how many replicas.

  Returns:
    The new ledger; and int64 [R], for each of the R replicas the
    `protocol.Verdict` that answers its last contribution: ADMIT for a waiting
    replica that gets a place; CONTINUE for a replica that has delivered and
    gets another place of the same step (if there are more places than
    replicas); else NONE.
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

  The first true elements stay true.
  """
  return condition & (tf.cumsum(tf.cast(condition, tf.int64)) <= limit)


def _num_accepted(ledger: Ledger) -> tf.Tensor:
  """Counts the accepted contributions of each replica, as int64 [R].

  A contribution is one replica's gradients for one update.

  Args:
    ledger: The recorded state of the step.
  """
  owners = places(ledger.accepted).replica  # Open places, -1, are left out.
  return tf.math.unsorted_segment_sum(
    tf.ones_like(owners), owners, ledger.status.shape[0]
  )


def _in_column(values: tf.Tensor, column: int | tf.Tensor) -> tf.Tensor:
  """Makes an int64 [R, NUM_COLUMNS] tensor that is zero but for one column.

  It is added to `Ledger.counts`, which has a row per replica.

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
  """Ends the step: counts which contributions were used, and empties the step.

  A contribution is one replica's gradients for one update. This is a pure
  function.

  Args:
    ledger: The recorded state of the step.
    can_skip: Whether the step may have fewer contributions, as `record` says.

  Returns:
    The ledger of the next step; and int64 [R], for each of the R replicas the
    `protocol.Verdict` that answers its last contribution: for a replica that
    waits, RELEASE, or CONTINUE if a step averages at least one contribution of
    every replica; for other replicas NONE.
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
  """Reports the progress of a step from its ledger.

  Args:
    state: The recorded state of the step, as NumPy arrays.
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
  """Returns how many sets of gradients of each replica were used or refused.

  Args:
    state: The recorded state of a step, as NumPy arrays, with the counts since
      the start of training.
  """
  rows = zip(state.counts.tolist(), state.held_up.tolist(), strict=True)
  return [
    results.Counts(
      applied, surplus, tuple(late), straggler_wait_secs=secs, missed=missed
    )
    for (applied, surplus, *late, missed), secs in rows
  ]
