"""Tests for runtime.resources."""

import threading

import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests.support import stores
from tf_replicas.runtime import control_flow
from tf_replicas.runtime import resources


class SharedVariableTest(stores.TestCase):
  def test_two_of_one_name_are_one(self):
    ours = stores.namespace().variable("v", [2], tf.float32)
    theirs = stores.namespace().variable("v", [2], tf.float32)
    ours.assign([1.0, 2.0])
    np.testing.assert_array_equal(theirs, [1, 2])

  def test_other_names_and_other_devices_are_others(self):
    with tf.device(stores.device(1)):
      far = stores.namespace().variable("v", [], tf.float32)
    near = stores.namespace().variable("v", [], tf.float32)
    other = stores.namespace().variable("w", [], tf.float32)
    for value, variable in enumerate([far, near, other]):
      variable.assign(value)
    self.assertEqual([float(v) for v in (far, near, other)], [0, 1, 2])
    self.assertIn("CPU:1", far.device)

  def test_holds_nothing_until_assigned(self):
    variable = stores.namespace().variable("v", [], "int64")
    self.assertFalse(variable.is_initialized())
    variable.assign(3)
    self.assertTrue(variable.is_initialized())

  def test_outlives_its_client(self):
    variable = stores.namespace().variable("v", [], tf.float32)
    variable.assign(4.0)
    del variable
    again = stores.namespace().variable("v", [], tf.float32)
    self.assertEqual(float(again), 4.0)

  def test_made_inside_a_function_it_is_the_same(self):
    outside = stores.namespace().variable("v", [], tf.float32)
    outside.assign(1.0)

    @tf.function
    def double():
      inside = stores.namespace().variable("v", [], tf.float32)
      inside.assign(inside * 2)

    double()
    double()
    self.assertEqual(float(outside), 4.0)

  def test_shape_and_dtype_are_static(self):
    variable = stores.namespace().variable("v", [2, 3], "float16")
    self.assertEqual(variable.shape, [2, 3])
    self.assertEqual(variable.dtype, tf.float16)
    self.assertEqual(variable.path, "v")

  def test_is_trainable_if_told(self):
    variable = stores.namespace().variable("v", [], "float32", trainable=True)
    variable.assign(3.0)
    with tf.GradientTape() as tape:
      loss = variable * variable
    self.assertEqual(float(tape.gradient(loss, variable)), 6.0)


