"""Training data of `fit`: global batches, cut into one part per contribution.

A *global batch* has the examples of one update. It is cut into as many *parts*
as the update has contributions. All parts of all epochs are one endless stream;
of M replicas, replica r takes the parts r, r + M, r + 2M and so on. So N
replicas whose N contributions make an update train on the same examples as one
process with the same global batches.
"""

import dataclasses
import math
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import cast

import keras
import numpy as np
import tensorflow as tf

from tf_replicas.fitting import arguments
from tf_replicas.replica import model_parallel
from tf_replicas.runtime import datasets

InputFn = Callable[[tf.distribute.InputContext], tf.data.Dataset]
Source = tf.data.Dataset | InputFn | object


@dataclasses.dataclass(frozen=True)
class TrainingData:
  """The data of a training.

  Attributes:
    steps_per_epoch: Batches in an epoch.
    part_fn: Maps (num_shards, shard_index, first_update, updates_per_batch) to
      an endless data set of (data,) or (data, weights); see `CompiledReplica`.
      `data` is the tuple that `train_step` takes. Each batch is repeated for
      the updates that are made of it.
  """

  steps_per_epoch: int
  part_fn: Callable[
    [int, int | tf.Tensor, int | tf.Tensor, int], tf.data.Dataset
  ]

  @property
  def spec(self) -> tuple:
    """`data` as nested `tf.TensorSpec`s."""
    return cast(tuple, self.part_fn(1, 0, 0, 1).element_spec)[0]


def make(
  x: Source,
  y: object = None,
  *,
  sample_weight: object = None,
  class_weight: Mapping[int, float] | None = None,
  batch_size: int | None = None,
  steps_per_epoch: int | None = None,
  shuffle: bool = True,
  seed: int = 0,
  num_contributions: int = 1,
) -> TrainingData:
  """Makes the training data of what the user gave to `fit`.

  Args:
    x: Arrays in any nested structure, with the examples along axis 0; or a
      `tf.data.Dataset` of global batches (x,), (x, y) or (x, y, weights); or a
      function of `tf.distribute.InputContext` that returns a data set of the
      parts of one replica.
    y: Labels, if `x` are arrays.
    sample_weight: Weights of the examples, if `x` are arrays.
    class_weight: Maps class numbers to weights of their examples.
    batch_size: Examples of a global batch, if `x` are arrays; default 32.
    steps_per_epoch: Updates in an epoch; default: as many as `x` has batches.
      The next epoch goes on with the next batches. After the last batch, the
      first follows.
    shuffle: Whether to shuffle arrays anew in every pass over them.
    seed: Of the shuffling; the same in all tasks.
    num_contributions: The contributions of one update.

  Returns:
    The training data.

  Raises:
    TypeError: If `x` is of another kind.
    ValueError: If an argument is out of range, or the number of updates in an
      epoch is not known.
  """
  arguments.check_data(
    batch_size=batch_size,
    steps_per_epoch=steps_per_epoch,
    shuffle=shuffle,
    seed=seed,
    class_weight=class_weight,
  )
  is_function = callable(x) and not isinstance(x, tf.data.Dataset)
  if isinstance(x, tf.data.Dataset) or is_function:
    for name, value in (
      ("y", y),
      ("sample_weight", sample_weight),
      ("batch_size", batch_size),
    ):
      if value is not None:
        raise ValueError(
          f"`{name}` must not be given if `x` yields batches, which have"
          f" all of it. Received: {arguments.short(value)}."
        )
  if is_function:
    return _from_function(x, class_weight, steps_per_epoch, num_contributions)
  if isinstance(x, tf.data.Dataset):
    return _from_dataset(x, class_weight, steps_per_epoch, num_contributions)
  arrays = _arrays(x, y, sample_weight)
  with tf.device("/cpu:0"):
    arrays = tf.nest.map_structure(tf.convert_to_tensor, arrays)
  specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, arrays)
  _check_specs(specs, class_weight)
  return _from_arrays(
    arrays,
    class_weight,
    batch_size or 32,
    steps_per_epoch,
    shuffle,
    seed,
    num_contributions,
  )


