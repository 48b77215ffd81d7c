"""A simulator of replicated training: how long steps take, and who waits.

    cluster = simulator.Cluster(50, compute_times.Exponential(1.0))
    result = simulator.simulate(cluster, simulator.Sync(46), num_steps=1000)
    result.step_secs.mean(), result.late.sum()

It goes where no machine here can go: 10,000 replicas make 1,000 synchronous
steps in seconds. It simulates times and counts, not losses. A replica, over and
over:

1. Asks for the parameters; which step they belong to is decided when the
   request is there. All who read at the same time share the PS tasks' outgoing
   links evenly, and nobody is faster than its own link.
2. Computes for a time drawn from a distribution.
3. Hands its gradients over, if the rule wants them. The PS tasks' incoming
   links take gradients in the order in which they come.
4. Reads again when the rule says so.

Every message, and the first byte of everything longer, takes `latency`.

Synchronous, N of M (`Sync`), with the library's admission: if N < M a replica
that is ready asks first. It is told at once that its gradients are late if the
step has ended since it read; the first N of a step are admitted; all others
hear when the step ends that they were not needed. Refused gradients are never
sent. The update takes `apply_secs` once N have arrived, then all who asked are
released. A late replica first finishes its batch: what it lost it cannot make
up, so steps take longer than the order statistics of one batch say, unless the
rule says `restarts_late`.

Asynchronous (`Async`): gradients are applied in the order in which they come,
one update after the other; a replica reads again when its own was made. With
`max_staleness`, or a `max_lead` of 0, it asks before it sends.

Timelines. `simulate(…, records=True)` keeps what a recorder of a real run
would: for each task events of a `kind` from `start` to `end`, in seconds on one
clock, with the global `step` they belong to. In a file, one per task, each line
is a JSON object:

    {"task": "worker:0", "step": 7, "kind": "compute", "start": 0.2, "end": 0.5}

* `read`: from the request to the last byte of the parameters.
* `compute`: until the gradients are there.
* `hand_over`: from the first byte sent to the acknowledgement of the last.
* `wait`: for a verdict before the gradients are sent, and for the release.
* `refused`: from having asked until the replica knows that its gradients are
  not wanted; they were late or surplus.
* `apply`: an update on the PS tasks, in the timeline of the chief for
  synchronous ones (here the task `chief`), else of the replica.

`experiments.simulator.recorded_run` reads such files and finds the cluster that
behaves like them.
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
  """Trains for `num_steps` updates.

  Args:
    cluster: What is simulated.
    rule: How updates come about.
    num_steps: S, at least 1.
    seed: Of the compute times. The k-th batch of a replica takes the same time
      under every rule.
    records: Whether to keep all events; much slower for many replicas.

  Returns:
    What happened until the last update.

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
        "`restarts_late` is simulated without `records` and bounded `cores`."
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
