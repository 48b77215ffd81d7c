"""Stores the variables of a model as shards on the PS tasks.

PS tasks are parameter servers, and a shard is a variable or a part of one.
Replicas never hold a remote or sharded variable. They *pull* the variables once
per step as plain tensors, and split their gradients into shards before sending
them. Tables (large matrices) are not pulled: replicas read single rows of them
(`tables`). Slots (values that an optimizer keeps per variable) and moving
averages are placed next to their shard. Every shared object has a name. So all
clients (the processes that train) that build a store from the same specs and
plan use the same variables.
"""

import functools
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import TypeVar

import numpy as np
import tensorflow as tf

from tf_replicas import cluster
from tf_replicas.runtime import control_flow
from tf_replicas.runtime import devices
from tf_replicas.runtime import packing
from tf_replicas.runtime import resources
from tf_replicas.store import moving_averages
from tf_replicas.store import placement
from tf_replicas.store import row_averages
from tf_replicas.store import tables

Gradient = tf.Tensor | tf.IndexedSlices | None
Value = tf.Tensor | np.ndarray | float
# Tensors in any structure.
_Tensors = TypeVar("_Tensors")


def ps_device(task: int) -> str:
  """Returns the name of the CPU device of parameter-server task `task`."""
  return f"/job:ps/task:{task}/device:CPU:0"


def variable_device(spec: cluster.ClusterSpec, task: int) -> str:
  """Returns the name of the device that holds the variables of a PS task.

  It is the task's GPU if `spec` gives it one, and else its CPU.
  """
  if not spec.gpus(cluster.Task("ps", task)):
    return ps_device(task)
  return devices.gpu_of_task("ps", task)


def build(
  spec: cluster.ClusterSpec,
  variables: Sequence[tf.Variable],
  *,
  wire_dtype: str | None = None,
  namespace: resources.Namespace = resources.DEFAULT_NAMESPACE,
) -> "ParameterStore":
  """Makes the parameter store of a cluster.

  Args:
    spec: The cluster: its PS tasks and the placement of variables.
    variables: Keras or TensorFlow variables. The store gets variables of the
      same paths, shapes and dtypes. The values of `variables` are not used.
    wire_dtype: `float16` or `bfloat16`: the dtype in which trainable float32
      variables and their gradients are sent. None: float32.
    namespace: The scope of the names of shared resources.

  Returns:
    The store. Its variables have no values unless some client (a process that
    trains) has assigned them.
  """
  specs = placement.from_variables(variables)
  return ParameterStore(
    specs,
    _plan(spec, specs),
    num_tasks=spec.num_tasks("ps"),
    device_of_variables=functools.partial(variable_device, spec),
    wire_dtype=wire_dtype,
    namespace=namespace,
  )


def describe(
  spec: cluster.ClusterSpec, variables: Sequence[tf.Variable]
) -> str:
  """Formats the placement of variables without making a store.

  The placement is that of the store that `build` would make.

  Args:
    spec: The cluster: its PS tasks and the placement of variables.
    variables: Keras or TensorFlow variables.

  Returns:
    A table as lines of text, without a final newline.
  """
  specs = placement.from_variables(variables)
  tasks = range(spec.num_tasks("ps"))
  return placement.table(
    specs, _plan(spec, specs), [variable_device(spec, task) for task in tasks]
  )


def _plan(
  spec: cluster.ClusterSpec, specs: Sequence[placement.VariableSpec]
) -> placement.Plan:
  policy = placement.policy_from(
    spec.variables.placement,
    spec.num_tasks("ps"),
    min_shard_bytes=spec.variables.min_shard_bytes,
    num_shards=spec.variables.num_shards,
  )
  return placement.plan(specs, policy)


