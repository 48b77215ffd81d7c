"""Tests of `cifar10.synthetic`."""

import numpy as np
import pytest
import tensorflow as tf

from cifar10 import distortions
from cifar10 import sources
from cifar10 import synthetic


@pytest.fixture(scope="module")
def splits():
  source = sources.find("synthetic")
  return {split: source.read(split) for split in ("train", "test")}


def accuracy(features, splits):
  """Test accuracy of a least-squares classifier on the training set."""
  rows = {
    split: np.column_stack([features(images), np.ones(len(labels))])
    for split, (images, labels) in splits.items()
  }
  targets = np.eye(10)[splits["train"][1]]
  weights, *_ = np.linalg.lstsq(rows["train"], targets, rcond=None)
  guesses = np.argmax(rows["test"] @ weights, axis=1)
  return np.mean(guesses == splits["test"][1])


def mean_colors(images):
  return np.mean(images, axis=(1, 2))


def color_edges(images):
  """How each pair of colors changes together, down and across."""
  crops = distortions.center(images).numpy()
  down = crops[:, 3:] - crops[:, :-3]
  across = crops[:, :, 3:] - crops[:, :, :-3]
  return np.column_stack(
    [
      np.einsum("nhwa,nhwb->nab", edges, edges).reshape([len(crops), 9])
      for edges in (down, across)
    ]
  )


def test_shapes_and_balance(splits):
  for split, size in (("train", 5_000), ("test", 1_000)):
    images, labels = splits[split]
    assert images.dtype == tf.uint8
    assert images.shape == [size, 32, 32, 3]
    np.testing.assert_array_equal(np.bincount(labels), [size // 10] * 10)


def test_is_the_same_every_time_and_in_a_graph(splits):
  images, labels = tf.function(synthetic.read)("test")
  np.testing.assert_array_equal(labels, splits["test"][1])
  # Fused arithmetic may round a value to the other side of an integer.
  difference = tf.abs(
    tf.cast(images, tf.int32) - tf.cast(splits["test"][0], tf.int32)
  )
  assert tf.reduce_max(difference) <= 1


def test_train_and_test_share_no_image(splits):
  seen = {image.tobytes() for image in splits["train"][0].numpy()}
  assert len(seen) == 5_000
  assert not any(i.tobytes() in seen for i in splits["test"][0].numpy())


def test_classes_can_be_learned_but_not_from_mean_colors(splits):
  assert accuracy(color_edges, splits) > 0.9
  assert accuracy(mean_colors, splits) < 0.2
