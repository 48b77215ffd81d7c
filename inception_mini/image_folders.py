"""Finds labeled images in a directory with one sub-folder per label.

This module does not import TensorFlow.
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
  """Raised if a directory or tar file of images cannot be used.

  The message says why.
  """


class Part(NamedTuple):
  """Says where in a tar file an image file is.

  Attributes:
    archive: Path of the tar file.
    start: Position of the image file's first byte in the tar file, from 0 on.
    size: Number of bytes of the image file.
  """

  archive: str
  start: int
  size: int


class File(NamedTuple):
  """An image file with its label.

  Attributes:
    path: Path of the file. If the file is in a tar file: its path as if the tar
      file were a directory.
    label: Number of the label, from 1 on; 0 if it has no label yet.
    text: Name of the label: the name of the sub-folder or, for ImageNet, a
      readable name of the class.
    state: Size in bytes, and time of the last modification in nanoseconds since
      1970. None if they cannot be read, as with a broken link.
    part: Where the image file is in a tar file; None if it is not in a tar
      file.
    synset: The identifier of the class in ImageNet, such as n01440764; empty
      for other images.
    boxes: The bounding boxes of objects, each as top, left, bottom and right
      edge in fractions of the image's height or width. Further elements of a
      box are ignored.
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
      OSError: If the file cannot be read, or the tar file ends before the end
        of the image file.
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
    files: The labeled JPEG and PNG files, in a shuffled order that is the same
      in every run.
    ignored: Paths of files without a label or of another type, and of
      sub-folders that are not named like a label.
  """

  files: list[File]
  ignored: list[str]


def labels_of(directory: str) -> list[str]:
  """Lists the labels: the names of the sub-folders, in alphabetical order.

  Hidden sub-folders are left out.

  Raises:
    FolderError: If the directory cannot be read or has no sub-folders, or if a
      name is not UTF-8, contains a line break, or begins or ends with a blank.
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
  """Returns whether the bytes of a file name are UTF-8.

  If they are not, Python's string for the name contains lone surrogates, which
  cannot be encoded.
  """
  try:
    name.encode()
  except UnicodeEncodeError:
    return False
  return True


def check_labels(directory: str, labels: Sequence[str]) -> None:
  """Checks that each sub-folder of a directory has the name of a label.

  Hidden sub-folders are ignored.

  Args:
    directory: The directory.
    labels: The names of the labels.

  Raises:
    FolderError: If a sub-folder has another name, or the directory cannot be
      read or has no sub-folders.
  """
  unknown = [label for label in labels_of(directory) if label not in labels]
  if unknown:
    raise FolderError(
      f"{directory} must have no other sub-folders than the training set, or "
      "`labels_file` must say which sub-folders are labels. Received: "
      f"{unknown[0]!r}."
    )


def find(directory: str, labels: Sequence[str]) -> Found:
  """Finds the labeled images in a directory, which has a sub-folder per label.

  Images may be at any depth of a label's sub-folder. Hidden files and folders
  are left out.

  Args:
    directory: The directory.
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
  """Returns the files in a shuffled order, which is the same in every run."""
  files = list(files)
  random.Random(_SHUFFLE_SEED).shuffle(files)
  return files


def fingerprint(directory: str, files: Sequence[File]) -> str:
  """Computes a digest that changes if the set of image files changes.

  It covers the order, names, labels, sizes and modification times of the files,
  and for ImageNet the synsets (classes) and bounding boxes.

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
  """Returns the size of a file in bytes, and when it was last modified.

  Args:
    path: The path of the file.

  Returns:
    The size, and the time in nanoseconds since 1970; None if they cannot be
    read.
  """
  try:
    status = os.stat(path)
  except OSError:
    return None
  return status.st_size, status.st_mtime_ns


def scan(directory: str) -> list[os.DirEntry]:
  """Lists the entries of a directory, in no particular order.

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
