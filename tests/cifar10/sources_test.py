"""Tests of `cifar10.sources`, all offline."""

import os
import subprocess
import sys
import time
import urllib.request

import numpy as np
import pytest
import tensorflow as tf

from cifar10 import sources
from tests.support import binaries

COLORS = ((255, 10, 0), (20, 30, 40), (7, 0, 199))
LABELS = (9, 3, 0)

# Fails if TensorFlow is imported.
_MAKE_WORKLOAD = """
import sys
sys.modules["tensorflow"] = sys.modules["keras"] = None
from cifar10 import config, workload
_, dataset, data_dir = sys.argv
workload.make(config.Config(dataset=dataset, data_dir=data_dir))
"""


def record(label, color):
  return bytes([label]) + b"".join(bytes([c] * 1024) for c in color)


def write_layout(directory):
  """Writes six files of zeros (label 0, black) that take no space."""
  directory.mkdir(exist_ok=True)
  for name in sources.TRAIN_FILES + sources.TEST_FILES:
    with open(directory / name, "wb") as file:
      file.truncate(30_730_000)


def overwrite(path, offset, contents):
  with open(path, "r+b") as file:
    file.seek(offset)
    file.write(contents)


def test_decodes_labels_and_color_planes():
  contents = b"".join(map(record, LABELS, COLORS))
  images, labels = sources.decode_records(tf.constant(contents))
  assert images.dtype == tf.uint8
  assert images.shape == [3, 32, 32, 3]
  np.testing.assert_array_equal(labels, LABELS)
  for image, color in zip(images.numpy(), COLORS, strict=True):
    np.testing.assert_array_equal(image, np.full([32, 32, 3], color))


def test_decodes_planes_row_by_row():
  planes = np.random.default_rng(0).integers(0, 256, [3, 32, 32], np.uint8)
  images, _ = sources.decode_records(tf.constant(b"\5" + planes.tobytes()))
  np.testing.assert_array_equal(images[0], planes.transpose([1, 2, 0]))


@pytest.mark.parametrize("below", ["", sources.SUBDIRECTORY])
def test_reads_the_binary_layout(tmp_path, below):
  directory = tmp_path / below
  write_layout(directory)
  overwrite(directory / "data_batch_1.bin", 0, record(9, COLORS[0]))
  overwrite(directory / "data_batch_5.bin", 9_999 * 3073, record(3, COLORS[1]))
  overwrite(directory / "test_batch.bin", 3073, record(8, COLORS[2]))
  source = sources.find("cifar10", str(tmp_path))
  assert (source.num_train, source.num_test) == (50_000, 10_000)
  images, labels = source.read("train")
  assert images.shape == [50_000, 32, 32, 3]
  assert (labels[0], labels[-1]) == (9, 3)
  assert np.count_nonzero(labels) == 2
  np.testing.assert_array_equal(images[-1, 0, 0], COLORS[1])
  images, labels = source.read("test")
  assert images.shape == [10_000, 32, 32, 3]
  assert labels[1] == 8
  np.testing.assert_array_equal(images[1, 31, 31], COLORS[2])


@pytest.mark.parametrize("dataset", ["cifar10", "synthetic"])
def test_a_launcher_checks_data_without_tensorflow(tmp_path, dataset):
  write_layout(tmp_path)
  subprocess.run(
    [sys.executable, "-c", _MAKE_WORKLOAD, dataset, str(tmp_path)],
    cwd=binaries.ROOT,
    check=True,
  )


@pytest.mark.parametrize("size", [0, 30_729_999, 30_733_073])
def test_names_a_file_of_the_wrong_size(tmp_path, size):
  write_layout(tmp_path)
  os.truncate(tmp_path / "data_batch_3.bin", size)
  with pytest.raises(sources.DataError) as error:
    sources.find("cifar10", str(tmp_path))
  assert str(error.value) == (
    f"`{tmp_path}/data_batch_3.bin` must hold 10000 records of 3073 bytes, "
    f"30730000 in all. Received: {size} bytes."
  )


@pytest.mark.parametrize("name", sources.TRAIN_FILES + sources.TEST_FILES)
def test_names_a_missing_file(tmp_path, name):
  write_layout(tmp_path)
  (tmp_path / name).unlink()
  with pytest.raises(
    sources.DataError, match=rf"{name}` .* 30730000 .*no such"
  ):
    sources.find("cifar10", str(tmp_path))


def test_names_a_record_with_an_impossible_label(tmp_path):
  write_layout(tmp_path)
  overwrite(tmp_path / "data_batch_2.bin", 4_321 * 3073, b"\x0a")
  with pytest.raises(sources.DataError) as error:
    sources.find("cifar10", str(tmp_path))
  assert str(error.value) == (
    f"The label of record 4321 of `{tmp_path}/data_batch_2.bin` must be in "
    "[0, 9]. Received: 10."
  )


