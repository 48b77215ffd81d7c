"""Embeddings whose tables stay on the PS tasks, for Keras and for custom code.

A table is a variable of which a replica looks up only the rows that its batch
needs (`store.tables`). PS tasks are parameter servers. For training, a driver
builds the model: it calls the user's `model_fn` or `replica_fn`. A table that
is made there is created on the PS tasks, or beside the other variables if there
are no PS tasks. Elsewhere, an `Embedding` works as `keras.layers.Embedding`
does, and a `Table` is an ordinary variable.
"""

import contextlib
import os
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_replicas.runtime import keras_internals
from tf_replicas.runtime import row_files
from tf_replicas.session import checkpoints
from tf_replicas.store import tables

# Whole numbers up to this one are exact in float32.
_EXACT_IN_FLOAT = 1 << 24
# `fit` makes tables of embeddings of at least so many bytes.
MIN_TABLE_BYTES = 1 << 26
_PREFIX = "variables/"


@keras.saving.register_keras_serializable(package="tf_replicas")
class Embedding(keras.layers.Embedding):
  """A `keras.layers.Embedding` whose rows stay on the PS tasks.

  The rows form a table. A replica fetches the rows of the ids in its batch, and
  sends gradients of these rows only. The optimizer updates only these rows.
  Under SGD without momentum and Adagrad, that equals the update of the whole
  table. Under optimizers that also change rows without a gradient, such as
  Adam, these rows stay as they are ("lazy" updates).

  The layer's weight has the shape (0, output_dim): it stands for the table.
  """

  def __init__(
    self,
    input_dim: int,
    output_dim: int,
    *args: Any,
    partition: str = "modulo",
    combiner: str | None = None,
    **kwargs: Any,
  ):
    """Makes the layer, without its table of rows.

    Args:
      input_dim: The number of rows.
      output_dim: The number of columns.
      *args: As in `keras.layers.Embedding`.
      partition: How the rows are divided among N PS tasks. `modulo` puts row r
        on PS task r modulo N, so that frequent ids that are neighbors are on
        different tasks; `range` puts consecutive rows on a task.
      combiner: `sum`, `mean` or `sqrtn` (the sum over the root of the number of
        ids) combines the rows of the ids along the last dimension; no ids yield
        zeros. The ids may then be a `tf.SparseTensor` of 2 dimensions. None:
        every id yields a row.
      **kwargs: As in `keras.layers.Embedding`.

    Raises:
      ValueError: If `partition` or `combiner` is not known; if there is a
        combiner and `mask_zero`; or, where a driver builds the model, if
        `weights` are given. `build` refuses other arguments that need
        the whole table.
    """
    _check_partition(partition)
    if tables.current_home() is not None and kwargs.get("weights") is not None:
      raise ValueError(
        "`weights` of `tf_replicas.Embedding` must be None where replicas build"
        " the model, since the parameter servers compute the first rows."
        " Received: an array."
      )
    super().__init__(input_dim, output_dim, *args, **kwargs)
    self.partition = partition
    self.combiner = combiner
    self._was_of_keras = False
    tables.check_combiner(combiner)
    if combiner is not None and self.mask_zero:
      raise ValueError(
        f"`mask_zero` must be False where rows are combined, in the layer"
        f" {self.name!r}. Received: True, with combiner={combiner!r}."
      )

  def build(self, input_shape: Any = None) -> None:
    """Creates the table of rows on the PS tasks.

    If no driver builds the model, creates the weight of
    `keras.layers.Embedding`.

    Raises:
      ValueError: If an argument of the layer needs the whole table: a
        regularizer, a constraint, `lora_rank` or quantization.
    """
    home = tables.current_home()
    if home is None or self.built:
      super().build(input_shape)
      return
    for name, value in (
      ("embeddings_regularizer", self.embeddings_regularizer),
      ("embeddings_constraint", self.embeddings_constraint),
      ("lora_rank", self.lora_rank),
      ("quantization", self.quantization_mode),
    ):
      if value:
        raise ValueError(
          f"`{name}` must be None in {self._kind}, as it needs the"
          f" whole table. Received: {value!r:.80}, in the layer {self.name!r}."
        )
    weight = self.add_weight(
      shape=(0, self.output_dim),
      initializer="zeros",
      name="embeddings",
      trainable=True,
    )
    keras_internals.set_embedding_weight(self, weight)
    tables.attach(
      weight,
      weight.path,
      (self.input_dim, self.output_dim),
      self.embeddings_initializer,
      self.partition,
      home,
    )
    self.supports_jit = False  # XLA cannot fetch rows from other tasks.
    self.built = True

  @property
  def _is_on_ps(self) -> bool:
    """Whether PS tasks have the rows, so that the layer's weight is empty."""
    weight = keras_internals.embedding_weight(self) if self.built else None
    return weight is not None and tables.rows_of(weight) is not None

  @property
  def _kind(self) -> str:
    """What the layer is, for error messages."""
    if self._was_of_keras:
      return "an embedding of at least `min_table_bytes`"
    return "`tf_replicas.Embedding`"

  def set_weights(self, weights: Any) -> None:
    """Sets all rows, as in `keras.layers.Layer`.

    Raises:
      ValueError: If PS tasks have the rows.
    """
    self._check_has_rows("`set_weights` must not be called")
    super().set_weights(weights)

  def load_own_variables(self, store: Any) -> None:
    """Loads all rows from a Keras file, as in `keras.layers.Layer`.

    Raises:
      ValueError: If PS tasks have the rows.
    """
    self._check_has_rows("no weights must be loaded from a file")
    super().load_own_variables(store)

  def _check_has_rows(self, rule: str) -> None:
    """Raises ValueError if PS tasks have the rows.

    Args:
      rule: The beginning of the error message, such as "`set_weights` must not
        be called".
    """
    if self._is_on_ps:
      raise ValueError(
        f"{rule} for {self._kind} where replicas build the model, since the"
        " parameter servers compute the first rows. Received: weights for the"
        f" layer {self.name!r}."
      )

  @property
  def embeddings(self) -> Any:
    """The weight with all rows.

    Raises:
      AttributeError: If PS tasks have the rows, or the layer is not built.
    """
    if self._is_on_ps:
      raise AttributeError(
        f"`embeddings` of the layer {self.name!r} must not be used where"
        " replicas build the model: the parameter servers have the rows. Call"
        " `tf_replicas.lookup(layer, ids)`; or, if another layer shares the"
        " weight, use `keras.layers.Embedding`, and `fit` with"
        " `min_table_bytes=None`."
      )
    return super().embeddings

  @property
  def table(self) -> Any:
    """The variable to pass to `tables.gather`.

    If PS tasks have the rows, it is the empty weight that stands for the table;
    otherwise it is the weight with all rows.
    """
    if self._is_on_ps:
      return keras_internals.embedding_weight(self)
    return self.embeddings

  def call(self, inputs: Any) -> Any:
    """Looks up the rows for ids.

    Args:
      inputs: The ids, a dense or ragged tensor of integers, of any shape;
        with a combiner, also a sparse tensor of 2 dimensions.

    Returns:
      The rows, of shape [*inputs.shape, output_dim]; with a combiner,
      [*inputs.shape[:-1], output_dim].
    """
    weight = keras_internals.embedding_weight(self)
    if tables.has_rows(weight) and self.combiner is None:
      return super().call(inputs)
    # As in Keras, where a model without `dtype` for its input yields floats.
    is_float = tf.as_dtype(inputs.dtype).is_floating
    if is_float and self.input_dim <= _EXACT_IN_FLOAT:
      inputs = tf.cast(inputs, tf.int32)
    found = tables.gather(self.table, inputs, self.combiner)
    return tf.cast(found, self.compute_dtype)

  def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
    """Returns the shape of the result of `call` for ids of a given shape."""
    if self.combiner is not None:
      input_shape = input_shape[:-1]
    return (*input_shape, self.output_dim)

  def compute_output_spec(self, inputs: Any) -> Any:
    """Returns a symbolic tensor of the shape and dtype that `call` returns."""
    if self.combiner is None:
      return super().compute_output_spec(inputs)
    shape = self.compute_output_shape(inputs.shape)
    return keras.KerasTensor(shape, dtype=self.compute_dtype)

  def get_config(self) -> dict[str, Any]:
    """Returns the arguments with which Keras can make the layer again."""
    own = {"partition": self.partition, "combiner": self.combiner}
    return {**super().get_config(), **own}


