"""Which update rule a training uses, by settings; what goes together.

Nothing here needs TensorFlow before the rule is made.
"""

import dataclasses
from collections.abc import Callable

from tf_replicas import cluster

SYNC = "sync"
ASYNC = "async"
SOFTSYNC = "softsync"
BOUNDED_STALENESS = "bounded_staleness"
DROP_STALE = "drop_stale"
STALENESS_AWARE = "staleness_aware"
DELAY_COMPENSATED = "delay_compensated"
# What tames asynchronous updates; all of these may be combined.
POLICIES = (
  BOUNDED_STALENESS,
  DROP_STALE,
  STALENESS_AWARE,
  DELAY_COMPENSATED,
  SOFTSYNC,
)
RULES = (SYNC, ASYNC, *POLICIES)
# A setting of one rule or more -> the rules that it is for.
_FOR = {
  "max_staleness": (BOUNDED_STALENESS, DROP_STALE),
  "softsync_n": (SOFTSYNC,),
  "delay_compensation": (DELAY_COMPENSATED,),
}


@dataclasses.dataclass(frozen=True)
class UpdateSettings:
  """The update rule, and how it is to be.

  Attributes:
    rules: `sync`, `async`, or policies of asynchronous updates.
    use_locking: Whether asynchronous updates of one variable exclude each
      other.
    snapshot_reads: Whether asynchronous replicas read all variables of one
      version.
    max_staleness: The bound of `bounded_staleness`, in steps, and of
      `drop_stale`, in updates.
    softsync_n: n of n-softsync: an update is made of M / n gradients.
    delay_compensation: The factor of `delay_compensated`.
    refresh_every: How many steps an asynchronous replica makes from what it
      read once.
    wire_dtype: As what float32 parameters and gradients travel; None: as they
      are.
  """

  rules: tuple[str, ...] = (SYNC,)
  use_locking: bool = False
  snapshot_reads: bool = False
  max_staleness: int | None = None
  softsync_n: int | None = None
  delay_compensation: float | None = None
  refresh_every: int = 1
  wire_dtype: str | None = None

  @property
  def is_sync(self) -> bool:
    """Whether replicas wait for each other's contributions."""
    return self.rules == (SYNC,)

  def gradients_per_update(self, num_replicas: int) -> int:
    """How many of M replicas' gradients make an asynchronous update."""
    return num_replicas // (self.softsync_n or num_replicas)


def check(
  settings: UpdateSettings,
  num_replicas: int,
  replicas_to_aggregate: int | None = None,
) -> None:
  """Refuses what does not go together.

  Args:
    settings: What to look at.
    num_replicas: M.
    replicas_to_aggregate: N, if given.

  Raises:
    cluster.ClusterError: With the reason.
  """
  for rule in settings.rules:
    if rule not in RULES:
      raise cluster.ClusterError(
        f"`--update` must be of {', '.join(RULES)}. Received: {rule!r}."
      )
  alone = {SYNC, ASYNC}.intersection(settings.rules)
  if not settings.rules or alone and len(settings.rules) > 1:
    raise cluster.ClusterError(
      "`--update` must be sync, or async, or one or several of"
      f" {', '.join(POLICIES)}. Received: {','.join(settings.rules)!r}."
    )
  if replicas_to_aggregate is not None:
    if replicas_to_aggregate < 1:
      raise cluster.ClusterError(
        "`--replicas_to_aggregate` must be at least 1. Received:"
        f" {replicas_to_aggregate}."
      )
    if not settings.is_sync:
      raise cluster.ClusterError(
        "`--replicas_to_aggregate` needs `--update=sync`. Received:"
        f" --update={','.join(settings.rules)}."
      )
  for name, rules in _FOR.items():
    _check_needed(settings, name, rules)
  for name in ("use_locking", "snapshot_reads"):
    if settings.is_sync and getattr(settings, name):
      raise cluster.ClusterError(
        f"`--{name}` is for asynchronous updates; synchronous ones exclude"
        " reads and each other anyhow. Received: --update=sync."
      )
  if settings.is_sync and settings.refresh_every > 1:
    raise cluster.ClusterError(
      "`--refresh_every` must be 1 for synchronous updates, whose gradients"
      f" are all of the newest variables. Received: {settings.refresh_every}."
    )
  n = settings.softsync_n
  if n is not None and num_replicas % n:
    raise cluster.ClusterError(
      f"`--softsync_n` must divide the number of replicas, {num_replicas}."
      f" Received: {n}."
    )


def _check_needed(settings, name: str, rules: tuple[str, ...]) -> None:
  """A setting is given exactly if it is used."""
  value = getattr(settings, name)
  users = [rule for rule in rules if rule in settings.rules]
  if users and value is None:
    raise cluster.ClusterError(
      f"`--update={users[0]}` needs `--{name}`. Received: none."
    )
  if not users and value is not None:
    raise cluster.ClusterError(
      f"`--{name}` is for `--update={' or '.join(rules)}`. Received:"
      f" --update={','.join(settings.rules)}."
    )


def rule_fn(
  settings: UpdateSettings, replicas_to_aggregate: int, num_replicas: int
) -> Callable[..., object]:
  """What makes the rule: called with the inner optimizer and keywords.

  The keywords are those of `update_rule.UpdateRule`, such as
  `variable_averages` and `loss_scale`.

  Args:
    settings: Checked.
    replicas_to_aggregate: N, of synchronous updates.
    num_replicas: M.
  """
  from tf_replicas import async_replicas
  from tf_replicas import staleness
  from tf_replicas import sync_replicas

  if settings.is_sync:

    def new_sync(optimizer, **common):
      return sync_replicas.SyncReplicasOptimizer(
        optimizer,
        replicas_to_aggregate,
        num_replicas,
        wire_dtype=settings.wire_dtype,
        **common,
      )

    return new_sync
  new_policy = {
    BOUNDED_STALENESS: lambda: staleness.bounded_staleness(
      settings.max_staleness
    ),
    DROP_STALE: lambda: staleness.drop_stale(settings.max_staleness),
    STALENESS_AWARE: staleness.staleness_aware,
    DELAY_COMPENSATED: lambda: staleness.delay_compensated(
      settings.delay_compensation
    ),
  }
  policies = [new_policy[r]() for r in settings.rules if r in new_policy]

  def new_async(optimizer, **common):
    return async_replicas.AsyncReplicasOptimizer(
      optimizer,
      num_replicas,
      use_locking=settings.use_locking,
      snapshot_reads=settings.snapshot_reads,
      policies=policies,
      gradients_per_update=settings.gradients_per_update(num_replicas),
      refresh_every=settings.refresh_every,
      wire_dtype=settings.wire_dtype,
      **common,
    )

  return new_async
