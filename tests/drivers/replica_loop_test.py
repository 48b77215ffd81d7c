"""Tests for drivers.replica_loop, and for what a replica's rule does in it.

One variable `w` begins at 10. The loss of a batch is w times the mean x of it,
so the gradient is x; where x is 1, the loss tells which w was used. Most rules
here make one update of each contribution, at rate 1, and record the arguments.
"""

import contextlib
import threading
import time
from typing import NamedTuple
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests.support import stores
from tf_replicas.drivers import replica_loop
from tf_replicas.replica import model_replica
from tf_replicas.rules import base as rule_base
from tf_replicas.rules import step_token
from tf_replicas.rules.asynchronous import async_replicas
from tf_replicas.rules.sync import sync_replicas
from tf_replicas.runtime import put_back
from tf_replicas.runtime import waiting

SGD = keras.optimizers.SGD
START = 10.0
PER_BATCH = 2  # Examples.
ONES = [1.0] * 1000
SECS = 60.0  # No test waits that long if all is well.
_NO_TAG = -2


class Offer(NamedTuple):
  """The arguments of one contribution."""

  replica: int
  step: int
  loss: float
  num_examples: int
  tag: int | None
  gradient: float


class Rule(rule_base.GradientRule):
  """Descends at once, or does and answers as it is told.

  Attributes:
    offers: All contributions.
    paths: Of the variables that it got gradients of.
    asked_at: When it got the last contribution, in seconds since 1970.
  """

  def __init__(self, store, answers=(), *, scale=1.0, before_answer=None):
    """Prepares it.

    Args:
      store: What it updates.
      answers: (admitted, global step, tag), one for each contribution; when
        none is left it updates and admits.
      scale: Of the loss.
      before_answer: Called before each answer, in place of the update.
    """
    self.offers, self.paths = [], None
    self._store = store
    self._answers = list(answers)
    self._scale = scale
    self._before_answer = before_answer or self._update

  def scale_loss(self, loss):
    return loss * self._scale

  def apply_gradients(
    self,
    pairs,
    *,
    replica,
    local_step,
    loss,
    num_examples,
    preadmitted_tag=None,
  ):
    gradients, self.paths = zip(*pairs, strict=True)
    has_no_tag = preadmitted_tag is None
    admitted, step, tag = tf.numpy_function(
      self._answer,
      [
        tf.cast(replica, tf.int64),
        local_step,
        loss,
        num_examples,
        tf.constant(_NO_TAG, tf.int64) if has_no_tag else preadmitted_tag,
        gradients[0],
      ],
      [tf.int64] * 3,
    )
    for tensor in (admitted, step, tag):
      tensor.set_shape([])
    return step_token.StepToken(admitted, step, tag, step_token.pack_times())

  def _answer(self, replica, step, loss, num_examples, tag, gradient):
    self.asked_at = time.time()
    offer = Offer(
      int(replica),
      int(step),
      float(loss),
      int(num_examples),
      None if tag == _NO_TAG else int(tag),
      float(gradient),
    )
    self.offers.append(offer)
    self._before_answer(offer)
    answer = 1, int(self._store.global_step), -1
    if self._answers:
      answer = self._answers.pop(0)
    return tuple(map(np.int64, answer))

  def _update(self, offer):
    self._store.assign(0, float(self._store.read()[0]) - offer.gradient)
    self._store.advance(self._store.global_step, offer.num_examples)

  def _nothing(self, *args, **kwargs):
    """Stands in for what a replica does not call."""

  build = create = start = signature = trace_ahead = apply_updates = _nothing
  set_learning_rate = stop_at = counts = status = declare_lost = _nothing
  interrupt = release_replica = end_replicas = close = _nothing


def _store(*, is_new=False):
  """A store of `w`; without a value if it is new."""
  if is_new:
    return stores.attach([stores.spec("w", [])])
  return stores.create({"w": np.float32(START)})


