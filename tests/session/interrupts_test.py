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


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_between_steps_outlives_an_error(signum):
  """A parameter server may get SIGTERM with its chief, which then fails."""
  with pytest.raises(KeyboardInterrupt) as info:
    with interrupts.deferred():
      os.kill(os.getpid(), signum)
      raise OSError("the parameter server has gone")
  assert info.value.args == (("SIGTERM",) if signum == signal.SIGTERM else ())


def test_sigterm_of_a_manager_and_of_a_launcher_is_one():
  """The second one does not end the step in its midst, but Ctrl-C does."""
  done = []

  def step(*signals):
    for signum in signals:
      os.kill(os.getpid(), signum)
      done.append(signum)

  for signals in [(signal.SIGTERM,) * 2, (signal.SIGTERM, signal.SIGINT)]:
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
      with interrupts.deferred() as make:
        make(lambda signals=signals: step(*signals))
  assert done == [signal.SIGTERM] * 3


def test_a_step_can_end_at_once_if_an_interrupt_is_delayed():
  interrupts.raise_delayed()  # Nothing delays interrupts.
  done = []

  def step():
    interrupts.raise_delayed()
    done.append("before the signal")
    os.kill(os.getpid(), signal.SIGTERM)
    done.append("after the signal")
    interrupts.raise_delayed()
    done.append("after the interrupt")

  with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
    with interrupts.deferred() as make:
      make(step)
  assert done == ["before the signal", "after the signal"]
  interrupts.raise_delayed()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_first_interrupt_waits_for_the_end(signum):
  before = signal.getsignal(signum)
  done = []
  with pytest.raises(KeyboardInterrupt) as info:
    with interrupts.postponed():
      os.kill(os.getpid(), signum)
      done.append("after the first")
  assert info.value.args == (("SIGTERM",) if signum == signal.SIGTERM else ())
  with pytest.raises(KeyboardInterrupt):
    with interrupts.postponed():
      os.kill(os.getpid(), signum)
      done.append("after another first")
      os.kill(os.getpid(), signal.SIGINT)
      done.append("after the second")
  assert done == ["after the first", "after another first"]
  assert signal.getsignal(signum) is before


def test_what_is_not_interrupted_goes_on():
  with interrupts.postponed():
    pass
  with pytest.raises(ValueError):
    with interrupts.postponed():
      raise ValueError


def test_sigterm_raises_before_and_after_a_session_too():
  """A session delays it; what comes before and after does not."""
  with interrupts.sigterm_raises():
    ours = signal.getsignal(signal.SIGTERM)
    with interrupts.deferred() as make:
      with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        make(lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert signal.getsignal(signal.SIGTERM) is ours
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
      os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
      with interrupts.postponed():
        os.kill(os.getpid(), signal.SIGTERM)
  assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(
  "context", [interrupts.sigterm_raises, interrupts.postponed]
)
def test_the_handlers_of_a_program_stay(context):
  received = []
  before = signal.signal(signal.SIGTERM, lambda *_: received.append(1))
  try:
    with context():
      os.kill(os.getpid(), signal.SIGTERM)
      assert received == [1]
  finally:
    signal.signal(signal.SIGTERM, before)
