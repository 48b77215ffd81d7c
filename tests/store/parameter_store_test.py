"""Tests for store.parameter_store."""

import itertools
import json

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests.support import stores
from tf_replicas import cluster
from tf_replicas.store import parameter_store
from tf_replicas.store import placement

VALUES = {
  "embedding": np.arange(10, dtype="float32").reshape(5, 2),
  "conv/kernel": np.arange(24, dtype="float32").reshape(2, 2, 6),
  "conv/bias": np.arange(6, dtype="float64"),
  "scale": np.float32(0.5),
  "count": np.int64(7),
}
SPECS = [
  stores.spec(
    path,
    np.shape(value),
    dtype=np.asarray(value).dtype.name,
    trainable=path != "count",
  )
  for path, value in VALUES.items()
]
EMBEDDING, KERNEL, BIAS, SCALE, COUNT = range(5)


def _filled(num_tasks=2, policy=None):
  store = stores.attach(SPECS, num_tasks, policy)
  for index, value in enumerate(VALUES.values()):
    store.assign(index, value)
  store.start()
  return store


LAYOUTS = {
  "one_task": (1, None),
  "two_tasks": (2, placement.RoundRobin(2)),
  "two_in_shards": (2, stores.cut(2)),
  "three_in_shards": (3, stores.cut(3)),
  "three_mostly_idle": (3, placement.RoundRobin(1)),
}


class PullTest(stores.TestCase):
  @parameterized.named_parameters(
    (name, *layout) for name, layout in LAYOUTS.items()
  )
  def test_whole_tensors_and_the_step(self, num_tasks, policy):
    store = _filled(num_tasks, policy)
    store.advance(tf.constant(0, tf.int64), tf.constant(8))
    step, tensors = tf.function(store.pull)()
    self.assertEqual((int(step), step.dtype), (1, tf.int64))
    for value, tensor in zip(VALUES.values(), tensors, strict=True):
      self.assertEqual(tensor.dtype, np.asarray(value).dtype)
      np.testing.assert_array_equal(tensor, value)

  def test_shapes_are_static(self):
    store = _filled(3, stores.cut(3))
    shapes = []

    @tf.function
    def pull():
      shapes.extend(tensor.shape for tensor in store.pull()[1])

    pull()
    self.assertEqual(shapes, [np.shape(value) for value in VALUES.values()])


class TwoClientsTest(stores.TestCase):
  def test_the_second_finds_what_the_first_assigned(self):
    second = stores.attach(SPECS, 2, stores.cut(2))
    self.assertFalse(second.is_initialized())
    _filled(2, stores.cut(2))
    self.assertTrue(second.is_initialized())
    for value, tensor in zip(VALUES.values(), second.read(), strict=True):
      np.testing.assert_array_equal(tensor, value)

  def test_values_alone_do_not_make_it_initialized(self):
    store = stores.attach(SPECS)
    for index, value in enumerate(VALUES.values()):
      store.assign(index, value)
    self.assertFalse(store.is_initialized())

  def test_signature_tells_layouts_apart(self):
    two = stores.attach(SPECS, 2, placement.RoundRobin(2)).signature()
    shards = stores.attach(SPECS, 2, stores.cut(2)).signature()
    self.assertEqual(
      two[BIAS],
      {"path": "conv/bias", "shape": [6], "dtype": "float64", "ps": [0]},
    )
    self.assertEqual(json.loads(json.dumps(two)), two)
    self.assertNotEqual(two, shards)


class LayoutTest(stores.TestCase):
  def test_variables_live_on_the_device_of_their_task(self):
    store = _filled(2, stores.cut(2))
    for index, shards in enumerate(store.shards):
      for shard, variable in zip(shards, store.variables(index), strict=True):
        self.assertEqual(variable.path, shard.name)
        self.assertIn(f"CPU:{shard.task}", variable.device)

  def test_counters_live_on_task_0(self):
    store = _filled(2)
    self.assertIn("CPU:0", store.global_step.device)
    self.assertIn("CPU:0", store.examples_seen.device)

  def test_contributed_shards_of_a_task(self):
    store = _filled(2, stores.cut(2))
    self.assertEqual(store.trainable, [EMBEDDING, KERNEL, BIAS, SCALE])
    self.assertEqual(store.contributed, [*store.trainable, COUNT])
    owned = [store.contributed_shards(task) for task in range(2)]
    expected = [
      (position, number)
      for position, index in enumerate(store.contributed)
      for number in range(len(store.shards[index]))
    ]
    self.assertCountEqual(itertools.chain(*owned), expected)
    for task, shards in enumerate(owned):
      for position, number in shards:
        shard = store.shards[store.contributed[position]][number]
        self.assertEqual(shard.task, task)

  def test_table_names_idle_tasks_too(self):
    table = _filled(3, placement.RoundRobin(1)).table()
    self.assertIn("conv/kernel", table)
    self.assertIn("/device:CPU:2", table)

  def test_build_follows_the_spec(self):
    spec = cluster.parse(
      {
        "cluster": {
          "ps": ["ps0.example:1", "ps1.example:1"],
          "worker": ["w.example:1"],
        },
        "variables": {"placement": "partitioned", "min_shard_bytes": 8},
      }
    )
    variables = [tf.Variable(tf.zeros([4, 2]), name="table")]
    table = parameter_store.describe(spec, variables)
    self.assertIn("table/part_1", table)
    self.assertIn("/job:ps/task:1/device:CPU:0", table)


