"""One thread plays all replicas of an asynchronous rule, in a given order.

The rule is the library's, over one store in this process: how stale a gradient
is, what it is multiplied by and when the variables change is left to it, and it
counts. Only who is done when is not left to chance.
"""

import heapq
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from experiments import compute_times
from tf_replicas import async_replicas
from tf_replicas import parameter_store
from tf_replicas import placement
from tf_replicas import towers
from tf_replicas import turns
from tf_replicas import updates

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
  replica: towers.Replica,
  order: Sequence[int],
  num_parts: int,
) -> tuple[list[float], list[tf.Tensor]]:
  """Trains by `rule`.

  In its turn a replica computes a gradient with what it read last, hands it to
  the rule, and reads anew. Training ends early if a number is not finite.

  Args:
    rule: Not built yet; nobody may have to wait by it, and all rules of a
      process must be for as many replicas. Not all need to have a turn.
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
  )
  rule.build(store)
  _start(rule, store, [tf.identity(v) for v in replica.variables])
  iterator = iter(replica.dataset_fn(1, 0, 0))

  @tf.function(autograph=False)
  def begin(index):
    step, parameters = turns.begin(store, rule, index)
    return [step, *parameters]

  @tf.function(autograph=False)
  def take(index, step, *parameters):
    turn = turns.contribute(
      store, rule, replica, iterator, index, parameters, step=step
    )
    return [turn.release.global_step, *turn.state]

  indices = {index: tf.constant(index, tf.int64) for index in set(order)}
  states = {index: begin(tensor) for index, tensor in indices.items()}
  losses = []
  try:
    for part in np.array_split(order, num_parts):
      for index in part.tolist():
        states[index] = take(indices[index], *states[index])
      losses.append(rule.apply_update().loss)
  except updates.NonFiniteGradientError:
    pass
  return losses, store.read()


def _start(rule, store, values) -> None:
  """Gives everything its first value, whatever an earlier training left.

  A name means the same variable in all trainings of a process.
  """
  rule.initialize(values)
  rule.make_ready(is_chief=True)
  store.start()
  state = store.state()
  slots = [name for name in state if name.startswith("slots/")]
  store.load_state({name: tf.zeros_like(state[name]) for name in slots})
