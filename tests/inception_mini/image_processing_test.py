"""Tests of `inception_mini.image_processing`."""

import numpy as np
import pytest
import tensorflow as tf

from inception_mini import image_processing

NO_BOXES = tf.zeros([0, 4])


def noise(*shape, seed=0):
  generator = np.random.default_rng(seed)
  return tf.constant(generator.integers(0, 256, [*shape, 3], np.uint8))


def plane(height, width):
  """Red is the row, green the column; blue is nothing."""
  rows, columns = np.mgrid[:height, :width].astype(np.uint8)
  return tf.constant(np.stack([rows, columns, 0 * rows], -1))


def distort(image, seed, boxes=NO_BOXES, **kwargs):
  arguments = dict(image_size=8, min_crop_area=0.05) | kwargs
  return image_processing.distort(
    image, tf.constant(boxes), tf.constant([seed, 1]), **arguments
  ).numpy()


@pytest.mark.parametrize("encode", [tf.io.encode_jpeg, tf.io.encode_png])
@pytest.mark.parametrize("channels", [1, 3])
def test_decodes_to_three_channels(encode, channels):
  pixels = np.full([4, 5, channels], 200, np.uint8)
  image = image_processing.decode(encode(pixels))
  assert image.dtype == tf.uint8
  np.testing.assert_allclose(image, np.full([4, 5, 3], 200), atol=2)


class TestDistort:
  @pytest.mark.parametrize("shape", [(40, 30), (8, 8), (3, 50)])
  def test_shape_and_range(self, shape):
    for seed in range(20):
      image = distort(noise(*shape), seed)
      assert image.shape == (8, 8, 3) and image.dtype == np.float32
      assert -1.0 <= image.min() and image.max() <= 1.0

  @pytest.mark.parametrize("distort_color", [False, True])
  def test_same_seed_same_image(self, distort_color):
    image = noise(20, 20)
    first = distort(image, 3, distort_color=distort_color)
    again = distort(image, 3, distort_color=distort_color)
    other = distort(image, 4, distort_color=distort_color)
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.1

  def test_is_the_same_inside_a_graph(self):
    image = noise(20, 20)
    function = tf.function(
      lambda seed: image_processing.distort(
        image, NO_BOXES, seed, image_size=8, min_crop_area=0.1
      )
    )
    for seed in range(4):
      expected = distort(image, seed, min_crop_area=0.1)
      np.testing.assert_allclose(
        function(tf.constant([seed, 1])), expected, atol=1e-5
      )

  def test_crops_cover_the_areas_and_proportions_allowed(self):
    areas, ratios = [], []
    for seed in range(200):
      _, size = image_processing._crop_window(
        plane(200, 200), NO_BOXES, [seed, 0], 0.25
      )
      height, width = size.numpy()[:2]
      areas.append(height * width / 200**2)
      ratios.append(width / height)
    assert 0.24 <= min(areas) < 0.3 and 0.9 < max(areas) <= 1.0
    assert 0.74 <= min(ratios) < 0.8 and 1.25 < max(ratios) <= 1.35

  def test_crops_touch_a_box(self):
    """Its tenth at least; the box is the lower right corner."""
    box = tf.constant([[0.9, 0.9, 1.0, 1.0]])
    for seed in range(50):
      begin, size = image_processing._crop_window(
        plane(100, 100), box, [seed, 0], 0.05
      )
      end = (begin + size).numpy()
      assert end[0] > 90 and end[1] > 90

  def test_boxes_may_overstep_by_rounding(self):
    distort(plane(50, 50), 0, [[-0.001, 0.2, 0.5, 1.0001]])

  def test_some_are_mirrored(self):
    mirrored = [
      np.sign(
        np.diff(distort(plane(60, 60), seed, distort_color=False)[4, :, 1])
      )
      for seed in range(40)
    ]
    mirrored = [row[row != 0].mean() < 0 for row in mirrored]
    assert 8 < sum(mirrored) < 32

  def test_every_way_of_resizing_occurs(self):
    """One pixel blown up: bicubic oversteps, nearest has but two values."""
    image = np.zeros([2, 2, 3], np.uint8)
    image[0] = 255
    kinds = {
      tuple(np.unique(distort(tf.constant(image), s, distort_color=False)))
      for s in range(60)
    }
    assert (-1.0, 1.0) in kinds and len(kinds) >= 3


class TestColors:
  def test_order_varies(self):
    """With all the draws the same, the two orders differ."""
    image = tf.constant(np.random.default_rng(0).random([4, 4, 3], np.float32))
    results = []
    for seed in range(30):
      seed = tf.constant([seed, 0])
      seeds = tf.unstack(tf.random.split(seed, 5))
      saturated = tf.image.stateless_random_brightness(
        image, 32 / 255, seeds[3]
      )
      saturated = tf.image.stateless_random_saturation(
        saturated, 0.5, 1.5, seeds[1]
      )
      saturated = tf.image.stateless_random_hue(saturated, 0.2, seeds[2])
      last = tf.image.stateless_random_contrast(saturated, 0.5, 1.5, seeds[0])
      found = image_processing.distort_colors(image, seed)
      is_last = np.allclose(found, tf.clip_by_value(last, 0, 1), atol=1e-6)
      results.append(is_last)
    assert 5 < sum(results) < 25

  def test_stays_in_range(self):
    image = tf.constant([[[0.0, 0.5, 1.0], [1.0, 1.0, 1.0]]])
    for seed in range(30):
      colors = image_processing.distort_colors(image, tf.constant([seed, 0]))
      assert 0.0 <= np.min(colors) and np.max(colors) <= 1.0


class TestCenter:
  def test_is_the_middle(self):
    image = image_processing.center(
      plane(80, 160), image_size=10, central_fraction=0.5
    )
    pixels = (image.numpy() + 1.0) * 127.5
    rows, columns = pixels[..., 0], pixels[..., 1]
    assert 20 <= rows.min() < 24 and 56 < rows.max() <= 60
    assert 40 <= columns.min() < 48 and 112 < columns.max() <= 120

  def test_whole_image_of_the_right_size_is_only_scaled(self):
    image = noise(6, 6)
    center = image_processing.center(image, image_size=6, central_fraction=1.0)
    np.testing.assert_allclose(center, image.numpy() / 127.5 - 1.0, atol=1e-6)

  def test_is_bilinear(self):
    image = tf.constant([[[0] * 3, [255] * 3]], tf.uint8)
    center = image_processing.center(image, image_size=4, central_fraction=1.0)
    np.testing.assert_allclose(center[0, :, 0], [-1.0, -0.5, 0.5, 1.0])
