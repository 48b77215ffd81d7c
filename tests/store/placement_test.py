"""Tests for store.placement."""

import random

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tf_replicas.store import placement

KIB = 1024
PS_DEVICES = [f"/job:ps/task:{task}/device:CPU:0" for task in range(2)]


def _spec(path, *shape, dtype="float32", trainable=True):
  return placement.VariableSpec(path, shape, dtype, trainable)


def _specs_of_bytes(*num_bytes):
  return [_spec(f"v{i}", n, dtype="bool") for i, n in enumerate(num_bytes)]


def _tasks(plan):
  return [[shard.task for shard in shards] for shards in plan]


def _random_specs(rng):
  """Up to 20 variables of rank 0 to 4, of up to about 100,000 elements."""
  specs = []
  for i in range(rng.randint(1, 20)):
    rank = rng.randint(0, 4)
    largest = {0: 1, 1: 2000, 2: 300, 3: 40, 4: 18}[rank]
    shape = (rng.randint(1, largest) for _ in range(rank))
    dtype = rng.choice(["float32", "float16", "int64", "bool"])
    specs.append(_spec(f"v{i}", *shape, dtype=dtype))
  return specs


class VariableSpecTest(parameterized.TestCase):
  @parameterized.parameters(
    ((), "float32", 1, 4),
    ((3,), "float16", 3, 6),
    ((5, 5, 3, 64), "float32", 4800, 19200),
    ((2, 3), "int64", 6, 48),
    ((7, 2), "bfloat16", 14, 28),
    ((0, 4), "float32", 0, 0),
  )
  def test_size_and_num_bytes(self, shape, dtype, size, num_bytes):
    spec = _spec("v", *shape, dtype=dtype)
    self.assertEqual(spec.size, size)
    self.assertEqual(spec.num_bytes, num_bytes)

  def test_from_keras_variables(self):
    layer = keras.layers.BatchNormalization(name="norm")
    layer.build((None, 3))
    self.assertEqual(
      placement.from_variables(layer.variables),
      [
        _spec("norm/gamma", 3),
        _spec("norm/beta", 3),
        _spec("norm/moving_mean", 3, trainable=False),
        _spec("norm/moving_variance", 3, trainable=False),
      ],
    )

  def test_from_tensorflow_variables(self):
    variables = [
      tf.Variable(tf.zeros([2, 3]), name="table"),
      tf.Variable(0, dtype=tf.int64, trainable=False, name="global_step"),
    ]
    self.assertEqual(
      placement.from_variables(variables),
      [
        _spec("table", 2, 3),
        _spec("global_step", dtype="int64", trainable=False),
      ],
    )

  def test_path_of(self):
    layer = keras.layers.Dense(1, name="dense")
    layer.build((None, 1))
    self.assertEqual(placement.path_of(layer.kernel), "dense/kernel")
    variable = tf.Variable(0.0, name="a:0/b")
    self.assertEqual(placement.path_of(variable), "a:0/b")

  def test_from_variables_refuses_duplicate_paths(self):
    variables = [tf.Variable(0.0, name="w"), tf.Variable(1.0, name="w")]
    with self.assertRaisesRegex(
      ValueError, "`variables` must have distinct paths. Received: 'w' 2 times"
    ):
      placement.from_variables(variables)

  def test_from_variables_refuses_dynamic_shapes(self):
    variable = tf.Variable([1.0], shape=[None], name="w")
    with self.assertRaisesRegex(ValueError, r"static shapes. .*'w', \(None,\)"):
      placement.from_variables([variable])


