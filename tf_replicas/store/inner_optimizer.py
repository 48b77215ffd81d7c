"""Runs the user's optimizer on the PS tasks, next to the variables.

PS tasks are parameter servers. An update rule holds the user's optimizer as its
*inner optimizer*: a Keras 3 optimizer, or any object with `apply(gradients,
variables)` or `apply_gradients(pairs)`. An `InnerOptimizer` creates the
optimizer's slots (values per variable, such as momentum) on the devices of
their variables, under names by which every client (a process that trains) finds
them. It applies the optimizer to the variables of one PS task at a time, so
that neither gradients nor slots are sent to other tasks.

Of a table, a large matrix (`tables`), it updates only the rows that the
gradient has: it applies the optimizer to these rows of the table and of its
slots, and adds the differences. With an optimizer that changes rows
without a gradient, such as Adam or momentum, this is *lazy*: such rows stay as
they are.
"""

import contextlib
import copy
import re
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import Protocol
from typing import runtime_checkable

import keras
import numpy as np
import tensorflow as tf

from tf_replicas.runtime import keras_internals
from tf_replicas.runtime import module_internals
from tf_replicas.runtime import patches
from tf_replicas.runtime import resources
from tf_replicas.store import parameter_store


class TensorVariable:
  """Stands in for a variable while an optimizer is applied to tensors.

  It holds a tensor, and has the attributes and methods of a variable that the
  optimizers of Keras 3.15 use. Assigning replaces the tensor. A
  `keras.StatelessScope` alone does not suffice: there, `variable.value` is a
  plain tensor, but some optimizers call `variable.value.assign`.
  """

  def __init__(self, value: tf.Tensor, like: tf.Variable | None = None):
    """Makes a stand-in with the first value `value`.

    Args:
      value: The initial value.
      like: The trained variable that the object stands in for. The object takes
        over its constraint, and its name, path and id, by which the optimizer
        finds its slots. None: the object stands in for a slot, or for a scalar
        of the optimizer.
    """
    self.value = value
    self.dtype = value.dtype
    self.shape = value.shape
    self._be_found_as(like)

  def _be_found_as(self, like: tf.Variable | None) -> None:
    """Takes over what identifies the variable `like`, and its constraint."""
    if like is not None:
      self.name, self.path = like.name, like.path
      constrain = like.constraint
      self.constraint = constrain and (lambda own: constrain(own.value))
      self._unique_id = keras_internals.variable_id(like)

  def assign(self, value: tf.Tensor) -> None:
    """Replaces the value by `value`, cast to the dtype of the initial value."""
    self.value = tf.cast(value, self.dtype)

  def assign_add(self, value: tf.Tensor) -> None:
    """Adds `value` to the value."""
    self.assign(self.value + value)

  def assign_sub(self, value: tf.Tensor) -> None:
    """Subtracts `value` from the value."""
    self.assign(self.value - value)

  def __mul__(self, other: tf.Tensor) -> tf.Tensor:
    return self.value * other

  def __tf_tensor__(
    self, dtype: tf.DType | None = None, name: str | None = None
  ) -> tf.Tensor:
    return tf.convert_to_tensor(self.value, dtype=dtype, name=name)


@runtime_checkable
class ApplyOptimizer(Protocol):
  """Interface of an optimizer with `apply`, as Keras 3 and Sonnet define it."""

  def apply(
    self,
    gradients: Sequence[parameter_store.Gradient],
    variables: Sequence[tf.Variable],
  ) -> object:
    """Applies one gradient to each of `variables`.

    The result is not used.
    """


@runtime_checkable
class ApplyGradientsOptimizer(Protocol):
  """Interface of an optimizer of TF1 or `tf_keras`: with `apply_gradients`."""

  def apply_gradients(
    self,
    grads_and_vars: Iterable[tuple[parameter_store.Gradient, tf.Variable]],
  ) -> object:
    """Applies (gradient, variable) pairs.

    The result is not used.
    """


Optimizer = (
  keras.optimizers.Optimizer | ApplyOptimizer | ApplyGradientsOptimizer
)


