"""Tests for tf_replicas.resources."""

import threading

import numpy as np
import stores
import tensorflow as tf
from absl.testing import absltest

from tf_replicas import resources


class SharedVariableTest(stores.TestCase):
  def test_two_of_one_name_are_one(self):
    ours = resources.shared_variable("v", [2], tf.float32)
    theirs = resources.shared_variable("v", [2], tf.float32)
    ours.assign([1.0, 2.0])
    np.testing.assert_array_equal(theirs, [1, 2])

  def test_other_names_and_other_devices_are_others(self):
    with tf.device(stores.device(1)):
      far = resources.shared_variable("v", [], tf.float32)
    near = resources.shared_variable("v", [], tf.float32)
    other = resources.shared_variable("w", [], tf.float32)
    for value, variable in enumerate([far, near, other]):
      variable.assign(value)
    self.assertEqual([float(v) for v in (far, near, other)], [0, 1, 2])
    self.assertIn("CPU:1", far.device)

  def test_holds_nothing_until_assigned(self):
    variable = resources.shared_variable("v", [], "int64")
    self.assertFalse(variable.is_initialized())
    variable.assign(3)
    self.assertTrue(variable.is_initialized())

  def test_outlives_its_client(self):
    variable = resources.shared_variable("v", [], tf.float32)
    variable.assign(4.0)
    del variable
    again = resources.shared_variable("v", [], tf.float32)
    self.assertEqual(float(again), 4.0)

  def test_made_inside_a_function_it_is_the_same(self):
    outside = resources.shared_variable("v", [], tf.float32)
    outside.assign(1.0)

    @tf.function
    def double():
      inside = resources.shared_variable("v", [], tf.float32)
      inside.assign(inside * 2)

    double()
    double()
    self.assertEqual(float(outside), 4.0)

  def test_shape_and_dtype_are_static(self):
    variable = resources.shared_variable("v", [2, 3], "float16")
    self.assertEqual(variable.shape, [2, 3])
    self.assertEqual(variable.dtype, tf.float16)
    self.assertEqual(variable.path, "v")

  def test_is_trainable_if_told(self):
    variable = resources.SharedVariable(
      name="v", shape=[], dtype="float32", trainable=True
    )
    variable.assign(3.0)
    with tf.GradientTape() as tape:
      loss = variable * variable
    self.assertEqual(float(tape.gradient(loss, variable)), 6.0)


class VariableCreatorTest(stores.TestCase):
  def _create(self, value):
    created = []
    creator = resources.variable_creator(
      lambda name: (f"slots/{name}", stores.device(1)), created
    )
    with tf.variable_creator_scope(creator):
      variable = tf.Variable(value, name="momentum")
    return variable, created

  def test_names_places_and_collects(self):
    variable, created = self._create([1.0, 2.0])
    self.assertEqual(variable.path, "slots/momentum")
    self.assertIn("CPU:1", variable.device)
    self.assertLen(created, 1)
    self.assertIs(created[0], variable)
    np.testing.assert_array_equal(variable, [1, 2])

  def test_who_comes_second_finds_the_value_of_the_first(self):
    first, _ = self._create(lambda: tf.constant([1.0]))
    first.assign([5.0])
    second, _ = self._create(lambda: tf.constant([1.0]))
    np.testing.assert_array_equal(second, [5])


class QueueTest(stores.TestCase):
  def test_is_shared_by_name_and_keeps_order(self):
    ours = resources.Queue("q", [tf.int64, tf.float32])
    theirs = resources.Queue("q", [tf.int64, tf.float32])
    for i in range(3):
      ours.enqueue([tf.constant(i, tf.int64), tf.constant(i / 2)])
    self.assertEqual(int(theirs.size()), 3)
    taken = [[x.numpy() for x in theirs.dequeue()] for _ in range(3)]
    self.assertEqual(taken, [[0, 0.0], [1, 0.5], [2, 1.0]])

  def test_elements_may_differ_in_shape(self):
    queue = resources.Queue("q", [tf.float32])
    queue.enqueue([tf.zeros([])])
    queue.enqueue([tf.zeros([2, 3])])
    shapes = [tuple(queue.dequeue()[0].shape) for _ in range(2)]
    self.assertEqual(shapes, [(), (2, 3)])

  def test_close_releases_who_waits(self):
    queue = resources.Queue("q", [tf.int64])
    raised = []

    @tf.function
    def wait():
      return queue.dequeue()[0]

    def replica():
      try:
        wait()
      except tf.errors.OutOfRangeError as error:
        raised.append(error)

    thread = threading.Thread(target=replica, daemon=True)
    thread.start()
    resources.Queue("q", [tf.int64]).close()
    thread.join(timeout=20)
    self.assertLen(raised, 1)
    with self.assertRaises(tf.errors.CancelledError):
      queue.enqueue([tf.constant(1, tf.int64)])


class SelectTest(stores.TestCase):
  def test_by_python_index_uses_only_that_choice(self):
    used = []
    resources.select(1, ["a", "b"], used.append)
    self.assertEqual(used, ["b"])

  def test_by_tensor(self):
    @tf.function
    def chosen(index):
      return resources.select(index, [10, 20, 30], tf.constant)

    results = [int(chosen(tf.constant(i, tf.int64))) for i in range(3)]
    self.assertEqual(results, [10, 20, 30])


if __name__ == "__main__":
  absltest.main()
