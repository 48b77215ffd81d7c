"""Fixtures and settings of all tests."""

import signal

import pytest

from tests.support import tiers
from tests.support import trials

_guard = tiers.Guard()


def pytest_configure(config) -> None:
  """Tells pytest the tiers.

  And hears SIGINT, which a background job of a shell inherits as ignored.
  """
  signal.signal(signal.SIGINT, signal.default_int_handler)
  for tier, meaning in tiers.TIERS.items():
    config.addinivalue_line("markers", f"{tier}: {meaning} (set by itself)")
  config.addinivalue_line(
    "markers", "quick: in the README's test command (set by itself)"
  )
  config.addinivalue_line(
    "markers", "exhaustive: takes long, and is not run by CI"
  )


@pytest.hookimpl(tryfirst=True)  # `-m` chooses by what is set here.
def pytest_collection_modifyitems(config, items) -> None:
  """Marks every test with its tier."""
  for item in items:
    tier = tiers.of(item)
    item.add_marker(tier)
    if item.nodeid.startswith(tiers.QUICK):
      item.add_marker("quick")
    if config.pluginmanager.hasplugin("timeout"):
      item.add_marker(pytest.mark.timeout(tiers.DEADLINE_SECS[tier]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
  """Guards a unit test with its fixtures, whatever their scope."""
  _guard.is_up = item.get_closest_marker("unit") is not None
  try:
    return (yield)
  finally:
    _guard.is_up = False


@pytest.fixture(autouse=True)
def guard(request):
  """Fails a unit test that hid that it was refused a process."""
  yield _guard
  refused, _guard.refused = _guard.refused, []
  assert not refused, f"started processes: {refused}"


@pytest.fixture(scope="module")
def start_trial(tmp_path_factory):
  """Starts a scenario on a cluster; ends it with the test module at last."""
  started = []

  def start(scenario, document, **options):
    trial = trials.Trial(
      scenario, document, tmp_path_factory.mktemp(scenario), **options
    )
    started.append(trial)
    # Also tasks at addresses that do not seem to be of this machine.
    trial.tasks.start(*sorted(trial.spec.tasks(), key=lambda t: t.job != "ps"))
    return trial

  yield start
  for trial in started:
    trial.tasks.stop(grace_secs=1.0)
