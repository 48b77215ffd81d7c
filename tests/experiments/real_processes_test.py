"""Tests for the experiments on real processes: how they judge."""

import dataclasses

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from experiments import advise
from experiments import simulator
from experiments.claims import advice
from experiments.claims import backup_workers
from experiments.claims import in_graph_or_between_graph
from experiments.claims import one_node_feeds
from experiments.claims import sharding
from experiments.claims import smooth_or_fast
from experiments.claims import staleness_by_layer
from experiments.claims import straggler
from experiments.claims import update_once
from experiments.claims import validation
from experiments.simulator import compute_times
from experiments.simulator import recorded_run
from experiments.support import claims
from experiments.support import programs
from experiments.support import traffic

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

  def test_a_backup_alone_is_judged_too(self):
    few = {n: row for n, row in _rates(0.5, 1.0).items() if "first" in n}
    (finding,) = straggler.find([few])
    self.assertEqual(finding.verdict, claims.FAILS)

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


def _watched(values, num_updates, *, applied=None):
  return dict(
    num_updates=num_updates,
    applied=applied or [num_updates] * 3,
    num_reads=100 * num_updates,
    mixed=0,
    values=values,
    secs=list(range(len(values))),
  )


class UpdateOnceTest(parameterized.TestCase):
  @parameterized.parameters(
    ([0, -111, -222], None, claims.HOLDS),
    # A gradient was applied by itself.
    ([0, -1, -111, -222], None, claims.FAILS),
    # A gradient is missing.
    ([0, -111, -221], None, claims.FAILS),
    # The variable changed more often than there were updates.
    ([0, -111, -222, -333], None, claims.FAILS),
    # The library's own counts decide nothing.
    ([0, -111, -222], [2, 2, 1], claims.HOLDS),
  )
  def test_verdict(self, values, applied, expected):
    findings = update_once.find(
      [
        {
          "sync": _watched(values, 2, applied=applied),
          "async": _watched([0, -1, -101, -111], 3),
        }
      ]
    )
    self.assertEqual(claims.verdict(findings), expected)


class ValidationTest(absltest.TestCase):
  def test_predicts_more_workers(self):
    run = simulator.simulate(_cluster(4), simulator.Sync(), 200, records=True)
    found = recorded_run.fit(run.events, read_bytes=4e6).cluster
    other = simulator.simulate(_cluster(8), simulator.Sync(), 1000, seed=1)
    setting = validation.Setting(8, simulator.Sync())
    self.assertAlmostEqual(
      validation.predict(found, setting, 2) * other.step_secs[100:].mean(),
      1,
      delta=0.1,
    )

  def test_predicts_faster_links(self):
    slow = _cluster(4)
    run = simulator.simulate(slow, simulator.Sync(), 200, records=True)
    found = recorded_run.fit(run.events, read_bytes=4e6).cluster
    fast = dataclasses.replace(
      slow,
      replica_bandwidth=2 * slow.replica_bandwidth,
      ps_bandwidth=2 * slow.ps_bandwidth,
    )
    other = simulator.simulate(fast, simulator.Sync(), 1000, seed=1)
    setting = validation.Setting(4, simulator.Sync(), 2.0)
    self.assertAlmostEqual(
      validation.predict(found, setting, 2) * other.step_secs[100:].mean(),
      1,
      delta=0.1,
    )

  def test_the_fitted_training_is_not_judged(self):
    row = dict(measured=1.0, predicted=1.5)
    rows = {validation.FITTED: row}
    findings = validation.find([{"loopback": rows}])
    self.assertEqual(claims.verdict(findings), claims.UNCLEAR)
    rows["other"] = row
    findings = validation.find([{"loopback": rows}])
    self.assertEqual(claims.verdict(findings), claims.FAILS)

  def test_table(self):
    rows = {
      validation.FITTED: dict(measured=2.0, predicted=2.0),
      "4 workers, sync": dict(measured=2.0, predicted=2.1),
      "8 workers, sync": dict(measured=2.0, predicted=3.0),
    }
    report = {"date": "2000-01-01", "commit": "abc"}
    report["measurements"] = [{"loopback": rows}]
    first, _, _, _, fitted, good, bad = validation.table(report)
    self.assertIn("loopback: 1 of 2 within 10%", first)
    self.assertIn("| 2 | 1 | (fitted) | 2.0", fitted)
    self.assertStartsWith(
      good, "| loopback | 4 workers, sync | 2 | 1.05 | yes |"
    )
    self.assertStartsWith(bad, "| loopback | 8 workers, sync | 2 | 1.5 | no |")

  def test_step_rate(self):
    events = [
      simulator.Event("chief", n, "apply", n / 4, n / 4 + 0.1)
      for n in range(20)
    ]
    self.assertAlmostEqual(validation.step_rate(events), 4.0)


