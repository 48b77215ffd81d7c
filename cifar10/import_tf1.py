"""Imports a checkpoint of the TF1 tutorial, to evaluate, export or resume it.

  python -m cifar10.import_tf1 --checkpoint=TF1_DIR --train_dir=NEW_DIR
  python -m cifar10.eval --train_dir=NEW_DIR --run_once

`cifar10_train.py` and `cifar10_multi_gpu_train.py` of the tutorial wrote such
checkpoints, in the first or the second format of `tf.train.Saver`. The network
of this package is that of the tutorial, so only the names of variables change.
"""

import os
import re
from collections.abc import Sequence

import numpy as np
from absl import flags

from cifar10 import config as config_lib
from tf_replicas.programs import command_line
from tf_replicas.programs import run_options
from tf_replicas.runtime import processes

FLAGS = flags.FLAGS

_LAYERS = ("conv1", "conv2", "local3", "local4", "softmax_linear")
_PARAMETERS = {"weights": "kernel", "biases": "bias"}
# Maps the tutorial's names of the variables to those of this package.
NAMES = {
  f"{layer}/{theirs}": f"{layer}/{ours}"
  for layer in _LAYERS
  for theirs, ours in _PARAMETERS.items()
}
AVERAGE = "/ExponentialMovingAverage"  # Follows the name of a variable.
_STEP = "global_step"


def define_flags() -> None:
  """Defines the command-line flags of this program, as `--help` shows them."""
  flags.DEFINE_string(
    "checkpoint",
    None,
    "The TF1 checkpoint, or the directory of that training for its newest one",
  )
  flags.DEFINE_string(
    "train_dir", None, "The run to make; must hold no checkpoint yet"
  )
  flags.mark_flags_as_required(["checkpoint", "train_dir"])
  command_line.define_count(
    "batch_size",
    config_lib.Config.batch_size,
    "Images in one update of that training, of all GPUs; tells the learning"
    " rate and the position in the data when it is resumed",
  )


def read(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
  """Reads a checkpoint of TF1's CIFAR-10 tutorial.

  Args:
    path: Path of the checkpoint, or a directory, of which the newest checkpoint
      is read.

  Returns:
    A dict for `checkpoints.save`: float32 arrays under `variables/<path>`, and
    under `averages/<path>` if the checkpoint has moving averages; the int64
    scalar `global_step`.

  Raises:
    checkpoints.CheckpointError: If there is no checkpoint, it is damaged, or a
      variable is missing or has another shape.
  """
  from cifar10 import model as model_lib
  from tf_replicas.session import checkpoints
  from tf_replicas.session import evaluation

  path = os.fspath(path)
  if os.path.isdir(path):
    path = evaluation.newest_checkpoint(path)
  saved = checkpoints.read_tensors(path, _known)
  step = _global_step(path, saved.pop(_STEP, None))
  # With `--use_fp16` the tutorial's variables were float16.
  saved = {name: np.asarray(v, np.float32) for name, v in saved.items()}
  weights = {weight.path: weight.value for weight in model_lib.build().weights}
  kinds = {"": "variables"}
  if any(name.endswith(AVERAGE) for name in saved):
    kinds[AVERAGE] = "averages"
  faults = checkpoints.differences(
    saved,
    {name + end: weights[NAMES[name]] for name in NAMES for end in kinds},
  )
  if faults:
    raise checkpoints.CheckpointError(
      f"checkpoint {path} must be of the tutorial's network:"
      f" {checkpoints.some(faults.values(), '; ')}"
    )
  values = {
    f"{kind}/{ours}": saved[theirs + end]
    for end, kind in kinds.items()
    for theirs, ours in NAMES.items()
  }
  return {**values, _STEP: step}


def _known(key: str) -> str | None:
  """Selects the tensors of a TF1 checkpoint that are imported.

  Args:
    key: The name of a tensor in the checkpoint.

  Returns:
    `key` if the tensor is to be read, else None.
  """
  is_known = key == _STEP or key.removesuffix(AVERAGE) in NAMES
  return key if is_known else None


def _global_step(path: str, saved: np.ndarray | None) -> np.int64:
  """Returns the global step of a TF1 checkpoint.

  If the checkpoint has no variable `global_step`, the step is taken from the
  file name. (In the tutorial of 2015, the variable had no name.)

  Args:
    path: Path of the checkpoint.
    saved: The value in the checkpoint, an integer, or float32 as the tutorial's
      program for several GPUs stored it; None if there is no such variable.

  Raises:
    checkpoints.CheckpointError: If there is no value, and the file name has no
      step either.
  """
  from tf_replicas.session import checkpoints

  in_name = re.search(r"-(\d+)$", path)
  if saved is None and in_name is None:
    raise checkpoints.CheckpointError(
      f"checkpoint {path} must have a global_step, or a name that ends in -STEP"
    )
  return np.int64(int(in_name[1] if saved is None else saved))


def import_checkpoint(
  checkpoint: str | os.PathLike[str],
  train_dir: str | os.PathLike[str],
  *,
  batch_size: int = config_lib.Config.batch_size,
) -> str:
  """Writes a checkpoint of TF1's tutorial as the first one of a new training.

  Args:
    checkpoint: Path of the TF1 checkpoint, or a directory, of which the newest
      checkpoint is taken.
    train_dir: Directory of the training, which is made if it does not exist.
    batch_size: Number of images in one update of the TF1 training.

  Returns:
    The path of the new checkpoint.

  Raises:
    FileExistsError: If `train_dir` holds a checkpoint.
    checkpoints.CheckpointError: If the TF1 checkpoint is missing, damaged or of
      another network.
  """
  from tf_replicas.session import checkpoints

  if checkpoints.latest(train_dir) is not None:
    raise FileExistsError(
      "`train_dir` must hold no checkpoint; nothing is overwritten. Received:"
      f" {os.fspath(train_dir)}."
    )
  values = read(checkpoint)
  seen = values[_STEP] * np.int64(batch_size)
  return checkpoints.save(train_dir, {**values, "examples_seen": seen})


def main(argv: Sequence[str]) -> None:
  del argv
  with processes.importing_tensorflow():
    from tf_replicas.runtime import devices

  with processes.one_line_errors(
    usage=(FileExistsError, ValueError),
    run_time=run_options.RUN_TIME_ERRORS,
  ):
    devices.configure(())
    path = import_checkpoint(
      FLAGS.checkpoint, FLAGS.train_dir, batch_size=FLAGS.batch_size
    )
    print(f"imported {FLAGS.checkpoint} as {path}", flush=True)


if __name__ == "__main__":
  define_flags()
  command_line.start(main)