class _Copies:
  """Keeps copies of one scalar of the optimizer, one on every PS task.

  An example is the learning rate, which the client (the training process) sets.
  If updates on the PS tasks (parameter servers) fetched the scalar from the
  client, each update would take about a millisecond longer.

  Attributes:
    variables: The copies, by index of the PS task.
  """

  def __init__(
    self,
    variable: keras.Variable,
    store: parameter_store.ParameterStore,
    prefix: str,
  ):
    self.variables: list[Any] = []
    self._variable = variable
    self._copied: float | None = None
    for task in range(store.num_tasks):
      with tf.device(store.device_of_variables(task)):
        self.variables.append(
          store.namespace.variable(
            f"optimizer/{prefix}{variable.name}",
            variable.shape,
            variable.dtype,
          )
        )

  def refresh(self) -> list[tf.Variable]:
    """Assigns the value of the scalar to its copies if it has changed.

    Returns:
      The variables that were assigned: all copies, or an empty list if the
      value has not changed since the last call.
    """
    value = self._variable.numpy()
    if value == self._copied:
      return []
    for variable in self.variables:
      variable.assign(value)
    self._copied = value
    return self.variables


def scalar_name(name: str, seen: dict[str, int]) -> str:
  """Returns the name under which checkpoints store a scalar of an optimizer.

  Such a scalar belongs to the whole optimizer, not to one variable. If it has
  no name, Keras names it by a number that counts within the process, such as
  `variable_7`. This function counts within the optimizer instead, in the order
  of creation, so that the name is the same in every process.

  Args:
    name: The name that Keras gave the scalar.
    seen: How often each name has occurred so far. The function adds one for
      this name.
  """
  name = re.sub(r"^variable_\d+$", "variable", name)
  count = seen[name] = seen.get(name, -1) + 1
  return f"{name}_{count}" if count else name


