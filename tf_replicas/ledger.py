"""What every replica is doing and what the step has accepted: pure rules.

The ledger is the memory of `contributions`: it lives in variables on PS task 0
and changes by three pure functions of tensors. `record` notes one message of a
replica, `settle` gives the free places of the step to those who wait for one,
`finish` ends the step. Nothing here knows of queues or devices.
"""

import enum
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tf_replicas import releases

# Offers that are this many steps late or more are counted together.
MAX_LATE = 10
_SURPLUS = 1  # The column of counts.


class Kind(enum.IntEnum):
  """What a message in the inbox says."""

  OFFER = 0
  DELIVERED = 1
  NONFINITE = 2
  LOST = 3
  WAKE = 4


class Status(enum.IntEnum):
  """What a replica is doing, as far as the ledger knows."""

  COMPUTING = 0
  WAITING = 1
  ADMITTED = 2
  DELIVERED = 3
  LOST = 4


class Verdict(enum.IntEnum):
  """What a reply tells a replica.

  CONTINUE is RELEASE and ADMIT in one: the next contribution is admitted in
  advance, under the tag that follows. It saves the offer where every replica
  is needed for every step anyway. VOID is RELEASE for a contribution whose
  place was given to another.
  """

  NONE = -1
  ADMIT = 0
  RELEASE = 1
  CONTINUE = 2
  VOID = 3


