"""Tests for rules.asynchronous.async_admission, without gradients to apply."""

import functools
import threading
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests.support import background
from tests.support import stores
from tf_replicas.rules import results as results_lib
from tf_replicas.rules.asynchronous import async_admission
from tf_replicas.runtime import waiting as waiting_lib

# As the drivers trace.
_graph = functools.partial(tf.function, autograph=False)


def _attach(store, num_replicas, admits, per_update):
  return async_admission.AsyncAdmission(store, num_replicas, admits, per_update)


class Answer(NamedTuple):
  """An `Admission` as plain numbers."""

  admitted: bool
  version: int
  staleness: int
  has_ended: bool
  must_wait: bool


def _yes(version=0, staleness=0):
  return Answer(True, version, staleness, False, False)


class Client:
  """A store of one variable, and the applications of its replicas.

  The first client of a test is the chief, others share what it made.
  """

  def __init__(
    self, num_replicas, *, max_staleness=None, per_update=1, is_chief=True
  ):
    admits = None
    if max_staleness is not None:
      admits = lambda staleness: staleness <= max_staleness  # noqa: E731
    if is_chief:
      self.store = stores.create({"x": np.float32([0.0])})
    else:
      self.store = stores.attach([stores.spec("x", [1])])
    self.applications = _attach(self.store, num_replicas, admits, per_update)
    if is_chief:
      self.applications.initialize()
    self._admit = _graph(self.applications.admit)
    self._finish = _graph(self.applications.finish)
    self._declare_lost = _graph(self.applications.declare_lost)
    self._end = _graph(self.applications.end)

  def admit(self, replica, local_step=0, is_sound=True):
    answer = self._admit(_int(replica), _int(local_step), tf.constant(is_sound))
    return Answer(*(field.numpy().item() for field in answer))

  def finish(
    self, replica, staleness=0, *, loss=0.0, examples=1, is_update=True
  ):
    return int(
      self._finish(
        _int(replica),
        _int(staleness),
        tf.constant(loss, tf.float64),
        _int(examples),
        tf.constant(is_update),
      )
    )

  def apply(self, replica, local_step=0, **kwargs):
    """Admission and end of one that is admitted."""
    answer = self.admit(replica, local_step)
    assert answer.admitted, answer
    return self.finish(replica, answer.staleness, **kwargs)

  def reset(self):
    """As new: nothing was applied, and nothing is left to tell."""
    self.applications.initialize()
    self.store.start()
    self._drain()
    self.applications.wake()
    self._drain()
    try:
      self.collect()
    except results_lib.Interrupted:
      pass

  def close(self):
    self.applications.close()

  def _drain(self):
    while True:
      try:
        if self.collect_rest() is None:
          return
      except results_lib.NonFiniteGradientError:
        pass

  def declare_lost(self, replica):
    self._declare_lost(_int(replica))

  def end(self):
    self._end()

  def collect(self):
    return self.applications.collect(lambda step: step / 100)

  def collect_rest(self):
    return self.applications.collect_rest(lambda step: step / 100)

  @property
  def step(self):
    return int(self.store.global_step)

  def applied(self):
    return [counts.applied for counts in self.applications.counts()]

  def staleness(self):
    return [counts.staleness for counts in self.applications.counts()]

  def late(self):
    """Of each replica (staleness, how many) of what was dropped."""
    return [
      {k: n for k, n in enumerate(counts.late, start=1) if n}
      for counts in self.applications.counts()
    ]


def _int(value):
  return tf.constant(value, tf.int64)


class TestCase(background.TestCase):
  def _new_client(self, num_replicas, **kwargs):
    client = Client(num_replicas, **kwargs)
    self.addCleanup(client.close)
    return client

  def _client(self, num_replicas, **kwargs):
    """One as new, that an earlier test may have used; not to be closed."""
    key = "applications", num_replicas, *sorted(kwargs.items())
    return self.borrow(key, lambda: Client(num_replicas, **kwargs))


