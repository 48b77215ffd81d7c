"""Makes operations of a TensorFlow graph conditional, or puts them in order."""

from collections.abc import Callable

import tensorflow as tf


def done(*results: tf.Operation | tf.Tensor | None) -> tf.Tensor:
  """Returns a scalar tensor, True, that is computed after `results`.

  So operations become a tensor, which a branch of `tf.cond` has to return.

  Args:
    *results: Tensors and operations to wait for, in any structure. None, which
      eager operations return, is ignored.
  """
  pending = [r for r in tf.nest.flatten(results) if r is not None]
  with tf.control_dependencies(pending):
    return tf.constant(True)


def run_if(condition: bool | tf.Tensor, fn: Callable[[], object]) -> tf.Tensor:
  """Runs the operations that `fn` builds, but only if `condition` is true.

  Args:
    condition: A bool scalar, which may be a tensor of the graph.
    fn: Builds operations, and returns those to wait for, or None.

  Returns:
    A bool scalar, equal to `condition`. A control dependency on this scalar
    waits for what `fn` returned.
  """
  return tf.cond(condition, lambda: done(fn()), lambda: tf.constant(False))


def current_graph() -> tf.Graph:
  """Returns the graph of the innermost function or branch being traced."""
  return tf.compat.v1.get_default_graph()


def require(
  condition: tf.Tensor, message: str, value: tf.Tensor
) -> tf.Operation | tf.Tensor:
  """Makes an op that fails at run time if a condition is False.

  It is a single op. `tf.debugging.Assert` makes a conditional of some twenty
  ops.

  Args:
    condition: bool scalar.
    message: The error message.
    value: The wrong value, which is added to the message.

  Returns:
    An op or tensor to use as a control dependency, to wait for the check.

  Raises:
    tf.errors.InvalidArgumentError: At run time, if the condition is False.
  """
  checked = tf.raw_ops.Assert(condition=condition, data=[message, value])
  return tf.constant(True) if checked is None else checked
