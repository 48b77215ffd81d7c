"""Makes replicas of modules, from loss functions that call them as usual.

A module reads and assigns its own variables. `module_replica` traces the loss
function and its gradients once, with these variables. When a replica computes,
the traced function uses temporary variables in place of the module's variables.
They begin with the values that replicas share, and last for one execution. So
methods that are decorated by `tf.function` work, too.
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import cast

import numpy as np
import tensorflow as tf

from tf_replicas.replica import model_parallel
from tf_replicas.replica import model_replica
from tf_replicas.runtime import keras_internals
from tf_replicas.runtime import module_internals
from tf_replicas.runtime import patches
from tf_replicas.session import checkpoints
from tf_replicas.store import loss_scaling
from tf_replicas.store import parameter_store
from tf_replicas.store import tables

Own = module_internals.OwnVariable
# Gradients by position; loss; new values of the statistics; metrics.
_Result = tuple[
  Mapping[str, parameter_store.Gradient],
  tf.Tensor,
  list[tf.Tensor],
  dict[str, tf.Tensor],
]


class SharedTemplate:
  """Describes the variable on the parameter servers for a module's variable.

  The object converts to a tensor with the present value of the module's
  variable, which is the initial value of the shared one. An integer variable,
  such as a counter, is shared as float64, since update rules average what
  replicas contribute. float64 is exact for integers up to 2**53.

  Attributes:
    path: The path of the variable in the module.
    name: Equal to `path`.
    shape: The variable's shape.
    dtype: The dtype of the shared variable.
    trainable: Whether gradients update the variable.
    constraint: The variable's constraint, if it has one.
  """

  def __init__(self, own: Own):
    """Describes the shared variable for a variable of a module.

    Args:
      own: The variable of the module.
    """
    self._own = own.variable
    self.path = self.name = own.path
    self.shape = own.variable.shape
    dtype = tf.as_dtype(own.variable.dtype)
    self.dtype = tf.float64 if dtype.is_integer else dtype
    self.trainable, self.constraint = own.trainable, own.constraint
    if (rows := tables.rows_of(own.variable)) is not None:
      self.table_rows = rows

  def __tf_tensor__(
    self, dtype: tf.DType | None = None, name: str | None = None
  ) -> tf.Tensor:
    value = tf.cast(self._own.read_value(), self.dtype)
    return tf.convert_to_tensor(value, dtype=dtype, name=name)


class _Tracer:
  """Traces a module's loss function and its gradients to a TensorFlow function.

  Attributes:
    metrics: The names of the metrics that the loss function returns; empty
      before it is traced.
  """

  def __init__(
    self,
    loss_fn: Callable[..., Any],
    variables_fn: Callable[[], list[Own]],
  ):
    """Stores the functions, without tracing them.

    Args:
      loss_fn: Maps a batch to the loss, or to (loss, metrics).
      variables_fn: Returns the variables of the module, including those that
        the loss function makes when it is first called.
    """
    self.metrics: tuple[str, ...] = ()
    self._loss_fn = loss_fn
    self._variables_fn = variables_fn
    self._step = tf.function(self._trace, autograph=False)
    self._traced: dict[Any, tf.types.experimental.ConcreteFunction] = {}

  @property
  def trained(self) -> list[Own]:
    """The module's variables that gradients update."""
    return [own for own in self._variables_fn() if own.trainable]

  @property
  def statistics(self) -> list[Own]:
    """The module's numbers without gradients, which replicas share.

    These are averages, counters and frozen weights. Updates move them to the
    mean over the replicas.
    """
    return [own for own in self._variables_fn() if _is_statistic(own)]

  @property
  def others(self) -> list[Own]:
    """The module's variables without gradients that replicas do not share.

    These are states of random generators, and variables whose dtype is neither
    floating nor integer, such as bool or string.
    """
    rest = [own for own in self._variables_fn() if not own.trainable]
    return [own for own in rest if not _is_statistic(own)]

  def concrete(self, batch_spec: Any) -> tf.types.experimental.ConcreteFunction:
    """Traces the computation of gradients for batches of a given shape.

    Args:
      batch_spec: The shapes and dtypes of the batch. A function is traced once
        per spec.

    Returns:
      A function of (factor, batch), which multiplies the loss by the factor
      before it computes the gradients.

    Raises:
      ValueError: If the loss is not a scalar, depends on no trainable variable,
        or on variables that the module does not have.
    """
    key = tuple(tf.nest.flatten(batch_spec))  # The structure is always one.
    if key not in self._traced:
      self._traced[key] = self._new_concrete(batch_spec)
    return self._traced[key]

  def _new_concrete(
    self, batch_spec: Any
  ) -> tf.types.experimental.ConcreteFunction:
    with tf.device(None):
      traced = self._step.get_concrete_function(tf.TensorSpec([]), batch_spec)
    known = [own.variable for own in self._variables_fn()]
    for rows in filter(None, map(tables.rows_of, list(known))):
      known += rows.parts
    if foreign := module_internals.foreign_variables(traced, known):
      raise ValueError(
        "`loss_fn` must use only variables of the module, which are those that"
        " its attributes hold: others are not trained and not sent to replicas."
        f" Received: {', '.join(foreign)}."
      )
    return traced

  def _trace(self, factor: tf.Tensor, batch: model_replica.Batch) -> _Result:
    arguments = batch if isinstance(batch, tuple) else (batch,)
    with tf.GradientTape() as tape:
      result = patches.by_autograph(self._loss_fn)(*arguments)
      loss, metrics = _split(result)
      scaled = loss * tf.cast(factor, loss.dtype)
    self.metrics = tuple(sorted(metrics))
    trained = [own.variable for own in self.trained]
    if not trained:
      raise ValueError(
        "`module` must have trainable variables, once `loss_fn` has called it."
        " Received: a module that has none."
      )
    found = tape.gradient(scaled, trained)
    if all(gradient is None for gradient in found):
      raise ValueError(
        "`loss_fn` must compute the loss from the variables of the module."
        " Received: a loss that depends on none of its"
        f" {len(trained)} trainable variables; training would change nothing."
      )
    gradients = {str(i): g for i, g in enumerate(found) if g is not None}
    new = [own.variable.read_value() for own in self.statistics]
    return gradients, loss, new, metrics


