"""Tests of Inception's training and evaluation binaries, at their smallest."""

import json
import re
import shutil

import numpy as np
import pytest
import tensorflow as tf

from inception_mini import config
from inception_mini import eval as eval_lib
from inception_mini import inputs
from inception_mini import model as model_lib
from inception_mini import sources
from inception_mini import synthetic
from inception_mini import train
from tests.inception_mini import sources_test
from tests.programs import calls
from tests.support import binaries
from tf_replicas.programs import run_config
from tf_replicas.session import checkpoints
from tf_replicas.session import evaluation

# Tracing takes long where other work runs beside it.
TIMEOUT_SECS = 500.0
SMALL = (
  "--recipe=mini",
  "--dataset=synthetic",
  "--width=0.05",
  "--depth=0.1",
  "--batch_size=4",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """Two workers, one of them as backup: 3 steps."""
  train_dir = tmp_path_factory.mktemp("train")
  spec = train_dir / "spec.json"
  document = {
    "cluster": {
      "ps": ["localhost:0", "localhost:0"],
      "worker": ["localhost:0"] * 2,
    },
    "variables": {"on": "ps"},
  }
  spec.write_text(json.dumps(document))
  output = binaries.succeed(
    "inception_mini.distributed_train",
    *SMALL,
    f"--cluster_spec={spec}",
    f"--train_dir={train_dir}",
    "--num_replicas_to_aggregate=1",
    "--batch_norm_statistics=chief",
    "--max_steps=3",
    "--log_every_steps=1",
    timeout=TIMEOUT_SECS,
  )
  return str(train_dir), output


def _newest(train_dir):
  return checkpoints.read(checkpoints.latest(train_dir))


def test_trains_with_a_backup_replica(trained):
  train_dir, output = trained
  assert "; 2 replicas with 1 tower of batch 4 each; sync updates of 1 co" in (
    output
  )
  assert "effective batch 4" in output
  assert binaries.logged_steps(output) == [1, 2, 3]
  assert _newest(train_dir)["examples_seen"] == 3 * 4
  balance = float(re.search(r"Balance: ([\d.]+) ", output)[1])
  assert balance <= 1.1


def test_statistics_and_their_averages_have_moved(trained):
  state = _newest(trained[0])
  paths = [
    name.removeprefix("variables/")
    for name in state
    if name.startswith("variables/") and model_lib.is_statistic(name)
  ]
  assert len(paths) > 60
  for path in paths:
    start = 1.0 if path.endswith("variance") else 0.0
    moved, average = state[f"variables/{path}"], state[f"averages/{path}"]
    assert np.any(moved != start), path
    assert np.any(average != start) and np.any(average != moved), path


def test_evaluates_with_averages_of_everything(trained, tmp_path, capsys):
  train_dir, _ = trained
  settings = run_config.of_run(config.Config, train_dir)
  assert settings.num_classes == 10
  result = eval_lib.evaluate(settings, str(tmp_path), batch_size=300)
  pattern = (
    r"[-\d]+ [:.\d]+: precision @ 1 = (\d\.\d{4}) recall @ 5 = (\d\.\d{4})"
    r" \[1000 examples\]"
  )
  last = capsys.readouterr().out.splitlines()[-1]
  precision, recall = map(float, re.fullmatch(pattern, last).groups())

  model = model_lib.of_config(settings)
  averages = evaluation.averaged_variables(_newest(train_dir))
  for weight in model.weights:
    weight.assign(averages[weight.path])
  source = sources.find("synthetic")
  (batch,) = inputs.eval_batches(source, settings, 1000)
  images, labels = batch
  order = np.argsort(-model(images, training=False)["logits"], axis=-1)
  places = np.argmax(order == labels.numpy()[:, np.newaxis], axis=-1)
  assert result.num_examples == 1000
  np.testing.assert_allclose(result.precision, np.mean(places < 1), atol=2e-3)
  np.testing.assert_allclose(result.recall, np.mean(places < 5), atol=2e-3)
  assert abs(precision - result.precision) < 1e-4
  assert abs(recall - result.recall) < 1e-4
  assert tf.io.gfile.glob(f"{tmp_path}/events.*")


def test_evaluates_on_the_training_set(trained, capsys):
  train_dir, _ = trained
  settings = run_config.of_run(config.Config, train_dir)
  result = eval_lib.evaluate(settings, subset="train", batch_size=500)
  total = sum(synthetic.SHARDS["train"])
  assert result.num_examples == total
  assert f"[{total} examples]" in capsys.readouterr().out
  assert tf.io.gfile.glob(f"{train_dir}/eval_train/events.*")
  assert not tf.io.gfile.exists(f"{train_dir}/eval")


def small(train_dir, **given) -> config.Config:
  """What `SMALL` says."""
  sizes = {"width": 0.05, "depth": 0.1, "batch_size": 4, **given}
  return config.from_recipe(
    "mini", dataset="synthetic", train_dir=str(train_dir), **sizes
  )


def test_fine_tunes_to_another_number_of_classes(trained, tmp_path):
  train_dir, _ = trained
  settings = small(
    tmp_path,
    num_classes=12,
    pretrained_model_checkpoint_path=train_dir,
    learning_rate=1e-9,
    max_steps=1,
  )
  outcome, output = calls.train(train.train, settings)
  assert outcome.global_step == 1 and outcome.loss > 0
  assert f"starts from {train_dir}/model.ckpt-3; restored:\n" in output
  assert re.search(r"^  conv0_conv/kernel$", output, re.MULTILINE)
  assert re.search(r"^  conv0_norm/moving_mean$", output, re.MULTILINE)
  assert re.search(
    r"^initialized anew, not restored: .*\blogits/kernel", output, re.M
  )
  before, after = _newest(train_dir), _newest(str(tmp_path))
  np.testing.assert_allclose(
    after["variables/conv0_conv/kernel"],
    before["averages/conv0_conv/kernel"],
    atol=1e-6,
  )
  assert after["variables/logits/kernel"].shape[-1] == 12
  assert after["global_step"] == 1


@pytest.mark.exhaustive
def test_a_pretrained_model_is_needed_once(trained, tmp_path):
  """What is resumed does not start anew, wherever that model went."""
  train_dir, _ = trained
  shutil.copytree(train_dir, tmp_path / "run")
  output = binaries.succeed(
    "inception_mini.train",
    *SMALL,
    "--pretrained_model_checkpoint_path=/cleaned/up",
    f"--train_dir={tmp_path / 'run'}",
    "--max_steps=4",
    timeout=TIMEOUT_SECS,
  )
  assert "resuming at step 3; initial values are ignored" in output
  assert "settings changed on resuming: batch_norm_statistics " in output
  assert binaries.logged_steps(output) == [4]


def test_a_damaged_record_is_one_line(trained, tmp_path):
  train_dir, _ = trained
  sources_test.write_shards(tmp_path, [3, 3], "validation")
  path = tmp_path / "validation-00001-of-00002"
  contents = bytearray(path.read_bytes())
  contents[-7] ^= 1
  path.write_bytes(contents)
  binaries.refuse(
    "inception_mini.eval",
    f"TensorFlow failed: assertion failed: [{path}] [cannot be read to its end",
    f"--train_dir={train_dir}",
    "--dataset=records",
    f"--data_dir={tmp_path}",
    "--run_once",
    status=1,
  )


def test_a_missing_model_to_fine_tune_is_refused_before_training(tmp_path):
  settings = small(
    tmp_path / "run", pretrained_model_checkpoint_path=str(tmp_path / "no")
  )
  with pytest.raises(ValueError, match="No checkpoint file found"):
    train.train(settings)
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
  "words, flags",
  [
    ("`num_classes` must be at least 10", ["--num_classes=3"]),
    ("is gone: use --pretrained_model_checkpoint_path", ["--fine_tune"]),
    (
      "`--batch_norm_statistics=synchronized` needs towers (copies of",
      [
        "--batch_norm_statistics=synchronized",
        "--cluster_spec=cluster_specs/two_stages.json",
      ],
    ),
  ],
)
def test_bad_usage_is_one_line(tmp_path, words, flags):
  binaries.refuse(
    "inception_mini.train", words, *SMALL, f"--train_dir={tmp_path}", *flags
  )
