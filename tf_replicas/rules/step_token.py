"""Defines the token, the reply to a replica's gradients.

A replica receives a token in reply to each contribution (its gradients for one
update). The token says whether the contribution was used and from which global
step the replica continues. It also contains the times at which the contribution
reached each stage of the update. `rules.protocol` explains contributions, tags
and admission.
"""

from collections.abc import Callable
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
# The time of a stage that was not reached.
NEVER = 0.0
_NUM_TIMES = 4


class Times(NamedTuple):
  """The times at which a contribution reached each stage of an update.

  A contribution is one replica's gradients for one update. All fields are
  float64 scalars in seconds since 1970, by the clock of PS task 0. A field is
  `NEVER` (0.0) if the stage was not reached. `StepToken.times` holds the same
  times as int64 microseconds.

  Attributes:
    admitted: When the update rule accepted the contribution. `NEVER` if the
      replica sent the gradients without asking first.
    delivered: When all gradients of the contribution were on the PS tasks.
    applied: When the gradients were applied to the variables. `NEVER` if the
      chief applied them, not the replica itself.
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
    global_step: The global step from which the replica continues, or `ENDED`
      (-1) if training has ended.
    preadmitted_tag: The tag of the replica's next contribution if the chief has
      accepted it in advance, so that the replica need not ask; `NO_TAG` (-1) if
      it has not. None, instead of a tensor, has the same meaning as `NO_TAG`,
      but is known while a function is traced.
    times: The fields of `Times`, as one int64 [4] tensor in microseconds.
  """

  admitted: records.Int
  global_step: Annotated[tf.Tensor, tf.int64]
  preadmitted_tag: Annotated[tf.Tensor | int | None, tf.int64]
  times: Annotated[tf.Tensor, tf.int64]


LAYOUT = records.Layout(StepToken, tf.int64, times=_NUM_TIMES)


def first(step: tf.Tensor) -> StepToken:
  """Returns the token that a replica has before its first contribution.

  As nothing was contributed yet, `admitted` is 0, `preadmitted_tag` is
  `NO_TAG`, and all times are `NEVER`.

  Args:
    step: int64 scalar, the global step at which the replica read the variables.
      It becomes the token's `global_step`.
  """
  no_tag = tf.constant(NO_TAG, tf.int64)
  return StepToken(0, step, no_tag, pack_times())


def at_step(token: StepToken, step: tf.Tensor) -> StepToken:
  """Returns `token` with another global step, unless training has ended.

  A replica whose gradients were refused may read the variables while an update
  is being made. It then reads variables of a later step than its token names,
  so the token must be corrected.

  Args:
    token: The reply to a replica. If it says that training has ended, its
      global step is kept.
    step: int64 scalar, the global step at which the replica read the variables
      after the reply.
  """
  has_ended = token.global_step < 0
  return token._replace(
    global_step=tf.where(has_ended, token.global_step, step)
  )


def pull(
  token: StepToken | None,
  read: Callable[..., tuple[tf.Tensor, list[tf.Tensor]]],
) -> tuple[StepToken, list[tf.Tensor]]:
  """Reads the variables for a replica once `token` has arrived.

  Args:
    token: The reply to the replica's last gradients, on PS task 0. None: this
      is the first read.
    read: `ParameterStore.pull`, whose arguments `after` and `message` are still
      to be given.

  Returns:
    The token of the replica's next step (`at_step`, or `first`), and one tensor
    per variable, on the current device.
  """

  def message(step: tf.Tensor) -> tf.Tensor:
    return LAYOUT.pack(first(step) if token is None else at_step(token, step))

  after = [] if token is None else [token.global_step]
  vector, values = read(after=after, message=message)
  return LAYOUT.unpack(vector), values


def copy_here(device: str, token: StepToken) -> StepToken:
  """Copies a token to the current device, as one tensor.

  Args:
    device: The device of the token.
    token: The token.
  """
  with tf.device(device):
    packed = LAYOUT.pack(token)
  return LAYOUT.unpack(tf.identity(packed))


def never() -> tf.Tensor:
  """Returns `NEVER` as a float64 scalar: the time of a stage not reached."""
  return tf.constant(NEVER, tf.float64)


def now(*after: tf.Tensor) -> tf.Tensor:
  """Reads the clock of the current device after some tensors are computed.

  Args:
    *after: The tensors to wait for.

  Returns:
    Seconds since 1970, a float64 scalar.
  """
  with tf.control_dependencies(after):
    return tf.timestamp()


def clocked(values: T) -> tuple[tf.Tensor, T]:
  """Reads the clock after all tensors of a structure are computed.

  Args:
    values: A nested structure whose leaves are tensors or None.

  Returns:
    The time in seconds since 1970, a float64 scalar; and a copy of the
    structure. Ops that use the tensors of the copy run after the clock was
    read.
  """
  there = [value for value in tf.nest.flatten(values) if value is not None]
  time = now(*there)
  with tf.control_dependencies([time]):
    return time, tf.nest.map_structure(
      lambda value: None if value is None else tf.identity(value), values
    )


def microseconds(secs: tf.Tensor) -> tf.Tensor:
  """Converts float64 seconds to int64 microseconds.

  Times can then be packed into one tensor with other int64 values.
  """
  return tf.cast(tf.round(secs * 1e6), tf.int64)


def pack_times(
  admitted: tf.Tensor | float = NEVER,
  delivered: tf.Tensor | float = NEVER,
  applied: tf.Tensor | float = NEVER,
  released: tf.Tensor | float = NEVER,
) -> tf.Tensor:
  """Packs the times of a contribution into an int64 [4] tensor.

  A contribution is one replica's gradients for one update. The arguments are in
  seconds since 1970; `NEVER` means that the stage was not reached.

  Args:
    admitted: When the contribution was accepted.
    delivered: When all its gradients were on the PS tasks.
    applied: When its gradients were applied to the variables.
    released: When its replica was allowed to continue.

  Returns:
    The times in microseconds, in the order of the arguments.
  """
  times = Times(admitted, delivered, applied, released)
  return microseconds(
    tf.stack([tf.convert_to_tensor(t, tf.float64) for t in times])
  )
