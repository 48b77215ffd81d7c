"""Tests of `cifar10.config`."""

import dataclasses
import math
import re

import pytest
import tensorflow as tf

from cifar10 import config
from cifar10 import workload
from tf_replicas.programs import run_options


def test_defaults_are_the_tutorials():
  tutorial = config.from_recipe("tutorial")
  assert tutorial == config.Config()
  assert tutorial.batch_size == 128
  assert tutorial.momentum == 0.0
  assert len(config.LABELS) == config.NUM_CLASSES


def test_settings_win_over_the_recipe():
  settings = config.from_recipe("tutorial", learning_rate=0.5, momentum=0.9)
  assert settings.learning_rate == 0.5
  assert settings.momentum == 0.9


@pytest.mark.parametrize(
  "field, value",
  [
    ("batch_size", 0),
    ("max_steps", 0),
    ("recipe", "secret"),
    ("learning_rate", 0.0),
    ("num_epochs", math.inf),
    ("num_epochs", 1e305),
    ("num_epochs_per_decay", math.inf),
    ("weight_decay", math.inf),
    ("num_epochs_per_decay", -1.0),
    ("momentum", 1.0),
    ("moving_average_decay", 1.5),
    ("weight_decay", -0.1),
    ("decoupled_weight_decay", -0.1),
    ("decoupled_weight_decay", 0.1),  # Of Muon alone.
    ("dataset", ""),
    ("compute_dtype", "float64"),
    ("optimizer", "adagrad"),
    ("schedule", "cosine"),
    ("label_smoothing", 1.0),
    ("centered_share", 1.25),
    ("crop_size", 33.0),
    ("min_crop_size", 0.5),
    ("max_crop_size", 23.5),  # Less than the smallest.
    ("learning_rate_scale", 0.0),
    ("num_epochs", -2.0),
    ("warmup_epochs", 256.0),
    ("warmup_epochs", 255.999999),  # 256, to an example.
    ("seed", 2**63),
    ("seed", -1),
  ],
)
def test_refuses_settings_out_of_range(field, value):
  received = re.escape(repr(value))
  with pytest.raises(ValueError, match=rf"`{field}` must be .*{received}\.$"):
    dataclasses.replace(config.Config(), **{field: value})


@pytest.mark.parametrize(
  "examples_seen, expected",
  [
    (0, 0.1),
    (100_000 * 128, 0.1),  # The tutorial's whole run.
    (350 * 50_000 - 1, 0.1),
    (350 * 50_000, 0.01),
    (700 * 50_000, 0.001),
  ],
)
def test_learning_rate_falls_every_350_epochs(examples_seen, expected):
  settings = config.Config()
  assert config.learning_rate(settings, examples_seen) == pytest.approx(
    expected
  )
  rate = config.learning_rate(settings, tf.constant(examples_seen, tf.int64))
  assert float(rate) == pytest.approx(expected)


def test_learning_rate_follows_the_size_of_the_training_set():
  settings = config.Config(num_epochs_per_decay=2.0)
  rates = [
    config.learning_rate(settings, n, num_examples_per_epoch=10)
    for n in (19, 20)
  ]
  assert rates == pytest.approx([0.1, 0.01])


@pytest.mark.parametrize(
  "epochs, expected",
  [(0, 0.0), (3, 0.001), (6, 0.002), (23, 0.001), (40, 0.0), (41, 0.0)],
)
def test_one_cycle_rises_and_falls(epochs, expected):
  settings = config.from_recipe(
    "modern", learning_rate=0.002, num_epochs=40.0, warmup_epochs=6.0
  )
  examples_seen = epochs * 50_000
  assert config.learning_rate(settings, examples_seen) == pytest.approx(
    expected
  )
  rate = config.learning_rate(settings, tf.constant(examples_seen, tf.int64))
  assert float(rate) == pytest.approx(expected)


@pytest.mark.parametrize("beyond", [0, 1, 7, 12_345, 10**9])
def test_one_cycle_ends_at_nothing_exactly(beyond):
  """So that a run which goes on from there can be told from others."""
  settings = config.from_recipe("modern", num_epochs=5.0, warmup_epochs=0.5)
  assert config.learning_rate(settings, 250_000 + beyond) == 0.0


@pytest.mark.parametrize(
  "epochs, expected", [(0, 0.1), (2.5, 0.25), (5, 0.4), (350, 0.04)]
)
def test_a_scaled_rate_is_warmed_up(epochs, expected):
  settings = config.Config(learning_rate_scale=4.0, warmup_epochs=5.0)
  rate = config.learning_rate(settings, int(epochs * 50_000))
  assert rate == pytest.approx(expected)


def fit(recipe, batch=128, **settings):
  """`config.fit`, with less to write."""
  return config.fit(recipe, settings, effective_batch=batch)


@pytest.mark.parametrize(
  "num_gpus, steps", [(1, 100_000), (2, 50_000), (3, 33_334)]
)
def test_the_tutorials_run_has_100_000_steps(num_gpus, steps):
  made = workload.make(fit("tutorial", dataset="synthetic"))
  spec = run_options.one_machine_spec(num_gpus)
  assert made.last_step(run_options.Options(spec, "run")) == steps


def test_a_number_of_steps_wins():
  settings = fit("tutorial", max_steps=7, dataset="synthetic")
  assert settings.num_epochs == 256
  options = run_options.Options(run_options.one_machine_spec(0), "run")
  assert workload.make(settings).last_step(options, step=3, seen=5) == 7


def test_one_cycle_is_as_long_as_the_run():
  settings = fit("modern", 250, max_steps=2000)
  assert settings.num_epochs == 10.0
  assert settings.warmup_epochs == pytest.approx(1.0)
  assert config.learning_rate(settings, 500_000) == 0.0
  assert fit("modern", num_epochs=20.0).warmup_epochs == pytest.approx(2.0)
  assert fit("modern", num_epochs=20.0, warmup_epochs=1.0).warmup_epochs == 1.0


def test_late_crops_begin_with_the_last_part_of_the_run():
  assert config.centered_from(fit("tutorial")) is None
  settings = fit("modern", num_epochs=20.0)
  settings = dataclasses.replace(settings, centered_share=0.25)
  assert config.centered_from(settings) == 15 * 50_000
  settings = fit("modern", 250, max_steps=2000, centered_share=0.2)
  assert config.centered_from(settings) == 8 * 50_000


@pytest.mark.parametrize(
  "settings, warmup_epochs",
  [
    ({"learning_rate_scale": 1.0}, 0.0),
    ({"learning_rate_scale": 4.0}, 5.0),
    ({"learning_rate_scale": 4.0, "num_epochs": 8.0}, 1.0),
    ({"learning_rate_scale": 4.0, "warmup_epochs": 0.0}, 0.0),
    # A run of half an epoch, or of 25: an eighth of it, and no more than 5.
    ({"learning_rate_scale": 2.0, "batch": 250, "max_steps": 100}, 0.0625),
    ({"learning_rate_scale": 2.0, "batch": 250, "max_steps": 5000}, 3.125),
    ({"learning_rate_scale": 2.0, "batch": 250, "max_steps": 50_000}, 5.0),
  ],
)
def test_only_a_scaled_rate_of_the_tutorial_is_warmed_up(
  settings, warmup_epochs
):
  assert fit("tutorial", **settings).warmup_epochs == warmup_epochs


def test_the_tutorials_crops_are_not_resized():
  assert config.crop_sizes(config.Config()) is None
  settings = dataclasses.replace(config.Config(), crop_size=28.0)
  assert config.crop_sizes(settings) == (28, 24, 24)
