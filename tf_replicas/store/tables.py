"""Keeps tables, large matrices, whose rows live on the PS tasks only.

A *table* is a large matrix, such as that of an embedding, of which a batch
needs few rows. Its rows are divided among all PS tasks (parameter servers), and
each task computes the first values of its own rows. A replica fetches the rows
that it needs (`lookup`), and sends their gradient as (ids, rows): a
`tf.IndexedSlices`.

In a model, a variable of shape [0, columns] stands for the table: its
*placeholder*. Replicas pull the placeholder, and contribute a gradient for it,
as for any other variable. But its value is empty, and its gradient has the ids
of the rows that were looked up, and the gradients of these rows. A *home* says
which PS tasks hold the tables of a training. Where a model is built without a
home, as for evaluation, the variable has all rows and is an ordinary one.
"""

import contextlib
import contextvars
import functools
import itertools
import re
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tf_replicas.runtime import control_flow
from tf_replicas.runtime import resources
from tf_replicas.runtime import row_files

PARTITIONS = ("modulo", "range")
# How the rows of one bag of ids are combined; a bag without ids yields zeros.
_COMBINERS = {
  "sum": tf.math.unsorted_segment_sum,
  "mean": tf.math.unsorted_segment_mean,
  "sqrtn": tf.math.unsorted_segment_sqrt_n,
}
COMBINERS = tuple(_COMBINERS)
# The first values of so many rows are drawn together.
_BLOCK_ROWS = 1024
# Keras' truncated normal distribution of standard deviation 1 before the cut
# has this one afterwards.
_TRUNCATED_STDDEV = 0.87962566103423978
_ATTRIBUTE = "table_rows"
_SHARDS = "table_shards"
# What `_in_range` raises, within TensorFlow's message.
_BAD_IDS = re.compile(
  r"(the ids of rows of .* must be in \[0, \d+\)\. Received:)\]? \[?(-?\d+)"
)

Ids = tf.Tensor | tf.RaggedTensor | tf.SparseTensor


class Home:
  """Says where the tables of one training live.

  A table is a large matrix whose rows are divided among the PS tasks.

  Attributes:
    namespace: The namespace of the training.
    num_tasks: The number of PS tasks.
    device_of_task: Maps the index of a PS task to its device.
    is_open: Whether the PS tasks still run, so that rows can be read.
    reads_averages: Whether lookups outside of the training, as for evaluation,
      read moving averages in place of rows, for tables that have them.
    paths: The paths of the tables that were made in this home.
  """

  def __init__(
    self,
    namespace: resources.Namespace,
    num_tasks: int,
    device_of_task: Callable[[int], str],
  ):
    self.namespace = namespace
    self.num_tasks = num_tasks
    self.device_of_task = device_of_task
    self.is_open = True
    self.reads_averages = False
    self.paths: set[str] = set()
    self._made: list[Rows] = []

  def add(self, rows: "Rows") -> None:
    """Adds a table to this home.

    `move` needs the list of tables, and no two tables may have one path.

    Args:
      rows: The description of the table. It has the table's path.

    Raises:
      ValueError: If the home already has a table of this path.
    """
    if rows.path in self.paths:
      raise ValueError(
        "tables must have distinct paths: give their layers different names."
        f" Received: {rows.path!r} twice."
      )
    self.paths.add(rows.path)
    self._made.append(rows)

  def move(self, namespace: resources.Namespace) -> None:
    """Makes all tables of this home use the variables of another namespace.

    It is called after a PS task was restarted. Functions that were traced
    before keep the old variables.

    Args:
      namespace: The new namespace.
    """
    self.namespace = namespace
    for rows in self._made:
      vars(rows).pop("parts", None)
      rows.averages = None


_home: contextvars.ContextVar[Home | None] = contextvars.ContextVar(
  "home", default=None
)
# The tensors that stand for tables while a loss is computed, by path.
_placeholders: contextvars.ContextVar[dict[str, tf.Tensor]] = (
  contextvars.ContextVar("placeholders", default={})  # noqa: B039
)


def current_home() -> Home | None:
  """Returns the home (the PS tasks) for tables that a model makes now.

  A table is a large matrix, such as that of an embedding.

  Returns:
    The argument of the innermost context `home`. None outside of such a
    context; tables that are made then are ordinary variables.
  """
  return _home.get()


@contextlib.contextmanager
def home(where: Home) -> Iterator[None]:
  """Context in which models put their tables on the PS tasks of `where`.

  A table is a large matrix, such as that of an embedding. Outside of this
  context, a model's tables are ordinary variables.
  """
  token = _home.set(where)
  try:
    yield
  finally:
    _home.reset(token)


