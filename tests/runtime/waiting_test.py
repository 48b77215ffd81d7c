"""Tests of `waiting`: waits have words."""

import re
import threading
import time

import pytest
from absl.testing import absltest

from tf_replicas.runtime import waiting


@pytest.fixture
def words():
  logs, spoken = [], threading.Event()

  def log(line):
    logs.append(line)
    spoken.set()

  words = waiting.WaitLogger(every_secs=0.05, log=log)
  yield words, logs, spoken
  words.stop()


def test_a_wait_that_began_earlier_is_told_in_full():
  with pytest.raises(TimeoutError, match="worker 1: gave up after 101 s"):
    waiting.await_value(
      lambda: None,
      timeout_secs=101.0,
      what="worker 1",
      since=time.monotonic() - 100.5,
    )


class TestWords:
  def test_a_long_wait_has_words(self, words):
    words, logs, spoken = words
    with words.during("waiting for the chief"):
      assert spoken.wait(30)
    assert re.fullmatch(r"waiting for the chief: \d+ s so far", logs[0])

  def test_an_end_of_the_wait_ends_the_words(self, words):
    words, logs, spoken = words
    with pytest.raises(ValueError), words.during("a step"):
      assert spoken.wait(30)
      raise ValueError
    count = len(logs)
    time.sleep(0.5)
    assert len(logs) <= count + 1  # One was perhaps being said.

  def test_short_waits_have_none(self):
    logs = []
    words = waiting.WaitLogger(every_secs=2.0, log=logs.append)
    end = time.monotonic() + 3.0
    while time.monotonic() < end:
      with words.during("a step"):
        time.sleep(0.01)
    words.stop()
    assert not logs


def test_a_function_runs_where_no_thread_can_be_started(monkeypatch):
  """Python 3.12.1 starts none in functions of `atexit`."""

  def start(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")

  def fail():
    raise ValueError("failed")

  monkeypatch.setattr(threading.Thread, "start", start)
  ends = []
  waiting.RaisingThread(lambda: ends.append(1), on_error=bool).join()
  assert ends == [1]
  with pytest.raises(ValueError, match="failed"):
    waiting.RaisingThread(fail, on_error=bool).join(1.0)
  with pytest.raises(RuntimeError, match="shutdown"):
    waiting.PollingThread(fail, period_secs=0.1)


class PollingThreadTest(absltest.TestCase):
  def test_polls_until_it_is_stopped(self):
    calls, has_called, ends = [], threading.Event(), []

    def poll():
      calls.append(None)
      if len(calls) == 3:
        has_called.set()

    thread = waiting.PollingThread(
      poll, period_secs=0.01, at_stop=lambda: ends.append(len(calls))
    )
    self.assertTrue(has_called.wait(60))
    thread.stop()
    self.assertFalse(thread.is_alive())
    self.assertEqual(ends, [len(calls)])

  def test_ends_with_a_true_result(self):
    results = iter([False, None, True])
    thread = waiting.PollingThread(lambda: next(results), period_secs=0.01)
    thread.join(60)
    self.assertFalse(thread.is_alive())
    self.assertEmpty(list(results))

  def test_an_error_is_raised_where_it_is_stopped(self):
    failed = threading.Event()
    thread = waiting.PollingThread(
      lambda: 1 / 0, period_secs=0.01, on_error=failed.set
    )
    self.assertTrue(failed.wait(60))
    with self.assertRaises(ZeroDivisionError):
      thread.stop()
