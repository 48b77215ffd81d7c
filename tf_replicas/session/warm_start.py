"""Starts a training with the variables of a model that is already trained."""

import os
from collections.abc import Callable
from typing import NamedTuple

from tf_replicas.session import checkpoints
from tf_replicas.session import evaluation

_VARIABLES = "variables/"


class Transferred(NamedTuple):
  """Says which variables `transfer` has assigned.

  Attributes:
    path: The path of the checkpoint of the trained model.
    restored: Paths of the variables that have values from the checkpoint.
    fresh: Paths of the variables that keep their initial values.
  """

  path: str
  restored: tuple[str, ...]
  fresh: tuple[str, ...]


def find(path: str) -> str:
  """Finds a checkpoint, checks that its files exist, and returns its path.

  Args:
    path: The path of a checkpoint, or a train directory, which stands for its
      newest checkpoint.

  Raises:
    MissingCheckpointError: If there is no such checkpoint, or files of it are
      missing.
  """
  if os.path.isdir(path):
    path = evaluation.newest_checkpoint(path)
  if not checkpoints.is_complete(path):
    raise checkpoints.MissingCheckpointError(
      f"No checkpoint file found in {path}"
    )
  return path


def transfer(
  path: str,
  state: checkpoints.Checkpointable,
  is_new: Callable[[str], bool],
) -> Transferred:
  """Assigns the variables of a trained model to those of a new training.

  Where the trained model has moving averages, they are used instead of its
  variables. The averages of the new training start at the values of its
  variables. Slots, global step and everything else in the checkpoint are
  ignored.

  Args:
    path: The path of a checkpoint, or a train directory, which stands for its
      newest checkpoint.
    state: The state of the new training.
    is_new: Maps the path of a variable to whether the variable keeps its
      initial value. For example, that is useful for the last layer if the new
      model has another number of classes.

  Returns:
    Which variables were assigned.

  Raises:
    CheckpointError: If there is no checkpoint, or a variable that is not new is
      missing there or has another shape or dtype. Nothing is assigned then.
  """
  path = find(path)
  saved = evaluation.averaged_variables(checkpoints.read(path))
  wanted = state.state()
  paths = [
    name.removeprefix(_VARIABLES)
    for name in wanted
    if name.startswith(_VARIABLES)
  ]
  kept = [name for name in paths if not is_new(name)]
  checkpoints.check_same(
    f"checkpoint {path} is of another model",
    {name: saved[name] for name in kept if name in saved},
    {name: wanted[_VARIABLES + name] for name in kept},
  )
  state.load_state(
    {
      f"{kind}/{name}": saved[name]
      for kind in ("variables", "averages")
      for name in kept
      if f"{kind}/{name}" in wanted
    }
  )
  fresh = [name for name in paths if name not in kept]
  return Transferred(path, tuple(kept), tuple(fresh))
