"""Tests of `cifar10.inputs`."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from cifar10 import config
from cifar10 import inputs
from cifar10 import sources

NUM_TRAIN = 20
NUM_TEST = 7


def numbered_source(num_train=NUM_TRAIN, num_test=NUM_TEST):
  """Images of noise, whose labels are their numbers."""
  sizes = {"train": num_train, "test": num_test}

  def read(split):
    shape = [sizes[split], 32, 32, 3]
    images = tf.random.stateless_uniform(shape, [1, 2], 0, 256, tf.int32)
    return tf.cast(images, tf.uint8), tf.range(sizes[split], dtype=tf.int64)

  return sources.Source("numbered", num_train, num_test, read)


def train(num_batches, **kwargs):
  """The first batches as arrays: images and labels, one row per batch."""
  arguments = dict(batch_size=5, seed=1) | kwargs
  dataset = inputs.train_dataset(numbered_source(), **arguments)
  batches = itertools.islice(dataset.as_numpy_iterator(), num_batches)
  images, labels = zip(*batches, strict=True)
  return np.stack(images), np.stack(labels)


def test_shapes_and_types():
  dataset = inputs.train_dataset(numbered_source(), batch_size=5, seed=1)
  images, labels = dataset.element_spec
  assert images == tf.TensorSpec([5, 24, 24, 3], tf.float32)
  assert labels == tf.TensorSpec([5], tf.int64)
  assert dataset.cardinality() == tf.data.INFINITE_CARDINALITY


def test_every_epoch_is_another_permutation():
  _, labels = train(12)
  epochs = labels.reshape([3, NUM_TRAIN])
  for epoch in epochs:
    assert sorted(epoch) == list(range(NUM_TRAIN))
  assert len(set(map(tuple, epochs))) == 3


def test_no_example_is_dropped_when_batches_do_not_divide_an_epoch():
  _, labels = train(5, batch_size=8)
  for epoch in labels.reshape([2, NUM_TRAIN]):
    assert sorted(epoch) == list(range(NUM_TRAIN))


def test_batches_may_be_larger_than_the_training_set():
  _, labels = train(1, batch_size=3 * NUM_TRAIN)
  np.testing.assert_array_equal(np.bincount(labels[0]), [3] * NUM_TRAIN)


def test_same_seed_same_batches():
  images, labels = train(6)
  images_again, labels_again = train(6)
  np.testing.assert_array_equal(images, images_again)
  np.testing.assert_array_equal(labels, labels_again)


def test_other_seed_other_order():
  assert np.any(train(4)[1] != train(4, seed=2)[1])


def test_an_image_is_distorted_differently_each_epoch():
  images, labels = train(8)
  images = images.reshape([2, NUM_TRAIN, 24, 24, 3])
  labels = labels.reshape([2, NUM_TRAIN])
  first, second = (
    image[np.argsort(label)]
    for image, label in zip(images, labels, strict=True)
  )
  assert np.all(np.max(np.abs(first - second), axis=(1, 2, 3)) > 0.1)


def test_shards_are_disjoint_and_cover_an_epoch():
  shards = [
    train(4, batch_size=1, num_shards=5, shard_index=i)[1] for i in range(5)
  ]
  assert sorted(np.ravel(shards)) == list(range(NUM_TRAIN))


def test_shards_together_are_one_larger_batch():
  shards = [train(6, num_shards=3, shard_index=i) for i in range(3)]
  images, labels = train(6, batch_size=15)
  np.testing.assert_array_equal(
    np.concatenate([shard[1] for shard in shards], axis=1), labels
  )
  np.testing.assert_allclose(
    np.concatenate([shard[0] for shard in shards], axis=1), images, atol=1e-5
  )


def test_late_crops_are_near_the_middle():
  wide, _ = train(3, batch_size=20)
  narrow, _ = train(3, batch_size=20, centered_from=20)
  np.testing.assert_array_equal(narrow[0], wide[0])
  assert np.any(narrow[1] != wide[1])
  shards = [
    train(3, batch_size=10, num_shards=2, shard_index=i, centered_from=20)[0]
    for i in range(2)
  ]
  np.testing.assert_allclose(np.concatenate(shards, axis=1), narrow, atol=1e-5)
  # A batch is wide if it begins before; one begins at example 0, 20 and 40.
  late, _ = train(3, batch_size=20, centered_from=21)
  np.testing.assert_array_equal(late[:2], wide[:2])
  np.testing.assert_array_equal(late[2], narrow[2])


def test_late_crops_come_late_where_some_batches_are_not_used():
  """Of two workers one is a backup: 10 of each 20 images are used."""
  one_of_two = dict(num_shards=2, batch_size=10, used_share=0.5)
  wide, _ = train(4, **one_of_two)
  late, _ = train(4, **one_of_two, centered_from=30)
  np.testing.assert_array_equal(late[:3], wide[:3])
  assert np.any(late[3] != wide[3])


def test_late_crops_are_as_large_as_those_of_evaluation():
  sizes = config.CropSizes(evaluation=32, smallest=12, largest=16)
  small, _ = train(2, batch_size=20, crop_sizes=sizes)
  late, _ = train(2, batch_size=20, crop_sizes=sizes, centered_from=20)
  np.testing.assert_array_equal(late[0], small[0])
  assert np.any(late[1] != small[1])
  fixed = config.CropSizes(evaluation=32, smallest=31, largest=32)
  whole, _ = train(2, batch_size=20, crop_sizes=fixed)
  np.testing.assert_allclose(late[1], whole[1], atol=1e-5)
  shards = [
    train(
      2,
      batch_size=10,
      num_shards=2,
      shard_index=i,
      centered_from=20,
      crop_sizes=sizes,
    )[0]
    for i in range(2)
  ]
  np.testing.assert_allclose(np.concatenate(shards, axis=1), late, atol=1e-5)


@pytest.mark.parametrize("num_done", [1, 4, 7])
def test_a_resumed_run_goes_on_where_it_stopped(num_done):
  sizes = config.CropSizes(evaluation=28, smallest=20, largest=32)
  arguments = dict(num_shards=2, centered_from=50, crop_sizes=sizes)
  images, labels = train(10, **arguments)
  resumed = train(10 - num_done, start_example=num_done * 10, **arguments)
  np.testing.assert_array_equal(resumed[0], images[num_done:])
  np.testing.assert_array_equal(resumed[1], labels[num_done:])


@pytest.mark.parametrize("used", [5, 10, 23])
def test_who_starts_late_takes_no_example_of_another(used):
  """By asynchronous updates any number of batches may have been used."""
  images, labels = train(20, num_shards=2, shard_index=1)
  late = train(10, num_shards=2, shard_index=1, start_example=used)
  begun = used // 10
  np.testing.assert_array_equal(late[1], labels[begun : begun + 10])
  np.testing.assert_array_equal(late[0], images[begun : begun + 10])


@pytest.mark.parametrize("batch_size", [5, 8, 50])
def test_leased_batches_are_those_of_the_stream(batch_size):
  images, labels = train(8, batch_size=batch_size)
  numbers = [6, 0, 3, 7]
  leased = train(
    4,
    batch_size=batch_size,
    numbers=tf.data.Dataset.from_tensor_slices(np.array(numbers)),
  )
  np.testing.assert_array_equal(leased[1], labels[numbers])
  np.testing.assert_array_equal(leased[0], images[numbers])


def test_crops_where_backups_resume():
  """Of 20 images drawn 10 are used, so 40 drawn are 20 used."""
  one_of_two = dict(
    num_shards=2, batch_size=10, used_share=0.5, centered_from=30
  )
  images, labels = train(6, **one_of_two)
  resumed = train(4, start_example=40, **one_of_two)
  np.testing.assert_array_equal(resumed[0], images[2:])
  np.testing.assert_array_equal(resumed[1], labels[2:])


def test_shard_and_start_may_be_tensors_inside_a_function():
  @tf.function
  def first_labels(index, start):
    dataset = inputs.train_dataset(
      numbered_source(),
      batch_size=5,
      seed=1,
      num_shards=2,
      shard_index=index,
      start_example=start,
    )
    return dataset.take(1).get_single_element()[1]

  for index, start in itertools.product((0, 1), (0, 30)):
    expected = train(1, num_shards=2, shard_index=index, start_example=start)
    actual = first_labels(tf.constant(index), tf.constant(start, tf.int64))
    np.testing.assert_array_equal(actual, expected[1][0])


@pytest.mark.parametrize("make", ["train", "eval"])
def test_no_data_in_the_graph(make):
  """A worker is sent the recipe, not 15 MB of images."""
  source = sources.find("synthetic")
  if make == "train":
    dataset = inputs.train_dataset(source, batch_size=128, seed=0)
  else:
    dataset = inputs.eval_batches(source, 128)
  graph = tf.raw_ops.DatasetToGraphV2(
    input_dataset=tf.data.experimental.to_variant(dataset)
  )
  assert len(graph.numpy()) < 100_000


@pytest.mark.parametrize(
  "batch_size, sizes", [(3, [3, 3, 1]), (7, [7]), (100, [7])]
)
def test_evaluation_sees_every_image_once(batch_size, sizes):
  dataset = inputs.eval_batches(numbered_source(), batch_size)
  assert dataset.cardinality() == len(sizes)
  images, labels = zip(*dataset.as_numpy_iterator(), strict=True)
  assert [len(batch) for batch in images] == sizes
  np.testing.assert_array_equal(np.concatenate(labels), np.arange(NUM_TEST))


def test_evaluation_of_the_training_set():
  dataset = inputs.eval_batches(numbered_source(), 6, split="train")
  labels = np.concatenate([y for _, y in dataset.as_numpy_iterator()])
  np.testing.assert_array_equal(labels, np.arange(NUM_TRAIN))


@pytest.mark.parametrize(
  "name, value",
  [("batch_size", 0), ("num_shards", 0), ("shard_index", 1)],
)
def test_refuses_numbers_out_of_range(name, value):
  with pytest.raises(ValueError, match=rf"`{name}` must be .*: {value}\."):
    train(1, **{name: value})


def test_refuses_an_unknown_split():
  with pytest.raises(ValueError, match="`split` must be .*'dev'"):
    inputs.eval_batches(numbered_source(), 5, split="dev")
