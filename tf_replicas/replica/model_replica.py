"""Defines a model replica, which computes gradients on one or more devices.

A replica is a list of variables, a loss as a function of parameters and a
batch, and a data set. Model code never mentions a device: the driver decides
where a replica runs, and the update rule decides what becomes of its gradients.

A tower is one copy of the model's computation. A replica may have several
towers, one per device (in-graph replication), or may spread the layers of a
tower over several devices (`model_parallel`), or both: N x D devices are N
towers of D devices each.
"""

import dataclasses
import functools
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import tensorflow as tf
from absl import logging

from tf_replicas.replica import model_parallel
from tf_replicas.runtime import patches
from tf_replicas.runtime import signatures
from tf_replicas.store import loss_scaling
from tf_replicas.store import metric_sums
from tf_replicas.store import parameter_store
from tf_replicas.store import placement
from tf_replicas.store import tables

Batch = model_parallel.Batch
ScaleLoss = Callable[[tf.Tensor], tf.Tensor]
Metrics = Mapping[str, tf.Tensor]
Loss = (
  tf.Tensor
  | tuple[tf.Tensor, Sequence[tf.Tensor] | Metrics]
  | tuple[tf.Tensor, Sequence[tf.Tensor], Metrics]
)


class Gradients(NamedTuple):
  """The gradients of one batch, with its loss and its number of examples.

  Attributes:
    gradients: One per trainable variable: a dense tensor, `tf.IndexedSlices` or
      None. Then one tensor per other variable in `Replica.shared` (variables
      without gradients, such as moving means): its old value minus its new
      value.
    loss: float32 scalar, the mean loss over the examples.
    num_examples: int64 scalar, the number of examples.
  """

  gradients: list[parameter_store.Gradient]
  loss: tf.Tensor
  num_examples: tf.Tensor


class Inputs(NamedTuple):
  """The inputs from which gradients are computed for a batch, or a part of it.

  Attributes:
    parameters: One tensor per variable in `Replica.shared`, the variables that
      replicas share.
    batch: The examples.
    scale_loss: A function that is applied to the loss before differentiation.
  """

  parameters: Sequence[tf.Tensor]
  batch: Batch
  scale_loss: ScaleLoss


class LeasedData(NamedTuple):
  """Training data in numbered batches.

  A replica *leases* a number, which no other replica gets, and computes the
  batch of this number. So replicas may join and leave, and yet every batch is
  used.

  Attributes:
    dataset_fn: Maps an endless data set of batch numbers (int64 scalars) to the
      data set of the batches with these numbers. Its elements have the same
      structure as those of `Replica.dataset_fn`.
    num_before: Maps (global step, number of examples in all updates so far) to
      the number of batches used so far. A training that resumes from a
      checkpoint continues with the batch of this number.
  """

  dataset_fn: Callable[[tf.data.Dataset], tf.data.Dataset]
  num_before: Callable[[int, int], int]


