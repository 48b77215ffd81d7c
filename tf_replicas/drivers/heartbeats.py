"""Sends heartbeats, which show who is alive, and tells how training ended.

A *client* is a task that trains: a worker or the chief. A *serving task* is a
parameter server or, in in-graph replication, a worker. Every serving task has a
*heartbeat table* for each training. The table records when the last heartbeat
of each client arrived (by the clock of the serving task), which process sent
it, and how training ended. It also holds the serving task's versions of
TensorFlow, Keras and this library: a client with incompatible versions does not
join. The table of PS task 0 also describes the chief's variables and update
rule. The other clients compare this description with their own variables and
rule. A client sends heartbeats in one thread per serving task, so that a task
which hangs delays no other.

A process that joins replaces an earlier process of the same client. If the
earlier process still lives (it was stopped, its machine was cut off, or the
same task was started twice), it learns from its next heartbeat that it was
replaced, and ends as if it had died, without telling other tasks anything.

In a *series*, one training follows another, with the same processes and tables.
Between two trainings, the clients other than the chief *rest*: they wait for
the chief to begin the next training or to end the series.

A parameter server that was restarted has an empty table. The table has another
*incarnation*, which is a random number. The clients then attach to all tables
again. The sum of the incarnations of all parameter servers is the *generation*
of the training, which is part of the names of its variables. So all clients
agree on the generation without messages, and none uses variables from before
the restart.
"""

import contextlib
import functools
import json
import math
import os
import secrets
import sys
import time
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_replicas.drivers import heartbeat_table
from tf_replicas.drivers import versions
from tf_replicas.runtime import processes
from tf_replicas.runtime import resources
from tf_replicas.runtime import waiting

BEAT_SECS = 1.0
# A client is alive if its last heartbeat is younger than this.
ALIVE_SECS = 5 * BEAT_SECS
FINISHED = "finished"
# The number of the training when a series is over.
OVER = 0
_REPLACED = "this process was replaced: another one runs as the same task"
# How long the serving tasks may take to answer a client that leaves.
_ANSWER_SECS = 10.0
# How long a serving task that may end may take to do so, and how often to ask.
_END_SECS, _POLL_SECS = 5.0, 0.1


