"""Defines the integer codes that replicas and the chief exchange.

A *contribution* is what a replica computed from one batch. Its *tag*, an int64,
identifies it among those of the replica. A replica *offers* a contribution
before it sends the gradients. The chief *admits* it by giving it one of the N
*places* of the step, one for each contribution that the step averages.
"""

import enum

# Contributions that are this many steps late, or later, are counted together.
MAX_LATE = 10


class MessageType(enum.IntEnum):
  """The type of a message in the chief's inbox, a queue on PS task 0.

  A contribution is one replica's gradients for one update. OFFER asks the chief
  to admit a contribution to the step. DELIVERED reports that all gradients of a
  contribution have arrived. NONFINITE reports that a loss or a gradient is not
  finite. LOST reports that a replica is lost. WAKE makes the chief stop waiting
  for messages. EXPIRED reports that the step has exceeded its deadline.
  """

  OFFER = 0
  DELIVERED = 1
  NONFINITE = 2
  LOST = 3
  WAKE = 4
  EXPIRED = 5


class Status(enum.IntEnum):
  """The state of one replica, as the chief last recorded it.

  A contribution is one replica's gradients for one update. COMPUTING: the
  replica has no unanswered contribution. WAITING: the replica has offered a
  contribution that the step has not admitted yet. ADMITTED: the step has
  admitted the contribution, and its gradients are awaited. DELIVERED: the
  gradients have arrived. LOST: the replica is lost, and another one may take
  its place in the step. SKIPPED: the replica is lost, or a step exceeded its
  deadline because of it; steps need one contribution less until the replica
  offers one again.
  """

  COMPUTING = 0
  WAITING = 1
  ADMITTED = 2
  DELIVERED = 3
  LOST = 4
  SKIPPED = 5


class Verdict(enum.IntEnum):
  """The chief's reply to a contribution that a replica has offered.

  A contribution is one replica's gradients for one update, identified by an
  integer tag. ADMIT: the step takes the contribution, so the replica must send
  its gradients. RELEASE: the replica continues with the next step. CONTINUE: as
  RELEASE, but the replica's next contribution, whose tag is this one's plus 1,
  is admitted already. This saves the offer where every step needs every
  replica. VOID: as RELEASE, but the contribution was not used, because the
  replica has offered a newer one, was declared lost, or has a new chief. NONE:
  there is no reply.
  """

  NONE = -1
  ADMIT = 0
  RELEASE = 1
  CONTINUE = 2
  VOID = 3
