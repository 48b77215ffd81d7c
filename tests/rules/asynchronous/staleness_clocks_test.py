"""Tests for rules.asynchronous.staleness_clocks: which replica waits."""

import functools

import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests.support import background
from tests.support import stores
from tf_replicas.rules.asynchronous import staleness_clocks
from tf_replicas.runtime import waiting

# As the drivers trace.
_graph = functools.partial(tf.function, autograph=False)
_CLOSED = (tf.errors.OutOfRangeError, tf.errors.CancelledError)


def _attach(num_replicas, max_lead):
  return staleness_clocks.StalenessClocks(
    stores.namespace(), num_replicas, max_lead=max_lead, device=stores.device(0)
  )


class Client:
  """The gates of all replicas, as one client of the training sees them."""

  def __init__(self, num_replicas, max_lead, *, is_chief=True):
    self.gates = _attach(num_replicas, max_lead)
    if is_chief:
      self.gates.initialize()
    self._next_clock = _graph(self.gates.next_clock)
    self._before = _graph(self.gates.before)
    self._after = _graph(self.gates.after)
    self._declare_lost = _graph(self.gates.declare_lost)
    self._open = _graph(self.gates.open)

  def reset(self):
    self.gates.initialize()

  def close(self):
    self.gates.close()

  def next_clock(self, replica):
    return int(self._next_clock(_int(replica)))

  def before(self, replica, clock):
    self._before(_int(replica), _int(clock))

  def after(self, replica, clock):
    self._after(_int(replica), _int(clock))

  def step(self, replica):
    """What a replica passes in one step; its clock."""
    clock = self.next_clock(replica)
    self.before(replica, clock)
    self.after(replica, clock)
    return clock

  def declare_lost(self, replica):
    self._declare_lost(_int(replica))

  def open(self):
    self._open()

  def is_waiting(self):
    return self.gates.is_waiting().numpy().tolist()


def _int(value):
  return tf.constant(value, tf.int64)


class TestCase(background.TestCase):
  def _new_client(self, num_replicas, max_lead, **kwargs):
    client = Client(num_replicas, max_lead, **kwargs)
    self.addCleanup(client.close)
    return client

  def _client(self, num_replicas, max_lead):
    """One as new, that an earlier test may have used; not to be closed."""
    key = "gates", num_replicas, max_lead
    return self.borrow(key, lambda: Client(num_replicas, max_lead))

  def _await_waiting(self, client, *replicas):
    """Until just these wait at a gate, so that the test is sure of it."""
    expected = [r in replicas for r in range(len(client.is_waiting()))]
    waiting.await_value(
      lambda: client.is_waiting() == expected,
      timeout_secs=background.DEADLINE_SECS,
      what=f"{replicas} to wait, but {client.is_waiting()}",
      poll_secs=0.01,
    )


class ClockTest(TestCase):
  def test_counts_the_steps_of_each(self):
    client = self._client(2, 5)
    self.assertEqual([client.next_clock(r) for r in (0, 1)], [1, 1])
    self.assertEqual([client.step(0) for _ in range(3)], [1, 2, 3])
    self.assertEqual([client.next_clock(r) for r in (0, 1)], [4, 1])

  def test_asking_is_not_coming(self):
    client = self._client(1, 1)
    self.assertEqual([client.next_clock(0) for _ in range(3)], [1, 1, 1])

  def test_passing_before_the_update_is_not_yet_a_step(self):
    client = self._client(1, 0)
    client.before(0, 1)
    self.assertEqual(client.next_clock(0), 1)
    client.after(0, 1)
    self.assertEqual(client.next_clock(0), 2)

  def test_who_was_lost_comes_back_where_the_slowest_is(self):
    client = self._client(3, 9)
    for replica, steps in ((0, 1), (1, 3), (2, 5)):
      for _ in range(steps):
        client.step(replica)
    client.declare_lost(0)
    self.assertEqual(client.next_clock(0), 4)
    self.assertEqual(client.next_clock(2), 6)

  def test_where_all_were_lost_it_begins_anew(self):
    client = self._client(2, 9)
    for _ in range(3):
      client.step(0)
    for replica in (0, 1):
      client.declare_lost(replica)
    self.assertEqual([client.step(0), client.step(0)], [1, 2])

  def test_initialize_forgets_all_clocks(self):
    client = self._new_client(2, 9)
    client.step(0)
    client.declare_lost(1)
    client.gates.initialize()
    self.assertEqual([client.next_clock(r) for r in (0, 1)], [1, 1])


