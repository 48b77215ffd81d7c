"""Writes and reads the files of a train directory.

These files are checkpoints, and the record that a run has finished. A *slot* is
a value that an optimizer keeps per variable, such as momentum. A checkpoint is
a flat map from names to whole tensors, such as `variables/conv1/kernel`,
`slots/sgd/momentum/conv1/kernel`, `averages/conv1/kernel`,
`optimizer/began.sgd` (the global step at which these slots were created),
`global_step` and `examples_seen`. A checkpoint does not depend on the devices
of the tensors, so a run with one kind of replication can resume from a
checkpoint of another kind.

Tensors of many rows, such as tables (large embedding matrices) and their slots
and averages, are never whole in this process. They are written and read in
blocks of rows, in separate files: those of the checkpoint `model.ckpt-7` are
`model.ckpt-7.tables.index` and `model.ckpt-7.tables.data-….`.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import shutil
from collections.abc import Callable
from collections.abc import Container
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple
from typing import Protocol
from typing import TypeVar

import numpy as np
import tensorflow as tf
from absl import logging
from tensorflow.core.protobuf import trackable_object_graph_pb2

from tf_replicas.runtime import resources
from tf_replicas.runtime import row_files
from tf_replicas.session import checkpoint_errors

CheckpointError = checkpoint_errors.CheckpointError
UnreadableCheckpointError = checkpoint_errors.UnreadableCheckpointError
MissingCheckpointError = checkpoint_errors.MissingCheckpointError

PREFIX = "model.ckpt"
_TABLES = ".tables"
FINISHED = "finished.json"
# The names of the global steps at which an optimizer's slots were created. With
# several optimizers, the name of one precedes.
_BEGAN = re.compile(r"optimizer/([^/]+\.)?began\.")

# `tf.train.Checkpoint(state={name: variable})` stores each name as
# "state/<escaped name>/.ATTRIBUTES/VARIABLE_VALUE"; inside a name "." becomes
# ".." and "/" becomes ".S" (trackable_utils.escape_local_name, TF 2.21).
_VALUE = ".ATTRIBUTES/VARIABLE_VALUE"
_STORED_NAME = re.compile(rf"state/([^/]+)/{re.escape(_VALUE)}")
_ESCAPED = re.compile(r"\.([.S])")

# Errors of TF 2.21 for damaged files; for a truncated data file its checkpoint
# reader raises IndexError, a LookupError, and MemoryError for a size in an
# index that is far too large.
_READ_ERRORS = (
  tf.errors.OpError,
  LookupError,
  MemoryError,
  RuntimeError,
  ValueError,
)

Array = tf.Tensor | tf.Variable | np.ndarray
Values = Mapping[str, Array]
# What has a shape and a dtype.
Shaped = Any
_Result = TypeVar("_Result")


class RowTensor(Protocol):
  """Interface of a tensor that is read and assigned in blocks of rows.

  A checkpoint saves and restores it without having the whole tensor in memory.

  Attributes:
    shape: The shape of the whole tensor.
    dtype: The dtype of the tensor.
    num_parts: The number of PS tasks (parameter servers) that have rows.
  """

  shape: tuple[int, ...]
  dtype: tf.DType
  num_parts: int

  def read(self, begin: int, end: int) -> np.ndarray:
    """Returns the rows of the tensor from `begin` to `end`, exclusive."""
    ...

  def assign(self, begin: int, values: np.ndarray) -> None:
    """Assigns `values` to the rows of the tensor from row `begin` on."""

  def remote_writers(self, name: str) -> Sequence[Callable[[str], object]]:
    """Returns functions that make the PS tasks write the rows to files.

    Args:
      name: The name of the tensor in the files.

    Returns:
      Functions of the path of a file. Each makes one PS task (parameter server)
      write rows that it has, as `row_files.write` requires.
    """
    ...


class Checkpointable(Protocol):
  """Interface of an object whose named tensors can be saved and restored."""

  def state(self) -> Values:
    """Returns the tensors to save, by name. One name must be `global_step`."""

  def load_state(self, values: Mapping[str, np.ndarray]) -> None:
    """Assigns saved values to the tensors.

    Args:
      values: Arrays by name, with the shapes and dtypes of `state()`. A name
        may be missing only if the caller of `restore` declared it optional; the
        tensor of this name must then keep its present value.
    """


class Restored(NamedTuple):
  """Says what `restore` has loaded from a checkpoint, and what not.

  Attributes:
    path: The path of the checkpoint.
    global_step: The global step of the checkpoint.
    from_variables: Names of moving averages that were not restored. They start
      at the restored values of their variables.
    fresh: Names of other tensors that were not restored. They keep their
      initial values.
    ignored: Names in the checkpoint whose tensors were not used.
  """

  path: str
  global_step: int
  from_variables: tuple[str, ...]
  fresh: tuple[str, ...]
  ignored: tuple[str, ...]


class Finished(NamedTuple):
  """Records that a run has reached its last step.

  Attributes:
    global_step: The last global step.
    checkpoint: The path of the last checkpoint; None if none was written.
    datetime: The local time at the end: `2026-01-31 12:00:00.123456`.
  """

  global_step: int
  checkpoint: str | None
  datetime: str


def latest(train_dir: str | os.PathLike[str]) -> str | None:
  """Returns the path of the newest checkpoint; None if there is none.

  TensorFlow's index file, called `checkpoint`, names the newest checkpoint. Its
  path is returned even if files of this checkpoint are missing. Then reading it
  fails, which is better than a run that starts again from step 0. Without an
  index file (if the directory was copied by hand, for example), the newest
  checkpoint is the one with the largest step.

  Args:
    train_dir: The directory; need not exist.
  """
  train_dir = os.fspath(train_dir)
  index = _read_index(train_dir)
  if index is not None and index.model_checkpoint_path:
    return index.model_checkpoint_path
  steps = _steps(train_dir)
  return os.path.join(train_dir, f"{PREFIX}-{steps[0]}") if steps else None


def _read_index(train_dir: str) -> Any:
  """Reads TensorFlow's index file; returns None if it is missing or damaged."""
  try:
    return tf.train.get_checkpoint_state(train_dir)
  except ValueError:  # Of other damage TensorFlow logs a warning.
    path = os.path.join(train_dir, "checkpoint")
    logging.warning("%s is damaged and ignored", path)
    return None