class Ledger(NamedTuple):
  """The state of a step; R replicas, N places. All int64 where not said.

  Attributes:
    status: [R] `Status` of each replica.
    tag: [R] tag of its last offer.
    accepted: [N, 2] (replica, tag) of each delivered contribution, -1 where
      the place is open.
    examples: Scalar, examples in the accepted contributions.
    loss: float64 scalar, sum of their losses.
    delivered_at: float64 scalar, when the last of them was delivered; NEVER if
      none was yet.
    counts: [R, 2 + MAX_LATE] contributions applied, surplus or lost after they
      were admitted, late by 1, 2, ….
    held_up: float64 [R], seconds for which steps lacked nothing but this
      replica's contribution.
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
  """One message of a replica: int64 scalars, but float64 loss and time.

  The time is that of its arrival, in seconds since 1970.
  """

  kind: tf.Tensor
  replica: tf.Tensor
  tag: tf.Tensor
  step: tf.Tensor
  examples: tf.Tensor
  loss: tf.Tensor
  time: tf.Tensor


class Replies(NamedTuple):
  """What goes out after a message: int64 [R] each.

  Attributes:
    verdict: `Verdict` for the last offer of each replica.
    flush: A tag to release besides, of a void contribution, or -1.
  """

  verdict: tf.Tensor
  flush: tf.Tensor


class Collected(NamedTuple):
  """What `Contributions.collect` led to; tensors on PS task 0.

  Attributes:
    kind: int64, DELIVERED when the step is complete, else the kind of the
      message that ended the wait early (NONFINITE, WAKE).
    replica: int64, who sent that message.
    step: int64, the global step of these contributions.
    examples: int64, examples in them.
    loss: float64, their mean loss.
    present: bool [V], which variables got a gradient from anyone.
  """

  kind: tf.Tensor
  replica: tf.Tensor
  step: tf.Tensor
  examples: tf.Tensor
  loss: tf.Tensor
  present: tf.Tensor


def new_ledger(num_replicas: int, replicas_to_aggregate: int) -> Ledger:
  """An empty ledger: everyone computes, every place is open."""
  return Ledger(
    status=np.full([num_replicas], Status.COMPUTING, np.int64),
    tag=np.full([num_replicas], -1, np.int64),
    accepted=np.full([replicas_to_aggregate, 2], -1, np.int64),
    examples=np.int64(0),
    loss=np.float64(0),
    delivered_at=np.float64(releases.NEVER),
    counts=np.zeros([num_replicas, 2 + MAX_LATE], np.int64),
    held_up=np.zeros([num_replicas], np.float64),
  )


def record(
  ledger: Ledger, message: Message, step: tf.Tensor
) -> tuple[Ledger, Replies]:
  """Notes one message in the ledger; pure.

  Args:
    ledger: Before the message.
    message: From the inbox.
    step: The current global step.

  Returns:
    The ledger after it, and the replies that it causes at once.
  """
  num_replicas = ledger.status.shape[0]
  this = tf.range(num_replicas, dtype=tf.int64) == message.replica
  none = tf.fill([num_replicas], tf.constant(-1, tf.int64))

  def where_this(condition, value, otherwise):
    return tf.where(this & condition, tf.cast(value, tf.int64), otherwise)

  is_offer = message.kind == Kind.OFFER
  is_open = ledger.status >= Status.WAITING
  is_open &= ledger.status != Status.LOST
  late = tf.maximum(step - message.step, 0)
  is_late = is_offer & (late > 0)
  is_last = ledger.tag == message.tag
  was_owing = ledger.status == Status.ADMITTED
  delivered = this & was_owing & is_last & (message.kind == Kind.DELIVERED)
  is_void = (message.kind == Kind.DELIVERED) & ~is_last
  is_lost = (message.kind == Kind.LOST) & is_last & ~is_waiting(ledger)

  status = where_this(is_offer, Status.WAITING, ledger.status)
  status = where_this(is_late, Status.COMPUTING, status)
  status = where_this(is_lost, Status.LOST, status)
  status = _set(status, delivered, Status.DELIVERED)

  place = tf.reduce_sum(tf.cast(ledger.accepted[:, 0] >= 0, tf.int64))
  row = tf.range(ledger.accepted.shape[0], dtype=tf.int64) == place
  row &= tf.reduce_any(delivered)
  late_column = tf.minimum(late, MAX_LATE) + 1
  columns = tf.range(ledger.counts.shape[1], dtype=tf.int64)
  counted = (this & is_late)[:, None] & (columns == late_column)
  # If it lives, what it still delivers will be void.
  counted |= (this & is_lost & was_owing)[:, None] & (columns == _SURPLUS)
  credited = tf.reduce_any(delivered)
  was_awaited = delivered & (place == ledger.accepted.shape[0] - 1)
  was_awaited &= ledger.delivered_at != releases.NEVER
  awaited = message.time - ledger.delivered_at
  return (
    Ledger(
      status=status,
      tag=where_this(is_offer, message.tag, ledger.tag),
      accepted=tf.where(
        row[:, None],
        tf.stack([message.replica, message.tag])[None],
        ledger.accepted,
      ),
      examples=ledger.examples
      + tf.where(credited, message.examples, tf.zeros([], tf.int64)),
      loss=ledger.loss
      + tf.where(credited, message.loss, tf.zeros([], tf.float64)),
      delivered_at=tf.where(credited, message.time, ledger.delivered_at),
      counts=ledger.counts + tf.cast(counted, tf.int64),
      held_up=ledger.held_up
      + tf.where(was_awaited, awaited, tf.zeros([], tf.float64)),
    ),
    Replies(
      verdict=where_this(is_late, Verdict.RELEASE, none),
      flush=tf.where(
        this & ((is_offer & is_open) | (is_lost & was_owing)),
        ledger.tag,
        where_this(is_void, message.tag, none),
      ),
    ),
  )


def is_waiting(ledger: Ledger) -> tf.Tensor:
  """bool [R]: replicas that wait with all their work done."""
  return (ledger.status == Status.WAITING) | (ledger.status == Status.DELIVERED)


def settle(ledger: Ledger) -> tuple[Ledger, tf.Tensor]:
  """Gives the free places of the step to those who wait for one; pure.

  Returns:
    The ledger after it, and the `Verdict` for the tag that each replica had
    before: ADMIT; CONTINUE for one that delivered and is needed again within
    the step (more places than replicas); else NONE. int64 [R].
  """
  num_replicas = ledger.status.shape[0]
  num_places = ledger.accepted.shape[0]
  replicas = tf.range(num_replicas, dtype=tf.int64)
  waiting = ledger.status == Status.WAITING
  if num_places <= num_replicas:  # Each replica at most once.
    contributed = tf.reduce_any(
      ledger.accepted[:, :1] == replicas[None, :], axis=0
    )
    waiting &= ~contributed
  free = num_places - _count(ledger.accepted[:, 0] >= 0)
  free -= _count(ledger.status == Status.ADMITTED)
  admit = _first(waiting, free)
  again = tf.zeros_like(admit)
  if num_places > num_replicas:
    again = ledger.status == Status.DELIVERED
    again = _first(again, free - _count(admit))
  ledger = ledger._replace(
    status=_set(ledger.status, admit | again, Status.ADMITTED),
    tag=ledger.tag + tf.cast(again, tf.int64),
  )
  verdict = tf.fill([num_replicas], tf.cast(Verdict.NONE, tf.int64))
  verdict = _set(verdict, admit, Verdict.ADMIT)
  return ledger, _set(verdict, again, Verdict.CONTINUE)


def _count(condition: tf.Tensor) -> tf.Tensor:
  return tf.reduce_sum(tf.cast(condition, tf.int64))


def _first(condition: tf.Tensor, limit: tf.Tensor) -> tf.Tensor:
  """The first `limit` of those for whom `condition` holds."""
  return condition & (tf.cumsum(tf.cast(condition, tf.int64)) <= limit)


def _set(values: tf.Tensor, where: tf.Tensor, value: int) -> tf.Tensor:
  return tf.where(where, tf.cast(value, tf.int64), values)


def finish(ledger: Ledger) -> tuple[Ledger, tf.Tensor]:
  """Ends the step: counts, empties the places, releases who waits; pure.

  Returns:
    The ledger after it, and the `Verdict` for the tag that each replica had
    before: RELEASE, or CONTINUE where there is a place for everybody. int64
    [R].
  """
  num_replicas = ledger.status.shape[0]
  num_places = ledger.accepted.shape[0]
  replicas = tf.range(num_replicas, dtype=tf.int64)
  waits = is_waiting(ledger)
  applied = tf.reduce_sum(
    tf.cast(ledger.accepted[:, :1] == replicas[None, :], tf.int64), axis=0
  )
  surplus = tf.cast(ledger.status == Status.WAITING, tf.int64)
  zeros = tf.zeros([num_replicas, MAX_LATE], tf.int64)
  counts = tf.concat([applied[:, None], surplus[:, None], zeros], axis=1)
  status, tag, verdict = Status.COMPUTING, ledger.tag, Verdict.RELEASE
  if num_places >= num_replicas:
    status, verdict = Status.ADMITTED, Verdict.CONTINUE
    tag += tf.cast(waits, tf.int64)
  none = tf.fill([num_replicas], tf.cast(Verdict.NONE, tf.int64))
  return (
    Ledger(
      status=_set(ledger.status, waits, status),
      tag=tag,
      accepted=-tf.ones_like(ledger.accepted),
      examples=tf.zeros_like(ledger.examples),
      loss=tf.zeros_like(ledger.loss),
      delivered_at=tf.constant(releases.NEVER, tf.float64),
      counts=ledger.counts + counts,
      held_up=ledger.held_up,
    ),
    _set(none, waits, verdict),
  )
