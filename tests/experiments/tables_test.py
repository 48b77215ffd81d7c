"""Tests for experiments.tables: the pages have what the results say."""

import pytest

from experiments import numbers
from experiments import tables

# The race imports Keras, which starts a process.
pytest.importorskip("keras")


def test_every_page_is_up_to_date():
  """If it is not: python -m experiments.tables."""
  found = set()
  for page, text in numbers.pages().items():
    assert tables.fill(text) == text, page
    found |= {
      name for name in tables.TABLES if f"generated: {name} -->" in text
    }
  assert found == set(tables.TABLES)


def test_a_block_is_replaced(monkeypatch):
  monkeypatch.setitem(tables.TABLES, "some", lambda: ["| 1.5 |"])
  text = "A\n\n<!-- generated: some -->\nold\n<!-- end -->\n\nB\n"
  filled = tables.fill(text)
  assert filled == (
    "A\n\n<!-- generated: some -->\n\n| 1.5 |\n\n<!-- end -->\n\nB\n"
  )
  assert tables.fill(filled) == filled
  assert not list(numbers.numbers("page.md", filled))


def test_an_unknown_block_is_an_error():
  with pytest.raises(KeyError, match="other"):
    tables.fill("<!-- generated: other -->\n<!-- end -->\n")
