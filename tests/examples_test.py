"""The examples of training code train, alone and on clusters."""

import ast
import importlib.util
import os
import re
import runpy
import sys
from collections.abc import Sequence

import numpy as np
import pytest
import tensorflow as tf

from tests.support import trials
from tf_replicas.programs import update_options

_EXAMPLES = trials.ROOT / "examples"
_CLUSTER = ["-m", "tf_replicas.launch", "--preload", "--ps=1", "--workers=2"]


def _output(name: str, *prefix: str, arguments: Sequence[str] = ()) -> str:
  """What an example prints."""
  result = trials.python(*prefix, str(_EXAMPLES / name), *arguments)
  assert result.returncode == 0, result.stdout + result.stderr
  return result.stdout


def _last_number(output: str) -> float:
  """The number at the end of a line, of the last that has one."""
  return float(re.findall(r": ([\d.]+(?:e-\d+)?)$", output, re.MULTILINE)[-1])


@pytest.mark.parametrize("name", ["tf_module.py", "custom_loop.py"])
def test_learns_on_a_cluster(name):
  assert _last_number(_output(name, *_CLUSTER)) > 0.85


def test_tf_keras_learns():
  assert _last_number(_output("tf_keras_model.py")) > 0.85


@pytest.mark.skipif(
  importlib.util.find_spec("sonnet") is None, reason="needs dm-sonnet"
)
def test_sonnet_learns():
  assert _last_number(_output("sonnet_module.py")) > 0.85


@pytest.mark.exhaustive
def test_the_gan_makes_numbers_like_those_of_the_data():
  assert _last_number(_output("gan.py")) == pytest.approx(4.0, abs=0.8)


def test_a_backup_worker_saves_the_time_of_a_slow_one():
  """All of 4 wait 0.2 s for the slow one; how fast 3 are, the machine says.

  The mean is of 11 steps. If the chief stands still at the first of them, the
  slow one may be two batches ahead, so that only 9 take as long.
  """
  output = _output("backup_workers.py", *_CLUSTER[:-1], "--workers=4")
  pattern = r"4 of 4: ([\d.]+) s per step; 3 of 4: ([\d.]+) s per step"
  all_4, first_3 = map(float, re.search(pattern, output).groups())
  assert all_4 > 0.16
  saved = re.search(r"the backup worker saves (-?\d+)% of the time", output)
  assert int(saved.group(1)) == pytest.approx(
    100 * (1 - first_3 / all_4), abs=2
  )


def test_an_own_policy_counts_what_is_stale_on_a_cluster():
  output = _output("own_policy.py", *_CLUSTER)
  # A worker that comes late may have no gradient among the 400: `()`.
  found = re.findall(r"worker \d: staleness (\(.*?\)), \d+ ref", output)
  counts = [ast.literal_eval(each) for each in found]
  assert len(counts) == 2
  assert sum(map(sum, counts)) == 400
  assert max(map(len, counts)) <= 10  # 0 to 9 updates old.
  assert _last_number(output) < 0.01


def test_layers_are_on_two_devices():
  output = _output("model_parallel.py")
  assert re.search(r"first_2.*CPU:0", output), output
  assert re.search(r"last.*CPU:1", output), output
  assert _last_number(output) > 0.85


def _run_alone(
  name: str, arguments: list[str], monkeypatch, capsys
) -> tuple[dict, str]:
  """Runs an example in this process: its global names, what it prints."""
  for variable in [n for n in os.environ if n.startswith("TF_REPLICAS_")]:
    monkeypatch.delenv(variable)
  monkeypatch.setattr(sys, "argv", [name, *arguments])
  names = runpy.run_path(str(_EXAMPLES / name))
  return names, capsys.readouterr().out


def test_an_own_rule_moves_by_signs(monkeypatch, capsys):
  names, output = _run_alone("own_rule.py", [], monkeypatch, capsys)
  monkeypatch.delitem(update_options.RULES, "sign_sgd")
  kernel, bias = names["trained"].values.values()
  np.testing.assert_allclose(kernel, np.ones([3, 1]), atol=0.02)
  np.testing.assert_allclose(bias, [0.0], atol=0.02)
  assert _last_number(output) < 0.01


def test_resumes_under_another_rule(tmp_path, monkeypatch, capsys):
  arguments = [f"--train_dir={tmp_path}", "--rule=sync", "--max_steps=100"]
  names, _ = _run_alone("resume.py", arguments, monkeypatch, capsys)
  assert names["trained"].global_step == 100
  arguments = [f"--train_dir={tmp_path}", "--rule=async", "--max_steps=200"]
  output = _output("resume.py", *_CLUSTER, arguments=arguments)
  assert f"restored {tmp_path}/model.ckpt-100" in output
  assert "training from step 100 to 200" in output
  assert _last_number(output) < 0.3


def test_the_recommender_learns_what_can_be_known(tmp_path):
  arguments = [
    f"--train_dir={tmp_path}",
    f"--export_dir={tmp_path}/exported",
    "--epochs=2",
  ]
  output = _output("recommender/train.py", arguments=arguments)
  best, reached = map(float, re.findall(r"AUC.*: ([\d.]+)$", output, re.M))
  assert 0.85 < best < 0.95
  assert 0.96 * best < reached < best
  loaded = tf.saved_model.load(str(tmp_path / "exported"))
  ids = {name: tf.constant([3, 1, 2]) for name in ("user", "item")}
  assert loaded.serve(ids).shape == [3, 1]


@pytest.mark.parametrize(
  "path", sorted(_EXAMPLES.glob("*.py")), ids=lambda path: path.name
)
def test_is_short(path):
  assert len(path.read_text(encoding="utf-8").splitlines()) < 80


def test_every_program_is_listed():
  text = (_EXAMPLES / "README.md").read_text(encoding="utf-8")
  listed = re.findall(r"^\| \[`?([\w/.]+)`?\]\(\1\) \|", text, re.MULTILINE)
  programs = [*_EXAMPLES.glob("*.py"), *_EXAMPLES.glob("keras/*.py")]
  programs.append(_EXAMPLES / "recommender" / "train.py")
  expected = [str(path.relative_to(_EXAMPLES)) for path in programs]
  assert sorted(listed) == sorted(expected)
