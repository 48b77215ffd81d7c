"""Finds labeled images in a directory with one sub-folder per label.

The module does not import TensorFlow.
"""

import errno
import hashlib
import json
import os
import random
from collections.abc import Sequence
from typing import NamedTuple

EXTENSIONS = (".jpeg", ".jpg", ".png")

# Files are shuffled so that those of one label do not end up in one shard.
_SHUFFLE_SEED = 2016


class FolderError(Exception):
  """Raised if folders of images cannot be used; the message says why."""


class Part(NamedTuple):
  """The part of a tar file that is an image file.

  Attributes:
    archive: Path of the tar file.
    start: Number of bytes in the tar file before the image file.
    size: Number of bytes of the image file.
  """

  archive: str
  start: int
  size: int


class File(NamedTuple):
  """An image file with its label.

  Attributes:
    path: Path of the file. In a tar file: the path that the image file would
      have if tar files were directories.
    label: Number of the label, from 1 on.
    text: Name of the label. Unless the images are those of ImageNet, it is the
      name of the sub-folder too.
    state: Size in bytes, and time of the last modification in ns; None if the
      file cannot be reached, as with a broken link.
    part: Where the image file is if it is in a tar file, or else None.
    synset: The identifier of the class in ImageNet; empty for other images.
    boxes: Edges of objects: top, left, bottom, right, as shares of the image's
      height or width. Further elements of a box are ignored.
  """

  path: str
  label: int
  text: str
  state: tuple[int, int] | None
  part: Part | None = None
  synset: str = ""
  boxes: Sequence[Sequence] = ()

  def read(self) -> bytes:
    """Returns the bytes of the image file.

    Raises:
      OSError: If the file cannot be read, or the tar file ends too early.
    """
    if self.part is None:
      with open(self.path, "rb") as stream:
        return stream.read()
    with open(self.part.archive, "rb") as stream:
      stream.seek(self.part.start)
      content = stream.read(self.part.size)
    if len(content) < self.part.size:
      raise OSError(errno.EIO, "the tar file ends too early", self.path)
    return content


class Found(NamedTuple):
  """The image files that were found in a directory, and what was ignored.

  Attributes:
    files: Files with the name of a JPEG or PNG file, in a shuffled order that
      is always the same.
    ignored: Paths of other files, and of sub-folders that are not named like a
      label.
  """

  files: list[File]
  ignored: list[str]


def labels_of(directory: str) -> list[str]:
  """Lists the labels, which are the names of a directory's sub-folders.

  Hidden sub-folders are left out. The order is alphabetical.

  Raises:
    FolderError: If there are no labels, or a name cannot be a line of a text
      file.
  """
  labels = sorted(
    entry.name
    for entry in scan(directory)
    if entry.is_dir() and not entry.name.startswith(".")
  )
  if not labels:
    raise FolderError(
      f"{directory} must have one sub-folder per label. Received: none."
    )
  for label in labels:
    if label != label.strip() or "\n" in label or not _is_text(label):
      raise FolderError(
        f"{directory} must have sub-folders whose names are one line of UTF-8,"
        f" without blanks around. Received: {ascii(label)}."
      )
  return labels


def _is_text(name: str) -> bool:
  """Returns whether a file name is UTF-8.

  In a name that is not, Python puts lone surrogates, which cannot be encoded.
  """
  try:
    name.encode()
  except UnicodeEncodeError:
    return False
  return True


def check_labels(directory: str, labels: Sequence[str]) -> None:
  """Checks that every sub-folder of a directory is named like a label.

  Raises:
    FolderError: If the name of a sub-folder is not one of the labels.
  """
  unknown = [label for label in labels_of(directory) if label not in labels]
  if unknown:
    raise FolderError(
      f"{directory} must have no other sub-folders than the training set, or "
      "`labels_file` must say which sub-folders are labels. Received: "
      f"{unknown[0]!r}."
    )


def find(directory: str, labels: Sequence[str]) -> Found:
  """Finds the images in the sub-folders of a directory, one per label.

  Images may be at any depth of a label's sub-folder.

  Args:
    directory: The directory, with a sub-folder for each label.
    labels: The names of the labels; the first has number 1.

  Returns:
    The images, and the paths that were ignored.

  Raises:
    FolderError: If there are no images or a directory cannot be read.
  """
  numbers = {text: i for i, text in enumerate(labels, start=1)}
  files, ignored = [], []
  for entry in sorted(scan(directory), key=lambda entry: entry.name):
    if entry.name.startswith("."):
      continue
    if not entry.is_dir() or entry.name not in numbers:
      ignored.append(entry.path)
      continue
    for path in files_below(entry.path):
      if path.lower().endswith(EXTENSIONS):
        label = numbers[entry.name]
        files.append(File(path, label, entry.name, state(path)))
      else:
        ignored.append(path)
  if not files:
    raise FolderError(
      f"{directory} must hold JPEG or PNG files in sub-folders named "
      f"{labels[0]} and so on. Received: none."
    )
  return Found(shuffled(files), ignored)


def shuffled(files: Sequence[File]) -> list[File]:
  """Returns the files in a random order, which is always the same."""
  files = list(files)
  random.Random(_SHUFFLE_SEED).shuffle(files)
  return files


def fingerprint(directory: str, files: Sequence[File]) -> str:
  """Computes a digest by which a changed set of image files is recognized.

  It includes the names, labels, sizes and modification times of the files, and
  of ImageNet's files the synsets and the boxes.

  Args:
    directory: The directory to which the names are relative.
    files: The image files.

  Returns:
    A hexadecimal string.
  """
  digest = hashlib.sha256()
  for file in files:
    name = os.path.relpath(file.path, directory)
    facts = [name, file.label, file.text, file.state]
    if file.synset:
      facts += [file.synset, file.boxes]
    digest.update(json.dumps(facts).encode() + b"\n")
  return digest.hexdigest()


def state(path: str) -> tuple[int, int] | None:
  """Returns what `File.state` describes, for the file at a path."""
  try:
    status = os.stat(path)
  except OSError:
    return None
  return status.st_size, status.st_mtime_ns


def scan(directory: str) -> list[os.DirEntry]:
  """Lists the entries of a directory, in no order.

  Raises:
    FolderError: If the directory cannot be read.
  """
  try:
    with os.scandir(directory) as entries:
      return list(entries)
  except OSError as error:
    raise FolderError(
      f"{directory} must be a directory that can be read. Received: "
      f"{error.strerror}."
    ) from None


def files_below(directory: str) -> list[str]:
  """Lists the paths of all files below a directory, in alphabetical order.

  Hidden files and folders are left out.

  Raises:
    FolderError: If a directory cannot be read.
  """
  paths = []
  for entry in sorted(scan(directory), key=lambda entry: entry.name):
    if entry.name.startswith("."):
      continue
    paths += files_below(entry.path) if entry.is_dir() else [entry.path]
  return paths
