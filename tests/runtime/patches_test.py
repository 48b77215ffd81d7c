"""Tests of workarounds."""

import threading
import time

import tensorflow as tf
from absl.testing import absltest
from tensorflow.python.eager import cancellation

from tests.support import stores
from tf_replicas.runtime import patches


class CancellationTest(stores.TestCase):
  def test_cancels_what_runs_under_it_and_nothing_else(self):
    patches.keep_cancellation_to_its_thread()
    queue = stores.namespace().queue("awaited", [tf.int32])
    manager = cancellation.CancellationManager()
    wait = tf.function(queue.dequeue).get_concrete_function()
    ends = {}

    def start(name, run):
      def run_to_the_end():
        try:
          ends[name] = int(run()[0])
        except tf.errors.CancelledError:
          ends[name] = "canceled"

      thread = threading.Thread(target=run_to_the_end, daemon=True)
      thread.start()
      time.sleep(0.3)  # Until it waits.
      return thread

    canceled = start("closure", manager.get_cancelable_function(wait))
    other = start("other", wait)
    manager.start_cancel()
    canceled.join(timeout=10)
    queue.enqueue([tf.constant(5)])
    other.join(timeout=10)
    self.assertEqual(ends, {"closure": "canceled", "other": 5})


if __name__ == "__main__":
  absltest.main()