def _steps(train_dir: str) -> list[int]:
  """Returns the global steps of all checkpoints in a directory.

  The largest step comes first. A checkpoint is left out if its index file, such
  as `model.ckpt-7.index`, is missing.
  """
  pattern = re.compile(re.escape(PREFIX) + r"-(\d+)\.index")
  names = os.listdir(train_dir) if os.path.isdir(train_dir) else []
  steps = [int(m[1]) for m in map(pattern.fullmatch, names) if m]
  return sorted(steps, reverse=True)


def read_newest(
  train_dir: str | os.PathLike[str], read_fn: Callable[[str], _Result]
) -> _Result | None:
  """Reads the newest checkpoint that can be read.

  If the newest one is missing or damaged, this is logged, and the next older
  one is tried, and so on.

  Args:
    train_dir: The directory of the checkpoints; need not exist.
    read_fn: Reads the checkpoint at a path. It raises
      `UnreadableCheckpointError` if the checkpoint is missing or damaged.

  Returns:
    The result of `read_fn`; None if the directory has no checkpoint.

  Raises:
    UnreadableCheckpointError: If the directory has checkpoints, but none can be
      read. It is the error of the newest one.
  """
  train_dir = os.fspath(train_dir)
  newest = latest(train_dir)
  if newest is None:
    return None
  step = newest.rpartition("-")[2]
  older = [s for s in _steps(train_dir) if step.isdigit() and s < int(step)]
  paths = [newest, *(os.path.join(train_dir, f"{PREFIX}-{s}") for s in older)]
  errors = []
  for path in paths:
    if errors:
      logging.error("%s; the older checkpoint %s is tried", errors[-1], path)
    try:
      return read_fn(path)
    except UnreadableCheckpointError as error:
      errors.append(error)
  raise errors[0]


