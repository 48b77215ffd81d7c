"""Makes the training data of `fit`: parts of global batches for each replica.

A *global batch* has the examples of one update. A *contribution* is what a
replica computes for one update from one batch: gradients and a loss. An update
may average several contributions; then the global batch is cut into as many
*parts*, one for each contribution.

The parts of all global batches, in order, form one endless stream. Of M
replicas, replica r takes the parts r, r + M, r + 2M and so on. So if each
update averages one contribution of every replica, the replicas together train
on the same examples as one process with the same global batches.
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
from tf_replicas.fitting import python_batches
from tf_replicas.replica import model_parallel
from tf_replicas.runtime import datasets

InputFn = Callable[[tf.distribute.InputContext], tf.data.Dataset]
Source = tf.data.Dataset | InputFn | object
# The number of parts that a replica which leases them takes before it needs
# them. They are lost if it is killed.
_LEASED_AHEAD = 2


@dataclasses.dataclass(frozen=True)
class TrainingData:
  """The data of a training, cut into parts for the replicas.

  Attributes:
    steps_per_epoch: The number of global batches in an epoch.
    part_fn: A function of (num_shards, shard_index, first_update,
      updates_per_batch). It makes an endless data set: the parts of replica
      `shard_index` of `num_shards` replicas, from update `first_update` on.
      Each global batch is used for `updates_per_batch` successive updates. An
      element is (data,) or (data, weights), as `CompiledReplica` documents.
      `data` is (x,), (x, y) or (x, y, sample_weight).
    leased_fn: Maps (numbers of parts, updates_per_batch) to the data set of
      these parts. None if the data cannot be read by number.
  """

  steps_per_epoch: int
  part_fn: Callable[
    [int, int | tf.Tensor, int | tf.Tensor, int], tf.data.Dataset
  ]
  leased_fn: Callable[[tf.data.Dataset, int], tf.data.Dataset] | None = None

  @property
  def spec(self) -> tuple:
    """The shapes and dtypes of a part, as nested `tf.TypeSpec`s.

    Axis 0 of each tensor has the examples of the part. Its size is None unless
    all parts are equally large. The structure is (x,), (x, y) or (x, y,
    sample_weight).
    """
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
  num_epochs: int = 1,
) -> TrainingData:
  """Makes the training data from the arguments of `fit`.

  Args:
    x: One of these: arrays in any nested structure, with the examples along
      axis 0; a `tf.data.Dataset`, a `keras.utils.PyDataset` or an iterator of
      global batches (x,), (x, y) or (x, y, weights); or a function of
      `tf.distribute.InputContext` that returns the data set of one replica,
      whose elements are parts.
    y: The labels, if `x` consists of arrays.
    sample_weight: The weights of the examples, if `x` consists of arrays.
    class_weight: Maps a class number to the weight of the examples of the
      class. None: all weights are 1.
    batch_size: The number of examples in a global batch, if `x` consists of
      arrays. None: 32.
    steps_per_epoch: The number of global batches in an epoch. None: as many as
      `x` has. With another number, an epoch begins with the batch that follows
      the last one of the epoch before. After the last batch of `x`, the first
      one follows.
    shuffle: Whether to shuffle arrays before every pass over them.
    seed: The seed of the shuffling; the same in all tasks.
    num_contributions: The number of contributions that an update averages.
    num_epochs: The number of epochs to train. An iterator must have batches for
      all of them.

  Returns:
    The training data.

  Raises:
    TypeError: If `x` is of none of these kinds.
    ValueError: If an argument is out of range, or the number of updates in an
      epoch is not known.
  """
  arguments.check(
    batch_size=batch_size,
    steps_per_epoch=steps_per_epoch,
    shuffle=shuffle,
    seed=seed,
    class_weight=class_weight,
  )
  if yields_batches(x):
    given = {"y": y, "sample_weight": sample_weight, "batch_size": batch_size}
    for name, value in given.items():
      if value is not None:
        raise ValueError(
          f"`{name}` must not be given if `x` yields batches: labels, weights"
          " and size are those of the batches. Received:"
          f" {arguments.short(value)}."
        )
  if isinstance(x, keras.utils.PyDataset | Iterator):
    return _from_python(
      x, class_weight, steps_per_epoch, num_contributions, num_epochs
    )
  if isinstance(x, datasets.Sendable):
    return _from_sendable(x, class_weight, steps_per_epoch, num_contributions)
  if isinstance(x, tf.data.Dataset):
    return _from_dataset(x, class_weight, steps_per_epoch, num_contributions)
  if callable(x):
    return _from_function(x, class_weight, steps_per_epoch, num_contributions)
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


def yields_batches(x: Source) -> bool:
  """Returns whether the training data `x` yields batches.

  Returns False if it consists of arrays.
  """
  kinds = tf.data.Dataset | datasets.Sendable | keras.utils.PyDataset | Iterator
  return callable(x) or isinstance(x, kinds)


def split_validation(
  x: Source, y: object, sample_weight: object, share: float
) -> tuple[tuple, tuple]:
  """Takes the last examples of arrays for validation, as Keras does.

  Args:
    x: The inputs: arrays in any nested structure, with the examples along axis
      0.
    y: The labels, as arrays; None for no labels.
    sample_weight: The weights of the examples, as arrays; None for no weights.
    share: The share of the examples to take, in (0, 1).

  Returns:
    Two tuples (x, y, sample_weight): the first is for training, the second for
    validation. They have None where an argument is None.

  Raises:
    TypeError: If `x` does not consist of arrays.
    ValueError: If no example would be left for training or for validation.
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
  """Checks that a data set can be used after this process joins a cluster.

  Args:
    dataset: The data. It is checked only if it is a `tf.data.Dataset`.
    name: The name of the argument of `fit`, for the error message.

  Raises:
    ValueError: If the data set uses lookup tables or variables. They are lost
      when this process joins the cluster.
  """
  if not isinstance(dataset, tf.data.Dataset):
    return
  if devices := datasets.resources_of(dataset):
    raise ValueError(
      f"`{name}` must not use layers, tables or variables that were made before"
      " `fit` is called, as the cluster does not have them: call them in"
      " `model_fn`, or pass a function that makes them and the data set."
      f" Received: a data set that uses {len(devices)} of them."
    )


