"""Evaluates checkpoints with their moving averages, once or continuously.

Continuous evaluation waits for new checkpoints until training has finished.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from collections.abc import Mapping
from typing import TypeVar

import keras
import numpy as np

from tf_replicas.runtime import own_variables
from tf_replicas.session import checkpoints

Result = TypeVar("Result")
# Called with a global step and the variables of that step by path.
EvaluateFn = Callable[[int, dict[str, np.ndarray]], Result]

# How often continuous evaluation looks for a new checkpoint.
_POLL_SECS = 1.0


def averaged_variables(
  values: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
  """Picks from a checkpoint the variables to evaluate a model with.

  Args:
    values: The tensors of a checkpoint by name, as `checkpoints.read` returns
      them.

  Returns:
    Arrays by variable path. For each variable, it is the moving average,
    `averages/<path>`, if the checkpoint has one, and the variable itself,
    `variables/<path>`, otherwise. A run may have no averages at all. Variables
    that the library has added to those of the model are left out.
  """
  prefix = "variables/"
  paths = [n.removeprefix(prefix) for n in values if n.startswith(prefix)]
  return {
    path: values[checkpoints.stored_name(path, values)]
    for path in paths
    if not own_variables.is_own(path)
  }


def load_into_keras(
  model: keras.Model, values: Mapping[str, np.ndarray]
) -> None:
  """Assigns values to all weights of a built Keras model.

  Args:
    model: The model. Its weights are identified by `variable.path`.
    values: Arrays by path, of the weights' shapes.

  Raises:
    CheckpointError: If the value of a weight is missing, unknown, or of another
      shape. No weight is changed then.
  """
  weights = {weight.path: weight.value for weight in model.weights}
  checkpoints.assign("the checkpoint is of another model", weights, values)


def evaluate(
  train_dir: str | os.PathLike[str],
  evaluate_fn: EvaluateFn[Result],
  *,
  run_once: bool,
  interval_secs: float = 60.0,
  timeout_secs: float | None = None,
) -> Result | None:
  """Evaluates the newest checkpoint once, or new ones until training ends.

  Args:
    train_dir: The train directory.
    evaluate_fn: Called with the global step and the variables by path. Moving
      averages take the place of variables that have them.
    run_once: Whether to evaluate only the newest checkpoint, once.
    interval_secs: The least time, in seconds, between the starts of two
      evaluations. Not used with `run_once`.
    timeout_secs: Returns after so many seconds without a new checkpoint; None
      waits until training has finished. Not used with `run_once`.

  Returns:
    The last result of `evaluate_fn`. Without `run_once`, None if there was no
    checkpoint until the time limit or the end of the training.

  Raises:
    CheckpointError: If a checkpoint is damaged. With `run_once`, also if there
      is no checkpoint.
    ValueError: If `interval_secs` or `timeout_secs` is out of range.
  """
  if run_once:
    return evaluate_once(train_dir, evaluate_fn)
  return evaluate_continuously(
    train_dir,
    evaluate_fn,
    interval_secs=interval_secs,
    timeout_secs=timeout_secs,
  )


def newest_checkpoint(train_dir: str | os.PathLike[str]) -> str:
  """Returns the path of the newest checkpoint of a run.

  Args:
    train_dir: The train directory of the run.

  Raises:
    MissingCheckpointError: If the directory has no checkpoint.
  """
  path = checkpoints.latest(train_dir)
  if path is None:
    raise checkpoints.MissingCheckpointError(
      f"No checkpoint file found in {os.fspath(train_dir)}"
    )
  return path


def evaluate_once(
  train_dir: str | os.PathLike[str], evaluate_fn: EvaluateFn[Result]
) -> Result:
  """Evaluates the newest checkpoint.

  Args:
    train_dir: The train directory.
    evaluate_fn: Called with the global step and the variables by path. Moving
      averages take the place of variables that have them.

  Returns:
    The result of `evaluate_fn`.

  Raises:
    CheckpointError: If there is no checkpoint, or it is damaged.
  """
  path = newest_checkpoint(train_dir)
  return _evaluate(path, checkpoints.read(path), evaluate_fn)


def evaluate_continuously(
  train_dir: str | os.PathLike[str],
  evaluate_fn: EvaluateFn[Result],
  *,
  interval_secs: float = 60.0,
  timeout_secs: float | None = None,
  clock: Callable[[], float] = time.time,
  sleep: Callable[[float], None] = time.sleep,
) -> Result | None:
  """Evaluates new checkpoints until training has finished.

  Every evaluation uses the newest checkpoint, so earlier checkpoints may be
  skipped. The last checkpoint of a finished run is always evaluated, without
  waiting for `interval_secs`.

  Args:
    train_dir: The train directory; need not exist yet.
    evaluate_fn: Called with the global step and the variables by path. Moving
      averages take the place of variables that have them.
    interval_secs: The least time, in seconds, between the starts of two
      evaluations.
    timeout_secs: Returns after so many seconds without a new checkpoint; None
      waits until training has finished.
    clock: Returns the time in seconds.
    sleep: Sleeps for a number of seconds.

  Returns:
    The last result of `evaluate_fn`. None if there was no checkpoint until the
    time limit or the end of the training.

  Raises:
    CheckpointError: If a checkpoint or `finished.json` is damaged.
    ValueError: If an argument is out of range.
  """
  _check_secs(interval_secs, timeout_secs)
  result = None
  evaluated = None
  started = -float("inf")
  new_at = clock()
  while True:
    # Read before looking for checkpoints: it is written after the last one.
    finished = checkpoints.read_finished(train_dir)
    path = finished.checkpoint if finished else None
    path = path or checkpoints.latest(train_dir)
    is_new = path is not None and path != evaluated
    now = clock()
    if is_new and (finished or now - started >= interval_secs):
      started, evaluated = now, path
      try:
        values = checkpoints.read(path)
      except checkpoints.MissingCheckpointError:
        print(
          f"skipped {path}: the training deleted it before it was read",
          flush=True,
        )
      else:
        result = _evaluate(path, values, evaluate_fn)
      new_at = clock()
    elif not is_new and timeout_secs and now - new_at >= timeout_secs:
      print(
        f"evaluation stops: no new checkpoint for {timeout_secs:g} s",
        flush=True,
      )
      return result
    if finished:
      return result
    sleep(_POLL_SECS)


def _check_secs(interval_secs: float, timeout_secs: float | None) -> None:
  if interval_secs < 0:
    raise ValueError(
      f"`interval_secs` must not be negative. Received: {interval_secs}."
    )
  if timeout_secs is not None and not timeout_secs > 0:
    raise ValueError(
      f"`timeout_secs` must be positive or None. Received: {timeout_secs}."
    )


def _evaluate(
  path: str,
  values: Mapping[str, np.ndarray],
  evaluate_fn: EvaluateFn[Result],
) -> Result:
  has_averages = any(name.startswith("averages/") for name in values)
  which = " with moving averages" if has_averages else ""
  print(f"evaluating {path}{which}", flush=True)
  return evaluate_fn(int(values["global_step"]), averaged_variables(values))
