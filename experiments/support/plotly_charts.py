"""Converts matplotlib figures of curves to interactive charts of plotly.

A chart is what plotly.js needs to draw: `data` and `layout`, which JSON can
hold, and a `title`.
"""

import math
from collections.abc import Iterable
from collections.abc import Iterator

_SYMBOLS = {
  "o": "circle",
  "s": "square",
  "^": "triangle-up",
  "v": "triangle-down",
  "D": "diamond",
  "x": "x",
  "*": "star",
}
_DASHES = {"-": "solid", "--": "dash", "-.": "dashdot", ":": "dot"}
_SHAPES = {
  "default": "linear",
  "steps": "vh",
  "steps-pre": "vh",
  "steps-mid": "hvh",
  "steps-post": "hv",
}
_ANCHORS = {"center": "middle", "baseline": "bottom"}
# What every figure contains, and what belongs to the curves.
_PARTS = ("Spine", "XAxis", "YAxis", "Text", "Annotation", "Legend")
_CURVES = ("Line2D", "LineCollection", "FillBetweenPolyCollection")
_PIXELS_PER_POINT = 96 / 72
_BLANK = {"type": "scatter", "hoverinfo": "skip", "showlegend": False}


def convert(figure) -> list[dict]:
  """Converts a figure, if it has only curves, error bars, bands and texts.

  Scales that plotly lacks become linear.

  Args:
    figure: A `matplotlib.figure.Figure`.

  Returns:
    A chart for each of its axes; nothing if the figure has other parts, such
    as bars.
  """
  if not all(_has_only_curves(axis) for axis in figure.axes):
    return []
  return [_chart(axis) for axis in figure.axes]


def numbers(values: Iterable[float]) -> list[float]:
  """Rounds numbers to five digits, for JSON.

  Args:
    values: The numbers.
  """
  return [float(f"{value:.5g}") for value in values]


def _has_only_curves(axis) -> bool:
  return all(
    type(part).__name__ in (*_PARTS, *_CURVES)
    for part in axis.get_children()
    if part is not axis.patch
  )


def _chart(axis) -> dict:
  bars, hidden = _error_bars(axis)
  data, shapes = [*_bands(axis)], []
  # Dashes of their own are all "--" for matplotlib.
  dashes = iter(("dash", "longdash", "longdashdot", "dashdot"))
  for line in axis.lines:
    if line in hidden:
      continue
    dash = _DASHES.get(line.get_linestyle(), "solid")
    dash = next(dashes, dash) if dash == "dash" else dash
    style = {"color": _color(line), "width": line.get_linewidth(), "dash": dash}
    place = _straight(axis, line)
    if place:
      shapes.append({"type": "line", "line": style, "layer": "below", **place})
    else:
      data.append(_trace(line, style, bars.get(line)))
  layout = {
    "xaxis": _scale(axis.xaxis, axis.get_xlim(), axis.get_autoscalex_on()),
    "yaxis": _scale(axis.yaxis, axis.get_ylim(), axis.get_autoscaley_on()),
    "shapes": shapes,
    "annotations": [_annotation(axis, text) for text in axis.texts],
  }
  if axis.get_legend():
    title = axis.get_legend().get_title().get_text()
    layout["legend"] = {"title": {"text": title}}
  return {
    "title": axis.get_title() or axis.get_ylabel(),
    "data": data,
    "layout": layout,
  }


def _error_bars(axis) -> tuple[dict, set]:
  """Returns the error bars by line, and the caps, which plotly draws itself."""
  bars, hidden = {}, set()
  for container in axis.containers:
    line, caps, (collection,) = container
    hidden.update(caps)
    ends = [segment[:, 1] for segment in collection.get_segments()]
    heights = line.get_ydata()
    bars[line] = (
      container.get_label(),
      {
        "type": "data",
        "array": numbers(
          high - y for (_, high), y in zip(ends, heights, strict=True)
        ),
        "arrayminus": numbers(
          y - low for (low, _), y in zip(ends, heights, strict=True)
        ),
      },
    )
  return bars, hidden


