"""Tests for experiments.support.claims, and a quick run of simulated claims."""

import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import pytest
from absl.testing import absltest
from absl.testing import parameterized

from experiments.claims import backup_curves
from experiments.claims import scale_out
from experiments.claims import sixteen_or_eight
from experiments.claims import stale_ball
from experiments.support import claims

ROOT = pathlib.Path(__file__).resolve().parents[2]


class VerdictTest(parameterized.TestCase):
  @parameterized.parameters(
    ([1.0, 2.0], claims.HOLDS),
    ([1.0, 2.1], claims.UNCLEAR),
    ([0.9, 2.1], claims.FAILS),
    ([math.nan], claims.FAILS),
  )
  def test_finding(self, values, expected):
    finding = claims.Finding("x", values, least=1.0, most=2.0)
    self.assertEqual(finding.verdict, expected)

  def test_claim_needs_every_finding(self):
    holds = claims.Finding("x", [1.0, 1.0], least=0.5)
    unclear = claims.Finding("x", [1.0, 0.0], least=0.5)
    fails = claims.Finding("x", [0.0, 0.0], least=0.5)
    self.assertEqual(claims.verdict([holds]), claims.HOLDS)
    self.assertEqual(claims.verdict([holds, unclear]), claims.UNCLEAR)
    self.assertEqual(claims.verdict([unclear, fails, holds]), claims.FAILS)

  def test_words(self):
    finding = claims.Finding("wait", [3.0, 1.0, 2.0], "s", most=2.5)
    self.assertEqual(
      str(finding), "wait: 2 s (1 to 3); claimed at most 2.5: unclear"
    )
    self.assertEqual(str(claims.Finding("wait", [0.5])), "wait: 0.5")
    finding = claims.Finding("wait", [0.5, 0.5], "s")
    self.assertEqual(str(finding), "wait: 0.5 s (all 2 alike)")


class ClaimTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    pytest.importorskip("matplotlib")

  @parameterized.parameters(stale_ball, sixteen_or_eight)
  def test_quick_run(self, module):
    """Both files are written; the numbers decide."""
    with tempfile.TemporaryDirectory() as directory:
      report = claims.run(module.CLAIM, directory, num_seeds=1, is_quick=True)
      name = module.CLAIM.name
      self.assertCountEqual(
        os.listdir(directory), [f"{name}.json", f"{name}.png"]
      )
      path = pathlib.Path(directory, f"{name}.json")
      written = json.loads(path.read_text(encoding="utf-8"))
    self.assertEqual(module.__name__, f"experiments.claims.{name}")
    self.assertEqual(written, json.loads(json.dumps(report)))
    # A quick run of the other one only simulates, and judges nothing.
    is_other = module is sixteen_or_eight
    expected = claims.UNCLEAR if is_other else claims.ILLUSTRATION
    self.assertEqual(written["verdict"], expected)

  def test_an_illustration_has_no_verdict(self):
    claim = dataclasses.replace(
      stale_ball.CLAIM,
      measure=lambda is_quick, seed: {},
      find=lambda measurements: [claims.Finding("x", [0.0], least=1.0)],
      draw=lambda measurements: claims.new_figure(1, 1)[0],
      is_illustration=True,
    )
    with tempfile.TemporaryDirectory() as directory:
      report = claims.run(claim, directory, num_seeds=1, revision="abc")
    self.assertEqual(report["verdict"], claims.ILLUSTRATION)
    self.assertEqual(report["commit"], "abc")

  def test_judges_stored_measurements_again(self):
    claim = dataclasses.replace(
      stale_ball.CLAIM,
      measure=lambda is_quick, seed: {"x": 1.0},
      find=lambda ms: [claims.Finding("x", [m["x"] for m in ms], most=2.0)],
      draw=lambda measurements: claims.new_figure(1, 1)[0],
      is_illustration=False,
    )
    with tempfile.TemporaryDirectory() as directory:
      before = claims.run(claim, directory, num_seeds=2, revision="abc")
      stricter = dataclasses.replace(
        claim,
        title="Another title",
        find=lambda ms: [claims.Finding("x", [m["x"] for m in ms], most=0.5)],
      )
      after = claims.judge(stricter, directory)
    self.assertEqual(before["verdict"], claims.HOLDS)
    self.assertEqual(after["verdict"], claims.FAILS)
    self.assertEqual(after["title"], "Another title")
    for field in ("commit", "date", "seconds", "measurements", "command"):
      self.assertEqual(after[field], before[field])

  def test_numbers_are_written_in_one_line(self):
    measured = {"rows": [[1, 2.5], [-3e-9, 4]], "words": ["in [0, 1]", "[\n1]"]}
    claim = dataclasses.replace(
      stale_ball.CLAIM,
      measure=lambda is_quick, seed: measured,
      find=lambda measurements: [],
      draw=lambda measurements: claims.new_figure(1, 1)[0],
    )
    with tempfile.TemporaryDirectory() as directory:
      claims.run(claim, directory, num_seeds=1)
      text = pathlib.Path(directory, "stale_ball.json").read_text("utf-8")
    self.assertEqual(json.loads(text)["measurements"], [measured])
    self.assertIn("[1,2.5],\n", text)

  def test_program(self):
    with tempfile.TemporaryDirectory() as directory:
      result = subprocess.run(
        [
          sys.executable,
          "-m",
          "experiments.claims.stale_ball",
          "--num_seeds=1",
          f"--output={directory}/new",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        cwd=ROOT,
      )
      self.assertIn("This is an illustration", result.stdout)
      self.assertEqual(result.stderr, "")
      self.assertTrue(os.path.exists(f"{directory}/new/stale_ball.png"))

  @parameterized.parameters(
    ("--num_seeds=0", "num_seeds"), ("--output=/dev/null/x", "/dev/null/x")
  )
  def test_mistakes_are_one_line(self, flag, words):
    result = subprocess.run(
      [sys.executable, "-m", "experiments.claims.stale_ball", flag],
      capture_output=True,
      text=True,
      check=False,
      timeout=300,
      cwd=ROOT,
    )
    self.assertIn(result.returncode, (1, 2))
    self.assertLen(result.stderr.splitlines(), 1)
    self.assertRegex(result.stderr, f"error: .*{words}")


class StaleBallTest(absltest.TestCase):
  def test_by_hand(self):
    """Rate 0.5, staleness 0, 1, 2: 1 - .5, - .5 * 1, - .5 * 1."""
    np.testing.assert_allclose(
      stale_ball.roll(0.5, [0, 1, 2]), [1.0, 0.5, 0.0, -0.5]
    )
    np.testing.assert_allclose(
      stale_ball.roll(0.5, [0, 1, 2], divides=True), [1.0, 0.5, 0.0, -0.25]
    )

  def test_limits_by_rolling(self):
    for staleness in (0, 1, 4):
      limit = stale_ball.largest_stable_rate(staleness)
      below = stale_ball.roll(0.98 * limit, [staleness] * 3000)
      above = stale_ball.roll(1.02 * limit, [staleness] * 3000)
      self.assertLess(np.abs(below[-50:]).max(), 1e-3)
      self.assertGreater(np.abs(above[-50:]).max(), 1e3)


class BackupCurvesTest(absltest.TestCase):
  def test_the_numbers_are_of_the_curves(self):
    """If backups change nothing, all gains are zero."""
    flat = [1.0] * len(backup_curves.BACKUPS)
    of_total = [1.0] * len(backup_curves.NEEDED_OF_TOTAL)
    names = list(backup_curves.COMPUTE)
    slower = [2.0, *flat[1:]]
    measurement = {
      "published": flat,
      "free_links": flat,
      "means": dict.fromkeys(names, flat),
      "order_statistics": dict.fromkeys(names, slower),
      "of_total": dict.fromkeys(names, of_total),
    }
    for finding in backup_curves.find([measurement]):
      if "promise" in finding.what:
        self.assertEqual(finding.values, [0.0])
      if "for the same precision" in finding.what:
        self.assertEqual(finding.values, [100.0])

  def test_time_to_precision(self):
    """If all steps are equal, fewer gradients per update only take longer."""
    times = backup_curves.time_to_precision(
      [1.0] * len(backup_curves.NEEDED_OF_TOTAL)
    )
    self.assertEqual(times[-1], 1.0)
    self.assertTrue(np.all(np.diff(times) < 0))
    # As published: 76.2 thousand updates with 100, 137.5 with 50.
    exponent = backup_curves.UPDATES_EXPONENT
    self.assertAlmostEqual(76.2 * 2**exponent, 137.5)

  def test_speedup_is_paid_for(self):
    steps = [1.0] * len(backup_curves.BACKUPS)
    speedup = backup_curves.speedup(steps)
    self.assertEqual(speedup[0], 1.0)
    self.assertAlmostEqual(speedup[-1], 50 / 60)


class SixteenOrEightTest(absltest.TestCase):
  CASE = {"secs": 1.0, "num_steps": 5, "seed": 0}

  def test_a_model_of_no_size(self):
    count = sixteen_or_eight.needed(
      lambda count: 1, gigabits=1.0, megabytes=0.0, **self.CASE
    )
    self.assertIn(count, (8, 9))

  def test_one_link_for_all(self):
    """125 MB/s carry 0.625 contributions of 2 * 100 MB each: never eight."""
    count = sixteen_or_eight.needed(
      lambda count: 1, gigabits=1.0, megabytes=100.0, **self.CASE
    )
    self.assertEqual(count, sixteen_or_eight.MOST + 1)


class ScaleOutTest(absltest.TestCase):
  def test_synchronous_efficiency(self):
    self.assertAlmostEqual(scale_out.synchronous_efficiency(1), 1.0)
    self.assertAlmostEqual(scale_out.synchronous_efficiency(2), 1 / 1.1)

  def test_one_point(self):
    point = scale_out.simulate("asynchronous", 20, True, 0, {})
    self.assertAlmostEqual(point["staleness"], 19, delta=1)
    self.assertAlmostEqual(point["efficiency"], 1.0, delta=0.1)
    self.assertEqual(point["waiting"], 0.0)


if __name__ == "__main__":
  absltest.main()
