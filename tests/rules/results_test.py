"""Tests for rules.results, and for how the ledger is read into it."""

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from tf_replicas.rules import results
from tf_replicas.rules.sync import ledger


class NonFiniteGradientErrorTest(absltest.TestCase):
  def test_names_the_replica_and_the_step(self):
    error = results.NonFiniteGradientError(2, 17)
    self.assertEqual((error.replica, error.global_step), (2, 17))
    self.assertRegex(str(error), "^replica 2 .*not finite.* step 17$")

  def test_uses_the_name_of_the_replica_if_given(self):
    error = results.NonFiniteGradientError(2, 17, "worker:2")
    self.assertStartsWith(str(error), "worker:2 computed")


class CountsTest(absltest.TestCase):
  def test_refused_is_surplus_plus_late(self):
    counts = results.Counts(applied=100, surplus=3, late=(4, 0, 5))
    self.assertEqual(counts.refused, 12)

  def test_from_a_ledger_are_those_of_each_replica(self):
    state = ledger.new_ledger(2, 1)
    columns = state.counts.shape[1]
    rows = np.arange(2 * columns).reshape(2, columns)
    state = state._replace(counts=rows, held_up=np.array([0.5, 0.25]))
    first, second = ledger.counts_from_ledger(state)
    self.assertEqual((first.applied, first.surplus), (0, 1))
    self.assertEqual(first.late, tuple(range(2, columns - 1)))
    self.assertEqual(first.missed, columns - 1)
    self.assertEqual(first.straggler_wait_secs, 0.5)
    self.assertEqual((second.applied, second.surplus), (columns, columns + 1))
    self.assertEqual(second.late, tuple(range(columns + 2, 2 * columns - 1)))
    self.assertEqual(second.straggler_wait_secs, 0.25)
    self.assertEqual(second.staleness, ())

  def test_totals_are_sums_of_each_field(self):
    sum_of_both = results.total(
      [
        results.Counts(1, 10, (1, 2), straggler_wait_secs=0.5, missed=2),
        results.Counts(
          2, 20, (4, 5, 6), (7, 8), straggler_wait_secs=0.25, missed=1
        ),
      ]
    )
    self.assertEqual(
      sum_of_both,
      results.Counts(
        3, 30, (5, 7, 6), (7, 8), straggler_wait_secs=0.75, missed=3
      ),
    )

  def test_the_total_of_one_is_itself(self):
    counts = results.Counts(1, 2, (3,), (4, 5), 6.0)
    self.assertEqual(results.total([counts]), counts)


class SummaryTest(parameterized.TestCase):
  def test_the_mean_is_over_gradients(self):
    # 6 fresh, 2 one update old, 2 three updates old: (2 + 6) / 10.
    mean, _, largest = results.summary([6, 2, 0, 2])
    self.assertAlmostEqual(mean, 0.8)
    self.assertEqual(largest, 3)

  @parameterized.parameters(
    ([95, 5], 0),  # 95% are exactly enough.
    ([94, 6], 1),
    ([90, 4, 1, 5], 2),
    ([0, 0, 7], 2),
    ([1], 0),
  )
  def test_the_bound_is_the_smallest_for_95_percent(self, counts, bound):
    self.assertEqual(results.summary(counts)[1], bound)


if __name__ == "__main__":
  absltest.main()
