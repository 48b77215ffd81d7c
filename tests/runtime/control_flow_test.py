"""Tests for runtime.control_flow."""

import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tf_replicas.runtime import control_flow
from tf_replicas.runtime import resources


class RunIfTest(parameterized.TestCase):
  @parameterized.product(condition=[True, False], is_eager=[True, False])
  def test_runs_only_if_the_condition_holds(self, condition, is_eager):
    total = tf.Variable(0)

    def run(condition):
      ran = control_flow.run_if(condition, lambda: total.assign_add(5))
      with tf.control_dependencies([ran]):
        return ran, total.read_value()

    run = run if is_eager else tf.function(run, autograph=False)
    ran, seen = run(tf.constant(condition))
    self.assertEqual(bool(ran), condition)
    self.assertEqual(int(seen), 5 * condition)

  def test_fn_may_return_nothing(self):
    total = tf.Variable(0)

    @tf.function(autograph=False)
    def run():
      def fn():
        total.assign_add(1)

      return control_flow.run_if(tf.constant(True), fn)

    self.assertTrue(bool(run()))
    self.assertEqual(int(total), 1)


class CallOnTest(parameterized.TestCase):
  """The full name of the device makes it a single operation."""

  def setUp(self):
    super().setUp()
    with tf.init_scope():
      self.device = tf.constant(0).device
    self.assertIn("/job:", self.device)

  @parameterized.parameters(True, False)
  def test_returns_what_the_function_returns(self, is_eager):
    total = tf.Variable(2)

    def run(factor):
      def fn():
        total.assign_add(1)
        rows = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([3]))
        return [{"a": factor * total.read_value()}, rows]

      return control_flow.call_on(self.device, fn)

    run = run if is_eager else tf.function(run, autograph=False)
    found, rows = run(tf.constant(5))
    self.assertEqual(int(found["a"]), 15)
    self.assertEqual(rows.indices.numpy().tolist(), [3])

  def test_refuses_operations_for_other_tasks(self):
    """In-graph, a parameter server cannot run a part on another."""
    other = self.device.replace("task:0", "task:1")

    def fn():
      with tf.device(other):
        return tf.timestamp()

    run = tf.function(
      lambda: control_flow.call_on(self.device, fn), autograph=False
    )
    with self.assertRaisesRegex(AssertionError, "may not know .*task:1"):
      run.get_concrete_function()

  def test_is_one_operation(self):
    @tf.function(autograph=False)
    def run(x):
      return control_flow.call_on(self.device, lambda: (x + 1) * (x - 1))

    traced = run.get_concrete_function(tf.TensorSpec([], tf.int32))
    kinds = [op.type for op in traced.graph.get_operations()]
    # Of `x`, and of the anchor of the call.
    inputs = ["Placeholder"] * 2
    self.assertEqual(kinds, [*inputs, "PartitionedCall", "Identity"])
    self.assertEqual(int(traced(tf.constant(4))), 15)

  @parameterized.parameters(0, 1)
  def test_reads_a_shared_variable_anew_each_time(self, num_constants):
    """TensorFlow keeps the result of a stateless call with constant inputs."""
    with tf.device(self.device):
      count = resources.new_namespace().variable("count", [], tf.int64)
    count.assign(0)

    def step():
      after = [tf.constant(True)] * num_constants
      value = control_flow.call_on(self.device, count.read_value, after)
      count.assign(value + 1)
      return value

    step = tf.function(step, autograph=False).get_concrete_function()
    self.assertEqual([int(step()) for _ in range(3)], [0, 1, 2])

  def test_makes_the_handles_of_shared_resources_itself(self):
    """A handle from outside would be an input of the call."""
    with tf.device(self.device):
      namespace = resources.new_namespace()
      variable = namespace.variable("variable", [], tf.int64)
      queue = namespace.queue("queue", [tf.int64])
      mutex = namespace.mutex("mutex")
    variable.assign(5)

    def use():
      def change():
        queue.enqueue([variable.assign_add(1, read_value=True)])
        return tf.cond(
          variable.read_value() > 5,
          lambda: 10 * variable.read_value(),
          lambda: tf.zeros([], tf.int64),
        )

      return mutex.hold(change)

    step = tf.function(
      lambda: control_flow.call_on(self.device, use), autograph=False
    ).get_concrete_function()
    self.assertEqual(int(step()), 60)
    self.assertEqual(int(step()), 70)
    self.assertEqual(int(queue.size()), 2)
    (call,) = (
      operation
      for operation in step.graph.get_operations()
      if operation.type == "PartitionedCall"
    )
    self.assertLen(call.inputs, 1)

  @parameterized.parameters("", "/device:CPU:0")
  def test_waits_for_the_tensors_of_after(self, device):
    total = tf.Variable(1)

    @tf.function(autograph=False)
    def run():
      where = device or self.device
      first = control_flow.call_on(where, lambda: total.assign_add(1))
      return control_flow.call_on(
        where, lambda: 10 * total.read_value(), [first]
      )

    self.assertEqual(int(run()), 20)

  def test_refuses_control_dependencies_on_what_is_outside(self):
    @tf.function(autograph=False)
    def run(x):
      def fn():
        with tf.control_dependencies([x]):
          return tf.constant(1)

      return control_flow.call_on(self.device, fn)

    with self.assertRaisesRegex(AssertionError, "use `after`"):
      run(tf.constant(1))


class RequireTest(parameterized.TestCase):
  @parameterized.parameters(False, True)
  def test_names_what_is_wrong(self, is_eager):
    def run(value):
      checked = control_flow.require(value > 0, "must be positive:", value)
      with tf.control_dependencies([checked]):
        return tf.identity(value)

    if not is_eager:
      run = tf.function(run, autograph=False)
    self.assertEqual(int(run(tf.constant(3))), 3)
    with self.assertRaisesRegex(
      tf.errors.InvalidArgumentError, r"must be positive:.*-7"
    ):
      run(tf.constant(-7))


class DoneTest(absltest.TestCase):
  def test_comes_after_operations_tensors_and_none(self):
    log = []

    @tf.function(autograph=False)
    def run(one):
      value = tf.numpy_function(lambda x: log.append(1) or x, [one], tf.float32)
      return control_flow.done([value, None], value.op)

    self.assertTrue(bool(run(tf.constant(1.0))))
    self.assertEqual(log, [1])


if __name__ == "__main__":
  absltest.main()
