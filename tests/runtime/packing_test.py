"""Tests for runtime.packing."""

import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tf_replicas.runtime import packing

F32 = tf.float32
LARGEST_SMALL = packing.SMALL_BYTES // 4


def _item(*shape, dtype=F32):
  return packing.Item(shape, dtype)


class GroupsTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("nothing", [], []),
    ("one", [_item(3)], [[0]]),
    ("small_together", [_item(3), _item(), _item(2, 2)], [[0, 1, 2]]),
    ("large_alone", [_item(3), _item(1 << 20), _item(5)], [[0, 2], [1]]),
    (
      "large_never_together",
      [_item(1 << 20), _item(1 << 20)],
      [[0], [1]],
    ),
    (
      "by_dtype",
      [_item(3), _item(3, dtype=tf.int64), _item(2)],
      [[0, 2], [1]],
    ),
    ("largest_small", [_item(LARGEST_SMALL), _item()], [[0, 1]]),
    ("smallest_large", [_item(LARGEST_SMALL + 1), _item()], [[1], [0]]),
    (
      "bytes_not_elements",
      [_item(LARGEST_SMALL, dtype=tf.float64), _item(1, dtype=tf.float64)],
      [[1], [0]],
    ),
  )
  def test_groups(self, items, expected):
    self.assertEqual(packing.groups(items), expected)


class PackTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("one", [(2, 3)]),
    ("several", [(2, 3), (), (4,), (1, 1, 2)]),
    ("with_an_empty_one", [(2,), (0, 5), (3,)]),
  )
  def test_unpack_undoes_pack(self, shapes):
    rng = np.random.default_rng(0)
    values = [rng.normal(size=shape).astype("float32") for shape in shapes]
    items = [_item(*shape) for shape in shapes]

    @tf.function
    def there_and_back(*tensors):
      return packing.unpack(packing.pack(tensors), items)

    for value, result in zip(
      values, there_and_back(*map(tf.constant, values)), strict=True
    ):
      self.assertEqual(result.shape, value.shape)
      np.testing.assert_array_equal(result, value)

  def test_several_are_laid_end_to_end(self):
    packed = packing.pack([tf.constant([[1.0, 2.0]]), tf.constant(3.0)])
    np.testing.assert_array_equal(packed, [1, 2, 3])

  def test_dtype_is_kept(self):
    packed = packing.pack(
      [tf.constant([1], tf.int64), tf.constant([2], "int64")]
    )
    self.assertEqual(packed.dtype, tf.int64)

  def test_one_of_another_shape_is_refused(self):
    with self.assertRaises((tf.errors.InvalidArgumentError, ValueError)):
      packing.unpack(tf.zeros([3]), [_item(2)])


if __name__ == "__main__":
  absltest.main()
