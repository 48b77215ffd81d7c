"""Tests for the race: the event clock, and what is computed from the times."""

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from experiments import race
from experiments.simulator import compute_times
from experiments.support import claims
from experiments.support import event_clock
from experiments.support import race_task
from tf_replicas.replica import model_replica
from tf_replicas.rules import results

NUM_BATCHES, BATCH = 50, 3


def _training(name, workers, **options):
  """A training of two weights that are pulled toward numbers of a batch."""
  contestant = race_task.contestant(name, workers)
  replica = model_replica.Replica(
    variables=[tf.Variable([1.0, 2.0], name="weights")],
    loss_fn=lambda parameters, batch: tf.reduce_mean(
      (parameters[0] - tf.cast(batch, tf.float32)[:, None]) ** 2
    ),
    dataset_fn=lambda *_: None,
  )
  return event_clock.Training(
    contestant.rule(workers, 0.1),
    replica,
    batches_shape=[NUM_BATCHES, BATCH],
    needs=contestant.needs,
    **options,
  )


def _start(training, times, absence=None, seed=0):
  count = training.rule.total_num_replicas
  rng = np.random.default_rng(seed)
  batches = rng.integers(0, 5, [count, NUM_BATCHES, BATCH])
  training.start(
    [tf.constant([1.0, 2.0])],
    batches,
    compute_times.Draws(times, count, seed, {count - 1: 3.0}),
    absence,
  )


def _updates(training, *times):
  updates = []
  for time in times:
    training.advance(time)
    updates.append(training.point().updates)
  training.finish()
  return updates


class EventClockTest(parameterized.TestCase):
  """Two usual workers need 1 s, the last one 3 s, and an exchange 0.1 s."""

  @parameterized.parameters(
    # One update per batch of the slow worker.
    ("sync", 3, [0, 1, 1, 2]),
    # The two usual workers make an update each 1.1 s.
    ("sync, 1 backup", 3, [2, 2, 3, 5]),
    # 2 of each usual worker by 3.0, 3 by 3.3, 5 by 6; and of the slow one.
    ("async", 3, [4, 5, 7, 12]),
    # With a lead of 2 a usual worker waits once it is 2 steps ahead.
    ("bounded staleness 2", 2, [2, 3, 4, 6]),
  )
  def test_updates_follow_from_times(self, name, workers, expected):
    training = _training(name, workers, exchange_secs=0.1)
    _start(training, compute_times.Constant(1.0))
    self.assertEqual(_updates(training, 3.0, 3.15, 3.35, 6.25), expected)
    training.close()

  @parameterized.parameters("sync, 1 backup", "async")
  def test_equal_seeds_give_equal_weights(self, name):
    """Also in a second training with the same traced functions."""
    self._assert_equal_weights(name)

  @pytest.mark.exhaustive
  def test_equal_seeds_give_equal_weights_after_a_switch(self):
    self._assert_equal_weights("sync, then async")

  def _assert_equal_weights(self, name):
    times = compute_times.Lognormal(1.0, 0.5)
    training = _training(name, 3)
    values = []
    for seed in (0, 1, 0):
      _start(training, times, seed=seed)
      training.advance(15.0)
      values.append(training.point().values[0].numpy())
      training.finish()
      if name == "sync, then async":
        training.close()
        training = _training(name, 3)
    training.close()
    np.testing.assert_array_equal(values[0], values[2])
    self.assertGreater(np.abs(values[0] - values[1]).max(), 1e-4)

  @parameterized.parameters(
    # Nothing between 4, when the others wait, and the first batch after 10.
    ("sync", [1, 1, 2]),
    # The others go on.
    ("sync, 1 backup", [3, 9, 11]),
  )
  def test_a_replica_dies_and_returns(self, name, expected):
    training = _training(name, 3)
    absence = event_clock.Absence(
      replica=2, start=3.5, end=9.5, noticed_after=1.0
    )
    _start(training, compute_times.Constant(1.0), absence)
    self.assertEqual(_updates(training, 3.9, 9.4, 12.7)[:2], expected[:2])
    counts = training.rule.counts()
    self.assertGreaterEqual(counts[2].applied + counts[2].refused, 2)
    training.close()

  def test_divergence_is_an_error(self):
    training = _training("async", 2)
    training.rule.set_learning_rate(1e30)
    _start(training, compute_times.Constant(1.0))
    with self.assertRaises(results.NonFiniteGradientError):
      training.advance(3000.0)  # The chief hears of it a little later.
    training.close()

  def test_switches(self):
    training = _training("sync, then async", 2)
    _start(training, compute_times.Constant(1.0))
    # 20 updates of the slow worker's 3 s, then 1 and 1/3 per second.
    self.assertEqual(_updates(training, 60.5, 66.5), [20, 28])
    training.close()


def _cell(rule, condition, workers, times):
  runs = [
    {"seed": s, "seconds": t, "updates": 10, "examples": 100, "refused": 0.0}
    for s, t in enumerate(times)
  ]
  return {
    "rule": rule,
    "condition": condition,
    "workers": workers,
    "rate": 0.1,
    "search": [{"rate": 0.1, "limit": 100.0, "seconds": [10.0, 11.0]}],
    "runs": runs,
    "commit": "abc",
    "date": "2000-01-01",
    "machine": "m",
  }


def _cells(**times):
  """Cells of sync (as long as 10 s) and of async, by the kind of workers."""
  cells = {}
  for condition, values in times.items():
    condition = condition.replace("_", " ")
    for rule, own in (("sync", [10.0, 20.0, 15.0]), ("async", values)):
      cells[rule, condition, 4] = _cell(rule, condition, 4, own)
  return cells


