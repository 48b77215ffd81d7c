"""Keeps, on a serving task, the heartbeats it received and the outcome.

The docstring of `heartbeats` explains the terms.
"""

import functools
import json
from collections.abc import Callable

import tensorflow as tf

from tf_replicas.drivers import versions
from tf_replicas.runtime import resources

_LEFT = 0.0
_NO_PROCESS = 0
# The age of a client that rests is less than this: the seconds since its last
# heartbeat are subtracted.
RESTS = -2.0


class HeartbeatTable:
  """The heartbeat table of one training, or of a series, on one serving task.

  Attributes:
    device: The device of the serving task.
    beats: float64 [number of clients]: the time of each client's last
      heartbeat, in seconds since 1970; -1: none yet, 0: the client has left;
      another negative number: minus the time, of a client that rests.
    processes: int64 [number of clients]: the number that identifies each
      client's present process; 0: none yet.
    outcome: How training ended; "" while it goes on.
    dismissed: Whether this training does not need the serving task any more.
    is_open: Whether the chief has let the other clients begin.
    versions: The result of `versions.here()` in the serving task, as JSON.
    signature: The variables and the update rule of the chief, as JSON; "" until
      the chief has published them.
    number: The number of the present training of a series, from 1 on; 0 once
      the series is over.
    call: What the chief calls in the present training: bytes that
      `fitting.series` defines; b"" in the first training.
  """

  def __init__(
    self,
    device: str,
    namespace: resources.Namespace = resources.DEFAULT_NAMESPACE,
  ):
    """Attaches to the table, which the serving task initializes.

    Args:
      device: The device of the serving task.
      namespace: The namespace of the training, the same in the serving task and
        in all clients.
    """
    self.device = device
    self._namespace = namespace
    names = namespace.child("heartbeats")
    with tf.device(device):
      self.beats = names.variable("beats", [None], tf.float64)
      self.processes = names.variable("processes", [None], tf.int64)
      self.outcome = names.variable("outcome", [], tf.string)
      self.dismissed = names.variable("dismissed", [], tf.bool)
      self.is_open = names.variable("is_open", [], tf.bool)
      self.versions = names.variable("versions", [], tf.string)
      self.signature = names.variable("signature", [], tf.string)
      self.number = names.variable("number", [], tf.int64)
      self.call = names.variable("call", [], tf.string)

  def initialize(self, num_clients: int) -> None:
    """Initializes an empty table, in the serving task when that starts."""
    self.beats.assign(tf.fill([num_clients], tf.cast(-1.0, tf.float64)))
    self.processes.assign(
      tf.fill([num_clients], tf.cast(_NO_PROCESS, tf.int64))
    )
    self.outcome.assign("")
    self.dismissed.assign(False)
    self.is_open.assign(False)
    self.versions.assign(json.dumps(versions.here()))
    self.call.assign(b"")
    self.number.assign(1)
    self.signature.assign("")

  def attach_again(self) -> "HeartbeatTable":
    """Returns a new object for the table, after the serving task restarted."""
    return HeartbeatTable(self.device, self._namespace)

  @tf.function(autograph=False)
  def _beat(self, client, process, sign, joins) -> tf.Tensor:
    def take_over():
      self.processes.scatter_update(tf.IndexedSlices(process, client))
      return tf.constant(True)

    here = resources.this_device()
    with tf.device(self.device):
      known = tf.gather(self.processes.read_value(), client)
      is_current = joins | (known == process) | (known == _NO_PROCESS)
      now = sign * tf.timestamp()
      last = tf.gather(self.beats.read_value(), client)
      now = tf.where(is_current, now, last)
      self.beats.scatter_update(tf.IndexedSlices(now, client))
      is_new = joins | (known == _NO_PROCESS)  # Else the number is there.
      tf.cond(is_new, take_over, lambda: tf.constant(False))
    with tf.device(here):
      return tf.identity(is_current)

  def beat(
    self,
    client: int,
    process: int,
    is_here: bool,
    *,
    joins: bool = False,
    rests: bool = False,
  ) -> bool:
    """Records a heartbeat, or that the client has left.

    Args:
      client: The client's number.
      process: The number that identifies the client's process.
      is_here: Whether the client takes part; False when it leaves.
      joins: Whether `process` replaces any other process of that client.
      rests: Whether the client, which is here, waits for the next training.

    Returns:
      Whether `process` is the client's current one. If not, nothing was
      recorded.
    """
    numbers = tf.constant(client), tf.constant(process, tf.int64)
    sign = (-1.0 if rests else 1.0) if is_here else _LEFT
    sign = tf.constant(sign, tf.float64)
    return bool(self._beat(*numbers, sign, tf.constant(joins)))

  def dismiss(self, outcome: str) -> None:
    """Tells the serving task that training ended, and how."""
    self.outcome.assign(outcome)
    self.dismissed.assign(True)
    resources.flush_assignments([self.dismissed])

  def is_ready(self) -> bool:
    """Returns whether the serving task has initialized the whole table."""
    return bool(self.signature.is_initialized())

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
    """Returns the seconds since each client's last heartbeat.

    -1 means no heartbeat yet, 0 means that the client has left. Less than
    `RESTS`: the client rests, and its last heartbeat was `RESTS - age` seconds
    ago.
    """
    return self._ages().numpy().tolist()
