"""Tests for rules.sync.ledger."""

import dataclasses
import functools

import hypothesis
import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import strategies as st

from tf_replicas.rules import protocol
from tf_replicas.rules.sync import ledger
from tf_replicas.rules.sync import quorum

COMPUTING, WAITING, ADMITTED, DELIVERED, LOST, SKIPPED = protocol.Status
NONE, ADMIT, RELEASE, CONTINUE, VOID = protocol.Verdict
OFFER = protocol.MessageType.OFFER
MAX_LATE = protocol.MAX_LATE


@functools.cache
def _functions(needed):
  """Traced once per number of replicas and places: eager ops are slow."""
  record = functools.partial(ledger.record, can_skip=needed.can_shrink)
  settle = functools.partial(ledger.settle, quorum=needed)
  finish = functools.partial(ledger.finish, can_skip=needed.can_shrink)
  return (
    tf.function(record, autograph=False),
    tf.function(settle, autograph=False),
    tf.function(finish, autograph=False),
  )


def _message(kind, replica, tag=-1, step=0, examples=0, loss=0.0, time=0.0):
  integers = [tf.constant(x, tf.int64) for x in (kind, replica, tag, step)]
  return ledger.Message(
    *integers,
    examples=tf.constant(examples, tf.int64),
    loss=tf.constant(loss, tf.float64),
    time=tf.constant(time, tf.float64),
  )


class Desk:
  """Serves messages as the chief does: note, settle, reply.

  Attributes:
    replies: (replica, tag, verdict) of every reply, in order.
  """

  def __init__(self, num_replicas, num_places, step=0, *, least=None):
    self.quorum = quorum.parse(num_places, num_replicas, least)
    self.record, self.settle, self.end = _functions(self.quorum)
    self.state = ledger.Ledger(
      *map(tf.constant, ledger.new_ledger(num_replicas, self.quorum.most))
    )
    self.step = step
    self.replies = []

  def say(self, kind, replica, tag=-1, **fields):
    """Serves one message; returns the replies that it led to."""
    before = len(self.replies)
    message = _message(kind, replica, tag, **fields)
    noted, replies = self.record(
      self.state, message, tf.constant(self.step, tf.int64)
    )
    flushed = np.where(replies.flush >= 0, VOID, NONE)
    self._reply(flushed, replies.flush)
    self._reply(replies.verdict, noted.tag)
    self.state, settled = self.settle(noted)
    self._reply(settled, noted.tag)
    return self.replies[before:]

  def offer(self, replica, tag, step=None):
    step = self.step if step is None else step
    return self.say(OFFER, replica, tag, step=step)

  def deliver(self, replica, tag, **fields):
    return self.say(protocol.MessageType.DELIVERED, replica, tag, **fields)

  def lose(self, replica, tag):
    return self.say(protocol.MessageType.LOST, replica, tag)

  def finish(self):
    before = len(self.replies)
    tags = self.state.tag
    self.state, verdict = self.end(self.state)
    self._reply(verdict, tags)
    self.step += 1
    return self.replies[before:]

  def _reply(self, verdicts, tags):
    for replica, (verdict, tag) in enumerate(
      zip(np.asarray(verdicts), np.asarray(tags), strict=True)
    ):
      if verdict != NONE:
        self.replies.append((replica, int(tag), protocol.Verdict(verdict)))

  @property
  def status(self):
    return [protocol.Status(s) for s in self.state.status.numpy()]

  @property
  def accepted(self):
    rows = self.state.accepted.numpy().tolist()
    return [tuple(row) for row in rows if row[0] >= 0]

  @property
  def counts(self):
    return self.state.counts.numpy().tolist()


def _counts(applied=0, surplus=0, **late):
  """A row of counts; `late_3=1`: one that was three steps late."""
  row = [applied, surplus] + [0] * MAX_LATE + [0]  # None was missed.
  for name, count in late.items():
    row[1 + int(name.removeprefix("late_"))] = count
  return row


class NewLedgerTest(absltest.TestCase):
  def test_everyone_computes_and_every_place_is_open(self):
    state = ledger.new_ledger(3, 2)
    self.assertEqual(state.status.tolist(), [COMPUTING] * 3)
    self.assertEqual(state.tag.tolist(), [-1] * 3)
    self.assertEqual(state.accepted.tolist(), [[-1, -1]] * 2)
    self.assertEqual(state.counts.tolist(), [_counts()] * 3)
    self.assertEqual((state.examples, state.loss), (0, 0.0))
    self.assertEqual(state.held_up.tolist(), [0.0] * 3)
    floats = {k for k, v in state._asdict().items() if v.dtype == np.float64}
    self.assertEqual(floats, {"loss", "delivered_at", "held_up"})


