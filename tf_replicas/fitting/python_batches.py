"""Makes data sets of batches that the user's Python code yields.

The code is an iterator (such as a generator) or a `keras.utils.PyDataset`. It
runs in the process that uses the data set.
"""

import itertools
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from tf_replicas.fitting import arguments

# The batches that are read to find out which axes vary; Keras reads as many.
_NUM_PEEKED = 2
_RULE = (
  "`x` must yield tuples of arrays, with the examples along axis 0, all of one"
  " structure. Received:"
)


class PythonBatches:
  """The batches of an iterator or a `keras.utils.PyDataset`.

  Attributes:
    spec: The shapes and dtypes of a batch, as nested `tf.TensorSpec`s: (x,),
      (x, y) or (x, y, weights).
    length: The number of batches in a pass over a `PyDataset`. None if it is
      endless or not known, and for an iterator.
  """

  def __init__(self, x: keras.utils.PyDataset | Iterator):
    """Reads the first batches, to find out their shapes and dtypes.

    Args:
      x: The `keras.utils.PyDataset` or the iterator.

    Raises:
      TypeError: If a batch is not a tuple, or does not consist of arrays.
      ValueError: If there are no batches, or if their structures or the ranks
        of their arrays differ.
    """
    self._x = x
    self._was_read = False
    self.length: int | None = None
    if isinstance(x, keras.utils.PyDataset):
      self.length = x.num_batches
      count = _NUM_PEEKED if self.length is None else self.length
      first = [x[i] for i in range(min(_NUM_PEEKED, count))]
    else:
      first = list(itertools.islice(x, _NUM_PEEKED))
      self._x = itertools.chain(first, x)
    if not first:
      raise ValueError("`x` must have batches. Received: none.")
    self.spec = _common_spec([_arrays(batch) for batch in first])

  def dataset(self, num_needed: int) -> tf.data.Dataset:
    """Returns a data set of the batches.

    For a `PyDataset`, it has the batches of one pass. For an iterator, it has
    the batches of the iterator, and then repeats the last batch without end.
    The repetitions are not used for training: at the end of a training, a
    replica draws batches whose gradients are no longer needed.

    Args:
      num_needed: The number of batches that an iterator must yield. If it
        yields fewer, the data set raises an error after the last one. Not used
        for a `PyDataset`.

    Raises:
      ValueError: If an iterator was read before, by an earlier data set.
    """
    if isinstance(self._x, keras.utils.PyDataset):
      return self._passes(self._x)
    if self._was_read:
      raise ValueError(
        "`x` must be readable again when training resumes after the loss of a"
        " task: pass a `tf.data.Dataset`, a `keras.utils.PyDataset` or a"
        " function, or start all tasks again. Received: an iterator, which"
        " yields each batch once."
      )
    return tf.data.Dataset.from_generator(
      lambda: self._iterate(num_needed), output_signature=self.spec
    )

  def _iterate(self, num_needed: int) -> Iterator[tuple]:
    self._was_read = True
    count, last = 0, ()
    for batch in self._x:
      last = self._checked(batch)
      yield last
      count += 1
    if count >= num_needed:
      yield from itertools.repeat(last)
    raise ValueError(
      "`x` must yield a batch for each step of each epoch. Received: an"
      f" iterator that ended after {count} batches."
    )

  def _checked(self, batch: object) -> tuple:
    """Checks a batch, and converts it to arrays with the dtypes of `spec`.

    Args:
      batch: A batch as the user's code yields it.

    Raises:
      TypeError: If the batch is not a tuple, or does not consist of arrays.
      ValueError: If its structure or shapes do not fit `spec`.
    """
    arrays = _arrays(batch)
    specs = tf.nest.flatten(self.spec)
    is_same = _structure(arrays) == _structure(self.spec)
    found = tf.nest.flatten(arrays)
    if not is_same or not all(
      spec.shape.is_compatible_with(array.shape)
      for spec, array in zip(specs, found, strict=True)
    ):
      raise ValueError(
        f"{_RULE} {arguments.short(_shapes(arrays))}, in a later batch."
      )
    found = [
      array if spec.dtype == tf.string else array.astype(spec.dtype.name)
      for spec, array in zip(specs, found, strict=True)
    ]
    return tf.nest.pack_sequence_as(self.spec, found)

  def _passes(self, x: keras.utils.PyDataset) -> tf.data.Dataset:
    """Returns a data set of the batches of a `keras.utils.PyDataset`.

    Each iteration over the data set is a new pass over `x`, and calls its
    `on_epoch_begin` (and `on_epoch_end` for the pass before).
    """
    specs = tf.nest.flatten(self.spec)
    number = itertools.count()

    def begin() -> np.int64:
      if next(number):
        x.on_epoch_end()
      x.on_epoch_begin()
      count = x.num_batches
      return np.int64(np.iinfo(np.int64).max if count is None else count)

    def read(index: np.int64) -> list[np.ndarray]:
      return tf.nest.flatten(self._checked(x[int(index)]))

    def batch(index: tf.Tensor) -> tuple:
      tensors = tf.numpy_function(read, [index], [s.dtype for s in specs])
      for tensor, spec in zip(tensors, specs, strict=True):
        tensor.set_shape(spec.shape)
      return tf.nest.pack_sequence_as(self.spec, tensors)

    def one_pass(_: tf.Tensor) -> tf.data.Dataset:
      count = tf.numpy_function(begin, [], tf.int64)
      count.set_shape([])
      return tf.data.Dataset.range(count).map(
        batch, num_parallel_calls=max(1, x.workers), deterministic=True
      )

    return tf.data.Dataset.range(1).flat_map(one_pass)


