"""The session around a step function: when to log, summarize, save and stop."""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import time
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from tf_replicas import checkpoints
from tf_replicas import console
from tf_replicas import interrupts
from tf_replicas import reports


class StepResult(NamedTuple):
  """What one call of a step function did.

  Attributes:
    global_step: The step reached.
    loss: Mean over the contributions applied. Not looked at if the step did
      not advance; otherwise a loss that is not finite ends training.
    num_examples: Examples in the contributions applied since the last result,
      of the whole cluster.
    scalars: More numbers for TensorBoard, such as `learning_rate` or
      `contributions/worker_0/applied`.
    histograms: Values by name whose distribution goes to TensorBoard.
  """

  global_step: int
  loss: float
  num_examples: int
  scalars: Mapping[str, float] = {}
  histograms: Mapping[str, np.ndarray] = {}


class Session:
  """Runs a step function up to a step, and keeps the records of the run.

  The session owns *when* to log, summarize, save and stop; the program owns
  *what* a step is. "Every N steps" means: whenever a multiple of N was reached
  or passed, since steps of other replicas may come between two results.

  With a `train_dir` that holds a checkpoint the run resumes. Nothing is ever
  deleted there but checkpoints beyond `keep_checkpoints`, and the record that
  an earlier run had finished.
  """

  def __init__(
    self,
    train_dir: str | os.PathLike[str] | None,
    *,
    state: checkpoints.Checkpointable | None,
    max_steps: int,
    is_chief: bool = True,
    log_every_steps: int | None = 10,
    summary_every_steps: int | None = 100,
    checkpoint_every_steps: int | None = None,
    checkpoint_every_secs: float | None = 600.0,
    keep_checkpoints: int | None = 5,
    is_optional: Callable[[str], bool] | None = None,
    progress_bar: bool | None = None,
    clock: Callable[[], float] = time.time,
  ):
    """Initializes the session; reads and writes nothing yet.

    Args:
      train_dir: Where checkpoints, summaries and the finished record go; None
        writes nothing.
      state: What to save and restore; None if another task does that.
      max_steps: The global step to stop at.
      is_chief: Whether this task writes. The others print the same lines, and
        restore `state` if they have one.
      log_every_steps: Steps between log lines; None logs none.
      summary_every_steps: Steps between TensorBoard points; None writes none.
      checkpoint_every_steps: Steps between checkpoints; None for none by step.
      checkpoint_every_secs: Seconds between checkpoints; None for none by
        time. One is written at the end in any case.
      keep_checkpoints: How many of the newest stay; None keeps all.
      is_optional: Says of a name in a checkpoint whether it may be absent or
        different, see `checkpoints.restore`.
      progress_bar: Whether to draw one; None does if stdout is a terminal.
      clock: Returns the time in seconds since the epoch.

    Raises:
      ValueError: If an argument is out of range.
    """
    if max_steps < 0:
      raise ValueError(f"`max_steps` must be 0 or more. Received: {max_steps}.")
    _require_positive_or_none(
      log_every_steps=log_every_steps,
      summary_every_steps=summary_every_steps,
      checkpoint_every_steps=checkpoint_every_steps,
      checkpoint_every_secs=checkpoint_every_secs,
      keep_checkpoints=keep_checkpoints,
    )
    if train_dir is not None and os.path.isfile(train_dir):
      raise ValueError(
        f"`train_dir` must be a directory. Received: {os.fspath(train_dir)}."
      )
    self._train_dir = None if train_dir is None else os.fspath(train_dir)
    self._is_writer = is_chief and train_dir is not None
    self._state = state
    self._max_steps = max_steps
    self._log_every_steps = log_every_steps
    self._summary_every_steps = summary_every_steps
    self._checkpoint_every_steps = checkpoint_every_steps
    self._checkpoint_every_secs = checkpoint_every_secs
    self._keep_checkpoints = keep_checkpoints
    self._is_optional = is_optional
    self._clock = clock
    self._console = console.Console(has_bar=progress_bar if is_chief else False)
    self._start_step: int | None = None
    self._saved_step: int | None = None
    self._saved_path: str | None = None

  def restore_or_initialize(self) -> int:
    """Restores the newest checkpoint, if there is one.

    A state that is not behind it is kept: parameter servers may have outlived
    the chief that wrote it, and replicas may be about to update what is there.

    Returns:
      The global step to start from: 0 if this session holds no state.

    Raises:
      CheckpointError: If the checkpoint is damaged or of another model; then
        neither state nor directory were touched.
    """
    step = 0
    if self._state is not None:
      step = int(self._state.state()["global_step"])
      path = self._train_dir and checkpoints.latest(self._train_dir)
      if path:
        step = self._restore(path, step)
    if self._is_writer and step < self._max_steps:
      checkpoints.remove_finished(self._train_dir)
    self._start_step = step
    return step

  def run(
    self,
    step_fn: Callable[[], StepResult],
    *,
    report: Callable[[], Iterable[str]] | None = None,
    wake: Callable[[], None] | None = None,
  ) -> int:
    """Calls `step_fn` until the global step reaches `max_steps`.

    A "step" here is one update of the variables, not one batch: with three
    workers and `replicas_to_aggregate=2`, two or three batches make one step.
    At the end a checkpoint and the finished record are written; on Ctrl-C or
    SIGTERM a checkpoint, if that is possible. These wait for the end of the
    step, for a second at most.

    Args:
      step_fn: Advances training and returns what happened. May return
        without advancing the global step (a dropped gradient).
      report: Returns lines to print at the end.
      wake: Makes a `step_fn` that waits in TensorFlow return to Python for a
        moment, so that it hears an interrupt; called in another thread.

    Returns:
      The global step reached.

    Raises:
      FloatingPointError: If a loss or, when saving, a variable is not finite.
        That state is not saved.
      CheckpointError: As `restore_or_initialize`, if that was not called.
      KeyboardInterrupt: If interrupted.
    """
    if self._start_step is None:
      self.restore_or_initialize()
    now = self._clock()
    # Without the state, only the first result tells where training is.
    step = None if self._state is None else self._start_step
    reporter = self._open_reporter(now)
    with interrupts.deferred(wake) as make, contextlib.closing(reporter):
      self._console.open_bar(step or 0, self._max_steps)
      try:
        step, now = self._loop(lambda: make(step_fn), step, reporter, now)
        self._save(step)
        self._write_finished(step, now)
      except KeyboardInterrupt:
        self._save_interrupted()
        raise
    lines = [reporter.final_line(step, now), *(report() if report else ())]
    self._console.log("\n".join(lines))
    return step

  def _open_reporter(self, now: float) -> reports.Reporter:
    writes_summaries = self._is_writer and self._summary_every_steps is not None
    summaries = reports.Summaries(self._train_dir if writes_summaries else None)
    return reports.Reporter(
      self._console,
      summaries,
      log_every_steps=self._log_every_steps,
      summary_every_steps=self._summary_every_steps,
      now=now,
    )

  def _loop(
    self,
    step_fn: Callable[[], StepResult],
    step: int | None,
    reporter: reports.Reporter,
    now: float,
  ) -> tuple[int, float]:
    """Runs the steps; returns the last one and the time it ended."""
    saved_at = now
    while step is None or step < self._max_steps:
      result = step_fn()
      now = self._clock()
      previous = max(result.global_step - 1, 0) if step is None else step
      step = result.global_step
      if step == previous:
        reporter.add_examples(result.num_examples)
        continue
      if not math.isfinite(result.loss):
        raise FloatingPointError(
          f"Model diverged with loss = {result.loss} at step {step}; "
          f"last good checkpoint: {self._last_good_checkpoint()}"
        )
      reporter.advance(
        previous,
        **result._asdict(),
        now=now,
        is_last=step >= self._max_steps,
      )
      secs = self._checkpoint_every_secs
      if (secs is not None and now - saved_at >= secs) or reports.is_due(
        previous, step, self._checkpoint_every_steps
      ):
        self._save(step)
        saved_at = now
    return step, now

  def _restore(self, path: str, live_step: int) -> int:
    """Restores `path` if the state is behind; returns the step it is at."""
    if live_step > 0:
      saved_step = int(checkpoints.read(path)["global_step"])
      if live_step >= saved_step:
        self._saved_step, self._saved_path = saved_step, path
        self._console.log(f"kept the state at step {live_step}, not {path}")
        return live_step
    restored = checkpoints.restore(
      path, self._state, is_optional=self._is_optional
    )
    self._saved_step, self._saved_path = restored.global_step, path
    self._console.log(checkpoints.describe(restored))
    return restored.global_step

  def _save(self, step: int | None = None) -> None:
    """Writes a checkpoint, unless there is one of `step` or of the state."""
    if not self._is_writer or self._state is None:
      return
    if step is not None and step == self._saved_step:
      return
    values = {k: np.asarray(v) for k, v in self._state.state().items()}
    # Not `step`: other replicas may have gone on.
    step = int(values["global_step"])
    if step == self._saved_step:
      return
    name = checkpoints.first_non_finite(values)
    if name is not None:
      raise FloatingPointError(
        f"Model diverged: {name} is not finite at step {step}; "
        f"last good checkpoint: {self._last_good_checkpoint()}"
      )
    self._saved_path = checkpoints.save(
      self._train_dir,
      values,
      keep_checkpoints=self._keep_checkpoints,
    )
    self._saved_step = step
    self._console.log(f"saved {self._saved_path}")

  def _save_interrupted(self) -> None:
    try:
      self._save()
    except Exception as error:  # The interrupt must not be hidden by it.
      self._console.log(f"interrupted; could not save: {error}")
    else:
      self._console.log(
        f"interrupted; last checkpoint: {self._last_good_checkpoint()}"
      )

  def _last_good_checkpoint(self) -> str:
    if self._saved_path is None and self._train_dir is not None:
      return checkpoints.latest(self._train_dir) or "none"
    return self._saved_path or "none"

  def _write_finished(self, step: int, now: float) -> None:
    if self._is_writer:
      ended = str(datetime.datetime.fromtimestamp(now))
      record = checkpoints.Finished(step, self._saved_path, ended)
      checkpoints.write_finished(self._train_dir, record)


def _require_positive_or_none(**arguments: float | None) -> None:
  for name, value in arguments.items():
    if value is not None and not value > 0:
      raise ValueError(f"`{name}` must be positive or None. Received: {value}.")
