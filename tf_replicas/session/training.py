"""Runs a training: calls its step function, and logs, saves and stops."""

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

from tf_replicas.runtime import waiting
from tf_replicas.session import checkpoints
from tf_replicas.session import console
from tf_replicas.session import interrupts
from tf_replicas.session import reports

TABLE_WRITERS = ("chief", "ps")


class DataEnded(Exception):
  """Raised by a step function if there are no more data, so training ends.

  The message says whose data have ended.
  """


class StepExpired(TimeoutError):
  """Raised by a step function if a step was not made in time.

  The variables are those of the step before, so they can be saved. The message
  says which contributions (gradients of a replica) are missing.
  """


class StepResult(NamedTuple):
  """The result of one call of a step function.

  A contribution, below, is the gradients that one replica computed from one
  batch, with the loss of the batch.

  Attributes:
    global_step: The global step now.
    loss: The mean loss over the applied contributions. The session ignores it
      if the global step did not advance; otherwise a loss that is not finite
      ends training.
    num_examples: The number of examples, of the whole cluster, in the
      contributions applied since the last result.
    scalars: More numbers by name for TensorBoard, such as
      `contributions/worker_0/applied`. The number `learning_rate` is in the log
      too.
    histograms: Values by name for histograms in TensorBoard.
    images: Pictures by name for TensorBoard, uint8 `[height, width, channels]`.
    metrics: Numbers by name for the log and TensorBoard, such as those of
      `Replica.metrics`. They are means over the contributions applied since the
      last result.
  """

  global_step: int
  loss: float
  num_examples: int
  scalars: Mapping[str, float] = {}
  histograms: Mapping[str, np.ndarray] = {}
  images: Mapping[str, np.ndarray] = {}
  metrics: Mapping[str, float] = {}


