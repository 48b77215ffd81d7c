"""Errors about checkpoints. This module does not import TensorFlow."""


class CheckpointError(ValueError):
  """Reports a checkpoint that is missing, damaged, or of another model."""


class UnreadableCheckpointError(CheckpointError):
  """Reports a checkpoint that is missing or damaged."""


class MissingCheckpointError(UnreadableCheckpointError):
  """Reports that a checkpoint, or some of its files, do not exist."""
