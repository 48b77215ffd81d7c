"""A checkpoint measured with its moving averages, once or continuously."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from collections.abc import Mapping
from typing import TypeVar

import keras
import numpy as np

from tf_replicas import checkpoints
from tf_replicas import run_settings

Result = TypeVar("Result")
# Called with a global step and the variables of that step by path.
EvaluateFn = Callable[[int, dict[str, np.ndarray]], Result]

# How often continuous evaluation looks whether anything is new.
_POLL_SECS = 1.0


def averaged_variables(
  values: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
  """Picks the variables to evaluate with from a checkpoint.

  Args:
    values: What `checkpoints.read` returns.

  Returns:
    By variable path: `averages/<path>` where the checkpoint has it, otherwise
    `variables/<path>` (statistics of batch normalisation, or all, if training
    kept no averages).
  """
  prefix = "variables/"
  paths = [n.removeprefix(prefix) for n in values if n.startswith(prefix)]
  return {
    path: values.get(f"averages/{path}", values[prefix + path])
    for path in paths
  }


def load_into_keras(
  model: keras.Model, values: Mapping[str, np.ndarray]
) -> None:
  """Assigns every weight of a built Keras model.

  Args:
    model: The model; its weights are found by `variable.path`.
    values: Arrays by path.

  Raises:
    CheckpointError: If a weight is missing, left over, or of another shape.
      Then nothing was assigned.
  """
  weights = {weight.path: weight for weight in model.weights}
  faults = [f"{path} is not in the model" for path in values.keys() - weights]
  for path, weight in weights.items():
    if path not in values:
      faults.append(f"{path} is not in the checkpoint")
    elif tuple(values[path].shape) != tuple(weight.shape):
      faults.append(
        f"{path} has shape {list(values[path].shape)} in the checkpoint and "
        f"{list(weight.shape)} in the model"
      )
  if faults:
    raise checkpoints.CheckpointError(
      "the checkpoint is of another model: "
      + checkpoints.some(sorted(faults), "; ")
    )
  for path, weight in weights.items():
    weight.assign(values[path])


def evaluate(
  train_dir: str | os.PathLike[str],
  evaluate_fn: EvaluateFn[Result],
  *,
  run_once: bool,
  interval_secs: float = 60.0,
  timeout_secs: float | None = None,
) -> Result | None:
  """`evaluate_once` or `evaluate_continuously`, as `run_once` says."""
  if run_once:
    return evaluate_once(train_dir, evaluate_fn)
  return evaluate_continuously(
    train_dir,
    evaluate_fn,
    interval_secs=interval_secs,
    timeout_secs=timeout_secs,
  )


def await_run(
  train_dir: str | os.PathLike[str], *, timeout_secs: float | None = None
) -> bool:
  """Waits until training has written into its directory, and says so.

  What a run is made of, such as its network and its data set, is only known
  then.

  Args:
    train_dir: Where training writes; need not exist yet.
    timeout_secs: How long to wait; None waits for ever.

  Returns:
    Whether there is a run.
  """
  train_dir = os.fspath(train_dir)
  deadline = float("inf")
  if timeout_secs is not None:
    deadline = time.monotonic() + timeout_secs
  has_told = False
  while not run_settings.is_recorded(train_dir):
    if checkpoints.latest(train_dir):
      break  # Of a training that records no settings.
    if time.monotonic() >= deadline:
      return False
    if not has_told:
      print(f"waiting for a training in {train_dir}", flush=True)
      has_told = True
    time.sleep(_POLL_SECS)
  return True


def newest_checkpoint(train_dir: str | os.PathLike[str]) -> str:
  """Path of the newest checkpoint of a run.

  Raises:
    CheckpointError: If there is none.
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
    train_dir: Where training writes.
    evaluate_fn: Called with the global step and the variables.

  Returns:
    What `evaluate_fn` returned.

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

  Each time the newest checkpoint is taken; some in between may be skipped. The
  last one of a finished run is always evaluated, without waiting.

  Args:
    train_dir: Where training writes; need not exist yet.
    evaluate_fn: Called with the global step and the variables.
    interval_secs: At least this long from the start of one evaluation to that
      of the next.
    timeout_secs: Stops when no new checkpoint came for so long; None waits for
      the finished record alone.
    clock: Returns the time in seconds.
    sleep: Waits for some seconds.

  Returns:
    What `evaluate_fn` returned last; None if it was never called.

  Raises:
    CheckpointError: If a checkpoint is damaged, or `finished.json` is.
    ValueError: If an argument is out of range.
  """
  if interval_secs < 0:
    raise ValueError(
      f"`interval_secs` must not be negative. Received: {interval_secs}."
    )
  if timeout_secs is not None and not timeout_secs > 0:
    raise ValueError(
      f"`timeout_secs` must be positive or None. Received: {timeout_secs}."
    )
  result = None
  evaluated = None
  started = -float("inf")
  new_at = clock()
  while True:
    # The record first: it is written after the last checkpoint.
    finished = checkpoints.read_finished(train_dir)
    path = finished.checkpoint if finished else None
    path = path or checkpoints.latest(train_dir)
    is_new = path is not None and path != evaluated
    now = clock()
    if is_new and (finished or now - started >= interval_secs):
      started = now
      evaluated = path
      try:
        values = checkpoints.read(path)
      except checkpoints.MissingCheckpointError:
        print(f"skipped {path}: deleted before it was read", flush=True)
      else:
        result = _evaluate(path, values, evaluate_fn)
      new_at = clock()
    elif not is_new and timeout_secs and now - new_at >= timeout_secs:
      print(f"no new checkpoint for {timeout_secs:g} s", flush=True)
      return result
    if finished:
      return result
    sleep(_POLL_SECS)


def _evaluate(
  path: str,
  values: Mapping[str, np.ndarray],
  evaluate_fn: EvaluateFn[Result],
) -> Result:
  has_averages = any(name.startswith("averages/") for name in values)
  which = " with moving averages" if has_averages else ""
  print(f"evaluating {path}{which}", flush=True)
  return evaluate_fn(int(values["global_step"]), averaged_variables(values))
