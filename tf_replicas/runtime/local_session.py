"""Runs operations of TensorFlow in this process, without the cluster.

A process that is connected to other tasks registers each operation that it runs
eagerly for the first time with all of them, and waits for their answers
(TensorFlow 2.21). If the host of a task cannot be reached, it may wait for a
quarter of an hour. A session of TF1 has no connections. So operations that must
not wait, such as those that write checkpoints, run in a session.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf


def run(fn: Callable[..., Any], *values: Any) -> Any:
  """Runs the operations that `fn` creates, on the CPU of this process.

  Args:
    fn: Maps one tensor per element of `values` to operations or tensors, in any
      structure. It is called in a new graph.
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
  # A session would take all memory of the GPUs.
  config = tf.compat.v1.ConfigProto(device_count={"GPU": 0})
  with (
    tf.Graph().as_default() as graph,
    tf.compat.v1.Session(graph=graph, config=config) as session,
  ):
    tensors = [
      tf.compat.v1.placeholder(array.dtype, array.shape) for array in arrays
    ]
    return session.run(fn(*tensors), dict(zip(tensors, arrays, strict=True)))