class OfferTest(parameterized.TestCase):
  def test_a_fresh_offer_is_admitted(self):
    desk = Desk(3, 2)
    self.assertEqual(desk.offer(1, 10), [(1, 10, ADMIT)])
    self.assertEqual(desk.status, [COMPUTING, ADMITTED, COMPUTING])

  def test_beyond_the_places_it_waits(self):
    desk = Desk(3, 2)
    desk.offer(2, 20)
    desk.offer(0, 1)
    self.assertEqual(desk.offer(1, 10), [])
    self.assertEqual(desk.status, [ADMITTED, WAITING, ADMITTED])

  @parameterized.parameters((1, "late_1"), (3, "late_3"), (10, "late_10"))
  def test_a_late_one_is_released_at_once_and_counted(self, late, name):
    desk = Desk(2, 2, step=20)
    self.assertEqual(desk.offer(1, 10, step=20 - late), [(1, 10, RELEASE)])
    self.assertEqual(desk.status, [COMPUTING, COMPUTING])
    self.assertEqual(desk.counts, [_counts(), _counts(**{name: 1})])

  def test_very_late_ones_are_counted_together(self):
    desk = Desk(1, 1, step=1000)
    desk.offer(0, 10, step=990)
    desk.offer(0, 20, step=3)
    self.assertEqual(desk.counts, [_counts(late_10=2)])

  def test_one_from_the_future_is_released(self):
    # As after a restore of an older checkpoint by the chief.
    desk = Desk(1, 1, step=5)
    self.assertEqual(desk.offer(0, 10, step=7), [(0, 10, RELEASE)])
    self.assertEqual(desk.counts, [_counts(late_10=1)])


class DeliveredTest(parameterized.TestCase):
  def test_fills_places_in_order_of_arrival(self):
    desk = Desk(3, 2)
    desk.offer(0, 1)
    desk.offer(2, 20)
    self.assertEqual(desk.deliver(2, 20, examples=8, loss=1.5), [])
    self.assertEqual(desk.accepted, [(2, 20)])
    desk.deliver(0, 1, examples=4, loss=2.0)
    self.assertEqual(desk.accepted, [(2, 20), (0, 1)])
    self.assertEqual(int(desk.state.examples), 12)
    self.assertEqual(float(desk.state.loss), 3.5)
    self.assertEqual(desk.status, [DELIVERED, COMPUTING, DELIVERED])

  def test_with_a_wrong_tag_is_void(self):
    desk = Desk(2, 2)
    desk.offer(0, 2)
    self.assertEqual(desk.deliver(0, 1, examples=8, loss=1.5), [(0, 1, VOID)])
    self.assertEqual(desk.accepted, [])
    self.assertEqual(int(desk.state.examples), 0)
    self.assertEqual(float(desk.state.loss), 0.0)
    self.assertEqual(desk.status, [ADMITTED, COMPUTING])

  def test_without_admission_is_ignored(self):
    desk = Desk(2, 1)
    desk.offer(0, 1)
    desk.offer(1, 10)
    desk.deliver(1, 10)
    self.assertEqual(desk.accepted, [])
    self.assertEqual(desk.status, [ADMITTED, WAITING])

  def test_twice_counts_once(self):
    desk = Desk(2, 2)
    desk.offer(0, 1)
    desk.deliver(0, 1, examples=8)
    desk.deliver(0, 1, examples=8)
    self.assertEqual(desk.accepted, [(0, 1)])
    self.assertEqual(int(desk.state.examples), 8)

  @parameterized.parameters(
    protocol.MessageType.NONFINITE, protocol.MessageType.WAKE
  )
  def test_other_messages_change_nothing(self, kind):
    desk = Desk(2, 1)
    desk.offer(0, 1)
    before = [x.numpy().tolist() for x in desk.state]
    replica = -1 if kind == protocol.MessageType.WAKE else 0
    self.assertEqual(desk.say(kind, replica, 1), [])
    self.assertEqual([x.numpy().tolist() for x in desk.state], before)


class HeldUpTest(absltest.TestCase):
  """For how long a step lacked nothing but one contribution."""

  def _step(self, desk, *times):
    """Everyone offers and delivers; replica r at `times[r]`."""
    for replica in range(len(times)):
      desk.offer(replica, tag=10 * desk.step + replica)
    for replica in np.argsort(times):
      desk.deliver(replica, tag=10 * desk.step + replica, time=times[replica])
    # All are released with what comes next admitted.
    desk.finish()
    for replica in range(len(times)):
      desk.lose(replica, int(desk.state.tag[replica]))

  def test_is_from_the_last_but_one_to_the_last(self):
    desk = Desk(3, 3)
    self._step(desk, 10.0, 17.0, 12.0)
    np.testing.assert_allclose(desk.state.held_up, [0.0, 5.0, 0.0])
    self._step(desk, 20.0, 20.5, 20.25)
    np.testing.assert_allclose(desk.state.held_up, [0.0, 5.25, 0.0])
    self._step(desk, 31.0, 30.0, 30.0)
    np.testing.assert_allclose(desk.state.held_up, [1.0, 5.25, 0.0])

  def test_nobody_else_is_no_hold_up(self):
    desk = Desk(1, 1)
    self._step(desk, 10.0)
    self._step(desk, 20.0)
    self.assertEqual(float(desk.state.held_up[0]), 0.0)

  def test_of_the_first_n_only(self):
    desk = Desk(3, 2)
    for replica, tag in enumerate((1, 2, 3)):
      desk.offer(replica, tag)
    desk.deliver(1, 2, time=5.0)
    desk.deliver(0, 1, time=7.0)
    self.assertEqual(desk.state.held_up.numpy().tolist(), [2.0, 0.0, 0.0])

  def test_a_delivery_that_does_not_count_is_none(self):
    desk = Desk(2, 2)
    desk.offer(0, 1)
    desk.offer(1, 2)
    desk.deliver(0, 1, time=5.0)
    desk.deliver(0, 1, time=8.0)
    desk.deliver(1, 2, time=9.0)
    self.assertEqual(desk.state.held_up.numpy().tolist(), [0.0, 4.0])