def split_validation(
  x: Source, y: object, sample_weight: object, share: float
) -> tuple[tuple, tuple]:
  """Takes the last examples of arrays for validation, as Keras does.

  Args:
    x: See `make`; arrays only.
    y: See `make`.
    sample_weight: See `make`.
    share: The share of the examples that is taken.

  Returns:
    (x, y, sample_weight) to train with, and the same to validate with. What is
    None stays None.

  Raises:
    TypeError: If `x` are not arrays.
    ValueError: If either side would have no example.
  """
  if callable(x) or isinstance(x, tf.data.Dataset):
    raise TypeError(
      "`validation_split` needs arrays. With a data set or a function, give"
      f" `validation_data`. Received: {share}, and `x` of type"
      f" {type(x).__name__}."
    )
  arrays = _arrays(x, y, sample_weight)
  length = len(tf.nest.flatten(arrays)[0])
  end = math.floor(length * (1 - share))
  if not 0 < end < length:
    raise ValueError(
      "`validation_split` must leave examples to train and to validate with."
      f" Received: {share} of {length} examples."
    )

  def cut(begin: int, end: int) -> tuple:
    found = tf.nest.map_structure(lambda a: a[begin:end], arrays)
    return (*found, None, None)[:3]

  return cut(0, end), cut(end, length)


def check_can_connect(dataset: object, name: str) -> None:
  """Checks data that are made before this process joins a cluster.

  Args:
    dataset: A data set, or anything else, which is not checked.
    name: The argument of `fit` that it is.

  Raises:
    ValueError: If it uses tables or variables, which are lost then.
  """
  if not isinstance(dataset, tf.data.Dataset):
    return
  if devices := datasets.resources_of(dataset):
    raise ValueError(
      f"`{name}` must not use layers, tables or variables that were made before"
      " this process joined the cluster: call them in `model_fn`, or pass a"
      f" function that makes them and the data set. Received: a data set that"
      f" uses {len(devices)} of them."
    )


def validation(given: object) -> object:
  """Validation data as Keras takes them, in a process that joined a cluster.

  Args:
    given: Of `fit`.

  Returns:
    The same. A function was called, and a data set placed on this process's
    new devices: Keras makes its iterator where the data set is.
  """
  if isinstance(given, tf.data.Dataset):
    return given.take(-1)
  return given() if callable(given) else given


def _arrays(x: object, y: object, sample_weight: object) -> tuple:
  """(x,), (x, y) or (x, y, weights) as nested arrays of one length."""
  given = [x]
  if sample_weight is not None and y is None:
    raise ValueError("`sample_weight` needs `y`. Received: no `y`.")
  given += [part for part in (y, sample_weight) if part is not None]

  def array(value: object) -> np.ndarray:
    if not hasattr(value, "__array__"):  # As those of NumPy and pandas have.
      raise TypeError(
        "`x` and `y` must be arrays, a `tf.data.Dataset`, or a function of"
        f" `tf.distribute.InputContext`. Received: a {type(value).__name__}."
      )
    value = np.asarray(value)
    if value.dtype == np.float64:
      value = value.astype(np.float32)  # As Keras does.
    if value.dtype == object or not value.ndim:
      raise ValueError(
        "`x` and `y` must be arrays of numbers or strings with the examples"
        f" along axis 0. Received: shape {value.shape}, dtype {value.dtype}."
      )
    return value

  arrays = tf.nest.map_structure(array, tuple(given))
  lengths = {len(a) for a in tf.nest.flatten(arrays)}
  if len(lengths) != 1:
    raise ValueError(
      "`x`, `y` and `sample_weight` must have equally many examples. Received:"
      f" {sorted(lengths)}."
    )
  if not lengths.pop():
    raise ValueError("`x` must have examples. Received: arrays of length 0.")
  return arrays


