"""Tests of `cifar10.distortions` against `tf.image`, image by image."""

import numpy as np
import pytest
import tensorflow as tf

from cifar10 import config
from cifar10 import distortions

NUM_DRAWS = 8_100


@pytest.fixture(scope="module")
def draws():
  drawn = distortions.draw([7, 8], NUM_DRAWS)
  return distortions.Distortions(*(values.numpy() for values in drawn))


def noise(num_images):
  return tf.constant(
    np.random.default_rng(3).integers(0, 256, [num_images, 32, 32, 3], np.uint8)
  )


def distort_one(image, size, top, left, flip, brightness, contrast):
  assert size == 24
  image = tf.image.crop_to_bounding_box(image, top, left, 24, 24)
  if flip:
    image = tf.image.flip_left_right(image)
  image = tf.image.adjust_brightness(tf.cast(image, tf.float32), brightness)
  image = tf.image.adjust_contrast(image, contrast)
  return tf.image.per_image_standardization(image)


def test_does_what_tf_image_does():
  images = noise(16)
  drawn = distortions.draw([1, 2], 16)
  assert len(set(map(bool, drawn.flip))) == 2
  expected = [
    distort_one(i, *one) for i, *one in zip(images, *drawn, strict=True)
  ]
  actual = distortions.apply(images, drawn)
  assert actual.dtype == tf.float32
  np.testing.assert_allclose(actual, expected, atol=2e-5)


def test_colors_may_stay():
  images = noise(8)
  drawn = distortions.draw([1, 2], 8)
  plain = drawn._replace(brightness=tf.zeros([8]), contrast=tf.ones([8]))
  np.testing.assert_allclose(
    distortions.apply(images, drawn, colors=False),
    distortions.apply(images, plain),
    atol=1e-5,
  )


def test_crops_and_flips_by_hand():
  rows, columns = np.meshgrid(np.arange(32), np.arange(32), indexing="ij")
  image = np.stack([rows, columns, 0 * rows], -1).astype(np.uint8)
  drawn = distortions.Distortions(
    size=tf.fill([3], 24.0),
    top=tf.constant([0, 8, 3]),
    left=tf.constant([0, 8, 5]),
    flip=tf.constant([False, False, True]),
    brightness=tf.zeros([3]),
    contrast=tf.ones([3]),
  )
  crops = distortions.apply(tf.stack([image] * 3), drawn)
  for crop, (top, left, step) in zip(
    crops, [(0, 0, 1), (8, 8, 1), (3, 5, -1)], strict=True
  ):
    cut = image[top : top + 24, left : left + 24][:, ::step]
    standardized = (cut - np.mean(cut)) / np.std(cut)
    np.testing.assert_allclose(crop, standardized, atol=1e-5)


def test_a_blank_image_stays_finite():
  blank = tf.fill([2, 32, 32, 3], tf.constant(200, tf.uint8))
  np.testing.assert_array_equal(
    distortions.center(blank), np.zeros([2, 24, 24, 3])
  )
  assert np.all(np.abs(distortions.distort(blank, [1, 1])) < 1e-2)


def test_center_is_the_tutorials_evaluation_crop():
  images = noise(4)
  crops = tf.image.resize_with_crop_or_pad(images, 24, 24)
  np.testing.assert_allclose(
    distortions.center(images),
    tf.image.per_image_standardization(crops),
    atol=1e-6,
  )


def test_offsets_are_uniform_and_independent(draws):
  cells = np.bincount(draws.top * 9 + draws.left, minlength=81)
  assert len(cells) == 81
  # 80 degrees of freedom: mean 80, standard deviation 12.6; 5 of these.
  expected = NUM_DRAWS / 81
  assert np.sum((cells - expected) ** 2 / expected) < 80 + 5 * 12.6


