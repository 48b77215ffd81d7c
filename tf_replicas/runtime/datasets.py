"""What a `tf.data.Dataset` holds; the private names of tf.data (2.21)."""

from collections.abc import Iterator

import tensorflow as tf


def resources_of(dataset: tf.data.Dataset) -> list[str]:
  """The devices of tables and variables that functions of `dataset` use.

  Args:
    dataset: A data set made outside of functions.

  Returns:
    One device per table or variable, each as often as it is used.
  """
  return [
    tensor.device
    for part in _parts(dataset)
    for function in part._functions()
    for tensor in function.function.captured_inputs
    if tensor.dtype == tf.resource
  ]


def _parts(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
  yield dataset
  for each in dataset._inputs():
    yield from _parts(each)