class AdmissionTest(TestCase):
  def test_first_gradients_are_fresh(self):
    client = self._client(2)
    self.assertEqual(client.admit(1), _yes(version=0, staleness=0))

  def test_staleness_is_what_was_applied_since_the_read(self):
    client = self._client(2)
    for step in range(3):
      client.apply(0, step)
    self.assertEqual(client.admit(1, 1), _yes(version=3, staleness=2))

  @parameterized.parameters(0, 1, 2, 3)
  def test_what_is_under_way_is_counted_as_if_it_were_finished(
    self, num_finished
  ):
    client = self._client(4)
    for replica in range(3):
      self.assertEqual(client.admit(replica), _yes(replica, replica))
    for replica in range(num_finished):
      self.assertEqual(client.finish(replica, replica), replica + 1)
    self.assertEqual(client.admit(3), _yes(version=3, staleness=3))

  def test_a_restarted_replica_does_not_wait_for_itself(self):
    """What it had under way before its restart is no update before this."""
    client = self._client(2)
    self.assertEqual(client.admit(0), _yes(0, 0))
    self.assertEqual(client.admit(0), _yes(0, 0))
    self.assertEqual(client.admit(1), _yes(version=1, staleness=1))

  def test_a_step_from_the_future_is_not_stale(self):
    client = self._client(1)
    self.assertEqual(client.admit(0, 5), _yes(version=0, staleness=0))

  def test_two_clients_share_what_is_under_way(self):
    ours = self._new_client(2)
    theirs = self._new_client(2, is_chief=False)
    ours.admit(0)
    self.assertEqual(theirs.admit(1), _yes(version=1, staleness=1))
    self.assertEqual(ours.finish(0), 1)
    self.assertEqual(theirs.finish(1, 1), 2)
    self.assertEqual(ours.staleness(), theirs.staleness())
    self.assertEqual(ours.staleness(), [(1,), (0, 1)])

  def test_initialize_forgets_an_earlier_training(self):
    client = self._new_client(3, max_staleness=0)
    client.apply(0)
    client.admit(1)  # Too stale.
    client.admit(2, 1)  # Under way.
    client.applications.stop_at(0)
    client.end()
    client.applications.initialize()
    self.assertFalse(client.applications.has_ended())
    self.assertEqual(client.applied(), [0, 0, 0])
    self.assertEqual(client.late(), [{}, {}, {}])
    self.assertEqual(client.admit(0, 1), _yes(version=1, staleness=0))


class RefusalTest(TestCase):
  def _stale_client(self, most, num_steps):
    """Two replicas; the first has made `num_steps` updates."""
    client = self._client(2, max_staleness=most)
    for step in range(num_steps):
      client.apply(0, step)
    return client

  def test_the_bound_itself_is_admitted(self):
    client = self._stale_client(2, 3)
    self.assertEqual(client.admit(1, 1), _yes(version=3, staleness=2))

  def test_what_is_too_stale_is_refused_at_once_and_counted(self):
    client = self._stale_client(2, 3)
    self.assertEqual(client.admit(1), Answer(False, 3, 3, False, False))
    self.assertEqual(client.late(), [{}, {3: 1}])
    self.assertEqual(client.applied(), [3, 0])
    self.assertEqual(client.step, 3)

  def test_what_is_under_way_makes_too_stale(self):
    client = self._client(2, max_staleness=0)
    client.admit(0)
    self.assertEqual(client.admit(1), Answer(False, 1, 1, False, False))

  def test_what_was_refused_is_not_under_way(self):
    client = self._stale_client(0, 1)
    self.assertFalse(client.admit(1).admitted)
    self.assertEqual(client.admit(0, 1), _yes(version=1, staleness=0))
    client.finish(0)
    self.call(client.applications.await_idleness).result()

  def test_the_oldest_are_counted_together(self):
    client = self._stale_client(0, 12)
    for local_step in (3, 2, 0):  # 9, 10 and 12 updates late.
      client.admit(1, local_step)
    self.assertEqual(client.late(), [{}, {9: 1, 10: 2}])
    self.assertLen(client.applications.counts()[1].late, 10)

  def test_what_is_not_finite_is_refused_and_told(self):
    client = self._client(2)
    client.apply(0)
    answer = client.admit(1, 1, is_sound=False)
    self.assertEqual(answer, Answer(False, 1, 0, False, False))
    with self.assertRaises(results_lib.NonFiniteGradientError) as caught:
      client.collect()
    self.assertEqual(caught.exception.replica, 1)
    self.assertEqual(caught.exception.global_step, 1)
    self.assertEqual(client.applied(), [1, 0])

  def test_what_is_not_finite_is_not_under_way(self):
    client = self._client(2)
    client.admit(1, is_sound=False)
    self.assertEqual(client.admit(0), _yes(version=0, staleness=0))

  def test_what_is_not_finite_is_not_counted_as_too_stale(self):
    client = self._stale_client(0, 1)
    client.admit(1, is_sound=False)
    self.assertEqual(client.late(), [{}, {}])
    with self.assertRaises(results_lib.NonFiniteGradientError):
      client.collect_rest()


