"""Where the variables live: which task holds which piece of which variable.

A policy is a callable that takes the specs of all variables and returns the
shards of each, in the order of the specs:

    specs = placement.from_variables(model.variables)
    shards = placement.plan(specs, placement.GreedyByBytes(num_tasks=2))
    print(placement.table(specs, shards, ["/job:ps/task:0", "/job:ps/task:1"]))

Policies see the whole list at once, so every process computes the same plan.
A policy of your own builds its shards with `split`.
"""

import collections
import itertools
import math
from collections.abc import Callable
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

# TF1's `min_max_variable_partitioner(min_slice_size=256 << 10)`.
MIN_SHARD_BYTES = 256 << 10


class VariableSpec(NamedTuple):
  """A variable as far as its placement is concerned.

  Attributes:
    path: The name that identifies it, e.g. `conv1/kernel`.
    shape: Its static shape.
    dtype: The name of its type, e.g. `float32`.
    trainable: Whether gradients update it.
  """

  path: str
  shape: tuple[int, ...]
  dtype: str
  trainable: bool

  @property
  def size(self) -> int:
    """Number of elements."""
    return math.prod(self.shape)

  @property
  def num_bytes(self) -> int:
    return self.size * tf.as_dtype(self.dtype).size


class Shard(NamedTuple):
  """A contiguous piece of a variable, or the whole of it, on one task.

  Attributes:
    path: The variable it belongs to.
    index: Its number among the `num_shards` of the variable.
    task: The index of the task that holds it.
    axis: The axis along which the variable is cut; 0 for a whole variable.
    begin: Where it begins along `axis`.
    size: Its extent along `axis`; 1 for a scalar.
    shape: The shape of the shard itself.
    dtype: The name of its type.
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
    """The variable's path, followed by `/part_<index>` if it has parts."""
    part = "" if self.num_shards == 1 else f"/part_{self.index}"
    return self.path + part

  @property
  def num_bytes(self) -> int:
    return math.prod(self.shape) * tf.as_dtype(self.dtype).size

  @property
  def slices(self) -> tuple[slice, ...]:
    """Cuts the shard out of the variable's value: `value[shard.slices]`."""
    if not self.shape:
      return ()
    cut = slice(self.begin, self.begin + self.size)
    return (slice(None),) * self.axis + (cut,)


Plan = list[tuple[Shard, ...]]
Policy = Callable[[Sequence[VariableSpec]], Plan]


def path_of(variable: tf.Variable | str) -> str:
  """The path of a Keras variable, or the name of a TensorFlow one.

  A path given as such is returned as it is.
  """
  if isinstance(variable, str):
    return variable
  return getattr(variable, "path", None) or variable.name.removesuffix(":0")


def from_variables(variables: Sequence[tf.Variable]) -> list[VariableSpec]:
  """Describes variables of Keras or TensorFlow, by `path_of`.

  Raises:
    ValueError: If two paths are the same, or a shape is not static.
  """
  specs = []
  for variable in variables:
    path, shape = path_of(variable), tf.TensorShape(variable.shape)
    if not shape.is_fully_defined():
      raise ValueError(
        f"`variables` must have static shapes. Received: {path!r}, {shape}."
      )
    dtype, trainable = tf.as_dtype(variable.dtype).name, variable.trainable
    specs.append(VariableSpec(path, tuple(shape), dtype, trainable))
  _check_distinct_paths("variables", specs)
  return specs


