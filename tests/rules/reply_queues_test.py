"""Tests for rules.reply_queues."""

from unittest import mock

import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests.support import background
from tests.support import stores
from tf_replicas.rules import protocol
from tf_replicas.rules import reply_queues as replies_lib
from tf_replicas.runtime import waiting

NUM_REPLICAS = 3
NONE, ADMIT, RELEASE, CONTINUE, VOID = map(int, protocol.Verdict)


def _replies():
  """Attaches to the replies; every call is another client."""
  store = stores.attach([stores.spec("w", [2])])
  return replies_lib.ReplyQueues(store, NUM_REPLICAS, store.namespace)


def _queues():
  """One queue of (tag, value) per replica."""
  with tf.device(stores.device(0)):
    return [
      stores.namespace().queue(f"own/{r}", [tf.int64])
      for r in range(NUM_REPLICAS)
    ]


def _await_empty(queue):
  waiting.await_value(
    lambda: int(queue.size()) == 0,
    timeout_secs=background.DEADLINE_SECS,
    what="waiting for an empty queue",
  )


class TakeOwnTest(stores.TestCase):
  def setUp(self):
    super().setUp()
    self.queues = _queues()
    for queue in self.queues:  # Whoever still waits ends with the test.
      self.addCleanup(queue.close)

    @tf.function(autograph=False)
    def take(replica, tag):
      return replies_lib.take_own(self.queues, replica, tag, lambda e: e[0])

    self._traced = take

  def _put(self, replica, *elements):
    for element in elements:
      self.queues[replica].enqueue([tf.constant(element, tf.int64)])

  def _start(self, replica, tag):
    numbers = tf.constant(replica, tf.int64), tf.constant(tag, tf.int64)
    return background.Call(lambda: self._traced(*numbers))

  def _take(self, replica, tag):
    """(element, whether it was put back)."""
    return self._told(self._start(replica, tag))

  def _told(self, call):
    element, is_put_back = call.result()
    return element.numpy().tolist(), bool(is_put_back)

  def _left(self, replica):
    """Takes all that is left in the queue of `replica`."""
    queue = self.queues[replica]
    dequeue = tf.function(lambda: queue.dequeue()[0], autograph=False)
    return [dequeue().numpy().tolist() for _ in range(int(queue.size()))]

  def test_its_own_is_taken_and_what_follows_stays(self):
    self._put(1, [7, 70], [8, 80])
    self.assertEqual(self._take(1, 7), ([7, 70], False))
    self.assertEqual(self._left(1), [[8, 80]])

  def test_what_is_for_earlier_ones_is_thrown_away(self):
    self._put(1, [3, 30], [6, 60], [7, 70])
    self.assertEqual(self._take(1, 7), ([7, 70], False))
    self.assertEqual(self._left(1), [])

  def test_what_is_for_a_later_one_is_put_back_as_it_was(self):
    self._put(1, [6, 60], [8, 80])
    self.assertEqual(self._take(1, 7), ([8, 80], True))
    self.assertEqual(self._left(1), [[8, 80]])

  def test_each_replica_has_its_own_queue(self):
    self._put(0, [7, 0])
    self._put(1, [7, 1])
    self._put(2, [7, 2])
    self.assertEqual(self._take(2, 7), ([7, 2], False))
    self.assertEqual(self._left(0), [[7, 0]])
    self.assertEqual(self._left(1), [[7, 1]])

  def test_what_is_put_back_goes_to_the_same_replica(self):
    self._put(2, [9, 90])
    self.assertEqual(self._take(2, 7), ([9, 90], True))
    self.assertEqual([self._left(r) for r in range(3)], [[], [], [[9, 90]]])

  def test_the_replica_may_be_known_before_it_runs(self):
    self._put(1, [3, 30], [9, 90])
    take = tf.function(
      lambda tag: replies_lib.take_own(self.queues, 1, tag, lambda e: e[0]),
      autograph=False,
    )
    call = background.Call(lambda: take(tf.constant(7, tf.int64)))
    self.assertEqual(self._told(call), ([9, 90], True))
    self.assertEqual(self._left(1), [[9, 90]])

  @parameterized.parameters(7, 8, 1000)
  def test_what_is_for_all_until_a_time_is_for_those_before_it(self, until):
    self._put(1, [-until, 0])
    self.assertEqual(self._take(1, 7), ([-until, 0], False))
    self.assertEqual(self._left(1), [])

  def test_what_is_for_all_until_a_time_is_not_for_those_after_it(self):
    self._put(1, [-6, 60], [7, 70])
    self.assertEqual(self._take(1, 7), ([7, 70], False))

  def test_it_waits_until_something_comes(self):
    call = self._start(1, 7)
    self.assertTrue(call.waits())
    self._put(0, [7, 0])  # For another replica.
    self._put(1, [6, 60])  # For an earlier one.
    self.assertTrue(call.waits())
    self._put(1, [7, 70])
    self.assertEqual(self._told(call), ([7, 70], False))

  def test_an_older_process_leaves_to_the_newer_one_what_is_for_it(self):
    """The older one waits longer: it is served first."""
    self._put(1, [6, 60])
    older = self._start(1, 7)
    _await_empty(self.queues[1])  # The older one waits in the queue.
    self.assertTrue(older.waits())
    newer = self._start(1, 8)
    self.assertTrue(newer.waits())
    self._put(1, [8, 80])
    self.assertEqual(self._told(older), ([8, 80], True))
    self.assertEqual(self._told(newer), ([8, 80], False))
    self.assertEqual(self._left(1), [])

  def test_whoever_waits_hears_of_the_end(self):
    call = self._start(1, 7)
    self.assertTrue(call.waits())
    self.queues[1].close()
    with self.assertRaises(tf.errors.OutOfRangeError):
      call.result()


