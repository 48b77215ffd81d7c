"""Tests for programs.function_launcher: functions as all tasks of a cluster."""

import os
import pathlib
import signal
import sys
import time

import numpy as np
import pytest

import tf_replicas
from tests.support import trials
from tf_replicas import cluster
from tf_replicas.programs import function_launcher

_SCRIPT = """
import os, sys, time
import tf_replicas

def wait():
  tf_replicas.report("here")
  time.sleep(300)

with tf_replicas.LocalTraining(wait, workers=1) as training:
  for report in training:
    print(report, flush=True)
"""


def _train(rule_name: str, epochs: int) -> dict:
  """Fits a line, reports each epoch, and counts the contributions."""
  import keras

  class Report(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
      tf_replicas.report({"epoch": epoch, **logs})

  def model_fn():
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model

  x = np.random.default_rng(1).normal(size=[64, 3]).astype("float32")
  history = tf_replicas.fit(
    model_fn,
    x,
    x.sum(axis=1, keepdims=True),
    batch_size=8,
    epochs=epochs,
    verbose=0,
    rule=getattr(tf_replicas, rule_name)(),
    callbacks=[Report()],
  )
  applied = {name: c.applied for name, c in history.contributions.items()}
  return {"loss": history.history["loss"], "applied": applied}


def _await_end(pids: list[int]) -> None:
  deadline = time.monotonic() + 60
  while running := [p for p in pids if pathlib.Path(f"/proc/{p}").exists()]:
    assert time.monotonic() < deadline, f"{running} still run"
    time.sleep(0.05)


def test_two_trainings_after_one_another():
  """Each has its reports, its result, and no process that is left."""
  before = trials.descendants(os.getpid())
  for rule_name, places in (("Sync", 2), ("Async", 1)):
    lines = []
    with tf_replicas.LocalTraining(
      _train, args=(rule_name,), kwargs={"epochs": 3}, log=lines.append
    ) as training:
      reports = list(training)
      result = training.result(timeout_secs=trials.DEADLINE_SECS)
    assert [report["epoch"] for report in reports] == [0, 1, 2], lines
    # Asynchronous updates may be counted in an earlier epoch than their own. An
    # epoch without any has the loss of the epoch before.
    losses = [report["loss"] for report in reports if "loss" in report]
    assert len(losses) == 3 or rule_name == "Async"
    assert result["loss"] == losses
    assert losses[-1] < losses[0] or rule_name == "Async"
    assert sorted(result["applied"]) == ["worker 0", "worker 1"]
    assert sum(result["applied"].values()) == 3 * 8 * places
    assert training.result() == result
    assert list(training) == []
    assert trials.descendants(os.getpid()) == before


def _fail(how: str) -> None:
  if os.environ["TF_REPLICAS_TASK"] == "worker:1":
    print("about to fail")
    if how == "raise":
      raise ValueError("no such thing")
    os._exit(3)
  time.sleep(300)


@pytest.mark.parametrize("how", ["raise", "exit"])
def test_a_failure_comes_back_in_one_piece(how, monkeypatch):
  monkeypatch.setattr(function_launcher, "_LAST_SECS", 0.2)
  before = trials.descendants(os.getpid())
  with tf_replicas.LocalTraining(_fail, args=(how,)) as training:
    with pytest.raises(tf_replicas.LocalTrainingError) as raised:
      list(training)
    with pytest.raises(tf_replicas.LocalTrainingError):
      training.result(timeout_secs=1)
  assert raised.value.task == tf_replicas.Task("worker", 1)
  lines = str(raised.value).splitlines()
  if how == "raise":
    assert lines[:2] == [
      "worker 1 failed:",
      "Traceback (most recent call last):",
    ]
    assert '    raise ValueError("no such thing")' in lines
    assert lines[-1] == "ValueError: no such thing"
  else:
    assert lines == [
      "worker 1 failed with exit status 3. Its last lines:",
      "[worker 1] about to fail",
    ]
  assert trials.descendants(os.getpid()) == before


def _die_once(mark: str) -> str:
  path = pathlib.Path(mark)
  if os.environ["TF_REPLICAS_TASK"] == "worker:1":
    if not path.exists():
      path.write_text("once")
      os.kill(os.getpid(), signal.SIGKILL)
    path.write_text("twice")
  deadline = time.monotonic() + trials.DEADLINE_SECS
  while not path.exists() or path.read_text() != "twice":
    assert time.monotonic() < deadline
    time.sleep(0.05)
  return path.read_text()


def test_a_killed_worker_gets_the_function_again(tmp_path):
  arguments = (str(tmp_path / "mark"),)
  with tf_replicas.LocalTraining(_die_once, args=arguments) as training:
    assert training.result(timeout_secs=trials.DEADLINE_SECS) == "twice"


def _leave_a_child(path: str) -> str:
  child = os.fork()
  if not child:
    time.sleep(3600)
    os._exit(0)
  pathlib.Path(path).with_suffix(f".{child}").touch()
  return "done"


def test_a_child_of_a_task_holds_up_nothing(tmp_path):
  """It inherits the pipe to the parent process."""
  arguments = (str(tmp_path / "child"),)
  with tf_replicas.LocalTraining(
    _leave_a_child, args=arguments, workers=1
  ) as training:
    assert training.result(timeout_secs=trials.DEADLINE_SECS) == "done"
  children = [int(p.suffix[1:]) for p in tmp_path.iterdir()]
  assert children
  for child in children:
    os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_an_interrupted_process(tmp_path, sig):
  """Its functions are in its main module, as those of a notebook."""
  script = tmp_path / "script.py"
  script.write_text(_SCRIPT, encoding="utf-8")
  temporary = tmp_path / "temporary"
  temporary.mkdir()
  environ = {**trials.ENVIRON, "TMPDIR": str(temporary)}
  with trials.running([sys.executable, script], environ=environ) as process:
    output = trials.read_until("here", process)
    pids = trials.descendants(process.pid)
    assert len(pids) == 3, output  # The fork server and two tasks.
    process.send_signal(sig)
    rest, _ = process.communicate(timeout=60)
  assert ("KeyboardInterrupt" in rest) == (sig == signal.SIGINT)
  _await_end(pids)
  assert not list(temporary.iterdir())


def test_leaving_the_block_ends_the_processes():
  before = trials.descendants(os.getpid())
  with tf_replicas.LocalTraining(
    time.sleep, args=(300,), workers=1
  ) as training:
    with pytest.raises(TimeoutError, match="still ran after 0.1 s"):
      training.result(timeout_secs=0.1)
  assert trials.descendants(os.getpid()) == before
  with pytest.raises(tf_replicas.LocalTrainingError, match="ended before"):
    training.result()
  with pytest.raises(RuntimeError, match="runs once"):
    training.__enter__()


@pytest.mark.parametrize(
  ("arguments", "error", "words"),
  [
    ({"function": 3}, TypeError, "`function` must be callable.*Received: 3"),
    ({"args": [sys._getframe()]}, TypeError, "cloudpickle can pickle"),
    (
      {"cluster": cluster.parse({"cluster": {}})},
      ValueError,
      "at least two. Received: no tasks.",
    ),
    ({"ps": 0}, ValueError, "`ps` must be at least 1. Received: 0."),
    (
      {"cluster": "cluster_specs/two_hosts.json"},
      ValueError,
      "must have all its tasks on this machine",
    ),
  ],
)
def test_refuses(arguments, error, words):
  with pytest.raises(error, match=words):
    tf_replicas.LocalTraining(**{"function": print, **arguments})


def test_refuses_calls_before_the_start():
  training = tf_replicas.LocalTraining(print)
  with pytest.raises(RuntimeError, match="`with` statement"):
    training.result()
  training.close()


def test_refuses_to_run_without_cloudpickle(monkeypatch):
  monkeypatch.setitem(sys.modules, "cloudpickle", None)
  with pytest.raises(ImportError, match=r"pip install cloudpickle"):
    tf_replicas.LocalTraining(print)


def test_reports_go_nowhere_elsewhere():
  tf_replicas.report({"loss": 1.0})
