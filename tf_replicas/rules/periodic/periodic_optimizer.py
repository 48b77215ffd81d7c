"""Defines the update rule of replicas that train own copies.

`periodic_averaging` makes such a rule for each kind of exchange. It explains
local steps, periods, exchanges and the centre (the shared variables).
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
  """An update rule whose replicas exchange every `period` batches.

  The global step, and so `max_steps`, counts the updates of the centre, as with
  the optimizers of TF1. If all replicas exchange together, an update includes
  N * `period` batches, else `period` batches. Checkpoints, averages and
  evaluation use the centre. `examples_seen` counts the examples of all local
  steps that led to an update. The reported loss is the mean over these
  examples.

  Local steps use the chief's learning rate at the beginning of the period. A
  gradient or a loss that is not finite ends the period and the training, and
  does not change the centre.

  Attributes:
    wire_dtype: None: tensors are sent in their own dtype, once per period.
    period: The number of local steps between two exchanges.
    name: The name of the kind of exchange.
  """

  wire_dtype = None

  def __init__(
    self, steps: local_steps.LocalSteps, sync_round: sync_rounds.SyncRound
  ):
    """Combines local steps with a kind of exchange.

    Args:
      steps: Makes the local steps of a replica.
      sync_round: Makes the exchange after each period.
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
    """See `UpdateRule.build`; all contributions are dense."""
    del is_sparse
    rule_base.check_no_tables(store, f"the update rule {self.name!r}")
    self._store = store
    self._steps.build(store, namespace or store.namespace)
    self._rule.build(store, namespace=namespace)
    self._sync_round.build(store)

  def create(self, values: Sequence[tf.Tensor], *, resumed: bool) -> None:
    """See `UpdateRule.create`."""
    if not resumed:
      self._steps.initialize()
    self._steps.refresh()
    self._rule.create(values, resumed=resumed)

  def start(self) -> None:
    """See `UpdateRule.start`."""
    self._rule.start()

  def signature(self) -> dict[str, object]:
    """See `UpdateRule.signature`."""
    return {
      "period": self.period,
      **self._sync_round.signature(),
      **self._rule.signature(),
    }

  # The replica's half.

  @tf.autograph.experimental.do_not_convert
  def begin(self, replica: int | tf.Tensor) -> rule_base.ReplicaStep:
    """Reads the centre as the replica's copy; see `UpdateRule.begin`."""
    step, parameters = self._rule.pull_contributed(replica)
    centre = parameters if self._sync_round.needs_centre else []
    return rule_base.ReplicaStep(
      step_token.first(step),
      [*parameters, *centre, *self._steps.new_slots()],
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
    """Makes one period of local steps, and the exchange after it.

    See `UpdateRule.contribute`. The global step of the tokens is the step of
    the centre when the replica last read it. `admitted` says whether the
    exchange updated the centre.
    """
    number = len(self._store.contributed)
    cuts = number, number * (2 if self._sync_round.needs_centre else 1)
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
    token, parameters, centre = self._sync_round.exchange(
      sync_rounds.Period(replica, before, local, token)
    )
    state = [*parameters, *centre, *local.slots]
    return rule_base.ReplicaStep(token, state, computed)

  # The chief's half.

  def set_learning_rate(self, rate: float) -> None:
    """Sets the learning rate of each replica, from its next period on."""
    self._steps.set_learning_rate(rate)
    if self._rule.inner.has_adjustable_rate():
      self._rule.set_learning_rate(rate)

  def stop_at(self, step: int) -> None:
    """See `UpdateRule.stop_at`."""
    self._rule.stop_at(step)

  def apply_updates(self, max_updates: int = 1) -> list[results.Update]:
    """Waits for an update of the centre; see `UpdateRule.apply_updates`.

    The reported learning rate is that of the local steps.
    """
    del max_updates
    rate = self._steps.refresh()
    updates = self._rule.apply_updates(1)
    return [update._replace(learning_rate=rate) for update in updates]

  # For the driver that watches and ends the training: these methods call those
  # of the rule that updates the centre.

  def counts(self) -> list[results.Counts]:
    """Returns how many periods were used; see `UpdateRule.counts`."""
    return self._rule.counts()

  def status(self) -> results.StepStatus:
    """See `UpdateRule.status`."""
    return self._rule.status()

  def declare_lost(self, replica: int, tag: int) -> None:
    """See `UpdateRule.declare_lost`."""
    self._rule.declare_lost(replica, tag)

  def trace_ahead(self) -> None:
    """See `UpdateRule.trace_ahead`."""
    self._rule.trace_ahead()

  def interrupt(self) -> None:
    """See `UpdateRule.interrupt`."""
    self._rule.interrupt()

  def end_replicas(self) -> None:
    """Ends replicas, also in the middle of a period."""
    self._steps.end()
    self._rule.end_replicas()

  def release_replica(self, replica: int) -> None:
    """See `UpdateRule.release_replica`."""
    self._rule.release_replica(replica)

  def close(self) -> None:
    """See `UpdateRule.close`."""
    self._steps.end()
    self._rule.close()
