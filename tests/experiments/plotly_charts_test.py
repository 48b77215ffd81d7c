"""Tests for experiments.support.plotly_charts."""

from absl.testing import absltest
from matplotlib import pyplot

from experiments.support import claims
from experiments.support import plotly_charts


class ConvertTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.figure, self.axis = claims.new_figure(4, 3)
    self.addCleanup(pyplot.close, self.figure)

  def test_lines(self):
    self.axis.plot([1, 10], [3, 4], "s--", color="#0072B2", label="one")
    self.axis.plot([1, 10], [5, 6], color="black")
    self.axis.set_xscale("log")
    self.axis.set_xlim(1, 100)
    self.axis.set_title("Two lines")
    (chart,) = plotly_charts.convert(self.figure)
    self.assertEqual(chart["title"], "Two lines")
    first, second = chart["data"]
    self.assertEqual((first["x"], first["y"]), ([1, 10], [3, 4]))
    self.assertEqual(first["mode"], "lines+markers")
    self.assertEqual(first["marker"]["symbol"], "square")
    self.assertEqual(first["line"]["dash"], "dash")
    self.assertEqual(first["line"]["color"], "#0072b2")
    self.assertEqual((first["name"], first["showlegend"]), ("one", True))
    self.assertEqual((second["mode"], second["showlegend"]), ("lines", False))
    self.assertEqual(chart["layout"]["xaxis"]["range"], [0, 2])
    self.assertNotIn("range", chart["layout"]["yaxis"])

  def test_steps_and_some_markers(self):
    self.axis.step([0, 1], [2, 3], where="post")
    self.axis.plot(range(10), "o-", markevery=3, fillstyle="none")
    (chart,) = plotly_charts.convert(self.figure)
    steps, marked = chart["data"]
    self.assertEqual(steps["line"]["shape"], "hv")
    self.assertEqual(marked["line"]["shape"], "linear")
    self.assertEqual(marked["marker"]["symbol"], "circle-open")
    self.assertEqual(marked["marker"]["maxdisplayed"], 4)

  def test_error_bars(self):
    self.axis.errorbar(
      [1, 2], [5, 6], yerr=[[1, 2], [3, 4]], capsize=3, label="measured"
    )
    (chart,) = plotly_charts.convert(self.figure)
    (trace,) = chart["data"]
    self.assertEqual((trace["name"], trace["showlegend"]), ("measured", True))
    self.assertEqual(trace["error_y"]["array"], [3, 4])
    self.assertEqual(trace["error_y"]["arrayminus"], [1, 2])

  def test_bands_lines_across_and_texts(self):
    self.axis.fill_between([0, 1], [0, 0], [1, 2], alpha=0.5)
    self.axis.axhline(0.5)
    self.axis.axvline(0.25)
    self.axis.text(0.1, 0.2, "here")
    (chart,) = plotly_charts.convert(self.figure)
    (band,) = chart["data"]
    self.assertEqual(band["fill"], "toself")
    across, upright = chart["layout"]["shapes"]
    self.assertEqual((across["y0"], across["xref"]), (0.5, "paper"))
    self.assertEqual((upright["x1"], upright["yref"]), (0.25, "paper"))
    (text,) = chart["layout"]["annotations"]
    self.assertEqual((text["text"], text["x"], text["y"]), ("here", 0.1, 0.2))

  def test_other_pictures_are_left_alone(self):
    self.axis.bar([1, 2], [3, 4])
    self.assertEqual(plotly_charts.convert(self.figure), [])


if __name__ == "__main__":
  absltest.main()
