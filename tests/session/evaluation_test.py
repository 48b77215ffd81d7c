"""Tests of `session.evaluation`."""

import glob
import os

import keras
import numpy as np
import pytest

from tf_replicas.session import checkpoints
from tf_replicas.session import evaluation


class Time:
  """A clock that sleeping moves, and that training follows.

  Attributes:
    now: Seconds.
    events: What training does at which second.
  """

  def __init__(self, events=None):
    self.now = 0.0
    self.events = dict(events or {})
    self.happen()

  def clock(self):
    return self.now

  def sleep(self, secs):
    assert secs > 0
    self.now += secs
    assert self.now < 10000, "evaluation does not end"
    self.happen()

  def happen(self):
    for secs in sorted(s for s in self.events if s <= self.now):
      self.events.pop(secs)()


def save(train_dir, step, **kwargs):
  values = {
    "variables/w": np.full(2, step, np.float32),
    "global_step": np.int64(step),
  }
  return checkpoints.save(train_dir, values, **kwargs)


def finish(train_dir, step):
  path = save(train_dir, step)
  checkpoints.write_finished(train_dir, checkpoints.Finished(step, path, ""))


def follow(train_dir, time, *, evaluate_fn=None, **kwargs):
  """Returns what `evaluate_continuously` returned, and [(second, step)]."""
  evaluated = []

  def record(step, variables):
    np.testing.assert_array_equal(variables["w"], [step, step])
    evaluated.append((time.now, step))
    if evaluate_fn is not None:
      evaluate_fn()
    return step / 10

  result = evaluation.evaluate_continuously(
    train_dir, record, clock=time.clock, sleep=time.sleep, **kwargs
  )
  return result, evaluated


def test_averaged_variables():
  values = {
    "variables/w": 1.0,
    "variables/bn/mean": 2.0,
    "variables/averages/w": 5.0,
    "variables/loss_scale/value": 6.0,
    "variables/metrics/sums": 7.0,
    "averages/w": 3.0,
    "slots/w/momentum": 4.0,
    "global_step": 9,
  }
  assert evaluation.averaged_variables(values) == {
    "w": 3.0,
    "bn/mean": 2.0,
    "averages/w": 5.0,
  }


def test_evaluate_once(tmp_path, capsys):
  save(tmp_path, 3)
  path = save(tmp_path, 12)
  result = evaluation.evaluate_once(
    tmp_path, lambda step, variables: (step, variables["w"].tolist())
  )
  assert result == (12, [12.0, 12.0])
  assert capsys.readouterr().out == f"evaluating {path}\n"


def test_evaluate_once_with_averages(tmp_path, capsys):
  path = checkpoints.save(
    tmp_path,
    {
      "variables/w": np.ones(2),
      "averages/w": np.zeros(2),
      "global_step": np.int64(1),
    },
  )
  variables = evaluation.evaluate_once(tmp_path, lambda step, v: v)
  np.testing.assert_array_equal(variables["w"], [0.0, 0.0])
  out = capsys.readouterr().out
  assert out == f"evaluating {path} with moving averages\n"


def test_evaluate_once_without_a_checkpoint(tmp_path):
  with pytest.raises(checkpoints.CheckpointError) as info:
    evaluation.evaluate_once(tmp_path, lambda step, variables: None)
  assert str(info.value) == f"No checkpoint file found in {tmp_path}"


def test_ends_with_the_finished_run(tmp_path):
  train_dir = tmp_path / "train"
  time = Time(
    {
      5: lambda: save(train_dir, 10),
      30: lambda: save(train_dir, 20),
      40: lambda: save(train_dir, 30),
      50: lambda: save(train_dir, 40),
      55: lambda: finish(train_dir, 50),
    }
  )
  result, evaluated = follow(train_dir, time, interval_secs=20.0)
  # 30 is passed over, the last one does not wait for the interval.
  assert evaluated == [(5.0, 10), (30.0, 20), (50.0, 40), (55.0, 50)]
  assert result == 5.0


def test_finished_run_is_evaluated_at_once(tmp_path):
  finish(tmp_path, 7)
  assert follow(tmp_path, Time()) == (0.7, [(0.0, 7)])


def test_finished_checkpoint_is_not_evaluated_twice(tmp_path):
  path = save(tmp_path, 7)
  record = checkpoints.Finished(7, path, "")
  time = Time({3: lambda: checkpoints.write_finished(tmp_path, record)})
  assert follow(tmp_path, time) == (0.7, [(0.0, 7)])
  assert time.now == 3.0


