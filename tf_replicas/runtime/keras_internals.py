"""Uses the private names of Keras that the library needs, as of Keras 3.15.

No other module uses a private name of Keras. Optimizers that an older Keras
lacks are left out, so that the library can be imported with an older Keras.
"""

import contextlib
import functools
import inspect
import re
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.trainers import compile_utils

from tf_replicas.runtime import resources

Rate = (
  keras.Variable
  | keras.optimizers.schedules.LearningRateSchedule
  | Callable[[], float | tf.Tensor]
)

_EXCLUDED_NAMES = "_exclude_from_weight_decay_pattern"


def optimizer_classes(*names: str) -> tuple[type, ...]:
  """Returns those classes of `keras.optimizers` with these names that exist.

  Args:
    *names: Names of classes. For example, Keras 3.8 has no `Muon`, and Keras
      3.12 has no `MultiOptimizer`.
  """
  found = [getattr(keras.optimizers, name, None) for name in names]
  return tuple(c for c in found if c is not None)


def optimizer_class(
  name: str, *arguments: str
) -> type[keras.optimizers.Optimizer]:
  """Returns the class of `keras.optimizers` with this name.

  Args:
    name: The name of the class.
    *arguments: Names of arguments that the constructor of the class must have.

  Raises:
    ValueError: If the installed version of Keras has no such class, or its
      constructor lacks one of the arguments.
  """
  found = optimizer_classes(name)
  if not found or set(arguments) - set(inspect.signature(found[0]).parameters):
    raise ValueError(
      f"the optimizer {name} needs a newer version of Keras. Received: Keras"
      f" {keras.__version__}."
    )
  return found[0]


def check_works(optimizer: keras.optimizers.Optimizer) -> None:
  """Checks that an optimizer of Keras works with TensorFlow.

  `Muon` of Keras 3.10 to 3.12 does not: it reads an attribute that the
  variables of TensorFlow do not have. These versions are recognized by an
  attribute that they lack, `rms_rate`.

  Raises:
    ValueError: If the optimizer fails with TensorFlow.
  """
  muons = optimizer_classes("Muon")
  if isinstance(optimizer, muons) and not hasattr(optimizer, "rms_rate"):
    raise ValueError(
      "the optimizer Muon needs Keras 3.13 or newer, because that of older"
      " versions fails with TensorFlow. Received: Keras"
      f" {keras.__version__}."
    )


def learning_rate(optimizer: keras.optimizers.Optimizer) -> Rate:
  """Returns the learning rate in the form in which the optimizer stores it.

  The property `optimizer.learning_rate` would instead return the number that a
  schedule gives at `optimizer.iterations`.

  Args:
    optimizer: A Keras optimizer.

  Returns:
    A variable, a schedule, or a function without arguments that returns the
    rate, depending on how the optimizer was made.
  """
  return optimizer._learning_rate


def has_schedule(optimizer: keras.optimizers.Optimizer) -> bool:
  """Returns whether the optimizer's learning rate is a Keras schedule."""
  return isinstance(
    learning_rate(optimizer),
    keras.optimizers.schedules.LearningRateSchedule,
  )


def variables_updated_by(
  optimizer: keras.optimizers.Optimizer,
) -> list[keras.Variable]:
  """Returns the variables for which a built optimizer was built."""
  if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
    optimizer = optimizer.inner_optimizer  # In older versions, only it knows.
  return optimizer._trainable_variables


def velocities(
  optimizer: keras.optimizers.Optimizer,
) -> list[keras.Variable]:
  """Returns the velocities of an optimizer.

  A velocity is a slot (a value per variable) that is a sum of past gradients,
  each multiplied by the learning rate.

  Args:
    optimizer: A built Keras optimizer.

  Returns:
    The momentum slots of SGD and RMSprop, one per variable. The list is empty
    for these optimizers without momentum, and for all other optimizers.
  """
  if isinstance(optimizer, keras.optimizers.SGD):
    return list(optimizer.momentums)
  if isinstance(optimizer, keras.optimizers.RMSprop):
    return list(optimizer._momentums)
  return []


def is_default(hook: Callable) -> bool:
  """Returns whether a hook is that of `keras.callbacks.Callback`, for nothing.

  Args:
    hook: A method of a callback, or a function that replaces it, as those of
      `keras.callbacks.LambdaCallback`.
  """
  return getattr(hook, "_is_default", False)


