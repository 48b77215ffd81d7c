"""Asynchronous updates: each replica applies its own gradient at once.

What TF1 did without `SyncReplicasOptimizer`, with exact counts of updates and
of their staleness. `AsyncReplicasOptimizer` says how it comes about.
"""

import functools
from collections.abc import Iterable
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tf_replicas import applications
from tf_replicas import contributions
from tf_replicas import gates
from tf_replicas import gradient_queues
from tf_replicas import inner_optimizer
from tf_replicas import ledger
from tf_replicas import mean_update
from tf_replicas import moving_averages
from tf_replicas import parameter_store
from tf_replicas import replica_update
from tf_replicas import staleness as staleness_lib
from tf_replicas import updates


class AsyncReplicasOptimizer:
  """An optimizer wrapper that applies every gradient as soon as it is there.

  Nobody waits for anybody, unless a policy says so. An update is one replica's
  gradient of its own batch, of variables that others may have changed since
  they were read; the *staleness* says how often. The global step counts the
  applications, exactly.

  A replica's step, in its own program, but on the PS tasks:

  1. Pull the global step and then the parameters (`pull`), and compute.
  2. Wait at the first gate, if `max_lead` bounds how far ahead it may be.
  3. Admission, under a lock on PS task 0: the updates that are finished or
     under way, less the step that was pulled, are the staleness. Policies
     refuse the whole set, before its bytes travel, or admit it.
  4. Send the gradients; on each PS task apply the inner optimizer to the
     shards there, then move their averages. With `use_locking` one replica at
     a time does that on a PS task.
  5. Under the first lock: global step + 1, count, tell the chief.
  6. Wait at the second gate, as at the first.

  The chief only listens (`apply_update`).

  `use_locking` off: updates of one variable may interleave. What adds to a
  variable, as plain gradient descent does, still loses nothing; what reads and
  then writes it, as momentum and Adam do with their slots, may lose the work
  of another replica. On: updates of one variable, slots included, exclude each
  other. Neither makes the whole set atomic, since PS tasks are locked one by
  one and reads not at all: a replica may read some variables before and others
  after an update (as TF1). `snapshot_reads` make it atomic, at the cost of one
  lock for all PS tasks, held while variables are read and sent, and while an
  update is made: reads and updates then follow one another.

  Attributes:
    inner: The inner optimizer, bound to the store.
    total_num_replicas: M, the replicas that apply.
    policy: What is done about staleness.
  """

  replicas_to_aggregate = 1

  def __init__(
    self,
    optimizer: object,
    total_num_replicas: int,
    *,
    use_locking: bool = False,
    snapshot_reads: bool = False,
    policies: Sequence[staleness_lib.Policy] = (),
    variable_averages: moving_averages.MovingAverages | None = None,
    variables_to_average: Iterable[tf.Variable | str] | None = None,
    has_chief_statistics: bool = False,
    loss_scale: float | None = None,
    name: str = "async_replicas",
  ):
    """Wraps `optimizer`.

    Args:
      optimizer: The inner optimizer, as for `SyncReplicasOptimizer`.
      total_num_replicas: M, the replicas that apply.
      use_locking: Whether updates of one variable exclude each other.
      snapshot_reads: Whether replicas read all variables of one version.
      policies: What to do about staleness, combined.
      variable_averages: Keeps shadow averages, updated after every update.
      variables_to_average: Variables, or their paths; all if not given.
      has_chief_statistics: Whether only replica 0 moves statistics.
      loss_scale: As for `SyncReplicasOptimizer`.
      name: Names the rule.

    Raises:
      TypeError, ValueError: If an argument is of no use.
    """
    if isinstance(total_num_replicas, bool) or total_num_replicas < 1:
      raise ValueError(
        "`total_num_replicas` must be an integer of at least 1."
        f" Received: {total_num_replicas!r}."
      )
    if variables_to_average is not None and variable_averages is None:
      raise ValueError("`variables_to_average` needs `variable_averages`.")
    self.total_num_replicas = total_num_replicas
    self.policy = staleness_lib.combine(policies)
    self.name = name
    self.variable_averages = variable_averages
    self._use_locking = use_locking
    self._snapshot_reads = snapshot_reads
    self._to_average = variables_to_average
    self._has_chief_statistics = has_chief_statistics
    self._loss_scale = loss_scale
    self.inner = inner_optimizer.InnerOptimizer(optimizer)
    self._is_ready = False

  def build(
    self,
    store: parameter_store.ParameterStore,
    *,
    is_sparse: Sequence[bool] | None = None,
  ) -> None:
    """Attaches to, or creates, everything on the PS tasks.

    Args:
      store: Holds the variables; need not be initialised yet.
      is_sparse: For each of the store's `contributed` whether its gradients
        come as `tf.IndexedSlices`. None do if not given.

    Raises:
      ValueError: If a policy cannot treat sparse gradients and there are some.
    """
    if self.policy.compensate and any(is_sparse or ()):
      raise ValueError(
        f"`compensate` needs dense gradients. Received: {self.policy.name}."
      )
    self._store = store
    self._device = store.device_of_task(0)
    count = self.total_num_replicas
    self._applications = applications.Applications(
      store, count, self.policy.admits
    )
    new_gate = functools.partial(
      gates.Gate, max_lead=self.policy.max_lead, device=self._device
    )
    self._before = new_gate("async/before", count)
    self._after = new_gate("async/after", count)
    self.update = mean_update.MeanUpdate(
      store,
      self.inner,
      variable_averages=self.variable_averages,
      to_average=self._to_average,
      clip_norm=None,
    )
    self._replica_update = replica_update.ReplicaUpdate(
      store,
      self.update,
      num_replicas=count,
      policy=self.policy,
      use_locking=self._use_locking,
      snapshot_reads=self._snapshot_reads,
    )
    self.pull = self._replica_update.pull

  def create(self, values: Sequence[tf.Tensor]) -> None:
    """The chief's: gives everything its first value, unless it has one.

    Args:
      values: Of the variables, in the store's order.
    """
    is_new = not self._store.is_initialized()
    if is_new:
      self._applications.initialize()
      self._before.initialize()
      self._after.initialize()
      for index, value in enumerate(values):
        self._store.assign(index, value)
      self.update.initialize(values)
    self._make_ready(is_chief=True)
    if is_new:
      self._store.start()
    else:
      # An earlier chief's `apply_update` may live on at the PS; this ends it.
      self._applications.wake()

  def _make_ready(self, *, is_chief: bool) -> None:
    """Builds the inner optimizer, once; the chief first."""
    if self._is_ready:
      return
    with tf.init_scope():
      self.inner.build(self._store, is_chief=is_chief)
    if self.policy.rate_factor and not self.inner.has_adjustable_rate():
      raise ValueError(
        "`policies` with `rate_factor` need a Keras optimizer whose learning"
        f" rate is a number. Received: {self.policy.name}."
      )
    if self.inner.has_common_state():
      raise ValueError(
        "`optimizer` must not have state of its own that each update changes,"
        f" as Nadam has. Received: {self.inner.optimizer!r}."
      )
    self._is_ready = True

  def signature(self) -> list:
    """What every client of a training must agree on about the rule."""
    return [
      self.name,
      self.total_num_replicas,
      self._use_locking,
      self._snapshot_reads,
      self._has_chief_statistics,
      self.policy.name,
    ]

  # The replica's half.

  def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
    """What to differentiate instead of `loss`; see `loss_scale`."""
    return loss if self._loss_scale is None else loss * self._loss_scale

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
    """Applies one set of gradients; to be used inside a `tf.function`.

    Args:
      grads_and_vars: As for `SyncReplicasOptimizer`.
      replica: Which replica this is, in [0, total_num_replicas).
      local_step: int64 scalar, the global step whose variables were used.
      loss: Scalar, for the reports: the mean over these examples.
      num_examples: Scalar, how many examples the gradients are the mean of.
      ticket: Not used; there are none.

    Returns:
      Whether the gradients were applied, and the global step to go on from.

    Raises:
      tf.errors.OutOfRangeError, tf.errors.CancelledError: At its end.
    """
    del ticket
    self._make_ready(is_chief=False)
    gradients, moves = mean_update.in_order(self._store, grads_and_vars)
    if self._loss_scale is not None:
      factor = 1 / self._loss_scale
      gradients = [mean_update.scaled(g, factor) for g in gradients]
    if self._has_chief_statistics:
      moves = [mean_update.scaled(m, replica == 0) for m in moves]
    gradients += moves
    is_sound = tf.math.is_finite(tf.cast(loss, tf.float32))
    is_sound &= gradient_queues.all_finite(gradients)
    loss = tf.cast(loss, tf.float64)
    with tf.device(self._device):
      clock = self._after.clocks()
      # One that was lost comes back where the slowest is.
      clock = tf.where(clock < gates.LOST, clock, tf.reduce_min(clock))
      clock = tf.where(clock < gates.LOST, clock, 0)
      clock = tf.gather(clock, replica) + 1
      may_go = self._before.enter(replica, clock)
      with tf.control_dependencies([may_go]):
        admitted, version, staleness, ended = self._applications.admit(
          replica, local_step, is_sound
        )

    def use():
      updated = self._replica_update(replica, gradients, version, staleness)
      with tf.control_dependencies([updated]):
        return self._applications.finish(replica, staleness, loss, num_examples)

    with tf.device(self._device):
      step = tf.cond(
        admitted,
        use,
        lambda: tf.where(ended, tf.constant(-1, tf.int64), version),
      )
      with tf.control_dependencies([step]):
        may_go = self._after.enter(replica, clock)
      with tf.control_dependencies([may_go]):
        return contributions.Release(
          tf.cast(admitted, tf.int64),
          tf.identity(step),
          tf.constant(-1, tf.int64),
        )

  # The chief's half.

  def set_learning_rate(self, rate: float) -> None:
    """Sets the inner Keras optimizer's rate, from `apply_update` on."""
    self.inner.optimizer.learning_rate = rate

  def apply_update(self) -> updates.Update:
    """Waits until something was applied; what was since the last call.

    Raises:
      NonFiniteGradientError: If a replica computed something not finite.
      Interrupted: If `interrupt` was called.
      tf.errors.OutOfRangeError: After `close`.
    """
    self.inner.refresh()
    rows = self._applications.listen().numpy()
    kinds = rows[:, 0]
    for _, replica, step, _, _ in rows[kinds == ledger.Kind.NONFINITE]:
      raise updates.NonFiniteGradientError(int(replica), int(step))
    applied = rows[kinds == ledger.Kind.DELIVERED]
    if not len(applied):
      raise updates.Interrupted("interrupted")
    step = int(applied[:, 2].max())
    return updates.Update(
      global_step=step,
      loss=float(applied[:, 4].mean()),
      num_examples=int(applied[:, 3].sum()),
      learning_rate=self.inner.learning_rate(step - 1),
    )

  # For whoever drives or watches it.

  def counts(self) -> list[updates.Counts]:
    """What became of each replica's gradients; late: dropped as too stale."""
    return [
      updates.Counts(int(applied.sum()), 0, tuple(map(int, dropped[1:])))
      for applied, dropped in zip(
        self._applications.applied.numpy(),
        self._applications.dropped.numpy(),
        strict=True,
      )
    ]

  def staleness(self) -> np.ndarray:
    """How many gradients were applied: [replica, staleness], int64.

    The last column counts all of `applications.MAX_STALENESS` and more.
    """
    return self._applications.applied.numpy()

  def ledger(self) -> ledger.Ledger:
    """Who waits at a gate, and who is given up, as NumPy values."""
    count = self.total_num_replicas
    waits = self._before.is_waiting() | self._after.is_waiting()
    status = np.where(
      waits.numpy(), ledger.Status.WAITING, ledger.Status.COMPUTING
    )
    is_lost = self._after.clocks().numpy() >= gates.LOST
    status = np.where(is_lost, ledger.Status.LOST, status)
    return ledger.new_ledger(count, 1)._replace(status=status)

  def declare_lost(self, replica: int, tag: int) -> None:
    """Lets nobody wait for `replica` until it comes back."""
    del tag

    @tf.function(autograph=False)
    def lose(replica):
      self._before.declare_lost(replica)
      self._after.declare_lost(replica)
      self._applications.forget(replica)

    lose(tf.constant(replica, tf.int64))

  def interrupt(self) -> None:
    """Makes `apply_update`, waiting in another thread, raise `Interrupted`."""
    try:
      self._applications.wake()
    except tf.errors.OpError:
      pass  # It was closed meanwhile, which ends the wait as well.

  def end_replicas(self) -> None:
    """Releases every replica to `contributions.ENDED` from now on."""

    @tf.function(autograph=False)
    def end():
      self._applications.end()
      self._before.open()
      self._after.open()

    end()

  def give_up(self, replica: int) -> None:
    """Makes `apply_gradients`, in another thread, raise an error."""
    self._before.give_up(replica)
    self._after.give_up(replica)

  def close(self) -> None:
    """Ends the training: every replica gets `OutOfRangeError`."""
    self._before.close()
    self._after.close()
    self._applications.close()
