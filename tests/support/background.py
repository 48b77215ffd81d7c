"""Runs calls that may wait in threads, so that no test waits for too long."""

import threading

from tests.support import stores

# No test waits that long if all is well.
DEADLINE_SECS = 100.0
# How long a call is watched that should not return.
WATCH_SECS = 0.2


class Call:
  """Calls a function in a daemon thread of its own."""

  def __init__(self, function, *args):
    self._result = self._error = None

    def run():
      try:
        self._result = function(*args)
      except BaseException as error:  # `result` raises it.
        self._error = error

    self._thread = threading.Thread(target=run, daemon=True)
    self._thread.start()

  def is_alive(self) -> bool:
    """Returns whether the function has not returned yet."""
    return self._thread.is_alive()

  def waits(self) -> bool:
    """Returns whether the function has not returned after 0.2 seconds."""
    self._thread.join(WATCH_SECS)
    return self._thread.is_alive()

  def result(self):
    """Waits until the function returns, and returns its result.

    Raises:
      AssertionError: If the function has not returned after 100 seconds.
      BaseException: What the function raised.
    """
    self._thread.join(DEADLINE_SECS)
    if self._thread.is_alive():
      raise AssertionError("the call did not return")
    if self._error is not None:
      raise self._error
    return self._result


def run_all(function, count: int) -> list:
  """Returns the results of `function(0)`, ..., `function(count - 1)`.

  All calls run at the same time, in threads.
  """
  calls = [Call(function, number) for number in range(count)]
  return [call.result() for call in calls]


# Clients that no test uses, by what they are.
_idle = {}


class TestCase(stores.TestCase):
  """Base class of tests of calls that wait, which share their clients.

  A client is an object whose calls are tested. Tracing its functions takes most
  of a test's time, so later tests use it again.
  """

  def setUp(self):
    super().setUp()
    self._calls = []

  def call(self, function, *args):
    self._calls.append(Call(function, *args))
    return self._calls[-1]

  def assert_waits(self, call):
    self.assertTrue(call.waits(), "it should have waited")

  def borrow(self, key, make):
    """Returns a client for one test, which must not close it.

    A client is an object whose calls are tested.

    Args:
      key: Identifies equal clients.
      make: Makes a client. An existing one, whose test has ended, is used
        instead, after a call of its `reset`.
    """
    client = _idle.pop(key, None)
    if client is None:
      client = make()
    else:
      client.reset()

    def give_back():
      if any(call.is_alive() for call in self._calls):
        client.close()  # The test has failed.
      else:
        _idle[key] = client

    self.addCleanup(give_back)
    return client
