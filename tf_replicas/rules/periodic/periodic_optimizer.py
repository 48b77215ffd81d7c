"""Defines the update rule of replicas that train their own copies.

A replica trains its copy of the variables for a period, and then exchanges
values with the *center*, the shared variables. `periodic_averaging` makes such
a rule for each kind of exchange, and explains the terms.
"""

from collections.abc import Sequence

import tensorflow as tf

from tf_replicas.rules import base as rule_base
from tf_replicas.rules import results
from tf_replicas.rules import step_token
from tf_replicas.rules.periodic import local_steps
from tf_replicas.rules.periodic import sync_rounds
from tf_replicas.runtime import resources
from tf_replicas.store import parameter_store


class PeriodicOptimizer(rule_base.UpdateRule):
  """An update rule whose replicas train their own copies of the variables.

  A replica makes one local step on its copy for each batch. After `period`
  batches it exchanges values with the *center*, the shared variables.

  The global step, and so `max_steps`, counts the updates of the center, as with
  the optimizers of TF1. If N replicas exchange together, an update includes N
  times `period` batches; if each replica exchanges alone, `period` batches.
  Checkpoints, moving averages and evaluation use the center. `examples_seen`
  counts the examples of all local steps that led to an update. The reported
  loss is the mean over these examples.

  Local steps use the learning rate that the chief had at the beginning of the
  period. A gradient or a loss that is not finite ends the period and the
  training, and does not change the center.

  Attributes:
    wire_dtype: None: tensors are sent in their own dtype, once per period.
    period: The number of local steps of a replica between two exchanges.
    name: The name of the kind of exchange.
  """

  wire_dtype = None

  def __init__(
    self, steps: local_steps.LocalSteps, sync_round: sync_rounds.SyncRound
  ):
    """Combines the local training of replicas with a kind of exchange.

    Args:
      steps: Makes the local steps of a replica, which train its own copy of the
        variables.
      sync_round: Makes the exchange between a replica's copy and the shared
        variables after each period of local steps.
    """
    self._steps = steps
    self._sync_round = sync_round
    self._rule = sync_round.rule
    self.period = steps.period
    self.name = sync_round.rule.name
    self.total_num_replicas = sync_round.rule.total_num_replicas
    self.replicas_to_aggregate = sync_round.rule.replicas_to_aggregate
    self.accepted_fraction = sync_round.rule.accepted_fraction
    self.preadmits = sync_round.rule.preadmits

  def build(
    self,
    store: parameter_store.ParameterStore,
    *,
    is_sparse: Sequence[bool] | None = None,
    namespace: resources.Namespace | None = None,
  ) -> None:
    """Creates the rule's shared objects on the PS tasks, or attaches to them.

    Implements `UpdateRule.build`, which documents the arguments and the error.
    `is_sparse` is not used, as replicas hand over dense tensors only. Tables
    (`tf_replicas.Embedding`) are not supported.
    """
    del is_sparse
    rule_base.check_no_tables(store, f"the update rule {self.name!r}")
    self._store = store
    self._steps.build(store, namespace or store.namespace)
    self._rule.build(store, namespace=namespace)
    self._sync_round.build(store)

  def create(self, values: Sequence[tf.Tensor], *, resumed: bool) -> None:
    """Initializes the shared objects, or takes over those of an earlier chief.

    In a new training, it also sends the learning rate to PS task 0, where the
    replicas read it. Otherwise that of the earlier chief stays there until
    `apply_updates` is called.

    Args:
      values: The initial value of each variable, in the order of the parameter
        store. Not used if `resumed`.
      resumed: Whether to take over: True if an earlier chief has initialized
        the parameter store. Its variables then keep their values.
    """
    if not resumed:
      self._steps.initialize()
      self._steps.refresh()
    self._rule.create(values, resumed=resumed)

  def start(self) -> None:
    """Calls `start` of the rule that updates the shared variables.

    This prepares it for the first update of this chief. The chief calls this
    method once, after all variables have their values.
    """
    self._rule.start()

  def signature(self) -> dict[str, object]:
    """Returns the settings that must be equal in the chief and all workers.

    Returns:
      The settings by name, of types that JSON can represent.
    """
    return {
      "period": self.period,
      **self._sync_round.signature(),
      **self._rule.signature(),
    }

  # The replica's half.

  @tf.autograph.experimental.do_not_convert
  def begin(self, replica: int | tf.Tensor) -> rule_base.ReplicaStep:
    """Reads the *center*, the shared variables, as the replica's first copy.

    Implements `UpdateRule.begin`, which documents the argument. The state in
    the result consists of the copy, then the center again if the kind of
    exchange needs it, then the state of the local optimizer.
    """
    token, parameters = self._rule.pull_contributed(replica)
    center = parameters if self._sync_round.needs_center else []
    return rule_base.ReplicaStep(
      token,
      [*parameters, *center, *self._steps.new_slots()],
      step_token.never(),
    )

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
    """Makes one period of local steps of a replica, and the exchange after it.

    In a period, the replica trains its own copy of the variables on `period`
    batches. Then it exchanges values with the *center*, the shared variables.
    Implements `UpdateRule.contribute`, which documents the arguments. The
    `global_step` of the returned token is the step of the center when the
    replica last read it. `admitted` says whether the exchange updated the
    center.
    """
    number = len(self._store.contributed)
    cuts = number, number * (2 if self._sync_round.needs_center else 1)
    before = sync_rounds.State(
      state[: cuts[0]], state[cuts[0] : cuts[1]], state[cuts[1] :]
    )
    local = self._steps(
      compute,
      before.parameters,
      before.slots,
      pull_back=self._sync_round.pull_back(before),
      wants_totals=self._sync_round.needs_totals,
    )
    computed = step_token.never()
    if records_times:
      computed, local = step_token.clocked(local)
    token, parameters, center = self._sync_round.exchange(
      sync_rounds.Period(replica, before, local, token)
    )
    state = [*parameters, *center, *local.slots]
    return rule_base.ReplicaStep(token, state, computed)

  # The chief's half.

  def set_learning_rate(self, rate: float) -> None:
    """Sets the learning rate that each replica uses from its next period on.

    A period is a replica's local steps between two exchanges with the shared
    variables.
    """
    self._steps.set_learning_rate(rate)
    if self._rule.inner.has_adjustable_rate():
      self._rule.set_learning_rate(rate)

  def stop_at(self, step: int) -> None:
    """Makes no more updates of the shared variables once `step` is reached.

    Args:
      step: A global step, which counts these updates.
    """
    self._rule.stop_at(step)

  def apply_updates(self, max_updates: int = 1) -> list[results.Update]:
    """Waits for an update of the *center*, the shared variables, or makes it.

    Implements `UpdateRule.apply_updates`, which documents the errors.
    `max_updates` is ignored.

    Returns:
      A list of one report, with the learning rate of the replicas' local steps.
    """
    del max_updates
    rate = self._steps.refresh()
    updates = self._rule.apply_updates(1)
    return [update._replace(learning_rate=rate) for update in updates]

  # For the driver that watches and ends the training: these methods call those
  # of the rule that updates the center.

  def counts(self) -> list[results.Counts]:
    """Returns how many periods of each replica were used and refused.

    A period is a replica's local steps between two exchanges with the shared
    variables.

    Returns:
      One `results.Counts` per replica.
    """
    return self._rule.counts()

  def status(self) -> results.StepStatus:
    """Returns the progress of the next update and the state of each replica.

    This is the `status` of the rule that updates the shared variables.
    """
    return self._rule.status()

  def declare_lost(self, replica: int, tag: int) -> None:
    """Stops waiting for `replica` until it takes part in an exchange again.

    Implements `UpdateRule.declare_lost`, which documents the arguments.
    """
    self._rule.declare_lost(replica, tag)

  def trace_ahead(self) -> None:
    """Traces all functions that may have to be called while a task hangs.

    They could not be traced then: a client that traces a function waits for all
    tasks (TensorFlow 2.21).
    """
    self._rule.trace_ahead()

  def interrupt(self) -> None:
    """Ends the wait of `apply_updates`, which runs in another thread.

    `apply_updates` then raises `Interrupted`.
    """
    self._rule.interrupt()

  def end_replicas(self) -> None:
    """Tells replicas that training has ended, which ends local training, too.

    A replica ends its period after the present batch or the next one. Under
    some rules the call goes on answering replicas until `interrupt` is called.
    """
    self._steps.end()
    self._rule.end_replicas()

  def release_replica(self, replica: int) -> None:
    """Tells `replica`, which runs in this process, that training has ended.

    Called when the chief, which would answer the replica, is lost.
    """
    self._rule.release_replica(replica)

  def close(self) -> None:
    """Ends the training, so that no call waits any longer.

    Calls of the chief and of replicas that wait for each other raise
    `tf.errors.OutOfRangeError`.
    """
    self._steps.end()
    self._rule.close()
