"""Runs somebody's optimizer where the variables live.

The optimizer wrappers hold an inner optimizer and never subclass one: a Keras
3 optimizer, or any object with `apply(gradients, variables)` or
`apply_gradients(pairs)`. Here its slots are put beside their variables, under
names that every client finds, and its update runs on one PS task at a time
with that task's own variables, so that neither gradients nor slots travel.
"""

import dataclasses
import re
from collections.abc import Sequence

import keras
import tensorflow as tf

from tf_replicas import parameter_store
from tf_replicas import resources
from tf_replicas import workarounds


@dataclasses.dataclass
class _Copies:
  """Copies on the PS tasks of a scalar of the client, and what they hold."""

  variables: list[tf.Variable]
  value: object = None


class Cell:
  """Stands for a variable while an optimizer is applied to tensors.

  Keras 3.15 assigns a variable of the whole optimizer (Nadam's `_u_product`),
  and with TensorFlow every variable, through its `value`, which in a
  `keras.StatelessScope` would be a tensor.
  """

  def __init__(self, value: tf.Tensor, like: tf.Variable | None = None):
    """Holds `value`.

    Args:
      value: What the variable is taken to hold.
      like: Has the name by which the optimizer knows the variable, if it is
        one that is trained.
    """
    self.value = value
    self.dtype = value.dtype
    self.shape = value.shape
    if like is not None:
      self.name, self.path, self.constraint = like.name, like.path, None
      self._unique_id = like._unique_id

  def assign(self, value: tf.Tensor) -> None:
    self.value = tf.cast(value, self.dtype)

  def assign_add(self, value: tf.Tensor) -> None:
    self.assign(self.value + value)

  def assign_sub(self, value: tf.Tensor) -> None:
    self.assign(self.value - value)

  def __mul__(self, other: tf.Tensor) -> tf.Tensor:
    return self.value * other

  def __tf_tensor__(self, dtype=None, name=None) -> tf.Tensor:
    return tf.convert_to_tensor(self.value, dtype=dtype, name=name)


