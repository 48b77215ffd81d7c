"""Makes synchronous updates, each from the gradients of N replicas.

`SyncReplicasOptimizer` is the successor of TF1's
`tf.train.SyncReplicasOptimizer`. Its docstring explains the protocol, which
includes backup replicas.
"""

import functools
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Annotated
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tf_replicas.rules import base as rule_base
from tf_replicas.rules import protocol
from tf_replicas.rules import results
from tf_replicas.rules import step_token
from tf_replicas.rules.sync import chief_recovery
from tf_replicas.rules.sync import contributions
from tf_replicas.rules.sync import ledger
from tf_replicas.rules.sync import quorum as quorum_lib
from tf_replicas.runtime import control_flow
from tf_replicas.runtime import records
from tf_replicas.runtime import resources
from tf_replicas.runtime import waiting
from tf_replicas.store import moving_averages
from tf_replicas.store import parameter_store

_CALL_SECS = 0.1  # A new learning rate waits no longer than this.


class _StepReport(NamedTuple):
  """The report of one step that the PS tasks return to the chief.

  Attributes:
    kind, replica, step, examples, loss, present: As in `ledger.Collected`,
      which describes the gradients that the step has collected.
    began: When the update began, in seconds since 1970.
    ended: When the update was complete, in seconds since 1970; `NEVER` if no
      update was made.
  """

  kind: records.Int
  replica: records.Int
  step: records.Int
  examples: records.Int
  loss: records.Float
  began: records.Float
  ended: records.Float
  present: Annotated[tf.Tensor | np.ndarray, tf.bool]

  @property
  def is_made(self) -> bool | tf.Tensor:
    """Whether the step has updated the variables."""
    return self.ended != step_token.NEVER


