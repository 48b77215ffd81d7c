"""Tests of `inception_mini.sources`, `records` and `synthetic`."""

import numpy as np
import pytest
import tensorflow as tf

from inception_mini import config
from inception_mini import inputs
from inception_mini import records
from inception_mini import sources
from inception_mini import synthetic
from tests.support import trials


def serialized(label, *, boxes=(), size=(4, 5)):
  pixels = np.full([*size, 3], 10 * label, np.uint8)
  return records.serialize(
    tf.io.encode_png(pixels).numpy(),
    file_format="PNG",
    height=size[0],
    width=size[1],
    label=label,
    text="thing",
    filename="a.png",
    boxes=boxes,
  )


def write_shards(directory, lengths, subset="train"):
  """Shards whose labels count from 1."""
  label = 0
  for i, length in enumerate(lengths):
    name = records.shard_name(subset, i, len(lengths))
    with tf.io.TFRecordWriter(str(directory / name)) as writer:
      for _ in range(length):
        label += 1
        writer.write(serialized(label))


def all_examples(source, subset="train"):
  return [
    source.decode(*(raw if isinstance(raw, tuple) else (raw,)))
    for shard in range(len(source.lengths[subset]))
    for raw in source.read(subset, tf.constant(shard, tf.int64))
  ]


def check_batches(source, num_train, num_validation):
  """Goes through both pipelines, as graphs."""
  settings = config.Config(image_size=32, batch_size=num_train, num_classes=9)
  images, labels = next(iter(inputs.train_dataset(source, settings)))
  assert images.shape == (num_train, 32, 32, 3)
  assert labels.shape == (num_train,)
  batches = inputs.eval_batches(source, settings, 2)
  assert sum(len(labels) for _, labels in batches) == num_validation


def check_devices_can_be_chosen(dataset, directory):
  """A program configures its GPUs after it has found its data."""
  result = trials.python(
    "-c",
    "import sys\n"
    "from inception_mini import sources\n"
    "from tf_replicas.runtime import devices\n"
    "sources.find(*sys.argv[1:])\n"
    "devices.configure((0, 1), num_emulated=2)\n",
    dataset,
    str(directory),
  )
  assert result.returncode == 0, result.stderr


class TestRecords:
  def test_what_is_written_is_read(self):
    boxes = [(0.1, 0.2, 0.5, 0.75), (0.0, 0.25, 1.0, 0.5)]
    stored = records.parse(serialized(7, boxes=boxes))
    assert stored.label == 7
    np.testing.assert_allclose(stored.boxes, boxes)
    assert tf.io.decode_image(stored.encoded).shape == (4, 5, 3)

  def test_boxes_may_be_missing(self):
    """Some files have no such keys at all."""
    example = tf.train.Example.FromString(serialized(1))
    for key in (*records.BOX_EDGES, records.BOX_LABEL):
      del example.features.feature[key]
    stored = records.parse(example.SerializeToString())
    assert stored.boxes.shape == (0, 4)

  @pytest.mark.parametrize("length", [0, 1, 9])
  def test_counts_records(self, tmp_path, length):
    write_shards(tmp_path, [length])
    path = str(tmp_path / records.shard_name("train", 0, 1))
    assert records.count_records(path) == length

  @pytest.mark.parametrize("cut", [1, 16, 40])
  def test_notices_half_a_record(self, tmp_path, cut):
    write_shards(tmp_path, [3])
    path = tmp_path / records.shard_name("train", 0, 1)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(records.DataError, match="it ends inside record"):
      records.count_records(str(path))

  def test_notices_what_is_no_record_file(self, tmp_path):
    (tmp_path / "x").write_text("something else, of some length")
    with pytest.raises(records.DataError, match="must consist of whole"):
      records.count_records(str(tmp_path / "x"))


# What is no example of a labeled image, though TensorFlow could parse it.
NO_EXAMPLES = {
  "no protocol buffer": b"\x9f not a record",
  "empty": b"",
  "no label": records.serialize(
    b"png",
    file_format="PNG",
    height=4,
    width=5,
    label=1,
    text="thing",
    filename="a.png",
  ).replace(records.LABEL.encode(), b"image/class/title"),
}