def save(
  train_dir: str | os.PathLike[str],
  values: Values,
  *,
  keep_checkpoints: int | None = 5,
  row_tensors: Mapping[str, RowTensor] | None = None,
  written_by_ps: bool = False,
) -> str:
  """Writes the tensors `values` as `<train_dir>/model.ckpt-<global_step>`.

  Args:
    train_dir: A directory; created if it does not exist.
    values: Tensors by name, on any devices. One name must be `global_step`.
    keep_checkpoints: The number of newest checkpoints to keep; None keeps all.
    row_tensors: Tensors by name that may be too large for this process. They
      are written in blocks of rows, to separate files.
    written_by_ps: Whether the PS tasks (parameter servers) write the rows of
      `row_tensors`. They need `train_dir` on storage that all tasks share. If
      False, this process reads the rows and writes them.

  Returns:
    The path of the checkpoint.

  Raises:
    CheckpointError: If PS tasks have to write, but do not share `train_dir`.
    tf.errors.OpError: If it cannot be written, for example as the disk is full.
      Earlier checkpoints stay, and the files of this one are removed.
  """
  train_dir = os.fspath(train_dir)
  os.makedirs(train_dir, exist_ok=True)
  _remove_unfinished(train_dir)
  _remove_tables_without_checkpoint(train_dir)
  # Without the outer `None`, the caller's device would be merged into this one.
  with tf.device(None), tf.device(resources.this_device()):
    # Copies in this process, so that saving needs no other task.
    arrays = {name: np.asarray(value) for name, value in values.items()}
  step = int(arrays["global_step"])
  path = os.path.join(train_dir, f"{PREFIX}-{step}")
  if row_tensors:
    # First: without the index file of the rest, there is no checkpoint.
    _write_rows(tables_of(path), row_tensors, written_by_ps=written_by_ps)
  try:
    _write_arrays(path, arrays)
    _keep_newest(train_dir, path, keep_checkpoints)
  finally:
    _remove_tables_without_checkpoint(train_dir)
  return path


def _write_arrays(path: str, arrays: Mapping[str, np.ndarray]) -> None:
  """Writes the files of a checkpoint, except those of tables.

  They are those of `tf.train.Checkpoint(state={name: variable, ...})`.

  Args:
    path: The path of the checkpoint.
    arrays: The tensors by name.
  """
  stored: dict[str, Any] = {}
  # `tf.train.Checkpoint.restore` reads which object has which children.
  graph = trackable_object_graph_pb2.TrackableObjectGraph()
  checkpoint, state = graph.nodes.add(), graph.nodes.add()
  checkpoint.children.add(node_id=1, local_name="state")

  def add(parent: Any, name: str, key: str, value: Any) -> None:
    parent.children.add(node_id=len(graph.nodes), local_name=name)
    graph.nodes.add().attributes.add(
      name="VARIABLE_VALUE", full_name=name, checkpoint_key=key
    )
    stored[key] = value

  for name, array in arrays.items():
    add(state, name, _key_of(name), array)
  counter = "save_counter"
  add(checkpoint, counter, f"{counter}/{_VALUE}", np.int64(1))
  stored[row_files.OBJECT_GRAPH] = graph.SerializeToString()
  row_files.write(path, [lambda part: row_files.save_whole(part, stored)])


def _keep_newest(
  train_dir: str, path: str, keep_checkpoints: int | None
) -> None:
  """Names a new checkpoint in TensorFlow's index file, and removes old ones.

  Args:
    train_dir: The directory of the checkpoints.
    path: The path of the new checkpoint.
    keep_checkpoints: The number of newest checkpoints to keep; None keeps all.
  """
  index = _read_index(train_dir)
  paths = list(index.all_model_checkpoint_paths) if index else []
  paths = [p for p in paths if p != path and os.path.exists(p + ".index")]
  paths.append(path)
  kept = paths if keep_checkpoints is None else paths[-keep_checkpoints:]

  directory = os.path.abspath(train_dir)

  def write_index(paths: list[str]) -> None:
    # Relative paths are right even if the directory is moved.
    names = [os.path.relpath(p, directory) for p in paths]
    quoted = [json.dumps(name, ensure_ascii=False) for name in names]
    lines = [f"model_checkpoint_path: {quoted[-1]}\n"]
    lines += [f"all_model_checkpoint_paths: {name}\n" for name in quoted]
    _write_text(os.path.join(train_dir, "checkpoint"), "".join(lines))

  # First with the old ones, so that a later call removes them if this ends.
  write_index(paths)
  if len(kept) < len(paths):
    for old in paths[: -len(kept)]:
      row_files.remove(old)
    write_index(kept)


def tables_of(path: str) -> str:
  """Returns the path, without extension, of the separate files of a checkpoint.

  These files have the tensors that are written in blocks of rows, such as large
  embedding matrices.

  Args:
    path: The path of the checkpoint.
  """
  return path + _TABLES


