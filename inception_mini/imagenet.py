"""Finds the images of ImageNet with their labels, names and bounding boxes.

ImageNet's *synsets* are its classes, with identifiers such as n01440764. The
images may be in directories, or in the tar files that ImageNet distributes.
Tar files are not unpacked: images are read where they are.
"""

import os
import re
import tarfile
from collections.abc import Mapping
from collections.abc import Sequence

from inception_mini import bounding_boxes
from inception_mini import image_folders
from inception_mini import records

DataError = records.DataError

_SYNSET = re.compile(r"n\d{8}")
_VALIDATION_IMAGE = re.compile(r"ILSVRC2012_val_(\d{8})\.JPEG")
_TAR = ".tar"


def scan(path: str) -> list[image_folders.File]:
  """Lists all files of a directory or tar file, with the synsets of most.

  Args:
    path: A directory or an uncompressed tar file.

  Returns:
    The files. The synset is the name of the directory, or of the inner tar file
    without `.tar`, that a file is in. It is empty for a file that is in none.

  Raises:
    image_folders.FolderError: If the directory or the file cannot be read.
  """
  if not os.path.isdir(path):
    return _scan_tar(path)
  files = []
  for entry in sorted(image_folders.scan(path), key=lambda entry: entry.name):
    if entry.name.startswith("."):
      continue
    if entry.is_dir():
      synset, paths = entry.name, image_folders.files_below(entry.path)
    else:
      synset, paths = "", [entry.path]
    for file in paths:
      state = image_folders.state(file)
      files.append(image_folders.File(file, 0, synset, state, synset=synset))
  return files


def _scan_tar(path: str) -> list[image_folders.File]:
  try:
    changed = os.stat(path).st_mtime_ns
    with tarfile.open(path, "r:") as tar:
      return list(_members(tar, path, path, changed))
  except OSError as error:
    reason = error.strerror
  except tarfile.TarError as error:
    reason = f"a damaged tar file, {error}"
  raise image_folders.FolderError(
    f"{path} must be a directory or a whole, uncompressed tar file. Received: "
    f"{reason}."
  )


def _members(tar, archive, path, changed, start=0, synset=""):
  """Lists the files in a tar file, and in the tar files in it.

  Args:
    tar: The tar file, which is open.
    archive: The path of the outermost tar file.
    path: The path of the tar file, as if tar files were directories.
    changed: The time of the last modification of the outermost tar file, in ns.
    start: The number of bytes in the outermost tar file before this one.
    synset: The synset of the files.
  """
  for member in tar:
    name = os.path.basename(member.name)
    if member.size < 0:
      raise tarfile.ReadError(f"with a member of {member.size} bytes: {path}")
    if not member.isfile() or name.startswith("."):
      continue
    here = os.path.join(path, name)
    first = start + member.offset_data
    if name.endswith(_TAR) and not synset:
      stream = tar.extractfile(member)
      with tarfile.open(fileobj=stream, mode="r:") as inner:
        inner_synset = name.removesuffix(_TAR)
        yield from _members(inner, archive, here, changed, first, inner_synset)
    else:
      yield image_folders.File(
        here,
        0,
        synset,
        (member.size, changed),
        part=image_folders.Part(archive, first, member.size),
        synset=synset,
      )
  # The class takes a damaged header for the end.
  tar.fileobj.seek(tar.offset)
  end = tar.fileobj.read(tarfile.BLOCKSIZE)
  if not end or end.strip(b"\0"):
    raise tarfile.ReadError(f"whose end is missing or damaged: {path}")


def with_synsets(
  files: Sequence[image_folders.File], labels_path: str
) -> list[image_folders.File]:
  """Gives ImageNet's validation images the synsets that a text file lists.

  Args:
    files: Files that are in no directory of a synset. The images are named
      `ILSVRC2012_val_00000001.JPEG` and so on.
    labels_path: A file with one synset per line, in the order of the images.

  Returns:
    The images. Other files keep their synset, which is empty.

  Raises:
    DataError: If the file cannot be read, a line is no synset, or there is not
      exactly one image for each line.
  """
  synsets = []
  for number, line in enumerate(_lines(labels_path), start=1):
    _check_synset(line.strip(), f"{labels_path}, line {number},")
    synsets.append(line.strip())
  numbers, labeled = set(), []
  for file in files:
    match = _VALIDATION_IMAGE.fullmatch(os.path.basename(file.path))
    if match and file.synset:
      raise DataError(
        f"`validation_labels_file` must not be given for images in a directory "
        f"per synset. Received: {labels_path}, and the image {file.path}."
      )
    if match:
      number = int(match[1])
      if number in numbers or not 1 <= number <= len(synsets):
        raise DataError(
          f"{labels_path} must have a line for each image. Received: "
          f"{len(synsets)} lines, and the image {file.path}."
        )
      numbers.add(number)
      file = file._replace(synset=synsets[number - 1])
    labeled.append(file)
  missing = sorted(set(range(1, len(synsets) + 1)) - numbers)
  if missing:
    raise DataError(
      f"{labels_path} must have one line per image. Received: {len(synsets)} "
      f"lines, and no image ILSVRC2012_val_{missing[0]:08d}.JPEG."
    )
  return labeled


