"""Prepares `tf.data.Dataset`s, finds their resources, turns them into bytes.

The module uses private names of TensorFlow 2.21.
"""

import dataclasses
from collections.abc import Iterator

import tensorflow as tf

from tf_replicas.runtime import processes


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
  """Disables autotuning, whose thread may delay the end of an iterator.

  TensorFlow 2.21 tunes the parallelism of a data set in a thread. The call that
  deletes an iterator waits for this thread, which may miss that it should end:
  then the call takes up to 60 s (seen for 8 of 40 iterators). Without
  autotuning, `tf.data.AUTOTUNE` stands for the number of cores.

  Args:
    dataset: The data set.

  Returns:
    The same data set without autotuning. If the options of `dataset` say
    whether it is tuned, `dataset` itself.
  """
  if dataset.options().autotune.enabled is not None:
    return dataset
  options = tf.data.Options()
  options.autotune.enabled = False
  return dataset.with_options(options)


def resources_of(dataset: tf.data.Dataset) -> list[str]:
  """Finds the devices of the lookup tables and variables that a data set uses.

  Args:
    dataset: A data set that was made outside of a `tf.function`.

  Returns:
    One device string for each use of a lookup table or variable by a function
    of the data set, such as the function of a `map`. The list is empty if there
    are none.
  """
  return [
    tensor.device
    for part in _parts(dataset)
    for function in part._functions()
    for tensor in function.function.captured_inputs
    if tensor.dtype == tf.resource
  ]


@dataclasses.dataclass(frozen=True)
class Sendable:
  """Holds a data set in a form from which other processes can make it again.

  Attributes:
    graph: The data set as bytes, as `to_bytes` returns it.
    spec: The `element_spec` of the data set.
  """

  graph: bytes
  spec: object


def to_bytes(dataset: tf.data.Dataset) -> bytes:
  """Serializes the graph of a data set, with the tensors that it contains.

  Args:
    dataset: A data set that was made outside of a `tf.function`.

  Returns:
    The graph as bytes, from which `from_bytes` makes the data set again in
    another process.

  Raises:
    TypeError: If the data set calls Python code, or uses a lookup table or a
      variable.
  """
  if used := resources_of(dataset):
    raise TypeError(
      f"a data set that cannot be sent: it uses {len(used)} tables or variables"
    )
  try:
    graph = tf.raw_ops.DatasetToGraphV2(
      input_dataset=tf.data.experimental.to_variant(dataset),
      external_state_policy=1,  # Sends random operations as they are.
      strip_device_assignment=True,
    ).numpy()
  except tf.errors.OpError as error:
    reason = processes.shortened(error.message)
    raise TypeError(f"a data set that cannot be sent: {reason}") from None
  definition = tf.compat.v1.GraphDef.FromString(graph)
  bodies = [f.node_def for f in definition.library.function]
  ops = {node.op for body in [definition.node, *bodies] for node in body}
  if called := sorted(op for op in ops if "PyFunc" in op):
    raise TypeError(f"a data set that calls Python code ({called[0]})")
  for node in definition.node:
    # Each process makes its own generator of seeds for `shuffle`. It would
    # share one that it finds by name, which has given out seeds already.
    for handle in node.attr["value"].tensor.resource_handle_val:
      handle.name = f"sent/{handle.name}"
  return definition.SerializeToString()


def from_bytes(graph: bytes | tf.Tensor, spec: object) -> tf.data.Dataset:
  """Makes the data set again that `to_bytes` has serialized.

  Args:
    graph: The result of `to_bytes`, or a string tensor that contains it.
    spec: The `element_spec` of the data set.
  """
  variant = tf.raw_ops.DatasetFromGraph(graph_def=graph)
  return tf.data.experimental.from_variant(variant, spec)


def _parts(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
  yield dataset
  for each in dataset._inputs():
    yield from _parts(each)