@contextlib.contextmanager
def replacing(
  min_bytes: int | None, paths: Collection[str] = ()
) -> Iterator[None]:
  """Context in which large embedding layers of Keras become `Embedding`s.

  A `keras.layers.Embedding` that is made within the context changes its class
  when it is built, if its weight would have at least `min_bytes` bytes or has
  one of the given paths, and if a driver builds the model. Its rows then stay
  on the PS tasks. A layer of a subclass cannot be changed so: if it is large,
  its `build` raises ValueError.

  Args:
    min_bytes: The number of bytes; None: the size does not matter.
    paths: Paths of weights.
  """
  of_keras: Any = keras.layers.Embedding
  build = of_keras.build

  def build_or_replace(layer: Any, input_shape: Any = None) -> None:
    size = tf.as_dtype(layer.variable_dtype).size
    num_bytes = layer.input_dim * layer.output_dim * size
    is_large = min_bytes is not None and num_bytes >= min_bytes
    is_of_keras = type(layer) is of_keras
    is_named = is_of_keras and f"{layer.path}/embeddings" in paths
    is_left = layer.built or tables.current_home() is None
    if is_left or not (is_large or is_named):
      build(layer, input_shape)
      return
    if not is_of_keras:
      raise ValueError(
        f"the layer {layer.name!r} must be a `tf_replicas.Embedding` or a"
        " `keras.layers.Embedding`, and not of a class derived from it, because"
        " its weight has at least `min_table_bytes`; with"
        " `min_table_bytes=None`, each replica reads the whole weight at every"
        f" step. Received: {type(layer).__name__}, of {num_bytes} bytes."
      )
    _replace(layer)
    Embedding.build(layer, input_shape)

  if min_bytes is None and not paths:
    yield
    return
  of_keras.build = build_or_replace
  try:
    yield
  finally:
    of_keras.build = build


