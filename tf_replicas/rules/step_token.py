"""Defines the token that lets a replica continue, and the times in it.

`rules.protocol` explains contributions, tags and admission.
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
  """The times at which a contribution reached each stage.

  All fields are float64 scalars in seconds since 1970, by the clock of PS task
  0, or `NEVER` for a stage that was not reached. They are sent as int64
  microseconds.

  Attributes:
    admitted: When the contribution was admitted, if the replica had to ask.
    delivered: When all gradients of the contribution were on the PS tasks.
    applied: When the contribution was applied, if the replica did so itself.
    released: When the replica could continue.
  """

  admitted: tf.Tensor | float
  delivered: tf.Tensor | float
  applied: tf.Tensor | float
  released: tf.Tensor | float


class StepToken(NamedTuple):
  """The reply that a replica receives to a contribution.

  The successor of the tokens of TF1's `SyncReplicasOptimizer`. All fields are
  int64 scalars, except `times`.

  Attributes:
    admitted: 1 if the contribution was used, else 0.
    global_step: The global step to continue from, or `ENDED`.
    preadmitted_tag: The tag under which the replica's next contribution is
      already admitted, or `NO_TAG`. None, instead of a tensor, if it is known
      while tracing that there is no such tag.
    times: The fields of `Times`, as one int64 [4] tensor in microseconds.
  """

  admitted: records.Int
  global_step: Annotated[tf.Tensor, tf.int64]
  preadmitted_tag: Annotated[tf.Tensor | int | None, tf.int64]
  times: Annotated[tf.Tensor, tf.int64]


LAYOUT = records.Layout(StepToken, tf.int64, times=_NUM_TIMES)


def first(step: tf.Tensor) -> StepToken:
  """Returns a replica's first token, after it read the variables of `step`."""
  no_tag = tf.constant(NO_TAG, tf.int64)
  return StepToken(0, step, no_tag, pack_times())


def never() -> tf.Tensor:
  """Returns `NEVER` as a float64 scalar."""
  return tf.constant(NEVER, tf.float64)


def now(*after: tf.Tensor) -> tf.Tensor:
  """Reads the clock once the tensors `after` are computed.

  Returns:
    Seconds since 1970, a float64 scalar.
  """
  with tf.control_dependencies(after):
    return tf.timestamp()


def clocked(values: T) -> tuple[tf.Tensor, T]:
  """Reads the clock once all tensors of a structure are computed.

  Args:
    values: The structure; its leaves may be None.

  Returns:
    The time, as `now` returns it, and copies of the tensors. Ops that use the
    copies run after the clock was read.
  """
  there = [value for value in tf.nest.flatten(values) if value is not None]
  time = now(*there)
  with tf.control_dependencies([time]):
    return time, tf.nest.map_structure(
      lambda value: None if value is None else tf.identity(value), values
    )


def microseconds(secs: tf.Tensor) -> tf.Tensor:
  """Converts seconds to int64 microseconds, to be sent with other int64."""
  return tf.cast(tf.round(secs * 1e6), tf.int64)


def pack_times(
  admitted: tf.Tensor | float = NEVER,
  delivered: tf.Tensor | float = NEVER,
  applied: tf.Tensor | float = NEVER,
  released: tf.Tensor | float = NEVER,
) -> tf.Tensor:
  """Packs the fields of `Times`, in seconds, into an int64 [4] tensor.

  Returns:
    The times in microseconds.
  """
  times = Times(admitted, delivered, applied, released)
  return microseconds(
    tf.stack([tf.convert_to_tensor(t, tf.float64) for t in times])
  )
