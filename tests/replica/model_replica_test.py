"""Tests for replica.model_replica."""

import dataclasses
import traceback

import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests.support import stores
from tf_replicas.replica import model_replica


def _gradients(gradients, loss=0.0, num_examples=1):
  return model_replica.Gradients(
    gradients, tf.constant(loss), tf.constant(num_examples, tf.int64)
  )


def _slices(rows, values):
  return tf.IndexedSlices(
    tf.constant(values, tf.float32),
    tf.constant(rows, tf.int64),
    tf.constant([4, 1], tf.int64),
  )


class TrainableTest(parameterized.TestCase):
  @parameterized.parameters(
    (True, False, "`variables` must be trainable. Received: a"),
    (False, True, "`statistics` must not be trainable. Received: b"),
  )
  def test_what_is_trained_is_trainable(self, is_frozen, is_trained, words):
    """Else its gradient would be taken for a statistic's way, or vice versa."""
    a = tf.Variable(1.0, name="a", trainable=not is_frozen)
    b = tf.Variable(1.0, name="b", trainable=is_trained)
    with self.assertRaisesRegex(ValueError, words):
      model_replica.Replica([a], _loss, _batches, statistics=[b])


class AverageTowersTest(stores.TestCase):
  def test_mean_of_gradients_and_losses_sum_of_examples(self):
    result = model_replica.average_towers(
      [
        _gradients([tf.constant([x, -x])], loss=x, num_examples=8)
        for x in (1.0, 2.0, 6.0)
      ]
    )
    np.testing.assert_allclose(result.gradients[0], [3, -3])
    self.assertAlmostEqual(float(result.loss), 3.0, places=6)
    self.assertEqual(int(result.num_examples), 24)
    self.assertEqual(result.num_examples.dtype, tf.int64)

  def test_none_in_all_stays_none(self):
    result = model_replica.average_towers([_gradients([None])] * 2)
    self.assertEqual(result.gradients, [None])

  def test_none_in_some_counts_as_zero(self):
    result = model_replica.average_towers(
      [_gradients([None]), _gradients([tf.constant([4.0])])]
    )
    np.testing.assert_allclose(result.gradients[0], [2])

  def test_slices_stay_slices(self):
    result = model_replica.average_towers(
      [
        _gradients([_slices([1, 3], [[2], [4]])]),
        _gradients([_slices([3], [[8]])]),
      ]
    )
    self.assertIsInstance(result.gradients[0], tf.IndexedSlices)
    np.testing.assert_allclose(
      tf.convert_to_tensor(result.gradients[0])[:, 0], [0, 1, 0, 6]
    )

  def test_slices_and_dense_make_dense(self):
    result = model_replica.average_towers(
      [
        _gradients([_slices([1], [[2]])]),
        _gradients([tf.ones([4, 1])]),
      ]
    )
    np.testing.assert_allclose(result.gradients[0][:, 0], [0.5, 1.5, 0.5, 0.5])

  def test_dtype_is_kept(self):
    half = tf.constant([1.0], tf.float16)
    result = model_replica.average_towers(
      [_gradients([half]), _gradients([half])]
    )
    self.assertEqual(result.gradients[0].dtype, tf.float16)


TABLE = np.arange(8, dtype="float32").reshape(4, 2)
KERNEL = np.float32([[1.0], [-0.5]])


def _loss(parameters, rows, labels):
  table, kernel, _ = parameters
  outputs = tf.gather(table, rows) @ kernel
  return tf.reduce_mean(tf.square(outputs[:, 0] - labels))


def _batches(num_shards, shard_index, start_example=0):
  del num_shards, shard_index, start_example
  rows = tf.constant([0, 1, 1, 3], tf.int64)
  batch = (rows, tf.constant([1.0, 2, 3, 4]))
  return tf.data.Dataset.from_tensors(batch).repeat()


def _replica(devices=()):
  variables = [
    tf.Variable(TABLE, name="table"),
    tf.Variable(KERNEL, name="kernel"),
    tf.Variable(0.0, name="unused"),
  ]
  return model_replica.Replica(variables, _loss, _batches, devices)


def _dense(gradient):
  return None if gradient is None else tf.convert_to_tensor(gradient).numpy()