class LostTest(absltest.TestCase):
  def test_place_of_an_admitted_one_goes_to_the_first_that_waits(self):
    desk = Desk(4, 1)
    desk.offer(1, 10)
    desk.offer(3, 30)
    desk.offer(2, 20)
    # The old tag is released too: its owner may only have been slow.
    self.assertEqual(desk.lose(1, 10), [(1, 10, VOID), (2, 20, ADMIT)])
    self.assertEqual(desk.status, [COMPUTING, LOST, ADMITTED, WAITING])

  def test_what_it_delivers_later_is_ignored(self):
    desk = Desk(2, 1)
    desk.offer(0, 1)
    desk.lose(0, 1)
    desk.deliver(0, 1, examples=8)
    self.assertEqual(desk.accepted, [])
    self.assertEqual(desk.status, [LOST, COMPUTING])
    self.assertEqual(desk.counts, [_counts(surplus=1), _counts()])

  def test_successor_is_welcome(self):
    desk = Desk(1, 1)
    desk.offer(0, 1)
    desk.lose(0, 1)
    self.assertEqual(desk.offer(0, 2), [(0, 2, ADMIT)])

  def test_of_another_tag_means_a_predecessor(self):
    desk = Desk(1, 1)
    desk.offer(0, 2)
    self.assertEqual(desk.lose(0, 1), [])
    self.assertEqual(desk.status, [ADMITTED])

  def test_one_with_all_its_work_done_is_not_lost(self):
    desk = Desk(2, 1)
    desk.offer(0, 1)
    desk.offer(1, 10)
    desk.deliver(0, 1)
    self.assertEqual(desk.lose(0, 1) + desk.lose(1, 10), [])
    self.assertEqual(desk.status, [DELIVERED, WAITING])

  def test_one_that_computes_owes_no_reply(self):
    desk = Desk(2, 1)
    self.assertEqual(desk.lose(0, -1), [])
    self.assertEqual(desk.status, [LOST, COMPUTING])
    self.assertEqual(desk.counts, [_counts()] * 2)

  def test_stays_lost_over_the_end_of_a_step(self):
    desk = Desk(2, 1)
    desk.lose(1, -1)
    desk.offer(0, 1)
    desk.deliver(0, 1)
    self.assertEqual(desk.finish(), [(0, 1, RELEASE)])
    self.assertEqual(desk.status, [COMPUTING, LOST])


class SupersededTest(absltest.TestCase):
  """A second offer of a replica whose first is open: it was restarted."""

  def test_admitted(self):
    desk = Desk(2, 1)
    desk.offer(0, 1)
    self.assertEqual(desk.offer(0, 2), [(0, 1, VOID), (0, 2, ADMIT)])
    # Another process of the replica may have taken the first VOID.
    self.assertEqual(desk.deliver(0, 1), [(0, 1, VOID)])
    self.assertEqual(desk.accepted, [])
    desk.deliver(0, 2)
    self.assertEqual(desk.accepted, [(0, 2)])

  def test_waiting(self):
    desk = Desk(2, 1)
    desk.offer(0, 1)
    desk.offer(1, 10)
    self.assertEqual(desk.offer(1, 20), [(1, 10, VOID)])
    self.assertEqual(desk.status, [ADMITTED, WAITING])

  def test_delivered_keeps_its_place_and_gets_no_second(self):
    desk = Desk(2, 2)
    desk.offer(0, 1)
    desk.deliver(0, 1)
    self.assertEqual(desk.offer(0, 2), [(0, 1, VOID)])
    self.assertEqual(desk.accepted, [(0, 1)])
    self.assertEqual(desk.status, [WAITING, COMPUTING])

  def test_by_a_late_one(self):
    desk = Desk(1, 1, step=4)
    desk.offer(0, 1)
    self.assertEqual(desk.offer(0, 2, step=3), [(0, 1, VOID), (0, 2, RELEASE)])
    self.assertEqual(desk.status, [COMPUTING])

  def test_a_released_one_is_not_flushed_again(self):
    desk = Desk(2, 1)
    desk.offer(0, 1)
    desk.deliver(0, 1)
    desk.finish()
    self.assertEqual(desk.offer(0, 2), [(0, 2, ADMIT)])


