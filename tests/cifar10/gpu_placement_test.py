"""Towers and variables on the GPUs of a cluster, for which CPUs stand in."""

import json
import re

import pytest

from cifar10 import config as config_lib
from cifar10 import train
from tests.programs import calls
from tests.support import binaries
from tf_replicas.session import checkpoints

MODULE = "cifar10.distributed_train"
SPEC = {
  "cluster": {"ps": ["localhost:0"], "worker": ["localhost:0"] * 2},
  "devices": {
    "ps": {"gpus": [0]},
    "worker:0": {"gpus": [0, 1]},
    "worker:1": {"gpus": [0, 1]},
  },
}
STEPS = 4


def _flags(tmp_path, *more):
  spec = tmp_path / "spec.json"
  spec.write_text(json.dumps(SPEC))
  return [
    f"--cluster_spec={spec}",
    "--dataset=synthetic",
    f"--train_dir={tmp_path / 'run'}",
    "--batch_size=4",
    "--learning_rate=0.05",
    f"--max_steps={STEPS}",
    *more,
  ]


def _state(train_dir):
  return checkpoints.read(checkpoints.latest(str(train_dir)))


@pytest.fixture(scope="module")
def between_graph(tmp_path_factory):
  """A training of two workers with two towers each; its output and state."""
  path = tmp_path_factory.mktemp("between_graph")
  output = binaries.succeed(MODULE, *_flags(path, "--emulate_gpus"))
  return output, _state(path / "run")


def test_variables_of_a_ps_task_are_on_its_gpu(between_graph):
  output, _ = between_graph
  # CPU 0 has queues and counters, and CPU 1 stands in for the GPU.
  places = re.findall(r"conv1/kernel .* (/job:ps\S+)", output)
  assert places == ["/job:ps/task:0/device:CPU:1"]


def test_each_worker_has_two_towers(between_graph):
  output, state = between_graph
  assert "2 replicas with 2 towers of batch 4 each" in output
  assert state["examples_seen"] == STEPS * 2 * 2 * 4


@pytest.mark.exhaustive
def test_in_graph_towers_train_the_same(between_graph, tmp_path):
  more = ["--emulate_gpus", "--replication=in_graph"]
  output = binaries.succeed(MODULE, *_flags(tmp_path, *more))
  assert "2 replicas with 2 towers of batch 4 each" in output
  assert "/job:ps/task:0/device:CPU:1" in output
  _expect_equal(_state(tmp_path / "run"), between_graph[1])


@pytest.mark.exhaustive
def test_variables_and_towers_of_one_process_are_on_gpus(tmp_path):
  settings = config_lib.Config(
    "synthetic", batch_size=16, max_steps=STEPS, train_dir=str(tmp_path / "one")
  )
  calls.train(train.train, settings)
  spec = tmp_path / "spec.json"
  document = {
    "devices": {"worker": {"gpus": [1, 0]}},
    "variables": {"on": "gpu"},
  }
  spec.write_text(json.dumps(document))
  output = binaries.succeed(
    "cifar10.multi_gpu_train",
    f"--cluster_spec={spec}",
    "--dataset=synthetic",
    f"--train_dir={tmp_path / 'run'}",
    "--batch_size=8",
    f"--learning_rate={settings.learning_rate}",
    f"--max_steps={STEPS}",
    "--emulate_gpus",
  )
  assert "variables on gpu: updates from 2 towers of batch 8" in output
  # The first tower is on GPU 1.
  assert re.search(r"conv1/kernel .* /device:CPU:1$", output, re.MULTILINE)
  _expect_equal(_state(tmp_path / "run"), _state(tmp_path / "one"))


def test_variables_on_a_gpu_need_one(tmp_path):
  spec = tmp_path / "spec.json"
  spec.write_text(json.dumps({"variables": {"on": "gpu"}}))
  more = [f"--cluster_spec={spec}", "--dry_run"]
  words = "must not be 'gpu' unless `devices` gives the process a GPU"
  binaries.refuse("cifar10.multi_gpu_train", words, *more)


@pytest.mark.parametrize(
  "replication",
  [
    "between_graph",
    pytest.param("in_graph", marks=pytest.mark.exhaustive),
  ],
)
def test_a_gpu_check_needs_no_gpu(tmp_path, replication):
  more = "--check_gpu", f"--replication={replication}"
  output = binaries.succeed(MODULE, *_flags(tmp_path, *more))
  ((count, fallbacks),) = re.findall(
    r"GPU check: ([\d,]+) traced ops are for GPUs; ([\d,]+) of them", output
  )
  assert int(count.replace(",", "")) > 500
  assert int(fallbacks) == 0  # All have GPU kernels.
  assert "/job:ps/task:0/device:CPU:1" in output
  assert f"training from step 0 to {1}" in output
  assert not (tmp_path / "run").exists()


def _expect_equal(state, other):
  assert state.keys() == other.keys()
  for name, value in state.items():
    assert value == pytest.approx(other[name], abs=2e-5), name
