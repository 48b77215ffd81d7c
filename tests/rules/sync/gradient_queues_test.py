"""Tests for rules.sync.gradient_queues."""

import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests.support import stores
from tf_replicas.rules.sync import gradient_queues
from tf_replicas.runtime import packing
from tf_replicas.runtime import resources
from tf_replicas.store import gradient_math
from tf_replicas.store import parameter_store
from tf_replicas.store import placement

SHAPES = {"table": (5, 2), "kernel": (2, 4), "bias": (4,), "scale": ()}
IS_SPARSE = [True, False, False, False]


def _slices(rows, value):
  return tf.IndexedSlices(
    tf.fill([len(rows), 2], float(value)), tf.constant(rows, tf.int64)
  )


def _dense(value):
  return [tf.fill(s, float(value)) for s in list(SHAPES.values())[1:]]


class GradientQueuesTest(stores.TestCase):
  def _queues(
    self,
    *,
    num_replicas=3,
    num_tasks=2,
    shapes=SHAPES,
    sparse=None,
    wire_dtype=None,
  ):
    specs = [stores.spec(path, shape) for path, shape in shapes.items()]
    self.store = stores.attach(
      specs, num_tasks, stores.cut(num_tasks), wire_dtype
    )
    if sparse is None:
      sparse = IS_SPARSE
    return gradient_queues.GradientQueues(self.store, num_replicas, sparse)

  def _put(self, queues, replica, tag, gradients):
    tf.function(
      lambda: queues.put(
        replica, tf.constant(tag, tf.int64), queues.pack(gradients)
      ),
      autograph=False,
    )()

  def _take(self, queues, accepted):
    """The sums of all tasks, joined to whole arrays; sparse ones as dense."""
    accepted = tf.constant(accepted, tf.int64, [len(accepted), 2])

    @tf.function(autograph=False)
    def take(task):
      return queues.take_sums(task, accepted)

    parts = {}
    for task in range(self.store.num_tasks):
      for owner, total in zip(
        self.store.contributed_shards(task), take(task), strict=True
      ):
        parts[owner] = total
    wholes = []
    for index, shards in enumerate(self.store.shards):
      joined = []
      for number, shard in enumerate(shards):
        total = parts[index, number]
        if isinstance(total, tf.IndexedSlices):
          total = tf.math.unsorted_segment_sum(
            total.values, total.indices, shard.shape[0]
          )
        joined.append(np.broadcast_to(total, shard.shape))
      axis = shards[0].axis
      wholes.append(
        joined[0] if len(joined) == 1 else np.concatenate(joined, axis)
      )
    return wholes

  @parameterized.parameters(1, 2, 3)
  def test_sums_what_was_accepted(self, num_tasks):
    queues = self._queues(num_tasks=num_tasks)
    self._put(queues, 2, 7, [_slices([4, 0], 10), *_dense(1)])
    self._put(queues, 0, 3, [_slices([4], 1), *_dense(2)])
    table, *dense = self._take(queues, [(2, 7), (0, 3)])
    np.testing.assert_array_equal(table[:, 0], [10, 0, 0, 0, 11])
    for total in dense:
      np.testing.assert_array_equal(total, np.full_like(total, 3))

  def test_repeated_rows_add_up(self):
    queues = self._queues()
    self._put(queues, 0, 1, [_slices([3, 3, 3], 2), *_dense(0)])
    table, *_ = self._take(queues, [(0, 1)])
    np.testing.assert_array_equal(table[:, 1], [0, 0, 0, 6, 0])

  def test_order_of_arrival_does_not_matter(self):
    # In float32 (1e8 + 1) - 1e8 is 0, but (1e8 - 1e8) + 1 is 1.
    terms = {0: 1e8, 1: -1e8, 2: 1.0}
    results = []
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
      self.new_cluster()
      queues = self._queues()
      for replica in order:
        self._put(queues, replica, 1, [None, *_dense(terms[replica])])
      accepted = [(replica, 1) for replica in order]
      results.append(self._take(queues, accepted)[1].tolist())
    self.assertEqual(results, [np.ones([2, 4]).tolist()] * 3)

  def test_several_of_one_replica(self):
    queues = self._queues()
    for tag in (1, 2, 3):
      self._put(queues, 1, tag, [None, *_dense(tag)])
    accepted = [(1, 1), (1, 3), (1, 2)]
    np.testing.assert_array_equal(self._take(queues, accepted)[2], [6] * 4)

  def test_void_ones_are_thrown_away(self):
    queues = self._queues()
    self._put(queues, 0, 1, [_slices([0], 100), *_dense(100)])
    self._put(queues, 0, 2, [_slices([0], 50), *_dense(50)])
    self._put(queues, 0, 3, [_slices([0], 1), *_dense(1)])
    self._put(queues, 0, 4, [_slices([0], 2), *_dense(2)])
    for tag, expected in ((3, 1), (4, 2)):
      table, kernel, bias, scale = self._take(queues, [(0, tag)])
      self.assertEqual(table[0, 0], expected)
      for total in (kernel, bias, scale):
        np.testing.assert_array_equal(total, np.full_like(total, expected))

  def test_what_is_not_accepted_stays_for_later(self):
    queues = self._queues()
    self._put(queues, 0, 1, [None, *_dense(1)])
    self._put(queues, 1, 5, [None, *_dense(5)])
    np.testing.assert_array_equal(self._take(queues, [(0, 1)])[2], [1] * 4)
    np.testing.assert_array_equal(self._take(queues, [(1, 5)])[2], [5] * 4)

  def test_none_counts_as_zero(self):
    queues = self._queues()
    self._put(queues, 0, 1, [None, tf.ones([2, 4]), None, None])
    self._put(queues, 1, 1, [_slices([1], 3), None, tf.ones([4]), None])
    table, kernel, bias, scale = self._take(queues, [(0, 1), (1, 1)])
    np.testing.assert_array_equal(table[:, 0], [0, 3, 0, 0, 0])
    np.testing.assert_array_equal(kernel, np.ones([2, 4]))
    np.testing.assert_array_equal(bias, np.ones([4]))
    self.assertEqual(scale, 0)

  def test_nobody_has_anything(self):
    queues = self._queues()
    self._put(queues, 0, 1, [None] * 4)
    for total in self._take(queues, [(0, 1)]):
      np.testing.assert_array_equal(total, np.zeros_like(total))

  def test_large_ones_travel_alone(self):
    size = packing.SMALL_BYTES
    shapes = {"large": (size,), "small": (2,), "other": (size + 1,)}
    queues = self._queues(num_tasks=1, shapes=shapes, sparse=[False] * 3)
    gradients = [tf.ones([size]), None, tf.range(size + 1, dtype=tf.float32)]
    self._put(queues, 0, 1, gradients)
    self._put(queues, 1, 1, [None, tf.ones([2]), None])
    large, small, other = self._take(queues, [(0, 1), (1, 1)])
    np.testing.assert_array_equal(large, gradients[0])
    np.testing.assert_array_equal(small, [1, 1])
    np.testing.assert_array_equal(other, gradients[2])

  def test_gradients_take_the_dtype_of_the_variable(self):
    queues = self._queues()
    halves = [tf.cast(g, tf.float16) for g in _dense(2)]
    table = tf.IndexedSlices(
      tf.ones([1, 2], tf.float16), tf.constant([3], tf.int32)
    )
    self._put(queues, 0, 1, [table, *halves])
    for total in self._take(queues, [(0, 1)]):
      self.assertEqual(total.dtype, np.float32)

  def test_slices_for_a_variable_announced_as_dense(self):
    queues = self._queues(sparse=[False] * 4)
    self._put(queues, 0, 1, [_with_shape(_slices([4, 4], 1)), *_dense(0)])
    table, *_ = self._take(queues, [(0, 1)])
    np.testing.assert_array_equal(table[:, 0], [0, 0, 0, 0, 2])

  def test_dense_for_a_variable_announced_as_sparse_is_refused(self):
    queues = self._queues()
    with self.assertRaisesRegex(ValueError, "'table'.*IndexedSlices"):
      self._put(queues, 0, 1, [tf.ones([5, 2]), *_dense(0)])

  def test_replica_may_be_a_tensor(self):
    queues = self._queues()

    @tf.function(autograph=False)
    def put(replica):
      packed = queues.pack([None, *_dense(4)])
      queues.put(replica, tf.constant(1, tf.int64), packed)

    for replica in range(3):
      put(tf.constant(replica, tf.int64))
    totals = self._take(queues, [(0, 1), (1, 1), (2, 1)])
    np.testing.assert_array_equal(totals[2], [12] * 4)

  @parameterized.parameters(0, 1)
  def test_scalars_are_sent_with_the_gradients(self, task):
    """PS task 0 gets them, too, if it has no shard."""
    self.store = parameter_store.ParameterStore(
      [stores.spec("kernel", (2, 4))],
      [[placement.Shard("kernel", 0, 1, task, 0, 0, 2, (2, 4), "float32")]],
      num_tasks=2,
      device_of_task=stores.device,
      namespace=stores.namespace(),
    )
    queues = gradient_queues.GradientQueues(self.store, 2, [False])

    @tf.function(autograph=False)
    def put():
      tag = tf.constant(7, tf.int64)
      scalars = resources.Scalars(1, tag, tf.constant(False), tf.constant(0.5))
      packed = queues.pack([tf.ones([2, 4])], scalars)

      def then(arrived, landed):
        with tf.control_dependencies([arrived]):
          return [tf.identity(scalar) for scalar in landed]

      return queues.put_with_scalars(packed, scalars, then)

    self.assertEqual([x.numpy() for x in put()], [1, 7, False, 0.5])
    (total,) = self._take(queues, [(1, 7)])
    np.testing.assert_array_equal(total, np.ones([2, 4]))

  def test_two_clients_share_the_queues(self):
    ours = self._queues()
    theirs = self._queues()
    self._put(theirs, 0, 1, [None, *_dense(4)])
    np.testing.assert_array_equal(self._take(ours, [(0, 1)])[2], [4] * 4)