@contextlib.contextmanager
def placeholders(
  pairs: Iterable[tuple[Any, tf.Tensor]],
) -> Iterator[None]:
  """Context in which given tensors get the gradients of tables.

  A table is a large matrix whose rows live on the PS tasks only. So a gradient
  tape or `tf.gradients` cannot watch it. It watches an empty tensor in its
  place: within the context, the gradient of a lookup flows to this tensor.

  Args:
    pairs: (variable, tensor) pairs: a variable that stands for a table, and the
      tensor, [0, columns], that gets the gradients of this table. Variables
      that stand for no table are ignored.
  """
  found = {
    rows.path: tensor
    for variable, tensor in pairs
    if (rows := rows_of(variable)) is not None
  }
  token = _placeholders.set(found)
  try:
    yield
  finally:
    _placeholders.reset(token)


class _Draw(NamedTuple):
  """Says how the initial values of a table (a large matrix) are drawn.

  Attributes:
    kind: `constant`, `uniform`, `normal` or `truncated` (normal).
    first: The value (`constant`), the lower bound (`uniform`), or the mean.
    second: The upper bound (`uniform`), or the standard deviation; not used for
      `constant`.
    seed: The seed of the random numbers; not used for `constant`.
  """

  kind: str
  first: float
  second: float = 0.0
  seed: int = 0

  def block(
    self, number: tf.Tensor, columns: int, dtype: tf.DType
  ) -> tf.Tensor:
    """Draws the initial values of a block of rows: [_BLOCK_ROWS, columns].

    Args:
      number: int64 scalar, the number of the block in the table. Blocks of
        different numbers have different random values.
      columns: The number of columns of the table.
      dtype: The dtype of the rows.
    """
    shape = [_BLOCK_ROWS, columns]
    seed = tf.stack([tf.constant(self.seed, tf.int64), number])
    if self.kind == "uniform":
      return tf.random.stateless_uniform(
        shape, seed, self.first, self.second, dtype
      )
    draw = tf.random.stateless_normal
    if self.kind == "truncated":
      draw = tf.random.stateless_truncated_normal
    return draw(shape, seed, self.first, self.second, dtype)


def _draw(initializer: Any, shape: tuple[int, int], path: str) -> _Draw:
  """Converts an initializer of Keras into one that can draw some rows only.

  A table is a large matrix, of which every PS task draws only its own rows.

  Args:
    initializer: The initializer.
    shape: The (rows, columns) of the table.
    path: The path of the table, for the error message.

  Returns:
    The distribution, its parameters and its seed.

  Raises:
    ValueError: If the initializer cannot draw rows one by one.
  """
  kinds = keras.initializers

  def is_a(kind) -> bool:
    return isinstance(initializer, kind) and (
      type(initializer).__call__ is kind.__call__
    )

  if is_a(kinds.Zeros):
    return _Draw("constant", 0.0)
  if is_a(kinds.Ones):
    return _Draw("constant", 1.0)
  if is_a(kinds.Constant) and np.ndim(initializer.value) == 0:
    return _Draw("constant", float(initializer.value))
  seed = getattr(initializer, "seed", None)
  if isinstance(seed, int):
    if is_a(kinds.RandomUniform):
      return _Draw("uniform", initializer.minval, initializer.maxval, seed)
    if is_a(kinds.RandomNormal):
      return _Draw("normal", initializer.mean, initializer.stddev, seed)
    if is_a(kinds.TruncatedNormal):
      return _Draw("truncated", initializer.mean, initializer.stddev, seed)
    if is_a(kinds.VarianceScaling):
      fans = {"fan_in": shape[0], "fan_out": shape[1]}
      fan = fans.get(initializer.mode, sum(shape) / 2)
      scale = initializer.scale / max(1.0, fan)
      if initializer.distribution == "uniform":
        limit = (3.0 * scale) ** 0.5
        return _Draw("uniform", -limit, limit, seed)
      if initializer.distribution == "untruncated_normal":
        return _Draw("normal", 0.0, scale**0.5, seed)
      stddev = scale**0.5 / _TRUNCATED_STDDEV
      return _Draw("truncated", 0.0, stddev, seed)
  raise ValueError(
    f"the initializer of the table {path!r} must be one of Keras that draws"
    " every row by itself, with an integer seed or none: zeros, ones, a"
    " constant, uniform, normal, truncated normal or variance scaling."
    f" Received: {initializer!r:.200}."
  )