def _replace(layer: Any) -> None:
  """Makes an embedding layer of Keras an `Embedding`."""
  object.__setattr__(layer, "__class__", Embedding)
  layer.partition, layer.combiner = tables.PARTITIONS[0], None
  layer._was_of_keras = True


def _restore(layer: Any) -> None:
  """Makes a layer that `_replace` has changed an embedding of Keras again."""
  object.__setattr__(layer, "__class__", keras.layers.Embedding)


def table_weights(model: keras.Model) -> dict[str, keras.Variable]:
  """Finds the weights of a built model that may be tables, by their paths.

  A table is a large matrix, whose rows live on the PS tasks while it is
  trained. Where the model was not built for training, its weight has all rows.

  Args:
    model: The model.

  Returns:
    The weights of the embedding layers of Keras and of this library. The path
    is that of the table in checkpoints.
  """
  found = {}
  for layer in _layers(model):
    weight = keras_internals.embedding_weight(layer)
    rows = tables.rows_of(weight)
    found[weight.path if rows is None else rows.path] = weight
  return found


def _layers(model: keras.Model) -> list[Any]:
  """Returns the built embedding layers of a model that may have tables."""
  return [
    layer
    for layer in keras_internals.layers_of(model)
    if type(layer) is keras.layers.Embedding or isinstance(layer, Embedding)
    if layer.built
  ]


