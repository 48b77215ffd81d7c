"""Tests for tf_replicas.launcher: every spec without parameter servers."""

import pathlib
import signal
import subprocess
import sys
import time

import conftest
import launcher_task
import pytest

from tf_replicas import checkpoints

PROGRAM = pathlib.Path(launcher_task.__file__)
SPECS = conftest.ROOT / "cluster_specs"


def _start(spec, directory, max_steps, *flags):
  path = SPECS / spec
  if not path.exists():
    path = directory / "spec.json"
    path.write_text(spec)
  environ = dict(conftest.ENVIRON)
  environ["PYTHONPATH"] += f":{PROGRAM.parent}"
  return subprocess.Popen(
    [sys.executable, PROGRAM, path, directory, str(max_steps), *flags],
    env=environ,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def _run(*arguments):
  """(Exit status, output)."""
  process = _start(*arguments)
  try:
    output, _ = process.communicate(timeout=300)
  except subprocess.TimeoutExpired:
    process.terminate()
    output, _ = process.communicate(timeout=30)
    raise AssertionError(f"it did not end:\n{output}") from None
  return process.returncode, output


TWO_MIRRORED = """{
  "devices": {"worker": {"gpus": [0, 1]}}, "variables": {"on": "mirrored"}
}"""


@pytest.mark.cluster
def test_one_training_goes_through_all_of_them(tmp_path):
  """One directory, resumed with other devices and drivers each time."""
  status, output = _run("one_device.json", tmp_path, 2)
  assert status == 0, output
  assert "from 1 tower of batch 3: effective batch 3" in output
  assert "Total: 4 variables, 57 parameters, 228 B" in output

  status, output = _run("four_towers.json", tmp_path, 4, "emulate_gpus")
  assert status == 0, output
  assert f"restored {tmp_path}/model.ckpt-2" in output
  assert "from 4 towers of batch 3: effective batch 12" in output

  status, output = _run(TWO_MIRRORED, tmp_path, 6, "emulate_gpus")
  assert status == 0, output
  assert f"restored {tmp_path}/model.ckpt-4" in output
  assert "from 2 replicas of batch 3: effective batch 6" in output

  status, output = _run("mirrored_2workers.json", tmp_path, 8)
  assert status == 0, output
  assert f"[worker 0] restored {tmp_path}/model.ckpt-6" in output
  assert "[worker 0] finished at step 8" in output

  state = checkpoints.read(checkpoints.latest(str(tmp_path)))
  assert state["global_step"] == 8
  assert state["examples_seen"] == 2 * 3 + 2 * 12 + 2 * 6 + 2 * 6


@pytest.mark.parametrize(
  ("spec", "words"),
  [
    ("four_towers.json", "from 4 towers of batch 3: effective batch 12"),
    ("mirrored_2workers.json", "from 2 replicas of batch 3: effective batch 6"),
  ],
)
def test_dry_run_starts_nothing(tmp_path, spec, words):
  status, output = _run(spec, tmp_path, 2, "dry_run")
  assert status == 0, output
  assert words in output
  assert "Total: 4 variables, 57 parameters, 228 B" in output
  assert not list(tmp_path.iterdir())


def test_gpus_that_do_not_exist_are_one_line(tmp_path):
  status, output = _run("four_towers.json", tmp_path, 2)
  assert status == 2
  errors = [x for x in output.splitlines() if x.startswith("error: ")]
  assert len(errors) == 1 and "use --emulate_gpus" in errors[0], output
  assert "Traceback" not in output


@pytest.mark.cluster
@pytest.mark.parametrize("spec", ["one_device.json", "mirrored_2workers.json"])
def test_an_interrupt_saves(tmp_path, spec):
  process = _start(spec, tmp_path, 10**6)
  output = []
  deadline = time.monotonic() + 300
  for line in process.stdout:
    output.append(line)
    if "step 10," in line or time.monotonic() > deadline:
      break
  process.send_signal(signal.SIGTERM)
  try:
    rest, _ = process.communicate(timeout=60)
  finally:
    process.kill()
  assert process.returncode == 128 + signal.SIGTERM, "".join(output) + rest
  assert checkpoints.latest(str(tmp_path)) is not None, rest
