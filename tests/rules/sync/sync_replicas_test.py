"""Tests for rules.sync.sync_replicas: whole trainings in one process."""

import threading
import time

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests.support import background
from tests.support import stores
from tf_replicas.rules import base as rule_base
from tf_replicas.rules import results
from tf_replicas.rules.sync import contributions
from tf_replicas.rules.sync import sync_replicas
from tf_replicas.runtime import waiting
from tf_replicas.store import moving_averages

SGD = keras.optimizers.SGD
VALUES = {
  "table": np.linspace(-1, 1, 8, dtype="float32").reshape(4, 2),
  "kernel": np.float32([[1.0], [-0.5]]),
  "bias": np.zeros([1], "float32"),
}
IS_SPARSE = [True, False, False]


def _store(values=VALUES, num_tasks=2):
  specs = [
    stores.spec(
      path, v.shape, trainable=not path.startswith(("moving", "metrics/"))
    )
    for path, v in values.items()
  ]
  return stores.attach(specs, num_tasks, stores.cut(num_tasks))


class Training:
  """Replicas as threads over one store; the test's thread is the chief."""

  def __init__(self, optimizer, compute, *, values=VALUES, is_sparse=IS_SPARSE):
    """Creates the store.

    Args:
      optimizer: A `SyncReplicasOptimizer`.
      compute: Maps (replica, global step, parameters, how often it was called
        before) to (gradients, loss, num_examples).
      values: The initial values by path.
      is_sparse: Which gradients are slices.
    """
    self.optimizer = optimizer
    self.store = _store(values)
    self.errors = []
    self.releases = [[] for _ in range(optimizer.total_num_replicas)]
    self._compute = compute
    self._paths = list(values)
    self._functions = {}
    optimizer.build(self.store, is_sparse=is_sparse)
    rule_base.create_or_resume(
      optimizer, self.store, [tf.constant(v) for v in values.values()]
    )
    self._threads = []

  def start(self, *replicas):
    for replica in replicas or range(self.optimizer.total_num_replicas):
      if replica not in self._functions:
        self._functions[replica] = self._function(replica)
      thread = threading.Thread(
        target=self._contribute, args=(replica,), daemon=True
      )
      thread.start()
      self._threads.append(thread)

  def _function(self, replica):
    """What processes of one replica would trace alike is traced once."""

    @tf.function(autograph=False)
    def contribute(number, tag):
      step, parameters = self.store.pull()
      gradients, loss, num_examples = self._compute(
        replica, step, parameters, number
      )
      return self.optimizer.apply_gradients(
        zip(gradients, self._paths, strict=True),
        replica=replica,
        local_step=step,
        loss=loss,
        num_examples=num_examples,
        preadmitted_tag=tag,
      )

    return contribute

  def _contribute(self, replica):
    contribute = self._functions[replica]
    number, tag = 0, None
    try:
      while True:
        token = contribute(tf.constant(number), tag)
        self.releases[replica].append(
          (bool(token.admitted), int(token.global_step))
        )
        number += 1
        has_tag = int(token.preadmitted_tag) >= 0
        tag = tf.identity(token.preadmitted_tag) if has_tag else None
    except (tf.errors.OutOfRangeError, tf.errors.CancelledError):
      pass
    except Exception as error:  # The test's thread raises it.
      self.errors.append(error)
      self.optimizer.interrupt()

  def steps(self, count):
    return [self.optimizer.apply_updates()[0] for _ in range(count)]

  def stop(self):
    self.optimizer.close()
    for thread in self._threads:
      thread.join(timeout=background.DEADLINE_SECS)
    assert not any(thread.is_alive() for thread in self._threads)
    if self.errors:
      raise self.errors[0]

  def values(self):
    return dict(zip(self._paths, stores.numpy(self.store.read()), strict=True))


def _train(optimizer, compute, num_steps, **kwargs):
  training = Training(optimizer, compute, **kwargs)
  training.start()
  try:
    updates = training.steps(num_steps)
  finally:
    training.stop()
  return training, updates


