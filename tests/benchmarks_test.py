"""Tests for what the benchmarks share: ratios, stored results."""

import json
import math
import pathlib
import tempfile

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from benchmarks import bandwidth_kinds
from benchmarks import ratios
from benchmarks import stored
from experiments import trainings
from experiments.support import layer_task


class RatiosTest(absltest.TestCase):
  def test_compares_within_rounds(self):
    rounds = [{"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 4.0}, {"a": 9.0, "b": 9.0}]
    self.assertEqual(
      ratios.compare(rounds, [("a", "b")]),
      {"a / b": {"median": 0.75, "min": 0.5, "max": 1.0}},
    )

  def test_ratio_of_two_means(self):
    """With equal variances of n numbers each, there are 2 n - 2 degrees."""
    values = [math.exp(x) for x in (0.1, 0.2, 0.3, 0.4)]
    others = [math.exp(x) for x in (0.0, 0.1, 0.2, 0.3)]
    # The variance is 1/60; the quantile with 6 degrees of freedom is 2.447.
    half = 2.447 * math.sqrt(2 / 60 / 4)
    np.testing.assert_allclose(
      ratios.of_means(values, others),
      np.exp([0.1, 0.1 - half, 0.1 + half]),
      rtol=1e-12,
    )
    self.assertEqual(ratios.of_means([2.0, 2.0], [1.0, 1.0])[1:], (2.0, 2.0))


class LeastTimeTest(parameterized.TestCase):
  @parameterized.parameters(
    (100, 2.0),  # Four times 781,250 floats take 1 s...
    (10_000, 4.0),  # ... or 10 ms; computing takes 0.5 s.
  )
  def test_the_longer_of_computing_and_transferring(self, mbit_per_sec, share):
    rounds = [
      {
        bandwidth_kinds.COMPUTING: {"images_per_sec": 40.0},
        "between-graph": {"images_per_sec": 10.0},
      }
    ]
    network = bandwidth_kinds.Network(parameters=781_250, batch=10)
    (found,) = bandwidth_kinds.shares_of_least_time(
      rounds, "between-graph", network, mbit_per_sec
    )
    self.assertAlmostEqual(found, share)


class StoredTest(absltest.TestCase):
  def test_has_the_circumstances(self):
    with tempfile.TemporaryDirectory() as directory:
      path = pathlib.Path(directory, "results.json")
      stored.write(str(path), {"rate": 2.5})
      found = json.loads(path.read_text())
    self.assertEqual(found["rate"], 2.5)
    self.assertContainsSubset(
      {"command", "date", "machine", "commit", "tensorflow"}, found
    )

  def test_without_a_file(self):
    stored.write(None, {"rate": 2.5})


class TrainingsTest(absltest.TestCase):
  def test_reads_what_the_evaluation_printed(self):
    text = (
      "evaluating /tmp/run/model.ckpt-1563 with moving averages\n"
      "2026-11-26 14:00:00.1: precision @ 1 = 0.7628 [10000 examples]\n"
      "evaluating /tmp/run/model.ckpt-3126 with moving averages\n"
      "2026-11-26 14:01:00.1: precision @ 1 = 0.7879 [10000 examples]\n"
    )
    self.assertEqual(trainings.measured(text), [(1563, 0.7628), (3126, 0.7879)])


class StalenessTest(absltest.TestCase):
  def test_of_updates_between_two_moments(self):
    # Update k uses version k - 2 in one layer, and version k in the other.
    def weights(count):
      return [
        [count, sum(k - 2 for k in range(count))],
        [count, sum(range(count))],
      ]

    begin, end = (np.array(weights(n), float) for n in (10, 30))
    self.assertEqual(layer_task.staleness(begin, end), [2.0, 0.0])


if __name__ == "__main__":
  absltest.main()
