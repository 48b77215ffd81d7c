"""Tests for experiments.report: what is on the page."""

import html.parser
import importlib
import json
import pathlib
import tempfile
from unittest import mock

import tensorflow as tf  # noqa: F401  # Its first import starts `uname`.
from absl.testing import absltest

from experiments import report
from experiments.support import claims

NAMES = ("one", "two", "three", "four")
PIXEL = b"\x89PNG\r\n\x1a\n"


def _report(name, verdict=claims.HOLDS, **changed):
  finding = {
    "what": "step < 2 & more",
    "unit": "s",
    "values": [1.0, 2.0, 4.0],
    "most": 5.0,
    "verdict": verdict,
  }
  return {
    "name": name,
    "title": f"Title of {name}",
    "claim": "What is claimed.",
    "source": "Somebody <1990>",
    "explanation": "For beginners.",
    "verdict": verdict,
    "findings": [finding],
    "command": f"python -m experiments.claims.{name}",
    "machine": "a machine",
    "date": "2026-01-02",
    "seconds": 3.0,
    "measurements": [],
    **changed,
  }


class _Page(html.parser.HTMLParser):
  """Collects links and images, and that every tag is closed."""

  VOID = {"meta", "img"}

  def __init__(self, text):
    super().__init__()
    self.open, self.attributes, self.words = [], [], ""
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.attributes += attrs
    if tag not in self.VOID:
      self.open.append(tag)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag, tag

  def handle_data(self, data):
    self.words += data


class ReportTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(mock.patch.object(report, "EXPERIMENTS", NAMES))
    self.directory = self.enter_context(tempfile.TemporaryDirectory())

  def _write(self, content):
    root = pathlib.Path(self.directory)
    path = root / f"{content['name']}.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    path.with_suffix(".png").write_bytes(PIXEL)

  def _render(self, **arguments):
    missing = report.render(self.directory, **arguments)
    root = pathlib.Path(self.directory)
    page = _Page(root.joinpath("report.html").read_text(encoding="utf-8"))
    text = root.joinpath("report.md").read_text(encoding="utf-8")
    return missing, page, text

  def test_everything_is_on_the_page(self):
    verdicts = [claims.HOLDS, claims.FAILS, claims.UNCLEAR, claims.HOLDS]
    for name, verdict in zip(NAMES, verdicts, strict=True):
      self._write(_report(name, verdict))
    missing, page, text = self._render()
    self.assertEmpty(missing)
    self.assertEmpty(page.open)
    for words in (
      "4 claims: 2 hold, 1 do not hold, 1 are unclear.",
      "Title of one",
      "Somebody <1990>",
      "step < 2 & more",
      "2 s (1 to 4)",
      "at most 5",
      "python -m experiments.claims.one",
      "a machine",
      "2026-01-02",
    ):
      self.assertIn(words, page.words)
      self.assertIn(words, text)
    for name in NAMES:
      self.assertIn(("href", f"#{name}"), page.attributes)
      self.assertIn(f"({name}.png)", text)

  def test_says_that_little_was_measured(self):
    for name in NAMES:
      self._write(_report(name))
    self.assertNotIn("--quick", self._render()[2])
    self._write(
      _report("two", command="python -m experiments.claims.two --quick")
    )
    _, page, text = self._render()
    for words in (page.words, text):
      self.assertIn("4 hold. Made with --quick, which measures too", words)

  def test_needs_no_other_file(self):
    for name in NAMES:
      self._write(_report(name))
    _, page, _ = self._render()
    sources = [value for key, value in page.attributes if key == "src"]
    self.assertLen(sources, len(NAMES))
    for source in sources:
      self.assertStartsWith(source, "data:image/png;base64,")
    links = [value for key, value in page.attributes if key == "href"]
    self.assertTrue(all(link.startswith("#") for link in links))

  def test_what_is_missing_is_named(self):
    for name in NAMES[:2]:
      self._write(_report(name))
    missing, page, text = self._render(failed=NAMES[:1])
    expected = [*NAMES[:1], *NAMES[2:]]
    self.assertEqual(missing, expected)
    self.assertIn("1 claim: 1 hold. ", page.words)
    for name in expected:
      self.assertIn(f"{name} has no result", page.words)
      self.assertIn(f"**{name}** has no result", text)

  def test_another_file(self):
    self._write({"name": "one"})
    with self.assertRaisesRegex(ValueError, "one.json must be written"):
      report.render(self.directory)


class ExperimentsTest(absltest.TestCase):
  def test_every_experiment_has_its_claim(self):
    for name in report.EXPERIMENTS:
      module = importlib.import_module(f"experiments.claims.{name}")
      self.assertEqual(module.CLAIM.name, name)


if __name__ == "__main__":
  absltest.main()
