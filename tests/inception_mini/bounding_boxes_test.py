"""Tests of `inception_mini.bounding_boxes`."""

import pytest

from inception_mini import bounding_boxes

Box = bounding_boxes.Box


def xml(*boxes, size=(200, 100), name="n01440764"):
  """An annotation with boxes of left, top, right, bottom, in pixels."""
  things = "".join(
    f"<object><name>{name}</name><bndbox><xmin>{left}</xmin><ymin>{top}</ymin>"
    f"<xmax>{right}</xmax><ymax>{bottom}</ymax></bndbox></object>"
    for left, top, right, bottom in boxes
  )
  return (
    f"<annotation><filename>%s</filename><size><width>{size[0]}</width>"
    f"<height>{size[1]}</height><depth>3</depth></size>{things}</annotation>"
  )


def parse(text):
  return bounding_boxes.parse_annotation(text.encode(), "a.xml")


class TestAnnotation:
  def test_edges_are_shares_of_the_annotated_size(self):
    boxes, num_empty = parse(xml((20, 10, 100, 75), (0, 0, 200, 100)))
    assert boxes == [
      Box(0.1, 0.1, 0.75, 0.5, "n01440764"),
      Box(0.0, 0.0, 1.0, 1.0, "n01440764"),
    ]
    assert num_empty == 0

  def test_boxes_are_cut_to_the_image_and_empty_ones_left_out(self):
    boxes, num_empty = parse(
      xml(
        (-20, 50, 300, 100),
        (50, 10, 50, 20),  # Without width.
        (60, 20, 50, 10),  # In the other order, as TF1's script also allows.
        (210, 10, 250, 20),  # Outside.
      )
    )
    assert boxes == [
      Box(0.5, 0.0, 1.0, 1.0, "n01440764"),
      Box(0.1, 0.25, 0.2, 0.3, "n01440764"),
    ]
    assert num_empty == 2

  def test_an_image_without_objects(self):
    assert parse(xml()) == ([], 0)

  @pytest.mark.parametrize(
    "text, words",
    [
      ("", "no element found"),
      (xml((1, 2, 3, 4))[:-5], "not well-formed|unclosed token"),
      (xml((1, 2, 3, 4), size=(0, 9)), "a size of 0 or less"),
      (xml((1, 2, 3, 4)).replace("width", "w"), "size/width None"),
      (xml((1, 2, 3, 4)).replace("ymax", "y"), "ymax None"),
      (xml((1, 2, "wide", 4)), "xmax 'wide'"),
      (xml((1, 2, "nan", 4)), "xmax 'nan'"),
      ("<!DOCTYPE a [<!ENTITY b 'c'>]>" + xml(), "a document type"),
      (" " * bounding_boxes.MAX_ANNOTATION_BYTES + xml(), "at most 1048576 b"),
    ],
  )
  def test_others_are_refused_in_one_line(self, text, words):
    with pytest.raises(bounding_boxes.DataError, match=words) as error:
      parse(text)
    assert str(error.value).startswith("a.xml must be an annotation")
    assert "\n" not in str(error.value)

  def test_an_encoding_that_would_hide_a_document_type(self):
    text = "<?xml version='1.0' encoding='utf-16'?><!DOCTYPE a>" + xml()
    with pytest.raises(bounding_boxes.DataError, match="must be an annotation"):
      bounding_boxes.parse_annotation(text.encode("utf-16"), "a.xml")


class TestRead:
  def test_a_directory_of_annotations(self, tmp_path):
    for synset in ("n01440764", "n01443537"):
      (tmp_path / "Annotation" / synset).mkdir(parents=True)
      path = tmp_path / "Annotation" / synset / f"{synset}_7.xml"
      path.write_text(xml((20, 10, 100, 75), (9, 9, 9, 9), name=synset))
    (tmp_path / "Annotation" / "README").write_text("about")
    assert bounding_boxes.read(str(tmp_path)) == bounding_boxes.Boxes(
      {
        f"{synset}_7": [Box(0.1, 0.1, 0.75, 0.5, synset)]
        for synset in ("n01440764", "n01443537")
      },
      2,
    )

  def test_a_csv_file(self, tmp_path):
    path = tmp_path / "boxes.csv"
    path.write_text(
      "n01440764_7.JPEG,0.0060,0.2620,0.7545,0.9940\n\n"
      "n01440764_7.JPEG,0.0,0.0,1.0,1.0\n"
      "n01440764_8.JPEG,0.5,0.0,0.5,1.0\n"
    )
    assert bounding_boxes.read(str(path)) == bounding_boxes.Boxes(
      {"n01440764_7": [Box(0.262, 0.006, 0.994, 0.7545), Box(0, 0, 1, 1)]}, 1
    )

  @pytest.mark.parametrize(
    "line",
    ["a.JPEG,1,2,3", "a.JPEG,0,0,500,375", "a.JPEG,0,0,1,nan", ",0,0,1,1", "x"],
  )
  def test_a_line_of_another_form_is_named(self, tmp_path, line):
    path = tmp_path / "boxes.csv"
    path.write_text(f"a.JPEG,0,0,1,1\n{line}\n")
    with pytest.raises(bounding_boxes.DataError) as error:
      bounding_boxes.read(str(path))
    assert str(error.value) == (
      f"{path} must have lines `image,xmin,ymin,xmax,ymax` with edges in "
      f"[0, 1]. Received: line 2, {line!r}."
    )

  def test_boxes_must_be_there(self, tmp_path):
    with pytest.raises(bounding_boxes.DataError, match="Received: none, and 0"):
      bounding_boxes.read(str(tmp_path))
    missing = tmp_path / "missing.csv"
    with pytest.raises(bounding_boxes.DataError, match=f"{missing} cannot be"):
      bounding_boxes.read(str(missing))

  def test_an_image_has_one_annotation(self, tmp_path):
    for folder in ("a", "b"):
      (tmp_path / folder).mkdir()
      (tmp_path / folder / "x.xml").write_text(xml((20, 10, 100, 75)))
    with pytest.raises(bounding_boxes.DataError, match="a second one of x"):
      bounding_boxes.read(str(tmp_path))
