"""Synchronous updates from exactly N contributions, with backup replicas.

The successor of TF1's `tf.train.SyncReplicasOptimizer`, with stricter rules.
`SyncReplicasOptimizer` says what they are and how they come about.
"""

import functools
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence

import tensorflow as tf

from tf_replicas import contributions
from tf_replicas import inner_optimizer
from tf_replicas import ledger
from tf_replicas import mean_update
from tf_replicas import moving_averages
from tf_replicas import parameter_store
from tf_replicas import updates


class SyncReplicasOptimizer:
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
  4. Apply the inner optimizer on each PS task.
  5. Global step + 1.
  6. Update the moving averages.
  7. Release every replica that has offered.

  After TF1's `tf.train.SyncReplicasOptimizer`, but the first step counts like
  every other, contributions are taken or refused as a whole, the mean is of
  exactly N, and nothing is dropped without being counted.

  Attributes:
    inner: The inner optimizer, bound to the store.
    update: Makes the update, once `build` was called.
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
    name: str = "sync_replicas",
  ):
    """Wraps `optimizer`.

    Args:
      optimizer: The inner optimizer: a Keras 3 optimizer, or any object with
        `apply(gradients, variables)` or `apply_gradients(pairs)`.
      replicas_to_aggregate: N, the contributions in one update.
      total_num_replicas: M, the replicas that offer; N if not given.
      variable_averages: Keeps shadow averages, updated after every update and
        before the replicas go on.
      variables_to_average: Variables, or their paths; all if not given.
      clip_replica_norm: Each replica's gradients are scaled down to this
        global norm before they are offered.
      clip_mean_norm: The mean is scaled down to this global norm before it is
        applied.
      has_chief_statistics: Whether statistics follow replica 0 alone, or the
        first of the N if it is not among them; else the mean of all N.
      loss_scale: `scale_loss` multiplies by it and `apply_gradients` divides
        by it, for float16 computation.
      name: Names the summaries.

    Raises:
      TypeError, ValueError: If an argument is of no use.
    """
    if total_num_replicas is None:
      total_num_replicas = replicas_to_aggregate
    _check_count("replicas_to_aggregate", replicas_to_aggregate)
    _check_count("total_num_replicas", total_num_replicas)
    _check_positive("clip_replica_norm", clip_replica_norm)
    _check_positive("clip_mean_norm", clip_mean_norm)
    _check_positive("loss_scale", loss_scale)
    if variables_to_average is not None and variable_averages is None:
      raise ValueError("`variables_to_average` needs `variable_averages`.")
    self.replicas_to_aggregate = replicas_to_aggregate
    self.total_num_replicas = total_num_replicas
    self.variable_averages = variable_averages
    self.name = name
    self._to_average = variables_to_average
    self._clip_replica_norm = clip_replica_norm
    self._clip_mean_norm = clip_mean_norm
    self._has_chief_statistics = has_chief_statistics
    self._loss_scale = loss_scale
    self.inner = inner_optimizer.InnerOptimizer(optimizer)

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
    self._store = store
    self._contributions: contributions.Contributions | None = None
    if not is_alone:
      self._contributions = contributions.Contributions(
        store,
        num_replicas=self.total_num_replicas,
        replicas_to_aggregate=self.replicas_to_aggregate,
        is_sparse=is_sparse or [False] * len(store.contributed),
        has_chief_statistics=self._has_chief_statistics,
      )
    self.update = mean_update.MeanUpdate(
      store,
      self.inner,
      variable_averages=self.variable_averages,
      to_average=self._to_average,
      clip_norm=self._clip_mean_norm,
    )
    self._client_device = tf.constant(0).device
    self._present = (True,) * len(store.contributed)
    self._steps: dict[tuple[bool, ...], Callable] = {}

  def create(self, values: Sequence[tf.Tensor]) -> None:
    """The chief's: gives everything its first value, unless it has one.

    Args:
      values: Of the variables, in the store's order.
    """
    is_new = not self._store.is_initialized()
    if is_new:
      # The global step comes last: it tells others that all is there.
      if self._contributions is not None:
        self._contributions.initialize()
      for index, value in enumerate(values):
        self._store.assign(index, value)
      self.update.initialize(values)
    self.inner.build(self._store)
    if is_new:
      self._store.start()
    elif self._contributions is not None:
      # An earlier chief's `collect` may live on at the PS; this ends it.
      self._contributions.wake()

  def signature(self) -> list:
    """What every client of a training must agree on about the rule."""
    counts = [self.replicas_to_aggregate, self.total_num_replicas]
    return [self.name, *counts, self._has_chief_statistics]

  # The replica's half.

  def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
    """What to differentiate instead of `loss`; see `loss_scale`."""
    return loss if self._loss_scale is None else loss * self._loss_scale

  def finish_gradients(
    self,
    gradients: Sequence[parameter_store.Gradient],
    replica: int | None = None,
  ) -> list[parameter_store.Gradient]:
    """A replica's gradients of the scaled loss as they enter the mean.

    Args:
      gradients: One per element of the store's `contributed`.
      replica: Whose, where all N replicas enter every mean with no chief to
        choose whose statistics count.
    """
    count = len(self._store.trainable)
    gradients, moves = list(gradients[:count]), list(gradients[count:])
    if self._loss_scale is not None:
      factor = 1 / self._loss_scale
      gradients = [mean_update.scaled(g, factor) for g in gradients]
    if self._clip_replica_norm is not None:
      gradients, _ = tf.clip_by_global_norm(gradients, self._clip_replica_norm)
    if self._has_chief_statistics and replica is not None:
      weight = 0 if replica else self.replicas_to_aggregate
      moves = [mean_update.scaled(m, weight) for m in moves]
    return [*gradients, *moves]

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
  ) -> contributions.Release:
    """Offers one set of gradients and waits until this replica may go on.

    To be used inside a `tf.function`.

    Args:
      grads_and_vars: (gradient, variable) pairs; gradients of the variable's
        shape, dense, `tf.IndexedSlices` or None; a variable may be given by
        its path. Variables left out have none. Of a statistic, in place of
        a gradient, old less new value (see `mean_update`).
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
    gradients, moves = mean_update.in_order(self._store, grads_and_vars)
    return self._contributions.offer(
      replica,
      self.finish_gradients([*gradients, *moves]),
      local_step=local_step,
      loss=loss,
      num_examples=num_examples,
      ticket=ticket,
    )

  # The chief's half.

  def set_learning_rate(self, rate: float) -> None:
    """Sets the inner Keras optimizer's rate, from the next update on."""
    self.inner.optimizer.learning_rate = rate

  def apply_update(self) -> updates.Update:
    """Waits for N contributions and makes one update of them.

    Raises:
      NonFiniteGradientError: If a replica computed something not finite.
      Interrupted: If `interrupt` was called.
      tf.errors.OutOfRangeError: After `close`.
    """
    self.inner.refresh()
    if self._present not in self._steps:
      step_fn = functools.partial(self._step, self._present)
      step_fn = tf.function(step_fn, autograph=False).get_concrete_function()
      self._steps[self._present] = step_fn
    fields = self._steps[self._present]().numpy()
    kind, replica, step, examples, loss, is_updated = fields[:6]
    if kind == ledger.Kind.NONFINITE:
      raise updates.NonFiniteGradientError(int(replica), int(step))
    if kind == ledger.Kind.WAKE:
      raise updates.Interrupted(f"interrupted at step {int(step)}")
    if not is_updated:
      # Other variables than assumed have gradients; their update is traced.
      self._present = tuple((fields[6:] > 0).tolist())
      return self.apply_update()
    return updates.Update(
      global_step=int(step) + 1,
      loss=float(loss),
      num_examples=int(examples),
      learning_rate=self.inner.learning_rate(int(step)),
    )

  def _step(self, present: tuple[bool, ...]) -> tf.Tensor:
    """Collects a step and makes its update, without coming back in between.

    Args:
      present: Which trainable variables are assumed to have a gradient from
        anyone; if that is wrong the update is left to the next call.

    Returns:
      The fields of `contributions.Collected`, with whether the update was made
      before `present`: one float64 vector, for each tensor read is a call.
    """
    with tf.device(self._store.device_of_task(0)):
      collected = self._contributions.collect()
      may_update = collected.kind == int(ledger.Kind.DELIVERED)
      may_update &= tf.reduce_all(collected.present == list(present))
      is_updated = tf.cond(
        may_update,
        lambda: self._finish_step(present, collected),
        lambda: tf.constant(False),
      )
      fields = [*collected[:5], is_updated]
      fields = tf.stack([tf.cast(field, tf.float64) for field in fields])
      present = tf.cast(collected.present, tf.float64)
      packed = tf.concat([fields, present], axis=0)
    with tf.device(self._client_device):
      return tf.identity(packed)

  def _finish_step(self, present, collected) -> tf.Tensor:
    """Updates, advances the step and lets the replicas go on; returns True."""
    updated = self.update(
      present,
      collected.step,
      self._contributions.take_sums,
      self.replicas_to_aggregate,
    )
    with tf.control_dependencies([updated]):
      step = self._store.advance(collected.step, collected.examples)
    with tf.control_dependencies([step]):
      self._contributions.release_all(step)
      return tf.constant(True)

  # For whoever drives or watches it.

  def counts(self) -> list[updates.Counts]:
    """What became of each replica's contributions; none if it is alone."""
    if self._contributions is None:
      return []
    rows = self._contributions.snapshot().counts
    return [
      updates.Counts(int(r[0]), int(r[1]), tuple(map(int, r[2:]))) for r in rows
    ]

  def ledger(self) -> ledger.Ledger:
    """Who owes what at this moment, as NumPy values."""
    return self._contributions.snapshot()

  def declare_lost(self, replica: int, tag: int) -> None:
    """Offers the place of `replica`, whose last offer is `tag`, to others."""
    self._contributions.declare_lost(replica, tag)

  def interrupt(self) -> None:
    """Makes `apply_update`, waiting in another thread, raise `Interrupted`."""
    try:
      self._contributions.wake()
    except tf.errors.OpError:
      pass  # It was closed meanwhile, which ends the wait as well.

  def end_replicas(self) -> None:
    """Releases replicas to `contributions.ENDED` until `interrupt`."""
    tf.function(self._contributions.end_replicas, autograph=False)()

  def give_up(self, replica: int) -> None:
    """Makes `apply_gradients`, waiting in another thread, raise an error."""
    self._contributions.give_up(replica)

  def close(self) -> None:
    """Ends the training: every waiting replica gets `OutOfRangeError`."""
    self._contributions.close()


def _check_count(name: str, value: int) -> None:
  if isinstance(value, bool) or not isinstance(value, int):
    raise TypeError(f"`{name}` must be an integer. Received: {value!r}.")
  if value < 1:
    raise ValueError(f"`{name}` must be at least 1. Received: {value}.")


def _check_positive(name: str, value: float | None) -> None:
  if value is not None and not value > 0:
    raise ValueError(f"`{name}` must be positive. Received: {value}.")
