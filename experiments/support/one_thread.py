"""One thread plays all replicas of an asynchronous rule, in a given order.

The rule is the library's, over one store in this process: how stale a gradient
is, what it is multiplied by and when the variables change is left to it, and it
counts. Only who is done when is not left to chance.
"""

import heapq
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from experiments.simulator import compute_times
from tf_replicas.drivers import replica_loop
from tf_replicas.replica import model_replica
from tf_replicas.rules import base as rule_base
from tf_replicas.rules import results
from tf_replicas.rules.asynchronous import async_replicas
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
  """Whose gradient is finished next, again and again.

  All begin at once, and each begins anew as soon as it has finished.

  Args:
    compute: How long a replica takes.
    num_replicas: How many there are.
    num_turns: Length of the result.
    seed: Of the compute times.
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


def play(
  rule: async_replicas.AsyncReplicasOptimizer,
  replica: model_replica.Replica,
  order: Sequence[int],
  num_parts: int,
) -> tuple[list[float], list[tf.Tensor]]:
  """Trains by `rule`.

  In its turn a replica computes a gradient with what it read last, hands it to
  the rule, and reads anew. Training ends early if a number is not finite.

  Args:
    rule: Not built yet; nobody may have to wait by it. Not all replicas need to
      have a turn.
    replica: What each computes. All take their batches from one data set.
    order: Whose turn it is.
    num_parts: In how many parts to tell of the training.

  Returns:
    The mean loss of each part that was finished, and the parameters then.
  """
  specs = placement.from_variables(replica.variables)
  store = parameter_store.ParameterStore(
    specs,
    placement.plan(specs, placement.GreedyByBytes(1)),
    num_tasks=1,
    device_of_task=lambda _: _CPU,
    namespace=resources.new_namespace("one-thread"),
  )
  rule.build(store)
  values = [tf.identity(v) for v in replica.variables]
  rule_base.create_or_resume(rule, store, values)
  iterator = iter(replica.dataset_fn(1, 0, 0))

  def loop(index):
    return replica_loop.ReplicaLoop(
      rule, replica, iterator, index, ps_device=_CPU, device=_CPU
    )

  @tf.function(autograph=False)
  def begin(index):
    return loop(index).begin()

  @tf.function(autograph=False)
  def run_one(index, *carried):
    return loop(index).run_one(False, *carried)

  indices = {index: tf.constant(index, tf.int64) for index in set(order)}
  states = {index: begin(tensor) for index, tensor in indices.items()}
  losses = []
  try:
    for part in np.array_split(order, num_parts):
      for index in part.tolist():
        states[index] = run_one(indices[index], *states[index])
      losses.append(rule.apply_updates()[0].loss)
  except results.NonFiniteGradientError:
    pass
  return losses, store.read()