def _model():
  return model_replica.Replica(
    [tf.Variable(START, name="w")],
    lambda parameters, x: parameters[0] * tf.reduce_mean(x),
    lambda *_: None,
  )


class Replica:
  """A replica whose steps the test makes.

  Attributes:
    state: What it carries to its next step.
  """

  def __init__(
    self, store, rule, batches=ONES, *, index=0, recorder=None, repeats=False
  ):
    if callable(batches):
      data_set = tf.data.Dataset.from_generator(
        batches, output_signature=tf.TensorSpec([], tf.float32)
      )
    else:
      data_set = tf.data.Dataset.from_tensor_slices(np.float32(batches))
    self._batches = iter(data_set.map(lambda x: (tf.fill([PER_BATCH], x),)))
    loop = replica_loop.ReplicaLoop(
      rule,
      _model(),
      self._batches,
      index,
      device=None,
      recorder=recorder,
      name="someone",
      put_back=(
        put_back.PutBack(self._batches.element_spec, device=None)
        if repeats
        else None
      ),
    )
    begin = tf.function(loop.begin, autograph=False)
    self._packed, *self.state = begin()
    self._run_one = tf.function(loop.run_one, autograph=False)
    self._run_many = tf.function(loop.run_many, autograph=False)

  @property
  def last(self):
    """The last token."""
    return step_token.LAYOUT.unpack(self._packed)

  @property
  def tag(self):
    return int(self.last.preadmitted_tag)

  @property
  def step(self):
    return int(self.last.global_step)

  @property
  def w(self):
    return float(self.state[0])

  def next_x(self):
    """The x of the first batch that no step has used."""
    ((x, *_),) = next(self._batches)
    return float(x)

  def trace_one(self):
    """Traces what `run_one` runs, which takes long, and runs nothing."""
    self._run_one.get_concrete_function(
      self._packed, *self.state, is_preadmitted=False
    )

  def run_one(self, *, is_preadmitted=False):
    self._packed, *self.state = self._run_one(
      self._packed, *self.state, is_preadmitted=is_preadmitted
    )
    return self.last

  def run_many(self, *, is_preadmitted=False, max_steps=1000):
    """Runs steps; returns how many."""
    count, self._packed, *self.state = self._run_many(
      tf.constant(max_steps),
      self._packed,
      *self.state,
      is_preadmitted=is_preadmitted,
    )
    return int(count)


def _in_background(run):
  """A thread; `_join` waits for it and raises what it raised."""
  return waiting.RaisingThread(run, on_error=lambda: None)


def _join(*threads):
  for thread in threads:
    thread.join(SECS)
    assert not thread.is_alive(), "it runs forever"


def _contribute(rule, *, index=0, step=0, tag=None, **kwargs):
  """One contribution outside of any loop, in a graph."""
  model = _model()
  batches = iter(tf.data.Dataset.from_tensors((tf.ones([PER_BATCH]),)).repeat())

  @tf.function(autograph=False)
  def run(step, parameter):
    token = step_token.first(step)
    if tag is not None:
      token = token._replace(preadmitted_tag=tf.constant(tag, tf.int64))
    return rule.contribute(
      lambda state, scale: model.gradients(state, next(batches), scale),
      index,
      [parameter],
      token=token,
      **kwargs,
    )

  return run(tf.constant(step, tf.int64), tf.constant(START))


