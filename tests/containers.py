"""Several trainings by turns on the same devices, under the same names.

Names of shared resources outlive a training; in a resource container of its
own a name means another object.
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

import tensorflow as tf

_OPS = {
  "VarHandleOp": tf.raw_ops.VarHandleOp,
  "FIFOQueueV2": tf.raw_ops.FIFOQueueV2,
  "MutexV2": tf.raw_ops.MutexV2,
}


@contextlib.contextmanager
def use(container: str) -> Iterator[None]:
  """Inside, names mean objects of `container`; it replaces an outer one."""
  with contextlib.ExitStack() as stack:
    for name, op in _OPS.items():

      def in_container(op=op, **arguments):
        return op(**{**arguments, "container": container})

      stack.enter_context(mock.patch.object(tf.raw_ops, name, in_container))
    yield