class Session:
  """Calls a step function until `max_steps`, and logs and saves the run.

  The session decides *when* to log, write summaries, save and stop. The program
  decides *what* a step is. "Every N steps" means: whenever a multiple of N is
  reached or passed, as one call of the step function may advance the global
  step by more than one.

  If `train_dir` holds a checkpoint, the run resumes from it. The session
  deletes only these in the directory: checkpoints beyond `keep_checkpoints`,
  unfinished files of an interrupted save, and the record that an earlier run
  has finished.
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
    table_writer: str = "chief",
    is_optional: Callable[[str], bool] | None = None,
    clock: Callable[[], float] = time.time,
  ):
    """Stores the settings of the session, without reading or writing files.

    Args:
      train_dir: The directory of checkpoints, of summaries, and of the record
        that the run has finished. None: nothing is written.
      state: The state to save and restore; None if another task does that.
      max_steps: The global step at which training stops.
      is_chief: Whether this task writes files. Other tasks print log lines too,
        and restore `state` if they have one.
      log_every_steps: Steps between log lines; None for no log lines.
      summary_every_steps: Steps between summaries; None for no summaries.
      checkpoint_every_steps: Steps between checkpoints; None: checkpoints do
        not depend on steps.
      checkpoint_every_secs: Seconds between checkpoints; None: checkpoints do
        not depend on time. A checkpoint is always written at the end.
      keep_checkpoints: The number of newest checkpoints to keep; None keeps
        all.
      table_writer: Who writes the rows of tables (large matrices on the
        parameter servers) to checkpoints. `chief`: the chief, in blocks that it
        reads from the parameter servers. `ps`: each parameter server its own
        rows; `train_dir` must be on storage that all tasks share.
      is_optional: Maps a name to whether its tensor may be missing in the
        checkpoint, or differ in shape or dtype, when `state` is restored. None:
        every tensor must match.
      clock: Returns the time in seconds since 1970.

    Raises:
      ValueError: If an argument is out of range.
    """
    if max_steps < 0:
      raise ValueError(f"`max_steps` must be 0 or more. Received: {max_steps}.")
    if table_writer not in TABLE_WRITERS:
      raise ValueError(
        f"`table_writer` must be one of {', '.join(TABLE_WRITERS)}. Received:"
        f" {table_writer!r}."
      )
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
    self._table_writer = table_writer
    self._is_optional = is_optional
    self._clock = clock
    self._console = console.Console(has_bar=None if is_chief else False)
    self._start_step: int | None = None
    self._saved_at = 0.0
    self._saved_step: int | None = None
    self._saved_path: str | None = None
    # Writes a checkpoint while training goes on.
    self._writer: waiting.RaisingThread | None = None

  def restore_or_initialize(self) -> int:
    """Restores the newest checkpoint, unless the state is at least as new.

    The state may be newer than the checkpoint if the chief was restarted:
    meanwhile, the other replicas may have updated the variables on the
    parameter servers. Such a state is kept. If the newest checkpoint is
    damaged, the next older one is restored.

    Returns:
      The global step to start from; 0 if there is no `state`.

    Raises:
      CheckpointError: If the checkpoint is of another model, or no checkpoint
        can be read. State and directory are unchanged then.
    """
    self._await_writer()
    step = 0
    if self._state is not None:
      live_step = step = int(self._state.state()["global_step"])
      if self._train_dir is not None:
        restored = checkpoints.read_newest(
          self._train_dir, lambda path: self._restore(path, live_step)
        )
        step = live_step if restored is None else restored
    if self._is_writer and step < self._max_steps:
      checkpoints.remove_finished(self._train_dir)
    self._start_step = step
    self._saved_at = self._clock()
    return step

  def run(
    self,
    step_fn: Callable[[], StepResult],
    *,
    report: Callable[[], Iterable[str]] | None = None,
    wake: Callable[[], None] | None = None,
  ) -> int:
    """Calls `step_fn` until the global step reaches `max_steps`.

    A "step" in this class is one update of the variables, not one batch: with
    three workers and `replicas_to_aggregate=2`, two or three batches make one
    step. At the end, a checkpoint is written, and the record that the run has
    finished. On Ctrl-C or SIGTERM, and if a step was not made in time
    (`StepExpired`), a checkpoint is written if possible. Interrupts wait for
    the end of the step, for a second at most.

    Args:
      step_fn: Advances training and returns the result. It may return without
        advancing the global step, as for a dropped gradient.
      report: Returns lines to print at the end.
      wake: Makes a `step_fn` that waits in TensorFlow return to Python for a
        moment, so that interrupts are handled. It is called in another thread.

    Returns:
      The last global step.

    Raises:
      FloatingPointError: If a loss or, before a save, a variable is not finite.
        That state is not saved.
      CheckpointError: If the checkpoint to resume from is of another model, or
        none can be read, unless `restore_or_initialize` was called before.
      StepExpired: If `step_fn` raises it.
      KeyboardInterrupt: On Ctrl-C or SIGTERM.
    """
    if self._start_step is None:
      self.restore_or_initialize()
    now = self._clock()
    # Without a state, the first result tells the global step.
    step = None if self._state is None else self._start_step
    reporter = self._open_reporter(now)
    with interrupts.deferred(wake) as make, contextlib.closing(reporter):
      if step is not None and step < self._max_steps:
        self._console.log(f"training from step {step} to {self._max_steps}")
      self._console.open_bar(step or 0, self._max_steps)
      try:
        step, now = self._loop(lambda: make(step_fn), step, reporter, now)
        self.finish(step)
      except (KeyboardInterrupt, StepExpired):
        self.save_interrupted()
        raise
      except BaseException:
        self.end_writing()
        raise
    lines = [reporter.final_line(step, now), *(report() if report else ())]
    self._console.log("\n".join(lines))
    return step

  def _open_reporter(self, now: float) -> reports.Reporter:
    writes_summaries = self._is_writer and self._summary_every_steps is not None
    summaries = reports.Summaries(
      self._train_dir if writes_summaries else None, log=self._console.log
    )
    return reports.Reporter(
      self._console,
      summaries,
      log_every_steps=self._log_every_steps,
      summary_every_steps=self._summary_every_steps,
      max_steps=self._max_steps,
      now=now,
    )

  def _loop(
    self,
    step_fn: Callable[[], StepResult],
    step: int | None,
    reporter: reports.Reporter,
    now: float,
  ) -> tuple[int, float]:
    """Makes steps until `max_steps` or the end of the data.

    Steps are reported, and checkpoints saved, when they are due.

    Args:
      step_fn: Makes a step, and returns its result.
      step: The global step at the start; None if it is not known before the
        first result of `step_fn`.
      reporter: Reports the steps.
      now: The time at the start, in seconds since 1970.

    Returns:
      The last global step, which is less than `max_steps` if the data ended;
      and the time when `step_fn` last returned, in seconds since 1970.

    Raises:
      FloatingPointError: If a loss is not finite; before a save, also if a
        variable is not finite.
      RuntimeError: If the data end before the first update of the training.
    """
    while step is None or step < self._max_steps:
      try:
        result = step_fn()
      except DataEnded as end:
        if not step:
          raise RuntimeError(f"{end}, before the first update") from None
        self._console.log(f"{end}; training ends")
        break
      now = self._clock()
      previous = max(result.global_step - 1, 0) if step is None else step
      step = result.global_step
      if step == previous:
        reporter.add_examples(result.num_examples)
        continue
      if not math.isfinite(result.loss):
        raise self._diverged(f"with loss = {result.loss}", step)
      reporter.advance(
        previous,
        **result._asdict(),
        now=now,
        is_last=step >= self._max_steps,
      )
      self.save_if_due(previous, step)
    return step, now

  def _restore(self, path: str, live_step: int) -> int:
    """Restores the checkpoint `path`, unless the state is at least as new.

    Args:
      path: The path of the checkpoint.
      live_step: The global step of the state. If it is 0, the checkpoint is
        always restored.

    Returns:
      The global step of the state afterwards.
    """
    assert self._state is not None
    if live_step > 0:
      saved_step = int(checkpoints.read(path)["global_step"])
      if live_step >= saved_step:
        self._saved_step, self._saved_path = saved_step, path
        self._console.log(
          f"kept the state at step {live_step} that is in use: the checkpoint"
          f" {path} is not newer"
        )
        return live_step
    restored = checkpoints.restore(
      path,
      self._state,
      is_optional=self._is_optional,
      row_tensors=_row_tensors(self._state),
    )
    self._saved_step, self._saved_path = restored.global_step, path
    self._console.log(checkpoints.describe(restored))
    return restored.global_step

  def save_if_due(self, previous: int, step: int) -> None:
    """Writes a checkpoint if one is due, by steps or by time.

    It is for programs with a loop of their own, which do not call `run`. The
    state is read before this method returns, and written afterwards in another
    thread, while training goes on. Only a state with tables (large matrices
    that are read in blocks of rows) is written before the method returns.

    Args:
      previous: The global step at the last call of this method.
      step: The global step now.

    Raises:
      FloatingPointError: If a variable is not finite.
      tf.errors.OpError, OSError, CheckpointError: If the state cannot be read,
        or if this or the checkpoint before could not be written.
    """
    if self._writer is not None and not self._writer.is_alive():
      self._await_writer()
    secs = self._checkpoint_every_secs
    if (secs is not None and self._clock() - self._saved_at >= secs) or (
      reports.is_due(previous, step, self._checkpoint_every_steps)
    ):
      self._begin_save(step)
      self._saved_at = self._clock()

  def finish(self, step: int) -> None:
    """Writes the last checkpoint, and the record that the run has finished.

    It is for programs with a loop of their own, which do not call `run`.

    Args:
      step: The last global step.

    Raises:
      FloatingPointError: If a variable is not finite.
      tf.errors.OpError, OSError, CheckpointError: If it cannot be written.
    """
    self.save(step)
    self._write_finished(step, self._clock())

  def save(self, step: int | None = None) -> None:
    """Writes a checkpoint, unless there is one of the present global step.

    Only the chief's session writes. Without a `state` or a `train_dir` nothing
    is written.

    Args:
      step: The global step, if the caller knows it. It saves reading the state
        if a checkpoint of this step was written already. None: not known.

    Raises:
      FloatingPointError: If a variable is not finite. Nothing is written then.
      tf.errors.OpError, OSError, CheckpointError: If it cannot be written.
    """
    self._begin_save(step)
    self._await_writer()

  def _begin_save(self, step: int | None) -> None:
    """Reads the state, and starts a thread that writes it.

    With tables, it waits for the thread. `save` documents the argument.

    Raises:
      FloatingPointError: If a variable is not finite. Nothing is written then.
      tf.errors.OpError, OSError, CheckpointError: If the state cannot be read,
        or if this or the checkpoint before could not be written.
    """
    train_dir = self._train_dir
    if not self._is_writer or self._state is None or train_dir is None:
      return
    if step is not None and step == self._saved_step:
      return
    values = {k: np.asarray(v) for k, v in self._state.state().items()}
    # Not `step`: other replicas may have advanced it since.
    step = int(values["global_step"])
    if step == self._saved_step:
      return
    name = checkpoints.first_non_finite(values)
    if name is not None:
      raise self._diverged(f"with non-finite values in {name}", step)
    self._await_writer()
    row_tensors = _row_tensors(self._state)

    def write() -> None:
      self._saved_path = checkpoints.save(
        train_dir,
        values,
        keep_checkpoints=self._keep_checkpoints,
        row_tensors=row_tensors,
        written_by_ps=self._table_writer == "ps",
      )

    self._saved_step = step
    self._writer = waiting.RaisingThread(
      write, on_error=lambda: None, daemon=False
    )
    if row_tensors:  # Later updates of the chief would change the rows.
      self._await_writer()

  def _await_writer(self) -> None:
    """Waits until the checkpoint is written that is being written, if any.

    Raises:
      tf.errors.OpError, OSError, CheckpointError: If it could not be written.
    """
    if self._writer is None:
      return
    try:
      self._writer.join()  # An interrupt leaves the writer as it is.
    except Exception:
      self._saved_step = self._writer = None
      raise
    self._writer = None
    self._console.log(f"saved {self._saved_path}")

  def end_writing(self) -> None:
    """Waits for the checkpoint that is being written, and logs its error.

    It is for programs with a loop of their own that ends with an error.
    """
    try:
      self._await_writer()
    except Exception as error:  # Must not replace the first error.
      self._console.log(f"could not save: {error}")

  def save_interrupted(self) -> None:
    """Writes a checkpoint, and logs which one is the last, or why it failed.

    It is for programs with a loop of their own that was interrupted.
    """
    self.end_writing()
    try:
      self.save()
    except Exception as error:  # Must not replace the first error.
      self._console.log(
        f"training stops; could not save: {error}; last checkpoint:"
        f" {self._last_good_checkpoint()}"
      )
    else:
      self._console.log(
        f"training stops; last checkpoint: {self._last_good_checkpoint()}"
      )

  def _diverged(self, reason: str, step: int) -> FloatingPointError:
    return FloatingPointError(
      f"Model diverged {reason} at step {step}; training stops, last good"
      f" checkpoint: {self._last_good_checkpoint()}"
    )

  def _last_good_checkpoint(self) -> str:
    self.end_writing()
    if self._saved_path is None and self._train_dir is not None:
      return checkpoints.latest(self._train_dir) or "none"
    return self._saved_path or "none"

  def _write_finished(self, step: int, now: float) -> None:
    if self._is_writer:
      ended = str(datetime.datetime.fromtimestamp(now))
      record = checkpoints.Finished(step, self._saved_path, ended)
      checkpoints.write_finished(self._train_dir, record)


def _row_tensors(
  state: checkpoints.Checkpointable,
) -> Mapping[str, checkpoints.RowTensor]:
  """Returns the tensors of `state` that are saved in blocks of rows, by name.

  They are what the method `row_tensors` of `state` returns. A state without
  such tensors need not have this method.
  """
  return getattr(state, "row_tensors", dict)()


def _require_positive_or_none(**arguments: float | None) -> None:
  for name, value in arguments.items():
    if value is not None and not value > 0:
      raise ValueError(f"`{name}` must be positive or None. Received: {value}.")
