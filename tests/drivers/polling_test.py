"""Tests for drivers.polling."""

import threading

from absl.testing import absltest

from tf_replicas.drivers import polling


class PollingThreadTest(absltest.TestCase):
  def test_polls_until_it_is_stopped(self):
    calls, has_called, ends = [], threading.Event(), []

    def poll():
      calls.append(None)
      if len(calls) == 3:
        has_called.set()

    thread = polling.PollingThread(
      poll, period_secs=0.01, at_stop=lambda: ends.append(len(calls))
    )
    self.assertTrue(has_called.wait(60))
    thread.stop()
    self.assertFalse(thread.is_alive())
    self.assertEqual(ends, [len(calls)])

  def test_ends_with_a_true_result(self):
    results = iter([False, None, True])
    thread = polling.PollingThread(lambda: next(results), period_secs=0.01)
    thread.join(60)
    self.assertFalse(thread.is_alive())
    self.assertEmpty(list(results))

  def test_an_error_is_raised_where_it_is_stopped(self):
    failed = threading.Event()
    thread = polling.PollingThread(
      lambda: 1 / 0, period_secs=0.01, on_error=failed.set
    )
    self.assertTrue(failed.wait(60))
    with self.assertRaises(ZeroDivisionError):
      thread.stop()


if __name__ == "__main__":
  absltest.main()