class CountsTest(TestCase):
  def test_finishing_counts_update_examples_and_staleness(self):
    client = self._client(3)
    for replica in (0, 1):
      client.admit(replica)
    self.assertEqual(client.finish(1, 1, examples=20), 1)
    self.assertEqual(client.finish(0, 0, examples=3), 2)
    self.assertEqual(client.apply(1, 0, examples=100), 3)
    self.assertEqual(client.step, 3)
    self.assertEqual(int(client.store.examples_seen), 123)
    self.assertEqual(client.applied(), [1, 2, 0])
    self.assertEqual(client.staleness(), [(1,), (0, 1, 1), ()])

  def test_a_checkpoint_has_the_examples_of_its_step(self):
    client = self._client(1)
    store = client.store
    device = store.device_of_task(0)
    with tf.device(device):
      gate = store.namespace.queue("gate", [tf.bool])

    @_graph
    def count():
      def change():
        with tf.control_dependencies([store.examples_seen.assign_add(7)]):
          opened = gate.dequeue()
        with tf.control_dependencies(opened):
          store.global_step.assign_add(1)
        return [tf.constant(True)]

      with tf.device(device):
        return store.count_lock.hold(change)

    counting = self.call(count)
    waiting_lib.await_value(
      lambda: tf.equal(store.examples_seen.read_value(), 7),
      timeout_secs=background.DEADLINE_SECS,
      what="waiting for the examples",
    )
    saving = self.call(store.state)
    reading = self.call(store.counts)
    finishing = self.call(client.finish, 0)
    self.assert_waits(saving)
    self.assert_waits(reading)
    self.assert_waits(finishing)
    gate.enqueue([tf.constant(True)])
    counting.result()
    self.assertEqual(finishing.result(), 2)
    state = saving.result()
    counts = int(state["global_step"]), int(state["examples_seen"])
    self.assertIn(counts, [(1, 7), (2, 8)])
    self.assertIn(reading.result(), [(1, 7), (2, 8)])

  def test_admission_alone_counts_nothing(self):
    client = self._client(1)
    client.admit(0)
    self.assertEqual(client.step, 0)
    self.assertEqual(client.applied(), [0])

  def test_the_stalest_are_counted_together(self):
    client = self._client(1)
    for staleness in (254, 255, 256, 1000):
      client.finish(0, staleness)
    self.assertEqual(client.applied(), [4])
    self.assertEqual(client.staleness(), [(0,) * 254 + (1, 3)])

  def test_nothing_is_lost_where_all_apply_at_once(self):
    """Every version is given out once, and every application counted."""
    client = self._client(4)

    def train(replica):
      step, answers = 0, []
      for _ in range(50):
        answers.append((step, client.admit(replica, step)))
        step = client.finish(replica, answers[-1][1].staleness, examples=2)
      return answers

    trained = background.run_all(train, 4)
    answers = sum(trained, [])
    for step, answer in answers:
      self.assertEqual(answer.staleness, answer.version - step)
    self.assertEqual(sorted(a.version for _, a in answers), list(range(200)))
    self.assertEqual(client.step, 200)
    self.assertEqual(int(client.store.examples_seen), 400)
    self.assertEqual(client.applied(), [50] * 4)
    for replica, counts in enumerate(client.staleness()):
      expected = np.bincount([a.staleness for _, a in trained[replica]])
      self.assertEqual(list(counts), expected.tolist())


