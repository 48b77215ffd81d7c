"""Measures checkpoints of a CIFAR-10 training with their moving averages.

  python -m cifar10.eval --train_dir=/tmp/cifar10_train [--run_once]

Without --run_once every new checkpoint is measured until training has ended.
"""

import datetime
import os
from collections.abc import Callable
from collections.abc import Sequence

import numpy as np
from absl import flags

from cifar10 import command_line
from cifar10 import config as config_lib
from cifar10 import confusion
from tf_replicas import program

FLAGS = flags.FLAGS


def define_flags() -> None:
  """The flags of this binary; `--help` shows them."""
  flags.DEFINE_string("train_dir", "/tmp/cifar10_train", "The run to measure")
  flags.DEFINE_string("eval_dir", None, "For TensorBoard; TRAIN_DIR/eval")
  flags.DEFINE_string("dataset", None, "As in training; that of the run")
  flags.DEFINE_string("data_dir", None, "As in training; that of the run")
  flags.DEFINE_integer("batch_size", 500, "Images at a time")
  flags.DEFINE_boolean("run_once", False, "Measure the newest checkpoint only")
  flags.DEFINE_float("eval_interval_secs", 10, "Between measurements")
  flags.DEFINE_float(
    "timeout_secs", None, "Wait for a new checkpoint; for ever"
  )


def evaluate(
  config: config_lib.Config,
  eval_dir: str | None = None,
  *,
  run_once: bool = True,
  batch_size: int = 500,
  interval_secs: float = 10.0,
  timeout_secs: float | None = None,
) -> np.ndarray | None:
  """Measures checkpoints in `config.train_dir`, in float32.

  Prints the precision @ 1 of each and writes it to TensorBoard, with the
  precision and the recall of every class (see `confusion`) and a picture of
  the confusion matrix.

  Args:
    config: The run: where it is, and its data set.
    eval_dir: Where the TensorBoard summaries go.
    run_once: Whether to measure the newest checkpoint only.
    batch_size: Images at a time.
    interval_secs: Seconds between measurements.
    timeout_secs: How long to wait for a new checkpoint.

  Returns:
    The last confusion matrix, or None if there was no checkpoint in time.

  Raises:
    checkpoints.CheckpointError: If there is none, or it is of another model.
    sources.DataError: If the data set cannot be read.
    ValueError: If a number is out of range.
  """
  import tensorflow as tf

  from cifar10 import model as model_lib
  from cifar10 import sources
  from tf_replicas import evaluation

  source = sources.find(config.dataset, config.data_dir)
  model = model_lib.build()
  count = _counter(model, source, batch_size)
  eval_dir = eval_dir or os.path.join(config.train_dir, "eval")
  writer = tf.summary.create_file_writer(eval_dir)
  can_draw = confusion.can_draw()
  if not can_draw:
    _say("no picture of the confusion matrix: matplotlib is not installed")

  def measure(global_step, values):
    evaluation.load_into_keras(model, values)
    matrix = count()
    _say(
      f"{datetime.datetime.now()}: precision @ 1 ="
      f" {confusion.accuracy(matrix):.4f} [{matrix.sum()} examples]"
    )
    with writer.as_default(step=global_step):
      for name, value in confusion.scalars(matrix).items():
        tf.summary.scalar(name, value)
      if can_draw:
        picture = confusion.picture(matrix)[np.newaxis]
        tf.summary.image("confusion_matrix", picture)
    writer.flush()
    return matrix

  if run_once:
    return evaluation.evaluate_once(config.train_dir, measure)
  return evaluation.evaluate_continuously(
    config.train_dir,
    measure,
    interval_secs=interval_secs,
    timeout_secs=timeout_secs,
  )


def _counter(model, source, batch_size: int) -> Callable[[], np.ndarray]:
  """Returns what counts each test image once, into a confusion matrix."""
  import tensorflow as tf

  from cifar10 import inputs

  @tf.function(reduce_retracing=True)
  def confused(images, labels):
    predictions = tf.argmax(model(images, training=False), axis=-1)
    return tf.math.confusion_matrix(
      labels, predictions, config_lib.NUM_CLASSES, dtype=tf.int64
    )

  batches = inputs.eval_batches(source, batch_size)
  return lambda: np.sum([confused(*batch) for batch in batches], axis=0)


def _say(line: str) -> None:
  print(line, flush=True)


def main(argv: Sequence[str]) -> None:
  del argv
  with program.quiet_stderr():
    from cifar10 import sources
    from tf_replicas import checkpoints
    from tf_replicas import devices

  given = {
    name: FLAGS[name].value
    for name in ("dataset", "data_dir")
    if FLAGS[name].value is not None
  }
  with program.one_line_errors(
    usage=(ValueError, checkpoints.CheckpointError, sources.DataError),
    run_time=program.RUN_TIME_ERRORS,
  ):
    config = config_lib.of_run(FLAGS.train_dir, **given)
    # Takes as much GPU memory as it needs, for training may run beside it.
    devices.configure(None)
    matrix = evaluate(
      config,
      FLAGS.eval_dir,
      run_once=FLAGS.run_once,
      batch_size=FLAGS.batch_size,
      interval_secs=FLAGS.eval_interval_secs,
      timeout_secs=FLAGS.timeout_secs,
    )
    if matrix is None:
      raise TimeoutError(f"No checkpoint file found in {FLAGS.train_dir}")
    _say(confusion.table(matrix))


if __name__ == "__main__":
  define_flags()
  command_line.start(main)