@dataclasses.dataclass(frozen=True)
class Replica:
  """The computation of one replica: variables, loss and data.

  A tower is one copy of the model's computation, on its device or devices. A
  replica has one tower or several, among which it divides each batch.

  Attributes:
    variables: The trainable variables of the model, with their initial values;
      Keras or TensorFlow variables. Training does not change them: it updates
      copies on the parameter servers.
    loss_fn: Maps (parameters, *batch) to a scalar, the mean loss over the
      batch. Parameters are tensors in the order of `shared`; the loss must be
      computed from them and not from the model's own variables. With
      `statistics` it returns (loss, new values of the statistics); with
      `metrics`, a dict of metrics follows: (loss, {"accuracy": accuracy}).
      AutoGraph converts it unless it is marked by
      `tf.autograph.experimental.do_not_convert`.
    dataset_fn: Maps (num_shards, shard_index, start_example) to an endless data
      set of batches: tensors with the examples along axis 0, in any `tf.nest`
      structure. `loss_fn` takes the elements of a tuple as separate arguments,
      and any other structure, such as a dict, as one argument. `num_shards` is
      the number of replicas, and `shard_index`, from 0 on, tells which of them
      this data set is for. `start_example` is the approximate number of
      examples that all replicas have drawn so far. `shard_index` and
      `start_example` are ints, or int64 scalars where the driver calls the
      function on a remote worker. Several towers share a batch.
    devices: The devices of the towers; empty for the default device. With
      `layers` on D devices, the first D are those of the first tower, and so
      on.
    layers: Maps the layers of the model to the devices of a tower. Gradients
      are then computed inside a `tf.function`.
    micro_batches: The number of equal parts in which a tower processes its
      batch. With one device per tower they are processed one after another, so
      that memory for activations is that of one part. Layers that compute over
      the batch, such as batch normalization, see one part at a time.
    statistics: Variables without gradients that a batch updates, such as moving
      means and variances. A replica contributes the mean over its towers.
    is_synchronized: Whether the towers run in lockstep, so that
      `tf.distribute.ReplicaContext.all_reduce` reduces over all of them.
      `keras.layers.BatchNormalization(synchronized=True)` needs this to
      normalize by the moments of the whole batch. Lockstep needs towers of one
      device each, in the process that traces. Each all-reduce makes tracing
      slower.
    loss_scale: Scales the loss dynamically, for computation in float16. None:
      no scale.
    metrics: Names of the scalars that `loss_fn` returns besides the loss, each
      a mean over the batch, for the log.
    on_data_end: What happens when the data set of a replica ends. "error": its
      task ends with an error. "stop": the training ends well, after the updates
      made so far. "go_on": the replica leaves; the training goes on
      with the others, until fewer are left than an update needs. The last two
      are for between-graph training and for one process.
    leased: The same data in numbered batches, which replicas take one after
      another in a training that other workers may join (`--max_workers`). None:
      each replica has a fixed part of the data, by `dataset_fn`.
  """

  variables: Sequence[tf.Variable]
  loss_fn: Callable[..., Loss]
  dataset_fn: Callable[[int, int | tf.Tensor, int | tf.Tensor], tf.data.Dataset]
  devices: Sequence[str] = ()
  layers: model_parallel.LayerPlacement | None = None
  micro_batches: int = 1
  statistics: Sequence[tf.Variable] = ()
  is_synchronized: bool = False
  loss_scale: loss_scaling.LossScale | None = None
  metrics: Sequence[str] = ()
  leased: LeasedData | None = None
  on_data_end: str = "error"

  def __post_init__(self) -> None:
    """Checks the attributes of the replica.

    Raises:
      TypeError: If an attribute is of a wrong type, or `dataset_fn` does not
        take three arguments.
      ValueError: If `micro_batches` is less than 1, there is no variable, a
        variable is frozen, a statistic is trainable, or `layers` do not fit
        `devices` or `is_synchronized`.
    """
    self._check_types()
    if self.on_data_end not in ("error", "stop", "go_on"):
      raise ValueError(
        "`on_data_end` must be 'error', 'stop' or 'go_on'. Received:"
        f" {self.on_data_end!r}."
      )
    if self.micro_batches < 1:
      raise ValueError(
        f"`micro_batches` must be at least 1. Received: {self.micro_batches}."
      )
    for name, is_trainable in (("variables", True), ("statistics", False)):
      wrong = [v for v in getattr(self, name) if v.trainable != is_trainable]
      if wrong:
        raise ValueError(
          f"`{name}` must {'' if is_trainable else 'not '}be trainable."
          f" Received: {', '.join(v.name for v in wrong)}."
        )
    has_stages = any(len(tower) > 1 for tower in self.towers())
    found = [v for v in self.variables if tables.rows_of(v) is not None]
    if self.layers is not None and found:
      raise ValueError(
        "`layers` must not be placed on several devices where a model has"
        " tables (`tf_replicas.Embedding`). Received: the table"
        f" {placement.path_of(found[0])!r}."
      )
    if self.is_synchronized and has_stages:
      raise ValueError(
        "`is_synchronized` needs towers of one device each. Received: `layers`"
        f" on {self.layers.num_devices} devices."
      )

  def trace_again(self) -> None:
    """Traces the functions again that were traced when the replica was made.

    It is called when a parameter server was restarted, so that tables have new
    variables: functions that were traced before use the old ones. A `Replica`
    has no such functions, so nothing is done; subclasses override this method.
    """

  def _check_types(self) -> None:
    for name in ("variables", "statistics"):
      values = getattr(self, name)
      if not isinstance(values, Sequence) or not all(
        hasattr(v, "trainable") for v in values
      ):
        raise TypeError(
          f"`{name}` must be a list of variables. Received: {values!r:.60}."
        )
    if not self.variables:
      raise ValueError(
        "`variables` must have the trainable variables of the model. Received:"
        " none."
      )
    if isinstance(self.devices, str) or not all(
      isinstance(device, str) for device in self.devices
    ):
      raise TypeError(
        '`devices` must be a list of names, such as ["/device:GPU:0"].'
        f" Received: {self.devices!r}."
      )
    if not isinstance(self.micro_batches, int):
      raise TypeError(
        f"`micro_batches` must be an integer. Received: {self.micro_batches!r}."
      )
    for name in ("loss_fn", "dataset_fn"):
      function = getattr(self, name)
      if not callable(function):
        raise TypeError(f"`{name}` must be a function. Received: {function!r}.")
    signatures.check_call(
      self.dataset_fn,
      *(1, 0, 0),
      rule="`dataset_fn` must take (num_shards, shard_index, start_example)",
    )

  @property
  def shared(self) -> list[tf.Variable]:
    """All variables that replicas share through the parameter servers.

    They are `variables`, then `statistics`, then the sums of `metrics`, then
    the state of `loss_scale`.
    """
    own = self.loss_scale.variables if self.loss_scale else ()
    return [*self.variables, *self.statistics, *self._metric_sums, *own]

  @functools.cached_property
  def _metric_sums(self) -> list[tf.Variable]:
    return [metric_sums.variable(self.metrics)] if self.metrics else []

  def towers(self) -> list[tuple[str, ...]]:
    """Returns the devices of each tower, one copy of the model's computation.

    The list is empty if the replica has no devices.
    """
    if self.layers is None:
      return [(device,) for device in self.devices]
    return self.layers.towers(self.devices)

  @tf.autograph.experimental.do_not_convert
  def gradients(
    self,
    parameters: Sequence[tf.Tensor],
    batch: Batch,
    scale_loss: ScaleLoss = tf.identity,
  ) -> Gradients:
    """Computes the gradients of one batch.

    With N towers (copies of the model on different devices), the gradients are
    the mean over N equal parts of the batch. The first call warns of variables
    that have no gradient.

    Args:
      parameters: One tensor per variable in `shared`, the variables that
        replicas share.
      batch: Tensors whose first dimension is divisible by the number of towers
        times `micro_batches`.
      scale_loss: A function that is applied to the loss before differentiation.

    Returns:
      The gradients of the scaled loss, and the loss without the scale.

    Raises:
      TypeError: If `loss_fn` does not take such a batch.
      ValueError: If the loss is not a scalar, no variable has a gradient, or
        the batch cannot be split.
    """
    inputs = Inputs(parameters, batch, scale_loss)
    if self.loss_scale is None:
      result = self._gradients(inputs)
    else:
      result = self._scaled_gradients(inputs, self.loss_scale)
    self._check_gradients(result.gradients[: len(self.variables)])
    return result

  def _scaled_gradients(
    self, inputs: Inputs, loss_scale: loss_scaling.LossScale
  ) -> Gradients:
    """Computes gradients with dynamic loss scaling, for float16.

    Args:
      inputs: The parameters, the batch and the function that scales the loss.
        The last parameters are the values of `loss_scale.variables`.
      loss_scale: Divides the gradients by the scale, and handles overflow.

    Returns:
      The gradients without the scale, and the loss.
    """
    count = len(inputs.parameters) - len(loss_scale.variables)
    parameters, state = inputs.parameters[:count], inputs.parameters[count:]

    def scaled(loss: tf.Tensor) -> tf.Tensor:
      return inputs.scale_loss(loss) * tf.cast(state[0], loss.dtype)

    result = self._gradients(Inputs(parameters, inputs.batch, scaled))
    gradients, loss = loss_scale.finish(
      result.gradients, len(self.variables), result.loss, state
    )
    return result._replace(gradients=gradients, loss=loss)

  def _gradients(self, inputs: Inputs) -> Gradients:
    towers, parts = self.towers(), [inputs.batch]
    if not towers:
      return self._tower([""], inputs)
    if len(towers) > 1:
      parts = self._pieces(inputs.batch, len(towers))
    inputs_of_towers = [inputs._replace(batch=part) for part in parts]
    if self.is_synchronized and len(towers) > 1:
      return self._in_lockstep(inputs_of_towers)
    results = []
    for devices, own in zip(towers, inputs_of_towers, strict=True):
      with tf.device(devices[0]):
        results.append(self._tower(devices, own))
    return average_towers(results)

  def _pieces(self, batch: Batch, count: int) -> Sequence[Batch]:
    """Splits a batch into `count` equal pieces, one per tower.

    A tower is a copy of the model on its device or devices.
    """
    return model_parallel.parts(batch, count, "devices")

  def _check_gradients(
    self, gradients: Sequence[parameter_store.Gradient]
  ) -> None:
    paths = [
      placement.path_of(variable)
      for variable, gradient in zip(self.variables, gradients, strict=True)
      if gradient is None
    ]
    if paths and len(paths) == len(self.variables):
      raise ValueError(
        "`loss_fn` must compute the loss from its `parameters`. Received: a"
        " loss that depends on no parameter, perhaps because a model was called"
        " with its own variables. Training would change nothing. Use"
        " `tf_replicas.module_replica`, whose loss function calls a model or"
        " module in the ordinary way, or `tf_replicas.keras_replica`."
      )
    if paths:
      _warn_once(
        f"the loss does not depend on {', '.join(paths)}: no gradient, so"
        " training leaves them unchanged"
      )

  def _in_lockstep(self, inputs: Sequence[Inputs]) -> Gradients:
    """Computes the mean gradients of all towers, which run in lockstep.

    A tower is one copy of the model on its device. A
    `tf.distribute.MirroredStrategy` traces each tower in a separate thread. So
    an op that combines values of all towers, such as all-reduce, works.

    Args:
      inputs: One element per tower.
    """
    strategy = tf.distribute.MirroredStrategy(
      list(self.devices), tf.distribute.ReductionToOneDevice()
    )
    results: dict[int, Gradients] = {}

    def tower() -> None:
      context = tf.distribute.get_replica_context()
      number = int(tf.get_static_value(context.replica_id_in_sync_group))
      results[number] = self._tower([self.devices[number]], inputs[number])

    strategy.run(tower)
    return average_towers([results[i] for i in range(len(inputs))])

  def _tower(self, devices: Sequence[str], inputs: Inputs) -> Gradients:
    """Computes the gradients of one tower, a copy of the model.

    They are the mean over the micro-batches, equal parts of the tower's batch.

    Args:
      devices: The devices of the tower; several if its layers are spread.
      inputs: The parameters, the tower's batch, and the function that scales
        the loss.
    """
    parameters = inputs.parameters
    pipeline, homes = None, [""] * len(parameters)
    if len(devices) > 1:
      pipeline = model_parallel.Pipeline(self.layers, devices)
      shared = self.shared[: len(parameters)]
      homes = [pipeline.device_of(placement.path_of(v)) for v in shared]
    copies = []
    for parameter, home in zip(parameters, homes, strict=True):
      with tf.device(home):
        copies.append(tf.identity(parameter))
    parts = model_parallel.parts(
      inputs.batch, self.micro_batches, "micro_batches"
    )
    limit = model_parallel.parts_under_way(len(devices))
    done: list[Gradients] = []
    for part in parts:
      if len(done) >= limit:
        part = model_parallel.after(done[-limit].gradients, part)
      part = Inputs(copies, part, inputs.scale_loss)
      done.append(self._part(pipeline, part))
    return done[0] if len(done) == 1 else average_towers(done)

  def _part(
    self, pipeline: model_parallel.Pipeline | None, inputs: Inputs
  ) -> Gradients:
    """Computes the gradients of one micro-batch, an equal part of a batch.

    Args:
      pipeline: Places the layers of the model on several devices; None if the
        model is on one device.
      inputs: The parameters, the micro-batch, and the function that scales the
        loss.
    """
    parameters, batch, scale_loss = inputs
    trained = parameters[: len(self.variables)]
    pairs = zip(self.variables, trained, strict=True)
    if pipeline is None:
      with (
        tf.GradientTape(watch_accessed_variables=False) as tape,
        tables.placeholders(pairs),
      ):
        tape.watch(trained)
        loss, moves = self._loss(parameters, batch)
        scaled = scale_loss(loss)
      gradients = tape.gradient(scaled, trained)
    else:
      with pipeline.part():
        loss, moves = self._loss(parameters, batch)
        scaled = scale_loss(loss)
      gradients = tf.gradients(scaled, trained)
    return Gradients(
      gradients=[*gradients, *moves],
      loss=tf.cast(loss, tf.float32),
      num_examples=num_examples(batch),
    )

  def _loss(
    self, parameters: Sequence[tf.Tensor], batch: Batch
  ) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Computes the loss of a batch, and how the batch changes the statistics.

    Returns:
      A pair: the loss, a scalar; and a list with the old minus the new value of
      each variable in `statistics`, and then of the variable that sums metrics,
      if there is one.
    """
    arguments = batch if isinstance(batch, tuple) else (batch,)
    self._check_arguments(arguments)
    loss_fn = patches.by_autograph(self.loss_fn)
    result: Any = loss_fn(parameters, *arguments)
    new: Sequence[tf.Tensor] = ()
    sums = []
    if self.metrics:
      result, found = self._split_metrics(result)
      sums = self.metric_moves(found)
    if isinstance(result, tuple) and len(result) == 2:
      result, new = result[0], tf.nest.flatten(result[1])
    if len(new) != len(self.statistics):
      raise ValueError(
        "`loss_fn` must return (loss, new values), with one new value for each"
        f" of the {len(self.statistics)} `statistics`. Received: {len(new)} new"
        " values."
      )
    if not tf.is_tensor(result) and not isinstance(result, int | float | list):
      raise TypeError(
        "`loss_fn` must return a scalar, the mean loss over the batch."
        f" Received: {result!r:.60}."
      )
    loss = tf.convert_to_tensor(result)
    if loss.shape.rank:
      raise ValueError(
        "`loss_fn` must return a scalar, the mean loss over the batch."
        f" Received: a tensor of shape {loss.shape}. Use `tf.reduce_mean`."
      )
    old = parameters[len(self.variables) :][: len(new)]
    return loss, [*(o - n for o, n in zip(old, new, strict=True)), *sums]

  def metric_moves(self, found: Metrics) -> list[tf.Tensor]:
    """Computes how a batch changes the shared variable that sums metrics.

    Args:
      found: The metrics of the batch, which `loss_fn` returned.

    Returns:
      A list of one tensor, the variable's old value minus its new value (as for
      every variable without gradients); an empty list if the replica has no
      metrics.
    """
    return [metric_sums.move(self.metrics, found)] if self.metrics else []

  def _split_metrics(self, result: Any) -> tuple[Any, Metrics]:
    """Splits the result of `loss_fn` into the metrics and the rest.

    Returns:
      A pair: what `loss_fn` would return without metrics, and the metrics by
      name.

    Raises:
      ValueError: If the metrics are missing, have other names, or are no
        scalars.
    """
    found = result[-1] if isinstance(result, tuple) else None
    if not isinstance(found, Mapping) or set(found) != set(self.metrics):
      raise ValueError(
        "`loss_fn` must return a dict of the `metrics` after the loss, with the"
        f" names {', '.join(self.metrics)}. Received: {found!r:.200}."
      )
    check_metrics(found)
    rest = result[:-1]
    return rest[0] if len(rest) == 1 else rest, found

  def _check_arguments(self, arguments: Sequence[Batch]) -> None:
    signatures.check_call(
      self.loss_fn,
      None,
      *arguments,
      rule="`loss_fn` must take (parameters, *batch), where a batch of"
      f" `dataset_fn` has {len(arguments)} elements",
    )


def check_metrics(metrics: Metrics) -> None:
  """Raises ValueError unless all metrics of a loss function are scalars."""
  for name, value in metrics.items():
    if tf.convert_to_tensor(value).shape.rank != 0:
      raise ValueError(
        "`loss_fn` must return scalars as metrics. Received:"
        f" {name!r} of shape {tf.convert_to_tensor(value).shape}."
      )


def num_examples(batch: Batch) -> tf.Tensor:
  """Returns the number of examples of a batch, as an int64 scalar.

  It is the size of the batch's first tensor along axis 0.

  Raises:
    ValueError: If the batch does not begin with a tensor that has an axis 0.
  """
  first = (tf.nest.flatten(batch) or [None])[0]
  if isinstance(first, tf.RaggedTensor):
    return first.nrows(out_type=tf.int64)
  if isinstance(first, tf.SparseTensor):
    return first.dense_shape[0]
  if not tf.is_tensor(first) or first.shape.rank == 0:
    raise ValueError(
      "`dataset_fn` must yield batches of tensors with the examples along axis"
      f" 0. Received: {first!r} first."
    )
  return tf.shape(first, out_type=tf.int64)[0]


@functools.cache
def _warn_once(message: str) -> None:
  logging.warning("tf_replicas: %s", message)


def average_towers(towers: Sequence[Gradients]) -> Gradients:
  """Averages the gradients of several towers, or of several micro-batches.

  A tower is one copy of the model on its device. All must have had equally many
  examples. `average_gradients` of TF1's `cifar10_multi_gpu_train` had this
  purpose. Each mean is computed on the device of its first gradient.

  Args:
    towers: The gradients of each tower, whose lists have the same order.

  Returns:
    The mean of gradients and loss, and the sum of the numbers of examples. A
    gradient that is None in all towers stays None; a gradient that is None in
    some towers counts as zero there.
  """
  scale = 1.0 / len(towers)
  gradients = [
    _mean(same, scale)
    for same in zip(*(t.gradients for t in towers), strict=True)
  ]
  return Gradients(
    gradients=gradients,
    loss=tf.add_n([t.loss for t in towers]) * scale,
    num_examples=tf.add_n([t.num_examples for t in towers]),
  )


def _mean(
  gradients: Sequence[parameter_store.Gradient], scale: float
) -> parameter_store.Gradient:
  gradients = [g for g in gradients if g is not None]
  if not gradients:
    return None
  with tf.device(gradients[0].device):
    if all(isinstance(g, tf.IndexedSlices) for g in gradients):
      values = tf.concat([g.values for g in gradients], axis=0)
      return tf.IndexedSlices(
        values * tf.cast(scale, values.dtype),
        tf.concat([g.indices for g in gradients], axis=0),
        gradients[0].dense_shape,
      )
    total = tf.add_n([tf.convert_to_tensor(g) for g in gradients])
    return total * tf.cast(scale, total.dtype)


def check_dataset(dataset: object) -> tf.data.Dataset:
  """Checks that `dataset`, the result of a `dataset_fn`, is a data set.

  Returns:
    `dataset`.

  Raises:
    TypeError: If `dataset` is no `tf.data.Dataset`.
  """
  if not isinstance(dataset, tf.data.Dataset):
    raise TypeError(
      "`dataset_fn` must return a `tf.data.Dataset`. Received: a"
      f" {type(dataset).__name__}."
    )
  return dataset


def sparsity(replica: Replica) -> list[bool]:
  """Finds out which of a replica's gradients are `tf.IndexedSlices`.

  The function traces the computation of the gradients to find out.

  Args:
    replica: The replica whose gradients are examined.

  Returns:
    One bool per variable in `replica.shared` (the variables that replicas
    share): whether its gradient is a `tf.IndexedSlices`.
  """
  batch = check_dataset(replica.dataset_fn(1, 0, 0)).element_spec
  parameters = [
    tf.TensorSpec(v.shape, tf.as_dtype(v.dtype)) for v in replica.shared
  ]
  found: list[bool] = []

  def trace(parameters: Sequence[tf.Tensor], batch: Batch) -> None:
    gradients = replica.gradients(parameters, batch).gradients
    found.extend(isinstance(g, tf.IndexedSlices) for g in gradients)

  tf.function(trace, autograph=False).get_concrete_function(parameters, batch)
  return found
