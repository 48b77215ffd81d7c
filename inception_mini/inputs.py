"""Makes batches of images for training and evaluation.

The examples of a data set are in several files, the shards. A raw example is a
stored image that is not decoded yet. Examples are shuffled and skipped as raw
examples. The dataset functions capture only file names and numbers, so they may
run on a remote worker. They turn AutoGraph off, which they do not need and
which would slow down the start.
"""

import tensorflow as tf

from inception_mini import config
from inception_mini import image_processing
from inception_mini import records
from inception_mini import sources
from tf_replicas.programs import fields

# The number of shards read in turn, of images processed at a time, and of
# batches prefetched.
INTERLEAVED_SHARDS = 4
PARALLEL_IMAGES = 4
PREFETCHED_BATCHES = 4
# The least number of units into which an epoch is divided for leases.
LEASED_UNITS = 64


@tf.autograph.experimental.do_not_convert
def train_dataset(
  source: sources.Source,
  settings: config.Config,
  *,
  batch_size: int | None = None,
  num_shards: int = 1,
  shard_index: int | tf.Tensor = 0,
  start_example: int | tf.Tensor = 0,
  with_seeds: bool = False,
  parallel_images: int = PARALLEL_IMAGES,
  leases: tf.data.Dataset | None = None,
) -> tf.data.Dataset:
  """Makes endless batches of distorted training images for one worker.

  In every epoch, the shards (files) of the data set are distributed anew among
  the n workers, the same number to each. If shards are left over, every worker
  reads them and uses every n-th example of them. So all shards are shared if
  there are fewer shards than workers. This has these consequences:

  * In every epoch, each example is used by one worker. A worker's epochs follow
    each other without a gap, so a batch may contain examples of two epochs.
  * The distortion of an example depends on the epoch, but not on the worker.

  Each worker draws examples at random from a buffer of
  `settings.shuffle_examples` raw examples, as in the TF1 program. Which
  examples share a batch depends on the number of workers.

  Args:
    source: The data, which is read when the dataset is iterated.
    settings: The settings, with image size, distortions, seed and buffer size.
    batch_size: Number of images in a batch of this worker. None:
      `settings.batch_size`.
    num_shards: Number n of workers.
    shard_index: Index of this worker, from 0 on. It may be a scalar tensor, as
      in the dataset function of an in-graph worker.
    start_example: Number of examples that all workers together have used so
      far, for a run that resumes from a checkpoint. Skipped examples of the
      current epoch are read, but not decoded.
    with_seeds: Whether to return random integers with each image, as seeds for
      dropout.
    parallel_images: Number of images decoded and distorted at the same time.
    leases: If workers may join the training: an endless dataset of the numbers
      that this worker leases (`leased_units`), int64 scalars, in place of
      `num_shards`, `shard_index` and `start_example`. The worker then uses the
      examples of these numbers only. None: workers have fixed parts.

  Returns:
    A dataset of float32 images `[batch, size, size, 3]` in [-1, 1] and int64
    labels `[batch]`; if `with_seeds`, also int32 seeds `[batch, 2]`. Its
    iterator raises `tf.errors.InvalidArgumentError` at a label that is out of
    range.

  Raises:
    ValueError: If an argument is out of range.
  """
  batch_size = settings.batch_size if batch_size is None else batch_size
  fields.require("batch_size", batch_size, batch_size >= 1, "positive")
  fields.require("num_shards", num_shards, num_shards >= 1, "positive")
  if isinstance(shard_index, int) and not 0 <= shard_index < num_shards:
    raise ValueError(
      f"`shard_index` must be in [0, {num_shards - 1}]. "
      f"Received: {shard_index}."
    )
  if source.num_train < num_shards:
    raise ValueError(
      f"`num_shards` must be at most the {source.num_train} training examples. "
      f"Received: {num_shards}."
    )
  deal = _Deal(
    source.lengths[records.TRAIN],
    num_workers=num_shards,
    worker=tf.cast(shard_index, tf.int64),
    seed=settings.seed,
  )

  num_classes = settings.num_classes or source.num_classes

  def image_and_label(epoch, number, raw):
    seed = tf.random.fold_in(
      tf.random.fold_in(deal.distortion_seed, epoch), number
    )
    seeds = tf.unstack(tf.random.split(seed, 2), num=2)
    example = source.decode(*raw)
    image = image_processing.distort(
      example.image,
      example.boxes,
      seeds[0],
      image_size=settings.image_size,
      min_crop_area=settings.min_crop_area,
      distort_color=settings.distort_color,
    )
    result = (image, _checked(example.label, num_classes))
    return (*result, tf.cast(seeds[1], tf.int32)) if with_seeds else result

  if leases is None:
    start = tf.cast(start_example, tf.int64) // num_shards
    examples = _raw_examples(source, deal, start, settings.shuffle_examples)
  else:
    examples = _leased_examples(source, deal, leases, settings.shuffle_examples)
  return (
    examples.map(
      image_and_label, num_parallel_calls=parallel_images, deterministic=True
    )
    .batch(batch_size, drop_remainder=True)
    .apply(
      tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
    )
    .prefetch(PREFETCHED_BATCHES)
  )


