"""Tests of `cifar10.export`."""

import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from cifar10 import config
from cifar10 import distortions
from cifar10 import export
from cifar10 import model
from cifar10 import sources
from tests.support import binaries
from tf_replicas.programs import run_config

# What somebody else does with it, who has TensorFlow and nothing of ours.
STRANGER = """
import sys
for package in ("cifar10", "tf_replicas", "keras"):
  sys.modules[package] = None
import numpy as np
import tensorflow as tf
model = tf.saved_model.load(sys.argv[1])
images = np.load(sys.argv[2])
np.save(sys.argv[3], model(images))
one = model.signatures["serving_default"](images=tf.constant(images[:1]))
np.save(sys.argv[4], one["probabilities"])
print(tf.io.read_file(model.labels.asset_path).numpy().decode(), end="")
"""


@pytest.fixture(scope="module")
def train_dir(tmp_path_factory):
  directory = tmp_path_factory.mktemp("train")
  binaries.save_checkpoint(directory, seed=1, average_seed=2)
  return directory


@pytest.fixture(scope="module")
def exported(train_dir, tmp_path_factory):
  """A SavedModel that is not where it was written."""
  directory = tmp_path_factory.mktemp("export")
  output = binaries.succeed(
    "cifar10.export",
    f"--train_dir={train_dir}",
    f"--export_dir={directory / 'parent' / 'model'}",
  )
  assert output.startswith(f"exported {train_dir}/model.ckpt-7 to ")
  assert [p.name for p in (directory / "parent").iterdir()] == ["model"]
  return (directory / "parent" / "model").rename(directory / "moved")


@pytest.fixture(scope="module")
def images():
  return sources.find("synthetic").read("test")[0][:5].numpy()


def expected(images, crop_size=24):
  """What evaluation computes, with the averages."""
  crops = distortions.center(images, crop_size)
  logits = model.build(seed=2)(crops, training=False)
  return tf.nn.softmax(logits).numpy()


def test_crops_as_the_run_does(images, tmp_path):
  binaries.save_checkpoint(tmp_path / "train", seed=1, average_seed=2)
  settings = config.Config(train_dir=str(tmp_path / "train"), crop_size=30)
  run_config.record(settings)
  export.export(settings.train_dir, str(tmp_path / "model"))
  probabilities = tf.saved_model.load(str(tmp_path / "model"))(images)
  np.testing.assert_allclose(probabilities, expected(images, 30), atol=1e-5)
  assert np.max(np.abs(probabilities - expected(images))) > 1e-4


def test_mean_of_the_views(train_dir, images, tmp_path):
  export.export(str(train_dir), str(tmp_path / "model"), num_views=2)
  probabilities = tf.saved_model.load(str(tmp_path / "model"))(images)
  mirrored = expected(images[:, :, ::-1])
  np.testing.assert_allclose(
    probabilities, (expected(images) + mirrored) / 2, atol=1e-5
  )
  assert np.max(np.abs(probabilities - expected(images))) > 1e-4


def test_needs_tensorflow_alone(exported, images, tmp_path):
  paths = [tmp_path / name for name in ("images.npy", "all.npy", "one.npy")]
  np.save(paths[0], images)
  result = subprocess.run(
    [sys.executable, "-c", STRANGER, exported, *paths],
    cwd=tmp_path,
    env=binaries.environ(),
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
  )
  assert result.returncode == 0, result.stderr
  assert result.stdout.splitlines() == list(config.LABELS)
  assert "gradient" not in result.stderr  # Loading warns if they are lacking.
  probabilities, one = np.load(paths[1]), np.load(paths[2])
  assert probabilities.dtype == np.float32
  np.testing.assert_allclose(probabilities, expected(images), atol=1e-6)
  np.testing.assert_allclose(one, expected(images[:1]), atol=1e-6)


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_any_batch_size(exported, images, batch_size):
  probabilities = tf.saved_model.load(str(exported))(images[:batch_size])
  assert probabilities.shape == [batch_size, 10]
  np.testing.assert_allclose(np.sum(probabilities, axis=1), 1.0, atol=1e-6)


def test_signature(exported):
  model = tf.saved_model.load(str(exported))
  signature = model.signatures["serving_default"]
  (images,) = signature.structured_input_signature[1].values()
  assert (images.shape.as_list(), images.dtype) == ([None, 32, 32, 3], tf.uint8)
  (name, outputs) = next(iter(signature.structured_outputs.items()))
  assert name == "probabilities"
  assert (outputs.shape.as_list(), outputs.dtype) == ([None, 10], tf.float32)


def test_an_empty_directory_will_do(train_dir, tmp_path):
  export.export(str(train_dir), str(tmp_path))
  assert tf.saved_model.contains_saved_model(str(tmp_path))


def test_nothing_is_overwritten(train_dir, tmp_path):
  (tmp_path / "precious").touch()
  with pytest.raises(FileExistsError, match="`export_dir` must not exist"):
    export.export(str(train_dir), str(tmp_path))
  assert [path.name for path in tmp_path.iterdir()] == ["precious"]
  with pytest.raises(FileExistsError, match="must be a directory"):
    export.export(str(train_dir), str(tmp_path / "precious"))


def test_a_run_without_a_checkpoint_is_one_line(tmp_path):
  flags = [f"--train_dir={tmp_path}", f"--export_dir={tmp_path / 'export'}"]
  binaries.refuse("cifar10.export", "No checkpoint file found", *flags)
  assert not list(tmp_path.iterdir())


def test_a_damaged_record_is_one_line(tmp_path):
  binaries.save_checkpoint(tmp_path / "run", seed=1, average_seed=2)
  (tmp_path / "run" / "config.json").write_text("{")
  with pytest.raises(ValueError, match=r"cannot read the settings .*\.json"):
    export.export(str(tmp_path / "run"), str(tmp_path / "e"))
  assert not (tmp_path / "e").exists()


def test_the_directory_must_be_named():
  binaries.refuse("cifar10.export", "--export_dir must have a value")
