"""The shared copy of a model: variable path -> shards on the PS tasks.

Replicas never hold a remote or sharded variable. They *pull* every parameter
once a step as plain tensors, and what they hand back is cut into shards where
it leaves. Slots and moving averages live beside the shard they belong to.
Everything is found by its name, so that each client which builds a store from
the same specs and plan reaches the same variables.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tf_replicas import cluster
from tf_replicas import packing
from tf_replicas import placement
from tf_replicas import resources

Gradient = tf.Tensor | tf.IndexedSlices | None


def ps_device(task: int) -> str:
  """The device of parameter-server task `task`."""
  return f"/job:ps/task:{task}/device:CPU:0"


def build(
  spec: cluster.ClusterSpec,
  variables: Sequence[tf.Variable],
  *,
  wire_dtype: str | None = None,
) -> "ParameterStore":
  """The store of a cluster, for variables like these.

  Args:
    spec: Says how many PS tasks there are and how to place variables.
    variables: Keras or TensorFlow variables: a pattern; values do not matter.
    wire_dtype: As `ParameterStore` has it.
  """
  specs = placement.from_variables(variables)
  return ParameterStore(
    specs,
    _plan(spec, specs),
    num_tasks=spec.num_tasks("ps"),
    wire_dtype=wire_dtype,
  )


def describe(
  spec: cluster.ClusterSpec, variables: Sequence[tf.Variable]
) -> str:
  """The placement table of such a store, which need not exist."""
  specs = placement.from_variables(variables)
  devices = [ps_device(task) for task in range(spec.num_tasks("ps"))]
  return placement.table(specs, _plan(spec, specs), devices)


def _plan(spec: cluster.ClusterSpec, specs) -> placement.Plan:
  policy = placement.policy_from(
    spec.variables.placement,
    spec.num_tasks("ps"),
    min_shard_bytes=spec.variables.min_shard_bytes,
    num_shards=spec.variables.num_shards,
  )
  return placement.plan(specs, policy)


class ParameterStore:
  """Variables on parameter servers, by path.

  Attributes:
    specs: What is held, in the order of the model's variables.
    shards: For each spec the `placement.Shard`s of it, in order.
    num_tasks: The number of PS tasks.
    global_step: int64 scalar on PS task 0: the updates made so far.
    examples_seen: int64 scalar on PS task 0: the examples they used.
    wire_dtype: As what float32 travels, or None.
    lock: Held while `state` reads, if somebody sets it.
  """

  def __init__(
    self,
    specs: Sequence[placement.VariableSpec],
    shards: Sequence[Sequence[placement.Shard]],
    *,
    num_tasks: int,
    device_of_task: Callable[[int], str] = ps_device,
    wire_dtype: str | None = None,
  ):
    """Attaches to the store of this cluster, or creates it.

    Args:
      specs: The variables, in the order every method uses.
      shards: The plan, as `placement.plan` gives it.
      num_tasks: How many PS tasks there are; may exceed those in the plan.
      device_of_task: Where the variables of a PS task live.
      wire_dtype: `float16` or `bfloat16`, as which the float32 variables are
        pulled and their gradients sent; variables, sums and checkpoints keep
        their own dtype. None: as they are.
    """
    self.wire_dtype = None if wire_dtype is None else tf.as_dtype(wire_dtype)
    self.specs = list(specs)
    self.shards = [tuple(s) for s in shards]
    self.num_tasks = num_tasks
    self.device_of_task = device_of_task
    self._variables = [
      self._create(s, trainable=spec.trainable)
      for spec, s in zip(self.specs, self.shards, strict=True)
    ]
    self._owner = {
      shard.name: (index, number)
      for index, shards in enumerate(self.shards)
      for number, shard in enumerate(shards)
    }
    # Name in checkpoints -> its parts, in the order of the shards.
    self._beside: dict[str, tuple[int, list[tf.Variable]]] = {}
    self.lock: resources.Mutex | None = None
    self._state_reader = None  # Made anew for what is added.
    with tf.device(device_of_task(0)):
      self.examples_seen = resources.shared_variable(
        "examples_seen", [], "int64"
      )
      self.global_step = resources.shared_variable("global_step", [], "int64")
    self._others: dict[str, tf.Variable] = {"examples_seen": self.examples_seen}

  def _create(
    self, shards: Sequence[placement.Shard], *, prefix="", trainable=False
  ) -> list[tf.Variable]:
    variables = []
    for shard in shards:
      with tf.device(self.device_of_task(shard.task)):
        variables.append(
          resources.SharedVariable(
            name=prefix + shard.name,
            shape=shard.shape,
            dtype=shard.dtype,
            trainable=trainable,
          )
        )
    return variables

  @property
  def trainable(self) -> list[int]:
    """The positions of the trainable variables in `specs`."""
    return [i for i, spec in enumerate(self.specs) if spec.trainable]

  @property
  def contributed(self) -> list[int]:
    """The positions of all that replicas contribute to, in `specs`.

    First what gradients update, then statistics, which replicas move.
    """
    others = [i for i, spec in enumerate(self.specs) if not spec.trainable]
    return self.trainable + others

  def contributed_shards(self, task: int) -> list[tuple[int, int]]:
    """(position in `contributed`, shard number) of what `task` holds."""
    return [
      (position, number)
      for position, index in enumerate(self.contributed)
      for number, shard in enumerate(self.shards[index])
      if shard.task == task
    ]

  def variables(self, index: int) -> list[tf.Variable]:
    """The shard variables of `specs[index]`, in order."""
    return self._variables[index]

  def table(self) -> str:
    """Which variable is where, and what each PS task holds; for people."""
    devices = [self.device_of_task(t) for t in range(self.num_tasks)]
    return placement.table(self.specs, self.shards, devices)

  def is_initialized(self) -> bool:
    """Whether a chief has filled the store (it sets the global step last)."""
    return bool(self.global_step.is_initialized())

  def start(self) -> None:
    """Sets the global step to 0, which says that all else has its value."""
    self.load_state({"examples_seen": 0, "global_step": 0})

  def signature(self) -> list[list]:
    """What two programs of one training must agree on: rows (path, …)."""
    return [
      [spec.path, list(spec.shape), spec.dtype, [s.task for s in shards]]
      for spec, shards in zip(self.specs, self.shards, strict=True)
    ]

  def assign(self, index: int, value) -> None:
    """Assigns the whole of variable `index`; `value` has its full shape."""
    self._assign_parts(self._variables[index], index, value)

  def _assign_parts(self, variables, index: int, value) -> None:
    for variable, part in zip(variables, self.split(index, value), strict=True):
      variable.assign(part)

  def split(self, index: int, value) -> list[tf.Tensor]:
    """Cuts a whole tensor of variable `index` into its shards' tensors."""
    shards = self.shards[index]
    value = tf.convert_to_tensor(value, dtype=self.specs[index].dtype)
    if len(shards) == 1:
      return [value]
    return tf.split(value, [s.size for s in shards], axis=shards[0].axis)

  def split_gradient(self, index: int, gradient: Gradient) -> list[Gradient]:
    """Cuts a gradient of variable `index` into one gradient per shard.

    Args:
      index: Position in `specs`.
      gradient: Of the variable's shape; `tf.IndexedSlices` go by row, so the
        variable's shards must be along axis 0; or None.

    Returns:
      One gradient per shard, of the kind given, indices relative to it.

    Raises:
      ValueError: For slices of a variable split along another axis.
    """
    shards = self.shards[index]
    if gradient is None or len(shards) == 1:
      return [gradient] * len(shards)
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

  @tf.autograph.experimental.do_not_convert
  def pull(self) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Reads the global step, then every variable once, as whole tensors.

    In that order: what is read during an update is tagged with the step before
    it, and a gradient with that tag is refused.

    Returns:
      The int64 global step, and one tensor per spec on the caller's device.
    """
    step = self.read_global_step()
    with tf.control_dependencies([step]):
      return step, self.read(item=self.wire_item)

  def read_global_step(self) -> tf.Tensor:
    """The global step: an int64 scalar read on PS task 0."""
    with tf.device(self.device_of_task(0)):
      return self.global_step.read_value()

  def advance(self, step: tf.Tensor, num_examples: tf.Tensor) -> tf.Tensor:
    """Makes the global step `step` + 1 and counts the examples; returns it."""
    with tf.device(self.device_of_task(0)):
      count = self.examples_seen.assign_add(tf.cast(num_examples, tf.int64))
      with tf.control_dependencies([count]):  # Then all of it is done.
        advanced = self.global_step.assign(step + 1)
      with tf.control_dependencies([advanced]):
        return tf.identity(step + 1)

  def read(
    self,
    read_shard: Callable[[int, int], tf.Tensor] | None = None,
    item: Callable[[int, int], packing.Item] | None = None,
  ) -> list[tf.Tensor]:
    """Every variable as a whole tensor, each shard read once.

    Args:
      read_shard: Reads, on its device, shard (position in `specs`, number);
        for who does more than that.
      item: As what such a shard travels; as it is if not given.
    """
    read_shard = read_shard or (lambda i, n: self._variables[i][n].read_value())
    item = item or self.item
    parts = {}
    for task in range(self.num_tasks):
      owners = [
        (index, number)
        for index, shards in enumerate(self.shards)
        for number, shard in enumerate(shards)
        if shard.task == task
      ]
      items = [item(*owner) for owner in owners]
      for group in packing.groups(items):
        with tf.device(self.device_of_task(task)):
          packed = packing.pack(
            [tf.cast(read_shard(*owners[i]), items[i].dtype) for i in group]
          )
        # What the reading waits for would be sent here too.
        with tf.control_dependencies(None):
          tensors = packing.unpack(packed, [items[i] for i in group])
          for i, tensor in zip(group, tensors, strict=True):
            parts[owners[i]] = tf.cast(tensor, self.item(*owners[i]).dtype)
    return [
      join([parts[index, n] for n in range(len(shards))], shards)
      for index, shards in enumerate(self.shards)
    ]

  def item(self, index: int, number: int) -> packing.Item:
    """Shape and dtype of shard `number` of variable `index`."""
    shard = self.shards[index][number]
    return packing.Item(shard.shape, tf.as_dtype(shard.dtype))

  def wire_item(self, index: int, number: int) -> packing.Item:
    """As what that shard is pulled, and its gradient sent."""
    item = self.item(index, number)
    is_narrowed = self.wire_dtype is not None and item.dtype == tf.float32
    return item._replace(dtype=self.wire_dtype) if is_narrowed else item

  def create_beside(self, index: int, kind: str) -> list[tf.Variable]:
    """Variables like the shards of `index`, on the same tasks.

    Args:
      index: Position in `specs`.
      kind: What they are, for example `averages`; part of their names. They
        are saved under `<kind>/<path>`.

    Returns:
      One variable per shard; without a value if nobody gave it one.
    """
    made = self._create(self.shards[index], prefix=f"{kind}/")
    self._state_reader = None
    self._beside[f"{kind}/{self.specs[index].path}"] = (index, made)
    return made

  def adopt(
    self, variable: tf.Variable, kind: str = "", owner: str = ""
  ) -> None:
    """Takes a variable made elsewhere (a slot) into the checkpoints.

    It is of a kind such as `slots/momentum` if it belongs to a shard, `owner`.
    """
    self._state_reader = None
    if owner in self._owner:
      index, number = self._owner[owner]
      if tuple(variable.shape) == self.shards[index][number].shape:
        name = f"{kind}/{self.specs[index].path}"
        # Each PS task makes its own, in no order of the shards.
        empty = index, [None] * len(self.shards[index])
        self._beside.setdefault(name, empty)[1][number] = variable
        return
    # A part of another shape cannot be joined to a whole.
    self._others[variable.path] = variable

  def state(self) -> dict[str, tf.Tensor]:
    """Everything held, as whole tensors by name, for a checkpoint.

    `variables/<path>`, `<kind>/<path>` for what is beside a variable, `<name>`
    for the rest. Shards are joined: the layout of PS tasks leaves no trace.
    """
    if self._state_reader is None:
      hold = self.lock.hold if self.lock else lambda read: read()
      self._state_reader = resources.reader(lambda: hold(self._read_state))
    resources.await_assigned([self.global_step, *sum(self._variables, [])])
    return self._state_reader()

  def _read_state(self) -> dict[str, tf.Tensor]:
    state = {"global_step": self.read_global_step()}
    for spec, value in zip(self.specs, self.read(), strict=True):
      state[f"variables/{spec.path}"] = value
    for name, (index, variables) in self._beside.items():
      parts = [v.read_value() for v in variables]
      state[name] = join(parts, self.shards[index])
    for name, variable in self._others.items():
      state[name] = variable.read_value()
    return state

  def load_state(self, state: Mapping[str, np.ndarray]) -> None:
    """Assigns what `state` gave; names that `state` lacks stay as they are."""
    for index, spec in enumerate(self.specs):
      if f"variables/{spec.path}" in state:
        self.assign(index, state[f"variables/{spec.path}"])
    for name, (index, variables) in self._beside.items():
      if name in state:
        self._assign_parts(variables, index, state[name])
    for name, variable in self._others.items():
      if name in state:
        variable.assign(state[name])
    resources.await_assigned(sum(self._variables, []))
    if "global_step" in state:
      # The last, for it tells that all else is there.
      self.global_step.assign(state["global_step"])
      resources.await_assigned([self.global_step])


def join(parts: Sequence[tf.Tensor], shards) -> tf.Tensor:
  return parts[0] if len(parts) == 1 else tf.concat(parts, shards[0].axis)
