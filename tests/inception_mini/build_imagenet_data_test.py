"""Tests of `inception_mini.build_imagenet_data` and `inception_mini.imagenet`.

The data have the layout of ImageNet, and are synthetic.
"""

import io
import tarfile

import numpy as np
import pytest
import tensorflow as tf

from inception_mini import build_imagenet_data
from inception_mini import config
from inception_mini import image_folders
from inception_mini import imagenet
from inception_mini import inputs
from inception_mini import records
from inception_mini import shards
from inception_mini import sources
from inception_mini import train
from inception_mini import workload
from tests.inception_mini import bounding_boxes_test
from tests.inception_mini import build_image_data_test
from tests.programs import calls
from tests.support import binaries

NAMES = {
  "n01440764": "tench, Tinca tinca",
  "n01443537": "goldfish, Carassius auratus",
  "n02092002": "Scottish deerhound, deerhound",
}
SYNSETS = tuple(NAMES)
TRAIN_IMAGES = 4  # Of each synset.
# The synsets of the validation images.
VALIDATION = (SYNSETS[2], SYNSETS[0], SYNSETS[1], SYNSETS[0])
# The boxes of one image, as in a record: top, left, bottom, right.
TENCH_BOXES = [(0.1, 0.1, 0.75, 0.5), (0.0, 0.0, 1.0, 1.0)]

value = build_image_data_test.value
contents = build_image_data_test.contents


def validation_name(number):
  return f"ILSVRC2012_val_{number:08d}"


def annotate(directory, image, *boxes, name=SYNSETS[0]):
  directory.mkdir(parents=True, exist_ok=True)
  text = bounding_boxes_test.xml(*boxes, name=name)
  (directory / f"{image}.xml").write_text(text)


@pytest.fixture
def tree(tmp_path):
  """ImageNet's directories and files."""
  root = tmp_path / "imagenet"
  for synset in SYNSETS:
    for i in range(TRAIN_IMAGES):
      build_image_data_test.write_image(
        root / "train" / synset / f"{synset}_{i}.JPEG", (10, 20), i
      )
  for i in range(1, len(VALIDATION) + 1):
    build_image_data_test.write_image(
      root / "val" / f"{validation_name(i)}.JPEG", (10, 20), i
    )
  (root / "val.txt").write_text("\n".join(VALIDATION) + "\n")
  (root / "metadata.txt").write_text(
    "".join(f"{s}\t{name}\n" for s, name in NAMES.items())
    + "n00004475\torganism, being\n"
  )
  boxes = root / "boxes"
  annotate(
    boxes / SYNSETS[0], f"{SYNSETS[0]}_1", (20, 10, 100, 75), (0, 0, 200, 100)
  )
  # One without height, and one of an image that is not there.
  annotate(boxes / SYNSETS[1], f"{SYNSETS[1]}_0", (20, 10, 30, 10))
  annotate(boxes / SYNSETS[1], f"{SYNSETS[1]}_99", (20, 10, 30, 20))
  # The object is of another synset; it has a name in English.
  annotate(boxes / SYNSETS[1], f"{SYNSETS[1]}_1", (0, 0, 99, 99))
  annotate(
    boxes / SYNSETS[2],
    f"{SYNSETS[2]}_1",
    (0, 0, 100, 100),
    name="Scottish_deerhound",
  )
  annotate(boxes / "val", validation_name(2), (0, 0, 50, 100))
  return root


def build(tree, output, subsets=("train", "validation"), **given):
  given = {
    "train": "train",
    "validation": "val",
    "validation_labels_file": "val.txt",
    "metadata_file": "metadata.txt",
    "bounding_box_file": "boxes",
    **given,
  }
  given = {key: name and str(tree / name) for key, name in given.items()}
  paths = {subset: given.pop(subset) for subset in ("train", "validation")}
  return build_imagenet_data.build(
    str(output),
    {subset: paths[subset] for subset in subsets},
    {"train": 3, "validation": 2},
    **given,
  )


def examples(directory, subset):
  """Maps the names of images, without extension, to their records."""
  return {
    value(e, "image/filename").decode().removesuffix(".JPEG"): e
    for part in build_image_data_test.examples(directory, subset)
    for e in part
  }


