"""Trains with many asynchronous replicas in one thread, in a given order.

The update rule is one of the library. It uses a parameter store in this
process. The rule itself decides how stale a gradient is, by what it is
multiplied, and when the variables change, and it counts all that. Only the
order in which replicas finish is given, and not left to chance.
"""

import collections
import heapq
from collections.abc import Mapping
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from experiments.simulator import compute_times
from tf_replicas.drivers import replica_loop
from tf_replicas.replica import model_replica
from tf_replicas.rules import base as rule_base
from tf_replicas.rules import results
from tf_replicas.rules.asynchronous import async_replicas
from tf_replicas.runtime import datasets
from tf_replicas.runtime import resources
from tf_replicas.store import parameter_store
from tf_replicas.store import placement

_CPU = "/device:CPU:0"


def finishing_order(
  compute: compute_times.Distribution,
  num_replicas: int,
  num_turns: int,
  seed: int,
) -> list[int]:
  """Returns which replica finishes the computation of a gradient, turn by turn.

  All replicas begin at the same time, and each begins anew as soon as it has
  finished.

  Args:
    compute: The distribution of the time that a gradient takes.
    num_replicas: The number of replicas.
    num_turns: The number of gradients, and the length of the result.
    seed: The seed of the compute times.

  Returns:
    The indices of the replicas.
  """
  draws = compute_times.Draws(compute, num_replicas, seed)
  ends = [(draws.next_of(replica), replica) for replica in range(num_replicas)]
  heapq.heapify(ends)
  order = []
  for _ in range(num_turns):
    end, replica = ends[0]
    heapq.heapreplace(ends, (end + draws.next_of(replica), replica))
    order.append(replica)
  return order


def local_store(
  specs: Sequence[placement.VariableSpec],
) -> parameter_store.ParameterStore:
  """Returns a parameter store whose only task is this process.

  Args:
    specs: The variables.
  """
  return parameter_store.ParameterStore(
    specs,
    placement.plan(specs, placement.GreedyByBytes(1)),
    num_tasks=1,
    device_of_task=lambda _: _CPU,
    namespace=resources.new_namespace("local"),
  )


def build(
  rule: rule_base.UpdateRule, replica: model_replica.Replica
) -> parameter_store.ParameterStore:
  """Builds a rule in this process, with the variables of a replica.

  Args:
    rule: The update rule, not built yet.
    replica: Has the variables, with their initial values.

  Returns:
    The store of the rule.
  """
  store = local_store(placement.from_variables(replica.variables))
  rule.build(store)
  values = [tf.identity(v) for v in replica.variables]
  rule_base.create_or_resume(rule, store, values)
  return store


def play(
  rule: async_replicas.AsyncReplicasOptimizer,
  replica: model_replica.Replica,
  order: Sequence[int],
  num_parts: int,
  joins: Mapping[int, int] | None = None,
) -> tuple[list[float], list[tf.Tensor]]:
  """Trains by an asynchronous update rule, with replicas that take turns.

  In its turn, a replica computes a gradient from the variables that it read
  last, hands the gradient over to the rule, and reads the variables anew.
  Training ends early if a loss or a gradient is not finite.

  Args:
    rule: The update rule, not built yet. It must be one by which no replica
      waits for others. Some of its replicas may have no turn.
    replica: The computation of each replica. All replicas take their batches
      from one data set.
    order: The index of the replica for each turn.
    num_parts: The number of parts into which the turns are divided, for the
      losses.
    joins: For a replica that joins later, the turn before which it reads the
      variables for the first time. The others read them at the start.

  Returns:
    The mean loss of each part that was finished, and the variables at the end.
  """
  store = build(rule, replica)
  iterator = iter(datasets.untuned(replica.dataset_fn(1, 0, 0)))

  def loop(index):
    return replica_loop.ReplicaLoop(rule, replica, iterator, index, device=_CPU)

  @tf.function(autograph=False)
  def begin(index):
    return loop(index).begin()

  @tf.function(autograph=False)
  def run_one(index, *carried):
    return loop(index).run_one(*carried, is_preadmitted=False)

  indices = {index: tf.constant(index, tf.int64) for index in set(order)}
  joining = collections.defaultdict(list)
  for index in indices:
    joining[(joins or {}).get(index, 0)].append(index)
  states, turn, losses = {}, 0, []
  try:
    for part in np.array_split(order, num_parts):
      for index in part.tolist():
        for new in joining[turn]:
          states[new] = begin(indices[new])
        states[index] = run_one(indices[index], *states[index])
        turn += 1
      losses.append(rule.apply_updates()[0].loss)
  except results.NonFiniteGradientError:
    pass
  return losses, store.read()