ONE = {"w": np.zeros([2], "float32")}


def _constant(*gradients):
  """Replica w contributes a known gradient: expected values are sums."""

  def compute(replica, step, parameters, number):
    del step, parameters, number
    value = gradients[replica]
    return [tf.fill([2], tf.constant(value))], tf.abs(value), 10 * (replica + 1)

  return compute


class DeadlineTest(stores.TestCase):
  """The update of a step that has exceeded its deadline."""

  def _train(self, **more):
    """Replica 1 computes nothing until the test lets it go on."""
    gate = threading.Event()
    self.addCleanup(gate.set)

    def wait(number):
      if number >= 1:
        gate.wait(60)
      return number

    def compute(replica, step, parameters, number):
      del step, parameters
      value = tf.constant(float(replica + 1))
      if replica == 1:
        number = tf.py_function(wait, [number], tf.int32)
        with tf.control_dependencies([number]):
          value = tf.identity(value)
      return [tf.fill([2], value)], value, 10

    optimizer = sync_replicas.SyncReplicasOptimizer(
      SGD(1.0), 3, step_timeout_secs=60, **more
    )
    training = Training(optimizer, compute, values=ONE, is_sparse=[False])
    training.start()
    self.addCleanup(training.stop)
    return training, gate

  def _expire(self, training, received):
    waiting.await_value(
      lambda: training.optimizer.status().received == received,
      timeout_secs=60,
      what="the other contributions",
      poll_secs=0.01,
    )
    training.optimizer.expire(int(training.store.read_global_step()))

  def test_the_mean_is_over_those_that_came(self):
    training, gate = self._train(min_contributions=2)
    (first,) = training.steps(1)
    self.assertEqual((first.loss, first.num_examples), (2.0, 30))
    late = background.Call(lambda: training.steps(1)[0])
    self._expire(training, 2)
    update = late.result()
    self.assertEqual((update.loss, update.num_examples), (2.0, 20))
    # No update waits for replica 1 any more.
    self.assertEqual(training.steps(1)[0].num_examples, 20)
    np.testing.assert_allclose(training.values()["w"], [-6.0, -6.0])
    counts = training.optimizer.counts()
    self.assertEqual([c.missed for c in counts], [0, 2, 0])
    self.assertEqual([c.applied for c in counts], [3, 1, 3])
    # It comes back, and updates are made from three contributions again.
    gate.set()
    waiting.await_value(
      lambda: training.steps(1)[0].num_examples == 30,
      timeout_secs=60,
      what="the third contribution",
    )
    self.assertEqual(training.optimizer.counts()[1].applied, 2)

  def test_the_learning_rate_follows_if_asked(self):
    training, gate = self._train(min_contributions=2, scale_rate=True)
    training.steps(1)
    before = training.values()["w"]
    late = background.Call(lambda: training.steps(1)[0])
    self._expire(training, 2)
    late.result()
    # Two of three contributions, and so two thirds of the rate.
    change = training.values()["w"] - before
    gate.set()
    np.testing.assert_allclose(change, [-2.0 * 2 / 3] * 2, rtol=1e-6)

  def test_one_is_not_enough_if_two_are_needed(self):
    for settings in ({}, {"min_contributions": 3}):
      optimizer = sync_replicas.SyncReplicasOptimizer(
        SGD(1.0), 3, step_timeout_secs=1.0, **settings
      )
      self.assertEqual(optimizer.min_contributions, 3)

  def test_refuses(self):
    for settings, words in (
      ({"min_contributions": 4, "step_timeout_secs": 1}, "must be at most"),
      ({"min_contributions": 0, "step_timeout_secs": 1}, "at least 1"),
      ({"step_timeout_secs": 0}, "must be positive"),
      ({"scale_rate": True}, "`scale_rate` needs `min_contributions` below"),
      (
        {
          "min_contributions": 1,
          "step_timeout_secs": 1,
          "total_num_replicas": 2,
        },
        "needs a `replicas_to_aggregate` of at most",
      ),
    ):
      with self.assertRaisesRegex(ValueError, words):
        sync_replicas.SyncReplicasOptimizer(SGD(1.0), 3, **settings)


