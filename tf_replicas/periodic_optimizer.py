"""The update rule of replicas that train copies of their own and meet at times.

What the kinds of `periodic_averaging` have in common.
"""

from collections.abc import Callable
from collections.abc import Sequence

import tensorflow as tf

from tf_replicas import ledger
from tf_replicas import local_steps
from tf_replicas import meetings
from tf_replicas import parameter_store
from tf_replicas import releases
from tf_replicas import towers
from tf_replicas import turns
from tf_replicas import updates


class PeriodicOptimizer:
  """An optimizer wrapper whose replicas meet every `period` batches.

  The global step counts the updates of the centre, which is what checkpoints,
  averages and evaluation see, and so does `max_steps` (as with the optimizers
  of TF1): where all replicas meet at a time that is one for all, N * `period`
  batches; else one for each that comes, `period` batches. `examples_seen`
  counts the examples of all local steps that led to an update. The loss that is
  reported is the mean over them.

  Local steps take the chief's learning rate as it was when the period began. A
  gradient or a loss that is not finite ends the period and the training; it
  never reaches the centre.

  Attributes:
    wire_dtype: None: what travels does so once in a period, as it is.
    period: The local steps between two meetings.
    name: The kind.
    inner: The inner optimizer of the centre.
  """

  wire_dtype = None

  def __init__(self, steps: local_steps.LocalSteps, meeting: meetings.Meeting):
    """Puts the parts together, as `periodic_averaging` does for each kind.

    Args:
      steps: What a replica does on its own.
      meeting: What it does when a period is over.
    """
    self._steps = steps
    self._meeting = meeting
    self._rule = meeting.rule
    self.period = steps.period
    self.name = meeting.rule.name
    self.inner = meeting.rule.inner

  @property
  def has_tickets(self) -> bool:
    """Whether a `Release` may carry a ticket."""
    return self._rule.has_tickets

  @property
  def replicas_to_aggregate(self) -> int:
    """How many replicas make one update."""
    return self._rule.replicas_to_aggregate

  @property
  def used_share(self) -> float:
    """How much of what the replicas draw is used, if they are alike."""
    return self._rule.used_share

  @property
  def total_num_replicas(self) -> int:
    """How many there are."""
    return self._rule.total_num_replicas

  def build(
    self,
    store: parameter_store.ParameterStore,
    *,
    is_sparse: Sequence[bool] | None = None,
  ) -> None:
    """Attaches to, or creates, everything on the PS tasks.

    Args:
      store: Holds the centre; need not be initialised yet.
      is_sparse: Not used: what is handed over is dense.
    """
    del is_sparse
    self._store = store
    self._steps.build(store)
    self._rule.build(store)
    self._meeting.build(store)

  def create(self, values: Sequence[tf.Tensor]) -> None:
    """The chief's: gives everything its first value, unless it has one.

    Args:
      values: Of the variables, in the store's order.
    """
    if not self._store.is_initialized():
      self._steps.initialize()
    self._steps.refresh()
    self._rule.create(values)

  def begin_updates(self) -> None:
    """The chief's, before its first update: of a centre that is whole."""
    self._rule.begin_updates()

  def signature(self) -> list:
    """What every client of a training must agree on about the rule."""
    return [self.period, *self._meeting.signature(), *self._rule.signature()]

  # The replica's half.

  def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
    """What to differentiate instead of `loss`."""
    return self._steps.scale_loss(loss)

  @tf.autograph.experimental.do_not_convert
  def begin(
    self, replica: int | tf.Tensor
  ) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """What a replica carries at first; to be used inside a `tf.function`.

    Args:
      replica: Who begins, in [0, total_num_replicas).

    Returns:
      The int64 global step of the centre that it begins with, and the state.
    """
    step, parameters = turns.pull(self._store, self._rule, replica)
    centre = parameters if self._meeting.needs_centre else []
    return step, [*parameters, *centre, *self._steps.new_slots()]

  @tf.autograph.experimental.do_not_convert
  def contribute(
    self,
    compute: Callable[[Sequence[tf.Tensor]], towers.Gradients],
    replica: int | tf.Tensor,
    state: Sequence[tf.Tensor],
    *,
    step: tf.Tensor,
    ticket: tf.Tensor | None = None,
    is_timed: bool = False,
  ) -> turns.Turn:
    """One period and the meeting after it; to be used inside a `tf.function`.

    Args:
      compute: Maps parameters to the gradients of the next batch, of the
        scaled loss.
      replica: Which replica this is, in [0, total_num_replicas).
      state: As `begin` or the last call returned it.
      step: int64 scalar, the global step of the centre as it was met last.
      ticket: That of the last `Release`, unless -1, to spare the offer.
      is_timed: Whether to look at the clock.

    Returns:
      The turn, whether the period counted included.

    Raises:
      tf.errors.OutOfRangeError, tf.errors.CancelledError: At its end.
    """
    number = len(self._store.contributed)
    cuts = number, number * (2 if self._meeting.needs_centre else 1)
    state = meetings.State(
      state[: cuts[0]], state[cuts[0] : cuts[1]], state[cuts[1] :]
    )
    local = self._steps(
      compute,
      state.parameters,
      state.slots,
      pull_back=self._meeting.pull_back(state),
      wants_totals=self._meeting.needs_totals,
    )
    computed = tf.constant(releases.NEVER, tf.float64)
    if is_timed:
      computed, local = releases.clocked(local)
    release, parameters, centre = self._meeting.meet(
      replica, state, local, step=step, ticket=ticket
    )
    return turns.Turn(release, [*parameters, *centre, *local.slots], computed)

  # The chief's half.

  def set_learning_rate(self, rate: float) -> None:
    """Sets the rate, of each replica from its next period on."""
    self._steps.set_learning_rate(rate)
    if self.inner.has_adjustable_rate():
      self._rule.set_learning_rate(rate)

  def stop_at(self, step: int) -> None:
    """Lets the global step not get beyond `step`."""
    self._rule.stop_at(step)

  def apply_update(self) -> updates.Update:
    """Waits for the next update of the centre, or makes it.

    Raises:
      NonFiniteGradientError: If a replica computed something not finite.
      Interrupted: If `interrupt` was called.
      tf.errors.OutOfRangeError: After `close`.
    """
    rate = self._steps.refresh()
    return self._rule.apply_update()._replace(learning_rate=rate)

  # For whoever drives or watches it; as the rule of the centre has it.

  def counts(self) -> list[updates.Counts]:
    """What became of each replica's periods."""
    return self._rule.counts()

  def ledger(self) -> ledger.Ledger:
    """Who owes what at this moment, as NumPy values."""
    return self._rule.ledger()

  def declare_lost(self, replica: int, tag: int) -> None:
    """Offers the place of `replica`, whose last offer is `tag`, to others."""
    self._rule.declare_lost(replica, tag)

  def trace_ahead(self) -> None:
    """See `update_rule.UpdateRule`."""
    self._rule.trace_ahead()

  def interrupt(self) -> None:
    """Makes `apply_update`, waiting in another thread, raise `Interrupted`."""
    self._rule.interrupt()

  def end_replicas(self) -> None:
    """Releases replicas to `releases.ENDED`, in the midst of a period."""
    self._steps.end()
    self._rule.end_replicas()

  def give_up(self, replica: int) -> None:
    """Ends `replica`, when it meets; it has no chief."""
    self._rule.give_up(replica)

  def close(self) -> None:
    """Ends the training: every replica that meets gets `OutOfRangeError`."""
    self._steps.end()
    self._rule.close()
