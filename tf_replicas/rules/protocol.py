"""Defines the integer codes that replicas and the chief exchange.

A *contribution* is one replica's gradients for one update, with their loss. Its
*tag* is an int64 that identifies it among the contributions of the same
replica. A *step* makes one update, from the mean of N contributions; it has N
*places*, one for each. A replica *offers* a contribution to the step before it
sends the gradients. The chief *admits* the contribution by giving it a free
place.
"""

import enum

# Contributions that are this many steps late, or later, are counted together.
MAX_LATE = 10
# A global step that no training reaches, for rules that have no limit.
NO_LIMIT = 1 << 60


class MessageType(enum.IntEnum):
  """The type of a message in the chief's inbox, a queue on PS task 0.

  A contribution is one replica's gradients for one update.

  Attributes:
    OFFER: A replica asks the chief to admit a contribution to the step.
    DELIVERED: All gradients of a contribution are on the PS tasks.
    NONFINITE: A replica computed a loss or a gradient that is not finite.
    LOST: A replica does not answer any more.
    WAKE: The chief must stop waiting for messages.
    EXPIRED: The step has exceeded its deadline.
  """

  OFFER = 0
  DELIVERED = 1
  NONFINITE = 2
  LOST = 3
  WAKE = 4
  EXPIRED = 5


class Status(enum.IntEnum):
  """The state of one replica, as the chief last recorded it.

  A contribution is one replica's gradients for one update.

  Attributes:
    COMPUTING: The replica has no contribution that waits for a reply.
    WAITING: The replica has offered a contribution, and the step has not
      admitted it yet.
    ADMITTED: The step has admitted the contribution. Its gradients have not all
      arrived.
    DELIVERED: The gradients have arrived. The replica waits for the update.
    LOST: The replica is lost. The step still needs N contributions, so another
      replica may contribute in its place.
    SKIPPED: The step does without the replica, which is lost or exceeded the
      deadline of a step. Only if updates may have fewer than N contributions.
      Ends when the replica makes an offer.
  """

  COMPUTING = 0
  WAITING = 1
  ADMITTED = 2
  DELIVERED = 3
  LOST = 4
  SKIPPED = 5


class Verdict(enum.IntEnum):
  """The chief's reply to a contribution that a replica has offered.

  A contribution is one replica's gradients for one update; an integer tag
  identifies it. The reply comes with a global step, `step_token.ENDED` if
  training has ended.

  Attributes:
    NONE: There is no reply.
    ADMIT: The step takes the contribution. The replica must send its gradients.
    RELEASE: The replica must go on to its next step, or stop if training has
      ended. If training goes on, gradients that had arrived were used, and a
      contribution that was still waiting for admission was refused.
    CONTINUE: As RELEASE, but the replica's next contribution is already
      admitted, under this tag plus 1, so that the replica need not offer it. If
      a step takes several contributions of a replica, the next one may be for
      the same step.
    VOID: The replica must go on to its next step, and the contribution was not
      used: a newer offer of the same replica replaced it, the replica was
      declared lost, or a new chief has begun.
  """

  NONE = -1
  ADMIT = 0
  RELEASE = 1
  CONTINUE = 2
  VOID = 3
