"""Tests for drivers.heartbeat_table; its users are in heartbeats_test."""

import time

from absl.testing import absltest
from absl.testing import parameterized

from tests.support import stores
from tf_replicas.drivers import heartbeat_table
from tf_replicas.runtime import resources

NEVER_CAME, HAS_LEFT = -1, 0
# Numbers of processes; as float64 the first two would be the same.
OLD, NEW, THIRD = (1 << 62) - 1, (1 << 62) - 2, 7


def _table(task=0):
  """Attaches to the table of a task; every call is another client."""
  return heartbeat_table.HeartbeatTable(stores.device(task), stores.namespace())


class BeatTest(stores.TestCase):
  def setUp(self):
    super().setUp()
    self.table = _table()
    self.table.initialize(3)

  def test_no_heartbeat_yet(self):
    self.assertEqual(self.table.ages(), [NEVER_CAME] * 3)

  def test_the_first_heartbeat_is_of_the_current_process(self):
    self.assertTrue(self.table.beat(1, OLD, True).is_current)
    ages = self.table.ages()
    self.assertGreater(ages[1], 0)
    self.assertEqual((ages[0], ages[2]), (NEVER_CAME, NEVER_CAME))

  def test_an_age_is_the_time_since_the_last_beat(self):
    self.table.beat(0, OLD, True)
    time.sleep(0.3)
    self.assertGreater(self.table.ages()[0], 0.29)
    # The second beat counts, not the first.
    began = time.time()
    self.assertTrue(self.table.beat(0, OLD, True).is_current)
    (age, *_) = self.table.ages()
    self.assertBetween(age, 0, time.time() - began + 0.01)

  def test_clients_do_not_mix(self):
    for client in range(3):
      self.assertTrue(self.table.beat(client, 100 + client, True).is_current)
    self.assertTrue(self.table.beat(1, 101, False).is_current)
    first, second, third = self.table.ages()
    self.assertGreater(first, 0)
    self.assertEqual(second, HAS_LEFT)
    self.assertGreater(third, 0)
    self.assertFalse(self.table.beat(1, 100, True).is_current)
    self.assertFalse(self.table.beat(2, 101, True).is_current)

  def test_a_client_rests(self):
    self.table.beat(1, OLD, True, rests=True)
    self.table.beat(2, NEW, True)
    time.sleep(0.3)
    first, second, third = self.table.ages()
    self.assertEqual(first, NEVER_CAME)
    self.assertBetween(heartbeat_table.RESTS - second, 0.29, 30)
    self.assertGreater(third, 0)
    self.table.beat(1, OLD, True)
    self.assertGreater(self.table.ages()[1], 0)

  def test_a_client_that_left_may_come_back(self):
    self.table.beat(0, OLD, True)
    self.table.beat(0, OLD, False)
    self.assertEqual(self.table.ages()[0], HAS_LEFT)
    self.assertTrue(self.table.beat(0, OLD, True).is_current)
    self.assertGreater(self.table.ages()[0], 0)

  @parameterized.parameters(True, False)
  def test_nothing_is_recorded_of_another_process(self, is_here):
    self.table.beat(0, OLD, True)
    time.sleep(0.3)
    self.assertFalse(self.table.beat(0, NEW, is_here).is_current)
    self.assertGreater(self.table.ages()[0], 0.29)  # Neither new nor left.
    self.assertTrue(self.table.beat(0, OLD, True).is_current)

  def test_a_client_that_left_is_still_that_process(self):
    self.table.beat(0, OLD, True)
    self.table.beat(0, OLD, False)
    self.assertFalse(self.table.beat(0, NEW, True).is_current)
    self.assertEqual(self.table.ages()[0], HAS_LEFT)

  def test_a_process_that_joins_replaces_the_other(self):
    self.table.beat(0, OLD, True)
    self.table.beat(1, OLD, True)
    self.assertTrue(self.table.beat(0, NEW, True, joins=True).is_current)
    self.assertTrue(self.table.beat(0, NEW, True).is_current)
    self.assertFalse(self.table.beat(0, OLD, True).is_current)
    self.assertFalse(self.table.beat(0, THIRD, True).is_current)
    # Another client is not concerned.
    self.assertTrue(self.table.beat(1, OLD, True).is_current)
    self.assertFalse(self.table.beat(1, NEW, True).is_current)

  def test_a_replaced_process_leaves_no_trace_when_it_leaves(self):
    self.table.beat(0, OLD, True)
    self.table.beat(0, NEW, True, joins=True)
    self.assertFalse(self.table.beat(0, OLD, False).is_current)
    self.assertGreater(self.table.ages()[0], 0)

  def test_a_replaced_process_may_join_again(self):
    self.table.beat(0, OLD, True)
    self.table.beat(0, NEW, True, joins=True)
    self.assertTrue(self.table.beat(0, OLD, True, joins=True).is_current)
    self.assertFalse(self.table.beat(0, NEW, True).is_current)

  def test_clients_that_attached_by_name_see_the_same(self):
    other = _table()
    self.assertTrue(other.beat(2, OLD, True).is_current)
    self.assertGreater(self.table.ages()[2], 0)
    self.assertFalse(self.table.beat(2, NEW, True).is_current)

  def test_another_task_has_another_table(self):
    other = _table(task=1)
    other.initialize(3)
    self.table.beat(0, OLD, True)
    self.assertEqual(other.ages(), [NEVER_CAME] * 3)
    self.assertTrue(other.beat(0, NEW, True).is_current)

  def test_another_training_has_another_table(self):
    other = heartbeat_table.HeartbeatTable(
      stores.device(0), resources.new_namespace("other")
    )
    self.assertFalse(other.is_ready())
    other.initialize(2)
    self.table.beat(0, OLD, True)
    self.assertEqual(other.ages(), [NEVER_CAME] * 2)
    other.dismiss("finished")
    self.assertFalse(bool(self.table.dismissed))


