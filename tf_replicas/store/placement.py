"""Decides which PS task holds which variable, or which shard of a variable.

PS tasks are parameter servers; a shard is a part of a variable. A policy is a
function that maps the specs of all variables to the shards of each variable, in
the order of the specs:

    specs = placement.from_variables(model.variables)
    shards = placement.plan(specs, placement.GreedyByBytes(num_tasks=2))
    print(placement.table(specs, shards, ["/job:ps/task:0", "/job:ps/task:1"]))

A policy gets the whole list at once, so every process computes the same plan. A
user's own policy must make its shards by `split`.
"""

import collections
import itertools
import math
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import tensorflow as tf

from tf_replicas.runtime import own_variables
from tf_replicas.store import tables

# TF1's `min_max_variable_partitioner(min_slice_size=256 << 10)`.
MIN_SHARD_BYTES = 256 << 10
# The attribute of a variable that `divide_by` sets.
_DIVISOR = "_tf_replicas_divisor"


class VariableSpec(NamedTuple):
  """Describes a variable of the model.

  Attributes:
    path: The name that identifies the variable, such as `conv1/kernel`.
    shape: The static shape of the variable.
    dtype: The name of the variable's dtype, such as `float32`.
    trainable: Whether gradients update the variable.
    table: If the variable stands for a table (a large matrix whose rows live on
      the PS tasks only), the `tables.Rows` that describe the table; else None.
    divisor: An update divides the sum over its contributions by this number.
      None: by the number of the contributions.
    constraint: Maps the variable to the value that the optimizer assigns after
      an update, such as a `keras.constraints.Constraint`. None: no constraint.
  """

  path: str
  shape: tuple[int, ...]
  dtype: str
  trainable: bool
  table: tables.Rows | None = None
  divisor: int | None = None
  constraint: Callable[[tf.Variable], tf.Tensor] | None = None

  @property
  def is_statistic(self) -> bool:
    """Whether it is a variable of the model without gradients.

    Examples are the moving means of batch normalization. The loss scale and the
    sums of metrics have no gradients either, but belong to the library.
    """
    is_own = own_variables.is_own(self.path) or self.divisor is not None
    return not (self.trainable or is_own)

  @property
  def size(self) -> int:
    """Number of elements of the variable."""
    return math.prod(self.shape)

  @property
  def num_bytes(self) -> int:
    """Number of bytes of the variable's value."""
    return self.size * tf.as_dtype(self.dtype).size


class Shard(NamedTuple):
  """A contiguous part of a variable, or a whole variable, on one PS task.

  Attributes:
    path: The path of the variable.
    index: The index of this shard among the shards of the variable.
    num_shards: The number of shards of the variable.
    task: The index of the PS task (parameter server) that holds the shard.
    axis: The axis along which the variable is split; 0 for a whole variable.
    begin: The first index along `axis`.
    size: The number of indices along `axis`; 1 for a scalar.
    shape: The shape of the shard.
    dtype: The name of the shard's dtype.
  """

  path: str
  index: int
  num_shards: int
  task: int
  axis: int
  begin: int
  size: int
  shape: tuple[int, ...]
  dtype: str

  @property
  def name(self) -> str:
    """Name of the shard: the path of the variable if there is one shard only.

    Otherwise it is `<path>/part_<index>`.
    """
    part = "" if self.num_shards == 1 else f"/part_{self.index}"
    return self.path + part

  @property
  def num_bytes(self) -> int:
    """Number of bytes of the shard's value."""
    return math.prod(self.shape) * tf.as_dtype(self.dtype).size

  @property
  def slices(self) -> tuple[slice, ...]:
    """Slices that select the shard from the variable's whole value.

    They are to be used as `value[shard.slices]`.
    """
    if not self.shape:
      return ()
    rows = slice(self.begin, self.begin + self.size)
    return (slice(None),) * self.axis + (rows,)


Plan = list[tuple[Shard, ...]]
Policy = Callable[[Sequence[VariableSpec]], Plan]


def path_of(variable: tf.Variable | str) -> str:
  """Returns the path that identifies a variable, such as `conv1/kernel`.

  Args:
    variable: A Keras variable, whose `path` is returned; a TensorFlow variable,
      whose name without `:0` is returned; or a path, which is returned.
  """
  if isinstance(variable, str):
    return variable
  return getattr(variable, "path", None) or variable.name.removesuffix(":0")


