"""The protocol between replicas and the chief: messages, states, verdicts."""

import enum

# Contributions that are this many steps late, or later, are counted together.
MAX_LATE = 10


class MessageType(enum.IntEnum):
  """The type of a message to the chief.

  OFFER asks for a place in the step. DELIVERED reports that the gradients have
  arrived; NONFINITE that a value is not finite; LOST that a replica is lost.
  WAKE makes the chief's wait end.
  """

  OFFER = 0
  DELIVERED = 1
  NONFINITE = 2
  LOST = 3
  WAKE = 4


class Status(enum.IntEnum):
  """What one replica is doing, as the chief last recorded it."""

  COMPUTING = 0
  WAITING = 1
  ADMITTED = 2
  DELIVERED = 3
  LOST = 4


class Verdict(enum.IntEnum):
  """The reply to a contribution that a replica has offered.

  A contribution has a number among those of its replica, its *tag*. A step has
  N *places*, one for each contribution that it averages.

  ADMIT: the contribution has a place; send its gradients. RELEASE: the step is
  over; continue with the next one. CONTINUE is RELEASE and ADMIT in one: the
  next contribution, with the next tag, has a place already. It saves the offer
  when every step needs every replica. VOID is RELEASE for a contribution that
  is not used, because another replica has its place.
  """

  NONE = -1
  ADMIT = 0
  RELEASE = 1
  CONTINUE = 2
  VOID = 3
