"""Tests for fitting.custom_loop, in one process."""

import json
import os
import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_replicas
from tests.session import reports_test
from tf_replicas import cluster
from tf_replicas.drivers import one_machine
from tf_replicas.fitting import custom_loop
from tf_replicas.fitting import roles
from tf_replicas.session import checkpoints

_DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"


class _Line(tf.Module):
  def __init__(self):
    super().__init__()
    self.slope = tf.Variable(0.0)


def _loss_fn(module, x):
  error = module.slope * x - 3.0 * x
  return tf.reduce_mean(error**2), {"distance": tf.abs(module.slope - 3.0)}


def _dataset_fn(num_shards, index, start):
  del num_shards, index, start
  return tf.data.Dataset.from_tensors(tf.ones([4])).repeat()


def _replica():
  return tf_replicas.module_replica(_Line(), _loss_fn, _dataset_fn)


def _sgd():
  return keras.optimizers.SGD(0.25)


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
  for name in list(os.environ):
    if name.startswith(("TF_CONFIG", "TF_REPLICAS", "SLURM")):
      monkeypatch.delenv(name)


def test_trains_logs_and_resumes(tmp_path, capsys):
  """The slope halves its distance to 3 in every update."""
  arguments = {
    "train_dir": tmp_path,
    "log_every_steps": 1,
    "summary_every_steps": 1,
    "variable_averages": tf_replicas.MovingAverages(0.5),
  }
  first = tf_replicas.run(_replica, _sgd, max_steps=2, **arguments)
  assert first.global_step == 2
  assert first.loss == pytest.approx(1.5**2)
  assert first.metrics == {"distance": pytest.approx(1.5)}
  assert first.values["slope"] == pytest.approx(2.25)
  assert 0.0 < first.averages["slope"] < 2.25
  assert ", loss = 2.25, distance = 1.5 (" in capsys.readouterr().out
  scalars = reports_test.read_scalars(tmp_path)
  assert scalars["distance", 2] == pytest.approx(1.5)
  second = tf_replicas.run(_replica, _sgd, max_steps=3, **arguments)
  assert second.values["slope"] == pytest.approx(2.625)
  assert second.metrics == {"distance": pytest.approx(0.75)}


@pytest.mark.parametrize(
  ("rows", "log_every_steps", "line"),
  [
    (
      {"ps 0": 3, "ps 1": 1},
      10,
      "4 rows of tables were updated: 75.0% on ps 0, 25.0% on ps 1",
    ),
    ({"ps 0": 3, "ps 1": 1}, None, ""),
    ({}, 10, ""),  # There are no tables.
    ({"ps 0": 0}, 10, ""),
  ],
)
def test_tells_the_load_of_parameter_servers(
  monkeypatch, rows, log_every_steps, line
):
  monkeypatch.setattr(one_machine.OneMachine, "row_updates", lambda self: rows)
  lines = []
  trained = tf_replicas.run(
    _replica,
    _sgd,
    max_steps=1,
    log_every_steps=log_every_steps,
    log=lines.append,
  )
  assert trained.row_updates == rows
  assert [s for s in lines if "rows of tables" in s] == ([line] if line else [])


def test_a_checkpoint_of_other_metrics_serves(tmp_path):
  tf_replicas.run(_replica, _sgd, max_steps=1, train_dir=tmp_path)
  resumed = tf_replicas.run(
    lambda: tf_replicas.module_replica(
      _Line(), lambda m, x: _loss_fn(m, x)[0], _dataset_fn
    ),
    _sgd,
    max_steps=2,
    train_dir=tmp_path,
  )
  assert resumed.values["slope"] == pytest.approx(2.25)
  assert resumed.metrics == {}
  with pytest.raises(checkpoints.CheckpointError, match="slope"):
    tf_replicas.run(
      lambda: tf_replicas.keras_replica(
        keras.Sequential([keras.Input([4]), keras.layers.Dense(1)]),
        keras.losses.MeanSquaredError(),
        lambda *_: tf.data.Dataset.from_tensors(
          (tf.ones([2, 4]), tf.ones([2, 1]))
        ).repeat(),
      ),
      _sgd,
      max_steps=3,
      train_dir=tmp_path,
    )


def test_join_gives_the_driver_and_clips():
  with tf_replicas.join(_replica, _sgd, clip_mean_norm=1.0) as driver:
    assert driver.step().global_step == 1
    assert driver.values()["slope"] == pytest.approx(0.25)