class StopTest(TestCase):
  def test_what_comes_after_the_last_update_waits_for_the_end(self):
    client = self._client(1)
    client.applications.stop_at(2)
    self.assertEqual(client.apply(0, 0), 1)
    self.assertEqual(client.apply(0, 1), 2)
    late = self.call(client.admit, 0, 2)
    self.assert_waits(late)
    client.end()
    self.assertEqual(late.result(), Answer(False, 2, 0, True, False))
    self.assertEqual(client.step, 2)

  def test_no_two_are_admitted_for_the_last_update(self):
    client = self._client(2)
    client.applications.stop_at(1)
    self.assertEqual(client.admit(0), _yes())
    second = self.call(client.admit, 1)
    self.assert_waits(second)
    client.finish(0)
    self.assert_waits(second)
    client.end()
    self.assertEqual(second.result(), Answer(False, 1, 1, True, False))
    self.assertEqual(client.applied(), [1, 0])

  def test_who_waits_replaces_one_that_is_lost(self):
    client = self._client(2)
    client.applications.stop_at(1)
    client.admit(0)
    second = self.call(client.admit, 1)
    self.assert_waits(second)
    client.declare_lost(0)
    self.assertEqual(second.result(), _yes(version=0, staleness=0))
    self.assertEqual(client.finish(1), 1)

  def test_only_one_of_two_replaces_one_that_is_lost(self):
    client = self._client(3)
    client.applications.stop_at(1)
    client.admit(0)
    others = [self.call(client.admit, replica) for replica in (1, 2)]
    for other in others:
      self.assert_waits(other)
    client.declare_lost(0)
    waiting_lib.await_value(
      lambda: [not other.waits() for other in others].count(True),
      timeout_secs=background.DEADLINE_SECS,
      what="one of them",
    )
    self.assertEqual([other.waits() for other in others].count(True), 1)
    client.end()
    answers = [other.result().admitted for other in others]
    self.assertCountEqual(answers, [True, False])

  def test_a_higher_limit_lets_in_who_waits(self):
    client = self._client(2)
    client.applications.stop_at(1)
    client.apply(0)
    second = self.call(client.admit, 1)
    self.assert_waits(second)
    client.applications.stop_at(2)
    self.assertEqual(second.result(), _yes(version=1, staleness=1))

  def test_a_lower_limit_holds_from_then_on(self):
    client = self._client(1)
    client.applications.stop_at(9)
    client.apply(0, 0)
    client.applications.stop_at(1)
    late = self.call(client.admit, 0, 1)
    self.assert_waits(late)
    client.end()
    self.assertFalse(late.result().admitted)

  def test_what_is_too_stale_is_not_made_to_wait(self):
    client = self._client(2, max_staleness=0)
    client.applications.stop_at(1)
    client.apply(0)
    answer = self.call(client.admit, 1).result()
    self.assertEqual(answer, Answer(False, 1, 1, False, False))

  def test_who_waits_may_have_become_too_stale(self):
    client = self._client(2, max_staleness=0)
    client.applications.stop_at(1)
    client.apply(0)
    waiting = self.call(client.admit, 1, 1)
    self.assert_waits(waiting)
    client.finish(0)  # As if it had been admitted beyond the limit.
    client.applications.stop_at(3)
    self.assertEqual(waiting.result(), Answer(False, 2, 1, False, False))
    self.assertEqual(client.late(), [{}, {1: 1}])

  def test_several_at_once_stop_at_the_very_step(self):
    client = self._client(4)
    client.applications.stop_at(60)

    def train(replica):
      step, versions = 0, []
      while (answer := client.admit(replica, step)).admitted:
        versions.append(answer.version)
        step = client.finish(replica, answer.staleness)
      return versions, answer.has_ended

    calls = [self.call(train, replica) for replica in range(4)]
    waiting_lib.await_value(
      lambda: client.step >= 60,
      timeout_secs=background.DEADLINE_SECS,
      what="the last step",
    )
    for call in calls:
      self.assert_waits(call)
    client.end()
    results = [call.result() for call in calls]
    self.assertEqual([has_ended for _, has_ended in results], [True] * 4)
    versions = sum((versions for versions, _ in results), [])
    self.assertEqual(sorted(versions), list(range(60)))
    self.assertEqual(client.step, 60)
    self.assertEqual(sum(client.applied()), 60)


