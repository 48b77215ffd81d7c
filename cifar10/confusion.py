"""Computes precision and recall from a confusion matrix, and draws it.

A confusion matrix has one row for each true class and one column for each
predicted class: `[10, 10]` counts of images.
"""

import numpy as np

from cifar10 import config

_INCHES = 8
_DOTS_PER_INCH = 90


def accuracy(matrix: np.ndarray) -> float:
  """Returns the share of images that are classified right (precision @ 1).

  Args:
    matrix: `[10, 10]` counts of images by true class and predicted class.
  """
  return float(np.trace(matrix) / np.sum(matrix))


def recall(matrix: np.ndarray) -> np.ndarray:
  """Returns the recall of each class: the share of its images classified right.

  Args:
    matrix: `[10, 10]` counts of images by true class and predicted class.

  Returns:
    `[10]` shares; NaN for a class without an image.
  """
  return _share(np.diag(matrix), np.sum(matrix, axis=1))


def precision(matrix: np.ndarray) -> np.ndarray:
  """Returns the precision of each class.

  It is the share of images of this class among those predicted as this class.

  Args:
    matrix: `[10, 10]` counts of images by true class and predicted class.

  Returns:
    `[10]` shares; NaN for a class that was never predicted.
  """
  return _share(np.diag(matrix), np.sum(matrix, axis=0))


def scalars(matrix: np.ndarray) -> dict[str, float]:
  """Returns accuracy, precision and recall by their names in TensorBoard.

  Precision and recall of a class are left out if they are NaN.

  Args:
    matrix: `[10, 10]` counts of images by true class and predicted class.
  """
  values = {"precision @ 1": accuracy(matrix)}
  for name, rates in (
    ("precision", precision(matrix)),
    ("recall", recall(matrix)),
  ):
    for label, rate in zip(config.LABELS, rates, strict=True):
      if not np.isnan(rate):
        values[f"{name}/{label}"] = float(rate)
  return values


def table(matrix: np.ndarray) -> str:
  """Formats a table with the number of images, recall and precision by class.

  Args:
    matrix: `[10, 10]` counts of images by true class and predicted class.

  Returns:
    A table as text, one line per class.
  """
  lines = [f"{'class':<12}{'images':>7}{'recall':>9}{'precision':>11}"]
  rows = zip(
    config.LABELS,
    np.sum(matrix, axis=1),
    recall(matrix),
    precision(matrix),
    strict=True,
  )
  for label, images, *rates in rows:
    shown = ["-" if np.isnan(rate) else f"{rate:.4f}" for rate in rates]
    lines.append(f"{label:<12}{images:>7}{shown[0]:>9}{shown[1]:>11}")
  return "\n".join(lines)


def can_draw() -> bool:
  """Returns whether matplotlib, an optional requirement, is installed."""
  try:
    import matplotlib  # noqa: F401
  except ImportError:
    return False
  return True


def picture(matrix: np.ndarray) -> np.ndarray:
  """Draws a confusion matrix; a darker cell has a larger share of its row.

  Args:
    matrix: `[10, 10]` counts of images by true class and predicted class.

  Returns:
    A uint8 image `[height, width, 3]`.

  Raises:
    ImportError: If matplotlib is not installed.
  """
  from matplotlib.backends import backend_agg
  from matplotlib.figure import Figure

  figure = Figure(
    figsize=(_INCHES, _INCHES), dpi=_DOTS_PER_INCH, layout="constrained"
  )
  canvas = backend_agg.FigureCanvasAgg(figure)
  axes = figure.add_subplot()
  totals = np.sum(matrix, axis=1, keepdims=True)
  shares = matrix / np.maximum(totals, 1)
  axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0)
  ticks = range(config.NUM_CLASSES)
  axes.set_xticks(ticks, config.LABELS, rotation=45, ha="right")
  axes.set_yticks(ticks, config.LABELS)
  axes.set_xlabel("taken for")
  axes.set_ylabel("is")
  for (row, column), count in np.ndenumerate(matrix):
    color = "white" if shares[row, column] > 0.5 else "black"
    axes.text(column, row, str(count), ha="center", va="center", color=color)
  canvas.draw()
  return np.array(canvas.buffer_rgba())[:, :, :3]


def _share(parts: np.ndarray, wholes: np.ndarray) -> np.ndarray:
  return np.divide(
    parts, wholes, out=np.full(len(parts), np.nan), where=wholes > 0
  )
