"""The examples of training code train, alone and on clusters."""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.support import trials

_EXAMPLES = trials.ROOT / "examples"
_CLUSTER = ["-m", "tf_replicas.launch", "--ps=1", "--workers=2"]


def _last_number(name: str, *prefix: str) -> float:
  """The number at the end of what an example prints."""
  output = _output(name, prefix=prefix)
  return float(re.findall(r": ([\d.]+)$", output, re.MULTILINE)[-1])


def _output(name: str, *flags: str, prefix: Sequence[str] = ()) -> str:
  """What an example prints."""
  result = subprocess.run(
    [sys.executable, *prefix, str(_EXAMPLES / name), *flags],
    env={**os.environ, **trials.ENVIRON},
    capture_output=True,
    text=True,
    timeout=trials.DEADLINE_SECS,
    check=False,
  )
  assert result.returncode == 0, result.stdout + result.stderr
  return result.stdout


@pytest.mark.parametrize("name", ["tf_module.py", "custom_loop.py"])
def test_learns_on_a_cluster(name):
  assert _last_number(name, *_CLUSTER) > 0.85


def test_tf_keras_learns():
  assert _last_number("tf_keras_model.py") > 0.85


@pytest.mark.skipif(
  importlib.util.find_spec("sonnet") is None, reason="needs dm-sonnet"
)
def test_sonnet_learns():
  assert _last_number("sonnet_module.py") > 0.85


def test_the_gan_makes_numbers_like_those_of_the_data():
  assert _last_number("gan.py") == pytest.approx(4.0, abs=0.8)


def test_the_recommender_learns_what_can_be_known(tmp_path):
  output = _output(
    "recommender/train.py",
    f"--train_dir={tmp_path}",
    f"--export_dir={tmp_path}/exported",
    "--epochs=2",
  )
  best, reached = map(float, re.findall(r"AUC.*: ([\d.]+)$", output, re.M))
  assert 0.85 < best < 0.95
  assert 0.96 * best < reached < best
  assert (tmp_path / "exported" / "saved_model.pb").exists()


@pytest.mark.parametrize(
  "path", sorted(_EXAMPLES.glob("*.py")), ids=lambda path: path.name
)
def test_is_short(path):
  assert len(path.read_text(encoding="utf-8").splitlines()) < 60