class AdviceTest(parameterized.TestCase):
  @parameterized.parameters(
    (1.2, claims.HOLDS), (1.4, claims.FAILS), (1.0, claims.FAILS)
  )
  def test_verdict(self, gain, expected):
    row = {"change": "--update=async", "predicted": 1.2, "measured": gain}
    findings = advice.find([{"links": {"rule": row}}])
    self.assertEqual(claims.verdict(findings), expected)

  def test_what_is_not_recommended_is_counted_apart(self):
    gains = {"rule": (1.2, 1.2), "backups": (1.3, 2.0), "ps": (1.0, 2.0)}
    rows = {
      kind: {"change": kind, "predicted": predicted, "measured": measured}
      for kind, (predicted, measured) in gains.items()
    }
    recommended, others, *judged = advice.find([{"links": rows}])
    self.assertIn("(1 of 2)", recommended.what)
    self.assertEqual(others.values, [0.0])
    self.assertEqual([bool(f.bounds) for f in judged], [True, True, False])

  def test_the_best_of_each_kind_is_followed(self):
    cluster = _cluster(4)
    options = [
      advise.Option("rule", "first", cluster, simulator.Async()),
      advise.Option("backups", "second", cluster, simulator.Sync(3)),
      advise.Option("rule", "third", cluster, simulator.Sync()),
    ]
    best = advice.best_of_each_kind(
      [advise.Advice(option, 1.0, 1.0) for option in options]
    )
    self.assertEqual(
      {kind: each.option.what for kind, each in best.items()},
      {"rule": "first", "backups": "second"},
    )

  def test_counts_contributions(self):
    events = [
      simulator.Event("chief", n, "apply", n / 4, n / 4 + 0.1)
      for n in range(20)
    ]
    for rule, count in (
      (simulator.Async(), 1),
      (simulator.Sync(3), 3),
      (simulator.Sync(), 4),
    ):
      self.assertAlmostEqual(advice.throughput(events, rule), 4.0 * count)


class StalenessByLayerTest(absltest.TestCase):
  def test_numbers(self):
    findings = staleness_by_layer.find(
      [{"tf1": [7.0, 5.0, 3.5], "ours": [7.0, 7.0, 7.0]}]
    )
    self.assertEqual([f.values for f in findings], [[1.0], [0.5], [1.0], [1.0]])

  def test_the_ratio_follows_from_the_times_of_the_layers(self):
    self.assertAlmostEqual(staleness_by_layer.BY_TIMES, (18 + 2) / (18 + 36))


class BackupWorkersTest(absltest.TestCase):
  def _measured(self, *secs):
    return {
      "straggler_secs": [0.1, 0.1, 0.1, 0.5],
      "steps": {
        str(b): dict(measured=s, simulated=s)
        for b, s in zip((0, 2), secs, strict=True)
      },
      "simulated_speedups": {"6": 0.9},
    }

  def test_verdict(self):
    for secs, expected in (
      ((1.0, 0.5), claims.HOLDS),
      # Shorter, but by less than the share of the machines.
      ((1.0, 0.9), claims.FAILS),
      ((1.0, 1.1), claims.FAILS),
    ):
      findings = backup_workers.find([self._measured(*secs)])
      self.assertEqual(claims.verdict(findings), expected)

  def test_speedup_counts_the_backups(self):
    speedups = backup_workers.speedups(self._measured(1.0, 0.5), "measured")
    self.assertEqual(speedups, {0: 1.0, 2: 2 * 6 / 8})


