"""Makes asynchronous updates: each replica applies its own gradients at once.

TF1 trained in this way without `SyncReplicasOptimizer`. Here, updates and their
staleness are also counted exactly. `AsyncReplicasOptimizer` documents the
protocol.
"""

from collections.abc import Iterable
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tf_replicas.rules import base as rule_base
from tf_replicas.rules import protocol
from tf_replicas.rules import results
from tf_replicas.rules import step_token
from tf_replicas.rules.asynchronous import async_admission
from tf_replicas.rules.asynchronous import own_update as own_update_lib
from tf_replicas.rules.asynchronous import staleness as staleness_lib
from tf_replicas.rules.asynchronous import staleness_clocks
from tf_replicas.runtime import control_flow
from tf_replicas.runtime import resources
from tf_replicas.store import gradient_math
from tf_replicas.store import inner_optimizer
from tf_replicas.store import moving_averages
from tf_replicas.store import parameter_store


class _Answer(NamedTuple):
  """The answer to one replica's gradients, with what describes them.

  Attributes:
    admission: Whether they are applied, as which update, and how stale.
    replica: The index of the replica; an int, or a scalar on PS task 0.
    clock: How many steps the replica has made, for the staleness clocks.
    loss: Scalar, the mean loss over the examples of the batch.
    num_examples: Scalar, the number of examples in the batch.
  """

  admission: async_admission.Admission
  replica: int | tf.Tensor
  clock: tf.Tensor
  loss: tf.Tensor
  num_examples: tf.Tensor

  def for_replica(self, replica: int | tf.Tensor) -> "_Answer":
    """Returns the same answer, with `replica` as its index if that is an int.

    A call on a PS task returns tensors only. An int is better where it is
    known: no choice among the replicas is then left to run time.
    """
    return self if tf.is_tensor(replica) else self._replace(replica=replica)


