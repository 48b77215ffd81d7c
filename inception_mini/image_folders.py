"""Folders of labelled images: one sub-folder per label, files within.

Imports no TensorFlow.
"""

import hashlib
import json
import os
import random
from collections.abc import Sequence
from typing import NamedTuple

EXTENSIONS = (".jpeg", ".jpg", ".png")

# Files of one label must not end up in one shard.
_SHUFFLE_SEED = 2016


class FolderError(Exception):
  """The folders cannot be used; the message is one line with the reason."""


class File(NamedTuple):
  """A labelled file.

  Attributes:
    path: Where it is.
    label: From 1 on.
    text: The name of the label and of its sub-folder.
    state: Size in bytes and time of change in ns; None if it cannot be reached,
      such as a link to nowhere.
  """

  path: str
  label: int
  text: str
  state: tuple[int, int] | None


class Found(NamedTuple):
  """What a directory holds.

  Attributes:
    files: Images by name, in a shuffled order that is always the same.
    ignored: Paths of other files, and of sub-folders that are no label.
  """

  files: list[File]
  ignored: list[str]


def labels_of(directory: str) -> list[str]:
  """Names of the sub-folders, in alphabetical order; hidden ones are not.

  Raises:
    FolderError: If there are none, or one cannot be a line of a file.
  """
  labels = sorted(
    entry.name
    for entry in _scan(directory)
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
  """Whether its bytes are UTF-8; Python keeps others as lone surrogates."""
  try:
    name.encode()
  except UnicodeEncodeError:
    return False
  return True


def check_labels(directory: str, labels: Sequence[str]) -> None:
  """Checks that every sub-folder is one of the labels.

  Raises:
    FolderError: If not.
  """
  unknown = [label for label in labels_of(directory) if label not in labels]
  if unknown:
    raise FolderError(
      f"{directory} must have no sub-folder but those of the training set, "
      f"or `labels_file` say which count. Received: {unknown[0]!r}."
    )


def find(directory: str, labels: Sequence[str]) -> Found:
  """Finds the images below a directory, at any depth of a label's folder.

  Args:
    directory: Has a sub-folder for each label.
    labels: Their names; the first has label 1.

  Raises:
    FolderError: If there are no images or a directory cannot be read.
  """
  numbers = {text: i for i, text in enumerate(labels, start=1)}
  files, ignored = [], []
  for entry in sorted(_scan(directory), key=lambda entry: entry.name):
    if entry.name.startswith("."):
      continue
    if not entry.is_dir() or entry.name not in numbers:
      ignored.append(entry.path)
      continue
    for path in _files_below(entry.path):
      if path.lower().endswith(EXTENSIONS):
        label = numbers[entry.name]
        files.append(File(path, label, entry.name, _state(path)))
      else:
        ignored.append(path)
  if not files:
    raise FolderError(
      f"{directory} must hold JPEG or PNG files in sub-folders named "
      f"{labels[0]} and so on. Received: none."
    )
  random.Random(_SHUFFLE_SEED).shuffle(files)
  return Found(files, ignored)


def fingerprint(directory: str, files: Sequence[File]) -> str:
  """A digest of names, labels, sizes and times of change of the files."""
  digest = hashlib.sha256()
  for file in files:
    name = os.path.relpath(file.path, directory)
    facts = [name, file.label, file.text, file.state]
    digest.update(json.dumps(facts).encode() + b"\n")
  return digest.hexdigest()


def _state(path: str) -> tuple[int, int] | None:
  try:
    status = os.stat(path)
  except OSError:
    return None
  return status.st_size, status.st_mtime_ns


def _scan(directory: str) -> list[os.DirEntry]:
  try:
    with os.scandir(directory) as entries:
      return list(entries)
  except OSError as error:
    raise FolderError(
      f"{directory} must be a directory that can be read. Received: "
      f"{error.strerror}."
    ) from None


def _files_below(directory: str) -> list[str]:
  """Paths of all files that are not hidden, in order."""
  paths = []
  for entry in sorted(_scan(directory), key=lambda entry: entry.name):
    if entry.name.startswith("."):
      continue
    paths += _files_below(entry.path) if entry.is_dir() else [entry.path]
  return paths
