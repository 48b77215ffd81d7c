"""Tests of `cifar10.workload`."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from cifar10 import config
from cifar10 import workload
from tests.support import optimizers
from tf_replicas import cluster
from tf_replicas.programs import run_options
from tf_replicas.programs import update_options
from tf_replicas.rules.asynchronous import async_replicas


def _rule_fn(replicas_to_aggregate, num_replicas):
  settings = update_options.UpdateSettings(
    replicas_to_aggregate=replicas_to_aggregate
  )
  return update_options.rule_fn(settings, num_replicas)


@pytest.mark.parametrize(
  "compute_dtype, rule, is_dynamic, fixed",
  [
    ("float32", "sync", False, None),
    ("bfloat16", "sync", False, None),
    ("float16", "sync", True, None),
    ("float16", "model_average", False, 1024),
  ],
)
def test_float16_scales_the_loss(compute_dtype, rule, is_dynamic, fixed):
  settings = config.Config(dataset="synthetic", compute_dtype=compute_dtype)
  update = update_options.UpdateSettings(rules=(rule,))
  spec = cluster.parse(
    {"ps": ["localhost:1"], "worker": ["localhost:2", "localhost:3"]}
  )
  options = run_options.Options(spec, settings.train_dir, update=update)
  made = workload.make(settings, options)
  assert (made.replica_fn([]).loss_scale is not None) == is_dynamic
  found = []
  made.optimizer_fn(lambda _, **keywords: found.append(keywords["loss_scale"]))
  assert found == [fixed]


def test_the_rule_aggregates_as_many_gradients_as_asked():
  settings = config.Config(dataset="synthetic")
  optimizer = workload.make(settings).optimizer_fn(_rule_fn(2, 3))
  assert optimizer.replicas_to_aggregate == 2
  assert optimizer.total_num_replicas == 3


def test_one_rule_after_the_other():
  settings = update_options.UpdateSettings(
    rules=("async",),
    then_update=("sync",),
    switch_at_step=7,
    wire_dtype="bfloat16",
    replicas_to_aggregate=2,
  )
  rule_fn = update_options.rule_fn(settings, 3)
  made = workload.make(config.Config(dataset="synthetic"))
  optimizer = made.optimizer_fn(rule_fn)
  first, second = optimizer.rules
  assert isinstance(first, async_replicas.AsyncReplicasOptimizer)
  assert second.replicas_to_aggregate == 2
  assert first.total_num_replicas == second.total_num_replicas == 3
  assert optimizer.wire_dtype == "bfloat16"


def test_a_batch_is_for_all_towers():
  settings = config.Config(dataset="synthetic", batch_size=4)
  one = workload.make(settings).replica_fn([])
  two = workload.make(settings).replica_fn(["/device:CPU:0"] * 2)
  images, labels = next(iter(two.dataset_fn(1, 0, 0)))
  assert images.shape == [8, 24, 24, 3]
  # The same images that two replicas of one tower get.
  for index in (0, 1):
    part, classes = next(iter(one.dataset_fn(2, index, 0)))
    np.testing.assert_array_equal(part, images[4 * index : 4 * (index + 1)])
    np.testing.assert_array_equal(classes, labels[4 * index : 4 * (index + 1)])


def test_the_rate_follows_the_examples():
  settings = config.Config(dataset="synthetic", learning_rate=0.5)
  learning_rate_fn = workload.make(settings).learning_rate_fn
  assert learning_rate_fn(0) == 0.5
  assert learning_rate_fn(350 * 50_000) == pytest.approx(0.05)


def test_modern_recipe_has_its_optimizer_and_its_loss():
  optimizers.require("Muon", "rms_rate")
  from cifar10 import muon

  settings = config.from_recipe(
    "modern", dataset="synthetic", batch_size=4, compute_dtype="float32"
  )
  made = workload.make(settings)
  optimizer = made.optimizer_fn(_rule_fn(1, 1)).inner.optimizer
  assert isinstance(optimizer, muon.Muon)
  assert optimizer.weight_decay == settings.decoupled_weight_decay
  modern = made.replica_fn([])
  plain = workload.make(dataclasses.replace(settings, label_smoothing=0.0))
  plain = plain.replica_fn([])
  batch = next(iter(modern.dataset_fn(1, 0, 0)))
  parameters = [tf.convert_to_tensor(v) for v in modern.variables]
  losses = [float(r.loss_fn(parameters, *batch)) for r in (modern, plain)]
  assert losses[0] != pytest.approx(losses[1], abs=1e-6)