class InnerOptimizer:
  """An optimizer bound to the trainable variables of a store."""

  def __init__(self, optimizer: object):
    """Wraps `optimizer`.

    Raises:
      TypeError: If it has no known way to be applied.
      ValueError: If it is a Keras optimizer with an option that is wrong when
        variables are updated in groups.
    """
    self.optimizer = optimizer
    # What one optimizer calls momentum may have another's opposite sign.
    self._kind = type(optimizer).__name__.lower()
    self._is_built = False
    self._store: parameter_store.ParameterStore | None = None
    self._is_keras = isinstance(optimizer, keras.optimizers.Optimizer)
    self._began: tf.Variable | None = None
    if self._is_keras:
      _check_keras(optimizer)
    elif not hasattr(optimizer, "apply") and not hasattr(
      optimizer, "apply_gradients"
    ):
      raise TypeError(
        "`optimizer` must have `apply(gradients, variables)` or"
        f" `apply_gradients(pairs)`. Received: {optimizer!r}."
      )

  def build(
    self, store: parameter_store.ParameterStore, *, is_chief: bool = True
  ) -> None:
    """Creates the slots beside the store's trainable variables.

    Args:
      store: Holds the variables.
      is_chief: Whether this client says what the learning rate is; the others
        build after it, and apply with its rate.

    Raises:
      ValueError: If the optimizer needs whole variables and the store has cut
        one into shards, or if it was built for other variables.
    """
    if store is self._store:
      return  # Another rule around this optimizer has built it.
    self._store = store
    self._created: list[tf.Variable] = []
    self._num_adopted = 0
    self._names: dict[str, int] = {}
    # Path of a slot -> (its kind, path of the shard that it belongs to).
    self._owner: dict[str, tuple[str, str]] = {}
    self._shards = {
      variable.path.replace("/", "_"): variable
      for index in store.trainable
      for variable in store.variables(index)
    }
    if self._is_keras:
      _check_shards(self.optimizer, store)
    if self._is_keras and not self._is_built:
      if self.optimizer.built:
        raise ValueError(
          "`optimizer` must not be built yet, for its slots belong beside the"
          f" variables of the store. Received: {self.optimizer!r}."
        )
      self._is_built = True
      with self._creator_scope(store.device_of_task(0)):
        self.optimizer.build(list(self._shards.values()))
        if not self._has_schedule():
          self._began = tf.Variable(
            tf.zeros([], tf.int64), name=f"began.{self._kind}"
          )
    self._adopt()
    self._copies: list[tuple[keras.Variable, _Copies]] = []
    # State of the whole optimizer that updates change.
    self._common: list[keras.Variable] = []
    if self._is_keras:
      self._make_copies()
      if is_chief:
        self.refresh()
    else:
      self._meet_variables()

  def _adopt(self) -> None:
    created = self._created[self._num_adopted :]
    with tf.init_scope():  # An update may just be traced.
      resources.await_assigned(created)
    for variable in created:
      self._store.adopt(variable, *self._owner.get(variable.path, ()))
    self._num_adopted = len(self._created)

  def _meet_variables(self) -> None:
    """Lets an optimizer that is not of Keras make its slots, and does no more.

    It makes them when it meets a variable: while an update is traced. Before a
    checkpoint is restored is the time for that, or what they held is lost.
    """

    @tf.function(autograph=False)
    def update():
      for task in range(self._store.num_tasks):
        variables = [
          self._store.variables(index)[number]
          for index in self._store.trainable
          for number, shard in enumerate(self._store.shards[index])
          if shard.task == task
        ]
        gradients = [tf.zeros(v.shape, v.dtype) for v in variables]
        self.apply(task, gradients, variables, tf.zeros([], tf.int64))

    update.get_concrete_function()

  def _creator_scope(self, device: str):
    """Variables created inside are shared, beside their reference variable.

    Keras names a slot `<path, / as _>_<slot>`. What follows no such name
    (a scalar of the whole optimizer) goes to `device`.
    """

    def place(name: str) -> tuple[str, str]:
      owners = [n for n in self._shards if name.startswith(n + "_")]
      if owners:
        owner = max(owners, key=len)
        variable = self._shards[owner]
        slot = name[len(owner) + 1 :]
        kind = f"slots/{self._kind}/{slot}"
        path = f"{kind}/{variable.path}"
        self._owner[path] = kind, variable.path
        return path, variable.device
      # Keras numbers nameless variables by process: `variable_7`.
      name = re.sub(r"^variable_\d+$", "variable", name)
      count = self._names[name] = self._names.get(name, -1) + 1
      suffix = f"_{count}" if count else ""
      return f"optimizer/{name}{suffix}", device

    creator = resources.variable_creator(place, self._created)
    return tf.variable_creator_scope(creator)

  def learning_rate(self, step: int) -> float:
    """The rate at global step `step`; NaN if there is no such thing."""
    if not self._is_keras:
      return float("nan")
    rate = self.optimizer._learning_rate  # `learning_rate` reads `iterations`.
    if self._has_schedule():
      return float(rate(step))
    return float(rate() if callable(rate) else rate)

  def refresh(self) -> None:
    """Tells the PS tasks what the client changed, such as the learning rate.

    They hold a copy each, since a number that an update had to fetch from the
    client would hold it up for a millisecond.
    """
    changed: list[tf.Variable] = []
    for variable, copies in self._copies:
      value = variable.numpy()
      if value != copies.value:
        for copy in copies.variables:
          copy.assign(value)
        copies.value = value
        changed += copies.variables
    resources.await_assigned(changed)

  def _make_copies(self) -> None:
    """Copies of the scalars that the client holds, on every PS task."""
    self._copies = []
    for variable in self.optimizer.variables:
      if isinstance(variable.value, resources.SharedVariable):
        if variable.value.path not in self._owner:
          self._common.append(variable)
        continue
      if variable is self.optimizer.iterations:
        continue
      copies = []
      for task in range(self._store.num_tasks):
        with tf.device(self._store.device_of_task(task)):
          copies.append(
            resources.shared_variable(
              f"optimizer/{variable.name}", variable.shape, variable.dtype
            )
          )
      self._copies.append((variable, _Copies(copies)))

  def _scalars(self, task: int, step: tf.Tensor, rate_factor) -> list:
    """What no update changes: (Keras variable, its value in this one).

    The iteration count is not Keras' own, which is lost to races (Keras 3.15:
    `iterations.assign(iterations + 1)`), but the global step since the slots
    began, for whose age it stands; a schedule goes by the whole global step.
    """
    if self._began is not None:
      with tf.device(self._store.device_of_task(0)):
        step = step - self._began.read_value()
    copied = {id(v): copies.variables[task] for v, copies in self._copies}
    scalars = []
    for variable in self.optimizer.variables:
      if variable is self.optimizer.iterations:
        value = tf.cast(step, variable.dtype)
      elif id(variable) in copied:
        value = copied[id(variable)].read_value()
        if rate_factor is not None and self._is_rate(variable):
          value *= tf.cast(rate_factor, value.dtype)
      else:
        continue
      scalars.append((variable, value))
    return scalars

  def _has_schedule(self) -> bool:
    rate = self.optimizer._learning_rate
    return isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)

  def _is_rate(self, variable: keras.Variable) -> bool:
    return variable is self.optimizer._learning_rate

  def has_adjustable_rate(self) -> bool:
    """Whether `apply` can multiply the learning rate by a tensor."""
    return self._is_keras and isinstance(
      self.optimizer._learning_rate, keras.Variable
    )

  def has_common_state(self) -> bool:
    """Whether updates change what belongs to the whole optimizer (Nadam)."""
    return bool(self._common)

  def apply(
    self,
    task: int,
    gradients: Sequence[parameter_store.Gradient],
    variables: Sequence[tf.Variable],
    step: tf.Tensor,
    rate_factor: tf.Tensor | None = None,
  ) -> list[tuple[tf.Variable, tf.Tensor]]:
    """Applies gradients to variables that all live on PS task `task`.

    Args:
      task: The PS task; the ops are placed on it.
      gradients: One per variable, not None.
      variables: Shards of the store's trainable variables.
      step: int64 scalar, the updates made before this one.
      rate_factor: Scalar; multiplies the learning rate of this update, of an
        optimizer that `has_adjustable_rate`.

    Returns:
      New values of what belongs to the whole optimizer, for `commit`.
    """
    if not variables:
      return []
    device = self._store.device_of_task(task)
    with tf.device(device):
      if not self._is_keras:
        with self._creator_scope(device):
          if hasattr(self.optimizer, "apply"):
            self.optimizer.apply(gradients, variables)
          else:
            pairs = list(zip(gradients, variables, strict=True))
            self.optimizer.apply_gradients(pairs)
        self._adopt()
        return []
      scalars = self._scalars(task, step, rate_factor)
      with (
        workarounds.outside_strategy(),
        keras.StatelessScope(scalars) as scope,
      ):
        cells = [
          (variable, Cell(variable.value.read_value()))
          for variable in self._common
        ]
        for pair in cells:
          scope.add_update(pair)
        self.optimizer.apply(gradients, variables)
      return [(variable.value, cell.value) for variable, cell in cells]

  def commit(self, changed: Sequence[tuple[tf.Variable, tf.Tensor]]) -> None:
    """Assigns what `apply` of one task returned; once per step."""
    for variable, value in changed:
      variable.assign(value)