class FewerPlacesTest(absltest.TestCase):
  """N < M: backup replicas."""

  def test_a_step(self):
    desk = Desk(3, 2)
    desk.offer(2, 20)
    desk.offer(0, 1)
    desk.offer(1, 10)
    desk.deliver(0, 1)
    desk.deliver(2, 20)
    replies = [(0, 1, RELEASE), (1, 10, RELEASE), (2, 20, RELEASE)]
    self.assertEqual(desk.finish(), replies)
    self.assertEqual(desk.status, [COMPUTING] * 3)
    self.assertEqual(desk.accepted, [])
    self.assertEqual(
      desk.counts, [_counts(applied=1), _counts(surplus=1), _counts(applied=1)]
    )

  def test_who_computes_is_not_released(self):
    desk = Desk(2, 1)
    desk.offer(1, 10)
    desk.deliver(1, 10, examples=8, loss=2.0)
    self.assertEqual(desk.finish(), [(1, 10, RELEASE)])
    self.assertEqual(int(desk.state.examples), 0)
    self.assertEqual(float(desk.state.loss), 0.0)


class AsManyPlacesTest(absltest.TestCase):
  """N = M: whoever is released is admitted in advance."""

  def test_tickets(self):
    desk = Desk(2, 2)
    for replica, tag in ((0, 1), (1, 10)):
      desk.offer(replica, tag)
    for replica, tag in ((0, 1), (1, 10)):
      desk.deliver(replica, tag)
    self.assertEqual(desk.finish(), [(0, 1, CONTINUE), (1, 10, CONTINUE)])
    self.assertEqual(desk.status, [ADMITTED, ADMITTED])
    # The ticket is the tag that follows; the old one is worth nothing.
    desk.deliver(1, 10)
    self.assertEqual(desk.accepted, [])
    desk.deliver(1, 11)
    desk.deliver(0, 2)
    self.assertEqual(desk.accepted, [(1, 11), (0, 2)])
    desk.finish()
    self.assertEqual(desk.counts, [_counts(applied=2)] * 2)

  def test_lost_ticket_holder_is_released_from_the_ticket(self):
    desk = Desk(1, 1)
    desk.offer(0, 1)
    desk.deliver(0, 1)
    desk.finish()
    self.assertEqual(desk.lose(0, 2), [(0, 2, VOID)])


class MorePlacesTest(absltest.TestCase):
  """N > M: several batches of each replica."""

  def test_who_delivered_goes_on_within_the_step(self):
    desk = Desk(2, 3)
    desk.offer(0, 1)
    self.assertEqual(desk.deliver(0, 1), [(0, 1, CONTINUE)])
    self.assertEqual(desk.status, [ADMITTED, COMPUTING])
    self.assertEqual(desk.deliver(0, 2), [(0, 2, CONTINUE)])
    self.assertEqual(desk.accepted, [(0, 1), (0, 2)])
    # The last place is promised to replica 0.
    self.assertEqual(desk.offer(1, 10), [])
    self.assertEqual(desk.deliver(0, 3), [])
    self.assertEqual(desk.finish(), [(0, 3, CONTINUE), (1, 10, CONTINUE)])
    self.assertEqual(desk.status, [ADMITTED, ADMITTED])
    self.assertEqual(desk.counts, [_counts(applied=3), _counts(surplus=1)])

  def test_a_step_that_begins_anew_refuses_all_it_had(self):
    desk = Desk(2, 3)
    desk.offer(0, 1)
    desk.deliver(0, 1, examples=8, loss=2.0, time=5.0)
    desk.deliver(0, 2)
    desk.offer(1, 10)
    state = ledger.cleared(desk.state)
    expected = [_counts(surplus=3), _counts(surplus=1)]
    self.assertEqual(np.asarray(state.counts).tolist(), expected)
    empty = ledger.new_ledger(2, 3)
    for name in set(ledger.Ledger._fields) - {"counts", "held_up"}:
      with self.subTest(name):
        np.testing.assert_array_equal(
          getattr(state, name), getattr(empty, name)
        )

  def test_who_waits_comes_before_who_delivered(self):
    desk = Desk(3, 4)
    for replica in range(3):
      desk.offer(replica, 10 * replica)
    # Both of 0 and 1 want the fourth place.
    self.assertEqual(desk.deliver(1, 10), [(1, 10, CONTINUE)])
    self.assertEqual(desk.deliver(0, 0), [])
    self.assertEqual(desk.lose(1, 11), [(1, 11, VOID), (0, 0, CONTINUE)])
    self.assertEqual(desk.lose(2, 20), [(2, 20, VOID)])
    self.assertEqual(desk.offer(2, 30), [(2, 30, ADMIT)])
    self.assertEqual(desk.status, [ADMITTED, LOST, ADMITTED])