def _write_rows(
  prefix: str, row_tensors: Mapping[str, RowTensor], *, written_by_ps: bool
) -> None:
  """Writes tensors in blocks of rows.

  Args:
    prefix: The path of the files without their extensions.
    row_tensors: The tensors by name.
    written_by_ps: Whether the PS tasks write the rows, and not this process.

  Raises:
    CheckpointError: If the PS tasks do not share the directory.
  """
  if not written_by_ps:
    row_files.write(prefix, row_files.local_writers(row_tensors))
    return
  writers = [
    writer
    for name, tensor in row_tensors.items()
    for writer in tensor.remote_writers(name)
  ]
  num_threads = max(tensor.num_parts for tensor in row_tensors.values())
  try:
    row_files.write(prefix, writers, num_threads=num_threads)
  except (
    FileNotFoundError,
    tf.errors.NotFoundError,
    tf.errors.PermissionDeniedError,
  ) as error:
    reason = " ".join(str(error).split())
    raise CheckpointError(
      "the PS tasks cannot write the rows of tables: `table_writer='ps'` needs"
      " a `train_dir` on storage that all tasks share and may write to, at the"
      f" same path. Received: {os.path.dirname(prefix)} ({reason})."
    ) from None


def _remove_unfinished(train_dir: str) -> None:
  """Removes what a process that was killed has left of a checkpoint."""
  for pattern in (f"{row_files.UNFINISHED}*", f"{PREFIX}-*_temp"):
    for path in glob.glob(os.path.join(glob.escape(train_dir), pattern)):
      shutil.rmtree(path, ignore_errors=True)


def _remove_tables_without_checkpoint(train_dir: str) -> None:
  """Removes the table files of checkpoints that do not exist any more, or yet.

  Table files are the separate files of a checkpoint with the tensors that are
  written in blocks of rows. `_keep_newest` removes the other files of old
  checkpoints, but not these. A process that was killed may also have left table
  files of a checkpoint that it had not written completely.

  Args:
    train_dir: The directory of the checkpoints.
  """
  pattern = os.path.join(glob.escape(train_dir), f"{PREFIX}-*{_TABLES}.*")
  for name in glob.glob(pattern):
    path = name[: name.rindex(_TABLES + ".")]
    if not os.path.exists(path + ".index"):
      with contextlib.suppress(FileNotFoundError):
        os.remove(name)


