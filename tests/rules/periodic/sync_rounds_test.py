"""Tests for rules.periodic.sync_rounds.

The center is `a`, two numbers on two PS tasks, and the statistic `moving`. What
a period led to is given, so that only the exchange is tested. What is
expected is worked out by hand.
"""

import threading

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests.support import stores
from tf_replicas.rules import base as rule_base
from tf_replicas.rules import results
from tf_replicas.rules import step_token
from tf_replicas.rules.asynchronous import async_replicas
from tf_replicas.rules.periodic import local_steps
from tf_replicas.rules.periodic import sync_rounds
from tf_replicas.rules.sync import sync_replicas
from tf_replicas.runtime import waiting
from tf_replicas.store import inner_optimizer

SGD = keras.optimizers.SGD
NAN, INF = float("nan"), float("inf")
CENTER = [10.0, 20.0, 100.0]  # The last is the statistic.
NUM_EXAMPLES = 3  # Of a period.
SECS = 60.0  # No test waits that long if all is well.
SPECS = [stores.spec("a", [2]), stores.spec("moving", [], trainable=False)]


def _together(num_places, num_replicas=None, *, moving_rate=None, rho=0.0):
  """All replicas exchange at once; elastically if there is a rate."""
  num_replicas = num_replicas or num_places
  rate = 1.0 if moving_rate is None else moving_rate * num_replicas
  rule = sync_replicas.SyncReplicasOptimizer(
    sync_rounds.MoveToward(rate), num_places, num_replicas
  )
  return sync_rounds.AverageAll(rule, moving_rate, rho)


def _alone(num_replicas, *, moving_rate=0.25, rho=1.0, **kwargs):
  """Each has an exchange of its own."""
  rule = async_replicas.AsyncReplicasOptimizer(
    sync_rounds.MoveToward(moving_rate), num_replicas, **kwargs
  )
  return sync_rounds.ElasticRound(rule, moving_rate, rho)


def _accumulated(num_replicas, *, period=4, optimizer=None, **kwargs):
  """Each hands over its mean gradient."""
  rule = async_replicas.AsyncReplicasOptimizer(
    optimizer or SGD(0.5), num_replicas, **kwargs
  )
  return sync_rounds.AccumulatedGradients(rule, period)


class Answers(rule_base.GradientRule):
  """A rule for `Together` that makes no update, and notes what it got.

  Attributes:
    said: In center of gradients, by path.
    heard: All else, by name.
  """

  refresh_every = 1

  def __init__(self, store, move, answer):
    self._store, self._answer = store, answer
    self.inner = inner_optimizer.InnerOptimizer(move)

  def apply_gradients(self, pairs, **heard):
    self.said = {path: np.asarray(distance) for distance, path in pairs}
    self.heard = heard
    admitted, step, tag = (tf.constant(x, tf.int64) for x in self._answer)
    return step_token.StepToken(admitted, step, tag, step_token.pack_times())

  def _nothing(self, *args, **kwargs):
    """Stands in for what an exchange does not call."""

  build = create = start = signature = trace_ahead = scale_loss = _nothing
  apply_updates = set_learning_rate = stop_at = counts = status = _nothing
  declare_lost = interrupt = release_replica = end_replicas = _nothing
  close = _nothing


def _exchange_answering(
  answer, *, rate=1.0, moving_rate=None, center_now=CENTER, tag=None
):
  """Replica 1 has a copy of step 0; the center is at step 6."""
  store = stores.attach(SPECS)
  rule = Answers(store, sync_rounds.MoveToward(rate), answer)
  sync_round = sync_rounds.AverageAll(rule, moving_rate)
  for index, value in enumerate(_tensors(center_now)):
    store.assign(index, value)
  store.load_state({"global_step": 6})
  sync_round.build(store)
  knew = _tensors(CENTER)
  local = local_steps.Local(
    _tensors([14.0, 12.0, 104.0]), [], [], tf.constant(0.25), tf.constant(3)
  )
  state = sync_rounds.State(
    *([], knew) if sync_round.needs_center else (knew, []), []
  )
  token = _token(0, tag)
  period = sync_rounds.Period(1, state, local, token)
  return rule, Outcome(*sync_round.exchange(period))


def _token(step, tag=None):
  """The token that a replica has before it exchanges."""
  step = tf.cast(step, tf.int64)
  return step_token.first(step)._replace(preadmitted_tag=tag)