class ConstructorTest(stores.TestCase):
  @parameterized.named_parameters(
    (
      "zero",
      {"replicas_to_aggregate": 0},
      ValueError,
      "`replicas_to_aggregate`.*at least 1.*: 0",
    ),
    ("no_int", {"replicas_to_aggregate": 2.0}, TypeError, "integer.*: 2.0"),
    ("bool", {"replicas_to_aggregate": True}, TypeError, "integer.*True"),
    ("total", {"total_num_replicas": -1}, ValueError, "`total_num_replicas`"),
    ("clip", {"clip_mean_norm": 0.0}, ValueError, "`clip_mean_norm`.*0.0"),
    ("nan", {"clip_replica_norm": float("nan")}, ValueError, "positive.*nan"),
    ("scale", {"loss_scale": -2.0}, ValueError, "`loss_scale`.*-2.0"),
    (
      "average_what",
      {"variables_to_average": ["w"]},
      ValueError,
      "`variables_to_average` needs `variable_averages`",
    ),
    ("optimizer", {"optimizer": 3}, TypeError, "`optimizer`.*3"),
  )
  def test_refuses(self, arguments, error, message):
    arguments = {"optimizer": SGD(0.1), "replicas_to_aggregate": 2, **arguments}
    with self.assertRaisesRegex(error, message):
      sync_replicas.SyncReplicasOptimizer(**arguments)

  def test_as_many_replicas_as_places_by_default(self):
    optimizer = sync_replicas.SyncReplicasOptimizer(SGD(0.1), 3)
    self.assertEqual(optimizer.total_num_replicas, 3)

  def test_gradients_of_other_variables_are_refused(self):
    optimizer = sync_replicas.SyncReplicasOptimizer(SGD(0.1), 1)
    optimizer.build(_store(ONE, 1))
    with self.assertRaisesRegex(ValueError, "Received: 'other'"):
      optimizer.apply_gradients(
        [(None, "other")], replica=0, local_step=tf.constant(0, tf.int64)
      )

  def test_averages_of_other_variables_are_refused(self):
    optimizer = sync_replicas.SyncReplicasOptimizer(
      SGD(0.1),
      1,
      variable_averages=moving_averages.MovingAverages(0.9),
      variables_to_average=["other"],
    )
    with self.assertRaisesRegex(ValueError, "'other'; the store has"):
      optimizer.build(_store(ONE, 1))


