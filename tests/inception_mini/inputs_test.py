"""Tests of `inception_mini.inputs`."""

import dataclasses
import itertools

import numpy as np
import pytest
import tensorflow as tf

from inception_mini import config
from inception_mini import inputs
from inception_mini import sources

LENGTHS = (5, 7, 4, 6, 3)
NUM_TRAIN = sum(LENGTHS)
VALIDATION_LENGTHS = (4, 3)

SETTINGS = config.Config(image_size=32, batch_size=5, shuffle_examples=4)


def numbered_source(lengths=LENGTHS):
  """Grey images whose labels are their numbers."""
  by_subset = {"train": lengths, "validation": VALIDATION_LENGTHS}

  def read(subset, shard):
    starts = tf.cumsum(by_subset[subset], exclusive=True)
    first = tf.cast(tf.gather(starts, shard), tf.int64)
    length = tf.cast(tf.gather(by_subset[subset], shard), tf.int64)
    return tf.data.Dataset.range(first, first + length)

  def decode(number):
    image = tf.fill([40, 50, 3], tf.cast(100 + number, tf.uint8))
    return sources.Example(image, number, tf.zeros([0, 4]))

  return sources.Source("numbered", 100, by_subset, read, decode)


def deal(num_workers=1, worker=0, lengths=LENGTHS, seed=0):
  return inputs._Deal(
    lengths,
    num_workers=num_workers,
    worker=tf.constant(worker, tf.int64),
    seed=seed,
  )


@tf.autograph.experimental.do_not_convert
def stream(num_examples, num_workers=1, worker=0, start=0, lengths=LENGTHS):
  """The first labels that a worker gets, from its own number `start` on."""
  examples = inputs._raw_examples(
    numbered_source(lengths),
    deal(num_workers, worker, lengths),
    tf.constant(start, tf.int64),
    SETTINGS.shuffle_examples,
  )
  examples = itertools.islice(examples.as_numpy_iterator(), num_examples)
  found = [(int(number), int(raw[0])) for _, number, raw in examples]
  assert all(number == label for number, label in found)
  return [label for _, label in found]


def batches(num_batches, settings=SETTINGS, lengths=LENGTHS, **kwargs):
  dataset = inputs.train_dataset(numbered_source(lengths), settings, **kwargs)
  return [*itertools.islice(dataset.as_numpy_iterator(), num_batches)]


def parts(num_workers, epoch, lengths=LENGTHS):
  """How many examples each worker has in an epoch."""
  epoch = tf.constant(epoch, tf.int64)
  return [
    int(deal(num_workers, worker, lengths).num_examples(epoch))
    for worker in range(num_workers)
  ]


def test_shapes_and_types():
  dataset = inputs.train_dataset(numbered_source(), SETTINGS, with_seeds=True)
  images, labels, seeds = dataset.element_spec
  assert images == tf.TensorSpec([5, 32, 32, 3], tf.float32)
  assert labels == tf.TensorSpec([5], tf.int64)
  assert seeds == tf.TensorSpec([5, 2], tf.int32)
  assert dataset.cardinality() == tf.data.INFINITE_CARDINALITY
  images, _, _ = next(iter(dataset))
  assert np.ptp(images.numpy()) > 0 and np.abs(images).max() <= 1.0


def test_every_epoch_is_another_permutation():
  labels = np.reshape(stream(3 * NUM_TRAIN), [3, NUM_TRAIN])
  for epoch in labels:
    assert sorted(epoch) == list(range(NUM_TRAIN))
  assert len(set(map(tuple, labels))) == 3


def test_batches_reach_into_the_next_epoch():
  labels = [labels for _, labels in batches(5, batch_size=10)]
  for epoch in np.reshape(labels, [2, NUM_TRAIN]):
    assert sorted(epoch) == list(range(NUM_TRAIN))


