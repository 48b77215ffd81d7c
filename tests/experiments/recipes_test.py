"""Tests for experiments.recipes."""

import pytest
import tensorflow as tf

from cifar10 import config
from experiments import recipes
from tf_replicas.programs import run_config


def test_a_curve_has_every_measurement(tmp_path):
  run_config.record(config.Config(train_dir=str(tmp_path), batch_size=100))
  with tf.summary.create_file_writer(str(tmp_path / "eval")).as_default():
    for epoch in range(30):
      tf.summary.scalar(recipes.TAG, epoch / 32, step=500 * epoch)
  expected = [(float(epoch), epoch / 32) for epoch in range(30)]
  assert recipes.curve(str(tmp_path)) == expected


def test_a_run_without_measurements_is_refused(tmp_path):
  with pytest.raises(ValueError, match="must hold measurements.*none"):
    recipes.curve(str(tmp_path))
