"""Shows the progress of `fit`, with the learning rate and the time left."""

import math
import os
import sys
import time
from collections.abc import Callable
from collections.abc import Mapping

import keras
import numpy as np

from tf_replicas.session import reports

# Seconds between two lines of an epoch.
_LINE_SECS = 10.0


class Progress(keras.callbacks.ProgbarLogger):
  """Keras' progress bar, with the learning rate and the time left.

  On a terminal and in a notebook it is a bar. Elsewhere, for example under a
  launcher, it prints lines: after the first batches, every ten seconds, and
  after each epoch. There, Keras' bar would fill the log with control
  characters.

  Attributes:
    async_safe: True, so that Keras may call the methods for batches in another
      thread.
  """

  async_safe = True

  def __init__(
    self,
    learning_rate_fn: Callable[[], float],
    *,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Initializes the callback.

    Args:
      learning_rate_fn: Returns the current learning rate. NaN: none is shown,
        for example because there are several.
      clock: Returns a time in seconds.
    """
    super().__init__()
    self._learning_rate_fn = learning_rate_fn
    self._clock = clock
    self._has_lines = False
    self._epoch = 0
    self._first: tuple[float, int] | None = None
    self._said_at = -math.inf

  def set_params(self, params: Mapping[str, object]) -> None:
    """Receives settings of the training, and chooses a bar or lines.

    Args:
      params: Keras gives "epochs", "steps" (the number of batches in an epoch)
        and "verbose".
    """
    super().set_params(params)
    if self.verbose == 1 and not _can_redraw():
      # Of Keras, only the line after each epoch.
      self.verbose, self._has_lines = 2, True

  def on_epoch_begin(self, epoch: int, logs=None) -> None:
    """Prints the number of the epoch, and the estimated time left."""
    self._epoch = epoch
    epochs, self.epochs = self.epochs, 1  # Keras' own line has no time.
    super().on_epoch_begin(epoch, logs)
    self.epochs = epochs
    if self.verbose and epochs > 1:
      left = self._left(epoch * (self.target or 0))
      print(f"Epoch {epoch + 1}/{epochs}{left}", flush=True)

  def on_train_batch_end(self, batch: int, logs=None) -> None:
    """Moves the bar, or prints a line if one is due."""
    logs = self._with_rate(logs)
    super().on_train_batch_end(batch, logs)
    done = self._epoch * (self.target or 0) + batch + 1
    now = self._clock()
    if self._first is None:
      self._first = (now, done)
    is_end = batch + 1 == self.target  # Keras prints a line.
    if self._has_lines and not is_end and now - self._said_at >= _LINE_SECS:
      self._said_at = now
      values = "".join(
        f" - {name}: {np.mean(x):.4g}" for name, x in logs.items()
      )
      print(f"{batch + 1}/{self.target}{self._left(done)}{values}", flush=True)

  def on_epoch_end(self, epoch: int, logs=None) -> None:
    """Completes the bar, or prints the last line of the epoch."""
    super().on_epoch_end(epoch, self._with_rate(logs))

  def _with_rate(
    self, logs: Mapping[str, float | np.ndarray] | None
  ) -> dict[str, float | np.ndarray]:
    logs = dict(logs or {})
    rate = self._learning_rate_fn()
    if not math.isnan(rate):
      logs.setdefault("learning_rate", rate)
    return logs

  def _left(self, done: int) -> str:
    """Estimates the time left to the end of the last epoch.

    The estimate assumes that the remaining batches take as long, on average, as
    those since the first batch of this process.

    Args:
      done: The number of batches done, in all epochs together.

    Returns:
      A text such as " - 0:01:30 left"; "" before the second batch, or if the
      number of batches in an epoch is not known.
    """
    if self._first is None or self.target is None:
      return ""
    since, before = self._first
    if done <= before:
      return ""
    per_batch = (self._clock() - since) / (done - before)
    left = per_batch * (self.epochs * self.target - done)
    return f" - {reports.duration(left)} left"


def _can_redraw() -> bool:
  """Returns whether the output can show a bar that is redrawn in place.

  The criteria are those of Keras, such as whether stdout is a terminal.
  """
  return (
    sys.stdout.isatty()
    or "ipykernel" in sys.modules
    or "PYCHARM_HOSTED" in os.environ
  )