@pytest.mark.parametrize(
  ("replica_fn", "optimizer_fn", "more", "error", "words"),
  [
    (3, _sgd, {}, TypeError, "`replica_fn` must be a function"),
    (_replica, "sgd", {}, TypeError, "`optimizer_fn` must be a function"),
    (_Line, _sgd, {}, TypeError, "must return a `tf_replicas.Replica`.*_Line"),
    (_replica, _sgd, {"rule": "sync"}, TypeError, "`rule` must be made by"),
    (_replica, _sgd, {"replication": "x"}, ValueError, "`replication`.*'x'"),
    (
      _replica,
      _sgd,
      {"rule": tf_replicas.Sync(replicas_to_aggregate=2)},
      ValueError,
      "`replicas_to_aggregate` must be 1",
    ),
    (
      _replica,
      _sgd,
      {"rule": tf_replicas.Periodic("model_average"), "clip_mean_norm": 1.0},
      ValueError,
      "`clip_mean_norm` must be None with a rule of `Periodic`",
    ),
    (
      _replica,
      _sgd,
      {"rule": tf_replicas.Sync(clip_norm=2.0), "clip_mean_norm": 1.0},
      ValueError,
      "`clip_mean_norm` must be None, as `rule` has clip_norm=2.0",
    ),
    (
      _replica,
      _sgd,
      {"clip_replica_norm": 0.0},
      ValueError,
      "clip_replica_norm",
    ),
    (
      _replica,
      _sgd,
      {"rule": tf_replicas.Periodic("model_average")},
      ValueError,
      "'model_average'.*only with parameter servers|only with parameter",
    ),
  ],
)
def test_refuses_in_one_line(replica_fn, optimizer_fn, more, error, words):
  with pytest.raises(error, match=words) as caught:
    tf_replicas.run(replica_fn, optimizer_fn, max_steps=1, **more)
  assert "\n" not in str(caught.value)


def test_an_optimizer_in_the_place_of_a_function_is_refused():
  with pytest.raises(TypeError, match="`optimizer_fn` must be a function"):
    tf_replicas.run(_replica, _sgd(), max_steps=1)


def test_needs_to_know_its_task():
  spec = cluster.parse({"ps": ["localhost:1"], "worker": ["localhost:2"]})
  with pytest.raises(cluster.ClusterError, match="tf_replicas.launch"):
    tf_replicas.run(_replica, _sgd, max_steps=1, cluster=spec)


_SPEC = {
  "cluster": {"ps": ["localhost:1"], "worker": ["localhost:2"]},
  "layers": {"a": 0, "b": 1},
}


def test_layers_of_the_spec_are_not_ignored():
  spec = cluster.parse(_SPEC, "spec.json")
  part = roles.Part((spec, spec.chief), "between_graph", (), 1.0)
  with pytest.raises(cluster.ClusterError, match="spec.json: `layers` must be"):
    custom_loop._replica(_replica, part)


def test_fit_refuses_layers_of_the_spec(monkeypatch):
  monkeypatch.setenv("TF_REPLICAS_CLUSTER_SPEC", json.dumps(_SPEC))
  monkeypatch.setenv("TF_REPLICAS_TASK", "worker:0")
  with pytest.raises(
    cluster.ClusterError, match="`layers` must be absent for `fit`.*'b': 1"
  ) as caught:
    tf_replicas.fit(lambda: None, np.ones([4, 1]), np.ones([4, 1]))
  assert "\n" not in str(caught.value)


def test_the_values_are_arrays():
  trained = tf_replicas.run(_replica, _sgd, max_steps=1, log_every_steps=None)
  assert isinstance(trained.values["slope"], np.ndarray)


def _run_example(name, names):
  """Runs a code block of the documentation with, and into, `names`."""
  text = (_DOCS / "custom_loops.md").read_text(encoding="utf-8")
  pattern = rf"<!-- example: {name} -->\n```python\n(.*?)```"
  # AutoGraph reads the source of what it converts.
  code = re.search(pattern, text, re.DOTALL).group(1)
  path = names["directory"] / f"{name}.py"
  path.write_text(code, encoding="utf-8")
  exec(compile(code, str(path), "exec"), names)


def test_the_documentation_trains(tmp_path, monkeypatch, capsys):
  names = {"directory": tmp_path, "__name__": "docs"}
  _run_example("run", names)
  assert float(names["line"].slope) == pytest.approx(3.0, abs=0.01)
  assert "largest = " in capsys.readouterr().out
  names |= {"replica_fn": _replica, "optimizer_fn": _sgd}
  _run_example("join", names)
  assert names["result"].global_step == 100
  monkeypatch.chdir(tmp_path)
  for said in ("training from step 0 to 100", "restored"):
    _run_example("session", names)
    output = capsys.readouterr().out
    assert said in output and "updates: 100" in output
  _run_example("tf1", names)
  np.testing.assert_allclose(
    names["trained"].values["kernel"], np.ones([3, 1]), atol=0.1
  )