@pytest.mark.parametrize("num_workers", [2, 3, 5, 7])
def test_workers_share_every_epoch(num_workers):
  """With shards to spare, one each, and fewer than workers."""
  sizes = np.array([parts(num_workers, epoch) for epoch in range(3)])
  np.testing.assert_array_equal(sizes.sum(1), [NUM_TRAIN] * 3)
  streams = [
    stream(sum(sizes[:, k]), num_workers, k) for k in range(num_workers)
  ]
  for epoch in range(3):
    first, last = sizes[:epoch].sum(0), sizes[: epoch + 1].sum(0)
    labels = itertools.chain.from_iterable(
      s[a:b] for s, a, b in zip(streams, first, last, strict=True)
    )
    assert sorted(labels) == list(range(NUM_TRAIN))


def test_shares_of_equal_shards_are_equal():
  assert parts(3, 0, lengths=(10,) * 6) == [20] * 3
  assert parts(4, 0, lengths=(12,) * 6) == [18] * 4
  assert parts(4, 0, lengths=(12,)) == [3] * 4
  sizes = parts(4, 0, lengths=(13,) * 3)
  assert max(sizes) - min(sizes) <= 1


def test_workers_are_dealt_other_shards_in_every_epoch():
  lengths = (4,) * 12
  labels = stream(5 * 16, 3, lengths=lengths)
  epochs = np.reshape(labels, [5, 16]) // 4
  assert len({tuple(sorted(set(shards))) for shards in epochs}) > 1


@pytest.mark.parametrize("num_workers, worker", [(1, 0), (2, 1), (7, 3)])
def test_goes_on_where_it_was(num_workers, worker):
  whole = stream(110, num_workers, worker)
  for start in (25, 26, 93):
    rest = stream(8, num_workers, worker, start)
    assert rest == whole[start : start + 8]


def test_start_counts_the_examples_of_all_workers():
  kwargs = dict(batch_size=5, num_shards=3, shard_index=1)
  *_, third = batches(3, **kwargs)
  (first,) = batches(1, start_example=2 * 15, **kwargs)
  for a, b in zip(third, first, strict=True):
    np.testing.assert_array_equal(a, b)


def test_seed_decides_order_and_distortions():
  settings = dataclasses.replace(SETTINGS, seed=1)
  for a, b in zip(batches(6, settings), batches(6, settings), strict=True):
    np.testing.assert_array_equal(a[0], b[0])
    np.testing.assert_array_equal(a[1], b[1])
  labels = [b[1].tolist() for b in batches(6, settings)]
  assert labels != [b[1].tolist() for b in batches(6)]