def validation(given: object) -> object:
  """Prepares validation data, after this process has joined a cluster.

  Args:
    given: The argument `validation_data` of `fit`.

  Returns:
    The argument `validation_data` for `keras.Model.fit`. If `given` is a
    function, its result. If it is a data set, a data set with the same
    elements, on the devices that TensorFlow has since it joined the cluster.
    Otherwise, `given` itself.
  """
  if isinstance(given, tf.data.Dataset):
    return given.take(-1)
  return given() if callable(given) else given


def _arrays(x: object, y: object, sample_weight: object) -> tuple:
  """Converts training data to NumPy arrays, and checks their lengths.

  Args:
    x: The inputs, in any nested structure of arrays.
    y: The labels; None if there are none.
    sample_weight: The weights of the examples; None if there are none.

  Returns:
    (x,), (x, y) or (x, y, weights): nested arrays of the same length. float64
    becomes float32.

  Raises:
    TypeError: If something is not an array.
    ValueError: If there are no examples, if arrays differ in length or are not
      of numbers or strings, or if there are weights without labels.
  """
  given = [x]
  if sample_weight is not None and y is None:
    raise ValueError("`sample_weight` needs `y`. Received: no `y`.")
  given += [part for part in (y, sample_weight) if part is not None]

  def array(value: object) -> np.ndarray:
    if not hasattr(value, "__array__"):  # As those of NumPy and pandas have.
      raise TypeError(
        "`x` and `y` must be arrays, or `x` a `tf.data.Dataset`, a"
        " `keras.utils.PyDataset`, an iterator or a function of"
        " `tf.distribute.InputContext`; lists and dicts must contain arrays."
        f" Received: a {type(value).__name__} in place of an array."
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

  def order_of(number_of_pass):
    order = tf.range(length, dtype=tf.int64)
    if shuffle:
      order = tf.random.experimental.stateless_shuffle(
        order, seed=tf.stack([tf.constant(seed, tf.int64), number_of_pass])
      )
    return order

  def part(order, number, updates_per_batch):
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

  def part_fn(num_shards, index, first_update, updates_per_batch):
    first = tf.cast(first_update, tf.int64) * num_contributions
    index, num_shards = tf.cast(index, tf.int64), tf.cast(num_shards, tf.int64)
    # A pass over the arrays; `steps_per_epoch` may be another number.
    per_pass = batches * num_contributions * updates_per_batch
    per_pass = tf.constant(per_pass, tf.int64)

    def parts_of_pass(number_of_pass):
      order = order_of(number_of_pass)
      begin = tf.maximum(number_of_pass * per_pass, first)
      begin += (index - begin) % num_shards
      numbers = tf.data.Dataset.range(
        begin, (number_of_pass + 1) * per_pass, num_shards
      )
      return numbers.map(
        lambda number: part(order, number % per_pass, updates_per_batch)
      )

    passes = tf.data.Dataset.range(first // per_pass, tf.int64.max)
    return passes.flat_map(parts_of_pass).prefetch(tf.data.AUTOTUNE)

  def leased_fn(numbers, updates_per_batch):
    per_pass = batches * num_contributions * updates_per_batch
    parts = numbers.map(
      lambda number: part(
        order_of(number // per_pass), number % per_pass, updates_per_batch
      )
    )
    return parts.prefetch(_LEASED_AHEAD)

  return TrainingData(steps_per_epoch or batches, part_fn, leased_fn)


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
      # The first of these parts has the number `first` * `num_contributions`.
      num_shards = tf.cast(num_shards, tf.int64)
      index = (index - first * num_contributions) % num_shards
      parts = parts.shard(num_shards, index)
    return parts.prefetch(tf.data.AUTOTUNE)

  return TrainingData(steps, part_fn)


def sendable(x: tf.data.Dataset) -> datasets.Sendable:
  """Converts a data set to a form that can be sent to other tasks: its graph.

  Args:
    x: The training data.

  Returns:
    An object that can be pickled, and that `make` takes as `x`.

  Raises:
    TypeError: If the data set needs Python code or objects of this process.
  """
  try:
    return datasets.Sendable(datasets.to_bytes(x), x.element_spec)
  except TypeError as error:
    raise TypeError(
      "`x` must be a data set that can be sent to the workers, or a function of"
      f" `tf.distribute.InputContext` that makes one there. Received: {error}."
    ) from None


def _from_sendable(
  x: datasets.Sendable,
  class_weight: Mapping[int, float] | None,
  steps_per_epoch: int | None,
  num_contributions: int,
) -> TrainingData:
  graph = tf.constant(x.graph)  # Not a part of the functions that use it.
  dataset = datasets.from_bytes(graph, x.spec)
  steps = steps_per_epoch or _known_length(dataset)

  def part_fn(num_shards, index, first_update, updates_per_batch):
    made = _from_dataset(
      datasets.from_bytes(graph, x.spec), class_weight, steps, num_contributions
    )
    return made.part_fn(num_shards, index, first_update, updates_per_batch)

  return TrainingData(steps, part_fn)


def check_python(x: object, *, can_run: bool) -> None:
  """Checks that the replicas can get batches from `x`.

  If `x` yields batches by Python code (as an iterator or a
  `keras.utils.PyDataset`), each replica must run in a process that has `x`.

  Args:
    x: The training data, of any kind.
    can_run: Whether each replica has a process that runs the user's script.

  Raises:
    TypeError: If `x` yields batches by Python code, and `can_run` is False.
  """
  if isinstance(x, keras.utils.PyDataset | Iterator) and not can_run:
    raise TypeError(
      "`x` may yield batches by Python code only with"
      ' `replication="between_graph"`, or without a cluster. Otherwise pass a'
      " `tf.data.Dataset`, or a function of `tf.distribute.InputContext` that"
      f" makes one. Received: a {type(x).__name__}."
    )


def _from_python(
  x: keras.utils.PyDataset | Iterator,
  class_weight: Mapping[int, float] | None,
  steps_per_epoch: int | None,
  num_contributions: int,
  num_epochs: int,
) -> TrainingData:
  batches = python_batches.PythonBatches(x)
  _check_specs(batches.spec, class_weight)
  steps = steps_per_epoch or batches.length
  if not steps:
    raise ValueError(
      "`steps_per_epoch` must be given if `x` does not say how many batches an"
      f" epoch has. Received: None, and a {type(x).__name__}."
    )

  # What calls Python code must be made after this process has joined a cluster.
  def part_fn(num_shards, index, first_update, updates_per_batch):
    made = _from_dataset(
      batches.dataset(steps * num_epochs),
      class_weight,
      steps,
      num_contributions,
    )
    return made.part_fn(num_shards, index, first_update, updates_per_batch)

  return TrainingData(steps, part_fn)


def _size(tensor: tf.Tensor) -> tf.Tensor:
  """Returns the number of examples in a batch, as an int64 scalar.

  Args:
    tensor: A tensor of the batch, with the examples along axis 0.

  Raises:
    tf.errors.InvalidArgumentError: When the op runs, if there are no examples.
  """
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
    first = tf.cast(first_update, tf.int64) * num_contributions
    index, num_shards = tf.cast(index, tf.int64), tf.cast(num_shards, tf.int64)
    # Its elements are the parts `index`, `index` + `num_shards` and so on.
    first = (first - index + num_shards - 1) // num_shards
    dataset = _repeated(dataset.repeat(), updates_per_batch).skip(first)
    return dataset.map(lambda *data: (_weighted(data, class_weight),))

  return TrainingData(steps_per_epoch, part_fn)


def _repeated(dataset: tf.data.Dataset, count: int) -> tf.data.Dataset:
  """Returns `dataset` with each element `count` times in a row."""
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
  """Cuts a part of a global batch into one piece for each tower of a replica.

  A tower is a copy of the model on one device of the replica.

  Args:
    batch: (data,) or (data, weights), an element of a data set that
      `TrainingData.part_fn` makes.
    count: The number of towers.

  Returns:
    `count` pieces. If `batch` has no weights and `count` divides its static
    size, the pieces are equal, and each is (data,); its weight is 1. Otherwise
    each is (data, weights). `weights`, float32 [examples], repeats one number
    for every example, the weight of the piece: w * n / m. Here w is the weight
    of the part (which `weights` of `batch` repeats; 1 without weights), n is
    the number of examples of the piece, and m is the mean of n over the pieces.
    A piece without examples (n = 0) holds any one example as a filler. So the
    mean over the pieces of (weight * mean loss) is w times the mean loss of the
    part.
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


def piece_spec(element_spec: tuple, count: int) -> tuple:
  """Describes the data of the pieces that `pieces` makes.

  Args:
    element_spec: The shapes and dtypes of a batch: (data,) or (data, weights).
    count: The number of towers, at least 1.

  Returns:
    The shapes and dtypes of the data of a piece.
  """
  data, *weights = element_spec
  if count == 1:
    return data
  size = tf.nest.flatten(data)[0].shape[0]
  if weights or size is None or size % count:
    size = None
  else:
    size //= count

  def of_piece(spec: tf.TypeSpec) -> tf.TypeSpec:
    if not isinstance(spec, tf.TensorSpec):
      return spec  # It has no static size.
    return tf.TensorSpec([size, *spec.shape[1:]], spec.dtype)

  return tf.nest.map_structure(of_piece, data)


def _piece(
  size: tf.Tensor, piece: tf.Tensor, count: int
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
  """Computes which examples of a batch are in one of several pieces.

  If there are more pieces than examples, some pieces have no example. Such a
  piece gets any one example, as a filler, and the weight 0.

  Args:
    size: The number of examples in the batch, an int64 scalar.
    piece: The index of the piece, an int64 scalar.
    count: The number of pieces.

  Returns:
    (begin, end, weight). The piece has the examples [begin, end). The weight
    is the number of its examples divided by the mean number over all pieces: 1
    if all pieces have the same size.
  """
  begin, end = size * piece // count, size * (piece + 1) // count
  share = tf.cast(end - begin, tf.float32) / tf.cast(size, tf.float32)
  begin = tf.minimum(begin, size - 1)
  return begin, tf.maximum(end, begin + 1), share * count


def _as_tuple(spec: object) -> tuple:
  """Returns `spec` if it is a tuple, otherwise the tuple (spec,).

  Args:
    spec: The `element_spec` of a data set.
  """
  return spec if isinstance(spec, tuple) else (spec,)


def _check_specs(
  specs: tuple, class_weight: Mapping[int, float] | None, name: str = "x"
) -> None:
  """Checks that data can be used for training, by its shapes and dtypes.

  Args:
    specs: The shapes and dtypes of a batch, as nested `tf.TypeSpec`s: (x,), (x,
      y) or (x, y, weights).
    class_weight: The weights of classes, by class number; None for no weights.
    name: The name of the data in error messages.

  Raises:
    TypeError: If a component is not a dense or ragged tensor.
    ValueError: If the examples are not along axis 0 of each component, if the
      weights are not numbers, or if `class_weight` is given and `y` is not one
      tensor of numbers.
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
  """Checks `validation_data` before training.

  Keras would report a mistake only after the first epoch.

  Args:
    data: The argument `validation_data` of `keras.Model.fit`.
    steps: The argument `validation_steps` of `keras.Model.fit`.

  Returns:
    The shapes and dtypes of a batch, as nested `tf.TypeSpec`s: (x,), (x, y) or
    (x, y, weights). None if they are not known before the data is read, or if
    `data` is None.

  Raises:
    TypeError: If the data is of a kind that Keras does not take, or has
      components that are not tensors.
    ValueError: If there are no examples, if the components have different
      numbers of examples, or if the data is endless and `steps` is None.
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
  specs = tf.nest.map_structure(
    lambda a: tf.TensorSpec(
      a.shape, tf.string if a.dtype.kind in "SUO" else tf.as_dtype(a.dtype)
    ),
    arrays,
  )
  _check_specs(specs, None, "validation_data")
  return tf.nest.map_structure(
    lambda spec: tf.TensorSpec([None, *spec.shape[1:]], spec.dtype), specs
  )


def _is_number(spec: tf.TensorSpec | tf.RaggedTensorSpec) -> bool:
  return spec.dtype.is_floating or spec.dtype.is_integer or spec.dtype.is_bool


def _weighted(data: tuple, class_weight: Mapping[int, float] | None) -> tuple:
  """Gives the examples of a batch the weights of their classes.

  Args:
    data: (x,), (x, y) or (x, y, weights).
    class_weight: Maps a class number to the weight of the class. Other classes
      have the weight 1.

  Returns:
    (x, y, weights). Weights in `data` are multiplied by those of the classes.
    If `class_weight` is None, `data` itself.
  """
  if class_weight is None:
    return data
  classes = data[1]
  if classes.shape.rank and classes.shape.rank > 1:
    is_one_hot = classes.shape[-1] != 1
    classes = tf.argmax(classes, -1) if is_one_hot else classes[..., 0]
  if classes.dtype.is_floating:
    classes = tf.round(classes)
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