class LostTest(TestCase):
  def test_nothing_of_a_lost_replica_is_under_way(self):
    client = self._client(2)
    client.admit(0)
    client.declare_lost(0)
    self.assertEqual(client.admit(1), _yes(version=0, staleness=0))

  def test_only_who_was_declared_lost_is(self):
    client = self._client(3)
    client.admit(0)
    client.declare_lost(1)
    self.assertEqual(
      client.applications.is_lost().numpy().tolist(), [False, True, False]
    )
    self.assertEqual(client.admit(2), _yes(version=1, staleness=1))

  def test_who_comes_back_is_lost_no_more(self):
    client = self._client(2)
    client.declare_lost(0)
    self.assertEqual(client.admit(0), _yes(version=0, staleness=0))
    self.assertFalse(client.applications.is_lost().numpy().any())
    self.assertEqual(client.admit(1), _yes(version=1, staleness=1))

  def test_what_a_lost_replica_finishes_all_the_same_is_counted(self):
    client = self._client(2)
    client.admit(0)
    client.declare_lost(0)
    self.assertEqual(client.finish(0, 0, examples=5), 1)
    self.assertEqual(client.applied(), [1, 0])
    self.assertEqual(int(client.store.examples_seen), 5)
    self.assertFalse(client.applications.is_lost().numpy().any())


class EndTest(TestCase):
  def test_nothing_is_admitted_after_the_end(self):
    client = self._client(2)
    client.apply(0)
    self.assertFalse(client.applications.has_ended())
    client.end()
    self.assertTrue(client.applications.has_ended())
    for replica in (0, 1):
      answer = client.admit(replica, 1)
      self.assertEqual(answer, Answer(False, 1, 0, True, False))
    self.assertEqual(client.applied(), [1, 0])

  def test_what_comes_after_the_end_is_not_counted_as_too_stale(self):
    client = self._client(2, max_staleness=0)
    client.apply(0)
    client.end()
    self.assertTrue(client.admit(1).has_ended)
    self.assertEqual(client.late(), [{}, {}])

  def test_what_was_under_way_at_the_end_is_finished(self):
    client = self._client(1)
    client.admit(0)
    client.end()
    self.assertEqual(client.finish(0), 1)
    self.assertEqual(client.applied(), [1])

  def test_the_end_reaches_all_who_wait(self):
    client = self._client(3)
    client.applications.stop_at(0)
    calls = [self.call(client.admit, replica) for replica in range(3)]
    for call in calls:
      self.assert_waits(call)
    client.end()
    for call in calls:
      self.assertEqual(call.result(), Answer(False, 0, 0, True, False))

  def test_resume_admits_again(self):
    client = self._client(1)
    client.end()
    self.assertFalse(client.admit(0).admitted)
    client.applications.resume()
    self.assertFalse(client.applications.has_ended())
    self.assertEqual(client.admit(0), _yes())

  def test_the_limit_holds_after_resume(self):
    """What the end left behind for those who wait does not admit them."""
    client = self._client(1)
    client.applications.stop_at(1)
    client.apply(0)
    client.end()
    self.assertTrue(client.admit(0, 1).has_ended)
    client.applications.resume()
    late = self.call(client.admit, 0, 1)
    self.assert_waits(late)
    client.end()
    self.assertTrue(late.result().has_ended)
    self.assertEqual(client.step, 1)

  def test_close_ends_who_waits(self):
    client = self._new_client(1)
    client.applications.stop_at(0)
    admitted = self.call(client.admit, 0)
    collected = self.call(client.collect)
    self.assert_waits(admitted)
    self.assert_waits(collected)
    client.applications.close()
    for call in (admitted, collected):
      with self.assertRaises(tf.errors.OutOfRangeError):
        call.result()