class SplitTest(parameterized.TestCase):
  def test_pieces_are_nearly_equal_and_longer_ones_first(self):
    shards = placement.split(_spec("table", 10, 2), [3, 0, 2, 1])
    self.assertEqual([s.index for s in shards], [0, 1, 2, 3])
    self.assertEqual([s.task for s in shards], [3, 0, 2, 1])
    self.assertEqual([s.begin for s in shards], [0, 3, 6, 8])
    self.assertEqual([s.size for s in shards], [3, 3, 2, 2])
    self.assertEqual(
      [s.shape for s in shards], [(3, 2), (3, 2), (2, 2), (2, 2)]
    )
    self.assertEqual([s.num_bytes for s in shards], [24, 24, 16, 16])
    self.assertEqual(shards[2].name, "table/part_2")

  def test_cuts_any_axis(self):
    first, second = placement.split(_spec("kernel", 5, 7, 2), [0, 1], axis=1)
    self.assertEqual((first.axis, first.shape), (1, (5, 4, 2)))
    self.assertEqual((second.axis, second.shape), (1, (5, 3, 2)))
    value = np.arange(70).reshape(5, 7, 2)
    np.testing.assert_array_equal(value[second.slices], value[:, 4:])
    np.testing.assert_array_equal(
      tf.constant(value)[second.slices], value[:, 4:]
    )

  @parameterized.parameters(((), 1), ((4,), 4), ((6, 2), 6))
  def test_single_task_keeps_the_variable_whole(self, shape, size):
    (whole,) = placement.split(_spec("v", *shape), [2], axis=1)
    expected = placement.Shard("v", 0, 1, 2, 0, 0, size, shape, "float32")
    self.assertEqual(whole, expected)
    self.assertEqual(whole.name, "v")
    value = np.ones(shape)
    self.assertEqual(value[whole.slices].shape, shape)

  @parameterized.parameters(((), 0), ((4,), 1), ((4,), -1), ((2, 9), 0))
  def test_refuses_an_axis_that_cannot_be_cut(self, shape, axis):
    with self.assertRaisesRegex(ValueError, "`axis` must be an axis of at"):
      placement.split(_spec("v", *shape), [0, 1, 2], axis=axis)


class RoundRobinTest(absltest.TestCase):
  def test_goes_by_order_whatever_the_size(self):
    specs = _specs_of_bytes(100, 1, 100, 1, 100)
    plan = placement.plan(specs, placement.RoundRobin(2))
    self.assertEqual(_tasks(plan), [[0], [1], [0], [1], [0]])
    self.assertEqual(placement.bytes_per_task(plan, 2), [300, 2])

  def test_has_no_memory(self):
    policy = placement.RoundRobin(2)
    specs = _specs_of_bytes(1, 1, 1)
    self.assertEqual(policy(specs), policy(specs))


class GreedyByBytesTest(absltest.TestCase):
  def test_places_largest_first(self):
    # In the order of the specs it would be 2 + 3 against 4 + 5.
    specs = _specs_of_bytes(2, 4, 3, 5)
    plan = placement.plan(specs, placement.GreedyByBytes(2))
    self.assertEqual(_tasks(plan), [[0], [1], [1], [0]])
    self.assertEqual(placement.bytes_per_task(plan, 2), [7, 7])

  def test_ties_keep_the_order(self):
    specs = _specs_of_bytes(1, 1, 1, 1, 1)
    plan = placement.plan(specs, placement.GreedyByBytes(3))
    self.assertEqual(_tasks(plan), [[0], [1], [2], [0], [1]])

  def test_max_load_is_at_most_mean_plus_largest(self):
    for seed in range(100):
      rng = random.Random(seed)
      specs, num_tasks = _random_specs(rng), rng.randint(1, 6)
      plan = placement.plan(specs, placement.GreedyByBytes(num_tasks))
      loads = placement.bytes_per_task(plan, num_tasks)
      largest = max(spec.num_bytes for spec in specs)
      with self.subTest(seed=seed):
        self.assertLessEqual(max(loads), sum(loads) / num_tasks + largest)
        self.assertLessEqual(max(loads) - min(loads), largest)


class PartitionedTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("below_two_minimal_shards", (511, 256), 4, [1], 0),
    ("two_minimal_shards", (512, 256), 4, [256, 256], 0),
    ("three", (768, 256), 4, [256, 256, 256], 0),
    ("at_most_one_per_task", (5120, 256), 4, [1280] * 4, 0),
    ("vector", (5 * 64 * KIB,), 2, [160 * KIB] * 2, 0),
    ("few_rows", (3, 256 * KIB), 4, [64 * KIB] * 4, 1),
    ("as_many_rows_as_shards", (4, 256 * KIB), 4, [1] * 4, 0),
    ("kernel", (5, 5, 128, 256), 2, [128, 128], 3),
    ("first_of_equal_axes", (3, 3, 256, 256), 2, [128, 128], 2),
    ("short_axes", (64 * KIB, 3, 2), 2, [32 * KIB] * 2, 0),
  )
  def test_cuts(self, shape, num_tasks, sizes, axis):
    policy = placement.Partitioned(num_tasks)
    ((*shards,),) = placement.plan([_spec("v", *shape)], policy)
    if len(sizes) == 1:
      self.assertEqual(shards, list(placement.split(_spec("v", *shape), [0])))
    else:
      self.assertEqual([s.size for s in shards], sizes)
      self.assertEqual({s.axis for s in shards}, {axis})
      self.assertEqual([s.task for s in shards], list(range(len(sizes))))

  def test_num_shards_limits_the_pieces(self):
    policy = placement.Partitioned(4, min_shard_bytes=1, num_shards=2)
    ((*shards,),) = placement.plan([_spec("v", 10)], policy)
    self.assertEqual([s.size for s in shards], [5, 5])

  def test_short_variables_get_fewer_pieces_than_tasks(self):
    policy = placement.Partitioned(4, min_shard_bytes=1)
    plan = placement.plan([_spec("pair", 2), _spec("scalar")], policy)
    self.assertEqual(_tasks(plan), [[0, 1], [2]])

  def test_longer_pieces_go_to_less_loaded_tasks(self):
    # "b" is cut in 3 + 2 and comes after "a", which has loaded task 0.
    specs = [_spec("b", 5, dtype="bool"), _spec("a", 4, dtype="int64")]
    policy = placement.Partitioned(2, min_shard_bytes=2)
    plan = placement.plan(specs, policy)
    self.assertEqual(_tasks(plan), [[0, 1], [0, 1]])
    self.assertEqual(placement.bytes_per_task(plan, 2), [19, 18])
    specs = [_spec("b", 5, dtype="bool"), _spec("a", 1, dtype="int64")]
    plan = placement.plan(specs, policy)
    self.assertEqual(_tasks(plan), [[1, 0], [0]])
    self.assertEqual(placement.bytes_per_task(plan, 2), [10, 3])

  def test_balances_the_report_of_one_overloaded_server(self):
    # TF#24953: 0.69, 93.7, 15.5 and 4.1 MB on four parameter servers.
    specs = [
      _spec("small", 690_000, dtype="bool"),
      _spec("table", 23_425, 1000),
      _spec("hidden", 3875, 1000),
      _spec("softmax", 1025, 1000),
    ]
    before = placement.plan(specs, placement.RoundRobin(4))
    loads = placement.bytes_per_task(before, 4)
    self.assertEqual(loads, [690_000, 93_700_000, 15_500_000, 4_100_000])
    self.assertAlmostEqual(placement.balance(loads), 93.7 * 4 / 113.99)

    after = placement.plan(specs, placement.Partitioned(4))
    loads = placement.bytes_per_task(after, 4)
    self.assertEqual(sum(loads), 113_990_000)
    self.assertLessEqual(placement.balance(loads), 1.01)

  def test_properties_hold_for_random_models(self):
    for seed in range(100):
      rng = random.Random(seed)
      specs, num_tasks = _random_specs(rng), rng.randint(1, 6)
      min_shard_bytes = rng.choice([1, 100, 5000, 50_000])
      num_shards = rng.choice([None, rng.randint(1, num_tasks)])
      policy = placement.Partitioned(num_tasks, min_shard_bytes, num_shards)
      with self.subTest(seed=seed):
        plan = placement.plan(specs, policy)
        self.assertEqual(plan, placement.plan(specs, policy))
        for spec, shards in zip(specs, plan, strict=True):
          self._check_variable(spec, shards, num_tasks)
          self._check_cut(spec, shards, min_shard_bytes, num_shards)
        self._check_balance(plan, num_tasks)

  def _check_variable(self, spec, shards, num_tasks):
    """Every element once, every shard on its own task."""
    count = np.zeros(spec.shape, np.int32)
    for shard in shards:
      self.assertEqual(count[shard.slices].shape, shard.shape)
      count[shard.slices] += 1
    np.testing.assert_array_equal(count, 1)
    self.assertEqual(sum(s.num_bytes for s in shards), spec.num_bytes)
    tasks = {shard.task for shard in shards}
    self.assertLen(tasks, len(shards))
    self.assertContainsSubset(tasks, range(num_tasks))

  def _check_cut(self, spec, shards, min_shard_bytes, num_shards):
    if num_shards is not None:
      self.assertLessEqual(len(shards), num_shards)
    if len(shards) > 1:
      self.assertGreaterEqual(spec.num_bytes / len(shards), min_shard_bytes)
      sizes = [shard.size for shard in shards]
      self.assertLessEqual(max(sizes) - min(sizes), 1)

  def _check_balance(self, plan, num_tasks):
    loads = placement.bytes_per_task(plan, num_tasks)
    largest = max(s.num_bytes for shards in plan for s in shards)
    self.assertLessEqual(max(loads), sum(loads) / num_tasks + largest)
    self.assertLessEqual(max(loads) - min(loads), largest)


