"""Tests for experiments.trainings; the trainings take too long to run here."""

import json
import subprocess
import sys

import pytest

from experiments import trainings

# 50 updates of 1,000 examples are an epoch.
_RESULT = {
  "last_line": "finished at step 100: 100000 examples",
  "precision_by_step": [[25, 0.5], [100, 0.75]],
}


def test_every_measurement_is_read_with_its_step():
  output = "".join(
    f"12:00: evaluating /tmp/run/model.ckpt-{step}\n12:01: a line\n"
    f"12:01: precision @ 1 = {precision}\n"
    for step, precision in ((782, 0.5), (1564, 0.625))
  )
  assert trainings.measured(output) == [(782, 0.5), (1564, 0.625)]


def test_a_curve_counts_epochs_by_examples():
  assert trainings.by_epochs(_RESULT) == [(0.5, 0.5), (2.0, 0.75)]


def _run(*arguments):
  return subprocess.run(
    [sys.executable, "-m", "experiments.trainings", *arguments],
    capture_output=True,
    text=True,
    check=False,
    timeout=120,
  )


def test_the_picture_is_drawn_from_stored_results(tmp_path):
  pytest.importorskip("matplotlib")
  path = tmp_path / "trainings.json"
  path.write_text(json.dumps({"tutorial": _RESULT, "modern": _RESULT}))
  stored = path.read_bytes()
  result = _run("--draw", f"--output={path}")
  assert result.returncode == 0, result.stderr
  assert (tmp_path / "recipes.png").read_bytes().startswith(b"\x89PNG")
  assert path.read_bytes() == stored


def test_a_picture_without_a_training_is_refused(tmp_path):
  path = tmp_path / "trainings.json"
  path.write_text(json.dumps({"modern": _RESULT}))
  result = _run("--draw", f"--output={path}")
  assert result.returncode == 2
  assert result.stderr.strip().endswith("Missing: tutorial.")