class UpdateTest(stores.TestCase):
  def test_mean_of_all(self):
    optimizer = sync_replicas.SyncReplicasOptimizer(SGD(2.0), 2)
    training, updates = _train(
      optimizer, _constant(0.1, 0.3), 3, values=ONE, is_sparse=[False]
    )
    expected = 0 - 3 * (0.1 + 0.3) / 2 * 2.0
    np.testing.assert_allclose(training.values()["w"], expected, rtol=1e-6)
    self.assertEqual([u.global_step for u in updates], [1, 2, 3])
    self.assertEqual([u.num_examples for u in updates], [30] * 3)
    np.testing.assert_allclose([u.loss for u in updates], 0.2, rtol=1e-6)
    np.testing.assert_allclose([u.learning_rate for u in updates], 2.0)
    for counts in optimizer.counts():
      self.assertEqual((counts.applied, counts.refused), (3, 0))
    self.assertEqual(int(training.store.examples_seen), 90)
    for releases in training.releases:
      self.assertEqual(releases[:2], [(True, 1), (True, 2)])

  def test_n_of_m(self):
    optimizer = sync_replicas.SyncReplicasOptimizer(SGD(1.0), 2, 3)
    num_steps = 6
    training, updates = _train(
      optimizer,
      _constant(1.0, 1.0, 1.0),
      num_steps,
      values=ONE,
      is_sparse=[False],
    )
    np.testing.assert_allclose(training.values()["w"], -num_steps, rtol=1e-6)
    self.assertEqual(updates[-1].global_step, num_steps)
    applied = [counts.applied for counts in optimizer.counts()]
    self.assertEqual(sum(applied), 2 * num_steps)
    self.assertLessEqual(max(applied), num_steps)
    for releases, counts in zip(
      training.releases, optimizer.counts(), strict=True
    ):
      # A replica may be stopped before it could note its last release.
      admitted = sum(was_admitted for was_admitted, _ in releases)
      self.assertBetween(counts.applied - admitted, 0, 1)

  def test_more_places_than_replicas(self):
    optimizer = sync_replicas.SyncReplicasOptimizer(SGD(1.0), 4, 2)
    training, updates = _train(
      optimizer, _constant(1.0, 1.0), 3, values=ONE, is_sparse=[False]
    )
    np.testing.assert_allclose(training.values()["w"], -3, rtol=1e-6)
    applied = [counts.applied for counts in optimizer.counts()]
    self.assertEqual(sum(applied), 12)

  def test_loss_scale_is_taken_out_again(self):
    optimizer = sync_replicas.SyncReplicasOptimizer(
      SGD(1.0), 1, loss_scale=1024.0
    )
    self.assertEqual(float(optimizer.scale_loss(tf.constant(2.0))), 2048)
    training, _ = _train(
      optimizer, _constant(512.0), 1, values=ONE, is_sparse=[False]
    )
    np.testing.assert_allclose(training.values()["w"], -0.5)

  def test_clip_replica_norm_comes_before_the_mean(self):
    optimizer = sync_replicas.SyncReplicasOptimizer(
      SGD(1.0), 2, clip_replica_norm=float(np.sqrt(2))
    )
    # Of two elements each: 3 is scaled to 1, and 0.5 stays.
    training, _ = _train(
      optimizer, _constant(3.0, 0.5), 1, values=ONE, is_sparse=[False]
    )
    np.testing.assert_allclose(training.values()["w"], -0.75, rtol=1e-6)

  def test_clip_mean_norm_comes_after_it(self):
    optimizer = sync_replicas.SyncReplicasOptimizer(
      SGD(1.0), 2, clip_mean_norm=float(np.sqrt(2))
    )
    training, _ = _train(
      optimizer, _constant(3.0, 0.5), 1, values=ONE, is_sparse=[False]
    )
    np.testing.assert_allclose(training.values()["w"], -1.0, rtol=1e-6)

  def test_averages_follow_and_are_saved(self):
    optimizer = sync_replicas.SyncReplicasOptimizer(
      SGD(1.0),
      1,
      variable_averages=moving_averages.MovingAverages(
        0.75, num_updates_aware=False
      ),
    )
    training, _ = _train(
      optimizer, _constant(1.0), 2, values=ONE, is_sparse=[False]
    )
    # 0.75 * (0.75 * 0 + 0.25 * -1) + 0.25 * -2.
    average = training.store.state()["averages/w"]
    np.testing.assert_allclose(average, [-0.6875] * 2)

  def test_none_from_all_skips_none_from_some_counts_as_zero(self):
    def compute(replica, step, parameters, number):
      del step, parameters, number
      kernel = tf.ones([2, 1]) if replica == 0 else None
      return [None, kernel, None], 0.0, 1

    optimizer = sync_replicas.SyncReplicasOptimizer(
      SGD(1.0, weight_decay=0.5), 2
    )
    training, _ = _train(optimizer, compute, 2)
    values = training.values()
    np.testing.assert_array_equal(values["table"], VALUES["table"])
    np.testing.assert_array_equal(values["bias"], VALUES["bias"])
    once = VALUES["kernel"] * 0.5 - 0.5
    np.testing.assert_allclose(values["kernel"], once * 0.5 - 0.5)

  def test_what_is_not_finite_is_refused_before_it_does_harm(self):
    optimizer = sync_replicas.SyncReplicasOptimizer(SGD(1.0), 2)

    def compute(replica, step, parameters, number):
      del parameters, number
      is_bad = (step == 1) & (replica == 1)
      gradient = tf.where(is_bad, float("nan"), 1.0)
      return [tf.fill([2], gradient)], 0.0, 1

    training = Training(optimizer, compute, values=ONE, is_sparse=[False])
    training.start()
    try:
      training.steps(1)
      with self.assertRaises(results.NonFiniteGradientError) as raised:
        optimizer.apply_updates()
    finally:
      training.stop()
    self.assertEqual(raised.exception.replica, 1)
    self.assertEqual(raised.exception.global_step, 1)
    self.assertIn("replica 1 computed a loss", str(raised.exception))
    np.testing.assert_array_equal(training.values()["w"], [-1, -1])

  def test_several_updates_of_one_call_end_where_something_is_not_finite(self):
    optimizer = sync_replicas.SyncReplicasOptimizer(SGD(1.0), 2)

    def compute(replica, step, parameters, number):
      del replica, parameters, number
      gradient = tf.where(step == 7, float("nan"), 1.0)
      return [tf.fill([2], gradient)], tf.cast(step, tf.float32), 5

    training = Training(optimizer, compute, values=ONE, is_sparse=[False])
    training.start()
    made = []
    try:
      self.assertLen(optimizer.apply_updates(1), 1)
      made += optimizer.apply_updates(3)
      self.assertLessEqual(len(made), 3)
      with self.assertRaises(results.NonFiniteGradientError) as raised:
        while True:
          made += optimizer.apply_updates(100)
    finally:
      training.stop()
    self.assertEqual([u.global_step for u in made], list(range(2, 8)))
    self.assertEqual([u.loss for u in made], list(range(1, 7)))
    self.assertEqual([u.num_examples for u in made], [10] * 6)
    self.assertEqual(raised.exception.global_step, 7)
    np.testing.assert_array_equal(training.values()["w"], [-7, -7])

  def test_interrupt_and_close(self):
    optimizer = sync_replicas.SyncReplicasOptimizer(SGD(1.0), 1)
    training = Training(
      optimizer, _constant(1.0), values=ONE, is_sparse=[False]
    )
    optimizer.interrupt()
    with self.assertRaises(results.Interrupted):
      optimizer.apply_updates()[0]
    training.stop()
    with self.assertRaises(tf.errors.OutOfRangeError):
      optimizer.apply_updates()[0]

  def test_an_interrupt_that_came_too_late_ends_no_ending(self):
    """Nobody waited for an update any more; the replicas still come."""
    optimizer = sync_replicas.SyncReplicasOptimizer(SGD(1.0), 1, 2)
    training = Training(
      optimizer, _constant(1.0), values=ONE, is_sparse=[False]
    )
    optimizer.interrupt()
    answering = waiting.RaisingThread(optimizer.end_replicas, on_error=bool)
    training.start(0)
    (release, *_) = waiting.await_value(
      lambda: training.releases[0], timeout_secs=60, what="an answer"
    )
    self.assertEqual(release, (False, -1))
    while answering.is_alive():
      optimizer.interrupt()
      answering.join(timeout_secs=1)
    training.stop()

  def test_what_is_void_brings_no_gradient_of_another_variable(self):
    """Replica 1 was thought to be lost, then hands over; 0 has its place."""
    inner = SGD(1.0, weight_decay=0.5)
    optimizer = sync_replicas.SyncReplicasOptimizer(inner, 1, 2)

    def compute(replica, step, parameters, number):
      del replica, step, parameters, number
      return [tf.ones([2]), None], 0.0, 1

    values = {"w": np.zeros(2, "float32"), "v": np.ones(3, "float32")}
    training = Training(
      optimizer, compute, values=values, is_sparse=[False, False]
    )
    ledger, tag = optimizer._contributions, 7
    ledger._send(contributions.Kind.OFFER, 1, tag)
    ledger.declare_lost(1, tag)
    ledger._send(contributions.Kind.DELIVERED, 1, tag, present=[True, True])
    training.start(0)
    try:
      training.steps(2)
    finally:
      training.stop()
    np.testing.assert_allclose(training.values()["w"], [-1.5, -1.5])
    np.testing.assert_array_equal(training.values()["v"], values["v"])
    self.assertEqual([c.applied for c in optimizer.counts()], [2, 0])

  def test_a_replica_that_gave_up_its_chief_may_come_back(self):
    optimizer = sync_replicas.SyncReplicasOptimizer(SGD(1.0), 1)
    training = Training(
      optimizer, _constant(1.0), values=ONE, is_sparse=[False]
    )
    training.start()
    (releases,) = training.releases
    deadline = time.monotonic() + background.DEADLINE_SECS
    while not releases and time.monotonic() < deadline:
      optimizer.release_replica(0)
      time.sleep(0.1)
    training.steps(1)
    training.stop()
    *ended, applied = releases
    self.assertEqual(set(ended), {(False, -1)})
    self.assertEqual(applied, (True, 1))

  @parameterized.parameters((3, 3), (2, 3), (5, 3))
  def test_two_processes_of_one_replica_hold_up_no_step(self, places, replicas):
    """One that was thought to be dead comes back beside its successor."""
    optimizer = sync_replicas.SyncReplicasOptimizer(SGD(1.0), places, replicas)
    training = Training(
      optimizer, _constant(*[1.0] * replicas), values=ONE, is_sparse=[False]
    )
    training.start(*range(replicas), 1, 1)
    deadline = threading.Timer(250, optimizer.interrupt)
    deadline.start()
    try:
      training.steps(100)
    finally:
      deadline.cancel()
      training.stop()
    np.testing.assert_allclose(training.values()["w"], -100)
    self.assertEqual(sum(c.applied for c in optimizer.counts()), 100 * places)

  def test_a_chief_that_was_replaced_makes_no_updates(self):
    first, second = (
      sync_replicas.SyncReplicasOptimizer(SGD(1.0), 2) for _ in range(2)
    )
    training = Training(
      first, _constant(1.0, 1.0), values=ONE, is_sparse=[False]
    )
    training.start()
    training.steps(3)
    second.build(training.store, is_sparse=[False])
    second.create([tf.constant(v) for v in ONE.values()], resumed=True)
    second.start()
    for _ in range(3):
      with self.assertRaises(results.Interrupted):
        first.apply_updates()[0]
      while True:  # It wakes once more.
        try:
          second.apply_updates()
          break
        except results.Interrupted:
          pass
    training.stop()
    np.testing.assert_allclose(training.values()["w"], -6)
    self.assertEqual([c.applied for c in second.counts()], [6, 6])

  def test_a_late_gradient_is_refused_and_counted(self):
    optimizer = sync_replicas.SyncReplicasOptimizer(SGD(1.0), 1, 2)

    def compute(replica, step, parameters, number):
      del step, parameters, number
      return [tf.ones([2])], 0.0, 1

    training = Training(optimizer, compute, values=ONE, is_sparse=[False])
    training.start(0)
    training.steps(3)
    late = []

    @tf.function(autograph=False)
    def offer_from_step_1():
      return optimizer.apply_gradients(
        [(tf.ones([2]), "w")],
        replica=1,
        local_step=tf.constant(1, tf.int64),
      )

    thread = threading.Thread(
      target=lambda: late.append(offer_from_step_1()), daemon=True
    )
    thread.start()
    while not late:
      training.steps(1)
    training.stop()
    self.assertFalse(bool(late[0].admitted))
    self.assertGreaterEqual(int(late[0].global_step), 3)
    counts = optimizer.counts()[1]
    self.assertEqual((counts.applied, counts.refused), (0, 1))
    self.assertEqual(sum(counts.late), 1)