def test_the_rest_is_uniform_and_independent(draws):
  # Five standard errors of a mean of uniform draws of width w:
  # 5 * w / sqrt(12 * 8100).
  def assert_mean(values, expected, width):
    tolerance = 5 * width / np.sqrt(12 * NUM_DRAWS)
    assert np.mean(values) == pytest.approx(expected, abs=tolerance)

  assert np.min(draws.brightness) >= -63 and np.max(draws.brightness) < 63
  assert np.min(draws.contrast) >= 0.2 and np.max(draws.contrast) < 1.8
  assert_mean(draws.brightness, 0.0, 126)
  assert_mean(draws.brightness**2, 63**2 / 3, 63**2)
  assert_mean(draws.contrast, 1.0, 1.6)
  assert_mean((draws.contrast - 1) ** 2, 0.8**2 / 3, 0.8**2)
  # A coin has variance 1/4, three times that of a uniform draw of width 1.
  assert_mean(draws.flip, 0.5, np.sqrt(3))
  assert np.all(draws.size == 24)
  correlations = np.corrcoef(np.stack(draws[1:]).astype(float))
  off_diagonal = correlations - np.eye(5)
  assert np.max(np.abs(off_diagonal)) < 5 / np.sqrt(NUM_DRAWS)


def test_distribution_is_that_of_tf_image():
  """Compares mean and mean square of every pixel over many draws."""
  num = 3_000
  image = noise(1)[0]
  ours = distortions.distort(tf.repeat(image[tf.newaxis], num, axis=0), [5, 6])

  def random_distort(i):
    seed = tf.stack([i, 9])
    seeds = tf.unstack(tf.random.split(seed, 4), num=4)
    crop = tf.image.stateless_random_crop(image, [24, 24, 3], seeds[0])
    crop = tf.image.stateless_random_flip_left_right(crop, seeds[1])
    crop = tf.cast(crop, tf.float32)
    crop = tf.image.stateless_random_brightness(crop, 63, seeds[2])
    crop = tf.image.stateless_random_contrast(crop, 0.2, 1.8, seeds[3])
    return tf.image.per_image_standardization(crop)

  data = tf.data.Dataset.range(num).map(random_distort).batch(num)
  theirs = data.get_single_element()
  for moment in (1, 2):
    a, b = ours.numpy() ** moment, theirs.numpy() ** moment
    error = np.sqrt((np.var(a, axis=0) + np.var(b, axis=0)) / num)
    z = (np.mean(a, axis=0) - np.mean(b, axis=0)) / error
    # 1728 normal values exceed 5.5 once in 15,000 tries.
    assert np.max(np.abs(z)) < 5.5
    assert np.std(z) == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("max_shift", [0, 2])
def test_crops_may_be_near_the_middle(max_shift):
  drawn = distortions.draw([7, 8], 2_000, max_shift=tf.constant(max_shift))
  for offsets in (drawn.top, drawn.left):
    expected = np.arange(4 - max_shift, 4 + max_shift + 1)
    found, counts = np.unique(offsets, return_counts=True)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(counts * len(expected) / 2_000, 1, atol=0.2)


def resized(size, top, left, flip):
  return distortions.Distortions(
    size=tf.constant([size], tf.float32),
    top=tf.constant([top], tf.float32),
    left=tf.constant([left], tf.float32),
    flip=tf.constant([flip]),
    brightness=tf.zeros([1]),
    contrast=tf.ones([1]),
  )


@pytest.mark.parametrize("top, left, flip", [(0, 0, False), (3, 8, True)])
def test_a_crop_of_24_is_resized_to_itself(top, left, flip):
  images = noise(1)
  cut = images[:, top : top + 24, left : left + 24]
  if flip:
    cut = tf.reverse(cut, [2])
  np.testing.assert_allclose(
    distortions.apply(images, resized(24, top, left, flip), colors=False),
    tf.image.per_image_standardization(cut),
    atol=1e-4,
  )