class InnerOptimizer:
  """Applies the user's optimizer to variables on the PS tasks.

  PS tasks are parameter servers. The optimizer updates all or some of the
  trainable variables of a `ParameterStore`.
  """

  def __init__(
    self,
    optimizer: Optimizer,
    *,
    name: str = "",
    paths: Collection[str] | None = None,
    momentum_correction: bool = False,
  ):
    """Wraps the user's optimizer.

    Keras' SGD and RMSprop with momentum m keep a velocity that includes the
    learning rate: v <- m v + rate * gradient. After a change of the rate, the
    old rate would dominate the velocity for about 1 / (1 - m) updates. With
    `momentum_correction`, velocities are multiplied by (new rate / old rate) at
    the change. This equals keeping u <- m u + gradient, and v = rate * u (Goyal
    et al. 2017, section 3, remark 2). A new rate of 0 sets velocities to 0.
    Updates that asynchronous replicas make at that moment may still use the old
    rate.

    Args:
      optimizer: The optimizer. A Keras optimizer must not be built yet.
      name: Distinguishes the slots of several optimizers of a training.
      paths: The paths of the variables to update. None: all trainable ones.
      momentum_correction: Whether velocities are rescaled when the learning
        rate changes.

    Raises:
      TypeError: If `optimizer` has neither `apply` nor `apply_gradients`.
      ValueError: If `optimizer` is a Keras optimizer with an option that is not
        supported; or if `momentum_correction` is given, and the optimizer has
        no velocities or its learning rate is a schedule.
    """
    if momentum_correction:
      _check_velocities(optimizer)
    self.optimizer = optimizer
    # Part of the slots' names: `momentum` of one optimizer may have the
    # opposite sign of another's.
    self._prefix = f"{name}." if name else ""
    self._kind = self._prefix + type(optimizer).__name__.lower()
    self._paths = paths
    # The copies of an optimizer that is not of Keras 3, once it is built.
    self._by_task: list[Any] = []
    self._is_built = False
    self._store: parameter_store.ParameterStore | None = None
    self._is_keras = isinstance(optimizer, keras.optimizers.Optimizer)
    self._corrects_momentum = momentum_correction
    # The learning rate of the velocities; 0 before the first update.
    self._velocity_rate: tf.Variable | None = None
    # The global step at which the slots were created.
    self._began: tf.Variable | None = None
    if self._is_keras:
      _check_keras(optimizer)
    elif isinstance(optimizer, type) or not isinstance(
      optimizer, ApplyOptimizer | ApplyGradientsOptimizer
    ):
      raise TypeError(
        "`optimizer` must have `apply(gradients, variables)` or"
        f" `apply_gradients(pairs)`. Received: {optimizer!r}."
      )

  def build(
    self, store: parameter_store.ParameterStore, *, is_chief: bool = True
  ) -> None:
    """Creates the optimizer's slots, each on the device of its variable.

    A slot is a value that the optimizer keeps per variable, such as momentum.

    Args:
      store: Holds the variables.
      is_chief: Whether this client (training process) sets the learning rate.
        The other clients must build after the chief, and use its rate.

    Raises:
      ValueError: If the optimizer needs whole variables and the store splits
        one into shards, if it is not one of Keras 3 and the store has tables,
        or if it was already built outside of this class.
    """
    if store is self._store:
      return  # Built by another rule with the same optimizer.
    self._store = store
    self._created: list[tf.Variable] = []
    self._num_tracked = 0
    self._names: dict[str, int] = {}
    # Maps the path of a slot to its kind and the path of its shard.
    self._owner: dict[str, tuple[str, str]] = {}
    self._shards = {
      variable.path.replace("/", "_"): variable
      for index in store.trainable
      for variable in store.variables(index)
      if self._paths is None or store.specs[index].path in self._paths
    }
    # Paths of the shards of tables.
    self._in_tables = {
      variable.path
      for index in store.trainable
      for variable in store.variables(index)
      if store.specs[index].table is not None
    }
    if self._is_keras:
      _check_shards(self.optimizer, store)
      self._build_keras(store.device_of_task(0))
    elif store.table_paths:
      raise ValueError(
        "`optimizer` must be one of Keras 3 where there are tables"
        f" ({', '.join(store.table_paths)}). Received: {self.optimizer!r}."
      )
    self._track()
    # The slots of the shards of tables, by the path of the shard.
    self._table_slots = self._find_table_slots()
    self._copies: list[tuple[keras.Variable, _Copies]] = []
    # Scalars of the whole optimizer that updates change.
    self._common: list[keras.Variable] = []
    if self._is_keras:
      self._sort_scalars()
      if is_chief:
        self.refresh()
    else:
      self._by_task = [self._copy(task) for task in range(store.num_tasks)]
      self._create_slots()

  def _build_keras(self, device: str) -> None:
    """Builds the Keras optimizer, with each slot on the device of its variable.

    Further calls do nothing.

    Args:
      device: The device of the scalars of the whole optimizer.

    Raises:
      ValueError: If the optimizer was already built outside of this class.
    """
    if self._is_built:
      return
    own: Any = self.optimizer
    if own.built:
      raise ValueError(
        "`optimizer` must not be built yet: its slots are created on the"
        f" parameter servers. Received: {own!r}."
      )
    self._is_built = True
    with self._creator_scope(device):
      own.build(list(self._shards.values()))
      if not keras_internals.has_schedule(own):
        self._began = tf.Variable(
          tf.zeros([], tf.int64), name=f"began.{self._kind}"
        )
      if self._corrects_momentum:
        self._velocity_rate = tf.Variable(
          tf.zeros([]), name=f"velocity_rate.{self._kind}"
        )

  def _find_table_slots(self) -> dict[str, list[keras.Variable]]:
    """Maps the path of each shard of a table to the optimizer's slots for it.

    The map is empty if the store has no tables.
    """
    found: dict[str, list[keras.Variable]] = {}
    if self._in_tables:
      own: Any = self.optimizer
      for slot in own.variables:
        _, shard = self._owner.get(getattr(slot.value, "path", ""), ("", ""))
        if shard in self._in_tables:
          found.setdefault(shard, []).append(slot)
    return found

  def _copy(self, task: int) -> Any:
    """Copies the user's optimizer for one PS task.

    Only optimizers that are not of Keras 3 are copied. Such an optimizer counts
    its calls, and may expect the same variables in each call. So every PS task
    needs its own copy, which is applied to the variables of that task. The
    variables of the copy, such as counters, are created on the PS task under
    names by which all clients (training processes) find them.

    Args:
      task: The index of the PS task.

    Returns:
      The copy.
    """
    assert self._store is not None
    own: Any = self.optimizer
    kind: Any = type(own)
    with self._creator_scope(self._store.device_of_variables(task)):
      if hasattr(kind, "from_config") and hasattr(kind, "get_config"):
        return kind.from_config(own.get_config())
      if not isinstance(own, tf.Module):
        return copy.deepcopy(own)
      copies = {
        id(found.variable): tf.Variable(
          found.variable.read_value(), name=found.path
        )
        for found in module_internals.variables_of(own)
      }
      return copy.deepcopy(own, copies)

  def _track(self) -> None:
    """Makes the store's checkpoints contain the new slots.

    New slots are those that were created since the last call.
    """
    created = self._created[self._num_tracked :]
    with tf.init_scope():  # The caller may be tracing an update.
      resources.flush_assignments(created)
    for variable in created:
      self._store.track(variable, *self._owner.get(variable.path, ()))
    self._num_tracked = len(self._created)

  def _create_slots(self) -> None:
    """Makes an optimizer that is not of Keras 3 create its slots.

    Slots are values per variable, such as momentum. Such an optimizer creates
    them when it is first applied to a variable. So this method traces an
    update, and does not run it. If the slots did not exist when a checkpoint is
    restored, their saved values would be lost.
    """

    @tf.function(autograph=False)
    def update() -> None:
      for task in range(self._store.num_tasks):
        variables = self._variables_on(task)
        gradients = [tf.zeros(v.shape, v.dtype) for v in variables]
        self.apply(task, gradients, variables, tf.zeros([], tf.int64))

    update.get_concrete_function()

  def _variables_on(self, task: int) -> list[tf.Variable]:
    """Returns the shards of trainable variables that one PS task holds.

    A shard is a variable or a part of one. The order is that of the store.

    Args:
      task: The index of the PS task.
    """
    assert self._store is not None
    return [
      self._store.variables(index)[number]
      for index in self._store.trainable
      for number, shard in enumerate(self._store.shards[index])
      if shard.task == task
    ]

  def _creator_scope(
    self, device: str
  ) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which new variables are shared by all clients.

    Clients are the training processes. A slot (a value that an optimizer keeps
    per variable) is placed next to its variable. The name of the slot says
    which variable that is: Keras names a slot `<path of its variable, with _
    for />_<slot>`; other optimizers make the path a part of the name.

    Args:
      device: The device of all other new variables, such as scalars of the
        whole optimizer.
    """

    def place_slot(slot: str, variable: tf.Variable) -> tuple[str, str]:
      kind = f"slots/{self._kind}/{slot}"
      path = f"{kind}/{variable.path}"
      self._owner[path] = kind, variable.path
      return path, variable.device

    def place(name: str) -> tuple[str, str]:
      owners = [n for n in self._shards if name.startswith(n + "_")]
      if owners:
        owner = max(owners, key=len)
        variable = self._shards[owner]
        return place_slot(name[len(owner) + 1 :], variable)
      if not self._is_keras:
        name = name.strip("/")
        within = [
          v for v in self._shards.values() if f"/{v.path}/" in f"/{name}/"
        ]
        if within:
          variable = max(within, key=lambda v: len(v.path))
          rest = f"/{name}/".replace(f"/{variable.path}/", "/").strip("/")
          # Sonnet names a slot like its variable, within a scope.
          scope = tf.get_current_name_scope().split("/")[-1]
          scope = re.sub(r"_\d+$", "", scope)  # Of another task's copy.
          return place_slot(rest or scope or "slot", variable)
      scalar = self._prefix + scalar_name(name, self._names)
      return f"optimizer/{scalar}", device

    def is_of_table(path: str) -> bool:
      return self._owner.get(path, ("", ""))[1] in self._in_tables

    creator = self._store.namespace.variable_creator(
      place, self._created, is_of_table
    )
    return tf.variable_creator_scope(creator)

  def learning_rate(self, step: int) -> float:
    """Returns the learning rate at global step `step`.

    The result is NaN if the optimizer is not one of Keras 3.
    """
    if not self._is_keras:
      return float("nan")
    rate = keras_internals.learning_rate(self.optimizer)
    if keras_internals.has_schedule(self.optimizer):
      return float(rate(step))
    return float(rate() if callable(rate) else rate)

  def refresh(self) -> None:
    """Copies scalars that have changed, such as the learning rate, to PS tasks.

    The client (training process) that sets the learning rate calls this method
    before each update.
    """
    changed = self._correct_momentum()
    changed += [v for _, copies in self._copies for v in copies.refresh()]
    resources.flush_assignments(changed)

  def _correct_momentum(self) -> list[tf.Variable]:
    """Multiplies the velocities by new / old rate if the learning rate changed.

    A shared variable holds the old rate, which the velocities include. It is
    read at every call, since a restored checkpoint may have changed it.

    Returns:
      The variables that were assigned; empty if nothing was to be corrected.
    """
    if self._velocity_rate is None:
      return []
    rate = np.float32(self.learning_rate(0))
    before = np.float32(self._velocity_rate.numpy())
    if rate == before:
      return []
    changed = [self._velocity_rate]
    if before:
      for velocity in keras_internals.velocities(self.optimizer):
        variable = velocity.value
        with tf.device(variable.device):
          # Asynchronous updates change the variable meanwhile, too.
          variable.assign_add(variable.read_value() * (rate / before - 1))
        changed.append(variable)
    self._velocity_rate.assign(rate)
    return changed

  def _sort_scalars(self) -> None:
    """Finds the scalars of the whole optimizer, and stores them in two lists.

    `_common` gets the scalars that updates change, such as that of Nadam. These
    are shared variables. `_copies` gets the scalars that the client (training
    process) sets, such as the learning rate, each with new copies on the PS
    tasks.

    Raises:
      ValueError: If an element of `_common` would not be a scalar.
    """
    assert self._store is not None
    for variable in self.optimizer.variables:
      if isinstance(variable.value, resources.SharedVariable):
        if variable.value.path not in self._owner:
          _check_scalar(self.optimizer, variable)
          self._common.append(variable)
      elif variable is not self.optimizer.iterations:
        self._copies.append(
          (variable, _Copies(variable, self._store, self._prefix))
        )

  def read_origins(self) -> list[tf.Tensor]:
    """Reads the global step at which the slots were created, on PS task 0.

    Bias correction uses the number of updates since then.

    Returns:
      A list of one int64 scalar, which is 0 if the optimizer does not need it.
    """
    assert self._store is not None
    with tf.device(self._store.device_of_task(0)):
      if self._began is None:
        return [tf.zeros([], tf.int64)]
      return [self._began.read_value()]

  def _scalar_values(
    self,
    task: int,
    step: tf.Tensor,
    rate_factor: tf.Tensor | None,
    origins: Sequence[tf.Tensor] | None,
  ) -> Iterator[tuple[keras.Variable, tf.Tensor]]:
    """Yields the values that scalars of the optimizer have in this update.

    The scalars are those that the client sets, such as the learning rate, and
    `iterations`. The value of `iterations` is computed from the global step.
    (Keras 3.15 assigns `iterations + 1`, which would lose increments if updates
    run at the same time.) If the learning rate is a schedule, the value is the
    global step; if not, it is the number of updates since the slots were
    created, which bias correction needs.

    Args:
      task: The PS task on which the update is made.
      step: int64 scalar, the global step before the update.
      rate_factor: Scalar that multiplies the learning rate; None: 1.
      origins: What `read_origins` returned; None: it is called now.

    Yields:
      (Keras variable, its value in this update) pairs.
    """
    if self._began is not None:
      (origin,) = self.read_origins() if origins is None else origins
      step = step - origin
    iterations = self.optimizer.iterations
    yield iterations, tf.cast(step, iterations.dtype)
    rate = keras_internals.learning_rate(self.optimizer)
    for variable, copies in self._copies:
      value = copies.variables[task].read_value()
      if rate_factor is not None and variable is rate:
        value *= tf.cast(rate_factor, value.dtype)
      yield variable, value

  def has_adjustable_rate(self) -> bool:
    """Returns whether `apply` can multiply the learning rate by a factor.

    It can if the optimizer is one of Keras 3 and its rate is a number, not a
    schedule.
    """
    return self._is_keras and isinstance(
      keras_internals.learning_rate(self.optimizer), keras.Variable
    )

  def has_common_state(self) -> bool:
    """Returns whether updates change scalars of the whole optimizer.

    Nadam has such a scalar; most optimizers keep all state per variable.
    """
    return bool(self._common)

  def stays_on_task(self) -> bool:
    """Returns whether `apply` uses only variables of its own PS task.

    That is known for optimizers of Keras 3 (given `origins`). Another optimizer
    may read a variable that it has placed elsewhere.
    """
    return self._is_keras

  def apply(
    self,
    task: int,
    gradients: Sequence[parameter_store.Gradient],
    variables: Sequence[tf.Variable],
    step: tf.Tensor,
    rate_factor: tf.Tensor | None = None,
    origins: Sequence[tf.Tensor] | None = None,
  ) -> list[tuple[tf.Variable, tf.Tensor]]:
    """Applies gradients to variables on the PS task (parameter server) `task`.

    Args:
      task: The PS task on which the ops are placed.
      gradients: One per variable, dense or `tf.IndexedSlices`, not None.
      variables: Shards of the store's trainable variables.
      step: int64 scalar, the global step before this update.
      rate_factor: Scalar that multiplies the learning rate of this update;
        None: 1. It must be None unless `has_adjustable_rate()`.
      origins: What `read_origins` returned. None: PS task 0 is asked for it
        now, which is a message if `task` is another one.

    Returns:
      A (variable, new value) pair for each scalar of the whole optimizer that
      the update changes. `commit` assigns these values.
    """
    if not variables:
      return []
    assert self._store is not None
    device = self._store.device_of_variables(task)
    with tf.device(device):
      if not self._is_keras:
        with self._creator_scope(device), patches.outside_strategy():
          self._apply_copy(task, gradients, variables)
        self._track()
        return []
      scalars = list(self._scalar_values(task, step, rate_factor, origins))
      with (
        patches.outside_strategy(),
        keras.StatelessScope(scalars) as scope,
      ):
        cells = [
          (variable, TensorVariable(variable.value.read_value()))
          for variable in self._common
        ]
        rows: list[Any] = [
          _RowUpdate(g, v, self._table_slots.get(v.path, []))
          if v.path in self._in_tables
          else None
          for g, v in zip(gradients, variables, strict=True)
        ]
        row_slots = [pair for row in rows if row for pair in row.slots]
        for pair in [*cells, *row_slots]:
          scope.add_update(pair)
        self.optimizer.apply(
          [
            row.values if row else g
            for row, g in zip(rows, gradients, strict=True)
          ],
          [
            row.variable if row else v
            for row, v in zip(rows, variables, strict=True)
          ],
        )
      for row in rows:
        if row is not None:
          row.assign()
      return [(variable.value, cell.value) for variable, cell in cells]

  def _apply_copy(
    self,
    task: int,
    gradients: Sequence[parameter_store.Gradient],
    variables: Sequence[tf.Variable],
  ) -> None:
    """Applies gradients by the optimizer's copy for one PS task; see `_copy`.

    Args:
      task: The index of the PS task.
      gradients: One per element of `variables`.
      variables: Shards of the store's trainable variables, all on this task.
    """
    optimizer = self._by_task[task]
    if not isinstance(optimizer, ApplyOptimizer):
      optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))
      return
    if isinstance(optimizer, tf.Module):
      # Sonnet finds slots by the position of their variable.
      given = dict(zip((v.path for v in variables), gradients, strict=True))
      variables = self._variables_on(task)
      gradients = [given.get(v.path) for v in variables]
    optimizer.apply(gradients, variables)

  def set_learning_rate(self, rate: float) -> None:
    """Sets the learning rate of the next and all later updates.

    Raises:
      ValueError: If the optimizer's rate cannot be changed during training.
    """
    for optimizer in [self.optimizer, *self._by_task]:
      if not self._is_keras and not hasattr(type(optimizer), "from_config"):
        raise ValueError(
          "`optimizer` must be one of Keras 3 or `tf_keras` if its learning"
          f" rate is set during training. Received: {optimizer!r}."
        )
      optimizer.learning_rate = rate

  def skip(self) -> None:
    """Corrects the optimizer's count of updates for an update not made.

    The count, which Keras' bias correction uses, is the global step minus the
    step at which the slots were created. The global step goes up even if an
    update is not made. So this method adds 1 to the stored step at which the
    slots were created. It is to be used inside a `tf.function`.
    """
    if self._began is not None:
      self._began.assign_add(1)

  def commit(self, changed: Sequence[tuple[tf.Variable, tf.Tensor]]) -> None:
    """Assigns new values to scalars that belong to the whole optimizer.

    Only some optimizers, such as Nadam, change such scalars in an update. The
    method is to be called once per update, after `apply` on all PS tasks.

    Args:
      changed: The (variable, new value) pairs that `apply` returned for one of
        the PS tasks; they are equal for all tasks.
    """
    for variable, value in changed:
      variable.assign(value)


class _RowVariable(TensorVariable):
  """Stands in for some rows of a variable while an optimizer is applied.

  The rows are read when their value is used for the first time. An optimizer
  that only adds to them, such as gradient descent without momentum, does not
  use it.
  """

  def __init__(self, variable: Any, rows: tf.Tensor, like: Any = None):
    """Makes a stand-in for some rows of `variable`.

    Args:
      variable: A variable on the current device.
      rows: int64 [n], the indices of the rows.
      like: As for `TensorVariable`.
    """
    self.dtype = variable.dtype
    self.shape = tf.TensorShape([None, *variable.shape[1:]])
    self._be_found_as(like)
    self._variable = variable
    self._rows = rows
    # The first value and the present one; None: the value has not been used.
    self._first: Any = None
    self._value: Any = None
    # What was added to the rows before their value was used.
    self._added: Any = None

  @property
  def value(self) -> tf.Tensor:
    """The present value of the rows, [n, *variable.shape[1:]]."""
    if self._value is None:
      self._first = self._value = self._variable.gather(self._rows)
      if self._added is not None:
        self._value += self._added
    return self._value

  @value.setter
  def value(self, value: tf.Tensor) -> None:
    _ = self.value  # `write` needs the first value.
    self._value = value

  def assign_add(self, value: tf.Tensor) -> None:
    """Adds `value` to the rows."""
    if self._value is not None:
      super().assign_add(value)
      return
    value = tf.cast(value, self.dtype)
    self._added = value if self._added is None else self._added + value

  def assign_sub(self, value: tf.Tensor) -> None:
    """Subtracts `value` from the rows."""
    if self._value is not None:
      super().assign_sub(value)
    else:
      self.assign_add(-value)

  def write(self) -> None:
    """Adds what was changed to the rows of the variable.

    It adds a difference and does not assign the value. So two updates of the
    same row at the same time both take effect, as for an ordinary variable.
    """
    change = self._added
    if self._value is not None:
      change = self._value - self._first
    if change is not None:
      self._variable.scatter_add(tf.IndexedSlices(change, self._rows))


class _RowUpdate:
  """One update of some rows of a table, on one PS task.

  A table is a large matrix whose rows are divided among the PS tasks; each task
  holds one part of it. The caller applies the optimizer to `values` and
  `variable`, with the stand-ins of `slots` in place of the slots. Then `assign`
  writes the changes.

  Attributes:
    values: The gradient of the n rows for which there is one, [n, columns].
    variable: Stands in for these rows of the part.
    slots: (slot of the part, stand-in for these rows of the slot) pairs.
  """

  def __init__(
    self,
    gradient: Any,
    part: Any,
    slots: Sequence[keras.Variable],
  ):
    """Makes the stand-ins for the rows of the part and of its slots.

    Args:
      gradient: A `tf.IndexedSlices` with distinct indices of rows of the part.
      part: The variable of the part of the table.
      slots: The optimizer's slots of `part`, which have its shape.
    """
    rows = gradient.indices
    self.values = gradient.values
    self.variable = _RowVariable(part, rows, like=part)
    self.slots = [(slot, _RowVariable(slot.value, rows)) for slot in slots]

  def assign(self) -> None:
    """Writes what the optimizer has changed to the part and its slots."""
    for stand_in in (self.variable, *(each for _, each in self.slots)):
      stand_in.write()


# Adafactor (Keras 3.15) names its factored moments like the variable.
_FACTORED = keras_internals.optimizer_classes("Adafactor")
# It has no slots of its own.
_SEVERAL = keras_internals.optimizer_classes("MultiOptimizer")
# These optimizers use norms or products of a whole variable.
_NOT_BY_SHARD = keras_internals.optimizer_classes("Lamb", "Muon")


def _check_keras(optimizer: keras.optimizers.Optimizer) -> None:
  """Raises ValueError if a Keras optimizer cannot be used on PS tasks.

  The reason may be its class or one of its options.
  """
  name = type(optimizer).__name__
  if isinstance(optimizer, _SEVERAL):
    raise ValueError(
      "`optimizer` must be one optimizer for all variables; several can take"
      " turns: give `fit` a model whose `train_step` calls `apply` of each with"
      f" the variables that it updates. Received: {name}."
    )
  if isinstance(optimizer, _FACTORED):
    raise ValueError(
      "`optimizer` must keep its state by variable, as each PS task updates"
      " its own variables; to save memory, use one with a single value per"
      f" weight, such as `keras.optimizers.Lion`. Received: {name}."
    )
  if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
    raise ValueError(
      "`optimizer` must not scale the loss itself; give `loss_scale` to the"
      f" update rule. Received: {name}."
    )
  check_options(
    optimizer,
    global_clipnorm="give `clip_mean_norm` to the update rule",
    gradient_accumulation_steps="raise `replicas_to_aggregate`",
  )


def check_options(
  optimizer: keras.optimizers.Optimizer, **successors: str
) -> None:
  """Checks that an optimizer works, and has none of some forbidden options.

  Always forbidden are `use_ema` and `loss_scale_factor`, since the update rule
  has options for these purposes, and variables that are excluded from weight
  decay by `var_list`: they are not those that the optimizer will update.

  Args:
    optimizer: The Keras optimizer.
    **successors: More forbidden options. The value of each says what to do
      instead, for the error message.

  Raises:
    ValueError: If a forbidden option of the optimizer is set, or the optimizer
      does not work with the installed version of Keras.
  """
  keras_internals.check_works(optimizer)
  successors["use_ema"] = "give `variable_averages` to the update rule"
  successors["loss_scale_factor"] = "give `loss_scale` to the update rule"
  for option, instead in successors.items():
    if value := getattr(optimizer, option, None):
      raise ValueError(
        f"`optimizer` must not use `{option}`; {instead}."
        f" Received: {option}={value}."
      )
  if excluded := keras_internals.excluded_from_weight_decay(optimizer):
    raise ValueError(
      "`optimizer` must exclude variables from weight decay by `var_names`, as"
      " it updates variables that are made later. Received: `var_list` of"
      f" {len(excluded)} variables."
    )


def _check_scalar(
  optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> None:
  """Checks that a variable of an optimizer is a scalar, if it is not a slot.

  Slots are recognized by their names, which contain the name of a model's
  variable. Any other variable that is not a scalar is a slot without such a
  name, as Adagrad and Ftrl have them before Keras 3.10.

  Args:
    optimizer: The optimizer, for the error message.
    variable: A variable of it that was not recognized as a slot.

  Raises:
    ValueError: If `variable` is not a scalar.
  """
  if len(variable.shape):  # A `tf.TensorShape` without axes is true.
    raise ValueError(
      "`optimizer` must name its slots after their variables; a newer Keras may"
      f" do so. Received: {type(optimizer).__name__} of Keras"
      f" {keras.__version__}, with {variable.path}."
    )


def _check_velocities(optimizer: Optimizer) -> None:
  """Checks that `momentum_correction` is possible with an optimizer.

  It needs velocities, which are sums of gradients multiplied by the learning
  rate. SGD and RMSprop with momentum have them. The learning rate must be a
  number, not a schedule.

  Raises:
    ValueError: If that is not so.
  """
  is_keras = isinstance(optimizer, keras.optimizers.Optimizer)
  kinds = keras.optimizers.SGD, keras.optimizers.RMSprop
  if not isinstance(optimizer, kinds) or not optimizer.momentum:
    raise ValueError(
      "`momentum_correction` needs keras.optimizers.SGD or RMSprop with"
      " momentum, whose velocities include the learning rate. Received:"
      f" {type(optimizer).__name__}"
      + (", momentum=0." if isinstance(optimizer, kinds) else ".")
    )
  if is_keras and keras_internals.has_schedule(optimizer):
    raise ValueError(
      "`momentum_correction` needs a learning rate that is a number, not a"
      f" schedule. Received: {keras_internals.learning_rate(optimizer)!r}."
    )


def _check_shards(
  optimizer: keras.optimizers.Optimizer, store: parameter_store.ParameterStore
) -> None:
  """Checks that the store keeps variables whole if the optimizer needs that.

  Lamb, Muon and the option `clipnorm` compute with whole variables, for example
  their norms.

  Raises:
    ValueError: If the optimizer needs whole variables, and the store splits one
      into shards; or if it is Lamb or Muon, and the store has tables.
  """
  reason = None
  if isinstance(optimizer, _NOT_BY_SHARD):
    reason = type(optimizer).__name__
    if store.table_paths:
      raise ValueError(
        "`optimizer` must update each element of a variable independently of"
        " the others where there are tables"
        f" ({', '.join(store.table_paths)}). Received: {reason}."
      )
  elif optimizer.clipnorm:
    reason = f"clipnorm={optimizer.clipnorm}"
  for index in store.trainable:
    if reason and len(store.shards[index]) > 1:
      instead = "use the placement 'greedy' or 'round_robin'"
      if store.specs[index].table is not None:
        instead = "for a table, give `clip_mean_norm` to the update rule"
      raise ValueError(
        f"`optimizer` needs whole variables, but {store.specs[index].path!r} is"
        f" split into shards; {instead}. Received: {reason}."
      )