def divide_by(variable: Any, divisor: int) -> None:
  """Chooses the number by which updates divide the sum of contributions.

  By default, this is the number of contributions in the update, so that an
  update applies their mean.

  Args:
    variable: The variable, which `from_variables` will describe.
    divisor: The number.
  """
  setattr(variable, _DIVISOR, divisor)


def from_variables(variables: Sequence[tf.Variable]) -> list[VariableSpec]:
  """Describes Keras or TensorFlow variables by one `VariableSpec` each.

  Args:
    variables: The variables, identified by `path_of`. If a variable stands for
      a table (a large matrix on the PS tasks), the spec describes the table.

  Returns:
    One spec per variable.

  Raises:
    ValueError: If two paths are the same, a shape is not static, or a table is
      frozen (not trainable).
  """
  specs = []
  for variable in variables:
    if (rows := tables.rows_of(variable)) is not None:
      if not variable.trainable:
        raise ValueError(
          f"the table {rows.path!r} must be trainable. Received: a frozen one."
        )
      specs.append(
        VariableSpec(rows.path, rows.shape, rows.dtype.name, True, rows)
      )
      continue
    path, shape = path_of(variable), tf.TensorShape(variable.shape)
    if not shape.is_fully_defined():
      raise ValueError(
        f"`variables` must have static shapes. Received: {path!r}, {shape}."
      )
    dtype, trainable = tf.as_dtype(variable.dtype).name, variable.trainable
    sizes = tuple(size or 0 for size in shape)
    specs.append(
      VariableSpec(
        path,
        sizes,
        dtype,
        trainable,
        divisor=getattr(variable, _DIVISOR, None),
        constraint=getattr(variable, "constraint", None),
      )
    )
  _check_distinct_paths("variables", specs)
  return specs


def split(
  spec: VariableSpec, tasks: Sequence[int], *, axis: int = 0
) -> tuple[Shard, ...]:
  """Splits a variable into one shard per task, in order along an axis.

  The sizes differ by at most 1. Larger shards come first, as in TensorFlow's
  partitioners: 10 rows are split into 3, 3, 2, 2.

  Args:
    spec: The variable.
    tasks: The index of the PS task of each shard. With a single task the
      variable is whole.
    axis: The axis to split; not used for a whole variable.

  Returns:
    The shards.

  Raises:
    ValueError: If there is no such axis, or it is shorter than `tasks`.
  """
  pieces = len(tasks)
  if pieces == 1:
    size, task = (*spec.shape, 1)[0], tasks[0]
    return (Shard(spec.path, 0, 1, task, 0, 0, size, spec.shape, spec.dtype),)
  if not 0 <= axis < len(spec.shape) or spec.shape[axis] < pieces:
    rule = f"`axis` must be an axis of at least {pieces} rows of {spec}."
    raise ValueError(f"{rule} Received: {axis}.")
  shards, begin = [], 0
  for i, task in enumerate(tasks):
    size = spec.shape[axis] // pieces + (i < spec.shape[axis] % pieces)
    shape = spec.shape[:axis] + (size,) + spec.shape[axis + 1 :]
    shards.append(
      Shard(spec.path, i, pieces, task, axis, begin, size, shape, spec.dtype)
    )
    begin += size
  return tuple(shards)


class RoundRobin:
  """Places whole variables on the PS tasks in turn.

  Variable i is placed on task i modulo `num_tasks`, as by TF1's
  `replica_device_setter` and TF2's `ParameterServerStrategy`.
  """

  def __init__(self, num_tasks: int):
    _check_positive("num_tasks", num_tasks)
    self._num_tasks = num_tasks

  def __call__(self, specs: Sequence[VariableSpec]) -> Plan:
    return [split(s, [i % self._num_tasks]) for i, s in enumerate(specs)]


