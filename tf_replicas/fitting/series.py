"""Keeps the tasks of a cluster for further trainings of the chief's script.

The script of the chief may train several times on one cluster. These trainings
are a *series*, numbered from 1 on. The number is the name of the training's
namespace, which keeps its variables apart. The first training begins in all
tasks, as all run the script. Those that follow begin in the chief only. The
chief publishes which function it calls, and a worker, which waits between two
trainings, calls the same function with the same arguments. In-graph workers are
servers, and need not be told.

The published call is pickled by cloudpickle. It goes through a variable of PS
task 0, as heartbeats do.
"""

import functools
import pickle
import time
from collections.abc import Callable
from collections.abc import Mapping
from typing import NoReturn

import tensorflow as tf

from tf_replicas import cluster as cluster_module
from tf_replicas.drivers import connection
from tf_replicas.drivers import heartbeats
from tf_replicas.drivers import in_graph
from tf_replicas.fitting import arguments
from tf_replicas.programs import pickles
from tf_replicas.runtime import datasets
from tf_replicas.runtime import processes
from tf_replicas.runtime import resources

# Bytes of a published call: TensorFlow sends a string of at most 2 GiB.
_MAX_BYTES = 1 << 30
_POLL_SECS = 0.2
# A resting worker logs once, after this time, that it waits.
_LOG_SECS = 10.0


class Contributed(Exception):
  """Raised in a worker at the end of a training after its first one.

  This ends the call of `fit` or `run` that the worker made because the chief
  made it. The worker then waits for the next training.
  """


