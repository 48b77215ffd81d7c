"""Measures four remarks on the step from one replica to k replicas.

The remarks are those of Goyal et al. 2017, section 3. Each one names a mistake
that is easily made, and that causes no error message.
"""

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from cifar10 import config
from cifar10 import inputs
from cifar10 import sources
from experiments.support import claims
from experiments.support import one_thread
from experiments.support import small_network
from tf_replicas.store import inner_optimizer
from tf_replicas.store import placement


def measure(model, parameters, pictures, seed: int) -> dict[str, dict]:
  """Measures the numbers of all four remarks.

  Args:
    model: A network as `small_network.build` returns it.
    parameters: The values of the network's parameters at which gradients are
      computed.
    pictures: The pictures for which gradients are computed.
    seed: The seed of the shuffling of examples.

  Returns:
    The numbers of each remark, by the name of the remark.
  """
  return {
    "scaled_loss": scaled_loss(
      model, parameters, pictures, tf.range(64), factor=4.0
    ),
    "momentum": first_update_of_new_rate(factor=16.0),
    "whole_batch": replicas_of_whole_batch(model, parameters, pictures),
    "shuffle": one_shuffle(seed),
  }


def find(measurements: Sequence[dict]) -> list[claims.Finding]:
  """Returns what the remarks claim, as findings: numbers with bounds.

  Args:
    measurements: Results of `measure`, one per seed.
  """

  def each(remark, number):
    return [m[remark][number] for m in measurements]

  return [
    claims.Finding(
      "remark 1 (an identity): loss x 4 against rate x 4 without weight decay:"
      " difference",
      each("scaled_loss", "without_decay"),
      "of the update",
    ),
    claims.Finding(
      "remark 1 (an identity): the same with weight decay: difference",
      each("scaled_loss", "with_decay"),
      "of 3 x rate x decay x |parameters|",
    ),
    claims.Finding(
      "remark 2 (an identity): first update after the rate grew 16 times,"
      " without `momentum_correction`",
      each("momentum", "plain"),
      "of what it should be",
    ),
    claims.Finding(
      "remark 2: the same with the library's `momentum_correction`",
      each("momentum", "corrected"),
      "of what it should be",
      least=1 - 1e-4,
      most=1 + 1e-4,
    ),
    claims.Finding(
      "remark 3 (an identity): mean of 4 replicas' gradients against that of"
      " all examples: difference",
      each("whole_batch", "mean"),
      "of its size",
    ),
    claims.Finding(
      "remark 3 (an identity): their sum, as if each divided by its own batch"
      " alone",
      each("whole_batch", "sum"),
      "of its size",
    ),
    claims.Finding(
      "remark 4: examples of an epoch that 4 workers see twice or not at all",
      [sum(m["shuffle"].values()) for m in measurements],
      most=0,
    ),
  ]


def scaled_loss(
  model, parameters, pictures, chosen: tf.Tensor, *, factor: float
) -> dict[str, float]:
  """Measures remark 1: scaling the loss is not scaling the learning rate.

  An update with c times the loss is compared with one at c times the rate. They
  are equal without weight decay, but not with it.

  Args:
    model: A network as `small_network.build` returns it.
    parameters: The values of its parameters at which the gradient is computed.
    pictures: All pictures.
    chosen: The indices of the pictures of one batch.
    factor: The factor c.

  Returns:
    How much the two updates differ. `without_decay`: as a share of the length
    of the update. `with_decay`: as a share of the length that follows from
    theory, (c - 1) * rate * decay * |parameters|.
  """
  rate, decay = 0.01, 1e-3

  def update(loss_factor, rate, decay):
    with tf.GradientTape() as tape:
      tape.watch(parameters)
      loss = small_network.loss(model, parameters, pictures, chosen)
      norm = tf.add_n([tf.nn.l2_loss(p) for p in parameters])
      total = loss_factor * loss + decay * norm
    return [-rate * g for g in tape.gradient(total, parameters)]

  def difference(decay):
    of_loss = update(factor, rate, decay)
    of_rate = update(1.0, factor * rate, decay)
    return _distance(of_loss, of_rate), _norm(of_rate)

  without, size = difference(0.0)
  expected = (factor - 1) * rate * decay * _norm(parameters)
  return {
    "without_decay": without / size,
    "with_decay": difference(decay)[0] / expected,
  }