class RestoredTest(absltest.TestCase):
  """The variables were restored: `cleared` with `is_restored`."""

  def test_what_was_computed_before_is_refused_once(self):
    desk = Desk(3, 1, step=5)
    desk.offer(0, 1)
    desk.offer(1, 2)
    # 0 is admitted, 1 waits, 2 computes.
    desk.state = ledger.cleared(desk.state, is_restored=True)
    tags = [-1, -1, ledger.ABANDONED]
    self.assertEqual(np.asarray(desk.state.tag).tolist(), tags)
    self.assertEqual(desk.offer(2, 30), [(2, 30, RELEASE)])
    self.assertEqual(desk.offer(1, 20), [(1, 20, ADMIT)])
    self.assertEqual(desk.offer(2, 31), [])
    expected = [_counts(surplus=1)] * 2
    expected += [_counts(**{f"late_{MAX_LATE}": 1})]
    self.assertEqual(desk.counts, expected)

  def test_a_replica_may_be_lost_meanwhile(self):
    desk = Desk(2, 1)
    desk.state = ledger.cleared(desk.state, is_restored=True)
    self.assertEqual(desk.lose(0, ledger.ABANDONED), [])
    self.assertEqual(desk.status, [LOST, COMPUTING])
    self.assertEqual(desk.offer(0, 7), [(0, 7, RELEASE)])
    self.assertEqual(desk.offer(0, 8), [(0, 8, ADMIT)])


class DeadlineTest(parameterized.TestCase):
  """Steps that exceed their deadline."""

  def _is_complete(self, desk, least):
    needed = desk.quorum._replace(least=least)
    return bool(ledger.is_complete(desk.state, needed))

  def _expire(self, desk, step=None):
    step = desk.step if step is None else step
    return desk.say(protocol.MessageType.EXPIRED, -1, step=step)

  def test_a_step_goes_on_with_what_has_arrived(self):
    desk = Desk(3, 3, least=1)
    for replica in range(3):
      desk.offer(replica, 10)
    desk.deliver(0, 10, examples=4, loss=1.0)
    desk.deliver(2, 10, examples=4, loss=2.0)
    self.assertFalse(self._is_complete(desk, 2))
    self.assertEqual(self._expire(desk), [(1, 10, VOID)])
    self.assertTrue(self._is_complete(desk, 2))
    self.assertEqual(desk.accepted, [(0, 10), (2, 10)])
    desk.finish()
    self.assertEqual(desk.status, [ADMITTED, SKIPPED, ADMITTED])
    missed = [row[ledger.MISSED] for row in desk.counts]
    self.assertEqual(missed, [0, 1, 0])
    # The gradient comes too late. The next step does not wait for the replica.
    self.assertEqual(desk.deliver(1, 10), [])
    desk.deliver(0, 11)
    desk.deliver(2, 11)
    self.assertTrue(self._is_complete(desk, 2))
    desk.finish()
    self.assertEqual([row[ledger.MISSED] for row in desk.counts], [0, 2, 0])
    self.assertEqual(desk.counts[1][:2], [0, 1])  # Refused: one surplus.

  def test_a_step_waits_for_a_replica_that_came_back(self):
    desk = Desk(2, 2, least=1)
    desk.offer(0, 10)
    desk.offer(1, 10)
    desk.deliver(0, 10)
    self._expire(desk)
    desk.finish()
    self.assertEqual(desk.offer(1, 20), [(1, 20, ADMIT)])
    desk.deliver(0, 11)
    self.assertFalse(self._is_complete(desk, 1))
    desk.deliver(1, 20)
    self.assertTrue(self._is_complete(desk, 1))
    desk.finish()
    self.assertEqual([row[ledger.MISSED] for row in desk.counts], [0, 1])

  def test_later_steps_need_the_minimum(self):
    desk = Desk(3, 3, least=1)
    for replica in range(3):
      desk.offer(replica, 10)
    desk.deliver(0, 10)
    desk.deliver(1, 10)
    self._expire(desk)
    desk.finish()
    self.assertFalse(self._is_complete(desk, 2))
    desk.deliver(0, 11)
    self.assertFalse(self._is_complete(desk, 2))
    self._expire(desk)  # Too few: replica 1 is skipped, and yet needed.
    self.assertFalse(self._is_complete(desk, 2))
    desk.offer(1, 20)
    desk.deliver(1, 20)
    self.assertTrue(self._is_complete(desk, 2))

  def test_the_deadline_of_an_earlier_step(self):
    desk = Desk(2, 2, step=5, least=1)
    desk.offer(0, 10)
    desk.offer(1, 10)
    desk.deliver(0, 10)
    self.assertEqual(self._expire(desk, step=4), [])
    self.assertEqual(desk.status, [DELIVERED, ADMITTED])
    self.assertFalse(self._is_complete(desk, 1))

  def test_a_lost_replica_is_not_waited_for(self):
    desk = Desk(3, 3, least=1)
    for replica in range(3):
      desk.offer(replica, 10)
    desk.deliver(0, 10)
    self.assertEqual(desk.lose(1, 10), [(1, 10, VOID)])
    self.assertFalse(self._is_complete(desk, 1))
    desk.deliver(2, 10)
    self.assertTrue(self._is_complete(desk, 1))
    self.assertFalse(self._is_complete(desk, 3))
    desk.finish()
    self.assertEqual(desk.status, [ADMITTED, SKIPPED, ADMITTED])
    # Its successor takes part from its first offer on.
    self.assertEqual(desk.offer(1, 20), [(1, 20, ADMIT)])
    desk.deliver(0, 11)
    desk.deliver(2, 11)
    self.assertFalse(self._is_complete(desk, 1))

  def test_a_backup_replica_takes_the_place(self):
    desk = Desk(3, 2, least=1)
    for replica in range(3):
      desk.offer(replica, 10)
    desk.deliver(0, 10)
    self.assertEqual(self._expire(desk), [(1, 10, VOID), (2, 10, ADMIT)])
    self.assertFalse(self._is_complete(desk, 1))  # Its gradient is on its way.
    desk.deliver(2, 10)
    self.assertTrue(self._is_complete(desk, 1))

  def test_others_contribute_more_batches(self):
    desk = Desk(2, 3, least=1)
    desk.offer(0, 10)
    desk.offer(1, 10)
    desk.deliver(0, 10)
    desk.deliver(0, 11)
    self.assertEqual(self._expire(desk), [(1, 10, VOID), (0, 11, CONTINUE)])
    self.assertFalse(self._is_complete(desk, 2))
    desk.deliver(0, 12)
    self.assertTrue(self._is_complete(desk, 2))


