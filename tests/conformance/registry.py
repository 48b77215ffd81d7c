"""Lists all update rules and all drivers that the conformance tests test.

For a new rule or a new driver, one line has to be added.
"""

import functools

from tests.conformance import driver_suite
from tests.conformance import rule_suite
from tests.conformance import toy_driver
from tests.conformance import toy_rule
from tests.support import stores
from tf_replicas.drivers import mirrored
from tf_replicas.drivers import one_machine
from tf_replicas.rules import switch_conditions
from tf_replicas.rules import switching
from tf_replicas.rules.asynchronous import async_replicas
from tf_replicas.rules.asynchronous import staleness
from tf_replicas.rules.periodic import periodic_averaging
from tf_replicas.rules.sync import sync_replicas

PERIOD = 2


def _sync(needed, total):
  def make(optimizer):
    return sync_replicas.SyncReplicasOptimizer(optimizer, needed, total)

  return rule_suite.RuleCase(
    make,
    per_update=needed,
    contributions=max(1, needed // total),
    has_lockstep=True,
  )


def _async(*policies, gradients_per_update=1, **options):
  def make(optimizer):
    return async_replicas.AsyncReplicasOptimizer(
      optimizer,
      2,
      policies=policies,
      gradients_per_update=gradients_per_update,
      **options,
    )

  return rule_suite.RuleCase(make, per_update=gradients_per_update)


def _periodic(make, *, per_update=1, **options):
  make = functools.partial(_two_replicas, make, period=PERIOD, **options)
  return rule_suite.RuleCase(
    make,
    per_update=per_update,
    batches=PERIOD,
  )


def _two_replicas(make, optimizer, **options):
  return make(optimizer, 2, **options)


def _switching(first, second):
  """Returns the case of a rule that switches to another rule at global step 3.

  Args:
    first: The case of the rule before the switch.
    second: The case of the rule after the switch.
  """

  def make(optimizer):
    return switching.SwitchingOptimizer(
      [first.make(optimizer), second.make(optimizer)],
      switch_conditions.at_step(3),
    )

  return rule_suite.RuleCase(make, drops=True)


RULES = {
  "sync": _sync(2, 2),
  "sync_with_backup": _sync(2, 3),
  "sync_several_batches": _sync(4, 2),
  "async": _async(),
  "async_locked": _async(use_locking=True),
  "async_snapshot_reads": _async(snapshot_reads=True),
  "async_in_step": _async(staleness.bounded_staleness(0)),
  "async_bounded": _async(staleness.bounded_staleness(1)),
  "async_drop_stale": _async(staleness.drop_stale(1)),
  "async_staleness_aware": _async(staleness.staleness_aware()),
  "async_delay_compensated": _async(staleness.delay_compensated(0.5)),
  "async_softsync": _async(gradients_per_update=2),
  "async_refresh_every": _async(refresh_every=3),
  "model_average": _periodic(periodic_averaging.model_average, per_update=2),
  "elastic_average": _periodic(periodic_averaging.elastic_average),
  "elastic_average_sync": _periodic(
    periodic_averaging.elastic_average, per_update=2, synchronous=True
  ),
  "accumulated_gradients": _periodic(periodic_averaging.accumulated_gradients),
  "switching_async": _switching(_async(use_locking=True), _async()),
  "toy": rule_suite.RuleCase(toy_rule.SumOfTwo),
}


def _one_machine(replica_fn, rule_fn):
  return one_machine.OneMachine(replica_fn, lambda: rule_fn(1))


def _mirrored(replica_fn, rule_fn):
  devices = [stores.device(number) for number in range(2)]
  return mirrored.Mirrored(replica_fn, rule_fn, devices)


# Of one process.
DRIVERS = {
  "one_machine": driver_suite.DriverCase(_one_machine),
  "mirrored": driver_suite.DriverCase(_mirrored, num_replicas=2),
  "toy": driver_suite.DriverCase(toy_driver.Halves),
}
# Of several processes: those that `tests.tasks.cluster_task` knows.
CLUSTER_DRIVERS = {
  "between_graph": driver_suite.ClusterCase("between_graph"),
  "in_graph": driver_suite.ClusterCase("in_graph", has_chief=True),
}