@tf.autograph.experimental.do_not_convert
def eval_batches(
  source: sources.Source,
  settings: config.Config,
  batch_size: int,
  *,
  subset: str = records.VALIDATION,
) -> tf.data.Dataset:
  """Makes batches for evaluation, with every image in exactly one batch.

  Args:
    source: The data, which is read when the dataset is iterated.
    settings: The settings, with the image size and with the fraction of the
      height and width to use.
    batch_size: Number of images in a batch; the last batch may be smaller.
    subset: `validation`, or `train` to measure on the training set.

  Returns:
    A finite dataset of float32 images `[batch, size, size, 3]` in [-1, 1] and
    int64 labels `[batch]`, always in the same order.

  Raises:
    ValueError: If `batch_size` is not positive or the subset is unknown.
  """
  fields.require("batch_size", batch_size, batch_size >= 1, "positive")
  if subset not in source.lengths:
    raise ValueError(
      f"`subset` must be one of {', '.join(source.lengths)}. "
      f"Received: {subset!r}."
    )

  num_classes = settings.num_classes or source.num_classes

  def image_and_label(*raw):
    example = source.decode(*raw)
    image = image_processing.center(
      example.image,
      image_size=settings.image_size,
      central_fraction=settings.central_fraction,
    )
    return image, _checked(example.label, num_classes)

  lengths = source.lengths[subset]
  dataset = (
    tf.data.Dataset.range(len(lengths))
    .flat_map(lambda shard: source.read(subset, shard))
    .map(
      image_and_label, num_parallel_calls=PARALLEL_IMAGES, deterministic=True
    )
    .batch(batch_size)
  )
  return dataset.apply(
    tf.data.experimental.assert_cardinality(-(-sum(lengths) // batch_size))
  ).prefetch(PREFETCHED_BATCHES)


class _Deal:
  """Decides which examples of which shards one worker uses in each epoch.

  A shard is one of the files of the data set. The decision depends only on the
  seed, the epoch, the worker and the number of workers.

  Attributes:
    distortion_seed: Seed of the distortions of images, `[2]`. It is the same
      for all workers.
  """

  def __init__(self, lengths, *, num_workers, worker, seed):
    self._lengths = lengths
    self._num_workers = num_workers
    self._worker = worker
    self._order_seed, self._buffer_seed, self.distortion_seed = tf.unstack(
      tf.random.split(tf.constant([seed, 0], tf.int64), 3), num=3
    )

  def parts(self, epoch):
    """Chooses the shards (files), or parts of them, that the worker uses.

    With n workers, a shard is used either by one worker, or by all workers,
    each of which uses every n-th example of it.

    Args:
      epoch: The index of the epoch.

    Returns:
      Four int64 tensors with an element per shard that the worker uses: the
      index of the shard; the index, within the shard, of the first example to
      use; the step from one example to the next, 1 or n; and the index, within
      the whole data set, of the shard's first example.
    """
    n, total = self._num_workers, len(self._lengths)
    whole = total // n * n
    order = tf.random.experimental.stateless_shuffle(
      tf.range(total, dtype=tf.int64),
      tf.random.fold_in(self._order_seed, epoch),
    )
    shards = tf.concat(
      [tf.reshape(order[:whole], [-1, n])[:, self._worker], order[whole:]], 0
    )
    mine = tf.zeros([whole // n], tf.int64)
    # The offset spreads the odd examples of several shards.
    shared = (self._worker + tf.range(total - whole, dtype=tf.int64)) % n
    strides = tf.concat([mine + 1, tf.zeros_like(shared) + n], 0)
    numbers = tf.gather(
      tf.cumsum(tf.constant(self._lengths, tf.int64), exclusive=True), shards
    )
    return shards, tf.concat([mine, shared], 0), strides, numbers

  def num_examples(self, epoch):
    """Computes how many examples the worker uses in an epoch, an int64 scalar.

    Args:
      epoch: The index of the epoch.
    """
    shards, first, strides, _ = self.parts(epoch)
    lengths = tf.gather(tf.constant(self._lengths, tf.int64), shards)
    return tf.reduce_sum((lengths - first + strides - 1) // strides)

  def epochs(self, start):
    """Makes an endless dataset of the worker's epochs, for a run that resumes.

    The epochs that the worker has finished are left out.

    Args:
      start: The number of examples that the worker has used before.

    Returns:
      A dataset of (index of the epoch, number of examples to skip in this
      epoch). The second number is 0 in all epochs but the first.
    """

    def pass_over(left, epoch):
      skipped = tf.minimum(left, self.num_examples(epoch))
      is_left = skipped < self.num_examples(epoch)
      return left - skipped, (epoch, skipped, is_left)

    epochs = tf.data.Dataset.counter(tf.constant(0, tf.int64))
    epochs = epochs.scan(start, pass_over)
    epochs = epochs.filter(lambda epoch, skipped, is_left: is_left)
    return epochs.map(lambda epoch, skipped, is_left: (epoch, skipped))

  def shuffle_seed(self, epoch):
    """Returns the seed of the worker's shuffle buffer in an epoch, an int64."""
    seed = tf.random.fold_in(self._buffer_seed, epoch)
    return tf.random.fold_in(seed, self._worker)[0]


def _raw_examples(source, deal, start, buffer_size):
  """Makes the endless stream of a worker's shuffled training examples.

  Args:
    source: The data.
    deal: Decides which examples the worker uses.
    start: The number of examples that the worker has used before.
    buffer_size: The number of examples in the shuffle buffer.

  Returns:
    A dataset of (epoch, index of the example in the whole data set, raw
    example). A raw example is a tuple of arguments for `source.decode`.
  """

  def epoch_of_examples(epoch, skipped):
    parts = tf.data.Dataset.from_tensor_slices(deal.parts(epoch))
    examples = parts.interleave(
      lambda *part: _part_of_shard(source, records.TRAIN, *part),
      cycle_length=INTERLEAVED_SHARDS,
      num_parallel_calls=INTERLEAVED_SHARDS,
      deterministic=True,
    )
    examples = examples.shuffle(
      min(buffer_size, source.num_train),
      seed=deal.shuffle_seed(epoch),
      reshuffle_each_iteration=False,
    )
    examples = examples.skip(skipped)
    return examples.map(lambda number, *raw: (epoch, number, raw))

  return deal.epochs(start).flat_map(epoch_of_examples)


def leased_units(source: sources.Source) -> int:
  """Returns into how many units of examples an epoch is divided for leases.

  Workers that join and leave *lease* units: each unit is used by the worker
  that takes its number. A unit is a shard (a file), or every n-th example of
  one if there are few shards. Units are numbered through all epochs.

  Args:
    source: The data.
  """
  total = len(source.lengths[records.TRAIN])
  return total * _units_per_shard(total)


def _units_per_shard(num_shards: int) -> int:
  return -(-LEASED_UNITS // num_shards)


def _leased_examples(source, deal, leases, buffer_size):
  """Makes the stream of shuffled training examples that a worker leases.

  Args:
    source: The data.
    deal: Decides on the order of the shards in each epoch; that of one worker.
    leases: The numbers of the units that the worker uses, int64 scalars:
      `leased_units` says what a unit is.
    buffer_size: The number of examples in the shuffle buffer.

  Returns:
    A dataset like that of `_raw_examples`.
  """
  per_shard = _units_per_shard(len(source.lengths[records.TRAIN]))
  units = leased_units(source)

  def unit(number):
    epoch, position = number // units, number % units
    shards, _, _, firsts = deal.parts(epoch)
    shard = position // per_shard
    return epoch, shards[shard], position % per_shard, firsts[shard]

  def examples_of(epoch, shard, first, number):
    stride = tf.constant(per_shard, tf.int64)
    examples = _part_of_shard(
      source, records.TRAIN, shard, first, stride, number
    )
    return examples.map(lambda number, *raw: (epoch, number, raw))

  # Not in parallel: that would lease more units ahead.
  examples = leases.map(unit).interleave(
    examples_of, cycle_length=INTERLEAVED_SHARDS
  )
  return examples.shuffle(
    min(buffer_size, source.num_train),
    seed=deal.shuffle_seed(tf.constant(0, tf.int64)),
    reshuffle_each_iteration=False,
  )


def _part_of_shard(source, subset, shard, first, stride, number):
  """Makes a dataset of every `stride`-th example of a shard, not yet decoded.

  Args:
    source: The data.
    subset: `train` or `validation`.
    shard: The index of the shard, one of the files of the data set.
    first: The index, within the shard, of the first example to use.
    stride: The step from one example to the next.
    number: The index, within the whole data set, of the shard's first example.

  Returns:
    A dataset of (index of the example in the whole data set, raw example...).
  """
  examples = source.read(subset, shard).enumerate()
  examples = examples.filter(lambda i, raw: i % stride == first)
  return examples.map(
    lambda i, raw: (number + i, *(raw if isinstance(raw, tuple) else (raw,)))
  )


def _checked(label, num_classes):
  """Returns a label that raises an error at run time if it is out of range.

  Without this check, the loss would not report such a label.

  Args:
    label: The label, an integer scalar.
    num_classes: Labels must be in [0, num_classes). None: no check.
  """
  if num_classes is None:
    return label
  is_one = (label >= 0) & (label < tf.cast(num_classes, label.dtype))
  message = f"A label must be in [0, {num_classes - 1}]. Received:"
  with tf.control_dependencies([tf.debugging.Assert(is_one, [message, label])]):
    return tf.identity(label)
