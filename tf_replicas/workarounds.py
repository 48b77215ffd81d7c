"""Where TensorFlow 2.21 stands in the way of a cluster, and what helps."""

import contextlib
import threading
from collections.abc import Callable
from collections.abc import Iterator

import tensorflow as tf
from tensorflow.python.eager import cancellation
from tensorflow.python.eager import context
from tensorflow.python.eager import executor

_default_autograph = tf.__internal__.autograph.control_status_ctx()


def by_autograph(function: Callable) -> Callable:
  """Converts what a user wrote, where the library calls it.

  `tf.function` converts all that it comes across or nothing; the library needs
  nothing converted, and would take a second of every start. What is called
  eagerly needs it neither.
  """
  if tf.executing_eagerly():
    return function
  return tf.__internal__.autograph.tf_convert(function, _default_autograph)


@contextlib.contextmanager
def outside_strategy() -> Iterator[None]:
  """Ops built inside belong to no `tf.distribute` strategy.

  What a `ClusterCoordinator` schedules is traced inside the scope of its
  strategy and outside its replicas, where a Keras 3.15 optimizer fails, which
  neither knows that strategy nor these variables.
  """
  graph = tf.compat.v1.get_default_graph()
  strategies = graph._distribution_strategy_stack
  graph._distribution_strategy_stack = []
  try:
    yield
  finally:
    graph._distribution_strategy_stack = strategies


_cancelled_by = threading.local()


def keep_cancellation_to_its_thread() -> None:
  """Lets a `ClusterCoordinator` cancel its own closures and nothing else.

  TensorFlow 2.21 notes in one variable of the whole process which cancellation
  manager the closure that starts runs under. As long as a closure runs, every
  other thread's functions then run under the coordinator's manager as well,
  and one that fails, as a look at a dead worker does, cancels all closures.
  This keeps the note per thread. To be called before closures are scheduled;
  more than once does no harm.
  """
  manager_context = cancellation.CancellationManagerContext

  def enter(self):
    _cancelled_by.manager = self._cancellation_manager

  def leave(self, *_):
    _cancelled_by.manager = None

  manager_context.__enter__, manager_context.__exit__ = enter, leave
  cancellation.context = lambda: getattr(_cancelled_by, "manager", None)


_end_executor = executor.Executor.__del__


def end_executors_quietly() -> None:
  """Keeps a lost task from printing tracebacks of a `ClusterCoordinator`.

  TensorFlow 2.21 runs every closure under an executor, which raises once more
  where it is deleted what the closure failed with; Python prints that as an
  exception ignored. More than once does no harm.
  """
  told_before = contextlib.suppress(tf.errors.OpError)

  def end(self):
    with told_before:
      _end_executor(self)

  executor.Executor.__del__ = end


_async_wait = context.async_wait
_saving = threading.local()


@contextlib.contextmanager
def waiting_for_nobody() -> Iterator[None]:
  """Keeps a save, in this thread, from waiting for other tasks.

  TensorFlow 2.21 ends every save by waiting for all that was sent to other
  tasks; for one that has died it waits for ever. What a save writes is of this
  process. `tf.distribute`'s strategy for parameter servers leaves out that wait
  as well, everywhere and for good.
  """

  def wait():
    if not getattr(_saving, "is_on", False):
      _async_wait()

  context.async_wait = wait
  _saving.is_on = True
  try:
    yield
  finally:
    _saving.is_on = False
