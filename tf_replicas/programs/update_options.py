"""Defines the update rules by name, their settings, and valid combinations.

Each rule is an entry of `RULES`. Its settings are those fields of
`UpdateSettings` that name the rule; the fields also define the flags.
TensorFlow is imported only when a rule is made.

A contribution is what a replica sends for one update: a gradient, or the result
of several steps on the replica's own copy of the variables.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple
from typing import TYPE_CHECKING

from tf_replicas import cluster
from tf_replicas.programs import fields
from tf_replicas.rules.sync import quorum

if TYPE_CHECKING:
  from tf_replicas.rules import base as rule_base
  from tf_replicas.rules.asynchronous import staleness

# Called with the inner Keras optimizer and keywords of
# `rules.base.OptimizerRule`, such as `variable_averages` and `loss_scale`.
RuleFn = Callable[..., "rule_base.UpdateRule"]

# Groups of flags: of every training, of one with several replicas.
GRADIENTS, GROUP = "Gradients", "Update rule"
SYNC = "sync"


class Rule(NamedTuple):
  """An update rule that can be chosen by name.

  Attributes:
    make: Maps (settings, number of replicas, optimizer, keyword arguments) to
      the update rule.
    policy: Maps the settings to the staleness policy (what to do with gradients
      of old variables) that the rule adds to asynchronous updates; None if it
      adds none.
    is_combinable: Whether the rule may be combined with other combinable rules.
    waits_for_several: Whether an update waits for several contributions: for
      `replicas_to_aggregate` of them.
    is_switchable: Whether a training may switch to or from this rule after some
      updates.
    period: For a rule under which each replica trains its own copy of the
      variables: the default number of steps between two exchanges with the
      shared variables, as in TF1's contrib. None for other rules.
  """

  make: RuleFn
  policy: Callable[[UpdateSettings], staleness.Policy] | None = None
  is_combinable: bool = False
  waits_for_several: bool = False
  is_switchable: bool = False
  period: int | None = None


def _sync(settings: UpdateSettings, num_replicas: int, optimizer, **common):
  from tf_replicas.rules.sync import sync_replicas

  wanted = settings.replicas_to_aggregate
  return sync_replicas.SyncReplicasOptimizer(
    optimizer,
    num_replicas if wanted is None else wanted,
    num_replicas,
    wire_dtype=settings.wire_dtype,
    step_timeout_secs=settings.step_timeout_secs,
    min_contributions=settings.min_contributions,
    scale_rate=settings.scale_rate,
    **_of_gradients(settings, common),
  )


def _of_gradients(settings: UpdateSettings, common: dict) -> dict:
  """Returns the keyword arguments for a rule that applies gradients.

  They are the arguments in `common`, and further ones for the settings about
  clipping and momentum correction.

  Args:
    settings: The settings.
    common: Keyword arguments that all rules get.

  Raises:
    ValueError: If both `clip_norm` and the optimizer limit the norm of the mean
      gradient.
  """
  keywords = {"clip_replica_norm": settings.clip_replica_norm, **common}
  if settings.momentum_correction:
    keywords["momentum_correction"] = True
  if settings.clip_norm is not None:
    other = common.get("clip_mean_norm")
    fields.require(
      "clip_norm",
      settings.clip_norm,
      other is None,
      f"absent where the optimizer has global_clipnorm={other}",
    )
    keywords["clip_mean_norm"] = settings.clip_norm
  return keywords


def _async(settings: UpdateSettings, num_replicas: int, optimizer, **common):
  from tf_replicas.rules.asynchronous import async_replicas

  rules = [RULES[name] for name in settings.rules]
  return async_replicas.AsyncReplicasOptimizer(
    optimizer,
    num_replicas,
    use_locking=settings.use_locking,
    snapshot_reads=settings.snapshot_reads,
    policies=[rule.policy(settings) for rule in rules if rule.policy],
    gradients_per_update=replicas_to_aggregate(settings, num_replicas),
    refresh_every=settings.refresh_every,
    wire_dtype=settings.wire_dtype,
    **_of_gradients(settings, common),
  )


def _periodic(settings: UpdateSettings, num_replicas: int, optimizer, **common):
  from tf_replicas.rules.periodic import periodic_averaging

  (name,) = settings.rules
  counts = [num_replicas]
  if settings.waits_for_several:
    counts = [replicas_to_aggregate(settings, num_replicas), num_replicas]
  own = {}
  if name == "elastic_average":
    own = {"moving_rate": settings.moving_rate, "rho": settings.rho}
  return getattr(periodic_averaging, name)(
    optimizer,
    *counts,
    period=settings.local_steps,
    clip_replica_norm=settings.clip_replica_norm,
    **own,
    **common,
  )


def _policy(name: str, *arguments: str):
  """Returns a function that makes a staleness policy from the settings.

  A staleness policy says how asynchronous updates treat gradients that were
  computed from old variables.

  Args:
    name: The name of a function of the `staleness` module that makes the
      policy, such as "drop_stale".
    *arguments: The names of the fields of `UpdateSettings` whose values are
      passed to that function.

  Returns:
    A function that maps an `UpdateSettings` to the policy.
  """

  def make(settings: UpdateSettings) -> staleness.Policy:
    from tf_replicas.rules.asynchronous import staleness

    values = [getattr(settings, argument) for argument in arguments]
    return getattr(staleness, name)(*values)

  return make


def _combinable(policy=None, **more) -> Rule:
  return Rule(_async, policy, is_combinable=True, **more)


RULES = {
  SYNC: Rule(_sync, waits_for_several=True, is_switchable=True),
  "async": Rule(_async, is_switchable=True),
  "model_average": Rule(_periodic, waits_for_several=True, period=100),
  "elastic_average": Rule(_periodic, period=10),
  "accumulated_gradients": Rule(_periodic, period=10),
  "bounded_staleness": _combinable(
    _policy("bounded_staleness", "max_staleness"), is_switchable=True
  ),
  "drop_stale": _combinable(
    _policy("drop_stale", "max_staleness"), is_switchable=True
  ),
  "staleness_aware": _combinable(_policy("staleness_aware")),
  "delay_compensated": _combinable(
    _policy("delay_compensated", "delay_compensation")
  ),
  "softsync": _combinable(),
}


def _names(condition: Callable[[Rule], bool]) -> tuple[str, ...]:
  return tuple(name for name, rule in RULES.items() if condition(rule))


_SYNCHRONIZING = _names(lambda rule: rule.waits_for_several)
_ASYNCHRONOUS = _names(lambda rule: rule.make is _async)
_PERIODIC = _names(lambda rule: rule.period is not None)
_COMBINABLE = _names(lambda rule: rule.is_combinable)
_SWITCHABLE = _names(lambda rule: rule.is_switchable)


def _setting(default, help, within=None, *, of=None, is_needed=False, **more):
  """Returns a dataclass field for one setting of the update rules.

  Args:
    default: The default value.
    help: The help text of the flag.
    within: The interval of valid numbers, such as "[0, 1)"; None for any.
    of: The names of the rules that have this setting; None for all rules.
    is_needed: Whether a training with one of these rules must give a value
      other than None.
    **more: Further arguments of `fields.setting`.
  """
  more = {"of": of, "is_needed": is_needed, "group": GROUP, **more}
  return fields.setting(default, help, within, **more)


@dataclasses.dataclass(frozen=True)
class UpdateSettings:
  """The update rule or rules of a training, and their settings.

  The help texts of the fields describe them. The function `check` checks that
  they are valid together.
  """

  rules: tuple[str, ...] = _setting(
    (SYNC,),
    f"The update rule: {', '.join(RULES)}; {', '.join(_COMBINABLE)} may be"
    " combined by commas",
    flag="update",
  )
  replicas_to_aggregate: str | int | None = _setting(
    None,
    "Gradients averaged in one update: a number, `all`, `all-K` (all replicas"
    " but K) or `P%` of the replicas; default: one of every replica",
    of=_SYNCHRONIZING,
  )
  step_timeout_secs: float | None = _setting(
    None,
    "Seconds that a step waits for its gradients; then it goes on with at least"
    " --min_contributions of them, or training ends; default: no limit",
    "(0, inf)",
    of=(SYNC,),
  )
  min_contributions: int | None = _setting(
    None,
    "Smallest number of gradients in an update; updates then do not wait for"
    " replicas that are lost or have not come yet; default: all gradients",
    fields.COUNT,
    of=(SYNC,),
  )
  scale_rate: bool = _setting(
    False,
    "Multiply the learning rate by (number of gradients /"
    " --replicas_to_aggregate) in updates that have fewer",
    of=(SYNC,),
  )
  use_locking: bool = _setting(
    False, "Updates of one variable exclude each other", of=_ASYNCHRONOUS
  )
  snapshot_reads: bool = _setting(
    False, "Replicas read all variables at one version", of=_ASYNCHRONOUS
  )
  max_staleness: int | None = _setting(
    None,
    "Largest staleness, in steps or (drop_stale) updates",
    "[0, inf)",
    of=("bounded_staleness", "drop_stale"),
    is_needed=True,
  )
  softsync_n: int | None = _setting(
    None,
    "n of n-softsync: an update is made of (replicas / n) gradients",
    fields.COUNT,
    of=("softsync",),
    is_needed=True,
  )
  delay_compensation: float | None = _setting(
    None,
    "The factor lambda of delay compensation",
    "[0, inf)",
    of=("delay_compensated",),
    is_needed=True,
  )
  period: int | None = _setting(
    None,
    "Local steps between two exchanges; default: the rule's",
    fields.COUNT,
    of=_PERIODIC,
  )
  moving_rate: float | None = _setting(
    None,
    "Share of the distance that a local copy and the center move toward each"
    " other in an exchange; default: 0.9 / period / replicas",
    "(0, 1]",
    of=("elastic_average",),
  )
  rho: float | None = _setting(
    None,
    "Pull to the center in local steps; default: moving_rate / learning rate",
    "[0, inf)",
    of=("elastic_average",),
  )
  then_update: tuple[str, ...] = _setting(
    (), f"The rule that replaces --update: {', '.join(_SWITCHABLE)}"
  )
  switch_at_step: int | None = _setting(
    None, "Switch to --then_update at this global step", fields.COUNT
  )
  switch_when_refused: float | None = _setting(
    None,
    "Or once more than this share of some replica's gradients is refused",
    "[0, 1)",
  )
  switch_when_slow: float | None = _setting(
    None,
    "Or once updates wait for one replica for more than this share of the time",
    "[0, 1)",
  )
  refresh_every: int = _setting(
    1,
    "Gradients that a replica computes from one read of the variables",
    fields.COUNT,
    of=_ASYNCHRONOUS,
  )
  wire_dtype: str | None = _setting(
    None,
    "Dtype of parameters and gradients on the wire; default: float32",
    of=(SYNC, *_ASYNCHRONOUS),
    choices=("float16", "bfloat16"),
  )
  clip_norm: float | None = _setting(
    None,
    "Largest global norm of the mean gradient of an update, which is scaled"
    " down to it; default: any",
    "(0, inf)",
    of=(SYNC, *_ASYNCHRONOUS),
    group=GRADIENTS,
  )
  clip_replica_norm: float | None = _setting(
    None,
    "The same for each replica's gradient, before the mean is taken",
    "(0, inf)",
    group=GRADIENTS,
  )
  momentum_correction: bool = _setting(
    False,
    "Multiply velocities by (new rate / old rate) when the learning rate"
    " changes",
    of=(SYNC, *_ASYNCHRONOUS),
    group=GRADIENTS,
  )

  def __post_init__(self) -> None:
    number = self.replicas_to_aggregate
    if isinstance(number, str) and number.isdecimal():  # Of a flag.
      object.__setattr__(self, "replicas_to_aggregate", int(number))
    names = self.then_update
    names = (names,) if isinstance(names, str) else tuple(names)
    object.__setattr__(self, "then_update", names)

  def __str__(self) -> str:
    rules = [self.rules, self.then_update]
    return ", then ".join(",".join(names) for names in rules if names)

  @property
  def all_rules(self) -> tuple[str, ...]:
    """The names of the chosen rules, before and after a switch if any."""
    return self.rules + self.then_update

  @property
  def waits_for_several(self) -> bool:
    """Whether an update waits for contributions of several replicas.

    A contribution is what one replica sends for one update, such as a gradient.
    If training switches rules, this is about the first rule.
    """
    return any(RULES[name].waits_for_several for name in self.rules)

  @property
  def is_periodic(self) -> bool:
    """Whether each replica trains its own copy of the variables.

    A replica exchanges its copy with the shared variables only after several
    steps. If training switches rules, this is about the first rule.
    """
    return any(RULES[name].period for name in self.rules)

  @property
  def local_steps(self) -> int:
    """Number of batches that a replica trains on for one contribution.

    A contribution is what one replica sends for one update: a gradient of one
    batch, or the result of several steps on the replica's own copy of the
    variables.
    """
    return self.period or RULES[self.rules[0]].period or 1


def replicas_to_aggregate(settings: UpdateSettings, num_replicas: int) -> int:
  """Computes the number of contributions in one update.

  A contribution is what one replica sends for one update, such as a gradient.

  Args:
    settings: The update rule and its settings. If training switches rules, the
      first rule counts.
    num_replicas: Number of replicas.

  Returns:
    The number of contributions; for synchronous updates with
    `min_contributions`, the largest one.

  Raises:
    cluster.ClusterError: If the setting `replicas_to_aggregate` is not a valid
      number or share of `num_replicas`.
  """
  if not settings.waits_for_several:
    return num_replicas // (settings.softsync_n or num_replicas)
  value = settings.replicas_to_aggregate
  if value is None:
    return num_replicas
  try:
    return quorum.parse(value, num_replicas).most
  except ValueError as error:
    message = f"`--replicas_to_aggregate` {error}"
    raise cluster.ClusterError(message) from None


def needs_parameter_servers(settings: UpdateSettings) -> bool:
  """Returns whether a setting has a value that only parameter servers support.

  Every setting with another value than its default is such a setting, except
  `replicas_to_aggregate` and the settings about gradients, such as clipping.

  Args:
    settings: The settings.
  """
  return any(
    getattr(settings, field.name) != field.default
    for field in dataclasses.fields(settings)
    if field.metadata["group"] != GRADIENTS
    and field.name != "replicas_to_aggregate"
  )


def phases(settings: UpdateSettings) -> list[UpdateSettings]:
  """Splits the settings of a training at the switch between two update rules.

  Args:
    settings: The settings of the training.

  Returns:
    Two settings, for the updates before and after the switch; one if there is
    no switch.
  """
  return [
    dataclasses.replace(settings, rules=rules, then_update=())
    for rules in (settings.rules, settings.then_update)
    if rules
  ]


def expected_staleness(settings: UpdateSettings, num_replicas: int) -> float:
  """Estimates the staleness of gradients, with equally fast replicas.

  The staleness of a gradient is the number of updates between reading the
  variables that it is computed from and applying it. M replicas that do not
  wait for each other have a staleness of M - 1 (Lian et al. 2015). Options of
  asynchronous updates change this number:

  * n-softsync, where an update applies the mean of M / n gradients: at most n
    (Zhang et al. 2015, section 3).
  * `refresh_every`, by which a replica reads the variables only every K steps:
    adds M * (K - 1) / 2 on average.
  * `drop_stale`, which drops gradients staler than `max_staleness`: at most
    `max_staleness`.
  * Bounded staleness, where fast replicas wait for slow ones: no change, as the
    replicas are equally fast.

  Args:
    settings: The update rule and its settings. If training switches rules, the
      first rule counts.
    num_replicas: Number M of replicas.

  Returns:
    The staleness in updates; 0 for synchronous updates, and for rules that
    average copies of the variables.
  """
  rules = [RULES[name] for name in settings.rules]
  is_async = any(rule.make is _async for rule in rules)
  if not is_async and settings.rules != ("accumulated_gradients",):
    return 0.0
  staleness = float(num_replicas - 1)
  if "softsync" in settings.rules and settings.softsync_n:
    staleness = min(staleness, settings.softsync_n)
  staleness += num_replicas * (settings.refresh_every - 1) / 2
  if "drop_stale" in settings.rules and settings.max_staleness is not None:
    staleness = min(staleness, settings.max_staleness)
  return staleness


def check(settings: UpdateSettings, num_replicas: int) -> None:
  """Checks that the settings are valid, each and together.

  Args:
    settings: The settings.
    num_replicas: Number of replicas.

  Raises:
    cluster.ClusterError: If they are not valid. The message gives the reason.
  """
  _check_rules("update", settings.rules)
  fields.validate(settings, cluster.ClusterError)
  _check_switch(settings, num_replicas)
  for field in dataclasses.fields(settings):
    _check_used(settings, field)
  most = replicas_to_aggregate(settings, num_replicas)
  # Otherwise a replica brings several gradients of the same variables.
  if most > num_replicas and settings.all_rules != (SYNC,):
    raise cluster.ClusterError(
      "`--replicas_to_aggregate` must be at most the number of replicas,"
      f" {num_replicas}, for --update={settings}. Received: {most}."
    )
  least = settings.min_contributions
  if least is not None and least > most:
    raise cluster.ClusterError(
      "`--min_contributions` must be at most the number of gradients in an"
      f" update, {most}. Received: {least}."
    )
  can_shrink = least is not None and least < most
  if settings.scale_rate and not can_shrink:
    raise cluster.ClusterError(
      "`--scale_rate` needs `--min_contributions` below the number of gradients"
      f" in an update, {most}. Received: {least}."
    )
  has_deadline = settings.step_timeout_secs is not None
  if has_deadline and can_shrink and most > num_replicas:
    raise cluster.ClusterError(
      "`--step_timeout_secs` with `--min_contributions` needs"
      " `--replicas_to_aggregate` of at most the number of replicas,"
      f" {num_replicas}. Received: {most}."
    )
  if num_replicas % (settings.softsync_n or 1):
    raise cluster.ClusterError(
      f"`--softsync_n` must divide the number of replicas, {num_replicas}."
      f" Received: {settings.softsync_n}."
    )


def check_joining(
  settings: UpdateSettings, num_listed: int, num_replicas: int
) -> None:
  """Checks that updates can be made even if no further worker ever joins.

  Args:
    settings: The settings.
    num_listed: Number of replicas that the cluster spec lists.
    num_replicas: Number of replicas if all workers join that may join.

  Raises:
    cluster.ClusterError: If an update waits for more than `num_listed`
      contributions.
  """
  needed = replicas_to_aggregate(settings, num_replicas)
  if settings.min_contributions is not None:
    needed = settings.min_contributions
  if needed > num_listed and settings.waits_for_several:
    raise cluster.ClusterError(
      f"with `--max_workers`, an update may wait for at most {num_listed}"
      " gradients, one of each replica of the cluster spec, since other workers"
      " may never join: set `--min_contributions` (of sync), or"
      f" `--replicas_to_aggregate`. Received: updates of {needed}."
    )


def _check_rules(flag: str, names: tuple[str, ...]) -> None:
  is_one = len(names) == 1 and names[0] in RULES
  if not is_one and (not names or not set(names) <= set(_COMBINABLE)):
    raise cluster.ClusterError(
      f"`--{flag}` must be one of {', '.join(RULES)}, or several of"
      f" {', '.join(_COMBINABLE)}. Received: {','.join(map(str, names))!r}."
    )


def _check_used(settings: UpdateSettings, field: dataclasses.Field) -> None:
  """Checks whether one setting is needed or allowed by the update rules.

  Args:
    settings: All settings.
    field: The field of `UpdateSettings` to check.

  Raises:
    cluster.ClusterError: If a rule of the training needs the setting and it is
      None; or if the setting has another value than its default, but none of
      the training's rules uses it.
  """
  rules = field.metadata["of"]
  if rules is None:
    return
  value, name = getattr(settings, field.name), fields.flag_name(field)
  users = [rule for rule in rules if rule in settings.all_rules]
  if users and value is None and field.metadata["is_needed"]:
    raise cluster.ClusterError(
      f"`--update={users[0]}` needs `--{name}`. Received: none."
    )
  if not users and value != field.default:
    raise cluster.ClusterError(
      f"`--{name}` is for `--update={'` or `'.join(rules)}`. Received:"
      f" --update={settings}."
    )


def _check_switch(settings: UpdateSettings, num_replicas: int) -> None:
  """Checks the settings of a switch from one update rule to another.

  Raises:
    cluster.ClusterError: If there is a switch without exactly one condition, a
      condition without a switch, or a switch between rules or with settings
      that do not support it.
  """
  conditions = ("switch_at_step", "switch_when_refused", "switch_when_slow")
  values = {name: getattr(settings, name) for name in conditions}
  given = [f"--{k}={v}" for k, v in values.items() if v is not None]
  if len(given) != bool(settings.then_update):
    raise cluster.ClusterError(
      f"`--then_update` needs one of `--{'`, `--'.join(conditions)}`, and only"
      " one; without `--then_update` none of them may be given. Received:"
      f" --then_update={','.join(settings.then_update)},"
      f" {' '.join(given) or 'none of these'}."
    )
  if not settings.then_update:
    return
  for name in ("step_timeout_secs", "min_contributions", "scale_rate"):
    if value := getattr(settings, name):
      raise cluster.ClusterError(
        f"`--{name}` must not be given with `--then_update`. Received: {value}."
      )
  _check_rules("then_update", settings.then_update)
  if not set(settings.all_rules) <= set(_SWITCHABLE):
    raise cluster.ClusterError(
      "`--update` and `--then_update` may name only these rules if both are"
      f" given: {', '.join(_SWITCHABLE)}. Received: --update="
      f"{','.join(settings.rules)}, --then_update="
      f"{','.join(settings.then_update)}."
    )
  if (settings.rules == (SYNC,)) == (settings.then_update == (SYNC,)):
    raise cluster.ClusterError(
      "`--then_update` must go from sync to asynchronous rules or back."
      f" Received: {settings}."
    )
  if settings.refresh_every > 1:
    raise cluster.ClusterError(
      "`--then_update` needs `--refresh_every=1`. Received:"
      f" {settings.refresh_every}."
    )
  _check_switch_condition(settings, num_replicas)


def _check_switch_condition(
  settings: UpdateSettings, num_replicas: int
) -> None:
  """Checks that the condition for the switch to another rule can occur.

  For example, a rule that refuses no gradients never reaches the share of
  refused gradients at which to switch.

  Raises:
    cluster.ClusterError: If the condition cannot occur.
  """
  is_sync = settings.rules == (SYNC,)
  has_backups = is_sync and (
    replicas_to_aggregate(settings, num_replicas) < num_replicas
  )
  what = f"--update={','.join(settings.rules)}"
  what += f" {'with' if has_backups else 'without'} backups"
  if settings.switch_when_slow is not None and (not is_sync or has_backups):
    raise cluster.ClusterError(
      "`--switch_when_slow` needs `--update=sync` without backups, which waits"
      f" for every replica. Received: {what}."
    )
  can_refuse = has_backups or "drop_stale" in settings.rules
  if settings.switch_when_refused is not None and not can_refuse:
    raise cluster.ClusterError(
      "`--switch_when_refused` needs `--update=drop_stale`, or sync with"
      " `--replicas_to_aggregate` below the number of replicas: other rules"
      f" refuse nothing. Received: {what}."
    )


def rule_fn(settings: UpdateSettings, num_replicas: int) -> RuleFn:
  """Returns a function that makes the update rule that some settings describe.

  Args:
    settings: Settings that `check` accepts.
    num_replicas: Number of replicas.

  Returns:
    A function of a Keras optimizer and of keyword arguments for the update
    rule, such as `variable_averages`. It returns the update rule. If training
    switches between two rules, this is a `SwitchingOptimizer` that contains
    both.
  """
  if not settings.then_update:
    rule = RULES[settings.rules[0]]
    return functools.partial(rule.make, settings, num_replicas)

  from tf_replicas.rules import switch_conditions
  from tf_replicas.rules import switching

  new_rules = [rule_fn(phase, num_replicas) for phase in phases(settings)]
  if settings.switch_at_step is not None:
    choose = switch_conditions.at_step(settings.switch_at_step)
  elif settings.switch_when_refused is not None:
    choose = switch_conditions.when_refused(settings.switch_when_refused)
  else:
    choose = switch_conditions.when_slow(settings.switch_when_slow)

  def make(optimizer, **common):
    rules = [new_rule(optimizer, **common) for new_rule in new_rules]
    return switching.SwitchingOptimizer(rules, choose)

  return make
