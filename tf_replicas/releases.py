"""What a replica hears after it offered a contribution, and the times of it."""

from typing import NamedTuple
from typing import TypeVar

import tensorflow as tf

T = TypeVar("T")

# The global step that a replica is released to when there is no other.
ENDED = -1
# The time of what did not happen.
NEVER = 0.0


class Times(NamedTuple):
  """When it was how far; scalars on PS task 0's clock.

  Float64, seconds since 1970; as they travel int64, microseconds.

  Attributes:
    admitted: It was admitted, if it had to ask.
    delivered: All its bytes were on the PS tasks.
    applied: Its own update was made, where it had one.
    released: The replica may go on.
  """

  admitted: tf.Tensor | float
  delivered: tf.Tensor | float
  applied: tf.Tensor | float
  released: tf.Tensor | float


class Release(NamedTuple):
  """What a replica hears after it offered a contribution; scalars of int64.

  Attributes:
    admitted: 1 if the contribution was used, else 0.
    global_step: The step to go on from.
    ticket: Tag of the next contribution if admitted in advance, else -1.
    times: `Times` as one int64 [4] tensor, in microseconds.
  """

  admitted: tf.Tensor | int
  global_step: tf.Tensor
  ticket: tf.Tensor
  times: tf.Tensor

  def pack(self) -> tf.Tensor:
    """All of it as one int64 [7] tensor, for each tensor that travels costs."""
    fields = [tf.cast(field, tf.int64) for field in self[:3]]
    return tf.concat([tf.stack(fields), self.times], axis=0)


def unpack(packed: tf.Tensor) -> Release:
  """The inverse of `Release.pack`."""
  return Release(packed[0], packed[1], packed[2], packed[3:])


def first(step: tf.Tensor) -> Release:
  """That of a replica which begins, with the variables of `step`."""
  return Release(0, step, tf.constant(-1, tf.int64), pack_times())


def next_ticket(
  ticket: tf.Tensor | None, admitted: tf.Tensor, uses: int
) -> tf.Tensor:
  """The next ticket of a replica that uses what it read several times.

  Args:
    ticket: That of the last release; how often it was used before.
    admitted: bool scalar, whether this use was worth it.
    uses: How often it may be.

  Returns:
    int64 scalar: how often it was used; -1 if it is to be read anew.
  """
  anew = tf.constant(-1, tf.int64)
  if uses == 1:
    return anew
  count = tf.constant(1, tf.int64)
  if ticket is not None:
    count += tf.maximum(ticket, 0)
  return tf.where(admitted & (count < uses), count, anew)


def now(*after: tf.Tensor) -> tf.Tensor:
  """Seconds since 1970 as a float64 scalar, once `after` are there."""
  with tf.control_dependencies(after):
    return tf.timestamp()


def clocked(values: T) -> tuple[tf.Tensor, T]:
  """When all tensors of a structure are there, and the structure.

  Who uses what this returns does so after the clock was looked at. Leaves may
  be None.
  """
  there = [value for value in tf.nest.flatten(values) if value is not None]
  time = now(*there)
  with tf.control_dependencies([time]):
    return time, tf.nest.map_structure(
      lambda value: None if value is None else tf.identity(value), values
    )


def microseconds(secs: tf.Tensor) -> tf.Tensor:
  """The same as int64, which travels beside other int64."""
  return tf.cast(tf.round(secs * 1e6), tf.int64)


def pack_times(
  admitted=NEVER, delivered=NEVER, applied=NEVER, released=NEVER
) -> tf.Tensor:
  """The fields of `Times`, in seconds, as one tensor in microseconds."""
  times = Times(admitted, delivered, applied, released)
  return microseconds(
    tf.stack([tf.convert_to_tensor(t, tf.float64) for t in times])
  )
