"""Tests for the experiments on real processes: how they judge."""

from absl.testing import absltest
from absl.testing import parameterized

from experiments import claims
from experiments import compute_times
from experiments import programs
from experiments import simulator
from experiments import straggler
from experiments import update_once
from experiments import validation

try:
  import matplotlib
except ImportError:
  matplotlib = None


def _rates(slow_of_all, slow_of_two):
  rates = {
    "all of 3, equal": 2.0,
    "all of 3, one slow": slow_of_all,
    "first 2 of 3, equal": 2.5,
    "first 2 of 3, one slow": slow_of_two,
  }
  # So a step with the slow worker takes 5 * 0.8 times as long.
  return {
    name: dict(steps_per_sec=rate, busy=0.8) for name, rate in rates.items()
  }


class StragglerTest(parameterized.TestCase):
  @parameterized.parameters(
    (0.5, 2.4, claims.HOLDS),
    # The backup did not help.
    (0.5, 1.0, claims.FAILS),
    # The slow worker was not waited for.
    (1.9, 2.4, claims.FAILS),
    # It was waited for longer than it took.
    (0.2, 2.4, claims.FAILS),
  )
  def test_verdict(self, slow_of_all, slow_of_two, expected):
    findings = straggler.find([_rates(slow_of_all, slow_of_two)])
    self.assertEqual(claims.verdict(findings), expected)

  def test_busy_share(self):
    cluster = simulator.Cluster(
      3, compute_times.Lognormal(0.2, 0.01), slowdown={0: 4.0}
    )
    run = simulator.simulate(cluster, simulator.Sync(), 100, records=True)
    shares = [
      straggler.busy_share(run.events, f"worker:{n}", 2.0) for n in range(3)
    ]
    self.assertAlmostEqual(shares[0], 1, delta=0.02)
    self.assertAlmostEqual(shares[1], 0.25, delta=0.02)

  @absltest.skipIf(matplotlib is None, "needs matplotlib")
  def test_draws(self):
    axes = straggler.draw([_rates(0.5, 2.4)]).axes[0]
    self.assertLen(axes.patches, 4)


class UpdateOnceTest(parameterized.TestCase):
  @parameterized.parameters(
    ([3, 3], [1, 1], claims.HOLDS),
    ([3, 3], [1, 3], claims.FAILS),
    ([3, 3], [0, 1], claims.FAILS),
    ([3, 2], [1, 1], claims.FAILS),
  )
  def test_verdict(self, hand_overs, counts, expected):
    findings = update_once.find([dict(hand_overs=hand_overs, updates=counts)])
    self.assertEqual(claims.verdict(findings), expected)


class ValidationTest(parameterized.TestCase):
  @parameterized.parameters(
    (simulator.Sync(),), (simulator.Sync(3),), (simulator.Async(),)
  )
  def test_the_second_half_is_like_the_first(self, rule):
    cluster = simulator.Cluster(
      4,
      compute_times.Lognormal(0.2, 0.2),
      read_bytes=4e6,
      latency=0.004,
      replica_bandwidth=2e8,
      ps_bandwidth=1e9,
      apply_secs=0.01,
    )
    run = simulator.simulate(cluster, rule, 400, records=True)
    rates = validation.compare(run.events, rule, 0)
    self.assertAlmostEqual(rates["predicted"] / rates["measured"], 1, delta=0.1)

  def test_a_run_that_slows_down_is_not_predicted(self):
    cluster = simulator.Cluster(2, compute_times.Lognormal(0.2, 0.1))
    run = simulator.simulate(cluster, simulator.Sync(), 200, records=True)
    middle = max(e.end for e in run.events) / 2
    slow = [
      type(e)(
        e.task,
        e.step,
        e.kind,
        max(e.start, 3 * e.start - 2 * middle),
        max(e.end, 3 * e.end - 2 * middle),
      )
      for e in run.events
    ]
    rates = validation.compare(slow, simulator.Sync(), 0)
    self.assertGreater(rates["predicted"] / rates["measured"], 1.5)


class TrainTest(absltest.TestCase):
  def test_says_what_a_failed_training_printed(self):
    with self.assertRaisesRegex(RuntimeError, "Unknown command line flag"):
      programs.train("cifar10.distributed_train", ["--no_such_flag"], {})


if __name__ == "__main__":
  absltest.main()