# Adafactor (Keras 3.15) gives its factored moments the name of the variable,
# MultiOptimizer has no slots of its own.
_NOT_BY_TASK = (
  keras.optimizers.Adafactor,
  keras.optimizers.MultiOptimizer,
)
# They use norms or products of a whole variable.
_NOT_BY_SHARD = (keras.optimizers.Lamb, keras.optimizers.Muon)


def _check_keras(optimizer: keras.optimizers.Optimizer) -> None:
  """Refuses what cannot be right when each PS task updates its own."""
  name = type(optimizer).__name__
  if isinstance(optimizer, _NOT_BY_TASK):
    raise ValueError(
      "`optimizer` must keep its state by variable, so that each PS task can"
      f" update its own. Received: {name}."
    )
  if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
    raise ValueError(
      "`optimizer` must not scale the loss itself; give `loss_scale` to the"
      f" wrapper. Received: {name}."
    )
  for option, instead in (
    ("global_clipnorm", "give `clip_mean_norm` to the wrapper"),
    ("use_ema", "give `variable_averages` to the wrapper"),
    ("gradient_accumulation_steps", "raise `replicas_to_aggregate`"),
    ("loss_scale_factor", "give `loss_scale` to the wrapper"),
  ):
    value = getattr(optimizer, option, None)
    if value:
      raise ValueError(
        f"`optimizer` must not use `{option}`; {instead}."
        f" Received: {option}={value}."
      )


def _check_shards(
  optimizer: keras.optimizers.Optimizer, store: parameter_store.ParameterStore
) -> None:
  """Refuses what cannot be right where a variable is cut into shards."""
  reason = None
  if isinstance(optimizer, _NOT_BY_SHARD):
    reason = type(optimizer).__name__
  elif optimizer.clipnorm:
    reason = f"clipnorm={optimizer.clipnorm}"
  for index in store.trainable:
    if reason and len(store.shards[index]) > 1:
      raise ValueError(
        "`optimizer` must not need whole variables where they are cut into"
        f" shards, as {store.specs[index].path!r} is; use the placement"
        f" 'greedy' or 'round_robin'. Received: {reason}."
      )
