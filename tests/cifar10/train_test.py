"""Tests of `cifar10.train`, as a user runs it and as a notebook calls it."""

import json
import signal

import numpy as np
import pytest

from cifar10 import config as config_lib
from cifar10 import train
from tests.programs import calls
from tests.support import binaries
from tests.support import optimizers
from tests.support import trials
from tf_replicas.session import checkpoints

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


def config(train_dir, **given) -> config_lib.Config:
  """What these flags say."""
  given = {"batch_size": 16, "learning_rate": 0.05, **given}
  return config_lib.Config("synthetic", train_dir=str(train_dir), **given)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """A run of 20 steps, which a call takes to 25 in half precision."""
  train_dir = tmp_path_factory.mktemp("train")
  more = ["--max_steps=20", "--log_frequency=5"]
  result = binaries.run(MODULE, *flags(train_dir, *more))
  assert (result.returncode, result.stderr) == (0, ""), result
  first = result.stdout
  saved = checkpoints.read(checkpoints.latest(train_dir))
  settings = config(train_dir, max_steps=25, compute_dtype="bfloat16")
  outcome, second = calls.train(train.train, settings, log_every_steps=1)
  assert outcome.global_step == 25
  assert f"step 25, loss = {outcome.loss:.2f} " in second
  return train_dir, first, saved, second


def test_log_lines_have_the_tutorials_form(trained):
  _, first, _, second = trained
  assert binaries.logged_steps(first) == [5, 10, 15, 20]
  assert binaries.logged_steps(second) == [21, 22, 23, 24, 25]


def test_each_line_is_there_once(trained):
  _, first, _, _ = trained
  binaries.assert_tidy(first)
  assert "\ntraining from step 0 to 20\n" in first
  assert "learning rate 0.05; 0:0" in first and " left to step 20\n" in first


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
  settings = config(train_dir, max_steps=25, seed=5)
  outcome, output = calls.train(train.train, settings)
  assert outcome == (25, None)
  assert not binaries.logged_steps(output)
  after = {p: p.read_bytes() for n in names for p in train_dir.glob(n)}
  assert after == before


def test_a_second_training_in_one_process(tmp_path):
  outcomes = [
    train.train(config(tmp_path / name, max_steps=max_steps))
    for name, max_steps in (("one", 1), ("two", 2))
  ]
  assert [outcome.global_step for outcome in outcomes] == [1, 2]


def test_a_call_raises_what_a_binary_prints(tmp_path):
  (tmp_path / "file").touch()
  with pytest.raises(ValueError, match="`--train_dir` must be a directory"):
    train.train(config(tmp_path / "file"))
  with pytest.raises(ValueError, match="`keep_checkpoints` must be in"):
    train.train(config(tmp_path / "run"), keep_checkpoints=0)
  with pytest.raises(ValueError, match="`dry_run` must be False"):
    train.train(config(tmp_path / "run"), dry_run=True)
  assert not (tmp_path / "run").exists()


def test_dry_run_starts_and_downloads_nothing(tmp_path):
  more = ["--dataset=cifar10", f"--data_dir={tmp_path}", "--dry_run"]
  output = binaries.succeed(MODULE, *flags(tmp_path / "run", *more))
  missing = f"cifar10 is not in {tmp_path} yet; training will download it"
  assert missing in output
  assert "1,068,298 parameters" in output
  assert not list(tmp_path.iterdir())


def test_an_interrupted_modern_run_ends_as_an_uninterrupted_one(tmp_path):
  """Weights, slots, averages: rate, crops and data go on where they were."""
  optimizers.require("Muon", "rms_rate")
  # Of 128 examples the last 19 are cropped near the middle.
  modern = {"dataset": "synthetic", "batch_size": 16, "learning_rate": 0.05}
  modern["num_epochs"] = 0.00256

  def run(name, max_steps=None):
    given = {**modern, "train_dir": str(tmp_path / name)}
    given["max_steps"] = max_steps
    settings = config_lib.fit("modern", given, effective_batch=16)
    return calls.train(train.train, settings)[0].global_step

  states = []
  for name, parts in (("whole", [None]), ("two", [5, None])):
    assert [run(name, part) for part in parts] == [p or 8 for p in parts]
    states.append(checkpoints.read(checkpoints.latest(tmp_path / name)))
  whole, two = states
  assert whole["global_step"] == 8
  assert any(name.startswith("slots/") for name in whole)
  assert whole.keys() == two.keys()
  for name, value in whole.items():
    np.testing.assert_array_equal(value, two[name], name)
  # The cycle of the learning rate is over.
  words = "the schedule of the learning rate must not end before the training"
  with pytest.raises(checkpoints.CheckpointError, match=words):
    run("two", 12)
  kept = checkpoints.read(checkpoints.latest(tmp_path / "two"))
  assert kept["global_step"] == 8