class ReplicaTest(stores.TestCase):
  def _compute(self, replica, *, is_eager=False, **kwargs):
    parameters = [tf.identity(v) for v in replica.variables]
    batch = next(iter(replica.dataset_fn(1, 0, 0)))

    def gradients():
      return replica.gradients(parameters, batch, **kwargs)

    return gradients() if is_eager else tf.function(gradients)()

  def test_hand_numbers(self):
    # Outputs -0.5+0, 2-1.5, 2-1.5, 6-3.5 against 1, 2, 3, 4.
    result = self._compute(_replica())
    self.assertAlmostEqual(
      float(result.loss), (1.5**2 + 1.5**2 + 2.5**2 + 1.5**2) / 4, places=5
    )
    self.assertEqual(int(result.num_examples), 4)
    # d loss / d kernel = mean of 2 * error * row.
    errors = np.array([-1.5, -1.5, -2.5, -1.5])
    expected = 2 * (errors[:, None] * TABLE[[0, 1, 1, 3]]).mean(axis=0)
    np.testing.assert_allclose(result.gradients[1][:, 0], expected)
    self.assertIsNone(result.gradients[2])

  @parameterized.parameters(1, 2, 4)
  def test_towers_equal_one_device_with_the_whole_batch(self, num_towers):
    whole = self._compute(_replica())
    devices = [stores.device(i % 4) for i in range(num_towers)]
    split = self._compute(_replica(devices))
    self.assertAlmostEqual(float(split.loss), float(whole.loss), places=5)
    self.assertEqual(int(split.num_examples), 4)
    for ours, theirs in zip(split.gradients, whole.gradients, strict=True):
      if theirs is None:
        self.assertIsNone(ours)
      else:
        np.testing.assert_allclose(_dense(ours), _dense(theirs), rtol=1e-6)

  @parameterized.parameters((0, 2), (0, 4), (2, 2))
  def test_micro_batches_equal_the_whole_batch(self, num_towers, parts):
    whole = self._compute(_replica())
    replica = _replica([stores.device(i) for i in range(num_towers)])
    replica = dataclasses.replace(replica, micro_batches=parts)
    split = self._compute(replica)
    self.assertAlmostEqual(float(split.loss), float(whole.loss), places=5)
    self.assertEqual(int(split.num_examples), 4)
    self.assertIsInstance(split.gradients[0], tf.IndexedSlices)
    self.assertIsNone(split.gradients[2])
    for ours, theirs in zip(split.gradients[:2], whole.gradients, strict=False):
      np.testing.assert_allclose(_dense(ours), _dense(theirs), rtol=1e-6)

  def test_each_tower_computes_on_its_device(self):
    devices = [stores.device(1), stores.device(2)]
    seen = []

    def loss_fn(parameters, rows, labels):
      loss = _loss(parameters, rows, labels)
      seen.append(loss.device)
      return loss

    replica = model_replica.Replica(
      _replica().variables, loss_fn, _batches, devices
    )
    self._compute(replica)
    self.assertIn("CPU:1", seen[0])
    self.assertIn("CPU:2", seen[1])

  def test_scaled_loss_scales_gradients_but_not_the_report(self):
    plain = self._compute(_replica())
    scaled = self._compute(_replica(), scale_loss=lambda loss: 8 * loss)
    self.assertAlmostEqual(float(scaled.loss), float(plain.loss), places=5)
    np.testing.assert_allclose(
      scaled.gradients[1], 8 * plain.gradients[1], rtol=1e-6
    )

  def test_variables_are_only_a_pattern(self):
    replica = _replica()
    parameters = [v + 1.0 for v in replica.variables]
    batch = next(iter(replica.dataset_fn(1, 0, 0)))
    moved = replica.gradients(parameters, batch)
    at_home = self._compute(replica)
    self.assertNotAlmostEqual(float(moved.loss), float(at_home.loss))
    np.testing.assert_array_equal(replica.variables[0], TABLE)

  @parameterized.product(
    num_towers=[0, 2], is_synchronized=[False, True], is_eager=[False, True]
  )
  def test_a_loss_may_need_autograph(
    self, num_towers, is_synchronized, is_eager
  ):
    def loss_fn(parameters, rows, labels):
      if tf.reduce_sum(labels) > 0:
        return _loss(parameters, rows, labels)
      else:
        return tf.constant(0.0)

    replica = _replica([stores.device(i) for i in range(num_towers)])
    replica = dataclasses.replace(
      replica, loss_fn=loss_fn, is_synchronized=is_synchronized
    )
    whole = self._compute(_replica())
    result = self._compute(replica, is_eager=is_eager)
    self.assertAlmostEqual(float(result.loss), float(whole.loss), places=5)
    np.testing.assert_allclose(result.gradients[1], whole.gradients[1])

  def test_nothing_else_is_converted(self):
    """It would take a second of every start."""
    files = []

    @tf.autograph.experimental.do_not_convert
    def loss_fn(parameters, rows, labels):
      files.extend(frame.filename for frame in traceback.extract_stack())
      return _loss(parameters, rows, labels)

    self._compute(dataclasses.replace(_replica(), loss_fn=loss_fn))
    generated = [f for f in files if "__autograph_generated_file" in f]
    self.assertLen(generated, 1)  # The function above, which calls.
    self.assertIn(model_replica.__file__, files)

  @parameterized.parameters(0, 2)
  def test_sparsity(self, num_towers):
    devices = [stores.device(i) for i in range(num_towers)]
    self.assertEqual(
      model_replica.sparsity(_replica(devices)), [True, False, False]
    )