class BeginTest(stores.TestCase):
  def test_reads_the_step_and_the_variables_trainable_ones_first(self):
    specs = [
      stores.spec("moving", [], trainable=False),
      stores.spec("a", []),
      stores.spec("b", []),
    ]
    store = stores.attach(specs)
    for index, value in enumerate([3.0, 1.0, 2.0]):
      store.assign(index, value)
    store.load_state({"global_step": 8})
    rule = Rule(store)
    begun = rule.begin(0)
    self.assertEqual(int(begun.token.global_step), 8)
    self.assertEqual(stores.numpy(begun.state), [1.0, 2.0, 3.0])
    self.assertEqual(float(begun.computed), step_token.NEVER)
    token, state = rule.pull_contributed(0)
    self.assertEqual(int(token.global_step), 8)
    self.assertEqual(stores.numpy(state), [1.0, 2.0, 3.0])

  def test_a_rule_may_read_in_its_own_way(self):
    class OwnRead(Rule):
      def pull(self, replica, token=None):
        return step_token.first(tf.constant(5, tf.int64)), [10 * replica]

    rule = OwnRead(_store())
    self.assertEqual(rule.pull_contributed(3)[1], [30])
    begun = rule.begin(4)
    self.assertEqual((int(begun.token.global_step), begun.state), (5, [40]))

  def test_a_rule_may_choose_what_a_replica_carries(self):
    class OwnState(Rule):
      def begin(self, replica):
        token = step_token.first(tf.constant(5, tf.int64))
        state = [tf.constant([1.0, 2.0]), tf.constant(replica)]
        return rule_base.ReplicaStep(token, state, step_token.never())

    store = _store()
    replica = Replica(store, OwnState(store), index=4)
    self.assertEqual(replica.step, 5)
    np.testing.assert_array_equal(replica.state[0], [1.0, 2.0])
    self.assertEqual(int(replica.state[1]), 4)

  def test_the_first_token_admits_nothing(self):
    store = _store()
    store.load_state({"global_step": 8})
    replica = Replica(store, Rule(store), [1.0, 2.0])
    self.assertEqual(int(replica.last.admitted), 0)
    self.assertEqual(replica.step, 8)
    self.assertEqual(replica.tag, step_token.NO_TAG)
    self.assertEqual(replica.w, START)
    self.assertEqual(replica.next_x(), 1.0)


class ContributeTest(stores.TestCase):
  def test_hands_over_the_gradient_and_continues_from_the_update(self):
    store = _store()
    store.load_state({"global_step": 8})
    rule = Rule(store)
    replica = Replica(store, rule, [3.0, 4.0, 5.0], index=2)
    last = replica.run_one()
    self.assertEqual(
      rule.offers, [Offer(2, 8, START * 3, PER_BATCH, None, 3.0)]
    )
    self.assertEqual(rule.paths, ("w",))
    self.assertEqual((int(last.admitted), replica.step), (1, 9))
    self.assertEqual(replica.w, 7.0)
    # The next is of what it read, and of the next batch.
    replica.run_one()
    self.assertEqual(rule.offers[1], Offer(2, 9, 28.0, PER_BATCH, None, 4.0))
    self.assertEqual((replica.step, replica.w), (10, 3.0))
    self.assertEqual(replica.next_x(), 5.0)

  def test_the_loss_is_scaled_for_the_gradient_and_not_for_the_report(self):
    store = _store()
    rule = Rule(store, scale=8.0)
    _contribute(rule)
    self.assertEqual(rule.offers[0].gradient, 8.0)
    self.assertEqual(rule.offers[0].loss, START)

  def test_reads_only_after_the_token(self):
    """What is read includes an update that took a while."""
    store = _store()

    def slowly(offer):
      time.sleep(0.3)
      store.assign(0, START - offer.gradient)
      store.advance(store.global_step, offer.num_examples)

    step = _contribute(Rule(store, before_answer=slowly))
    self.assertEqual(stores.numpy(step.state), [9.0])
    self.assertEqual(int(step.token.global_step), 1)

  def test_a_refused_replica_continues_from_the_present_variables(self):
    """Its token has an older step than what it reads."""
    store = _store()

    def update_of_others(offer):
      del offer
      store.assign(0, 4.0)
      store.load_state({"global_step": 6})

    rule = Rule(store, [(0, 5, -1)], before_answer=update_of_others)
    step = _contribute(rule)
    self.assertEqual(int(step.token.admitted), 0)
    self.assertEqual(int(step.token.global_step), 6)
    self.assertEqual(stores.numpy(step.state), [4.0])

  def test_the_end_of_training_replaces_the_step(self):
    store = _store()
    store.load_state({"global_step": 6})
    rule = Rule(
      store, [(0, step_token.ENDED, -1)], before_answer=lambda _: None
    )
    step = _contribute(rule, step=6)
    self.assertEqual(int(step.token.global_step), step_token.ENDED)

  def test_the_rule_gets_the_old_tag_and_returns_a_new_one(self):
    store = _store()
    rule = Rule(store, [(1, 1, 78)])
    step = _contribute(rule, tag=77)
    self.assertEqual(rule.offers[0].tag, 77)
    self.assertEqual(int(step.token.preadmitted_tag), 78)

  def test_reads_the_clock_on_request_before_it_hands_over(self):
    store = _store()
    rule = Rule(store, before_answer=lambda _: time.sleep(0.2))
    step = _contribute(rule)
    self.assertEqual(float(step.computed), step_token.NEVER)
    before = time.time()
    step = _contribute(rule, records_times=True)
    self.assertBetween(
      float(step.computed), before - 1e-3, rule.asked_at + 1e-3
    )

  def test_a_rule_may_make_a_step_in_its_own_way(self):
    store, heard = _store(), []

    class OwnStep(Rule):
      def contribute(
        self, compute, replica, state, *, token, records_times=False
      ):
        heard.append((replica, records_times))
        first = compute([tf.constant(2.0)], self.scale_loss)
        second = compute(state, self.scale_loss)
        token = token._replace(
          admitted=1, global_step=token.global_step + 30, preadmitted_tag=41
        )
        loss = first.gradients[0] + first.loss + second.loss
        computed = tf.constant(5.0, tf.float64)
        return rule_base.ReplicaStep(token, [loss], computed)

    rule = OwnStep(store, scale=4.0)
    replica = Replica(store, rule, index=3)
    replica.run_one()
    self.assertEqual(heard, [(3, False)])
    self.assertEqual((replica.step, replica.tag), (30, 41))
    self.assertEqual(replica.w, 4.0 + 2.0 + START)
    self.assertEmpty(rule.offers)


