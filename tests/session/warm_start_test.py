"""Tests of `session.warm_start`."""

import numpy as np
import pytest

from tf_replicas.session import checkpoints
from tf_replicas.session import warm_start

THERE = {
  "variables/trunk": np.float32([1, 2]),
  "averages/trunk": np.float32([3, 4]),
  "variables/norm/moving_mean": np.float32([5]),
  "variables/head": np.float32([6, 6, 6]),
  "averages/head": np.float32([7, 7, 7]),
  "slots/momentum/trunk": np.float32([8, 8]),
  "global_step": np.int64(9),
}


class State:
  """A new training of another number of classes."""

  def __init__(self, **more):
    self.values = {
      "variables/trunk": np.zeros([2], np.float32),
      "averages/trunk": np.zeros([2], np.float32),
      "variables/norm/moving_mean": np.zeros([1], np.float32),
      "averages/norm/moving_mean": np.zeros([1], np.float32),
      "variables/head": np.zeros([4], np.float32),
      "averages/head": np.zeros([4], np.float32),
      "slots/momentum/trunk": np.zeros([2], np.float32),
      "global_step": np.int64(0),
      **more,
    }

  def state(self):
    return dict(self.values)

  def load_state(self, values):
    assert values.keys() <= self.values.keys()
    self.values.update(values)


@pytest.fixture(scope="module")
def train_dir(tmp_path_factory):
  directory = tmp_path_factory.mktemp("train")
  checkpoints.save(directory, THERE)
  return str(directory)


def _is_head(path):
  return path == "head"


def test_averages_become_the_variables(train_dir):
  state = State()
  done = warm_start.transfer(train_dir, state, _is_head)
  assert done.path == f"{train_dir}/model.ckpt-9"
  assert done.restored == ("trunk", "norm/moving_mean")
  assert done.fresh == ("head",)
  expected = {
    **State().values,
    "variables/trunk": [3, 4],
    "averages/trunk": [3, 4],
    "variables/norm/moving_mean": [5],
    "averages/norm/moving_mean": [5],
  }
  assert state.values.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_array_equal(state.values[name], value, name)


@pytest.mark.parametrize(
  "more, words",
  [
    (
      {"variables/trunk": np.zeros([3], np.float32)},
      r"trunk has shape \[2\] in",
    ),
    (
      {"variables/wing": np.zeros([3], np.float32)},
      "wing is not in the checkpoint",
    ),
  ],
)
def test_another_trunk_is_refused_whole(train_dir, more, words):
  state = State(**more)
  with pytest.raises(checkpoints.CheckpointError, match=words):
    warm_start.transfer(train_dir, state, _is_head)
  for name, value in State(**more).values.items():
    np.testing.assert_array_equal(state.values[name], value, name)


def test_a_place_without_a_checkpoint(tmp_path):
  for path in (tmp_path, tmp_path / "model.ckpt-1"):
    with pytest.raises(checkpoints.MissingCheckpointError, match=str(path)):
      warm_start.find(str(path))