class _Link:
  """Sends the heartbeats of this process to one serving task, in a thread.

  A serving task is a parameter server or an in-graph worker.

  Attributes:
    has_joined: Whether the serving task has received a heartbeat.
    failure: Why the last heartbeat did not reach the serving task; "" if it
      did.
    was_restarted: Whether the serving task was restarted since it received the
      first heartbeat.
    server_leaves: Whether the serving task was asked to end (by SIGTERM), and
      waits until the chief has saved a checkpoint.
  """

  def __init__(
    self,
    table: heartbeat_table.HeartbeatTable,
    client: int,
    process: int,
    *,
    arbitrates: bool,
    log: Callable[[str], None],
    limit_secs: Callable[[], float],
  ):
    """Starts to send heartbeats to one serving task.

    Args:
      table: The heartbeat table of the serving task.
      client: The index of this client, a task that trains.
      process: A number that identifies this process.
      arbitrates: Whether this serving task decides which process is the present
        one, if two processes run as the same client. Only PS task 0 does so.
      log: Receives each line of the log.
      limit_secs: Returns a time limit in seconds. If the serving task takes
        longer to answer a heartbeat, this process ends with an error.
    """
    self._table = table
    self._client = client
    self._process = process
    self._arbitrates = arbitrates
    self.has_joined = self._was_replaced = self._is_leaving = False
    self._rests = self._is_stopped = False
    self.failure = ""
    self.was_restarted = self.server_leaves = False
    # A task that hangs raises no error: its clients wait.
    self._wait_logger = waiting.WaitLogger(
      log=log, limit_secs=limit_secs, on_limit=_end_process
    )
    self._what = f"waiting for an answer of {_task_name(table.device)}"
    self._answered = time.monotonic()
    self._beat()
    self._thread = waiting.PollingThread(
      self._beat, period_secs=BEAT_SECS, at_stop=self._say_goodbye
    )

  def await_join(self, timeout_secs: float, log: Callable[[str], None]) -> None:
    """Waits until the first heartbeat has reached the serving task.

    Args:
      timeout_secs: The time limit in seconds.
      log: Receives each line of the log.

    Raises:
      TimeoutError: If no heartbeat arrives in time. The message has the reason.
    """
    what = (
      f"waiting for {_task_name(self._table.device)} to connect to this task"
    )
    try:
      waiting.await_value(
        lambda: self.has_joined, timeout_secs=timeout_secs, what=what, log=log
      )
    except TimeoutError as error:
      raise TimeoutError(f"{error}: {self.failure}") from None

  def _beat(self, *, is_here: bool = True) -> None:
    with self._wait_logger.during(self._what):
      self._send(is_here=is_here)

  def _say_goodbye(self) -> None:
    if not self._is_stopped:
      self._beat(is_here=False)
    self._wait_logger.stop()

  def _send(self, *, is_here: bool) -> None:
    joins = not (self._arbitrates and self.has_joined)
    try:
      answer = self._table.beat(
        self._client, self._process, is_here, joins=joins, rests=self._rests
      )
      self._was_replaced = not answer.is_current
      self.server_leaves = answer.leaves
      self.has_joined, self.failure = True, ""
      self._answered = time.monotonic()
    except tf.errors.UnavailableError as error:
      # The task is down, and the main thread fails where it matters; or the
      # task cannot connect to this one.
      self.server_leaves = False
      self.failure = processes.shortened(error.message)
    except tf.errors.OpError:  # The task was restarted, or is down.
      self.server_leaves = False
      with contextlib.suppress(tf.errors.OpError):
        table = self._table.attach_again()
        if table.is_ready():
          self._table = table
          self.was_restarted = self.has_joined

  def silence(self) -> float:
    """Returns the seconds since the serving task last answered a heartbeat."""
    return time.monotonic() - self._answered

  def was_replaced(self) -> bool:
    """Returns whether another process of the same task has replaced this one.

    The serving task says so in its answer to a heartbeat. If its last answer is
    older than two seconds, the method first sends another heartbeat.
    """
    is_old = self.silence() > 2 * BEAT_SECS
    if is_old and not self._is_leaving:
      self._send(is_here=True)
    return self._was_replaced

  def rest(self, rests: bool) -> waiting.RaisingThread:
    """Tells the serving task whether this process rests.

    To rest is to wait for the next training of a series. The later heartbeats
    say the same, until the next call.

    Args:
      rests: Whether this process rests.

    Returns:
      A thread that sends the information, already started. The caller has to
      join it.
    """
    self._rests = rests
    return waiting.RaisingThread(self._beat, on_error=lambda: None)

  def stop(self) -> None:
    """Stops the heartbeats, without telling the serving task.

    It does not wait for a heartbeat that is under way.
    """
    self._is_stopped = True
    self._thread.request_stop()

  def leave(self) -> waiting.RaisingThread:
    """Stops the heartbeats. The last one says that this process leaves.

    Returns:
      The thread that sends the last heartbeat. The caller has to join it.
    """
    self._is_leaving = True
    self._thread.request_stop()
    return self._thread

  def release(self) -> None:
    """Lets the serving task end, which leaves; training does not end.

    It does nothing if the serving task cannot be reached.
    """
    with contextlib.suppress(tf.errors.OpError):
      self._table.release()

  def dismiss(self, outcome: str) -> None:
    """Tells the serving task to end, also if it was restarted.

    It does nothing if the serving task cannot be reached.

    Args:
      outcome: How training ended: `FINISHED`, or an error in one line.
    """
    try:
      self._table.dismiss(outcome)
    except tf.errors.OpError:
      # A task that is down has no table; its operator has to end it.
      with contextlib.suppress(tf.errors.OpError):
        self._table.attach_again().dismiss(outcome)


