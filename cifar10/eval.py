"""Measures checkpoints of a CIFAR-10 training with their moving averages.

  python -m cifar10.eval --train_dir=/tmp/cifar10_train [--run_once]
    [--views=6] [--eval_data=train_eval]

Without `--run_once`, every new checkpoint is measured until training has ended.
With `--views`, the probabilities are the mean over several views (crops,
possibly mirrored) of an image. With `--eval_data=train_eval`, training images
are measured instead of test images.
"""

import datetime
import os
from collections.abc import Callable
from collections.abc import Sequence

import numpy as np
from absl import flags

from cifar10 import config as config_lib
from cifar10 import confusion
from tf_replicas.programs import command_line
from tf_replicas.programs import fields
from tf_replicas.programs import run_config

FLAGS = flags.FLAGS

# Maps the tutorial's names of data to the splits of a source.
EVAL_DATA = {"test": "test", "train_eval": "train"}


def evaluate(
  config: config_lib.Config,
  eval_dir: str | None = None,
  *,
  eval_data: str = "test",
  run_once: bool = True,
  num_views: int = 1,
  batch_size: int = 500,
  interval_secs: float = 10.0,
  timeout_secs: float | None = None,
) -> np.ndarray | None:
  """Measures the checkpoints of a training on test images, in float32.

  The checkpoints are those in `config.train_dir`. For each, prints the
  precision @ 1 (the share of images that are classified right) and writes it to
  TensorBoard, with the precision and the recall of every class and a picture of
  the confusion matrix.

  Args:
    config: The settings of the training, with its directory and its data set.
    eval_dir: Directory of the TensorBoard summaries. None takes `eval` in the
      run's directory, followed by `_train` for `train_eval` and by, for
      example, `_6_views` for 6 views.
    eval_data: `test`, or `train_eval` for the undistorted training images; the
      names are the tutorial's.
    run_once: Whether to measure the newest checkpoint only.
    num_views: Number of views (crops, possibly mirrored) of an image over which
      the probabilities are averaged, one of `config.VIEWS`. The tutorial has 1.
    batch_size: Number of images in a batch.
    interval_secs: The least seconds between the starts of two measurements. Not
      used with `run_once`.
    timeout_secs: The seconds to wait for a new checkpoint. None waits until
      training has finished. Not used with `run_once`.

  Returns:
    The confusion matrix of the last checkpoint, `[10, 10]` counts of images by
    true and predicted class. Without `run_once`, None if there was no
    checkpoint until the time limit or the end of the training.

  Raises:
    checkpoints.CheckpointError: If a checkpoint is damaged or of another model.
      With `run_once`, also if there is no checkpoint.
    sources.DataError: If the data set cannot be read.
    ValueError: If a number is out of range.
  """
  from cifar10 import inputs
  from cifar10 import model as model_lib
  from cifar10 import sources
  from tf_replicas.session import evaluation
  from tf_replicas.session import reports

  source = sources.find(config.dataset, config.data_dir)
  model = model_lib.build()
  batches = inputs.eval_batches(
    source,
    batch_size,
    split=EVAL_DATA[eval_data],
    crop_size=config.crop_size,
    num_views=num_views,
  )
  count = _counter(model, batches, num_views)
  which = "" if eval_data == "test" else "_train"
  which += "" if num_views == 1 else f"_{num_views}_views"
  eval_dir = eval_dir or os.path.join(config.train_dir, f"eval{which}")
  summaries = reports.Summaries(eval_dir, log=_say)
  can_draw = confusion.can_draw()
  if not can_draw:
    _say("no picture of the confusion matrix: matplotlib is not installed")

  of_views = f" of {num_views} views" if num_views > 1 else ""

  def measure(global_step, values):
    evaluation.load_into_keras(model, values)
    matrix = count()
    _say(
      f"{datetime.datetime.now()}: precision @ 1 ="
      f" {confusion.accuracy(matrix):.4f} [{matrix.sum()} examples{of_views}]"
    )
    pictures = {}
    if can_draw:
      pictures["confusion_matrix"] = confusion.picture(matrix)
    summaries.write(global_step, confusion.scalars(matrix), images=pictures)
    return matrix

  return evaluation.evaluate(
    config.train_dir,
    measure,
    run_once=run_once,
    interval_secs=interval_secs,
    timeout_secs=timeout_secs,
  )


def _counter(network, batches, num_views) -> Callable[[], np.ndarray]:
  """Makes a function that computes the confusion matrix of a network.

  Args:
    network: A network made by `model.build`.
    batches: The batches of all images, with their labels.
    num_views: Number of views (crops, possibly mirrored) of each image.

  Returns:
    A function without arguments, which returns `[10, 10]` counts of images by
    true and predicted class.
  """
  import tensorflow as tf

  from cifar10 import model as model_lib

  @tf.function(reduce_retracing=True, autograph=False)
  def confused(views, labels):
    probabilities = model_lib.probabilities(network, views, num_views)
    predictions = tf.argmax(probabilities, axis=-1)
    return tf.math.confusion_matrix(
      labels, predictions, config_lib.NUM_CLASSES, dtype=tf.int64
    )

  return lambda: np.sum([confused(*batch) for batch in batches], axis=0)


def _say(line: str) -> None:
  print(line, flush=True)


def _evaluate() -> np.ndarray | None:
  given = command_line.given("dataset", "data_dir")
  return evaluate(
    run_config.of_run(config_lib.Config, FLAGS.train_dir, **given),
    eval_data=FLAGS.eval_data,
    num_views=int(FLAGS.views),
    batch_size=FLAGS.batch_size,
    **fields.given(command_line.EvaluationOptions),
  )


def main(argv: Sequence[str]) -> None:
  del argv
  matrix = command_line.evaluate(_evaluate)
  _say(confusion.table(matrix))


if __name__ == "__main__":
  command_line.define_evaluation_flags(
    config_lib.Config.train_dir, batch_size=500
  )
  fields.define_flag(
    "eval_data",
    str,
    "test",
    "The images to measure on, by the tutorial's names",
    group=command_line.EVALUATION,
    choices=tuple(EVAL_DATA),
  )
  fields.define_flag(
    "views",
    str,
    "1",
    "Views of an image over which probabilities are averaged",
    group=command_line.EVALUATION,
    choices=[str(number) for number in config_lib.VIEWS],
  )
  command_line.start(main)
