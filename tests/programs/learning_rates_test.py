"""Tests of `programs.learning_rates`."""

import pytest

from cifar10 import config
from tf_replicas import cluster
from tf_replicas.programs import learning_rates
from tf_replicas.programs import run_options
from tf_replicas.programs import update_options


def options(num_workers, *rules, **settings):
  """A cluster of these workers with a parameter server."""
  workers = [f"h{i}:1" for i in range(num_workers)]
  document = {"cluster": {"ps": ["p:1"], "worker": workers}}
  update = update_options.UpdateSettings(rules or ("sync",), **settings)
  return run_options.Options(cluster.parse(document), "run", update=update)


def default(how, batch_size):
  return learning_rates.default(
    how, recipe="tutorial", rate=0.1, recipe_batch=128, batch_size=batch_size
  )


@pytest.mark.parametrize(
  "batch, staleness, is_divided, expected",
  [
    (128, 0, False, 0.1),
    (1280, 0, False, 0.1),
    (32, 0, False, 0.025),
    (128, 1, False, 0.05),
    (32, 3, False, 0.00625),
    (128, 1, True, 0.05),  # The rule divides from a staleness of 2 on.
    (128, 3, True, 0.075),
    (128, 0, True, 0.1),
  ],
)
def test_rate_follows_batch_and_staleness(
  batch, staleness, is_divided, expected
):
  rate = learning_rates.scaled(
    0.1,
    batch=batch,
    recipe_batch=128,
    staleness=staleness,
    is_divided=is_divided,
  )
  assert rate == pytest.approx(expected)


def test_without_a_batch_of_the_recipe_only_staleness_counts():
  rate = learning_rates.scaled(0.1, batch=1, recipe_batch=None, staleness=1)
  assert rate == pytest.approx(0.05)


@pytest.mark.parametrize("num_gpus, batch_size", [(0, 128), (4, 32), (2, 128)])
def test_the_tutorials_rate_is_exact_from_its_batch_on(num_gpus, batch_size):
  how = run_options.Options(run_options.one_machine_spec(num_gpus), "run")
  assert default(how, batch_size).rate == 0.1


@pytest.mark.parametrize(
  "how, batch_size, expected",
  [
    (options(2), 64, 0.1),
    (options(4), 32, 0.1),
    (options(4, replicas_to_aggregate=3), 32, 0.075),
    (options(4, replicas_to_aggregate=8), 16, 0.1),
    (options(2, "async"), 32, 0.0125),
    (options(4, "async"), 32, 0.00625),
    (options(4, "async", refresh_every=3), 128, 0.1 / 8),
    (options(4, "bounded_staleness", max_staleness=0), 128, 0.025),
    (options(4, "drop_stale", max_staleness=1), 128, 0.05),
    (options(2, "staleness_aware"), 32, 0.0125),
    (options(4, "staleness_aware"), 128, 0.075),
    (options(4, "softsync", softsync_n=2), 64, 0.1 / 3),
    (options(4, "model_average"), 32, 0.025),
    (options(4, "elastic_average"), 128, 0.1),
    # The walk of a replica, or the mean of its 10 gradients, 3 updates old.
    (options(4, "accumulated_gradients"), 32, 0.025),
    (options(4, "accumulated_gradients", period=1), 128, 0.025),
    (options(2, then_update=("async",), switch_at_step=9), 128, 0.05),
  ],
)
def test_rate_follows_the_rule(how, batch_size, expected):
  assert default(how, batch_size).rate == pytest.approx(expected)


def test_a_rate_that_will_be_scaled_is_that_of_one_batch():
  found = learning_rates.default(
    options(4),
    recipe="tutorial",
    rate=0.1,
    recipe_batch=128,
    batch_size=32,
    is_scaled_later=True,
  )
  assert found.rate == pytest.approx(0.025)


def test_muons_rate_follows_the_staleness_alone():
  how = options(2, "async")
  for dataset in ("cifar10", "synthetic"):
    found = config.default_rate("modern", how, batch_size=8, dataset=dataset)
    assert found.rate == 0.01


@pytest.mark.parametrize(
  "workers, batch_size, expected",
  [(2, 32, 0.05), (4, 32, 0.05), (2, 16, 0.025)],
)
def test_the_synthetic_data_set_has_a_lower_rate(workers, batch_size, expected):
  found = config.default_rate(
    "tutorial", options(workers), batch_size=batch_size, dataset="synthetic"
  )
  assert found.rate == pytest.approx(expected)


def test_the_line_says_why():
  found = default(options(2, "async"), 32)
  assert learning_rates.describe(found, found.rate) == (
    "learning rate 0.0125 (async updates of 32 examples, expected staleness 1;"
    " tutorial has 0.1 for 128 examples and fresh gradients)"
  )
  line = learning_rates.describe(found, 0.3)
  assert line.startswith("learning rate 0.3, as given; the default is 0.0125 (")


def test_advice_names_a_lower_rate():
  def advice(how, rate, *others):
    found = default(how, 32)
    return learning_rates.advice(found, rate, how.update, *others)

  assert advice(options(2, "async"), 0.3) == (
    "try --learning_rate=0.0125 (0.3 was used), or --clip_norm=1, or"
    " --update=sync"
  )
  assert advice(options(4, clip_norm=2.0), 0.1, "a longer --warmup_epochs") == (
    "try --learning_rate=0.0333 (0.1 was used), or a longer --warmup_epochs"
  )
  line = advice(options(2, "elastic_average"), 0.1)
  assert line.endswith(", or --clip_replica_norm=1")