def _batch(number, size):
  """Batch `number` of a fixed stream: rows and labels."""
  rng = np.random.default_rng(int(number))
  rows = rng.integers(0, 4, size)
  return rows, rng.normal(size=size).astype("float32")


NUM_STEPS, BATCH = 4, 6
BATCHES = [_batch(step, BATCH) for step in range(NUM_STEPS + 1)]
ROWS = np.stack([rows for rows, _ in BATCHES])
LABELS = np.stack([labels for _, labels in BATCHES])


def _compute_share(num_replicas):
  """Each replica has its equal share of the batch of the step."""
  share = BATCH // num_replicas

  def compute(replica, step, parameters, number):
    del number
    begin = replica * share
    # A replica may look beyond the last step before it is stopped.
    step = tf.minimum(step, NUM_STEPS)
    rows = tf.gather(tf.constant(ROWS), step)[begin : begin + share]
    labels = tf.gather(tf.constant(LABELS), step)[begin : begin + share]
    with tf.GradientTape() as tape:
      tape.watch(parameters)
      table, kernel, bias = parameters
      outputs = tf.gather(table, rows) @ kernel + bias
      loss = tf.reduce_mean(tf.square(outputs[:, 0] - labels))
    return tape.gradient(loss, parameters), loss, share

  return compute