@pytest.fixture(scope="module")
def written():
  rng = np.random.default_rng(1)
  return {
    "train": (
      rng.integers(0, 256, [20, 32, 32, 3], np.uint8),
      np.arange(20) % 10,
    ),
    "test": (rng.integers(0, 256, [7, 32, 32, 3], np.uint8), np.arange(7)),
  }


class TestTensorFlowDatasets:
  """Data sets in TFDS's own format, written on the spot."""

  def write(self, directory, splits, *, num_classes=10, size=32, image="image"):
    tfds = pytest.importorskip("tensorflow_datasets")
    path = directory / "tiny" / "1.0.0"
    path.mkdir(parents=True)
    info = tfds.core.DatasetInfo(
      builder=tfds.core.DatasetIdentity(
        name="tiny",
        version=tfds.core.Version("1.0.0"),
        data_dir=str(path),
        module_name="tests",
      ),
      features=tfds.features.FeaturesDict(
        {
          image: tfds.features.Image(shape=(size, size, 3)),
          "label": tfds.features.ClassLabel(num_classes=num_classes),
        }
      ),
    )
    writer = tfds.core.SequentialWriter(info, max_examples_per_shard=8)
    writer.initialize_splits(list(splits))
    writer.add_examples(
      {
        split: [
          {image: pixels, "label": label}
          for pixels, label in zip(images, labels, strict=True)
        ]
        for split, (images, labels) in splits.items()
      }
    )
    writer.close_all()

  def test_reads_what_was_written(self, tmp_path, written):
    self.write(tmp_path, written)
    source = sources.find("tiny", str(tmp_path), download=False)
    assert (source.num_train, source.num_test) == (20, 7)
    for split, (images, labels) in written.items():
      # In a graph too, where a remote worker would read.
      for read in (source.read, tf.function(source.read)):
        images_read, labels_read = read(split)
        np.testing.assert_array_equal(images_read, images)
        np.testing.assert_array_equal(labels_read, labels)
        assert labels_read.dtype == tf.int64

  def test_refuses_other_numbers_of_classes(self, tmp_path, written):
    self.write(tmp_path, written, num_classes=100)
    with pytest.raises(sources.DataError, match="10 classes. Received: 100"):
      sources.find("tiny", str(tmp_path))

  def test_refuses_other_image_sizes(self, tmp_path):
    images = np.zeros([3, 28, 28, 3], np.uint8)
    self.write(tmp_path, {"train": (images, range(3))}, size=28)
    with pytest.raises(
      sources.DataError, match=r"\(32, 32, 3\).*\(28, 28, 3\)"
    ):
      sources.find("tiny", str(tmp_path))

  def test_refuses_a_data_set_without_images(self, tmp_path, written):
    self.write(tmp_path, written, image="picture")
    with pytest.raises(sources.DataError, match="`image` .* Received: None"):
      sources.find("tiny", str(tmp_path))

  def test_refuses_a_missing_split(self, tmp_path, written):
    self.write(tmp_path, {"train": written["train"]})
    with pytest.raises(sources.DataError, match="split 'test'.*splits: train"):
      sources.find("tiny", str(tmp_path))

  def test_names_the_known_data_sets(self, tmp_path):
    pytest.importorskip("tensorflow_datasets")
    with pytest.raises(
      sources.DataError, match="cifar10, synthetic or .* Received: 'nonesuch'"
    ):
      sources.find("nonesuch", str(tmp_path))

  def test_says_what_was_tried_when_nothing_is_prepared(self, tmp_path):
    pytest.importorskip("tensorflow_datasets")
    with pytest.raises(sources.DataError) as error:
      sources.find("cifar10", str(tmp_path), download=False)
    message = str(error.value)
    assert "\n" not in message
    assert f"could not load 'cifar10' from `{tmp_path}`" in message
    assert "data_batch_1.bin" in message

  def test_fails_at_once_without_network(self, tmp_path, monkeypatch):
    pytest.importorskip("tensorflow_datasets")

    def refuse(request, timeout):
      raise OSError("no route to host")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    started = time.monotonic()
    with pytest.raises(
      sources.DataError, match="cannot reach .*: no route to host. Give"
    ):
      sources.find("cifar10", str(tmp_path))
    assert time.monotonic() - started < 30

  def test_says_so_when_it_is_not_installed(self, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(sources.DataError, match="tensorflow_datasets.* Give"):
      sources.find("cifar10", str(tmp_path))