def _is_statistic(own: Own) -> bool:
  return not (own.trainable or own.is_random) and _is_number(own)


def _is_number(own: Own) -> bool:
  dtype = tf.as_dtype(own.variable.dtype)
  return dtype.is_floating or dtype.is_integer


def _split(result: Any) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
  """Splits the result of a loss function into the loss and the metrics.

  Returns:
    The loss, and a dict of metrics, which may be empty.

  Raises:
    ValueError: If the loss or a metric is not a scalar.
  """
  metrics: Mapping[str, tf.Tensor] = {}
  if isinstance(result, tuple) and len(result) == 2:
    result, metrics = result
  if not isinstance(metrics, Mapping) or isinstance(result, tuple | Mapping):
    raise ValueError(
      "`loss_fn` must return a loss, or (loss, metrics) with a dict of scalars."
      f" Received: {(result, metrics)!r:.200}."
    )
  loss = tf.convert_to_tensor(result)
  if loss.shape.rank:
    raise ValueError(
      "`loss_fn` must return a scalar, the mean loss over the batch."
      f" Received: a tensor of shape {loss.shape}. Use `tf.reduce_mean`."
    )
  model_replica.check_metrics(metrics)
  return loss, {name: tf.convert_to_tensor(x) for name, x in metrics.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModuleReplica(model_replica.Replica):
  """A replica of a module, which computes gradients by a traced function.

  The function was traced with the variables of the module. In each execution,
  temporary variables with the shared values take their place.

  Attributes:
    tracer: Traces the function.
    others: The module's variables that replicas do not share. Each comes with a
      function that returns the value it has at the start of an execution.
  """

  tracer: _Tracer
  others: Sequence[tuple[Own, Callable[[], tf.Tensor]]]

  def _part(
    self,
    pipeline: model_parallel.Pipeline | None,
    inputs: model_replica.Inputs,
  ) -> model_replica.Gradients:
    """Computes the gradients of one micro-batch, an equal part of a batch.

    Args:
      pipeline: Not used.
      inputs: The values of the shared variables, the micro-batch, and a
        function that scales the loss.
    """
    del pipeline
    parameters, batch, scale_loss = inputs
    tracer = self.tracer
    function = tracer.concrete(
      tf.nest.map_structure(tf.type_spec_from_value, batch)
    )
    shared = [*tracer.trained, *tracer.statistics]
    values = list(zip(shared, parameters, strict=False))
    values += [(own, first()) for own, first in self.others]
    gradients, loss, new, metrics = module_internals.call_with_values(
      function, [scale_loss(tf.ones([])), batch], values
    )
    old = parameters[len(self.variables) : len(shared)]
    moves = [o - tf.cast(n, o.dtype) for o, n in zip(old, new, strict=True)]
    return model_replica.Gradients(
      gradients=[
        *(gradients.get(str(i)) for i in range(len(self.variables))),
        *moves,
        *self.metric_moves(metrics),
      ],
      loss=tf.cast(loss, tf.float32),
      num_examples=model_replica.num_examples(batch),
    )


def module_replica(
  module: Any,
  loss_fn: Callable[..., Any],
  dataset_fn: Callable[..., tf.data.Dataset],
  *,
  devices: Sequence[str] = (),
  micro_batches: int = 1,
  loss_scale: loss_scaling.LossScale | None = None,
) -> ModuleReplica:
  """Makes a replica of a module from a loss function that calls the module.

  Gradients update the module's trainable variables. Its other numbers, such as
  averages and counters of batch normalization, become statistics of the
  replica: an update moves them to the mean over the replicas that contribute to
  it. Generators (`tf.random.Generator`) draw new numbers for every gradient.
  The variables of the module do not change; `load_into_module` assigns the
  trained values.

  Args:
    module: A `tf.Module`, such as a module of Sonnet; or a layer or model of
      `tf_keras` or Keras 3. Its variables are those that its attributes hold,
      also in lists, dicts and modules. If the module makes variables when it is
      first called, they are made for the batches of `dataset_fn`.
    loss_fn: Maps (module, *batch) to a scalar, the mean loss over the batch; or
      to (loss, metrics), where metrics is a dict of scalars for the log. The
      function may use no variables outside `module`. AutoGraph converts it.
    dataset_fn: Maps (num_shards, shard_index, start_example) to an endless data
      set of batches; `Replica` documents the arguments.
    devices: The devices among which each batch is divided; empty for the
      default device.
    micro_batches: The number of equal parts in which a device processes its
      batch, one after another, to save memory.
    loss_scale: Scales the loss dynamically, for computation in float16. None:
      no scale.

  Returns:
    The replica.

  Raises:
    TypeError: If `module` is no module, or `loss_fn` is not callable.
    ValueError: If the loss is not a scalar, depends on no trainable variable,
      or on variables outside `module`.
  """
  if not module_internals.is_module(module):
    raise TypeError(
      "`module` must be a `tf.Module`, or a Keras layer or model. Received:"
      f" {module!r:.200}."
    )
  _check_callable("loss_fn", loss_fn)

  def call(*batch):
    return patches.by_autograph(loss_fn)(module, *batch)

  return _replica(
    _Tracer(call, lambda: module_internals.variables_of(module)),
    loss_fn,
    dataset_fn,
    devices=devices,
    micro_batches=micro_batches,
    loss_scale=loss_scale,
  )


def model_fn_replica(
  model_fn: Callable[..., Any],
  dataset_fn: Callable[..., tf.data.Dataset],
  *,
  devices: Sequence[str] = (),
  micro_batches: int = 1,
  loss_scale: loss_scaling.LossScale | None = None,
) -> ModuleReplica:
  """Makes a replica of a model function in the style of TF1.

  Args:
    model_fn: Maps the elements of a batch, such as (features, labels), to a
      scalar, the mean loss over the batch; or to (loss, metrics), where metrics
      is a dict of scalars for the log. The function makes its variables by
      `tf.compat.v1.get_variable` or `tf.compat.v1.layers` (which needs
      `tf-keras`, and `TF_USE_LEGACY_KERAS=1` in the environment). Assignments
      that the function makes are run, whether it adds them to the collection
      `UPDATE_OPS` or not. Losses of regularizers are part of the loss if the
      function adds them, as by `tf.compat.v1.losses.get_regularization_loss`.
    dataset_fn: Maps (num_shards, shard_index, start_example) to an endless data
      set of batches; `Replica` documents the arguments.
    devices: The devices among which each batch is divided; empty for the
      default device.
    micro_batches: The number of equal parts in which a device processes its
      batch, one after another, to save memory.
    loss_scale: Scales the loss dynamically, for computation in float16. None:
      no scale.

  Returns:
    The replica. The paths of its variables are their names in TF1.

  Raises:
    TypeError: If `model_fn` is not callable.
    ValueError: If the loss is not a scalar, or depends on no variable.
  """
  _check_callable("model_fn", model_fn)

  def converted(*batch):
    return patches.by_autograph(model_fn)(*batch)

  call, variables_fn = module_internals.with_v1_variables(converted)
  return _replica(
    _Tracer(call, variables_fn),
    model_fn,
    dataset_fn,
    devices=devices,
    micro_batches=micro_batches,
    loss_scale=loss_scale,
  )


def _check_callable(name: str, value: object) -> None:
  if not callable(value):
    raise TypeError(f"`{name}` must be a function. Received: {value!r:.200}.")


def _replica(
  tracer: _Tracer,
  loss_fn: Callable[..., Any],
  dataset_fn: Callable[..., tf.data.Dataset],
  *,
  devices: Sequence[str],
  **more,
) -> ModuleReplica:
  spec = dataset_fn(1, 0, 0).element_spec
  parts = max(1, len(devices)) * more["micro_batches"]
  tracer.concrete(tf.nest.map_structure(lambda s: _part_spec(s, parts), spec))
  return ModuleReplica(
    variables=cast(Any, [SharedTemplate(own) for own in tracer.trained]),
    statistics=cast(Any, [SharedTemplate(own) for own in tracer.statistics]),
    loss_fn=loss_fn,
    dataset_fn=dataset_fn,
    devices=devices,
    metrics=tracer.metrics,
    tracer=tracer,
    others=[
      (
        own,
        keras_internals.first_value(own.variable, is_random=own.is_random),
      )
      for own in tracer.others
    ],
    **more,
  )


def _part_spec(spec: tf.TypeSpec, parts: int) -> tf.TypeSpec:
  """Returns the spec of a tensor after a batch is cut into equal parts.

  Args:
    spec: The spec (shape and dtype) of a tensor of the whole batch.
    parts: The number of parts along the first dimension.

  Returns:
    The spec of one part of the tensor. If the first dimension is unknown or
    missing, `spec` itself.
  """
  if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
    return spec
  size = spec.shape[0]
  return tf.TensorSpec([size and size // parts, *spec.shape[1:]], spec.dtype)


def load_into_module(module: Any, values: Mapping[str, np.ndarray]) -> None:
  """Assigns trained values to the variables of a module.

  Args:
    module: A module like the argument of `module_replica`, with all its
      variables.
    values: Arrays by the paths of the variables, as `run` or `Driver.values`
      returns them.

  Raises:
    CheckpointError: If a value is missing, unknown, or of another shape; no
      variable is changed then.
  """
  own = {
    own.path: own.variable
    for own in module_internals.variables_of(module)
    if not own.is_random
    and _is_number(own)
    and tables.rows_of(own.variable) is None
  }
  checkpoints.assign("the values are of another module", own, values)
