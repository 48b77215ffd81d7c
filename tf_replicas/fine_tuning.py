"""A training that starts from what another one learned."""

import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tf_replicas import checkpoints
from tf_replicas import evaluation

_VARIABLES = "variables/"


class Transferred(NamedTuple):
  """What `transfer` did.

  Attributes:
    path: The checkpoint.
    restored: Paths of the variables that have its values.
    fresh: Paths of those that keep their initial value.
  """

  path: str
  restored: tuple[str, ...]
  fresh: tuple[str, ...]


def find(path: str) -> str:
  """The checkpoint that is meant.

  Args:
    path: Of a checkpoint, or of a train directory: its newest.

  Raises:
    CheckpointError: If there is none.
  """
  found = checkpoints.latest(path) if os.path.isdir(path) else path
  if found is None or not checkpoints.is_complete(found):
    raise checkpoints.MissingCheckpointError(
      f"No checkpoint file found in {found or path}"
    )
  return found


def transfer(
  path: str,
  state: checkpoints.Checkpointable,
  is_new: Callable[[str], bool],
) -> Transferred:
  """Gives the variables of a new training the values of a trained model.

  They are its moving averages, where it has some, and new averages start there
  too. Slots, global step and whatever else a checkpoint holds are not taken.

  Args:
    path: As for `find`.
    state: What is to be trained.
    is_new: Says of a variable's path whether to leave it as it is, such as the
      head of another number of classes.

  Raises:
    CheckpointError: If another variable is missing there or of another shape
      or dtype; then nothing was assigned.
  """
  path = find(path)
  there = evaluation.averaged_variables(checkpoints.read(path))
  here = state.state()
  wanted = [
    name.removeprefix(_VARIABLES)
    for name in here
    if name.startswith(_VARIABLES)
  ]
  kept = [name for name in wanted if not is_new(name)]
  faults = []
  for name in kept:
    old, new = there.get(name), here[_VARIABLES + name]
    if old is None:
      faults.append(f"{name} is missing there")
    elif _spec(old) != _spec(new):
      faults.append(f"{name} is {_spec(old)} there and {_spec(new)} here")
  if faults:
    raise checkpoints.CheckpointError(
      f"checkpoint {path} is of another model: {checkpoints.some(faults, '; ')}"
    )
  state.load_state(
    {
      f"{kind}/{name}": there[name]
      for kind in ("variables", "averages")
      for name in kept
      if f"{kind}/{name}" in here
    }
  )
  fresh = [name for name in wanted if name not in kept]
  return Transferred(path, tuple(kept), tuple(fresh))


def _spec(value: tf.Tensor | np.ndarray) -> str:
  return f"{tf.as_dtype(value.dtype).name}{list(value.shape)}"
