"""Tests for rules.asynchronous.async_replicas: trainings in one process."""

import threading

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests.support import background
from tests.support import replicas
from tests.support import stores
from tf_replicas.replica import model_replica
from tf_replicas.rules import base as rule_base
from tf_replicas.rules import results
from tf_replicas.rules.asynchronous import async_replicas
from tf_replicas.rules.asynchronous import staleness
from tf_replicas.runtime import waiting
from tf_replicas.store import moving_averages

SGD = keras.optimizers.SGD
TWO = {"a": np.float32([1.0, 2.0]), "b": np.float32([3.0])}


class Training:
  """One store, and a client of its own for every replica."""

  def __init__(
    self,
    make_optimizer,
    num_replicas,
    *,
    values=TWO,
    is_sparse=(),
    wire_dtype=None,
  ):
    self.paths = list(values)
    self.num_replicas = num_replicas
    self.optimizers, self.stores = [], []
    for replica in range(num_replicas):
      optimizer = make_optimizer()
      specs = self._specs(values)
      store = stores.attach(specs, 2, stores.cut(2), wire_dtype)
      optimizer.build(store, is_sparse=is_sparse or [False] * len(values))
      if replica == 0:
        rule_base.create_or_resume(
          optimizer, store, [tf.constant(v) for v in values.values()]
        )
      self.optimizers.append(optimizer)
      self.stores.append(store)
    self.chief = self.optimizers[0]
    self._pulls = [
      tf.function(lambda r=r: self.optimizers[r].pull(r), autograph=False)
      for r in range(num_replicas)
    ]
    self._applies = [
      tf.function(lambda *a, r=r: self._apply(r, *a), autograph=False)
      for r in range(num_replicas)
    ]

  def _specs(self, values):
    """Describes the variables, for the store of one client."""
    return [
      stores.spec(path, v.shape, trainable=not path.startswith("moving"))
      for path, v in values.items()
    ]

  def _apply(self, replica, step, loss, *gradients):
    return self.optimizers[replica].apply_gradients(
      zip(gradients, self.paths, strict=True),
      replica=replica,
      local_step=step,
      loss=loss,
      num_examples=10 * (replica + 1),
    )

  def pull(self, replica):
    token, values = self._pulls[replica]()
    return token.global_step, values

  def apply(self, replica, step, gradients, loss=0.5):
    release = self._applies[replica](step, tf.constant(loss), *gradients)
    return bool(release.admitted), int(release.global_step)

  def run(self, compute, steps):
    """Every replica in a thread of its own; `compute(replica, values)`."""
    errors = []

    def train(replica):
      try:
        for _ in range(steps):
          step, values = self.pull(replica)
          self.apply(replica, step, compute(replica, values))
      except Exception as error:  # The test's thread raises it.
        errors.append(error)

    threads = [
      threading.Thread(target=train, args=(r,), daemon=True)
      for r in range(self.num_replicas)
    ]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join(timeout=120)
    if errors:
      raise errors[0]
    assert not any(thread.is_alive() for thread in threads)

  def values(self):
    values = stores.numpy(self.stores[0].read())
    return dict(zip(self.paths, values, strict=True))


def _grads(a, b):
  return [tf.constant(a, tf.float32, [2]), tf.constant(b, tf.float32, [1])]


def _rule(inner, num_replicas, **kwargs):
  return lambda: async_replicas.AsyncReplicasOptimizer(
    inner(), num_replicas, **kwargs
  )


