"""Reads the bounding boxes of ImageNet: annotations in XML, or a CSV file.

This module does not import TensorFlow.
"""

import math
import os
import xml.etree.ElementTree as ET
from typing import NamedTuple

from inception_mini import image_folders
from tf_replicas.programs import tfds_builder

DataError = tfds_builder.DataError

# An annotation of ImageNet has a few hundred bytes per box.
MAX_ANNOTATION_BYTES = 1 << 20


class Box(NamedTuple):
  """The bounding box of one object, in fractions of the image's size.

  Attributes:
    top: The upper edge, in [0, 1].
    left: The left edge, in [0, 1].
    bottom: The lower edge, in [0, 1]; larger than `top`.
    right: The right edge, in [0, 1]; larger than `left`.
    name: The name of the object in the XML annotation, normally the identifier
      of an ImageNet class (synset), such as n01440764. Empty if the box is from
      a CSV file.
  """

  top: float
  left: float
  bottom: float
  right: float
  name: str = ""


class Boxes(NamedTuple):
  """The bounding boxes of a data set.

  Attributes:
    by_image: Maps the file name of an image, without directory and extension,
      to its boxes. Images without boxes are not in the map.
    num_empty: Number of boxes that were left out because they have no area
      inside the image.
  """

  by_image: dict[str, list[Box]]
  num_empty: int


def read(path: str) -> Boxes:
  """Reads the bounding boxes of many images.

  Args:
    path: One of two: a directory of XML annotations, at any depth, each named
      like its image but with the extension `.xml`; or a CSV file with the lines
      `image,xmin,ymin,xmax,ymax`, as the TF1 script `process_bounding_boxes`
      writes it.

  Returns:
    The boxes of all images, one or more.

  Raises:
    DataError: If a file cannot be read or is invalid, or there are no boxes.
    image_folders.FolderError: If a directory cannot be read.
  """
  try:
    read_all = _read_directory if os.path.isdir(path) else _read_csv
    boxes = read_all(path)
  except OSError as error:
    raise DataError(
      f"{error.filename or path} cannot be read: {error.strerror}."
    ) from None
  if not boxes.by_image:
    raise DataError(
      f"{path} must be a directory of XML files or a CSV file with bounding "
      f"boxes. Received: none, and {boxes.num_empty} that are empty."
    )
  return boxes


def parse_annotation(content: bytes, path: str) -> tuple[list[Box], int]:
  """Parses the XML annotation of one image, in the format of Pascal VOC.

  Args:
    content: The bytes of the file.
    path: The path of the file, for error messages.

  Returns:
    The boxes, each cut off at the edges of the image; and the number of boxes
    that were left out because they have no area inside the image.

  Raises:
    DataError: If the content is not such an annotation.
  """
  if len(content) > MAX_ANNOTATION_BYTES:
    raise DataError(
      f"{path} must be an annotation of at most {MAX_ANNOTATION_BYTES} bytes. "
      "Received: more."
    )
  try:
    text = content.decode()
    # Without a document type there are no entities, which could fill the
    # memory or read other files.
    if "<!DOCTYPE" in text:
      raise ValueError("a document type")
    root = ET.fromstring(text)
    size = [_number(root, f"size/{name}") for name in ("width", "height")]
    if min(size) <= 0:
      raise ValueError("a size of 0 or less")
    found = []
    for thing in root.iterfind("object"):
      name = (thing.findtext("name") or "").strip()
      for edges in thing.iterfind("bndbox"):
        left, top, right, bottom = (
          min(max(_number(edges, edge) / size[i % 2], 0.0), 1.0)
          for i, edge in enumerate(("xmin", "ymin", "xmax", "ymax"))
        )
        # Some annotations of ImageNet have them in the other order.
        left, right = sorted((left, right))
        top, bottom = sorted((top, bottom))
        found.append(Box(top, left, bottom, right, name))
  except (ValueError, ET.ParseError) as error:
    raise DataError(
      f"{path} must be an annotation of ImageNet in XML, with `size` and the "
      f"edges of each `bndbox`. Received: {' '.join(str(error).split())[:200]}."
    ) from None
  boxes = [box for box in found if not _is_empty(box)]
  return boxes, len(found) - len(boxes)


def _read_directory(directory: str) -> Boxes:
  by_image, num_empty = {}, 0
  for path in image_folders.files_below(directory):
    if not path.lower().endswith(".xml"):
      continue
    image = os.path.splitext(os.path.basename(path))[0]
    if image in by_image:
      raise DataError(
        f"{directory} must have one annotation per image. Received: {path}, "
        f"a second one of {image}."
      )
    with open(path, "rb") as file:
      content = file.read(MAX_ANNOTATION_BYTES + 1)
    boxes, empty = parse_annotation(content, path)
    num_empty += empty
    if boxes:
      by_image[image] = boxes
  return Boxes(by_image, num_empty)


def _read_csv(path: str) -> Boxes:
  by_image, num_empty = {}, 0
  try:
    with open(path, encoding="utf-8") as file:
      lines = file.readlines()
  except UnicodeDecodeError:
    raise DataError(
      f"{path} must be a text file. Received: bytes that are no UTF-8."
    ) from None
  for number, line in enumerate(lines, start=1):
    if not line.strip():
      continue
    try:
      image, box = _parse_line(line.strip())
    except ValueError:
      raise DataError(
        f"{path} must have lines `image,xmin,ymin,xmax,ymax` with edges in "
        f"[0, 1]. Received: line {number}, {line.strip()[:100]!r}."
      ) from None
    if _is_empty(box):
      num_empty += 1
    else:
      by_image.setdefault(image, []).append(box)
  return Boxes(by_image, num_empty)


def _parse_line(line: str) -> tuple[str, Box]:
  """Parses one line of a CSV file: the path of an image and a box.

  Returns:
    The file name of the image, without directory and extension; and the box.

  Raises:
    ValueError: If the line has another form, or an edge is not in [0, 1].
  """
  path, *edges = line.split(",")
  image = os.path.splitext(os.path.basename(path))[0]
  left, top, right, bottom = map(float, edges)
  if not image or not all(
    0 <= edge <= 1 for edge in (left, top, right, bottom)
  ):
    raise ValueError
  return image, Box(top, left, bottom, right)


def _number(element: ET.Element, path: str) -> float:
  text = element.findtext(path)
  try:
    number = float(text or "")
  except ValueError:
    number = math.nan
  if not math.isfinite(number):
    raise ValueError(f"{path} {text!r}")
  return number


def _is_empty(box: Box) -> bool:
  return box.top >= box.bottom or box.left >= box.right
