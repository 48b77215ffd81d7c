"""What a train directory holds: checkpoints by name, and whether it finished.

A checkpoint is a flat map from names to whole tensors, such as
`variables/conv1/kernel`, `slots/sgd/momentum/conv1/kernel`,
`averages/conv1/kernel`, `optimizer/began.sgd` (the global step since when there
are such slots), `global_step` and `examples_seen`. It says nothing of where the
tensors lived, so a run with one kind of replication resumes the checkpoint of
another.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from typing import NamedTuple
from typing import Protocol

import numpy as np
import tensorflow as tf

from tf_replicas import resources
from tf_replicas import workarounds

PREFIX = "model.ckpt"
FINISHED = "finished.json"
# Begins the name of a global step: since when an optimizer has its slots.
_BEGAN = "optimizer/began."

# `tf.train.Checkpoint(state={name: variable})` stores each name as
# "state/<escaped name>/.ATTRIBUTES/VARIABLE_VALUE"; inside a name "." becomes
# ".." and "/" becomes ".S" (trackable_utils.escape_local_name, TF 2.21).
_STORED_NAME = re.compile(r"state/([^/]+)/\.ATTRIBUTES/VARIABLE_VALUE")
_ESCAPED = re.compile(r"\.([.S])")

# What TF 2.21 raises for damaged files. IndexError (a LookupError) is how its
# checkpoint reader reports a data file that ends too early.
_READ_ERRORS = (tf.errors.OpError, LookupError, RuntimeError, ValueError)

Values = Mapping[str, tf.Tensor | np.ndarray]


class CheckpointError(ValueError):
  """A checkpoint is absent, damaged, or of another model."""


class MissingCheckpointError(CheckpointError):
  """A checkpoint's files are not there, or not all of them."""


class Checkpointable(Protocol):
  """What can be saved: anything that gives and takes its tensors by name."""

  def state(self) -> Values:
    """Returns every tensor to save by name, `global_step` among them."""

  def load_state(self, values: Mapping[str, np.ndarray]) -> None:
    """Assigns `values`.

    Args:
      values: Arrays by name, with the shapes and dtypes of `state()`. Names
        that the caller of `restore` called optional may be absent; what they
        name is then to be left as it was initialised.
    """


class Restored(NamedTuple):
  """What `restore` did.

  Attributes:
    path: The checkpoint.
    global_step: Its global step.
    from_variables: Averages that now start at their restored variable.
    fresh: Other names not restored, which keep their initial value.
    ignored: Names in the checkpoint that nothing here wants.
  """

  path: str
  global_step: int
  from_variables: tuple[str, ...]
  fresh: tuple[str, ...]
  ignored: tuple[str, ...]


class Finished(NamedTuple):
  """The record of a run that came to its regular end.

  Attributes:
    global_step: The last step.
    checkpoint: Path of the last checkpoint, None if none was written.
    datetime: When it ended.
  """

  global_step: int
  checkpoint: str | None
  datetime: str


def latest(train_dir: str | os.PathLike[str]) -> str | None:
  """Returns the path of the newest checkpoint, None if there is none.

  This is the one that the index file `checkpoint` names, even if its files are
  gone: whoever wants it must hear so, and not start afresh. Without an index
  file (copied by hand, say) it is the one with the largest step.
  """
  train_dir = os.fspath(train_dir)
  index = tf.train.get_checkpoint_state(train_dir)
  if index is not None and index.model_checkpoint_path:
    return index.model_checkpoint_path
  pattern = re.compile(re.escape(PREFIX) + r"-(\d+)\.index")
  names = os.listdir(train_dir) if os.path.isdir(train_dir) else []
  steps = [int(m[1]) for m in map(pattern.fullmatch, names) if m]
  return os.path.join(train_dir, f"{PREFIX}-{max(steps)}") if steps else None