def _is_ps(table: heartbeat_table.HeartbeatTable) -> bool:
  return tf.DeviceSpec.from_string(table.device).job in (None, "ps")


def _no_limit() -> float:
  return math.inf


def _end_process(message: str) -> None:
  """Prints an error, and ends this process at once, with exit status 1.

  It does not wait for other threads, since they may hang in TensorFlow.
  """
  print(f"error: {message}", file=sys.stderr, flush=True)
  os._exit(1)


class Heartbeats:
  """Sends the heartbeats of this process, and reads those of the others.

  A client is a task that trains: a worker or the chief. A serving task is a
  parameter server or an in-graph worker. A client sends its heartbeats to every
  serving task, which keeps them in a table.

  Attributes:
    client: The index of this client.
    answer_timeout_secs: A time limit in seconds. If a parameter server takes
      longer to answer a heartbeat, this process ends with an error. Infinite at
      first.
  """

  def __init__(
    self,
    client: int,
    *,
    devices: Sequence[str],
    timeout_secs: float = 60.0,
    namespace: resources.Namespace = resources.DEFAULT_NAMESPACE,
    log: Callable[[str], None] = print,
  ):
    """Attaches to the heartbeat tables and starts to send heartbeats.

    Args:
      client: The index of this client, from 0 on. Client 0 is the chief.
      devices: One device of each serving task. The first device is that of PS
        task 0.
      timeout_secs: Seconds to wait for the table of each serving task, and then
        for the first heartbeat to arrive there.
      namespace: The namespace of the training, one of those given to
        `server.serve`.
      log: Receives each line of the log.

    Raises:
      RuntimeError: If a serving task has an incompatible version of TensorFlow,
        Keras or this library.
      TimeoutError: If a serving task has no table for the namespace in time, or
        receives no heartbeat in time, for example because it cannot resolve the
        host name of this task.
      ValueError: If `client` is not below the number of clients for which a
        serving task has a table.
    """
    self.client = client
    self.answer_timeout_secs = math.inf
    self._log = log
    self._outcome_if_lost = "PS task 0 was lost"
    self._process = secrets.randbelow(1 << 62) + 1
    tables = [heartbeat_table.HeartbeatTable(d, namespace) for d in devices]
    for table in tables:
      of_training = f" of training {namespace.name!r}" if namespace.name else ""
      waiting.await_value(
        table.is_ready,
        timeout_secs=timeout_secs,
        what=(
          f"waiting for the heartbeat table{of_training} on"
          f" {_task_name(table.device)}"
        ),
        log=log,
      )
      versions.compare(
        json.loads(table.versions.numpy()), _task_name(table.device), log=log
      )
      num_clients = len(table.ages())
      if client >= num_clients:
        raise ValueError(
          "`num_clients` of `tf_replicas.serve` must be at least"
          f" {client + 1}, as this client has the number {client}. Received:"
          f" {num_clients}, by {_task_name(table.device)}."
        )
    self._number, self._call = 1, b""
    self._link(tables, timeout_secs)

  def _link(
    self, tables: list[heartbeat_table.HeartbeatTable], timeout_secs: float
  ) -> None:
    """Starts to send heartbeats to all serving tasks.

    Args:
      tables: The table of each serving task. The first is that of PS task 0.
      timeout_secs: Seconds to wait for the first heartbeat to arrive.

    Raises:
      TimeoutError: If a serving task receives no heartbeat in time.
    """
    self._tables = tables
    self._incarnations = [
      table.read_incarnation() for table in tables if _is_ps(table)
    ]
    self._first = tables[0]
    self._links = [
      _Link(
        table,
        self.client,
        self._process,
        arbitrates=table is self._first,
        log=self._log,
        limit_secs=(
          (lambda: self.answer_timeout_secs) if _is_ps(table) else _no_limit
        ),
      )
      for table in tables
    ]
    try:
      for link in self._links:
        link.await_join(timeout_secs, self._log)
    except TimeoutError:
      self.leave()
      raise

  @property
  def generation(self) -> int:
    """A number that is part of the names of the training's variables.

    It identifies the processes of the parameter servers to which this process
    is attached: clients with equal generations are attached to the same
    processes. It changes when this process attaches again after a parameter
    server was restarted.
    """
    return sum(self._incarnations)

  def attach_again(self, timeout_secs: float) -> None:
    """Attaches to all tables again, after a serving task was restarted.

    This process must be connected to the new process of the serving task.

    Args:
      timeout_secs: Seconds to wait for the first heartbeat to arrive.

    Raises:
      tf.errors.OpError: If a serving task does not answer, or has no table yet.
      TimeoutError: If a serving task receives no heartbeat in time.
    """
    tables = [table.attach_again() for table in self._tables]
    for table in tables:
      if not table.is_ready():
        message = f"{_task_name(table.device)} has no heartbeat table yet"
        raise tf.errors.UnavailableError(None, None, message)
    for link in self._links:
      link.stop()
    self._link(tables, timeout_secs)

  def lost(self) -> list[str]:
    """Returns the parameter servers that are lost, by the last heartbeats.

    A parameter server is lost if the last heartbeat failed, or if it was
    restarted and this process has not attached again. One that hangs is not
    lost. The method sends nothing.

    Returns:
      The names of the lost tasks, such as "ps 0".
    """
    return [
      _task_name(table.device)
      for table, link in zip(self._tables, self._links, strict=True)
      if _is_ps(table)
      and link.has_joined
      and (link.failure or link.was_restarted)
    ]

  def unreachable_workers(self) -> list[str]:
    """Returns the in-graph workers that the last heartbeat did not reach.

    One that hangs is left out. The method sends nothing.

    Returns:
      The names of the workers, such as "worker 0".
    """
    return [
      _task_name(table.device)
      for table, link in zip(self._tables, self._links, strict=True)
      if not _is_ps(table) and link.failure
    ]

  def leaving(self) -> list[str]:
    """Returns the parameter servers that wait for a checkpoint before they end.

    They were asked to end, by SIGTERM. The method sends nothing: the last
    heartbeats tell, which are about a second old.

    Returns:
      The names of these tasks, such as "ps 0".
    """
    return list(self._leaving())

  def _leaving(self) -> dict[str, _Link]:
    """Returns the links to the parameter servers that leave, by task name."""
    return {
      _task_name(table.device): link
      for table, link in zip(self._tables, self._links, strict=True)
      if _is_ps(table) and link.server_leaves
    }

  def release(self) -> None:
    """Lets the parameter servers end that `leaving` returns.

    It returns when a heartbeat has shown that they have ended. It waits for
    ten seconds at most for their answers, and then for five.
    """
    leaving = self._leaving()
    _await_answers(
      [
        waiting.RaisingThread(link.release, on_error=bool)
        for link in leaving.values()
      ]
    )
    deadline = time.monotonic() + _END_SECS
    while leaving.keys() - self.lost() and time.monotonic() < deadline:
      time.sleep(_POLL_SECS)

  def find_lost(self) -> list[str]:
    """Calls every parameter server, and returns those that are lost.

    A parameter server is lost if the call fails, or if it was restarted since
    this process attached to it. One that hangs is not lost: the method waits
    for its answer, without a time limit.

    Returns:
      The names of the lost tasks, such as "ps 0".
    """
    found = []
    for table, known in zip(self._tables, self._incarnations, strict=False):
      try:
        is_lost = table.read_incarnation() != known
      except tf.errors.OpError:
        is_lost = True
      if is_lost:
        found.append(_task_name(table.device))
    return found

  def renew(self) -> None:
    """Makes all clients attach again, as if PS task 0 had been restarted.

    For them, it is lost now. Only the chief calls this.
    """
    self._first.renew()

  @property
  def is_replaced(self) -> bool:
    """Whether another process of the same task has replaced this one.

    PS task 0 decides that. The property may have to ask it.
    """
    return self._links[0].was_replaced()

  def raise_if_replaced(self) -> None:
    """Raises RuntimeError if another process has replaced this one.

    That process runs as the same task, and has started later.
    """
    if self.is_replaced:
      raise RuntimeError(_REPLACED)

  def silences(self) -> list[float]:
    """Returns the seconds since each serving task last answered this process.

    Returns:
      One number per serving task: first the parameter servers, then the
      in-graph workers, if any.
    """
    return [link.silence() for link in self._links]

  def ages(self) -> list[float]:
    """Returns the seconds since the last heartbeat of each client.

    Returns:
      One number per client. -1: there was no heartbeat yet. 0: the client has
      left. A number x below -2: the client waits for the next training of a
      series, and its last heartbeat was -2 - x seconds ago.
    """
    return self._first.ages()

  def trace_ahead(self) -> None:
    """Traces the TensorFlow functions that `ages` and `outcome` use.

    In in-graph replication, tracing calls every task, and hangs if one of them
    hangs. So functions are traced before the first update, while all tasks
    answer.
    """
    self.ages()
    self.outcome()

  def here(self) -> list[int]:
    """Returns the indices of the other clients that are alive.

    A client is alive if its last heartbeat came in the last five seconds.
    Clients that wait for the next training of a series are left out.
    """
    return [
      client
      for client, age in enumerate(self.ages())
      if client != self.client and 0 < age < ALIVE_SECS
    ]

  def _resting(self) -> list[int]:
    """Returns the indices of the clients that rest and are alive.

    To rest is to wait for the next training of a series. A client is alive if
    its last heartbeat came in the last five seconds.
    """
    rests = heartbeat_table.RESTS
    return [
      client
      for client, age in enumerate(self.ages())
      if 0 < rests - age < ALIVE_SECS
    ]

  def publish(self, signature: Mapping) -> None:
    """Publishes what the chief trains. Only the chief calls this.

    Args:
      signature: The name of the training, and a description of the variables
        and the update rule, of types that JSON can represent. `published`
        returns it in the other tasks.
    """
    table = self._first
    if self.number() != self._number:  # PS task 0 was started or restarted.
      self._assign(table.call, self._call)
      self._assign(table.number, self._number)
    table.signature.assign(json.dumps(signature))
    resources.flush_assignments([table.signature])

  def published(self) -> dict | None:
    """Returns the description that the chief has given to `publish`.

    Returns None if the chief has not published it yet.
    """
    text = self._first.signature.numpy().decode()
    return json.loads(text) if text else None

  def open_training(self) -> None:
    """Lets the other tasks begin to train. Only the chief calls this.

    Call it after the variables were initialized or restored.
    """
    self._first.is_open.assign(True)

  def close_training(self) -> None:
    """Takes back `open_training`. Only the chief calls this.

    It is needed after the loss of a parameter server other than PS task 0. Then
    the table of PS task 0 still says that the other tasks may train, while the
    variables have no values.
    """
    self._first.is_open.assign(False)
    resources.flush_assignments([self._first.is_open])

  def is_open(self) -> bool:
    """Returns whether the chief has let the other tasks begin to train."""
    return bool(self._first.is_open.numpy())

  def outcome(self) -> str:
    """Returns how training ended, as announced on PS task 0.

    Returns:
      "" while training goes on, then `FINISHED` or an error in one line. In a
      process that was replaced, an error that says so.
    """
    return _REPLACED if self.is_replaced else self._outcome()

  def _outcome(self) -> str:
    return self._first.outcome.numpy().decode()

  def number(self) -> int:
    """Returns the number of the present training of a series.

    The first training has the number 1. Once the series has ended, the number
    is `OVER` (0). Until the chief has published a number, it is
    `heartbeat_table.NOT_BEGUN` (-1). It is so again after a restart of PS task
    0.
    """
    return int(self._first.number.numpy())

  def call(self) -> bytes:
    """Returns the function call that workers make in the present training.

    The workers repeat the call of the chief, such as a call of `fit`.

    Returns:
      The function and its arguments, pickled by `fitting.series`. b"" in the
      first training, which all tasks begin by themselves.
    """
    return self._first.call.numpy()

  def begin_series(self) -> None:
    """Begins the first training of a series. Only the chief calls this.

    It does nothing if an earlier process of the chief has begun the series.
    """
    if self.number() == heartbeat_table.NOT_BEGUN:
      self._assign(self._first.number, self._number)

  def begin_next(self, call: bytes) -> None:
    """Begins the next training of a series. Only the chief calls this.

    Args:
      call: The function call that the other tasks make in this training,
        pickled. They get it from the method `call`.
    """
    table = self._first
    number = self._number + 1
    self._number, self._call = number, call
    table.call.assign(call)
    table.signature.assign("")
    table.is_open.assign(False)
    self._assign(table.outcome, "")
    self._assign(table.number, number)  # Last: others wait for it.

  def end_series(self, outcome: str) -> None:
    """Ends a series of trainings. Tasks that wait for the next one then leave.

    Args:
      outcome: How the series ended: `FINISHED`, or an error in one line.
    """
    self._outcome_if_lost = outcome
    self._assign(self._first.outcome, outcome)
    self._assign(self._first.number, OVER)

  def raise_if_ended(self) -> None:
    """Raises `RuntimeError` if training has ended, with or without an error.

    The message says how it ended.
    """
    outcome = self.outcome()
    if outcome:
      raise RuntimeError(outcome)

  def raise_if_ended_early(self) -> None:
    """Raises `RuntimeError` if training has ended with an error."""
    if self.outcome() != FINISHED:
      self.raise_if_ended()

  def end(self, outcome: str) -> None:
    """Announces how training ended, unless it was announced before.

    Args:
      outcome: `FINISHED`, or an error in one line.
    """
    self._outcome_if_lost = outcome
    if not self.outcome():
      self._assign(self._first.outcome, outcome)

  def _assign(self, variable: resources.SharedVariable, value: object) -> None:
    """Assigns a value to a shared variable, and waits until it is assigned.

    So all later reads, in any task, return the value.
    """
    variable.assign(value)
    resources.flush_assignments([variable])

  @contextlib.contextmanager
  def announce_failure(self, is_chief: bool) -> Iterator[None]:
    """Makes a context for the code that builds a training.

    If the chief raises an error in this context, the other tasks are told about
    the error, and all tasks end. This is not done once the training was opened
    (`open_training`): then the chief was restarted, and the other tasks wait
    for another restart.

    Args:
      is_chief: Whether this process is the chief. If False, the context does
        nothing.
    """
    try:
      yield
    except Exception as error:
      is_open = False
      # If PS task 0 cannot be reached, `error` must not be replaced.
      with contextlib.suppress(tf.errors.OpError):
        is_open = self.is_open()
      if is_chief and not self.is_replaced and not is_open:
        outcome = outcome_of(error)
        stages = [lambda: self.end(outcome), self.leave]
        stages.append(lambda: self.shut_down_servers(timeout_secs=10))
        run_all(stages, log=self._log)
      raise

  def rest(self) -> None:
    """Tells the serving tasks that this process waits for the next training."""
    _await_answers([link.rest(True) for link in self._links])

  def resume(self) -> None:
    """Tells the serving tasks that this process takes part in training again.

    It ends the effect of `rest`.
    """
    _await_answers([link.rest(False) for link in self._links])

  def leave(self) -> None:
    """Tells the serving tasks that this process leaves, and stops heartbeats.

    It waits for their answers for at most ten seconds.
    """
    _await_answers([link.leave() for link in self._links])

  def shut_down_servers(self, *, timeout_secs: float) -> list[int]:
    """Waits for the other clients to leave, and tells the serving tasks to end.

    Only the chief calls this, as its last call.

    Args:
      timeout_secs: Seconds to wait until the other clients have left.

    Returns:
      The indices of the clients that were still alive after the wait.
    """
    deadline = time.monotonic() + timeout_secs
    try:
      while here := self.here() + self._resting():
        if time.monotonic() > deadline:
          break
        time.sleep(0.05)
      outcome = self._outcome()
    except tf.errors.OpError:  # PS task 0 is down: dismiss the others.
      here, outcome = [], self._outcome_if_lost
    first, *others = self._links
    # PS task 0 last: clients may still read from it.
    for links in others, [first]:
      _await_answers(
        [
          waiting.RaisingThread(
            functools.partial(link.dismiss, outcome), on_error=bool
          )
          for link in links
        ]
      )
    return here