class RepliesTest(stores.TestCase):
  def setUp(self):
    super().setUp()
    self.chief, self.replica = _replies(), _replies()
    self.addCleanup(self.chief.close)
    self._sending = tf.function(self.chief.send, autograph=False)
    self._waiting = tf.function(self.replica.wait, autograph=False)

  def _send(self, verdicts, tags, step):
    numbers = [tf.constant(n, tf.int64) for n in (verdicts, tags, step)]
    self._sending(*numbers)

  def _start(self, replica, tag):
    numbers = tf.constant(replica, tf.int64), tf.constant(tag, tf.int64)
    return background.Call(lambda: self._waiting(*numbers))

  def _told(self, call):
    """(verdict, step) of a call."""
    verdict, step = call.result()
    return int(verdict), int(step)

  def test_everyone_hears_the_verdict_on_its_own_tag(self):
    self._send([ADMIT, RELEASE, CONTINUE], [11, 12, 13], 5)
    self.assertEqual(self._told(self._start(2, 13)), (CONTINUE, 5))
    self.assertEqual(self._told(self._start(0, 11)), (ADMIT, 5))
    self.assertEqual(self._told(self._start(1, 12)), (RELEASE, 5))

  def test_without_a_verdict_one_waits_on(self):
    calls = [self._start(r, 10 + r) for r in range(NUM_REPLICAS)]
    self._send([NONE, RELEASE, NONE], [10, 11, 12], 5)
    self.assertEqual(self._told(calls[1]), (RELEASE, 5))
    self.assertTrue(calls[0].waits())
    self.assertTrue(calls[2].waits())
    self._send([RELEASE, NONE, CONTINUE], [10, 11, 12], 6)
    self.assertEqual(self._told(calls[0]), (RELEASE, 6))
    self.assertEqual(self._told(calls[2]), (CONTINUE, 6))

  def test_a_reply_to_an_earlier_contribution_is_thrown_away(self):
    self._send([ADMIT, NONE, NONE], [3, 0, 0], 1)
    self._send([RELEASE, NONE, NONE], [3, 0, 0], 2)
    call = self._start(0, 4)
    self.assertTrue(call.waits())
    self._send([CONTINUE, NONE, NONE], [4, 0, 0], 3)
    self.assertEqual(self._told(call), (CONTINUE, 3))

  def test_a_reply_to_a_later_process_makes_the_older_one_void(self):
    self._send([ADMIT, NONE, NONE], [3, 0, 0], 3)
    older = self._start(0, 4)
    _await_empty(self.chief._queues[0])  # The older one waits in the queue.
    self.assertTrue(older.waits())
    newer = self._start(0, 5)
    self.assertTrue(newer.waits())
    self._send([ADMIT, NONE, NONE], [5, 0, 0], 3)
    verdict, _ = self._told(older)
    self.assertEqual(verdict, VOID)
    self.assertEqual(self._told(newer), (ADMIT, 3))

  def test_a_reply_to_all_until_now_ends_what_was_asked_before_it(self):
    self._send([RELEASE, NONE, NONE], [-100, 0, 0], -1)
    self.assertEqual(self._told(self._start(0, 99)), (RELEASE, -1))
    # It was for one who waits; what is left of another is for nobody later.
    self._send([RELEASE, NONE, NONE], [-100, 0, 0], -1)
    call = self._start(0, 101)
    self.assertTrue(call.waits())
    self._send([ADMIT, NONE, NONE], [101, 0, 0], 2)
    self.assertEqual(self._told(call), (ADMIT, 2))

  def test_a_step_that_is_over_is_told_as_it_is(self):
    self._send([RELEASE, VOID, NONE], [1, 1, 1], -1)
    self.assertEqual(self._told(self._start(0, 1)), (RELEASE, -1))
    self.assertEqual(self._told(self._start(1, 1)), (VOID, -1))

  def test_the_end_is_for_everybody_who_waits_or_comes(self):
    calls = [self._start(r, 1) for r in range(NUM_REPLICAS)]
    for call in calls:
      self.assertTrue(call.waits())
    self.chief.close()
    for call in [*calls, self._start(1, 2)]:
      with self.assertRaises(tf.errors.OutOfRangeError):
        call.result()


class ManyRepliesTest(RepliesTest):
  """The same, sent as to more replicas than there are branches for."""

  def setUp(self):
    patched = mock.patch.object(replies_lib, "_MOST_BRANCHES", NUM_REPLICAS - 1)
    self.enter_context(patched)
    super().setUp()

  def test_replies_to_one_replica_keep_their_order(self):
    @tf.function(autograph=False)
    def send_twice():
      for verdict in (VOID, ADMIT):
        verdicts = tf.constant([NONE, verdict, NONE], tf.int64)
        tags = tf.fill([NUM_REPLICAS], tf.constant(4, tf.int64))
        self.chief.send(verdicts, tags, tf.constant(3, tf.int64))

    for _ in range(10):
      send_twice()
      told = [self._told(self._start(1, 4))[0] for _ in range(2)]
      self.assertEqual(told, [VOID, ADMIT])


if __name__ == "__main__":
  absltest.main()