def swap_exactly(callback: keras.callbacks.SwapEMAWeights) -> None:
  """Makes a callback swap weights and averages without rounding.

  With TensorFlow, Keras adds and subtracts them, which rounds. So the weights
  would change a little with each evaluation.

  Args:
    callback: The callback, which is changed.
  """
  internals: Any = callback
  internals._tf_swap_variables = internals._backend_swap_variables


def layers_of(model: keras.Model) -> list[keras.layers.Layer]:
  """Returns a model and all layers in it, those within layers too."""
  return list(model._flatten_layers())


def single_metrics(
  metrics: Sequence[keras.metrics.Metric],
) -> list[keras.metrics.Metric]:
  """Lists metrics, with those of `compile` in place of their container.

  Args:
    metrics: The metrics of a model. One of them may be the object that contains
      all metrics given to `compile`.

  Returns:
    Metrics with the same variables, in the same order.
  """
  found = []
  for metric in metrics:
    is_container = isinstance(metric, compile_utils.CompileMetrics)
    found += metric.metrics if is_container else [metric]
  return found


def embedding_weight(layer: keras.layers.Embedding) -> keras.Variable:
  """Returns the weight of a built embedding layer.

  Unlike the property `embeddings`, it works with every kind of weight: it adds
  nothing to it, and `tf_replicas.Embedding` does not refuse it.
  """
  return layer._embeddings


def set_embedding_weight(
  layer: keras.layers.Embedding, weight: keras.Variable
) -> None:
  """Gives an embedding layer its weight, as `build` of Keras does."""
  layer._embeddings = weight


def variable_id(variable: tf.Variable) -> int | str:
  """Returns the key by which a Keras optimizer finds slots of `variable`."""
  return variable._unique_id


def copy_of(
  optimizer: keras.optimizers.Optimizer,
  variables: Sequence[keras.Variable] = (),
  **changes,
) -> keras.optimizers.Optimizer:
  """Returns a new optimizer, not built, with the configuration of `optimizer`.

  Args:
    optimizer: The optimizer to copy.
    variables: The variables that `optimizer` updates. If it excludes some of
      them from weight decay, the copy excludes variables of the same paths.
    **changes: Entries of the configuration that replace those of `optimizer`.
  """
  copied = type(optimizer).from_config(_configuration(optimizer) | changes)
  # Excluded variables are not in the configuration.
  pattern = getattr(optimizer, _EXCLUDED_NAMES, None)
  keys = excluded_from_weight_decay(optimizer)
  patterns = [pattern.pattern] if pattern else []
  patterns += [
    rf"^{re.escape(v.path)}(/part_\d+)?(:0)?$"  # The name of a shard.
    for v in variables
    if optimizer._var_key(v) in keys
  ]
  if patterns:
    setattr(copied, _EXCLUDED_NAMES, re.compile("|".join(patterns)))
  return copied