class ParameterStore:
  """Holds the variables of a training on the parameter servers (PS tasks).

  Attributes:
    specs: The description of each variable, in the model's order.
    shards: The `placement.Shard`s (parts) of each variable, in order.
    num_tasks: The number of PS tasks.
    device_of_task: Maps the index of a PS task to its CPU, where queues, locks
      and counters are.
    device_of_variables: Maps the index of a PS task to the device that holds
      the variables of the task and computes their updates: its CPU or a GPU.
      Tables are always on the CPU.
    global_step: int64 scalar on PS task 0: the number of updates so far.
    examples_seen: int64 scalar on PS task 0: the number of examples in these
      updates.
    wire_dtype: The dtype in which trainable float32 variables and their
      gradients are sent; None: float32.
    namespace: The namespace of all shared resources of this training.
    lock: A lock that `state` holds while it reads; None: no lock.
    count_lock: A lock on PS task 0. `state` holds it while it reads the global
      step and `examples_seen`, so that it reads both as of the same update.
      Updates that replicas make hold it while they change both.
  """

  def __init__(
    self,
    specs: Sequence[placement.VariableSpec],
    shards: Sequence[Sequence[placement.Shard]],
    *,
    num_tasks: int,
    device_of_task: Callable[[int], str] = ps_device,
    device_of_variables: Callable[[int], str] | None = None,
    wire_dtype: str | None = None,
    namespace: resources.Namespace = resources.DEFAULT_NAMESPACE,
  ):
    """Creates the variables, or attaches to those of another client.

    Clients are the processes that train. All of them build equal stores.

    Args:
      specs: The description of each variable, in the order that all methods
        use.
      shards: The result of `placement.plan`.
      num_tasks: The number of PS tasks, including tasks without shards.
      device_of_task: Maps the index of a PS task to its CPU.
      device_of_variables: Maps the index of a PS task to the device of its
        variables, such as a GPU; None: the same as `device_of_task`.
      wire_dtype: `float16` or `bfloat16`: the dtype in which trainable float32
        variables are pulled and their gradients sent. Variables, sums and
        checkpoints keep their own dtype. None casts nothing.
      namespace: The scope of the names of shared resources. Stores in different
        namespaces share nothing.

    Raises:
      ValueError: If a variable with a constraint is split into shards.
    """
    self.namespace = namespace
    self.wire_dtype = None if wire_dtype is None else tf.as_dtype(wire_dtype)
    self.specs = list(specs)
    self.shards = [tuple(s) for s in shards]
    self.num_tasks = num_tasks
    self.device_of_task = device_of_task
    self.device_of_variables = device_of_variables or device_of_task
    # For each PS task the (position in `specs`, shard number) of its shards,
    # without those of tables.
    self._owners: list[list[tuple[int, int]]] = [[] for _ in range(num_tasks)]
    for index, pieces in enumerate(self.shards):
      if self.specs[index].table is None:
        for number, shard in enumerate(pieces):
          self._owners[shard.task].append((index, number))
    self._variables = [
      self._create_parts(spec, s) if spec.table is None else spec.table.parts
      for spec, s in zip(self.specs, self.shards, strict=True)
    ]
    self._owner = {
      shard.name: (index, number)
      for index, pieces in enumerate(self.shards)
      for number, shard in enumerate(pieces)
    }
    # The slots of tables: maps names in checkpoints to (position in `specs`,
    # one part per shard).
    self._table_slots: dict[str, tuple[int, list[tf.Variable]]] = {}
    # The moving averages of tables, by the position in `specs`.
    self._row_averages: dict[int, list[row_averages.AveragedPart]] = {}
    # Maps names in checkpoints to (position in `specs`, one part per shard).
    self._beside: dict[str, tuple[int, list[tf.Variable]]] = {}
    self.lock: resources.Mutex | None = None
    # Made by the next call of `state`; None after variables were added.
    self._state_reader: Callable[[], dict[str, tf.Tensor]] | None = None
    self._counts_reader: Callable[[], dict[str, tf.Tensor]] | None = None
    self._row_tensors: dict[str, tables.RowTensor] | None = None
    with tf.device(device_of_task(0)):
      self.examples_seen = namespace.variable("examples_seen", [], "int64")
      self.global_step = namespace.variable("global_step", [], "int64")
      self.count_lock = namespace.mutex("count_lock")
    self._others: dict[str, tf.Variable] = {}
    # One int64 scalar per PS task: the number of rows of tables in its updates.
    self._row_updates: list[resources.SharedVariable] = []
    for task in range(num_tasks) if self.table_paths else ():
      with tf.device(device_of_task(task)):
        name = f"row_updates/{task}"
        self._row_updates.append(namespace.variable(name, [], "int64"))

  def _create_parts(
    self, spec: placement.VariableSpec, shards: Sequence[placement.Shard]
  ) -> list[tf.Variable]:
    """Creates a variable of the model, as one variable per shard.

    Raises:
      ValueError: If the variable has a constraint and is split into shards.
    """
    constraint = spec.constraint if spec.trainable else None
    if constraint is not None and len(shards) > 1:
      raise ValueError(
        f"the constraint of {spec.path!r} needs the whole variable; use the"
        " placement 'greedy' or 'round_robin'. Received:"
        f" {len(shards)} shards."
      )
    return self._create(shards, trainable=spec.trainable, constraint=constraint)

  def _create(
    self,
    shards: Sequence[placement.Shard],
    *,
    prefix: str = "",
    **arguments: Any,
  ) -> list[tf.Variable]:
    """Creates one variable per shard.

    Args:
      shards: The shards.
      prefix: The beginning of the names, before those of the shards.
      **arguments: Further arguments of `Namespace.variable`.
    """
    variables = []
    for shard in shards:
      with tf.device(self.device_of_variables(shard.task)):
        variables.append(
          self.namespace.variable(
            prefix + shard.name, shard.shape, shard.dtype, **arguments
          )
        )
    return variables

  @property
  def trainable(self) -> list[int]:
    """Positions of the trainable variables in `specs`."""
    return [i for i, spec in enumerate(self.specs) if spec.trainable]

  @property
  def contributed(self) -> list[int]:
    """Positions in `specs` of all variables, in the order of contributions.

    A contribution is what a replica computed from one batch: one tensor per
    variable. First come the gradients of the trainable variables. Then come the
    changes of the *statistics*, variables without gradients, such as moving
    means of batch normalization.
    """
    others = [i for i, spec in enumerate(self.specs) if not spec.trainable]
    return self.trainable + others

  def contributed_shards(self, task: int) -> list[tuple[int, int]]:
    """Lists the shards (variables or parts of them) on the PS task `task`.

    Returns:
      For each shard, a pair: the position of its variable in the list
      `contributed`, and the number of the shard among those of the variable.
    """
    return [
      (position, number)
      for position, index in enumerate(self.contributed)
      for number, shard in enumerate(self.shards[index])
      if shard.task == task
    ]

  def call_on_tasks(self, fn: Callable[[int], _Tensors]) -> list[_Tensors]:
    """Makes one call on each PS task that holds a part of what changes.

    These are the tasks with shards that `contributed_shards` lists.

    Args:
      fn: Maps the index of a PS task to tensors in any structure, as the
        argument `fn` of `control_flow.call_on`, which makes the calls.

    Returns:
      The result of each call, on its task.
    """
    return [
      control_flow.call_on(
        self.device_of_task(task), functools.partial(fn, task)
      )
      for task in range(self.num_tasks)
      if self.contributed_shards(task)
    ]

  def variables(self, index: int) -> list[tf.Variable]:
    """Returns the variables on the PS tasks that hold `specs[index]`, by shard.

    There is one variable per shard, in the order of the shards.
    """
    return self._variables[index]

  def table(self) -> str:
    """Formats the placement of the variables as a table of text.

    It lists all shards with their sizes and devices, and the total size.
    """
    tasks = range(self.num_tasks)
    return placement.table(
      self.specs, self.shards, [self.device_of_variables(t) for t in tasks]
    )

  def is_initialized(self) -> bool:
    """Returns whether a chief has assigned values to all variables.

    The chief assigns the global step last, so only the global step is checked.
    """
    return bool(self.global_step.is_initialized())

  def start(self) -> None:
    """Sets the global step and the number of examples seen to 0.

    For other clients (processes that train), the store is initialized from now
    on. So all other variables must already have their values.
    """
    for count in self._row_updates:
      count.assign(0)
    resources.flush_assignments(self._row_updates)
    self.load_state({"examples_seen": 0, "global_step": 0})

  def signature(self) -> list[dict[str, str | list[int]]]:
    """Returns a description that must be equal in all clients of a training.

    Clients, the processes that train, compare it to find out whether they have
    built the same store.

    Returns:
      A dict for each variable: its "path", "shape" and "dtype", and the "ps"
      tasks of its shards; for a table, also how its "rows" are divided. JSON
      can represent the result.
    """
    return [
      {
        "path": spec.path,
        "shape": list(spec.shape),
        "dtype": spec.dtype,
        "ps": [shard.task for shard in shards],
        **({"rows": spec.table.partition} if spec.table else {}),
      }
      for spec, shards in zip(self.specs, self.shards, strict=True)
    ]

  @property
  def table_paths(self) -> list[str]:
    """Paths of those variables that are tables (matrices read row by row)."""
    return [spec.path for spec in self.specs if spec.table is not None]

  def assign_first(self, values: Sequence[Value]) -> None:
    """Assigns initial values to all variables.

    For tables, large matrices whose rows are divided among the PS tasks, the PS
    tasks compute the values.

    Args:
      values: One initial value per variable. The value for a table is not used.

    Raises:
      ValueError: If a table does not fit into the memory of a PS task.
    """
    for index, (spec, value) in enumerate(zip(self.specs, values, strict=True)):
      if spec.table is None:
        self.assign(index, value)
      else:
        spec.table.initialize()

  def assign(self, index: int, value: Value) -> None:
    """Assigns `value` to the variable `specs[index]`, shard by shard."""
    self._assign_parts(self._variables[index], index, value)

  def subtract(self, index: int, value: Value) -> None:
    """Subtracts `value` from the variable `specs[index]`, shard by shard."""
    parts = self.split(index, value)
    for variable, part in zip(self._variables[index], parts, strict=True):
      variable.assign_sub(part)
    resources.flush_assignments(self._variables[index])

  def reader(self, indices: Sequence[int]) -> Callable[[], list[tf.Tensor]]:
    """Makes a function that reads some of the variables.

    Args:
      indices: The positions of these variables in `specs`.

    Returns:
      A function without arguments. It returns the value of each of these
      variables as a whole tensor, in the order of `indices`.
    """

    def read():
      values = []
      for i in indices:
        value = self._placeholder(i)
        if value is None:
          parts = [v.read_value() for v in self._variables[i]]
          value = join(parts, self.shards[i])
        values.append(value)
      return values

    return resources.remote_reader(read)

  def _placeholder(self, index: int) -> tf.Tensor | None:
    """Returns the tensor without rows that replicas pull in place of a table.

    A table is a matrix that is too large to be pulled.

    Args:
      index: The position of a variable in `specs`.

    Returns:
      The tensor; None if the variable is not a table.
    """
    spec = self.specs[index]
    if spec.table is None:
      return None
    return tf.zeros([0, *spec.shape[1:]], spec.dtype)

  def _assign_parts(
    self, variables: Sequence[tf.Variable], index: int, value: Value
  ) -> None:
    for variable, part in zip(variables, self.split(index, value), strict=True):
      variable.assign(part)

  def split(self, index: int, value: Value) -> list[tf.Tensor]:
    """Splits a value of variable `specs[index]` into one tensor per shard."""
    shards = self.shards[index]
    value = tf.convert_to_tensor(value, dtype=self.specs[index].dtype)
    if len(shards) == 1:
      return [value]
    return tf.split(value, [s.size for s in shards], axis=shards[0].axis)

  def split_gradient(self, index: int, gradient: Gradient) -> list[Gradient]:
    """Splits a gradient of variable `index` into one gradient per shard.

    Args:
      index: The position of the variable in `specs`.
      gradient: A gradient of the variable's shape, or None. `tf.IndexedSlices`
        need shards along axis 0, as they consist of rows.

    Returns:
      One gradient per shard, of the same kind as `gradient`: dense,
      `tf.IndexedSlices` with indices relative to the shard, or None.

    Raises:
      ValueError: If `gradient` is a `tf.IndexedSlices` and the variable is
        split along another axis.
    """
    shards = self.shards[index]
    if gradient is None or len(shards) == 1:
      return [gradient] * len(shards)
    table = self.specs[index].table
    if table is not None:
      return table.split(gradient)
    if not isinstance(gradient, tf.IndexedSlices):
      return self.split(index, tf.cast(gradient, self.specs[index].dtype))
    if shards[0].axis != 0:
      raise ValueError(
        f"A sparse gradient of {shards[0].path!r} needs shards along axis 0."
        f" Received: shards along axis {shards[0].axis}."
      )
    parts = []
    for shard in shards:
      inside = (gradient.indices >= shard.begin) & (
        gradient.indices < shard.begin + shard.size
      )
      parts.append(
        tf.IndexedSlices(
          tf.boolean_mask(gradient.values, inside),
          tf.boolean_mask(gradient.indices, inside) - shard.begin,
          tf.constant(shard.shape, gradient.indices.dtype),
        )
      )
    return parts

  def split_by_task(
    self, gradients: Sequence[Gradient]
  ) -> list[list[Gradient]]:
    """Splits gradients of whole variables into gradients of shards, by PS task.

    Args:
      gradients: One per element of `contributed`: dense, `tf.IndexedSlices` or
        None.

    Returns:
      For each PS task, one gradient per element of `contributed_shards(task)`.
    """
    parts = [
      self.split_gradient(index, gradient)
      for index, gradient in zip(self.contributed, gradients, strict=True)
    ]
    return [
      [parts[position][n] for position, n in self.contributed_shards(task)]
      for task in range(self.num_tasks)
    ]

  def parcel(
    self,
    task: int,
    positions: Sequence[int] | None = None,
    *,
    is_narrowed: bool = True,
  ) -> packing.Parcel:
    """Makes the `Parcel` that packs contributions for transfer to a PS task.

    A contribution is what a replica computed from one batch: gradients of
    trainable variables, and changes of variables without gradients.

    Args:
      task: The index of the PS task.
      positions: The positions in `contributed_shards(task)` of the shards to
        transfer. None: all shards of the task.
      is_narrowed: Whether gradients of trainable float32 variables are cast to
        `wire_dtype` for the transfer.
    """
    shards = self.contributed_shards(task)
    if positions is not None:
      shards = [shards[i] for i in positions]
    owners = [(self.contributed[p], number) for p, number in shards]
    specs = [self.specs[index] for index, _ in owners]
    return self._parcel(
      owners,
      self.wire_item if is_narrowed else self.item,
      [0 if s.trainable else 1 if s.is_statistic else 2 for s in specs],
    )

  def _parcel(
    self,
    owners: Sequence[tuple[int, int]],
    item: Callable[[int, int], packing.Item],
    kinds: Sequence[int] | None = None,
  ) -> packing.Parcel:
    return packing.Parcel(
      [item(*owner) for owner in owners],
      [self.item(*owner).dtype for owner in owners],
      kinds,
    )

  @tf.autograph.experimental.do_not_convert
  def pull(
    self,
    read_shard: Callable[[int, int], tf.Tensor] | None = None,
    *,
    in_order: bool = False,
    after: Sequence[tf.Tensor] = (),
    message: Callable[[tf.Tensor], tf.Tensor] = tf.identity,
  ) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Reads the global step, then every variable once, as whole tensors.

    The global step is read first. So variables that are read during an update
    come with the step before that update, and a synchronous rule refuses
    gradients computed from them.

    Args:
      read_shard: Maps (position in `specs`, shard number) to the value to read
        for the shard. It is called once per shard, on the shard's device. None:
        the value of the shard's variable.
      in_order: Whether each PS task sends the variables in their order, so that
        a forward pass can begin when the first have arrived. The variables are
        then read one after another, over a longer time. False: they are all
        read at once.
      after: Tensors to wait for before the global step is read.
      message: Maps the global step to a tensor, which is sent along with the
        variables of PS task 0, where it is called.

    Returns:
      The tensor of `message`, and one tensor per variable, on the caller's
      device.
    """
    read_step = self.read_global_step
    if any(self._owners[1:]):  # Otherwise one call on PS task 0 reads all.
      step = control_flow.call_on(self.device_of_task(0), read_step, after)
      read_step, after = lambda: step, [step]
    return self._fetch(
      read_shard,
      self.wire_item,
      in_order=in_order,
      after=after,
      message=lambda: message(read_step()),
    )

  def read_global_step(self) -> tf.Tensor:
    """Reads the global step, an int64 scalar, from parameter server 0."""
    with tf.device(self.device_of_task(0)):
      return self.global_step.read_value()

  def counts(self) -> tuple[int, int]:
    """Reads the global step and `examples_seen`, both as of the same update.

    Two reads could have an update of an asynchronous replica between them.
    """
    if self._counts_reader is None:
      self._counts_reader = resources.remote_reader(self._read_counts)
    resources.flush_assignments([self.global_step, self.examples_seen])
    counts = self._counts_reader()
    return int(counts["global_step"]), int(counts["examples_seen"])

  def _read_counts(self) -> dict[str, tf.Tensor]:
    return self.count_lock.hold(
      lambda: {
        "global_step": self.read_global_step(),
        "examples_seen": self.examples_seen.read_value(),
      }
    )

  def count_rows(self, task: int, ids: tf.Tensor) -> tf.Tensor:
    """Counts the rows of a table that an update changes on a PS task.

    They are added to the number that `row_updates` returns for this task.

    Args:
      task: The index of the PS task, on whose device this is called.
      ids: The indices of the n rows that an update changes, [n], of any integer
        dtype.

    Returns:
      `ids`, once they are counted. An update that uses them also waits for the
      count, whose end is then no message of its own.
    """
    count: Any = self._row_updates[task]
    with tf.control_dependencies([count.assign_add(tf.size(ids, tf.int64))]):
      return tf.identity(ids)

  def row_updates(self) -> list[int]:
    """Returns how many rows of tables all updates have changed, per PS task.

    A row counts again in each update that changes it. The list has one number
    per PS task; it is empty if there are no tables.
    """
    if not self._row_updates:
      return []
    return [int(count) for count in self._read_row_updates()]

  @functools.cached_property
  def _read_row_updates(self) -> Callable[[], list[tf.Tensor]]:
    return resources.remote_reader(
      lambda: [count.read_value() for count in self._row_updates]
    )

  def advance(self, step: tf.Tensor, num_examples: tf.Tensor) -> tf.Tensor:
    """Sets the global step to `step` + 1, and counts the examples of an update.

    Args:
      step: int64 scalar, the global step before the update.
      num_examples: Scalar, the number of examples in the update.

    Returns:
      The new global step. A control dependency on it waits until the global
      step and the count of examples are assigned.
    """
    with tf.device(self.device_of_task(0)):
      count = self.examples_seen.assign_add(tf.cast(num_examples, tf.int64))
      with tf.control_dependencies([count]):  # The global step comes last.
        advanced = self.global_step.assign(step + 1)
      with tf.control_dependencies([advanced]):
        return tf.identity(step + 1)

  def read(self) -> list[tf.Tensor]:
    """Reads all variables except tables, as whole tensors.

    Returns:
      One tensor per variable, on the caller's device. For a table (a matrix
      whose rows are read singly), it is a tensor without rows.
    """
    return self._fetch(None, self.item)[1]

  def _fetch(
    self,
    read_shard: Callable[[int, int], tf.Tensor] | None,
    item: Callable[[int, int], packing.Item],
    *,
    in_order: bool = False,
    after: Sequence[tf.Tensor] = (),
    message: Callable[[], tf.Tensor] | None = None,
  ) -> tuple[Any, list[tf.Tensor]]:
    """Reads all variables except tables, as whole tensors.

    Args:
      read_shard: As for `pull`.
      item: Maps (position in `specs`, shard number) to the shape of the shard
        and the dtype in which it is sent to the caller. The results have the
        variables' own dtypes in any case.
      in_order: As for `pull`.
      after: Tensors to wait for before anything is read.
      message: Returns a tensor that PS task 0, where it is called, sends along
        with its variables. None: no such tensor is sent.

    Returns:
      The tensor of `message`, or None; and one tensor per variable, on the
      caller's device. For a table (a matrix whose rows are read singly), it is
      a tensor without rows.
    """
    read_shard = read_shard or (lambda i, n: self._variables[i][n].read_value())
    parts = {}
    told = None
    for task, owners in enumerate(self._owners):

      def read(i: int, task=task, owners=owners) -> tf.Tensor:
        with tf.device(self.device_of_variables(task)):
          return read_shard(*owners[i])

      fetched, more = self._parcel(owners, item).fetch(
        self.device_of_task(task),
        read,
        in_order=in_order,
        after=after,
        message=None if task else message,
      )
      told = told if task else more
      parts.update(zip(owners, fetched, strict=True))
    values = []
    for index, shards in enumerate(self.shards):
      value = self._placeholder(index)
      if value is None:
        value = join([parts[index, n] for n in range(len(shards))], shards)
      values.append(value)
    return told, values

  def item(self, index: int, number: int) -> packing.Item:
    """Returns shape and dtype of shard `number` of variable `specs[index]`."""
    shard = self.shards[index][number]
    return packing.Item(shard.shape, tf.as_dtype(shard.dtype))

  def wire_item(self, index: int, number: int) -> packing.Item:
    """Returns the shape and dtype that a shard has in transfers.

    A gradient of the shard is transferred in this dtype too. Trainable float32
    variables are cast to `wire_dtype`, if that is given. Statistics (variables
    without gradients) are not cast, as they may be counts.

    Args:
      index: The position of the variable in `specs`.
      number: The number of the shard.
    """
    item = self.item(index, number)
    is_narrowed = self.wire_dtype is not None and item.dtype == tf.float32
    is_narrowed &= self.specs[index].trainable
    return item._replace(dtype=self.wire_dtype) if is_narrowed else item

  @property
  def wire_dtypes(self) -> list[tf.DType]:
    """The dtypes in which contributions are sent, in their order.

    There is one dtype for each element of `contributed`.
    """
    return [self.wire_item(index, 0).dtype for index in self.contributed]

  def create_like(self, index: int, kind: str) -> list[tf.Variable]:
    """Creates companions of a variable, such as its moving average.

    The companion has the same shards on the same PS tasks.

    Args:
      index: The position of the variable in `specs`.
      kind: The first part of the names of the new variables, such as
        `averages`. Checkpoints save the companion as `<kind>/<path>`.

    Returns:
      One new variable per shard. It has no value unless some client (a process
      that trains) has already assigned one.
    """
    made = self._create(self.shards[index], prefix=f"{kind}/")
    self._state_reader = None
    self._beside[f"{kind}/{self.specs[index].path}"] = (index, made)
    return made

  def create_row_averages(
    self, index: int, averages: moving_averages.MovingAverages
  ) -> list[row_averages.AveragedPart]:
    """Creates the moving average of a table, a matrix that is updated by row.

    Checkpoints save it as `averages/<path>`.

    Args:
      index: The position of the table in `specs`.
      averages: Has the decays.

    Returns:
      One object per shard of the table, on its PS task. The averages have no
      values unless some client (a process that trains) has already assigned
      them. `load_state` declares them valid at the global step that it assigns.
    """
    parts: list[Any] = self._variables[index]
    made = [
      row_averages.AveragedPart(
        averages, part, self.namespace, self.read_global_step
      )
      for part in parts
    ]
    table = self.specs[index].table
    assert table is not None
    table.averages = self._row_averages[index] = made
    self._row_tensors = None
    return made

  def track(
    self, variable: tf.Variable, kind: str = "", owner: str = ""
  ) -> None:
    """Makes checkpoints contain a variable that was created elsewhere.

    Args:
      variable: The variable, such as a slot of an optimizer.
      kind: The first part of the variable's name, such as `slots/sgd/momentum`.
      owner: The name of the shard to which the variable belongs; empty if it
        belongs to no shard.
    """
    self._state_reader = self._row_tensors = None
    if owner in self._owner:
      index, number = self._owner[owner]
      if tuple(variable.shape) == self.shards[index][number].shape:
        name = f"{kind}/{self.specs[index].path}"
        # Slots are created task by task, not in the order of the shards.
        empty: Any = index, [None] * len(self.shards[index])
        is_table = self.specs[index].table is not None
        group = self._table_slots if is_table else self._beside
        group.setdefault(name, empty)[1][number] = variable
        return
    # Parts of other shapes than the shards' cannot be joined.
    self._others[variable.path] = variable

  def state(self) -> dict[str, tf.Tensor]:
    """Reads the values of all variables for a checkpoint.

    Returns:
      Whole tensors by name. The names do not depend on the placement: a
      variable is `variables/<path>`, its slots and moving averages are
      `<kind>/<path>`, and everything else is `<name>`. Tables (large matrices),
      their slots and moving averages are left out: `row_tensors` has them.
    """
    if self._state_reader is None:
      read = self._read_state
      if self.lock is not None:
        read = functools.partial(self.lock.hold, read)
      self._state_reader = resources.remote_reader(read)
    resources.flush_assignments([self.global_step, *sum(self._variables, [])])
    return self._state_reader()

  def _read_state(self) -> dict[str, tf.Tensor]:
    state = self._read_counts()
    for spec, value in zip(self.specs, self.read(), strict=True):
      if spec.table is None:
        state[f"variables/{spec.path}"] = value
    for name, (index, variables) in self._beside.items():
      parts = [v.read_value() for v in variables]
      state[name] = join(parts, self.shards[index])
    for name, variable in self._others.items():
      state[name] = variable.read_value()
    return state

  def row_tensors(self) -> dict[str, tables.RowTensor]:
    """Returns the tables, their slots and their moving averages, by name.

    Tables are matrices that may be too large for this process. So each object
    of the result reads and assigns blocks of rows, for checkpoints. The names
    are of the form `variables/<path>` and `<kind>/<path>`. Averages are read as
    they are at the present global step. Averages that were assigned are valid
    only after `load_state` has assigned their global step.
    """
    if self._row_tensors is None:
      found: dict[str, tuple[int, list[Any]]] = {
        f"variables/{spec.path}": (index, self._variables[index])
        for index, spec in enumerate(self.specs)
        if spec.table is not None
      }
      found |= self._table_slots
      for index, parts in self._row_averages.items():
        found[f"averages/{self.specs[index].path}"] = index, parts
      self._row_tensors = {
        name: tables.RowTensor(table, variables)
        for name, (index, variables) in found.items()
        if (table := self.specs[index].table) is not None
      }
    return self._row_tensors

  def load_state(self, state: Mapping[str, np.ndarray]) -> None:
    """Assigns saved tensors to the variables of the store.

    Args:
      state: Whole arrays by name; the method `state` documents the names. A
        variable whose name is missing does not change.
    """
    for index, spec in enumerate(self.specs):
      if spec.table is None and f"variables/{spec.path}" in state:
        self.assign(index, state[f"variables/{spec.path}"])
    for name, (index, variables) in self._beside.items():
      if name in state:
        self._assign_parts(variables, index, state[name])
    if "examples_seen" in state:
      self.examples_seen.assign(state["examples_seen"])
    for name, variable in self._others.items():
      if name in state:
        variable.assign(state[name])
    resources.flush_assignments(sum(self._variables, []))
    if "global_step" in state:
      step = int(state["global_step"])
      row_averages.restart(self._row_averages.values(), step)
      # Last: the global step tells other clients that all else is assigned.
      self.global_step.assign(state["global_step"])
      resources.flush_assignments([self.global_step])


def join(
  parts: Sequence[tf.Tensor], shards: Sequence[placement.Shard]
) -> tf.Tensor:
  """Joins the parts of a variable, one per shard, into a whole tensor.

  Args:
    parts: The values of the shards, in order.
    shards: The shards, in the same order. They tell along which axis to join.
  """
  return parts[0] if len(parts) == 1 else tf.concat(parts, shards[0].axis)
