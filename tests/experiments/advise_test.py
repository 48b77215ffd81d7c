"""Tests for the advisor, on simulated runs whose best change is known."""

import tempfile

from absl.testing import absltest
from absl.testing import parameterized

from experiments import advise
from experiments import simulator
from experiments.simulator import compute_times
from experiments.simulator import recorded_run

EVEN = compute_times.Lognormal(1.0, 0.05)


def run(rule=None, num_steps=200, **fields):
  fields = {"num_replicas": 4, "compute": EVEN, "read_bytes": 1e7} | fields
  cluster = simulator.Cluster(**fields)
  return cluster, simulator.simulate(
    cluster, rule or simulator.Sync(), num_steps, records=True
  )


def advice(result, rule=None):
  fit = recorded_run.fit(result.events, read_bytes=1e7)
  found = advise.advise(fit.cluster, rule or simulator.Sync())
  return {each.option.what: each for each in found}


class AdviseTest(parameterized.TestCase):
  @parameterized.parameters(
    simulator.Sync(), simulator.Sync(3), simulator.Async()
  )
  def test_finds_the_rule(self, rule):
    self.assertEqual(advise.recorded_rule(run(rule)[1].events), rule)

  def test_a_slow_worker_asks_for_a_backup(self):
    _, result = run(slowdown={3: 5.0})
    found = advice(result)
    backup = found["--update=sync --replicas_to_aggregate=3"]
    _, then = run(simulator.Sync(3), slowdown={3: 5.0})
    gain = then.throughput / result.throughput
    self.assertGreater(gain, 2.0)
    self.assertAlmostEqual(backup.gain / gain, 1.0, delta=0.05)
    self.assertEqual(
      max(found.values(), key=lambda a: a.gain).option.kind, "rule"
    )

  def test_a_busy_ps_asks_for_more_ps_tasks(self):
    _, result = run(ps_bandwidth=2e7)
    more = advice(result)["2 times as many PS tasks, `partitioned` placement"]
    _, then = run(ps_bandwidth=2e7, num_ps=2)
    gain = then.throughput / result.throughput
    self.assertGreater(gain, 1.4)
    self.assertAlmostEqual(more.gain / gain, 1.0, delta=0.05)

  def test_nothing_to_gain(self):
    _, result = run(compute=compute_times.Constant(1.0), ps_bandwidth=1e12)
    lines = advise.report(result.events, 1e7)
    self.assertIn("change nothing", "\n".join(lines))

  def test_reads_a_stored_run(self):
    _, result = run(slowdown={3: 5.0})
    with tempfile.TemporaryDirectory() as directory:
      recorded_run.write(result.events, directory)
      lines = advise.report(recorded_run.read(directory), 1e7)
    ratio = float(lines[0].split(" makes ")[1].split()[0])
    self.assertAlmostEqual(ratio, 1.0, delta=0.05)
    self.assertIn("Largest gain: --update=async", "\n".join(lines))

  def test_no_updates(self):
    with self.assertRaisesRegex(ValueError, "must have updates"):
      advise.report([], 1.0)


if __name__ == "__main__":
  absltest.main()