def boxes_of(example):
  features = example.features.feature
  edges = [features[key].float_list.value for key in records.BOX_EDGES]
  labels = features[records.BOX_LABEL].int64_list.value
  assert set(labels) <= {value(example, records.LABEL)}
  assert len(labels) == len(edges[0])
  return list(zip(*edges, strict=True))


def to_tars(tree):
  """The tar files of ImageNet: a tar of tars, and one of images."""
  with tarfile.open(tree / "train.tar", "w") as outer:
    for synset in SYNSETS:
      inner_path = tree / f"{synset}.tar"
      with tarfile.open(inner_path, "w") as inner:
        for path in sorted((tree / "train" / synset).iterdir()):
          inner.add(path, path.name)
      outer.add(inner_path, inner_path.name)
      inner_path.unlink()
  with tarfile.open(tree / "val.tar", "w") as tar:
    for path in sorted((tree / "val").iterdir()):
      tar.add(path, path.name)


def test_records_have_labels_names_and_boxes(tree, tmp_path, capsys):
  summaries = build(tree, tmp_path / "out")
  assert summaries["train"] == shards.Summary(12, 0, 0, 3)
  assert summaries["validation"] == shards.Summary(4, 0, 0, 2)
  lines = capsys.readouterr().out.splitlines()
  # Left out: one of no image, and one of another synset.
  assert lines[0].startswith(
    "boxes: 4 used, in 3 images; left out: 1 without area inside the image, "
    "2 of other images or"
  )
  assert (tmp_path / "out" / "labels.txt").read_text().split() == list(SYNSETS)

  found = examples(tmp_path / "out", "train")
  assert len(found) == 12
  for name, example in found.items():
    synset = name.split("_")[0]
    assert value(example, "image/class/synset") == synset.encode()
    assert value(example, "image/class/text") == NAMES[synset].encode()
    assert value(example, "image/class/label") == 1 + SYNSETS.index(synset)
    path = tree / "train" / synset / f"{name}.JPEG"
    assert value(example, "image/encoded") == path.read_bytes()
  boxes = {name: boxes_of(e) for name, e in found.items() if boxes_of(e)}
  assert boxes.keys() == {f"{SYNSETS[0]}_1", f"{SYNSETS[2]}_1"}
  np.testing.assert_allclose(boxes[f"{SYNSETS[0]}_1"], TENCH_BOXES)
  np.testing.assert_allclose(boxes[f"{SYNSETS[2]}_1"], [(0, 0, 1, 0.5)])

  found = examples(tmp_path / "out", "validation")
  labels = [
    value(found[validation_name(i)], "image/class/synset").decode()
    for i in range(1, 5)
  ]
  assert tuple(labels) == VALIDATION
  assert boxes_of(found[validation_name(2)]) == [(0, 0, 1, 0.25)]


def test_a_csv_file_gives_the_boxes_too(tree, tmp_path):
  (tree / "boxes.csv").write_text(
    f"{SYNSETS[0]}_1.JPEG,0.1000,0.1000,0.5000,0.7500\n"
    f"{SYNSETS[0]}_1.JPEG,0.0,0.0,1.0,1.0\n"
  )
  build(tree, tmp_path / "out", ["train"], validation_labels_file=None)
  build(
    tree,
    tmp_path / "csv",
    ["train"],
    validation_labels_file=None,
    bounding_box_file="boxes.csv",
  )
  name = f"{SYNSETS[0]}_1"
  first = examples(tmp_path / "out", "train")[name]
  assert first == examples(tmp_path / "csv", "train")[name]


def test_tar_files_need_not_be_unpacked(tree, tmp_path):
  build(tree, tmp_path / "out")
  to_tars(tree)
  build(tree, tmp_path / "tars", train="train.tar", validation="val.tar")
  first, second = contents(tmp_path / "out"), contents(tmp_path / "tars")
  assert len(first) == 5
  assert {n: c[0] for n, c in first.items()} == {
    n: c[0] for n, c in second.items()
  }


