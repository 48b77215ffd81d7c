"""Prints log lines on the console, and a progress bar below them."""

from __future__ import annotations

import sys

import tqdm


class Console:
  """Prints log lines, and a progress bar below them."""

  def __init__(self, *, has_bar: bool | None = None):
    """Initializes the console.

    Args:
      has_bar: Whether there is a progress bar; None: if stdout is a terminal.
    """
    self._has_bar = sys.stdout.isatty() if has_bar is None else has_bar
    self._bar: tqdm.tqdm | None = None

  def log(self, line: str) -> None:
    """Prints a line above the bar, and flushes stdout."""
    if self._bar is None:
      print(line, flush=True)
    else:
      tqdm.tqdm.write(line, file=sys.stdout)
      sys.stdout.flush()

  def open_bar(self, step: int, max_steps: int) -> None:
    """Draws the bar, if this console has one.

    Args:
      step: The global step at the start.
      max_steps: The global step of a full bar.
    """
    if self._has_bar:
      self._bar = tqdm.tqdm(
        total=max_steps,
        initial=step,
        unit="step",
        file=sys.stdout,
        dynamic_ncols=True,
      )

  def move_bar(self, step: int, note: str) -> None:
    """Moves the bar, if it is open.

    Args:
      step: The global step.
      note: What to show behind the bar, such as "loss = 0.25".
    """
    if self._bar is not None:
      self._bar.set_postfix_str(note, refresh=False)
      self._bar.update(step - self._bar.n)

  def close_bar(self) -> None:
    """Closes the bar; later lines are printed below it."""
    if self._bar is not None:
      self._bar.close()
      self._bar = None