def save(
  train_dir: str | os.PathLike[str],
  values: Values,
  *,
  keep_checkpoints: int | None = 5,
) -> str:
  """Writes `values` as `<train_dir>/model.ckpt-<global_step>`.

  Args:
    train_dir: A directory, made if need be.
    values: Tensors by name, wherever they are; `global_step` is one of them.
    keep_checkpoints: How many of the newest stay; None keeps all.

  Returns:
    The path of the checkpoint.
  """
  train_dir = os.fspath(train_dir)
  os.makedirs(train_dir, exist_ok=True)
  io_device = resources.this_device()
  # The outer `None` drops the caller's device, into which ours would merge.
  with tf.device(None), tf.device(io_device):
    # Copies made here, so that nothing depends on where the originals live.
    arrays = {name: np.asarray(value) for name, value in values.items()}
    holders = {
      name: tf.Variable(array, trainable=False)
      for name, array in arrays.items()
    }
    manager = tf.train.CheckpointManager(
      tf.train.Checkpoint(state=holders),
      train_dir,
      max_to_keep=keep_checkpoints,
      checkpoint_name=PREFIX,
    )
    with workarounds.waiting_for_nobody():
      return manager.save(
        checkpoint_number=int(arrays["global_step"]),
        options=tf.train.CheckpointOptions(experimental_io_device=io_device),
      )