def _cluster(num_replicas):
  return simulator.Cluster(
    num_replicas,
    compute_times.Lognormal(0.2, 0.2),
    read_bytes=4e6,
    latency=0.004,
    replica_bandwidth=2e8,
    ps_bandwidth=4e8,
    apply_secs=0.01,
  )


class TrainTest(absltest.TestCase):
  def test_says_what_a_failed_training_printed(self):
    with self.assertRaisesRegex(RuntimeError, "Unknown command line flag"):
      programs.train("cifar10.distributed_train", ["--no_such_flag"], {})


def _losses(deviation, secs, *, batches=1, seed=0):
  """Losses of updates of `batches` batches of 16, around a flat line."""
  rows = 3200 // batches
  noise = np.random.default_rng(seed).standard_normal(rows)
  size = deviation / batches**0.5
  return [
    [i * secs, 16 * batches * (i + 1), 2 + size * float(noise[i])]
    for i in range(rows)
  ]


def _curves(rough, slow_secs):
  return {
    "sync, 2 workers, equal": _losses(0.1, 1.0, batches=2),
    "async, 2 workers, equal": _losses(rough, 0.5, seed=1),
    "sync, 2 workers, one slow": _losses(0.1, slow_secs, batches=2),
    "async, 2 workers, one slow": _losses(rough, 0.5, seed=1),
  }


class SmoothOrFastTest(parameterized.TestCase):
  def test_equal_workers_alone_are_judged_too(self):
    few = {n: rows for n, rows in _curves(0.08, 2.0).items() if "equal" in n}
    findings = smooth_or_fast.find([few])
    self.assertEqual(claims.verdict(findings), claims.FAILS)
    self.assertFalse([f for f in findings if "slower" in f.what])

  def test_points_are_whole_rows(self):
    rows = [[0.0, 64, 1.0], [1.0, 96, 2.0], [2.0, 160, 4.0], [3.0, 320, 6.0]]
    self.assertEqual(
      smooth_or_fast.points(rows),
      [((64 * 1 + 32 * 2 + 64 * 4) / 160, 160), (6.0, 160)],
    )

  def _scatter(self, means, examples=smooth_or_fast.POINT_EXAMPLES):
    return smooth_or_fast.scatter([(mean, examples) for mean in means])

  def test_scatter_is_not_of_the_trend(self):
    line = np.linspace(2, 1, 1000)
    self.assertLess(self._scatter(line), 0.001)
    noise = 0.3 * np.random.default_rng(0).standard_normal(1000)
    self.assertAlmostEqual(self._scatter(line + noise), 0.3, delta=0.03)

  def test_larger_points_are_not_smoother(self):
    noise = np.random.default_rng(0).standard_normal(1000)
    one = self._scatter(noise)
    four = self._scatter(noise / 2, 4 * smooth_or_fast.POINT_EXAMPLES)
    self.assertAlmostEqual(four / one, 1.0)

  def test_jumps_count(self):
    calm = np.zeros(100)
    calm[::10] = 1.0
    self.assertGreater(self._scatter(calm), 0.25)

  def test_rate(self):
    self.assertAlmostEqual(smooth_or_fast.rate(_losses(0.1, 0.5)), 32)

  @parameterized.parameters(
    # Twice as rough, and faster.
    (0.2, 2.0, claims.HOLDS),
    # Less rough than the other.
    (0.08, 2.0, claims.FAILS),
    # As fast as the other.
    (0.2, 1.0, claims.FAILS),
  )
  def test_verdict(self, rough, slow_secs, expected):
    findings = smooth_or_fast.find([_curves(rough, slow_secs)])
    self.assertEqual(claims.verdict(findings), expected)

  @absltest.skipIf(matplotlib is None, "needs matplotlib")
  def test_draws(self):
    panels = smooth_or_fast.draw([_curves(0.14, 2.0)]).axes
    self.assertEqual([axes.get_xlabel() for axes in panels], ["examples"] * 3)