class Partitioned:
  """Splits large variables into shards, and balances the bytes of the PS tasks.

  A variable of B bytes gets `B // min_shard_bytes` shards, at least one and at
  most `num_shards`. They are placed on the tasks that hold the fewest bytes so
  far, at most one shard per task. Variables with the largest shards are placed
  first.

  Vectors and matrices are split along axis 0. The gradient of an embedding
  matrix consists of rows, so a task then gets only the rows of its shard.
  Variables of a higher rank (such as kernels), or with fewer rows than shards,
  are split along the longest axis, which makes shards of similar size. (Along
  axis 0, a 5x5 kernel would be split into 3 + 2 rows.)
  """

  def __init__(
    self,
    num_tasks: int,
    min_shard_bytes: int = MIN_SHARD_BYTES,
    num_shards: int | None = None,
  ):
    """Creates the placement policy.

    Args:
      num_tasks: The number of PS tasks.
      min_shard_bytes: The smallest mean size, in bytes, of a variable's shards.
      num_shards: The largest number of shards of a variable; None: `num_tasks`.

    Raises:
      ValueError: If an argument is out of range.
    """
    _check_positive("num_tasks", num_tasks)
    _check_positive("min_shard_bytes", min_shard_bytes)
    if num_shards is not None and not 1 <= num_shards <= num_tasks:
      raise ValueError(
        f"`num_shards` must be in [1, {num_tasks}], since a task holds at most"
        f" one shard of a variable. Received: {num_shards}."
      )
    self._num_tasks = num_tasks
    self._min_shard_bytes = min_shard_bytes
    self._max_shards = num_shards or num_tasks

  def __call__(self, specs: Sequence[VariableSpec]) -> Plan:
    cuts = [self._cut(spec) for spec in specs]
    loads = [[piece.num_bytes for piece in pieces] for pieces in cuts]
    return _place_greedily(cuts, loads, self._num_tasks)

  def _cut(self, spec: VariableSpec) -> tuple[Shard, ...]:
    """Splits a variable into as many shards as the policy allows.

    The shards are on tasks 0, 1, …; `_place_greedily` chooses their tasks
    later.
    """
    pieces = min(self._max_shards, spec.num_bytes // self._min_shard_bytes)
    if pieces < 2 or not spec.shape:
      return split(spec, [0])
    axis = 0
    if len(spec.shape) > 2 or spec.shape[0] < pieces:
      axis = spec.shape.index(max(spec.shape))
    return split(spec, range(min(pieces, spec.shape[axis])), axis=axis)


class GreedyByBytes(Partitioned):
  """Places each whole variable on the PS task with the fewest bytes so far.

  The largest variable is placed first. (TF1's `GreedyLoadBalancingStrategy`
  placed variables in the order of their creation, which gives a worse balance.)
  Variables of equal size are placed in the order of the specs. If several tasks
  have equally few bytes, the first of them is used. No task gets more bytes
  than the mean over the tasks plus the bytes of the largest variable.
  """

  def __init__(self, num_tasks: int):
    super().__init__(num_tasks, num_shards=1)


def policy_from(
  name: str,
  num_tasks: int,
  *,
  min_shard_bytes: int = MIN_SHARD_BYTES,
  num_shards: int | None = None,
) -> Policy:
  """Returns the placement policy with the given name.

  Args:
    name: `round_robin`, `greedy` or `partitioned`.
    num_tasks: The number of PS tasks.
    min_shard_bytes: The smallest mean size, in bytes, of a variable's shards.
      Only `partitioned` uses it.
    num_shards: The largest number of shards of a variable; None: `num_tasks`.
      Only `partitioned` uses it.

  Raises:
    ValueError: If there is no such policy, or a number is out of range.
  """
  if name == "round_robin":
    return RoundRobin(num_tasks)
  if name == "greedy":
    return GreedyByBytes(num_tasks)
  if name == "partitioned":
    return Partitioned(num_tasks, min_shard_bytes, num_shards)
  raise ValueError(
    "`name` must be one of 'round_robin', 'greedy', 'partitioned'. Received:"
    f" {name!r}."
  )


def plan(specs: Sequence[VariableSpec], policy: Policy) -> Plan:
  """Places variables by a policy, and checks the policy's plan.

  Args:
    specs: The variables.
    policy: Returns the shards of each variable. It is called without tables
      (large matrices), whose rows are always divided among all PS tasks.

  Returns:
    The shards of each variable.

  Raises:
    ValueError: If two specs have the same path, or the policy leaves out a
      variable, puts two shards of a variable on one task, or returns other
      shards than `split` makes.
  """
  _check_distinct_paths("specs", specs)
  others = [spec for spec in specs if spec.table is None]
  shards = policy(others)
  if len(shards) != len(others):
    rule = f"`policy` must place all {len(others)} variables."
    raise ValueError(f"{rule} Received: {len(shards)}.")
  for spec, pieces in zip(others, shards, strict=True):
    tasks = [piece.task for piece in pieces]
    distinct = 0 < len(tasks) == len(set(tasks)) and min(tasks) >= 0
    if not distinct or pieces != split(spec, tasks, axis=pieces[0].axis):
      raise ValueError(
        "`policy` must return shards of `split` on distinct tasks for"
        f" {spec.path!r}. Received: {pieces}."
      )
  placed = iter(shards)
  return [
    next(placed) if s.table is None else split(s, range(s.table.num_parts))
    for s in specs
  ]


def bytes_per_task(shards: Plan, num_tasks: int) -> list[int]:
  """Returns, for each of `num_tasks` PS tasks, the bytes of all its shards."""
  loads = [0] * num_tasks
  for shard in itertools.chain(*shards):
    loads[shard.task] += shard.num_bytes
  return loads


def balance(loads: Sequence[float]) -> float:
  """Computes the largest load divided by the mean load.

  The result is 1 if all loads are equal, and otherwise larger.

  Args:
    loads: The load of each task, such as its bytes.
  """
  return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def table(
  specs: Sequence[VariableSpec], shards: Plan, device_of_task: Sequence[str]
) -> str:
  """Formats the placement of variables as a table of text.

  The table lists all shards with their devices, the bytes of each device, and
  the total.

  Args:
    specs: The variables.
    shards: The shards of each variable, as `plan` returns them.
    device_of_task: The device of every task, in order. If there is one device,
      the lines for devices are left out, as they would repeat the total.

  Returns:
    Lines of text, without a final newline.
  """
  rows = [("variable", "shape", "bytes", "device")]
  for shard in itertools.chain(*shards):
    num_bytes, device = human_bytes(shard.num_bytes), device_of_task[shard.task]
    rows.append((shard.name, str(shard.shape), num_bytes, device))
  lines = _align(rows, "<<><") + [""]
  loads = bytes_per_task(shards, len(device_of_task))
  if len(device_of_task) > 1:
    sizes = map(human_bytes, loads)
    rows = [("device", "bytes"), *zip(device_of_task, sizes, strict=True)]
    lines += _align(rows, "<>")
    lines.append(f"Balance: {balance(loads):.2f} (max/mean bytes per device)")
  num_parameters = sum(spec.size for spec in specs)
  lines.append(
    f"Total: {len(specs)} variables, {num_parameters:,} parameters,"
    f" {human_bytes(sum(loads))}"
  )
  return "\n".join(lines)


def human_bytes(num_bytes: int) -> str:
  """Formats a number of bytes with a unit, such as `512 B` or `18.8 KiB`."""
  value, unit = num_bytes, "B"
  for larger_unit in ("KiB", "MiB", "GiB", "TiB"):
    # Less than 1024, so that 1024.0 is never printed.
    if value < 1023.95:
      break
    value, unit = value / 1024, larger_unit
  return f"{value:.{0 if unit == 'B' else 1}f} {unit}"


def _place_greedily(
  cuts: Plan, loads: Sequence[Sequence[float]], num_tasks: int
) -> Plan:
  """Places shards on the tasks with the least load, largest shards first.

  A task gets a shard only while it has the least load, so the loads of two
  tasks never differ by more than the largest shard.

  Args:
    cuts: The shards of each variable, whose tasks are to be chosen.
    loads: The load of each of these shards, such as its bytes.
    num_tasks: The number of PS tasks.

  Returns:
    The shards with the chosen tasks.
  """
  total = [0] * num_tasks
  placed = list(cuts)
  for i in sorted(range(len(cuts)), key=lambda i: -loads[i][0]):
    # The shards of a variable are on different tasks.
    tasks = sorted(range(num_tasks), key=total.__getitem__)[: len(cuts[i])]
    for task, load in zip(tasks, loads[i], strict=True):
      total[task] += load
    placed[i] = tuple(map(lambda p, t: p._replace(task=t), cuts[i], tasks))
  return placed


def _align(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
  """Formats rows of text as lines with aligned columns.

  Args:
    rows: The cells of each row.
    sides: One character per column: `<` aligns left, `>` right.
  """
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  line = "  ".join(map("{{:{}{}}}".format, sides, widths))
  return [line.format(*row).rstrip() for row in rows]


def _check_distinct_paths(name: str, specs: Sequence[VariableSpec]) -> None:
  counts = collections.Counter(spec.path for spec in specs)
  for path, count in counts.items():
    if count > 1:
      raise ValueError(
        f"`{name}` must have distinct paths. Received: {path!r} {count} times."
      )


def _check_positive(name: str, value: int) -> None:
  if value < 1:
    raise ValueError(f"`{name}` must be at least 1. Received: {value}.")
