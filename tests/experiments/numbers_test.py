"""Tests for experiments.numbers: every measured number has its data."""

import json
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest

from experiments import numbers

_STORED = "<!-- measured: results/straggler.json{} -->\n\n"


def _of(text):
  return list(numbers.numbers("page.md", text))


def _problems(text):
  return [problem for n in _of(text) if (problem := numbers.problem(n))]


class PagesTest(absltest.TestCase):
  def test_every_measured_number_has_its_data(self):
    wrong = [(str(n), numbers.problem(n)) for n in numbers.of_pages()]
    self.assertEmpty([pair for pair in wrong if pair[1]])


class NumbersTest(absltest.TestCase):
  def test_what_looks_like_a_measurement(self):
    text = (
      "With TensorFlow 2.21 and `0.5` on 2026-01-02, 3 workers take 0.81 of the"
      " time, 5% more,\nor 12 s; [0.7](x_1.5.md); 95% interval\n"
    )
    found = _of(text)
    self.assertEqual([n.text for n in found], ["0.81", "5", "12", "0.7"])
    self.assertEqual([n.line for n in found], [1, 1, 2, 2])
    self.assertEqual([n.is_percent for n in found], [False, True, False, False])

  def test_needs_a_source(self):
    self.assertEqual(_problems("It takes 3 s.\n"), ["has no source"])
    self.assertEmpty(
      _problems("<!-- not measured: a limit -->\n\nAfter 3 s.\n")
    )

  def test_a_comment_is_for_one_block(self):
    text = "<!-- not measured: a limit -->\n\nAfter 3 s.\n\nAfter 4 s.\n"
    self.assertLen(_problems(text), 1)

  def test_a_section_ends_at_the_next_heading(self):
    text = (
      "# A\n\n<!-- not measured: x (section) -->\n\n1.5\n\n2.5\n\n# B\n\n3.5\n"
    )
    self.assertLen(_problems(text), 1)

  def test_data_must_hold_the_number(self):
    report = numbers.ROOT / "experiments" / "results" / "straggler.json"
    findings = json.loads(report.read_text(encoding="utf-8"))["findings"]
    text = f"It costs {findings[1]['values'][0]:.0%}.\n"
    self.assertEmpty(_problems(_STORED.format("") + text))
    self.assertEqual(
      _problems(_STORED.format("") + "It costs 12.3456%.\n"),
      ["is not in results/straggler.json"],
    )
    also = _STORED.format("; also: 12.3456")
    self.assertEmpty(_problems(also + "It costs 12.3456%.\n"))

  def _store(self, data):
    """Stores the only data that the comments of this test may name."""
    directory = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    self.enter_context(mock.patch.object(numbers, "ROOT", directory))
    (directory / "experiments").mkdir()
    (directory / "experiments" / "fit.json").write_text(json.dumps(data))

  def test_a_comment_may_compute_a_number(self):
    self._store({"rounds": 8 * [{"fit": 99.0, "loop": 100.0}]})
    stored = "<!-- measured: fit.json; 2026-11-25; {} -->\n\nA 0.99.\n"
    for words, problems in {
      'computed: 0.99 = mean(r["fit"] / r["loop"] for r in x["rounds"])'
      "; 3 = len(xs)": 0,
      'computed: 0.99 = 1.01 * len(x["rounds"]) / 8': 1,
      'computed: 0.98 = x["rounds"][0]["fit"] / x["rounds"][0]["loop"]': 1,
      "computed: 0.99 = x.rounds": 1,
      "computed: 0.99": 1,
      "computed: 0.99 = open('x')": 1,
      "also: 0.99": 0,
    }.items():
      self.assertLen(_problems(stored.format(words)), problems, words)

  def test_raw_measurements_do_not_suffice(self):
    self._store({"rounds": [{"fit": 167.44}]})
    text = "<!-- measured: fit.json; 2026-11-25 -->\n\n167.44.\n"
    self.assertLen(_problems(text), 1)

  def test_a_generated_table_may_be_the_source(self):
    self.enter_context(
      mock.patch.object(numbers, "generated", lambda: {"some": "| 0.83 (5%) |"})
    )
    of_table = "<!-- measured: table some; also: 0.9 -->\n\nA rate of {}.\n"
    for text, problems in {
      "0.83, 5% and 0.9": [],
      "0.84": ["is not in table some"],
    }.items():
      self.assertEqual(_problems(of_table.format(text)), problems)
    (what,) = _problems("<!-- measured: table other -->\n\n0.5\n")
    self.assertIn("on no page", what)

  def test_a_text_may_be_the_source(self):
    stored = "<!-- measured: results/fuzz.txt; 2026-11-25 -->\n\n"
    self.assertEmpty(_problems(stored + "It grew by 16 MiB.\n"))
    self.assertLen(_problems(stored + "It grew by 17 MiB.\n"), 1)
    self.assertLen(_problems(stored.replace("-25", "") + "16 MiB.\n"), 1)

  def test_data_must_exist_and_have_a_date(self):
    self._store({"findings": [{"values": [0.5]}]})
    (what,) = _problems("<!-- measured: none.json -->\n\n0.5\n")
    self.assertIn("does not exist", what)
    (what,) = _problems("<!-- measured: fit.json -->\n\n0.5\n")
    self.assertIn("has no date", what)


if __name__ == "__main__":
  absltest.main()