def _tensors(values):
  """`a` and the statistic, of three numbers."""
  *a, moving = values
  return [tf.constant(a, tf.float32), tf.constant(moving, tf.float32)]


def _flat(tensors):
  return np.concatenate([np.reshape(t, [-1]) for t in stores.numpy(tensors)])


def _close(actual, expected):
  np.testing.assert_allclose(actual, expected, rtol=1e-5)


class Outcome:
  """What an exchange returned."""

  def __init__(self, token, copy, center):
    self.verdict = bool(token.admitted), int(token.global_step)
    self.tag = int(token.preadmitted_tag)
    self.copy = _flat(copy)
    self.center = _flat(center) if center else None


class Center:
  """A store and a rule; the test is the chief."""

  def __init__(self, test, sync_round):
    self.sync_round, self.rule = sync_round, sync_round.rule
    self.store = stores.attach(SPECS, 2, stores.cut(2))
    self.rule.build(self.store)
    sync_round.build(self.store)
    rule_base.create_or_resume(self.rule, self.store, _tensors(CENTER))
    test.addCleanup(self.rule.close)
    deadline = threading.Timer(SECS, self.rule.interrupt)
    deadline.start()
    test.addCleanup(deadline.cancel)
    self._exchange = tf.function(self._build_exchange, autograph=False)

  def _build_exchange(self, replica, center, copy, totals, loss, step):
    state = sync_rounds.State(
      center, center if self.sync_round.needs_center else [], []
    )
    local = local_steps.Local(
      copy, [], totals, loss, tf.constant(NUM_EXAMPLES, tf.int64)
    )
    period = sync_rounds.Period(replica, state, local, _token(step))
    return self.sync_round.exchange(period)

  def exchange(
    self, replica, copy=CENTER, *, knew=CENTER, totals=(), loss=0.5, step=0
  ):
    """`replica` exchanges its copy; `knew` is the center as it knows it."""
    return Outcome(
      *self._exchange(
        tf.constant(replica, tf.int64),
        _tensors(knew),
        _tensors(copy),
        list(totals),
        tf.constant(loss, tf.float64),
        tf.constant(step, tf.int64),
      )
    )

  def exchange_together(self, copies, **kwargs):
    """Replicas exchange copies, by their number; the update and outcomes."""
    outcomes = {}

    def exchange(replica, copy):
      outcomes[replica] = self.exchange(replica, copy, **kwargs)

    threads = [
      waiting.RaisingThread(lambda i=i: exchange(*i), on_error=lambda: None)
      for i in copies.items()
    ]
    update = self.rule.apply_updates()[0]
    for thread in threads:
      thread.join(SECS)
      assert not thread.is_alive(), "it waits forever"
    return update, outcomes

  def center(self):
    return _flat(self.store.read())

  def step(self):
    return int(self.store.global_step)


class MoveTest(absltest.TestCase):
  def test_goes_towards_the_copy_as_far_as_the_rate_says(self):
    """A distance is the center less the copy."""
    one, two = tf.Variable([10.0, 20.0]), tf.Variable(5.0)
    distances = [tf.constant([-4.0, 8.0]), tf.constant(1.0)]
    sync_rounds.MoveToward(0.25).apply(distances, [one, two])
    np.testing.assert_array_equal(one, [11.0, 18.0])
    self.assertEqual(float(two), 4.75)


class ModelAverageTest(stores.TestCase):
  def test_the_center_and_all_copies_become_the_mean(self):
    shared = Center(self, _together(2))
    update, outcomes = shared.exchange_together(
      {0: [14.0, 20.0, 104.0], 1: [8.0, 0.0, 100.0]}
    )
    mean = [11.0, 10.0, 102.0]
    _close(shared.center(), mean)
    for replica in range(2):
      _close(outcomes[replica].copy, mean)
      self.assertEqual(outcomes[replica].verdict, (True, 1))
      self.assertIsNone(outcomes[replica].center)
    self.assertEqual(update.num_examples, 2 * NUM_EXAMPLES)
    self.assertEqual(update.loss, 0.5)
    self.assertEqual(int(shared.store.examples_seen), 2 * NUM_EXAMPLES)

  def test_the_mean_is_over_the_replicas_that_took_part(self):
    shared = Center(self, _together(2, 3))
    shared.exchange_together({0: [14.0, 20.0, 104.0], 2: [8.0, 0.0, 100.0]})
    knew = shared.center()
    _close(knew, [11.0, 10.0, 102.0])
    # Afterwards the mean is that of the new copies.
    _, outcomes = shared.exchange_together(
      {0: [1.0, 2.0, 3.0], 2: [3.0, 4.0, 5.0]}, knew=knew, step=1
    )
    _close(shared.center(), [2.0, 3.0, 4.0])
    self.assertEqual(outcomes[2].verdict, (True, 2))