class IdlenessTest(TestCase):
  def test_nobody_has_anything_under_way(self):
    client = self._client(2)
    client.apply(0)
    self.call(client.applications.await_idleness).result()

  def test_waits_for_all_that_is_under_way(self):
    client = self._client(3)
    client.admit(0)
    client.admit(2)
    idle = self.call(client.applications.await_idleness)
    self.assert_waits(idle)
    client.finish(0)
    self.assert_waits(idle)
    client.finish(2)
    idle.result()

  def test_does_not_wait_for_who_is_lost(self):
    client = self._client(2)
    client.admit(1)
    idle = self.call(client.applications.await_idleness)
    self.assert_waits(idle)
    client.declare_lost(1)
    idle.result()


class CollectTest(TestCase):
  def test_tells_of_all_since_the_last_call(self):
    client = self._client(2)
    client.apply(0, loss=1.0, examples=10)
    client.apply(1, loss=2.0, examples=10)
    client.apply(1, 2, loss=6.0, examples=40)
    # The mean of the losses, and the rate of the step before the last update.
    self.assertEqual(client.collect(), results_lib.Update(3, 3.0, 60, 0.02))
    client.apply(0, 3, loss=0.5, examples=7)
    self.assertEqual(client.collect(), results_lib.Update(4, 0.5, 7, 0.03))

  def test_waits_for_something_to_tell(self):
    client = self._client(1)
    update = self.call(client.collect)
    client.admit(0)
    self.assert_waits(update)
    client.finish(0, loss=4.0, examples=2)
    self.assertEqual(update.result(), results_lib.Update(1, 4.0, 2, 0.0))

  def test_the_rest_is_not_waited_for(self):
    client = self._client(1)
    rest = self.call(client.collect_rest)
    self.assertIsNone(rest.result())
    client.apply(0, loss=4.0, examples=2)
    self.assertEqual(client.collect_rest(), results_lib.Update(1, 4.0, 2, 0.0))
    self.assertIsNone(self.call(client.collect_rest).result())

  def test_wake_interrupts_who_waits(self):
    client = self._client(1)
    update = self.call(client.collect)
    self.assert_waits(update)
    client.applications.wake()
    with self.assertRaises(results_lib.Interrupted):
      update.result()

  def test_one_wake_interrupts_once(self):
    client = self._client(1)
    client.applications.wake()
    with self.assertRaises(results_lib.Interrupted):
      client.collect()
    update = self.call(client.collect)
    self.assert_waits(update)
    client.apply(0)
    self.assertEqual(update.result().global_step, 1)

  @parameterized.parameters(True, False)
  def test_a_wake_beside_an_update_is_told_after_it(self, is_woken_first):
    client = self._client(1)
    if is_woken_first:
      client.applications.wake()
    client.apply(0)
    if not is_woken_first:
      client.applications.wake()
    self.assertEqual(client.collect().global_step, 1)
    with self.assertRaises(results_lib.Interrupted):
      self.call(client.collect).result()

  def test_a_wake_among_the_rest_is_not_forgotten(self):
    client = self._client(1)
    client.applications.wake()
    self.assertIsNone(client.collect_rest())
    with self.assertRaises(results_lib.Interrupted):
      self.call(client.collect).result()

  def test_wake_after_close_does_nothing(self):
    client = self._new_client(1)
    client.applications.close()
    client.applications.wake()
    with self.assertRaises(tf.errors.OutOfRangeError):
      self.call(client.collect).result()

  def test_what_was_applied_before_close_is_told(self):
    client = self._new_client(1)
    client.apply(0)
    client.applications.close()
    self.assertEqual(client.collect().global_step, 1)

  def test_tracing_ahead_takes_nothing(self):
    client = self._new_client(1)
    self.call(client.applications.trace_ahead).result()
    client.apply(0)
    client.applications.trace_ahead()
    self.assertEqual(client.collect_rest().global_step, 1)

  def test_all_that_is_told_adds_up(self):
    client = self._client(3)
    done = threading.Event()

    def listen():
      heard = []
      while not heard or heard[-1].global_step < 60:
        heard.append(client.collect())
      done.set()
      return heard

    listening = self.call(listen)

    def train(replica):
      for _ in range(20):
        client.apply(replica, examples=replica + 1)

    background.run_all(train, 3)
    heard = listening.result()
    self.assertTrue(done.is_set())
    steps = [update.global_step for update in heard]
    self.assertEqual(steps, sorted(set(steps)))
    # 20 times 1, 2 and 3.
    self.assertEqual(sum(update.num_examples for update in heard), 120)
    self.assertIsNone(client.collect_rest())