class ShareTest(absltest.TestCase):
  """Steps that need a share of the replicas that take part."""

  def _step(self, desk, replicas):
    """All of `replicas` offer and deliver; returns whose gradients counted."""
    for replica in replicas:
      desk.offer(replica, 100 * (desk.step + 1))
    while not ledger.is_complete(desk.state, desk.quorum):
      status = desk.status
      self.assertIn(ADMITTED, status)  # Else the step would wait for ever.
      replica = status.index(ADMITTED)
      desk.deliver(replica, int(desk.state.tag[replica]))
    owners = [replica for replica, _ in desk.accepted]
    desk.finish()
    return owners

  def test_all_but_one(self):
    desk = Desk(4, "all-1", least=1)
    self.assertEqual(self._step(desk, [0, 1, 2, 3]), [0, 1, 2])
    desk.lose(3, int(desk.state.tag[3]))
    self.assertEqual(self._step(desk, [2, 1, 0]), [1, 2])
    desk.lose(2, int(desk.state.tag[2]))
    self.assertEqual(self._step(desk, [0, 1]), [0])
    # They come back.
    self.assertEqual(self._step(desk, [3, 2, 1]), [1, 2, 3])

  def test_a_percentage_is_rounded_up(self):
    desk = Desk(5, "60%", least=2)
    self.assertEqual(self._step(desk, range(5)), [0, 1, 2])
    desk.lose(4, int(desk.state.tag[4]))
    self.assertEqual(self._step(desk, range(4)), [0, 1, 2])
    desk.lose(3, int(desk.state.tag[3]))
    self.assertEqual(self._step(desk, range(3)), [0, 1])
    desk.lose(2, int(desk.state.tag[2]))
    desk.lose(1, int(desk.state.tag[1]))
    desk.offer(0, 900)
    desk.deliver(0, 900)
    self.assertFalse(ledger.is_complete(desk.state, desk.quorum))

  def test_an_admitted_contribution_is_waited_for(self):
    desk = Desk(4, "all-1", least=1)
    for replica in range(4):
      desk.offer(replica, 10)
    desk.deliver(0, 10)
    desk.deliver(1, 10)
    # Two of three replicas would do now, but that of replica 2 is on its way.
    desk.lose(3, 10)
    self.assertEqual(desk.status[2:], [ADMITTED, WAITING])
    desk = Desk(4, "all-1", least=1)
    for replica in range(3):
      desk.offer(replica, 10)
    desk.lose(3, -1)
    desk.deliver(0, 10)
    desk.deliver(1, 10)
    self.assertFalse(ledger.is_complete(desk.state, desk.quorum))
    desk.deliver(2, 10)
    self.assertTrue(ledger.is_complete(desk.state, desk.quorum))

  @hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
  @hypothesis.given(
    st.sampled_from([(4, "all-1"), (5, "60%"), (3, "all"), (4, "50%")]),
    st.lists(
      st.tuples(st.sampled_from("oooddddl"), st.integers(0, 4)), max_size=40
    ),
  )
  def test_every_step_is_of_distinct_fresh_contributions(self, shape, actions):
    num_replicas, share = shape
    desk = Desk(num_replicas, share, least=1)
    offered = {}
    for number, (action, replica) in enumerate(actions):
      replica %= num_replicas
      tag = int(desk.state.tag[replica])
      if action == "o":
        offered[replica, 1000 * (number + 1)] = desk.step
        desk.offer(replica, 1000 * (number + 1))
      elif action == "d":
        desk.deliver(replica, tag)
      else:
        desk.lose(replica, tag)
      for owner, accepted in desk.accepted:
        if accepted % 1000 == 0:  # Not one that was admitted by CONTINUE.
          self.assertEqual(offered[owner, accepted], desk.step)
      if ledger.is_complete(desk.state, desk.quorum):
        owners = [owner for owner, _ in desk.accepted]
        self.assertLen(set(owners), len(owners))
        here = num_replicas - desk.status.count(SKIPPED)
        self.assertGreaterEqual(len(owners), max(desk.quorum.of(here), 1))
        desk.finish()
        self.assertEqual(desk.accepted, [])