def test_validation_images_may_be_in_a_directory_per_synset(tree, tmp_path):
  """As the TF1 script moves them."""
  for i, synset in enumerate(VALIDATION, start=1):
    (tree / "val" / synset).mkdir(exist_ok=True)
    path = tree / "val" / f"{validation_name(i)}.JPEG"
    path.rename(tree / "val" / synset / path.name)
  build(tree, tmp_path / "out", validation_labels_file=None)
  found = examples(tmp_path / "out", "validation")
  assert value(found[validation_name(1)], "image/class/label") == 3


def test_a_file_chooses_and_orders_synsets(tree, tmp_path, capsys):
  (tree / "labels.txt").write_text(f"{SYNSETS[2]}\n{SYNSETS[0]}\n")
  summaries = build(tree, tmp_path / "out", labels_file="labels.txt")
  assert [s.num_examples for s in summaries.values()] == [8, 3]
  example = examples(tmp_path / "out", "train")[f"{SYNSETS[0]}_1"]
  assert value(example, "image/class/label") == 2
  assert "train: left out 4 paths" in capsys.readouterr().err


def test_the_name_of_a_synset_may_be_unknown(tree, tmp_path):
  build(tree, tmp_path / "out", metadata_file=None, bounding_box_file=None)
  example = examples(tmp_path / "out", "train")[f"{SYNSETS[0]}_1"]
  assert value(example, "image/class/text") == SYNSETS[0].encode()
  assert boxes_of(example) == []


def test_png_and_cmyk_become_rgb_jpeg(tree, tmp_path):
  """ImageNet has a PNG and some CMYK images that are called .JPEG."""
  image = pytest.importorskip("PIL.Image")
  folder = tree / "train" / SYNSETS[0]
  color = np.full([10, 20, 3], (55, 255, 255), np.uint8)
  png = tf.io.encode_png(color).numpy()
  (folder / f"{SYNSETS[0]}_1.JPEG").write_bytes(png)
  stream = io.BytesIO()
  ink = image.new("CMYK", (20, 10), (200, 0, 0, 0))
  ink.save(stream, "JPEG", quality=95)
  (folder / f"{SYNSETS[0]}_2.JPEG").write_bytes(stream.getvalue())
  gray = tf.io.encode_jpeg(np.zeros([10, 20, 1], np.uint8)).numpy()
  (folder / f"{SYNSETS[0]}_3.JPEG").write_bytes(gray)
  build(tree, tmp_path / "out", ["train"], validation_labels_file=None)
  found = examples(tmp_path / "out", "train")
  for i in (1, 2):
    example = found[f"{SYNSETS[0]}_{i}"]
    assert value(example, "image/format") == b"JPEG"
    encoded = value(example, "image/encoded")
    np.testing.assert_array_equal(
      tf.io.extract_jpeg_shape(encoded), [10, 20, 3]
    )
    np.testing.assert_allclose(tf.io.decode_jpeg(encoded), color, atol=3)
  # The decoder makes three channels of it.
  assert value(found[f"{SYNSETS[0]}_3"], "image/encoded") == gray


def test_a_damaged_image_is_reported_and_left_out(tree, tmp_path, capsys):
  path = tree / "train" / SYNSETS[0] / f"{SYNSETS[0]}_0.JPEG"
  path.write_bytes(path.read_bytes()[:100])
  to_tars(tree)
  for name, directory in [("a", "train"), ("b", "train.tar")]:
    summaries = build(tree, tmp_path / name, train=directory)
    assert summaries["train"].num_skipped == 1
    (line,) = capsys.readouterr().err.splitlines()
    parts = directory, SYNSETS[0], path.name
    if directory == "train.tar":
      parts = directory, f"{SYNSETS[0]}.tar", path.name
    assert line.startswith(f"skipped {tree.joinpath(*parts)}: ")


def test_other_boxes_are_other_data(tree, tmp_path):
  build(tree, tmp_path / "out")
  before = contents(tmp_path / "out")
  with pytest.raises(shards.BuildError, match="other or changed files"):
    build(tree, tmp_path / "out", bounding_box_file=None)
  assert contents(tmp_path / "out") == before
  assert build(tree, tmp_path / "out")["train"].num_kept == 3


def remove(tree, path):
  (tree / path).unlink()


def write(tree, path, text):
  (tree / path).parent.mkdir(exist_ok=True)
  (tree / path).write_text(text)


