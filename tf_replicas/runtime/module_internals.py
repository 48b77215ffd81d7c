"""Finds the variables of modules (`tf.Module`), and calls traced functions.

The module uses private names of TensorFlow 2.21. A Keras layer counts as a
module too.
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import keras
import tensorflow as tf
from tensorflow.python.eager import wrap_function
from tensorflow.python.ops import handle_data_util

from tf_replicas.runtime import keras_internals
from tf_replicas.runtime import resources


class OwnVariable(NamedTuple):
  """Describes a variable of a module (a `tf.Module` or a Keras layer).

  Attributes:
    path: A name that is the same in every task: the path of the attribute that
      holds the variable, such as `layers/0/w`. For a variable of a Keras layer,
      the path ends with the variable's own name or path.
    variable: The variable.
    trainable: Whether gradients update the variable.
    is_random: Whether the variable is the state of a random generator.
    constraint: Maps the variable to the value that the optimizer assigns after
      an update. None: no constraint.
  """

  path: str
  variable: tf.Variable
  trainable: bool
  is_random: bool = False
  constraint: Callable[[tf.Variable], tf.Tensor] | None = None


def is_module(value: object) -> bool:
  """Returns whether `variables_of` can find the variables of `value`.

  That is so for a `tf.Module`, and for a layer or model of Keras 3 or
  `tf_keras`.
  """
  return isinstance(value, tf.Module) or _is_layer(value)


def variables_of(module: Any) -> list[OwnVariable]:
  """Returns all variables of a module and of the objects in its attributes.

  Args:
    module: A `tf.Module`, such as one of Sonnet, or a layer or model of Keras 3
      or `tf_keras`.

  Returns:
    The variables, each of them once, in an order that the attributes determine.
  """
  if _is_layer(module):
    return _of_layer(module)
  found: dict[int, OwnVariable] = {}
  for steps, value in module._flatten(
    predicate=_is_leaf, with_path=True, expand_composites=True
  ):
    path = "/".join(map(str, steps))
    if _is_layer(value):
      own = [v._replace(path=f"{path}/{v.path}") for v in _of_layer(value)]
    elif isinstance(value, tf.random.Generator):
      own = [OwnVariable(path, value.state, False, is_random=True)]
    elif isinstance(value, keras.Variable):
      own = [_of_keras(value, trainable=value.trainable)._replace(path=path)]
    else:
      own = [_of_tensorflow(value, path, trainable=value.trainable)]
    for variable in own:
      found.setdefault(id(variable.variable), variable)
  return list(found.values())


def _is_leaf(value: object) -> bool:
  return _is_layer(value) or isinstance(
    value, tf.Variable | tf.random.Generator | keras.Variable
  )


def _is_layer(value: object) -> bool:
  """Returns whether `value` is a layer or model of Keras 3 or `tf_keras`."""
  names = ("trainable_weights", "non_trainable_weights")
  return all(hasattr(type(value), name) for name in names)


def _of_layer(layer: Any) -> list[OwnVariable]:
  variables = [(v, True) for v in layer.trainable_variables]
  variables += [(v, False) for v in layer.non_trainable_variables]
  return [
    _of_keras(v, trainable=trainable)
    if isinstance(v, keras.Variable)
    else _of_tensorflow(v, v.name.removesuffix(":0"), trainable=trainable)
    for v, trainable in variables
  ]


def _of_keras(variable: keras.Variable, *, trainable: bool) -> OwnVariable:
  is_random = keras_internals.is_seed(variable)
  constraint = variable.constraint
  return OwnVariable(
    variable.path, variable.value, trainable, is_random, constraint
  )


def _of_tensorflow(
  variable: tf.Variable, path: str, *, trainable: bool
) -> OwnVariable:
  constraint = getattr(variable, "constraint", None)
  return OwnVariable(path, variable, trainable, constraint=constraint)


def foreign_variables(
  function: Any,
  known: Sequence[tf.Variable],
) -> list[str]:
  """Returns the names of the variables that a function uses besides `known`.

  Args:
    function: A traced function, a `ConcreteFunction`.
    known: The variables to leave out of the result.
  """
  ids = {id(v.handle) for v in known}
  names = {id(v.handle): v.name for v in function.variables}
  return [
    names.get(id(capture), "a variable without a name")
    for capture in function.captured_inputs
    if capture.dtype == tf.resource
    and id(capture) not in ids
    and _is_of_variable(capture)
  ]


def _is_of_variable(handle: tf.Tensor) -> bool:
  """Returns whether a resource handle refers to a variable.

  Other handles refer to a lookup table, for example.
  """
  data = handle_data_util.get_handle_data(handle)
  return data is not None and data.is_set


def call_with_values(
  function: Any,
  arguments: Sequence[Any],
  values: Sequence[tuple[OwnVariable, tf.Tensor]],
) -> Any:
  """Calls a function with temporary variables in place of those that it uses.

  It is to be used inside a `tf.function`. The temporary variables last for one
  execution of that function. The variables that they replace are neither read
  nor assigned.

  Args:
    function: A traced function, a `ConcreteFunction`.
    arguments: The arguments: tensors, in the structure that `function` was
      traced with.
    values: The variables to replace, each with the first value of the temporary
      variable.

  Returns:
    What `function` returns.
  """
  used = {id(capture) for capture in function.captured_inputs}
  handles = {
    id(own.variable.handle): resources.LocalVariable(
      tf.cast(value, own.variable.dtype), name=own.path, trainable=False
    ).handle
    for own, value in values
    if id(own.variable.handle) in used
  }
  captures = [handles.get(id(c), c) for c in function.captured_inputs]
  bound = function.function_type.bind(*arguments)
  flat = function.function_type.unpack_inputs(bound)
  return function._call_flat(list(flat), captures)


def with_v1_variables(
  model_fn: Callable[..., Any],
) -> tuple[Callable[..., Any], Callable[[], list[OwnVariable]]]:
  """Makes a model function in the style of TF1 reuse its variables.

  Args:
    model_fn: A function that makes its variables by
      `tf.compat.v1.get_variable`.

  Returns:
    Two functions. The first one calls `model_fn`, inside a `tf.function`: its
    first call makes the variables, and later calls use the variables of the
    first. The second one returns the variables made so far.
  """
  # What `tf.compat.v1.wrap_function` uses. That itself runs no assignments in
  # order, and prunes those that no result depends on.
  holder = wrap_function.VariableHolder(share_variables=True)
  kept = holder.call_with_variable_creator_scope(model_fn)

  def call(*arguments):
    # A function that is traced shares the collections of the whole process,
    # so `get_variable` would find what it made in another trace.
    graph = tf.compat.v1.get_default_graph()
    collections = graph._collections
    graph._collections = {}
    try:
      return kept(*arguments)
    finally:
      graph._collections = collections

  def variables() -> list[OwnVariable]:
    return [
      OwnVariable(v.name.removesuffix(":0"), v, v.trainable)
      for v in holder.variables.values()
    ]

  return tf.autograph.experimental.do_not_convert(call), variables
