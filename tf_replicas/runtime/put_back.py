"""Keeps a batch of an iterator for later use.

The module uses raw ops of TensorFlow 2.21.
"""

import uuid
from collections.abc import Iterator
from collections.abc import Sequence

import tensorflow as tf

from tf_replicas.runtime import control_flow


class PutBack:
  """Stores one batch, so that the next step can use it again.

  The batch is in a queue, since the shapes of batches may differ. The methods
  find the queue by its name. They may be used inside a `tf.function`.

  Attributes:
    element_spec: The structure of `tf.TypeSpec`s of a batch.
    loop_shapes: For each tensor of `no_batch`, the shape invariant of a loop
      that carries a batch.
  """

  def __init__(self, element_spec: object, *, device: str | None):
    """Stores the settings.

    Args:
      element_spec: The structure of `tf.TypeSpec`s of a batch.
      device: The device of the queue; None: where the methods are used.
    """
    self.element_spec = element_spec
    self._device = device
    flat = tf.nest.flatten(element_spec, expand_composites=True)
    self._dtypes = [spec.dtype for spec in flat]
    self._shapes = [spec.shape for spec in flat]
    self.loop_shapes = [
      shape if shape.rank is None else tf.TensorShape([None] * shape.rank)
      for shape in self._shapes
    ]
    self._name = f"put_back/{uuid.uuid4().hex}"

  def flatten(self, batch: object) -> list[tf.Tensor]:
    """Returns the tensors of a batch, in the order that `put` expects."""
    flat = tf.nest.flatten(batch, expand_composites=True)
    return [tensor for tensor in flat if tensor is not None]

  def no_batch(self) -> list[tf.Tensor]:
    """Returns empty tensors of the types and ranks of a batch's tensors.

    A loop that carries the batch of its last step begins with them.
    """
    with tf.device(self._device):
      return [
        _empty(dtype, shape)
        for dtype, shape in zip(self._dtypes, self._shapes, strict=True)
      ]

  def put(
    self, tensors: Sequence[tf.Tensor], is_wanted: tf.Tensor
  ) -> tf.Tensor:
    """Stores a batch for the next call of `take`, if `is_wanted`.

    Args:
      tensors: The batch, as `flatten` returns it. If another one is stored, the
        op waits until that one is taken.
      is_wanted: bool scalar.

    Returns:
      A tensor to use as a control dependency, which waits for the batch.
    """

    def put() -> tf.Operation:
      return tf.raw_ops.QueueEnqueueV2(handle=self._queue(), components=tensors)

    with tf.device(self._device):
      return control_flow.run_if(is_wanted, put)

  def take(self, iterator: Iterator) -> object:
    """Returns the stored batch, or else the next batch of `iterator`."""

    def stored() -> object:
      tensors = self._dequeue()
      for tensor, shape in zip(tensors, self._shapes, strict=True):
        tensor.set_shape(shape)
      return tf.nest.pack_sequence_as(
        self.element_spec, tensors, expand_composites=True
      )

    with tf.device(self._device):
      return tf.cond(self._has_batch(), stored, lambda: next(iterator))

  def clear(self) -> tf.Tensor:
    """Removes the batch, if there is one.

    Returns:
      A tensor to use as a control dependency.
    """
    with tf.device(self._device):
      return control_flow.run_if(self._has_batch(), self._dequeue)

  def _has_batch(self) -> tf.Tensor:
    return tf.raw_ops.QueueSizeV2(handle=self._queue()) > 0

  def _dequeue(self) -> list[tf.Tensor]:
    return list(
      tf.raw_ops.QueueDequeueV2(
        handle=self._queue(), component_types=self._dtypes
      )
    )

  def _queue(self) -> tf.Tensor:
    return tf.raw_ops.FIFOQueueV2(
      component_types=self._dtypes, capacity=1, shared_name=self._name
    )


def _empty(dtype: tf.DType, shape: tf.TensorShape) -> tf.Tensor:
  """Returns a tensor of the given type and rank, without elements.

  Args:
    dtype: The type. A variant gets an empty list.
    shape: The shape, as far as it is known.
  """
  if dtype == tf.variant:
    return tf.raw_ops.EmptyTensorList(
      element_shape=-1, max_num_elements=-1, element_dtype=tf.float32
    )
  return tf.zeros([0] * (shape.rank or 0), dtype)