def _task_name(device: str) -> str:
  task = tf.DeviceSpec.from_string(device)
  return f"{task.job} {task.task}" if task.job else device


def _await_answers(threads: Sequence[waiting.RaisingThread]) -> None:
  """Joins threads that call serving tasks, for at most ten seconds in all.

  A thread whose serving task hangs is left behind.
  """
  deadline = time.monotonic() + _ANSWER_SECS
  for thread in threads:
    thread.join(max(deadline - time.monotonic(), 0.0))


def run_all(
  stages: Iterable[Callable[[], object]], *, log: Callable[[str], None]
) -> bool:
  """Calls functions that shut a training down, one after the other.

  If a function raises an error, logs that, and calls the next one.

  Args:
    stages: The functions, in order.
    log: Receives each line of the log.

  Returns:
    True if no function raised an error.
  """
  is_done = True
  for stage in stages:
    try:
      stage()
    except Exception as error:
      message = processes.shortened(str(error))
      log(f"one step of the shutdown failed; the shutdown goes on: {message}")
      is_done = False
  return is_done


def outcome_of(error: BaseException | None) -> str:
  """Describes in one line how training ended.

  Args:
    error: The error that ended the training; None if there was none.

  Returns:
    `FINISHED`, or the message of `error` in one line.
  """
  if error is None:
    return FINISHED
  return " ".join(str(error).split()) or type(error).__name__