class InterleavingTest(stores.TestCase):
  """Forced interleavings, by hand."""

  def test_a_chief_that_takes_over_keeps_the_learning_rate(self):
    """Until it sets one, replicas go on with that of the earlier chief."""

    def make():
      return async_replicas.AsyncReplicasOptimizer(SGD(1.0), 1)

    training = Training(make, 1)
    training.chief.set_learning_rate(0.25)
    training.chief.inner.refresh()
    second = Training(make, 1).chief
    gradients = [tf.ones([2]), tf.ones([1])]
    training.apply(0, training.pull(0)[0], gradients)
    np.testing.assert_allclose(training.values()["b"], [2.75])
    second.set_learning_rate(0.5)
    second.inner.refresh()
    training.apply(0, training.pull(0)[0], gradients)
    np.testing.assert_allclose(training.values()["b"], [2.25])

  def test_every_gradient_is_applied_at_once(self):
    training = Training(_rule(lambda: SGD(0.5), 2), 2)
    step_0, _ = training.pull(0)
    step_1, _ = training.pull(1)
    self.assertEqual(training.apply(0, step_0, _grads(1.0, 2.0)), (True, 1))
    np.testing.assert_allclose(training.values()["a"], [0.5, 1.5])
    np.testing.assert_allclose(training.values()["b"], [2.0])
    self.assertEqual(training.apply(1, step_1, _grads(2.0, 0.0)), (True, 2))
    np.testing.assert_allclose(training.values()["a"], [-0.5, 0.5])
    step_0, _ = training.pull(0)
    self.assertEqual(training.apply(0, step_0, _grads(0.0, 1.0)), (True, 3))
    counts = training.chief.counts()
    self.assertEqual([c.staleness for c in counts], [(2,), (0, 1)])

  def test_chief_hears_of_all_since_its_last_call(self):
    training = Training(_rule(lambda: SGD(0.5), 2), 2)
    for replica, loss in ((0, 1.0), (1, 4.0)):
      step, _ = training.pull(replica)
      training.apply(replica, step, _grads(0.0, 0.0), loss)
    update = training.chief.apply_updates()[0]
    self.assertEqual(update, results.Update(2, 2.5, 30, 0.5))
    self.assertEqual(int(training.stores[1].examples_seen), 30)

  def test_who_computes_holds_nobody_up(self):
    """One has begun its step, but its batch is slow to come."""
    training = Training(_rule(lambda: SGD(0.5), 2), 2)
    begun, batches = (
      stores.namespace().queue(name, [tf.float32])
      for name in ("begun", "batches")
    )

    @tf.function(autograph=False)
    def slow_step(step):
      begun.enqueue([tf.constant(0.0)])
      (loss,) = batches.dequeue()
      gradients = [tf.fill([2], loss), tf.fill([1], loss)]
      return training._apply(0, step, loss, *gradients).global_step

    def apply_others():
      begun.dequeue()
      for step in range(10):
        training.apply(1, tf.constant(step, tf.int64), _grads(0.0, 0.0))

    threads = [
      threading.Thread(target=run, daemon=True)
      for run in (lambda: slow_step(tf.constant(0, tf.int64)), apply_others)
    ]
    for thread in threads:
      thread.start()
    threads[1].join(timeout=background.DEADLINE_SECS)
    others_are_held_up = threads[1].is_alive()
    batches.enqueue([tf.constant(1.0)])
    for thread in threads:
      thread.join(timeout=background.DEADLINE_SECS)
    self.assertFalse(others_are_held_up)
    counts = training.chief.counts()
    self.assertEqual([c.staleness for c in counts], [(0,) * 10 + (1,), (10,)])

  def test_drop_stale_drops_whole_sets(self):
    rule = _rule(lambda: SGD(0.5), 2, policies=[staleness.drop_stale(1)])
    training = Training(rule, 2)
    old, _ = training.pull(1)
    for _ in range(2):
      step, _ = training.pull(0)
      training.apply(0, step, _grads(0.0, 0.0))
    self.assertEqual(training.apply(1, old, _grads(9.0, 9.0)), (False, 2))
    self.assertEqual(training.apply(1, old + 1, _grads(1.0, 1.0)), (True, 3))
    np.testing.assert_allclose(training.values()["a"], [0.5, 1.5])
    self.assertEqual(
      training.chief.counts(),
      [
        results.Counts(2, 0, (0,) * 10, (2,)),
        results.Counts(1, 0, (0, 1) + (0,) * 8, (0, 1)),
      ],
    )

  def test_staleness_aware_divides_the_rate(self):
    rule = _rule(lambda: SGD(0.5), 2, policies=[staleness.staleness_aware()])
    training = Training(rule, 2)
    old, _ = training.pull(1)
    for _ in range(4):
      step, _ = training.pull(0)
      training.apply(0, step, _grads(1.0, 1.0))
    np.testing.assert_allclose(training.values()["a"], [-1.0, 0.0])
    training.apply(1, old, _grads(2.0, 2.0))
    np.testing.assert_allclose(training.values()["a"], [-1.25, -0.25])

  def test_delay_compensated_by_hand(self):
    rule = _rule(
      lambda: SGD(0.5), 2, policies=[staleness.delay_compensated(0.25)]
    )
    training = Training(rule, 2)
    old, _ = training.pull(1)
    step, _ = training.pull(0)
    training.apply(0, step, _grads(1.0, 1.0))
    training.apply(1, old, _grads(2.0, 4.0))
    # g + 0.25 g g (now - read), where now - read = -0.5.
    np.testing.assert_allclose(training.values()["a"], [-0.25, 0.75])
    np.testing.assert_allclose(training.values()["b"], [3 - 0.5 - 0.5 * 2.0])

  def test_variable_without_gradient_is_left_alone(self):
    training = Training(_rule(lambda: SGD(0.5), 1), 1)
    step, _ = training.pull(0)
    training.apply(0, step, [None, tf.constant([2.0])])
    np.testing.assert_allclose(training.values()["a"], [1.0, 2.0])
    np.testing.assert_allclose(training.values()["b"], [2.0])

  def test_sparse_rows(self):
    values = {"table": np.zeros([4, 1], "float32")}
    rule = _rule(lambda: SGD(1.0), 1, use_locking=True)
    training = Training(rule, 1, values=values, is_sparse=[True])
    step, _ = training.pull(0)
    slices = tf.IndexedSlices(
      tf.constant([[1.0], [2.0], [4.0]]),
      tf.constant([3, 0, 3]),
      tf.constant([4, 1]),
    )
    training.apply(0, step, [slices])
    np.testing.assert_allclose(
      training.values()["table"], [[-2.0], [0.0], [0.0], [-5.0]]
    )

  def test_averages_follow(self):
    rule = _rule(
      lambda: SGD(1.0),
      1,
      variable_averages=moving_averages.MovingAverages(
        0.75, num_updates_aware=False
      ),
    )
    training = Training(rule, 1)
    step, _ = training.pull(0)
    training.apply(0, step, _grads(4.0, 4.0))
    state = training.stores[0].state()
    np.testing.assert_allclose(state["averages/a"], [0.0, 1.0])

  def test_not_finite_is_not_applied_and_raises_at_the_chief(self):
    training = Training(_rule(lambda: SGD(0.5), 2), 2)
    step, _ = training.pull(1)
    release = training.apply(1, step, _grads(np.nan, 1.0))
    self.assertFalse(release[0])
    with self.assertRaises(results.NonFiniteGradientError) as caught:
      training.chief.apply_updates()[0]
    self.assertEqual(caught.exception.replica, 1)
    np.testing.assert_allclose(training.values()["b"], [3.0])

  def test_learning_rate_is_the_chiefs(self):
    training = Training(_rule(lambda: SGD(0.5), 2), 2)
    training.chief.set_learning_rate(0.25)
    training.chief.inner.refresh()
    step, _ = training.pull(1)
    training.apply(1, step, _grads(1.0, 1.0))
    np.testing.assert_allclose(training.values()["a"], [0.75, 1.75])

  def test_clip_mean_norm_is_of_all_tasks_and_gradients(self):
    rule = _rule(
      lambda: SGD(1.0), 2, gradients_per_update=2, clip_mean_norm=2.0
    )
    training = Training(rule, 2)
    for replica, value in enumerate((1.0, 5.0)):
      step, _ = training.pull(replica)
      training.apply(replica, step, _grads(value, value))
    # The mean is 3 everywhere; of three elements its norm is 3 sqrt(3).
    moved = 2.0 / np.sqrt(3.0)
    np.testing.assert_allclose(
      training.values()["a"], TWO["a"] - moved, rtol=1e-6
    )

  def test_interrupt_and_close(self):
    training = Training(_rule(lambda: SGD(0.5), 1), 1)
    training.chief.interrupt()
    with self.assertRaises(results.Interrupted):
      training.chief.apply_updates()[0]
    training.chief.close()
    step, _ = training.pull(0)
    with self.assertRaises(
      (tf.errors.OutOfRangeError, tf.errors.CancelledError)
    ):
      training.apply(0, step, _grads(1.0, 1.0))

  def test_an_interrupt_beside_an_update_is_raised_after_it(self):
    training = Training(_rule(lambda: SGD(0.5), 1), 1)
    step, _ = training.pull(0)
    training.apply(0, step, _grads(1.0, 1.0))
    training.chief.interrupt()
    training.apply(0, step, _grads(1.0, 1.0))
    self.assertEqual(training.chief.apply_updates()[0].global_step, 2)
    # A call that was not told of it would wait for ever.
    rescue = threading.Timer(background.DEADLINE_SECS, training.chief.close)
    rescue.start()
    self.addCleanup(rescue.cancel)
    with self.assertRaises(results.Interrupted):
      training.chief.apply_updates()[0]
    training.apply(0, step, _grads(1.0, 1.0))
    self.assertEqual(training.chief.apply_updates()[0].global_step, 3)

  def test_end(self):
    rule = _rule(lambda: SGD(0.5), 2, policies=[staleness.bounded_staleness(0)])
    training = Training(rule, 2)
    training.chief.end_replicas()
    step, _ = training.pull(0)
    self.assertEqual(training.apply(0, step, _grads(1.0, 1.0)), (False, -1))
    np.testing.assert_allclose(training.values()["b"], [3.0])

  @parameterized.named_parameters(
    ("plain", ()), ("gated", [staleness.bounded_staleness(0)])
  )
  def test_a_chief_that_was_given_up_may_come_back(self, policies):
    rule = _rule(lambda: SGD(0.5), 2, policies=policies)
    training = Training(rule, 2)
    step, _ = training.pull(1)
    for _ in range(2):  # As long as the replica has not heard of it.
      training.optimizers[1].release_replica(1)
    self.assertEqual(training.apply(1, step, _grads(1.0, 1.0)), (False, -1))
    chief = training.optimizers[0]
    chief.create([tf.constant(v) for v in TWO.values()], resumed=True)
    self.assertEqual([r.status for r in chief.status().replicas], [0, 0])
    chief.declare_lost(1, -1)
    self.assertEqual(training.apply(0, step, _grads(1.0, 1.0)), (True, 1))

  def test_every_third_gradient_makes_an_update(self):
    """2-softsync of six: sums of 3, their mean, one step."""
    rule = _rule(
      lambda: SGD(0.5),
      2,
      gradients_per_update=3,
      policies=[staleness.staleness_aware()],
    )
    training = Training(rule, 2)
    old, _ = training.pull(1)
    for number, (a, b) in enumerate([(3.0, 0.0), (0.0, 6.0), (3.0, 3.0)]):
      step, _ = training.pull(0)
      self.assertEqual(
        training.apply(0, step, _grads(a, b)), (True, number // 2)
      )
    # (3 + 0 + 3) / 3 and (0 + 6 + 3) / 3.
    np.testing.assert_allclose(training.values()["a"], [0.0, 1.0])
    np.testing.assert_allclose(training.values()["b"], [1.5])
    for _ in range(3):
      training.apply(0, step + 1, _grads(0.0, 0.0))
    self.assertEqual(training.apply(1, old, _grads(6.0, 0.0)), (True, 2))
    training.apply(0, step + 2, _grads(6.0, 0.0))
    training.apply(0, step + 2, _grads(3.0, 0.0))
    # Two updates late: half of its 6 counts.
    np.testing.assert_allclose(training.values()["a"], [-2.0, -1.0])
    self.assertEqual(int(training.stores[0].global_step), 3)
    self.assertEqual(int(training.stores[0].examples_seen), 8 * 10 + 20)
    self.assertEqual(training.chief.counts()[1].staleness, (0, 0, 1))

  def test_sums_are_saved_with_their_number(self):
    rule = _rule(lambda: SGD(0.5), 1, gradients_per_update=2)
    training = Training(rule, 1)
    step, _ = training.pull(0)
    training.apply(0, step, _grads(2.0, 4.0))
    saved = {k: v.numpy() for k, v in training.stores[0].state().items()}
    self.new_cluster()
    resumed = Training(rule, 1)
    resumed.stores[0].load_state(saved)
    self.assertEqual(resumed.apply(0, step, _grads(4.0, 0.0)), (True, 1))
    np.testing.assert_allclose(resumed.values()["a"], [-0.5, 0.5])
    np.testing.assert_allclose(resumed.values()["b"], [2.0])

  def test_sums_for_another_number_are_not_restored(self):
    rule = _rule(lambda: SGD(0.5), 1, gradients_per_update=4)
    training = Training(rule, 1)
    step, _ = training.pull(0)
    for _ in range(3):
      training.apply(0, step, _grads(8.0, 8.0))
    saved = {k: v.numpy() for k, v in training.stores[0].state().items()}
    self.new_cluster()
    resumed = Training(_rule(lambda: SGD(0.5), 1, gradients_per_update=2), 1)
    resumed.stores[0].load_state(saved)
    resumed.chief.stop_at(1)
    answers = []

    def contribute():
      for gradient in (2.0, 4.0):
        answers.append(resumed.apply(0, step, _grads(gradient, 0.0)))

    thread = threading.Thread(target=contribute, daemon=True)
    thread.start()
    thread.join(timeout=background.DEADLINE_SECS)
    self.assertEqual(answers, [(True, 0), (True, 1)])
    np.testing.assert_allclose(resumed.values()["a"], [-0.5, 0.5])
    np.testing.assert_allclose(resumed.values()["b"], [3.0])

  def test_what_is_summed_is_counted_before_it_is_saved(self):
    rule = _rule(lambda: SGD(0.5), 1, gradients_per_update=2)
    training = Training(rule, 1)
    store, admission = training.stores[0], training.chief.admission
    (total,) = training.chief._own_update._sums[1]
    finish = admission.finish
    gate = stores.namespace().queue("gate", [tf.bool])

    def finish_later(*args):
      with tf.control_dependencies(gate.dequeue()):
        return finish(*args)

    admission.finish = finish_later
    step, _ = training.pull(0)
    saved = {}
    threads = [
      threading.Thread(target=run, daemon=True)
      for run in (
        lambda: training.apply(0, step, _grads(2.0, 4.0)),
        lambda: saved.update(store.state()),
      )
    ]
    threads[0].start()
    waiting.await_value(
      lambda: total.numpy() == [4.0],
      timeout_secs=background.DEADLINE_SECS,
      what="the sum",
    )
    threads[1].start()
    threads[1].join(timeout=0.5)
    gate.enqueue([tf.constant(True)])
    for thread in threads:
      thread.join(timeout=background.DEADLINE_SECS)
    np.testing.assert_array_equal(saved["sums_2/b"], [4.0])
    self.assertEqual(int(saved["async/pending_2"]), 1)

  def test_sparse_gradients_are_not_summed(self):
    rule = _rule(lambda: SGD(0.5), 1, gradients_per_update=2)
    with self.assertRaisesRegex(ValueError, "`gradients_per_update` must be 1"):
      Training(rule, 1, is_sparse=[True, False])

  def test_wire_dtype(self):
    """1 / 3 in bfloat16 is 0.333984375; the variables stay float32."""
    rule = _rule(lambda: SGD(1.0), 1, wire_dtype="bfloat16")
    training = Training(rule, 1, wire_dtype=rule().wire_dtype)
    step, _ = training.pull(0)
    training.apply(0, step, _grads(1 / 3, 1 / 3))
    np.testing.assert_array_equal(
      training.values()["b"], np.float32([3 - 0.333984375])
    )
    _, values = training.pull(0)
    np.testing.assert_array_equal(values[1], [2.671875])

  def test_wire_dtype_must_be_known(self):
    with self.assertRaisesRegex(ValueError, "`wire_dtype`.*'int8'"):
      _rule(lambda: SGD(1.0), 1, wire_dtype="int8")()

  def test_stops_at_a_step_and_waits_for_who_is_under_way(self):
    """Of two, one may make the last update; it is lost, the other makes it."""
    training = Training(_rule(lambda: SGD(0.5), 2), 2)
    training.chief.stop_at(1)
    admit = tf.function(training.chief.admission.admit, autograph=False)
    zero, yes = tf.constant(0, tf.int64), tf.constant(True)
    self.assertTrue(admit(tf.constant(1, tf.int64), zero, yes).admitted)
    answers = []

    def contribute():
      for _ in range(2):
        step, _ = training.pull(0)
        answers.append(training.apply(0, step, _grads(0.0, 2.0)))

    thread = threading.Thread(target=contribute, daemon=True)
    thread.start()
    thread.join(timeout=0.5)
    self.assertEqual(answers, [])
    self.assertEqual(int(training.stores[0].global_step), 0)
    training.chief.declare_lost(1, -1)
    self.assertEqual(training.chief.apply_updates()[0].global_step, 1)
    waiting.await_value(
      lambda: answers,
      timeout_secs=background.DEADLINE_SECS,
      what="an answer",
    )
    self.assertEqual(answers, [(True, 1)])
    training.chief.end_replicas()
    thread.join(timeout=background.DEADLINE_SECS)
    self.assertEqual(answers, [(True, 1), (False, -1)])
    np.testing.assert_allclose(training.values()["b"], [2.0])

  def test_refresh_every_keeps_what_was_read(self):
    rule = _rule(lambda: SGD(0.5), 1, refresh_every=3)
    training = Training(rule, 1)
    optimizer, store = training.chief, training.stores[0]
    replica = model_replica.Replica(
      [tf.Variable(v) for v in TWO.values()],
      lambda parameters, x: tf.reduce_sum(parameters[1]) * x[0],
      lambda *_: tf.data.Dataset.from_tensors((tf.ones([1]),)).repeat(),
    )
    runner = replicas.Runner(
      optimizer, store, replica, iter(replica.dataset_fn()), 0
    )
    runner.begin()
    seen = []
    for _ in range(7):
      step = runner.token.global_step
      seen.append((step, float(runner.state[1][0])))
      runner.step()
    self.assertEqual(seen, [(0, 3.0)] * 3 + [(3, 1.5)] * 3 + [(6, 0.0)])
    self.assertEqual(optimizer.counts()[0].staleness, (3, 2, 2))

  def test_dropped_gradients_are_of_variables_read_anew(self):
    rule = _rule(
      lambda: SGD(0.5),
      2,
      refresh_every=9,
      policies=[staleness.drop_stale(1)],
    )
    training = Training(rule, 2)
    replica = model_replica.Replica(
      [tf.Variable(v) for v in TWO.values()],
      lambda parameters, x: tf.reduce_sum(parameters[1]) * x[0],
      lambda *_: tf.data.Dataset.from_tensors((tf.ones([1]),)).repeat(),
    )
    runner = replicas.Runner(
      training.optimizers[1],
      training.stores[1],
      replica,
      iter(replica.dataset_fn()),
      1,
    )
    runner.begin()
    steps = [runner.step() for _ in range(2)]
    self.assertEqual([s.global_step for s in steps], [0, 0])  # Kept.
    dropped = runner.step()
    self.assertEqual(dropped.admitted, 0)
    self.assertEqual(dropped.global_step, 2)  # Read anew.
    self.assertEqual(runner.step().admitted, 1)


def _slowly(gradients, variables):
  """Plain descent that takes a while between reading and writing."""
  values = [variable.read_value() for variable in variables]
  for variable, gradient, value in zip(
    variables, gradients, values, strict=True
  ):
    with tf.control_dependencies([value]):
      work = tf.while_loop(
        lambda i, _: i < 3_000,
        lambda i, x: (i + 1, tf.sin(x)),
        (tf.constant(0), tf.constant(1.0)),
      )
    variable.assign(value - gradient + 0.0 * work[1])


class _Slow:
  apply = staticmethod(_slowly)


class ConcurrentTest(stores.TestCase):
  @parameterized.named_parameters(
    ("momentum", lambda: SGD(1.0, momentum=0.5)),
    ("adam", lambda: keras.optimizers.Adam(0.5, beta_2=0.5)),
  )
  def test_locking_loses_nothing(self, inner):
    """Constant gradients: the order of updates does not matter.

    Adam corrects its moments by the number of the update, so its first updates
    depend on their order: one replica makes these alone.
    """
    replicas, steps, alone_at_first = 3, 40, 60
    training = Training(_rule(inner, replicas, use_locking=True), replicas)
    for _ in range(alone_at_first):
      step, _ = training.pull(0)
      training.apply(0, step, _grads(1.0, 1.0))
    training.run(lambda r, v: _grads(1.0, 1.0), steps)
    total = alone_at_first + replicas * steps
    self.assertEqual(int(training.stores[0].global_step), total)
    self.new_cluster()
    alone = Training(_rule(inner, 1), 1)
    alone.run(lambda r, v: _grads(1.0, 1.0), total)
    for path, value in alone.values().items():
      np.testing.assert_allclose(training.values()[path], value, rtol=1e-4)

  @parameterized.parameters(True, False)
  def test_locking_is_what_loses_nothing(self, use_locking):
    """A read that is long before its write: who does not lock loses much."""
    replicas, steps = 3, 10
    rule = _rule(_Slow, replicas, use_locking=use_locking)
    training = Training(rule, replicas)
    together = threading.Barrier(replicas, timeout=background.DEADLINE_SECS)

    def compute(replica, values):
      del replica, values
      together.wait()  # All apply their gradients at the same time.
      return _grads(1.0, 1.0)

    training.run(compute, steps)
    self.assertEqual(int(training.stores[0].global_step), replicas * steps)
    lost = training.values()["b"][0] - (3.0 - replicas * steps)
    if use_locking:
      self.assertEqual(lost, 0.0)
    else:
      self.assertGreater(lost, 0.0)

  def test_counts_are_exact_without_locking(self):
    training = Training(_rule(lambda: SGD(1.0), 3), 3)
    training.run(lambda r, v: _grads(1.0, 0.0), 40)
    self.assertEqual(int(training.stores[0].global_step), 120)
    self.assertEqual(int(training.stores[0].examples_seen), 40 * 60)
    counts = training.chief.counts()
    self.assertEqual([c.applied for c in counts], [40] * 3)
    self.assertEqual([sum(c.staleness) for c in counts], [40] * 3)
    np.testing.assert_allclose(training.values()["a"], [-119.0, -118.0])

  @parameterized.parameters(True, False)
  def test_snapshots_are_of_one_version(self, snapshot_reads):
    """Every update takes 1 from all; who sees a difference saw half of one.

    Without snapshots, it depends on the machine how soon somebody does.
    """
    seen = []

    def compute(replica, values):
      if replica:
        a, b = values[0].numpy(), values[1].numpy()
        seen.append(float(a[0] + 2.0 - b[0]))
      return _grads(1.0, 1.0)

    rule = _rule(_Slow, 3, use_locking=True, snapshot_reads=snapshot_reads)
    training = Training(rule, 3)
    training.run(compute, 12)
    for _ in range(20):
      if snapshot_reads or any(seen):
        break
      training.run(compute, 12)
    self.assertEqual(any(seen), not snapshot_reads)

  def test_bound_of_zero_is_synchronous(self):
    """All read the same values, and apply before anyone reads again."""
    rule = _rule(
      lambda: SGD(0.25), 3, policies=[staleness.bounded_staleness(0)]
    )
    training = Training(rule, 3)
    seen = [[] for _ in range(3)]

    def compute(replica, values):
      seen[replica].append(values[1].numpy()[0])
      return [values[0] * 0.0, values[1] - tf.constant([float(replica)])]

    training.run(compute, 10)
    expected, value = [], np.float32(3.0)
    for _ in range(10):
      expected.append(value)
      value = value - 0.25 * (3 * value - 3.0)
    for values in seen:
      np.testing.assert_allclose(values, expected, rtol=1e-5)

  @parameterized.parameters(1, 3)
  def test_bound_holds(self, bound):
    rule = _rule(
      lambda: SGD(0.25), 2, policies=[staleness.bounded_staleness(bound)]
    )
    training = Training(rule, 2)
    done = threading.Event()

    def run_ahead():
      for _ in range(bound + 1):
        step, _ = training.pull(0)
        training.apply(0, step, _grads(0.0, 0.0))
      done.set()

    thread = threading.Thread(target=run_ahead, daemon=True)
    thread.start()
    deadline = threading.Event()
    while not training.chief.status().replicas[0].status:
      deadline.wait(0.01)
    self.assertEqual(int(training.stores[1].global_step), bound + 1)
    self.assertFalse(done.is_set())
    step, _ = training.pull(1)
    training.apply(1, step, _grads(0.0, 0.0))
    self.assertTrue(done.wait(30))
    thread.join()

  @parameterized.parameters(0, 1)
  def test_two_processes_of_one_replica_hold_nobody_up(self, bound):
    """One that was thought to be dead comes back beside its successor."""
    policies = [staleness.bounded_staleness(bound)]
    training = Training(_rule(lambda: SGD(0.25), 2, policies=policies), 2)

    def contribute(replica):
      try:
        while True:
          step, _ = training.pull(replica)
          training.apply(replica, step, _grads(0.0, 0.0))
      except tf.errors.OpError:
        pass  # It was closed.

    threads = [
      threading.Thread(target=contribute, args=(r,), daemon=True)
      for r in (0, 1, 1, 1)
    ]
    for thread in threads:
      thread.start()
    try:
      waiting.await_value(
        lambda: int(training.stores[0].global_step) > 250,
        timeout_secs=250,
        what="250 steps",
      )
    finally:
      training.chief.close()
      for thread in threads:
        thread.join(60)

  def test_lost_replica_holds_nobody_up(self):
    rule = _rule(
      lambda: SGD(0.25), 2, policies=[staleness.bounded_staleness(0)]
    )
    training = Training(rule, 2)
    training.chief.declare_lost(1, -1)
    self.assertEqual(
      [r.status for r in training.chief.status().replicas], [0, 4]
    )
    for number in range(3):
      step, _ = training.pull(0)
      self.assertEqual(
        training.apply(0, step, _grads(0.0, 0.0)), (True, number + 1)
      )


if __name__ == "__main__":
  absltest.main()