class TogetherTest(stores.TestCase):
  """What is handed over, and what follows from the token."""

  NOW = [7.0, 8.0, 9.0]

  def test_hands_over_how_far_the_center_is_from_the_copy(self):
    """Statistics times the rate; the inner optimizer multiplies the rest."""
    for moving_rate in (None, 0.25):
      rule, _ = _exchange_answering(
        (1, 6, -1), rate=0.5, moving_rate=moving_rate, tag="a tag"
      )
      self.assertEqual(rule.said.keys(), {"a", "moving"})
      np.testing.assert_allclose(rule.said["a"], [-4.0, 8.0])
      np.testing.assert_allclose(rule.said["moving"], -2.0)
      self.assertEqual(rule.heard["replica"], 1)
      self.assertEqual(int(rule.heard["local_step"]), 0)
      self.assertEqual(float(rule.heard["loss"]), 0.25)
      self.assertEqual(int(rule.heard["num_examples"]), 3)
      self.assertEqual(rule.heard["preadmitted_tag"], "a tag")

  @parameterized.parameters(0, 1)
  def test_an_averaged_copy_becomes_the_center_even_if_refused(self, admitted):
    _, outcome = _exchange_answering((admitted, 5, -1), center_now=self.NOW)
    _close(outcome.copy, self.NOW)
    self.assertEqual(outcome.verdict, (bool(admitted), 6))

  def test_an_elastic_copy_moves_from_where_the_center_was(self):
    _, outcome = _exchange_answering(
      (1, 6, 77), moving_rate=0.25, center_now=self.NOW
    )
    _close(outcome.copy, [13.0, 14.0, 103.0])
    _close(outcome.center, self.NOW)
    self.assertEqual((outcome.verdict, outcome.tag), ((True, 6), 77))

  def test_an_elastic_copy_that_was_refused_is_not_moved(self):
    _, outcome = _exchange_answering(
      (0, 5, -1), moving_rate=0.25, center_now=self.NOW
    )
    _close(outcome.copy, [14.0, 12.0, 104.0])
    _close(outcome.center, self.NOW)
    self.assertEqual(outcome.verdict, (False, 6))

  @parameterized.parameters(None, 0.25)
  def test_the_end_of_training_replaces_the_step(self, moving_rate):
    _, outcome = _exchange_answering(
      (0, step_token.ENDED, -1), moving_rate=moving_rate
    )
    self.assertEqual(outcome.verdict, (False, step_token.ENDED))


class ElasticTogetherTest(stores.TestCase):
  def test_copies_move_a_quarter_and_the_center_by_the_sum(self):
    shared = Center(self, _together(2, moving_rate=0.25))
    _, outcomes = shared.exchange_together(
      {0: [14.0, 20.0, 104.0], 1: [8.0, 0.0, 108.0]}
    )
    # Differences: 4, 0, 4 and -2, -20, 8.
    center = [10.5, 15.0, 103.0]
    _close(shared.center(), center)
    _close(outcomes[0].copy, [13.0, 20.0, 103.0])
    _close(outcomes[1].copy, [8.5, 5.0, 106.0])
    for replica in range(2):
      self.assertEqual(outcomes[replica].verdict, (True, 1))
      _close(outcomes[replica].center, center)


