"""Imports TensorFlow as the binaries do; for the tests' own tasks."""

from tf_replicas.runtime import processes

with processes.importing_tensorflow():
  import tensorflow  # noqa: F401
