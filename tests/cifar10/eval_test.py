"""Tests of `cifar10.eval`."""

import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from cifar10 import config
from cifar10 import confusion
from cifar10 import distortions
from cifar10 import eval as eval_lib
from cifar10 import inputs
from cifar10 import model
from cifar10 import sources
from tests.support import binaries
from tests.support import trials
from tf_replicas.programs import run_config
from tf_replicas.session import checkpoints


@pytest.fixture(scope="module")
def train_dir(tmp_path_factory):
  directory = tmp_path_factory.mktemp("train")
  path = binaries.save_checkpoint(directory, seed=1, average_seed=2)
  checkpoints.write_finished(directory, checkpoints.Finished(7, path, ""))
  return directory


def summaries(directory):
  """Value by tag, of all event files."""
  found = {}
  for path in directory.glob("events.*"):
    for record in tf.data.TFRecordDataset(str(path)):
      event = tf.compat.v1.Event.FromString(record.numpy())
      for value in event.summary.value:
        assert event.step == 7
        found[value.tag] = tf.make_ndarray(value.tensor)
  return found


@pytest.fixture(scope="module")
def measured(train_dir, tmp_path_factory):
  """The confusion matrix of 1,000 synthetic images, and the summaries."""
  eval_dir = tmp_path_factory.mktemp("eval")
  settings = config.Config(dataset="synthetic", train_dir=str(train_dir))
  matrix = eval_lib.evaluate(settings, str(eval_dir), batch_size=300)
  return matrix, summaries(eval_dir)


def test_measures_the_moving_averages(measured):
  matrix, _ = measured
  network = model.build(seed=2)
  expected = np.zeros([10, 10], np.int64)
  source = sources.find("synthetic")
  for images, labels in inputs.eval_batches(source, 1000):
    predictions = np.argmax(network(images), axis=-1)
    np.add.at(expected, (labels.numpy(), predictions), 1)
  np.testing.assert_array_equal(matrix, expected)


def test_mean_of_the_views(train_dir, capsys):
  settings = config.Config(dataset="synthetic", train_dir=str(train_dir))
  matrix = eval_lib.evaluate(settings, batch_size=300, num_views=6)
  assert "[1000 examples of 6 views]" in capsys.readouterr().out
  assert list(train_dir.glob("eval_6_views/events.*"))
  network = model.build(seed=2)
  images, labels = sources.find("synthetic").read("test")
  crops = [distortions.center(images, size) for size in (22, 24, 26)]
  probabilities = sum(
    tf.nn.softmax(network(crop)) + tf.nn.softmax(network(crop[:, :, ::-1]))
    for crop in crops
  )
  expected = np.zeros([10, 10], np.int64)
  np.add.at(expected, (labels, np.argmax(probabilities, axis=-1)), 1)
  # The order of a sum may decide between two classes.
  assert np.sum(np.abs(matrix - expected)) <= 4


def test_tensorboard_gets_the_rates(measured):
  matrix, found = measured
  scalars = {tag: v for tag, v in found.items() if tag != "confusion_matrix"}
  assert scalars == pytest.approx(confusion.scalars(matrix))
  assert {f"recall/{label}" for label in config.LABELS} <= scalars.keys()


def test_tensorboard_gets_the_matrix(measured):
  pytest.importorskip("matplotlib")
  matrix, found = measured
  width, height, png = found["confusion_matrix"].tolist()
  image = tf.io.decode_png(png).numpy()
  assert image.shape == (int(height), int(width), 3)
  np.testing.assert_array_equal(image, confusion.picture(matrix))


def test_does_without_matplotlib(train_dir, tmp_path, monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, "matplotlib", None)
  settings = config.Config(dataset="synthetic", train_dir=str(train_dir))
  assert eval_lib.evaluate(settings, str(tmp_path)).sum() == 1000
  line = "no picture of the confusion matrix: matplotlib is not installed\n"
  assert capsys.readouterr().out.count(line) == 1
  assert "confusion_matrix" not in summaries(tmp_path)
  assert "precision @ 1" in summaries(tmp_path)


def test_counts_each_of_10000_images_once(train_dir, tmp_path):
  """No batch size divides them all; the tutorial counted 10,112."""
  binaries.make_record_files(tmp_path)
  output = binaries.succeed(
    "cifar10.eval",
    f"--train_dir={train_dir}",
    f"--eval_dir={tmp_path / 'eval'}",
    "--dataset=cifar10",
    f"--data_dir={tmp_path}",
    "--batch_size=128",
  )
  pattern = r"[-\d]+ [:.\d]+: precision @ 1 = 0\.\d{4} \[10000 examples\]"
  lines = output.splitlines()
  # Without --run_once too it ended by itself, after one measurement.
  assert [bool(re.fullmatch(pattern, line)) for line in lines].count(True) == 1
  assert re.search(r"^airplane +1000 +0\.\d{4} ", output, re.MULTILINE)


@pytest.mark.parametrize(
  "words, flags",
  [
    ("No checkpoint file found", []),
    ("Unknown command line flag", ["--run_twice"]),
    ("surplus", ["surplus"]),
  ],
)
def test_bad_usage_is_one_line(tmp_path, words, flags):
  binaries.refuse(
    "cifar10.eval",
    words,
    f"--train_dir={tmp_path}",
    "--run_once",
    *flags,
  )
  assert not list(tmp_path.iterdir())


def test_a_timeout_is_one_line(tmp_path):
  binaries.refuse(
    "cifar10.eval",
    "No checkpoint file found",
    f"--train_dir={tmp_path}",
    "--dataset=synthetic",
    "--timeout_secs=0.5",
    status=1,
  )


def test_measures_the_training_images(train_dir, capsys):
  settings = config.Config(dataset="synthetic", train_dir=str(train_dir))
  matrix = eval_lib.evaluate(settings, eval_data="train_eval")
  assert matrix.sum() == sources.find("synthetic").num_train
  assert list(train_dir.glob("eval_train/events.*"))


def test_waits_for_a_run_and_takes_its_settings(train_dir, tmp_path):
  """Evaluation may be started first; what is trained is known later."""
  run = tmp_path / "run"
  with trials.running(
    binaries.command("cifar10.eval", f"--train_dir={run}"),
    environ=binaries.environ(),
    stderr=subprocess.DEVNULL,
  ) as process:
    line = process.stdout.readline()
    assert line == f"waiting for a training to begin in {run}\n"
    assert not run.exists()
    settings = config.Config(
      dataset="synthetic", train_dir=str(run), crop_size=29.0
    )
    run_config.record(settings)
    for path in train_dir.iterdir():
      if path.is_file():
        shutil.copy(path, run)
    output, _ = process.communicate(timeout=300)
  assert process.returncode == 0
  matrix = eval_lib.evaluate(settings, str(tmp_path / "eval"))
  assert f"precision @ 1 = {confusion.accuracy(matrix):.4f}" in output
  smaller = config.Config(dataset="synthetic", train_dir=str(run))
  assert np.any(matrix != eval_lib.evaluate(smaller, str(tmp_path / "eval")))


def test_reads_the_settings_of_the_run(train_dir, tmp_path):
  run = tmp_path / "run"
  shutil.copytree(train_dir, run)
  run_config.record(config.Config(dataset="synthetic", train_dir=str(run)))
  settings = run_config.of_run(config.Config, str(run))
  assert eval_lib.evaluate(settings).sum() == 1000
  assert list((run / "eval").glob("events.*"))