class ElasticAloneTest(stores.TestCase):
  def test_one_after_the_other(self):
    shared = Center(self, _alone(2))
    first = shared.exchange(0, [14.0, 20.0, 104.0])
    _close(shared.center(), [11.0, 20.0, 101.0])
    _close(first.copy, [13.0, 20.0, 103.0])
    _close(first.center, [11.0, 20.0, 101.0])
    self.assertEqual(first.verdict, (True, 1))
    self.assertEqual(first.tag, -1)  # Not admitted in advance.
    # From the center as it is now, not as the replica knew it.
    second = shared.exchange(1, [7.0, 0.0, 97.0])
    _close(shared.center(), [10.0, 15.0, 100.0])
    _close(second.copy, [8.0, 5.0, 98.0])
    _close(second.center, [10.0, 15.0, 100.0])
    self.assertEqual(second.verdict, (True, 2))
    self.assertEqual(int(shared.store.examples_seen), 2 * NUM_EXAMPLES)
    counts = shared.rule.counts()
    self.assertEqual([c.staleness for c in counts], [(1,), (0, 1)])
    self.assertEqual(
      shared.rule.apply_updates()[0].num_examples, 2 * NUM_EXAMPLES
    )

  def test_the_center_is_carried_only_where_a_force_needs_it(self):
    for rho, needs_center in ((0.0, False), (0.5, True)):
      self.new_cluster()
      shared = Center(self, _alone(1, rho=rho))
      self.assertEqual(shared.sync_round.needs_center, needs_center)
      outcome = shared.exchange(0, [14.0, 20.0, 104.0])
      self.assertEqual(outcome.center is not None, needs_center)
      _close(outcome.copy, [13.0, 20.0, 103.0])

  def test_statistics_may_follow_replica_0_alone(self):
    shared = Center(self, _alone(2, has_chief_statistics=True))
    other = shared.exchange(1, [10.0, 20.0, 104.0])
    _close(shared.center(), CENTER)
    # The copy moves toward the center nevertheless.
    _close(other.copy, [10.0, 20.0, 103.0])
    shared.exchange(0, [10.0, 20.0, 104.0], step=1)
    _close(shared.center(), [10.0, 20.0, 101.0])

  def test_what_is_not_finite_does_not_reach_the_center(self):
    shared = Center(self, _alone(2))
    for copy, loss in (
      ([14.0, 20.0, 104.0], NAN),
      ([14.0, 20.0, 104.0], -INF),
      ([NAN, 0.0, 0.0], 0.5),
      ([0.0, INF, 0.0], 0.5),
    ):
      with self.subTest(copy=copy, loss=loss):
        outcome = shared.exchange(1, copy, loss=loss)
        _close(shared.center(), CENTER)
        if np.isfinite(copy).all():
          _close(outcome.copy, copy)
        self.assertEqual(outcome.verdict, (False, 0))
        self.assertEqual(int(shared.store.examples_seen), 0)
        with self.assertRaises(results.NonFiniteGradientError) as caught:
          shared.rule.apply_updates()[0]
        self.assertEqual(caught.exception.replica, 1)

  def test_after_the_end_nothing_moves(self):
    shared = Center(self, _alone(1))
    shared.rule.end_replicas()
    outcome = shared.exchange(0, [14.0, 20.0, 104.0])
    self.assertEqual(outcome.verdict, (False, step_token.ENDED))
    _close(outcome.copy, [14.0, 20.0, 104.0])
    _close(shared.center(), CENTER)
    self.assertEqual(shared.step(), 0)
    self.assertEqual(shared.rule.counts()[0].applied, 0)


