"""Tests for the experiments that repeat figures of papers."""

from unittest import mock

import pytest
from absl.testing import absltest
from absl.testing import parameterized

from experiments.claims import dutta_error_time
from experiments.support import claims


def _measurement(sync, backup, fully_async):
  errors = {"sync": sync, "5-sync": backup, "async": fully_async}
  return {
    "times": list(range(len(sync))),
    "rate": 0.1,
    "rules": {
      rule: {"errors": own, "updates": 1} for rule, own in errors.items()
    },
  }


SLOW = [0.9] * 12 + [0.1] * 5
FAST = [0.9] + [0.2] * 16


class DuttaTest(parameterized.TestCase):
  @parameterized.parameters(
    ((SLOW, FAST, FAST), claims.HOLDS),
    ((FAST, FAST, SLOW), claims.FAILS),
    ((SLOW, FAST, [0.05] * 17), claims.FAILS),
  )
  def test_verdict(self, errors, expected):
    findings = dutta_error_time.find([_measurement(*errors)])
    self.assertEqual(claims.verdict(findings), expected)

  def test_draws(self):
    pytest.importorskip("matplotlib")
    figure = dutta_error_time.draw([_measurement(SLOW, FAST, FAST)] * 2)
    self.assertLen(figure.axes[0].lines, 4)


class MeasureTest(absltest.TestCase):
  def test_an_error_falls(self):
    rules = {"async": {"rules": ("async",)}}
    with mock.patch.object(dutta_error_time, "RULES", rules):
      measured = dutta_error_time.measure(True, 0)
    errors = measured["rules"]["async"]["errors"]
    self.assertLess(errors[-1], errors[0] - 0.1)
    self.assertGreater(measured["rules"]["async"]["updates"], 64)


if __name__ == "__main__":
  absltest.main()