def move_boxes(tree):
  (tree / "boxes").rename(tree / "away")
  annotate(tree / "boxes", "n01440764_99", (20, 10, 30, 20))


def empty(tree, synset):
  for path in (tree / "train" / synset).iterdir():
    path.unlink()


LINES = "\n".join(VALIDATION)


@pytest.mark.parametrize(
  "change, given, words",
  [
    (None, {"train": "no"}, "no must be a directory or a whole, uncompressed"),
    (None, {"train": "metadata.txt"}, "Received: a damaged tar file, "),
    (None, {"train": "val"}, "must have a sub-directory per synset"),
    (None, {"labels_file": "no.txt"}, "no.txt cannot be read: "),
    (None, {"metadata_file": "no.txt"}, "no.txt cannot be read: "),
    (None, {"metadata_file": "val.txt"}, "Received: 0 names, but none of n014"),
    (None, {"bounding_box_file": "no.csv"}, "no.csv cannot be read: No such"),
    (None, {"labels_file": "metadata.txt"}, "Each line of .* must be a synset"),
    (
      lambda t: write(t, "l.txt", "\n".join([*SYNSETS, "n09999999"])),
      {"labels_file": "l.txt"},
      "files of all 4 synsets. Received: no files of 1 synsets; the first is",
    ),
    (lambda t: empty(t, SYNSETS[0]), {}, "val/.* must have no other|val must"),
    (
      lambda t: write(t, "train/cats/1.JPEG", ""),
      {},
      "each sub-directory of .*/train must be a synset .* Received: 'cats'",
    ),
    (
      lambda t: write(t, "val.txt", LINES.replace(SYNSETS[2], "n09999999")),
      {},
      "val must have no other synsets .* Received: n09999999 of .*00000001",
    ),
    (
      lambda t: write(t, "val.txt", LINES.replace(SYNSETS[2], "tench")),
      {},
      "val.txt, line 1, must be a synset such as n01440764. Received: 'tench'",
    ),
    (
      lambda t: write(t, "val.txt", "\n".join(VALIDATION[:3])),
      {},
      "must have a line for each image. Received: 3 lines, and the .*00000004",
    ),
    (
      lambda t: remove(t, f"val/{validation_name(3)}.JPEG"),
      {},
      "one line per image. Received: 4 lines, and no image ILSVRC.*_00000003",
    ),
    (
      lambda t: write(t, f"val/{SYNSETS[0]}/{validation_name(1)}.JPEG", ""),
      {},
      "must not be given for images in a directory per synset. Received: ",
    ),
    (None, {"validation_labels_file": None}, "val must hold JPEG files of"),
    (move_boxes, {}, "boxes must have boxes of the images. Received: 1 boxes"),
  ],
)
def test_bad_input_is_one_line_and_nothing_is_made(
  tree, tmp_path, change, given, words
):
  if change:
    change(tree)
  errors = (image_folders.FolderError, records.DataError)
  with pytest.raises(errors, match=words) as error:
    build(tree, tmp_path / "out", **given)
  assert "\n" not in str(error.value)
  assert not (tmp_path / "out").exists()


def test_a_tar_file_is_whole(tree, tmp_path):
  to_tars(tree)
  path = tree / "train.tar"
  whole = path.read_bytes()
  with tarfile.open(path) as tar:
    second = tar.getmembers()[1]
  damaged = bytearray(whole)
  damaged[second.offset + 150] ^= 1  # In the checksum of a header.
  for content in (
    whole[: second.offset_data + 700],
    whole[: second.offset + 100],
    whole[: second.offset],
    bytes(damaged),
  ):
    path.write_bytes(content)
    with pytest.raises(image_folders.FolderError, match=f"{path} must be a"):
      build(tree, tmp_path / "out", train="train.tar")


def test_a_tar_file_that_shrinks_ends_the_build(tree, tmp_path):
  """What was there and is not now is no image that cannot be read."""
  to_tars(tree)
  path = tree / "val.tar"
  (file, *_) = imagenet.scan(str(path))
  assert (
    file.read() == (tree / "val" / f"{validation_name(1)}.JPEG").read_bytes()
  )
  path.write_bytes(path.read_bytes()[: file.part.start + 9])
  with pytest.raises(OSError, match="the tar file ends too early"):
    shards.encode(file)