class EquivalenceTest(stores.TestCase):
  """N replicas with B examples each are one with N * B."""

  def test_sparse_and_dense(self):
    found = []
    for num_replicas in (1, 3):
      self.new_cluster()
      optimizer = sync_replicas.SyncReplicasOptimizer(
        keras.optimizers.Adam(0.1), num_replicas, clip_mean_norm=0.5
      )
      training, updates = _train(
        optimizer, _compute_share(num_replicas), NUM_STEPS
      )
      found.append((training.values(), updates))
    (one, one_updates), (three, three_updates) = found
    for path, value in VALUES.items():
      self.assertFalse(np.allclose(one[path], value), path)
      np.testing.assert_allclose(
        three[path], one[path], rtol=1e-4, atol=1e-6, err_msg=path
      )
    for ours, theirs in zip(three_updates, one_updates, strict=True):
      self.assertEqual(ours.num_examples, BATCH)
      self.assertAlmostEqual(ours.loss, theirs.loss, places=5)


class RepeatTest(stores.TestCase):
  def _repeat(self, max_calls, *, secs=60.0, until=1000, pause=0.0):
    """The rows of calls that count themselves, and wish to end at `until`."""
    calls = tf.Variable(0.0, dtype=tf.float64)

    @tf.function(autograph=False)
    def run(max_calls):
      def body():
        def wait():
          time.sleep(pause)
          return np.float64(0.0)

        with tf.control_dependencies([tf.numpy_function(wait, [], "float64")]):
          number = calls.assign_add(1.0)
        return tf.stack([number, 10 * number]), number < until

      return sync_replicas._repeat(body, max_calls, secs=secs)

    rows = run(tf.constant(max_calls)).numpy()
    self.assertLen(rows, int(calls))
    self.assertEqual(
      rows.tolist(), [[n, 10 * n] for n in range(1, len(rows) + 1)]
    )
    return len(rows)

  @parameterized.parameters(1, 2, 5)
  def test_as_often_as_wanted(self, max_calls):
    self.assertEqual(self._repeat(max_calls), max_calls)

  @parameterized.parameters(1, 3)
  def test_until_a_call_wants_no_other_and_its_row_counts(self, until):
    self.assertEqual(self._repeat(9, until=until), until)

  def test_once_in_any_case(self):
    self.assertEqual(self._repeat(0), 1)
    self.assertEqual(self._repeat(9, secs=0.0), 1)

  def test_not_again_when_its_time_is_over(self):
    self.assertBetween(self._repeat(10_000, secs=0.3, pause=0.1), 1, 4)


if __name__ == "__main__":
  absltest.main()
