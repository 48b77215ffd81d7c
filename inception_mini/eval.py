"""Measures the precision and recall of an Inception training's checkpoints.

  python -m inception_mini.eval --train_dir=/tmp/run [--run_once]

With `--run_once`, only the newest checkpoint is measured. Otherwise every new
checkpoint is measured until the training has ended. The network uses the moving
averages of its weights, and of the means and variances of batch normalization.
"""

import dataclasses
import datetime
import os
from collections.abc import Callable
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from absl import flags

from inception_mini import config as config_lib
from tf_replicas.programs import command_line
from tf_replicas.programs import fields
from tf_replicas.programs import run_config

FLAGS = flags.FLAGS

_K = 5


class Result(NamedTuple):
  """The precision and recall of one checkpoint.

  Attributes:
    precision: The fraction of images whose label is the most likely class
      (precision @ 1).
    recall: The fraction of images whose label is among the five most likely
      classes (recall @ 5).
    num_examples: Number of images.
  """

  precision: float
  recall: float
  num_examples: int


def evaluate(
  config: config_lib.Config,
  eval_dir: str | None = None,
  *,
  subset: str = "validation",
  run_once: bool = True,
  batch_size: int = 100,
  interval_secs: float = 10.0,
  timeout_secs: float | None = None,
) -> Result | None:
  """Measures the precision and recall of a training's checkpoints, in float32.

  The checkpoints are those in `config.train_dir`. For each measured checkpoint,
  prints the precision @ 1 (the fraction of images whose label is the most
  likely class) and the recall @ 5 (the fraction whose label is among the five
  most likely), and writes them to TensorBoard.

  Args:
    config: The settings of the training, with its directory, network and data
      set.
    eval_dir: Directory of the TensorBoard summaries. None: `eval` in the train
      directory, or `eval_train` if `subset` is `train`.
    subset: The images to measure on: `validation` or `train`.
    run_once: Whether to measure only the newest checkpoint. If False, measures
      new checkpoints until the training has ended.
    batch_size: Number of images in a batch.
    interval_secs: The least time, in seconds, between the starts of two
      measurements. Not used with `run_once`.
    timeout_secs: Returns after so many seconds without a new checkpoint. None:
      waits until the training has ended. Not used with `run_once`.

  Returns:
    The result for the checkpoint that was measured last. Without `run_once`,
    None if no checkpoint appeared before the time limit or the end of the
    training.

  Raises:
    checkpoints.CheckpointError: If a checkpoint is damaged or belongs to
      another model. With `run_once`, also if there is no checkpoint.
    sources.DataError: If the data set cannot be read.
    ValueError: If a number is out of range.
  """

  from inception_mini import model as model_lib
  from inception_mini import sources
  from tf_replicas.session import evaluation
  from tf_replicas.session import reports

  source = sources.find(config.dataset, config.data_dir, subsets=(subset,))
  model = model_lib.of_config(
    dataclasses.replace(config, compute_dtype="float32"), source.num_classes
  )
  count = _counter(model, source, config, subset, batch_size)
  which = "" if subset == "validation" else f"_{subset}"
  eval_dir = eval_dir or os.path.join(config.train_dir, f"eval{which}")
  summaries = reports.Summaries(eval_dir)

  def measure(global_step, values):
    evaluation.load_into_keras(model, values)
    result = count()
    print(
      f"{datetime.datetime.now()}: precision @ 1 = {result.precision:.4f}"
      f" recall @ {_K} = {result.recall:.4f} [{result.num_examples} examples]",
      flush=True,
    )
    scalars = {"precision @ 1": result.precision}
    scalars[f"recall @ {_K}"] = result.recall
    summaries.write(global_step, scalars)
    return result

  return evaluation.evaluate(
    config.train_dir,
    measure,
    run_once=run_once,
    interval_secs=interval_secs,
    timeout_secs=timeout_secs,
  )


def _counter(model, source, config, subset, batch_size) -> Callable[[], Result]:
  """Makes a function that measures the network's precision and recall.

  Args:
    model: The network.
    source: The data set.
    config: The settings of the training.
    subset: `validation` or `train`.
    batch_size: The number of images in a batch.

  Returns:
    A function without arguments, which reads each image of the subset once and
    returns the result for the model's present variables.
  """
  import tensorflow as tf

  from inception_mini import inputs
  from inception_mini import model as model_lib

  @tf.function(reduce_retracing=True, autograph=False)
  def hits(images, labels):
    logits = model(images, training=False)[model_lib.LOGITS]
    k = min(_K, logits.shape[-1])
    found = [tf.math.in_top_k(labels, logits, n) for n in (1, k)]
    found.append(tf.ones_like(found[0]))
    return tf.reduce_sum(tf.cast(tf.stack(found), tf.int64), axis=1)

  batches = inputs.eval_batches(source, config, batch_size, subset=subset)

  def count():
    first, among, total = np.sum([hits(*batch) for batch in batches], axis=0)
    return Result(first / total, among / total, int(total))

  return count


def _evaluate() -> Result | None:
  given = command_line.given("dataset", "data_dir", "image_size")
  config = run_config.of_run(config_lib.Config, FLAGS.train_dir, **given)
  return evaluate(
    config,
    subset=FLAGS.subset,
    batch_size=FLAGS.batch_size,
    **fields.given(command_line.EvaluationOptions),
  )


def main(argv: Sequence[str]) -> None:
  del argv
  command_line.evaluate(_evaluate)


if __name__ == "__main__":
  command_line.define_evaluation_flags(
    config_lib.Config.train_dir, batch_size=100
  )
  fields.define_flag(
    "image_size",
    int,
    None,
    "As in training; default: the run's",
    group=command_line.EVALUATION,
  )
  fields.define_flag(
    "subset",
    str,
    "validation",
    "The images to measure on",
    group=command_line.EVALUATION,
    choices=("validation", "train"),
  )
  command_line.start(main)