class Series:
  """The trainings of one script on one cluster, as this process sees them.

  Attributes:
    spec: The cluster.
    task: The task of this process.
    replication: "between_graph" or "in_graph".
    number: The number of the present training, or of the last one.
    beats: The heartbeats of this process.
    is_idle: Whether this process waits for the next training.
    timeout_secs: Seconds without a heartbeat after which a worker that waits
      for the next training gives up the chief.
  """

  def __init__(
    self,
    spec: cluster_module.ClusterSpec,
    task: cluster_module.Task,
    replication: str,
    *,
    timeout_secs: float,
  ):
    """Connects this process to the cluster. `start` must be called next.

    Args:
      spec: The cluster.
      task: The task of this process: the chief, or a worker that does not only
        serve.
      replication: "between_graph" or "in_graph".
      timeout_secs: Seconds to wait for the tasks that serve (parameter servers
        and in-graph workers). Also the value of the attribute.

    Raises:
      cluster.ClusterError: If the port of `task` is in use.
      TimeoutError: If a serving task does not answer in time.
      RuntimeError: If a serving task has other versions of TensorFlow, Keras or
        this library.
    """
    self.spec = spec
    self.task = task
    self.replication = replication
    self.is_idle = False
    self.timeout_secs = timeout_secs
    self._is_answering = False
    if replication == "in_graph":
      devices = in_graph.connect_client(spec, timeout_secs=timeout_secs)
      client = 0
    else:
      devices = connection.connect_client(spec, task, timeout_secs=timeout_secs)
      client = spec.replicas.index(task)
    self.beats = heartbeats.Heartbeats(
      client, devices=devices, timeout_secs=timeout_secs
    )
    self.number = 1

  def start(self) -> None:
    """Finds out which training of the series this process has to begin with.

    Returns in the first training. A worker that was started again later waits
    for the next training, takes part in all that follow and ends.

    Raises:
      RuntimeError: If this process is a chief that was started again after the
        first training.
    """
    self.number = self.beats.number()
    has_ended = self.beats.outcome() == heartbeats.FINISHED
    if self.number == 1 and not has_ended:
      if self._is_chief:
        processes.at_exit(self._close)
      return
    if self._is_chief:
      self._refuse_to_go_on()
    # This worker was started again, and its script begins with a training that
    # is over.
    if not has_ended and self.number != heartbeats.OVER:
      self.number -= 1
    self.beats.rest()
    self._answer_calls()

  @property
  def _is_chief(self) -> bool:
    return self.task == self.spec.chief

  @property
  def may_train(self) -> bool:
    """Whether this process may begin another training.

    In the chief, this is False if the last training has failed or still runs.
    """
    return self.is_idle or self._is_answering

  @property
  def namespace(self) -> str:
    """The name of the present training's namespace, which is its number."""
    return str(self.number)

  def _refuse_to_go_on(self) -> NoReturn:
    """Ends all tasks, in a chief that was started again after a training.

    The new process does not have the results of the trainings before.

    Raises:
      RuntimeError: Always.
    """
    message = (
      f"{self.task} was started again after its first training, whose results"
      " are lost: start all tasks again. With a `train_dir` for each training,"
      " they resume"
    )
    self._end_all(message)
    raise RuntimeError(message)

  def _end_all(self, outcome: str) -> None:
    stages = [
      lambda: self.beats.end_series(outcome),
      self.beats.leave,
      lambda: self.beats.shut_down_servers(timeout_secs=10),
    ]
    heartbeats.run_all(stages, log=print)

  def begin_next(
    self,
    caller: str,
    function: Callable[..., object],
    given: Mapping[str, object],
  ) -> None:
    """Begins the next training of the series, in the chief.

    Args:
      caller: Name of the function that the user has called.
      function: The function that the workers have to call.
      given: The keyword arguments of `function`, which are sent to the workers
        with the argument `cluster`.

    Raises:
      ImportError: If cloudpickle is needed, but not installed.
      TypeError, ValueError: If an argument cannot be sent. The message names
        it.
      RuntimeError: If the tasks have ended.
    """
    call = b""
    if self.replication != "in_graph" and len(self.spec.replicas) > 1:
      call = _pickled(caller, function, {**given, "cluster": self.spec})
    try:
      self.beats.raise_if_ended_early()
      for address in self._serving_addresses():
        resources.clear(
          resources.Namespace(self.namespace, self.beats.generation), address
        )
      self.beats.begin_next(call)
    except tf.errors.OpError as error:
      raise RuntimeError(
        f"`{caller}` found that a task of the cluster has ended since the last"
        f" training: start all again ({processes.shortened(error.message)})"
      ) from None
    self.number += 1
    self.is_idle = False

  def _serving_addresses(self) -> list[str]:
    workers = self.spec.addresses("worker")
    is_in_graph = self.replication == "in_graph"
    return self.spec.addresses("ps") + (workers if is_in_graph else [])

  def end_training(self) -> None:
    """Notes that a training has ended without an error, in the chief.

    The chief then may begin another one.
    """
    self.is_idle = True

  def _close(self) -> None:
    """Ends the series for all tasks, at the end of the chief's process.

    Does nothing after a training that failed, whose tasks have ended.
    """
    if self.is_idle:
      self.is_idle = False
      self._end_all(heartbeats.FINISHED)
      connection.disconnect()

  def answer_calls(self) -> NoReturn:
    """Waits for further trainings after one has ended, in a worker.

    The worker takes part in all of them. After the last one, the process ends.

    Raises:
      Contributed: If the training that has ended was one of the further
        trainings. The call of this method that waited for it then waits again.
    """
    if self._is_answering:
      raise Contributed
    self._answer_calls()

  def _answer_calls(self) -> NoReturn:
    self._is_answering = True
    while True:
      with processes.one_line_errors(
        (), (OSError, RuntimeError, tf.errors.OpError)
      ):
        call = self._next_call()
      if call is None:
        processes.exit_now(0)
      try:
        call()
      except Contributed:
        continue
      except Exception as error:
        self.beats.end(f"{self.task}: {heartbeats.outcome_of(error)}")
        self.beats.leave()
        raise

  def _next_call(self) -> Callable[[], object] | None:
    """Waits until the chief begins the next training, in a worker.

    Returns:
      The function that this worker has to call; None if the series is over.

    Raises:
      RuntimeError: If the chief was lost, or a task has ended the series.
    """
    self._await_next()
    if self.beats.number() == heartbeats.OVER:
      outcome = self.beats.outcome()
      self.beats.leave()
      if outcome != heartbeats.FINISHED:
        raise RuntimeError(outcome)
      return None
    self.beats.resume()
    while True:  # The chief may have begun another one before `resume`.
      self.number = self.beats.number()
      call = self.beats.call()
      if self.beats.number() == self.number:
        break
    try:
      function, given = pickle.loads(call)
    except Exception as error:
      message = (
        f"{self.task} cannot unpickle what the chief calls:"
        f" {heartbeats.outcome_of(error)}"
      )
      self.beats.end(message)
      self.beats.leave()
      raise RuntimeError(message) from error
    return functools.partial(function, **given)

  def _await_next(self) -> None:
    since, was_logged = time.monotonic(), False
    while self.beats.number() == self.number != heartbeats.OVER:
      try:
        self.beats.raise_if_ended_early()
      except RuntimeError:
        self.beats.leave()
        raise
      age = self.beats.ages()[0]
      if age > self.timeout_secs:
        message = (
          f"the chief was lost after training {self.number}: no heartbeat for"
          f" {age:.0f} s"
        )
        self._end_all(message)
        raise RuntimeError(message)
      if not was_logged and time.monotonic() - since > _LOG_SECS:
        print(f"{self.task} waits for the chief to train again or to end")
        was_logged = True
      time.sleep(_POLL_SECS)