@contextlib.contextmanager
def looked_up_in_shards(
  model: keras.Model, pairs: Iterable[tuple[keras.Variable, tables.Shards]]
) -> Iterator[None]:
  """Context in which a model looks up rows of its tables in shards.

  A table is the large matrix of an embedding layer. Its shards are the
  variables that an exported model has for it.

  Args:
    model: A built model.
    pairs: (weight of a layer, shards of its table) pairs. `table_weights` has
      the weights.
  """
  pairs = list(pairs)
  ids = {id(weight) for weight, _ in pairs}
  of_keras = [
    layer
    for layer in _layers(model)
    if not isinstance(layer, Embedding)
    if id(keras_internals.embedding_weight(layer)) in ids
  ]
  for layer in of_keras:
    _replace(layer)
  try:
    with tables.looked_up_in_shards(pairs):
      yield
  finally:
    for layer in of_keras:
      _restore(layer)


class Table(tf.Module):
  """A table of rows on the PS tasks, for custom code.

  A replica fetches only the rows that its batch needs, by `lookup`. A table is
  made in `replica_fn`. It must be an attribute of the module that is given to
  `module_replica`; or its `variable` must be one of the `variables` of a
  `Replica`.

  Attributes:
    variable: Stands for the table in `Replica.variables`.
  """

  def __init__(
    self,
    num_rows: int,
    num_columns: int,
    *,
    name: str,
    initializer: Any = "uniform",
    dtype: str = "float32",
    partition: str = "modulo",
  ):
    """Makes the table, or an ordinary variable if no driver builds the model.

    Args:
      num_rows: The number of rows.
      num_columns: The number of columns.
      name: The path of the table, which is also its name in checkpoints.
      initializer: An initializer of Keras, or its name, that can draw rows one
        by one.
      dtype: The dtype of the rows.
      partition: How the rows are divided among N PS tasks. `modulo` puts row r
        on PS task r modulo N; `range` puts consecutive rows on a task.

    Raises:
      ValueError: If an argument is invalid.
    """
    for what, value in (("num_rows", num_rows), ("num_columns", num_columns)):
      if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
          f"`{what}` must be a positive integer. Received: {value!r}."
        )
    _check_partition(partition)
    super().__init__()
    initializer = keras.initializers.get(initializer)
    home = tables.current_home()
    if home is None:
      first = initializer((num_rows, num_columns), dtype)
      self.variable = tf.Variable(first, name=name)
      return
    first = tf.zeros([0, num_columns], dtype)
    self.variable = tf.Variable(first, name=name)
    shape = num_rows, num_columns
    tables.attach(self.variable, name, shape, initializer, partition, home)


def lookup(
  table: Table | Embedding | tf.Variable,
  ids: tf.Tensor | tf.RaggedTensor | tf.SparseTensor,
  combiner: str | None = None,
  weights: tf.Tensor | tf.RaggedTensor | tf.SparseTensor | None = None,
) -> tf.Tensor | tf.RaggedTensor:
  """Looks up rows of a table on the PS tasks, in a loss function.

  A call fetches each row once, from all PS tasks at the same time. Calls that
  do not depend on each other run at the same time, too.

  Args:
    table: A `Table`, its `variable`, or an embedding layer that is built.
    ids: Indices of rows: a tensor or ragged tensor of integers, of any shape;
      with a combiner, also a sparse tensor of 2 dimensions.
    combiner: `sum`, `mean` or `sqrtn` (the sum over the root of the number of
      ids): combines the rows of the ids along the last dimension. No ids yield
      zeros. None: every id yields a row.
    weights: With a combiner, the weight of each id: numbers, with the same
      structure and shape as `ids`. If rows r with weights w are combined, then
      `sum` is the sum of w r, `mean` divides it by the sum of w, and `sqrtn` by
      the root of the sum of w^2, as `tf.nn.embedding_lookup_sparse` does. None:
      all weights are 1.

  Returns:
    The rows, of shape [*ids.shape, columns]; with a combiner, [*ids.shape[:-1],
    columns].

  Raises:
    TypeError: If `ids` are not integers, or sparse without a combiner.
    ValueError: If `combiner` is not known, `ids` have no dimension for it, or
      `weights` do not go with `ids` and `combiner`.
    RuntimeError: If the rows were on parameter servers that have ended.
    tf.errors.InvalidArgumentError: At run time, if an id is out of range.
  """
  if isinstance(table, Table):
    table = table.variable
  elif isinstance(table, Embedding):
    table = table.table
  elif isinstance(table, keras.layers.Embedding):
    table = table.embeddings
  if not isinstance(ids, tf.RaggedTensor | tf.SparseTensor):
    ids = tf.convert_to_tensor(ids)
  if weights is not None and not isinstance(
    weights, tf.RaggedTensor | tf.SparseTensor
  ):
    weights = tf.convert_to_tensor(weights)
  return tables.gather(table, ids, combiner, weights)


