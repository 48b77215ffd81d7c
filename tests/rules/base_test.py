"""Tests for rules.base."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests.support import stores
from tf_replicas.rules import base as rule_base
from tf_replicas.rules import switch_conditions
from tf_replicas.rules import switching
from tf_replicas.rules.asynchronous import async_replicas
from tf_replicas.rules.periodic import periodic_averaging
from tf_replicas.rules.sync import sync_replicas
from tf_replicas.store import moving_averages

SGD = keras.optimizers.SGD
NAN = float("nan")
# The statistic is not the last, in the store.
PATHS = ["kernel", "moving", "bias"]


class Rule(rule_base.OptimizerRule):
  """An `OptimizerRule` whose remaining methods do nothing.

  Attributes:
    resumed: For each call of `create`, whether the store was initialized.
  """

  def __init__(self, replicas_to_aggregate=4, *, optimizer=None, **kwargs):
    optimizer = SGD(0.5) if optimizer is None else optimizer
    super().__init__(optimizer, name="rule", **kwargs)
    self.replicas_to_aggregate = replicas_to_aggregate
    self.total_num_replicas = replicas_to_aggregate
    self.resumed = []

  def build(self, store, *, is_sparse=None, namespace=None):
    self.bind(store)

  def create(self, values, *, resumed):
    self.resumed.append(resumed)
    if not resumed:
      self.assign_first(values)
    self.inner.build(self._store, is_chief=True)

  def _nothing(self, *args, **kwargs):
    """Stands in for what no test of this file calls."""

  start = signature = apply_gradients = apply_updates = stop_at = _nothing
  counts = status = declare_lost = interrupt = release_replica = _nothing
  end_replicas = close = suspend = resume = _nothing


def _store():
  """A store without values."""
  return stores.attach(
    [stores.spec(path, [2], trainable=path != "moving") for path in PATHS]
  )


def _bound(**kwargs):
  """A rule of a store without values, and the store."""
  rule, store = Rule(**kwargs), _store()
  rule.build(store)
  return rule, store


def _vector(value):
  return tf.fill([2], tf.constant(value, tf.float32))


def _firsts(gradients):
  """The first element of each; all elements are alike."""
  return [None if g is None else float(g[0]) for g in gradients]


class LossScaleTest(stores.TestCase):
  @parameterized.parameters((None, 3.0), (1024.0, 3072.0), (0.5, 1.5))
  def test_multiplies_the_loss(self, scale, expected):
    rule = Rule(loss_scale=scale)
    self.assertEqual(float(rule.scale_loss(tf.constant(3.0))), expected)

  def test_scaled_in_float16_where_gradients_are(self):
    scaled = Rule(loss_scale=8.0).scale_loss(tf.constant(3.0, tf.float16))
    self.assertEqual(scaled.dtype, tf.float16)
    self.assertEqual(float(scaled), 24.0)

  def test_gradients_are_divided_by_it_and_statistics_are_not(self):
    rule, _ = _bound(loss_scale=8.0)
    finished = rule.finish_gradients([_vector(16.0), None, _vector(16.0)])
    self.assertEqual(_firsts(finished), [2.0, None, 16.0])

  def test_without_one_gradients_stay_as_they_are(self):
    rule, _ = _bound()
    finished = rule.finish_gradients([_vector(16.0), None, _vector(3.0)])
    self.assertEqual(_firsts(finished), [16.0, None, 3.0])

  def test_sparse_gradients_stay_sparse(self):
    rule, _ = _bound(loss_scale=8.0)
    rows = tf.IndexedSlices(
      tf.constant([16.0, 8.0]), tf.constant([1, 1]), tf.constant([2])
    )
    finished, *_ = rule.finish_gradients([rows, None, None])
    self.assertIsInstance(finished, tf.IndexedSlices)
    np.testing.assert_array_equal(finished.values, [2.0, 1.0])
    np.testing.assert_array_equal(finished.indices, [1, 1])

  def test_clipping_is_of_gradients_without_the_scale(self):
    """Of norm 10 without it, that is twice too long."""
    rule, _ = _bound(loss_scale=8.0, clip_replica_norm=5.0)
    gradients = [tf.constant([48.0, 0.0]), tf.constant([0.0, 64.0]), None]
    kernel, bias, _ = rule.finish_gradients(gradients)
    np.testing.assert_allclose(kernel, [3.0, 0.0], rtol=1e-6)
    np.testing.assert_allclose(bias, [0.0, 4.0], rtol=1e-6)

  def test_clipping_leaves_short_gradients_and_all_statistics(self):
    rule, _ = _bound(clip_replica_norm=5.0)
    gradients = [tf.constant([3.0, 0.0]), None, _vector(1000.0)]
    kernel, bias, moving = rule.finish_gradients(gradients)
    np.testing.assert_allclose(kernel, [3.0, 0.0])
    self.assertIsNone(bias)
    np.testing.assert_array_equal(moving, [1000.0, 1000.0])


class ChiefStatisticsTest(stores.TestCase):
  GRADIENTS = 1.0, 2.0, 8.0  # The last is how far a statistic goes.

  def _gradients(self):
    return list(map(_vector, self.GRADIENTS))

  def test_only_statistics_are_weighted(self):
    rule, _ = _bound(has_chief_statistics=True)
    weighted = rule.weigh_statistics(self._gradients(), 3)
    self.assertEqual(_firsts(weighted), [1.0, 2.0, 24.0])

  def test_the_weight_may_be_known_at_run_time_only(self):
    rule, _ = _bound(has_chief_statistics=True)
    weighted = rule.weigh_statistics(self._gradients(), tf.constant(0))
    self.assertEqual(_firsts(weighted), [1.0, 2.0, 0.0])

  def test_a_rule_whose_statistics_follow_all_weights_nothing(self):
    rule, _ = _bound()
    weighted = rule.weigh_statistics(self._gradients(), 0)
    self.assertEqual(_firsts(weighted), list(self.GRADIENTS))

  def test_in_lockstep_the_mean_over_replicas_is_that_of_replica_0(self):
    store = _store()
    rule = Rule(4, has_chief_statistics=True)
    update = rule_base.LockstepUpdate(rule, store)
    moves = [
      _firsts(update.finish_gradients(self._gradients(), replica=r))
      for r in range(4)
    ]
    self.assertEqual(np.mean(moves, axis=0).tolist(), list(self.GRADIENTS))
    self.assertEqual([row[2] for row in moves], [32.0, 0.0, 0.0, 0.0])

  def test_finish_gradients_does_not_weigh_statistics(self):
    rule, _ = _bound(has_chief_statistics=True)
    finished = rule.finish_gradients(self._gradients())
    self.assertEqual(_firsts(finished), list(self.GRADIENTS))


class InOrderTest(stores.TestCase):
  def test_trainable_variables_come_first_in_the_order_of_the_store(self):
    rule, _ = _bound()
    ordered = rule.in_order(
      [
        (_vector(3.0), "moving"),
        (_vector(2.0), "bias"),
        (_vector(1.0), "kernel"),
      ]
    )
    self.assertEqual(_firsts(ordered), [1.0, 2.0, 3.0])

  def test_variables_left_out_have_none(self):
    rule, _ = _bound()
    ordered = rule.in_order([(_vector(2.0), "bias"), (None, "kernel")])
    self.assertEqual(_firsts(ordered), [None, 2.0, None])

  def test_variables_may_be_given_themselves(self):
    rule, _ = _bound()
    bias = tf.Variable([0.0, 0.0], name="bias")
    self.assertEqual(
      _firsts(rule.in_order([(_vector(2.0), bias)])), [None, 2.0, None]
    )

  def test_finishes_the_gradients(self):
    rule, _ = _bound(loss_scale=8.0)
    ordered = rule.in_order([(_vector(8.0), "moving"), (_vector(8.0), "bias")])
    self.assertEqual(_firsts(ordered), [None, 1.0, 8.0])

  def test_refuses_a_variable_that_is_not_in_the_store(self):
    rule, _ = _bound()
    with self.assertRaisesRegex(ValueError, "of the store.*'other'"):
      rule.in_order([(_vector(1.0), "kernel"), (_vector(1.0), "other")])


class CreateTest(stores.TestCase):
  VALUES = 1.0, 2.0, 3.0

  def _create(self, rule, store):
    rule_base.create_or_resume(rule, store, list(map(_vector, self.VALUES)))

  def test_a_new_training_begins_with_the_values_at_step_0(self):
    rule, store = _bound()
    self.assertFalse(store.is_initialized())
    self._create(rule, store)
    self.assertTrue(store.is_initialized())
    self.assertEqual(int(store.global_step), 0)
    self.assertEqual(_firsts(store.read()), list(self.VALUES))
    self.assertEqual(rule.resumed, [False])

  def test_the_store_is_initialized_after_all_else(self):
    """Other tasks take that as the sign that everything has a value."""
    rule, store = _bound()
    was_initialized = []
    create = rule.create

    def watched(values, *, resumed):
      create(values, resumed=resumed)
      was_initialized.append(bool(store.is_initialized()))

    rule.create = watched
    self._create(rule, store)
    self.assertEqual(was_initialized, [False])

  def test_a_restarted_chief_continues_where_the_earlier_one_was(self):
    rule, store = _bound()
    self._create(rule, store)
    store.assign(0, [7.0, 7.0])
    store.advance(tf.constant(4, tf.int64), tf.constant(10))
    again, store = _bound()
    self._create(again, store)
    self.assertEqual(int(store.global_step), 5)
    self.assertEqual(int(store.examples_seen), 10)
    self.assertEqual(_firsts(store.read()), [7.0, 2.0, 3.0])
    self.assertEqual(again.resumed, [True])

  def test_averages_begin_with_the_values_of_their_variables(self):
    rule, store = _bound(
      variable_averages=moving_averages.MovingAverages(0.9),
      variables_to_average=["bias"],
    )
    self._create(rule, store)
    state = store.state()
    np.testing.assert_array_equal(state["averages/bias"], [3.0, 3.0])
    self.assertNotIn("averages/kernel", state)


class LockstepTest(stores.TestCase):
  VALUES = 1.0, 2.0, 3.0

  def test_the_inner_optimizer_updates_at_the_present_rate(self):
    store = _store()
    rule = Rule(2)
    update = rule_base.LockstepUpdate(rule, store)
    update.create(list(map(_vector, self.VALUES)))
    rule.set_learning_rate(2.0)
    rule.inner.refresh()

    @tf.function
    def apply():
      step = tf.constant(0, tf.int64)
      sums = [_vector(1.0), _vector(3.0), None]
      return update.apply(sums, step, tf.constant(8))

    self.assertEqual(int(apply()), 1)
    # kernel 1 - 2 * 1 / 2, moving as it was, bias 3 - 2 * 3 / 2.
    self.assertEqual(_firsts(store.read()), [0.0, 2.0, 0.0])
    self.assertEqual(int(store.examples_seen), 8)

  def test_only_some_rules_can_do_without_parameter_servers(self):
    with self.assertRaisesRegex(
      ValueError, "'rule' works only with parameter servers"
    ):
      Rule().in_lockstep(_store())


class Tf1Test(stores.TestCase):
  """Programs written for TF1 get errors that name the successor."""

  NAMES = (
    "minimize",
    "compute_gradients",
    "get_slot",
    "get_slot_names",
    "variables",
    "get_chief_queue_runner",
    "get_init_tokens_op",
    "make_session_run_hook",
  )
  RULES = (
    sync_replicas.SyncReplicasOptimizer,
    async_replicas.AsyncReplicasOptimizer,
  )

  @parameterized.product(name=NAMES, make=RULES)
  def test_a_method_of_tf1_names_its_successor(self, name, make):
    with self.assertRaisesRegex(AttributeError, f"{name}'; .*`.+`") as caught:
      getattr(make(SGD(0.5), 2), name)
    self.assertNotIn("\n", str(caught.exception))
    self.assertFalse(hasattr(make(SGD(0.5), 2), name))

  @parameterized.parameters(*NAMES)
  def test_so_do_rules_that_contain_others(self, name):
    sgd = SGD(0.5)
    for rule in (
      periodic_averaging.elastic_average(sgd, 2, period=2),
      switching.SwitchingOptimizer(
        [make(sgd, 2) for make in self.RULES], switch_conditions.at_step(1)
      ),
    ):
      with self.assertRaisesRegex(AttributeError, f"{name}'; .*`.+`"):
        getattr(rule, name)

  @parameterized.parameters(*RULES)
  def test_other_names_are_just_missing(self, make):
    with self.assertRaisesRegex(AttributeError, "Optimizer' has.*'minimise'.$"):
      make(SGD(0.5), 2).minimise()

  @parameterized.product(make=RULES, name=["opt", "use_nesterov"])
  def test_an_unknown_argument_is_named(self, make, name):
    with self.assertRaisesRegex(TypeError, f"unexpected.*'{name}'"):
      make(**{name: SGD(0.5)}, total_num_replicas=2)

  def test_sync_replicas_has_no_locking(self):
    words = "`use_locking` .* is gone: .*; `AsyncReplicasOptimizer` has.*True"
    with self.assertRaisesRegex(TypeError, words):
      sync_replicas.SyncReplicasOptimizer(SGD(0.5), 2, use_locking=True)

  @parameterized.parameters(*RULES)
  def test_build_comes_first(self, make):
    rule = make(SGD(0.5), 2)
    step = tf.constant(0, tf.int64)
    for use in (
      rule.apply_updates,
      lambda: rule.apply_gradients([], replica=0, local_step=step),
    ):
      with self.assertRaisesRegex(RuntimeError, "not built: call `build`"):
        use()


class InterfaceTest(parameterized.TestCase):
  @parameterized.parameters(
    rule_base.UpdateRule, rule_base.GradientRule, rule_base.OptimizerRule
  )
  def test_a_rule_must_have_every_method(self, interface):
    class Incomplete(interface):
      def __init__(self):
        pass

    with self.assertRaisesRegex(TypeError, "abstract.*interrupt"):
      Incomplete()


class RefusalTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("clip_replica", {"clip_replica_norm": 0.0}, "`clip_replica_norm`.*0.0"),
    ("clip_mean", {"clip_mean_norm": -1.0}, "`clip_mean_norm`.*-1.0"),
    ("scale", {"loss_scale": NAN}, "`loss_scale` must be positive.*nan"),
    ("average", {"variables_to_average": ["w"]}, "needs `variable_averages`"),
    ("wire", {"wire_dtype": "int8"}, "`wire_dtype`.*float16.*'int8'"),
    ("wide", {"wire_dtype": "float64"}, "`wire_dtype`.*'float64'"),
  )
  def test_rule(self, arguments, message):
    with self.assertRaisesRegex(ValueError, message):
      Rule(**arguments)

  def test_a_string_is_not_an_optimizer(self):
    with self.assertRaisesRegex(TypeError, "`optimizer`"):
      Rule(optimizer="sgd")

  @parameterized.parameters(*rule_base.WIRE_DTYPES, None)
  def test_accepts_all_wire_dtypes(self, dtype):
    self.assertEqual(Rule(wire_dtype=dtype).wire_dtype, dtype)

  @parameterized.parameters(
    (0, ValueError),
    (-3, ValueError),
    (1.0, TypeError),
    ("1", TypeError),
    (None, TypeError),
    (True, TypeError),
  )
  def test_counts(self, value, error):
    with self.assertRaisesRegex(error, f"`many`.*Received: {value!r}"):
      rule_base.check_count("many", value)

  @parameterized.parameters(0, 0.0, -1e-9, NAN)
  def test_numbers_that_are_not_positive(self, value):
    with self.assertRaisesRegex(ValueError, f"`much`.*positive.*: {value}"):
      rule_base.check_positive("much", value)

  def test_accepts_good_counts_and_numbers(self):
    for count in (1, 2, 10**12):
      rule_base.check_count("many", count)
    for value in (None, 1e-30, 1, float("inf")):
      rule_base.check_positive("much", value)

  @parameterized.parameters(1, 3)
  def test_a_rule_for_another_number_of_replicas(self, number):
    rule = Rule(number)
    with self.assertRaisesRegex(
      ValueError, f"must be 2, as there are left, right.*Received: {number}"
    ):
      rule_base.check_replicas(rule, ["left", "right"])

  def test_accepts_the_right_number_of_replicas(self):
    rule_base.check_replicas(Rule(2), ["left", "right"])


if __name__ == "__main__":
  absltest.main()
