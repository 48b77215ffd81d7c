"""Keeps the tasks of a cluster for further trainings of the chief's script.

The script of the chief may train several times on one cluster. These trainings
are a *series*, numbered from 1 on. The number is a prefix of the names of the
training's variables (their namespace), so that trainings share no variables.

All tasks run the script, and so begin the first training by themselves. The
later trainings begin in the chief only. Between two trainings, a worker waits.
The chief publishes which function it calls (`fit` or `run`), and the worker
calls the same function with the same arguments. In-graph workers are servers,
and need not be told.

The published call is pickled by cloudpickle, and sent by way of a variable on
PS task 0.
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
from tf_replicas.drivers import heartbeat_table
from tf_replicas.drivers import heartbeats
from tf_replicas.drivers import in_graph
from tf_replicas.fitting import arguments
from tf_replicas.programs import pickles
from tf_replicas.runtime import datasets
from tf_replicas.runtime import processes
from tf_replicas.runtime import resources
from tf_replicas.runtime import waiting

# Bytes of a published call: TensorFlow sends a string of at most 2 GiB.
_MAX_BYTES = 1 << 30
_POLL_SECS = 0.2
# A resting worker logs once, after this time, that it waits.
_LOG_SECS = 10.0


class Contributed(Exception):
  """Raised in a worker at the end of its second or a later training.

  In such a training, the worker has called `fit` or `run` because the chief
  did. The exception ends that call, and the worker waits for the next training.
  """


class Series:
  """The trainings of one script on one cluster, as this process sees them.

  Attributes:
    spec: The cluster.
    task: The task of this process.
    replication: "between_graph" or "in_graph".
    number: The number of the present training; between two trainings, that of
      the last one.
    beats: The heartbeats of this process.
    is_idle: In the chief: whether the last training has ended without an error,
      and the next one has not begun. In a worker: False.
    timeout_secs: A time limit in seconds. If the chief sends no heartbeat for
      so long, a worker that waits for the next training gives up.
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
      task: The task of this process: the chief, or a between-graph worker.
      replication: "between_graph" or "in_graph".
      timeout_secs: Seconds to wait for the serving tasks (parameter servers and
        in-graph workers). The attribute `timeout_secs` begins with this value.

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
    """Begins the series, or joins it if this process was restarted.

    It returns if the cluster is in its first training. Otherwise, this process
    was restarted. Then a worker waits for the next training, takes part in all
    later trainings, and ends the process.

    Raises:
      RuntimeError: If the cluster is not in its first training any more, and
        this process is the chief. All tasks then end.
      TimeoutError: If the chief does not begin the series in time.
    """
    if self._is_chief:
      self.beats.begin_series()
    else:
      self._await_chief()
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

  def _await_chief(self) -> None:
    """Waits until PS task 0 knows the number of the present training.

    The chief tells it when the series begins, and after a restart of PS task 0.

    Raises:
      TimeoutError: If the chief does not do so in time.
    """
    try:
      waiting.await_value(
        lambda: self.beats.number() != heartbeat_table.NOT_BEGUN,
        timeout_secs=self.timeout_secs,
        what=f"{self.task} waits for the chief to begin the training",
      )
    except TimeoutError:
      self.beats.leave()
      raise

  @property
  def _is_chief(self) -> bool:
    return self.task == self.spec.chief

  @property
  def may_train(self) -> bool:
    """Whether this process may begin another training.

    In the chief, it is True after a training that ended without an error. In a
    worker, it is True from the end of the first training on.
    """
    return self.is_idle or self._is_answering

  @property
  def namespace(self) -> str:
    """The namespace of the present training: its number, as a string."""
    return str(self.number)

  def _refuse_to_go_on(self) -> NoReturn:
    """Ends all tasks. Called in a chief that was restarted too late.

    That is after the first training: its results were in the process that was
    lost.

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
    """Begins the next training of the series. Only the chief calls this.

    It deletes the variables of the training before on all serving tasks, and
    makes the waiting workers call `function`.

    Args:
      caller: The name of the function that the user called, for error messages.
      function: The function that the workers have to call.
      given: Its keyword arguments. `cluster` is added to them.

    Raises:
      ImportError: If cloudpickle is needed, but not installed.
      TypeError, ValueError: If an argument cannot be sent. The message names
        it.
      RuntimeError: If a task of the cluster has ended.
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
    """Notes that a training has ended without an error. The chief calls this.

    It may then begin another training.
    """
    self.is_idle = True

  def _close(self) -> None:
    """Ends the series for all tasks. Called at the end of the chief's process.

    It does nothing if the last training failed, since that has ended all tasks.
    """
    if self.is_idle:
      self.is_idle = False
      self._end_all(heartbeats.FINISHED)
      connection.disconnect()

  def answer_calls(self) -> NoReturn:
    """Waits for the next training. A worker calls this at the end of each.

    After the first training, it takes part in all later trainings, and then
    ends the process. It makes a later training by calling `fit` or `run`, which
    calls this method again at its end. That second call raises `Contributed`,
    and so returns to the first call.

    Raises:
      Contributed: At the end of a later training than the first one.
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
    """Waits until the chief begins the next training or ends the series.

    Returns:
      A function without arguments that this worker has to call, which takes
      part in the training. None if the series is over.

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
        print(
          f"{self.task} waits until the chief begins another training, or the"
          " chief's script ends; nothing to do"
        )
        was_logged = True
      time.sleep(_POLL_SECS)


def _pickled(
  caller: str, function: Callable[..., object], given: Mapping[str, object]
) -> bytes:
  """Pickles a function and its arguments, which are sent to the workers.

  Args:
    caller: The name of the function that the user called, for error messages.
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

  If each argument alone can be pickled, returns the name of the first one.

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
