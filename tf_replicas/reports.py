"""What a run tells while it goes on: log lines and TensorBoard."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from tf_replicas import console as console_lib
from tf_replicas import resources


class Summaries:
  """Writes scalars for TensorBoard, or nothing."""

  def __init__(self, directory: str | os.PathLike[str] | None):
    """Opens an event file.

    Args:
      directory: Where; None makes every method a no-op.
    """
    self._device = resources.this_device()
    if directory is None:
      self._writer = tf.summary.create_noop_writer()
    else:
      with tf.device(None), tf.device(self._device):
        self._writer = tf.summary.create_file_writer(os.fspath(directory))

  def write(
    self,
    step: int,
    scalars: Mapping[str, float],
    histograms: Mapping[str, np.ndarray] | None = None,
  ) -> None:
    """Writes `scalars` and `histograms` by name as of `step`."""
    with tf.device(None), tf.device(self._device):
      with self._writer.as_default(step=step):
        for name, value in scalars.items():
          tf.summary.scalar(name, value)
        for name, values in (histograms or {}).items():
          tf.summary.histogram(name, values)
      self._writer.flush()

  def close(self) -> None:
    """Closes the event file."""
    self._writer.close()


class Reporter:
  """Says how far a run is and how fast, on a console and in summaries.

  "Every N steps" means: whenever a multiple of N was reached or passed, and
  at the last step. Rates are means over the time since the line, or the
  summary, before. A *batch* in the log line is all that one step used.
  """

  def __init__(
    self,
    console: console_lib.Console,
    summaries: Summaries,
    *,
    log_every_steps: int | None,
    summary_every_steps: int | None,
    now: float,
  ):
    """Initializes the reporter.

    Args:
      console: Where lines are printed.
      summaries: Where scalars are written.
      log_every_steps: Steps between log lines; None for none.
      summary_every_steps: Steps between summaries; None for none.
      now: Seconds since the epoch; the first window begins here.
    """
    self._console = console
    self._summaries = summaries
    self._log_every_steps = log_every_steps
    self._summary_every_steps = summary_every_steps
    self._log_window = _Window(now)
    self._summary_window = _Window(now)
    self._run = _Window(now)

  def add_examples(self, num_examples: int) -> None:
    """Counts examples that did not advance the step."""
    for window in (self._log_window, self._summary_window, self._run):
      window.add(0, num_examples)

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
  ) -> None:
    """Reports, if it is time to, that training went on.

    Args:
      previous: The step of the call before.
      global_step: The step now.
      loss: Of the step.
      num_examples: Examples used since the call before.
      scalars: More numbers for the summaries.
      now: Seconds since the epoch.
      is_last: Whether this is the last step of the run.
      histograms: Values whose distribution goes to the summaries.
    """
    # Steps are lost when a parameter server comes back from a checkpoint.
    num_steps = max(global_step - previous, 0)
    for window in (self._log_window, self._summary_window, self._run):
      window.add(num_steps, num_examples)
    self._console.move_bar(global_step, loss)
    steps = (previous, global_step)
    if is_due(*steps, self._log_every_steps, is_last=is_last):
      self._log(global_step, loss, now)
    if is_due(*steps, self._summary_every_steps, is_last=is_last):
      self._summarize(global_step, loss, scalars, histograms, now)

  def final_line(self, step: int, now: float) -> str:
    """Returns a line on the whole run."""
    run = self._run
    return (
      f"finished at step {step}: {run.num_examples} examples in "
      f"{run.secs(now):.1f} s ({run.examples_per_sec(now):.1f} examples/sec)"
    )

  def close(self) -> None:
    """Closes the bar and the event file."""
    self._console.close_bar()
    self._summaries.close()

  def _log(self, step: int, loss: float, now: float) -> None:
    window, self._log_window = self._log_window, _Window(now)
    self._console.log(
      f"{datetime.datetime.fromtimestamp(now)}: step {step}, "
      f"loss = {loss:.2f} ({window.examples_per_sec(now):.1f} examples/sec; "
      f"{_ratio(window.secs(now), window.num_steps):.3f} sec/batch)"
    )

  def _summarize(self, step, loss, scalars, histograms, now) -> None:
    window, self._summary_window = self._summary_window, _Window(now)
    rates = {
      "loss": loss,
      "examples_per_sec": window.examples_per_sec(now),
      "steps_per_sec": _ratio(window.num_steps, window.secs(now)),
    }
    self._summaries.write(step, {**rates, **scalars}, histograms)


def is_due(
  previous: int, step: int, every: int | None, *, is_last: bool = False
) -> bool:
  """Returns whether a multiple of `every` was reached after `previous`."""
  if every is None:
    return False
  return is_last or step // every > previous // every


def steps_until_due(step: int, every: int | None) -> float:
  """How many more steps until `is_due` is true."""
  return float("inf") if every is None else every - step % every


class _Window:
  """Counts what happened since a moment."""

  def __init__(self, start: float):
    self._start = start
    self.num_steps = 0
    self.num_examples = 0

  def add(self, num_steps: int, num_examples: int) -> None:
    self.num_steps += num_steps
    self.num_examples += num_examples

  def secs(self, now: float) -> float:
    return now - self._start

  def examples_per_sec(self, now: float) -> float:
    return _ratio(self.num_examples, self.secs(now))


def _ratio(amount: float, per: float) -> float:
  """Returns `amount / per`, 0 where there is nothing to divide by."""
  return amount / per if per > 0 else 0.0