def load_tables(
  model: keras.Model,
  train_dir: str | os.PathLike[str] | None = None,
  *,
  averaged: bool = False,
) -> None:
  """Loads all rows of a model's embedding tables into this process.

  During training, the rows of an `Embedding` are on the PS tasks. After this
  function, the layers have all rows and work as `keras.layers.Embedding` does,
  so that the model can be evaluated or exported. The rows must fit into the
  memory. Layers that `fit` has turned into `Embedding`s are Keras' own again.
  Other weights of the model do not change.

  A callback of `fit` may call this function. The model then has the rows until
  the callbacks of the epoch have been called, or until the next update. What
  the callback assigns to the rows is not sent to the PS tasks.

  Args:
    model: A built model: one that was trained, or one that was built anew.
    train_dir: The directory of the training, whose newest checkpoint is read.
      None reads the rows from the PS tasks, while the training still runs or if
      it ran in this process.
    averaged: Whether to load the moving average of each table that has one, in
      place of its rows. After `fit` with an optimizer with `use_ema=True`, it
      must be True, since the other weights are then averages too.

  Raises:
    CheckpointError: If there is no checkpoint, or a table is not in it; or if
      its tables have other names than those of the model.
    RuntimeError: If `train_dir` is None and the parameter servers have ended.
    ValueError: If `averaged` is False, and `fit` has put averages into the
      other weights of the model.
  """
  found = filter(None, map(tables.rows_of, model.variables))
  if not averaged and any(rows.home.reads_averages for rows in found):
    raise ValueError(
      "`averaged` must be True: the other weights of the model are moving"
      " averages since the end of `fit`, as its optimizer has `use_ema=True`."
      " Received: False."
    )
  checkpoint = None
  if train_dir is not None:
    checkpoint = checkpoints.latest(train_dir)
    if checkpoint is None:
      raise checkpoints.MissingCheckpointError(
        f"`train_dir` must hold a checkpoint. Received: {train_dir}."
      )
  saved = {} if checkpoint is None else checkpoints.saved_rows(checkpoint)
  _check_names(model, saved, checkpoint)
  for variable in model.variables:
    rows = tables.rows_of(variable)
    if rows is None and _PREFIX + variable.path not in saved:
      continue
    value = _whole(variable, rows, checkpoint, saved, averaged)
    if rows is None:
      variable.assign(value)
    else:
      keras_internals.replace_value(variable, value)
      tables.detach(variable)
  for layer in keras_internals.layers_of(model):
    if isinstance(layer, Embedding) and layer._was_of_keras:
      _restore(layer)
  # Keras keeps these once traced, with lookups on the parameter servers.
  model.test_function = model.predict_function = None


def _check_names(
  model: keras.Model,
  saved: Mapping[str, row_files.Entry],
  checkpoint: str | None,
) -> None:
  """Checks that a model has the tables of a checkpoint under the same names.

  Args:
    model: The model.
    saved: The shapes and dtypes of the tables in the checkpoint, by name.
    checkpoint: The path of the checkpoint, for the error message.

  Raises:
    CheckpointError: If no weight of the model, or not each `Embedding`, has the
      name of a table in the checkpoint, which has tables.
  """
  names = {n.removeprefix(_PREFIX) for n in saved if n.startswith(_PREFIX)}
  if not names:
    return
  others = [
    variable.path
    for variable in model.variables
    if tables.rows_of(variable) is None and variable.path not in names
  ]
  missing = [
    layer.table.path
    for layer in keras_internals.layers_of(model)
    if isinstance(layer, Embedding) and layer.table.path in others
  ]
  if missing or len(others) == len(model.variables):
    raise checkpoints.CheckpointError(
      f"the checkpoint {checkpoint} must have the tables of the model under"
      " their names, the paths of the layers' weights. Received:"
      f" {checkpoints.some(sorted(names))}, and a model with"
      f" {checkpoints.some(missing or others)}."
    )


