"""Tests of `programs.update_options`; see `run_options_test` for its checks."""

import contextlib
import dataclasses
import re

import keras
import pytest

from tf_replicas import cluster
from tf_replicas.programs import update_options
from tf_replicas.rules.asynchronous import async_replicas
from tf_replicas.rules.periodic import periodic_optimizer
from tf_replicas.rules.sync import sync_replicas

# What the rules need besides their names.
NEEDED = {
  "bounded_staleness": {"max_staleness": 2},
  "drop_stale": {"max_staleness": 2},
  "delay_compensated": {"delay_compensation": 0.1},
  "softsync": {"softsync_n": 2},
}
FIELDS = dataclasses.fields(update_options.UpdateSettings)


def make(*rules, num_replicas=4, **given):
  """The rule of these settings, which `check` accepts."""
  for name in rules:
    given |= NEEDED.get(name, {})
  settings = update_options.UpdateSettings(rules, **given)
  update_options.check(settings, num_replicas)
  new_rule = update_options.rule_fn(settings, num_replicas)
  return new_rule(keras.optimizers.SGD(0.1))


@pytest.mark.parametrize("name", update_options.RULES)
def test_every_rule_is_made(name):
  made = make(name)
  expected = async_replicas.AsyncReplicasOptimizer
  if name == "sync":
    expected = sync_replicas.SyncReplicasOptimizer
  elif update_options.RULES[name].period:
    expected = periodic_optimizer.PeriodicOptimizer
  assert isinstance(made, expected)
  assert made.total_num_replicas == 4


@pytest.mark.parametrize("name", ["sync", "model_average"])
def test_an_update_waits_for_this_many(name):
  assert make(name).replicas_to_aggregate == 4
  assert make(name, replicas_to_aggregate=3).replicas_to_aggregate == 3


@pytest.mark.parametrize(
  "rules, given, expected",
  [
    (["sync"], {}, 4),
    (["sync"], {"replicas_to_aggregate": 3}, 3),
    (["async"], {}, 1),
    (["softsync", "drop_stale"], {"softsync_n": 2, "max_staleness": 1}, 2),
    (["accumulated_gradients"], {}, 1),
  ],
)
def test_contributions_in_an_update(rules, given, expected):
  settings = update_options.UpdateSettings(tuple(rules), **given)
  assert update_options.replicas_to_aggregate(settings, 4) == expected


@pytest.mark.parametrize(
  "rules, given, expected",
  [
    (["sync"], {}, 0),
    (["sync"], {"replicas_to_aggregate": 3}, 0),
    (["async"], {}, 3),
    (["async"], {"refresh_every": 5}, 11),  # (3 + 7 + 11 + 15 + 19) / 5.
    (["bounded_staleness"], {"max_staleness": 1}, 3),
    (["drop_stale", "staleness_aware"], {"max_staleness": 2}, 2),
    (["softsync"], {"softsync_n": 1}, 1),
    (["softsync"], {"softsync_n": 4}, 3),
    (["model_average"], {}, 0),
    (["elastic_average"], {}, 0),
    (["accumulated_gradients"], {}, 3),
  ],
)
def test_expected_staleness(rules, given, expected):
  settings = update_options.UpdateSettings(tuple(rules), **given)
  assert update_options.expected_staleness(settings, 4) == expected
  if rules == ["async"] and not given:
    assert update_options.expected_staleness(settings, 1) == 0


def test_what_is_not_of_gradients_needs_parameter_servers():
  settings = update_options.UpdateSettings(clip_norm=1.0)
  assert not update_options.needs_parameter_servers(settings)
  settings = dataclasses.replace(settings, wire_dtype="bfloat16")
  assert update_options.needs_parameter_servers(settings)


@pytest.mark.parametrize(
  "given, words",
  [
    (
      {
        "min_contributions": 2,
        "then_update": ("async",),
        "switch_at_step": 5,
      },
      "`--min_contributions` must not be given with `--then_update`",
    ),
    (
      {"min_contributions": 5, "step_timeout_secs": 9.0},
      "`--min_contributions` must be at most the number of gradients in an"
      " update, 4. Received: 5.",
    ),
    (
      {
        "min_contributions": 3,
        "step_timeout_secs": 9.0,
        "replicas_to_aggregate": 2,
      },
      "in an update, 2. Received: 3.",
    ),
    (
      {
        "step_timeout_secs": 9.0,
        "then_update": ("async",),
        "switch_at_step": 5,
      },
      "`--step_timeout_secs` must not be given with `--then_update`",
    ),
  ],
)
def test_refuses_deadlines(given, words):
  settings = update_options.UpdateSettings(**given)
  with pytest.raises(cluster.ClusterError, match=re.escape(words)):
    update_options.check(settings, 4)