class PutBackTest(stores.TestCase):
  def _gradients(self, answers, **kwargs):
    """The gradients that were offered until all batches were used."""
    store = _store()
    rule = Rule(store, answers, before_answer=lambda _: store.load_state(state))
    state = {"global_step": 0}
    replica = Replica(store, rule, [1.0, 2.0, 3.0], **kwargs)
    with contextlib.suppress(tf.errors.OutOfRangeError):
      while True:
        if len(rule.offers) < len(answers):
          state["global_step"] = answers[len(rule.offers)][1]
        replica.run_one()
    return [offer.gradient for offer in rule.offers]

  def test_a_refused_batch_of_the_same_step_is_used_again(self):
    answers = [(0, 0, -1), (1, 1, -1), (0, 1, -1), (0, 1, -1), (1, 2, -1)]
    self.assertEqual(
      self._gradients(answers, repeats=True), [1.0, 1.0, 2.0, 2.0, 2.0, 3.0]
    )
    self.assertEqual(self._gradients(answers), [1.0, 2.0, 3.0])

  def test_a_refused_batch_is_dropped_once_an_update_was_made(self):
    answers = [(0, 1, -1), (1, 2, -1)]
    self.assertEqual(self._gradients(answers, repeats=True), [1.0, 2.0, 3.0])

  def test_many_steps_in_one_call_use_a_batch_again(self):
    store = _store()
    state = iter([0, 0, 1, 1, 2, 3])
    rule = Rule(
      store,
      [(0, 0, -1), (0, 0, -1), (1, 1, -1), (0, 1, -1), (1, 2, -1), (1, 3, -1)],
      before_answer=lambda _: store.load_state({"global_step": next(state)}),
    )
    replica = Replica(store, rule, [1.0, 2.0, 3.0], repeats=True)
    self.assertEqual(replica.run_many(max_steps=6), 6)
    self.assertEqual(
      [offer.gradient for offer in rule.offers], [1.0, 1.0, 1.0, 2.0, 2.0, 3.0]
    )

  def test_a_refusal_among_steps_admitted_in_advance(self):
    store = _store()
    # (admitted, global step, tag of the next): the third one is refused.
    answers = [(1, 1, 11), (1, 2, 12), (0, 2, -1), (1, 3, 13), (1, 4, -1)]
    steps = iter([step for _, step, _ in answers])
    rule = Rule(
      store,
      answers,
      before_answer=lambda _: store.load_state({"global_step": next(steps)}),
    )
    replica = Replica(store, rule, [1.0, 2.0, 3.0, 4.0], repeats=True)
    replica.run_one()
    self.assertEqual(replica.tag, 11)
    self.assertEqual(replica.run_many(is_preadmitted=True, max_steps=0), 0)
    self.assertEqual(replica.run_many(is_preadmitted=True), 2)
    self.assertEqual(replica.run_many(max_steps=1), 1)
    self.assertEqual(replica.run_many(is_preadmitted=True), 1)
    self.assertEqual(
      [(offer.gradient, offer.tag) for offer in rule.offers],
      [(1.0, None), (2.0, 11), (3.0, 12), (3.0, None), (4.0, 13)],
    )


