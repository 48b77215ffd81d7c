"""Imports TensorFlow in the way of the training binaries, for test tasks."""

from tf_replicas.runtime import processes

with processes.importing_tensorflow():
  import tensorflow  # noqa: F401
