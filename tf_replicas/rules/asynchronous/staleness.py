"""Defines policies for stale gradients, which can be combined.

The *staleness* of a gradient is the number of updates made after its variables
were read and before the gradient is applied.
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Policy:
  """A policy for stale gradients in asynchronous updates.

  The staleness of a gradient is the number of updates made after its variables
  were read and before the gradient is applied. Each of the functions is
  optional. For example, this policy divides the learning rate by the square
  root of the staleness plus 1:

      Policy("root", rate_factor=lambda s: tf.math.rsqrt(s + 1.0))

  Attributes:
    name: The name of the policy, equal in all programs of a training.
    admits: Maps the staleness, an int64 scalar, to a bool scalar: whether the
      gradients are applied. A refused set of gradients is dropped as a whole,
      and counted. None: all gradients are applied.
    rate_factor: Maps the staleness, a float32 scalar, to a scalar by which the
      learning rate is multiplied. None: the rate is not changed.
    compensate: Maps (gradient, the variable's present value, its value when the
      replica read it), dense tensors of one shape, to the gradient to apply.
      None: the gradient is not changed.
    max_lead: The largest number of updates by which a replica may be ahead of
      the slowest one. A replica that is further ahead waits before it reads.
      None: no replica waits.
  """

  name: str
  admits: Callable[[tf.Tensor], tf.Tensor] | None = None
  rate_factor: Callable[[tf.Tensor], tf.Tensor] | None = None
  compensate: Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor] | None = (
    None
  )
  max_lead: int | None = None

  def __post_init__(self):
    if self.max_lead is not None and self.max_lead < 0:
      raise ValueError(
        f"`max_lead` must not be negative. Received: {self.max_lead}."
      )


def drop_stale(max_staleness: int) -> Policy:
  """Makes a policy that drops gradients that are too stale.

  The staleness of a gradient is the number of updates made after its variables
  were read and before the gradient is applied. The policy does what
  `DropStaleGradientOptimizer` of TF1's contrib did. Here, the staleness is
  exact even if several replicas apply gradients at the same time.

  Args:
    max_staleness: The largest staleness with which gradients are applied.

  Returns:
    The policy, with `admits`; give it to `AsyncReplicasOptimizer`.

  Raises:
    ValueError: If `max_staleness` is negative.
  """
  if max_staleness < 0:
    raise ValueError(
      f"`max_staleness` must not be negative. Received: {max_staleness}."
    )
  return Policy(
    f"drop_stale({max_staleness})", admits=lambda s: s <= max_staleness
  )


def bounded_staleness(max_lead: int) -> Policy:
  """Makes a policy by which fast replicas wait for the slowest one.

  A replica that is more than `max_lead` updates ahead of the slowest replica
  waits before it reads the variables. This is the stale-synchronous parameter
  server (Ho et al. 2013, section 2): a read includes all updates of every
  replica, except at most the last `max_lead` of each. Without this policy no
  replica waits.

  If `max_lead` is 0, all replicas read the same values, and all apply their
  gradients before any of them reads again. These are synchronous steps, in each
  of which M replicas make M updates.

  Args:
    max_lead: The largest number of updates by which a replica may be ahead, at
      least 0.

  Returns:
    The policy, with `max_lead`; give it to `AsyncReplicasOptimizer`.

  Raises:
    ValueError: If `max_lead` is negative.
  """
  return Policy(f"bounded_staleness({max_lead})", max_lead=max_lead)


def staleness_aware() -> Policy:
  """Makes a policy that divides the learning rate by the staleness, if above 1.

  The staleness of a gradient is the number of updates made after its variables
  were read and before the gradient is applied. After Zhang et al. 2015,
  "Staleness-aware async-SGD", section 3.

  Returns:
    The policy, with `rate_factor`; give it to `AsyncReplicasOptimizer`.
  """
  return Policy(
    "staleness_aware", rate_factor=lambda s: 1.0 / tf.maximum(s, 1.0)
  )


def delay_compensated(variance: float) -> Policy:
  """Makes a policy that corrects stale gradients to first order.

  A stale gradient was computed from values of the variables that have changed
  since. To a gradient `g`, the policy adds `variance * g * g * (now - read)`,
  where `now` is the variable's present value, and `read` the value that the
  replica read. This is DC-ASGD with a constant factor (Zheng et al. 2017,
  section 4).

  Args:
    variance: The factor of the correction.
      `DelayCompensatedGradientDescentOptimizer` of TF1's contrib calls it
      `variance_parameter`.

  Returns:
    The policy, with `compensate`; give it to `AsyncReplicasOptimizer`.
  """
  return Policy(
    f"delay_compensated({variance})",
    compensate=lambda g, now, read: g + variance * g * g * (now - read),
  )


def combine(policies: Sequence[Policy]) -> Policy:
  """Combines policies for stale gradients into one.

  Args:
    policies: The policies. If there are none, the result changes nothing.

  Returns:
    A policy that applies gradients if all policies admit them. It multiplies
    the learning rate by all rate factors, makes the compensations in the order
    of `policies`, and has the smallest `max_lead`.
  """
  admits = [p.admits for p in policies if p.admits]
  factors = [p.rate_factor for p in policies if p.rate_factor]
  compensations = [p.compensate for p in policies if p.compensate]
  leads = [p.max_lead for p in policies if p.max_lead is not None]

  def all_admit(staleness):
    return tf.reduce_all([admit(staleness) for admit in admits])

  def product(staleness):
    return tf.reduce_prod([factor(staleness) for factor in factors])

  def compensate(gradient, now, read):
    for step in compensations:
      gradient = step(gradient, now, read)
    return gradient

  return Policy(
    "+".join(p.name for p in policies) or "none",
    admits=all_admit if admits else None,
    rate_factor=product if factors else None,
    compensate=compensate if compensations else None,
    max_lead=min(leads, default=None),
  )
