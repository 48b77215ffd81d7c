"""Runs operations of TensorFlow in this process, without the cluster.

A process that is connected to other tasks registers each operation that it runs
eagerly for the first time with all of them, and waits for their answers
(TensorFlow 2.21). If the host of a task cannot be reached, it may wait for a
quarter of an hour. A session of TF1 has no connections, so checkpoints and
summaries are written by sessions.
"""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf


def make(graph: tf.Graph) -> tf.compat.v1.Session:
  """Makes a session for `graph`, which uses the CPU of this process only."""
  # A session would take all memory of the GPUs.
  config = tf.compat.v1.ConfigProto(device_count={"GPU": 0})
  return tf.compat.v1.Session(graph=graph, config=config)


@contextlib.contextmanager
def new() -> Iterator[tf.compat.v1.Session]:
  """Context with a new graph and a session for it, which are the default."""
  with tf.Graph().as_default() as graph, make(graph) as session:
    yield session


def run(fn: Callable[..., Any], *values: Any) -> Any:
  """Runs the operations that `fn` creates.

  Args:
    fn: Maps one tensor per element of `values` to operations or tensors, in any
      structure.
    *values: Arrays, numbers, strings or bytes.

  Returns:
    The values of the tensors, as NumPy arrays, in the structure that `fn`
    returns; None in place of operations.
  """
  # NumPy's own type of bytes would lose zeros at the end.
  arrays = [
    np.asarray(v, np.object_ if isinstance(v, str | bytes) else None)
    for v in values
  ]
  with new() as session:
    tensors = [
      tf.compat.v1.placeholder(array.dtype, array.shape) for array in arrays
    ]
    return session.run(fn(*tensors), dict(zip(tensors, arrays, strict=True)))