def split(
  spec: VariableSpec, tasks: Sequence[int], *, axis: int = 0
) -> tuple[Shard, ...]:
  """Cuts a variable into one piece per task, in order along the axis.

  The pieces are as equal as whole rows allow, and the longer ones come first,
  as in TensorFlow's partitioners: 10 rows in 4 are 3, 3, 2, 2.

  Args:
    spec: The variable.
    tasks: The task of each piece; a single one keeps the variable whole.
    axis: The axis to cut, ignored if the variable stays whole.

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


def byte_size_load_fn(spec: VariableSpec) -> int:
  """The load of a variable is its bytes (TF1 `contrib.training`'s name)."""
  return spec.num_bytes


class RoundRobin:
  """Variable i lives on task i modulo `num_tasks`, whatever its size.

  What TF1's `replica_device_setter` and TF2's `ParameterServerStrategy` do.
  """

  def __init__(self, num_tasks: int):
    _check_positive("num_tasks", num_tasks)
    self._num_tasks = num_tasks

  def __call__(self, specs: Sequence[VariableSpec]) -> Plan:
    return [split(s, [i % self._num_tasks]) for i, s in enumerate(specs)]


class GreedyByBytes:
  """Each variable goes to the task with the least load so far.

  TF1's `GreedyLoadBalancingStrategy` placed variables as they were created and
  was only as good as that order. This one starts with the largest; equal loads
  keep the order of the specs, and of equal tasks the first is taken. No task
  gets more than the mean plus the largest variable. `load_fn` says what load a
  variable is; one that counts slots would multiply the bytes of trainable ones.
  """

  def __init__(
    self,
    num_tasks: int,
    load_fn: Callable[[VariableSpec], float] = byte_size_load_fn,
  ):
    _check_positive("num_tasks", num_tasks)
    self._num_tasks = num_tasks
    self._load_fn = load_fn

  def __call__(self, specs: Sequence[VariableSpec]) -> Plan:
    whole = [split(spec, [0]) for spec in specs]
    loads = [[self._load_fn(spec)] for spec in specs]
    return _place_greedily(whole, loads, self._num_tasks)


class Partitioned:
  """Cuts large variables into pieces, then places the pieces by bytes.

  A variable of at least `2 * min_shard_bytes` is cut into as many pieces as
  its bytes hold `min_shard_bytes`, at most one per task, and these go to the
  least loaded tasks. Variables with the largest pieces are placed first.

  A vector or a matrix is cut along axis 0: the gradient of an embedding table
  names rows, and so reaches only the tasks that hold them. If it has fewer rows
  than pieces, and for every higher rank (kernels), the longest axis is cut,
  since its pieces are the most even: a 5x5 kernel in two would be 3 + 2 rows.
  """

  def __init__(
    self,
    num_tasks: int,
    min_shard_bytes: int = MIN_SHARD_BYTES,
    num_shards: int | None = None,
  ):
    """Creates the policy.

    Args:
      num_tasks: How many tasks share the variables.
      min_shard_bytes: The least bytes of a piece, on average over the pieces
        of a variable.
      num_shards: The most pieces a variable is cut into; None: one per task.
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
    """Returns the pieces, their tasks still to be chosen."""
    pieces = min(self._max_shards, spec.num_bytes // self._min_shard_bytes)
    if pieces < 2 or not spec.shape:
      return split(spec, [0])
    axis = 0
    if len(spec.shape) > 2 or spec.shape[0] < pieces:
      axis = spec.shape.index(max(spec.shape))
    return split(spec, range(min(pieces, spec.shape[axis])), axis=axis)


def policy_from(
  name: str,
  num_tasks: int,
  *,
  min_shard_bytes: int = MIN_SHARD_BYTES,
  num_shards: int | None = None,
) -> Policy:
  """Returns the policy called `round_robin`, `greedy` or `partitioned`.

  The last two arguments are those of `Partitioned`; the others cut nothing.
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
  """Places variables by a policy and checks what it returns.

  Raises:
    ValueError: If two specs have the same path, or the policy (one of your
      own, say) does not cover every variable, or puts two shards of it on one
      task.
  """
  _check_distinct_paths("specs", specs)
  shards = policy(specs)
  if len(shards) != len(specs):
    rule = f"`policy` must place all {len(specs)} variables."
    raise ValueError(f"{rule} Received: {len(shards)}.")
  for spec, pieces in zip(specs, shards, strict=True):
    tasks = [piece.task for piece in pieces]
    distinct = 0 < len(tasks) == len(set(tasks)) and min(tasks) >= 0
    if not distinct or pieces != split(spec, tasks, axis=pieces[0].axis):
      raise ValueError(
        "`policy` must return `split` pieces on distinct tasks for"
        f" {spec.path!r}. Received: {pieces}."
      )
  return shards


def bytes_per_task(shards: Plan, num_tasks: int) -> list[int]:
  """Bytes of variables on each task, idle ones included."""
  loads = [0] * num_tasks
  for shard in itertools.chain(*shards):
    loads[shard.task] += shard.num_bytes
  return loads


def balance(loads: Sequence[float]) -> float:
  """The largest load in units of the mean one: 1 is perfect."""
  return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def table(
  specs: Sequence[VariableSpec], shards: Plan, device_of_task: Sequence[str]
) -> str:
  """Lays out a plan for people: each shard, each device, the total.

  Args:
    specs: The variables.
    shards: Their shards, as `plan` returns them.
    device_of_task: The device of every task, by its index. Idle ones belong
      here too. With a single device (all variables on a CPU) the block of
      devices is left out, as it would repeat the total.
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
  """Formats a number of bytes, e.g. `512 B`, `18.8 KiB`, `4.1 MiB`."""
  value, unit = num_bytes, "B"
  for larger_unit in ("KiB", "MiB", "GiB", "TiB"):
    # Not 1024: what would be printed as 1024.0 goes to the next unit.
    if value < 1023.95:
      break
    value, unit = value / 1024, larger_unit
  return f"{value:.{0 if unit == 'B' else 1}f} {unit}"


def _place_greedily(
  cuts: Plan, loads: Sequence[Sequence[float]], num_tasks: int
) -> Plan:
  """Gives each variable's pieces, heaviest first, to the least loaded tasks.

  As the heaviest piece joins the least loaded task, no two tasks ever differ by
  more than the heaviest piece of all; nor does any exceed the mean by more.
  """
  total = [0] * num_tasks
  placed = list(cuts)
  for i in sorted(range(len(cuts)), key=lambda i: -loads[i][0]):
    # One task per piece: all of a variable's shards are on distinct tasks.
    tasks = sorted(range(num_tasks), key=total.__getitem__)[: len(cuts[i])]
    for task, load in zip(tasks, loads[i], strict=True):
      total[task] += load
    placed[i] = tuple(map(lambda p, t: p._replace(task=t), cuts[i], tasks))
  return placed


def _align(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
  """Pads the columns; `sides` has a format alignment per column."""
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