class TestFirstRecord:
  @pytest.mark.parametrize("what", NO_EXAMPLES)
  def test_must_be_a_labeled_image(self, tmp_path, what):
    path = str(tmp_path / "train-00000-of-00001")
    with tf.io.TFRecordWriter(path) as writer:
      writer.write(NO_EXAMPLES[what])
    with pytest.raises(records.DataError, match="another first record"):
      records.count_records(path)

  @pytest.mark.parametrize(
    ("edges", "is_right"),
    [
      ([[0.1, 0.2], [0.1, 0.2], [0.5, 0.6], [0.5, 0.6]], True),
      ([[], [], [], []], True),
      ([[0.1, 0.2], [0.1], [0.5], [0.5]], False),
      ([[1], [1], [2], [2]], False),
    ],
  )
  def test_edges_of_boxes(self, tmp_path, edges, is_right):
    """They are floats, and each box has all four."""
    example = tf.train.Example.FromString(serialized(1))
    for key, values in zip(records.BOX_EDGES, edges, strict=True):
      feature = example.features.feature[key]
      is_integer = bool(values) and isinstance(values[0], int)
      kept = feature.int64_list if is_integer else feature.float_list
      kept.value.extend(values)
    path = str(tmp_path / "train-00000-of-00001")
    with tf.io.TFRecordWriter(path) as writer:
      writer.write(example.SerializeToString())
    if is_right:
      assert records.count_records(path) == 1
    else:
      with pytest.raises(records.DataError, match="another first record"):
        records.count_records(path)

  def test_is_checked_before_the_devices_are_chosen(self, tmp_path):
    for subset in ("train", "validation"):
      write_shards(tmp_path, [2], subset)
    check_devices_can_be_chosen("records", tmp_path)


class TestFolder:
  def find(self, directory, **kwargs):
    return sources.find("records", str(directory), **kwargs)

  def test_knows_the_lengths(self, tmp_path):
    write_shards(tmp_path, [3, 0, 2])
    write_shards(tmp_path, [4], "validation")
    source = self.find(tmp_path)
    assert source.lengths == {"train": (3, 0, 2), "validation": (4,)}
    assert (source.num_train, source.num_validation) == (5, 4)
    assert source.num_classes is None
    check_batches(source, 5, 4)

  @pytest.mark.parametrize("where", [-40, -4])
  def test_names_a_damaged_file(self, tmp_path, where):
    """A flipped bit in the data or the checksum of its last record."""
    write_shards(tmp_path, [2, 3])
    path = tmp_path / records.shard_name("train", 1, 2)
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    path.write_bytes(data)
    source = self.find(tmp_path, subsets=("train",))
    first = source.read("train", tf.constant(0, tf.int64))
    assert len(list(first)) == 2
    found = iter(source.read("train", tf.constant(1, tf.int64)))
    for _ in range(2):
      next(found)
    words = rf"{path}\] \[cannot be read to its end"
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
      next(found)

  def test_names_a_file_that_has_gone(self, tmp_path):
    """It is counted here and read by another machine, or later."""
    write_shards(tmp_path, [2])
    path = tmp_path / records.shard_name("train", 0, 1)
    source = self.find(tmp_path, subsets=("train",))
    path.unlink()
    found = iter(source.read("train", tf.constant(0, tf.int64)))
    with pytest.raises(tf.errors.NotFoundError, match=str(path)):
      next(found)

  def test_labels_file_gives_the_classes(self, tmp_path):
    write_shards(tmp_path, [3])
    (tmp_path / "labels.txt").write_text("cat\ndog\nowl\n")
    assert self.find(tmp_path, subsets=("train",)).num_classes == 4

  def test_reads_every_example(self, tmp_path):
    write_shards(tmp_path, [3, 0, 2])
    source = self.find(tmp_path, subsets=("train",))
    found = all_examples(source)
    assert [int(e.label) for e in found] == [1, 2, 3, 4, 5]
    assert [int(e.image[0, 0, 0]) for e in found] == [10, 20, 30, 40, 50]
    assert found[0].image.dtype == tf.uint8

  @pytest.mark.parametrize(
    "names, words",
    [
      ([], "Received: none"),
      (["train-00000-of-00001.tmp"], "Received: none"),
      (
        ["train-00001-of-00003"],
        "2 are missing; the first is train-00000-of-00003",
      ),
      (["train-00000-of-00001", "train-00000-of-00002"], "sets of [1, 2]"),
      (["train-00000-of-00001"], "must hold examples"),
    ],
  )
  def test_refuses_incomplete_sets(self, tmp_path, names, words):
    for name in names:
      (tmp_path / name).write_bytes(b"")
    with pytest.raises(sources.DataError) as error:
      self.find(tmp_path, subsets=("train",))
    assert words in str(error.value)

  def test_needs_a_directory(self, tmp_path):
    with pytest.raises(sources.DataError, match="`data_dir` must be a dir"):
      self.find(tmp_path / "nowhere")
    with pytest.raises(sources.DataError, match="Received: none"):
      sources.find("records")