class AccumulatedTest(stores.TestCase):
  def test_the_mean_gradient_is_applied_once(self):
    """Rate 0.5, a period of 4: an eighth of the sum."""
    shared = Center(self, _accumulated(2))
    totals = _tensors([16.0, -8.0, 6.0])
    outcome = shared.exchange(0, [1.0, 2.0, 3.0], totals=totals)
    # The statistic goes half of its way, for there are two replicas.
    center = [8.0, 21.0, 97.0]
    _close(shared.center(), center)
    self.assertEqual(outcome.verdict, (True, 1))
    _close(outcome.copy, center)
    self.assertIsNone(outcome.center)
    self.assertEqual(shared.step(), 1)
    self.assertEqual(int(shared.store.examples_seen), NUM_EXAMPLES)
    self.assertEqual([c.applied for c in shared.rule.counts()], [1, 0])
    shared.exchange(0, totals=totals, step=1)
    _close(shared.center(), [6.0, 22.0, 94.0])

  def test_goes_on_from_what_others_made_of_the_center(self):
    shared = Center(self, _accumulated(2))
    shared.exchange(0, totals=_tensors([16.0, 0.0, 0.0]))
    outcome = shared.exchange(1, totals=_tensors([0.0, 16.0, 0.0]))
    _close(outcome.copy, [8.0, 18.0, 100.0])
    self.assertEqual(outcome.verdict, (True, 2))
    # It was of step 0, one update ago.
    self.assertEqual(shared.rule.counts()[1].staleness, (0, 1))

  def test_the_optimizer_of_the_center_keeps_its_slots(self):
    """By 2, then by half of that and 2."""
    shared = Center(self, _accumulated(1, optimizer=SGD(0.5, momentum=0.5)))
    for step, expected in enumerate([8.0, 5.0]):
      shared.exchange(0, totals=_tensors([16.0, 0.0, 0.0]), step=step)
      _close(shared.center()[0], expected)

  def test_a_variable_without_gradient_is_left_alone(self):
    """Weight decay would move it."""
    shared = Center(self, _accumulated(1, optimizer=SGD(0.5, weight_decay=0.1)))
    outcome = shared.exchange(0, totals=[None, tf.constant(5.0)])
    _close(shared.center(), [10.0, 20.0, 95.0])
    self.assertEqual(outcome.verdict, (True, 1))

  def test_statistics_may_follow_replica_0_alone(self):
    shared = Center(self, _accumulated(2, has_chief_statistics=True))
    shared.exchange(1, totals=_tensors([0.0, 0.0, 6.0]))
    _close(shared.center(), CENTER)
    shared.exchange(0, totals=_tensors([0.0, 0.0, 6.0]), step=1)
    _close(shared.center(), [10.0, 20.0, 94.0])

  def test_what_is_not_finite_does_not_reach_the_center(self):
    shared = Center(self, _accumulated(2))
    for totals, loss in (
      ([1.0, 1.0, 1.0], NAN),
      ([1.0, NAN, 1.0], 0.5),
      ([1.0, 1.0, INF], 0.5),
    ):
      with self.subTest(totals=totals, loss=loss):
        outcome = shared.exchange(1, totals=_tensors(totals), loss=loss)
        self.assertEqual(outcome.verdict, (False, 0))
        _close(shared.center(), CENTER)
        with self.assertRaises(results.NonFiniteGradientError) as caught:
          shared.rule.apply_updates()[0]
        self.assertEqual(caught.exception.replica, 1)

  def test_after_the_end_nothing_moves(self):
    shared = Center(self, _accumulated(1))
    shared.rule.end_replicas()
    outcome = shared.exchange(0, totals=_tensors([16.0, 16.0, 16.0]))
    self.assertEqual(outcome.verdict, (False, step_token.ENDED))
    _close(shared.center(), CENTER)
    self.assertEqual(shared.step(), 0)


class PullBackTest(stores.TestCase):
  @parameterized.named_parameters(
    ("together", lambda rho: _together(2, moving_rate=0.25, rho=rho)),
    ("alone", lambda rho: _alone(2, rho=rho)),
  )
  def test_a_copy_descends_towards_the_center_that_it_knows(self, make):
    sync_round = make(0.5)
    state = sync_rounds.State(
      [tf.constant(0.0)] * 2, [tf.constant(10.0), tf.constant(20.0)], []
    )
    pull_back = sync_round.pull_back(state)
    # Gradients: what is above the center goes down, what is below goes up.
    self.assertEqual(float(pull_back(tf.constant(14.0), 0)), 2.0)
    self.assertEqual(float(pull_back(tf.constant(14.0), 1)), -3.0)

  @parameterized.named_parameters(
    ("model_average", lambda: _together(2)),
    ("together", lambda: _together(2, moving_rate=0.25)),
    ("alone", lambda: _alone(2, rho=0.0)),
    ("accumulated", lambda: _accumulated(2)),
  )
  def test_there_is_none_where_there_is_no_force(self, make):
    state = sync_rounds.State([tf.constant(1.0)], [], [])
    self.assertIsNone(make().pull_back(state))


class KindTest(stores.TestCase):
  @parameterized.named_parameters(
    ("model_average", lambda: _together(2), False, False),
    ("together", lambda: _together(2, moving_rate=0.25), True, False),
    ("alone", lambda: _alone(2), True, False),
    ("accumulated", lambda: _accumulated(2), False, True),
  )
  def test_what_a_kind_needs(self, make, needs_center, needs_totals):
    sync_round = make()
    self.assertEqual(sync_round.needs_center, needs_center)
    self.assertEqual(sync_round.needs_totals, needs_totals)

  @parameterized.named_parameters(
    ("together", lambda *r: _together(2, moving_rate=r[0], rho=r[1])),
    ("alone", lambda *r: _alone(2, moving_rate=r[0], rho=r[1])),
  )
  def test_clients_must_agree_on_rate_and_force(self, make):
    signature = make(0.25, 0.5).signature()
    self.assertEqual(make(0.25, 0.5).signature(), signature)
    self.assertNotEqual(make(0.125, 0.5).signature(), signature)
    self.assertNotEqual(make(0.25, 0.75).signature(), signature)


if __name__ == "__main__":
  absltest.main()
