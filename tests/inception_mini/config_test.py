"""Tests of `inception_mini.config`."""

import dataclasses
import re
import subprocess
import sys

import pytest
import tensorflow as tf

from inception_mini import config


def test_defaults_are_the_originals():
  original = config.from_recipe("original")
  assert original == config.Config()
  assert original.image_size == 299
  assert (original.width, original.depth) == (1.0, 1.0)
  assert original.rmsprop_decay == original.rmsprop_momentum == 0.9
  assert original.rmsprop_epsilon == 1.0
  assert original.auxiliary_weight == 0.4
  assert original.weight_decay == 0.00004


def test_settings_win_over_the_recipe():
  settings = config.from_recipe("mini", width=0.5)
  assert settings.width == 0.5
  assert settings.image_size == 32


@pytest.mark.parametrize("recipe", sorted(config.RECIPES))
def test_every_recipe_is_valid(recipe):
  assert config.from_recipe(recipe).recipe == recipe


@pytest.mark.parametrize(
  "field, value",
  [
    ("dataset", ""),
    ("train_dir", ""),
    ("image_size", 31),
    ("image_size", 300),
    ("num_classes", 1),
    ("width", 0.0),
    ("depth", -1.0),
    ("dropout", 1.0),
    ("batch_size", 0),
    ("max_steps", 0),
    ("seed", -1),
    ("recipe", "secret"),
    ("learning_rate", 0.0),
    ("learning_rate_decay_factor", 0.0),
    ("num_epochs_per_decay", -1.0),
    ("num_epochs_per_decay", 1e305),
    ("warmup_epochs", -1.0),
    ("warmup_epochs", float("inf")),
    ("rmsprop_decay", 1.0),
    ("rmsprop_momentum", -0.1),
    ("rmsprop_epsilon", 0.0),
    ("moving_average_decay", 1.5),
    ("batch_norm_decay", 1.0),
    ("weight_decay", -0.1),
    ("label_smoothing", 1.0),
    ("auxiliary_weight", -0.4),
    ("min_crop_area", 0.0),
    ("central_fraction", 1.1),
    ("shuffle_examples", 0),
    ("compute_dtype", "int8"),
    ("learning_rate", float("nan")),
  ],
)
def test_refuses_settings_out_of_range(field, value):
  received = re.escape(repr(value))
  with pytest.raises(ValueError, match=rf"`{field}` must be .*{received}\.$"):
    dataclasses.replace(config.Config(), **{field: value})


@pytest.mark.parametrize(
  "examples_seen, num_decays",
  [(0, 0), (199, 0), (200, 1), (399, 1), (400, 2), (2_000, 10)],
)
def test_learning_rate_falls_every_two_epochs(examples_seen, num_decays):
  settings = config.Config()
  expected = pytest.approx(0.045 * 0.94**num_decays)
  for examples in (examples_seen, tf.constant(examples_seen, tf.int64)):
    rate = config.learning_rate(settings, examples, num_examples_per_epoch=100)
    assert float(rate) == expected


@pytest.mark.parametrize(
  "examples_seen, share", [(0, 0.0), (25, 0.5), (49, 0.98), (50, 1.0), (99, 1)]
)
def test_learning_rate_is_warmed_up(examples_seen, share):
  settings = config.Config(learning_rate=0.4, warmup_epochs=0.5)
  for examples in (examples_seen, tf.constant(examples_seen, tf.int64)):
    rate = config.learning_rate(settings, examples, num_examples_per_epoch=100)
    assert float(rate) == pytest.approx(0.4 * share)


def test_imports_no_tensorflow():
  program = "import sys, inception_mini.config; print('keras' in sys.modules)"
  program += "; print('tensorflow' in sys.modules)"
  result = subprocess.run(
    [sys.executable, "-c", program], capture_output=True, text=True, check=True
  )
  assert result.stdout.split() == ["False", "False"]
