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
  """The type of a message to the chief.

  OFFER asks for a place in the step. DELIVERED reports that the gradients have
  arrived. NONFINITE reports that the loss or a gradient is not finite. LOST
  reports that a replica is lost. WAKE ends the chief's wait for messages.
  """

  OFFER = 0
  DELIVERED = 1
  NONFINITE = 2
  LOST = 3
  WAKE = 4


class Status(enum.IntEnum):
  """The state of one replica, as the chief last recorded it.

  COMPUTING: the replica has no open contribution. WAITING: its contribution has
  no place yet. ADMITTED: its contribution has a place, and the gradients are
  awaited. DELIVERED: the gradients have arrived. LOST: the chief does not wait
  for the replica.
  """

  COMPUTING = 0
  WAITING = 1
  ADMITTED = 2
  DELIVERED = 3
  LOST = 4


class Verdict(enum.IntEnum):
  """The chief's reply to a contribution that a replica has offered.

  ADMIT: the contribution has a place; send its gradients. RELEASE: continue
  with the next step. CONTINUE: as RELEASE, and the replica's next contribution,
  whose tag is this one's plus 1, has a place already. This saves the offer
  where every step needs every replica. VOID: as RELEASE, but the contribution
  was not used: the replica has offered a newer one, was declared lost, or has a
  new chief. NONE: no reply.
  """

  NONE = -1
  ADMIT = 0
  RELEASE = 1
  CONTINUE = 2
  VOID = 3