class LifeOfTheTaskTest(stores.TestCase):
  def _state(self, table):
    return (
      bool(table.dismissed.numpy()),
      table.outcome.numpy().decode(),
      bool(table.is_open.numpy()),
      table.signature.numpy().decode(),
    )

  def test_it_is_ready_once_the_task_has_made_it(self):
    client = _table()
    self.assertFalse(client.is_ready())
    _table().initialize(3)
    self.assertTrue(client.is_ready())
    self.assertEqual(self._state(client), (False, "", False, ""))

  def test_the_dismissal_has_the_outcome(self):
    table = _table()
    table.initialize(3)
    _table().dismiss("failed: no data")
    self.assertEqual(self._state(table), (True, "failed: no data", False, ""))

  def test_a_task_that_leaves_says_so_and_ends_without_an_outcome(self):
    table = _table()
    table.initialize(3)
    self.assertFalse(_table().beat(0, OLD, True).leaves)
    table.leaves.assign(True)
    self.assertTrue(_table().beat(0, OLD, True).leaves)
    _table().release()
    self.assertEqual(self._state(table), (True, "", False, ""))

  def test_the_outcome_is_there_when_the_task_is_dismissed(self):
    """The task reads the outcome once, as soon as it is dismissed."""
    table = _table()
    table.initialize(3)
    outcomes = []
    assign = table.dismissed.assign

    def look_and_assign(value):
      outcomes.append(table.outcome.numpy())
      return assign(value)

    table.dismissed.assign = look_and_assign
    table.dismiss("finished")
    self.assertEqual(outcomes, [b"finished"])

  def test_a_task_that_begins_anew_forgets_all(self):
    table = _table()
    table.initialize(3)
    table.beat(0, OLD, True)
    table.is_open.assign(True)
    table.signature.assign("rows")
    table.dismiss("finished")
    table.initialize(3)
    self.assertEqual(self._state(table), (False, "", False, ""))
    self.assertEqual(table.ages(), [NEVER_CAME] * 3)
    self.assertTrue(table.beat(0, NEW, True).is_current)


if __name__ == "__main__":
  absltest.main()
