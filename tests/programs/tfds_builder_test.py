"""Tests of `programs.tfds_builder`; see also those of the sources."""

import os
import subprocess
import sys

import pytest

from tests.support import trials
from tf_replicas.programs import tfds_builder

PROGRAM = trials.ROOT / "tests" / "tasks" / "prepared_task.py"


def test_devices_can_still_be_chosen_after_it_prepared_a_data_set(tmp_path):
  pytest.importorskip("tensorflow_datasets")
  result = subprocess.run(
    [sys.executable, PROGRAM, tmp_path],
    env={**os.environ, "PYTHONPATH": str(trials.ROOT)},
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
  )
  assert result.returncode == 0, result.stdout + result.stderr
  assert "[0, 1, 2]" in result.stdout.replace("np.uint8(", "").replace(")", "")
  assert "CPU:1" in result.stdout
  assert list((tmp_path / "grey").glob("1.0.0/*.tfrecord*"))


def test_a_missing_package_names_the_extra(monkeypatch):
  monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
  with pytest.raises(tfds_builder.DataError) as raised:
    tfds_builder.builder(
      "mnist", None, download=False, others="synthetic", advice="Advice."
    )
  message = str(raised.value)
  assert "tensorflow_datasets" in message and "\n" not in message
  assert (
    "pip install tensorflow-datasets importlib_resources. Advice." in message
  )