def _arrays(batch: object) -> tuple:
  """Converts a batch to a tuple of nested NumPy arrays.

  Args:
    batch: A batch as the user's code yields it.

  Returns:
    (x,), (x, y) or (x, y, weights). Values of None at the end are left out.

  Raises:
    TypeError: If the batch is not such a tuple, or does not consist of arrays.
  """
  if isinstance(batch, list | np.ndarray):  # As Keras allows.
    batch = tuple(batch) if isinstance(batch, list) else (batch,)
  if not isinstance(batch, tuple) or not 1 <= len(batch) <= 3:
    raise TypeError(
      "`x` must yield tuples (x,), (x, y) or (x, y, weights). Received:"
      f" {arguments.short(batch)}."
    )
  while batch and batch[-1] is None:
    batch = batch[:-1]

  def array(value: object) -> np.ndarray:
    value = np.asarray(value)
    if value.dtype == object or not value.ndim or value.dtype.kind == "V":
      raise TypeError(f"{_RULE} {arguments.short(value)}.")
    if value.dtype.kind == "f":
      value = value.astype(keras.config.floatx())  # As Keras does.
    return value

  return tf.nest.map_structure(array, keras.tree.lists_to_tuples(batch))


def _structure(arrays: object) -> object:
  return tf.nest.map_structure(lambda _: 0, arrays)


def _shapes(arrays: object) -> object:
  return tf.nest.map_structure(lambda a: (a.shape, a.dtype.name), arrays)


def _common_spec(batches: list[tuple]) -> tuple:
  """Returns the shapes and dtypes that fit all given batches.

  Args:
    batches: At least one batch, each a tuple of nested arrays.

  Returns:
    Nested `tf.TensorSpec`s with the dtypes of the first batch. The sizes of
    axis 0, and of axes whose sizes differ, are None.

  Raises:
    ValueError: If the batches differ in structure or in the ranks of arrays.
  """
  first = batches[0]
  for other in batches[1:]:
    if _structure(other) != _structure(first):
      raise ValueError(
        f"{_RULE} {arguments.short(_shapes(other))}, in a later batch."
      )

  def common(*arrays: np.ndarray) -> tf.TensorSpec:
    if len({array.ndim for array in arrays}) > 1:
      raise ValueError(f"{_RULE} arrays of different ranks.")
    sizes = [set(axis) for axis in zip(*(a.shape for a in arrays), strict=True)]
    shape = [size.pop() if len(size) == 1 else None for size in sizes[1:]]
    dtype = arrays[0].dtype
    return tf.TensorSpec(
      [None, *shape],
      tf.string if dtype.kind in "SU" else tf.as_dtype(dtype),
    )

  return tf.nest.map_structure(common, *batches)
