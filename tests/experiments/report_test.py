"""Tests for experiments.report: what is on the page."""

import html.parser
import importlib
import json
import pathlib
import tempfile
from unittest import mock

import numpy as np
import tensorflow as tf  # noqa: F401  # Its first import starts `uname`.
from absl.testing import absltest
from plotly import graph_objects

from experiments import report
from experiments import simulator
from experiments.claims import scale_out
from experiments.claims import stale_ball
from experiments.support import claims
from experiments.support import report_panels

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

  VOID = {"meta", "img", "input"}

  def __init__(self, text):
    super().__init__()
    self.open, self.tags, self.attributes, self.words = [], [], [], ""
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.tags.append((tag, dict(attrs)))
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
      "Of 4 claims: 2 hold, 1 does not hold, 1 is unclear.",
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
    self.assertTrue(all(link.startswith(("#", "data:")) for link in links))

  def test_what_is_missing_is_named(self):
    for name in NAMES[:2]:
      self._write(_report(name))
    missing, page, text = self._render(failed=NAMES[:1])
    expected = [*NAMES[:1], *NAMES[2:]]
    self.assertEqual(missing, expected)
    self.assertIn("Of 1 claim: 1 holds. ", page.words)
    for name in expected:
      self.assertIn(f"{name} has no result", page.words)
      self.assertIn(f"**{name}** has no result", text)

  def test_another_file(self):
    self._write({"name": "one"})
    with self.assertRaisesRegex(ValueError, "one.json must be written"):
      report.render(self.directory)


class StoredResultsTest(absltest.TestCase):
  """The page of the results that are stored in the repository."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    directory = str(pathlib.Path(report.__file__).with_name("results"))
    cls.reports, missing = report.load(directory)
    cls.text = report.to_html(cls.reports, missing, directory)
    cls.page = _Page(cls.text)
    _, _, rest = cls.text.partition('id="page-data">')
    cls.data = json.loads(rest.partition("</script>")[0])

  def test_needs_no_network(self):
    self.assertEmpty(self.page.open)
    for tag, attributes in self.page.tags:
      self.assertNotEqual(tag, "link")
      for name in ("src", "href"):
        if name in attributes:
          self.assertStartsWith(attributes[name], ("#", "data:"))
    style, _, _ = self.text.partition("</style>")
    self.assertNotIn("url(", style)
    self.assertNotIn("@import", style)
    self.assertLess(len(self.text), 8e6)

  def test_has_all_claims_with_command_and_raw_data(self):
    ids = [value for name, value in self.page.attributes if name == "id"]
    downloads = [
      value for name, value in self.page.attributes if name == "download"
    ]
    for stored in self.reports:
      self.assertIn(stored["name"], ids)
      self.assertIn(f"{stored['name']}.json", downloads)
      self.assertIn(stored["command"], self.page.words)
    self.assertIn("race", ids)
    self.assertIn("race.json", downloads)

  def test_has_sliders(self):
    sliders = [
      attributes.get("data-control")
      for tag, attributes in self.page.tags
      if tag == "input" and attributes["type"] == "range"
    ]
    expected = ["staleness", "rate", "workers"]  # The ball.
    expected += ["workers", "slower", "backups", "bound"]  # The simulator.
    expected += ["workers", None]  # The race, and the timeline.
    self.assertCountEqual(sliders, expected)

  def test_numbers_of_the_ball(self):
    ball = self.data["panels"]["ball"]
    values = {
      control["name"]: list(map(float, control["values"]))
      for control in ball["controls"]
    }
    late, random, divided = (curve["points"]["of"] for curve in ball["series"])
    for i, rate in enumerate(values["rate"]):
      for j, stale in enumerate(values["staleness"]):
        path = stale_ball.roll(rate, [int(stale)] * stale_ball.NUM_UPDATES)
        np.testing.assert_allclose(late[f"{j},{i}"]["y"], path, rtol=1e-4)
      for j, workers in enumerate(values["workers"]):
        staleness = stale_ball.random_staleness(int(workers), 0)
        for curve, divides in ((random, False), (divided, True)):
          path = stale_ball.roll(rate, staleness, divides=divides)
          np.testing.assert_allclose(curve[f"{j},{i}"]["y"], path, rtol=1e-4)

  def test_numbers_of_the_simulator(self):
    """8 workers of which 2 are backups, and the last is 5 times slower."""
    panel = self.data["panels"]["cluster"]
    places = [
      control["values"].index(value)
      for control, value in zip(panel["controls"], "852", strict=False)
    ]
    run = simulator.simulate(
      simulator.Cluster(8, scale_out.COMPUTE, slowdown={7: 5}),
      simulator.Sync(6),
      30,
    )
    curve = panel["series"][1]
    (row,) = curve["rows"]["of"][",".join(map(str, places))]
    self.assertEqual(row[1], f"{run.throughput:.3g}")
    made = 30 * 6 + run.late.sum() + run.surplus.sum()
    self.assertEqual(row[3:], ["0.0", f"{1 - 30 * 6 / made:.0%}"])

  def test_plotly_accepts_all_charts(self):
    charts = [chart for own in self.data["charts"].values() for chart in own]
    charts += [run["chart"] for run in self.data["timeline"]["runs"].values()]
    for panel in self.data["panels"].values():
      data = [
        curve["trace"] | points
        for curve in panel["series"]
        for points in curve["points"]["of"].values()
      ]
      charts.append({"data": data, "layout": panel["layout"]})
    for name in ("stale_ball", "scale_out", "backup_curves"):
      self.assertIn(name, self.data["charts"])
    for chart in charts:
      graph_objects.Figure({"data": chart["data"], "layout": chart["layout"]})

  def test_conclusion(self):
    found = _report("one", claims.FAILS)
    others = dict(found["findings"][0], what="share", verdict=claims.HOLDS)
    found["findings"].insert(0, others)
    self.assertEqual(
      report._conclusion(found),
      "Does not hold: 1 of 2 numbers is not as claimed."
      " Step < 2 & more: 2 s (1 to 4), claimed at most 5",
    )

  def test_prose(self):
    self.assertEqual(
      report._prose("`a*b*c` < 2, and *unclear*; 2 * 3 * 4"),
      "<code>a*b*c</code> &lt; 2, and <em>unclear</em>; 2 * 3 * 4",
    )

  def test_timeline_is_recorded_or_simulated(self):
    timeline = self.data["timeline"]
    self.assertIn("Recorded on real processes", timeline["note"])
    simulated = report_panels.timeline({"sync": {}, "async": {}})
    self.assertIn("Simulated", simulated["note"])
    self.assertIn("for 79% of the time", simulated["title"])
    for found in (timeline, simulated):
      for run in found["runs"].values():
        kinds = {kind for _, kind, _, _ in run["events"]}
        self.assertContainsSubset({"compute", "hand_over", "apply"}, kinds)
        for _, _, start, end in run["events"]:
          self.assertBetween(start, 0.0, end)
          self.assertLessEqual(end, found["secs"])


class ExperimentsTest(absltest.TestCase):
  def test_every_experiment_has_its_claim(self):
    for name in report.EXPERIMENTS:
      module = importlib.import_module(f"experiments.claims.{name}")
      self.assertEqual(module.CLAIM.name, name)


if __name__ == "__main__":
  absltest.main()