class MistakeTest(stores.TestCase):
  """Mistakes of newcomers are refused while the step is traced."""

  def _trace(self, loss_fn, batch, variables=None, statistics=()):
    variables = variables or [tf.Variable(2.0, name="weight")]
    replica = model_replica.Replica(
      variables,
      loss_fn,
      lambda *_: tf.data.Dataset.from_tensors(batch).repeat(),
      statistics=statistics,
    )
    model_replica.sparsity(replica)
    values = [tf.identity(v) for v in replica.shared]
    return replica.gradients(values, next(iter(replica.dataset_fn(1, 0, 0))))

  def test_a_loss_of_the_own_variables(self):
    weight = tf.Variable(2.0, name="weight")
    with self.assertRaisesRegex(ValueError, "depends on no parameter.*keras_r"):
      self._trace(
        lambda parameters, x: tf.reduce_mean(weight * x), (tf.ones([4]),)
      )

  def test_one_variable_without_a_gradient_is_named_once(self):
    names = ("used", "left_out")
    variables = [tf.Variable(2.0, name=name) for name in names]
    with self.assertLogs("absl", "WARNING") as logs:
      self._trace(lambda p, x: tf.reduce_mean(p[0] * x), (X,), variables)
    self.assertLen(logs.output, 1)
    self.assertRegex(logs.output[0], "does not depend on left_out: no gradient")

  def test_a_loss_per_example(self):
    with self.assertRaisesRegex(ValueError, r"scalar.*shape \(4,\).*mean`"):
      self._trace(lambda parameters, x: parameters[0] * x, (X,))

  @parameterized.parameters(
    (lambda p, x, y: p[0], (), "has 1 elements. Received: .*lambda"),
    (lambda p, x: (p[0], p[0]), (), "of the 0 `statistics`.*: 1 new values"),
    (lambda p, x: p[0], (0.0,), "of the 1 `statistics`.*: 0 new values"),
    (lambda p, x: [p[0], p[0]], (), r"scalar.*Received: .*shape \(2,\)"),
  )
  def test_wrong_arguments_and_results(self, loss_fn, statistics, message):
    statistics = [tf.Variable(x, trainable=False) for x in statistics]
    with self.assertRaisesRegex((TypeError, ValueError), message):
      self._trace(loss_fn, (X,), statistics=statistics)

  def test_a_batch_without_examples(self):
    with self.assertRaisesRegex(ValueError, "examples along axis 0"):
      self._trace(lambda p, x: p[0] * x, (tf.constant(1.0),))


X = tf.constant([1.0, 2.0, 3.0, 4.0])


class BatchTest(stores.TestCase):
  """Any structure of tensors is a batch."""

  @parameterized.product(
    batch=[
      X,
      {"a": {"b": X}, "c": X},
      ({"a": X}, X),
      ({"a": tf.RaggedTensor.from_row_lengths(X, [1, 1, 1, 1])},),
    ],
    num_towers=[0, 2],
    micro_batches=[1, 2],
  )
  def test_structures(self, batch, num_towers, micro_batches):
    seen = []

    def loss_fn(parameters, *arguments):
      seen.append(arguments)
      first = tf.nest.flatten(arguments, expand_composites=True)[0]
      return parameters[0] * tf.reduce_mean(first)

    replica = model_replica.Replica(
      [tf.Variable(2.0, name="weight")],
      loss_fn,
      lambda *_: tf.data.Dataset.from_tensors(batch).repeat(),
      [stores.device(i) for i in range(num_towers)],
      micro_batches=micro_batches,
    )
    result = replica.gradients(
      [tf.constant(2.0)], next(iter(replica.dataset_fn(1, 0, 0)))
    )
    self.assertAlmostEqual(float(result.gradients[0]), 2.5)
    self.assertAlmostEqual(float(result.loss), 5.0)
    self.assertEqual(int(result.num_examples), 4)
    wanted = batch if isinstance(batch, tuple) else (batch,)
    for arguments in seen:
      tf.nest.assert_same_structure(arguments, wanted)


if __name__ == "__main__":
  absltest.main()