def _from_arrays(
  arrays: tuple,
  class_weight: Mapping[int, float] | None,
  batch_size: int,
  steps_per_epoch: int | None,
  shuffle: bool,
  seed: int,
  num_contributions: int,
) -> TrainingData:
  length = int(tf.nest.flatten(arrays)[0].shape[0])
  batches = math.ceil(length / batch_size)
  is_even = batch_size % num_contributions == 0 and not length % batch_size

  def part_fn(num_shards, index, first_update, updates_per_batch):
    first = tf.cast(first_update, tf.int64) * num_contributions
    index, num_shards = tf.cast(index, tf.int64), tf.cast(num_shards, tf.int64)
    # A pass over the arrays; `steps_per_epoch` may be another number.
    per_pass = batches * num_contributions * updates_per_batch
    per_pass = tf.constant(per_pass, tf.int64)

    def parts_of_pass(number_of_pass):
      order = tf.range(length, dtype=tf.int64)
      if shuffle:
        order = tf.random.experimental.stateless_shuffle(
          order, seed=tf.stack([tf.constant(seed, tf.int64), number_of_pass])
        )
      begin = tf.maximum(number_of_pass * per_pass, first)
      begin += (index - begin) % num_shards
      numbers = tf.data.Dataset.range(
        begin, (number_of_pass + 1) * per_pass, num_shards
      )
      return numbers.map(lambda number: part(order, number % per_pass))

    def part(order, number):
      update, piece = number // num_contributions, number % num_contributions
      begin = update // updates_per_batch * batch_size
      chosen = order[begin : begin + batch_size]
      begin, end, weight = _piece(
        tf.size(chosen, tf.int64), piece, num_contributions
      )
      chosen = chosen[begin:end]
      if is_even:
        chosen = tf.ensure_shape(chosen, [batch_size // num_contributions])
      data = tf.nest.map_structure(lambda a: tf.gather(a, chosen), arrays)
      return _with_weights(_weighted(data, class_weight), weight, is_even)

    passes = tf.data.Dataset.range(first // per_pass, tf.int64.max)
    return passes.flat_map(parts_of_pass).prefetch(tf.data.AUTOTUNE)

  return TrainingData(steps_per_epoch or batches, part_fn)


def _from_dataset(
  dataset: tf.data.Dataset,
  class_weight: Mapping[int, float] | None,
  steps_per_epoch: int | None,
  num_contributions: int,
) -> TrainingData:
  _check_specs(_as_tuple(dataset.element_spec), class_weight)
  steps = steps_per_epoch or _known_length(dataset)
  dataset = dataset.map(lambda *data: _weighted(data, class_weight))
  sizes = {s.shape[0] for s in tf.nest.flatten(dataset.element_spec)}
  size = sizes.pop() if len(sizes) == 1 else None
  is_even = size is not None and size % num_contributions == 0
  is_even |= num_contributions == 1

  def part(data, piece):
    size = _size(tf.nest.flatten(data)[0])
    begin, end, weight = _piece(size, piece, num_contributions)
    data = tf.nest.map_structure(lambda a: a[begin:end], data)
    return _with_weights(data, weight, is_even)

  def part_fn(num_shards, index, first_update, updates_per_batch):
    first = tf.cast(first_update, tf.int64)
    index = tf.cast(index, tf.int64)
    batches = _repeated(dataset.repeat(), updates_per_batch)
    if num_shards == num_contributions:
      parts = batches.skip(first).map(lambda *data: part(data, index))
    else:
      pieces = tf.data.Dataset.range(num_contributions)
      parts = batches.skip(first).flat_map(
        lambda *data: pieces.map(lambda piece: part(data, piece))
      )
      parts = parts.shard(num_shards, index)
    return parts.prefetch(tf.data.AUTOTUNE)

  return TrainingData(steps, part_fn)


def _size(tensor: tf.Tensor) -> tf.Tensor:
  """The examples of a batch, an int64 scalar; fails if there are none."""
  size = tf.shape(tensor, tf.int64)[0]
  rule = tf.debugging.assert_positive(
    size, "`x` must yield batches of at least one example. Received: none."
  )
  with tf.control_dependencies([rule]):
    return tf.identity(size)


def _from_function(
  function: InputFn,
  class_weight: Mapping[int, float] | None,
  steps_per_epoch: int | None,
  num_contributions: int,
) -> TrainingData:
  if steps_per_epoch is None:
    raise ValueError(
      "`steps_per_epoch` must be given if `x` is a function: nothing else says"
      " how many updates an epoch has. Received: None."
    )
  arguments.check_function("x", function, 1)

  def part_fn(num_shards, index, first_update, updates_per_batch):
    context = tf.distribute.InputContext(num_shards, index, num_contributions)
    dataset = function(context)
    if not isinstance(dataset, tf.data.Dataset):
      raise TypeError(
        "the function `x` must return a `tf.data.Dataset`. Received: a"
        f" {type(dataset).__name__}."
      )
    _check_specs(_as_tuple(dataset.element_spec), class_weight)
    first = tf.cast(first_update, tf.int64) * num_contributions // num_shards
    dataset = _repeated(dataset.repeat(), updates_per_batch).skip(first)
    return dataset.map(lambda *data: (_weighted(data, class_weight),))

  return TrainingData(steps_per_epoch, part_fn)


def _repeated(dataset: tf.data.Dataset, count: int) -> tf.data.Dataset:
  """`dataset` with each element `count` times."""
  if count == 1:
    return dataset

  def several(*data):
    return tf.data.Dataset.from_tensors(data).repeat(count)

  return dataset.flat_map(several)


def _known_length(dataset: tf.data.Dataset) -> int:
  length = int(dataset.cardinality())
  if length == 0:
    raise ValueError("`x` must have batches. Received: an empty data set.")
  if length < 0:
    is_endless = length == tf.data.INFINITE_CARDINALITY
    what = "endless" if is_endless else "of unknown length"
    raise ValueError(
      "`steps_per_epoch` must be given if `x` is a data set of unknown length."
      f" Received: None, and a data set that is {what}."
    )
  return length


def pieces(batch: tuple, count: int) -> Sequence[model_parallel.Batch]:
  """Cuts a part of a batch into one piece per tower.

  Args:
    batch: (data,) or (data, weights), as `TrainingData.part_fn` yields it.
    count: The number of pieces.

  Returns:
    As many of the same kind. The mean of their gradients, by their weights, is
    that of the part.
  """
  data, *weights = batch
  first = tf.nest.flatten(data)[0]
  if not weights and first.shape[0] is not None and not first.shape[0] % count:
    return model_parallel.parts(batch, count, "devices")
  size = tf.shape(first, tf.int64)[0]
  found = []
  for number in range(count):
    begin, end, weight = _piece(size, tf.constant(number, tf.int64), count)
    piece = tf.nest.map_structure(lambda a, b=begin, e=end: a[b:e], data)
    own = weights[0][begin:end] if weights else tf.ones([end - begin])
    found.append((piece, own * weight))
  return found


def _piece(
  size: tf.Tensor, piece: tf.Tensor, count: int
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
  """Which examples of a batch a piece has: begin, end, weight.

  The weight is the piece's share of the batch times the number of pieces. An
  empty piece gets one example, with weight 0.
  """
  begin, end = size * piece // count, size * (piece + 1) // count
  share = tf.cast(end - begin, tf.float32) / tf.cast(size, tf.float32)
  begin = tf.minimum(begin, size - 1)
  return begin, tf.maximum(end, begin + 1), share * count


def _as_tuple(spec: object) -> tuple:
  """What `Dataset.map` would give a function of `*data`."""
  return spec if isinstance(spec, tuple) else (spec,)


def _check_specs(
  specs: tuple, class_weight: Mapping[int, float] | None, name: str = "x"
) -> None:
  """Checks what `x` yields, as nested `tf.TypeSpec`s.

  Raises:
    TypeError: If it yields other things than dense or ragged tensors.
    ValueError: If it yields no batches of examples, or labels or weights of
      other kinds than are needed.
  """
  if len(specs) > 3:
    raise ValueError(
      f"`{name}` must yield (x,), (x, y) or (x, y, weights). Received:"
      f" elements of {len(specs)} parts."
    )
  leaves = tf.nest.flatten(specs)
  for spec in leaves:
    if not isinstance(spec, tf.TensorSpec | tf.RaggedTensorSpec):
      raise TypeError(
        f"`{name}` must yield dense or ragged tensors (`tf.sparse.to_dense`"
        f" makes dense ones). Received: {arguments.short(spec)}."
      )
    if spec.shape.rank == 0:
      raise ValueError(
        f"`{name}` must yield batches, with the examples along axis 0:"
        " `Dataset.batch` makes them. Received: a scalar,"
        f" {arguments.short(spec)}."
      )
  sizes = {s.shape[0] for s in leaves if s.shape.rank} - {None}
  if not leaves or len(sizes) > 1 or 0 in sizes:
    raise ValueError(
      f"`{name}` must yield tensors with equally many examples, at least one."
      f" Received: {sorted(sizes)}."
    )
  for spec in tf.nest.flatten(specs[2:]):
    if not _is_number(spec):
      raise ValueError(
        "the weights of the examples must be numbers. Received:"
        f" {spec.dtype.name}."
      )
  if class_weight is None:
    return
  labels = tf.nest.flatten(specs[1:2])
  if len(labels) != 1 or any(map(tf.nest.is_nested, specs[1:2])):
    received = arguments.short(specs[1]) if len(specs) > 1 else "no labels"
    raise ValueError(
      "`class_weight` needs `y` to be one array, not a list or a dictionary."
      f" Received: {received}."
    )
  if not _is_number(labels[0]):
    raise ValueError(
      "`class_weight` needs labels that are numbers. Received:"
      f" {labels[0].dtype.name}."
    )


def check_validation(data: object, steps: int | None = None) -> tuple | None:
  """Checks `validation_data`, which Keras reads only after the first epoch.

  Args:
    data: See `keras.Model.fit`.
    steps: `validation_steps`.

  Returns:
    (x, y) or the like as nested `tf.TypeSpec`s; None if it is not known before
    it is read.

  Raises:
    TypeError: If it is of another kind, or yields no tensors.
    ValueError: If it has no examples, or not equally many.
  """
  if isinstance(data, tf.data.Dataset):
    specs = _as_tuple(data.element_spec)
    _check_specs(specs, None, "validation_data")
    if int(data.cardinality()) == 0:
      raise ValueError(
        "`validation_data` must have batches. Received: an empty data set."
      )
    if steps is None and data.cardinality() == tf.data.INFINITE_CARDINALITY:
      raise ValueError(
        "`validation_steps` must be given if `validation_data` is endless."
        " Received: None."
      )
    return specs
  if data is None or isinstance(data, keras.utils.PyDataset | Iterator):
    return None
  if not isinstance(data, tuple | list):
    raise TypeError(
      "`validation_data` must be (x, y), (x, y, weights) or a"
      f" `tf.data.Dataset`. Received: a {type(data).__name__}."
    )
  if not 1 <= len(data) <= 3:
    raise ValueError(
      "`validation_data` must be (x, y) or (x, y, weights). Received:"
      f" {len(data)} parts."
    )
  given = tuple(part for part in data if part is not None)
  arrays = tf.nest.map_structure(np.asarray, given)
  sizes = {a.shape[0] if a.ndim else 0 for a in tf.nest.flatten(arrays)}
  if len(sizes) != 1 or 0 in sizes:
    raise ValueError(
      "`validation_data` must have equally many examples, at least one."
      f" Received: {sorted(sizes)}."
    )
  return tf.nest.map_structure(
    lambda a: tf.TensorSpec(
      [None, *a.shape[1:]],
      tf.string if a.dtype.kind in "SUO" else tf.as_dtype(a.dtype),
    ),
    arrays,
  )


def _is_number(spec: tf.TensorSpec | tf.RaggedTensorSpec) -> bool:
  return spec.dtype.is_floating or spec.dtype.is_integer or spec.dtype.is_bool


def _weighted(data: tuple, class_weight: Mapping[int, float] | None) -> tuple:
  """`data` with `class_weight` as weights of its examples."""
  if class_weight is None:
    return data
  classes = data[1]
  if classes.shape.rank and classes.shape.rank > 1:
    is_one_hot = classes.shape[-1] != 1
    classes = tf.argmax(classes, -1) if is_one_hot else classes[..., 0]
  known = tf.constant(list(class_weight), tf.int64)
  values = tf.constant(list(class_weight.values()), tf.float32)
  classes = tf.expand_dims(tf.cast(classes, tf.int64), -1)
  is_class = tf.equal(classes, known)
  found = tf.reduce_sum(tf.where(is_class, values, 0.0), axis=-1)
  found = tf.where(tf.reduce_any(is_class, axis=-1), found, 1.0)
  if len(data) == 3:
    found *= tf.cast(data[2], tf.float32)
  return (*data[:2], found)


def _with_weights(data: tuple, weight: tf.Tensor, is_even: bool) -> tuple:
  if is_even:
    return (data,)
  size = tf.shape(tf.nest.flatten(data)[0])[:1]
  return data, tf.fill(size, weight)