class SeveralBatchesTest(stores.TestCase):
  """A rule that aggregates more contributions than it has replicas."""

  def _run(self, answers, *, replicas_to_aggregate, replicas, step=0):
    """Makes one step; the offers of it, and the replica after it."""
    store = _store()
    store.load_state({"global_step": step})
    rule = sync_replicas.SyncReplicasOptimizer(
      SGD(1.0), replicas_to_aggregate, replicas
    )
    rule.build(store)
    self.addCleanup(rule.close)
    script = Rule(store, answers, before_answer=lambda _: store.assign(0, 1.0))
    with mock.patch.object(rule, "apply_gradients", script.apply_gradients):
      replica = Replica(store, rule, [1.0, 2.0, 3.0, 4.0, 5.0])
      replica.run_one()
    return script.offers, replica

  def test_continues_within_the_step_while_preadmitted(self):
    offers, replica = self._run(
      [(1, 4, 70), (1, 4, 71), (1, 5, 72), (1, 5, 73)],
      replicas_to_aggregate=5,
      replicas=2,
      step=4,
    )
    self.assertEqual([o.tag for o in offers], [None, 70, 71])
    self.assertEqual([o.step for o in offers], [4, 4, 4])
    # New batches, but the parameters that the step began with.
    self.assertEqual([o.gradient for o in offers], [1.0, 2.0, 3.0])
    self.assertEqual([o.loss for o in offers], [10.0, 20.0, 30.0])
    self.assertEqual(replica.tag, 72)
    self.assertEqual(replica.w, 1.0)
    self.assertEqual(replica.next_x(), 4.0)

  def test_ends_without_preadmission(self):
    offers, replica = self._run(
      [(1, 0, 70), (0, 0, -1), (1, 0, 71)], replicas_to_aggregate=3, replicas=2
    )
    self.assertEqual([o.tag for o in offers], [None, 70])
    self.assertEqual(int(replica.last.admitted), 0)
    self.assertEqual(replica.tag, -1)

  def test_ends_when_training_has_ended(self):
    offers, replica = self._run(
      [(1, 0, 70), (0, step_token.ENDED, 71), (1, 0, 72)],
      replicas_to_aggregate=3,
      replicas=2,
    )
    self.assertLen(offers, 2)
    self.assertEqual(replica.step, step_token.ENDED)

  @parameterized.parameters((2, 2), (1, 2))
  def test_other_rules_use_one_batch(self, replicas_to_aggregate, replicas):
    offers, replica = self._run(
      [(1, 0, 70), (1, 0, 71)],
      replicas_to_aggregate=replicas_to_aggregate,
      replicas=replicas,
    )
    self.assertLen(offers, 1)
    self.assertEqual(replica.next_x(), 2.0)


