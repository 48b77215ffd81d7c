"""Which update rule a training uses, by settings; what goes together.

Nothing here needs TensorFlow before the rule is made.
"""

import dataclasses
import math
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
MODEL_AVERAGE = "model_average"
ELASTIC_AVERAGE = "elastic_average"
# Rules of periodic averaging -> their usual period, after TF1's contrib.
PERIODS = {
  MODEL_AVERAGE: 100,
  ELASTIC_AVERAGE: 10,
  "accumulated_gradients": 10,
}
RULES = (SYNC, ASYNC, *PERIODS, *POLICIES)
# One may follow on another in the same training.
SWITCHABLE = (SYNC, ASYNC, BOUNDED_STALENESS, DROP_STALE)
# A setting of one rule or more -> the rules that it is for.
_FOR = {
  "max_staleness": (BOUNDED_STALENESS, DROP_STALE),
  "softsync_n": (SOFTSYNC,),
  "delay_compensation": (DELAY_COMPENSATED,),
  "period": tuple(PERIODS),
  "moving_rate": (ELASTIC_AVERAGE,),
  "rho": (ELASTIC_AVERAGE,),
}
_HAS_DEFAULT = {"period", "moving_rate", "rho"}
# What may say when one rule follows on another.
_MOMENTS = ("switch_at_step", "switch_when_refused", "switch_when_slow")


@dataclasses.dataclass(frozen=True)
class UpdateSettings:
  """The update rule, and how it is to be.

  Attributes:
    rules: `sync`, `async`, a rule of periodic averaging, or policies of
      asynchronous updates.
    use_locking: Whether asynchronous updates of one variable exclude each
      other.
    snapshot_reads: Whether asynchronous replicas read all variables of one
      version.
    max_staleness: The bound of `bounded_staleness`, in steps, and of
      `drop_stale`, in updates.
    softsync_n: n of n-softsync: an update is made of M / n gradients.
    delay_compensation: The factor of `delay_compensated`.
    period: Local steps between two meetings; None: the rule's usual.
    moving_rate: Of `elastic_average`; None: the rule's usual.
    rho: Of `elastic_average`; None: the rule's usual.
    refresh_every: How many steps an asynchronous replica makes from what it
      read once.
    wire_dtype: As what float32 parameters and gradients travel; None: as they
      are.
    then_update: The rules that follow on `rules` in the same training; empty:
      none.
    switch_at_step: The global step at which they do.
    switch_when_refused: Or the share of a replica's contributions, so many of
      which are refused when they do.
    switch_when_slow: Or the share of the time for which updates wait for one
      replica alone when they do.
  """

  rules: tuple[str, ...] = (SYNC,)
  use_locking: bool = False
  snapshot_reads: bool = False
  max_staleness: int | None = None
  softsync_n: int | None = None
  delay_compensation: float | None = None
  period: int | None = None
  moving_rate: float | None = None
  rho: float | None = None
  refresh_every: int = 1
  wire_dtype: str | None = None
  then_update: tuple[str, ...] = ()
  switch_at_step: int | None = None
  switch_when_refused: float | None = None
  switch_when_slow: float | None = None

  def __str__(self) -> str:
    rules = [self.rules, self.then_update]
    return ", then ".join(",".join(names) for names in rules if names)

  @property
  def all_rules(self) -> tuple[str, ...]:
    """Those of the whole training."""
    return self.rules + self.then_update

  @property
  def is_sync(self) -> bool:
    """Whether updates are synchronous, of gradients."""
    return self.rules == (SYNC,)

  @property
  def is_of_several(self) -> bool:
    """Whether an update waits for contributions of several replicas."""
    return self.rules in ((SYNC,), (MODEL_AVERAGE,))

  @property
  def is_periodic(self) -> bool:
    """Whether replicas train copies of their own."""
    return self.rules[:1] != () and self.rules[0] in PERIODS

  @property
  def local_steps(self) -> int:
    """The batches in one contribution."""
    if not self.is_periodic:
      return 1
    return self.period or PERIODS[self.rules[0]]

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
  _check_rules("update", settings.rules)
  has_backups = (replicas_to_aggregate or num_replicas) < num_replicas
  _check_switch(settings, has_backups)
  if replicas_to_aggregate is not None:
    if replicas_to_aggregate < 1:
      raise cluster.ClusterError(
        "`--replicas_to_aggregate` must be at least 1. Received:"
        f" {replicas_to_aggregate}."
      )
    if not settings.is_of_several and SYNC not in settings.then_update:
      raise cluster.ClusterError(
        "`--replicas_to_aggregate` needs `--update=sync` or model_average."
        f" Received: --update={','.join(settings.rules)}."
      )
    # Else a replica brings several gradients of the same variables.
    if replicas_to_aggregate > num_replicas and settings.all_rules != (SYNC,):
      raise cluster.ClusterError(
        "`--replicas_to_aggregate` must be at most the number of replicas,"
        f" {num_replicas}, for --update={settings}. Received:"
        f" {replicas_to_aggregate}."
      )
  for name, rules in _FOR.items():
    _check_needed(settings, name, rules)
  if settings.moving_rate is not None and not 0 < settings.moving_rate <= 1:
    raise cluster.ClusterError(
      f"`--moving_rate` must be in (0, 1]. Received: {settings.moving_rate}."
    )
  for name in ("rho", "delay_compensation"):
    value = getattr(settings, name)
    if value is not None and not 0 <= value < math.inf:
      raise cluster.ClusterError(
        f"`--{name}` must be at least 0 and finite. Received: {value}."
      )
  usual = UpdateSettings()
  for name in ("use_locking", "snapshot_reads", "refresh_every"):
    value = getattr(settings, name)
    is_for_it = settings.all_rules != (SYNC,) and not settings.is_periodic
    if value != getattr(usual, name) and not is_for_it:
      raise cluster.ClusterError(
        f"`--{name}` is for asynchronous updates by gradients. Received:"
        f" --update={','.join(settings.rules)}."
      )
  if settings.wire_dtype and settings.is_periodic:
    raise cluster.ClusterError(
      "`--wire_dtype` is for updates by gradients. Received:"
      f" --update={settings.rules[0]}."
    )
  n = settings.softsync_n
  if n is not None and num_replicas % n:
    raise cluster.ClusterError(
      f"`--softsync_n` must divide the number of replicas, {num_replicas}."
      f" Received: {n}."
    )


