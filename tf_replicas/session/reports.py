"""Reports the progress of a run: log lines and TensorBoard summaries."""

from __future__ import annotations

import datetime
import importlib.util
import math
import os
import time
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tf_replicas.runtime import local_session
from tf_replicas.session import console as console_lib


class Summaries:
  """Writes summaries of a training to an event file for TensorBoard.

  It uses no eager operations of TensorFlow, as these may wait for other tasks
  (`runtime.local_session`).
  """

  def __init__(
    self,
    directory: str | os.PathLike[str] | None,
    *,
    log: Callable[[str], None] = print,
  ):
    """Opens an event file.

    If the package tensorboard is missing, logs that, and writes nothing later.

    Args:
      directory: The directory of the file; None writes nothing.
      log: Takes the log line.
    """
    self._file: Any = None
    if directory is None:
      return
    if not importlib.util.find_spec("tensorboard"):
      log(
        "No summaries are written, as the package tensorboard is not"
        " installed: pip install tensorboard"
      )
      return
    from tensorboard.summary.writer import event_file_writer

    self._file = event_file_writer.EventFileWriter(os.fspath(directory))

  def write(
    self,
    step: int,
    scalars: Mapping[str, float],
    histograms: Mapping[str, np.ndarray] | None = None,
    images: Mapping[str, np.ndarray] | None = None,
  ) -> None:
    """Writes the summaries of a step, if an event file is open.

    Args:
      step: The global step.
      scalars: Numbers by name.
      histograms: Values by name, of any shape, for histograms.
      images: Pictures by name, uint8 `[height, width, channels]`.
    """
    if self._file is None:
      return
    from tensorboard.plugins.histogram import summary_v2 as histogram
    from tensorboard.plugins.scalar import summary_v2 as scalar

    event = _proto("event").Event(wall_time=time.time(), step=step)
    for name, value in scalars.items():
      event.summary.MergeFrom(scalar.scalar_pb(name, value))
    for name, values in (histograms or {}).items():
      event.summary.MergeFrom(histogram.histogram_pb(name, values))
    for name, image in (images or {}).items():
      event.summary.value.append(_image(name, image))
    self._file.add_event(event)
    self._file.flush()

  def close(self) -> None:
    """Closes the event file, if one is open."""
    if self._file is not None:
      self._file.close()
      self._file = None


def _proto(name: str) -> Any:
  """Returns the module of a protocol buffer of TensorBoard."""
  return importlib.import_module(f"tensorboard.compat.proto.{name}_pb2")


def _image(name: str, image: np.ndarray) -> Any:
  """Returns the summary of a picture, as `tf.summary.image` writes it.

  Args:
    name: The name of the summary.
    image: uint8 `[height, width, channels]`.

  Returns:
    A `Summary.Value`.
  """
  from tensorboard.plugins.image import metadata
  from tensorboard.util import tensor_util

  height, width, _ = image.shape
  png = local_session.run(tf.io.encode_png, image)
  return _proto("summary").Summary.Value(
    tag=name,
    metadata=metadata.create_summary_metadata(display_name="", description=""),
    tensor=tensor_util.make_tensor_proto(
      [str(width).encode(), str(height).encode(), png], dtype=np.object_
    ),
  )