def read(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
  """Reads a checkpoint without knowing the model.

  Args:
    path: A checkpoint's path, without the ending of a file.

  Returns:
    Every array by name.

  Raises:
    MissingCheckpointError: If files are missing (deleted while read, say).
    CheckpointError: If a file is damaged or not of this library.
  """
  path = os.fspath(path)
  try:
    reader = tf.train.load_checkpoint(path)
    keys = map(_STORED_NAME.fullmatch, reader.get_variable_to_shape_map())
    values = {
      _unescape(key[1]): np.asarray(reader.get_tensor(key[0]))
      for key in keys
      if key
    }
  except _READ_ERRORS as error:
    if not is_complete(path):
      raise MissingCheckpointError(
        f"checkpoint {path} is not there, or not all of its files"
      ) from error
    reason = " ".join(str(error).split())
    raise CheckpointError(f"checkpoint {path} is damaged: {reason}") from error
  if "global_step" not in values:
    raise CheckpointError(
      f"checkpoint {path} has no global_step: tf_replicas did not write it"
    )
  return values


def is_complete(path: str | os.PathLike[str]) -> bool:
  """Returns whether every file of the checkpoint `path` is there."""
  path = os.fspath(path)
  data = glob.glob(glob.escape(path) + ".data-?????-of-?????")
  totals = {int(name.rpartition("-of-")[2]) for name in data}
  return os.path.exists(path + ".index") and totals == {len(data)}


def restore(
  path: str | os.PathLike[str],
  state: Checkpointable,
  *,
  is_optional: Callable[[str], bool] | None = None,
) -> Restored:
  """Loads a checkpoint into `state`, or refuses before touching anything.

  An average that the checkpoint lacks starts at the restored variable, as it
  would have started at the initial one. An optimizer that it lacks begins at
  the global step.

  Args:
    path: The checkpoint.
    state: What to load.
    is_optional: Says of a name whether it may be absent or different (slots
      of another optimizer, averages newly switched on). None means no name.

  Returns:
    What was and what was not restored.

  Raises:
    CheckpointError: If the checkpoint cannot be read, or names, shapes or
      dtypes differ.
  """
  path = os.fspath(path)
  there = read(path)
  here = state.state()
  differing = _differences(there, here)
  if is_optional is not None:
    differing = {n: d for n, d in differing.items() if not is_optional(n)}
  if differing:
    train_dir = os.path.dirname(path) or "."
    what = some(differing.values(), "; ")
    raise CheckpointError(
      f"train_dir {train_dir} holds a checkpoint of another model: {what}"
    )
  values = {n: there[n] for n in here if _same(there.get(n), here[n])}
  averages = {}
  for name in here.keys() - values:
    variable = there.get(name.replace("averages/", "variables/", 1))
    if name.startswith("averages/") and _same(variable, here[name]):
      averages[name] = variable
  begun = {n: there["global_step"] for n in here if n.startswith(_BEGAN)}
  state.load_state(begun | values | averages)
  return Restored(
    path,
    int(there["global_step"]),
    from_variables=tuple(sorted(averages)),
    fresh=tuple(sorted(here.keys() - (values | averages | begun).keys())),
    ignored=tuple(sorted(there.keys() - values)),
  )


def describe(restored: Restored) -> str:
  """Returns a line on what was restored and what was not."""
  line = f"restored {restored.path}"
  if restored.from_variables:
    names = some(restored.from_variables)
    line += f"; started at the restored variables: {names}"
  if restored.fresh:
    line += f"; initialised afresh: {some(restored.fresh)}"
  if restored.ignored:
    line += f"; not used: {some(restored.ignored)}"
  return line


def first_non_finite(values: Values) -> str | None:
  """Returns the first name under `variables/` with a NaN or an infinity."""
  for name, value in values.items():
    if name.startswith("variables/") and tf.as_dtype(value.dtype).is_floating:
      if not np.isfinite(np.asarray(value)).all():
        return name
  return None


def some(items: Iterable[str], separator: str = ", ") -> str:
  """Joins the first few items and counts the rest."""
  items = list(items)
  more = f"{separator}and {len(items) - 4} more" if len(items) > 4 else ""
  return separator.join(items[:4]) + more


def write_finished(train_dir: str | os.PathLike[str], record: Finished) -> None:
  """Writes the record that continuous evaluation stops on, atomically."""
  train_dir = os.fspath(train_dir)
  os.makedirs(train_dir, exist_ok=True)
  if record.checkpoint is not None:
    # By its name only: the directory may be moved.
    record = record._replace(checkpoint=os.path.basename(record.checkpoint))
  path = os.path.join(train_dir, FINISHED)
  with open(path + ".tmp", "w", encoding="utf-8") as file:
    json.dump(record._asdict(), file)
    file.write("\n")
  os.replace(path + ".tmp", path)


def read_finished(train_dir: str | os.PathLike[str]) -> Finished | None:
  """Returns the record of a finished run, None if there is none.

  Raises:
    CheckpointError: If the file is not such a record.
  """
  path = os.path.join(os.fspath(train_dir), FINISHED)
  try:
    with open(path, encoding="utf-8") as file:
      record = Finished(**json.load(file))
  except FileNotFoundError:
    return None
  except (TypeError, ValueError) as error:
    raise CheckpointError(f"{path} is no finished record: {error}") from error
  if record.checkpoint is None:
    return record
  return record._replace(
    checkpoint=os.path.join(os.fspath(train_dir), record.checkpoint)
  )


def remove_finished(train_dir: str | os.PathLike[str]) -> None:
  """Removes the record, if there is one: training goes on."""
  try:
    os.remove(os.path.join(os.fspath(train_dir), FINISHED))
  except FileNotFoundError:
    pass


def _unescape(name: str) -> str:
  return _ESCAPED.sub(lambda match: "/" if match[1] == "S" else ".", name)


def _spec(value: tf.Tensor | np.ndarray) -> tuple[list[int], str]:
  return list(value.shape), tf.as_dtype(value.dtype).name


def _same(there: np.ndarray | None, here: tf.Tensor | np.ndarray) -> bool:
  return there is not None and _spec(there) == _spec(here)


def _differences(there: Values, here: Values) -> dict[str, str]:
  """Returns, by name, how two states differ."""
  differences = {}
  for name in sorted({*there, *here}):
    if name not in there:
      differences[name] = f"{name} is missing there"
    elif name not in here:
      differences[name] = f"{name} is there and unknown here"
    elif not _same(there[name], here[name]):
      for what, old, new in zip(
        ("shape", "dtype"), _spec(there[name]), _spec(here[name]), strict=True
      ):
        if old != new:
          differences[name] = f"{name} has {what} {old} there and {new} here"
          break
  return differences
