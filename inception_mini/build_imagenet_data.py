r"""Makes TFRecord files (shards) of ImageNet (ILSVRC 2012), with its boxes.

  python -m inception_mini.build_imagenet_data \
    --train_directory=ILSVRC2012_img_train.tar \
    --validation_directory=ILSVRC2012_img_val.tar \
    --validation_labels_file=validation_synsets.txt \
    --imagenet_metadata_file=metadata.txt --bounding_box_file=annotations \
    --output_directory=/data/imagenet

A synset is a class of ImageNet, with an identifier such as n01440764. The
images may also be in directories: training images in one sub-directory per
synset, and validation images likewise or all in one directory. If the program
is interrupted, the same command continues where it stopped. Files that cannot
be read are reported and left out.

The program replaces the TF1 scripts `build_imagenet_data`,
`process_bounding_boxes` and `preprocess_imagenet_validation_data`.
"""

from collections.abc import Sequence

from absl import flags

from inception_mini import bounding_boxes
from inception_mini import build_image_data
from inception_mini import image_folders
from tf_replicas.programs import command_line

FLAGS = flags.FLAGS


def define_flags() -> None:
  """Defines the command-line flags of this program.

  Most have the names of the flags of the TF1 script `build_imagenet_data`.
  """
  flags.DEFINE_string(
    "train_directory",
    None,
    "Has a sub-directory per synset; or the tar file of ImageNet",
  )
  flags.DEFINE_string(
    "validation_directory",
    None,
    "The same for validation; with --validation_labels_file, a directory or"
    " tar file of ILSVRC2012_val_00000001.JPEG and so on",
  )
  flags.DEFINE_string("output_directory", None, "Where the shards go")
  flags.DEFINE_integer("train_shards", 1024, "Files of training examples")
  flags.DEFINE_integer("validation_shards", 128, "Files of validation examples")
  flags.DEFINE_integer(
    "num_threads", None, "Shards at a time; default: one per core"
  )
  flags.DEFINE_string(
    "labels_file",
    None,
    "One synset per line, the first is label 1; default: all synsets, in"
    " alphabetical order",
  )
  flags.DEFINE_string(
    "validation_labels_file",
    None,
    "One synset per line, in the order of the validation images",
  )
  flags.DEFINE_string(
    "imagenet_metadata_file",
    None,
    "Lines of a synset and its name; default: the name is the synset",
  )
  flags.DEFINE_string(
    "bounding_box_file",
    None,
    "A directory of XML annotations, or the CSV file of the TF1 script;"
    " default: no boxes",
  )


def build(
  output_directory: str,
  directories: dict[str, str],
  num_shards: dict[str, int],
  *,
  num_threads: int | None = None,
  labels_file: str | None = None,
  validation_labels_file: str | None = None,
  metadata_file: str | None = None,
  bounding_box_file: str | None = None,
) -> dict:
  """Makes TFRecord files (shards) of ImageNet, and a file with the synsets.

  Args:
    output_directory: Directory for the shards and the file with the synsets.
    directories: Maps each subset (`train`, `validation`) to the directory or
      tar file with its images; see `imagenet.scan`.
    num_shards: Maps each subset to its number of shards.
    num_threads: Number of shards written at the same time; None is one per
      core.
    labels_file: Path of a file that lists the synsets to use, one per line, in
      order. Images of other synsets are left out. None: the synsets are those
      of the images in the first element of `directories`, in alphabetical
      order, which is the usual order of ImageNet.
    validation_labels_file: Path of a file with the synset of each validation
      image, one per line. None if the validation images are in one directory
      per synset.
    metadata_file: Path of a file with a readable name for each synset. None:
      the name of a synset is its identifier.
    bounding_box_file: Path of the bounding boxes, for `bounding_boxes.read`.
      None: the examples have no boxes.

  Returns:
    Maps each subset to a `shards.Summary`: how many examples and shards there
    are, and how many files were left out.

  Raises:
    ValueError: If a number is out of range, or there is a
      `validation_labels_file` but no directory for `validation`.
    image_folders.FolderError: If a directory or tar file cannot be used.
    records.DataError: If another input file cannot be used, or the input files
      contradict each other.
    shards.BuildError: If the output directory cannot be used, or no image can
      be read.
    shards.Interrupted: On Ctrl-C.
  """
  from inception_mini import imagenet

  if validation_labels_file and "validation" not in directories:
    raise ValueError(
      "`validation_labels_file` needs `validation_directory`. Received: none."
    )
  scanned = {s: imagenet.scan(path) for s, path in directories.items()}
  if validation_labels_file:
    scanned["validation"] = imagenet.with_synsets(
      scanned["validation"], validation_labels_file
    )
  first = next(iter(directories))
  synsets = (
    imagenet.read_synsets(labels_file)
    if labels_file
    else imagenet.synsets_of(scanned[first], directories[first])
  )
  for subset, files in scanned.items():
    if subset == "train":
      imagenet.check_complete(files, synsets, directories[subset])
    if not labels_file:
      imagenet.check_known(files, synsets, directories[subset])
  names = imagenet.read_names(metadata_file, synsets) if metadata_file else {}
  boxes = bounding_boxes.read(bounding_box_file) if bounding_box_file else None
  found = {
    subset: imagenet.label(
      files,
      synsets,
      names,
      boxes.by_image if boxes else {},
      path=directories[subset],
    )
    for subset, files in scanned.items()
  }
  if boxes:
    _tell_boxes(bounding_box_file, boxes, found)
  return build_image_data.write(
    output_directory,
    directories,
    found,
    synsets,
    num_shards,
    num_threads=num_threads,
    as_jpeg=True,
  )


def _tell_boxes(
  path: str,
  boxes: bounding_boxes.Boxes,
  found: dict[str, image_folders.Found],
) -> None:
  """Prints how many bounding boxes are used, and why others are left out.

  Args:
    path: The path that the boxes were read from, for the error message.
    boxes: All boxes that were read.
    found: Maps each subset to its images, with the boxes that they use.

  Raises:
    bounding_boxes.DataError: If no image has a box.
  """
  images = [f for files, _ in found.values() for f in files if f.boxes]
  used = sum(len(file.boxes) for file in images)
  num_boxes = sum(map(len, boxes.by_image.values()))
  if not images:
    raise bounding_boxes.DataError(
      f"{path} must have boxes of the images. Received: {num_boxes} boxes, "
      "none of which belongs to an image and its synset."
    )
  print(
    f"boxes: {used} used, in {len(images)} images; left out: {boxes.num_empty} "
    f"without area inside the image, {num_boxes - used} of other images or with"
    " another synset than their image",
    flush=True,
  )


def _build_from_flags() -> None:
  build(
    FLAGS.output_directory,
    build_image_data.directories_of_flags(),
    build_image_data.num_shards_of_flags(),
    num_threads=FLAGS.num_threads,
    labels_file=FLAGS.labels_file,
    validation_labels_file=FLAGS.validation_labels_file,
    metadata_file=FLAGS.imagenet_metadata_file,
    bounding_box_file=FLAGS.bounding_box_file,
  )


def main(argv: Sequence[str]) -> None:
  del argv
  build_image_data.run(_build_from_flags)


if __name__ == "__main__":
  define_flags()
  command_line.start(main)