class RefreshTest(stores.TestCase):
  """Each update takes 1 from w, so w = 10 - step, unless it was kept."""

  def _run(self, verdicts, refresh_every):
    """Makes one step per verdict; the offers, and the replica after them."""
    store = _store()
    rule = async_replicas.AsyncReplicasOptimizer(
      SGD(1.0), 1, refresh_every=refresh_every
    )
    rule.build(store)
    self.addCleanup(rule.close)
    answers = [(int(ok), n + 1, -1) for n, ok in enumerate(verdicts)]
    script = Rule(store, answers)
    with mock.patch.object(rule, "apply_gradients", script.apply_gradients):
      replica = Replica(store, rule)
      for _ in verdicts:
        replica.run_one()
    return script.offers, replica

  def test_what_was_read_is_used_as_often_as_allowed(self):
    offers, replica = self._run([True] * 7, refresh_every=3)
    steps = [0, 0, 0, 3, 3, 3, 6]
    self.assertEqual([o.step for o in offers], steps)
    self.assertEqual([o.loss for o in offers], [10.0 - s for s in steps])
    self.assertEqual((replica.step, replica.w), (6, 4.0))

  def test_a_refusal_makes_it_read_anew_and_count_from_the_start(self):
    verdicts = [True, False, True, True, True, True]
    offers, replica = self._run(verdicts, refresh_every=3)
    steps = [0, 0, 2, 2, 2, 5]
    self.assertEqual([o.step for o in offers], steps)
    self.assertEqual([o.loss for o in offers], [10.0 - s for s in steps])
    self.assertEqual((replica.step, replica.w), (5, 5.0))

  def test_a_count_of_1_reads_after_every_step(self):
    offers, replica = self._run([True] * 4, refresh_every=1)
    self.assertEqual([o.step for o in offers], [0, 1, 2, 3])
    self.assertEqual([o.loss for o in offers], [10.0, 9.0, 8.0, 7.0])
    self.assertEqual((replica.step, replica.w), (4, 6.0))

  def test_the_end_counts_though_parameters_are_kept(self):
    store = _store()
    rule = async_replicas.AsyncReplicasOptimizer(SGD(1.0), 1, refresh_every=3)
    rule.build(store)
    self.addCleanup(rule.close)
    script = Rule(store, [(1, 1, -1), (0, step_token.ENDED, -1)])
    with mock.patch.object(rule, "apply_gradients", script.apply_gradients):
      replica = Replica(store, rule)
      replica.run_one()
      self.assertEqual(replica.step, 0)
      replica.run_one()
    self.assertEqual(replica.step, step_token.ENDED)


class PreadmittedTagTest(stores.TestCase):
  @parameterized.parameters((True, 70), (False, None))
  def test_is_used_by_a_preadmitted_step_only(self, is_preadmitted, expected):
    store = _store()
    rule = Rule(store, [(1, 1, 70)])
    replica = Replica(store, rule)
    replica.run_one()
    replica.run_one(is_preadmitted=is_preadmitted)
    self.assertEqual([o.tag for o in rule.offers], [None, expected])


