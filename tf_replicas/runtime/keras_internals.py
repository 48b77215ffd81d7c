"""The private names of Keras that the library needs; seen in Keras 3.15.

No other module uses a private name of Keras. Optimizers that an older Keras
lacks are left out here, so that the library can be imported with it.
"""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence

import keras
import tensorflow as tf
from keras.src.backend.common import global_state

from tf_replicas.runtime import resources

Rate = (
  keras.Variable
  | keras.optimizers.schedules.LearningRateSchedule
  | Callable[[], float | tf.Tensor]
)

# The end of the path of a `keras.random.SeedGenerator`'s state.
_SEED = "seed_generator_state"
_EXCLUDED = "_exclude_from_weight_decay_pattern"


def optimizer_classes(*names: str) -> tuple[type, ...]:
  """The classes of `keras.optimizers` with these names, as far as they exist.

  Args:
    *names: Names of classes. Keras 3.8 has no `Lamb`, `Muon`, `MultiOptimizer`.
  """
  found = [getattr(keras.optimizers, name, None) for name in names]
  return tuple(c for c in found if c is not None)


def learning_rate(optimizer: keras.optimizers.Optimizer) -> Rate:
  """The learning rate as the optimizer stores it.

  `optimizer.learning_rate` would evaluate a schedule, at `iterations`.

  Args:
    optimizer: A Keras optimizer.

  Returns:
    Its variable, its schedule, or a function without arguments.
  """
  return optimizer._learning_rate


def has_schedule(optimizer: keras.optimizers.Optimizer) -> bool:
  """Whether the learning rate follows a schedule."""
  return isinstance(
    learning_rate(optimizer),
    keras.optimizers.schedules.LearningRateSchedule,
  )


def velocities(
  optimizer: keras.optimizers.Optimizer,
) -> list[keras.Variable]:
  """The slots that hold sums of gradients times the learning rate.

  Args:
    optimizer: A built Keras optimizer.

  Returns:
    Those of SGD and RMSprop with momentum, one per variable; of others none.
  """
  if isinstance(optimizer, keras.optimizers.SGD):
    return list(optimizer.momentums)
  if isinstance(optimizer, keras.optimizers.RMSprop):
    return list(optimizer._momentums)
  return []


def variable_id(variable: tf.Variable) -> int | str:
  """The key by which an optimizer finds the slots of `variable`."""
  return variable._unique_id


def copy_weight_decay_exclusions(
  source: keras.optimizers.Optimizer, target: keras.optimizers.Optimizer
) -> None:
  """Copies the variables that `source` excludes from weight decay.

  Set by `exclude_from_weight_decay`; `get_config` does not contain them.
  """
  if hasattr(source, _EXCLUDED):
    setattr(target, _EXCLUDED, getattr(source, _EXCLUDED))


def copy_of(
  optimizer: keras.optimizers.Optimizer, **changes
) -> keras.optimizers.Optimizer:
  """An optimizer of the same configuration that is not built.

  Args:
    optimizer: The optimizer.
    **changes: Entries of its configuration that are others.
  """
  copied = type(optimizer).from_config(optimizer.get_config() | changes)
  copy_weight_decay_exclusions(optimizer, copied)
  return copied


@contextlib.contextmanager
def names_from_the_start() -> Iterator[None]:
  """Context in which layers without a name get the same ones every time.

  Keras numbers them per process (`dense_7`), so a model would have other names
  than in a checkpoint, or in another task, if a process built others before.
  """
  key = "object_name_uids"
  own = global_state.get_global_attribute(key)
  global_state.set_global_attribute(key, None)
  try:
    yield
  finally:
    global_state.set_global_attribute(key, own)


@contextlib.contextmanager
def local_values(
  variables: Sequence[keras.Variable], values: Sequence[tf.Tensor]
) -> Iterator[None]:
  """Context in which variables are local ones that hold `values`.

  To be used while a function is traced, by one thread at a time. Reads,
  assignments and gradient tapes treat them like the variables that they
  replace; they live as long as one execution.
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


@contextlib.contextmanager
def optimizers_of(
  model: keras.Model,
  optimizers: Mapping[str, keras.optimizers.Optimizer],
) -> Iterator[None]:
  """Context in which attributes of `model` are other optimizers."""
  own = {name: vars(model)[name] for name in optimizers}
  model.__dict__.update(optimizers)
  try:
    yield
  finally:
    model.__dict__.update(own)


def constant_state(variable: keras.Variable) -> Callable[[], tf.Tensor]:
  """What gives an untrained variable its value at the start of every step.

  Args:
    variable: Any state.

  Returns:
    A function without arguments, for use in a `tf.function`: a new number for
    the state of a seed, the present value for others.
  """
  if not variable.path.endswith(_SEED):
    value = variable.numpy()
    return lambda: tf.constant(value)

  def new_seed() -> tf.Tensor:
    number = tf.random.uniform(variable.shape, maxval=2**31 - 1, dtype=tf.int64)
    return tf.cast(number, variable.dtype)

  return new_seed
