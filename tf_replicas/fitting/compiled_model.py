"""Makes a replica that runs the `train_step` of a compiled Keras model.

The model's `train_step` is not changed. It is traced as the user, or Keras,
wrote it. While it is traced, two things are replaced. In place of the variables
of the model, there are temporary variables that hold the parameters of the
step. In place of its optimizers, there are optimizers that record the gradients
and do not apply them.

Terms:

* *phase*: one call of an optimizer's `apply` in `train_step`. A `train_step`
  may have several phases, for example for a generator and a discriminator. Each
  phase becomes an update of its own.
* *states*: the non-trainable variables of the model of floating dtype, such as
  moving means.
* *contribution*: what a replica sends for one update.
* *global batch*: the examples of an update. A *part* is the share of one
  contribution.
* *tower*: a copy of the model on one device of a replica.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import cast
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tf_replicas.fitting import arguments
from tf_replicas.fitting import data as data_module
from tf_replicas.replica import keras_models
from tf_replicas.replica import model_parallel
from tf_replicas.replica import model_replica
from tf_replicas.runtime import control_flow
from tf_replicas.runtime import keras_internals
from tf_replicas.store import alternating_optimizer
from tf_replicas.store import gradient_math
from tf_replicas.store import inner_optimizer
from tf_replicas.store import loss_scaling
from tf_replicas.store import moving_averages
from tf_replicas.store import parameter_store
from tf_replicas.store import placement
from tf_replicas.store import tables

# Attributes of a model with a custom `train_step`: the metrics of `_means`, and
# the names of the values that `train_step` returns.
_MEANS, _LOGGED = "_tf_replicas_means", "_tf_replicas_logged"
# Attributes of a model: its phases; and a list with the variable that holds the
# number of the current phase, empty if there is only one phase.
_PHASES, _PHASE = "_tf_replicas_phases", "_tf_replicas_phase"


class _Call(NamedTuple):
  """A recorded call of the method `apply` of an optimizer.

  Attributes:
    name: The name of the model's attribute that holds the optimizer, such as
      "optimizer".
    pairs: The arguments of the call, as pairs (gradient, variable).
  """

  name: str
  pairs: list[tuple[parameter_store.Gradient, keras.Variable]]


class RecordingOptimizer(keras.optimizers.Optimizer):
  """An optimizer that records the gradients and changes no variable.

  It replaces an optimizer of the model while `train_step` is traced.

  Attributes:
    loss_factor: The factor that `scale_loss` uses, a float32 scalar; None: no
      factor.
  """

  def __init__(
    self,
    variables_fn: Callable[[], Sequence[keras.Variable]],
    record: Callable[
      [list[tuple[parameter_store.Gradient, keras.Variable]]], None
    ],
  ):
    """Makes the optimizer.

    Args:
      variables_fn: Returns the variables that the replaced optimizer updates.
      record: Called in each call of `apply`, with a list of the pairs
        (gradient, variable).
    """
    super().__init__(learning_rate=0.0, name="recording")
    self._variables_fn = variables_fn
    self._record = record
    self.loss_factor: tf.Tensor | None = None

  def apply(
    self,
    grads: Sequence[parameter_store.Gradient],
    trainable_variables: Sequence[keras.Variable] | None = None,
  ) -> None:
    """Records gradients and their variables instead of applying the gradients.

    Args:
      grads: The gradients.
      trainable_variables: One variable for each gradient. None: the result of
        `variables_fn`.

    Raises:
      ValueError: If the numbers of gradients and variables differ.
    """
    if trainable_variables is None:
      trainable_variables = self._variables_fn()
    grads, variables = list(grads), list(trainable_variables)
    if len(grads) != len(variables):
      raise ValueError(
        "`apply` must get one gradient for each variable. Received:"
        f" {len(grads)} gradients, {len(variables)} variables."
      )
    self._record(list(zip(grads, variables, strict=True)))

  def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
    """Returns the loss, multiplied by `loss_factor` if there is a factor.

    `train_step` calls this before it computes the gradients. They are divided
    by the factor later, outside of `train_step`.
    """
    if self.loss_factor is None:
      return loss
    return loss * tf.cast(self.loss_factor, loss.dtype)


class _Recording:
  """Replaces the optimizers of a model while its `train_step` is traced.

  It records the calls of `apply` that `train_step` makes.
  """

  def __init__(self, model: keras.Model):
    """Makes a `RecordingOptimizer` for each optimizer of the model.

    Call it outside of any `tf.function`, since it makes variables.
    """
    self._model = model
    self._calls: list[_Call] = []
    self._after: Callable[[int], None] = lambda number: None
    self._graph: tf.Graph | None = None
    self._optimizers = {
      name: RecordingOptimizer(
        functools.partial(self._variables_of, value),
        functools.partial(self._record, name),
      )
      for name, value in vars(model).items()
      if isinstance(value, keras.optimizers.Optimizer)
    }

  def _variables_of(
    self, optimizer: keras.optimizers.Optimizer
  ) -> Sequence[keras.Variable]:
    """Returns the variables that an optimizer of the model updates.

    Keras builds an optimizer for all trainable variables before `train_step`,
    unless it is built.
    """
    if optimizer.built:
      return keras_internals.variables_updated_by(optimizer)
    return self._model.trainable_variables

  def _record(self, name: str, pairs) -> None:
    if control_flow.current_graph() is not self._graph:
      raise ValueError(
        "`train_step` must apply gradients in every step, outside of `tf.cond`,"
        " `tf.while_loop` and other functions. Received: a call of `apply`"
        f" within one, by {name!r}."
      )
    self._calls.append(_Call(name, pairs))
    self._after(len(self._calls) - 1)

  @contextlib.contextmanager
  def begin(
    self,
    loss_factor: tf.Tensor | None = None,
    after: Callable[[int], None] = lambda number: None,
  ) -> Iterator[list[_Call]]:
    """Returns a context in which the model's optimizers are replaced.

    The value of the context is a list, to which each call of `apply` is added.

    Args:
      loss_factor: The factor by which `scale_loss` multiplies, a float32
        scalar; None: no factor.
      after: Called after each call of `apply`, with the index of the call, from
        0 on.
    """
    self._calls, self._after = [], after
    self._graph = control_flow.current_graph()
    for optimizer in self._optimizers.values():
      optimizer.loss_factor = loss_factor
    with keras_internals.optimizers_of(self._model, self._optimizers):
      yield self._calls


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledReplica(model_replica.Replica):
  """A replica that runs the `train_step` of a compiled model.

  If `train_step` applies gradients several times, each time is a phase and
  becomes an update of its own. Each contribution belongs to one phase: the
  replica computes only what leads to the gradients of this phase.

  Batches are (data,) or (data, weights). `data` is the argument of
  `train_step`. `weights`, float32 [batch], has the same number in all elements:
  the weight of this part in the mean over the parts of a global batch. It is 1
  if all parts are equally large, and 0 for a part without examples, whose data
  is only a filler.

  Attributes:
    steps: One function per phase, made by `trace`. Its arguments are
      (parameters, loss factor, data). It returns (gradients, loss, new values
      of the states, increments of the variables of the metrics).
    trace_steps: A function that traces `train_step` again, and returns new
      `steps`.
    num_metrics: The number of variables of metrics. They are the last elements
      of `statistics`.
    num_parts: The number of pieces into which the examples of an update are
      cut: the number of contributions times the number of towers of a replica.
  """

  steps: list[tf.types.experimental.ConcreteFunction]
  trace_steps: Callable[[], list[tf.types.experimental.ConcreteFunction]]
  num_metrics: int
  num_parts: int

  def trace_again(self) -> None:
    """Traces all phases of `train_step` again.

    It is needed after parameter servers were restarted, if the model has tables
    (matrices whose rows live there). The traces contain the names of tables.
    """
    self.steps[:] = self.trace_steps()

  def _pieces(
    self, batch: model_replica.Batch, count: int
  ) -> Sequence[model_replica.Batch]:
    """Cuts a batch into one piece for each tower.

    The sizes of the pieces may differ.

    Args:
      batch: (data,) or (data, weights), as the class documents it.
      count: The number of pieces.

    Returns:
      The pieces, each with the structure of `batch`.
    """
    return data_module.pieces(cast(tuple, batch), count)

  def _part(
    self,
    pipeline: model_parallel.Pipeline | None,
    inputs: model_replica.Inputs,
  ) -> model_replica.Gradients:
    """Computes the gradients of one piece of a batch, on one device.

    Args:
      pipeline: Not used: it is for models with layers on several devices.
      inputs: The parameters, the batch, and the function that scales the loss.

    Returns:
      The gradients, the loss and the number of examples. The gradients are
      those of the trainable variables, then two kinds of numbers that are sent
      like gradients: for each state, its old minus its new value; and for each
      variable of a metric, its increment, scaled so that an update of all
      pieces applies minus the sum of the increments.
    """
    del pipeline
    parameters, batch, scale_loss = inputs
    data, *weights = cast(tuple, batch)
    own = list(parameters[: len(parameters) - self.num_metrics])
    factor = scale_loss(tf.ones([]))
    if len(self.steps) == 1:
      result = self.steps[0](own, factor, data)
    else:  # The phase is the last of the states.
      result = tf.switch_case(
        _number_of(own[-1], len(self.steps)),
        [functools.partial(step, own, factor, data) for step in self.steps],
      )
    gradients, loss, states, increments = result
    gradients = [gradients.get(str(i)) for i in range(len(self.variables))]
    old = parameters[len(self.variables) :]
    moves = [o - n for o, n in zip(old, states, strict=False)]
    examples = model_replica.num_examples(batch)
    # An update divides by the number of parts, and a metric is a sum over them.
    factor = tf.constant(-self.num_parts, tf.float32)
    if weights:
      weight = tf.reduce_mean(weights[0])
      is_used = weight > 0
      gradients = [gradient_math.scaled(g, weight) for g in gradients]
      moves = [gradient_math.scaled(m, weight) for m in moves]
      factor *= tf.cast(is_used, tf.float32)
      examples *= tf.cast(is_used, tf.int64)
    sums = [gradient_math.scaled(i, factor) for i in increments]
    return model_replica.Gradients(
      gradients=[*gradients, *moves, *sums],
      loss=tf.cast(loss, tf.float32),
      num_examples=examples,
    )


def _number_of(phase: tf.Tensor, count: int) -> tf.Tensor:
  """Returns the index of a phase as an int32 scalar in [0, count).

  Args:
    phase: float32 scalar. The replicas share this variable like others, so it
      may have been averaged, and may be inexact: it is rounded.
    count: The number of phases.
  """
  return tf.math.floormod(tf.cast(tf.round(phase), tf.int32), count)


def replica(
  model: keras.Model,
  dataset_fn,
  *,
  num_contributions: int,
  devices: Sequence[str] = (),
  leased: model_replica.LeasedData | None = None,
) -> CompiledReplica:
  """Makes the replica that runs the `train_step` of a model.

  Args:
    model: A model that `build` has built.
    dataset_fn: Makes the data set of a replica, as `Replica.dataset_fn`
      documents it. `CompiledReplica` describes the batches.
    num_contributions: The number of contributions that one update averages.
    devices: The devices of the towers. Empty: one tower on the default device.
    leased: The same data by numbers, as for `Replica.leased`.

  Returns:
    The replica. Its `variables` are the trainable variables of the model. Its
    `statistics` are the states of the model, then the variables of its metrics.

  Raises:
    ValueError: If `train_step` does something that cannot be replicated. The
      message says what.
  """
  num_towers = max(1, len(devices))
  num_parts = num_contributions * num_towers
  data_spec = data_module.piece_spec(
    dataset_fn(1, 0, 0).element_spec, num_towers
  )
  _check_losses(model, data_spec, num_parts)
  metrics = metric_variables(model)
  for variable in metrics:  # A replica sends N times its increments.
    placement.divide_by(variable, num_contributions)

  def trace_steps() -> list[tf.types.experimental.ConcreteFunction]:
    return [trace(model, data_spec, n) for n in range(len(phases(model)))]

  return CompiledReplica(
    variables=model.trainable_variables,
    loss_fn=model.train_step,
    dataset_fn=dataset_fn,
    devices=devices,
    statistics=[*_statistics(model), *metrics],
    steps=trace_steps(),
    trace_steps=trace_steps,
    loss_scale=_loss_scale(getattr(model, phases(model)[0].name)),
    num_metrics=len(metrics),
    num_parts=num_parts,
    leased=leased,
  )


def _check_losses(model: keras.Model, data_spec: tuple, num_parts: int) -> None:
  """Checks that the mean over the parts of a batch is the loss of the batch.

  That is so for a loss that is a mean over the examples, and not for a sum.

  Args:
    model: A compiled model.
    data_spec: The shapes and dtypes of a batch: (x,), (x, y) or (x, y,
      weights).
    num_parts: The number of parts into which a batch is cut.

  Raises:
    ValueError: If there are several parts, and a loss with which the model is
      compiled is not such a mean.
  """
  if num_parts == 1:
    return
  refused: set[str | None] = {"sum", "none", None}
  if len(data_spec) == 3:  # Parts have different sums of weights.
    refused.add("mean_with_sample_weight")
  for loss in tf.nest.flatten(getattr(model, "loss", None)):
    if isinstance(loss, keras.losses.Loss) and loss.reduction in refused:
      raise ValueError(
        "`model_fn` must compile the model with losses that are means over the"
        " examples (`reduction='sum_over_batch_size'`), because a batch is cut"
        f" into {num_parts} parts. Received: {type(loss).__name__} with"
        f" reduction={loss.reduction!r}."
      )


def _loss_scale(
  optimizer: keras.optimizers.Optimizer,
) -> loss_scaling.LossScale | None:
  """Returns the loss scaling of an optimizer.

  Returns None unless the optimizer is a `LossScaleOptimizer`.
  """
  if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
    return loss_scaling.LossScale(
      optimizer.initial_scale, optimizer.dynamic_growth_steps
    )
  return None


def optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
  """Lists the optimizers that the `train_step` of a model uses.

  Args:
    model: A model that `build` has built.

  Returns:
    Each optimizer once, in the order of their first use. In place of a
    `LossScaleOptimizer`, its inner optimizer.
  """
  found = [
    getattr(model, name)
    for name in dict.fromkeys(phase.name for phase in phases(model))
  ]
  return [
    o.inner_optimizer
    if isinstance(o, keras.optimizers.LossScaleOptimizer)
    else o
    for o in found
  ]


class _KerasAverages(moving_averages.MovingAverages):
  """Moving averages that are equal to those of Keras' option `use_ema`.

  After the first update, the averages are the values of the variables.
  """

  def decay_at(self, global_step) -> tf.Tensor:
    """Returns the decay of the averages in an update; 0 in the first update.

    Args:
      global_step: The number of updates, including this one.
    """
    decay = super().decay_at(global_step)
    return tf.where(tf.equal(global_step, 1), tf.zeros_like(decay), decay)

  def decay_between(self, begin, end) -> tf.Tensor:
    """Returns the product of the decays of the updates `begin` + 1 to `end`.

    It is 0 if the first update is one of them.

    Args:
      begin: The global step before the first of these updates.
      end: The global step after the last of them.
    """
    product = super().decay_between(begin, end)
    has_first = tf.less(begin, 1) & tf.greater_equal(end, 1)
    return tf.where(has_first, tf.zeros_like(product), product)


def inner_optimizer_of(
  model: keras.Model,
) -> tuple[
  keras.optimizers.Optimizer | alternating_optimizer.AlternatingOptimizer,
  dict[str, object],
]:
  """Makes the optimizer that runs where the variables live.

  On parameter servers, each server updates only some of the variables. So
  options that need all variables at once, such as `global_clipnorm`, become
  arguments of the update rule.

  Args:
    model: A model that `build` has built.

  Returns:
    An optimizer, and a dict of keyword arguments of `OptimizerRule`. The
    optimizer is a copy of the model's optimizer, without variables. If
    `train_step` has several phases, it is an `AlternatingOptimizer` that
    contains a copy of each of the model's optimizers.

  Raises:
    ValueError: If the optimizer has an option that is not supported.
  """
  variables = model.trainable_variables
  if len(phases(model)) > 1:
    copies = {
      phase.name: keras_internals.copy_of(getattr(model, phase.name), variables)
      for phase in phases(model)
    }
    made = alternating_optimizer.AlternatingOptimizer(copies, phases(model))
    return made, {}
  (optimizer,) = optimizers(model)
  changes, common = {}, {}
  # A constant factor is needed only where the loss scale is not dynamic.
  if optimizer.loss_scale_factor:
    changes["loss_scale_factor"] = None
    common["loss_scale"] = optimizer.loss_scale_factor
  if optimizer.global_clipnorm:
    changes["global_clipnorm"] = None
    common["clip_mean_norm"] = optimizer.global_clipnorm
  if optimizer.use_ema:
    if optimizer.ema_overwrite_frequency:
      raise ValueError(
        "the optimizer of `model_fn` must have `ema_overwrite_frequency=None`:"
        " averages replace the weights at the end of `fit` only. Received:"
        f" {optimizer.ema_overwrite_frequency}."
      )
    changes["use_ema"] = False
    common["variable_averages"] = _KerasAverages(
      optimizer.ema_momentum, num_updates_aware=False
    )
    common["variables_to_average"] = [v.path for v in variables]
  if optimizer.gradient_accumulation_steps:
    raise ValueError(
      "the optimizer of `model_fn` must have"
      " `gradient_accumulation_steps=None`: an update is made of one batch. Use"
      " a larger `batch_size`, which"
      " `tf_replicas.Sync(replicas_to_aggregate=N)` cuts into N parts."
      f" Received: {optimizer.gradient_accumulation_steps}."
    )
  return keras_internals.copy_of(optimizer, variables, **changes), common


def metric_variables(model: keras.Model) -> list[keras.Variable]:
  """Lists the variables of all metrics, which are summed over the replicas.

  These are the metrics of the model, and those of `_means`.

  Args:
    model: A model that `build` has built.

  Raises:
    ValueError: If a variable is not of floating dtype.
  """
  variables = [v for metric in _metrics(model) for v in metric.variables]
  for variable in variables:
    if not tf.as_dtype(variable.dtype).is_floating:
      raise ValueError(
        "the metrics of `model_fn` must have states of floating dtype, which"
        f" are summed over the replicas. Received: {variable.path} of dtype"
        f" {variable.dtype}."
      )
  return variables


def _metrics(model: keras.Model) -> list[keras.metrics.Metric]:
  """Lists the metrics of the model, then those of `_means`."""
  all_metrics = [*model.metrics, *_means(model).values()]
  return keras_internals.single_metrics(all_metrics)


def _only_finite(
  model: keras.Model, increments: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
  """Leaves a batch out of the metrics that it would make infinite or NaN.

  Args:
    model: The model.
    increments: What the batch adds to the variables of metrics.

  Returns:
    The increments. If one of a metric is not finite, all those of this metric
    are zero.
  """
  kept, rest = [], iter(increments)
  for metric in _metrics(model):
    own = [next(rest) for _ in metric.variables]
    is_finite = [tf.reduce_all(tf.math.is_finite(value)) for value in own]
    for value in own:
      is_kept = tf.reduce_all(is_finite)
      kept.append(tf.where(is_kept, value, tf.zeros_like(value)))
  return kept


def _means(model: keras.Model) -> dict[str, keras.metrics.Mean]:
  """Returns metrics that average the scalars which a `train_step` returns.

  A custom `train_step` may return scalars that no metric of the model computes.
  `build` has made one metric for each of them. `fit` shows the mean of such a
  scalar over the examples of the epoch, where Keras would show its value in the
  last batch.

  Returns:
    The metrics by name of the scalar; empty if there are none.
  """
  return vars(model).get(_MEANS, {})


def results(model: keras.Model) -> dict[str, float | np.ndarray]:
  """Returns the results of all metrics by name, as Keras logs them.

  These are the metrics of the model, and those of `_means`. Most are floats. A
  metric such as `keras.metrics.F1Score` has an array.
  """
  logs = {k: v for k, v in model.get_metrics_result().items()}
  logs |= {name: mean.result() for name, mean in _means(model).items()}
  names = vars(model).get(_LOGGED, logs)
  flat = {name: logs[name] for name in names}
  values = tf.nest.map_structure(np.asarray, flat)
  return tf.nest.map_structure(lambda v: v if v.ndim else float(v), values)


def _statistics(model: keras.Model) -> list[keras.Variable]:
  """Lists the states of a model, which replicas share.

  Variables of metrics are not states. If `train_step` has several phases, a
  variable follows that is not part of the model: the index of the next phase.
  """
  metrics = {id(v) for v in metric_variables(model)}
  states = [
    v
    for v in model.non_trainable_variables
    if tf.as_dtype(v.dtype).is_floating and id(v) not in metrics
  ]
  return [*states, *vars(model)[_PHASE]]


def phases(model: keras.Model) -> list[alternating_optimizer.Phase]:
  """Lists the phases of a model's `train_step`, in order.

  Args:
    model: A model that `build` has built.

  Returns:
    One `Phase` per call of `apply`. Its `name` is the name of the model's
    attribute that holds the optimizer.
  """
  return vars(model)[_PHASES]


def build(model: keras.Model, data_spec: tuple) -> None:
  """Checks a model, and builds it, its metrics, loss and optimizers.

  Args:
    model: What the user's `model_fn` returned.
    data_spec: The shapes and dtypes of a batch, as nested `tf.TensorSpec`s:
      (x,), (x, y) or (x, y, weights).

  Raises:
    TypeError: If `model` is not a Keras 3 model.
    ValueError: If the model is not compiled, is compiled with an option that is
      not supported, does not fit the data, or has a `train_step` that cannot be
      replicated. The message says what.
  """
  if not isinstance(model, keras.Model):
    raise TypeError(
      "`model_fn` must return a model of Keras 3 (`keras.Model`). Received: a"
      f" {type(model).__module__}.{type(model).__name__}."
    )
  if not model.compiled:
    raise ValueError(
      "`model_fn` must return a compiled model: call `model.compile` in it."
      f" Received: {model.name!r}, which is not compiled."
    )
  if not isinstance(model.optimizer, keras.optimizers.Optimizer):
    raise ValueError(
      "`model_fn` must compile the model with an optimizer of Keras 3."
      f" Received: {model.optimizer!r}."
    )
  if model.run_eagerly:
    raise ValueError(
      "`model_fn` must compile the model with `run_eagerly=False`: replicas run"
      " graphs. Received: True."
    )
  if keras_internals.is_compiled_by_xla(model):
    raise ValueError(
      "`model_fn` must compile the model with `jit_compile='auto'` or False:"
      " replicas are not compiled by XLA. Received: True."
    )
  check_data(model, data_spec)
  _build(model, data_spec)


def check_data(model: keras.Model, data_spec: tuple, where: str = "") -> None:
  """Checks that data fits the inputs and the loss of a model.

  It finds only common mistakes; Keras finds others when the model is traced.
  With a custom `train_step`, it checks nothing.

  Args:
    model: A compiled model.
    data_spec: The shapes and dtypes of a batch, as nested `tf.TypeSpec`s: (x,),
      (x, y) or (x, y, weights).
    where: The beginning of error messages, which says which data is meant.

  Raises:
    ValueError: If the data does not fit the model.
  """
  if type(model).train_step is not keras.Model.train_step:
    return
  inputs = getattr(model, "inputs", None) or ()
  if len(inputs) == 1 and not tf.nest.is_nested(data_spec[0]):
    wanted, given = inputs[0], data_spec[0]
    is_text = [tf.as_dtype(v.dtype) == tf.string for v in (wanted, given)]
    if is_text[0] != is_text[1] or not _fits(model, given.shape):
      raise ValueError(
        f"{where}`x` must fit the input of the model, of shape"
        f" {tuple(wanted.shape)} and dtype {wanted.dtype}. Received: batches of"
        f" shape {given.shape} and dtype {given.dtype.name}."
      )
  has_loss = getattr(model, "loss", None) is not None
  is_own = type(model).compute_loss is not keras.Model.compute_loss
  if is_own or not has_loss:
    return
  if len(data_spec) < 2:
    raise ValueError(
      f"{where}`y` must be given, as `model_fn` compiles the model with a loss"
      " (`loss=None` if it needs no labels). Received: none."
    )
  for spec in tf.nest.flatten(data_spec[1]):
    if spec.dtype == tf.string:
      raise ValueError(
        f"{where}`y` must be numbers, as `model_fn` compiles the model with a"
        " loss. Received: strings."
      )


def _fits(model: keras.Model, given: tf.TensorShape) -> bool:
  """Returns whether a model with one input accepts a tensor of shape `given`.

  It follows the rules of Keras 3.15. A last axis of size 1 may be missing or
  extra. For a `Sequential` model, the rank must fit, and the sizes of the axes
  that its first layer checks.
  """
  if given.rank is None:
    return True
  sizes, wanted = list(given), list(model.inputs[0].shape)
  if len(sizes) == len(wanted) + 1 and sizes[-1] in (1, None):
    sizes.pop()
  elif len(sizes) == len(wanted) - 1 and wanted[-1] in (1, None):
    sizes.append(1)
  if len(sizes) != len(wanted):
    return False
  pairs = list(zip(sizes[1:], wanted[1:], strict=True))
  if isinstance(model, keras.Sequential):
    spec = model.layers[0].input_spec if model.layers else None
    axes = getattr(spec, "axes", None) or {}
    pairs = [(sizes[axis], size) for axis, size in axes.items()]
  return all(
    size is None or want is None or size == want for size, want in pairs
  )


def _build(model: keras.Model, data_spec: tuple) -> None:
  """Makes all variables of a model, and finds out what `train_step` does.

  For this, it traces `train_step`, which builds the layers that it calls. It
  does not run it. The phases and the metrics of `_means` are stored in the
  model.

  Args:
    model: A compiled model.
    data_spec: The shapes and dtypes of a batch, as nested `tf.TensorSpec`s:
      (x,), (x, y) or (x, y, weights).

  Raises:
    ValueError: If the model has no trainable weights, or `train_step` does not
      return a dict of scalars or applies gradients in an unsupported way.
  """
  found, made = {}, []
  recording = _Recording(model)
  known: set[str] = set()

  def probe(data):
    with recording.begin() as calls, _updated_metrics(model, known):
      logs = model.train_step(_as_keras_packs(data))
    found.update(logs if isinstance(logs, dict) else {"loss": logs})
    made[:] = calls  # A function that makes variables is traced twice.

  tf.function(probe, autograph=False).get_concrete_function(data_spec)
  if not model.trainable_variables:
    raise ValueError(
      "`model_fn` must return a model with trainable weights. Received:"
      f" {model.name!r}, which has none."
    )
  # By their paths, all tasks find the same variables. The metrics of several
  # outputs often have one name.
  metrics = [v for metric in model.metrics for v in metric.variables]
  unique = {id(v): v for v in [*model.variables, *metrics]}
  keras_internals.make_paths_distinct(list(unique.values()))
  _set_phases(model, made)
  if type(model).train_step is keras.Model.train_step:
    return
  for name, value in found.items():
    is_number = isinstance(value, int | float)
    if not is_number and (
      not hasattr(value, "shape")
      or tf.TensorShape(value.shape).rank != 0
      or tf.as_dtype(value.dtype) == tf.string
    ):
      raise ValueError(
        "`train_step` must return a dict of scalars that are numbers."
        f" Received: {name!r}: {arguments.short(value)}."
      )
  # Not an attribute: Keras would take them for metrics of the model.
  model.__dict__[_MEANS] = {
    name: keras.metrics.Mean(name=f"mean_of_{name}")
    for name in found
    if name not in known
  }
  model.__dict__[_LOGGED] = sorted(found)


@contextlib.contextmanager
def _updated_metrics(model: keras.Model, names: set[str]) -> Iterator[None]:
  """Makes a context that finds out which metrics of a model are updated in it.

  The existence of a metric does not tell that: a custom `train_step` may return
  a value "loss", and not update the model's metric of that name.

  Args:
    model: The model.
    names: A set, to which the name of each updated metric is added.
  """

  def noting(metric: keras.metrics.Metric):
    update_state = metric.update_state

    def update(*args, **kwargs):
      updated = update_state(*args, **kwargs)
      result = metric.result()
      names.update(result if isinstance(result, dict) else [metric.name])
      return updated

    return update

  metrics = model.metrics
  for metric in metrics:
    metric.__dict__["update_state"] = noting(metric)
  try:
    yield
  finally:
    for metric in metrics:
      del metric.__dict__["update_state"]


def _set_phases(model: keras.Model, calls: Sequence[_Call]) -> None:
  """Stores the phases of `train_step` in the model, and builds its optimizers.

  Args:
    model: The model.
    calls: The calls of `apply` that `train_step` makes, in order. Each of them
      is a phase.

  Raises:
    ValueError: If `train_step` applies no gradients, or applies them in a way
      that is not supported. The message says which.
  """
  if not calls:
    raise ValueError(
      "`train_step` must apply gradients, with an optimizer that is an"
      " attribute of the model, such as `self.optimizer`. Received: no call of"
      " `apply`."
    )
  for call in calls:
    _check_call(model, call)
  made = [
    alternating_optimizer.Phase(
      call.name, tuple(v.path for g, v in call.pairs if g is not None)
    )
    for call in calls
  ]
  if not all(phase.paths for phase in made):
    raise ValueError(
      "the loss of `model_fn` must depend on the trainable weights, or training"
      " would change nothing. Received: no gradient for any of"
      f" {', '.join(v.path for v in model.trainable_variables)}."
    )
  for name in dict.fromkeys(phase.name for phase in made):
    _build_optimizer(model, name, made)
  model.__dict__[_PHASES] = made
  model.__dict__[_PHASE] = []
  if len(made) > 1:
    number = keras.Variable(0.0, trainable=False, name="phase")
    model.__dict__[_PHASE] = [number]


def _check_call(model: keras.Model, call: _Call) -> None:
  """Checks the gradients and variables that `train_step` gives to `apply`.

  Raises:
    ValueError: If a variable is not a trainable variable of the model, or
      occurs twice, or if a gradient does not fit its variable.
  """
  known = {id(v) for v in model.trainable_variables}
  for gradient, variable in call.pairs:
    if id(variable) not in known:
      raise ValueError(
        "`train_step` must apply gradients to the model's trainable"
        f" variables. Received: {getattr(variable, 'path', variable)!r}."
      )
    _check_gradient(gradient, variable)
  if len({id(v) for _, v in call.pairs}) < len(call.pairs):
    raise ValueError(
      "`train_step` must give `apply` each variable once. Received:"
      f" {', '.join(v.path for _, v in call.pairs)}."
    )


def _build_optimizer(
  model: keras.Model,
  name: str,
  all_phases: Sequence[alternating_optimizer.Phase],
) -> None:
  """Builds an optimizer of the model, unless it is built.

  If `train_step` has one phase, the optimizer is built for all trainable
  variables. Otherwise, it is built for those that it updates.

  Args:
    model: The model.
    name: The name of the model's attribute that holds the optimizer.
    all_phases: The phases of `train_step`, of all optimizers.

  Raises:
    ValueError: If there are several phases, and the optimizer has an option
      that is not supported then.
  """
  optimizer = getattr(model, name)
  is_alone = len(all_phases) == 1
  if not is_alone:
    _check_can_alternate(name, optimizer)
  if not optimizer.built:
    paths = set().union(*(p.paths for p in all_phases if p.name == name))
    optimizer.build(
      [v for v in model.trainable_variables if is_alone or v.path in paths]
    )


def _check_gradient(
  gradient: parameter_store.Gradient, variable: keras.Variable
) -> None:
  """Raises ValueError if a gradient does not fit its variable.

  It must have the shape of the variable and a floating dtype, or be None.
  """
  if gradient is None:
    return
  shape = getattr(gradient, "shape", None)
  dtype = getattr(gradient, "dtype", None)
  if shape is None or dtype is None or not tf.as_dtype(dtype).is_floating:
    fits = False
  else:
    fits = tf.TensorShape(shape).is_compatible_with(variable.shape)
  if not fits:
    raise ValueError(
      f"`train_step` must apply a gradient of shape {tuple(variable.shape)} and"
      f" floating dtype to {variable.path!r}. Received:"
      f" {arguments.short(gradient)}."
    )


def _check_can_alternate(
  name: str, optimizer: keras.optimizers.Optimizer
) -> None:
  used = [
    option
    for option in ("global_clipnorm", "use_ema", "loss_scale_factor")
    if getattr(optimizer, option)
  ]
  if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
    used = ["loss scaling"]
  if used:
    raise ValueError(
      "`train_step` must use optimizers without `global_clipnorm`, `use_ema`"
      " and loss scaling if it applies gradients several times. Received:"
      f" {used[0]} of {name!r}."
    )


def _as_keras_packs(data: tuple) -> object:
  """Returns data in the form that Keras passes to `train_step`.

  The tuple (x,) becomes x, unless x is a tuple or a list. Other tuples are not
  changed.
  """
  is_alone = len(data) == 1 and not isinstance(data[0], tuple | list)
  return data[0] if is_alone else data


def trace(
  model: keras.Model, data_spec: tuple, phase: int = 0
) -> tf.types.experimental.ConcreteFunction:
  """Traces one phase of `train_step` as a function that changes no variables.

  The phase consists of what `train_step` does between the call of `apply`
  before it and its own call of `apply`. The last phase also has what follows.

  Args:
    model: A model that `build` has built. Its metrics are reset; otherwise it
      is unchanged afterwards.
    data_spec: The shapes and dtypes of a batch, as nested `tf.TensorSpec`s:
      (x,), (x, y) or (x, y, weights).
    phase: The index of the phase.

  Returns:
    A traced function of:

    * the parameters, a list of tensors: the values of the trainable variables,
      then those of the states,
    * the loss factor, by which `scale_loss` of the optimizer multiplies,
    * the data.

    It returns four values:

    * the gradients, as a dict; a key is the position of the variable in
      `model.trainable_variables`, as a string,
    * the loss, a float32 scalar; 0 unless the phase is the last one,
    * the new values of the states,
    * the increments of the variables of the metrics; zero for a metric that the
      batch would make infinite or NaN.

  Raises:
    ValueError: If `train_step` reads variables that the model does not track,
      or assigns integers.
  """
  trained, states = model.trainable_variables, _statistics(model)
  metrics = metric_variables(model)
  for metric in [*model.metrics, *_means(model).values()]:
    metric.reset_state()
  zeros = [v.numpy() for v in metrics]
  known = {id(v) for v in [*trained, *states, *metrics]}
  others = [v for v in model.non_trainable_variables if id(v) not in known]
  constants = [
    keras_internals.first_value(v, is_random=keras_internals.is_seed(v))
    for v in others
  ]
  optimizer = getattr(model, phases(model)[phase].name)
  is_scaled = _loss_scale(optimizer) is not None
  is_last = phase == len(phases(model)) - 1
  recording = _Recording(model)

  def step(parameters, loss_factor, data):
    values = [*parameters, *zeros, *(state() for state in constants)]
    variables = [*trained, *states, *metrics, *others]
    changing = [*states, *metrics]
    ends: list[tf.Tensor] = []

    def after(number: int) -> None:
      """Is called at the end of each phase: after a call of `apply`.

      At the end of an earlier phase than `phase`, it resets states and metrics
      to the values at the beginning of `train_step`, so that the changes of
      earlier phases do not count. At the end of `phase`, it reads the values of
      states and metrics, which the traced function returns. (If `phase` is the
      last one, they are read at the end of `train_step`.)

      Args:
        number: The index of the phase that ends.
      """
      if number < phase:
        first = [*parameters[len(trained) :], *zeros]
        for variable, value in zip(changing, first, strict=True):
          variable.assign(value)
      elif number == phase and not is_last:
        ends.extend(tf.convert_to_tensor(v.value) for v in changing)

    with (
      keras_internals.local_values(variables, values),
      recording.begin(loss_factor if is_scaled else None, after) as calls,
    ):
      logs = model.train_step(_as_keras_packs(data))
      loss = tf.zeros([])
      if is_last:
        loss = _loss(logs)
        _update_means(model, logs, data)
        ends.extend(tf.convert_to_tensor(v.value) for v in changing)
      keras_models.check_unchanged(keras_internals.assigned(others))
    if vars(model)[_PHASE]:  # The last of the states.
      count = len(phases(model))
      number = _number_of(parameters[-1], count)
      following = tf.math.floormod(number + 1, count)
      ends[len(states) - 1] = tf.cast(following, tf.float32)
    increments = [
      n - z for n, z in zip(ends[len(states) :], zeros, strict=True)
    ]
    return (
      _gradients(model, calls, phase),
      loss,
      ends[: len(states)],
      _only_finite(model, increments),
    )

  return _traced(step, [*trained, *states], data_spec)


def _traced(
  step: Callable[..., tuple],
  variables: Sequence[keras.Variable],
  data_spec: tuple,
) -> tf.types.experimental.ConcreteFunction:
  """Traces a Python function, and checks that it uses no variables.

  Args:
    step: A function of (parameters, loss factor, data), made by `trace`.
    variables: Variables with the shapes and dtypes of the parameters.
    data_spec: The shapes and dtypes of the data.

  Raises:
    ValueError: If `step` uses a variable, and not only its arguments.
  """
  specs = [tf.TensorSpec(v.shape, v.dtype) for v in variables]
  concrete = tf.function(step, autograph=False).get_concrete_function(
    specs, tf.TensorSpec([]), data_spec
  )
  if foreign := concrete.variables:
    raise ValueError(
      "`train_step` must read only variables that the model tracks, such as"
      " those of `add_weight`: others are not trained and not sent to replicas."
      f" Received: {', '.join(v.name for v in foreign)}."
    )
  return concrete


def _update_means(model: keras.Model, logs: object, data: tuple) -> None:
  """Adds the results of a custom `train_step` to the metrics of `_means`.

  Args:
    model: The model.
    logs: The result of `train_step`: a loss, or a dict of scalars by name.
    data: The batch. Its number of examples is the weight of each scalar in the
      mean.
  """
  size = tf.shape(tf.nest.flatten(data)[0])[0]
  for name, mean in _means(model).items():
    value = logs[name] if isinstance(logs, dict) else logs
    mean.update_state(value, sample_weight=size)


def _gradients(
  model: keras.Model, calls: Sequence[_Call], phase: int
) -> dict[str, parameter_store.Gradient]:
  """Returns the gradients of one phase of a traced `train_step`.

  All phases return gradients of the same variables. The gradients of variables
  that only other phases update are zero, and are not applied.

  Args:
    model: The model.
    calls: The recorded calls of `apply`, one per phase.
    phase: The index of the phase.

  Returns:
    The gradients as a dict. A key is the position of the variable in
    `model.trainable_variables`, as a string. With one phase, gradients that are
    None are left out.
  """
  positions = {id(v): i for i, v in enumerate(model.trainable_variables)}
  found: dict[str, parameter_store.Gradient] = {
    str(positions[id(variable)]): gradient
    for gradient, variable in calls[phase].pairs
    if gradient is not None
  }
  if len(calls) == 1:
    return found
  trained = model.trainable_variables
  used = set().union(*(p.paths for p in phases(model)))
  return {
    str(i): tf.convert_to_tensor(
      cast(tf.Tensor, found.get(str(i), tf.zeros(v.shape, v.dtype)))
    )
    for i, v in enumerate(trained)
    if v.path in used
  }


def _loss(logs: object) -> tf.Tensor:
  """Returns the loss among the results of `train_step`, a float32 scalar.

  Args:
    logs: What `train_step` returned: the loss, or a dict by name. If the dict
      has no "loss", the result is 0.
  """
  loss = logs.get("loss", 0.0) if isinstance(logs, dict) else logs
  loss = tf.cast(tf.convert_to_tensor(loss), tf.float32)
  return tf.reduce_mean(loss)


def load(
  model: keras.Model, state: Mapping[str, np.ndarray | tf.Tensor], step: int
) -> None:
  """Assigns the trained values to the variables of the user's model.

  It assigns the variables of the model, its metrics and its optimizers. Tables
  (matrices whose rows live on the parameter servers) keep their values.

  Args:
    model: A model that `build` has built. Its variables have the same paths as
      those in the parameter store.
    state: A result of `ParameterStore.state`.
    step: The number of updates that were made.
  """
  for variable in shared(model):
    if tables.rows_of(variable) is None:
      variable.assign(state[f"variables/{variable.path}"])
  names = dict.fromkeys(phase.name for phase in phases(model))
  for name in names:
    prefix = f"{name}." if len(phases(model)) > 1 else ""
    count = alternating_optimizer.applies_before(phases(model), name, step)
    _load_optimizer(getattr(model, name), state, prefix, int(count))


def _load_optimizer(
  optimizer: keras.optimizers.Optimizer,
  state: Mapping[str, np.ndarray | tf.Tensor],
  prefix: str,
  updates: int,
) -> None:
  """Assigns the trained values to the variables of one optimizer.

  Args:
    optimizer: A built optimizer of the model.
    state: A result of `ParameterStore.state`.
    prefix: The prefix of this optimizer's names in `state`; "" if the model has
      one optimizer.
    updates: The number of updates that this optimizer has made.
  """
  slots = {}
  for name, value in state.items():
    if name.startswith(f"slots/{prefix}"):
      _, _, slot, path = name.split("/", 3)
      slots[f"{path.replace('/', '_')}_{slot}"] = value
    elif name.startswith("averages/"):
      path = name.removeprefix("averages/")
      slots[f"{path.replace('/', '_')}_average"] = value
  if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
    scale = loss_scaling.state(state)
    optimizer.dynamic_scale.assign(scale.value)
    optimizer.step_counter.assign(int(scale.good_updates))
    updates -= int(scale.void)
    optimizer = optimizer.inner_optimizer
  seen: dict[str, int] = {}
  for variable in optimizer.variables:
    if variable.name in slots:
      variable.assign(slots[variable.name])
      continue
    name = prefix + inner_optimizer.scalar_name(variable.name, seen)
    if f"optimizer/{name}" in state:
      variable.assign(state[f"optimizer/{name}"])
  cast(keras.Variable, optimizer.iterations).assign(updates)


def shared(model: keras.Model) -> list[keras.Variable]:
  """Lists the variables of a model that replicas share.

  These are the trainable variables, then the states, then the variables of
  metrics.
  """
  return [
    *model.trainable_variables,
    *_statistics(model),
    *metric_variables(model),
  ]