class Rows:
  """Describes a table, and reads and assigns its rows on the PS tasks.

  A table is a large matrix, whose rows are divided into parts. There is one
  part per PS task, unless there are fewer rows than PS tasks. With the
  partition `modulo`, row r is in part r modulo the number of parts. With
  `range`, the parts are consecutive ranges of rows.

  Attributes:
    path: The path of the table, which identifies it.
    shape: (rows, columns).
    dtype: The dtype of the rows.
    partition: How rows are divided: `modulo` or `range`.
    home: The PS tasks that hold the parts.
    averages: The moving averages of the rows, one object per part, as
      `row_averages` makes them. None: there are none.
  """

  def __init__(
    self,
    path: str,
    shape: tuple[int, int],
    dtype: tf.DType | str,
    initializer: Any,
    partition: str,
    home: Home,
  ):
    """Stores the description of a table, and adds the table to its home.

    No variables are created now. The property `parts` makes them at its first
    use.

    Args:
      path: The path of the table, which identifies it.
      shape: (rows, columns).
      dtype: The dtype of the rows, a floating dtype.
      initializer: A Keras initializer for the first values of the rows. Each PS
        task draws its own rows only. So it must be zeros, ones, a constant, or
        a random distribution (uniform, normal, truncated normal or variance
        scaling) with an integer seed or none.
      partition: How rows are divided among the PS tasks: `modulo` or `range`.
      home: Says which PS tasks hold the table.

    Raises:
      ValueError: If the home already has a table of this path, the initializer
        is not one of those listed above, or the dtype is not floating.
    """
    self.path = path
    self.shape = shape
    self.dtype = tf.as_dtype(dtype)
    self.partition = partition
    self.home = home
    self.averages: list[Any] | None = None
    if not self.dtype.is_floating:
      raise ValueError(
        f"the table {path!r} must be of floating dtype. Received:"
        f" {self.dtype.name}."
      )
    self._draw = _draw(initializer, shape, path)
    home.add(self)

  @property
  def num_parts(self) -> int:
    """Number of parts into which the rows are divided: one per PS task.

    There are fewer parts if there are fewer rows than PS tasks.
    """
    return min(self.home.num_tasks, self.shape[0])

  @property
  def sizes(self) -> list[int]:
    """Number of rows of each part; every PS task holds one part of the table.

    The numbers differ by at most 1.
    """
    size, rest = divmod(self.shape[0], self.num_parts)
    return [size + (number < rest) for number in range(self.num_parts)]

  @functools.cached_property
  def parts(self) -> list[tf.Variable]:
    """Variables of the parts of the table, one per part.

    They are made at the first use, or found if another client (a process that
    trains) has made them. Their names are those of the shards of an ordinary
    variable.
    """
    made: list[Any] = []
    for number, size in enumerate(self.sizes):
      part = f"/part_{number}" if self.num_parts > 1 else ""
      with tf.device(self.home.device_of_task(number)):
        made.append(
          self.home.namespace.variable(
            self.path + part, [size, self.shape[1]], self.dtype, trainable=True
          )
        )
    return made

  def place(self, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Finds out which part of the table has each of some rows, and where.

    Part number p is on PS task p.

    Args:
      ids: int64 [n], indices of rows of the table.

    Returns:
      A pair: the number of the part that has each row, int32 [n]; and the index
      of each row within its part, int64 [n].
    """
    ids = tf.cast(ids, tf.int64)
    count = self.num_parts
    if self.partition == "modulo":
      return tf.cast(tf.math.floormod(ids, count), tf.int32), ids // count
    size, rest = divmod(self.shape[0], count)
    # The first `rest` parts have one row more than the others.
    split = rest * (size + 1)
    later = rest + (ids - split) // size
    part = tf.where(ids < split, ids // (size + 1), later)
    begin = part * size + tf.minimum(part, rest)
    return tf.cast(part, tf.int32), ids - begin

  def split(self, gradient: Any) -> list[Any]:
    """Splits a gradient of the table into one gradient per part.

    Part number p is on PS task p.

    Args:
      gradient: A `tf.IndexedSlices` with indices of rows of the table.

    Returns:
      One `tf.IndexedSlices` per part, with indices of rows within the part.
    """
    numbers, rows = self.place(gradient.indices)
    count = self.num_parts
    values = tf.dynamic_partition(gradient.values, numbers, count)
    return [
      tf.IndexedSlices(
        values[number], own, tf.constant([size, self.shape[1]], tf.int64)
      )
      for number, (size, own) in enumerate(
        zip(self.sizes, tf.dynamic_partition(rows, numbers, count), strict=True)
      )
    ]

  def fetch(self, ids: tf.Tensor, parts: list[Any] | None = None) -> tf.Tensor:
    """Reads rows from the PS tasks, from all of them at the same time.

    Args:
      ids: int64 [n], indices of rows, on the current device.
      parts: What to read, one object per part of the table, such as the
        variables of a slot, or the moving averages. None: the variables of the
        table itself.

    Returns:
      The rows, [n, columns], on the current device.
    """
    parts = list(self.parts) if parts is None else parts
    numbers, rows = self.place(ids)

    def reader(part: Any) -> Callable[[tf.Tensor], tf.Tensor]:
      def read(own: tf.Tensor) -> tf.Tensor:
        if isinstance(part, tf.Variable):
          return control_flow.call_on(part.device, lambda: part.gather(own))
        # Moving averages also need the global step, which is on PS task 0.
        with tf.device(part.device):
          return part.gather(own)

      return read

    return _from_parts([reader(part) for part in parts], numbers, rows)

  def assign(
    self,
    ids: tf.Tensor,
    values: tf.Tensor,
    parts: list[Any] | None = None,
  ) -> None:
    """Assigns rows on the PS tasks; to be used inside a `tf.function`.

    Args:
      ids: int64 [n], indices of distinct rows.
      values: The new values of these rows, [n, columns].
      parts: What to change, one object per part of the table, such as the
        variables of a slot, or the moving averages. None: the variables of the
        table itself.
    """
    by_part = self.split(tf.IndexedSlices(values, ids))
    for part, own in zip(parts or self.parts, by_part, strict=True):
      with tf.device(part.device):
        part.scatter_update(own)

  def initialize(self, shadows: list[Any] | None = None) -> None:
    """Assigns initial values to all rows. The PS tasks compute them.

    The values of a row depend only on the seed, the index of the row, and the
    shape and dtype of the table, not on the number of PS tasks.

    Args:
      shadows: The variables that get the values, one per part: those of the
        moving average of the table. None: those of the table itself.

    Raises:
      ValueError: If a part does not fit into the memory of its PS task.
    """
    parts: list[Any] = self.parts if shadows is None else shadows
    room = {part.device: part.num_bytes for part in parts}
    what = "" if shadows is None else "the moving average of "
    resources.check_room(room, f"{what}the table {self.path!r}")

    # An argument: TensorFlow would keep the tensor that it makes of a constant,
    # and the variable, which shares its memory, would copy it when it changes.
    @tf.function(
      autograph=False, input_signature=[tf.TensorSpec([], self.dtype)]
    )
    def fill(first: tf.Tensor) -> tf.Tensor:
      for number, part in enumerate(parts):
        with tf.device(part.device):
          self._fill(number, part, first)
      return tf.constant(True)

    first = self._draw.first if self._draw.kind == "constant" else 0.0
    # A call of the function itself would warn of many traces.
    fill.get_concrete_function()(tf.constant(first, self.dtype))

  def _fill(self, number: int, part: Any, first: tf.Tensor) -> None:
    """Assigns initial values to the rows of one part, block by block.

    Args:
      number: The number of the part.
      part: The variable of the part.
      first: Scalar. First, all elements get this value. Then, unless the
        initializer is constant, they are replaced by random values.
    """
    draw, (size, columns) = self._draw, self.shape
    part.assign(tf.fill(part.shape, first))
    if draw.kind == "constant":
      return
    blocks = range(0, -(-size // _BLOCK_ROWS))
    if self.partition == "range":
      begin, count = sum(self.sizes[:number]), self.sizes[number]
      last = (begin + count - 1) // _BLOCK_ROWS
      blocks = range(begin // _BLOCK_ROWS, last + 1)

    def one(block: tf.Tensor) -> list[tf.Tensor]:
      ids = block * _BLOCK_ROWS + tf.range(_BLOCK_ROWS, dtype=tf.int64)
      numbers, rows = self.place(ids)
      is_own = (numbers == number) & (ids < size)
      values = draw.block(block, columns, self.dtype)
      part.scatter_update(
        tf.IndexedSlices(
          tf.boolean_mask(values, is_own), tf.boolean_mask(rows, is_own)
        )
      )
      return [block + 1]

    tf.while_loop(
      lambda block: block < blocks.stop,
      one,
      [tf.constant(blocks.start, tf.int64)],
      parallel_iterations=1,
    )


def _from_parts(
  readers: Sequence[Callable[[tf.Tensor], tf.Tensor]],
  numbers: tf.Tensor,
  rows: tf.Tensor,
) -> tf.Tensor:
  """Reads rows of a matrix that is divided into parts, from all parts at once.

  Args:
    readers: One function per part: it maps indices of rows within the part,
      int64 [m], to these rows, [m, columns].
    numbers: The number of the part that has each row, int32 [n].
    rows: The index of each row within its part, int64 [n].

  Returns:
    The rows, [n, columns].
  """
  if len(readers) == 1:
    return tf.identity(readers[0](rows))
  count = len(readers)
  by_part = tf.dynamic_partition(rows, numbers, count)
  places = tf.dynamic_partition(tf.range(tf.size(rows)), numbers, count)
  found = [read(own) for read, own in zip(readers, by_part, strict=True)]
  return tf.dynamic_stitch(places, found)


class Shards:
  """The variables of a table in a model that is exported.

  A table is a large matrix, whose rows live on the PS tasks while it is
  trained. In an exported model it is divided into *shards*, which are variables
  of consecutive rows. All but the last have the same number of rows.

  Here, the variables have no rows: they say how the exported model looks up
  rows. Their values are written to its files, block by block.

  Attributes:
    path: The path of the table, which identifies it.
    shape: (rows, columns) of the whole table.
    dtype: The dtype of the rows.
    variables: The shards, [None, columns] each, with distinct names.
  """

  def __init__(
    self, path: str, shape: tuple[int, int], dtype: tf.DType, max_bytes: int
  ):
    """Makes the variables.

    Args:
      path: The path of the table.
      shape: (rows, columns) of the whole table.
      dtype: The dtype of the rows.
      max_bytes: The largest size of a shard in bytes. A row that is larger is a
        shard by itself.
    """
    self.path = path
    self.shape = shape
    self.dtype = dtype
    rows, columns = shape
    size = min(rows, max(1, max_bytes // (columns * dtype.size)))
    # Whole blocks of a checkpoint are read faster, and with less memory.
    block = next(row_files.blocks(shape, dtype))[1]
    self._size = size // block * block or size
    self.variables = [
      tf.Variable(
        tf.zeros([0, columns], dtype),
        shape=[None, columns],
        name=f"{path}/shard_{number}",
      )
      for number in range(-(-rows // self._size))
    ]

  @property
  def names(self) -> list[str]:
    """The name of each shard, as it stands in the exported model."""
    return [variable.name.partition(":")[0] for variable in self.variables]

  @property
  def ranges(self) -> list[tuple[int, int]]:
    """The (first row, row after the last) of each shard."""
    rows, size = self.shape[0], self._size
    return [(begin, min(begin + size, rows)) for begin in range(0, rows, size)]

  def gather(self, ids: tf.Tensor) -> tf.Tensor:
    """Looks up rows in the shards.

    Args:
      ids: int64 [n], indices of rows of the whole table.

    Returns:
      The rows, [n, columns].

    Raises:
      tf.errors.InvalidArgumentError: At run time, if an id is out of range.
    """
    with tf.control_dependencies([_in_range(ids, self)]):
      numbers = tf.cast(ids // self._size, tf.int32)
    readers = [functools.partial(tf.gather, each) for each in self.variables]
    return _from_parts(readers, numbers, tf.math.floormod(ids, self._size))


@contextlib.contextmanager
def looked_up_in_shards(pairs: Iterable[tuple[Any, Shards]]) -> Iterator[None]:
  """Context in which lookups of tables read rows in shards.

  A table is a large matrix, such as that of an embedding. Its shards are the
  variables that an exported model has for it.

  Args:
    pairs: (variable, shards) pairs: a variable that is a table or stands for
      one, and the shards that are read instead of it.
  """
  variables = []
  try:
    for variable, shards in pairs:
      setattr(variable, _SHARDS, shards)
      variables.append(variable)
    yield
  finally:
    for variable in variables:
      setattr(variable, _SHARDS, None)


class RowTensor:
  """Reads and assigns a table, or what belongs to it, in blocks of rows.

  Checkpoints are saved and restored in this way, since the whole tensor may be
  too large for this process.

  Attributes:
    shape: (rows, columns).
    dtype: The dtype of the rows.
    num_parts: The number of parts, each on one PS task.
  """

  def __init__(self, rows: Rows, parts: list[Any]):
    """Stores what holds the rows on the PS tasks.

    Args:
      rows: The table (a large matrix), whose rows are divided among PS tasks.
      parts: The variables of the table or of its slot, or its moving averages,
        one object per PS task.
    """
    self.shape = rows.shape
    self.dtype = rows.dtype
    self.num_parts = rows.num_parts
    self._rows = rows
    self._parts = parts
    self._here = resources.this_device()

  @functools.cached_property
  def _reader(self) -> Callable[..., tf.Tensor]:
    @tf.function(autograph=False)
    def read(begin: tf.Tensor, end: tf.Tensor) -> tf.Tensor:
      with tf.device(self._here):
        return self._rows.fetch(tf.range(begin, end), self._parts)

    return self._concrete(read)

  @functools.cached_property
  def _writer(self) -> Callable[..., tf.Tensor]:
    @tf.function(autograph=False)
    def write(begin: tf.Tensor, end: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
      with tf.device(self._here):
        self._rows.assign(tf.range(begin, end), values, self._parts)
        return tf.constant(True)

    shape = [None, self.shape[1]]
    return self._concrete(write, tf.TensorSpec(shape, self.dtype))

  @functools.cached_property
  def _savers(self) -> list[Callable[..., tf.Tensor]]:
    """For each part, a function by which its PS task writes rows to a file."""

    def saver(part: Any) -> Callable[..., tf.Tensor]:
      @tf.function(autograph=False)
      def save(begin, end, path, name, place) -> tf.Tensor:
        with tf.device(part.device):
          rows = part.gather(tf.range(begin, end))
          return control_flow.done(row_files.save(path, name, place, rows))

      return self._concrete(save, *[tf.TensorSpec([], tf.string)] * 3)

    return list(map(saver, self._parts))

  def _concrete(self, function: Any, *more: tf.TensorSpec) -> Any:
    number = tf.TensorSpec([], tf.int64)
    with tf.device(None):
      return function.get_concrete_function(number, number, *more)

  def trace(self) -> None:
    """Traces the functions that saving a checkpoint calls, before the first.

    A process that must not trace functions later calls it.
    """
    _ = self._reader, self._savers

  def read(self, begin: int, end: int) -> np.ndarray:
    """Returns the rows from `begin` to `end`, exclusive, from the PS tasks."""
    with tf.device(None):
      limits = (tf.constant(n, tf.int64) for n in (begin, end))
      return self._reader(*limits).numpy()

  def assign(self, begin: int, values: np.ndarray) -> None:
    """Assigns `values` to the rows from `begin` on, on the PS tasks."""
    with tf.device(None):
      end = tf.constant(begin + len(values), tf.int64)
      rows = tf.constant(values, self.dtype)
      self._writer(tf.constant(begin, tf.int64), end, rows)

  def remote_writers(self, name: str) -> list[Callable[[str], object]]:
    """Returns functions that make the PS tasks write the rows to files.

    Args:
      name: The name of the tensor in the files.

    Returns:
      Functions of the path of a file, which has no extension. Each makes one PS
      task write rows of its own, as `row_files.write` requires. Functions that
      follow each other are for different PS tasks.
    """

    def write(number: int, begin: int, end: int, path: str) -> None:
      sizes, count = self._rows.sizes, self._rows.num_parts
      if self._rows.partition == "modulo" and count > 1:
        stored = row_files.stride_name(name, number, count)
        shape = (sizes[number], *self.shape[1:])
        place = row_files.slice_of(shape, begin, end)
      else:
        stored, before = name, sum(sizes[:number])
        place = row_files.slice_of(self.shape, before + begin, before + end)
      with tf.device(None):
        limits = (tf.constant(n, tf.int64) for n in (begin, end))
        texts = map(tf.constant, (path, stored, place))
        self._savers[number](*limits, *texts)

    shapes = [(size, *self.shape[1:]) for size in self._rows.sizes]
    blocks = [
      [(number, *limits) for limits in row_files.blocks(shape, self.dtype)]
      for number, shape in enumerate(shapes)
    ]
    return [
      functools.partial(write, *block)
      for together in itertools.zip_longest(*blocks)
      for block in together
      if block is not None
    ]


def attach(
  variable: Any,
  path: str,
  shape: tuple[int, int],
  initializer: Any,
  partition: str,
  where: Home,
) -> None:
  """Makes `variable`, of shape [0, columns], stand for a new table.

  A table is a large matrix whose rows live on the PS tasks only.

  Args:
    variable: A TensorFlow or Keras variable.
    path: The path of the table.
    shape: (rows, columns).
    initializer: An initializer of Keras for the rows.
    partition: How rows are divided among the PS tasks: `modulo` or `range`.
    where: The PS tasks that hold the table.

  Raises:
    ValueError: If `where` has a table of this path, the initializer cannot draw
      rows one by one, or the dtype of `variable` is not floating.
  """
  rows = Rows(path, shape, variable.dtype, initializer, partition, where)
  attach_rows(variable, rows)


def attach_rows(variable: Any, rows: Rows) -> None:
  """Makes `variable`, of shape [0, columns], stand for a table that exists.

  A table is a large matrix whose rows live on the PS tasks only.
  """
  setattr(variable, _ATTRIBUTE, rows)
  if isinstance(variable, keras.Variable):
    # By which `module_replica` finds the variables of a layer.
    setattr(variable.value, _ATTRIBUTE, rows)


def detach(variable: Any) -> None:
  """Makes `variable`, which stands for a table, an ordinary variable again.

  A table is a large matrix whose rows live on the PS tasks.
  """
  setattr(variable, _ATTRIBUTE, None)


def rows_of(variable: Any) -> Rows | None:
  """Returns the table that a variable stands for, as a `Rows` object.

  A table is a large matrix whose rows live on the PS tasks. In a model, a
  variable without rows stands for it.

  Returns:
    The `Rows`; None if the variable is an ordinary one.
  """
  return getattr(variable, _ATTRIBUTE, None)


def has_rows(variable: Any) -> bool:
  """Returns whether a variable has all rows of its table itself.

  A table is a large matrix. The rows may be elsewhere: on the PS tasks, or in
  the shards of a model that is exported.
  """
  shards = getattr(variable, _SHARDS, None)
  return rows_of(variable) is None and shards is None


def _path_of(variable: Any) -> str:
  """Returns the name of a table, for error messages.

  Args:
    variable: The placeholder of a table on the PS tasks, or an ordinary
      variable that has the rows itself.

  Returns:
    The path of the table in its namespace; for an ordinary variable its `name`.
  """
  rows = rows_of(variable)
  return getattr(variable, "name", "") if rows is None else rows.path


def check_combiner(combiner: str | None) -> None:
  """Raises ValueError unless `combiner` is None or one of `COMBINERS`."""
  if combiner is not None and combiner not in COMBINERS:
    raise ValueError(
      f"`combiner` must be one of {', '.join(COMBINERS)}, or None. Received:"
      f" {combiner!r}."
    )


def check_ids(ids: Ids, path: str) -> None:
  """Checks that the ids of the rows to look up are integers.

  Args:
    ids: The ids.
    path: The path of the table, for the error message.

  Raises:
    TypeError: If `ids` are not integers.
  """
  if not tf.as_dtype(ids.dtype).is_integer:
    raise TypeError(
      f"the ids of rows of the table {path!r} must be integers. Received:"
      f" {tf.as_dtype(ids.dtype).name}."
    )


def gather(
  variable: Any,
  ids: Ids,
  combiner: str | None = None,
  weights: Ids | None = None,
) -> tf.Tensor | tf.RaggedTensor:
  """Looks up rows of a table, or of an ordinary variable.

  A table is a large matrix whose rows live on the PS tasks. Its rows are
  fetched from there, each row once. Gradients flow to the tensor that stands
  for the table in the model. Outside of the training, moving averages take the
  place of the rows if `reads_averages` of the home is set.

  Args:
    variable: A variable that stands for a table, or has the rows itself.
    ids: Indices of rows, of any shape and integer dtype.
    combiner: One of `COMBINERS`; combines the rows of the ids along the last
      dimension. None: every id yields a row.
    weights: With a combiner, the weight of each id: numbers, with the same
      structure and shape as `ids`. None: all weights are 1.

  Returns:
    The rows, of shape [*ids.shape, columns]; with a combiner, [*ids.shape[:-1],
    columns].

  Raises:
    TypeError: If `ids` are not integers, or sparse without a combiner.
    ValueError: If `combiner` is not known, `ids` have no dimension for it, or
      `weights` do not go with `ids` and `combiner`.
    RuntimeError: If the PS tasks of the table have ended.
    tf.errors.InvalidArgumentError: At run time, if an id is out of range.
  """
  check_combiner(combiner)
  path = _path_of(variable)
  if weights is not None:
    _check_weights(weights, ids, combiner, path)
  if combiner is not None or isinstance(ids, tf.SparseTensor):
    return _combined(variable, ids, combiner, weights)
  if isinstance(ids, tf.RaggedTensor):
    return ids.with_flat_values(_gather(variable, ids.flat_values))
  return _gather(variable, ids)


def _gather(variable: Any, ids: tf.Tensor) -> tf.Tensor:
  """Looks up rows by a dense tensor of integers; see `gather`."""
  path = _path_of(variable)
  check_ids(ids, path)
  if has_rows(variable):
    return tf.gather(tf.convert_to_tensor(variable), ids)
  flat = tf.cast(tf.reshape(ids, [-1]), tf.int64)
  shards = getattr(variable, _SHARDS, None)
  found = _fetch(variable, flat) if shards is None else shards.gather(flat)
  columns = found.shape[1]
  shape: list[Any] = [tf.shape(ids), [columns]]
  found = tf.reshape(found, tf.concat(shape, axis=0))
  return tf.ensure_shape(found, [*ids.shape, columns])


def _fetch(variable: Any, ids: tf.Tensor) -> tf.Tensor:
  """Fetches rows from the PS tasks, each row once; see `gather`.

  Args:
    variable: A variable that stands for a table.
    ids: int64 [n], indices of rows.

  Returns:
    The rows, [n, columns].

  Raises:
    RuntimeError: If the PS tasks of the table have ended.
  """
  rows, path = rows_of(variable), _path_of(variable)
  assert rows is not None
  if not rows.home.is_open:
    raise RuntimeError(
      f"the rows of the table {path!r} were on parameter servers, which have"
      " ended: call `tf_replicas.load_tables(model, train_dir)` first."
    )
  placeholder = _placeholders.get().get(path)
  parts = None
  if placeholder is None:
    placeholder = tf.convert_to_tensor(variable)
    parts = rows.averages if rows.home.reads_averages else None
  unique, places = tf.unique(ids)
  # The rows must not be older than the placeholder, which was pulled before.
  with tf.control_dependencies([placeholder, _in_range(unique, rows)]):
    unique = resources.copy_here(unique)
  fetched = _with_gradient(placeholder, rows.fetch(unique, parts), unique)
  return tf.gather(fetched, places)


def _check_weights(
  weights: Ids, ids: Ids, combiner: str | None, path: str
) -> None:
  """Checks the weights of a lookup.

  Args:
    weights: The weights of the ids.
    ids: The ids of the rows to look up.
    combiner: How the rows are combined; None: they are not.
    path: The path of the table, for the error message.

  Raises:
    ValueError: If there is no combiner, or `weights` and `ids` differ in their
      structure or shape.
  """
  if combiner is None:
    raise ValueError(
      f"`weights` of ids of the table {path!r} must be None without a"
      f" `combiner`. Received: {weights!r:.200}."
    )
  same_kind = all(
    isinstance(weights, kind) == isinstance(ids, kind)
    for kind in (tf.RaggedTensor, tf.SparseTensor)
  )
  if not same_kind or not weights.shape.is_compatible_with(ids.shape):
    raise ValueError(
      f"`weights` of ids of the table {path!r} must have the structure and"
      f" shape of the ids, {ids!r:.200}. Received: {weights!r:.200}."
    )


def _combined(
  variable: Any, ids: Ids, combiner: str | None, weights: Any
) -> tf.Tensor | tf.RaggedTensor:
  """Looks up rows by ids, and combines the rows of each *bag*; see `gather`.

  A bag is the ids along the last dimension: a row of a matrix of ids.
  """
  path = _path_of(variable)
  if combiner is None:
    raise TypeError(
      f"`combiner` must be one of {', '.join(COMBINERS)} where the ids of rows"
      f" of the table {path!r} are sparse. Received: None."
    )
  if isinstance(ids, tf.RaggedTensor) and ids.ragged_rank > 1:
    of_values = None if weights is None else weights.values
    inner = _combined(variable, ids.values, combiner, of_values)
    return ids.with_values(inner)
  if isinstance(ids, tf.RaggedTensor) and ids.flat_values.shape.rank == 1:
    found = _gather(variable, ids.flat_values)
    factors = None if weights is None else weights.flat_values
    bags = ids.value_rowids()
    return _combine(found, bags, ids.nrows(), combiner, factors)
  if isinstance(ids, tf.SparseTensor) and ids.shape.rank == 2:
    found = _gather(variable, ids.values)
    factors = None if weights is None else weights.values
    bags = ids.indices[:, 0]
    return _combine(found, bags, ids.dense_shape[0], combiner, factors)
  if not isinstance(ids, tf.Tensor) or not ids.shape.rank:
    raise ValueError(
      f"the ids of rows of the table {path!r} must be a sparse tensor of 2"
      " dimensions, a ragged tensor without inner dimensions, or a dense tensor"
      f" of at least 1, where `combiner` is {combiner!r}. Received:"
      f" {ids!r:.200}."
    )
  found = _gather(variable, tf.reshape(ids, [-1]))
  factors = None if weights is None else tf.reshape(weights, [-1])
  outer, size = tf.shape(ids)[:-1], tf.shape(ids)[-1]
  count = tf.reduce_prod(outer)
  bags = tf.repeat(tf.range(count), size)
  total = _combine(found, bags, count, combiner, factors)
  shape: list[Any] = [outer, [found.shape[-1]]]
  total = tf.reshape(total, tf.concat(shape, axis=0))
  return tf.ensure_shape(total, [*ids.shape[:-1], found.shape[-1]])


def _combine(
  found: tf.Tensor,
  bags: tf.Tensor,
  count: tf.Tensor,
  combiner: str,
  weights: tf.Tensor | None,
) -> tf.Tensor:
  """Combines the rows of each bag, as `tf.nn.embedding_lookup_sparse` does.

  A *bag* is a group of ids whose rows are combined into one row.

  Args:
    found: The rows that were looked up, [n, columns].
    bags: The number of the bag that each row belongs to, [n].
    count: The number of bags.
    combiner: One of `COMBINERS`.
    weights: The weight of each row, [n]; None: all weights are 1.

  Returns:
    One row per bag, [count, columns]; zeros for a bag without rows.
  """
  if weights is None:
    return _COMBINERS[combiner](found, bags, count)
  weights = tf.cast(weights, found.dtype)[:, tf.newaxis]
  add = tf.math.unsorted_segment_sum
  total = add(found * weights, bags, count)
  if combiner == "sum":
    return total
  if combiner == "mean":
    return tf.math.divide_no_nan(total, add(weights, bags, count))
  norm = tf.sqrt(add(tf.square(weights), bags, count))
  return tf.math.divide_no_nan(total, norm)


def _in_range(ids: tf.Tensor, rows: Rows | Shards) -> tf.Operation | tf.Tensor:
  """Returns an op that fails if one of `ids` is not the index of a row.

  Args:
    ids: int64 [n], indices to look up in a table.
    rows: The table, a large matrix, which is on the PS tasks or in shards.
  """
  count = rows.shape[0]
  low, high = tf.reduce_min(ids), tf.reduce_max(ids)
  message = f"the ids of rows of {rows.path} must be in [0, {count}). Received:"
  is_fine = (low >= 0) & (high < count) | (tf.size(ids) == 0)
  return control_flow.require(is_fine, message, tf.where(low < 0, low, high))


def bad_ids(error: tf.errors.OpError) -> str:
  """Finds the cause in an error if it comes from a lookup with a bad id.

  Args:
    error: What the step of a replica raised, with a message of many lines.

  Returns:
    One line with the table, the valid ids and an invalid id that was received;
    "" if the error has another cause.
  """
  found = _BAD_IDS.search(error.message)
  return f"{found[1]} {found[2]}" if found else ""


def _with_gradient(
  placeholder: tf.Tensor, fetched: tf.Tensor, ids: tf.Tensor
) -> tf.Tensor:
  """Returns `fetched`, but its gradient flows to `placeholder`.

  A table is a large matrix whose rows live on the PS tasks. So a tensor of this
  process has to stand for it in the computation of gradients.

  Args:
    placeholder: The tensor [0, columns] that stands for the table. It gets the
      gradient as a `tf.IndexedSlices` whose indices are `ids`.
    fetched: Rows of the table, [n, columns].
    ids: The indices of these rows, int64 [n].
  """

  @tf.custom_gradient
  def fetch(placeholder, fetched) -> Any:
    def gradient(upstream):
      values = tf.convert_to_tensor(upstream)
      values = tf.cast(values, placeholder.dtype)
      shape = tf.constant([0, fetched.shape[1]], tf.int64)
      return tf.IndexedSlices(values, ids, shape), None

    return tf.identity(fetched), gradient

  found: Any = fetch(placeholder, fetched)
  return found
