"""Makes a replica of a Keras 3 model, with its states and regularizers."""

import inspect
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence

import keras
import tensorflow as tf

from tf_replicas.replica import model_parallel
from tf_replicas.replica import model_replica
from tf_replicas.runtime import keras_internals
from tf_replicas.store import loss_scaling


def keras_replica(
  model: keras.Model,
  loss: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
  dataset_fn: Callable[..., tf.data.Dataset],
  *,
  devices: Sequence[str] = (),
  layers: model_parallel.LayerPlacement | None = None,
  micro_batches: int = 1,
  is_synchronized: bool = False,
  loss_scale: loss_scaling.LossScale | None = None,
  metrics: Mapping[str, Callable[..., tf.Tensor]] | None = None,
) -> model_replica.Replica:
  """Makes a replica of a Keras model; `compile` and `fit` are not used.

  The loss is `loss(labels, outputs)` plus the losses of the model's
  regularizers. Variables of a floating dtype that have no gradients, such as
  the moving mean and variance of batch normalization, become statistics of the
  replica: an update moves them to the mean over the replicas that contribute to
  it. Weights of frozen layers are shared as statistics too, and stay constant.
  Random layers draw new numbers for every gradient. The model is called with
  `training=True` if its `call` has such an argument, as `fit` does.

  Args:
    model: A built Keras 3 model. Its own weights do not change; `Driver.values`
      returns the trained values.
    loss: Maps (labels, outputs) to a scalar, the mean over the batch; for
      example a `keras.losses.Loss`.
    dataset_fn: Maps (num_shards, shard_index, start_example) to an endless data
      set of batches (inputs, labels); `Replica` documents the arguments.
    devices: The devices among which each batch is divided, or which the layers
      are spread over; empty for the default device.
    layers: Maps the layers to several devices; the result of `place_layers`.
      None: all layers run on one device.
    micro_batches: The number of equal parts in which a device processes its
      batch.
    is_synchronized: Whether the devices run in lockstep, which
      `keras.layers.BatchNormalization(synchronized=True)` needs.
    loss_scale: Scales the loss dynamically, for computation in float16, such as
      that of a model with the dtype policy `mixed_float16`. None: no scale.
    metrics: Functions of (labels, outputs) by name, for the log: each returns a
      scalar, a mean over the batch.

  Returns:
    The replica.

  Raises:
    TypeError: If `model` is not a Keras 3 model, or `loss` is not callable.
    ValueError: If the model is not built; or, when the replica computes, if the
      model assigns an integer variable.
  """
  _check(model, loss)
  metrics = metrics or {}
  variables = model.trainable_variables
  states = model.non_trainable_variables
  statistics = [v for v in states if _is_statistic(v)]
  arguments = {}
  if "training" in inspect.signature(model.call).parameters:
    arguments["training"] = True

  def loss_fn(
    parameters: Sequence[tf.Tensor],
    inputs: model_replica.Batch,
    labels: model_replica.Batch,
  ) -> model_replica.Loss:
    trained = parameters[: len(variables)]
    moved = iter(parameters[len(variables) :])
    given = [
      tf.convert_to_tensor(next(moved) if _is_statistic(v) else _initial(v))
      for v in states
    ]
    outputs, updated, penalties = model.stateless_call(
      trained, given, inputs, return_losses=True, **arguments
    )
    check_unchanged(
      [
        v
        for v, first, now in zip(states, given, updated, strict=True)
        if now is not first and not _is_statistic(v)
      ]
    )
    total = loss(labels, outputs)
    if total.shape.rank == 0:  # Else `Replica` raises an error.
      total = tf.add_n([total, *penalties])
    found = {name: f(labels, outputs) for name, f in metrics.items()}
    if not statistics:
      return (total, found) if metrics else total
    pairs = zip(updated, states, strict=True)
    new = [value for value, v in pairs if _is_statistic(v)]
    return (total, new, found) if metrics else (total, new)

  return model_replica.Replica(
    variables,
    loss_fn,
    dataset_fn,
    devices=devices,
    layers=layers,
    micro_batches=micro_batches,
    statistics=statistics,
    is_synchronized=is_synchronized,
    loss_scale=loss_scale,
    metrics=tuple(metrics),
  )


def _check(
  model: keras.Model, loss: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
) -> None:
  if not isinstance(model, keras.Model):
    raise TypeError(
      "`model` must be a model of Keras 3 (`keras.Model`); for others, such as"
      " those of `tf_keras` and modules, use `tf_replicas.module_replica`."
      f" Received: a {type(model).__module__}.{type(model).__name__}."
    )
  if not callable(loss):
    raise TypeError(
      "`loss` must be a function or a `keras.losses.Loss`, such as"
      f" `keras.losses.MeanSquaredError()`. Received: {loss!r}."
    )
  if not model.built:
    raise ValueError(
      "`model` must be built; give it a `keras.Input`, or call it once."
      f" Received: {model}."
    )


def check_unchanged(assigned: Iterable[keras.Variable]) -> None:
  """Checks that a model assigns no variable that replicas do not share.

  Args:
    assigned: The variables that the model assigns, and replicas do not share.

  Raises:
    ValueError: If there is one other than the states of random generators.
  """
  for variable in assigned:
    if not keras_internals.is_seed(variable):
      raise ValueError(
        "a model must assign only variables of floating dtype, which replicas"
        " share; a counter may be of float32. Received:"
        f" {variable.path} of dtype {variable.dtype}."
      )


def _is_statistic(state: keras.Variable) -> bool:
  return tf.as_dtype(state.dtype).is_floating


def _initial(state: keras.Variable) -> tf.Tensor:
  """Returns the value that an unshared variable has at each call of the model.

  Args:
    state: A variable of the model that replicas do not share.

  Returns:
    For the state of a seed generator, a new random value; otherwise the
    variable's present value.
  """
  is_seed = keras_internals.is_seed(state)
  return keras_internals.new_seed(state) if is_seed else state.value
