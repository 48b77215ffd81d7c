"""Exports a trained network as a SavedModel that needs TensorFlow alone.

  python -m cifar10.export --train_dir=/tmp/cifar10_train --export_dir=DIR
    [--views=6]

The model takes raw uint8 images `[batch, 32, 32, 3]`, in the color order red,
green, blue, and returns probabilities `[batch, 10]`. It includes cropping and
standardization, and has the moving averages of the weights. `model.labels` is
the path of a file with the names of the classes, one per line. With `--views`,
the probabilities are the mean over several views (crops, possibly mirrored) of
an image.
"""

import os
from collections.abc import Mapping
from collections.abc import Sequence

import numpy as np
from absl import flags

from cifar10 import config as config_lib
from tf_replicas.programs import command_line
from tf_replicas.programs import run_config
from tf_replicas.programs import run_options
from tf_replicas.runtime import processes

FLAGS = flags.FLAGS


def define_flags() -> None:
  """Defines the command-line flags of this program, which exports a network."""
  flags.DEFINE_string("train_dir", "/tmp/cifar10_train", "The run to export")
  flags.DEFINE_string(
    "export_dir", None, "Directory for the SavedModel; new or empty"
  )
  flags.mark_flag_as_required("export_dir")
  flags.DEFINE_enum(
    "views",
    "1",
    [str(number) for number in config_lib.VIEWS],
    "Views of an image over which probabilities are averaged",
  )


def export(train_dir: str, export_dir: str, *, num_views: int = 1) -> str:
  """Exports the newest checkpoint of a training as a SavedModel.

  Args:
    train_dir: The directory of the training.
    export_dir: Directory of the SavedModel. It must be empty or not exist. The
      model appears there only when it is complete.
    num_views: Number of views (crops, possibly mirrored) of an image over which
      the probabilities are averaged, one of `config.VIEWS`.

  Returns:
    The path of the checkpoint that was exported.

  Raises:
    FileExistsError: If `export_dir` is a file or is not empty.
    ValueError: If the file with the settings of the training is damaged.
    checkpoints.CheckpointError: If there is no checkpoint, or it is of another
      model.
  """
  from tf_replicas.runtime import saved_models
  from tf_replicas.session import checkpoints
  from tf_replicas.session import evaluation

  path = evaluation.newest_checkpoint(train_dir)
  values = evaluation.averaged_variables(checkpoints.read(path))
  config = run_config.of_run(config_lib.Config, train_dir)
  with saved_models.new_directory(export_dir, "export_dir") as directory:
    labels = os.path.join(os.path.dirname(directory), "labels.txt")
    _save(values, config.crop_size, num_views, labels, directory)
  return path


def _save(
  values: Mapping[str, np.ndarray],
  crop_size: float,
  num_views: int,
  labels_path: str,
  directory: str,
) -> None:
  """Writes a SavedModel of the network to a directory.

  Args:
    values: The values of the network's variables, by path.
    crop_size: Height and width of the crop from the middle of an image.
    num_views: Number of views (crops, possibly mirrored) of an image over which
      the probabilities are averaged.
    labels_path: Path of the file with the names of the classes, which is
      written here and copied into the SavedModel.
    directory: Directory of the SavedModel.
  """
  import tensorflow as tf

  from cifar10 import distortions
  from cifar10 import model as model_lib
  from tf_replicas.session import evaluation

  network = model_lib.build()
  evaluation.load_into_keras(network, values)
  with open(labels_path, "w", encoding="utf-8") as file:
    file.write("\n".join(config_lib.LABELS) + "\n")
  size = config_lib.RECORD_SIZE
  images_spec = tf.TensorSpec([None, size, size, 3], tf.uint8, "images")

  @tf.function(input_signature=[images_spec], autograph=False)
  def classify(images):
    views = distortions.views(images, crop_size, num_views)
    return model_lib.probabilities(network, views, num_views)

  @tf.function(input_signature=[images_spec], autograph=False)
  def serve(images):
    return {"probabilities": classify(images)}

  # Not the Keras model: it would drag its classes along.
  module = tf.Module()
  module.weights = [weight.value for weight in network.weights]
  module.labels = tf.saved_model.Asset(labels_path)
  module.__call__ = classify
  tf.saved_model.save(module, directory, signatures={"serving_default": serve})


def main(argv: Sequence[str]) -> None:
  del argv
  with processes.importing_tensorflow():
    from tf_replicas.runtime import devices

  with processes.one_line_errors(
    usage=(FileExistsError, ValueError),
    run_time=run_options.RUN_TIME_ERRORS,
  ):
    devices.configure(())
    path = export(FLAGS.train_dir, FLAGS.export_dir, num_views=int(FLAGS.views))
    print(f"exported {path} to {FLAGS.export_dir}", flush=True)


if __name__ == "__main__":
  define_flags()
  command_line.start(main)