class TestSynthetic:
  def test_is_whole_and_always_the_same(self):
    source = sources.find("synthetic")
    assert (source.num_train, source.num_validation) == (5_000, 1_000)
    assert source.num_classes == 10
    shard = tf.constant(1, tf.int64)
    images, labels = synthetic.read("validation", shard)
    again, _ = synthetic.read("validation", shard)
    np.testing.assert_array_equal(images, again)
    assert images.dtype == tf.uint8 and images.shape == (500, 40, 40, 3)
    np.testing.assert_array_equal(np.bincount(labels), [50] * 10)

  def test_shards_and_subsets_differ(self):
    firsts = {
      (subset, shard): synthetic.read(subset, tf.constant(shard, tf.int64))[0]
      .numpy()[0]
      .tobytes()
      for subset in ("train", "validation")
      for shard in (0, 1)
    }
    assert len(set(firsts.values())) == 4

  def test_lengths_are_true(self):
    source = sources.find("synthetic")
    raw = source.read("train", tf.constant(7, tf.int64))
    assert sum(1 for _ in raw) == source.lengths["train"][7]

  def test_color_and_texture_tell_the_class(self):
    """A linear look at the two of them is nearly always right."""
    images, labels = synthetic.read("train", tf.constant(0, tf.int64))
    images, labels = images.numpy().astype(np.float32), labels.numpy()
    is_red = images[..., 0].mean((1, 2)) > images[..., 2].mean((1, 2))
    np.testing.assert_array_equal(is_red, labels < 5)
    grey = images.mean(-1)
    grey -= grey.mean((1, 2), keepdims=True)
    down = np.abs(grey.mean(2)).mean(1)  # Lying stripes survive this mean.
    across = np.abs(grey.mean(1)).mean(1)
    assert down[labels % 5 == 0].min() > down[labels % 5 != 0].max()
    assert across[labels % 5 == 1].min() > across[labels % 5 != 1].max()


class TestTensorFlowDatasets:
  """Prepared here, as nothing may be downloaded."""

  def write(self, directory, splits, *, image=None, label=None):
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
          "image": image or tfds.features.Image(shape=(None, None, 3)),
          "label": label or tfds.features.ClassLabel(num_classes=4),
        }
      ),
    )
    writer = tfds.core.SequentialWriter(info, max_examples_per_shard=2)
    writer.initialize_splits(list(splits))
    writer.add_examples(splits)
    writer.close_all()

  def examples(self, number, channels=3):
    return [
      {"image": np.full([4 + i, 5, channels], i, np.uint8), "label": i % 4}
      for i in range(number)
    ]

  @pytest.mark.parametrize("split", ["validation", "test"])
  def test_is_read_by_its_name(self, tmp_path, split):
    self.write(tmp_path, {"train": self.examples(5), split: self.examples(3)})
    source = sources.find("tiny", str(tmp_path))
    assert source.num_classes == 4
    assert (source.num_train, source.num_validation) == (5, 3)
    assert len(source.lengths["train"]) > 1
    found = all_examples(source)
    assert sorted(int(e.label) for e in found) == [0, 0, 1, 2, 3]
    sizes = sorted(e.image.shape[0] for e in found)
    assert sizes == [4, 5, 6, 7, 8]
    assert len(all_examples(source, "validation")) == 3
    check_batches(source, 5, 3)

  def test_is_found_before_the_devices_are_chosen(self, tmp_path):
    splits = {"train": self.examples(3), "test": self.examples(2)}
    self.write(tmp_path, splits)
    check_devices_can_be_chosen("tiny", tmp_path)

  def test_grey_images_will_do(self, tmp_path):
    tfds = pytest.importorskip("tensorflow_datasets")
    self.write(
      tmp_path,
      {"train": self.examples(2, 1), "test": self.examples(2, 1)},
      image=tfds.features.Image(shape=(None, None, 1)),
    )
    source = sources.find("tiny", str(tmp_path))
    assert all_examples(source)[0].image.shape[-1] == 3

  def test_both_splits_are_needed(self, tmp_path):
    self.write(tmp_path, {"train": self.examples(2)})
    with pytest.raises(sources.DataError, match="in split 'test'"):
      sources.find("tiny", str(tmp_path))
    source = sources.find("tiny", str(tmp_path), subsets=("train",))
    assert source.num_train == 2

  def test_the_label_is_one_of_several(self, tmp_path):
    tfds = pytest.importorskip("tensorflow_datasets")
    self.write(
      tmp_path,
      {"train": self.examples(2), "test": self.examples(2)},
      label=tfds.features.Scalar(np.int64),
    )
    with pytest.raises(sources.DataError, match="must be one of several"):
      sources.find("tiny", str(tmp_path))

  def test_an_unknown_name(self, tmp_path):
    pytest.importorskip("tensorflow_datasets")
    with pytest.raises(sources.DataError, match="must be records, synthetic"):
      sources.find("no_such_images", str(tmp_path), download=False)
