"""Tests of `inception_mini.workload`: the original's settings get there."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from inception_mini import config
from inception_mini import model
from inception_mini import workload
from tf_replicas.programs import update_options


def _rule(settings, **rules):
  rule_fn = update_options.rule_fn(update_options.UpdateSettings(**rules), 3)
  settings = dataclasses.replace(settings, dataset="synthetic")
  return workload.make(settings).optimizer_fn(rule_fn)


def test_the_originals_optimizer_and_averages():
  rule = _rule(config.Config())
  settings = rule.inner.optimizer.get_config()
  assert isinstance(rule.inner.optimizer, keras.optimizers.RMSprop)
  assert settings["learning_rate"] == pytest.approx(0.045)
  assert (settings["rho"], settings["momentum"]) == (0.9, 0.9)
  assert settings["epsilon"] == 1.0
  assert not settings["centered"]
  assert rule.variable_averages.decay == 0.9999
  assert not rule.has_chief_statistics


def test_the_chiefs_statistics():
  settings = config.Config(batch_norm_statistics=config.CHIEF)
  assert _rule(settings).has_chief_statistics
  assert _rule(settings, rules=("async",)).has_chief_statistics


def test_the_loss_is_of_these_settings():
  """Each changes it by what `model.total_loss` says, and the defaults are."""
  small = config.from_recipe(
    "mini", dataset="synthetic", width=0.05, depth=0.1, num_classes=10
  )
  assert small.dropout == 0.2
  given = {"label_smoothing": 0.3, "auxiliary_weight": 0.7, "weight_decay": 0.1}
  images = tf.random.stateless_uniform([4, 32, 32, 3], [1, 2], -1, 1)
  labels, seeds = tf.constant([1, 2, 3, 4]), tf.zeros([4, 2], tf.int32)
  losses = []
  for name, value in [(None, None), *given.items()]:
    settings = dataclasses.replace(small, **({name: value} if name else {}))
    replica = workload.make(settings).replica_fn([])
    values = [tf.identity(v) for v in replica.shared]
    loss, moves = replica.loss_fn(values, images, labels, seeds)
    losses.append(float(loss))
    network = model.of_config(settings)
    weights = {w.path: w.value for w in network.weights}
    expected, _ = model.total_loss(
      network,
      {path: weights[path] for path in weights if "seed" not in path},
      images,
      labels,
      dropout_seed=seeds[0],
      label_smoothing=settings.label_smoothing,
      auxiliary_weight=settings.auxiliary_weight,
      decay_factor=settings.weight_decay,
    )
    np.testing.assert_allclose(losses[-1], expected, rtol=1e-5)
    assert len(moves) == len(replica.statistics)
  assert len({round(loss, 4) for loss in losses}) == 1 + len(given)
