"""Synchronous updates from exactly N contributions, with backup replicas.

The successor of TF1's `tf.train.SyncReplicasOptimizer`, with stricter rules.
`SyncReplicasOptimizer` says what they are and how they come about.
"""

import functools
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tf_replicas import connection
from tf_replicas import contributions
from tf_replicas import ledger
from tf_replicas import moving_averages
from tf_replicas import parameter_store
from tf_replicas import releases
from tf_replicas import succession
from tf_replicas import update_rule
from tf_replicas import updates

_NUM_FIELDS, _ENDED_AT = 7, 6  # Of what `_step` returns.
_CALL_SECS = 0.1  # No learning rate waits longer.


class SyncReplicasOptimizer(update_rule.UpdateRule):
  """An optimizer wrapper that applies one averaged update per N gradients.

  Without it, replicas that share variables update them one after the other,
  each with a gradient of values that others have changed meanwhile. With it,
  every update is the mean of exactly `replicas_to_aggregate` = N gradients, all
  computed from the variables of that very step, by distinct replicas where
  there are at least N of them.

  Of M = `total_num_replicas`:

  * M = N: every replica contributes to every step;
  * M > N: M - N *backup replicas*; a step takes the first N and does not wait
    for the slowest (Chen et al. 2016, section 2.2);
  * M < N: replicas contribute several batches each to one step.

  The wrapper has two halves. A replica's half offers gradients and waits
  (`apply_gradients`); the chief's half makes the updates (`apply_update`).

  Objects, found by name by every client:

  * on each PS task: the shards of the variables, their slots and averages, and
    one queue of gradient sets per replica;
  * on PS task 0: the global step, the inbox, the ledger of who owes what, and
    one queue of replies per replica (see `tf_replicas.contributions`).

  A replica's step:

  1. Pull the global step and then the parameters (`ParameterStore.pull`).
  2. Compute gradients; clip them here if `clip_replica_norm` is given.
  3. Offer: send (replica, tag, step), wait for the verdict. A gradient from
     older variables is refused at once, one beyond the first N when the step
     ends: both before any of its bytes travel, and both are counted.
  4. If admitted, hand over: all gradients to the PS tasks, then "delivered".
  5. Wait for the release, which names the step to go on from.

  The chief's step:

  1. Answer offers until N contributions were delivered. If an admitted replica
     is lost, its place goes to one that waits, or to its successor.
  2. On each PS task: sum the N in replica order and divide by N. A variable
     that none of them had a gradient for is skipped; one that some had none
     for counts as zero there. Sparse gradients are summed by row and divided
     by N too, so that N replicas of B examples equal one of N * B.
  3. Clip the mean by its global norm if `clip_mean_norm` is given.
  4. Apply the inner optimizer on each PS task; update the moving averages.
  5. Global step + 1.
  6. Release every replica that has offered.

  After TF1's `tf.train.SyncReplicasOptimizer`, but the first step counts like
  every other, contributions are taken or refused as a whole, and counted, and
  the mean is of exactly N. Only what comes after the last step is not counted.

  Attributes:
    replicas_to_aggregate: N.
    total_num_replicas: M.
  """

  def __init__(
    self,
    optimizer: object,
    replicas_to_aggregate: int,
    total_num_replicas: int | None = None,
    *,
    variable_averages: moving_averages.MovingAverages | None = None,
    variables_to_average: Iterable[tf.Variable | str] | None = None,
    clip_replica_norm: float | None = None,
    clip_mean_norm: float | None = None,
    has_chief_statistics: bool = False,
    loss_scale: float | None = None,
    wire_dtype: str | None = None,
    name: str = "sync_replicas",
  ):
    """Wraps `optimizer`.

    Args:
      optimizer: The inner optimizer. For it and for all that is not named
        here see `UpdateRule`.
      replicas_to_aggregate: N, the contributions in one update.
      total_num_replicas: M, the replicas that offer; N if not given.
      clip_mean_norm: The mean of N contributions is scaled down to this global
        norm before it is applied.
      has_chief_statistics: Whether statistics follow replica 0 alone, or the
        first of the N if it is not among them; else the mean of all N.

    Raises:
      TypeError, ValueError: If an argument is of no use.
    """
    if total_num_replicas is None:
      total_num_replicas = replicas_to_aggregate
    update_rule.check_count("replicas_to_aggregate", replicas_to_aggregate)
    update_rule.check_count("total_num_replicas", total_num_replicas)
    super().__init__(
      optimizer,
      variable_averages=variable_averages,
      variables_to_average=variables_to_average,
      clip_replica_norm=clip_replica_norm,
      clip_mean_norm=clip_mean_norm,
      has_chief_statistics=has_chief_statistics,
      loss_scale=loss_scale,
      wire_dtype=wire_dtype,
      name=name,
    )
    self.replicas_to_aggregate = replicas_to_aggregate
    self.total_num_replicas = total_num_replicas
    self.used_share = min(1.0, replicas_to_aggregate / total_num_replicas)

  @property
  def has_tickets(self) -> bool:
    """Whether a `Release` may carry a ticket."""
    return self.replicas_to_aggregate >= self.total_num_replicas

  def build(
    self,
    store: parameter_store.ParameterStore,
    *,
    is_sparse: Sequence[bool] | None = None,
    is_alone: bool = False,
  ) -> None:
    """Attaches to, or creates, everything on the PS tasks.

    Args:
      store: Holds the variables; need not be initialised yet.
      is_sparse: For each of the store's `contributed` whether its gradients
        come as `tf.IndexedSlices`. None do if not given.
      is_alone: Whether one program has all the gradients of a step, for
        `update.whole_step`. Then nothing is offered, counted or waited for.
    """
    self.bind(store)
    self._contributions: contributions.Contributions | None = None
    if not is_alone:
      self._contributions = contributions.Contributions(
        store,
        num_replicas=self.total_num_replicas,
        replicas_to_aggregate=self.replicas_to_aggregate,
        is_sparse=is_sparse or [False] * len(store.contributed),
        has_chief_statistics=self.has_chief_statistics,
      )
    self._client_device = tf.constant(0).device
    self._present = (True,) * len(store.contributed)
    self._steps = functools.cache(self._trace)
    self._untold: Sequence[np.ndarray] = ()
    self._mark = succession.UpdateMark(store)
    self._is_successor = False

  def initialize(self, values: Sequence[tf.Tensor]) -> None:
    """Gives everything but the slots and the global step its first value."""
    if self._contributions is not None:
      self._contributions.initialize()
    self._mark.clear()
    super().initialize(values)

  def take_over(self) -> None:
    """A restarted chief's: waits for the end of its predecessor's update."""
    super().take_over()
    self._mark.await_end()
    self._is_successor = True

  def begin_updates(self) -> None:
    """A restarted chief's: trusts nothing that its predecessor had begun."""
    if self._is_successor:
      self._contributions.begin_anew()

  def signature(self) -> list:
    """What every client of a training must agree on about the rule."""
    return [
      self.name,
      self.replicas_to_aggregate,
      self.total_num_replicas,
      self.has_chief_statistics,
      self.wire_dtype,
    ]

  # The replica's half.

  @tf.autograph.experimental.do_not_convert
  def apply_gradients(
    self,
    grads_and_vars: Iterable[tuple[parameter_store.Gradient, object]],
    *,
    replica: int | tf.Tensor,
    local_step: tf.Tensor,
    loss: tf.Tensor | float = 0.0,
    num_examples: tf.Tensor | int = 0,
    ticket: tf.Tensor | None = None,
  ) -> releases.Release:
    """Offers one set of gradients and waits until this replica may go on.

    To be used inside a `tf.function`.

    Args:
      grads_and_vars: (gradient, variable) pairs, as `in_order` takes them.
      replica: Which replica this is, in [0, total_num_replicas).
      local_step: int64 scalar, the global step whose variables were used.
      loss: Scalar, for the reports: the mean over these examples.
      num_examples: Scalar, how many examples the gradients are the mean of.
      ticket: That of the last `Release`, unless -1, to spare the offer.

    Returns:
      Whether the gradients were admitted, and the global step to go on from.

    Raises:
      ValueError: If a variable is not in the store.
      tf.errors.OutOfRangeError, tf.errors.CancelledError: At its end.
    """
    return self._contributions.offer(
      replica,
      self.in_order(grads_and_vars),
      local_step=local_step,
      loss=loss,
      num_examples=num_examples,
      ticket=ticket,
    )

  # The chief's half.

  def stop_at(self, step: int) -> None:
    """Nothing: who wants no more updates calls `apply_update` no more."""
    del step

  def apply_update(self) -> updates.Update:
    """Waits for N contributions and makes one update; as `apply_updates`."""
    return self.apply_updates(1)[0]

  def apply_updates(self, most: int) -> list[updates.Update]:
    """Makes several updates in one call, all with the learning rate of now.

    Args:
      most: How many at most: what fits into 0.1 s, or one. Between two calls
        pass milliseconds, which small models would feel.

    Raises:
      NonFiniteGradientError: If a replica computed something not finite.
      Interrupted: If `interrupt` was called.
      tf.errors.OutOfRangeError: After `close`.
    """
    if not len(self._untold):
      self.inner.refresh()
      self._untold = self._steps(self._present)(tf.constant(most)).numpy()
    is_made = self._untold[:, _ENDED_AT] != releases.NEVER
    made, self._untold = self._untold[is_made], self._untold[~is_made]
    if len(made):
      rate = self.inner.learning_rate
      return [updates.of_step(*row[2:_NUM_FIELDS], rate) for row in made]
    (row,), self._untold = self._untold, ()
    kind, replica, step = map(int, row[:3])
    if kind == ledger.Kind.NONFINITE:
      raise updates.NonFiniteGradientError(replica, step)
    if kind == ledger.Kind.WAKE:
      raise updates.Interrupted(f"interrupted at step {step}")
    # Other variables than assumed have gradients; their update is traced.
    self._present = tuple((row[_NUM_FIELDS:] > 0).tolist())
    return self.apply_updates(most)

  def _trace(self, present: tuple[bool, ...]) -> Callable:
    """As many steps as it is told: [n, row]; only the last may be none."""

    def step():
      row = self._step(present)
      return row, row[_ENDED_AT] != releases.NEVER

    def steps(most):
      with tf.device(self._store.device_of_task(0)):
        rows = update_rule.repeat(step, most, secs=_CALL_SECS)
      with tf.device(self._client_device):
        return tf.identity(rows)

    spec = tf.TensorSpec([], tf.int32)
    return tf.function(steps, autograph=False).get_concrete_function(spec)

  def _step(self, present: tuple[bool, ...]) -> tf.Tensor:
    """Collects a step and makes its update; on PS task 0.

    Args:
      present: Which trainable variables are assumed to have a gradient from
        anyone; if that is wrong the update is left to the next call.

    Returns:
      The fields of `ledger.Collected`, before `present` when the update
      began and ended: one float64 vector, for each tensor read is a call.
    """
    collected = self._contributions.collect()
    may_update = collected.kind == int(ledger.Kind.DELIVERED)
    may_update &= tf.reduce_all(collected.present == list(present))
    began = releases.now(may_update)
    with tf.control_dependencies([began]):
      ended = tf.cond(
        may_update,
        lambda: self._finish_step(present, collected),
        lambda: tf.constant(releases.NEVER, tf.float64),
      )
    fields = [*collected[:5], began, ended]
    fields = tf.stack([tf.cast(field, tf.float64) for field in fields])
    present = tf.cast(collected.present, tf.float64)
    return tf.concat([fields, present], axis=0)

  def _finish_step(self, present, collected) -> tf.Tensor:
    """Updates, advances the step and lets the replicas go on; when it did."""
    with tf.control_dependencies([self._mark.begin(collected.step)]):
      updated = self.update(
        present,
        collected.step,
        self._contributions.take_sums,
        self.replicas_to_aggregate,
      )
    with tf.control_dependencies([updated]):
      step = self._store.advance(collected.step, collected.examples)
    ended = releases.now(step)
    with tf.control_dependencies([ended]):
      self._contributions.release_all(step)
      return tf.identity(ended)

  # For whoever drives or watches it.

  def counts(self) -> list[updates.Counts]:
    """What became of each replica's contributions; none if it is alone."""
    if self._contributions is None:
      return []
    return updates.of_ledger(self._contributions.snapshot())

  def ledger(self) -> ledger.Ledger:
    """Who owes what at this moment, as NumPy values."""
    return self._contributions.snapshot()

  def declare_lost(self, replica: int, tag: int) -> None:
    """Offers the place of `replica`, whose last offer is `tag`, to others."""
    self._contributions.declare_lost(replica, tag)

  def interrupt(self) -> None:
    """Makes `apply_update`, waiting in another thread, raise `Interrupted`."""
    if self._contributions is None:
      return
    try:
      self._contributions.wake()
    except tf.errors.OpError:
      pass  # It was closed meanwhile, which ends the wait as well.

  def trace_ahead(self) -> None:
    """See `update_rule.UpdateRule`."""
    super().trace_ahead()
    self._steps(self._present)

  @tf.function(autograph=False)
  def end_replicas(self) -> None:
    """Releases replicas to `releases.ENDED` until `interrupt`."""
    self._contributions.end_replicas()

  def suspend(self) -> None:
    """Releases every replica to `releases.ENDED` until `resume`.

    `apply_update` has told of all updates.
    """
    self._answering = connection.Thread(self.end_replicas, on_error=bool)

  def resume(self) -> None:
    """Makes updates again, of what is offered from now on."""
    state = self.ledger()
    for replica in np.flatnonzero(state.status == ledger.Status.ADMITTED):
      # It may still hand over what was admitted before `suspend`.
      self.declare_lost(int(replica), int(state.tag[replica]))
    while self._answering.is_alive():
      self.interrupt()  # An earlier chief's answers last until ours begin.
      self._answering.join(1.0)
    self._contributions.initialize(keep_counts=True)

  def give_up(self, replica: int) -> None:
    """Ends `replica`, which has no chief; its thread is another."""
    self._contributions.give_up(replica)

  def close(self) -> None:
    """Ends the training: every waiting replica gets `OutOfRangeError`."""
    self._contributions.close()
