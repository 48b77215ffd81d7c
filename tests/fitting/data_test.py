"""The stream of parts, and how replicas share it."""

import itertools

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests.support import stores
from tf_replicas.fitting import data

_NUMBERS = np.arange(22, dtype=np.float32)


def _parts(made, num_shards, index, first=0, count=20, updates_per_batch=1):
  """Examples and weights of the first parts of a replica."""
  batches = made.part_fn(num_shards, index, first, updates_per_batch)
  return [
    tuple(tf.nest.map_structure(np.asarray, b)) for b in batches.take(count)
  ]


def _examples(part):
  return part[0][0].tolist() if len(part) == 1 or part[1][0] > 0 else []


class PartsTest(stores.TestCase):
  """22 examples in batches of 8: 8, 8 and 6."""

  def _made(self, kind, contributions):
    arguments = {"num_contributions": contributions}
    if kind == "arrays":
      return data.make(_NUMBERS, batch_size=8, shuffle=False, **arguments)
    dataset = tf.data.Dataset.from_tensor_slices(_NUMBERS).batch(8)
    return data.make(dataset, **arguments)

  @parameterized.parameters(
    itertools.product(["arrays", "data set"], [(1, 1), (2, 2), (3, 3), (2, 3)])
  )
  def test_replicas_share_out_every_update(self, kind, counts):
    contributions, replicas = counts
    made = self._made(kind, contributions)
    self.assertEqual(made.steps_per_epoch, 3)
    streams = [
      _parts(made, replicas, r, count=6 * contributions)
      for r in range(replicas)
    ]
    # The parts in the order of the stream.
    stream = [p for turn in zip(*streams, strict=True) for p in turn]
    for update in range(6):
      begin = update * contributions
      parts = stream[begin : begin + contributions]
      found = [e for part in parts for e in _examples(part)]
      first = update % 3 * 8
      self.assertEqual(found, list(range(first, min(first + 8, 22))))

  @parameterized.parameters((1, 1), (3, 1), (2, 2))
  def test_leased_parts_are_those_of_the_stream(self, contributions, updates):
    made = data.make(_NUMBERS, batch_size=8, num_contributions=contributions)
    stream = _parts(made, 1, 0, updates_per_batch=updates)
    numbers = [7, 0, 19, 3, 12]
    leased = made.leased_fn(
      tf.data.Dataset.from_tensor_slices(np.array(numbers)), updates
    )
    for number, part in zip(numbers, leased, strict=True):
      tf.nest.map_structure(
        np.testing.assert_array_equal, tuple(part), stream[number]
      )

  @parameterized.parameters(2, 5)
  def test_epochs_go_on_where_the_last_one_ended(self, steps):
    made = data.make(
      _NUMBERS, batch_size=8, shuffle=False, steps_per_epoch=steps
    )
    self.assertEqual(made.steps_per_epoch, steps)
    found = [e for p in _parts(made, 1, 0, count=4) for e in _examples(p)]
    self.assertEqual(found, [*range(22), *range(8)])

  @parameterized.parameters("arrays", "data set")
  def test_weights_make_the_mean_over_all_examples(self, kind):
    made = self._made(kind, 4)
    parts = [_parts(made, 4, r, count=3)[2] for r in range(4)]
    means = [w[0] * np.mean(d[0]) for d, w in parts]
    self.assertAlmostEqual(np.mean(means), _NUMBERS[16:].mean(), places=5)

  def test_an_empty_part_counts_nothing(self):
    made = data.make(
      np.arange(9.0), batch_size=8, shuffle=False, num_contributions=2
    )
    (_, last), (_, empty) = (
      [p[1] for p in _parts(made, 2, r, count=2)] for r in range(2)
    )
    self.assertEqual([last.tolist(), empty.tolist()], [[0.0], [2.0]])

  @parameterized.parameters("arrays", "data set")
  def test_resumes_at_an_update(self, kind):
    made = self._made(kind, 2)
    whole, rest = _parts(made, 2, 1, count=9), _parts(made, 2, 1, 4, count=5)
    for one, other in zip(whole[4:], rest, strict=True):
      np.testing.assert_array_equal(one[0][0], other[0][0])

  @parameterized.product(
    kind=["arrays", "data set"],
    counts=[(1, 2), (1, 3), (2, 3)],
    first=[1, 2, 4],
  )
  def test_a_replica_that_starts_later_keeps_its_parts(
    self, kind, counts, first
  ):
    """Part p is that of replica p modulo the number of replicas."""
    contributions, replicas = counts
    made = self._made(kind, contributions)
    stream = [_examples(p) for p in _parts(made, 1, 0, count=40)]
    for replica in range(replicas):
      found = _parts(made, replicas, replica, first, count=4)
      begin = first * contributions
      numbers = [p for p in range(begin, 40) if p % replicas == replica]
      self.assertEqual(
        [_examples(p) for p in found], [stream[p] for p in numbers[:4]]
      )

  @parameterized.product(counts=[(1, 2), (2, 3), (3, 3)], first=[1, 2, 4])
  def test_the_same_with_a_function(self, counts, first):
    contributions, replicas = counts

    def x(context):
      return (
        tf.data.Dataset.range(99)
        .batch(1)
        .shard(context.num_input_pipelines, context.input_pipeline_id)
      )

    made = data.make(x, steps_per_epoch=9, num_contributions=contributions)
    for replica in range(replicas):
      found = _parts(made, replicas, replica, first, count=4)
      begin = first * contributions
      numbers = [p for p in range(begin, 40) if p % replicas == replica]
      self.assertEqual([int(part[0][0][0]) for part in found], numbers[:4])

  def test_an_iterator_is_read_once(self):
    made = data.make(iter([(_NUMBERS,)] * 8), steps_per_epoch=4)
    self.assertLen(_parts(made, 1, 0, count=2), 2)
    with self.assertRaisesRegex(ValueError, "must be readable again"):
      made.part_fn(1, 0, 2, 1)

  @parameterized.parameters("arrays", "data set")
  def test_a_batch_of_two_updates_comes_twice(self, kind):
    made = self._made(kind, 2)
    once, twice = (
      _parts(made, 2, 1, first=2 * u, count=6 * u, updates_per_batch=u)
      for u in (1, 2)
    )
    expected = [_examples(p) for p in once for _ in range(2)]
    self.assertEqual([_examples(p) for p in twice], expected)

  def test_shuffled_epochs_have_all_examples_in_another_order(self):
    made = data.make(_NUMBERS, batch_size=8, num_contributions=2)
    orders = []
    for epoch in range(2):
      parts = [_parts(made, 2, r, 3 * epoch, count=3) for r in range(2)]
      orders.append([e for p in sum(parts, []) for e in _examples(p)])
      self.assertEqual(sorted(orders[-1]), _NUMBERS.tolist())
    self.assertNotEqual(*orders)

  def test_an_even_division_needs_no_weights(self):
    made = data.make(np.zeros([32, 3]), batch_size=8, num_contributions=2)
    (part,) = _parts(made, 2, 0, count=1)
    self.assertLen(part, 1)
    self.assertEqual(made.spec[0].shape, [4, 3])


