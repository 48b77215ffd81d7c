"""Finds the images of ImageNet with their labels, names and bounding boxes.

A *synset* is a class of ImageNet, and has an identifier such as n01440764. The
images may be in directories, or in the tar files that ImageNet distributes. Tar
files are not unpacked: each image is read from its place in the tar file.
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
  """Lists all files in a directory or tar file, with their synsets if known.

  The synset (class) of a file is the name of the sub-directory that it is in.
  In a tar file, it is the name of the inner tar file without `.tar`.

  Args:
    path: A directory or an uncompressed tar file.

  Returns:
    The files, without labels. The synset of a file is empty if the file is in
    no sub-directory and in no inner tar file. Hidden files are left out.

  Raises:
    image_folders.FolderError: If the directory or the tar file cannot be read.
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
  """Yields the files in a tar file, and in the tar files that it contains.

  Args:
    tar: The open `tarfile.TarFile`.
    archive: The path of the outermost tar file.
    path: The path of `tar`, as if tar files were directories.
    changed: When the outermost tar file was last modified, in nanoseconds since
      1970.
    start: Position of this tar file's first byte in the outermost tar file.
    synset: The synset (class) of the files, or "" in the outermost tar file.
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
    files: Files without synsets (classes). The images are named
      `ILSVRC2012_val_00000001.JPEG` and so on.
    labels_path: A file with one synset per line. Line k is the synset of image
      number k.

  Returns:
    All files. The images have their synsets, and other files are unchanged.

  Raises:
    DataError: If the text file cannot be read, a line is not a synset, there is
      not exactly one image for each line, or an image has a synset already.
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
  """Reads a list of synsets (classes) from a text file, one per line.

  The order matters: the first synset has label 1.

  Raises:
    DataError: If the file cannot be read, a line is not a synset, or a synset
      is there twice.
  """
  synsets = records.read_labels(path)
  for synset in synsets:
    _check_synset(synset, f"Each line of {path}")
  return synsets


def synsets_of(files: Sequence[image_folders.File], path: str) -> list[str]:
  """Returns the distinct synsets (classes) of files, in alphabetical order.

  This is the usual order of ImageNet.

  Args:
    files: Some files.
    path: The directory or tar file that has the files, for error messages.

  Raises:
    DataError: If no file has a synset, or a file is in a directory that is not
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
  """Checks that each synset (class) has training images.

  Args:
    files: The training files.
    synsets: The synsets.
    path: The directory or tar file that has the files, for the error message.

  Raises:
    DataError: If a synset has no files.
  """
  found = {file.synset for file in files}
  missing = [synset for synset in synsets if synset not in found]
  if missing:
    raise DataError(
      f"{path} must have files of all {len(synsets)} synsets. Received: no "
      f"files of {len(missing)} synsets; the first is {missing[0]}."
    )


def check_known(
  files: Sequence[image_folders.File], synsets: Sequence[str], path: str
) -> None:
  """Checks that files belong to no other synsets (classes) than given ones.

  Files without a synset are ignored.

  Args:
    files: The files.
    synsets: The allowed synsets.
    path: The directory or tar file that has the files, for the error message.

  Raises:
    DataError: If a file has another synset.
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
  """Reads the readable names of synsets (classes) from a text file.

  Args:
    path: A file of lines such as `n01440764<tab>tench, Tinca tinca`.
    synsets: Synsets that must be in the file. It may have others, too.

  Returns:
    Maps each synset in the file to its name.

  Raises:
    DataError: If the file cannot be read, or one of `synsets` has no name in
      it.
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
  """Gives images their labels, readable names and bounding boxes.

  Like the TF1 script, leaves out a box if its name is another synset (class)
  than that of the image. A box whose name is not a synset is kept: some
  annotations have an English name instead.

  Args:
    files: The files, with their synsets.
    synsets: The synsets to use, in order. The first has label 1.
    names: Maps synsets to their readable names. For a synset that is missing,
      the identifier is used as the name.
    boxes: Maps file names of images, without directory and extension, to their
      boxes.
    path: The directory or tar file that has the files, for the error message.

  Returns:
    The images of the synsets, in a shuffled order that is the same in every
    run; and the paths of all other files.

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