class NamespaceTest(parameterized.TestCase):
  def _fill(self, namespace, value):
    """Leaves a variable, an element and a lock, all under one name."""
    namespace.variable("x", [], tf.float32).assign(value)
    namespace.queue("x", [tf.float32]).enqueue([tf.constant(value)])

    @tf.function
    def hold():
      return namespace.mutex("x").hold(lambda: [tf.constant(value)])

    hold()

  def _found(self, namespace):
    """What is there: a value or None, and all elements of the queue."""
    variable = namespace.variable("x", [], tf.float32)
    queue = namespace.queue("x", [tf.float32])
    elements = [float(queue.dequeue()[0]) for _ in range(int(queue.size()))]
    is_there = bool(variable.is_initialized())
    return float(variable) if is_there else None, elements

  @parameterized.named_parameters(
    ("names", ("a",), ("b",)),
    ("a_name_and_none", ("c",), ("",)),
    ("names_that_are_paths", ("d",), ("d/0",)),
    ("generations", ("e", 0), ("e", 1)),
    ("generations_of_the_default", ("", 2), ("", 3)),
    ("a_number_in_the_name", ("f/1", 0), ("f", 1)),
    ("children", ("g", 0, "one/"), ("g", 0, "two/")),
    ("a_child_and_its_parent", ("h", 0, "one/"), ("h",)),
  )
  def test_two_do_not_share(self, one, other):
    one, other = resources.Namespace(*one), resources.Namespace(*other)
    self._fill(one, 1.0)
    self.assertEqual(self._found(other), (None, []))
    self._fill(other, 2.0)
    self.assertEqual(self._found(one), (1.0, [1.0]))
    self.assertEqual(self._found(other), (2.0, [2.0]))

  @parameterized.parameters(("shared",), ("shared", 4), ("", 5))
  def test_equal_ones_of_two_clients_share(self, *fields):
    self._fill(resources.Namespace(*fields), 3.0)
    self.assertEqual(self._found(resources.Namespace(*fields)), (3.0, [3.0]))
    self._fill(resources.Namespace(*fields).child("one"), 4.0)
    found = self._found(resources.Namespace(*fields).child("one"))
    self.assertEqual(found, (4.0, [4.0]))

  def test_a_lock_is_held_until_calls_have_ended(self):
    """`control_flow.call_on` makes stateless calls, which read variables."""
    namespace, here = resources.new_namespace("held"), resources.this_device()
    held = threading.Event()
    with tf.device(here):
      gate = namespace.queue("gate", [tf.bool])
      mutex = namespace.mutex("mutex")
      value = namespace.variable("value", [], "float32")
      value.assign(1.0)

    @tf.function(autograph=False)
    def read():
      def wait_and_read():
        tf.py_function(held.set, [], [])
        with tf.control_dependencies(gate.dequeue()):
          return value.read_value()

      return mutex.hold(lambda: control_flow.call_on(here, wait_and_read))

    @tf.function(autograph=False)
    def change():
      return mutex.hold(lambda: tf.identity(value.assign(2.0)))

    found = []
    reading = threading.Thread(
      target=lambda: found.append(float(read())), daemon=True
    )
    changing = threading.Thread(target=change, daemon=True)
    reading.start()
    self.assertTrue(held.wait(timeout=60))
    changing.start()
    changing.join(timeout=1)
    self.assertTrue(changing.is_alive())
    gate.enqueue([tf.constant(True)])
    for thread in (reading, changing):
      thread.join(timeout=60)
      self.assertFalse(thread.is_alive())
    self.assertEqual(found, [1.0])
    self.assertEqual(float(value), 2.0)

  def test_a_lock_of_an_older_generation_holds_nobody_up(self):
    old, new = (resources.Namespace("locks", g) for g in (0, 1))
    held, gate = threading.Event(), old.queue("gate", [tf.bool])

    def wait():
      tf.py_function(held.set, [], [])
      return gate.dequeue()

    hold_old = tf.function(lambda: old.mutex("x").hold(wait))
    hold_new = tf.function(lambda: new.mutex("x").hold(lambda: [tf.ones([])]))
    thread = threading.Thread(target=hold_old, daemon=True)
    thread.start()
    self.assertTrue(held.wait(timeout=60))
    self.assertEqual(float(hold_new()[0]), 1.0)
    gate.enqueue([tf.constant(True)])
    thread.join(timeout=60)
    self.assertFalse(thread.is_alive())

  def test_a_dequeue_left_behind_takes_nothing_of_the_next_generation(self):
    old, new = (
      resources.Namespace("waits", g).queue("x", [tf.int64]) for g in (0, 1)
    )
    taken = []

    def wait():
      try:
        taken.append(tf.function(old.dequeue)())
      except tf.errors.OutOfRangeError:
        pass

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    new.enqueue([tf.constant(1, tf.int64)])
    thread.join(timeout=0.5)
    self.assertEqual(int(new.size()), 1)
    self.assertEmpty(taken)
    old.close()
    thread.join(timeout=60)

  def test_the_default_is_the_container_of_tensorflow(self):
    self.assertEqual(resources.DEFAULT_NAMESPACE, resources.Namespace("", 0))
    self.assertEqual(resources.DEFAULT_NAMESPACE.container, "")

  def test_the_path_of_a_variable_does_not_tell_its_namespace(self):
    namespace = resources.Namespace("paths", 1).child("one").child("two")
    self.assertEqual(namespace.variable("v", [], tf.float32).path, "v")

  @parameterized.parameters("a_b", "-a", ".a", "/a", "a b", "\u00e9", "a\n")
  def test_names_that_tensorflow_does_not_take(self, name):
    with self.assertRaisesRegex(ValueError, "must start with.*Received: '"):
      resources.Namespace(name)

  @parameterized.parameters(-1, 1.0, "1", True)
  def test_generations_that_are_no_count(self, generation):
    with self.assertRaisesRegex(ValueError, "integer from 0 on.*Received"):
      resources.Namespace("a", generation)

  @parameterized.parameters("0", "a", "A.b-c/7", "localhost")
  def test_names_that_tensorflow_takes(self, name):
    self._fill(resources.Namespace(name), 5.0)
    self.assertEqual(self._found(resources.Namespace(name)), (5.0, [5.0]))


class VariableCreatorTest(stores.TestCase):
  def _create(self, value):
    created = []
    creator = stores.namespace().variable_creator(
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
    ours = stores.namespace().queue("q", [tf.int64, tf.float32])
    theirs = stores.namespace().queue("q", [tf.int64, tf.float32])
    for i in range(3):
      ours.enqueue([tf.constant(i, tf.int64), tf.constant(i / 2)])
    self.assertEqual(int(theirs.size()), 3)
    taken = [[x.numpy() for x in theirs.dequeue()] for _ in range(3)]
    self.assertEqual(taken, [[0, 0.0], [1, 0.5], [2, 1.0]])

  def test_elements_may_differ_in_shape(self):
    queue = stores.namespace().queue("q", [tf.float32])
    queue.enqueue([tf.zeros([])])
    queue.enqueue([tf.zeros([2, 3])])
    shapes = [tuple(queue.dequeue()[0].shape) for _ in range(2)]
    self.assertEqual(shapes, [(), (2, 3)])

  def test_close_releases_who_waits(self):
    queue = stores.namespace().queue("q", [tf.int64])
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
    stores.namespace().queue("q", [tf.int64]).close()
    thread.join(timeout=20)
    self.assertLen(raised, 1)
    with self.assertRaises(tf.errors.CancelledError):
      queue.enqueue([tf.constant(1, tf.int64)])


class SelectTest(stores.TestCase):
  def test_by_python_index_uses_only_that_choice(self):
    used = []
    resources.switch(1, ["a", "b"], used.append)
    self.assertEqual(used, ["b"])

  def test_by_tensor(self):
    @tf.function
    def chosen(index):
      return resources.switch(index, [10, 20, 30], tf.constant)

    results = [int(chosen(tf.constant(i, tf.int64))) for i in range(3)]
    self.assertEqual(results, [10, 20, 30])


if __name__ == "__main__":
  absltest.main()
