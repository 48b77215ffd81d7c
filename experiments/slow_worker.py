"""Draws the README's picture of what a slow worker costs.

  python -m experiments.slow_worker

Reads the stored result of the experiment `straggler`, and writes the picture
`docs/images/slow_worker.svg`.
"""

import json
import pathlib
import statistics

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402

_ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULT = _ROOT / "experiments" / "results" / "straggler.json"
PICTURE = _ROOT / "docs" / "images" / "slow_worker.svg"
# Measurement -> position, label, color.
_BARS = {
  "all of 3, equal": (4.2, "equal workers", "#0072b2"),
  "all of 3, one slow": (3.2, "one slow worker", "#d55e00"),
  "first 2 of 3, equal": (1.2, "equal workers", "#0072b2"),
  "first 2 of 3, one slow": (0.2, "one slow worker", "#d55e00"),
}
_SETTINGS = {
  "font.family": "sans-serif",
  "font.size": 12,
  "svg.fonttype": "none",  # Text stays text.
  "svg.hashsalt": "slow_worker",  # The same file in every run.
}


def draw(path: pathlib.Path) -> None:
  """Draws the updates per second with and without a slow worker.

  Bars are medians over the repetitions, and lines the ranges.

  Args:
    path: The SVG file to write.
  """
  document = json.loads(RESULT.read_text(encoding="utf-8"))
  with pyplot.rc_context(_SETTINGS):
    figure, axes = pyplot.subplots(figsize=(6.4, 3.2))
    for name, (position, label, color) in _BARS.items():
      rates = [m[name]["steps_per_sec"] for m in document["measurements"]]
      rate = statistics.median(rates)
      axes.barh(position, rate, 0.8, color=color)
      axes.plot([min(rates), max(rates)], [position] * 2, color="black")
      axes.text(max(rates) + 0.04, position, f"{rate:.2f}", va="center")
      axes.text(-0.06, position, label, va="center", ha="right")
    for position, text in (
      (5.05, "Each update waits for all 3 workers"),
      (2.05, "Each update takes the first 2 gradients of 3"),
    ):
      axes.text(0, position, text, va="center", weight="bold")
    axes.set(ylim=(-0.4, 5.4), xlabel="updates per second")
    axes.set_xlim(0, 1.15 * axes.get_xlim()[1])
    axes.set_yticks([])
    axes.spines[["top", "right"]].set_visible(False)
    figure.subplots_adjust(left=0.27, right=0.98, top=0.99, bottom=0.17)
    figure.savefig(path, facecolor="white", metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
  draw(PICTURE)
