"""Lines on the console, and a progress bar below them."""

from __future__ import annotations

import sys

import tqdm


class Console:
  """Prints whole lines, and keeps a progress bar below them."""

  def __init__(self, *, has_bar: bool | None = None):
    """Initializes the console.

    Args:
      has_bar: Whether `open_bar` draws one; None if stdout is a terminal.
    """
    self._has_bar = sys.stdout.isatty() if has_bar is None else has_bar
    self._bar: tqdm.tqdm | None = None

  def log(self, line: str) -> None:
    """Prints a line, at once and without garbling the bar."""
    if self._bar is None:
      print(line, flush=True)
    else:
      tqdm.tqdm.write(line, file=sys.stdout)
      sys.stdout.flush()

  def open_bar(self, step: int, max_steps: int) -> None:
    """Draws the bar, if this console has one."""
    if self._has_bar:
      self._bar = tqdm.tqdm(
        total=max_steps,
        initial=step,
        unit="step",
        file=sys.stdout,
        dynamic_ncols=True,
      )

  def move_bar(self, step: int, loss: float) -> None:
    """Moves the bar, if there is one."""
    if self._bar is not None:
      self._bar.set_postfix_str(f"loss = {loss:.2f}", refresh=False)
      self._bar.update(step - self._bar.n)

  def close_bar(self) -> None:
    """Leaves the bar as it is; lines now come below it."""
    if self._bar is not None:
      self._bar.close()
      self._bar = None