def _pickled(
  caller: str, function: Callable[..., object], given: Mapping[str, object]
) -> bytes:
  """Pickles a function and its arguments, for the workers to call it.

  Args:
    caller: Name of the function that the user has called, for errors.
    function: The function.
    given: The keyword arguments of `function`.

  Raises:
    ImportError: If cloudpickle is not installed.
    TypeError: If an argument cannot be pickled.
    ValueError: If the arguments are too large.
  """
  needs = f"a second `{caller}` on a cluster sends its arguments, which needs"

  def dumps(value: object) -> bytes:
    return pickles.dumps(value, needs, reduce=_reduce)

  try:
    call = dumps((function, dict(given)))
  except ImportError:
    raise
  except Exception as error:
    name = _culprit(dumps, given)
    raise TypeError(
      f"`{name}` of a second `{caller}` must be what cloudpickle can pickle,"
      " with all that it uses, as the workers get it from the chief:"
      f" {_INSTEAD.get(name, 'make it inside of a function')}. Received:"
      f" {arguments.short(given[name])}, and the error:"
      f" {heartbeats.outcome_of(error)}."
    ) from error
  if len(call) > _MAX_BYTES:
    name = max(given, key=lambda name: len(dumps(given[name])))
    raise ValueError(
      f"the arguments of a second `{caller}` must have at most {_MAX_BYTES}"
      " bytes, as the workers get them from the chief:"
      f" {_INSTEAD.get(name, 'make them in a function')}. Received:"
      f" {len(call)} bytes, most of them in `{name}`."
    )
  return call


_INSTEAD = {
  "x": "pass a function of `tf.distribute.InputContext` that makes the data",
  "model_fn": "make in `model_fn` what it uses",
  "replica_fn": "make in `replica_fn` what it uses",
}


def _culprit(
  dumps: Callable[[object], bytes], given: Mapping[str, object]
) -> str:
  """Returns the name of the first argument that cannot be pickled.

  Args:
    dumps: Pickles a value, or raises an exception.
    given: The arguments by name.
  """
  for name, value in given.items():
    try:
      dumps(value)
    except Exception:
      return name
  return next(iter(given))


def _reduce(value: object) -> object:
  """Tells cloudpickle how to pickle a `tf.data.Dataset`: as its graph.

  Args:
    value: The object to pickle.

  Returns:
    For a data set, (function, arguments): calling the function with the
    arguments makes the data set again. For any other value, `NotImplemented`;
    cloudpickle then pickles the value in its own way.

  Raises:
    TypeError: If the data set calls Python code, or uses a lookup table or a
      variable.
  """
  if isinstance(value, tf.data.Dataset):
    graph = datasets.to_bytes(value)
    return datasets.from_bytes, (graph, value.element_spec)
  return NotImplemented
