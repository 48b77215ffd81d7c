"""Opens the session of TF1's `SyncReplicasOptimizer`, a peer in benchmarks."""

import contextlib
from typing import Any

import tensorflow as tf

v1 = tf.compat.v1


def synchronous(
  server: v1.train.Server,
  optimizer: v1.train.SyncReplicasOptimizer,
  *,
  is_chief: bool,
) -> contextlib.AbstractContextManager[Any]:
  """Makes a session of one worker, a context manager, without checkpoints.

  Args:
    server: The TensorFlow server of this process.
    optimizer: The optimizer of the default graph, whose training op exists.
    is_chief: Whether this worker is the chief.
  """
  # With no tokens, the old class is synchronous from the first step.
  hooks = [optimizer.make_session_run_hook(is_chief, num_tokens=0)]
  return v1.train.MonitoredTrainingSession(
    server.target,
    is_chief=is_chief,
    hooks=hooks,
    save_checkpoint_steps=None,
    save_checkpoint_secs=None,
  )