def differences(
  ours: Sequence[Mapping[str, Any]],
  theirs: Sequence[Mapping[str, Any]],
  limit: int = 3,
) -> list[str]:
  """Describes how a task's variables differ from those of the chief.

  Args:
    ours: The variables of this task, as `ParameterStore.signature` returns
      them.
    theirs: The same for the variables of the chief.
    limit: The number of differences to describe. Further ones are only counted.

  Returns:
    One phrase for each difference; empty if the lists are equal.
  """
  found = []
  for number in range(max(len(ours), len(theirs))):
    mine = ours[number] if number < len(ours) else None
    other = theirs[number] if number < len(theirs) else None
    if mine != other:
      found.append(
        f"variable {number} is {_described(mine)} here and"
        f" {_described(other)} at the chief"
      )
  if len(found) > limit:
    found[limit:] = [f"and {len(found) - limit} more"]
  return found


def _described(variable: Mapping[str, Any] | None) -> str:
  """Describes a variable in words, such as `w (shape [3], float32, on ps 0)`.

  Args:
    variable: An element of `ParameterStore.signature`. None: there is no such
      variable.
  """
  if variable is None:
    return "absent"
  parts = [
    f"shape {variable['shape']}",
    variable["dtype"],
    f"on ps {', '.join(map(str, variable['ps']))}",
  ]
  if "rows" in variable:
    parts.append(f"rows divided by {variable['rows']!r}")
  return f"{variable['path']} ({', '.join(parts)})"
