"""Defines the token, the reply that lets a replica continue.

A replica receives it for a contribution, its gradients for one update. The
token contains the times at which the contribution reached each stage of the
update. `rules.protocol` explains contributions, tags and admission.
"""

from typing import Annotated
from typing import NamedTuple
from typing import TypeVar

import tensorflow as tf

from tf_replicas.runtime import records

T = TypeVar("T")

# The global step of a token that says that training has ended.
ENDED = -1
# `preadmitted_tag` where the next contribution is not admitted in advance.
NO_TAG = -1
# The time of what did not happen.
NEVER = 0.0
_NUM_TIMES = 4


class Times(NamedTuple):
  """The times at which a contribution reached each stage of an update.

  A contribution is one replica's gradients for one update. All fields are
  float64 scalars in seconds since 1970, by the clock of PS task 0, or `NEVER`
  (0.0) for a stage that was not reached. They are sent as int64 microseconds.

  Attributes:
    admitted: When the update rule accepted the contribution, if the replica had
      to ask before it sent the gradients.
    delivered: When all gradients of the contribution were on the PS tasks.
    applied: When the gradients were applied to the variables, if the replica
      itself applied them.
    released: When the replica was allowed to continue with its next step.
  """

  admitted: tf.Tensor | float
  delivered: tf.Tensor | float
  applied: tf.Tensor | float
  released: tf.Tensor | float


class StepToken(NamedTuple):
  """The reply that a replica receives to a contribution.

  A contribution is one replica's gradients for one update; an integer tag
  identifies it. The token takes the place of the integer tokens of TF1's
  `SyncReplicasOptimizer`. All fields are int64 scalars, except `times`.

  Attributes:
    admitted: 1 if the contribution was used, else 0.
    global_step: The global step to continue from, or `ENDED` (-1) if training
      has ended.
    preadmitted_tag: The tag under which the replica's next contribution is
      accepted in advance, so that the replica need not ask, or `NO_TAG` (-1).
      None, instead of a tensor, if it is known while tracing that there is no
      such tag.
    times: The fields of `Times`, as one int64 [4] tensor in microseconds.
  """

  admitted: records.Int
  global_step: Annotated[tf.Tensor, tf.int64]
  preadmitted_tag: Annotated[tf.Tensor | int | None, tf.int64]
  times: Annotated[tf.Tensor, tf.int64]


LAYOUT = records.Layout(StepToken, tf.int64, times=_NUM_TIMES)


def first(step: tf.Tensor) -> StepToken:
  """Returns the token with which a replica begins its first step.

  The replica has contributed nothing yet. So the token has only a global step:
  `admitted` is 0, the tag is `NO_TAG`, and all times are `NEVER`.

  Args:
    step: int64 scalar, the global step at which the replica read the variables.
  """
  no_tag = tf.constant(NO_TAG, tf.int64)
  return StepToken(0, step, no_tag, pack_times())


def never() -> tf.Tensor:
  """Returns `NEVER`, the time of what did not happen, as a float64 scalar."""
  return tf.constant(NEVER, tf.float64)


def now(*after: tf.Tensor) -> tf.Tensor:
  """Reads the clock of the current device once some tensors are computed.

  Args:
    *after: The tensors to wait for.

  Returns:
    Seconds since 1970, a float64 scalar.
  """
  with tf.control_dependencies(after):
    return tf.timestamp()


def clocked(values: T) -> tuple[tf.Tensor, T]:
  """Reads the clock once all tensors of a structure are computed.

  Args:
    values: The structure; its leaves are tensors or None.

  Returns:
    The time, in seconds since 1970, a float64 scalar; and a copy of the
    structure. Ops that use the copied tensors run after the clock was read.
  """
  there = [value for value in tf.nest.flatten(values) if value is not None]
  time = now(*there)
  with tf.control_dependencies([time]):
    return time, tf.nest.map_structure(
      lambda value: None if value is None else tf.identity(value), values
    )


def microseconds(secs: tf.Tensor) -> tf.Tensor:
  """Converts float64 seconds to int64 microseconds.

  So times can be packed into one tensor with other int64 values.
  """
  return tf.cast(tf.round(secs * 1e6), tf.int64)


def pack_times(
  admitted: tf.Tensor | float = NEVER,
  delivered: tf.Tensor | float = NEVER,
  applied: tf.Tensor | float = NEVER,
  released: tf.Tensor | float = NEVER,
) -> tf.Tensor:
  """Packs the times of a contribution into an int64 [4] tensor.

  A contribution is one replica's gradients for one update.

  Args:
    admitted: When the contribution was accepted, in seconds since 1970.
    delivered: When its gradients had arrived, in seconds since 1970.
    applied: When its gradients were applied, in seconds since 1970.
    released: When its replica could continue, in seconds since 1970.

  Returns:
    The times in microseconds, in the order of the arguments.
  """
  times = Times(admitted, delivered, applied, released)
  return microseconds(
    tf.stack([tf.convert_to_tensor(t, tf.float64) for t in times])
  )