def first_update_of_new_rate(factor: float) -> dict[str, float]:
  """Measures remark 2: Keras' momentum includes the learning rate.

  After many equal gradients, the rate is multiplied by a factor. Then the first
  update should be the new rate times the sum of gradients that momentum stands
  for.

  Args:
    factor: The factor by which the rate is multiplied.

  Returns:
    The first update with the new rate, as a share of what it should be:
    `plain`, by Keras' momentum as it is, and `corrected`, with
    `momentum_correction`.
  """
  expected = -0.01 * factor / (1 - small_network.MOMENTUM)
  return {
    name: _first_update(factor, is_corrected=is_corrected) / expected
    for name, is_corrected in (("plain", False), ("corrected", True))
  }


def _first_update(factor: float, *, is_corrected: bool) -> float:
  """Returns the change of a weight in the first update with a new rate.

  The weight is updated by the library's optimizer, with momentum, and its
  gradient is always 1.

  Args:
    factor: The factor by which the rate is multiplied before that update.
    is_corrected: Whether `momentum_correction` is used.
  """
  store = one_thread.local_store(
    [placement.VariableSpec("weight", (), "float32", True)]
  )
  store.assign(0, tf.constant(0.0))
  inner = inner_optimizer.InnerOptimizer(
    keras.optimizers.SGD(0.01, momentum=small_network.MOMENTUM),
    momentum_correction=is_corrected,
  )
  inner.build(store)

  @tf.function(autograph=False)
  def update():
    inner.apply(
      0, [tf.constant(1.0)], store.variables(0), tf.constant(0, tf.int64)
    )

  for _ in range(200):
    inner.refresh()
    update()
  inner.optimizer.learning_rate = 0.01 * factor
  before = float(store.read()[0])
  inner.refresh()
  update()
  return float(store.read()[0]) - before


def replicas_of_whole_batch(model, parameters, pictures) -> dict[str, float]:
  """Measures remark 3: the mean of the replicas' gradients must be applied.

  It compares the gradients of 4 replicas with 16 pictures each with the
  gradient of all 64 pictures.

  Args:
    model: A network as `small_network.build` returns it.
    parameters: The values of its parameters at which gradients are computed.
    pictures: Pictures, of which the first 64 are used.

  Returns:
    `mean`: the distance between the mean of the 4 gradients and that of all
    pictures. `sum`: the length of the sum of the 4 gradients. Both are shares
    of the length of the gradient of all pictures.
  """
  whole = tf.range(64)

  def gradient(chosen):
    return small_network.gradients(model, parameters, pictures, chosen)[1]

  parts = [gradient(part) for part in tf.split(whole, 4)]
  sums = [tf.add_n(same) for same in zip(*parts, strict=True)]
  of_all = gradient(whole)
  return {
    "mean": _distance([s / 4 for s in sums], of_all) / _norm(of_all),
    "sum": _norm(sums) / _norm(of_all),
  }


def one_shuffle(seed: int) -> dict[str, int]:
  """Measures remark 4: all workers must share one shuffling of the examples.

  It counts what 4 workers read in an epoch of 240 examples by `cifar10.inputs`.

  Args:
    seed: The seed of the shuffling.

  Returns:
    `repeated`: the number of examples that are read more than once. `missing`:
    the number of examples that are not read.
  """
  num_examples, num_workers, batch_size = 240, 4, 5
  size = config.RECORD_SIZE

  def read(split):  # The label tells which example it is.
    del split
    images = tf.zeros([num_examples, size, size, 3], tf.uint8)
    return images, tf.range(num_examples, dtype=tf.int64)

  source = sources.Source("numbered", num_examples, 0, read)
  seen = np.zeros([num_examples], np.int64)
  for worker in range(num_workers):
    dataset = inputs.train_dataset(
      source,
      batch_size=batch_size,
      seed=seed,
      num_shards=num_workers,
      shard_index=worker,
    )
    steps = num_examples // (num_workers * batch_size)
    for _, labels in dataset.take(steps):
      np.add.at(seen, labels.numpy(), 1)
  return {"repeated": int((seen > 1).sum()), "missing": int((seen == 0).sum())}


def _distance(some, others) -> float:
  return _norm([a - b for a, b in zip(some, others, strict=True)])


def _norm(tensors) -> float:
  return float(tf.linalg.global_norm(tensors))
