"""Tests of `cifar10.train` as a user runs it."""

import functools
import json
import signal

import cifar10_binaries as binaries
import conftest
import numpy as np
import pytest

from tf_replicas import checkpoints

MODULE = "cifar10.train"


def flags(train_dir, *more: str) -> list[str]:
  """Flags of a quick run."""
  return [
    "--dataset=synthetic",
    f"--train_dir={train_dir}",
    "--batch_size=16",
    "--learning_rate=0.05",
    *more,
  ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """A run of 20 steps, which another takes to 25 in half precision."""
  train_dir = tmp_path_factory.mktemp("train")
  run = functools.partial(binaries.succeed, MODULE)
  first = run(*flags(train_dir, "--max_steps=20", "--log_frequency=5"))
  saved = checkpoints.read(checkpoints.latest(train_dir))
  more = ["--max_steps=25", "--log_every_steps=1", "--compute_dtype=bfloat16"]
  second = run(*flags(train_dir, *more))
  return train_dir, first, saved, second


def test_log_lines_have_the_tutorials_form(trained):
  _, first, _, second = trained
  assert binaries.logged_steps(first) == [5, 10, 15, 20]
  assert binaries.logged_steps(second) == [21, 22, 23, 24, 25]


def test_the_parameters_are_counted(trained):
  _, first, _, _ = trained
  assert "1,068,298 parameters" in first
  assert "effective batch 16" in first


def test_the_first_loss_is_the_tutorials(trained):
  _, first, _, _ = trained
  step, loss = binaries.LOG_LINE.findall(first)[0]
  assert step == "5"
  assert float(loss) == pytest.approx(4.65, abs=0.1)


def test_the_second_run_resumed_the_first(trained):
  train_dir, _, saved, second = trained
  assert saved["global_step"] == 20
  assert saved["examples_seen"] == 20 * 16
  assert f"restored {train_dir}/model.ckpt-20" in second
  state = checkpoints.read(checkpoints.latest(train_dir))
  assert state["global_step"] == 25
  assert state["examples_seen"] == 25 * 16
  assert checkpoints.read_finished(train_dir).global_step == 25


def test_variables_are_float32_whatever_computes(trained):
  train_dir, _, saved, _ = trained
  state = checkpoints.read(checkpoints.latest(train_dir))
  for name, value in state.items():
    if name.startswith(("variables/", "averages/")):
      assert value.dtype == np.float32, name
      assert np.any(value != saved[name]), name


def test_the_settings_are_recorded(trained):
  train_dir, _, _, _ = trained
  recorded = json.loads((train_dir / "config.json").read_text())
  assert recorded["compute_dtype"] == "bfloat16"
  assert recorded["batch_size"] == 16
  assert recorded["max_steps"] == 25


def test_a_finished_run_has_nothing_left_to_do(trained):
  train_dir, _, _, _ = trained
  names = ("model.ckpt*", "config.json")
  before = {p: p.read_bytes() for n in names for p in train_dir.glob(n)}
  output = binaries.succeed(
    MODULE, *flags(train_dir, "--max_steps=25", "--seed=5")
  )
  assert not binaries.logged_steps(output)
  after = {p: p.read_bytes() for n in names for p in train_dir.glob(n)}
  assert after == before


def test_dry_run_starts_nothing(tmp_path):
  train_dir = tmp_path / "run"
  output = binaries.succeed(MODULE, *flags(train_dir, "--dry_run"))
  assert "1,068,298 parameters" in output
  assert not train_dir.exists()


def test_dry_run_downloads_nothing(tmp_path):
  more = ["--dataset=cifar10", f"--data_dir={tmp_path}", "--dry_run"]
  output = binaries.succeed(MODULE, *flags(tmp_path / "run", *more))
  assert "cifar10 is not there yet; training will download it" in output
  assert "1,068,298 parameters" in output
  assert not list(tmp_path.iterdir())


def test_an_interrupted_modern_run_ends_as_an_uninterrupted_one(tmp_path):
  """Weights, slots, averages: rate, crops and data go on where they were."""
  # Of 128 examples the last 19 are cropped near the middle.
  modern = ["--recipe=modern", "--num_epochs=0.00256"]
  states = []
  for name, parts in (("whole", [[]]), ("two", [["--max_steps=5"], []])):
    for part in parts:
      binaries.succeed(MODULE, *flags(tmp_path / name, *modern, *part))
    states.append(checkpoints.read(checkpoints.latest(tmp_path / name)))
  whole, two = states
  assert whole["global_step"] == 8
  assert any(name.startswith("slots/") for name in whole)
  assert whole.keys() == two.keys()
  for name, value in whole.items():
    np.testing.assert_array_equal(value, two[name], name)
  # The cycle of the learning rate is over.
  beyond = flags(tmp_path / "two", *modern, "--max_steps=12")
  words = "after 128 examples the schedule of the learning rate must not be at"
  binaries.refuse(MODULE, words, *beyond)
  kept = checkpoints.read(checkpoints.latest(tmp_path / "two"))
  assert kept["global_step"] == 8


def test_a_file_in_the_place_of_the_directory(tmp_path):
  (tmp_path / "file").touch()
  words = "`--train_dir` must be a directory"
  binaries.refuse(MODULE, words, *flags(tmp_path / "file"))


@pytest.mark.parametrize(
  "words, flag",
  [
    ("no_such_flag", "--no_such_flag"),
    ("num_gpus", "--num_gpus=2"),
    ("surplus", "surplus"),
    ("max_steps", "--max_steps=0"),
    ("log_every_steps", "--log_frequency=0"),
    ("`momentum` must be in [0, 1)", "--momentum=1.5"),
    ("compute_dtype", "--compute_dtype=float64"),
    ("checkpoint_every_secs", "--checkpoint_every_secs=0"),
    ("'cifar11'", "--dataset=cifar11"),
  ],
)
def test_bad_usage_is_one_line(tmp_path, words, flag):
  train_dir = tmp_path / "run"
  binaries.refuse(MODULE, words, *flags(train_dir, flag))
  assert not train_dir.exists()


def test_an_interrupt_saves(tmp_path):
  with conftest.running(
    binaries.command(MODULE, *flags(tmp_path, "--max_steps=100000")),
    environ=binaries.environ(),
  ) as process:
    output = conftest.read_until("step 10,", process)
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
  assert process.returncode == 128 + signal.SIGINT, output + rest
  assert "Traceback" not in rest
  assert checkpoints.read(checkpoints.latest(tmp_path))["global_step"] >= 10
  assert checkpoints.read_finished(tmp_path) is None


def test_help_shows_the_flags_of_the_binary():
  output = binaries.run(MODULE, "--help").stdout
  for name in ("--train_dir", "--max_steps", "--compute_dtype"):
    assert name in output
  assert "--job_name" not in output