class ConstraintTest(stores.TestCase):
  def _specs(self, trainable=True):
    spec = stores.spec("kernel", [4, 2], trainable=trainable)
    return [spec._replace(constraint=keras.constraints.NonNeg())]

  def test_is_that_of_the_variable(self):
    specs = self._specs()
    (variable,) = stores.attach(specs, 2).variables(0)
    self.assertIs(variable.constraint, specs[0].constraint)

  def test_of_a_statistic_is_left_out(self):
    store = stores.attach(self._specs(trainable=False), 2, stores.cut(2))
    for variable in store.variables(0):
      self.assertIsNone(variable.constraint)

  def test_of_shards_is_refused(self):
    with self.assertRaisesRegex(
      ValueError, "the constraint of 'kernel' needs the whole.*: 2 shards"
    ):
      stores.attach(self._specs(), 2, stores.cut(2))


class SplitTest(stores.TestCase):
  def test_along_rows_and_along_another_axis(self):
    store = _filled(2, stores.cut(2))
    for index in (EMBEDDING, KERNEL):
      value = list(VALUES.values())[index]
      parts = store.split(index, value)
      self.assertLen(parts, 2)
      for shard, part in zip(store.shards[index], parts, strict=True):
        np.testing.assert_array_equal(part, value[shard.slices])

  def test_a_whole_variable_stays_whole(self):
    (part,) = _filled(2, stores.cut(2)).split(SCALE, 3.0)
    self.assertEqual(float(part), 3.0)


class SplitGradientTest(stores.TestCase):
  def test_dense(self):
    store = _filled(2, stores.cut(2))
    gradient = tf.constant(VALUES["conv/kernel"])
    parts = store.split_gradient(KERNEL, gradient)
    for shard, part in zip(store.shards[KERNEL], parts, strict=True):
      np.testing.assert_array_equal(part, gradient.numpy()[shard.slices])

  def test_of_another_dtype(self):
    parts = _filled(2, stores.cut(2)).split_gradient(
      EMBEDDING, tf.ones([5, 2], tf.float16)
    )
    self.assertEqual([p.dtype for p in parts], [tf.float32] * 2)

  @parameterized.parameters(1, 3)
  def test_none_is_none_for_every_shard(self, num_tasks):
    store = _filled(num_tasks, stores.cut(num_tasks))
    parts = store.split_gradient(EMBEDDING, None)
    self.assertEqual(parts, [None] * num_tasks)

  def test_slices_go_to_the_shard_of_their_row(self):
    store = _filled(2, stores.cut(2))  # Rows 0-2 and 3-4.
    rows = [4, 0, 2, 4, 3]
    gradient = tf.IndexedSlices(
      tf.constant([[r, i] for i, r in enumerate(rows)], tf.float32),
      tf.constant(rows, tf.int64),
      tf.constant([5, 2], tf.int64),
    )
    first, second = store.split_gradient(EMBEDDING, gradient)
    np.testing.assert_array_equal(first.indices, [0, 2])
    np.testing.assert_array_equal(first.values, [[0, 1], [2, 2]])
    np.testing.assert_array_equal(second.indices, [1, 1, 0])
    np.testing.assert_array_equal(second.values, [[4, 0], [4, 3], [3, 4]])
    np.testing.assert_array_equal(
      tf.concat([tf.convert_to_tensor(p) for p in (first, second)], axis=0),
      tf.convert_to_tensor(gradient),
    )

  def test_slices_that_miss_a_shard(self):
    store = _filled(2, stores.cut(2))
    gradient = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]))
    _, second = store.split_gradient(EMBEDDING, gradient)
    self.assertEqual(second.values.shape, [0, 2])
    self.assertEqual(second.indices.shape, [0])

  def test_slices_of_a_whole_variable_stay_as_they_are(self):
    gradient = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]))
    (part,) = _filled(1).split_gradient(EMBEDDING, gradient)
    self.assertIs(part, gradient)

  def test_slices_of_columns_are_refused(self):
    store = _filled(2, stores.cut(2))
    gradient = tf.IndexedSlices(tf.ones([1, 2, 6]), tf.constant([0]))
    with self.assertRaisesRegex(ValueError, "'conv/kernel'.*axis 2"):
      store.split_gradient(KERNEL, gradient)