def unloader(model: keras.Model) -> Callable[[], None]:
  """Returns a function that undoes later calls of `load_tables`.

  The function has no arguments. It makes the model look up rows on the PS tasks
  again, and frees the memory of the rows. It does nothing if `load_tables` was
  not called since.

  Args:
    model: A built model, whose tables are on the PS tasks.
  """
  found = [
    (variable, rows)
    for variable in model.variables
    if (rows := tables.rows_of(variable)) is not None
  ]
  of_keras = [
    layer
    for layer in keras_internals.layers_of(model)
    if isinstance(layer, Embedding) and layer._was_of_keras
  ]

  def unload() -> None:
    loaded = [pair for pair in found if tables.rows_of(pair[0]) is None]
    if not loaded:
      return
    for variable, rows in loaded:
      none = np.empty([0, rows.shape[1]], rows.dtype.as_numpy_dtype)
      keras_internals.replace_value(variable, none)
      tables.attach_rows(variable, rows)
    for layer in of_keras:
      _replace(layer)
    # Keras traces these again, with lookups on the PS tasks.
    model.test_function = model.predict_function = None

  return unload


def _whole(
  variable: keras.Variable,
  rows: tables.Rows | None,
  checkpoint: str | None,
  saved: dict[str, row_files.Entry],
  averaged: bool,
) -> np.ndarray:
  """Reads all rows of an embedding table, block by block.

  They are read from a checkpoint, or from the PS tasks.

  Args:
    variable: The weight of the layer.
    rows: The table that the weight stands for; None if the weight has all rows.
    checkpoint: The path of the checkpoint. None reads from the PS tasks; then
      `rows` must be given.
    saved: The shapes and dtypes of the tables in the checkpoint, by name.
    averaged: Whether to read the moving average of the table, if it has one.

  Returns:
    An array of shape (number of rows, number of columns).

  Raises:
    CheckpointError: If the checkpoint has no such table, or one of another
      shape.
    RuntimeError: If `checkpoint` is None and the PS tasks have ended.
  """
  path = variable.path if rows is None else rows.path
  shape = tuple(variable.shape) if rows is None else rows.shape
  tensor = None
  if checkpoint is None and rows is not None:
    if not rows.home.is_open:
      raise RuntimeError(
        f"`train_dir` must be given: the table {path!r} was on parameter"
        " servers, which have ended. Received: None."
      )
    parts = rows.averages if averaged else None
    tensor = tables.RowTensor(rows, parts or rows.parts)
  name = checkpoints.stored_name(path, saved, averaged=averaged)
  if checkpoint is not None:
    entry = saved.get(name)
    if entry is None or entry.shape != shape:
      found = "none" if entry is None else f"one of shape {entry.shape}"
      raise checkpoints.CheckpointError(
        f"the checkpoint {checkpoint} must have the table {path!r} of shape"
        f" {shape}. Received: {found}."
      )
  dtype = tf.as_dtype(variable.dtype)
  whole = np.empty(shape, dtype.as_numpy_dtype)
  for begin, end in row_files.blocks(shape, dtype):
    if tensor is not None:
      whole[begin:end] = tensor.read(begin, end)
    elif checkpoint is not None:
      found = checkpoints.read_rows(checkpoint, name, saved[name], begin, end)
      whole[begin:end] = np.asarray(found)
  return whole


def _check_partition(partition: str) -> None:
  if partition not in tables.PARTITIONS:
    raise ValueError(
      f"`partition` must be one of {', '.join(tables.PARTITIONS)}. Received:"
      f" {partition!r}."
    )
