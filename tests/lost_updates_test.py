"""Locking loses no update: 3 replicas on real processes, increments counted."""

import pytest

from benchmarks import lost_updates
from tests.support import trials


# What rounding makes of the inverse of Adam's 300 updates is below 0.01.
@pytest.mark.parametrize(
  "name", ["adam", pytest.param("momentum", marks=pytest.mark.exhaustive)]
)
def test_locking_loses_nothing(name):
  lost = lost_updates.measure(
    name, use_locking=True, increments=100, environ=trials.ENVIRON
  )
  assert len(lost) > 1
  assert lost == pytest.approx(dict.fromkeys(lost, 0.0), abs=0.1)


def test_what_is_lost_shows():
  """The count itself: of values that one of three updates never reached."""
  for name in lost_updates.OPTIMIZERS:
    for values in lost_updates.alone(name, 3).values():
      found = [values[2], values[2], values[3], values[3]]
      assert lost_updates.count(found, values) == pytest.approx(2.5)
