"""Who was heard of when, and how training ended: kept by a serving task."""

import functools
from collections.abc import Callable

import tensorflow as tf

from tf_replicas import resources

_LEFT = 0.0
_NOBODY = 0


class Register:
  """The register of one serving task."""

  def __init__(self, device: str, num_clients: int):
    self.device = device
    with tf.device(device):
      self.beats = resources.shared_variable(
        "register/beats", [num_clients], tf.float64
      )
      # The number of the process that each client is.
      self.processes = resources.shared_variable(
        "register/processes", [num_clients], tf.int64
      )
      self.outcome = resources.shared_variable(
        "register/outcome", [], tf.string
      )
      self.dismissed = resources.shared_variable(
        "register/dismissed", [], tf.bool
      )
      self.may_go = resources.shared_variable("register/may_go", [], tf.bool)
      self.signature = resources.shared_variable(
        "register/signature", [], tf.string
      )

  def initialize(self) -> None:
    """Gives an empty register; for the serving task itself, at its start."""
    self.beats.assign(tf.fill(self.beats.shape, tf.cast(-1.0, tf.float64)))
    self.processes.assign(
      tf.fill(self.processes.shape, tf.cast(_NOBODY, tf.int64))
    )
    self.outcome.assign("")
    self.dismissed.assign(False)
    self.may_go.assign(False)
    self.signature.assign("")

  @tf.function(autograph=False)
  def _beat(self, client, process, is_here, joins) -> tf.Tensor:
    def take_place():
      self.processes.scatter_update(tf.IndexedSlices(process, client))
      return tf.constant(True)

    here = resources.this_device()
    with tf.device(self.device):
      known = tf.gather(self.processes.read_value(), client)
      is_it = joins | (known == process) | (known == _NOBODY)
      now = tf.where(is_here, tf.timestamp(), tf.cast(_LEFT, tf.float64))
      now = tf.where(is_it, now, tf.gather(self.beats.read_value(), client))
      self.beats.scatter_update(tf.IndexedSlices(now, client))
      is_new = joins | (known == _NOBODY)  # Whoever beats on writes no number.
      tf.cond(is_new, take_place, lambda: tf.constant(False))
    with tf.device(here):
      return tf.identity(is_it)

  def beat(
    self, client: int, process: int, is_here: bool, *, joins: bool = False
  ) -> bool:
    """Notes that a client is here, or that it has left.

    Args:
      client: Which.
      process: The number of the process that it is.
      is_here: Whether it is here.
      joins: Whether it takes the client's place, from whoever has it.

    Returns:
      Whether it has that place; if not, nothing was noted.
    """
    numbers = tf.constant(client), tf.constant(process, tf.int64)
    return bool(self._beat(*numbers, tf.constant(is_here), tf.constant(joins)))

  def dismiss(self, outcome: str) -> None:
    """Lets the serving task go."""
    self.outcome.assign(outcome)
    self.dismissed.assign(True)
    resources.await_assigned([self.dismissed])

  def is_ready(self) -> bool:
    """Whether the serving task has made it (it sets the signature last)."""
    return bool(self.signature.is_initialized())

  @functools.cached_property
  def _ages(self) -> Callable[[], tf.Tensor]:
    def ages():
      with tf.device(self.device):
        beats = self.beats.read_value()
        # Not 0, also of a beat just now, or after the clock was set back.
        ages = tf.maximum(tf.timestamp() - beats, 1e-6)
        return tf.where(beats > 0, ages, beats)

    return resources.reader(ages)

  def ages(self) -> list[float]:
    """Seconds since each client's last beat; -1: never came, 0: has left."""
    return self._ages().numpy().tolist()
