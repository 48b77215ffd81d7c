"""Tests of `session.interrupts`; a session's are in training_test."""

import os
import signal
import threading
import time

import pytest
import tensorflow as tf

from tf_replicas.session import interrupts


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_step_that_waits_in_tensorflow_is_interrupted(signum):
  queue = tf.queue.FIFOQueue(10, [tf.bool])
  goes_on = tf.function(queue.dequeue).get_concrete_function()

  def step():
    threading.Timer(0.3, os.kill, [os.getpid(), signum]).start()
    while goes_on():
      pass  # As who was woken for no reason waits again.

  rescue = threading.Timer(20, queue.enqueue, [False])
  rescue.start()
  start = time.monotonic()
  with pytest.raises(KeyboardInterrupt) as info:
    with interrupts.deferred(lambda: queue.enqueue(True)) as make:
      make(step)
  rescue.cancel()
  assert time.monotonic() - start < 15
  assert info.value.args == (("SIGTERM",) if signum == signal.SIGTERM else ())
  assert signal.set_wakeup_fd(-1) == -1
