"""Decodes, distorts and crops images for the network.

This follows `image_processing.py` of the TF1 program. Random numbers are
stateless: equal seeds give equal distortions on every machine. The resize
method and the order of the color distortions are drawn for each image. In the
TF1 program, each thread used the same ones for all its images.
"""

import tensorflow as tf

# Limits of the random crop. All numbers are the original's.
MIN_OBJECT_COVERED = 0.1
ASPECT_RATIOS = (0.75, 1.33)
MAX_ATTEMPTS = 100
# Limits of the color distortions.
MAX_BRIGHTNESS_DELTA = 32 / 255
MAX_HUE_DELTA = 0.2
SATURATIONS = (0.5, 1.5)
CONTRASTS = (0.5, 1.5)

RESIZE_METHODS = (
  tf.image.ResizeMethod.BILINEAR,
  tf.image.ResizeMethod.NEAREST_NEIGHBOR,
  tf.image.ResizeMethod.BICUBIC,
  tf.image.ResizeMethod.AREA,
)


def decode(encoded: tf.Tensor) -> tf.Tensor:
  """Decodes an image file.

  Args:
    encoded: The bytes of a JPEG or PNG file, a scalar string.

  Returns:
    The image, uint8 `[height, width, 3]`.
  """
  image = tf.io.decode_image(encoded, channels=3, expand_animations=False)
  return tf.ensure_shape(image, [None, None, 3])


def distort(
  image: tf.Tensor,
  boxes: tf.Tensor,
  seed: tf.Tensor,
  *,
  image_size: int,
  min_crop_area: float,
  distort_color: bool = True,
) -> tf.Tensor:
  """Distorts an image at random for training.

  These are the steps, as in the TF1 program: crop the image so that the crop
  covers at least a tenth of one of the boxes; resize the crop by one of four
  methods; mirror it with probability 1/2; change its colors.

  Args:
    image: An image, uint8 `[height, width, 3]`.
    boxes: The bounding boxes of N objects, float32 `[N, 4]`: top, left, bottom
      and right edge in fractions of the image's height or width. With N = 0,
      the whole image is taken as a box.
    seed: `[2]` integers, the seed of all random choices.
    image_size: Height and width of the result.
    min_crop_area: Smallest area of the crop, as a fraction of the image's area.
    distort_color: Whether to change the colors.

  Returns:
    The distorted image, float32 `[image_size, image_size, 3]` in [-1, 1].
  """
  seeds = tf.unstack(tf.random.split(seed, 4), num=4)
  crop = tf.slice(image, *_crop_window(image, boxes, seeds[0], min_crop_area))
  crop = tf.image.convert_image_dtype(crop, tf.float32)
  size = [image_size, image_size]
  method = tf.random.stateless_uniform(
    [], seeds[1], 0, len(RESIZE_METHODS), tf.int32
  )
  resized = tf.switch_case(
    method,
    [lambda m=m: tf.image.resize(crop, size, m) for m in RESIZE_METHODS],
  )
  resized = tf.ensure_shape(resized, [*size, 3])
  resized = tf.image.stateless_random_flip_left_right(resized, seeds[2])
  if distort_color:
    resized = distort_colors(resized, seeds[3])
  # Bicubic resizing may leave [0, 1], and only `distort_colors` clips.
  return 2.0 * tf.clip_by_value(resized, 0.0, 1.0) - 1.0


def distort_colors(image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
  """Changes brightness, saturation, hue and contrast at random.

  Brightness is changed first. Contrast is changed either last, or directly
  after brightness.

  Args:
    image: An image, float32 `[height, width, 3]` in [0, 1].
    seed: `[2]` integers, the seed of all random choices.

  Returns:
    An image of the same shape and dtype, in [0, 1].
  """
  seeds = tf.unstack(tf.random.split(seed, 5), num=5)

  def contrast(image):
    return tf.image.stateless_random_contrast(image, *CONTRASTS, seeds[0])

  def saturation_and_hue(image):
    image = tf.image.stateless_random_saturation(image, *SATURATIONS, seeds[1])
    return tf.image.stateless_random_hue(image, MAX_HUE_DELTA, seeds[2])

  image = tf.image.stateless_random_brightness(
    image, MAX_BRIGHTNESS_DELTA, seeds[3]
  )
  image = tf.cond(
    tf.random.stateless_uniform([], seeds[4]) < 0.5,
    lambda: contrast(saturation_and_hue(image)),
    lambda: saturation_and_hue(contrast(image)),
  )
  return tf.clip_by_value(image, 0.0, 1.0)


def center(
  image: tf.Tensor, *, image_size: int, central_fraction: float
) -> tf.Tensor:
  """Crops an image to its middle and resizes it, for evaluation.

  The interpolation is bilinear.

  Args:
    image: An image, uint8 `[height, width, 3]`.
    image_size: Height and width of the result.
    central_fraction: The fraction of the height, and of the width, that is
      kept.

  Returns:
    An image, float32 `[image_size, image_size, 3]` in [-1, 1].
  """
  image = tf.image.convert_image_dtype(image, tf.float32)
  image = tf.image.central_crop(image, central_fraction)
  size = [image_size, image_size]
  return 2.0 * tf.ensure_shape(tf.image.resize(image, size), [*size, 3]) - 1.0


def _crop_window(image, boxes, seed, min_crop_area):
  """Draws a random crop of an image.

  Args:
    image: An image, `[height, width, 3]`.
    boxes: The bounding boxes of N objects, `[N, 4]`, as in `distort`. The crop
      covers at least a tenth of one of them, or is the whole image if no such
      crop was found.
    seed: `[2]` integers.
    min_crop_area: Smallest area of the crop, as a fraction of the image's area.

  Returns:
    The arguments `begin` and `size` of `tf.slice` for the crop.
  """
  begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
    tf.shape(image),
    # The op refuses edges that rounding has put outside of the image.
    tf.clip_by_value(boxes, 0.0, 1.0)[tf.newaxis],
    seed,
    min_object_covered=MIN_OBJECT_COVERED,
    aspect_ratio_range=ASPECT_RATIOS,
    area_range=(min_crop_area, 1.0),
    max_attempts=MAX_ATTEMPTS,
    use_image_if_no_bounding_boxes=True,
  )
  return begin, size
