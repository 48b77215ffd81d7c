"""Tests of `experiments.default_rates`; it trains for too long to run here."""

import pytest

from experiments import default_rates
from tf_replicas.programs import update_options


def test_has_every_rule():
  named = {r.settings.get("update") for r in default_rates.rules(4)}
  assert named == {None, *update_options.RULES} - {update_options.SYNC}


@pytest.mark.parametrize("workers", [2, 4])
def test_settings_fit_the_rule(workers):
  for rule in default_rates.rules(workers):
    given = {k: v for k, v in rule.settings.items() if k != "update"}
    names = (rule.settings.get("update", "sync"),)
    settings = update_options.UpdateSettings(names, **given)
    update_options.check(settings, workers)


def test_examples_of_an_update():
  sizes = {
    rule.name: default_rates.examples_of_update(rule, 4, 8)
    for rule in default_rates.rules(4)
  }
  assert sizes["sync"] == 32
  assert sizes["sync_backup"] == 24
  assert sizes["async"] == 8
  assert sizes["softsync"] == 16
  assert sizes["model_average"] == 320
  assert sizes["elastic_average"] == 80


def test_the_table_has_the_spread_and_the_failures():
  run = {
    "rule": "async",
    "workers": 2,
    "batch_size": 32,
    "steps": 300,
    "updates": 600,
    "examples": 19200,
    "learning_rate": 0.0125,
    "staleness": 1.0,
    "loss_max": 4.5,
    "error": None,
  }
  runs = [
    {**run, "seed": 0, "precision": 0.75},
    {**run, "seed": 1, "precision": 0.5},
    {**run, "seed": 2, "precision": None, "error": "error: diverged"},
  ]
  line = default_rates.table(runs).splitlines()[-1]
  assert line == (
    "| 2 | 32 | async | 0.0125 | 600 | 19200 | 0, 1, 2 | 0.500, 0.750, 0.750 |"
    " 4.50 | 1 of 3 |"
  )