class AsyncReplicasOptimizer(rule_base.OptimizerRule):
  """An optimizer wrapper that applies every gradient as soon as it arrives.

  No replica waits for another, unless a policy demands it. An update applies
  the gradients of one replica. Other replicas may have changed the variables
  since this replica read them; the *staleness* of the gradients is the number
  of these updates. The global step counts all updates, exactly.

  The replica's program runs one step as follows; parts 3 to 6 run on the PS
  tasks. `max_lead` is that of the `bounded_staleness` policy, if it is used.

  1. Pull the global step and then the parameters (`pull`); compute gradients.
  2. If `max_lead` is 0, wait until all replicas have computed the gradients of
     this step.
  3. Ask for admission, under a lock on PS task 0. The staleness is the number
     of updates finished or in progress, minus the step that was pulled.
     Policies admit or refuse the whole set of gradients, before it is sent. No
     update is admitted beyond the step given to `stop_at`.
  4. Send the gradients. On each PS task, apply the inner optimizer to the
     shards there, then update their moving averages. With `use_locking` only
     one replica at a time does so on a PS task.
  5. Under the lock of part 3, increase the global step by 1, count the
     gradients, and tell the chief.
  6. If `max_lead` is given, wait until no replica is more than `max_lead`
     updates behind.

  With `gradients_per_update` = c > 1, part 4 adds the gradients to sums beside
  the variables, and every c-th set of gradients causes an update with the mean
  of c sets. M / c is the n of n-softsync (Zhang et al. 2015, section 2).
  Policies then scale and compensate each gradient as it is added.

  The chief only receives reports (`apply_updates`).

  Without `use_locking`, updates of one variable may interleave. Optimizers that
  only add to variables, such as plain gradient descent and Adam of Keras 3.15,
  lose nothing. Optimizers that read and then write, such as momentum, may lose
  the update of another replica. With `use_locking`, updates of one variable and
  its slots exclude each other. Still a whole update is not atomic: PS tasks are
  locked one by one, and a read may see part of an update (as in TF1). With
  `snapshot_reads` updates are atomic: one lock for all PS tasks is held during
  an update, and while variables are read and sent.

  With `refresh_every` = K, a replica computes K gradients from the same read of
  the variables, which saves traffic and makes gradients staler. The replica
  reads again after K steps, or when its gradients were refused. (TF1 had
  `caching_device` for this.)

  Attributes:
    total_num_replicas: M, the number of replicas that apply gradients.
    refresh_every: K, the number of gradients that a replica computes per read.
    policy: All policies for stale gradients, combined into one.
    admission: Decides which gradients are applied, and counts them; set by
      `build`.
  """

  def __init__(
    self,
    optimizer: inner_optimizer.Optimizer,
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
    clip_mean_norm: float | None = None,
    momentum_correction: bool = False,
    has_chief_statistics: bool = False,
    loss_scale: float | None = None,
    wire_dtype: str | None = None,
    name: str = "async_replicas",
  ):
    """Makes a rule for asynchronous updates by `optimizer`.

    Args:
      optimizer: The optimizer that applies the gradients. `OptimizerRule`
        documents the arguments that are not listed here.
      total_num_replicas: M, the number of replicas.
      use_locking: Whether updates of one variable exclude each other.
      snapshot_reads: Whether each update, and each read of all variables, is
        atomic.
      policies: Decide what to do about gradients that were computed from old
        variables. All policies are combined.
      gradients_per_update: c, the number of sets of gradients in one update.
      refresh_every: K, the number of gradients that a replica computes from one
        read of the variables.
      has_chief_statistics: Whether only replica 0 changes statistics (variables
        without gradients, such as moving means of batch normalization).

    Raises:
      TypeError, ValueError: If an argument is invalid.
    """
    rule_base.check_count("total_num_replicas", total_num_replicas)
    rule_base.check_count("gradients_per_update", gradients_per_update)
    rule_base.check_count("refresh_every", refresh_every)
    super().__init__(
      optimizer,
      variable_averages=variable_averages,
      variables_to_average=variables_to_average,
      clip_replica_norm=clip_replica_norm,
      clip_mean_norm=clip_mean_norm,
      momentum_correction=momentum_correction,
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
    self._is_inner_built = False

  @property
  def read_needs(self) -> frozenset[str]:
    """What `pull` must do besides reading the variables, as a set of names.

    `snapshot_reads`: no update may interrupt the read. `copies`: the PS tasks
    keep a copy of the values that each replica read.
    """
    needs = {"snapshot_reads": self._snapshot_reads}
    needs["copies"] = self.policy.compensate is not None
    return frozenset(name for name, is_needed in needs.items() if is_needed)

  def build(
    self,
    store: parameter_store.ParameterStore,
    *,
    is_sparse: Sequence[bool] | None = None,
    namespace: resources.Namespace | None = None,
  ) -> None:
    """Creates the rule's shared objects on the PS tasks.

    The objects are variables, queues and locks. If another process has created
    objects of these names, uses those. New variables have no values before
    `create`. Implements `UpdateRule.build`.

    Args:
      store: Holds the variables, which need no values yet.
      is_sparse: For each element of `store.contributed` (the trainable
        variables, then the variables without gradients), whether its gradients
        are `tf.IndexedSlices`. None: all are dense.
      namespace: The scope of the names of the rule's own shared objects. None:
        the namespace of `store`.

    Raises:
      ValueError: If gradients are sparse, and a policy compensates stale
        gradients or `gradients_per_update` is not 1; or if the model has tables
        (matrices whose rows live on the PS tasks) and `snapshot_reads` is True.
    """
    if any(is_sparse or ()):
      self._check_sparse(store)
    if self._snapshot_reads:
      rule_base.check_no_tables(store, "`snapshot_reads`")
    namespace = namespace or store.namespace
    self.bind(store)
    self._device = store.device_of_task(0)
    count = self.total_num_replicas
    self.admission = async_admission.AsyncAdmission(
      store, count, self.policy.admits, self._per_update, namespace
    )
    self._clocks = staleness_clocks.StalenessClocks(
      namespace, count, max_lead=self.policy.max_lead, device=self._device
    )
    self._own_update = own_update_lib.OwnUpdate(
      store,
      self.applier,
      num_replicas=count,
      policy=self.policy,
      use_locking=self._use_locking,
      snapshot_reads=self._snapshot_reads,
      gradients_per_update=self._per_update,
    )
    self.is_built = True

  def _check_sparse(self, store: parameter_store.ParameterStore) -> None:
    if self.policy.compensate:
      rule_base.check_no_tables(
        store, f"the staleness policy {self.policy.name!r}"
      )
      raise ValueError(
        f"`compensate` needs dense gradients. Received: {self.policy.name}."
      )
    if self._per_update > 1:
      rule_base.check_no_tables(
        store, "`softsync` (`gradients_per_update` > 1)"
      )
      raise ValueError(
        "`gradients_per_update` must be 1 where gradients are sparse."
        f" Received: {self._per_update}."
      )

  def create(self, values: Sequence[tf.Tensor], *, resumed: bool) -> None:
    """Initializes the shared objects, or takes over those of an earlier chief.

    Only the chief calls it, after `build`. Implements `UpdateRule.create`.

    Args:
      values: The initial value of each variable, in the order of the parameter
        store. Not used if `resumed`.
      resumed: Whether to take over: True if an earlier chief has initialized
        the parameter store. Its variables then keep their values.
    """
    if not resumed:
      self.admission.initialize()
      self._own_update.initialize()
      self._clocks.initialize()
      self.assign_first(values)
    # Replicas that go on have the learning rate of the earlier chief until
    # `apply_updates` sets the present one.
    self._build_inner(is_chief=not resumed)
    if resumed:
      # An earlier chief's `apply_updates` may live on at the PS; this ends it.
      self.interrupt()
      if (
        self.admission.has_ended()
      ):  # Replicas ended admission when they lost their chief.
        self.resume()

  def start(self) -> None:
    """Does nothing, because under this rule a new chief has nothing to prepare.

    Replicas apply their gradients at once, so none waits for the chief.
    """

  def _build_inner(self, *, is_chief: bool) -> None:
    """Builds the user's optimizer (`inner`), unless it is built already.

    The chief must do so before other clients, which use its learning rate.

    Args:
      is_chief: Whether this process is the chief.

    Raises:
      ValueError: If the policies or asynchronous updates do not work with this
        optimizer.
    """
    if self._is_inner_built:
      return
    with tf.init_scope():
      self.inner.build(self._store, is_chief=is_chief)
    needs_rate = self.policy.rate_factor and self._per_update == 1
    if needs_rate and not self.inner.has_adjustable_rate():
      raise ValueError(
        "`policies` with `rate_factor` need a Keras optimizer whose learning"
        f" rate is a number. Received: {self.policy.name}."
      )
    if self.inner.has_common_state():
      raise ValueError(
        "`optimizer` must not have scalar state that every update changes, as"
        f" Nadam does. Received: {self.inner.optimizer!r}."
      )
    self._is_inner_built = True

  def signature(self) -> dict[str, object]:
    """Returns the settings that must be equal in the chief and all workers.

    Returns:
      The settings by name, of types that JSON can represent.
    """
    return {
      "name": self.name,
      "total_num_replicas": self.total_num_replicas,
      "use_locking": self._use_locking,
      "snapshot_reads": self._snapshot_reads,
      "has_chief_statistics": self.has_chief_statistics,
      "policy": self.policy.name,
      "gradients_per_update": self._per_update,
      "refresh_every": self.refresh_every,
      "wire_dtype": self.wire_dtype,
    }

  # The replica's half.

  def pull(
    self, replica: int | tf.Tensor, token: step_token.StepToken | None = None
  ) -> tuple[step_token.StepToken, list[tf.Tensor]]:
    """Reads the variables for a replica; to be used inside a `tf.function`.

    If the policy compensates stale gradients, the PS tasks keep a copy of the
    values that the replica read. Implements `GradientRule.pull`, which
    documents the arguments and the result.
    """
    return self._own_update.pull(replica, token)

  @tf.autograph.experimental.do_not_convert
  def begin(self, replica: int | tf.Tensor) -> rule_base.ReplicaStep:
    """Reads the parameters for a replica's first step.

    To be used inside a `tf.function`. Implements `UpdateRule.begin`.

    Args:
      replica: The index of this replica, in [0, total_num_replicas).

    Returns:
      A `ReplicaStep` with the state, and a `StepToken` with the global step at
      which the parameters were read. The state is one tensor per element of
      `store.contributed` (the trainable variables, then the variables without
      gradients). With `refresh_every` > 1, an int64 scalar follows: the number
      of steps since the last read.
    """
    begun = super().begin(replica)
    if self.refresh_every > 1:
      begun.state.append(tf.constant(0, tf.int64))
    return begun

  @tf.autograph.experimental.do_not_convert
  def contribute(
    self,
    compute: rule_base.ComputeFn,
    replica: int | tf.Tensor,
    state: Sequence[tf.Tensor],
    *,
    token: step_token.StepToken,
    records_times: bool = False,
  ) -> rule_base.ReplicaStep:
    """Makes one step of a replica: computes gradients and has them applied.

    The step ends with a read of the variables only if `refresh_every` gradients
    were computed since the last read, or the gradients were refused. To be used
    inside a `tf.function`. Implements `UpdateRule.contribute`.

    Args:
      compute: Computes the gradients of the next batch from the parameters.
      replica: The index of this replica, in [0, total_num_replicas).
      state: The state that `begin` or the last `contribute` returned.
      token: The `StepToken` that `begin` or the last `contribute` returned.
      records_times: Whether to record when the gradients were computed. The
        gradients are then sent only after the clock was read.

    Returns:
      A `ReplicaStep` with the token, and the state for the next step. The
      global step of the token is the step at which the variables were last
      read, or `step_token.ENDED` (-1) if training has ended.

    Raises:
      tf.errors.OutOfRangeError, tf.errors.CancelledError: At run time, when
        training has ended.
    """
    if self.refresh_every == 1:
      return super().contribute(
        compute, replica, state, token=token, records_times=records_times
      )
    *parameters, uses = state
    step = token.global_step
    token, computed = self.contribute_batch(
      compute, replica, parameters, token, records_times
    )
    # Refused gradients were too stale: read again.
    uses = tf.where(token.admitted > 0, uses + 1, self.refresh_every)
    is_due = uses >= self.refresh_every

    def keep():
      kept = step_token.copy_here(self._device, token)
      return step_token.at_step(kept, step), parameters

    token, parameters = tf.cond(
      is_due, lambda: self.pull_contributed(replica, token), keep
    )
    uses = tf.where(is_due, tf.zeros_like(uses), uses)
    return rule_base.ReplicaStep(token, [*parameters, uses], computed)

  @tf.autograph.experimental.do_not_convert
  def apply_gradients(
    self,
    grads_and_vars: Iterable[tuple[rule_base.Gradient, tf.Variable | str]],
    *,
    replica: int | tf.Tensor,
    local_step: tf.Tensor,
    loss: tf.Tensor | float = 0.0,
    num_examples: tf.Tensor | int = 0,
    preadmitted_tag: tf.Tensor | None = None,
  ) -> step_token.StepToken:
    """Applies one replica's gradients to the variables, if they are admitted.

    Waits where a policy demands it. To be used inside a `tf.function`.
    Implements `GradientRule.apply_gradients`.

    Args:
      grads_and_vars: (gradient, variable) pairs. A gradient has the variable's
        shape and is a dense tensor, `tf.IndexedSlices` or None. A variable may
        be given by its path. For a statistic (a variable without gradients),
        the old value minus the new value takes the gradient's place.
      replica: The index of this replica, in [0, total_num_replicas).
      local_step: int64 scalar, the global step of the variables from which the
        gradients were computed.
      loss: Scalar, the mean loss over the examples of the batch, for the
        chief's reports.
      num_examples: Scalar, the number of examples in the batch. Gradients and
        loss are means over them.
      preadmitted_tag: Not used, as no gradients are admitted in advance.

    Returns:
      A token that says whether the gradients were used, and from which global
      step the replica continues.

    Raises:
      ValueError: If a variable is not in the store.
      tf.errors.OutOfRangeError, tf.errors.CancelledError: At run time, when
        training has ended.
    """
    del preadmitted_tag
    self.check_built()
    self._build_inner(is_chief=False)
    weight = self._per_update * tf.cast(replica == 0, tf.int32)
    gradients = self.in_order(grads_and_vars)
    gradients = self.weigh_statistics(gradients, weight)
    is_sound = tf.math.is_finite(tf.cast(loss, tf.float32))
    is_sound &= gradient_math.all_finite(gradients, self._store.wire_dtypes)
    scalars = resources.Scalars(
      replica, local_step, is_sound, loss, num_examples
    )
    own_update = self._own_update
    if self.policy.admits is not None or self.policy.max_lead == 0:
      # Ask first: gradients that are refused are not sent.
      parcels = own_update.pack(gradients)
      return self._apply_if_admitted(replica, scalars, scalars.vector, parcels)
    parcels = own_update.pack(gradients, scalars)
    if own_update.is_by_task:
      return self._apply_by_task(replica, scalars, parcels)
    parts, vector = own_update.send(parcels)
    return self._apply_if_admitted(replica, scalars, vector, parcels, parts)

  def _ask(
    self, scalars: resources.Scalars, vector: tf.Tensor | None
  ) -> _Answer:
    """Asks whether one replica's gradients are applied, on PS task 0.

    Waits where a policy demands it.

    Args:
      scalars: What describes the gradients.
      vector: The copy of `scalars.vector` on PS task 0.

    Returns:
      The answer.
    """
    replica, local_step, is_sound, *report = scalars.split(vector)
    # Wait for the gradients before any clock or lock.
    with tf.control_dependencies([is_sound]):
      clock = self._clocks.next_clock(replica)
      passed = self._clocks.before(replica, clock)
    with tf.control_dependencies([passed]):
      admission = self.admission.admit(replica, local_step, is_sound)
    return _Answer(admission, replica, clock, *report)

  def _apply_by_task(
    self,
    replica: int | tf.Tensor,
    scalars: resources.Scalars,
    parcels: Sequence[own_update_lib.TaskGradients],
  ) -> step_token.StepToken:
    """Applies one replica's gradients by one call on each PS task.

    It sends them before the answer, with the scalars. It is possible only if
    `own_update.is_by_task`.

    Args:
      replica: The index of the replica.
      scalars: What describes the gradients.
      parcels: The packed gradients and scalars, by PS task.

    Returns:
      What `apply_gradients` returns.
    """
    own_update = self._own_update

    def ask():
      landed, sent = own_update.land(0, parcels[0])
      every = tf.nest.flatten([landed, sent], expand_composites=True)
      arrived_at = step_token.now(*every)
      answer = self._ask(scalars, *sent)
      admission = answer.admission
      decision = own_update.pack_decision(
        answer.replica,
        admission.admitted,
        admission.version,
        admission.staleness,
      )
      return answer, landed, arrived_at, decision

    answer, landed, arrived_at, decision = control_flow.call_on(
      self._device, ask
    )
    answer = answer.for_replica(replica)
    done = own_update.apply_by_task(parcels, landed, decision)

    def count() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
      step = self._finish(answer, True)
      return step, arrived_at, step_token.now(step)

    def count_and_release() -> step_token.StepToken:
      admission = answer.admission
      step, *times = tf.cond(
        admission.admitted, count, lambda: self._refuse(admission)
      )
      with tf.control_dependencies([step]):
        return self._release(answer, step, step_token.never(), *times)

    return control_flow.call_on(self._device, count_and_release, done)

  def _apply_if_admitted(
    self,
    replica: int | tf.Tensor,
    scalars: resources.Scalars,
    vector: tf.Tensor | None,
    parcels: Sequence[own_update_lib.TaskGradients],
    parts: list[list[rule_base.Gradient]] | None = None,
  ) -> step_token.StepToken:
    """Applies one replica's gradients if the answer admits them.

    Args:
      replica: The index of the replica.
      scalars: What describes the gradients.
      vector: `scalars.vector`, or its copy on PS task 0.
      parcels: The packed gradients, by PS task.
      parts: The gradients on the PS tasks if they were sent before the answer.
        None: they are sent after it, if they are admitted.

    Returns:
      What `apply_gradients` returns.
    """
    answer = control_flow.call_on(
      self._device, lambda: self._ask(scalars, vector)
    ).for_replica(replica)
    admission = answer.admission

    def apply():
      return self._own_update(
        answer.replica,
        parts or self._own_update.send(parcels)[0],
        admission.version,
        admission.staleness,
        self.admission.pending,
        lambda is_update: self._finish(answer, is_update),
      )

    with tf.device(self._device):
      admitted_at = (
        step_token.NEVER if parts else step_token.now(admission.admitted)
      )
      step, *times = tf.cond(
        admission.admitted, apply, lambda: self._refuse(admission)
      )
    return control_flow.call_on(
      self._device,
      lambda: self._release(answer, step, admitted_at, *times),
      [step],
    )

  def _finish(self, answer: _Answer, is_update: tf.Tensor | bool) -> tf.Tensor:
    """Counts gradients that were applied, and returns the new global step.

    Args:
      answer: The answer that admitted them.
      is_update: Whether they completed an update.
    """
    return self.admission.finish(
      answer.replica,
      answer.admission.staleness,
      answer.loss,
      answer.num_examples,
      is_update,
    )

  def _release(
    self,
    answer: _Answer,
    step: tf.Tensor,
    admitted_at: tf.Tensor | float,
    delivered_at: tf.Tensor,
    applied_at: tf.Tensor,
  ) -> step_token.StepToken:
    """Lets a replica continue, on PS task 0; waits where a policy demands it.

    Args:
      answer: The answer to its gradients.
      step: int64 scalar, the global step from which it continues.
      admitted_at: When its gradients were admitted or refused, in seconds since
        1970; `NEVER` if they were sent without asking.
      delivered_at: When they were delivered; `NEVER` if they were refused.
      applied_at: When they were applied; `NEVER` if they were refused.

    Returns:
      What `apply_gradients` returns.
    """
    passed = tf.identity(self._clocks.after(answer.replica, answer.clock))
    return step_token.StepToken(
      tf.cast(answer.admission.admitted, tf.int64),
      tf.identity(step),
      tf.constant(step_token.NO_TAG, tf.int64),
      step_token.pack_times(
        admitted_at,
        delivered_at,
        applied_at,
        released=step_token.now(passed),
      ),
    )

  def _refuse(
    self, admission: async_admission.Admission
  ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns what a replica is told if its gradients are refused.

    Returns:
      The global step from which the replica continues, or `step_token.ENDED`
      (-1); and twice `NEVER`, as the gradients were not delivered and applied.
    """
    ended = tf.constant(step_token.ENDED, tf.int64)
    step = tf.where(admission.has_ended, ended, admission.version)
    return step, step_token.never(), step_token.never()

  # The chief's half.

  def stop_at(self, step: int) -> None:
    """Makes no more updates of the variables once the global step is `step`."""
    self.admission.stop_at(step)

  def apply_updates(self, max_updates: int = 1) -> list[results.Update]:
    """Waits for an update, and returns one report of all unreported updates.

    The replicas make the updates. Only the chief calls this method. Implements
    `UpdateRule.apply_updates`.

    Args:
      max_updates: How many updates the caller waits for. The report may have
        fewer or more.

    Returns:
      A list of one report.

    Raises:
      NonFiniteGradientError: If a replica computed a gradient or a loss that is
        not finite.
      Interrupted: If `interrupt` was called.
      tf.errors.OutOfRangeError: After `close`.
    """
    self.check_built()
    self.inner.refresh()
    return [self.admission.collect(self.inner.learning_rate, max_updates)]

  # For the driver that watches and ends the training.

  def counts(self) -> list[results.Counts]:
    """Returns how many sets of gradients of each replica were used or dropped.

    Returns:
      One `results.Counts` per replica. Its `late` counts the sets that were
      dropped as too stale.
    """
    return self.admission.counts()

  def status(self) -> results.StepStatus:
    """Returns whether each replica computes, waits for slower ones, or is lost.

    The other fields of the result have no meaning under this rule: `received`
    is 0, `needed` is 1, and all tags are -1.
    """
    status = np.full(self.total_num_replicas, protocol.Status.COMPUTING)
    status[self._clocks.is_waiting().numpy()] = protocol.Status.WAITING
    status[self.admission.is_lost().numpy()] = protocol.Status.LOST
    return results.StepStatus(
      received=0,
      needed=1,
      replicas=[
        results.ReplicaStatus(protocol.Status(s), tag=-1) for s in status
      ],
    )

  def declare_lost(self, replica: int, tag: int) -> None:
    """Lets the other replicas continue without waiting for a lost replica.

    They wait for it again once it has come back, after a restart.

    Args:
      replica: The index of the lost replica.
      tag: Not used.
    """
    del tag
    self._lose(replica)

  @tf.function(autograph=False, input_signature=[tf.TensorSpec([], tf.int64)])
  def _lose(self, replica):
    self._clocks.declare_lost(replica)
    self.admission.declare_lost(replica)

  def interrupt(self) -> None:
    """Ends the wait of `apply_updates`, which runs in another thread.

    `apply_updates` then raises `Interrupted`.
    """
    self.admission.wake()

  @tf.function(autograph=False)
  def end_replicas(self) -> None:
    """Refuses gradients from now on, which tells replicas that training ended.

    Replicas that wait for slower replicas stop waiting, and are told as well.
    """
    self.admission.end()
    self._clocks.open()

  def trace_ahead(self) -> None:
    """Traces all functions that may have to be called while a task hangs.

    They could not be traced then: a client that traces a function waits for all
    tasks (TensorFlow 2.21).
    """
    super().trace_ahead()
    self.end_replicas.get_concrete_function()
    self.admission.trace_ahead()
    self._lose.get_concrete_function()

  def suspend(self) -> results.Update | None:
    """Refuses all gradients, and waits until none are being applied.

    `SwitchingOptimizer` calls it when it changes to another rule.

    Returns:
      One report that combines all updates that `apply_updates` has not returned
      yet; None if there are none.

    Raises:
      TimeoutError: If gradients are still being applied after 600 s.
    """
    self.end_replicas()
    self.admission.await_idleness()
    return self.admission.collect_rest(self.inner.learning_rate)

  def resume(self) -> None:
    """Takes gradients of replicas again after `suspend`.

    `SwitchingOptimizer` calls it when it changes to this rule.
    """
    self._clocks.initialize()
    self.admission.resume()

  def release_replica(self, replica: int) -> None:
    """Tells all replicas, not only `replica`, that training has ended.

    The driver calls this method in the process of `replica` when the chief is
    lost. The training then ends for all replicas.
    """
    del replica
    self.end_replicas()

  def close(self) -> None:
    """Ends the training, so that no call waits any longer.

    Calls of the chief and of replicas that wait for each other raise
    `tf.errors.OutOfRangeError`.
    """
    self._clocks.close()
    self.admission.close()
