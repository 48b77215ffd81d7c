"""Exports Keras models whose tables do not fit into the memory.

A table is the large matrix of an embedding layer, whose rows live on the PS
tasks (parameter servers) only. A checkpoint has them in separate files. An
exported model has each table as *shards*: variables of consecutive rows. Their
values are copied from the files of the checkpoint to those of the model in
blocks of rows, so that no table is ever whole in this process.
"""

import os
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_replicas.replica import embeddings
from tf_replicas.runtime import keras_internals
from tf_replicas.runtime import resources
from tf_replicas.runtime import saved_models
from tf_replicas.session import checkpoints
from tf_replicas.session import evaluation
from tf_replicas.store import tables


class _Saved:
  """The variables of a checkpoint. Tables are not read into memory.

  Tables are the large matrices of embeddings, which a checkpoint has in
  separate files.

  Attributes:
    checkpoint: The path of the checkpoint.
    shapes: An object with the shape and dtype of each variable, by path.
    table_paths: The paths of the variables that are in separate files.
  """

  def __init__(self, checkpoint: str, *, averaged: bool):
    """Reads the variables, except those in separate files.

    Args:
      checkpoint: The path of the checkpoint.
      averaged: Whether the moving average of a variable, if there is one, takes
        the place of the variable.

    Raises:
      CheckpointError: If the checkpoint cannot be read.
    """
    self.checkpoint = checkpoint
    self._values = checkpoints.read(checkpoint)
    self._entries = checkpoints.saved_rows(checkpoint)
    tensors: dict[str, Any] = {**self._values, **self._entries}
    prefix = "variables/"
    paths = [n.removeprefix(prefix) for n in tensors if n.startswith(prefix)]
    self._names = {
      path: checkpoints.stored_name(path, tensors, averaged=averaged)
      for path in paths
    }
    self.shapes = {path: tensors[name] for path, name in self._names.items()}
    self.table_paths = {p for p, n in self._names.items() if n in self._entries}

  def read(self, path: str, begin: int, end: int) -> np.ndarray | tf.Tensor:
    """Reads the rows of a variable from `begin` to `end`, exclusive."""
    name = self._names[path]
    if name in self._values:
      return self._values[name][begin:end]
    entry = self._entries[name]
    return checkpoints.read_rows(self.checkpoint, name, entry, begin, end)

  def value(self, path: str) -> np.ndarray:
    """Returns the whole value of a variable that is not in separate files."""
    return self._values[self._names[path]]


class _ShardRows:
  """Reads one shard of a table from a checkpoint, in blocks of rows.

  A shard is a variable of the exported model with consecutive rows of the
  table, a large matrix.

  Attributes:
    shape: (rows, columns) of the shard.
    dtype: The dtype of the rows.
  """

  def __init__(
    self, saved: _Saved, shards: tables.Shards, begin: int, end: int
  ):
    """Stores which rows of the table the shard has: from `begin` to `end`."""
    self.shape = end - begin, shards.shape[1]
    self.dtype = shards.dtype
    self._saved = saved
    self._path = shards.path
    self._first = begin

  def read(self, begin: int, end: int) -> np.ndarray | tf.Tensor:
    """Returns rows of the shard from `begin` to `end`, exclusive."""
    first = self._first
    return self._saved.read(self._path, first + begin, first + end)


