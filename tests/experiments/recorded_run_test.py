"""Tests for recorded runs: what was simulated is found again."""

import dataclasses
import pathlib
import tempfile

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from experiments import simulator
from experiments.simulator import compute_times
from experiments.simulator import recorded_run

TRUE = {
  "num_replicas": 4,
  "compute": compute_times.Lognormal(0.2, 0.2),
  "slowdown": {2: 3.0},
  "read_bytes": 1e6,
  "latency": 0.004,
  "apply_secs": 0.03,
}
LINE = '{"task": "a", "step": 1, "kind": "wait", "start": 1, "end": 2}\n'


def _turns(*spans, worker=0, count=5, secs=2.0):
  """Events of a worker that does the same in every turn of `secs` seconds."""
  return [
    simulator.Event(
      f"worker:{worker}", turn, kind, start + secs * turn, end + secs * turn
    )
    for turn in range(count)
    for kind, start, end in spans
  ]


class RoundTripTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("sync", simulator.Sync(), 2e8, 4e7),
    ("backup", simulator.Sync(3), 2e8, 4e7),
    ("links_of_the_replicas", simulator.Sync(3), 2e7, 4e8),
  )
  def test_finds_the_cluster(self, rule, replica_bandwidth, ps_bandwidth):
    true = simulator.Cluster(
      **TRUE, replica_bandwidth=replica_bandwidth, ps_bandwidth=ps_bandwidth
    )
    run = simulator.simulate(true, rule, 400, records=True)
    with tempfile.TemporaryDirectory() as directory:
      recorded_run.write(run.events, directory)
      events = recorded_run.read(directory)
    self.assertCountEqual(events, run.events)
    fit = recorded_run.fit(events, read_bytes=1e6)
    found = fit.cluster
    self.assertEqual(found.num_replicas, 4)
    self.assertAlmostEqual(found.latency, 0.004, places=9)
    self.assertAlmostEqual(found.apply_secs, 0.03, places=9)
    self.assertAlmostEqual(found.slowdown[2], 3.0, delta=0.2)
    self.assertLess(fit.read_error, 0.02)
    compute = np.array(found.compute.secs)
    self.assertAlmostEqual(np.log(compute).std(), 0.2, delta=0.02)
    self.assertAlmostEqual(np.median(compute), 0.2, delta=0.02)
    # Who always reads beside the same number of others cannot tell more.
    alone = min(replica_bandwidth, ps_bandwidth)
    shared = min(replica_bandwidth, ps_bandwidth / 4)
    np.testing.assert_allclose(
      min(found.replica_bandwidth, found.ps_bandwidth / 4), shared, rtol=0.02
    )
    self.assertLessEqual(found.replica_bandwidth, alone * 1.02)

  @parameterized.parameters(
    simulator.Sync(),
    simulator.Sync(3),
    simulator.Async(),
    simulator.Async(max_lead=2),
  )
  def test_the_found_cluster_is_as_fast(self, rule):
    true = simulator.Cluster(**TRUE, replica_bandwidth=5e7, ps_bandwidth=1e8)
    run = simulator.simulate(true, rule, 400, records=True)
    found = recorded_run.fit(run.events, read_bytes=1e6).cluster
    again = simulator.simulate(found, rule, 400, seed=1)
    np.testing.assert_allclose(
      again.step_ends[-1], run.step_ends[-1], rtol=0.04
    )

  def test_events_cover_the_time_of_a_replica(self):
    true = simulator.Cluster(**TRUE, ps_bandwidth=1e8)
    run = simulator.simulate(true, simulator.Sync(), 50, records=True)
    own = [event for event in run.events if event.task == "worker:1"]
    own.sort(key=lambda event: event.start)
    for one, other in zip(own[:-1], own[1:], strict=True):
      self.assertAlmostEqual(one.end, other.start)

  def test_what_lies_between_the_events_counts_as_computing(self):
    events = _turns(
      ("read", 0.0, 0.25),
      ("compute", 0.3, 1.0),
      ("hand_over", 1.1, 1.5),
      ("wait", 1.5, 1.9),
    )
    found = recorded_run.fit(events, read_bytes=1.0).cluster
    np.testing.assert_allclose(found.compute.secs, 2 - 0.25 - 0.4 - 0.4)
    self.assertAlmostEqual(found.replica_bandwidth, 4.0)

  def test_a_read_that_begins_before_the_last_transfer_has_ended(self):
    events = _turns(
      ("read", 0.0, 0.5),
      ("compute", 0.5, 1.5),
      ("hand_over", 1.5, 2.1),
      ("apply", 2.0, 2.1),
    )
    found = recorded_run.fit(events, read_bytes=1.0).cluster
    np.testing.assert_allclose(found.compute.secs, 1.0)

  def test_gradients_that_were_sent_and_then_refused(self):
    events = _turns(
      ("read", 0.0, 0.5), ("compute", 0.5, 1.5), ("hand_over", 1.5, 2.0)
    )
    events[-1] = dataclasses.replace(events[-1], kind="refused")
    found = recorded_run.fit(events, read_bytes=1.0).cluster
    self.assertEqual(found.latency, 0.0)
    self.assertAlmostEqual(found.replica_bandwidth, 2.0)

  def test_senders_that_share_the_link_of_the_ps_show_it(self):
    # All reads are beside another, so that only hand-overs tell whose link is
    # slow. Each transfer alone would take 1 s.
    events = [
      event
      for worker, (begin, end) in enumerate(((3.0, 4.6), (3.4, 5.0)))
      for event in _turns(
        ("read", 0.0, 2.0),
        ("compute", 2.0, begin),
        ("hand_over", begin, end),
        ("wait", end, 6.0),
        worker=worker,
        count=8,
        secs=6.0,
      )
    ]
    found = recorded_run.fit(events, read_bytes=1.0).cluster
    self.assertAlmostEqual(found.ps_bandwidth, 1.0)
    self.assertAlmostEqual(found.replica_bandwidth, 1.0)