class RunManyTest(stores.TestCase):
  def _replica(self, answers=(), batches=ONES):
    store = _store()
    rule = Rule(store, answers)
    return rule, Replica(store, rule, batches)

  def test_no_more_steps_than_allowed(self):
    rule, replica = self._replica()
    self.assertEqual(replica.run_many(max_steps=3), 3)
    self.assertLen(rule.offers, 3)
    self.assertEqual((replica.step, replica.w), (3, 7.0))
    self.assertEqual(replica.run_many(max_steps=2), 2)
    self.assertEqual([o.step for o in rule.offers], [0, 1, 2, 3, 4])
    self.assertEqual((replica.step, replica.w), (5, 5.0))

  def test_none_if_none_is_allowed(self):
    rule, replica = self._replica(batches=[1.0, 2.0])
    self.assertEqual(replica.run_many(max_steps=0), 0)
    self.assertEmpty(rule.offers)
    self.assertEqual((replica.step, replica.w), (0, START))
    self.assertEqual(replica.next_x(), 1.0)

  def test_ends_with_the_first_preadmission(self):
    rule, replica = self._replica([(1, 1, -1), (1, 2, 70)])
    self.assertEqual(replica.run_many(is_preadmitted=False), 2)
    self.assertEqual(replica.run_many(is_preadmitted=False), 0)
    self.assertLen(rule.offers, 2)
    self.assertEqual(replica.tag, 70)

  def test_preadmitted_steps_end_when_none_follows(self):
    rule, replica = self._replica(
      [(1, 1, 70), (1, 2, 71), (1, 3, 0), (0, 3, -1)]
    )
    self.assertEqual(replica.run_many(is_preadmitted=True), 0)
    self.assertEqual(replica.run_many(is_preadmitted=False), 1)
    self.assertEqual(replica.run_many(is_preadmitted=True), 3)
    self.assertEqual([o.tag for o in rule.offers], [None, 70, 71, 0])
    self.assertEqual(replica.run_many(is_preadmitted=True), 0)

  @parameterized.parameters((False, -1), (True, 71))
  def test_no_step_follows_the_end_of_training(self, is_preadmitted, tag):
    """Not even if the last token has a tag."""
    rule, replica = self._replica(
      [
        (1, 1, 70 if is_preadmitted else -1),
        (0, step_token.ENDED, tag),
        (1, 2, tag),
      ],
      [1.0, 2.0, 3.0, 4.0],
    )
    replica.run_one()
    self.assertEqual(replica.run_many(is_preadmitted=is_preadmitted), 1)
    self.assertEqual(replica.step, step_token.ENDED)
    self.assertEqual(replica.run_many(is_preadmitted=is_preadmitted), 0)
    self.assertEqual(replica.step, step_token.ENDED)
    self.assertLen(rule.offers, 2)
    self.assertEqual(replica.next_x(), 3.0)

  def test_the_end_of_the_data_is_an_error(self):
    store = _store()
    rule = Rule(store)
    replica = Replica(store, rule, [1.0, 1.0])
    with self.assertRaises(tf.errors.OutOfRangeError):
      replica.run_many(max_steps=5)
    self.assertLen(rule.offers, 2)
    self.assertEqual(int(store.global_step), 2)


class Recorder:
  """Keeps every step, in place of a timeline."""

  def __init__(self):
    self.told = []

  def record_step(self, name, step, began, computed, token, state):
    def note(*values):
      self.told.append((name, *(value.item() for value in values)))

    tf.numpy_function(
      note, [step, began, computed, token.global_step, state[0]], []
    )


class TimelineTest(stores.TestCase):
  def test_records_each_step_once_with_its_times(self):
    store, recorder = _store(), Recorder()
    rule = Rule(store)
    replica = Replica(store, rule, recorder=recorder)
    before = time.time()
    replica.run_one()
    replica.run_one()
    self.assertLen(recorder.told, 2)
    for number, told in enumerate(recorder.told):
      name, step, began, computed, now, w = told
      self.assertEqual((name, step, now), ("someone", number, number + 1))
      self.assertEqual(w, START - number - 1)
      self.assertLessEqual(before - 1e-3, began)
      self.assertLessEqual(began, computed + 1e-3)
    self.assertLessEqual(recorder.told[0][3], recorder.told[1][2] + 1e-3)
    self.assertLessEqual(recorder.told[1][3], rule.asked_at + 1e-3)


