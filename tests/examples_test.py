"""The examples of training code train, alone and on clusters."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from tests.support import trials

_EXAMPLES = trials.ROOT / "examples"
_CLUSTER = ["-m", "tf_replicas.launch", "--ps=1", "--workers=2"]


def _last_number(name: str, *prefix: str) -> float:
  """The number at the end of what an example prints."""
  result = subprocess.run(
    [sys.executable, *prefix, str(_EXAMPLES / name)],
    env={**os.environ, **trials.ENVIRON},
    capture_output=True,
    text=True,
    timeout=trials.DEADLINE_SECS,
    check=False,
  )
  assert result.returncode == 0, result.stdout + result.stderr
  return float(re.findall(r": ([\d.]+)$", result.stdout, re.MULTILINE)[-1])


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


@pytest.mark.parametrize(
  "path", sorted(_EXAMPLES.glob("*.py")), ids=lambda path: path.name
)
def test_is_short(path):
  assert len(path.read_text(encoding="utf-8").splitlines()) < 60