class SeveralGradientsTest(TestCase):
  """Updates that are made of more than one set of gradients."""

  def test_only_the_last_set_makes_a_step(self):
    client = self._client(1, per_update=3)
    steps, pending = [], []
    for is_update in (False, False, True, False):
      steps.append(client.apply(0, is_update=is_update))
      pending.append(int(client.applications.pending))
    self.assertEqual(steps, [0, 0, 1, 1])
    self.assertEqual(pending, [1, 2, 0, 1])
    self.assertEqual(client.applied(), [4])

  def test_staleness_is_in_updates_of_what_is_pending_and_under_way(self):
    client = self._client(4, per_update=3)
    client.apply(0, is_update=False)
    client.apply(0, is_update=False)
    self.assertEqual(client.admit(0), _yes(version=0, staleness=0))
    # Two are pending and one is under way: the next belongs to update 1.
    self.assertEqual(client.admit(1), _yes(version=1, staleness=1))
    self.assertEqual(client.admit(2, 1), _yes(version=1, staleness=0))
    self.assertEqual(client.admit(3, 1), _yes(version=1, staleness=0))

  def test_all_sets_of_the_last_update_are_admitted_and_no_more(self):
    client = self._client(3, per_update=2)
    client.applications.stop_at(1)
    self.assertEqual(client.admit(0), _yes())
    self.assertEqual(client.admit(1), _yes())
    third = self.call(client.admit, 2)
    self.assert_waits(third)
    client.finish(0, is_update=False)
    self.assert_waits(third)
    self.assertEqual(client.finish(1), 1)
    self.assert_waits(third)
    client.end()
    self.assertEqual(third.result(), Answer(False, 1, 1, True, False))

  def test_a_lost_set_of_the_last_update_is_replaced(self):
    client = self._client(3, per_update=2)
    client.applications.stop_at(1)
    client.apply(0, is_update=False)
    client.admit(1)
    third = self.call(client.admit, 2)
    self.assert_waits(third)
    client.declare_lost(1)
    self.assertEqual(third.result(), _yes(version=0, staleness=0))

  def test_the_chief_hears_of_every_set(self):
    client = self._client(1, per_update=2)
    client.apply(0, loss=2.0, examples=5, is_update=False)
    self.assertEqual(client.collect()[:3], (0, 2.0, 5))
    client.apply(0, loss=4.0, examples=6)
    self.assertEqual(client.collect(), results_lib.Update(1, 4.0, 6, 0.0))

  @parameterized.parameters((4, 3), (2, 0))
  def test_pending_sets_are_restored_for_the_same_number_only(
    self, per_update, expected
  ):
    client = self._new_client(1, per_update=4)
    for _ in range(3):
      client.apply(0, is_update=False)
    saved = {k: v.numpy() for k, v in client.store.state().items()}
    self.new_cluster()
    resumed = self._new_client(2, per_update=per_update)
    resumed.store.load_state(saved)
    self.assertEqual(int(resumed.applications.pending), expected)
    self.assertEqual(resumed.admit(0), _yes())
    # 3 + 1 sets are an update of 4; 0 + 1 are none of 2.
    self.assertEqual(resumed.admit(1).version, int(per_update == 4))


if __name__ == "__main__":
  absltest.main()