def _bands(axis) -> Iterator[dict]:
  from matplotlib import colors

  for band in axis.collections:
    if type(band).__name__ == "FillBetweenPolyCollection":
      corners = band.get_paths()[0].vertices
      red, green, blue, alpha = colors.to_rgba(band.get_facecolor()[0])
      yield {
        **_BLANK,
        "x": numbers(corners[:, 0]),
        "y": numbers(corners[:, 1]),
        "mode": "lines",
        "line": {"width": 0},
        "fill": "toself",
        "fillcolor": f"rgba({255 * red:.0f},{255 * green:.0f},"
        f"{255 * blue:.0f},{alpha:.2g})",
      }


def _straight(axis, line) -> dict | None:
  """Returns where a line across the whole chart is; None for other lines."""
  (x, *_), (y, *_) = line.get_data() if len(line.get_xdata()) else ([0], [0])
  if line.get_transform() == axis.get_yaxis_transform(which="grid"):
    return {"xref": "paper", "x0": 0, "x1": 1, "y0": float(y), "y1": float(y)}
  if line.get_transform() == axis.get_xaxis_transform(which="grid"):
    return {"yref": "paper", "y0": 0, "y1": 1, "x0": float(x), "x1": float(x)}
  return None


def _trace(line, style: dict, bar: tuple[str, dict] | None) -> dict:
  label, error = bar or (line.get_label(), None)
  symbol = _SYMBOLS.get(line.get_marker())
  is_open = "none" in (line.get_markerfacecolor(), line.get_fillstyle())
  modes = ["lines"] * (line.get_linestyle() in _DASHES)
  modes += ["markers"] * (symbol is not None)
  trace = {
    "type": "scatter",
    # An entry of the legend alone has no points.
    "x": numbers(line.get_xdata()) or [None],
    "y": numbers(line.get_ydata()) or [None],
    "mode": "+".join(modes) or "none",
    "name": label,
    "showlegend": not label.startswith("_"),
    "line": {**style, "shape": _SHAPES[line.get_drawstyle()]},
  }
  if symbol:
    trace["marker"] = {
      "symbol": symbol + "-open" * is_open,
      "size": line.get_markersize() * _PIXELS_PER_POINT,
    }
    every = line.get_markevery()
    if every:
      trace["marker"]["maxdisplayed"] = math.ceil(len(trace["x"]) / every)
  if error:
    trace["error_y"] = error
  return trace


def _color(artist) -> str:
  from matplotlib import colors

  return colors.to_hex(artist.get_color())


def _scale(axis, limits: tuple[float, float], is_free: bool) -> dict:
  """Describes an axis: label, scale, ticks, and limits unless they are free."""
  from matplotlib import ticker

  kind = "log" if axis.get_scale() == "log" else "linear"
  scale = {
    "title": {"text": axis.get_label_text().replace("\n", "<br>")},
    "type": kind,
    "automargin": True,
  }
  ends = [_place(kind, limit) for limit in limits]
  if not is_free:
    scale["range"] = numbers(ends)
  locator = axis.get_major_locator()
  if isinstance(locator, ticker.FixedLocator):
    scale["tickvals"] = numbers(locator.locs)
    scale["ticktext"] = [text.get_text() for text in axis.get_ticklabels()]
  elif kind == "log":
    # A short axis would have a number or two at powers of ten.
    scale["dtick"] = "D2" if ends[1] - ends[0] < 2 else 1
  return scale


def _place(kind: str, value: float) -> float:
  return math.log10(value) if kind == "log" else value


def _annotation(axis, text) -> dict:
  """Describes a text at a point; an `Annotation` is shifted by points."""
  x, y = getattr(text, "xy", text.get_position())
  shift = getattr(text, "xyann", (0, 0))
  return {
    "text": text.get_text(),
    "x": _place(axis.get_xscale(), float(x)),
    "y": _place(axis.get_yscale(), float(y)),
    "xshift": shift[0] * _PIXELS_PER_POINT,
    "yshift": shift[1] * _PIXELS_PER_POINT,
    "xanchor": text.get_horizontalalignment(),
    "yanchor": _ANCHORS.get(
      text.get_verticalalignment(), text.get_verticalalignment()
    ),
    "showarrow": False,
    "font": {"color": _color(text)},
  }