@pytest.mark.parametrize("flip", [False, True])
def test_resizing_keeps_the_corners_and_is_linear(flip):
  """Of pictures whose values rise evenly every size looks alike."""
  rows, columns = np.meshgrid(np.arange(32), np.arange(32), indexing="ij")
  image = np.stack([rows, columns, 3 * rows + columns], -1).astype(np.uint8)
  found = distortions.apply(
    image[np.newaxis], resized(29.5, 1.25, 0.5, flip), colors=False
  )
  down = np.linspace(1.25, 1.25 + 28.5, 24)[:, np.newaxis]
  across = np.linspace(0.5, 0.5 + 28.5, 24)[:: -1 if flip else 1]
  expected = np.stack([down + 0 * across, 0 * down + across, 3 * down + across])
  expected = np.moveaxis(expected, 0, -1)
  expected = (expected - np.mean(expected)) / np.std(expected)
  np.testing.assert_allclose(found[0], expected, atol=1e-3)


@pytest.mark.parametrize("flip", [False, True])
def test_no_crop_reaches_out_of_the_image(flip):
  grey = tf.fill([1, 32, 32, 3], tf.constant(200, tf.uint8))
  for size in np.arange(20, 32.5, 0.5):
    for corner in (0, (32 - size) / 2, 32 - size):
      found = distortions.apply(
        grey, resized(size, corner, corner, flip), colors=False
      )
      np.testing.assert_allclose(found, 0, atol=1e-2, err_msg=f"{size, corner}")


def test_center_may_be_of_another_size():
  images = noise(3)
  np.testing.assert_allclose(
    distortions.center(images, 24.001), distortions.center(images), atol=2e-2
  )
  np.testing.assert_allclose(
    distortions.center(images, 30.0)[1:2],
    distortions.apply(images[1:2], resized(30, 1, 1, False), colors=False),
    atol=1e-5,
  )


@pytest.mark.parametrize("num_views", config.VIEWS)
@pytest.mark.parametrize("size", [24, 31.0])
def test_views_of_an_image(num_views, size):
  images = noise(3)
  views = distortions.views(images, size, num_views).numpy()
  views = views.reshape(num_views, 3, 24, 24, 3)
  np.testing.assert_array_equal(views[0], distortions.center(images, size))
  half = num_views // 2
  np.testing.assert_array_equal(views[half:][:half], views[:half, :, :, ::-1])
  others = [size - 2, min(size + 2, 32)] if num_views == 6 else []
  for other, view in zip(others, views[1:half], strict=True):
    np.testing.assert_array_equal(view, distortions.center(images, other))


def test_refuses_another_number_of_views():
  with pytest.raises(ValueError, match=r"one of \(1, 2, 6\).*: 3\."):
    distortions.views(noise(1), 24, 3)


@pytest.mark.parametrize("max_shift", [1, 32])
def test_crops_of_any_size_stay_inside(max_shift):
  drawn = distortions.draw(
    [7, 8], 4_000, max_shift=max_shift, sizes=(20.0, tf.constant(32.0))
  )
  sizes = drawn.size.numpy()
  np.testing.assert_allclose(
    np.quantile(sizes, [0, 0.25, 0.5, 0.75, 1]), [20, 23, 26, 29, 32], atol=0.3
  )
  room = (32 - sizes) / 2
  for offsets in (drawn.top.numpy(), drawn.left.numpy()):
    shifts = (offsets - room) / np.maximum(np.minimum(room, max_shift), 1e-6)
    assert np.max(np.abs(shifts)) <= 1 + 1e-4
    big = shifts[room > 0.1]
    np.testing.assert_allclose(np.mean(big), 0, atol=0.05)
    np.testing.assert_allclose(np.std(big), 1 / np.sqrt(3), atol=0.02)
    # Neither where nor whether a crop is mirrored goes with its size.
    assert abs(np.corrcoef(sizes, offsets - room)[0, 1]) < 0.05
  assert abs(np.corrcoef(sizes, drawn.flip.numpy())[0, 1]) < 0.05


def test_same_seed_same_distortions():
  images = noise(8)
  first, again, other = (distortions.distort(images, [4, s]) for s in (1, 1, 2))
  np.testing.assert_array_equal(first, again)
  assert np.max(np.abs(first - other)) > 0.1
