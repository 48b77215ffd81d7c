"""Measures checkpoints of a CIFAR-10 training with their moving averages.

  python -m cifar10.eval --train_dir=/tmp/cifar10_train [--run_once]

Without --run_once every new checkpoint is measured until training has ended.
"""

import datetime
import functools
import os

from absl import app
from absl import flags
from absl import logging

from cifar10 import config as config_lib
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
) -> float | None:
  """Measures checkpoints in `config.train_dir`.

  Args:
    config: The run: where it is, and its data set.
    eval_dir: Where the TensorBoard summaries go.
    run_once: Whether to measure the newest checkpoint only.
    batch_size: Images at a time.
    interval_secs: Seconds between measurements.
    timeout_secs: How long to wait for a new checkpoint.

  Returns:
    The last precision @ 1, or None if there was no checkpoint in time.

  Raises:
    checkpoints.CheckpointError: If there is none, or it is of another model.
    sources.DataError: If the data set cannot be read.
  """
  import tensorflow as tf

  from cifar10 import model as model_lib
  from cifar10 import sources
  from tf_replicas import evaluation

  source = sources.find(config.dataset, config.data_dir)
  eval_dir = eval_dir or os.path.join(config.train_dir, "eval")
  measure = functools.partial(
    _measure,
    model_lib.build(),
    source,
    tf.summary.create_file_writer(eval_dir),
    batch_size,
  )
  if run_once:
    return evaluation.evaluate_once(config.train_dir, measure)
  return evaluation.evaluate_continuously(
    config.train_dir,
    measure,
    interval_secs=interval_secs,
    timeout_secs=timeout_secs,
  )


def _measure(model, source, writer, batch_size, global_step, values) -> float:
  """The precision @ 1 of one checkpoint; each test image counts once."""
  import tensorflow as tf

  from cifar10 import inputs
  from tf_replicas import evaluation

  evaluation.load_into_keras(model, values)

  @tf.function(reduce_retracing=True)
  def count_correct(images, labels):
    predictions = tf.argmax(model(images, training=False), axis=-1)
    return tf.math.count_nonzero(predictions == labels)

  correct = examples = 0
  for images, labels in inputs.eval_batches(source, batch_size):
    correct += int(count_correct(images, labels))
    examples += len(labels)
  precision = correct / examples
  with writer.as_default(step=global_step):
    tf.summary.scalar("precision @ 1", precision)
  writer.flush()
  now = datetime.datetime.now()
  print(
    f"{now}: precision @ 1 = {precision:.4f} [{examples} examples]", flush=True
  )
  return precision


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
  if not FLAGS["verbosity"].present:
    logging.set_verbosity(logging.WARNING)
  with program.quiet_stderr():
    from cifar10 import sources
    from tf_replicas import checkpoints

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
    precision = evaluate(
      config,
      FLAGS.eval_dir,
      run_once=FLAGS.run_once,
      batch_size=FLAGS.batch_size,
      interval_secs=FLAGS.eval_interval_secs,
      timeout_secs=FLAGS.timeout_secs,
    )
    if precision is None:
      raise TimeoutError(f"No checkpoint file found in {FLAGS.train_dir}")


if __name__ == "__main__":
  define_flags()
  app.run(main)