class Reporter:
  """Reports step, loss and speed of a run, on a console and in summaries.

  "Every N steps" means: whenever a multiple of N is reached or passed, and at
  the step `max_steps`. Rates are means over the time since the previous log
  line or summary. A *batch* in the log line means all examples of one step. The
  time left is that of the remaining steps at the speed that the log line shows.
  """

  def __init__(
    self,
    console: console_lib.Console,
    summaries: Summaries,
    *,
    log_every_steps: int | None,
    summary_every_steps: int | None,
    max_steps: int,
    now: float,
  ):
    """Stores the settings. The first rates are means over the time since `now`.

    Args:
      console: Prints the log lines.
      summaries: Writes the summaries.
      log_every_steps: Steps between log lines; None for no log lines.
      summary_every_steps: Steps between summaries; None for no summaries.
      max_steps: The global step at which the run ends.
      now: The time in seconds since 1970.
    """
    self._console = console
    self._summaries = summaries
    self._log_every_steps = log_every_steps
    self._summary_every_steps = summary_every_steps
    self._max_steps = max_steps
    self._log_window = _Window(now)
    self._summary_window = _Window(now)
    self._run = _Window(now)

  def add_examples(self, num_examples: int) -> None:
    """Counts examples without an advance of the global step.

    They are those of a step function's result that left the global step
    unchanged, for example because the gradient was dropped.

    Args:
      num_examples: The number of these examples.
    """
    self._count(0, num_examples)

  def _count(self, num_steps: int, num_examples: int) -> None:
    for window in (self._log_window, self._summary_window, self._run):
      window.num_steps += num_steps
      window.num_examples += num_examples

  def advance(
    self,
    previous: int,
    *,
    global_step: int,
    loss: float,
    num_examples: int,
    scalars: Mapping[str, float],
    now: float,
    is_last: bool,
    histograms: Mapping[str, np.ndarray] | None = None,
    images: Mapping[str, np.ndarray] | None = None,
    metrics: Mapping[str, float] | None = None,
  ) -> None:
    """Counts an advance of the global step, and reports if a report is due.

    Args:
      previous: The global step before the advance.
      global_step: The global step now.
      loss: The loss of the step.
      num_examples: The number of examples used since the last call of this
        method or `add_examples`.
      scalars: More numbers for the summaries, by name. The number
        `learning_rate` is in the log lines too.
      now: The time in seconds since 1970.
      is_last: Whether this is the last step of the run.
      histograms: Values by name for histograms in the summaries.
      images: Pictures by name for the summaries.
      metrics: More numbers for log lines and summaries, by name.
    """
    metrics = metrics or {}
    # Smaller than `previous` after a restored checkpoint.
    self._count(max(global_step - previous, 0), num_examples)
    rate = scalars.get("learning_rate", math.nan)
    rate_note = "" if math.isnan(rate) else f"learning rate {rate:.4g}"
    notes = [f"loss = {loss:.2f}", rate_note]
    self._console.move_bar(global_step, ", ".join(filter(None, notes)))
    steps = (previous, global_step)
    if is_due(*steps, self._log_every_steps, is_last=is_last):
      self._log(global_step, loss, metrics, now, rate_note)
    if is_due(*steps, self._summary_every_steps, is_last=is_last):
      numbers = {**metrics, **scalars}
      self._summarize(global_step, loss, numbers, histograms, images, now)

  def final_line(self, step: int, now: float) -> str:
    """Formats the totals of the run, such as its examples, as one line.

    Args:
      step: The last global step.
      now: The time in seconds since 1970.
    """
    run = self._run
    return (
      f"finished at step {step}: {run.num_examples} examples in "
      f"{run.secs(now):.1f} s ({run.examples_per_sec(now):.1f} examples/sec)"
    )

  def close(self) -> None:
    """Closes the progress bar and the event file."""
    self._console.close_bar()
    self._summaries.close()

  def _log(
    self,
    step: int,
    loss: float,
    metrics: Mapping[str, float],
    now: float,
    rate_note: str,
  ) -> None:
    window, self._log_window = self._log_window, _Window(now)
    more = "".join(f", {name} = {x:.4g}" for name, x in metrics.items())
    secs = _ratio(window.secs(now), window.num_steps)
    line = (
      f"{datetime.datetime.fromtimestamp(now)}: step {step}, "
      f"loss = {loss:.2f}{more} "
      f"({window.examples_per_sec(now):.1f} examples/sec; "
      f"{secs:.3f} sec/batch)"
    )
    if rate_note:
      line += f"; {rate_note}"
    if secs and step < self._max_steps:
      left = duration(secs * (self._max_steps - step))
      line += f"; {left} left to step {self._max_steps}"
    self._console.log(line)

  def _summarize(
    self,
    step: int,
    loss: float,
    scalars: Mapping[str, float],
    histograms: Mapping[str, np.ndarray] | None,
    images: Mapping[str, np.ndarray] | None,
    now: float,
  ) -> None:
    window, self._summary_window = self._summary_window, _Window(now)
    rates = {
      "loss": loss,
      "examples_per_sec": window.examples_per_sec(now),
      "steps_per_sec": _ratio(window.num_steps, window.secs(now)),
    }
    self._summaries.write(step, {**rates, **scalars}, histograms, images)


def is_due(
  previous: int, step: int, every: int | None, *, is_last: bool = False
) -> bool:
  """Returns whether a report is due that is made every so many steps.

  Args:
    previous: The global step at which this was last checked.
    step: The global step now.
    every: Steps between reports; None for no reports.
    is_last: Whether this is the last step of the run.

  Returns:
    Whether a multiple of `every` is in (previous, step], or the run ends.
  """
  if every is None:
    return False
  return is_last or step // every > previous // every


def steps_until_due(step: int, every: int | None) -> float:
  """Returns the number of steps from `step` to the next report.

  Args:
    step: The global step now.
    every: Steps between reports. None: there are no reports, and the result is
      infinity.
  """
  return float("inf") if every is None else every - step % every


def duration(secs: float) -> str:
  """Formats a number of seconds as hours, minutes and seconds: "0:01:30"."""
  return str(datetime.timedelta(seconds=round(secs)))


class _Window:
  """Counts steps and examples since a start time, to compute rates.

  All times are in seconds since 1970.
  """

  def __init__(self, start: float):
    self._start = start
    self.num_steps = 0
    self.num_examples = 0

  def secs(self, now: float) -> float:
    return now - self._start

  def examples_per_sec(self, now: float) -> float:
    return _ratio(self.num_examples, self.secs(now))


def _ratio(amount: float, per: float) -> float:
  """Returns `amount / per`, or 0 if `per` is not positive."""
  return amount / per if per > 0 else 0.0
