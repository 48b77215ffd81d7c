"""Names the variables that the library adds to those of a model.

Replicas share them, and checkpoints contain them, as those of the model.
"""

# Begins the paths of the variables of `store.loss_scaling`.
LOSS_SCALE = "loss_scale/"
# The path of the variable of `store.metric_sums`.
METRIC_SUMS = "metrics/sums"


def is_own(path: str) -> bool:
  """Returns whether `path` is that of a variable that the library has added."""
  return path.startswith(LOSS_SCALE) or path == METRIC_SUMS
