"""Tests of `cifar10.confusion`."""

import sys

import numpy as np
import pytest

from cifar10 import confusion


@pytest.fixture
def matrix():
  """Airplanes 3 of 4 right, one taken for a ship; ships 2 of 2; no truck."""
  counts = np.zeros([10, 10], np.int64)
  counts[0, 0], counts[0, 8], counts[8, 8] = 3, 1, 2
  counts[1, 0] = 2
  return counts


def test_rates(matrix):
  assert confusion.accuracy(matrix) == 5 / 8
  assert confusion.recall(matrix)[[0, 1, 8]].tolist() == [3 / 4, 0.0, 1.0]
  assert confusion.precision(matrix)[[0, 8]].tolist() == [3 / 5, 2 / 3]
  assert np.isnan(confusion.recall(matrix)[9])
  assert np.isnan(confusion.precision(matrix)[1])


def test_scalars_leave_out_what_is_not_a_number(matrix):
  assert confusion.scalars(matrix) == {
    "precision @ 1": 5 / 8,
    "precision/airplane": 3 / 5,
    "precision/ship": 2 / 3,
    "recall/airplane": 3 / 4,
    "recall/automobile": 0.0,
    "recall/ship": 1.0,
  }


def test_table(matrix):
  lines = confusion.table(matrix).splitlines()
  assert len(lines) == 11
  assert lines[:3] == [
    "class        images   recall  precision",
    "airplane          4   0.7500     0.6000",
    "automobile        2   0.0000          -",
  ]
  assert lines[10] == "truck             0        -          -"


def test_picture_is_darker_where_more_of_the_row_is():
  pytest.importorskip("matplotlib")
  picture = confusion.picture(np.eye(10, dtype=np.int64) * 7)
  assert picture.dtype == np.uint8
  assert picture.ndim == 3 and picture.shape[2] == 3
  dark_blue = (picture[:, :, 0] < 50) & (picture[:, :, 2] > 80)
  rows, columns = np.nonzero(dark_blue)
  # The diagonal, from the upper left to the lower right.
  assert np.corrcoef(rows, columns)[0, 1] > 0.95


def test_matplotlib_is_optional(monkeypatch):
  monkeypatch.setitem(sys.modules, "matplotlib", None)
  assert not confusion.can_draw()
