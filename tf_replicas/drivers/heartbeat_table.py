"""Defines the table of heartbeats that a serving task keeps for a training.

A serving task is a parameter server or an in-graph worker. The table records
which processes are alive, and how training ended. The docstring of
`drivers.heartbeats` explains its use.
"""

import functools
import json
import secrets
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from tf_replicas.drivers import versions
from tf_replicas.runtime import resources

# By what the time of a heartbeat is multiplied.
_PRESENT, _RESTING, _LEFT = 1, -1, 0
_NO_PROCESS = 0
# The age of a client that rests is less than this: the seconds since its last
# heartbeat are subtracted.
RESTS = -2.0
# The number of the training until the chief has said it. A parameter server
# that was restarted does not know it either.
NOT_BEGUN = -1


class Answer(NamedTuple):
  """The answer of a serving task to a heartbeat.

  Attributes:
    is_current: Whether the sender is the present process of its client. If
      False, another process has taken its place, and nothing was recorded.
    leaves: Whether the serving task was asked to end (by SIGTERM), and waits
      until the chief has saved a checkpoint.
  """

  is_current: bool
  leaves: bool


class HeartbeatTable:
  """The table of heartbeats of a training, in variables on a serving task.

  A serving task is a parameter server or an in-graph worker. Each serving task
  has a table. A client is a process that trains: a worker or the chief. It
  attaches to the tables by the names of their variables.

  Several trainings may follow each other in a *series*, with the same tables. A
  client *rests* between two trainings of a series.

  Attributes:
    device: The device of the serving task.
    beats: float64 [number of clients]: the time of the last heartbeat of each
      client, in seconds since 1970. For a client that rests, minus this time.
      -1: there was no heartbeat yet. 0: the client has left.
    processes: int64 [number of clients]: a number that identifies the present
      process of each client. 0: there was none yet.
    outcome: How training ended: "finished", or an error in one line. "" while
      it goes on.
    dismissed: Whether the serving task may end.
    leaves: Whether the serving task was asked to end (by SIGTERM), and waits
      until the chief has saved a checkpoint.
    is_open: Whether the chief has let the other clients begin.
    versions: The result of `versions.here()` in the serving task, as JSON.
    signature: The name of the training, and the variables and the update rule
      of the chief, as JSON; "" until the chief has published them.
    number: The number of the present training of a series, from 1 on; 0 once
      the series is over; `NOT_BEGUN` (-1) until the chief has published it.
    call: What the chief calls in the present training: bytes that
      `fitting.series` defines; b"" in the first training.
    incarnation: A random number that identifies the process of the serving
      task.
  """

  def __init__(
    self,
    device: str,
    namespace: resources.Namespace = resources.DEFAULT_NAMESPACE,
  ):
    """Attaches to the variables of the table on a serving task.

    They have no values before the serving task has called `initialize`.

    Args:
      device: The device of the serving task.
      namespace: The namespace of the training, the same in the serving task and
        in all processes that train.
    """
    self.device = device
    self._namespace = namespace
    names = namespace.child("heartbeats")
    with tf.device(device):
      self.beats = names.variable("beats", [None], tf.float64)
      self.processes = names.variable("processes", [None], tf.int64)
      self.outcome = names.variable("outcome", [], tf.string)
      self.dismissed = names.variable("dismissed", [], tf.bool)
      self.leaves = names.variable("leaves", [], tf.bool)
      self.is_open = names.variable("is_open", [], tf.bool)
      self.versions = names.variable("versions", [], tf.string)
      self.signature = names.variable("signature", [], tf.string)
      self.number = names.variable("number", [], tf.int64)
      self.call = names.variable("call", [], tf.string)
      self.incarnation = names.variable("incarnation", [], tf.int64)

  def initialize(self, num_clients: int) -> None:
    """Gives all variables their initial values. The serving task calls it.

    Args:
      num_clients: The number of processes that train.
    """
    self.beats.assign(tf.fill([num_clients], tf.cast(-1.0, tf.float64)))
    self.processes.assign(
      tf.fill([num_clients], tf.cast(_NO_PROCESS, tf.int64))
    )
    self.outcome.assign("")
    self.dismissed.assign(False)
    self.leaves.assign(False)
    self.is_open.assign(False)
    self.versions.assign(json.dumps(versions.here()))
    self.call.assign(b"")
    self.number.assign(NOT_BEGUN)
    self.renew()
    self.signature.assign("")

  def renew(self) -> None:
    """Gives the serving task another `incarnation`, as if it were restarted."""
    self.incarnation.assign(secrets.randbelow(1 << 62) + 1)
    resources.flush_assignments([self.incarnation])

  def attach_again(self) -> "HeartbeatTable":
    """Attaches to this table again, after the serving task was restarted.

    Returns:
      A new object, which replaces this one.
    """
    return HeartbeatTable(self.device, self._namespace)

  @tf.function(autograph=False, input_signature=[tf.TensorSpec([4], tf.int64)])
  def _beat(self, numbers: tf.Tensor) -> tf.Tensor:
    """Records a heartbeat on the serving task.

    Args:
      numbers: One tensor, since each is sent by itself: the client, the
        process, the factor of the time (`_PRESENT`, `_RESTING` or `_LEFT`), and
        whether the process joins (0 or 1).

    Returns:
      The fields of an `Answer`.
    """

    def take_over():
      self.processes.scatter_update(tf.IndexedSlices(process, client))
      return tf.constant(True)

    here = resources.this_device()
    with tf.device(self.device):
      client, process, factor, joins = tf.unstack(numbers)
      joins = joins > 0
      known = tf.gather(self.processes.read_value(), client)
      is_current = joins | (known == process) | (known == _NO_PROCESS)
      now = tf.cast(factor, tf.float64) * tf.timestamp()
      last = tf.gather(self.beats.read_value(), client)
      now = tf.where(is_current, now, last)
      self.beats.scatter_update(tf.IndexedSlices(now, client))
      is_new = joins | (known == _NO_PROCESS)  # Else the number is there.
      tf.cond(is_new, take_over, lambda: tf.constant(False))
      answer = tf.stack([is_current, self.leaves.read_value()])
    with tf.device(here):
      return tf.identity(answer)

  def beat(
    self,
    client: int,
    process: int,
    is_here: bool,
    *,
    joins: bool = False,
    rests: bool = False,
  ) -> Answer:
    """Records a heartbeat of a client, or that the client has left.

    Args:
      client: The index of the client.
      process: The number that identifies the process that calls this.
      is_here: True for a heartbeat; False if the client leaves.
      joins: Whether this process takes the place of another process that ran as
        the same client, if there was one.
      rests: Whether the client waits for the next training of a series.

    Returns:
      The answer of the serving task.
    """
    factor = (_RESTING if rests else _PRESENT) if is_here else _LEFT
    numbers = tf.constant([client, process, factor, int(joins)], tf.int64)
    return Answer(*self._beat(numbers).numpy().tolist())

  def dismiss(self, outcome: str) -> None:
    """Tells the serving task, which keeps this table, to end.

    Args:
      outcome: How training ended: `heartbeats.FINISHED`, or an error in one
        line.
    """
    self.outcome.assign(outcome)
    self.release()

  def release(self) -> None:
    """Lets the serving task end, which leaves; training does not end."""
    self.dismissed.assign(True)
    resources.flush_assignments([self.dismissed])

  def is_ready(self) -> bool:
    """Returns whether the serving task has initialized the table."""
    return bool(self.signature.is_initialized())

  @functools.cached_property
  def _incarnation(self) -> Callable[[], tf.Tensor]:
    return resources.remote_reader(self.incarnation.read_value)

  def read_incarnation(self) -> int:
    """Returns a number that identifies the process of the serving task.

    A restart changes it.
    """
    return int(self._incarnation())

  @functools.cached_property
  def _ages(self) -> Callable[[], tf.Tensor]:
    def ages():
      with tf.device(self.device):
        beats = self.beats.read_value()
        # Above 0 for a heartbeat just now, and after the clock was set back.
        ages = tf.maximum(tf.timestamp() - tf.abs(beats), 1e-6)
        others = tf.where(beats < -1, RESTS - ages, beats)
        return tf.where(beats > 0, ages, others)

    return resources.remote_reader(ages)

  def ages(self) -> list[float]:
    """Returns the seconds since the last heartbeat of each client.

    Returns:
      One number per client. -1: there was no heartbeat yet. 0: the client has
      left. A number x below `RESTS` (-2): the client rests, and its last
      heartbeat was `RESTS - x` seconds ago.
    """
    return self._ages().numpy().tolist()