def read(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
  """Reads all tensors of a checkpoint, without knowing the model.

  Args:
    path: A checkpoint's path, without a file extension.

  Returns:
    Arrays by name, without the tensors that are saved in blocks of rows.

  Raises:
    MissingCheckpointError: If files are missing, or deleted during the read.
    UnreadableCheckpointError: If a file is damaged.
    CheckpointError: If it is a checkpoint that this library did not write.
  """
  values = read_tensors(path, _name_of)
  if "global_step" not in values:
    raise CheckpointError(
      f"checkpoint {os.fspath(path)} has no global_step; another program wrote"
      " it"
    )
  return values


def read_tensors(
  path: str | os.PathLike[str], name_of: Callable[[str], str | None]
) -> dict[str, np.ndarray]:
  """Reads a checkpoint that any program has written with TensorFlow.

  Args:
    path: A checkpoint's path, without a file extension.
    name_of: Maps the key of a tensor in the file to its name in the result, or
      to None if the tensor is to be left out.

  Returns:
    Arrays by name.

  Raises:
    MissingCheckpointError: If files are missing, or deleted during the read.
    UnreadableCheckpointError: If a file is damaged.
  """
  path = os.fspath(path)
  try:
    reader = tf.train.load_checkpoint(path)
    names = {key: name_of(key) for key in reader.get_variable_to_shape_map()}
    return {
      name: np.asarray(reader.get_tensor(key))
      for key, name in names.items()
      if name is not None
    }
  except _READ_ERRORS as error:
    # A checkpoint in the format of TF1's first releases is one file.
    if not is_complete(path) and not os.path.isfile(path):
      raise MissingCheckpointError(_missing(path)) from error
    reason = " ".join(str(error).split())
    raise UnreadableCheckpointError(
      f"checkpoint {path} is damaged: {reason}"
    ) from error


def is_complete(path: str | os.PathLike[str]) -> bool:
  """Returns whether all files of the checkpoint at the path `path` exist."""
  path = os.fspath(path)
  data = row_files.data_files(path)
  totals = {int(name.rpartition("-of-")[2]) for name in data}
  return os.path.exists(path + ".index") and totals == {len(data)}


def restore(
  path: str | os.PathLike[str],
  state: Checkpointable,
  *,
  is_optional: Callable[[str], bool] | None = None,
  row_tensors: Mapping[str, RowTensor] | None = None,
) -> Restored:
  """Loads a checkpoint into `state`; changes nothing if it does not fit.

  If a moving average is missing in the checkpoint, it starts at the restored
  value of its variable. If the slots of the optimizer (such as momentum) are
  missing, they keep their initial values, and the optimizer's bias correction
  counts updates from the restored global step.

  Args:
    path: The path of the checkpoint.
    state: The object into which the checkpoint is loaded.
    is_optional: Maps a name to whether its tensor may be missing, in the
      checkpoint or in `state`, or have another shape or dtype. For example, the
      checkpoint may have slots of another optimizer, or no moving averages.
      None: all names, shapes and dtypes must match.
    row_tensors: Tensors of `state` by name that are read in blocks of rows.

  Returns:
    What was restored, and what was not.

  Raises:
    UnreadableCheckpointError: If the checkpoint is missing or damaged. If the
      file of `row_tensors` is damaged, some of their rows may already have been
      assigned.
    CheckpointError: If names, shapes or dtypes differ that are not optional.
  """
  path = os.fspath(path)
  saved = read(path)
  wanted = state.state()
  differing = differences(saved, wanted)
  row_tensors = row_tensors or {}
  entries = saved_rows(path)
  differing_rows = differences(entries, row_tensors)
  faults = {
    name: text
    for name, text in (differing | differing_rows).items()
    if is_optional is None or not is_optional(name)
  }
  if faults and not (entries or faults.keys() & differing):
    # Only the tables are missing; all else is of this model.
    raise MissingCheckpointError(_missing(tables_of(path)))
  if faults:
    raise CheckpointError(
      f"train_dir {os.path.dirname(path) or '.'} holds a checkpoint of another"
      f" model: {some(faults.values(), '; ')}"
    )
  values = {n: saved[n] for n in wanted if n not in differing}
  averages = _from_variables(saved, wanted, wanted.keys() - values)
  began = {n: saved["global_step"] for n in wanted if _BEGAN.match(n)}
  restored = began | values | averages
  loaded = [name for name in row_tensors if name not in differing_rows]
  row_averages = _from_variables(
    entries, row_tensors, row_tensors.keys() - set(loaded)
  )
  sources = {name: (name, entries[name]) for name in loaded} | {
    name: (_variable_of(name), entry) for name, entry in row_averages.items()
  }
  for name, (source, entry) in sources.items():
    tensor = row_tensors[name]
    for begin, end in row_files.blocks(tensor.shape, tensor.dtype):
      rows = read_rows(path, source, entry, begin, end)
      tensor.assign(begin, np.asarray(rows))
  # Last, as this sets the global step.
  state.load_state(restored)
  return Restored(
    path,
    int(saved["global_step"]),
    from_variables=tuple(sorted(averages.keys() | row_averages)),
    fresh=tuple(
      sorted((wanted.keys() - restored) | (row_tensors.keys() - sources))
    ),
    ignored=tuple(
      sorted((saved.keys() - values) | (entries.keys() - set(loaded)))
    ),
  )


def saved_rows(path: str) -> dict[str, row_files.Entry]:
  """Lists the tensors of a checkpoint that were saved in blocks of rows.

  Args:
    path: The path of the checkpoint.

  Returns:
    The shape and dtype of each such tensor, by name; an empty dict if there are
    none.

  Raises:
    UnreadableCheckpointError: If these files are incomplete or damaged.
  """
  prefix = tables_of(path)
  if not (os.path.exists(prefix + ".index") or row_files.data_files(prefix)):
    return {}
  with _naming_damage(prefix):
    if not is_complete(prefix):
      raise MissingCheckpointError(_missing(prefix))
    return row_files.shapes(prefix)


def _missing(path: str) -> str:
  return f"checkpoint {path}: files are missing"


def read_rows(
  path: str, name: str, entry: row_files.Entry, begin: int, end: int
) -> np.ndarray | tf.Tensor:
  """Reads some rows of a tensor that was saved in blocks of rows.

  Args:
    path: The path of the checkpoint.
    name: The name of the tensor, a key of `saved_rows`.
    entry: The shape and dtype of the tensor, its value in `saved_rows`.
    begin: The first row.
    end: The row after the last.

  Raises:
    UnreadableCheckpointError: If the files are missing or damaged.
  """
  with _naming_damage(tables_of(path)):
    return row_files.read(tables_of(path), name, entry, begin, end)


@contextlib.contextmanager
def _naming_damage(path: str) -> Iterator[None]:
  """Context that turns TensorFlow's errors into `UnreadableCheckpointError`s.

  Args:
    path: The path of the checkpoint that is read, for the error message.
  """
  try:
    yield
  except CheckpointError:
    raise
  except _READ_ERRORS as error:
    reason = " ".join(str(error).split())
    raise UnreadableCheckpointError(
      f"checkpoint {path} is damaged: {reason}"
    ) from error


def assign(
  what: str,
  variables: Mapping[str, tf.Variable],
  values: Mapping[str, np.ndarray],
) -> None:
  """Assigns values to all variables of a model, cast to the variables' dtypes.

  Args:
    what: Begins the error message, such as "the checkpoint is of another
      model".
    variables: The variables of the model, by name.
    values: A value for each variable, by name.

  Raises:
    CheckpointError: If a value is missing, unknown, or of another shape. No
      variable is changed then.
  """
  dtypes = {n: v.dtype.as_numpy_dtype for n, v in variables.items()}
  arrays = {n: np.asarray(v, dtypes.get(n)) for n, v in values.items()}
  check_same(what, arrays, variables)
  for name, variable in variables.items():
    variable.assign(arrays[name])


def check_same(what: str, saved: Values, wanted: Values) -> None:
  """Checks that two maps have the same names, with equal shapes and dtypes.

  Args:
    what: Begins the error message.
    saved: The tensors of a checkpoint, by name.
    wanted: The tensors of a model, by name.

  Raises:
    CheckpointError: If they differ.
  """
  if faults := differences(saved, wanted):
    raise CheckpointError(f"{what}: {some(faults.values(), '; ')}")


def differences(
  saved: Mapping[str, Shaped], wanted: Mapping[str, Shaped]
) -> dict[str, str]:
  """Describes the differences between a checkpoint and a model.

  Args:
    saved: The tensors of the checkpoint by name.
    wanted: The tensors of the model by name.

  Returns:
    A description by name, for every name that is missing in the checkpoint or
    in the model, or that has different shapes or dtypes. Sorted by name.
  """
  found = {}
  for name in sorted(saved.keys() | wanted):
    if name not in saved:
      found[name] = f"{name} is not in the checkpoint"
    elif name not in wanted:
      found[name] = f"{name} is not in the model"
    elif text := _difference(saved[name], wanted[name]):
      found[name] = f"{name} has {text}"
  return found


def _difference(saved: Shaped, wanted: Shaped) -> str | None:
  """Describes how shape or dtype of two tensors differ.

  Args:
    saved: The tensor in the checkpoint.
    wanted: The tensor in the model.

  Returns:
    The description; None if shapes and dtypes are equal.
  """
  for what, old, new in (
    ("shape", list(saved.shape), list(wanted.shape)),
    ("dtype", tf.as_dtype(saved.dtype).name, tf.as_dtype(wanted.dtype).name),
  ):
    if old != new:
      return f"{what} {old} in the checkpoint and {new} in the model"
  return None


def stored_name(
  path: str, names: Container[str], *, averaged: bool = True
) -> str:
  """Returns the name in a checkpoint of a variable or of its moving average.

  Args:
    path: The path of the variable.
    names: The names of the tensors in the checkpoint.
    averaged: Whether to prefer the moving average.

  Returns:
    `averages/<path>` if `averaged` and the checkpoint has it; otherwise
    `variables/<path>`.
  """
  average = f"averages/{path}"
  return average if averaged and average in names else f"variables/{path}"


def _variable_of(average: str) -> str:
  """Returns the name of the variable of the moving average `average`."""
  return average.replace("averages/", "variables/", 1)


def _from_variables(
  saved: Mapping[str, Shaped],
  wanted: Mapping[str, Shaped],
  missing: Iterable[str],
) -> dict[str, Any]:
  """Finds a first value for each moving average that the checkpoint lacks.

  The value is the saved value of the average's variable.

  Args:
    saved: The tensors of the checkpoint by name, or what describes them.
    wanted: The tensors of the model, by name.
    missing: The names of the model's tensors that the checkpoint lacks.

  Returns:
    The elements of `saved` to use, by the name of the average. An average is
    left out if its variable is not saved either, or has another shape or dtype.
  """
  found = {}
  for name in missing:
    variable = saved.get(_variable_of(name))
    if name.startswith("averages/") and variable is not None:
      if _difference(variable, wanted[name]) is None:
        found[name] = variable
  return found


def describe(restored: Restored) -> str:
  """Formats the result of `restore` as one line for the log."""
  line = f"restored {restored.path}"
  if restored.from_variables:
    names = some(restored.from_variables)
    line += f"; missing averages, which start at their variables: {names}"
  if restored.fresh:
    line += f"; initialized: {some(restored.fresh)}"
  if restored.ignored:
    line += f"; in the checkpoint, but not used: {some(restored.ignored)}"
  return line


def first_non_finite(values: Values) -> str | None:
  """Returns the name of the first variable that has a NaN or an infinity.

  Args:
    values: Tensors by name. Only names under `variables/` are checked.

  Returns:
    The name; None if all of these values are finite.
  """
  for name, value in values.items():
    if name.startswith("variables/") and tf.as_dtype(value.dtype).is_floating:
      if not np.isfinite(np.asarray(value)).all():
        return name
  return None


def some(items: Iterable[str], separator: str = ", ") -> str:
  """Joins the first four items, and adds how many more there are, if any."""
  items = list(items)
  more = f"{separator}and {len(items) - 4} more" if len(items) > 4 else ""
  return separator.join(items[:4]) + more


def write_finished(train_dir: str | os.PathLike[str], record: Finished) -> None:
  """Writes the record that a run has finished, as `finished.json`, atomically.

  Continuous evaluation ends when it finds this file.
  """
  train_dir = os.fspath(train_dir)
  os.makedirs(train_dir, exist_ok=True)
  if record.checkpoint is not None:
    # The name without its directory, which may be moved.
    record = record._replace(checkpoint=os.path.basename(record.checkpoint))
  text = json.dumps(record._asdict()) + "\n"
  _write_text(os.path.join(train_dir, FINISHED), text)


def _write_text(path: str, text: str) -> None:
  """Writes a text file, which is replaced as a whole if it exists."""
  with open(path + ".tmp", "w", encoding="utf-8") as file:
    file.write(text)
  os.replace(path + ".tmp", path)


def read_finished(train_dir: str | os.PathLike[str]) -> Finished | None:
  """Returns the record that a run has finished; None if there is no record.

  Args:
    train_dir: The train directory; need not exist.

  Raises:
    CheckpointError: If the file of the record is damaged.
  """
  path = os.path.join(os.fspath(train_dir), FINISHED)
  try:
    with open(path, encoding="utf-8") as file:
      record = Finished(**json.load(file))
  except FileNotFoundError:
    return None
  except (TypeError, ValueError) as error:
    raise CheckpointError(
      f"{path} is damaged: {error}; delete it to use the newest checkpoint"
    ) from error
  if record.checkpoint is None:
    return record
  return record._replace(
    checkpoint=os.path.join(os.fspath(train_dir), record.checkpoint)
  )


def remove_finished(train_dir: str | os.PathLike[str]) -> None:
  """Removes the record that a run has finished, if there is one.

  It is called when the training goes on.
  """
  with contextlib.suppress(FileNotFoundError):
    os.remove(os.path.join(os.fspath(train_dir), FINISHED))


def _key_of(name: str) -> str:
  """Converts the name of a tensor to its key in a checkpoint file."""
  escaped = name.replace(".", "..").replace("/", ".S")
  return f"state/{escaped}/{_VALUE}"


def _name_of(key: str) -> str | None:
  """Converts a key in a checkpoint file to the name of the saved tensor.

  Args:
    key: The key, as TensorFlow's checkpoint reader gives it.

  Returns:
    The name, such as `variables/conv1/kernel`; None if the key is not of the
    kind that `save` writes.
  """
  stored = _STORED_NAME.fullmatch(key)
  if stored is None:
    return None
  return _ESCAPED.sub(lambda m: "/" if m[1] == "S" else ".", stored[1])