def _shared(*, cut=0.5, in_total=1.0):
  whole = sharding.LARGEST / traffic.PARAMETER_BYTES
  must_be = 2 * sharding.WORKERS * traffic.PARAMETER_BYTES * in_total
  shares = {
    "1 PS": [1],
    "2 PS, greedy": [whole, 1 - whole],
    "2 PS, partitioned": [cut, 1 - cut],
    "4 PS, greedy": [whole, 1 - whole, 0, 0],
    "4 PS, partitioned": [0.25] * 4,
  }
  measured = {
    name: dict(steps_per_sec=9.0, ps_bytes=[must_be * share for share in row])
    for name, row in shares.items()
  }
  return {**measured, "one process": dict(steps_per_sec=12.0, ps_bytes=[])}


class ShardingTest(parameterized.TestCase):
  @parameterized.parameters(
    ({}, claims.HOLDS),
    # One of two has more than its share.
    ({"cut": 0.6}, claims.FAILS),
    # Something travelled that should not.
    ({"in_total": 1.2}, claims.FAILS),
  )
  def test_verdict(self, how, expected):
    findings = sharding.find([_shared(**how)])
    self.assertEqual(claims.verdict(findings), expected)

  def test_less_is_judged_too(self):
    few = {n: row for n, row in _shared().items() if "4 PS" not in n}
    findings = sharding.find([few])
    self.assertEqual(claims.verdict(findings), claims.HOLDS)
    self.assertFalse([f for f in findings if "4 PS" in f.what])

  @absltest.skipIf(matplotlib is None, "needs matplotlib")
  def test_draws(self):
    left, _ = sharding.draw([_shared()]).axes
    self.assertLen(left.get_yticklabels(), 6)
    self.assertLen(left.get_legend().get_texts(), 4)


def _clients(*, num_bytes=1000, cpu=0.01, rate=10.0):
  client = dict(
    start_secs=6.0,
    steps_per_sec=rate,
    client_cpu_secs=cpu,
    client_bytes=num_bytes,
    cpu_secs=0.2,
  )
  return {
    "in_graph": dict.fromkeys(("1", "2", "4"), client),
    "between_graph": dict.fromkeys(
      ("1", "2", "4"), {**client, "steps_per_sec": 10.0}
    ),
  }


class InGraphOrBetweenGraphTest(parameterized.TestCase):
  @parameterized.parameters(
    ({}, claims.HOLDS),
    # The parameters pass through the client.
    ({"num_bytes": 4e6}, claims.FAILS),
    ({"cpu": 0.1}, claims.FAILS),
    ({"rate": 5.0}, claims.FAILS),
  )
  def test_verdict(self, how, expected):
    findings = in_graph_or_between_graph.find([_clients(**how)])
    self.assertEqual(claims.verdict(findings), expected)

  def test_one_number_of_workers_is_judged_too(self):
    few = {name: {"2": rows["2"]} for name, rows in _clients(cpu=0.1).items()}
    findings = in_graph_or_between_graph.find([few])
    self.assertEqual(claims.verdict(findings), claims.FAILS)
    self.assertIn("2 workers", findings[0].what)

  @absltest.skipIf(matplotlib is None, "needs matplotlib")
  def test_draws(self):
    panels = in_graph_or_between_graph.draw([_clients()]).axes
    self.assertLen(panels, 3)


class OneNodeFeedsTest(parameterized.TestCase):
  @parameterized.parameters(
    ({}, claims.HOLDS),
    # It is as fast.
    ({"rate": 10.0}, claims.FAILS),
    # The bytes follow from where the batches are made.
    ({"fed": 1000}, claims.HOLDS),
  )
  def test_verdict(self, changed, expected):
    how = {"rate": 5.0, "fed": 4 * one_node_feeds.BATCH_BYTES, "own": 1000}
    how |= changed
    found = {
      "client": dict(steps_per_sec=how["rate"], client_bytes=how["fed"]),
      "workers": dict(steps_per_sec=10.0, client_bytes=how["own"]),
    }
    findings = one_node_feeds.find([{"4": found}])
    self.assertEqual(claims.verdict(findings), expected)


if __name__ == "__main__":
  absltest.main()