class FirstInARowTest(parameterized.TestCase):
  @parameterized.parameters(1, 2, 3, 4)
  def test_equals_testing_every_point(self, count):
    rng = np.random.default_rng(0)
    for share in (0.3, 0.7, 0.95):
      for _ in range(50):
        good = rng.random(20) < share
        tested = []

        def passes(i, good=good, tested=tested):
          tested.append(i)
          return bool(good[i])

        found = race.first_in_a_row(iter(range(20)), passes, count)
        starts = (i for i in range(21 - count) if good[i : i + count].all())
        self.assertEqual(found, next(starts, None))
        self.assertLen(set(tested), len(tested))

  def test_tests_few_points(self):
    tested = []
    race.first_in_a_row(range(30), lambda i: bool(tested.append(i)), 3)
    self.assertEqual(tested, list(range(2, 30, 3)))


class SpacedTest(absltest.TestCase):
  def test_equal_states_count_once(self):
    points = [
      event_clock.Point(time, 0, examples, [])
      for time, examples in enumerate([0, 0, 100, 255, 300, 300, 511, 600, 900])
    ]
    found = [point.time for point in race.spaced(points, 256)]
    self.assertEqual(found, [0, 4, 7, 8])


class SearchTest(parameterized.TestCase):
  RATES = (1.0, 2.0, 4.0, 8.0, 16.0)

  def _search(self, times):
    """Searches; `times` maps a rate to the time of each of two seeds."""
    self.runs = []

    def run(rate, seed, limit):
      self.runs.append((rate, seed))
      time = times[rate][seed]
      return None if time is None or time > limit else time

    return race.search(run, self.RATES, (0, 1), limit=1000)

  def test_climbs_to_a_rate_whose_neighbors_are_worse(self):
    times = {rate: (rate, rate) for rate in self.RATES}
    times[1.0] = (3.5, 3.5)
    rate, tried = self._search(times)
    self.assertEqual(rate, 2.0)
    self.assertEqual([t["rate"] for t in tried], [1.0, 2.0, 4.0, 8.0])
    # The smallest exceeds 1.5 times the best with the first seed.
    self.assertNotIn((1.0, 1), self.runs)
    self.assertIn((4.0, 1), self.runs)

  def test_one_seed_does_not_decide(self):
    times = dict.fromkeys(self.RATES, (10.0, 10.0))
    times[2.0] = (11.0, 5.0)
    self.assertEqual(self._search(times)[0], 2.0)

  @parameterized.parameters(1.0, 16.0)
  def test_the_best_may_be_the_first_or_the_last(self, best):
    times = {r: (1 + abs(r - best),) * 2 for r in self.RATES}
    self.assertEqual(self._search(times)[0], best)

  def test_rates_without_success_are_left(self):
    times = dict.fromkeys(self.RATES, (None, 1.0)) | {16.0: (700.0, 800.0)}
    rate, tried = self._search(times)
    self.assertEqual(rate, 16.0)
    self.assertEqual(tried[0]["seconds"], [None])

  def test_nothing_is_successful(self):
    rate, tried = self._search(dict.fromkeys(self.RATES, (3.0, None)))
    self.assertIsNone(rate)
    self.assertLen(tried, 5)


class FindTest(parameterized.TestCase):
  @parameterized.parameters(
    ([11.0, 21.0, 16.0], [5.0, 9.0, 8.0], claims.HOLDS),
    # Async is faster with even workers, too.
    ([9.0, 19.0, 14.0], [5.0, 9.0, 8.0], claims.FAILS),
    # It is so with some seeds.
    ([9.0, 21.0, 16.0], [5.0, 9.0, 8.0], claims.UNCLEAR),
    # Async is slower with uneven workers.
    ([11.0, 21.0, 16.0], [15.0, 29.0, 28.0], claims.FAILS),
  )
  def test_verdict_on_the_advice(self, even, slow, expected):
    findings = race.find(_cells(even=even, one_slow=slow))
    self.assertEqual(claims.verdict(findings), expected)

  def test_a_missed_precision_counts_with_the_longest_time(self):
    cells = _cells(even=[11.0, None, 16.0])
    (finding,) = race.find(cells)
    self.assertEqual(finding.values[1], race_task.MAX_SECS / 20.0)
    self.assertIn("2 of 3 seeds", race.table(cells))

  def test_short_table(self):
    cells = _cells(
      even=[5.0, 10.0, 7.6],
      stragglers=[9.0, 22.0, 14.0],
      one_slow=[1, 2.1, 1.5],
    )
    _, _, _, _, *rows = race.short_table(cells)
    self.assertStartsWith(rows[0], "| even | 4 | 15 ± 12 |  | 0.50 [0.")
    is_advice = [row.split(" | ")[5] for row in rows]
    self.assertEqual(is_advice, ["false", "not decided", "true"])
    fastest = [row.split(" | ")[6] for row in rows]
    self.assertEqual(fastest[0], "`async` |")
    self.assertIn("`sync`", fastest[1])

  def test_nothing_measured_is_no_verdict(self):
    self.assertIn("**not measured**", race.table({}))

  def test_fastest_names_those_that_may_be_as_fast(self):
    cells = _cells(even=[9.0, 22.0, 14.0])
    names = race.fastest(cells, "even", 4, ["sync", "async"])
    self.assertCountEqual(names, ["sync", "async"])
    cells = _cells(even=[5.0, 10.0, 7.4])
    names = race.fastest(cells, "even", 4, ["sync", "async"])
    self.assertEqual(names, ["async"])

  def test_ratio_is_paired(self):
    cells = _cells(even=[5.0, 10.0, 7.5])
    ratio = race.ratio(cells["async", "even", 4], cells["sync", "even", 4])
    np.testing.assert_allclose(ratio, [0.5] * 3, rtol=1e-6)


if __name__ == "__main__":
  absltest.main()