def export(
  model: keras.Model | Callable[[], keras.Model],
  train_dir: str | os.PathLike[str],
  path: str | os.PathLike[str],
  *,
  averaged: bool = False,
  max_shard_bytes: int = 1 << 30,
  input_signature: Any = None,
) -> str:
  """Exports the newest checkpoint of a training as a SavedModel.

  It is what `keras.Model.export` writes: a model for inference, with the
  function `serve`, which `tf.saved_model.load` loads without this library and
  without Keras. But the tables of embedding layers are copied from the
  checkpoint in blocks of 32 MiB, so they need not fit into the memory. In the
  SavedModel, each table is divided into variables of consecutive rows. Ragged
  and sparse inputs of the model stay so; Keras would make them dense.

  All weights are those of the checkpoint; those of `model` are not used, and
  stay as they are. Only a weight that is not trained and not in the checkpoint
  is exported with its value in `model`.

  Args:
    model: A built model, such as `history.model` of `fit`, or a part of one,
      such as one tower; or a function without arguments that builds it, such as
      the `model_fn` of `fit`. In another process, prefer the function: the
      tables of its model get no rows. A model that the caller builds outside of
      a training has all rows in memory.
    train_dir: The directory of the training.
    path: The directory of the SavedModel. It must be empty or not exist. The
      model appears there only when it is complete.
    averaged: Whether to export the moving average of each variable that has
      one, instead of the variable.
    max_shard_bytes: The largest size in bytes of a variable that has rows of a
      table. A row that is larger is a variable by itself.
    input_signature: As in `keras.Model.export`. It may have
      `tf.RaggedTensorSpec`s and `tf.SparseTensorSpec`s.

  Returns:
    The path of the checkpoint that was exported.

  Raises:
    CheckpointError: If there is no checkpoint, it is damaged, or it lacks a
      table or a trained weight of the model, or has it with another shape.
    FileExistsError: If `path` is a file, or a directory that is not empty.
    TypeError: If `model` is neither a Keras 3 model nor a function that builds
      one.
    ValueError: If `max_shard_bytes` is not positive, or the model is not built
      or cannot be exported by Keras.
  """
  is_int = isinstance(max_shard_bytes, int)
  if not is_int or isinstance(max_shard_bytes, bool) or max_shard_bytes < 1:
    raise ValueError(
      "`max_shard_bytes` must be a positive integer. Received:"
      f" {max_shard_bytes!r}."
    )
  checkpoint = evaluation.newest_checkpoint(train_dir)
  with saved_models.new_directory(os.fspath(path), "path") as directory:
    saved = _Saved(checkpoint, averaged=averaged)
    model = _built(model, saved.table_paths)
    found = {
      path: weight
      for path, weight in embeddings.table_weights(model).items()
      if path in saved.table_paths or tables.rows_of(weight) is not None
    }
    _check(saved, model, found)
    shards = {
      path: tables.Shards(
        path,
        tuple(saved.shapes[path].shape),
        tf.as_dtype(weight.dtype),
        max_shard_bytes,
      )
      for path, weight in found.items()
    }
    with (
      keras_internals.values_of(_values(saved, model, found)),
      embeddings.looked_up_in_shards(
        model, [(found[path], each) for path, each in shards.items()]
      ),
    ):
      _write(model, directory, input_signature)
    if shards:
      rows = {
        name: _ShardRows(saved, each, begin, end)
        for each in shards.values()
        for name, (begin, end) in zip(each.names, each.ranges, strict=True)
      }
      saved_models.fill(directory, rows)
  return checkpoint


def _built(
  model: keras.Model | Callable[[], keras.Model], table_paths: Collection[str]
) -> keras.Model:
  """Returns a built model; if it is built here, its tables have no rows.

  Args:
    model: A built model, or a function without arguments that builds it.
    table_paths: The paths of the tables (large matrices of embeddings), with
      which layers of Keras are recognized as tables.

  Raises:
    TypeError: If `model` is neither.
    ValueError: If the model is not built.
  """
  built = model
  if not isinstance(model, keras.Model) and callable(model):
    home = tables.Home(resources.new_namespace(), 1, lambda _: "")
    with tables.home(home), embeddings.replacing(None, table_paths):
      with keras_internals.names_from_the_start():
        built = model()
    home.is_open = False
  if not isinstance(built, keras.Model):
    raise TypeError(
      "`model` must be a model of Keras 3 (`keras.Model`), or a function"
      f" without arguments that returns one. Received: {built!r:.200}."
    )
  if not built.built:
    raise ValueError(
      "`model` must be built; give it a `keras.Input`, or call it once."
      f" Received: {built!r:.200}."
    )
  if built is not model:
    unique = {id(variable): variable for variable in built.variables}
    keras_internals.make_paths_distinct(list(unique.values()))
  return built


