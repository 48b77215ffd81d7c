"""A small model for the tests of drivers that need no parameter servers.

The batch of an update depends only on the number of the update. The replicas
divide it among themselves.
"""

import numpy as np
import tensorflow as tf

from tf_replicas.replica import model_replica
from tf_replicas.rules.sync import sync_replicas
from tf_replicas.store import moving_averages

WORDS, WIDTH, CLASSES = 10, 4, 3
# Of a whole step. Divisible by 1, 2, 3 and 4 towers.
BATCH = 12
PATHS = ("table", "kernel", "bias", "unused")


def variables(seed=3):
  """Makes the variables of the model, with random values.

  They are a table of which few rows are used, a matrix, a bias, and a variable
  that has no gradient.
  """
  rng = np.random.default_rng(seed)

  def normal(*shape):
    return (rng.normal(size=shape) / 2).astype("float32")

  return [
    tf.Variable(normal(WORDS, WIDTH), name="table"),
    tf.Variable(normal(WIDTH, CLASSES), name="kernel"),
    tf.Variable(np.zeros([CLASSES], "float32"), name="bias"),
    tf.Variable(np.ones([2], "float32"), name="unused"),
  ]


def loss_fn(parameters, words, labels):
  """Computes the mean cross entropy over the words of a batch."""
  table, kernel, bias, _ = parameters
  logits = tf.tanh(tf.gather(table, words)) @ kernel + bias
  return tf.reduce_mean(
    tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
  )


def dataset_fn(num_shards, shard_index, start_example):
  """Returns the data set of a replica: its equal part of every batch.

  Args:
    num_shards: Number of replicas.
    shard_index: Number of this replica.
    start_example: Number of examples that all replicas have drawn before.
  """
  share = BATCH // num_shards
  begin = shard_index * share

  def batch(number):
    seed = tf.stack([tf.constant(5, tf.int64), number])
    # Few words, so that towers touch the same rows of the table.
    words = tf.random.stateless_uniform([BATCH], seed, 0, WORDS // 2, tf.int32)
    words = words[begin : begin + share]
    return words, words % CLASSES

  numbers = tf.data.Dataset.range(start_example // BATCH, 10**6)
  return numbers.map(batch)


def poisoned(what, *, step, shard):
  """Makes functions of a model whose loss or gradient is infinite once.

  Args:
    what: Which of them is infinite: "loss" or "gradient".
    step: The global step at which this happens.
    shard: The number of the replica to which this happens.

  Returns:
    (loss_fn, dataset_fn), as a `Replica` needs them.
  """

  def bad_dataset_fn(num_shards, shard_index, start_example):
    data = dataset_fn(num_shards, shard_index, start_example)
    numbers = tf.data.Dataset.range(start_example // BATCH, 10**6)
    return tf.data.Dataset.zip(data, numbers).map(
      lambda batch, number: (
        *batch,
        tf.repeat((number == step) & (shard_index == shard), len(batch[0])),
      )
    )

  def bad_loss_fn(parameters, words, labels, is_bad):
    loss = loss_fn(parameters, words, labels)
    factor = tf.where(is_bad[0], float("inf"), 0.0)
    if what == "loss":
      return loss + factor
    return loss + _no_value(parameters[2], factor)

  return bad_loss_fn, bad_dataset_fn


@tf.custom_gradient
def _no_value(x, factor):
  """Returns 0, but its derivative with respect to `x` is `factor`."""
  return tf.zeros([]), lambda up: (up * factor * tf.ones_like(x), None)


def replica(
  devices=(), *, loss_fn=loss_fn, dataset_fn=dataset_fn, seed=3, **more
):
  """Makes the replica of the small model.

  Args:
    devices: The devices that compute, each with a copy of the model.
    loss_fn: The loss function.
    dataset_fn: Makes the data set.
    seed: Seed of the variables' initial values.
    **more: Further arguments of `Replica`.
  """
  return model_replica.Replica(
    variables(seed), loss_fn, dataset_fn, devices, **more
  )


def rule(optimizer, num_replicas=1, **options):
  """Makes a rule of synchronous updates, with averages of the variables.

  Args:
    optimizer: The Keras optimizer.
    num_replicas: Number of replicas, whose gradients are all used.
    **options: Further arguments of `SyncReplicasOptimizer`.
  """
  options.setdefault("variable_averages", moving_averages.MovingAverages(0.9))
  return sync_replicas.SyncReplicasOptimizer(optimizer, num_replicas, **options)


def state_of(driver):
  """Returns the arrays, by name, that a checkpoint of the driver would hold."""
  return {k: np.asarray(v) for k, v in driver.store.state().items()}


def assert_close(ours, theirs, *, rtol=1e-5, atol=1e-6):
  """Checks that two dicts of arrays have the same names and close values."""
  assert sorted(ours) == sorted(theirs), (sorted(ours), sorted(theirs))
  for name, value in theirs.items():
    np.testing.assert_allclose(
      ours[name], value, rtol=rtol, atol=atol, err_msg=name
    )
