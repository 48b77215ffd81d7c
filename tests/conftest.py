"""Fixtures and settings of all tests."""

import collections
import gc
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
  if hasattr(config.option, "loadscopereorder"):
    # By the number of tests; `pytest_collection_modifyitems` sorts by time.
    config.option.loadscopereorder = False
  for tier, meaning in tiers.TIERS.items():
    config.addinivalue_line("markers", f"{tier}: {meaning} (set by itself)")
  config.addinivalue_line(
    "markers", "quick: in the README's test command (set by itself)"
  )
  config.addinivalue_line(
    "markers", "exhaustive: takes long, and is not run by CI"
  )


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
  """Marks every test with its tier; begins with the files that take longest.

  So the last files that several workers begin are short, and end together.
  """
  for item in items:
    tier = tiers.of(item)
    item.add_marker(tier)
    if item.nodeid.startswith(tiers.QUICK):
      item.add_marker("quick")
    if config.pluginmanager.hasplugin("timeout"):
      item.add_marker(pytest.mark.timeout(tiers.DEADLINE_SECS[tier]))
  result = yield  # `-m` chooses by what was set.
  if hasattr(config, "workerinput"):  # A worker of pytest-xdist.
    secs = collections.Counter()
    for item in items:
      secs[item.path] += tiers.secs(item)
    items.sort(key=lambda item: -secs[item.path])
  return result


def pytest_collection_finish():
  """Spares the garbage collector what TensorFlow and the tests imported.

  Its thresholds stay: a data set's iterator that is collected only when Python
  ends may wait for ever for its threads (TensorFlow 2.21).
  """
  gc.collect()
  gc.freeze()


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
  """Starts a scenario on a cluster; ends it with the test module at last.

  Tasks in `absent` are not started.
  """
  started = []

  def start(scenario, document, absent=(), **options):
    trial = trials.Trial(
      scenario, document, tmp_path_factory.mktemp(scenario), **options
    )
    started.append(trial)
    # Also tasks at addresses that do not seem to be of this machine.
    tasks = [task for task in trial.spec.tasks() if task not in absent]
    trial.tasks.start(*sorted(tasks, key=lambda t: t.job != "ps"))
    return trial

  yield start
  for trial in started:
    trial.tasks.stop(grace_secs=1.0)