class AdvanceTest(stores.TestCase):
  def test_counts_steps_and_examples(self):
    store = _filled()
    for step in range(3):
      new = store.advance(tf.constant(step, tf.int64), tf.constant(10 + step))
      self.assertEqual(int(new), step + 1)
    self.assertEqual(int(store.read_global_step()), 3)
    self.assertEqual(int(store.examples_seen), 33)

  def test_start_sets_both_to_zero(self):
    store = _filled()
    self.assertEqual(int(store.global_step), 0)
    self.assertEqual(int(store.examples_seen), 0)


def _with_company(store):
  """Adds averages and slots, per task in reverse, as nobody promises order."""
  averages = store.create_like(EMBEDDING, "averages")
  for variable, part in zip(
    averages, store.split(EMBEDDING, -VALUES["embedding"]), strict=True
  ):
    variable.assign(part)
  parts = store.split(KERNEL, 2 * VALUES["conv/kernel"])
  for number in reversed(range(len(parts))):
    owner = store.shards[KERNEL][number].name
    slot = tf.Variable(parts[number], name=f"slots/momentum/{owner}")
    store.track(slot, "slots/momentum", owner)
  rate = tf.Variable(0.25)
  rate.path = "optimizer/rate"
  store.track(rate)
  return store


def _zeroed(num_tasks, policy):
  """The same variables with other values."""
  store = _with_company(_filled(num_tasks, policy))
  for index, value in enumerate(VALUES.values()):
    store.assign(index, np.zeros_like(value))
  for name, value in store.state().items():
    if "/" in name:
      store.load_state({name: np.zeros_like(value)})
  return store


class StateTest(stores.TestCase):
  def test_has_everything_whole_by_name(self):
    state = _with_company(_filled(3, stores.cut(3))).state()
    expected = {
      "global_step": 0,
      "examples_seen": 0,
      "averages/embedding": -VALUES["embedding"],
      "slots/momentum/conv/kernel": 2 * VALUES["conv/kernel"],
      "optimizer/rate": 0.25,
      **{f"variables/{path}": value for path, value in VALUES.items()},
    }
    self.assertCountEqual(state, expected)
    for name, value in expected.items():
      np.testing.assert_array_equal(state[name], value, err_msg=name)

  @parameterized.product(source=list(LAYOUTS), target=list(LAYOUTS))
  def test_moves_between_layouts(self, source, target):
    store = _with_company(_filled(*LAYOUTS[source]))
    store.advance(tf.constant(6, tf.int64), tf.constant(32))
    saved = {name: value.numpy() for name, value in store.state().items()}
    self.new_cluster()
    restored = _zeroed(*LAYOUTS[target])
    restored.load_state(saved)
    state = restored.state()
    self.assertCountEqual(state, saved)
    for name, value in saved.items():
      np.testing.assert_array_equal(state[name], value, err_msg=name)

  def test_what_is_not_in_it_stays(self):
    store = _with_company(_filled())
    store.load_state({"variables/scale": np.float32(9), "global_step": 4})
    state = store.state()
    self.assertEqual(float(state["variables/scale"]), 9)
    self.assertEqual(int(state["global_step"]), 4)
    self.assertEqual(float(state["optimizer/rate"]), 0.25)
    np.testing.assert_array_equal(
      state["variables/embedding"], VALUES["embedding"]
    )

  def test_wire_dtype_rounds_what_is_pulled_and_not_what_is_saved(self):
    values = {"kernel": np.float32([1 / 3, 256.5]), "count": np.float64(1 / 3)}
    specs = [
      stores.spec(path, value.shape, dtype=value.dtype.name)
      for path, value in values.items()
    ]
    store = stores.attach(specs, 2, stores.cut(2), "bfloat16")
    for index, value in enumerate(values.values()):
      store.assign(index, value)
    store.start()
    _, (kernel, count) = tf.function(store.pull)()
    self.assertEqual(kernel.dtype, tf.float32)
    third = float(tf.cast(tf.constant(1 / 3), tf.bfloat16))
    np.testing.assert_array_equal(kernel, np.float32([third, 256]))
    self.assertEqual(float(count), 1 / 3)
    saved = store.state()["variables/kernel"]
    np.testing.assert_array_equal(saved, values["kernel"])

  def test_what_has_no_place_is_ignored(self):
    _filled().load_state({"variables/other": np.zeros(3)})


if __name__ == "__main__":
  absltest.main()