def test_a_deadline_reaches_the_rule():
  settings = update_options.UpdateSettings(
    step_timeout_secs=9.0, min_contributions=3
  )
  update_options.check(settings, 4)
  rule = update_options.rule_fn(settings, 4)(keras.optimizers.SGD(0.1))
  assert (rule.step_timeout_secs, rule.min_contributions) == (9.0, 3)
  assert update_options.needs_parameter_servers(settings)


def test_norms_are_limited_once():
  settings = update_options.UpdateSettings(clip_norm=1.0)
  new_rule = update_options.rule_fn(settings, 2)
  with pytest.raises(ValueError, match=r"`clip_norm` must be absent .*0\.5"):
    new_rule(keras.optimizers.SGD(0.1), clip_mean_norm=0.5)


@pytest.mark.parametrize(
  "field", [f for f in FIELDS if f.metadata["of"]], ids=lambda f: f.name
)
def test_a_setting_is_refused_by_rules_that_ignore_it(field):
  value = field.metadata["choices"][0] if field.metadata["choices"] else 0.5
  if "int" in field.type:
    value = 2
  if field.type == "bool":
    value = True
  for name in set(update_options.RULES) - set(field.metadata["of"]):
    settings = {field.name: value, **NEEDED.get(name, {})}
    settings = update_options.UpdateSettings((name,), **settings)
    with pytest.raises(cluster.ClusterError, match=f"`--{field.name}` is for "):
      update_options.check(settings, 4)


@pytest.mark.parametrize(
  "value, expected",
  [("3", 3), (3, 3), ("all", 4), ("all-1", 3), ("90%", 4), ("50%", 2)],
)
def test_a_number_or_a_share_of_the_replicas(value, expected):
  settings = update_options.UpdateSettings(replicas_to_aggregate=value)
  update_options.check(settings, 4)
  assert update_options.replicas_to_aggregate(settings, 4) == expected


@pytest.mark.parametrize(
  "value, words",
  [
    (0, "must be a number of at least 1, `all`, `all-K` or `P%`. Received: 0."),
    (
      "most",
      "must be a number of at least 1, `all`, `all-K` or `P%`. Received",
    ),
    ("all-4", "must leave 1 to 4 of 4 replicas. Received: 'all-4'."),
    ("101%", "must leave 1 to 4 of 4 replicas. Received: '101%'."),
  ],
)
def test_refuses_numbers_and_shares(value, words):
  settings = update_options.UpdateSettings(replicas_to_aggregate=value)
  message = re.escape(f"`--replicas_to_aggregate` {words}")
  with pytest.raises(cluster.ClusterError, match=message):
    update_options.check(settings, 4)


def test_a_deadline_for_smaller_updates_needs_a_replica_for_each_gradient():
  settings = update_options.UpdateSettings(
    replicas_to_aggregate=8, min_contributions=2, step_timeout_secs=1.0
  )
  with pytest.raises(cluster.ClusterError, match="number of replicas, 4"):
    update_options.check(settings, 4)


@pytest.mark.parametrize("least", [None, 4])
def test_a_rate_that_follows_needs_smaller_updates(least):
  settings = update_options.UpdateSettings(
    scale_rate=True, min_contributions=least
  )
  words = "`--scale_rate` needs `--min_contributions` below"
  with pytest.raises(cluster.ClusterError, match=words):
    update_options.check(settings, 4)


@pytest.mark.parametrize(
  "given, words",
  [
    ({}, "may wait for at most 2 gradients, one of each replica"),
    ({"min_contributions": 3}, "Received: updates of 3."),
    ({"replicas_to_aggregate": "all-1"}, "Received: updates of 3."),
    ({"rules": ("model_average",)}, "Received: updates of 4."),
    ({"min_contributions": 2}, None),
    ({"replicas_to_aggregate": 2}, None),
    ({"rules": ("async",)}, None),
  ],
)
def test_updates_that_do_not_need_those_that_may_join(given, words):
  settings = update_options.UpdateSettings(**given)
  refused = contextlib.nullcontext()
  if words:
    refused = pytest.raises(cluster.ClusterError, match=re.escape(words))
  with refused:
    update_options.check_joining(settings, 2, 4)