def test_a_divergence_says_what_to_change(tmp_path):
  more = ["--learning_rate=1e30", "--max_steps=9", "--log_every_steps=1"]
  result = binaries.run(MODULE, *flags(tmp_path / "run", *more))
  assert result.returncode == 1
  line = result.stderr.splitlines()[-1]
  assert "not finite" in line or "diverged" in line
  assert "; try --learning_rate=0.0125 (1e+30 was used), or --clip_norm" in line
  reason = "learning rate 1e+30, as given; the default is 0.0125 (updates of 16"
  assert reason in result.stdout


def test_a_file_in_the_place_of_the_directory(tmp_path):
  (tmp_path / "file").touch()
  words = "`--train_dir` must be a directory"
  binaries.refuse(MODULE, words, *flags(tmp_path / "file"))


@pytest.mark.parametrize(
  "words, flag",
  [
    ("no_such_flag", "--no_such_flag"),
    ("is gone: use --num_gpus of cifar10.multi_gpu_train", "--num_gpus=2"),
    ("is gone: use --learning_rate", "--initial_learning_rate=0.1"),
    ("is gone: use --replicas_to_agg", "--num_replicas_to_aggregate=2"),
    ("surplus", "surplus"),
    ("max_steps", "--max_steps=0"),
    ("log_every_steps", "--log_frequency=0"),
    ("`momentum` must be in [0, 1)", "--momentum=1.5"),
    ("`clip_norm` must be in (0, inf)", "--clip_norm=0"),
    ("`--momentum_correction` needs", "--momentum_correction"),
    ("compute_dtype", "--compute_dtype=float64"),
    ("checkpoint_every_secs", "--checkpoint_every_secs=0"),
    ("'cifar11'", "--dataset=cifar11"),
    ("`--micro_batches` must divide", "--micro_batches=3"),
    ("is gone: use --compute_dtype=float16", "--use_fp16"),
    ("is gone: use --train_dir", "--checkpoint_dir=/tmp"),
    ("is gone: evaluation counts every image", "--num_examples=100"),
    ("is gone: tf.data chooses", "--num_preprocess_threads=4"),
    ("is gone: use --task_index", "--task_id=0"),
    ("is gone: use --cluster_spec", "--ps_hosts=a:1"),
    ("is gone: use --cluster_spec", "--worker_hosts=a:1"),
    ("is gone: use --update=sync", "--sync_replicas"),
    ("is gone: training uses the training images", "--subset=train"),
  ],
)
def test_bad_usage_is_one_line(tmp_path, words, flag):
  train_dir = tmp_path / "run"
  binaries.refuse(MODULE, words, *flags(train_dir, flag))
  assert not train_dir.exists()


def test_an_interrupt_saves(tmp_path):
  with trials.running(
    binaries.command(
      MODULE,
      *flags(tmp_path, "--max_steps=100000", "--log_device_placement"),
    ),
    environ=binaries.environ(),
  ) as process:
    output = trials.read_until("step 10,", process)
    assert "(Conv2D): /job:localhost/replica:0/task:0/device:CPU:0" in output
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
  assert process.returncode == 128 + signal.SIGINT, rest
  assert "Traceback" not in rest
  assert checkpoints.read(checkpoints.latest(tmp_path))["global_step"] >= 10
  assert checkpoints.read_finished(tmp_path) is None


def test_help_shows_the_flags_of_the_binary():
  result = binaries.run(MODULE, "--help")
  assert result.returncode == 0
  output = result.stdout
  assert output.startswith("Trains CIFAR-10 on one device")
  for name in ("--train_dir", "--max_steps", "--compute_dtype"):
    assert name in output
  assert "--job_name" not in output
