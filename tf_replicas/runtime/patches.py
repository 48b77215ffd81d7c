"""Works around errors of TensorFlow 2.21, by means of its private names."""

import contextlib
import threading
from collections.abc import Callable
from collections.abc import Iterator
from typing import ParamSpec
from typing import TypeVar

import tensorflow as tf
from tensorflow.python.eager import cancellation
from tensorflow.python.eager import context
from tensorflow.python.eager import executor

from tf_replicas.runtime import noise

_P = ParamSpec("_P")
_R = TypeVar("_R")

_default_autograph = tf.__internal__.autograph.control_status_ctx()


def by_autograph(function: Callable[_P, _R]) -> Callable[_P, _R]:
  """Converts a user's function by AutoGraph, as `tf.function` does.

  The library traces its own functions without AutoGraph:
  `tf.function(autograph=True)` would convert every function that it reaches,
  which would cost about a second at every start. So functions of the user are
  converted by this function.

  Args:
    function: The user's function.

  Returns:
    The converted function; in eager execution, `function` itself.
  """
  if tf.executing_eagerly():
    return function
  return tf.__internal__.autograph.tf_convert(function, _default_autograph)


@contextlib.contextmanager
def outside_strategy() -> Iterator[None]:
  """Context in which no `tf.distribute` strategy is in effect.

  A `ClusterCoordinator` traces its closures in the cross-replica context of its
  strategy. In that context, an optimizer of Keras 3.15 fails, as it knows
  neither the strategy nor its variables.
  """
  graph = tf.compat.v1.get_default_graph()
  strategies = graph._distribution_strategy_stack
  graph._distribution_strategy_stack = []
  try:
    yield
  finally:
    graph._distribution_strategy_stack = strategies


_canceled_by = threading.local()


def keep_cancellation_to_its_thread() -> None:
  """Keeps a `ClusterCoordinator` from cancelling functions of other threads.

  TensorFlow 2.21 stores the cancellation manager of a running closure in a
  variable of the process. Functions that other threads call meanwhile use this
  manager too. So an error in one of these functions, such as a call to a dead
  worker, cancels all closures. This function makes the variable thread-local.
  It must be called before the first closure is scheduled. Further calls change
  nothing.
  """
  manager_context = cancellation.CancellationManagerContext

  def enter(self: cancellation.CancellationManagerContext) -> None:
    _canceled_by.manager = self._cancellation_manager

  def leave(self: cancellation.CancellationManagerContext, *_: object) -> None:
    _canceled_by.manager = None

  manager_context.__enter__, manager_context.__exit__ = enter, leave
  cancellation.context = lambda: getattr(_canceled_by, "manager", None)


_end_executor = executor.Executor.__del__


def end_executors_quietly() -> None:
  """Suppresses tracebacks of a `ClusterCoordinator` about a lost task.

  TensorFlow 2.21 runs every closure in an executor. The executor's `__del__`
  raises the closure's error again, and Python prints it as "Exception ignored".
  Further calls change nothing.
  """

  def end(self: executor.Executor) -> None:
    with contextlib.suppress(tf.errors.OpError):
      _end_executor(self)

  executor.Executor.__del__ = end


def end_coordinator(
  coordinator: tf.distribute.coordinator.ClusterCoordinator,
) -> None:
  """Cancels the closures of a coordinator, and ends its threads."""
  coordinator._cluster.stop()


def original_error(error: Exception) -> Exception:
  """Returns the error of a worker's data set that a coordinator has wrapped.

  Args:
    error: An error of `ClusterCoordinator`; returned if it wraps nothing.
  """
  return getattr(error, "original_exception", None) or error


def new_coordinator(
  old: tf.distribute.coordinator.ClusterCoordinator,
) -> tf.distribute.coordinator.ClusterCoordinator:
  """Makes a coordinator that replaces an old one, for the same strategy.

  TensorFlow 2.21 keeps one coordinator per strategy.

  Args:
    old: A coordinator that `end_coordinator` has ended.
  """
  strategy = old.strategy
  strategy._cluster_coordinator = None
  return tf.distribute.coordinator.ClusterCoordinator(strategy)


def reconnect() -> None:
  """Connects this process to the tasks of its cluster that were restarted.

  The connections to other tasks stay, and so do tensors, variables and
  functions of this process (seen in TensorFlow 2.21). What the restarted tasks
  held is gone. If a task does not answer, the call hangs and holds Python's
  lock.

  Raises:
    tf.errors.OpError: If a task cannot be reached.
  """
  current = context.context()
  assert current is not None
  current.update_server_def(current._server_def)


def disconnect() -> None:
  """Makes this process forget the other tasks of its cluster.

  It is called when the other tasks have ended. Otherwise TensorFlow 2.21 still
  calls these tasks for every function that this process makes, and the next
  function fails. Tensors, variables and functions of this process stay usable.
  """
  current = context.context()
  definition = None if current is None else current._server_def
  if current is None or definition is None:
    return
  alone = type(definition)()
  alone.CopyFrom(definition)
  del alone.cluster.job[:]
  alone.cluster.job.extend(
    job for job in definition.cluster.job if job.name == definition.job_name
  )
  with noise.hidden_errors():  # Functions cannot be removed from other tasks.
    current.update_server_def(alone)
