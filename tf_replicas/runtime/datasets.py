"""Finds the resources of a `tf.data.Dataset`, by private names of 2.21."""

from collections.abc import Iterator

import tensorflow as tf


def resources_of(dataset: tf.data.Dataset) -> list[str]:
  """Returns the devices of tables and variables that `dataset` uses.

  Args:
    dataset: A data set made outside of functions.

  Returns:
    One device string per use of a table or variable by a function.
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
