"""Tests for experiments.support.timed_training, on real processes."""

import statistics
import unittest

from absl.testing import absltest

from experiments import simulator
from experiments.simulator import compute_times
from experiments.support import timed_training
from tf_replicas.cluster import private_network

OBSTACLE = private_network.obstacle()
SECS = 0.1  # Of a transfer of 1 MB over a link of 80 Mbit/s.


class LimitedLinksTest(absltest.TestCase):
  @unittest.skipIf(OBSTACLE is not None, OBSTACLE)
  def test_transfers_take_the_time_of_the_link(self):
    events = timed_training.train_by(
      simulator.Sync(),
      compute_times.Constant(0.01),
      1,
      6,
      seed=0,
      num_elements=250_000,
      mbit_per_sec=80.0,
    )
    for kind in ("read", "hand_over"):
      secs = [e.end - e.start for e in events if e.kind == kind]
      self.assertGreater(statistics.median(secs), 0.8 * SECS, kind)


if __name__ == "__main__":
  absltest.main()
