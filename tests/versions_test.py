"""Tests of `benchmarks.versions`, its page, and the project's own version."""

import json
import pathlib
import re

import pytest

import tf_replicas
from benchmarks import versions

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = json.loads(versions.RESULTS.read_text(encoding="utf-8"))


def test_the_page_shows_the_results():
  assert versions.PAGE.read_text(encoding="utf-8") == versions.page(RESULTS)


def test_all_that_was_run_can_be_installed():
  for row in RESULTS["runs"]:
    assert versions.triple_of(row) in RESULTS["resolved"]["triples"], row


def test_the_counts_of_pytest_are_read():
  output = (
    "FAILED tests/a_test.py::test_b - assert 1 == 2\n"
    "ERROR tests/c_test.py\n"
    "1 failed, 20 passed, 3 skipped, 2 errors in 61.50s (0:01:01)\n"
  )
  assert versions.outcome_of(output) == {
    "passed": 20,
    "failed": 3,
    "skipped": 3,
    "seconds": 62,
    "failures": ["tests/a_test.py::test_b", "tests/c_test.py"],
  }
  with pytest.raises(RuntimeError, match="must end with counts"):
    versions.outcome_of("ImportError\n")


def test_the_version_of_the_project_is_the_same_everywhere():
  changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
  newest, date = re.search(
    r"^## (\S+) - (\S+)$", changes, re.MULTILINE
  ).groups()
  citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
  assert newest == tf_replicas.__version__
  assert f"\nversion: {newest}\ndate-released: {date}\n" in citation