class WeightsTest(stores.TestCase):
  """Classes weigh as Keras weighs them."""

  @parameterized.parameters(
    (np.array([0, 1, 2, 1]),),
    (np.array([[0], [1], [2], [1]]),),
    (np.eye(3, dtype=np.float32)[[0, 1, 2, 1]],),
    (np.array([0.1, 0.9, 1.8, 1.2]),),
    (np.array([[0.1], [0.9], [1.8], [1.2]]),),
  )
  def test_class_weight(self, labels):
    made = data.make(
      np.zeros([4, 2]),
      labels,
      class_weight={0: 3.0, 1: 0.5},
      batch_size=4,
      shuffle=False,
    )
    ((part,),) = _parts(made, 1, 0, count=1)
    self.assertEqual(part[2].tolist(), [3.0, 0.5, 1.0, 0.5])

  def test_class_weight_multiplies_sample_weight(self):
    made = data.make(
      np.zeros([2, 2]),
      np.array([0, 1]),
      sample_weight=np.array([2.0, 4.0]),
      class_weight={0: 3.0, 1: 0.5},
      batch_size=2,
      shuffle=False,
    )
    ((part,),) = _parts(made, 1, 0, count=1)
    self.assertEqual(part[2].tolist(), [6.0, 2.0])


class SplitTest(stores.TestCase):
  """`validation_split` takes the last examples, as Keras does."""

  def test_every_array_is_cut(self):
    x = {"a": np.arange(10), "b": [np.arange(10) * 2, np.arange(10) * 3]}
    (x1, y1, w1), (x2, y2, w2) = data.split_validation(
      x, np.arange(10), None, 0.25
    )
    for part, y, numbers in ((x1, y1, range(7)), (x2, y2, range(7, 10))):
      self.assertEqual(part["a"].tolist(), list(numbers))
      self.assertEqual(part["b"][1].tolist(), [3 * n for n in numbers])
      self.assertEqual(y.tolist(), list(numbers))
    self.assertEqual([w1, w2], [None, None])

  @parameterized.parameters(
    (np.zeros([1, 1]), 0.1, "leave examples.*Received: 0.1 of 1 examples"),
    (np.zeros([3, 1]), 1.0, "leave examples.*Received: 1.0 of 3 examples"),
    (tf.data.Dataset.range(3), 0.5, "needs arrays.*type _RangeDataset"),
    (lambda context: None, 0.5, "needs arrays.*type function"),
  )
  def test_refuses(self, x, share, words):
    with self.assertRaisesRegex((TypeError, ValueError), words):
      data.split_validation(x, None, None, share)


class OtherArraysTest(stores.TestCase):
  """Columns of a table, as of pandas, are arrays."""

  class Column:
    """Has what NumPy asks for, as the columns of pandas have."""

    def __array__(self, dtype=None, copy=None):
      return np.arange(4, dtype=dtype)

  def test_columns(self):
    made = data.make({"a": self.Column()}, batch_size=4, shuffle=False)
    ((part,),) = _parts(made, 1, 0, count=1)
    self.assertEqual(part[0]["a"].tolist(), [0, 1, 2, 3])


class ConnectTest(stores.TestCase):
  """What a process has made before it joins a cluster."""

  def test_a_data_set_with_a_table_is_refused(self):
    words = tf.constant(["red", "green"])
    initializer = tf.lookup.KeyValueTensorInitializer(words, [0, 1])
    table = tf.lookup.StaticHashTable(initializer, -1)
    dataset = tf.data.Dataset.from_tensors(words).repeat()
    data.check_can_connect(dataset.shuffle(3), "x")
    data.check_can_connect(np.zeros([3]), "x")
    used = dataset.map(table.lookup)
    for each in (used.batch(2), tf.data.Dataset.zip(dataset, used)):
      with self.assertRaisesRegex(
        ValueError, "`validation_data` must not use.*uses 1 of them"
      ):
        data.check_can_connect(each, "validation_data")

  def test_validation_data(self):
    dataset = tf.data.Dataset.range(3)
    for given in (dataset, lambda: dataset):
      found = data.validation(given)
      self.assertEqual(list(found.as_numpy_iterator()), [0, 1, 2])
      self.assertEqual(found.cardinality(), 3)
    self.assertIsNone(data.validation(None))