def test_an_example_looks_the_same_whoever_reads_it():
  """In one epoch; in the next it looks different."""

  def looks(num_workers, worker):
    count = 12 // num_workers
    found = batches(
      2 * count,
      lengths=(6, 6),
      batch_size=1,
      num_shards=num_workers,
      shard_index=worker,
      with_seeds=True,
    )
    return [
      (i // count, int(label[0]), image.tobytes(), seed.tobytes())
      for i, (image, label, seed) in enumerate(found)
    ]

  alone = {(epoch, label): rest for epoch, label, *rest in looks(1, 0)}
  assert len({tuple(rest) for rest in alone.values()}) == 24
  shared = [example for k in range(3) for example in looks(3, k)]
  assert len(shared) == 24
  for epoch, label, *rest in shared:
    assert alone[epoch, label] == rest


@tf.autograph.experimental.do_not_convert
def leased(numbers, lengths=LENGTHS):
  """The labels of the units of examples that a worker leases."""
  examples = inputs._leased_examples(
    numbered_source(lengths),
    deal(lengths=lengths),
    tf.data.Dataset.from_tensor_slices(tf.constant(numbers, tf.int64)),
    SETTINGS.shuffle_examples,
  )
  found = [
    (int(number), int(raw[0]))
    for _, number, raw in examples.as_numpy_iterator()
  ]
  assert all(number == label for number, label in found)
  return [label for _, label in found]


@pytest.mark.parametrize("lengths", [LENGTHS, (3,) * 70])
def test_leased_units_are_the_epoch_whoever_takes_them(lengths):
  """With several units per shard, and with one."""
  units = inputs.leased_units(numbered_source(lengths))
  assert units >= inputs.LEASED_UNITS
  numbers = np.random.default_rng(0).permutation(2 * units)
  for epoch in range(2):
    own = [n for n in numbers if n // units == epoch]
    labels = leased(own[:7], lengths) + leased(own[7:], lengths)
    assert sorted(labels) == list(range(sum(lengths)))


def test_every_epoch_leases_the_shards_in_another_order():
  lengths = (1,) * 64
  units = inputs.leased_units(numbered_source(lengths))
  begins = []
  for begin in (0, units):
    whole = leased(range(begin, begin + units), lengths)
    assert sorted(whole) == list(range(64))
    begins.append([leased([begin + n], lengths) for n in range(6)])
  assert begins[0] != begins[1]


def test_a_leased_example_looks_as_in_a_fixed_part():
  """The distortion depends on the epoch and the example alone."""
  images = dict(zip(range(NUM_TRAIN), [None] * NUM_TRAIN, strict=True))
  for image, label in batches(5):
    images |= dict(zip(label.tolist(), image, strict=True))
  units = inputs.leased_units(numbered_source())
  numbers = tf.data.Dataset.range(units)
  for image, label in batches(5, leases=numbers):
    for one, number in zip(image, label.tolist(), strict=True):
      np.testing.assert_array_equal(one, images[number])


def test_works_inside_a_graph():
  """As a data set function on a remote worker does, with tensors."""

  @tf.function
  def first(index, start):
    dataset = inputs.train_dataset(
      numbered_source(),
      SETTINGS,
      num_shards=2,
      shard_index=index,
      start_example=start,
    )
    return dataset.take(1).get_single_element()[1]

  expected = stream(5, 2, 1, start=15)
  found = first(tf.constant(1, tf.int64), tf.constant(30, tf.int64))
  assert found.numpy().tolist() == expected


@pytest.mark.parametrize(
  "arguments, words",
  [
    (dict(batch_size=0), "`batch_size` must be positive"),
    (dict(num_shards=0), "`num_shards` must be positive"),
    (dict(num_shards=2, shard_index=2), r"`shard_index` must be in \[0, 1\]"),
    (dict(num_shards=26), "at most the 25 training examples"),
  ],
)
def test_refuses_numbers_out_of_range(arguments, words):
  with pytest.raises(ValueError, match=words):
    inputs.train_dataset(numbered_source(), SETTINGS, **arguments)


def test_notices_a_label_that_is_no_class():
  settings = dataclasses.replace(SETTINGS, num_classes=NUM_TRAIN - 1)
  with pytest.raises(tf.errors.InvalidArgumentError, match=r"in \[0, 23\]"):
    batches(NUM_TRAIN, settings, batch_size=1)


class TestEval:
  @pytest.mark.parametrize("batch_size, sizes", [(3, [3, 3, 1]), (7, [7])])
  def test_every_image_is_in_one_batch(self, batch_size, sizes):
    dataset = inputs.eval_batches(numbered_source(), SETTINGS, batch_size)
    assert dataset.cardinality() == len(sizes)
    batches = [*dataset.as_numpy_iterator()]
    assert [len(labels) for _, labels in batches] == sizes
    assert np.concatenate([b for _, b in batches]).tolist() == [*range(7)]

  def test_images_are_scaled(self):
    dataset = inputs.eval_batches(numbered_source(), SETTINGS, 7)
    images, labels = next(iter(dataset))
    assert images.shape == (7, 32, 32, 3)
    expected = (100 + labels.numpy()) / 127.5 - 1.0
    np.testing.assert_allclose(images[:, 3, 4, 1], expected, atol=1e-5)

  def test_the_training_set_can_be_measured(self):
    dataset = inputs.eval_batches(
      numbered_source(), SETTINGS, 25, subset="train"
    )
    ((_, labels),) = dataset.as_numpy_iterator()
    assert labels.tolist() == list(range(25))

  def test_refuses_an_unknown_subset(self):
    with pytest.raises(ValueError, match="`subset` must be one of train, val"):
      inputs.eval_batches(numbered_source(), SETTINGS, 5, subset="test")