class PolicyTest(parameterized.TestCase):
  @parameterized.parameters(
    ("round_robin", placement.RoundRobin),
    ("greedy", placement.GreedyByBytes),
    ("partitioned", placement.Partitioned),
  )
  def test_policy_from_name(self, name, cls):
    self.assertIsInstance(placement.policy_from(name, 2), cls)

  def test_policy_from_hands_the_options_on(self):
    specs = [_spec("v", 12)]
    policy = placement.policy_from("partitioned", 4, min_shard_bytes=12)
    self.assertLen(placement.plan(specs, policy)[0], 4)
    policy = placement.policy_from(
      "partitioned", 4, min_shard_bytes=12, num_shards=3
    )
    self.assertLen(placement.plan(specs, policy)[0], 3)

  def test_unknown_name(self):
    with self.assertRaisesRegex(ValueError, "'partitioned'. Received: 'best'."):
      placement.policy_from("best", 2)

  @parameterized.parameters("round_robin", "greedy", "partitioned")
  def test_refuses_no_tasks(self, name):
    message = "`num_tasks` must be at least 1. Received: 0."
    with self.assertRaisesRegex(ValueError, message):
      placement.policy_from(name, 0)

  @parameterized.parameters(0, 3)
  def test_refuses_more_shards_than_tasks(self, num_shards):
    message = rf"`num_shards` must be in \[1, 2\].* Received: {num_shards}."
    with self.assertRaisesRegex(ValueError, message):
      placement.Partitioned(2, num_shards=num_shards)

  def test_refuses_shards_of_no_bytes(self):
    with self.assertRaisesRegex(ValueError, "`min_shard_bytes` must be at lea"):
      placement.Partitioned(2, min_shard_bytes=0)


class PlanTest(parameterized.TestCase):
  def test_takes_a_policy_of_your_own(self):
    def by_name(specs):
      return [placement.split(s, [len(s.path) % 2]) for s in specs]

    plan = placement.plan([_spec("a", 2), _spec("bb", 2)], by_name)
    self.assertEqual(_tasks(plan), [[1], [0]])

  @parameterized.parameters("round_robin", "greedy", "partitioned")
  def test_no_variables(self, name):
    self.assertEqual(placement.plan([], placement.policy_from(name, 2)), [])

  def test_refuses_duplicate_paths(self):
    specs = [_spec("w", 2), _spec("v", 2), _spec("w", 3)]
    message = "`specs` must have distinct paths. Received: 'w' 2 times."
    with self.assertRaisesRegex(ValueError, message):
      placement.plan(specs, placement.RoundRobin(1))

  def test_refuses_a_policy_that_forgets_a_variable(self):
    message = "`policy` must place all 2 variables. Received: 1."
    with self.assertRaisesRegex(ValueError, message):
      placement.plan(
        [_spec("v", 2), _spec("w", 2)],
        lambda specs: [placement.split(specs[0], [0])],
      )

  @parameterized.named_parameters(
    ("no_shard", lambda spec: ()),
    ("same_task", lambda spec: placement.split(spec, [1, 1])),
    ("negative_task", lambda spec: placement.split(spec, [-1])),
    ("gap", lambda spec: placement.split(spec, [0, 1])[:1]),
    ("other_variable", lambda spec: placement.split(_spec("w", 4), [0])),
  )
  def test_refuses_a_policy_that_does_not_cover(self, place):
    message = "`policy` must return shards of `split` .*'v'. Received: "
    with self.assertRaisesRegex(ValueError, message):
      placement.plan([_spec("v", 4)], lambda specs: [place(specs[0])])