def test_labels_of_no_validation_images(tree, tmp_path):
  with pytest.raises(ValueError, match="needs `validation_directory`"):
    build(tree, tmp_path / "out", ["train"])


def test_the_command(tree, tmp_path):
  (tree / "labels.txt").write_text("\n".join(reversed(SYNSETS)))
  output = binaries.succeed(
    "inception_mini.build_imagenet_data",
    f"--train_directory={tree / 'train'}",
    f"--validation_directory={tree / 'val'}",
    f"--validation_labels_file={tree / 'val.txt'}",
    f"--labels_file={tree / 'labels.txt'}",
    f"--imagenet_metadata_file={tree / 'metadata.txt'}",
    f"--bounding_box_file={tree / 'boxes'}",
    f"--output_directory={tmp_path / 'out'}",
    "--train_shards=2",
    "--validation_shards=1",
  )
  assert "train: 12 images of 3 labels in 2 shards" in output
  assert "validation: 4 images of 3 labels in 1 shards" in output
  example = examples(tmp_path / "out", "train")[f"{SYNSETS[0]}_1"]
  assert value(example, "image/class/label") == 3
  assert value(example, "image/class/text") == NAMES[SYNSETS[0]].encode()
  np.testing.assert_allclose(boxes_of(example), TENCH_BOXES)


@pytest.fixture
def settings(tree, tmp_path):
  """Settings for training on the data, which are built."""
  build(tree, tmp_path / "out")
  return config.from_recipe(
    "mini",
    dataset="records",
    data_dir=str(tmp_path / "out"),
    train_dir=str(tmp_path / "run"),
    num_classes=4,  # With the background.
    width=0.05,
    depth=0.1,
    batch_size=4,
    learning_rate=0.01,
    max_steps=2,
  )


def test_the_network_learns_from_the_data(settings):
  source = sources.find("records", settings.data_dir)
  assert source.num_classes == 4
  ((images, labels),) = inputs.eval_batches(source, settings, 8)
  assert images.shape == (4, 32, 32, 3)
  assert sorted(labels.numpy()) == [1, 1, 2, 3]
  replica = workload.make(settings).replica_fn([])
  batch = next(iter(replica.dataset_fn(1, 0, 0)))
  values = [tf.identity(v) for v in replica.shared]
  losses = []
  for _ in range(2):
    with tf.GradientTape() as tape:
      tape.watch(values)
      loss, _ = replica.loss_fn(values, *batch)
    losses.append(float(loss))
    gradients = tape.gradient(
      loss, values, unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    values = [
      v - 0.01 * g if v.dtype.is_floating else v
      for v, g in zip(values, gradients, strict=True)
    ]
  assert losses[1] < losses[0]


@pytest.mark.exhaustive
def test_trains(settings):
  outcome, _ = calls.train(train.train, settings)
  assert outcome.global_step == 2 and np.isfinite(outcome.loss)


@pytest.mark.parametrize("with_boxes", [False, True])
def test_crops_are_around_the_boxes(tmp_path, with_boxes):
  """The object is a white column at the right, and all else is black."""
  folder = tmp_path / "train" / SYNSETS[0]
  folder.mkdir(parents=True)
  pixels = np.zeros([100, 200, 3], np.uint8)
  pixels[:, 150:] = 255
  encoded = tf.io.encode_jpeg(pixels, quality=100).numpy()
  (folder / "a.JPEG").write_bytes(encoded)
  annotate(tmp_path / "boxes", "a", (150, 0, 200, 100))
  boxes = str(tmp_path / "boxes") if with_boxes else None
  build_imagenet_data.build(
    str(tmp_path / "out"),
    {"train": str(tmp_path / "train")},
    {"train": 1},
    bounding_box_file=boxes,
  )
  source = sources.find("records", str(tmp_path / "out"), subsets=("train",))
  settings = config.from_recipe(
    "mini", batch_size=20, min_crop_area=0.1, distort_color=False
  )
  images, _ = next(iter(inputs.train_dataset(source, settings)))
  shows_the_object = images.numpy().max((1, 2, 3)) > 0.0
  assert shows_the_object.all() == with_boxes