@dataclasses.dataclass
class Oracle:
  """The rules of the docstrings once more, one replica at a time."""

  num_replicas: int
  num_places: int
  step: int = 0

  def __post_init__(self):
    self.status = [COMPUTING] * self.num_replicas
    self.tag = [-1] * self.num_replicas
    self.accepted = []
    self.examples = 0
    self.loss = 0.0
    self.counts = [_counts() for _ in range(self.num_replicas)]
    self.replies = []

  def say(self, kind, replica, tag=-1, step=0, examples=0, loss=0.0):
    if kind == OFFER:
      if self.status[replica] in (WAITING, ADMITTED, DELIVERED):
        self.replies.append((replica, self.tag[replica], VOID))
      if self.status[replica] in (WAITING, ADMITTED):
        self.counts[replica][1] += 1
      self.tag[replica] = tag
      if step < self.step:
        late = min(self.step - step, MAX_LATE)
        self.counts[replica][1 + late] += 1
        self.status[replica] = COMPUTING
        self.replies.append((replica, tag, RELEASE))
      else:
        self.status[replica] = WAITING
    elif kind == protocol.MessageType.DELIVERED:
      if self.tag[replica] != tag:
        self.replies.append((replica, tag, VOID))
      elif self.status[replica] == ADMITTED:
        self.status[replica] = DELIVERED
        self.accepted.append((replica, tag))
        self.examples += examples
        self.loss += loss
    elif kind == protocol.MessageType.LOST and self.tag[replica] == tag:
      if self.status[replica] == ADMITTED:
        self.replies.append((replica, tag, VOID))
        self.counts[replica][1] += 1
      if self.status[replica] not in (WAITING, DELIVERED):
        self.status[replica] = LOST
    self._settle()

  def _free(self):
    return self.num_places - len(self.accepted) - self.status.count(ADMITTED)

  def _settle(self):
    several = self.num_places > self.num_replicas
    has_contributed = {replica for replica, _ in self.accepted}
    news = []
    for replica in range(self.num_replicas):
      if self.status[replica] == WAITING and self._free():
        if several or replica not in has_contributed:
          self.status[replica] = ADMITTED
          news.append((replica, self.tag[replica], ADMIT))
    for replica in range(self.num_replicas):
      if several and self.status[replica] == DELIVERED and self._free():
        self.status[replica] = ADMITTED
        news.append((replica, self.tag[replica], CONTINUE))
        self.tag[replica] += 1
    self.replies += sorted(news)

  def finish(self):
    for replica, _ in self.accepted:
      self.counts[replica][0] += 1
    for replica in range(self.num_replicas):
      if self.status[replica] == WAITING:
        self.counts[replica][1] += 1
      if self.status[replica] in (WAITING, DELIVERED):
        if self.num_places >= self.num_replicas:
          self.replies.append((replica, self.tag[replica], CONTINUE))
          self.status[replica] = ADMITTED
          self.tag[replica] += 1
        else:
          self.replies.append((replica, self.tag[replica], RELEASE))
          self.status[replica] = COMPUTING
    self.accepted, self.examples, self.loss = [], 0, 0.0
    self.step += 1


ACTIONS = st.lists(
  st.tuples(
    # Mostly progress, so that steps end; but everything can happen.
    st.sampled_from(
      ["offer"] * 4 + ["deliver"] * 6 + ["lost"] * 2 + ["nonfinite", "wake"]
    ),
    st.integers(0, 3),  # Replica.
    st.sampled_from(["last"] * 5 + ["wrong"]),  # Tag.
    st.sampled_from([0] * 6 + [1, 2, MAX_LATE + 2]),  # Late by.
    st.integers(0, 9),  # Examples.
  ),
  max_size=40,
)


def _drive(num_replicas, num_places, actions):
  """Yields (desk, oracle) after every message; both got the same ones."""
  step = 20
  desk = Desk(num_replicas, num_places, step)
  oracle = Oracle(num_replicas, num_places, step)
  for number, (action, replica, which, late, examples) in enumerate(actions):
    replica %= num_replicas
    tag = 1000 * number + WRONG if which == "wrong" else oracle.tag[replica]
    fields = {}
    if action == "offer":
      kind, tag = OFFER, 1000 * (number + 1)
      fields["step"] = oracle.step - late
    elif action == "deliver":
      kind = protocol.MessageType.DELIVERED
      fields.update(examples=examples, loss=examples / 4)
    elif action == "lost":
      kind = protocol.MessageType.LOST
    elif action == "nonfinite":
      kind = protocol.MessageType.NONFINITE
    else:
      kind, replica = protocol.MessageType.WAKE, -1
    if kind == protocol.MessageType.WAKE:
      desk.say(kind, replica, tag)
      oracle._settle()
    else:
      desk.say(kind, replica, tag, **fields)
      oracle.say(kind, replica, tag, **fields)
    yield desk, oracle
    if len(oracle.accepted) == num_places:
      desk.finish()
      oracle.finish()
      yield desk, oracle


