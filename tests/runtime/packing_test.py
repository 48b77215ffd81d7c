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
    ("smallest_large", [_item(LARGEST_SMALL + 1), _item()], [[0], [1]]),
    (
      "bytes_not_elements",
      [_item(LARGEST_SMALL, dtype=tf.float64), _item(1, dtype=tf.float64)],
      [[0], [1]],
    ),
    (
      "several_groups_in_order",
      [_item(LARGEST_SMALL)] * 6 + [_item(3)],
      [[0, 1, 2, 3], [4, 5, 6]],
    ),
    (
      "several_groups_of_each_dtype",
      [_item(LARGEST_SMALL), _item(LARGEST_SMALL, dtype=tf.int32)] * 5,
      [[0, 2, 4, 6], [1, 3, 5, 7], [8], [9]],
    ),
    ("empty_ones_too", [_item(0), _item(0, 5)], [[0, 1]]),
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


class BundleTest(parameterized.TestCase):
  def _there_and_back(self, values, shapes):
    """What arrives, and how many tensors were sent."""
    sent = []

    @tf.function(
      input_signature=[
        tf.TensorSpec(shape, value.dtype)
        for value, shape in zip(values, shapes, strict=True)
      ]
    )
    def run(*tensors):
      bundle = packing.bundle(tensors)
      sent.append(len(bundle.packed))
      return bundle.unpack(bundle.packed)

    return run(*map(tf.constant, values)), sent[0]

  @parameterized.parameters(0, 1, 7)
  def test_rows_and_what_is_small_are_one_tensor(self, count):
    rng = np.random.default_rng(count)
    values = [
      rng.normal(size=[5]).astype("float32"),
      rng.normal(size=[count, 3]).astype("float32"),
      rng.integers(0, 1 << 40, [count]),
      rng.normal(size=[LARGEST_SMALL + 1]).astype("float32"),
      rng.normal(size=[count, 1, 2]).astype("float16"),
      np.float64(3.5),
      rng.integers(-9, 9, [count]).astype("int8"),
    ]
    shapes = [
      *([5], [None, 3], [None], [LARGEST_SMALL + 1], [None, 1, 2], []),
      [None],
    ]
    found, num_sent = self._there_and_back(values, shapes)
    self.assertEqual(num_sent, 2)
    for value, result in zip(values, found, strict=True):
      self.assertEqual(result.dtype, value.dtype)
      np.testing.assert_array_equal(result, value)

  @parameterized.parameters(
    ([2, LARGEST_SMALL + 1], 2), ([2, LARGEST_SMALL, 1], 1), ([0, 2], 1)
  )
  def test_without_rows_what_is_small_is_one_tensor(self, sizes, num_sent):
    values = [np.arange(size, dtype="float32") for size in sizes]
    values.append(np.int64([3]))
    shapes = [value.shape for value in values]
    found, num_found = self._there_and_back(values, shapes)
    self.assertEqual(num_found, num_sent)
    for value, result in zip(values, found, strict=True):
      np.testing.assert_array_equal(result, value)

  def test_a_single_tensor_is_sent_as_it_is(self):
    bundle = packing.bundle([tf.constant([1, 2])])
    self.assertEqual(bundle.packed[0].dtype, tf.int32)

  def test_keeps_every_bit(self):
    bits = np.uint32([0x7FC00001, 0xFFA00000, 0x80000000])  # NaN, NaN, -0.
    (found,), _ = self._there_and_back([bits.view("float32")], [[None]])
    np.testing.assert_array_equal(found.numpy().view("uint32"), bits)


class FetchTest(parameterized.TestCase):
  """Six groups: five large tensors, and two small ones after the first."""

  def _fetch(self, *, in_order):
    large = 2 * LARGEST_SMALL + 1
    sizes = large, 3, large, 2, large, large, large
    items = [_item(size, dtype=tf.bfloat16) for size in sizes]
    parcel = packing.Parcel(items, [F32] * len(items))
    self.assertEqual(parcel.groups, [[0], [1, 3], [2], [4], [5], [6]])
    reads = {}

    def read(i):
      reads[i] = tf.fill(items[i].shape, tf.cast(i, F32), name=f"read{i}").op
      return reads[i].outputs[0]

    @tf.function(autograph=False)
    def run():
      return parcel.fetch("/device:CPU:0", read, in_order=in_order)[0]

    traced = run.get_concrete_function()
    for i, value in enumerate(traced()):
      self.assertEqual(value.dtype, F32)
      np.testing.assert_array_equal(value, np.full(items[i].shape, i))
    return reads

  @staticmethod
  def _waits_for(op, other):
    """Whether `op` runs only after `other`."""
    reached, left = set(), [op]
    while left:
      found = left.pop()
      reached.add(found.name)
      inputs = [tensor.op for tensor in found.inputs] + found.control_inputs
      left += [op for op in inputs if op.name not in reached]
    return other.name in reached

  def test_in_order_four_groups_are_on_their_way(self):
    reads = self._fetch(in_order=True)
    waits = {
      (i, j)
      for i in reads
      for j in reads
      if i != j and self._waits_for(reads[i], reads[j])
    }
    self.assertEqual(waits, {(5, 0), (6, 1), (6, 3)})

  def test_all_are_read_at_once_otherwise(self):
    reads = self._fetch(in_order=False)
    for i in reads:
      for j in reads:
        self.assertEqual(self._waits_for(reads[i], reads[j]), i == j)


if __name__ == "__main__":
  absltest.main()
