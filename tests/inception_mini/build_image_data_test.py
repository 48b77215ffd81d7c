"""Tests of `inception_mini.build_image_data` and what it is made of."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from inception_mini import build_image_data
from inception_mini import image_folders
from inception_mini import records
from inception_mini import shards
from tests.support import trials

LABELS = ("cat", "dog", "owl")
COMMAND = [sys.executable, "-m", "inception_mini.build_image_data"]


def write_image(path, size=(5, 6), seed=0, encode=tf.io.encode_jpeg):
  path.parent.mkdir(parents=True, exist_ok=True)
  pixels = np.random.default_rng(seed).integers(0, 256, [*size, 3], np.uint8)
  path.write_bytes(encode(pixels).numpy())


@pytest.fixture
def photos(tmp_path):
  """Seven images of each of three labels."""
  directory = tmp_path / "photos"
  for label in LABELS:
    for i in range(7):
      write_image(directory / label / f"{i}.jpg", seed=i)
  return directory


def build(photos, output, *, num_shards=3, subset="train", **kwargs):
  return build_image_data.build(
    str(output), {subset: str(photos)}, {subset: num_shards}, **kwargs
  )[subset]


def examples(directory, subset="train"):
  """All records, shard by shard."""
  return [
    [
      tf.train.Example.FromString(serialized)
      for serialized in tf.data.TFRecordDataset(path).as_numpy_iterator()
    ]
    for path in records.find_shards(str(directory), subset)
  ]


def value(example, key):
  feature = example.features.feature[key]
  values = getattr(feature, feature.WhichOneof("kind")).value
  return values[0] if len(values) == 1 else list(values)


def contents(directory):
  """Bytes and times of change of all shards."""
  return {
    path.name: (path.read_bytes(), path.stat().st_mtime_ns)
    for path in directory.glob("*-of-?????")
  }


def touched_shards(before, after):
  return sorted(name for name in after if after[name] != before.get(name))


def test_records_have_the_originals_features(tmp_path):
  write_image(tmp_path / "in" / "cat" / "first.JPEG", (4, 9))
  build(tmp_path / "in", tmp_path / "out", num_shards=1)
  ((example,),) = examples(tmp_path / "out")
  encoded = (tmp_path / "in" / "cat" / "first.JPEG").read_bytes()
  found = {key: value(example, key) for key in example.features.feature}
  assert found == {
    "image/height": 4,
    "image/width": 9,
    "image/colorspace": b"RGB",
    "image/channels": 3,
    "image/class/label": 1,
    "image/class/text": b"cat",
    "image/format": b"JPEG",
    "image/filename": b"first.JPEG",
    "image/encoded": encoded,
    "image/object/bbox/xmin": [],
    "image/object/bbox/ymin": [],
    "image/object/bbox/xmax": [],
    "image/object/bbox/ymax": [],
    "image/object/bbox/label": [],
  }


def test_every_image_is_in_one_shard_and_labels_start_at_1(photos, tmp_path):
  summary = build(photos, tmp_path / "out")
  assert summary == shards.Summary(21, 0, 0, 3)
  parts = examples(tmp_path / "out")
  assert [len(part) for part in parts] == [7, 7, 7]
  found = [
    (value(e, "image/class/text"), value(e, "image/class/label"))
    + (value(e, "image/filename"),)
    for part in parts
    for e in part
  ]
  expected = [
    (text.encode(), label, f"{i}.jpg".encode())
    for label, text in enumerate(LABELS, start=1)
    for i in range(7)
  ]
  assert sorted(found) == sorted(expected)
  # Shuffled, so that no shard is of one label.
  for part in parts:
    assert len({value(e, "image/class/label") for e in part}) > 1
  assert (tmp_path / "out" / "labels.txt").read_text() == "cat\ndog\nowl\n"
  assert not list((tmp_path / "out").glob("*.tmp"))


def test_names_of_shards(photos, tmp_path):
  build(photos, tmp_path, num_shards=2, subset="validation")
  assert sorted(contents(tmp_path)) == [
    "validation-00000-of-00002",
    "validation-00001-of-00002",
  ]


@pytest.mark.parametrize("num_threads", [1, 4])
def test_threads_do_not_change_the_files(photos, tmp_path, num_threads):
  build(photos, tmp_path / "a", num_threads=2)
  build(photos, tmp_path / "b", num_threads=num_threads)
  first, second = contents(tmp_path / "a"), contents(tmp_path / "b")
  assert {n: c[0] for n, c in first.items()} == {
    n: c[0] for n, c in second.items()
  }


def test_png_stays_png(tmp_path):
  path = tmp_path / "in" / "cat" / "a.png"
  write_image(path, encode=tf.io.encode_png)
  build(tmp_path / "in", tmp_path / "out", num_shards=1)
  ((example,),) = examples(tmp_path / "out")
  assert value(example, "image/format") == b"PNG"
  assert value(example, "image/encoded") == path.read_bytes()


def test_the_bytes_tell_the_format_and_not_the_name(tmp_path):
  """ImageNet has a PNG that is called .JPEG."""
  path = tmp_path / "in" / "cat" / "a.JPEG"
  write_image(path, encode=tf.io.encode_png)
  build(tmp_path / "in", tmp_path / "out", num_shards=1)
  ((example,),) = examples(tmp_path / "out")
  assert value(example, "image/format") == b"PNG"


def test_grey_images_are_read_as_three_channels(tmp_path):
  path = tmp_path / "in" / "cat" / "a.jpg"
  path.parent.mkdir(parents=True)
  path.write_bytes(tf.io.encode_jpeg(np.zeros([5, 4, 1], np.uint8)).numpy())
  assert build(tmp_path / "in", tmp_path / "out", num_shards=1)[0] == 1


def test_unreadable_images_are_reported_and_left_out(photos, tmp_path, capsys):
  good = (photos / "cat" / "0.jpg").read_bytes()
  (photos / "cat" / "cut.jpg").write_bytes(good[: len(good) // 2])
  (photos / "dog" / "empty.png").write_bytes(b"")
  (photos / "owl" / "text.jpg").write_text("hoo")
  (photos / "owl" / "gone.jpg").symlink_to(photos / "nowhere.jpg")
  summary = build(photos, tmp_path / "out")
  assert (summary.num_examples, summary.num_skipped) == (21, 4)
  lines = capsys.readouterr().err.splitlines()
  skipped = dict(line.split(": ", 1) for line in lines)
  assert set(skipped) == {
    f"skipped {photos}/cat/cut.jpg",
    f"skipped {photos}/dog/empty.png",
    f"skipped {photos}/owl/gone.jpg",
    f"skipped {photos}/owl/text.jpg",
  }
  assert skipped[f"skipped {photos}/dog/empty.png"] == "empty"
  assert skipped[f"skipped {photos}/owl/text.jpg"] == "neither JPEG nor PNG"


def test_a_disk_that_fails_ends_the_build(photos, tmp_path):
  """What was there and is not now is no image that cannot be read."""
  found = image_folders.find(str(photos), LABELS)
  fingerprint = image_folders.fingerprint(str(photos), found.files)
  away = photos.rename(tmp_path / "away")

  def write():
    return shards.write(
      "train",
      str(tmp_path / "out"),
      found.files,
      fingerprint=fingerprint,
      num_shards=3,
      num_threads=1,
    )

  with pytest.raises(FileNotFoundError, match=str(photos)):
    write()
  assert not contents(tmp_path / "out")
  away.rename(photos)
  assert write().num_examples == 21


def test_labels_of_a_mistake_are_replaced(photos, tmp_path, capsys):
  (tmp_path / "out").mkdir()
  (tmp_path / "out" / "labels.txt").write_text("train\ntest\n")
  assert build(photos, tmp_path / "out").num_examples == 21
  assert records.read_labels(tmp_path / "out" / "labels.txt") == list(LABELS)
  assert f"replaced {tmp_path}/out/labels.txt" in capsys.readouterr().out


def test_other_files_are_left_out(photos, tmp_path, capsys):
  (photos / "README.txt").write_text("about")
  (photos / "cat" / "notes.txt").write_text("about")
  (photos / "cat" / ".hidden.jpg").write_text("thumbnail")
  assert build(photos, tmp_path / "out").num_examples == 21
  assert "train: left out 2 paths" in capsys.readouterr().err


def test_images_may_lie_deeper(photos, tmp_path):
  write_image(photos / "cat" / "kittens" / "1.jpg")
  assert build(photos, tmp_path / "out").num_examples == 22


class TestGoingOn:
  def test_finished_shards_are_kept(self, photos, tmp_path):
    build(photos, tmp_path / "out")
    before = contents(tmp_path / "out")
    summary = build(photos, tmp_path / "out")
    assert (summary.num_kept, summary.num_written) == (3, 0)
    assert contents(tmp_path / "out") == before

  def test_a_missing_shard_is_made_again(self, photos, tmp_path):
    build(photos, tmp_path / "out")
    before = contents(tmp_path / "out")
    (tmp_path / "out" / "train-00001-of-00003").unlink()
    summary = build(photos, tmp_path / "out")
    assert (summary.num_kept, summary.num_written) == (2, 1)
    after = contents(tmp_path / "out")
    assert touched_shards(before, after) == ["train-00001-of-00003"]
    assert after["train-00001-of-00003"][0] == before["train-00001-of-00003"][0]

  def test_an_unfinished_shard_has_no_name(self, photos, tmp_path):
    """Whatever stops it, only whole shards have theirs."""

    def stop_at_the_second(name, number):
      raise RuntimeError("power cut")

    found = image_folders.find(str(photos), LABELS)
    with pytest.raises(RuntimeError):
      shards.write(
        "train",
        str(tmp_path / "out"),
        found.files,
        fingerprint=image_folders.fingerprint(str(photos), found.files),
        num_shards=3,
        num_threads=1,
        on_shard=stop_at_the_second,
      )
    for name in contents(tmp_path / "out"):
      assert records.count_records(str(tmp_path / "out" / name)) == 7
    assert len(contents(tmp_path / "out")) < 3
    (tmp_path / "out" / "train-00002-of-00003.tmp").write_bytes(b"half")
    assert build(photos, tmp_path / "out").num_examples == 21
    assert not list((tmp_path / "out").glob("*.tmp"))

  @pytest.mark.parametrize("change", ["added", "removed", "touched", "shards"])
  def test_another_input_is_refused(self, photos, tmp_path, change):
    build(photos, tmp_path / "out")
    before = contents(tmp_path / "out")
    if change == "added":
      write_image(photos / "dog" / "new.jpg")
    elif change == "removed":
      (photos / "dog" / "0.jpg").unlink()
    elif change == "touched":
      os.utime(photos / "dog" / "0.jpg", (1, 1))
    num_shards = 2 if change == "shards" else 3
    with pytest.raises(shards.BuildError, match="other or changed files"):
      build(photos, tmp_path / "out", num_shards=num_shards)
    assert contents(tmp_path / "out") == before

  def test_shards_of_unknown_origin_are_refused(self, photos, tmp_path):
    (tmp_path / "train-00000-of-00001").write_bytes(b"")
    with pytest.raises(shards.BuildError, match="unknown files"):
      build(photos, tmp_path)
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".txt"] == []

  def test_other_labels_are_refused(self, photos, tmp_path):
    build(photos, tmp_path / "out")
    write_image(photos / "pig" / "0.jpg")
    with pytest.raises(shards.BuildError, match=r"whose labels\.txt differs"):
      build(photos, tmp_path / "out", subset="validation")

  def test_two_builds_do_not_mix(self, photos, tmp_path):
    def build_again(name, number):
      with pytest.raises(shards.BuildError, match="Another build is at work"):
        build(photos, tmp_path)

    found = image_folders.find(str(photos), LABELS)
    shards.write(
      "train",
      str(tmp_path),
      found.files,
      fingerprint="",
      num_shards=1,
      num_threads=1,
      on_shard=build_again,
    )


class TestLabels:
  def test_a_file_chooses_and_orders_them(self, photos, tmp_path, capsys):
    (tmp_path / "labels").write_text("owl\n\ncat\n")
    summary = build(
      photos, tmp_path / "out", labels_file=str(tmp_path / "labels")
    )
    assert summary.num_examples == 14
    assert str(photos / "dog") in capsys.readouterr().err
    pairs = {
      (value(e, "image/class/label"), value(e, "image/class/text"))
      for part in examples(tmp_path / "out")
      for e in part
    }
    assert pairs == {(1, b"owl"), (2, b"cat")}

  def test_validation_has_those_of_training(self, photos, tmp_path):
    write_image(tmp_path / "test" / "owl" / "0.jpg")
    directories = {"train": str(photos), "validation": str(tmp_path / "test")}
    num_shards = {"train": 1, "validation": 1}
    build_image_data.build(str(tmp_path / "out"), directories, num_shards)
    ((example,),) = examples(tmp_path / "out", "validation")
    assert value(example, "image/class/label") == 3

  def test_validation_has_no_others(self, photos, tmp_path):
    write_image(tmp_path / "test" / "pig" / "0.jpg")
    directories = {"train": str(photos), "validation": str(tmp_path / "test")}
    num_shards = {"train": 1, "validation": 1}
    with pytest.raises(image_folders.FolderError, match="'pig'"):
      build_image_data.build(str(tmp_path / "out"), directories, num_shards)
    assert not (tmp_path / "out").exists()

  @pytest.mark.parametrize("text", ["", "cat\ncat\n"])
  def test_the_file_names_each_once(self, photos, tmp_path, text):
    (tmp_path / "labels").write_text(text)
    with pytest.raises(records.DataError, match="must name every label once"):
      build(photos, tmp_path / "out", labels_file=str(tmp_path / "labels"))


@pytest.mark.parametrize("num_shards", [0, 22])
def test_no_shard_is_empty(photos, tmp_path, num_shards):
  with pytest.raises(ValueError, match=r"`train_shards` must be in \[1, 21\]"):
    build(photos, tmp_path / "out", num_shards=num_shards)


def test_threads_are_counted(photos, tmp_path):
  for number in (-1, 0):
    with pytest.raises(ValueError, match="`num_threads` must be positive"):
      build(photos, tmp_path / "out", num_threads=number)


@pytest.mark.parametrize("make", [False, True])
def test_without_labeled_folders_nothing_is_made(tmp_path, make):
  if make:
    (tmp_path / "in").mkdir()
  with pytest.raises(image_folders.FolderError, match="must "):
    build(tmp_path / "in", tmp_path / "out")
  assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", [b"dog ", b"two\nlines", b"caf\xe9"])
def test_a_label_is_a_line_of_text(photos, tmp_path, name):
  os.mkdir(os.path.join(os.fsencode(photos), name))
  with pytest.raises(image_folders.FolderError, match="one line of UTF-8"):
    build(photos, tmp_path / "out")
  assert not (tmp_path / "out").exists()


def test_one_image_at_least_is_readable(tmp_path):
  (tmp_path / "in" / "cat").mkdir(parents=True)
  (tmp_path / "in" / "cat" / "a.jpg").write_text("no")
  with pytest.raises(shards.BuildError, match="1 that cannot be read"):
    build(tmp_path / "in", tmp_path / "out", num_shards=1)


def test_without_images_nothing_is_made(tmp_path):
  (tmp_path / "in" / "cat").mkdir(parents=True)
  with pytest.raises(image_folders.FolderError, match="JPEG or PNG"):
    build(tmp_path / "in", tmp_path / "out")


class TestCommand:
  def test_says_what_it_made(self, photos, tmp_path):
    (photos / "cat" / "bad.jpg").write_text("no")
    result = subprocess.run(
      [
        *COMMAND,
        f"--train_directory={photos}",
        f"--output_directory={tmp_path / 'out'}",
      ],
      capture_output=True,
      text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == (
      "train: 21 images of 3 labels in 2 shards (0 of an earlier build, "
      "2 written now); unreadable files left out: 1"
    )
    assert result.stderr.splitlines() == [
      f"skipped {photos}/cat/bad.jpg: neither JPEG nor PNG"
    ]

  def test_wrong_usage_is_one_line(self, tmp_path):
    result = subprocess.run(
      [*COMMAND, f"--train_directory={tmp_path}/no", "--output_directory=x"],
      capture_output=True,
      text=True,
    )
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and f"{tmp_path}/no" in line

  def test_an_interrupt_leaves_whole_shards(self, photos, tmp_path):
    """A pipe that nobody fills stands for a slow disk."""
    os.mkfifo(photos / "owl" / "slow.jpg")
    out = tmp_path / "out"
    command = [*COMMAND, f"--train_directory={photos}", "--train_shards=4"]
    with trials.running(
      [*command, f"--output_directory={out}", "--num_threads=1"]
    ) as process:
      while not (out / "train.plan.json").exists():
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.05)
      process.send_signal(signal.SIGINT)
      # Lets the reader go on, which then sees that it has to stop.
      threading.Thread(
        target=lambda: (photos / "owl" / "slow.jpg").write_bytes(b"x"),
        daemon=True,
      ).start()
      output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert output.splitlines()[-1].startswith("interrupted")
    for name in contents(out):
      assert records.count_records(str(out / name)) in (5, 6)
