"""Calls that may wait, in threads that no test waits for too long."""

import threading

from tests.support import stores

# No test waits that long if all is well.
DEADLINE_SECS = 100.0
# How long a call is watched that should not return.
WATCH_SECS = 0.2


class Call:
  """One call, in a daemon thread of its own."""

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
    """Whether it has not returned yet."""
    return self._thread.is_alive()

  def waits(self) -> bool:
    """Whether it has not returned, after a while."""
    self._thread.join(WATCH_SECS)
    return self._thread.is_alive()

  def result(self):
    """What it returned, or raises what it raised."""
    self._thread.join(DEADLINE_SECS)
    if self._thread.is_alive():
      raise AssertionError("the call did not return")
    if self._error is not None:
      raise self._error
    return self._result


def run_all(function, count: int) -> list:
  """The results of `function(0)`, ..., `function(count - 1)`, all at once."""
  calls = [Call(function, number) for number in range(count)]
  return [call.result() for call in calls]


# Clients that no test uses, by what they are.
_idle = {}


class TestCase(stores.TestCase):
  """Tests of calls that wait, with clients that several tests use by turns.

  To trace what a client does takes most of the time.
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
    """A client as new, not to be closed: from `make()`, or after `reset`."""
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