class WholeTrainingTest(stores.TestCase):
  """With real update rules."""

  def _start(self, rule, store):
    rule.build(store)
    rule_base.create_or_resume(rule, store, [tf.constant(START)])
    self.addCleanup(rule.close)

  def test_an_asynchronous_replica_stops_when_training_ends(self):
    store = _store(is_new=True)
    rule = async_replicas.AsyncReplicasOptimizer(SGD(1.0), 1)
    self._start(rule, store)
    # It makes far fewer steps before it hears of the end.
    replica, counts = Replica(store, rule, [1.0, -1.0] * 50_000), []
    thread = _in_background(
      lambda: counts.append(replica.run_many(max_steps=100_000))
    )
    waiting.await_value(
      lambda: int(store.global_step) >= 4 or not thread.is_alive(),
      timeout_secs=SECS,
      what="waiting for updates",
    )
    rule.end_replicas()
    _join(thread)
    self.assertEqual(replica.step, step_token.ENDED)
    self.assertEqual(int(replica.last.admitted), 0)
    (count,), step = counts, int(store.global_step)
    # Each step makes one update, except the last, which is refused.
    self.assertEqual(count, step + 1)
    self.assertEqual(rule.counts()[0].applied, step)
    self.assertEqual(int(store.examples_seen), PER_BATCH * step)
    self.assertEqual(float(store.read()[0]), START - step % 2)
    self.assertEqual(replica.run_many(), 0)

  def test_synchronous_replicas_are_preadmitted(self):
    """The means are 2, 3 and 4."""
    store = _store(is_new=True)
    rule = sync_replicas.SyncReplicasOptimizer(SGD(1.0), 2)
    self._start(rule, store)
    replicas = [
      Replica(store, rule, [1.0, 2.0, 3.0], index=0),
      Replica(store, rule, [3.0, 4.0, 5.0], index=1),
    ]
    counts = {}

    def train(index):
      first = replicas[index].run_many(is_preadmitted=False, max_steps=3)
      counts[index] = (
        first,
        replicas[index].run_many(is_preadmitted=True, max_steps=2),
      )

    threads = [_in_background(lambda i=i: train(i)) for i in range(2)]
    deadline = threading.Timer(SECS, rule.interrupt)
    deadline.start()
    self.addCleanup(deadline.cancel)
    for step in (1, 2, 3):
      (update,) = rule.apply_updates()
      self.assertEqual(
        (update.global_step, update.num_examples), (step, 2 * PER_BATCH)
      )
    _join(*threads)
    self.assertEqual(counts, {0: (1, 2), 1: (1, 2)})
    for replica in replicas:
      self.assertEqual((replica.step, replica.w), (3, 1.0))
    self.assertEqual([c.applied for c in rule.counts()], [3, 3])

  def test_two_replicas_fill_four_places(self):
    store = _store(is_new=True)
    rule = sync_replicas.SyncReplicasOptimizer(SGD(1.0), 4, 2)
    self._start(rule, store)
    is_updated = threading.Event()
    self.addCleanup(is_updated.set)

    def batches():
      """Two batches, and more only later.

      So the second replica can contribute, too. Without this, the first one
      could make all four contributions before the second one has started.
      """
      yield from (1.0, 1.0)
      is_updated.wait(SECS / 4)
      yield from ONES

    replicas = [Replica(store, rule, batches, index=i) for i in range(2)]
    for replica in replicas:
      replica.trace_one()
    threads = [_in_background(replica.run_one) for replica in replicas]
    deadline = threading.Timer(SECS, rule.interrupt)
    deadline.start()
    self.addCleanup(deadline.cancel)
    self.assertEqual(rule.apply_updates()[0].num_examples, 4 * PER_BATCH)
    is_updated.set()
    _join(*threads)
    self.assertEqual(float(store.read()[0]), START - 1)
    applied = [c.applied for c in rule.counts()]
    self.assertEqual(sum(applied), 4)
    # A replica may be given the third place before the other one is as far.
    self.assertGreater(min(applied), 0)
    self.assertEqual(int(store.examples_seen), 4 * PER_BATCH)
    for replica in replicas:
      self.assertEqual((replica.step, replica.w), (1, START - 1))


if __name__ == "__main__":
  absltest.main()
