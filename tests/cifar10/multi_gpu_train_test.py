"""Tests of `cifar10.multi_gpu_train`, with CPU devices in place of GPUs."""

import functools
import json
import re

import numpy as np
import pytest

from cifar10 import config as config_lib
from cifar10 import multi_gpu_train
from cifar10 import train
from cifar10 import workload
from tests.programs import calls
from tests.support import binaries
from tf_replicas import cluster
from tf_replicas.programs import run_options
from tf_replicas.session import checkpoints

MODULE = "cifar10.multi_gpu_train"
FOUR_TOWERS = "--cluster_spec=cluster_specs/four_towers.json"


def flags(train_dir, *more: str) -> list[str]:
  """Flags of a quick run."""
  return ["--dataset=synthetic", f"--train_dir={train_dir}", *more]


def config(train_dir, **given) -> config_lib.Config:
  """What these flags say."""
  return config_lib.Config("synthetic", train_dir=str(train_dir), **given)


def state(train_dir):
  """The newest checkpoint."""
  return checkpoints.read(checkpoints.latest(train_dir))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """Two towers for 10 steps, which four take to 15."""
  train_dir = tmp_path_factory.mktemp("train")
  run = functools.partial(binaries.succeed, MODULE)
  more = ["--num_gpus=2", "--batch_size=16", "--max_steps=10"]
  first = run(*flags(train_dir, "--emulate_gpus", *more))
  saved = state(train_dir)
  more = [FOUR_TOWERS, "--batch_size=8", "--max_steps=15"]
  second = run(*flags(train_dir, "--emulate_gpus", *more))
  return train_dir, first, saved, second


def test_log_lines_have_the_tutorials_form(trained):
  _, first, _, second = trained
  assert binaries.logged_steps(first) == [10]
  assert binaries.logged_steps(second) == [15]


def test_the_effective_batch_is_that_of_all_towers(trained):
  _, first, saved, second = trained
  assert "2 towers of batch 16: effective batch 32" in first
  assert "4 towers of batch 8: effective batch 32" in second
  assert "1,068,298 parameters" in first
  assert saved["examples_seen"] == 10 * 32


def test_another_number_of_towers_resumes(trained):
  train_dir, _, _, second = trained
  assert f"restored {train_dir}/model.ckpt-10" in second
  assert state(train_dir)["examples_seen"] == 15 * 32


def expect_equal(states, others):
  """Compares two checkpoints, up to the order of sums."""
  assert states.keys() == others.keys()
  for name, value in states.items():
    np.testing.assert_allclose(value, others[name], atol=2e-5, err_msg=name)


def test_two_towers_equal_one_device_with_a_double_batch(trained, tmp_path):
  # The default of the flags: a quarter of the recipe's batch, and of its rate.
  settings = config(
    tmp_path, batch_size=32, max_steps=10, learning_rate=0.1 * 32 / 128
  )
  calls.train(train.train, settings)
  expect_equal(state(tmp_path), trained[2])


@pytest.mark.exhaustive
def test_two_towers_equal_a_pipeline_of_two_devices(trained, tmp_path):
  more = ["--cluster_spec=cluster_specs/two_stages.json", "--micro_batches=2"]
  more += ["--emulate_gpus", "--batch_size=32", "--max_steps=10"]
  output = binaries.succeed(MODULE, *flags(tmp_path, *more))
  assert "1 tower of batch 32: effective batch 32" in output
  assert "of weights on /device:CPU:1" in output
  expect_equal(state(tmp_path), trained[2])


def test_two_towers_equal_two_mirrored_replicas(trained, tmp_path):
  spec = tmp_path / "spec.json"
  devices = {"worker": {"gpus": [0, 1]}}
  spec.write_text(
    json.dumps({"devices": devices, "variables": {"on": "mirrored"}})
  )
  more = [f"--cluster_spec={spec}", "--batch_size=16", "--max_steps=10"]
  output = binaries.succeed(MODULE, *flags(tmp_path, "--emulate_gpus", *more))
  assert "effective batch 32" in output
  expect_equal(state(tmp_path), trained[2])


def test_spec_and_number_exclude_each_other(tmp_path):
  more = [FOUR_TOWERS, "--num_gpus=2", "--emulate_gpus"]
  binaries.refuse(MODULE, "`--num_gpus`", *flags(tmp_path / "run", *more))
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", ["0", "-1", "two"])
def test_the_number_is_positive(tmp_path, number):
  more = [f"--num_gpus={number}", "--emulate_gpus"]
  binaries.refuse(MODULE, "--num_gpus", *flags(tmp_path, *more))


def test_a_cluster_is_for_another_binary(tmp_path):
  spec = tmp_path / "spec.json"
  spec.write_text(json.dumps({"ps": ["a:1"], "worker": ["b:1"]}))
  more = [f"--cluster_spec={spec}", "--emulate_gpus"]
  words = "cifar10.distributed_train"
  binaries.refuse(MODULE, words, *flags(tmp_path / "run", *more))


def test_gpus_that_do_not_exist(trained):
  train_dir, *_ = trained
  before = (train_dir / "config.json").read_text()
  more = ["--num_gpus=2", "--seed=5"]
  binaries.refuse(MODULE, "--emulate_gpus", *flags(train_dir, *more))
  assert (train_dir / "config.json").read_text() == before


def test_layers_of_another_model(tmp_path):
  devices = {"worker": {"gpus": [0, 1]}}
  spec = cluster.parse({"devices": devices, "layers": {"konv1": 1}})
  made = workload.make(config(tmp_path), run_options.Options(spec, "run"))
  with pytest.raises(cluster.ClusterError, match="konv1"):
    made.replica_fn(["/device:CPU:0", "/device:CPU:0"])


def test_parts_of_a_batch_are_equal(tmp_path):
  with pytest.raises(cluster.ClusterError, match="`--micro_batches`"):
    multi_gpu_train.train(config(tmp_path / "run"), micro_batches=3)
  assert not (tmp_path / "run").exists()


def test_a_call_is_for_one_machine(tmp_path):
  spec = cluster.parse({"ps": ["a:1"], "worker": ["b:1"]})
  with pytest.raises(ValueError, match="`task` must say which task"):
    multi_gpu_train.train(config(tmp_path / "run"), spec)


def test_dry_run_tells_how_layers_are_spread(tmp_path):
  more = ["--cluster_spec=cluster_specs/two_stages.json", "--dry_run"]
  output = binaries.succeed(MODULE, *flags(tmp_path / "run", *more))
  assert "1 tower of batch 128: effective batch 128" in output
  assert "1,068,298 parameters" in output
  assert re.search(r"^conv2 .*/device:GPU:1$", output, re.MULTILINE)
  assert "of weights on /device:GPU:0" in output
  assert not (tmp_path / "run").exists()


def test_epochs_count_what_was_trained_with_another_batch(tmp_path):
  # 160 examples: 5 updates of 16, then 3 of 32 of which the last is too large.
  more = ["--emulate_gpus", "--num_epochs=0.0032"]
  settings = config(tmp_path, batch_size=16, max_steps=5)
  outcome, _ = calls.train(multi_gpu_train.train, settings)
  assert outcome.global_step == 5
  binaries.succeed(
    MODULE, *flags(tmp_path, *more, "--batch_size=16", "--num_gpus=2")
  )
  assert state(tmp_path)["global_step"] == 5 + 3
  assert state(tmp_path)["examples_seen"] == 5 * 16 + 3 * 32