def _check(
  saved: _Saved, model: keras.Model, found: Mapping[str, keras.Variable]
) -> None:
  """Checks that a checkpoint has the variables of a model.

  Args:
    saved: The checkpoint.
    model: The model. Its weights that are not trained may be missing in the
      checkpoint.
    found: The weights of tables (large matrices of embeddings) by path.

  Raises:
    CheckpointError: If a variable is missing, or has another shape or dtype.
  """
  wanted: dict[str, Any] = {
    weight.path: weight
    for weight in _others(model, found)
    if weight.trainable or weight.path in saved.shapes
  }
  for path, weight in found.items():
    wanted[path] = tables.rows_of(weight) or weight
  checkpoints.check_same(
    f"{saved.checkpoint} is a checkpoint of another model",
    {path: s for path, s in saved.shapes.items() if path in wanted},
    wanted,
  )


def _others(
  model: keras.Model, found: Mapping[str, keras.Variable]
) -> list[keras.Variable]:
  """Returns the weights of a model that are not in `found`."""
  ids = {id(weight) for weight in found.values()}
  return [weight for weight in model.weights if id(weight) not in ids]


def _values(
  saved: _Saved, model: keras.Model, found: Mapping[str, keras.Variable]
) -> list[tuple[keras.Variable, tf.Variable]]:
  """Makes the variables that take the place of a model's own in the export.

  Args:
    saved: The checkpoint.
    model: The model.
    found: The weights of tables (large matrices of embeddings) by path.

  Returns:
    (weight of the model, variable) pairs. The variable has the value of the
    checkpoint; that of a table has no rows.
  """
  pairs = []
  for weight in found.values():
    empty = tf.zeros([0, weight.shape[1]], weight.dtype)
    pairs.append((weight, tf.Variable(empty, name=weight.path)))
  for weight in _others(model, found):
    if weight.path in saved.shapes:
      value = tf.convert_to_tensor(saved.value(weight.path))
      own = tf.Variable(value, trainable=weight.trainable, name=weight.path)
      pairs.append((weight, own))
  return pairs


def _write(model: keras.Model, directory: str, input_signature: Any) -> None:
  """Writes a SavedModel as `keras.Model.export` does.

  Keras 3.15 makes ragged and sparse inputs dense, so that a model that sums the
  rows of ids would count the padding.

  Args:
    model: The model.
    directory: The directory of the SavedModel.
    input_signature: The specs of the arguments of the model. None: those of its
      inputs.
  """
  if input_signature is None:
    input_signature = _composite_signature(model)
  if not any(map(_is_composite, keras.tree.flatten(input_signature))):
    model.export(directory, verbose=False, input_signature=input_signature)
    return
  serve = tf.function(
    model.__call__, input_signature=input_signature, autograph=False
  )
  serve.get_concrete_function()
  archive: Any = keras.export.ExportArchive()
  archive.track(model)
  archive.add_endpoint("serve", serve)
  archive.write_out(directory, verbose=False)


def _composite_signature(model: keras.Model) -> list[Any] | None:
  """Returns the specs of a model's arguments if some are ragged or sparse.

  Returns:
    One spec, or structure of specs, per argument. None if all inputs are dense,
    or the model does not tell its inputs.
  """
  inputs: Any = getattr(model, "inputs", None)
  if not inputs or not any(map(_is_composite, map(_spec, inputs))):
    return None
  if not isinstance(model, keras.Sequential):
    inputs = [model.input]  # One argument, which may be a dict.
  return keras.tree.map_structure(_spec, inputs)


def _is_composite(spec: Any) -> bool:
  return isinstance(spec, tf.RaggedTensorSpec | tf.SparseTensorSpec)


def _spec(tensor: Any) -> tf.TypeSpec:
  """Returns the spec of an input of a model, for batches of any size."""
  shape, dtype = [None, *tensor.shape[1:]], tensor.dtype
  if tensor.sparse:
    return tf.SparseTensorSpec(shape, dtype)
  if getattr(tensor, "ragged", False):  # Missing before Keras 3.10.
    return tf.RaggedTensorSpec(shape, dtype, tensor.ragged_rank)
  return tf.TensorSpec(shape, dtype, tensor.name)