class LeadTest(TestCase):
  """Where a replica may be some updates ahead of the slowest."""

  @parameterized.parameters(1, 2, 4)
  def test_the_fastest_is_no_further_ahead_than_allowed(self, max_lead):
    client = self._client(2, max_lead)
    for _ in range(max_lead):
      self.call(client.step, 0).result()
    one_more = self.call(client.step, 0)
    self._await_waiting(client, 0)
    self.assert_waits(one_more)
    self.call(client.step, 1).result()
    self.assertEqual(one_more.result(), max_lead + 1)
    again = self.call(client.step, 0)
    self._await_waiting(client, 0)
    self.assert_waits(again)
    client.step(1)
    again.result()
    self.assertEqual(client.is_waiting(), [False, False])

  def test_it_is_the_slowest_of_all_that_counts(self):
    client = self._client(3, 1)
    client.step(0)
    ahead = self.call(client.step, 0)
    self._await_waiting(client, 0)
    client.step(1)
    self.assert_waits(ahead)
    client.step(2)
    ahead.result()

  def test_several_who_wait_pass_together(self):
    client = self._client(3, 1)
    for replica in (0, 1):
      client.step(replica)
    ahead = [self.call(client.step, replica) for replica in (0, 1)]
    self._await_waiting(client, 0, 1)
    client.step(2)
    self.assertEqual([call.result() for call in ahead], [2, 2])

  def test_only_those_who_are_near_enough_pass(self):
    client = self._client(3, 1)
    near = self.call(client.after, 0, 2)
    far = self.call(client.after, 1, 3)
    self._await_waiting(client, 0, 1)
    client.after(2, 1)
    near.result()
    self._await_waiting(client, 1)
    self.assert_waits(far)
    # Of clocks 2, 3 and 2, nobody is too far ahead.
    client.after(2, 2)
    far.result()

  def test_nobody_waits_before_the_update(self):
    client = self._client(2, 1)
    for clock in (1, 2, 7):
      self.call(client.before, 0, clock).result()
    self.assertEqual(client.is_waiting(), [False, False])
    self.assertEqual(client.next_clock(0), 1)


class BarrierTest(TestCase):
  """Where nobody may be ahead at all."""

  def test_nobody_updates_before_all_have_computed(self):
    client = self._client(3, 0)
    calls = [self.call(client.before, r, 1) for r in (0, 2)]
    self._await_waiting(client, 0, 2)
    for call in calls:
      self.assert_waits(call)
    client.before(1, 1)
    for call in calls:
      call.result()
    self.assertEqual(client.is_waiting(), [False] * 3)

  def test_nobody_reads_before_all_have_updated(self):
    client = self._client(3, 0)
    background.run_all(lambda replica: client.before(replica, 1), 3)
    calls = [self.call(client.after, r, 1) for r in (1, 2)]
    self._await_waiting(client, 1, 2)
    for call in calls:
      self.assert_waits(call)
    client.after(0, 1)
    for call in calls:
      call.result()

  def test_one_step_is_not_another(self):
    """All came once; who comes for the second time waits again."""
    client = self._client(2, 0)
    background.run_all(client.step, 2)
    second = self.call(client.step, 0)
    self._await_waiting(client, 0)
    self.assert_waits(second)
    self.assertEqual(client.step(1), 2)
    self.assertEqual(second.result(), 2)

  def test_one_alone_waits_for_nobody(self):
    client = self._client(1, 0)
    steps = [self.call(client.step, 0).result() for _ in range(3)]
    self.assertEqual(steps, [1, 2, 3])


class LostTest(TestCase):
  def test_who_waits_for_a_lost_one_passes(self):
    client = self._client(2, 1)
    client.step(0)
    ahead = self.call(client.step, 0)
    self._await_waiting(client, 0)
    client.declare_lost(1)
    self.assertEqual(ahead.result(), 2)

  @parameterized.parameters("before", "after")
  def test_barrier_opens_for_those_who_wait_for_a_lost_one(self, where):
    client = self._client(3, 0)
    enter = getattr(client, where)
    calls = [self.call(enter, replica, 1) for replica in (0, 1)]
    self._await_waiting(client, 0, 1)
    client.declare_lost(2)
    for call in calls:
      call.result()

  @parameterized.parameters(0, 1)
  def test_who_comes_later_does_not_wait_for_a_lost_one(self, max_lead):
    client = self._client(2, max_lead)
    client.declare_lost(1)
    for number in range(4):
      self.assertEqual(self.call(client.step, 0).result(), number + 1)

  def test_the_others_are_waited_for_all_the_same(self):
    client = self._client(3, 1)
    client.declare_lost(1)
    client.step(0)
    ahead = self.call(client.step, 0)
    self._await_waiting(client, 0)
    self.assert_waits(ahead)
    client.step(2)
    ahead.result()

  @parameterized.parameters(0, 1)
  def test_who_comes_back_is_waited_for_again(self, max_lead):
    client = self._client(2, max_lead)
    client.declare_lost(1)
    for _ in range(5):
      client.step(0)
    if max_lead:
      self.assertEqual(client.step(1), 6)
      self.assertEqual([client.step(0), client.step(0)], [6, 7])
    else:
      back = self.call(client.step, 1)
      self._await_waiting(client, 1)
      self.assertEqual([client.step(0), back.result()], [6, 6])
    ahead = self.call(client.step, 0)
    self._await_waiting(client, 0)
    self.assert_waits(ahead)
    client.step(1)
    ahead.result()

  def test_who_waits_itself_and_is_lost_waits_no_more(self):
    client = self._client(2, 1)
    dead = self.call(client.after, 0, 2)
    self._await_waiting(client, 0)
    client.declare_lost(0)
    self.assertEqual(client.is_waiting(), [False, False])
    dead.result()


