"""A replica: what computes one gradient, on one device or on several.

Model code never mentions a device. A replica is a list of variables, a loss as
a function of parameters and a batch, and a data set; where it runs and what
becomes of its gradients is up to the driver and the update rule.

One device or several: a tower on each, or the layers of a tower spread over
several (`model_parallel`), or both: N x D devices are N towers of D each.
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_replicas import model_parallel
from tf_replicas import parameter_store
from tf_replicas import placement
from tf_replicas import workarounds


class Gradients(NamedTuple):
  """What one batch says.

  Attributes:
    gradients: One per trainable variable; dense, `tf.IndexedSlices` or None.
      Then one per statistic: the old value less the new.
    loss: float32 scalar, mean over the examples.
    num_examples: int64 scalar.
  """

  gradients: list[parameter_store.Gradient]
  loss: tf.Tensor
  num_examples: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Replica:
  """What one replica computes.

  Attributes:
    variables: The trainable variables of the model, with their initial values;
      Keras or TensorFlow variables. They are only a pattern: training happens
      on the parameter servers.
    loss_fn: Maps (parameters, *batch) to a scalar, the mean loss over the
      batch; parameters are tensors in the order of `shared`. With statistics it
      returns their new values too: (loss, values). AutoGraph converts it unless
      it is marked by `tf.autograph.experimental.do_not_convert`.
    dataset_fn: Maps (num_shards, shard_index, start_example) to an endless
      data set whose elements are batches: tuples of tensors with the examples
      along axis 0. The start is how many examples all replicas have drawn
      before, about. Index and start are ints, or int64 scalars where the driver
      runs the function on a remote worker. With several towers a batch is for
      all of them.
    devices: Where the towers compute; the default device if empty. With
      `layers` on D devices, the first D are the first tower, and so on.
    layers: Which layer of the model computes on which device of a tower; then
      gradients are computed inside a `tf.function`.
    micro_batches: In how many equal parts a tower takes its batch. With one
      device per tower, one part follows the other, and what the forward pass
      keeps is that of one. What a layer computes over the batch, such as batch
      normalization's statistics, it computes over a part.
    statistics: Variables that a batch moves without a gradient, such as moving
      means and variances. Each tower says where it would move them; the
      replica moves them to the mean of these.
    is_synchronized: Whether towers compute in lockstep, each op that
      `tf.distribute.ReplicaContext.all_reduce` stands for over all of them:
      what `keras.layers.BatchNormalization(synchronized=True)` needs to
      normalize by the moments of all towers' examples. Of towers with one
      device each, in the process that traces. Tracing takes long where there
      are many such ops: each looks at all before it.
  """

  variables: Sequence[tf.Variable]
  loss_fn: Callable[..., tf.Tensor]
  dataset_fn: Callable[[int, int | tf.Tensor, int | tf.Tensor], tf.data.Dataset]
  devices: Sequence[str] = ()
  layers: model_parallel.LayerPlacement | None = None
  micro_batches: int = 1
  statistics: Sequence[tf.Variable] = ()
  is_synchronized: bool = False

  def __post_init__(self):
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
    if self.is_synchronized and has_stages:
      raise ValueError(
        "`is_synchronized` needs towers of one device each. Received: `layers`"
        f" on {self.layers.num_devices}."
      )

  @property
  def shared(self) -> list[tf.Variable]:
    """All that replicas share: the variables, then the statistics."""
    return [*self.variables, *self.statistics]

  def towers(self) -> list[tuple[str, ...]]:
    """The devices of each tower; none if there are no devices."""
    if self.layers is None:
      return [(device,) for device in self.devices]
    return self.layers.towers(self.devices)

  @tf.autograph.experimental.do_not_convert
  def gradients(
    self,
    parameters: Sequence[tf.Tensor],
    batch: tuple[tf.Tensor, ...],
    scale_loss: Callable[[tf.Tensor], tf.Tensor] = tf.identity,
  ) -> Gradients:
    """The gradient of one batch; with N towers, the mean over N equal parts.

    Args:
      parameters: One tensor per variable in `shared`.
      batch: Tensors whose first dimension is divisible by the towers times the
        micro-batches.
      scale_loss: Applied to the loss before it is differentiated.
    """
    towers = self.towers()
    if not towers:
      return self._tower([""], parameters, batch, scale_loss)
    parts = model_parallel.parts(batch, len(towers), "devices")
    if self.is_synchronized and len(towers) > 1:
      return self._in_lockstep(parameters, parts, scale_loss)
    results = []
    for devices, part in zip(towers, parts, strict=True):
      with tf.device(devices[0]):
        results.append(self._tower(devices, parameters, part, scale_loss))
    return average_towers(results)

  def _in_lockstep(self, parameters, parts, scale_loss) -> Gradients:
    """All towers' mean, each traced in a thread of the strategy."""
    strategy = tf.distribute.MirroredStrategy(
      list(self.devices), tf.distribute.ReductionToOneDevice()
    )
    results = [None] * len(self.devices)

    def tower():
      context = tf.distribute.get_replica_context()
      number = int(tf.get_static_value(context.replica_id_in_sync_group))
      device = self.devices[number]
      results[number] = self._tower(
        [device], parameters, parts[number], scale_loss
      )

    strategy.run(tower)
    return average_towers(results)

  def _tower(self, devices, parameters, batch, scale_loss) -> Gradients:
    pipeline, homes = None, [""] * len(parameters)
    if len(devices) > 1:
      pipeline = model_parallel.Pipeline(self.layers, devices)
      paths = map(placement.path_of, self.shared)
      homes = [pipeline.device_of(path) for path in paths]
    own = []
    for parameter, home in zip(parameters, homes, strict=True):
      with tf.device(home):
        own.append(tf.identity(parameter))
    done, most = [], model_parallel.parts_under_way(len(devices))
    for part in model_parallel.parts(
      batch, self.micro_batches, "micro_batches"
    ):
      if len(done) >= most:
        part = model_parallel.after(done[-most].gradients, part)
      done.append(self._part(pipeline, own, part, scale_loss))
    return done[0] if len(done) == 1 else average_towers(done)

  def _part(self, pipeline, parameters, batch, scale_loss) -> Gradients:
    trained = parameters[: len(self.variables)]
    if pipeline is None:
      with tf.GradientTape(watch_accessed_variables=False) as tape:
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
      num_examples=tf.shape(batch[0], out_type=tf.int64)[0],
    )

  def _loss(self, parameters, batch) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """The loss, and how far each statistic moves down."""
    loss_fn = workarounds.by_autograph(self.loss_fn)
    if not self.statistics:
      return loss_fn(parameters, *batch), []
    loss, after = loss_fn(parameters, *batch)
    before = parameters[len(self.variables) :]
    return loss, [b - a for b, a in zip(before, after, strict=True)]


def average_towers(towers: Sequence[Gradients]) -> Gradients:
  """The mean of several towers' gradients of equally many examples.

  A gradient that is None in all towers stays None; None in some counts as
  zero. Each mean is computed where the first of its gradients is. After
  `average_gradients` of TF1's `cifar10_multi_gpu_train`.
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


def _mean(gradients, scale) -> parameter_store.Gradient:
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


def sparsity(replica: Replica) -> list[bool]:
  """Which of the replica's gradients come as `tf.IndexedSlices`; traces it."""
  batch = replica.dataset_fn(1, 0, 0).element_spec
  parameters = [
    tf.TensorSpec(v.shape, tf.as_dtype(v.dtype)) for v in replica.shared
  ]
  found = []

  def trace(parameters, batch):
    gradients = replica.gradients(parameters, batch).gradients
    found.extend(isinstance(g, tf.IndexedSlices) for g in gradients)

  trace = tf.function(trace, autograph=False)
  trace.get_concrete_function(parameters, batch)
  return found
