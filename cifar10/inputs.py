"""Makes batches of images for training and evaluation.

The images are not constants of a graph: a dataset reads its source when it is
first iterated, on the machine that iterates it. So a dataset function may run
on a remote worker. Every batch is gathered from memory and distorted as a
whole, so that one core prepares some forty thousand images per second.
AutoGraph is turned off, since it is not needed and would make the start slow.
"""

import tensorflow as tf

from cifar10 import config
from cifar10 import distortions
from cifar10 import sources
from tf_replicas.programs import fields

# The number of batches made at a time, and of finished batches that may wait.
PARALLEL_BATCHES = 2
PREFETCHED_BATCHES = 4

# Largest distance, in pixels, from a crop to the middle one after
# `centered_from`.
CENTERED_MAX_SHIFT = 2
# The same if crops are resized, and the largest difference, in pixels, to the
# size of crops in evaluation.
CENTERED_MAX_SHIFT_RESIZED = 1
CENTERED_MAX_RESIZE = 1.0


@tf.autograph.experimental.do_not_convert
def train_dataset(
  source: sources.Source,
  *,
  batch_size: int,
  seed: int,
  num_shards: int = 1,
  shard_index: int | tf.Tensor = 0,
  start_example: int | tf.Tensor = 0,
  used_share: float = 1.0,
  distort_colors: bool = True,
  centered_from: int | None = None,
  crop_sizes: config.CropSizes | None = None,
  numbers: tf.data.Dataset | None = None,
) -> tf.data.Dataset:
  """Makes endless batches of distorted training images for one worker.

  All workers share one stream of examples: for each epoch, a different
  permutation of the training set, one after another (Goyal et al. 2017, remark
  4). The stream is cut into global batches of `num_shards * batch_size`
  examples. Worker k takes the k-th of `num_shards` equal slices of each global
  batch. So

  *   every example is in one worker's batch once per epoch, without a remainder
      (a global batch may reach into the next epoch);
  *   n workers' batches put together are, image for image and distortions
      included, the batch of one worker with an n times larger batch.

  Args:
    source: The data, which is read when the dataset is first iterated.
    batch_size: Number of images in a batch of this worker.
    seed: Seed of order and distortions.
    num_shards: Number of workers.
    shard_index: Index of this worker, from 0 on; may be a scalar tensor, as in
      the dataset function of an in-graph worker.
    start_example: The position in the stream to begin at when a run is resumed:
      the number of examples that all workers have drawn so far. The dataset
      begins with the global batch that contains this example, so that workers
      never share an example, even if they start at different times. Skipping
      costs nothing.
    used_share: Share of the examples of a global batch that updates use. It is
      below 1 with backup workers: an update does not wait for all workers.
    distort_colors: Whether brightness and contrast change.
    centered_from: Number of examples used by updates after which images are
      cropped near the middle, as in evaluation; None for never.
    crop_sizes: Sizes of crops, which are then resized to 24 pixels. None: all
      crops have 24 pixels.
    numbers: The numbers, int64 scalars, of the batches to make: batch k of the
      stream, cut into batches of `batch_size` examples. The shard and
      `start_example` then have no meaning, and must have their defaults. None:
      this worker's slices of all global batches.

  Returns:
    A dataset of float32 images `[batch_size, 24, 24, 3]` and int64 labels
    `[batch_size]`.

  Raises:
    ValueError: If a number is out of range.
  """
  fields.require("batch_size", batch_size, batch_size >= 1, "positive")
  fields.require("num_shards", num_shards, num_shards >= 1, "positive")
  if isinstance(shard_index, int) and not 0 <= shard_index < num_shards:
    raise ValueError(
      f"`shard_index` must be in [0, {num_shards - 1}]. "
      f"Received: {shard_index}."
    )
  global_batch = num_shards * batch_size
  order_seed, distortion_seed = tf.unstack(
    tf.random.split(tf.constant([seed, 0], tf.int64), 2), num=2
  )
  first = tf.cast(shard_index, tf.int32) * batch_size

  def mine(values):
    return tf.ensure_shape(values[first : first + batch_size], [batch_size])

  used = max(1, round(global_batch * used_share))
  if numbers is None:
    order = _order(
      source.num_train, global_batch, order_seed, start_example, used
    )
  else:
    order = _leased_order(
      numbers, source.num_train, batch_size, order_seed, used
    )

  def batches(images, labels):
    def batch(position, indices):
      step_seed = tf.random.fold_in(distortion_seed, position)
      is_centered = centered_from is not None and position >= centered_from
      draws = distortions.draw(
        step_seed, global_batch, **_crops(crop_sizes, is_centered)
      )
      chosen = mine(indices)
      distorted = distortions.apply(
        tf.gather(images, chosen),
        distortions.Distortions(*map(mine, draws)),
        colors=distort_colors,
      )
      return distorted, tf.gather(labels, chosen)

    return order.map(
      batch, num_parallel_calls=PARALLEL_BATCHES, deterministic=True
    ).prefetch(PREFETCHED_BATCHES)

  dataset = _examples(source, "train").flat_map(batches)
  return dataset.apply(
    tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
  )