def read_synsets(path: str) -> list[str]:
  """Reads the ordered synsets, one per line; the first has label 1.

  Raises:
    DataError: If the file cannot be read, a line is no synset, or one is there
      twice.
  """
  synsets = records.read_labels(path)
  for synset in synsets:
    _check_synset(synset, f"Each line of {path}")
  return synsets


def synsets_of(files: Sequence[image_folders.File], path: str) -> list[str]:
  """Returns the synsets of files in alphabetical order, as ImageNet has them.

  Args:
    files: Some files.
    path: Where they are, for errors.

  Raises:
    DataError: If there are no synsets, or a file is in a directory that is not
      named like a synset.
  """
  synsets = sorted({file.synset for file in files if file.synset})
  if not synsets:
    raise DataError(
      f"{path} must have a sub-directory per synset, such as n01440764, or a "
      f"tar file per synset. Received: {len(files)} files, in none."
    )
  for synset in synsets:
    _check_synset(synset, f"The name of each sub-directory of {path}")
  return synsets


def check_complete(
  files: Sequence[image_folders.File], synsets: Sequence[str], path: str
) -> None:
  """Checks that each synset has training images.

  Args:
    files: The training files.
    synsets: The synsets.
    path: Where the files are, for the error.

  Raises:
    DataError: If a synset has no files.
  """
  found = {file.synset for file in files}
  missing = [synset for synset in synsets if synset not in found]
  if missing:
    raise DataError(
      f"{path} must have files of all {len(synsets)} synsets. Received: none "
      f"of {len(missing)} synsets, {missing[0]} the first."
    )


def check_known(
  files: Sequence[image_folders.File], synsets: Sequence[str], path: str
) -> None:
  """Checks that files are of no other synsets than the training set's.

  Args:
    files: The files.
    synsets: The synsets of the training set.
    path: Where the files are, for the error.

  Raises:
    DataError: If a file is of another synset.
  """
  known = {"", *synsets}
  for file in files:
    if file.synset not in known:
      raise DataError(
        f"{path} must have no other synsets than the training set, or "
        "`labels_file` must say which synsets to use. Received: "
        f"{file.synset} of {file.path}."
      )


def read_names(path: str, synsets: Sequence[str]) -> dict[str, str]:
  """Reads what synsets are called.

  Args:
    path: A file of lines such as `n01440764<tab>tench, Tinca tinca`.
    synsets: Synsets that must be in the file, beside others.

  Returns:
    Maps synsets to their names.

  Raises:
    DataError: If the file cannot be read, or a synset has no name in it.
  """
  names = {}
  for line in _lines(path):
    synset, *name = line.split(maxsplit=1) or [""]
    if name:
      names[synset] = name[0].strip()
  missing = [synset for synset in synsets if synset not in names]
  if missing:
    raise DataError(
      f"{path} must have a line with the name of each of the {len(synsets)} "
      f"synsets. Received: {len(names)} names, but none of {missing[0]}."
    )
  return names


def label(
  files: Sequence[image_folders.File],
  synsets: Sequence[str],
  names: Mapping[str, str],
  boxes: Mapping[str, Sequence[bounding_boxes.Box]],
  *,
  path: str,
) -> image_folders.Found:
  """Gives images their labels, names and bounding boxes.

  A box with the name of another synset than the image's is left out, as in the
  TF1 script. Names that are no synsets are not compared: the annotations of
  some images have a name in English.

  Args:
    files: The files, with their synsets.
    synsets: The synsets to use, in order; the first has label 1.
    names: Maps synsets to their names. A synset that is not there is its name.
    boxes: Maps names of images, without extension, to their boxes.
    path: Where the files are, for the error.

  Returns:
    The images, in a shuffled order that is always the same, and the paths of
    other files and of images of other synsets.

  Raises:
    DataError: If there are no images of the synsets.
  """
  numbers = {synset: i for i, synset in enumerate(synsets, start=1)}
  found, ignored = [], []
  for file in files:
    base, extension = os.path.splitext(os.path.basename(file.path))
    number = numbers.get(file.synset)
    if not number or extension.lower() not in image_folders.EXTENSIONS:
      ignored.append(file.path)
      continue
    kept = [
      box
      for box in boxes.get(base, ())
      if box.name == file.synset or not _SYNSET.fullmatch(box.name)
    ]
    text = names.get(file.synset, file.synset)
    found.append(file._replace(label=number, text=text, boxes=kept))
  if not found:
    raise DataError(
      f"{path} must hold JPEG files of synsets such as {synsets[0]}. Received: "
      f"{len(files)} other files."
    )
  return image_folders.Found(image_folders.shuffled(found), ignored)


def _lines(path: str) -> list[str]:
  try:
    with open(path, encoding="utf-8") as file:
      return file.read().rstrip().split("\n")
  except (OSError, UnicodeDecodeError) as error:
    raise DataError(f"{path} cannot be read: {error}.") from None


def _check_synset(synset: str, where: str) -> None:
  if not _SYNSET.fullmatch(synset):
    raise DataError(
      f"{where} must be a synset such as n01440764. Received: "
      f"{ascii(synset)[:100]}."
    )