class OtherSizesTest(parameterized.TestCase):
  """What 2 replicas show predicts clusters of other sizes."""

  def _ratio(self, true, workers, rule=None, **known):
    """Returns predicted / true updates per second with `workers` replicas."""
    run = simulator.simulate(true, simulator.Sync(), 200, records=True)
    found = recorded_run.fit(run.events, read_bytes=1e7, **known).cluster
    compute = compute_times.Empirical(found.compute.secs)
    rates = []
    for cluster in (true, dataclasses.replace(found, compute=compute)):
      other = dataclasses.replace(cluster, num_replicas=workers, slowdown={})
      result = simulator.simulate(other, rule or simulator.Sync(), 100, seed=9)
      rates.append(1 / result.step_secs.mean())
    return rates[1] / rates[0]

  def _cluster(self, replica_bandwidth, ps_bandwidth):
    return simulator.Cluster(
      2,
      compute_times.Lognormal(1.0, 0.2),
      read_bytes=1e7,
      latency=0.001,
      replica_bandwidth=replica_bandwidth,
      ps_bandwidth=ps_bandwidth,
      apply_secs=0.01,
    )

  @parameterized.product(
    workers=(2, 4, 16, 64),
    links=((5e7, 1e10), (1e9, 5e7), (5e7, 7e7)),
  )
  def test_synchronous(self, workers, links):
    self.assertAlmostEqual(
      self._ratio(self._cluster(*links), workers), 1.0, delta=0.1
    )

  @parameterized.parameters(simulator.Async(), simulator.Sync(6))
  def test_another_rule(self, rule):
    true = self._cluster(1e9, 5e7)
    self.assertAlmostEqual(self._ratio(true, 8, rule), 1.0, delta=0.1)

  def test_what_two_replicas_cannot_show_must_be_told(self):
    # 64 links carry more than the PS, and 2 do not.
    true = self._cluster(5e7, 1e9)
    self.assertAlmostEqual(self._ratio(true, 16), 1.0, delta=0.1)
    self.assertGreater(self._ratio(true, 64), 1.2)
    told = self._ratio(true, 64, ps_bandwidth=1e9)
    self.assertAlmostEqual(told, 1.0, delta=0.1)
    run = simulator.simulate(true, simulator.Sync(), 50, records=True)
    fit = recorded_run.fit(run.events, read_bytes=1e7)
    self.assertEqual(fit.cluster.ps_bandwidth, np.inf)
    self.assertAlmostEqual(fit.carried_bandwidth / 1e8, 1.0, delta=0.01)


class MistakeTest(parameterized.TestCase):
  def _read(self, text):
    directory = self.enter_context(tempfile.TemporaryDirectory())
    path = pathlib.Path(directory, "a.jsonl")
    path.write_text(text, encoding="utf-8")
    return recorded_run.read(directory)

  @parameterized.parameters(
    ("{}\n", "line 1 must be an object with task, step, kind, start, end"),
    (LINE + "nonsense\n", "line 2 must be an object"),
    (LINE.replace("wait", "sleep"), "`kind` must be one of"),
    (LINE.replace("2}", "0}"), "`end` must not be before `start`"),
    (LINE.replace("2}", '"x"}'), "line 1 must be an object"),
  )
  def test_lines(self, text, words):
    with self.assertRaisesRegex(ValueError, words):
      self._read(text)

  def test_a_last_line_may_be_cut(self):
    self.assertLen(self._read(LINE + LINE[:20]), 1)

  def test_no_timeline(self):
    with tempfile.TemporaryDirectory() as directory:
      with self.assertRaisesRegex(ValueError, "must hold timelines"):
        recorded_run.read(directory)

  def test_nothing_to_fit(self):
    with self.assertRaisesRegex(ValueError, "reads and computes twice"):
      recorded_run.fit(self._read(LINE), read_bytes=1.0)

  def test_overwrites_nothing(self):
    event = simulator.Event("a", 1, "wait", 1.0, 2.0)
    with tempfile.TemporaryDirectory() as directory:
      recorded_run.write([event], directory)
      with self.assertRaises(FileExistsError):
        recorded_run.write([event], directory)


if __name__ == "__main__":
  absltest.main()
