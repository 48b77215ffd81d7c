"""Prints log lines on the console, and a progress bar below them."""

from __future__ import annotations

import sys

import tqdm


class Console:
  """Prints log lines and, if it is wanted, a progress bar below them."""

  def __init__(self, *, has_bar: bool | None = None):
    """Prepares the console; `open_bar` draws the progress bar.

    Args:
      has_bar: Whether there is a progress bar. None: there is one if stdout is
        a terminal.
    """
    self._has_bar = sys.stdout.isatty() if has_bar is None else has_bar
    self._bar: tqdm.tqdm | None = None

  def log(self, line: str) -> None:
    """Prints a line, above the progress bar if it is open; flushes stdout."""
    if self._bar is None:
      print(line, flush=True)
    else:
      tqdm.tqdm.write(line, file=sys.stdout)
      sys.stdout.flush()

  def open_bar(self, step: int, max_steps: int) -> None:
    """Draws the progress bar, if this console is to have one.

    A bar that is open already, as after a recovery, is closed first.

    Args:
      step: The global step at the start.
      max_steps: The global step at which the bar is full.
    """
    self.close_bar()
    if self._has_bar:
      self._bar = tqdm.tqdm(
        total=max_steps,
        initial=step,
        unit="step",
        file=sys.stdout,
        dynamic_ncols=True,
      )

  def move_bar(self, step: int, note: str) -> None:
    """Moves the progress bar to a global step, if the bar is open.

    Args:
      step: The global step.
      note: The text to show behind the bar, such as "loss = 0.25".
    """
    if self._bar is not None:
      self._bar.set_postfix_str(note, refresh=False)
      self._bar.update(step - self._bar.n)

  def close_bar(self) -> None:
    """Closes the progress bar; later lines are printed below it."""
    if self._bar is not None:
      self._bar.close()
      self._bar = None
