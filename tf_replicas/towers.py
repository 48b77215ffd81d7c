"""A replica: what computes one gradient, on one device or on several.

Model code never mentions a device. A replica is a list of variables, a loss as
a function of parameters and a batch, and a data set; where it runs and what
becomes of its gradients is up to the driver and the update rule.
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_replicas import parameter_store


class Gradients(NamedTuple):
  """What one batch says.

  Attributes:
    gradients: One per trainable variable; dense, `tf.IndexedSlices` or None.
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
      batch; parameters are tensors in the order of `variables`.
    dataset_fn: Maps (num_shards, shard_index, start_example) to an endless
      data set whose elements are batches: tuples of tensors with the examples
      along axis 0. The index is an int, or an int64 scalar where the driver
      runs the function on a remote worker. The start, an int, is how many
      examples all replicas have used before. With several towers a batch is
      for all of them.
    devices: Where the towers compute; the default device if empty.
  """

  variables: Sequence[tf.Variable]
  loss_fn: Callable[..., tf.Tensor]
  dataset_fn: Callable[[int, int | tf.Tensor, int], tf.data.Dataset]
  devices: Sequence[str] = ()

  def gradients(
    self,
    parameters: Sequence[tf.Tensor],
    batch: tuple[tf.Tensor, ...],
    scale_loss: Callable[[tf.Tensor], tf.Tensor] = tf.identity,
  ) -> Gradients:
    """The gradient of one batch; with N towers, the mean over N equal parts.

    Args:
      parameters: One tensor per variable.
      batch: Tensors whose first dimension is divisible by the towers.
      scale_loss: Applied to the loss before it is differentiated.
    """
    if not self.devices:
      return self._tower(parameters, batch, scale_loss)
    parts = [tf.split(x, len(self.devices)) for x in batch]
    towers = []
    for device, part in zip(
      self.devices, zip(*parts, strict=True), strict=True
    ):
      with tf.device(device):
        towers.append(self._tower(parameters, part, scale_loss))
    return average_towers(towers)

  def _tower(self, parameters, batch, scale_loss) -> Gradients:
    parameters = [tf.identity(p) for p in parameters]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
      tape.watch(parameters)
      loss = self.loss_fn(parameters, *batch)
      scaled = scale_loss(loss)
    return Gradients(
      gradients=tape.gradient(scaled, parameters),
      loss=tf.cast(loss, tf.float32),
      num_examples=tf.shape(batch[0], out_type=tf.int64)[0],
    )


def average_towers(towers: Sequence[Gradients]) -> Gradients:
  """The mean of several towers' gradients of equally many examples.

  A gradient that is None in all towers stays None; None in some counts as
  zero. After `average_gradients` of TF1's `cifar10_multi_gpu_train`.
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
    tf.TensorSpec(v.shape, tf.as_dtype(v.dtype)) for v in replica.variables
  ]
  found = []

  def trace(parameters, batch):
    gradients = replica.gradients(parameters, batch).gradients
    found.extend(isinstance(g, tf.IndexedSlices) for g in gradients)

  tf.function(trace).get_concrete_function(parameters, batch)
  return found


def contribute(
  store: parameter_store.ParameterStore,
  optimizer,
  replica: Replica,
  iterator,
  index: int | tf.Tensor,
  last=None,
):
  """A replica's part in one step; to be used inside a `tf.function`.

  Pulls the parameters once, computes, and hands the gradient to the update
  rule; again with the same parameters if the rule wants more for this step.

  Args:
    store: Holds the parameters.
    optimizer: The update rule: has `scale_loss` and `apply_gradients`.
    replica: What to compute.
    iterator: Over the replica's batches.
    index: Which replica this is.
    last: What the last call returned, if its ticket is not -1.

  Returns:
    What `apply_gradients` returned last.
  """
  step, values = store.pull(None if last is None else last.global_step)
  parameters = [values[i] for i in store.trainable]
  paths = [store.specs[i].path for i in store.trainable]

  def one_batch(ticket):
    batch = next(iterator)
    result = replica.gradients(parameters, batch, optimizer.scale_loss)
    return optimizer.apply_gradients(
      zip(result.gradients, paths, strict=True),
      replica=index,
      local_step=step,
      loss=result.loss,
      num_examples=result.num_examples,
      ticket=ticket,
    )

  release = one_batch(None if last is None else last.ticket)
  if optimizer.replicas_to_aggregate <= optimizer.total_num_replicas:
    return release
  return type(release)(
    *tf.while_loop(
      lambda _, new, ticket: (new == step) & (ticket >= 0),
      lambda _, new, ticket: one_batch(ticket),
      release,
    )
  )