def _crops(
  sizes: config.CropSizes | None, is_centered: tf.Tensor | bool
) -> dict:
  """Returns the arguments of `distortions.draw` that concern crops.

  Args:
    sizes: The sizes of crops; None if all have 24 pixels.
    is_centered: Whether crops are near the middle of images, as in the last
      part of a training.
  """
  if sizes is None:
    shift = tf.where(is_centered, CENTERED_MAX_SHIFT, distortions.MAX_SHIFT)
    return {"max_shift": shift}
  least = max(sizes.evaluation - CENTERED_MAX_RESIZE, 1)
  largest = min(sizes.evaluation + CENTERED_MAX_RESIZE, config.RECORD_SIZE)
  return {
    "max_shift": tf.where(
      is_centered, CENTERED_MAX_SHIFT_RESIZED, config.RECORD_SIZE
    ),
    "sizes": (
      tf.where(is_centered, least, sizes.smallest),
      tf.where(is_centered, largest, sizes.largest),
    ),
  }


@tf.autograph.experimental.do_not_convert
def eval_batches(
  source: sources.Source,
  batch_size: int,
  *,
  split: str = "test",
  crop_size: float = config.IMAGE_SIZE,
  num_views: int = 1,
) -> tf.data.Dataset:
  """Makes batches for evaluation, with every image in exactly one batch.

  Args:
    source: The data, which is read when the dataset is first iterated.
    batch_size: Number of images in a batch; the last batch may be smaller.
    split: `test`, or `train` to measure on the training set.
    crop_size: Height and width of a crop, which is resized to 24 pixels.
    num_views: Number of views (crops, possibly mirrored) of an image, one of
      `config.VIEWS`.

  Returns:
    A finite dataset of float32 images `[num_views * batch, 24, 24, 3]`, in the
    order of `distortions.views`, and int64 labels `[batch]`.

  Raises:
    ValueError: If `batch_size` is not positive or the split is unknown.
  """
  fields.require("batch_size", batch_size, batch_size >= 1, "positive")
  sizes = {"train": source.num_train, "test": source.num_test}
  if split not in sizes:
    raise ValueError(f"`split` must be train or test. Received: {split!r}.")
  dataset = _examples(source, split).flat_map(
    lambda images, labels: (
      tf.data.Dataset.from_tensor_slices((images, labels))
      .batch(batch_size)
      .map(
        lambda images, labels: (
          distortions.views(images, crop_size, num_views),
          labels,
        )
      )
      .prefetch(PREFETCHED_BATCHES)
    )
  )
  return dataset.apply(
    tf.data.experimental.assert_cardinality(-(-sizes[split] // batch_size))
  )


def _examples(source: sources.Source, split: str) -> tf.data.Dataset:
  """Makes a dataset with one element: all images and labels of a data set.

  The images are read when the dataset is iterated. They are not tensors that
  the dataset captures, since the runtime copies captured tensors into the
  dataset's graph as constants each time it rewrites the graph (TF 2.21).

  Args:
    source: The data set.
    split: `train` or `test`.
  """

  def read(_):
    images, labels = source.read(split)
    size = config.RECORD_SIZE
    return (
      tf.ensure_shape(images, [None, size, size, 3]),
      tf.ensure_shape(labels, [None]),
    )

  return tf.data.Dataset.from_tensors(0).map(read)


def _leased_order(
  numbers: tf.data.Dataset,
  num_examples: int,
  batch_size: int,
  seed: tf.Tensor,
  step: int,
) -> tf.data.Dataset:
  """Makes a dataset with the indices of the examples of numbered batches.

  Args:
    numbers: The numbers of the batches, int64 scalars.
    num_examples: The number of training examples.
    batch_size: The number of examples in a batch.
    seed: The seed of the order, which is that of `_order`.
    step: The number of examples of a batch that updates use.

  Returns:
    A dataset of (number of examples used before, indices `[batch_size]`).
  """
  num_epochs = -(-batch_size // num_examples) + 1  # That a batch may touch.

  def one(number):
    start = number * batch_size
    epochs = [
      _permutation(num_examples, seed, start // num_examples + i)
      for i in range(num_epochs)
    ]
    begin = start % num_examples
    return number * step, tf.concat(epochs, 0)[begin : begin + batch_size]

  return numbers.map(one)


def _permutation(
  num_examples: int, seed: tf.Tensor, epoch: tf.Tensor
) -> tf.Tensor:
  """Returns the order of all examples in an epoch, int32 [num_examples]."""
  return tf.random.experimental.stateless_shuffle(
    tf.range(num_examples), tf.random.fold_in(seed, epoch)
  )


def _order(
  num_examples: int,
  global_batch: int,
  seed: tf.Tensor,
  start_example: int | tf.Tensor,
  step: int,
) -> tf.data.Dataset:
  """Makes a dataset with the indices of the examples of each global batch.

  A global batch is the batches of all workers for one step.

  Args:
    num_examples: The number of training examples.
    global_batch: The number of examples in a global batch.
    seed: The seed of the order.
    start_example: The number of examples drawn before, when a run is resumed.
    step: The number of examples of a global batch that updates use.

  Returns:
    A dataset with one pair per global batch: the number of examples that
    updates used before it, and the indices of its examples, `[global_batch]`.
  """
  number = tf.cast(start_example, tf.int64) // global_batch
  start = number * global_batch
  first_epoch = start // num_examples

  def permutation(epoch):
    order = _permutation(num_examples, seed, epoch)
    skipped = tf.where(epoch == first_epoch, start % num_examples, 0)
    return order[skipped:]

  indices = (
    tf.data.Dataset.counter(first_epoch)
    .map(permutation)
    .rebatch(global_batch, drop_remainder=True)
  )
  positions = tf.data.Dataset.counter(
    number * step, tf.constant(step, tf.int64)
  )
  return tf.data.Dataset.zip((positions, indices))