class SyncReplicasOptimizer(rule_base.OptimizerRule):
  """An optimizer wrapper that applies one averaged update per N gradients.

  A contribution is one replica's gradients for one update. Every update applies
  the mean of exactly N = `replicas_to_aggregate` contributions, unless
  `min_contributions` is given. All are computed from the variables of the same
  step, and by distinct replicas if there are at least N replicas.

  The number M = `total_num_replicas` of replicas may differ from N:

  * M = N: every replica contributes to every step.
  * M > N: there are M - N *backup replicas*. A step takes the first N
    contributions and does not wait for the slowest replicas (Chen et al. 2016,
    section 2.2).
  * M < N: one replica contributes several batches to the same step.

  N may also be given as a share of the M replicas: "all", "all-1" or "90%".

  With `min_contributions` < N, replicas may join and leave. Then steps *skip* a
  replica that is lost or has not come yet: they do not wait for it until it
  offers gradients, and have fewer contributions, but at least
  `min_contributions`. If N is given as a share, a step needs this share of the
  replicas that are not skipped. The update applies the mean of the
  contributions that the step has. With `step_timeout_secs` too, steps also skip
  replicas that have contributed nothing in this time, and refuse their late
  contributions. If fewer than `min_contributions` have come in this time, the
  training ends with an error. An update with fewer than N contributions differs
  from the one that N replicas would have made. `Counts.missed` counts such
  updates.

  A replica calls `apply_gradients`, which offers gradients and waits. The chief
  calls `apply_updates`, which makes the updates.

  Shared objects, which every client finds by name:

  * on each PS task: the shards of the variables, their slots and averages, and
    one queue of gradient sets per replica;
  * on PS task 0: the global step, the inbox (a queue of messages to the chief),
    the ledger (the record of the step's contributions), and one queue of
    replies per replica. `rules.sync.contributions` describes them.

  A step of a replica:

  1. Pull the global step and then the parameters (`ParameterStore.pull`).
  2. Compute gradients; clip them if `clip_replica_norm` is given.
  3. Offer: send (replica, tag, step) and wait for the chief's reply. The tag
     identifies the contribution. A contribution from older variables is refused
     at once; one beyond the first N is refused when the step ends. Refused
     contributions are counted, and their gradients are not sent.
  4. If admitted, send all gradients to the PS tasks, then "delivered".
  5. Wait for the release, which names the global step to continue from.

  A step of the chief:

  1. Answer offers until N contributions were delivered. If an admitted replica
     is lost, another waiting replica contributes in its place, or the same
     replica after a restart.
  2. On each PS task: sum the N gradients in replica order and divide by N. A
     variable for which no replica has a gradient is left unchanged. If only
     some have one, the missing ones count as zero. Sparse gradients are summed
     by row and divided by N too, so N batches of B examples equal one batch of
     N * B.
  3. Clip the mean by its global norm if `clip_mean_norm` is given.
  4. Apply the inner optimizer on each PS task; update the moving averages.
  5. Increase the global step by 1.
  6. Release every replica that waits.

  TF1's `tf.train.SyncReplicasOptimizer` differs: here, the first step is like
  every other; contributions are used or refused as a whole, and counted; and
  the mean is over exactly N. Contributions after the last step are not counted.

  Attributes:
    replicas_to_aggregate: N, the number of contributions in one update.
    total_num_replicas: M, the number of replicas that contribute.
    step_timeout_secs: Seconds after which a step goes on with fewer than N
      contributions; None: it waits for all replicas that are not lost.
    min_contributions: The smallest number of contributions in a step.
    quorum: N, `min_contributions` and, if N was given as a share, this share.
    scale_rate: Whether an update with fewer than N contributions has a smaller
      learning rate.
  """

  def __init__(
    self,
    optimizer: rule_base.Optimizer,
    replicas_to_aggregate: int | str,
    total_num_replicas: int | None = None,
    *,
    variable_averages: moving_averages.MovingAverages | None = None,
    variables_to_average: Iterable[tf.Variable | str] | None = None,
    step_timeout_secs: float | None = None,
    min_contributions: int | None = None,
    scale_rate: bool = False,
    clip_replica_norm: float | None = None,
    clip_mean_norm: float | None = None,
    momentum_correction: bool = False,
    has_chief_statistics: bool = False,
    loss_scale: float | None = None,
    wire_dtype: str | None = None,
    use_locking: None = None,
    name: str = "sync_replicas",
  ):
    """Makes a rule for synchronous updates by `optimizer`.

    A contribution is one replica's gradients for one update. Statistics are
    variables without gradients, such as moving means. `OptimizerRule` documents
    the arguments that are not listed here.

    Args:
      optimizer: The optimizer that applies the mean of the contributions.
      replicas_to_aggregate: N, the number of contributions in one update; or a
        share of the replicas: "all", "all-K" (all replicas but K) or "P%" (P
        percent of the replicas, rounded up).
      total_num_replicas: M, the number of replicas. None: N.
      step_timeout_secs: Seconds that a step waits for its contributions. Then
        it goes on with those that have come or, if they are fewer than
        `min_contributions`, the training ends with an error. None: no limit.
        The driver measures the time.
      min_contributions: The smallest number of contributions in an update if
        replicas are lost, have not come yet, or exceed `step_timeout_secs`.
        None: N.
      scale_rate: Whether an update with k < N contributions multiplies the
        learning rate by k / N.
      clip_mean_norm: The largest global norm of the mean of the contributions.
        A larger mean is scaled down before it is applied. None: no limit.
      has_chief_statistics: If True, statistics are updated from one replica: of
        those whose contributions are used, the one with the smallest index. If
        False, from the mean of all contributions of the update.
      use_locking: Must be None. TF1's class had this argument, which is not
        supported.

    Raises:
      TypeError, ValueError: If an argument is invalid.
    """
    if use_locking is not None:
      raise TypeError(
        "`use_locking` of TF1's optimizer is gone: one synchronous update never"
        " runs beside another; `AsyncReplicasOptimizer` has `use_locking`."
        f" Received: {use_locking!r}."
      )
    if total_num_replicas is None:
      if isinstance(replicas_to_aggregate, str):
        raise ValueError(
          "`total_num_replicas` must be given if `replicas_to_aggregate` is a"
          f" share. Received: {replicas_to_aggregate!r}."
        )
      rule_base.check_count("replicas_to_aggregate", replicas_to_aggregate)
      total_num_replicas = replicas_to_aggregate
    rule_base.check_count("total_num_replicas", total_num_replicas)
    if min_contributions is not None:
      rule_base.check_count("min_contributions", min_contributions)
    try:
      self.quorum = quorum_lib.parse(
        replicas_to_aggregate, total_num_replicas, min_contributions
      )
    except ValueError as error:
      raise ValueError(f"`replicas_to_aggregate` {error}") from None
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
    self.replicas_to_aggregate = self.quorum.most
    self.total_num_replicas = total_num_replicas
    self.min_contributions = self.quorum.least
    if self.min_contributions > self.replicas_to_aggregate:
      raise ValueError(
        "`min_contributions` must be at most `replicas_to_aggregate`,"
        f" {self.replicas_to_aggregate}. Received: {min_contributions}."
      )
    if scale_rate and not self.quorum.can_shrink:
      raise ValueError(
        "`scale_rate` needs `min_contributions` below `replicas_to_aggregate`,"
        f" {self.replicas_to_aggregate}. Received: {min_contributions}."
      )
    self.scale_rate = scale_rate
    if step_timeout_secs is not None:
      rule_base.check_positive("step_timeout_secs", step_timeout_secs)
      if self.quorum.can_shrink and self.quorum.most > total_num_replicas:
        raise ValueError(
          "`step_timeout_secs` with `min_contributions` needs a"
          " `replicas_to_aggregate` of at most `total_num_replicas`,"
          f" {total_num_replicas}. Received: {replicas_to_aggregate}."
        )
    self.step_timeout_secs = step_timeout_secs
    self.accepted_fraction = min(
      1.0, self.replicas_to_aggregate / total_num_replicas
    )
    self.preadmits = self.replicas_to_aggregate >= total_num_replicas
    self.repeats_refused = (
      self.replicas_to_aggregate == total_num_replicas
      and not self.quorum.can_shrink
    )

  def build(
    self,
    store: parameter_store.ParameterStore,
    *,
    is_sparse: Sequence[bool] | None = None,
    namespace: resources.Namespace | None = None,
  ) -> None:
    """Creates the rule's shared objects on the PS tasks, or attaches to them.

    Implements `UpdateRule.build`, which documents the arguments.
    """
    self.bind(store)
    self._contributions = contributions.Contributions(
      store,
      num_replicas=self.total_num_replicas,
      quorum=self.quorum,
      is_sparse=is_sparse or [False] * len(store.contributed),
      has_chief_statistics=self.has_chief_statistics,
      namespace=namespace,
    )
    count = len(store.contributed)
    self._layout = records.Layout(_StepReport, tf.float64, present=count)
    self._client_device = tf.constant(0).device
    self._present = (True,) * count
    self._steps = functools.cache(self._trace)
    self._unreported: list[_StepReport] = []
    self._mark = chief_recovery.UpdateInProgress(store)
    self._is_successor = False
    self._was_inconsistent = False
    self.is_built = True

  def create(self, values: Sequence[tf.Tensor], *, resumed: bool) -> None:
    """Assigns the initial values, or takes over an earlier chief's training.

    In the second case (`resumed`), waits until an update that the earlier chief
    has begun is complete. Implements `UpdateRule.create`, which documents the
    arguments.

    Raises:
      ValueError: If `scale_rate` is set, and the inner optimizer has no
        learning rate that is a number.
    """
    if resumed:
      # An earlier chief's `apply_updates` may live on at the PS; this ends it.
      self.interrupt()
      self._was_inconsistent = self._mark.await_end()
      self._is_successor = True
    else:
      self._contributions.initialize()
      self._mark.clear()
      self.assign_first(values)
    self.inner.build(self._store, is_chief=True)
    if self.scale_rate and not self.inner.has_adjustable_rate():
      raise ValueError(
        "`scale_rate` needs a Keras optimizer whose learning rate is a number."
        f" Received: {self.inner.optimizer!r}."
      )

  def start(self) -> None:
    """Drops the gradients that replicas have offered to an earlier chief.

    If that chief left the variables inconsistent, drops also the gradients that
    replicas compute at present, from variables that a checkpoint has replaced.
    Does nothing if there was no earlier chief. The chief calls it once, after
    all variables have their values.
    """
    if self._is_successor:
      self._contributions.begin_anew(is_restored=self._was_inconsistent)

  def signature(self) -> dict[str, object]:
    """Returns the settings that must be equal in the chief and all workers.

    Returns:
      The settings by name, of types that JSON can represent.
    """
    return {
      "name": self.name,
      "replicas_to_aggregate": self.replicas_to_aggregate,
      "total_num_replicas": self.total_num_replicas,
      "has_chief_statistics": self.has_chief_statistics,
      "wire_dtype": self.wire_dtype,
      "step_timeout_secs": self.step_timeout_secs,
      "min_contributions": self.min_contributions,
      "share": [self.quorum.percent, self.quorum.less],
      "scale_rate": self.scale_rate,
    }

  def in_lockstep(
    self, store: parameter_store.ParameterStore
  ) -> rule_base.LockstepUpdate:
    """Adapts this rule to one program that computes all replicas' gradients.

    Args:
      store: Holds the variables, all on one task.

    Returns:
      An object that makes updates with the settings of this rule, without
      parameter servers.
    """
    return rule_base.LockstepUpdate(self, store)

  # The replica's half.

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
    """Offers a replica's gradients to the chief, and waits for its reply.

    The gradients are sent only if the chief admits them to the step. Implements
    `GradientRule.apply_gradients`, which documents the arguments.
    """
    self.check_built()
    return self._contributions.offer(
      replica,
      self.in_order(grads_and_vars),
      local_step=local_step,
      loss=loss,
      num_examples=num_examples,
      preadmitted_tag=preadmitted_tag,
    )

  def contribute_batch(
    self,
    compute: rule_base.ComputeFn,
    replica: int | tf.Tensor,
    parameters: Sequence[tf.Tensor],
    token: step_token.StepToken,
    records_times: bool,
  ) -> tuple[step_token.StepToken, tf.Tensor]:
    """Computes a replica's gradients and hands them over.

    For one batch if there are at least as many replicas as contributions in an
    update. With fewer replicas, for one batch after another, from the same
    parameters, as long as the reply to the last gradients admits another
    contribution of this replica to the step.

    `GradientRule.contribute_batch` documents the arguments and the result,
    which is that of the last batch.
    """

    def one_batch(token):
      contribute = super(SyncReplicasOptimizer, self).contribute_batch
      return contribute(compute, replica, parameters, token, records_times)

    step = token.global_step
    result = one_batch(token)
    if self.replicas_to_aggregate <= self.total_num_replicas:
      return result
    return tf.while_loop(
      lambda token, _: (
        (token.global_step == step)
        & (token.preadmitted_tag != step_token.NO_TAG)
      ),
      lambda token, _: one_batch(token),
      result,
    )

  # The chief's half.

  def stop_at(self, step: int) -> None:
    """Does nothing, as only the chief's `apply_updates` makes updates here.

    Under other rules, replicas make the updates, and stop at global step
    `step`.
    """
    del step

  def apply_updates(self, max_updates: int = 1) -> list[results.Update]:
    """Makes one or several updates, all with the present learning rate.

    Waits until replicas have contributed the gradients of each update.

    Args:
      max_updates: The largest number of updates. After 0.1 s, no further update
        is begun. Several updates per call save the milliseconds between two
        calls, which slow down small models.

    Returns:
      One report per update, in order; at least one.

    Raises:
      NonFiniteGradientError: If a replica computed a value that is not finite.
        If updates were made before it, they are returned, and the next call
        raises the error.
      Interrupted: If `interrupt` was called; likewise.
      tf.errors.OutOfRangeError: After `close`.
    """
    self.check_built()
    if not self._unreported:
      self.inner.refresh()
      rows = self._steps(self._present)(tf.constant(max_updates)).numpy()
      self._unreported = self._layout.unpack_rows(rows)
    made = [report for report in self._unreported if report.is_made]
    self._unreported = [r for r in self._unreported if not r.is_made]
    if made:
      return [
        results.Update(
          global_step=report.step + 1,
          loss=report.loss,
          num_examples=report.examples,
          learning_rate=self.inner.learning_rate(report.step),
          began=report.began,
          ended=report.ended,
        )
        for report in made
      ]
    (report,), self._unreported = self._unreported, []
    if report.kind == protocol.MessageType.NONFINITE:
      raise results.NonFiniteGradientError(report.replica, report.step)
    if report.kind == protocol.MessageType.WAKE:
      raise results.Interrupted(f"interrupted at step {report.step}")
    # Other variables than assumed have gradients: trace an update of those.
    self._present = tuple(report.present.tolist())
    return self.apply_updates(max_updates)

  def _trace(self, present: tuple[bool, ...]) -> Callable:
    """Traces a function that makes up to a given number of updates.

    Args:
      present: For each element of `store.contributed` (the trainable variables,
        then the variables without gradients), whether some replica is assumed
        to have a gradient for it.

    Returns:
      A function of the largest number of updates, an int32 scalar. It returns
      float64 [number of steps, width], a packed `_StepReport` per row. The last
      row may be about a step that made no update.
    """

    def step():
      report = self._step(present)
      return self._layout.pack(report), report.is_made

    def steps(max_updates):
      with tf.device(self._store.device_of_task(0)):
        rows = _repeat(step, max_updates, secs=_CALL_SECS)
      with tf.device(self._client_device):
        return tf.identity(rows)

    spec = tf.TensorSpec([], tf.int32)
    return tf.function(steps, autograph=False).get_concrete_function(spec)

  def _step(self, present: tuple[bool, ...]) -> _StepReport:
    """Collects the replicas' gradients for a step, and makes its update.

    Makes no update if the collection was interrupted, or if `present` is wrong.

    Args:
      present: For each element of `store.contributed` (the trainable variables,
        then the variables without gradients), whether some replica is assumed
        to have a gradient for it.

    Returns:
      The report of the step, whose fields are tensors.
    """
    collected = self._contributions.collect()
    may_update = collected.kind == int(protocol.MessageType.DELIVERED)
    may_update &= tf.reduce_all(collected.present == list(present))
    began = step_token.now(may_update)
    with tf.control_dependencies([began]):
      # With one PS task, all is on the task of this function anyway.
      is_by_task = self._store.num_tasks > 1 and self.applier.is_by_task
      finish = self._finish_by_task if is_by_task else self._finish_step
      ended = finish(may_update, present, collected)
    return _StepReport(
      collected.kind,
      collected.replica,
      collected.step,
      collected.examples,
      collected.loss,
      began,
      ended,
      collected.present,
    )

  def _finish_step(
    self,
    may_update: tf.Tensor,
    present: tuple[bool, ...],
    collected: ledger.Collected,
  ) -> tf.Tensor:
    """Makes the update, advances the global step, releases the replicas.

    Args:
      may_update: bool scalar; False: nothing of this is done.
      present: For each element of `store.contributed` (the trainable variables,
        then the variables without gradients), whether some replica has a
        gradient for it.
      collected: The number of the step's contributions (sets of gradients), its
        global step, and so on.

    Returns:
      float64 scalar, the time at which the update was complete, in seconds
      since 1970; `step_token.NEVER` (0.0) if it was not made.
    """

    def update() -> tf.Tensor:
      def take_sums(task: int) -> list[rule_base.Gradient]:
        accepted = self._contributions.read_accepted()
        return self._contributions.take_sums(task, accepted)

      with tf.control_dependencies([self._mark.begin(collected.step)]):
        updated = self.applier(
          present,
          collected.step,
          take_sums,
          collected.count,
          rate_factor=self._rate_factor(collected.count),
        )
      with tf.control_dependencies([updated]):
        return self._advance(collected)

    return tf.cond(may_update, update, step_token.never)

  def _finish_by_task(
    self,
    may_update: tf.Tensor,
    present: tuple[bool, ...],
    collected: ledger.Collected,
  ) -> tf.Tensor:
    """Does the same as `_finish_step`, with fewer messages between PS tasks.

    PS task 0 sends each of the others one message, which says whether it makes
    its part of the update, and from which contributions. They answer when they
    have finished.

    Args:
      may_update: See `_finish_step`.
      present: See `_finish_step`.
      collected: See `_finish_step`.

    Returns:
      What `_finish_step` returns.
    """
    is_begun = control_flow.run_if(
      may_update, lambda: self._mark.begin(collected.step)
    )
    count = collected.count
    with tf.control_dependencies([is_begun]):
      accepted = self._contributions.read_accepted()
      scalars = [may_update, collected.step, count, *self.inner.read_origins()]
      scalars = tf.stack([tf.cast(scalar, tf.int64) for scalar in scalars])
      # The message: the scalars, and the rows of `accepted`.
      message = tf.concat([scalars, tf.reshape(accepted, [-1])], axis=0)

    def make_part(task: int) -> tf.Tensor:
      its_scalars, its_rows = tf.split(
        message, [scalars.shape[0], accepted.shape.num_elements()]
      )
      makes_update, step, its_count, *origins = tf.unstack(its_scalars)
      # Otherwise it is the same number in every step.
      is_variable = tf.is_tensor(count)
      num_contributions = (
        tf.cast(its_count, tf.float64) if is_variable else count
      )

      def take_sums(task: int) -> list[rule_base.Gradient]:
        its_accepted = tf.reshape(its_rows, accepted.shape)
        return self._contributions.take_sums(task, its_accepted)

      def make() -> tf.Tensor:
        return self.applier.on_task(
          task,
          present,
          step,
          take_sums,
          num_contributions,
          origins=origins,
          rate_factor=self._rate_factor(num_contributions),
        )

      return control_flow.run_if(makes_update > 0, make)

    # Each is equal to `may_update`, but comes from a task that has finished.
    is_made = tf.reduce_all(self._store.call_on_tasks(make_part))
    return tf.cond(is_made, lambda: self._advance(collected), step_token.never)

  def _rate_factor(self, count: int | tf.Tensor) -> tf.Tensor | None:
    """Returns what the learning rate of an update is multiplied by.

    Args:
      count: The number of contributions to the update.

    Returns:
      A float64 scalar; None: 1.
    """
    if not self.scale_rate:
      return None
    return tf.cast(count, tf.float64) / self.replicas_to_aggregate

  def _advance(self, collected: ledger.Collected) -> tf.Tensor:
    """Advances the global step after an update, and releases the replicas.

    Args:
      collected: What was collected for the update.

    Returns:
      float64 scalar, the time at which the update was complete, in seconds
      since 1970.
    """
    step = self._store.advance(collected.step, collected.examples)
    ended = step_token.now(step)
    with tf.control_dependencies([ended]):
      self._contributions.release_all(step)
      return tf.identity(ended)

  # For the driver that watches and ends the training.

  def counts(self) -> list[results.Counts]:
    """Reports how many contributions of each replica were used or refused.

    A contribution is one replica's gradients for one update.

    Returns:
      One `Counts` per replica, for the time since the start of training.
    """
    return ledger.counts_from_ledger(self._contributions.snapshot())

  def status(self) -> results.StepStatus:
    """Reports how many gradients of the next update have arrived.

    Also reports the state of each replica.
    """
    return ledger.step_status(self._contributions.snapshot())

  def declare_lost(self, replica: int, tag: int) -> None:
    """Stops waiting for `replica` until it offers gradients again.

    If the step has admitted gradients of the replica that have not arrived,
    another waiting replica may contribute in its place.

    Args:
      replica: The index of the replica.
      tag: The tag that identifies the replica's last contribution (its
        gradients for one update), as `status` returned it. Nothing changes if
        the replica has made a newer one.
    """
    self._contributions.declare_lost(replica, tag)

  def expire(self, step: int) -> None:
    """Lets the step go on without the replicas that have contributed nothing.

    Called when the step has exceeded its deadline, and has at least
    `min_contributions` contributions (sets of gradients). Later steps do not
    wait for those replicas either, until they offer gradients again.

    Args:
      step: The global step. The call has no effect on later steps.
    """
    self._contributions.expire(step)

  def interrupt(self) -> None:
    """Ends the wait of `apply_updates` or `end_replicas` in another thread.

    `apply_updates` then raises `Interrupted`, and `end_replicas` returns.
    """
    try:
      self._contributions.wake()
    except tf.errors.OpError:
      pass  # The inbox was closed meanwhile, which ends the wait as well.

  def trace_ahead(self) -> None:
    """Traces all functions that may have to be called while a task hangs.

    A client that traces a function waits for all tasks (TensorFlow 2.21), so
    these functions could not be traced while a task hangs.
    """
    super().trace_ahead()
    self.end_replicas.get_concrete_function()
    self._steps(self._present)

  @tf.function(autograph=False)
  def end_replicas(self) -> None:
    """Tells replicas that training has ended, until `interrupt` is called.

    Then it returns. Until then it answers each replica that waits or offers
    gradients.
    """
    self._contributions.end_replicas()

  def suspend(self) -> None:
    """Stops taking gradients, so that another rule can make the updates.

    `SwitchingOptimizer` calls it when it changes to another rule. Until
    `resume` is called, a thread answers replicas that still offer gradients to
    this rule: the gradients are refused, and the step of the reply is
    `step_token.ENDED`.

    Returns:
      None: there are no updates that `apply_updates` has not returned.
    """
    self._answering = waiting.RaisingThread(self.end_replicas, on_error=bool)

  def resume(self) -> None:
    """Takes gradients of replicas again after `suspend`.

    `SwitchingOptimizer` calls it when it changes to this rule.
    """
    for replica, (status, tag) in enumerate(self.status().replicas):
      # The replica may still deliver a contribution admitted before `suspend`.
      if status == protocol.Status.ADMITTED:
        self.declare_lost(replica, tag)
    while self._answering.is_alive():
      self.interrupt()  # An earlier chief's answers last until ours begin.
      self._answering.join(1.0)
    self._contributions.initialize(keep_counts=True)

  def release_replica(self, replica: int) -> None:
    """Tells `replica`, if it waits for a reply, that training has ended.

    A process calls it for its own replica if the chief, which would reply, is
    lost.
    """
    self._contributions.release_replica(replica)

  def close(self) -> None:
    """Ends the training: closes the queues between replicas and chief.

    Calls of the chief and of replicas that wait for each other raise
    `tf.errors.OutOfRangeError`.
    """
    self._contributions.close()


def _repeat(
  body: Callable[[], tuple[tf.Tensor, tf.Tensor]],
  max_calls: tf.Tensor,
  *,
  secs: float,
) -> tf.Tensor:
  """Calls `body` repeatedly in the graph, all on the current device.

  Args:
    body: Returns a float64 [width] tensor, and a bool scalar: whether to call
      `body` again.
    max_calls: int32 scalar, the largest number of calls. `body` is called at
      least once.
    secs: The time in seconds after which `body` is not called again.

  Returns:
    The tensors of all calls as rows, float64 [number of calls, width].
  """

  def call(count, _, end, rows):
    row, goes_on = body()
    with tf.control_dependencies([row, end]):  # Not before the call ends.
      now = tf.timestamp()
    goes_on &= (count + 1 < max_calls) & (now < end)
    return count + 1, goes_on, end, rows.write(count, row)

  max_calls = tf.identity(max_calls)
  rows = tf.TensorArray(tf.float64, size=0, dynamic_size=True)
  *_, rows = tf.while_loop(
    lambda _, goes_on, *rest: goes_on,
    call,
    (0, True, tf.timestamp() + secs, rows),
  )
  return rows.stack()
