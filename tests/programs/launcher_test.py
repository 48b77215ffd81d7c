"""Tests for programs.launcher: every spec without parameter servers."""

import io
import pathlib
import signal
import sys

import pytest

from tests.support import trials
from tests.tasks import launcher_task
from tf_replicas.programs import launcher
from tf_replicas.session import checkpoints

PROGRAM = pathlib.Path(launcher_task.__file__)
SPECS = trials.ROOT / "cluster_specs"


def _started(spec, directory, max_steps, *flags):
  path = SPECS / spec
  if not path.exists():
    path = directory / "spec.json"
    path.write_text(spec)
  environ = dict(trials.ENVIRON)
  environ["PYTHONPATH"] += f":{PROGRAM.parent}"
  command = [sys.executable, PROGRAM, path, directory, str(max_steps), *flags]
  return trials.running(command, environ=environ)


def _run(*arguments):
  """(Exit status, output)."""
  with _started(*arguments) as process:
    output, _ = process.communicate()
  return process.returncode, output


TWO_MIRRORED = """{
  "devices": {"worker": {"gpus": [0, 1]}}, "variables": {"on": "mirrored"}
}"""


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


class _Terminal(io.StringIO):
  def isatty(self):
    return True


def test_the_bar_begins_with_the_training(monkeypatch):
  monkeypatch.setattr(sys, "stdout", terminal := _Terminal())
  echo = launcher._Echo()
  echo("[worker 0] training from step 20 to 40")
  assert "20/40" in terminal.getvalue()
  echo(
    "[worker 0] 2026-11-24 16:00:00: step 30, loss = 1.23, accuracy = 0.5 (64.0"
    " examples/sec; 0.500 sec/batch); learning rate 0.05; 0:00:05 left to step"
    " 40"
  )
  echo.close()
  assert "30/40" in terminal.getvalue()
  assert "loss = 1.23, learning rate 0.05" in terminal.getvalue()


def test_a_machine_of_no_task_starts_none(tmp_path):
  """Each is for another; all of them were started here once."""
  spec = """{"cluster": {"ps": ["a.example:2222"],
    "worker": ["b.example:2222", "c.example:2222"]}}"""
  status, output = _run(spec, tmp_path, 2)
  assert status == 2, output
  (error,) = output.splitlines()
  assert error.startswith("error: ")
  assert "`cluster` must have a task at an address of this machine" in error
  assert "c.example:2222" in error
  assert not (tmp_path / "logs").exists()


def test_gpus_that_do_not_exist_are_one_line(tmp_path):
  status, output = _run("four_towers.json", tmp_path, 2)
  assert status == 2
  errors = [x for x in output.splitlines() if x.startswith("error: ")]
  assert len(errors) == 1 and "--emulate_gpus" in errors[0], output
  assert "Traceback" not in output


@pytest.mark.parametrize("spec", ["one_device.json", "mirrored_2workers.json"])
def test_an_interrupt_saves(tmp_path, spec):
  with _started(spec, tmp_path, 10**6) as process:
    output = trials.read_until("step 10,", process)
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=60)
  assert process.returncode == 128 + signal.SIGTERM, output + rest
  assert checkpoints.latest(str(tmp_path)) is not None, rest
