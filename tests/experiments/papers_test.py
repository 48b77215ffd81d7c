"""Tests for the experiments that repeat figures of papers."""

from unittest import mock

import pytest
from absl.testing import absltest
from absl.testing import parameterized

from experiments.claims import dutta_error_time
from experiments.claims import ho_bounded_staleness
from experiments.claims import zhang_easgd
from experiments.support import claims


def _measurement(sync, backup, fully_async):
  errors = {"sync": sync, "5-sync": backup, "async": fully_async}
  return {
    "times": list(range(len(sync))),
    "rate": 0.1,
    "rules": {
      rule: {"errors": own, "updates": [1] * len(own)}
      for rule, own in errors.items()
    },
  }


SLOW = [0.9] * 12 + [0.1] * 5
FAST = [0.9] + [0.2] * 16


class DuttaTest(parameterized.TestCase):
  @parameterized.parameters(
    ((SLOW, FAST, FAST), claims.HOLDS),
    ((FAST, FAST, SLOW), claims.FAILS),
  )
  def test_verdict(self, errors, expected):
    findings = dutta_error_time.find([_measurement(*errors)])
    self.assertEqual(claims.verdict(findings), expected)

  def test_draws(self):
    pytest.importorskip("matplotlib")
    figure = dutta_error_time.draw([_measurement(SLOW, FAST, FAST)] * 2)
    self.assertLen(figure.axes[0].lines, 4)


def _curve(length, falls_at, updates_per_point):
  """An error of 0.9 that falls to 0.1 at a point."""
  return {
    "errors": [0.9] * falls_at + [0.1] * (length - falls_at),
    "updates": [updates_per_point * i for i in range(length)],
  }


class HoTest(parameterized.TestCase):
  def _measurement(self, bounded, unbounded):
    # With the barrier, fewer updates, each of which is worth more.
    rules = {"bound 0": _curve(40, 20, 2)}
    rules |= {f"bound {s}": _curve(40, bounded, 5) for s in (2, 8)}
    rules["no bound"] = _curve(40, unbounded, 6)
    rates = {str(rate): rules for rate in ho_bounded_staleness.RATES}
    return {"times": list(range(40)), "rates": rates}

  @parameterized.parameters(
    (15, 16, claims.HOLDS),
    (25, 30, claims.FAILS),  # Later than with the barrier.
    (15, 12, claims.FAILS),  # No bound is best.
  )
  def test_verdict(self, bounded, unbounded, expected):
    found = ho_bounded_staleness.find([self._measurement(bounded, unbounded)])
    self.assertEqual(claims.verdict(found), expected)

  def test_draws(self):
    pytest.importorskip("matplotlib")
    figure = ho_bounded_staleness.draw([self._measurement(15, 16)] * 2)
    self.assertLen(figure.axes[0].lines, 5)


class ZhangEasgdTest(parameterized.TestCase):
  def _measurement(self, downpour, elastic):
    rows = {
      rule: {"errors": [0.9, *[error + rate / 10] * 3], "updates": [0] * 4}
      for rate in zhang_easgd.RATES
      for rule, error in [
        (rule, downpour if rule == zhang_easgd.DOWNPOUR else elastic)
        for rule in zhang_easgd.RULES
      ]
    }
    rates = {str(rate): rows for rate in zhang_easgd.RATES}
    return {"times": [0, 1, 2, 3], "rates": rates}

  @parameterized.parameters((0.3, 0.2, claims.HOLDS), (0.2, 0.3, claims.FAILS))
  def test_verdict(self, downpour, elastic, expected):
    found = zhang_easgd.find([self._measurement(downpour, elastic)])
    self.assertEqual(claims.verdict(found), expected)

  def test_errors_at_equal_rates_are_not_judged(self):
    found = zhang_easgd.find([self._measurement(0.3, 0.2)])
    rows = [f for f in found if "at the rate" in f.what]
    self.assertLen(rows, 2 * len(zhang_easgd.RATES))
    self.assertEqual({f.bounds for f in rows}, {""})

  def test_draws(self):
    pytest.importorskip("matplotlib")
    figure = zhang_easgd.draw([self._measurement(0.3, 0.2)] * 2)
    self.assertLen(figure.axes[0].lines, 4)


class MeasureTest(absltest.TestCase):
  def test_an_error_falls(self):
    rules = {"async": {"rules": ("async",)}}
    with mock.patch.object(dutta_error_time, "RULES", rules):
      measured = dutta_error_time.measure(True, 0)
    errors = measured["rules"]["async"]["errors"]
    self.assertLess(errors[-1], errors[0] - 0.1)
    self.assertGreater(measured["rules"]["async"]["updates"][-1], 64)


if __name__ == "__main__":
  absltest.main()