# Tags that end like this were never offered.
WRONG = 500
SHAPES = [(1, 1), (3, 2), (4, 1), (3, 3), (2, 3), (2, 5), (1, 4)]


class RandomSequencesTest(parameterized.TestCase):
  @hypothesis.settings(max_examples=120, deadline=None, derandomize=True)
  @hypothesis.given(st.sampled_from(SHAPES), ACTIONS)
  def test_state_and_replies_are_those_of_the_oracle(self, shape, actions):
    for desk, oracle in _drive(*shape, actions):
      self.assertEqual(desk.status, oracle.status)
      self.assertEqual(desk.state.tag.numpy().tolist(), oracle.tag)
      self.assertEqual(desk.accepted, oracle.accepted)
      self.assertEqual(int(desk.state.examples), oracle.examples)
      self.assertEqual(float(desk.state.loss), oracle.loss)
      self.assertEqual(desk.counts, oracle.counts)
      self.assertEqual(desk.replies, oracle.replies)

  @hypothesis.settings(max_examples=120, deadline=None, derandomize=True)
  @hypothesis.given(st.sampled_from(SHAPES), ACTIONS)
  def test_invariants(self, shape, actions):
    num_replicas, num_places = shape
    for desk, _ in _drive(*shape, actions):
      accepted, status = desk.accepted, desk.status
      self.assertLessEqual(len(accepted) + status.count(ADMITTED), num_places)
      self.assertLen(set(accepted), len(accepted))
      contributors = [replica for replica, _ in accepted]
      if num_places <= num_replicas:
        self.assertLen(set(contributors), len(contributors))
        for replica in contributors:
          self.assertNotEqual(status[replica], ADMITTED)
      free = num_places - len(accepted) - status.count(ADMITTED)
      for replica in range(num_replicas):
        if status[replica] == WAITING and replica not in contributors:
          self.assertEqual(free, 0, "a place is free while someone waits")

  @hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
  @hypothesis.given(st.sampled_from(SHAPES), ACTIONS)
  def test_every_tag_is_let_go_exactly_once(self, shape, actions):
    num_replicas, num_places = shape
    # Whatever happened before: now all offer and deliver for many steps.
    calm = [
      (action, replica, "last", 0, 1)
      for _ in range(3 * num_places)
      for action in ("offer", "deliver")
      for replica in range(num_replicas)
    ]
    desk = None
    for desk, _ in _drive(*shape, actions + calm):  # noqa: B007
      pass
    replies = {}
    for replica, tag, verdict in desk.replies:
      replies.setdefault((replica, tag), []).append(verdict)
    still_open = {
      (replica, int(desk.state.tag[replica]))
      for replica, status in enumerate(desk.status)
      if status in (WAITING, ADMITTED, DELIVERED)
    }
    offered = {
      (replica % num_replicas, 1000 * (number + 1))
      for number, (action, replica, *_) in enumerate(actions + calm)
      if action == "offer"
    }
    continued = {
      (replica, tag + 1)
      for replica, tag, verdict in desk.replies
      if verdict == CONTINUE
    }
    # What was handed over under them is void.
    wrong = {key for key in replies if key[1] % 1000 == WRONG}
    self.assertEqual(
      {v for key in wrong for v in replies.pop(key)} - {VOID}, set()
    )
    self.assertContainsSubset(set(replies), offered | continued)
    for key in offered | continued:
      verdicts = replies.get(key, [])
      if verdicts[:1] == [ADMIT]:
        self.assertIn(key, offered)
        verdicts = verdicts[1:]
      expected = 0 if key in still_open else 1
      self.assertLen(verdicts, expected, f"{key}: {replies.get(key)}")
      self.assertNotIn(ADMIT, verdicts)

  @hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
  @hypothesis.given(st.sampled_from(SHAPES), ACTIONS)
  def test_counts_add_up(self, shape, actions):
    desk = None
    for desk, _ in _drive(*shape, actions):  # noqa: B007
      pass
    if desk is None:
      return
    rows = np.array(desk.counts)
    self.assertEqual(rows[:, 0].sum(), (desk.step - 20) * shape[1])
    num_late = sum(a == "offer" and late > 0 for a, _, _, late, _ in actions)
    self.assertEqual(rows[:, 2:].sum(), num_late)
    # Whatever was offered or admitted by CONTINUE has exactly one outcome.
    num_offered = sum(action == "offer" for action, *_ in actions)
    num_continued = [v for *_, v in desk.replies].count(CONTINUE)
    num_open = desk.status.count(WAITING) + desk.status.count(ADMITTED)
    num_open += len(desk.accepted)
    self.assertEqual(rows.sum(), num_offered + num_continued - num_open)
    # A new chief refuses those that are open.
    cleared = ledger.cleared(desk.state)
    self.assertEqual(
      np.asarray(cleared.counts).sum(), num_offered + num_continued
    )


if __name__ == "__main__":
  absltest.main()