class OpenTest(TestCase):
  @parameterized.parameters(0, 2)
  def test_who_waits_passes(self, max_lead):
    client = self._client(3, max_lead)
    # At the gate after the update both are too far ahead.
    calls = [self.call(client.after, r, 9) for r in (0, 1)]
    self._await_waiting(client, 0, 1)
    client.open()
    for call in calls:
      call.result()

  @parameterized.parameters(0, 1)
  def test_who_comes_later_passes(self, max_lead):
    client = self._client(2, max_lead)
    client.open()
    for number in range(5):
      self.assertEqual(self.call(client.step, 0).result(), number + 1)

  def test_who_waits_before_the_update_passes_both_gates(self):
    client = self._client(2, 0)
    call = self.call(client.step, 0)
    self._await_waiting(client, 0)
    client.open()
    self.assertEqual(call.result(), 1)

  def test_initialize_shuts_it_again(self):
    client = self._new_client(2, 1)
    client.open()
    for _ in range(5):
      client.step(0)
    client.gates.initialize()
    self.assertEqual(client.step(0), 1)
    ahead = self.call(client.step, 0)
    self._await_waiting(client, 0)
    self.assert_waits(ahead)
    client.step(1)
    ahead.result()


class CloseTest(TestCase):
  @parameterized.parameters((0, "before"), (0, "after"), (1, "after"))
  def test_who_waits_gets_an_error(self, max_lead, where):
    client = self._new_client(2, max_lead)
    call = self.call(getattr(client, where), 0, 5)
    self._await_waiting(client, 0)
    client.close()
    with self.assertRaises(_CLOSED):
      call.result()

  @parameterized.parameters(0, 1)
  def test_who_comes_later_gets_an_error(self, max_lead):
    client = self._new_client(2, max_lead)
    client.close()
    with self.assertRaises(_CLOSED):
      self.call(client.after, 0, 1).result()
    with self.assertRaises(_CLOSED):
      self.call(client.after, 0, 5).result()


class ClientsTest(TestCase):
  @parameterized.parameters("before", "after")
  def test_two_clients_meet_at_the_same_gates(self, where):
    ours = self._new_client(2, 0)
    theirs = self._new_client(2, 0, is_chief=False)
    call = self.call(getattr(ours, where), 0, 1)
    self._await_waiting(theirs, 0)
    self.call(getattr(theirs, where), 1, 1).result()
    call.result()

  def test_a_successor_takes_the_place_of_one_that_waits(self):
    """A replica that was restarted: its first process must not be in its way.

    The old step passes, for its end; the new one waits for the others.
    """
    client = self._new_client(2, 0)
    old = self.call(client.before, 0, 1)
    self._await_waiting(client, 0)
    new = self.call(client.before, 0, 1)
    old.result()
    self._await_waiting(client, 0)
    self.assert_waits(new)
    self.call(client.before, 1, 1).result()
    new.result()

  @parameterized.parameters((0, 3), (1, 3), (3, 2))
  def test_no_lead_is_too_large_where_all_run_at_once(
    self, max_lead, num_replicas
  ):
    """At every pass all others must have come often enough."""
    client = self._client(num_replicas, max_lead)
    computed, updated = [0] * num_replicas, [0] * num_replicas
    too_early = []

    def train(replica):
      for number in range(1, 31):
        clock = client.next_clock(replica)
        computed[replica] = number
        client.before(replica, clock)
        if not max_lead and min(computed) < number:
          too_early.append(("before", number, list(computed)))
        updated[replica] = number
        client.after(replica, clock)
        if min(updated) < number - max_lead:
          too_early.append(("after", number, list(updated)))

    background.run_all(train, num_replicas)
    self.assertEqual(too_early, [])
    clocks = [client.next_clock(r) for r in range(num_replicas)]
    self.assertEqual(clocks, [31] * num_replicas)


if __name__ == "__main__":
  absltest.main()