def _check_rules(flag: str, rules: tuple[str, ...]) -> None:
  for rule in rules:
    if rule not in RULES:
      raise cluster.ClusterError(
        f"`--{flag}` must be of {', '.join(RULES)}. Received: {rule!r}."
      )
  alone = set(rules) - set(POLICIES)
  if not rules or alone and len(rules) > 1:
    raise cluster.ClusterError(
      f"`--{flag}` must be one of {', '.join(RULES)}, or several of"
      f" {', '.join(POLICIES)}. Received: {','.join(rules)!r}."
    )


def _check_switch(settings: UpdateSettings, has_backups: bool) -> None:
  """What follows on the first rules goes together with them."""
  moments = {name: getattr(settings, name) for name in _MOMENTS}
  given = [f"--{k}={v}" for k, v in moments.items() if v is not None]
  if len(given) != bool(settings.then_update):
    raise cluster.ClusterError(
      f"`--then_update` needs one of `--{'`, `--'.join(_MOMENTS)}`, and these"
      f" need it. Received: --then_update={','.join(settings.then_update)},"
      f" {' '.join(given) or 'none of these'}."
    )
  if not settings.then_update:
    return
  _check_rules("then_update", settings.then_update)
  if not set(settings.all_rules) <= set(SWITCHABLE):
    raise cluster.ClusterError(
      "`--then_update` needs rules, before and after, of"
      f" {', '.join(SWITCHABLE)}. Received: --update="
      f"{','.join(settings.rules)}, --then_update="
      f"{','.join(settings.then_update)}."
    )
  if settings.is_sync == (settings.then_update == (SYNC,)):
    raise cluster.ClusterError(
      "`--then_update` must go from sync to asynchronous rules or back."
      f" Received: {settings}."
    )
  what = f"--update={','.join(settings.rules)}"
  what += " with backups" if has_backups else " without backups"
  is_all = settings.is_sync and not has_backups
  if settings.switch_when_slow is not None and not is_all:
    raise cluster.ClusterError(
      "`--switch_when_slow` needs `--update=sync` without backups, which waits"
      f" for every replica. Received: {what}."
    )
  refuses = DROP_STALE in settings.rules or settings.is_sync and has_backups
  if settings.switch_when_refused is not None and not refuses:
    raise cluster.ClusterError(
      "`--switch_when_refused` needs `--update=drop_stale`, or sync with"
      " `--replicas_to_aggregate` below the number of replicas: others refuse"
      f" nothing. Received: {what}."
    )
  for name in ("switch_when_refused", "switch_when_slow"):
    share = getattr(settings, name)
    if share is not None and not 0 <= share < 1:
      raise cluster.ClusterError(
        f"`--{name}` must be in [0, 1). Received: {share}."
      )
  if settings.refresh_every > 1:
    raise cluster.ClusterError(
      "`--then_update` needs `--refresh_every=1`. Received:"
      f" {settings.refresh_every}."
    )


def _check_needed(settings, name: str, rules: tuple[str, ...]) -> None:
  """A setting is given exactly if it is used."""
  value = getattr(settings, name)
  users = [rule for rule in rules if rule in settings.all_rules]
  if users and value is None and name not in _HAS_DEFAULT:
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
    replicas_to_aggregate: N, of updates that wait for several.
    num_replicas: M.
  """
  from tf_replicas import async_replicas
  from tf_replicas import staleness
  from tf_replicas import sync_replicas

  if settings.then_update:
    return _switching_fn(settings, replicas_to_aggregate, num_replicas)
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
  if settings.is_periodic:
    return _periodic_fn(settings, replicas_to_aggregate, num_replicas)
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


def _switching_fn(settings, replicas_to_aggregate: int, num_replicas: int):
  from tf_replicas import rule_choice
  from tf_replicas import switching

  new_rules = [
    rule_fn(
      dataclasses.replace(settings, rules=rules, then_update=()),
      replicas_to_aggregate,
      num_replicas,
    )
    for rules in (settings.rules, settings.then_update)
  ]
  if settings.switch_at_step is not None:
    choose = rule_choice.at_step(settings.switch_at_step)
  elif settings.switch_when_refused is not None:
    choose = rule_choice.when_refused(settings.switch_when_refused)
  else:
    choose = rule_choice.when_slow(settings.switch_when_slow)

  def new_switching(optimizer, **common):
    rules = [new_rule(optimizer, **common) for new_rule in new_rules]
    return switching.SwitchingOptimizer(rules, choose)

  return new_switching


def _periodic_fn(settings, replicas_to_aggregate: int, num_replicas: int):
  from tf_replicas import periodic_averaging

  (name,) = settings.rules
  counts = [num_replicas]
  if settings.is_of_several:
    counts = [replicas_to_aggregate, num_replicas]

  def new_periodic(optimizer, **common):
    new_rule = getattr(periodic_averaging, name)
    if name == ELASTIC_AVERAGE:
      common.update(moving_rate=settings.moving_rate, rho=settings.rho)
    return new_rule(optimizer, *counts, period=settings.local_steps, **common)

  return new_periodic
