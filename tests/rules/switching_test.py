"""Tests for rules.switching: whole trainings in one process."""

import threading
import time

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
from tf_replicas.rules import switch_conditions
from tf_replicas.rules import switching
from tf_replicas.rules.asynchronous import async_replicas
from tf_replicas.rules.asynchronous import staleness
from tf_replicas.rules.sync import sync_replicas
from tf_replicas.runtime import waiting
from tf_replicas.store import moving_averages

PATH = "w"
RATE = 0.5


def _sync(optimizer, needed=2, total=2, **options):
  return sync_replicas.SyncReplicasOptimizer(
    optimizer, needed, total, **options
  )


def _async(optimizer, total=2, **options):
  return async_replicas.AsyncReplicasOptimizer(optimizer, total, **options)


class Training:
  """Replicas as threads over one store; the test's thread is the chief.

  Attributes:
    IS_SPARSE: For each variable, whether its gradients are `tf.IndexedSlices`.
  """

  IS_SPARSE = [False]

  def __init__(self, optimizer, gradients, *, gates=()):
    """Starts the replicas.

    Args:
      optimizer: The rule.
      gradients: The constant gradient of each replica.
      gates: For each replica what it waits for before each batch, if anything.
    """
    self.optimizer = optimizer
    self.store, values = self._new_store()
    optimizer.build(self.store, is_sparse=self.IS_SPARSE)
    rule_base.create_or_resume(optimizer, self.store, values)
    self.errors = []
    self.threads = []
    for replica, gradient in enumerate(gradients):
      gate = gates[replica] if gates else None
      thread = threading.Thread(
        target=self._train, args=(replica, gradient, gate), daemon=True
      )
      thread.start()
      self.threads.append(thread)

  def _new_store(self):
    """The parameter store, and the first values of its variables."""
    return stores.attach([stores.spec(PATH, [2])]), [tf.zeros([2])]

  def _model(self, gradient):
    """A replica whose batches are all the same."""
    dataset = tf.data.Dataset.from_tensors((tf.fill([1], gradient),)).repeat()
    return model_replica.Replica(
      [tf.Variable(tf.zeros([2]))],
      lambda parameters, x: tf.reduce_sum(parameters[0]) * x[0],
      lambda *_: dataset,
    )

  def _train(self, replica, gradient, gate):
    model = self._model(gradient)
    iterator = iter(model.dataset_fn(1, 0, 0))
    runner = replicas.Runner(
      self.optimizer, self.store, model, iterator, replica
    )
    try:
      runner.begin()
      while True:
        if gate is not None:
          gate.acquire()
        if runner.step().global_step < 0:
          return
    except (tf.errors.OutOfRangeError, tf.errors.CancelledError):
      pass
    except Exception as error:  # The test's thread raises it.
      self.errors.append(error)
      self.optimizer.interrupt()

  def run_to(self, step):
    """Makes updates up to `step`; what each call of `apply_update` did."""
    self.optimizer.stop_at(step)
    return self.run_beyond(step)

  def run_beyond(self, step):
    """Makes updates at least up to `step`; what each call did."""
    done = []
    while not done or done[-1].global_step < step:
      try:
        done.append(self.optimizer.apply_updates()[0])
      except results.Interrupted:
        assert not self.errors, self.errors
    return done

  def stop(self):
    self.optimizer.close()
    for thread in self.threads:
      thread.join(timeout=background.DEADLINE_SECS)
    assert not self.errors, self.errors
    assert not any(thread.is_alive() for thread in self.threads)

  def values(self):
    return stores.numpy(self.store.read())[0]


class Slowly:
  """A gate that takes its time."""

  def acquire(self):
    time.sleep(0.3)


def _every_fifth(progress):
  times = progress.global_step // 5
  return switch_conditions.Choice(times % 2, until=5 * times + 5)