def _configuration(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
  """Returns the configuration of an optimizer.

  A schedule or function of the user may not be serializable. So "learning_rate"
  is the object itself.
  """
  rate = learning_rate(optimizer)
  if isinstance(rate, keras.Variable):
    return optimizer.get_config()
  optimizer.__dict__["_learning_rate"] = None
  try:
    return optimizer.get_config() | {"learning_rate": rate}
  finally:
    optimizer.__dict__["_learning_rate"] = rate


def excluded_from_weight_decay(
  optimizer: keras.optimizers.Optimizer,
) -> Collection[int | str]:
  """Returns the variables that an optimizer does not decay.

  Variables that it excludes by name are not among them.

  Returns:
    The keys by which Keras finds the variables.
  """
  return getattr(optimizer, "_exclude_from_weight_decay", ())


def is_compiled_by_xla(model: keras.Model) -> bool:
  """Returns whether a model was compiled with `jit_compile=True`.

  The property `jit_compile` of a model is also true if "auto" means True.
  """
  config = getattr(model, "_compile_config", None)
  return getattr(config, "config", {}).get("jit_compile") is True


@contextlib.contextmanager
def names_from_the_start() -> Iterator[None]:
  """Context in which layers without a name get equal names every time.

  Keras numbers such layers per process (`dense_7`). If a process built other
  models before, the layers would have other names than in a checkpoint, or in
  another task. Within the context, the numbers begin anew.
  """
  key = "object_name_uids"
  own = global_state.get_global_attribute(key)
  global_state.set_global_attribute(key, None)
  try:
    yield
  finally:
    global_state.set_global_attribute(key, own)


def make_paths_distinct(variables: Sequence[keras.Variable]) -> None:
  """Appends numbers to the paths of variables that share their path.

  For example, the variables of several metrics may have one path.

  Args:
    variables: The variables. All tasks must pass them in the same order, so
      that the numbers are the same.
  """
  taken, seen = {variable.path for variable in variables}, set()
  for variable in variables:
    path, number = variable.path, 0
    while variable.path in seen or (number and variable.path in taken):
      number += 1
      variable._path = f"{path}_{number}"
    seen.add(variable.path)


def replace_value(variable: keras.Variable, value: np.ndarray) -> None:
  """Replaces the value of a variable by one that may have another shape.

  The shape of the variable becomes that of the new value.

  Args:
    variable: A variable of a built layer.
    value: The new value, of the variable's dtype.
  """
  first = tf.convert_to_tensor(value)
  variable._value = tf.Variable(
    first, trainable=variable.trainable, name=variable.name
  )
  variable._shape = value.shape


@contextlib.contextmanager
def local_values(
  variables: Sequence[keras.Variable], values: Sequence[tf.Tensor]
) -> Iterator[None]:
  """Context in which temporary variables take the place of Keras variables.

  It is to be used while a function is traced, by one thread at a time. Reads,
  assignments and gradient tapes treat the temporary variables like the
  variables that they replace. The temporary variables live as long as one
  execution of the function.

  Args:
    variables: The variables to replace.
    values: The first value of each temporary variable.
  """
  own = [variable._value for variable in variables]
  try:
    for variable, value in zip(variables, values, strict=True):
      variable._value = resources.LocalVariable(
        tf.cast(value, variable.dtype),
        name=variable.name,
        trainable=variable.trainable,
      )
    yield
  finally:
    for variable, value in zip(variables, own, strict=True):
      variable._value = value


def assigned(variables: Sequence[keras.Variable]) -> list[keras.Variable]:
  """Returns those of some variables that were assigned in `local_values`.

  To be called within this context.
  """
  return [v for v in variables if v._value.is_assigned]


@contextlib.contextmanager
def values_of(
  pairs: Sequence[tuple[keras.Variable, tf.Variable]],
) -> Iterator[None]:
  """Context in which Keras variables have other variables as their values.

  Args:
    pairs: (Keras variable, the variable that takes the place of its value)
      pairs. The shapes may differ.
  """
  own = [(variable, variable._value, variable._shape) for variable, _ in pairs]
  try:
    for variable, value in pairs:
      variable._value, variable._shape = value, tuple(value.shape)
    yield
  finally:
    for variable, value, shape in own:
      variable._value, variable._shape = value, shape


@contextlib.contextmanager
def optimizers_of(
  model: keras.Model,
  optimizers: Mapping[str, keras.optimizers.Optimizer],
) -> Iterator[None]:
  """Context in which a model has other optimizers in some of its attributes.

  Args:
    model: The model.
    optimizers: Maps the name of each attribute to the optimizer that the
      attribute holds within the context.
  """
  own = {name: vars(model)[name] for name in optimizers}
  model.__dict__.update(optimizers)
  try:
    yield
  finally:
    model.__dict__.update(own)


def is_seed(variable: keras.Variable) -> bool:
  """Returns whether a variable is the state of a Keras seed generator."""
  return variable.path.endswith("seed_generator_state")


def new_seed(variable: keras.Variable | tf.Variable) -> tf.Tensor:
  """Returns a random value of the shape and dtype of a generator's state.

  Args:
    variable: The state of a random generator, which is not changed.
  """
  shape: Any = variable.shape
  number = tf.random.uniform(shape, maxval=2**31 - 1, dtype=tf.int64)
  return tf.cast(number, variable.dtype)


def first_value(
  variable: keras.Variable | tf.Variable, *, is_random: bool
) -> Callable[[], tf.Tensor]:
  """Makes a function that returns the value a variable has when a step starts.

  The variable is one that replicas neither train nor share.

  Args:
    variable: The variable.
    is_random: Whether `variable` is the state of a random generator.

  Returns:
    A function without arguments, for use in a `tf.function`. If `is_random`, it
    returns a new random value at each call. If not, it always returns the value
    that the variable has now, while this function runs.
  """
  if is_random:
    return functools.partial(new_seed, variable)
  value = variable.numpy()
  return lambda: tf.constant(value)
