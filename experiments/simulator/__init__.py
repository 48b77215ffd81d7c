"""Simulates replicated training: how long steps take, and who waits.

    cluster = simulator.Cluster(50, compute_times.Exponential(1.0))
    result = simulator.simulate(cluster, simulator.Sync(46), num_steps=1000)
    result.step_secs.mean(), result.late.sum()

The simulator handles clusters that are larger than any machine here: 10,000
replicas make 1,000 synchronous steps in seconds, if their links cost no time.
It simulates times and counts, not losses. A replica repeats these steps:

1. It asks for the parameters. Which global step they belong to is decided when
   the request arrives. All replicas that read at the same time share the
   outgoing links of the PS tasks (parameter servers) evenly, and no replica is
   faster than its own link.
2. It computes gradients, for a time drawn from a distribution.
3. It hands its gradients over, if the rule wants them. All replicas that do so
   at the same time share the incoming links of the PS tasks evenly.
4. It reads again when the rule lets it.

Every message, and the first byte of everything longer, takes `latency`.

Synchronous training, N of M replicas (`Sync`), admits gradients as the library
does. If N < M, a replica with finished gradients asks first. It is told at once
that its gradients are late if the step has ended since it read the parameters.
The first N replicas of a step are admitted. All others are told at the end of
the step that their gradients were not needed. Refused gradients are never sent.
The update takes `apply_secs` once N gradients have arrived. Then all replicas
that asked are released. A late replica first finishes its batch, and cannot
make up for the lost time. So steps take longer than the order statistics of one
batch say, unless the rule says `restarts_late`.

Asynchronous training (`Async`): gradients are applied in the order in which
they arrive, one update after the other. A replica reads again when its own
update was made. With `max_staleness`, or a `max_lead` of 0, it asks before it
sends gradients.

Timelines: `simulate(…, records=True)` keeps what a recorder of a real run
would. For each task these are events of a `kind` from `start` to `end`, in
seconds on one clock, with the global `step` they belong to. There is one file
per task, in which each line is a JSON object:

    {"task": "worker:0", "step": 7, "kind": "compute", "start": 0.2, "end": 0.5}

* `read`: from the request to the last byte of the parameters.
* `compute`: from then until the gradients are computed.
* `hand_over`: from the first byte sent to the acknowledgement of the last.
* `wait`: the wait for permission to send the gradients, and the wait for the
  release.
* `refused`: from the request for permission until the replica knows that its
  gradients are not wanted, because they were late or surplus.
* `apply`: an update on the PS tasks. For synchronous updates it is in the
  timeline of the chief (here the task `chief`), otherwise in that of the
  replica.

`experiments.simulator.recorded_run` reads such files, and finds the cluster
that behaves like the recorded one.
"""

import math

from experiments.simulator import simulated_cluster
from experiments.simulator import simulated_events
from experiments.simulator import simulated_rounds

Async = simulated_cluster.Async
Cluster = simulated_cluster.Cluster
Event = simulated_cluster.Event
Result = simulated_cluster.Result
Sync = simulated_cluster.Sync


def simulate(
  cluster: Cluster,
  rule: Sync | Async,
  num_steps: int,
  *,
  seed: int = 0,
  records: bool = False,
) -> Result:
  """Simulates a training of `num_steps` updates.

  Args:
    cluster: The cluster that is simulated.
    rule: How updates are made of gradients.
    num_steps: S, the number of updates, at least 1.
    seed: The seed of the compute times. The k-th batch of a replica takes the
      same time under every rule.
    records: Whether to keep all events; much slower for many replicas.

  Returns:
    Times and counts until the last update.

  Raises:
    ValueError: If an argument is out of range, or the rule and the cluster do
      not go together.
  """
  if num_steps < 1:
    raise ValueError(f"`num_steps` must be at least 1. Received: {num_steps}.")
  _check(cluster.num_replicas, rule)
  if isinstance(rule, Sync):
    needs_events = records or cluster.cores < math.inf
    if not needs_events:
      return simulated_rounds.Rounds(cluster, rule, seed).run(num_steps)
    if rule.restarts_late:
      raise ValueError(
        "`restarts_late` must not be combined with `records` or `cores`."
        f" Received: {rule}."
      )
  training = simulated_events.Training(cluster, rule, seed, records=records)
  return training.run(num_steps)


def _check(num_replicas: int, rule: Sync | Async) -> None:
  if isinstance(rule, Sync):
    name, count = "replicas_to_aggregate", rule.replicas_to_aggregate
    if count is not None and not 1 <= count <= num_replicas:
      raise ValueError(
        f"`{name}` must be in [1, {num_replicas}]. Received: {count}."
      )
    return
  for name, least in (
    ("gradients_per_update", 1),
    ("max_lead", 0),
    ("max_staleness", 0),
  ):
    value = getattr(rule, name)
    if value is not None and value < least:
      raise ValueError(f"`{name}` must be at least {least}. Received: {value}.")
  if rule.max_lead is not None and rule.gradients_per_update > num_replicas:
    raise ValueError(
      f"With `max_lead`, `gradients_per_update` must be at most"
      f" {num_replicas}. Received: {rule.gradients_per_update}."
    )