class TableTest(parameterized.TestCase):
  def test_parameter_servers(self):
    specs = [
      _spec("embedding/table", 1000, 300),
      _spec("dense/kernel", 300, 10),
      _spec("dense/bias", 10),
      _spec("step", dtype="int64", trainable=False),
    ]
    plan = placement.plan(specs, placement.Partitioned(2))
    text = placement.table(specs, plan, PS_DEVICES)
    self.assertEqual(
      text,
      """\
variable                shape           bytes  device
embedding/table/part_0  (500, 300)  585.9 KiB  /job:ps/task:0/device:CPU:0
embedding/table/part_1  (500, 300)  585.9 KiB  /job:ps/task:1/device:CPU:0
dense/kernel            (300, 10)    11.7 KiB  /job:ps/task:0/device:CPU:0
dense/bias              (10,)            40 B  /job:ps/task:1/device:CPU:0
step                    ()                8 B  /job:ps/task:1/device:CPU:0

device                           bytes
/job:ps/task:0/device:CPU:0  597.7 KiB
/job:ps/task:1/device:CPU:0  586.0 KiB
Balance: 1.01 (max/mean bytes per device)
Total: 4 variables, 303,011 parameters, 1.2 MiB""",
    )

  def test_idle_servers_are_shown(self):
    specs = [_spec("w", 256)]
    plan = placement.plan(specs, placement.RoundRobin(2))
    text = placement.table(specs, plan, ["ps0", "ps1"])
    self.assertIn("ps0     1.0 KiB\nps1         0 B\nBalance: 2.00", text)

  def test_single_device(self):
    specs = [_spec("w", 3, 4), _spec("b", 4)]
    plan = placement.plan(specs, placement.policy_from("greedy", 1))
    self.assertEqual(
      placement.table(specs, plan, ["/device:CPU:0"]),
      """\
variable  shape   bytes  device
w         (3, 4)   48 B  /device:CPU:0
b         (4,)     16 B  /device:CPU:0

Total: 2 variables, 16 parameters, 64 B""",
    )

  def test_no_variables(self):
    text = placement.table([], [], ["ps0", "ps1"])
    self.assertIn("Balance: 1.00", text)
    self.assertTrue(text.endswith("Total: 0 variables, 0 parameters, 0 B"))

  def test_total_of_the_cifar10_network(self):
    shapes = {
      "conv1": (5, 5, 3, 64),
      "conv2": (5, 5, 64, 64),
      "local3": (2304, 384),
      "local4": (384, 192),
      "softmax_linear": (192, 10),
    }
    specs = []
    for layer, shape in shapes.items():
      specs.append(_spec(f"{layer}/kernel", *shape))
      specs.append(_spec(f"{layer}/bias", shape[-1]))
    plan = placement.plan(specs, placement.Partitioned(2))
    text = placement.table(specs, plan, PS_DEVICES)
    total = "Total: 10 variables, 1,068,298 parameters, 4.1 MiB"
    self.assertEqual(text.splitlines()[-1], total)
    split_ones = [shards[0].path for shards in plan if len(shards) > 1]
    self.assertEqual(split_ones, ["local3/kernel"])
    self.assertLess(placement.balance(placement.bytes_per_task(plan, 2)), 1.05)

  @parameterized.parameters(
    (0, "0 B"),
    (1023, "1023 B"),
    (1024, "1.0 KiB"),
    (19200, "18.8 KiB"),
    (KIB * KIB - 1, "1.0 MiB"),
    (4 * 1_068_298, "4.1 MiB"),
    (3 * KIB**3, "3.0 GiB"),
    (5000 * KIB**4, "5000.0 TiB"),
  )
  def test_human_bytes(self, num_bytes, text):
    self.assertEqual(placement.human_bytes(num_bytes), text)


if __name__ == "__main__":
  absltest.main()
