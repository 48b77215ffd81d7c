"""Who takes part in a training, who is alive, and how it ended.

On every task that serves (each PS; in-graph each worker as well) lives a small
*register*: when each client was last heard of, by that task's own clock, and
how training ended. On PS task 0 it also says what the chief trains, for the
others to compare with. A client beats in a thread of its own.
"""

import json
import threading
import time
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence

import tensorflow as tf

from tf_replicas import connection
from tf_replicas import resources

BEAT_SECS = 1.0
FINISHED = "finished"
_LEFT = 0.0


class Register:
  """The register of one serving task."""

  def __init__(self, device: str, num_clients: int):
    self.device = device
    with tf.device(device):
      self.beats = resources.shared_variable(
        "register/beats", [num_clients], tf.float64
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
    self.outcome.assign("")
    self.dismissed.assign(False)
    self.may_go.assign(False)
    self.signature.assign("")

  @tf.function(autograph=False)
  def _beat(self, client: tf.Tensor, is_here: tf.Tensor) -> None:
    with tf.device(self.device):
      now = tf.where(is_here, tf.timestamp(), tf.cast(_LEFT, tf.float64))
      self.beats.scatter_update(tf.IndexedSlices(now, client))

  def beat(self, client: int, is_here: bool) -> None:
    """Notes that a client is here, or that it has left."""
    self._beat(tf.constant(client), tf.constant(is_here))

  def dismiss(self, outcome: str) -> None:
    """Lets the serving task go."""
    self.outcome.assign(outcome)
    self.dismissed.assign(True)
    # An eager assignment is certain only once something read back followed it.
    self.dismissed.numpy()

  def is_ready(self) -> bool:
    """Whether the serving task has made it (it sets the signature last)."""
    return bool(self.signature.is_initialized())

  @tf.function(autograph=False)
  def _ages(self) -> tf.Tensor:
    with tf.device(self.device):
      beats = self.beats.read_value()
      # Not 0, also of a beat just now, or after the clock was set back.
      ages = tf.maximum(tf.timestamp() - beats, 1e-6)
      return tf.where(beats > 0, ages, beats)

  def ages(self) -> list[float]:
    """Seconds since each client's last beat; -1: never came, 0: has left."""
    return self._ages().numpy().tolist()


class Membership:
  """A client's view of the registers.

  Attributes:
    client: This client's number.
  """

  def __init__(
    self,
    client: int,
    num_clients: int,
    *,
    devices: Sequence[str],
    timeout_secs: float = 60.0,
  ):
    """Attaches to the registers of all serving tasks and starts to beat.

    Args:
      client: Which client this is, in [0, num_clients).
      num_clients: How many clients there are.
      devices: One device of each serving task; the first is PS task 0.
      timeout_secs: How long to wait for the registers to be there.

    Raises:
      TimeoutError: If one is not.
    """
    self.client = client
    self._places = [(device, num_clients) for device in devices]
    self._registers = [Register(*place) for place in self._places]
    self._first = self._registers[0]
    for device, register in zip(devices, self._registers, strict=True):
      connection.await_value(
        register.is_ready,
        timeout_secs=timeout_secs,
        what=f"waiting for the register of {device}",
      )
    self._stop = threading.Event()
    self._beat_all(True)
    self._thread = threading.Thread(
      target=self._keep_beating, name="beats", daemon=True
    )
    self._thread.start()

  def _beat_all(self, is_here: bool) -> None:
    for register in self._registers:
      try:
        register.beat(self.client, is_here)
      except tf.errors.OpError:
        # An in-graph worker may be away; without PS task 0 there is nothing.
        if register is self._first:
          raise

  def _keep_beating(self) -> None:
    while not self._stop.wait(BEAT_SECS):
      try:
        self._beat_all(True)
      except tf.errors.OpError:
        return  # The main thread sees the same failure where it matters.

  def ages(self) -> list[float]:
    """Seconds since each client's last beat; -1: never came, 0: has left."""
    return self._first.ages()

  def here(self) -> list[int]:
    """The other clients that beat."""
    return [
      client
      for client, age in enumerate(self.ages())
      if client != self.client and 0 < age < 5 * BEAT_SECS
    ]

  def publish(self, signature: object) -> None:
    """The chief's: says what it trains. Others wait for it (`compare`)."""
    self._first.signature.assign(json.dumps(signature))

  def published(self) -> object | None:
    """What the chief trains, or None as long as it has not said."""
    text = self._first.signature.numpy().decode()
    return json.loads(text) if text else None

  def let_go(self) -> None:
    """The chief's: everything has its first value; others may begin."""
    self._first.may_go.assign(True)

  def may_go(self) -> bool:
    """Whether the chief has let the others begin."""
    return bool(self._first.may_go.numpy())

  def outcome(self) -> str:
    """How training ended: `FINISHED`, what went wrong, or "" if it goes on."""
    return self._first.outcome.numpy().decode()

  def raise_if_ended(self) -> None:
    """Raises `RuntimeError` with how training ended, if it has ended."""
    outcome = self.outcome()
    if outcome:
      raise RuntimeError(outcome)

  def end(self, outcome: str) -> None:
    """Says how training ended, unless that was said before."""
    if not self.outcome():
      self._first.outcome.assign(outcome)

  def leave(self) -> None:
    """Says that this client needs nothing any more."""
    self._stop.set()
    self._thread.join()
    self._beat_all(False)

  def dismiss(
    self, *, timeout_secs: float, clock: Callable[[], float] = time.monotonic
  ) -> list[int]:
    """The chief's last act: lets the serving tasks go once the others left.

    Args:
      timeout_secs: How long to wait for clients that still beat.
      clock: Time in seconds.

    Returns:
      The clients that had not left.
    """
    deadline = clock() + timeout_secs
    while True:
      here = self.here()
      if not here or clock() > deadline:
        break
      time.sleep(0.05)
    outcome = self.outcome()
    # PS task 0 last: the others may still have to look something up there.
    for register, place in reversed(
      list(zip(self._registers, self._places, strict=True))
    ):
      _dismiss(register, place, outcome)
    return here


def take_leave(
  stages: Iterable[Callable[[], None]], *, log: Callable[[str], None]
) -> None:
  """Does one after the other.

  What one stage cannot reach is no reason to leave others waiting.
  """
  for stage in stages:
    try:
      stage()
    except tf.errors.OpError as unreachable:
      words = unreachable.message.splitlines()[0]
      log(f"could not take leave in order: {words}")


def outcome_of(error: BaseException | None) -> str:
  """How training ended, in one line."""
  if error is None:
    return FINISHED
  return " ".join(str(error).split()) or type(error).__name__


def _dismiss(register: Register, place: tuple[str, int], outcome: str) -> None:
  try:
    register.dismiss(outcome)
  except tf.errors.OpError:
    # A task that was restarted has a new register; one that is away has none,
    # and whoever runs it has to end it.
    try:
      Register(*place).dismiss(outcome)
    except tf.errors.OpError:
      pass


def differences(
  ours: Sequence[Sequence], theirs: Sequence[Sequence], limit: int = 3
) -> list[str]:
  """Says how two lists of (name, …) rows differ, in order; at most `limit`.

  Args:
    ours: Rows here.
    theirs: Rows of the chief.
    limit: How many differences to tell.
  """
  found = []
  for number in range(max(len(ours), len(theirs))):
    mine = list(ours[number]) if number < len(ours) else None
    other = list(theirs[number]) if number < len(theirs) else None
    if mine != other:
      found.append(f"variable {number} is {mine} here and {other} at the chief")
  if len(found) > limit:
    found[limit:] = [f"and {len(found) - limit} more"]
  return found