def _with_shape(slices):
  return tf.IndexedSlices(
    slices.values, slices.indices, tf.constant([5, 2], tf.int64)
  )

  @parameterized.parameters("bfloat16", "float16")
  def test_wire_dtype_rounds_what_travels_and_not_the_sums(self, dtype):
    """1 / 3 is another number in 16 bits, and 256 + 1 in bfloat16 is 256."""
    queues = self._queues(wire_dtype=dtype)
    for replica, value in enumerate((1 / 3, 256.0, 1.0)):
      gradients = [_slices([3], value), *_dense(value)]
      self._put(queues, replica, 7, gradients)
    sums = self._take(queues, [(0, 7), (1, 7), (2, 7)])
    third = float(tf.cast(tf.constant(1 / 3), dtype))
    self.assertNotEqual(third, np.float32(1 / 3))
    expected = np.float32(third + 257.0)
    np.testing.assert_array_equal(sums[0][3], [expected] * 2)
    for total, gradient in zip(sums[1:], gradients[1:], strict=True):
      self.assertEqual(total.dtype, np.float32)
      np.testing.assert_array_equal(total, np.full(gradient.shape, expected))


class AllFiniteTest(stores.TestCase):
  @parameterized.named_parameters(
    ("nothing", [], True),
    ("only_none", [None, None], True),
    ("small", [[1.0, -2.0], [0.0]], True),
    # Their squares are not finite, but they are.
    ("huge", [[1e30, -3e38]], True),
    ("huge_among_others", [[1.0], None, [3e38, 3e38]], True),
    ("nan", [[1.0], [float("nan")]], False),
    ("inf", [[1.0, float("inf")]], False),
    ("minus_inf", [[-float("inf")], [1.0]], False),
    ("nan_beside_huge", [[1e30], [float("nan")]], False),
    ("empty", [[]], True),
  )
  def test_dense(self, values, expected):
    gradients = [None if v is None else tf.constant(v) for v in values]
    result = tf.function(
      lambda: gradient_math.all_finite(gradients), autograph=False
    )()
    self.assertEqual(bool(result), expected)

  @parameterized.parameters(("bfloat16", True), ("float16", False))
  def test_as_it_arrives(self, dtype, expected):
    gradients = [tf.constant([1.0, 1e5])]
    found = gradient_math.all_finite(gradients, [tf.as_dtype(dtype)])
    self.assertEqual(bool(found), expected)

  def test_what_is_not_narrowed_travels_as_it_is(self):
    """float64, and the counts of a statistic."""
    specs = [
      stores.spec("w", [1], dtype="float64"),
      stores.spec("sum", [1], trainable=False),
      stores.spec("b", [1]),
    ]
    dtypes = stores.attach(specs, wire_dtype="float16").wire_dtypes
    self.assertEqual(dtypes, [tf.float64, tf.float16, tf.float32])
    values = [tf.constant([1e5], tf.float64), None, tf.constant([1e5])]
    self.assertTrue(gradient_math.all_finite(values, dtypes))

  @parameterized.parameters((1.0, True), (3e38, True), (float("nan"), False))
  def test_slices(self, value, expected):
    gradient = _slices([1], value)
    self.assertEqual(bool(gradient_math.all_finite([gradient])), expected)

  @parameterized.parameters("float16", "bfloat16", "float64")
  def test_dtypes(self, dtype):
    largest = tf.constant([float(tf.as_dtype(dtype).max)], dtype)
    infinite = tf.constant([float("inf")], dtype)
    self.assertTrue(gradient_math.all_finite([largest]))
    self.assertFalse(gradient_math.all_finite([largest, infinite]))

  def test_of_mixed_dtypes(self):
    gradients = [tf.ones([1], tf.float16), tf.ones([2], tf.float64)]
    self.assertTrue(gradient_math.all_finite(gradients))


if __name__ == "__main__":
  absltest.main()
