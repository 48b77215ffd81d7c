"""Tests for experiments.timeline: what became of each computation."""

import collections
import json
import pathlib
import subprocess
import sys
import tempfile

from absl.testing import absltest
from absl.testing import parameterized

from experiments import simulator
from experiments import timeline
from experiments.simulator import compute_times
from experiments.simulator import recorded_run

try:
  import matplotlib
except ImportError:
  matplotlib = None

CLUSTER = simulator.Cluster(
  4,
  compute_times.Lognormal(0.2, 0.2),
  slowdown={2: 3.0},
  read_bytes=1e6,
  latency=0.004,
  replica_bandwidth=2e8,
  ps_bandwidth=4e8,
  apply_secs=0.01,
)


def _simulated(rule, num_steps=60):
  return simulator.simulate(CLUSTER, rule, num_steps, records=True)


class TurnsTest(parameterized.TestCase):
  def test_staleness_is_that_of_the_run(self):
    result = _simulated(simulator.Async())
    found = timeline.turns(sorted(result.events, key=lambda e: e.start))
    staleness = [t.staleness for t in found]
    self.assertNotEmpty(set(staleness) - {0})
    # The simulator counts from where a read is decided, half a message later.
    self.assertAlmostEqual(
      sum(staleness) / len(found), result.staleness.mean(), delta=0.2
    )

  def test_refused_work_is_that_of_the_run(self):
    result = _simulated(simulator.Sync(3))
    found = timeline.turns(sorted(result.events, key=lambda e: e.start))
    outcomes = collections.Counter(t.outcome for t in found)
    refused = sum(e.kind == "refused" for e in result.events)
    self.assertGreater(refused, 0)
    self.assertEqual(outcomes[timeline.REFUSED], refused)
    self.assertEqual(outcomes[timeline.STALE], 0)
    self.assertGreaterEqual(outcomes[timeline.FRESH], 3 * 59)

  def test_the_trace_has_everything(self):
    result = _simulated(simulator.Sync(3), 10)
    trace = timeline.to_trace(result.events)["traceEvents"]
    names = [e["args"]["name"] for e in trace if e["ph"] == "M"]
    self.assertEqual(names[0], "chief")
    self.assertLen(names, 5)
    spans = [e for e in trace if e["ph"] == "X"]
    self.assertLen(spans, len(result.events))
    self.assertEqual(min(e["ts"] for e in spans), 0)

  @parameterized.parameters((None, 25), (3, 3))
  def test_window(self, first_step, expected):
    result = _simulated(simulator.Sync(), 60)
    ends = sorted(e.end for e in result.events if e.kind == "apply")
    span = timeline.window(result.events, 10, first_step)
    self.assertEqual(span, (ends[expected - 1], ends[expected + 9]))

  def test_window_beyond_the_end(self):
    result = _simulated(simulator.Sync(), 5)
    with self.assertRaisesRegex(ValueError, "less than the number.*5.*7"):
      timeline.window(result.events, 10, 7)


class ProgramTest(absltest.TestCase):
  def _directory(self):
    directory = tempfile.TemporaryDirectory()
    self.addCleanup(directory.cleanup)
    return directory.name

  def _run(self, *arguments):
    return subprocess.run(
      [sys.executable, "-m", "experiments.timeline", *arguments],
      capture_output=True,
      text=True,
      timeout=300,
      check=False,
    )

  @absltest.skipIf(matplotlib is None, "needs matplotlib")
  def test_writes_a_picture_and_a_trace(self):
    run = pathlib.Path(self._directory())
    recorded_run.write(
      _simulated(simulator.Sync(3)).events, str(run / "timeline")
    )
    output = run / "pictures"
    result = self._run(f"--run={run}", f"--output={output}")
    self.assertEqual(result.returncode, 0, result.stderr)
    self.assertRegex(result.stdout, r"worker:0: .*compute \d+%.*refused")
    self.assertEqual((output / "timeline.png").read_bytes()[1:4], b"PNG")
    trace = json.loads((output / "timeline.json").read_text())
    self.assertNotEmpty(trace["traceEvents"])

  def test_a_run_without_timeline(self):
    run = self._directory()
    result = self._run(f"--run={run}")
    self.assertEqual(result.returncode, 2)
    self.assertEqual(
      result.stderr,
      f"error: {run} must hold timelines, `*.jsonl`. Received: none.\n",
    )


if __name__ == "__main__":
  absltest.main()
