r"""Makes TFRecord files (shards) from folders of labeled JPEG or PNG files.

  python -m inception_mini.build_image_data --train_directory=photos/train \
    --validation_directory=photos/test --output_directory=/tmp/photos \
    --train_shards=8 --validation_shards=2

Each directory of images has one sub-folder per label. If the program is
interrupted, the same command continues where it stopped. Files that cannot be
read are reported and left out.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence

import tqdm
from absl import flags

from inception_mini import image_folders
from tf_replicas.programs import command_line
from tf_replicas.programs import fields
from tf_replicas.runtime import processes

FLAGS = flags.FLAGS


def define_flags() -> None:
  """Defines the command-line flags of this program, which builds TFRecords."""
  flags.DEFINE_string("train_directory", None, "Has a sub-folder per label")
  flags.DEFINE_string("validation_directory", None, "The same for validation")
  flags.DEFINE_string("output_directory", None, "Where the shards go")
  flags.DEFINE_integer("train_shards", 2, "Files of training examples")
  flags.DEFINE_integer("validation_shards", 2, "Files of validation examples")
  flags.DEFINE_integer(
    "num_threads", None, "Shards at a time; default: one per core"
  )
  flags.DEFINE_string(
    "labels_file",
    None,
    "One label per line, the first is 1; default: all sub-folders",
  )


def build(
  output_directory: str,
  directories: dict[str, str],
  num_shards: dict[str, int],
  *,
  num_threads: int | None = None,
  labels_file: str | None = None,
) -> dict:
  """Makes TFRecord files (shards) of labeled images, and a list of labels.

  Each subset, `train` or `validation`, has its own images and its own shards.

  Args:
    output_directory: Directory for the shards, and for a text file with the
      labels.
    directories: Maps each subset to its directory of images, which has one
      sub-folder per label.
    num_shards: Maps each subset to its number of shards.
    num_threads: Number of shards written at the same time; None is one per
      core.
    labels_file: Path of a file that lists the labels to use, one per line, in
      order. None: the labels are the names of the sub-folders of the first
      directory, in alphabetical order.

  Returns:
    Maps each subset to a `shards.Summary`: how many examples and shards there
    are, and how many files were left out.

  Raises:
    ValueError: If a number is out of range.
    image_folders.FolderError: If a directory cannot be used.
    records.DataError: If the file with the labels cannot be used.
    shards.BuildError: If the output directory cannot be used, or no image can
      be read.
    shards.Interrupted: On Ctrl-C.
  """
  from inception_mini import records

  labels = (
    records.read_labels(labels_file)
    if labels_file
    else image_folders.labels_of(next(iter(directories.values())))
  )
  found = {}
  for subset, directory in directories.items():
    if not labels_file:
      image_folders.check_labels(directory, labels)
    found[subset] = image_folders.find(directory, labels)
  return write(
    output_directory,
    directories,
    found,
    labels,
    num_shards,
    num_threads=num_threads,
  )


def write(
  output_directory: str,
  directories: dict[str, str],
  found: dict[str, image_folders.Found],
  labels: list[str],
  num_shards: dict[str, int],
  *,
  num_threads: int | None = None,
  as_jpeg: bool = False,
) -> dict:
  """Makes TFRecord files (shards) of labeled images, and a list of labels.

  Prints its progress and a summary. A subset is `train` or `validation`.

  Args:
    output_directory: Directory for the shards, and for a text file with the
      labels.
    directories: Maps each subset to the directory of its images.
    found: Maps each subset to its images, as `image_folders.find` or
      `imagenet.label` returned them.
    labels: The names of all labels, in order. The first has number 1.
    num_shards: Maps each subset to its number of shards.
    num_threads: Number of shards written at the same time; None is one per
      core.
    as_jpeg: Whether to convert PNG and CMYK images to RGB JPEG; see
      `shards.encode`.

  Returns:
    Maps each subset to a `shards.Summary`: how many examples and shards there
    are, and how many files were left out.

  Raises:
    ValueError: If a number is out of range.
    records.DataError: If an existing file with the labels is invalid.
    shards.BuildError: If the output directory cannot be used, or no image can
      be read.
    shards.Interrupted: On Ctrl-C.
  """
  from inception_mini import records
  from inception_mini import shards

  if num_threads is None:
    num_threads = os.cpu_count() or 1
  fields.require("num_threads", num_threads, num_threads >= 1, "positive")
  for subset, (files, _) in found.items():
    _check_shards(subset, num_shards[subset], len(files))
  summaries = {}
  with _labels_written(output_directory, records.LABELS_FILE, labels):
    for subset, (files, ignored) in found.items():
      _tell_ignored(subset, ignored)
      with _Progress(subset, len(files)) as progress:
        summaries[subset] = shards.write(
          subset,
          output_directory,
          files,
          fingerprint=image_folders.fingerprint(directories[subset], files),
          num_shards=num_shards[subset],
          num_threads=num_threads,
          as_jpeg=as_jpeg,
          on_image=progress.move,
          on_skip=progress.tell_skipped,
          on_shard=progress.tell_shard,
        )
      _tell_summary(subset, summaries[subset], len(labels))
      if not summaries[subset].num_examples:
        raise shards.BuildError(
          f"At least one file of {directories[subset]} must be an image. "
          f"Received: {len(files)} that cannot be read."
        )
  return summaries


class _Progress:
  """Shows the progress of writing one subset's shards (TFRecord files).

  On a terminal, shows a progress bar. Otherwise prints a line per finished
  shard. In both cases prints a line for each image file that is left out.
  """

  def __init__(self, subset: str, num_files: int):
    self._bar = tqdm.tqdm(
      desc=subset,
      total=num_files,
      unit="image",
      file=sys.stdout,
      disable=not sys.stdout.isatty(),
      dynamic_ncols=True,
    )

  def __enter__(self) -> "_Progress":
    return self

  def __exit__(self, *error) -> None:
    self._bar.close()

  def move(self, number: int) -> None:
    """Advances the progress bar, if there is one, by `number` images."""
    if not self._bar.disable:
      with self._bar.get_lock():
        self._bar.update(number)

  def tell_skipped(self, path: str, reason: str) -> None:
    """Prints the path of an image file that was left out, and the reason."""
    self._write(f"skipped {path}: {reason}", sys.stderr)

  def tell_shard(self, name: str, num_examples: int) -> None:
    """Prints a line about a finished shard, unless there is a progress bar."""
    if self._bar.disable:
      self._write(f"{name}: {num_examples} images", sys.stdout)

  def _write(self, line: str, file) -> None:
    # A path may hold bytes that are no UTF-8.
    line = line.encode(errors="backslashreplace").decode()
    tqdm.tqdm.write(line, file=file)
    file.flush()


def _check_shards(subset: str, num_shards: int, num_files: int) -> None:
  if not 1 <= num_shards <= num_files:
    raise ValueError(
      f"`{subset}_shards` must be in [1, {num_files}], as there are "
      f"{num_files} images. Received: {num_shards}."
    )


@contextlib.contextmanager
def _labels_written(
  directory: str, name: str, labels: list[str]
) -> Iterator[None]:
  """Makes a context in which the file that lists the labels is written.

  If the context raises a `shards.BuildError`, a new file is removed: the shards
  that the directory holds may have other labels.

  Args:
    directory: As for `_write_labels`.
    name: As for `_write_labels`.
    labels: As for `_write_labels`.

  Raises:
    records.DataError, shards.BuildError: As `_write_labels`.
  """
  from inception_mini import shards

  path = os.path.join(directory, name)
  is_new = not os.path.exists(path)
  _write_labels(directory, name, labels)
  try:
    yield
  except shards.BuildError:
    if is_new:
      os.remove(path)
    raise


def _write_labels(directory: str, name: str, labels: list[str]) -> None:
  """Writes the file that lists the labels, one per line.

  If the directory holds shards (TFRecord files) and such a file already, writes
  nothing, but checks that the file lists the same labels.

  Args:
    directory: The output directory, which is made if needed.
    name: The name of the file.
    labels: The labels, in order.

  Raises:
    records.DataError: If the existing file is invalid.
    shards.BuildError: If the directory holds shards, and the existing file
      lists other labels.
  """
  from inception_mini import records
  from inception_mini import shards

  os.makedirs(directory, exist_ok=True)
  path = os.path.join(directory, name)
  if os.path.exists(path) and shards.are_in(directory):
    if records.read_labels(path) != labels:
      raise shards.BuildError(
        f"`output_directory` must be empty or hold shards of the same labels. "
        f"Received: {directory}, whose {name} differs."
      )
    return
  if os.path.exists(path):
    print(f"replaced {path}: there were no shards with its labels", flush=True)
  with open(f"{path}.tmp", "w", encoding="utf-8") as file:
    file.write("\n".join(labels) + "\n")
  os.replace(f"{path}.tmp", path)


def _tell_ignored(subset: str, ignored: list[str]) -> None:
  if ignored:
    print(
      f"{subset}: left out {len(ignored)} paths that are not JPEG or PNG files "
      f"with a label, such as {ignored[0]}",
      file=sys.stderr,
      flush=True,
    )


def _tell_summary(subset: str, summary, num_labels: int) -> None:
  print(
    f"{subset}: {summary.num_examples} images of {num_labels} labels in "
    f"{summary.num_kept + summary.num_written} shards ({summary.num_kept} of an"
    f" earlier build, {summary.num_written} written now); unreadable files left"
    f" out: {summary.num_skipped}",
    flush=True,
  )


def directories_of_flags() -> dict[str, str]:
  """Reads from the flags which directory of images each subset has.

  Returns:
    Maps `train` and `validation` to their directories. A subset without a flag
    is left out.

  Raises:
    ValueError: If no subset has a directory, or there is no output directory.
  """
  given = {
    "train": FLAGS.train_directory,
    "validation": FLAGS.validation_directory,
  }
  directories = {subset: path for subset, path in given.items() if path}
  if not directories or not FLAGS.output_directory:
    raise ValueError(
      "`train_directory` or `validation_directory`, and `output_directory`, "
      "must be given."
    )
  return directories


def num_shards_of_flags() -> dict[str, int]:
  """Reads from the flags how many shards (TFRecord files) each subset gets.

  Returns:
    Maps `train` and `validation` to their numbers of shards.
  """
  return {"train": FLAGS.train_shards, "validation": FLAGS.validation_shards}


def _build_from_flags() -> None:
  build(
    FLAGS.output_directory,
    directories_of_flags(),
    num_shards_of_flags(),
    num_threads=FLAGS.num_threads,
    labels_file=FLAGS.labels_file,
  )


def run(build_from_flags: Callable[[], None]) -> None:
  """Runs a program that builds TFRecords, and ends the process on errors.

  An expected error, such as an unreadable directory, is printed as one line
  without a traceback.

  Args:
    build_from_flags: Builds the TFRecords as the flags say.
  """
  with processes.importing_tensorflow():
    import tensorflow as tf

    from inception_mini import records
    from inception_mini import shards

  usage = (
    ValueError,
    image_folders.FolderError,
    records.DataError,
    shards.BuildError,
  )
  try:
    with processes.one_line_errors(usage, (OSError, tf.errors.OpError)):
      build_from_flags()
  except (KeyboardInterrupt, shards.Interrupted):
    print("interrupted; run the same command to resume", file=sys.stderr)
    processes.exit_now(130)


def main(argv: Sequence[str]) -> None:
  del argv
  run(_build_from_flags)


if __name__ == "__main__":
  define_flags()
  command_line.start(main)