class SwitchingTest(stores.TestCase):
  def _train(self, optimizer, gradients, step, **more):
    training = Training(optimizer, gradients, **more)
    self.addCleanup(optimizer.close)
    done = training.run_to(step)
    training.stop()
    return training, done

  @parameterized.named_parameters(
    ("once", switch_conditions.at_step(6), 6),
    ("to_and_fro", _every_fifth, 10),
  )
  def test_sync_and_async(self, choose, num_sync):
    inner = keras.optimizers.SGD(RATE)
    averages = moving_averages.MovingAverages(0.5, num_updates_aware=False)
    rules = [
      _sync(inner, variable_averages=averages),
      _async(inner, variable_averages=averages, use_locking=True),
    ]
    optimizer = switching.SwitchingOptimizer(rules, choose)
    training, done = self._train(optimizer, [1.0, 1.0], 20)
    # Equal gradients: an update is the same whoever makes it.
    np.testing.assert_allclose(training.values(), [-RATE * 20] * 2)
    self.assertEqual(int(training.store.global_step), 20)
    # Synchronous updates have two examples, the others one.
    examples = 2 * num_sync + 20 - num_sync
    self.assertEqual(int(training.store.examples_seen), examples)
    self.assertEqual(sum(u.num_examples for u in done), examples)
    counts = optimizer.counts()
    self.assertEqual(sum(c.applied for c in counts), examples)
    self.assertEqual(sum(sum(c.staleness) for c in counts), 20 - num_sync)
    averages, average = training.store.state()["averages/w"], 0.0
    for step in range(20):
      average += 0.5 * (-RATE * (step + 1) - average)
    np.testing.assert_allclose(averages, [average] * 2, rtol=1e-5)

  def test_every_synchronous_update_is_of_both(self):
    """Async first; then 1 and 3 make updates of exactly 2."""
    inner = keras.optimizers.SGD(RATE)
    optimizer = switching.SwitchingOptimizer(
      [_async(inner, policies=[staleness.bounded_staleness(2)]), _sync(inner)],
      switch_conditions.at_step(7),
    )
    training, done = self._train(optimizer, [1.0, 3.0], 15)
    counts = optimizer.counts()
    ones, threes = (sum(c.staleness) for c in counts)
    self.assertEqual(ones + threes, 7)
    num_sync = 8
    self.assertEqual(
      [c.applied for c in counts], [ones + num_sync, threes + num_sync]
    )
    total = ones + 3 * threes + 2 * num_sync
    np.testing.assert_allclose(training.values(), [-RATE * total] * 2)
    self.assertEqual([u.num_examples for u in done[-num_sync:]], [2] * num_sync)

  @parameterized.named_parameters(
    ("once", switch_conditions.at_step(6), 6),
    ("to_and_fro", _every_fifth, 10),
  )
  def test_two_synchronous_rules(self, choose, num_of_both):
    """An update of both replicas; then of whoever comes first."""
    inner = keras.optimizers.SGD(RATE)
    both, first = _sync(inner, 2), _sync(inner, 1)
    optimizer = switching.SwitchingOptimizer([both, first], choose)
    training, done = self._train(optimizer, [1.0, 3.0], 20)
    applied = [[c.applied for c in rule.counts()] for rule in (both, first)]
    self.assertEqual(applied[0], [num_of_both] * 2)
    self.assertEqual(sum(applied[1]), 20 - num_of_both)
    total = num_of_both * 2 + applied[1][0] + 3 * applied[1][1]
    np.testing.assert_allclose(training.values(), [-RATE * total] * 2)
    examples = [update.num_examples for update in done]
    self.assertEqual(sum(examples), 2 * num_of_both + 20 - num_of_both)
    self.assertEqual(int(training.store.examples_seen), sum(examples))

  def test_two_asynchronous_rules(self):
    """Each has its own counts and gates; what was read serves either."""
    inner = keras.optimizers.SGD(RATE)
    rules = [
      _async(inner, policies=[staleness.bounded_staleness(1)]),
      _async(
        inner,
        policies=[
          staleness.bounded_staleness(2),
          staleness.delay_compensated(0.0),
        ],
      ),
    ]
    optimizer = switching.SwitchingOptimizer(
      rules, switch_conditions.at_step(7)
    )
    training, _ = self._train(optimizer, [1.0, 3.0], 20)
    applied = np.array([[c.applied for c in r.counts()] for r in rules])
    self.assertEqual(applied.sum(axis=1).tolist(), [7, 13])
    total = applied.sum(axis=0) @ [1.0, 3.0]
    np.testing.assert_allclose(training.values(), [-RATE * total] * 2)

  def test_all_rules_divide_by_the_scale_of_the_loss(self):
    inner = keras.optimizers.SGD(RATE)
    rules = [_sync(inner, loss_scale=8.0), _async(inner, loss_scale=8.0)]
    optimizer = switching.SwitchingOptimizer(
      rules, switch_conditions.at_step(3)
    )
    training, _ = self._train(optimizer, [1.0, 1.0], 8)
    np.testing.assert_allclose(training.values(), [-RATE * 8] * 2)

  def test_unfinished_sums_are_one_for_two_rules(self):
    """And have one name in checkpoints, whatever rule begins them."""
    inner = keras.optimizers.SGD(RATE)
    rules = [
      _async(inner, gradients_per_update=2, use_locking=use_locking)
      for use_locking in (False, True)
    ]
    optimizer = switching.SwitchingOptimizer(
      rules, switch_conditions.at_step(5)
    )
    training, _ = self._train(optimizer, [1.0, 1.0], 12)
    np.testing.assert_allclose(training.values(), [-RATE * 12] * 2)
    names = {"async/pending_2", "sums_2/w"}
    state = training.store.state()
    self.assertContainsSubset(names, state)
    self.assertEmpty([name for name in state if "rule" in name])

  def test_a_worker_knows_the_rule_in_use(self):
    """The object of a worker, where nothing but `build` is called."""

    def optimizer():
      inner = keras.optimizers.SGD(RATE)
      rules = [_async(inner), _sync(inner)]
      return switching.SwitchingOptimizer(rules, switch_conditions.at_step(2))

    store = stores.attach([stores.spec(PATH, [2])])
    chief, worker = optimizer(), optimizer()
    for each in (chief, worker):
      each.build(store, is_sparse=[False])
    rule_base.create_or_resume(chief, store, [tf.zeros([2])])
    self.assertEqual(worker.replicas_to_aggregate, 1)
    chief._change_to(1)
    for each in (chief, worker):
      self.assertEqual(each.replicas_to_aggregate, 2)
    worker.interrupt()
    with self.assertRaises(results.Interrupted):
      chief.rules[1].apply_updates()
    chief.close()

  def test_an_interrupt_during_the_change_reaches_the_new_rule(self):
    inner = keras.optimizers.SGD(RATE)
    old = _async(inner)
    optimizer = switching.SwitchingOptimizer(
      [old, _sync(inner)], switch_conditions.at_step(3)
    )
    training = Training(optimizer, [1.0, 1.0])
    self.addCleanup(optimizer.close)
    suspend = old.suspend

    def suspend_interrupted():
      optimizer.interrupt()
      return suspend()

    old.suspend = suspend_interrupted
    with self.assertRaises(results.Interrupted):
      for _ in range(12):
        optimizer.apply_updates()[0]
    training.run_to(20)
    training.stop()

  def test_an_earlier_chief_may_live_on_in_the_rule_to_come(self):
    """It was killed while it had suspended the second rule, and restarted."""
    inner = keras.optimizers.SGD(RATE)
    new = _sync(inner)
    optimizer = switching.SwitchingOptimizer(
      [_async(inner), new], switch_conditions.at_step(3)
    )
    training = Training(optimizer, [1.0, 1.0])
    self.addCleanup(optimizer.close)
    # As the first chief's, a thread waits for offers since it was created.
    contributions = new._contributions
    waiting.await_value(
      lambda: int(contributions._taker) != contributions._number,
      timeout_secs=100,
      what="a thread",
    )
    new.suspend()
    changed = threading.Event()
    resume = new.resume

    def resume_and_tell():
      resume()
      changed.set()

    new.resume = resume_and_tell
    chief = threading.Thread(target=training.run_to, args=(8,), daemon=True)
    chief.start()
    self.assertTrue(changed.wait(60))
    chief.join(60)
    self.assertEqual(int(training.store.global_step), 8)
    training.stop()

  def test_a_limit_ends_with_the_choice_that_had_it(self):
    inner = keras.optimizers.SGD(RATE)
    limits = {0: 5, 1: 10}

    def choose(progress):
      rule = int(5 <= progress.global_step < 10)
      is_back = progress.global_step >= 10
      return switch_conditions.Choice(rule, None if is_back else limits[rule])

    optimizer = switching.SwitchingOptimizer(
      [_async(inner), _sync(inner)], choose
    )
    training = Training(optimizer, [1.0, 1.0])
    self.addCleanup(optimizer.close)
    done = training.run_beyond(15)
    self.assertGreaterEqual(done[-1].global_step, 15)
    training.stop()

  def test_who_computes_all_the_while_is_let_go(self):
    """One replica has a ticket of the first synchronous phase to the last."""
    inner = keras.optimizers.SGD(RATE)
    slow = threading.Semaphore(3)
    optimizer = switching.SwitchingOptimizer(
      [_sync(inner), _async(inner)],
      lambda p: switch_conditions.Choice(int(3 <= p.global_step < 9), until=9),
    )
    training = Training(optimizer, [1.0, 1.0], gates=[None, slow])
    self.addCleanup(optimizer.close)
    training.run_to(9)
    self.assertEqual(optimizer.counts()[1].applied, 3)
    slow.release(9)
    training.run_to(12)
    np.testing.assert_allclose(training.values(), [-RATE * 12] * 2)
    training.stop()

  def test_the_record_of_refusals_changes_the_rule(self):
    """A backup replica that always comes last ends synchronous updates."""
    inner = keras.optimizers.SGD(RATE)
    slow = threading.Semaphore(0)
    optimizer = switching.SwitchingOptimizer(
      [_sync(inner, 2, 3), _async(inner, 3)],
      switch_conditions.when_refused(0.5, least=3),
    )
    training = Training(optimizer, [1.0] * 3, gates=[None, None, slow])
    self.addCleanup(optimizer.close)
    step = 0
    while not any(c.staleness for c in optimizer.counts()) and step < 300:
      step += 3
      slow.release()
      training.run_to(step)
    self.assertTrue(any(c.staleness for c in optimizer.counts()))
    self.assertGreaterEqual(optimizer.counts()[2].refused, 2)
    slow.release(9)
    training.stop()

  def test_waiting_for_one_changes_the_rule(self):
    """One that every update waits for ends synchronous updates.

    On a slow machine, an update may take several times as long as that wait.
    """
    inner = keras.optimizers.SGD(RATE)
    optimizer = switching.SwitchingOptimizer(
      [_sync(inner), _async(inner)], switch_conditions.when_slow(0.1, least=3)
    )
    training = Training(optimizer, [1.0, 1.0], gates=[None, Slowly()])
    self.addCleanup(optimizer.close)
    step = 0
    looks = []
    while not any(c.staleness for c in optimizer.counts()) and step < 300:
      step += 3
      training.run_to(step)
      looks.append([c.straggler_wait_secs for c in optimizer.counts()])
    self.assertGreater(step, 6)  # The first steps are not judged.
    fast, slow = optimizer.counts()
    self.assertTrue(fast.staleness or slow.staleness)
    fast_waits, slow_waits = np.subtract(looks[-1], looks[0])
    self.assertGreater(slow_waits, fast_waits)
    training.stop()

  @parameterized.named_parameters(
    ("at_the_start_only", [(0, 0), (0, 1e6), (0, 1e6), (0, 1e6)], 0),
    ("never", [(0, 0)] * 4, 0),
    ("always", [(0, 0), (0, 1e6), (0, 2e6)], 1),
    ("the_other", [(0, 0), (0, 0), (0, 0), (1e6, 0)], 1),
  )
  def test_when_slow(self, looks, expected):
    choose, choice = switch_conditions.when_slow(0.5, least=10), None
    for number, held_up in enumerate(looks):
      counts = [
        results.Counts(1, 0, (), straggler_wait_secs=s) for s in held_up
      ]
      progress = switch_conditions.Progress(10 * number, 0, lambda c=counts: c)
      choice = choose(progress)
      between = progress._replace(global_step=10 * number + 5, counts=None)
      if not choice.rule:
        self.assertEqual(choice.until, 10 * number + 10)
        self.assertEqual(choose(between), choice)
    self.assertEqual(choice.rule, expected)

  @parameterized.named_parameters(
    (
      "replicas",
      lambda inner: [_sync(inner), _async(inner, 3)],
      "`total_num_replicas`.*2 and 3",
    ),
    (
      "wire",
      lambda inner: [_sync(inner), _async(inner, wire_dtype="bfloat16")],
      "`wire_dtype`.*None and bfloat16",
    ),
    (
      "loss_scales",
      lambda inner: [_sync(inner, loss_scale=8.0), _async(inner)],
      "^`rules` must have the same `loss_scale`. Received: 8.0 and None.$",
    ),
    (
      "velocities",
      lambda inner: [_sync(inner), _async(inner, momentum_correction=True)],
      "the same `momentum_correction`. Received: False and True.$",
    ),
    (
      "optimizers",
      lambda inner: [_sync(inner), _async(keras.optimizers.SGD(1.0))],
      "one and the same optimizer",
    ),
    (
      "kept_reads",
      lambda inner: [_sync(inner), _async(inner, refresh_every=2)],
      "`refresh_every` of 1. Received: 2",
    ),
    (
      "several",
      lambda inner: [_async(inner), _sync(inner, 4, 2)],
      "one contribution.*4 contributions of 2",
    ),
    (
      "deadline",
      lambda inner: [
        _async(inner),
        sync_replicas.SyncReplicasOptimizer(inner, 2, step_timeout_secs=9),
      ],
      "no `step_timeout_secs`. Received: 9",
    ),
    (
      "ways_to_read",
      lambda inner: [
        _async(inner, policies=[staleness.delay_compensated(0.04)]),
        _async(inner, snapshot_reads=True),
      ],
      r"need: \['copies'\], \['snapshot_reads'\]",
    ),
  )
  def test_rules_that_do_not_go_together(self, rules, words):
    rules = rules(keras.optimizers.SGD(1.0, momentum=0.9))
    with self.assertRaisesRegex(ValueError, words):
      switching.SwitchingOptimizer(rules, switch_conditions.at_step(1))


if __name__ == "__main__":
  absltest.main()
