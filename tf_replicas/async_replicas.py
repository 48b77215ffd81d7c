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
from tf_replicas import gates
from tf_replicas import gradient_queues
from tf_replicas import ledger
from tf_replicas import moving_averages
from tf_replicas import parameter_store
from tf_replicas import releases
from tf_replicas import replica_update
from tf_replicas import resources
from tf_replicas import staleness as staleness_lib
from tf_replicas import update_rule
from tf_replicas import updates


class AsyncReplicasOptimizer(update_rule.UpdateRule):
  """An optimizer wrapper that applies every gradient as soon as it is there.

  Nobody waits for anybody, unless a policy says so. An update is one replica's
  gradient, of variables that others may have changed since they were read; the
  *staleness* says how often. The global step counts the updates, exactly.

  A replica's step, in its own program, but on the PS tasks:

  1. Pull the global step and then the parameters (`pull`), and compute.
  2. If `max_lead` is 0, wait until all have computed as many gradients.
  3. Admission, under a lock on PS task 0: the updates that are finished or
     under way, less the step that was pulled, are the staleness. Policies
     refuse the whole set, before its bytes travel, or admit it. After
     `stop_at` nothing is admitted beyond that step.
  4. Send the gradients; on each PS task apply the inner optimizer to the
     shards there, then move their averages. With `use_locking` one replica at
     a time does that on a PS task.
  5. Under the first lock: global step + 1, count, tell the chief.
  6. Wait until nobody is more than `max_lead` updates behind, if that is given.

  With `gradients_per_update` = c > 1, step 4 adds the gradients to sums beside
  the variables, and every c-th of all replicas applies their mean: M / c is the
  n of n-softsync (Zhang et al. 2015, section 2). Policies then scale and
  compensate each gradient as it is added.

  The chief only listens (`apply_update`).

  `use_locking` off: updates of one variable may interleave. What adds to it, as
  plain gradient descent and the slots of Keras 3.15's Adam do, loses nothing;
  what reads and then writes, as momentum does, may lose another's work. On:
  updates of one variable, slots included, exclude each other. Neither makes the
  whole set atomic: PS tasks are locked one by one, and a read may see half an
  update (as TF1). `snapshot_reads` do, by one lock for all PS tasks, held while
  variables are read and sent, and during an update.

  `refresh_every` = K lets a replica compute K times from what it read once,
  which saves traffic, and makes its gradients staler. It reads anew after K
  steps, or if they were refused. (TF1's `caching_device` left that open.)

  Attributes:
    total_num_replicas: M, the replicas that apply.
    refresh_every: K.
    policy: What is done about staleness.
    applications: What is under way, once `build` was called.
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
    gradients_per_update: int = 1,
    refresh_every: int = 1,
    variable_averages: moving_averages.MovingAverages | None = None,
    variables_to_average: Iterable[tf.Variable | str] | None = None,
    clip_replica_norm: float | None = None,
    has_chief_statistics: bool = False,
    loss_scale: float | None = None,
    wire_dtype: str | None = None,
    name: str = "async_replicas",
  ):
    """Wraps `optimizer`.

    Args:
      optimizer: For it and for all that is not named see `UpdateRule`.
      total_num_replicas: M.
      use_locking: Whether updates of one variable exclude each other.
      snapshot_reads: Whether replicas read all variables of one version.
      policies: What to do about staleness, combined.
      gradients_per_update: How many sets of gradients make one update.
      refresh_every: How many steps a replica makes from what it read once.
      has_chief_statistics: Whether only replica 0 moves statistics.

    Raises:
      TypeError, ValueError: If an argument is of no use.
    """
    update_rule.check_count("total_num_replicas", total_num_replicas)
    update_rule.check_count("gradients_per_update", gradients_per_update)
    update_rule.check_count("refresh_every", refresh_every)
    super().__init__(
      optimizer,
      variable_averages=variable_averages,
      variables_to_average=variables_to_average,
      clip_replica_norm=clip_replica_norm,
      has_chief_statistics=has_chief_statistics,
      loss_scale=loss_scale,
      wire_dtype=wire_dtype,
      name=name,
    )
    self.total_num_replicas = total_num_replicas
    self.refresh_every = refresh_every
    self.policy = staleness_lib.combine(policies)
    self._use_locking = use_locking
    self._snapshot_reads = snapshot_reads
    self._per_update = gradients_per_update
    self._is_ready = False

  @property
  def has_tickets(self) -> bool:
    """Whether a `Release` may carry a ticket."""
    return self.refresh_every > 1

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
      ValueError: If there are sparse gradients, and they cannot be treated.
    """
    if any(is_sparse or ()):
      self._check_sparse()
    self.bind(store)
    self._device = store.device_of_task(0)
    count = self.total_num_replicas
    self.applications = applications.Applications(
      store, count, self.policy.admits, self._per_update
    )
    self._gates: gates.Gates | None = None
    if self.policy.max_lead is not None:
      self._gates = gates.Gates(
        count, max_lead=self.policy.max_lead, device=self._device
      )
    self._replica_update = replica_update.ReplicaUpdate(
      store,
      self.update,
      num_replicas=count,
      policy=self.policy,
      use_locking=self._use_locking,
      snapshot_reads=self._snapshot_reads,
      gradients_per_update=self._per_update,
    )
    self.pull = self._replica_update.pull

  def _check_sparse(self) -> None:
    if self.policy.compensate:
      raise ValueError(
        f"`compensate` needs dense gradients. Received: {self.policy.name}."
      )
    if self._per_update > 1:
      raise ValueError(
        "`gradients_per_update` must be 1 where gradients are sparse."
        f" Received: {self._per_update}."
      )

  def initialize(self, values: Sequence[tf.Tensor]) -> None:
    """Gives everything but the slots and the global step its first value."""
    self.applications.initialize()
    self._replica_update.initialize()
    if self._gates is not None:
      self._gates.initialize()
    super().initialize(values)

  def make_ready(self, *, is_chief: bool) -> None:
    """Builds the inner optimizer, once; the chief first."""
    if self._is_ready:
      return
    with tf.init_scope():
      super().make_ready(is_chief=is_chief)
    needs_rate = self.policy.rate_factor and self._per_update == 1
    if needs_rate and not self.inner.has_adjustable_rate():
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
      self.has_chief_statistics,
      self.policy.name,
      self._per_update,
      self.refresh_every,
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
    """Applies one set of gradients; to be used inside a `tf.function`.

    Args:
      grads_and_vars: As `in_order` takes them.
      replica: Which replica this is, in [0, total_num_replicas).
      local_step: int64 scalar, the global step whose variables were used.
      loss: Scalar, for the reports: the mean over these examples.
      num_examples: Scalar, how many examples the gradients are the mean of.
      ticket: That of the last `Release`, unless -1.

    Returns: Whether the gradients were applied, and the global step after it;
      its ticket is -1 if the variables are to be read anew.

    Raises: OutOfRangeError, CancelledError: At its end, at run time.
    """
    self.make_ready(is_chief=False)
    weight = self._per_update * tf.cast(replica == 0, tf.int32)
    gradients = self.in_order(grads_and_vars)
    gradients = self.with_chief_statistics(gradients, weight)
    is_sound = tf.math.is_finite(tf.cast(loss, tf.float32))
    is_sound &= gradient_queues.all_finite(gradients, self.wire_dtype)
    replica, local_step, is_sound, loss, num_examples = resources.land_scalars(
      self._device, replica, local_step, is_sound, loss, num_examples
    )
    passed = [is_sound]  # Nobody comes to gate or lock before it has gradients.
    if self._gates is not None:
      with tf.control_dependencies(passed):
        clock = self._gates.next_clock(replica)
        passed = [self._gates.before(replica, clock)]
    with tf.control_dependencies(passed):
      admission = self.applications.admit(replica, local_step, is_sound)

    parcels, parts = self._replica_update.pack(gradients), None
    if self.policy.admits is None and self.policy.max_lead != 0:
      # What nobody refuses or holds up does not wait for an answer.
      parts = self._replica_update.send(parcels)

    def use():
      return self._replica_update(
        replica,
        parts or self._replica_update.send(parcels),
        admission.version,
        admission.staleness,
        self.applications.pending,
        functools.partial(
          self.applications.finish,
          replica,
          admission.staleness,
          loss,
          num_examples,
        ),
      )

    def pass_over():
      ended = tf.constant(releases.ENDED, tf.int64)
      step = tf.where(admission.has_ended, ended, admission.version)
      never = tf.constant(releases.NEVER, tf.float64)
      return step, never, never

    with tf.device(self._device):
      asked_at = releases.NEVER if parts else releases.now(admission.admitted)
      step, sent_at, applied_at = tf.cond(admission.admitted, use, pass_over)
      passed = [step]
      if self._gates is not None:
        with tf.control_dependencies(passed):
          passed = [self._gates.after(replica, clock)]
      with tf.control_dependencies(passed):
        return releases.Release(
          tf.cast(admission.admitted, tf.int64),
          tf.identity(step),
          releases.next_ticket(ticket, admission.admitted, self.refresh_every),
          releases.pack_times(asked_at, sent_at, applied_at, releases.now()),
        )

  # The chief's half.

  def stop_at(self, step: int) -> None:
    """Admits nothing that would take the global step beyond `step`."""
    self.applications.stop_at(step)

  def apply_update(self) -> updates.Update:
    """Waits for an update; what was applied since the last call.

    Raises: As `Applications.collect`.
    """
    self.inner.refresh()
    return self.applications.collect(self.inner.learning_rate)

  # For whoever drives or watches it.

  def counts(self) -> list[updates.Counts]:
    """What became of each replica's gradients; late: dropped as too stale."""
    return self.applications.counts()

  def ledger(self) -> ledger.Ledger:
    """Who waits at a gate, and who is given up, as NumPy values."""
    status = np.full(self.total_num_replicas, ledger.Status.COMPUTING)
    if self._gates is not None:
      status[self._gates.is_waiting().numpy()] = ledger.Status.WAITING
    status[self.applications.is_lost().numpy()] = ledger.Status.LOST
    return ledger.new_ledger(len(status), 1)._replace(status=status)

  def declare_lost(self, replica: int, tag: int) -> None:
    """Lets nobody wait for `replica` until it comes back."""
    del tag
    self._lose(replica)

  @tf.function(autograph=False, input_signature=[tf.TensorSpec([], tf.int64)])
  def _lose(self, replica):
    if self._gates is not None:
      self._gates.declare_lost(replica)
    self.applications.declare_lost(replica)

  def take_over(self) -> None:
    """A restarted chief's: goes on, also if the replicas had given it up."""
    super().take_over()
    if self.applications.has_ended():
      self.resume()

  def interrupt(self) -> None:
    """Makes `apply_update`, waiting in another thread, raise `Interrupted`."""
    self.applications.wake()

  @tf.function(autograph=False)
  def end_replicas(self) -> None:
    """Releases every replica to `releases.ENDED` from now on."""
    self.applications.end()
    if self._gates is not None:
      self._gates.open()

  def trace_ahead(self) -> None:
    """See `update_rule.UpdateRule`."""
    super().trace_ahead()
    self.applications.trace_ahead()
    self._lose.get_concrete_function()

  def suspend(self) -> updates.Update | None:
    """Ends all until `resume`; what `apply_update` has not told of yet."""
    self.end_replicas()
    self.applications.await_idleness()
    return self.applications.collect_rest(self.inner.learning_rate)

  def resume(self) -> None:
    """Admits again; replicas may come in any order."""
    if self._gates is not None:
      self._gates.initialize()
    self.applications.resume()

  def give_up(self, replica: int) -> None:
    """Ends all replicas, since the chief of `replica` is that of all."""
    del replica
    self.end_replicas()

  def close(self) -> None:
    """Ends the training: who waits, or comes, gets an `OpError`."""
    if self._gates is not None:
      self._gates.close()
    self.applications.close()