def test_run_that_finishes_while_evaluated(tmp_path):
  save(tmp_path, 7)
  time = Time()

  def evaluate_fn():
    time.now += 100.0
    if not os.path.exists(tmp_path / "finished.json"):
      finish(tmp_path, 9)

  result, evaluated = follow(tmp_path, time, evaluate_fn=evaluate_fn)
  assert [step for _, step in evaluated] == [7, 9]


def test_timeout_without_any_checkpoint(tmp_path, capsys):
  time = Time()
  assert follow(tmp_path, time, timeout_secs=30.0) == (None, [])
  assert time.now == 30.0
  assert capsys.readouterr().out == (
    "evaluation stops: no new checkpoint for 30 s\n"
  )


def test_timeout_counts_from_the_last_evaluation(tmp_path):
  time = Time({5: lambda: save(tmp_path, 1), 30: lambda: save(tmp_path, 2)})

  def evaluate_fn():
    time.now += 40.0

  _, evaluated = follow(
    tmp_path,
    time,
    evaluate_fn=evaluate_fn,
    timeout_secs=30.0,
    interval_secs=1.0,
  )
  assert [step for _, step in evaluated] == [1, 2]
  assert time.now == 5 + 40 + 1 + 40 + 30


def test_timeout_does_not_pass_over_a_checkpoint_that_waits(tmp_path):
  time = Time({0: lambda: save(tmp_path, 1), 10: lambda: save(tmp_path, 2)})
  _, evaluated = follow(tmp_path, time, timeout_secs=30.0, interval_secs=100.0)
  assert evaluated == [(0.0, 1), (100.0, 2)]


def test_deleted_checkpoint_is_skipped(tmp_path, monkeypatch, capsys):
  path = save(tmp_path, 1)
  time = Time({5: lambda: finish(tmp_path, 2)})
  latest = checkpoints.latest

  def latest_then_deleted(train_dir):
    found = latest(train_dir)
    if found == path:
      for file in glob.glob(path + ".*"):
        os.remove(file)
    return found

  monkeypatch.setattr(checkpoints, "latest", latest_then_deleted)
  assert follow(tmp_path, time) == (0.2, [(5.0, 2)])
  assert capsys.readouterr().out.splitlines() == [
    f"skipped {path}: the training deleted it before it was read",
    f"evaluating {tmp_path}/model.ckpt-2",
  ]


def test_damaged_checkpoint_is_an_error(tmp_path):
  path = save(tmp_path, 1)
  os.truncate(path + ".data-00000-of-00001", 4)
  with pytest.raises(checkpoints.CheckpointError, match="is damaged"):
    follow(tmp_path, Time())


def test_arguments_out_of_range(tmp_path):
  with pytest.raises(ValueError, match="`interval_secs` .* Received: -1"):
    follow(tmp_path, Time(), interval_secs=-1)
  with pytest.raises(ValueError, match="`timeout_secs` .* Received: 0"):
    follow(tmp_path, Time(), timeout_secs=0)


@pytest.fixture(name="model")
def fixture_model():
  model = keras.Sequential(
    [
      keras.layers.Dense(2, name="dense"),
      keras.layers.BatchNormalization(name="norm"),
      keras.layers.Dropout(0.5, seed=1),
    ],
    name="net",
  )
  model.build((None, 3))
  return model


def test_load_into_keras(model):
  rng = np.random.default_rng(0)
  values = {w.path: rng.normal(size=w.shape) for w in model.weights}
  assert len(values) == 6
  evaluation.load_into_keras(model, values)
  for weight in model.weights:
    np.testing.assert_allclose(weight, values[weight.path], rtol=1e-6)


def test_load_into_keras_refuses_another_model(model):
  values = {w.path: np.full(w.shape, 7.0) for w in model.weights}
  kernel = model.layers[0].kernel.path
  bias = model.layers[0].bias.path
  values[kernel] = np.full((4, 2), 7.0)
  values["other/bias"] = values.pop(bias)
  with pytest.raises(checkpoints.CheckpointError) as info:
    evaluation.load_into_keras(model, values)
  message = str(info.value)
  assert message.startswith("the checkpoint is of another model: ")
  assert f"{bias} is not in the checkpoint" in message
  assert "other/bias is not in the model" in message
  assert (
    f"{kernel} has shape [4, 2] in the checkpoint and [3, 2] in the model"
    in message
  )
  for weight in model.weights:
    assert not (np.asarray(weight) == 7.0).any()
