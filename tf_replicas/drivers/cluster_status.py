"""Finds out from outside what a training on parameter servers does.

The *serving tasks* are the parameter servers and, in in-graph replication, the
workers. Variables on them record which processes are alive (the heartbeat
tables) and what the update rule has done. `ClusterReader` reads these variables
by their names, without taking part in the training. It waits for a task that
hangs only until a time limit.

A *contribution* is one replica's gradients for one update.
"""

import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_replicas import cluster
from tf_replicas.drivers import heartbeat_table
from tf_replicas.drivers import heartbeats
from tf_replicas.rules import protocol
from tf_replicas.rules import results
from tf_replicas.rules.asynchronous import async_admission
from tf_replicas.rules.sync import chief_recovery
from tf_replicas.rules.sync import ledger as ledger_lib
from tf_replicas.runtime import observation
from tf_replicas.runtime import processes
from tf_replicas.runtime import resources
from tf_replicas.runtime import waiting

# The names of shared variables, with their dtypes.
_TABLE = {
  "beats": tf.float64,
  "outcome": tf.string,
  "is_open": tf.bool,
  "signature": tf.string,
  "number": tf.int64,
}
_PROGRESS = {
  "global_step": tf.int64,
  "examples_seen": tf.int64,
  "begun": tf.int64,
}
_LEDGER = {
  f"ledger/{name}": tf.as_dtype(np.asarray(value).dtype)
  for name, value in ledger_lib.new_ledger(1, 1)._asdict().items()
}
_ASYNC = {f"async/{name}": tf.int64 for name in ("state", "applied", "dropped")}
_GATES = {
  f"gates/{gate}/{name}": tf.int64
  for gate in ("before", "after")
  for name in ("clocks", "waiting")
}
_RULE = {**_LEDGER, **_ASYNC, **_GATES}
# A rule that switches has two rules, with these prefixes of their names.
_PREFIXES = ("", "rule0/", "rule1/")
_PROC = ("/proc/self/status", "/proc/self/net/dev")

# The presence of a client.
_ABSENT, _ALIVE, _SILENT, _RESTS, _LEFT = (
  "not here yet",
  "alive",
  "silent",
  "waits for the next training",
  "has left",
)


@dataclasses.dataclass(frozen=True)
class ServingTask:
  """What is known of a parameter server or an in-graph worker.

  Attributes:
    task: The name of the task, such as "ps 0".
    address: Its address, "host:port".
    error: Why it gave no answer; "" if it answered.
    memory_bytes: The resident memory of its process; -1 if not known.
    received_bytes: The bytes that its machine has received from the network,
      including loopback, since the machine started; -1 if not known. A
      container counts as a machine.
    sent_bytes: The same for the bytes that were sent.
    queued_gradients: The number of contributions that wait in its queues to be
      applied.
    row_updates: The number of rows of tables that updates have changed on it; a
      row counts once per update. -1 without tables, or if not known.
  """

  task: str
  address: str
  error: str = ""
  memory_bytes: int = -1
  received_bytes: int = -1
  sent_bytes: int = -1
  queued_gradients: int = 0
  row_updates: int = -1


@dataclasses.dataclass(frozen=True)
class Client:
  """What is known of a process that trains: the chief, or a worker.

  Attributes:
    task: The name of the task, such as "worker 1".
    address: Its address, "host:port".
    is_chief: Whether it is the chief.
    presence: "not here yet", "alive", "silent" (it should send heartbeats, but
      none came in the last five seconds), "waits for the next training" (of a
      series of trainings) or "has left".
    heartbeat_secs: Seconds since its last heartbeat. None if it is not here yet
      or has left.
  """

  task: str
  address: str
  is_chief: bool
  presence: str
  heartbeat_secs: float | None


@dataclasses.dataclass(frozen=True)
class Replica:
  """What the update rule has recorded of one replica.

  Attributes:
    task: The name of the task that computes its gradients.
    doing: What it does now: a `protocol.Status` in lower case, such as
      "computing".
    applied: The number of its contributions that updates have used.
    refused: The number of its contributions that were refused.
    mean_staleness: The mean staleness of the applied contributions. It is the
      number of updates between reading the variables and applying the
      gradients.
    max_staleness: The largest staleness of these contributions.
    waited_secs: Seconds for which updates waited for this replica alone.
    missed: The number of updates that were made without it, with
      `min_contributions`: it was lost, or a step exceeded its deadline.
  """

  task: str
  doing: str
  applied: int
  refused: int
  mean_staleness: float
  max_staleness: int
  waited_secs: float
  missed: int = 0


@dataclasses.dataclass(frozen=True)
class Status:
  """The state of a training, as its serving tasks have recorded it.

  Attributes:
    time: The time, in seconds since 1970.
    state: "starting", "running" or "ended".
    outcome: How training ended: "finished" or an error; "" before the end.
    number: The number of the training in a series of trainings, from 1 on; 1 if
      there is no series or its number is not known, 0 after its end.
    rule: The settings of the update rule, by name; empty if not known yet.
    global_step: The number of updates so far; -1 if not known.
    examples_seen: The number of examples in these updates; -1 if not known.
    steps_per_sec, examples_per_sec: The rates since the last reading; None in
      the first one.
    parameter_bytes: The size in bytes of all variables of the model, without
      optimizer slots and moving averages.
    received: The number of contributions that the next update has already.
    needed: The number of contributions that it needs. `received` and `needed`
      are 0 for rules whose updates wait for nobody.
    serving: The parameter servers and in-graph workers.
    clients: The processes that train.
    replicas: What the update rule has recorded of each replica.
    queues: The number of elements in the queues of PS task 0, by name. Queues
      that exist once per replica are added up.
    waits: Sentences that say which task waits for which.
    faults: Sentences that say what is wrong, and what happens because of it.
  """

  time: float
  state: str
  outcome: str = ""
  number: int = 1
  rule: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  global_step: int = -1
  examples_seen: int = -1
  steps_per_sec: float | None = None
  examples_per_sec: float | None = None
  parameter_bytes: int = 0
  received: int = 0
  needed: int = 0
  serving: Sequence[ServingTask] = ()
  clients: Sequence[Client] = ()
  replicas: Sequence[Replica] = ()
  queues: Mapping[str, int] = dataclasses.field(default_factory=dict)
  waits: Sequence[str] = ()
  faults: Sequence[str] = ()


@dataclasses.dataclass
class _Answer:
  """What one serving task has answered.

  Attributes:
    error: Why there is no answer; "" if there is one.
    time: The time by the clock of the task, in seconds since 1970.
    table: The values of the variables of its heartbeat table, by name.
    files: The texts of the files `_PROC`, which have its use of memory and of
      the network; empty if its system is not Linux.
    queued: The number of contributions in its queues.
    row_updates: The number of rows of tables that updates have changed on it;
      -1 if it is not known.
  """

  error: str = "no answer"
  time: float = 0.0
  table: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
  files: list[str] = dataclasses.field(default_factory=list)
  queued: int = 0
  row_updates: int = -1


class ClusterReader:
  """Reads the state of a training; `read` may be called again and again."""

  def __init__(
    self,
    spec: cluster.ClusterSpec,
    *,
    timeout_secs: float = 3.0,
    namespace: str = "",
  ):
    """Prepares to read. It does not connect to the cluster yet.

    Args:
      spec: The cluster. No port may be 0.
      timeout_secs: Seconds after which a serving task counts as not answering.
      namespace: The `namespace` that was given to the driver of the training.
        "" finds a training without a namespace, or the present training of a
        series (of calls of `fit` or `run`).

    Raises:
      cluster.ClusterError: If the cluster has no parameter servers, or a port
        is 0.
      ValueError: If `namespace` is invalid.
    """
    if not spec.num_tasks("ps"):
      raise cluster.ClusterError(
        f"{spec.where}`cluster` must have parameter servers, which record the"
        f" state of the training. Received jobs: {', '.join(spec.jobs)}."
      )
    for task in spec.tasks():
      if spec.address(task).endswith(":0"):
        raise cluster.ClusterError(
          f"{spec.where}`cluster` must have the ports that the tasks use, not"
          " port 0; a launcher writes them to cluster.json in the directory of"
          f" its logs. Received: {spec.address(task)} for {task}."
        )
    self._spec = spec
    self._timeout_secs = timeout_secs
    self._namespace = resources.Namespace(namespace)
    self._last: Status | None = None
    self._readers: dict[cluster.Task, observation.TaskReader] = {}
    # Calls that a task has not answered in time.
    self._pending: dict[cluster.Task, waiting.RaisingThread] = {}

  def _ask(
    self,
    tasks: Iterable[cluster.Task],
    ask: Callable[[cluster.Task, observation.TaskReader], None],
  ) -> dict[cluster.Task, str]:
    """Calls `ask` for all tasks at the same time, each in a thread.

    A task whose thread of an earlier call still waits is not asked again.

    Args:
      tasks: The tasks to ask.
      ask: Asks one task: a function of the task and of its reader.

    Returns:
      For each task, why it gave no answer in time; "" if it answered.
    """
    errors = {}
    for task in tasks:
      pending = self._pending.get(task)
      if pending is not None and pending.is_alive():
        errors[task] = self._silence
        continue
      errors[task] = ""
      if task not in self._readers:
        self._readers[task] = observation.TaskReader(
          task.job,
          task.index,
          self._spec.address(task),
          timeout_secs=self._timeout_secs,
        )
      self._pending[task] = waiting.RaisingThread(
        lambda task=task: ask(task, self._readers[task]), on_error=bool
      )
    for task in [task for task, error in errors.items() if not error]:
      thread = self._pending[task]
      try:
        # A call may have several parts, each with the time limit.
        thread.join(2 * self._timeout_secs)
        errors[task] = self._silence if thread.is_alive() else ""
      except tf.errors.DeadlineExceededError:
        errors[task] = self._silence
      except tf.errors.OpError as error:
        errors[task] = processes.shortened(error.message)
    return errors

  @property
  def _silence(self) -> str:
    return f"no answer for {self._timeout_secs:g} s"

  def read(self) -> Status:
    """Reads the present state of the training.

    It raises no error if a serving task does not answer. Then `Status.faults`
    names the task.
    """
    answers: dict[cluster.Task, _Answer] = {}

    def ask(task, reader):
      answer = _Answer()
      answer.time = reader.time()
      answer.table = reader.variables(
        self._namespace.child("heartbeats"), _TABLE
      )
      with contextlib.suppress(tf.errors.NotFoundError):  # Not on Linux.
        answer.files = reader.files(_PROC)
      answers[task] = answer

    def ask_all(tasks):
      for task, error in self._ask(tasks, ask).items():
        answer = answers.setdefault(task, _Answer())
        answer.error = error

    ask_all(self._spec.tasks("ps"))
    first = self._spec.tasks("ps")[0]
    known = answers[first]
    if known.error:  # The other tasks know the heartbeats, too.
      known = next((a for a in answers.values() if not a.error), known)
    is_in_graph = _is_in_graph(self._spec, known.table.get("beats"))
    if is_in_graph:
      ask_all(self._spec.tasks("worker"))
    training: dict[str, Any] = {}
    queues: dict[str, int] = {}
    if not answers[first].error:
      self._read_training(answers, training, queues)
    status = summarize(
      self._spec,
      {task: _serving_task(self._spec, task, a) for task, a in answers.items()},
      known.table if not known.error else {},
      training,
      queues,
      now=known.time,
      is_in_graph=is_in_graph,
    )
    status = _with_rates(status, self._last)
    if status.global_step >= 0:
      self._last = status
    return status

  def _read_training(
    self,
    answers: Mapping[cluster.Task, _Answer],
    training: dict[str, Any],
    queues: dict[str, int],
  ) -> None:
    """Reads what the update rule has recorded, and the lengths of its queues.

    The results are added to the arguments. Nothing is added if the training has
    no variables yet.

    Args:
      answers: The answers of the serving tasks so far. Receives `queued` and
        `row_updates`, and `error` of a task that does not answer any more.
      training: Receives the values of variables of PS task 0, by name.
      queues: Receives the lengths of the queues of PS task 0, by name.
    """
    first, *_ = servers = self._spec.tasks("ps")
    table = answers[first].table
    # The chief publishes it, and the generation of the variables with it.
    published = np.asarray(table.get("signature", b"")).item()
    generation = json.loads(published)["generation"] if published else 0
    names = [dataclasses.replace(self._namespace, generation=generation)]
    # The trainings of a series have their numbers as names.
    number = _number(table)
    if not self._namespace.name:
      names.append(resources.Namespace(str(number), generation))
    wanted = {**_PROGRESS, "rules/in_use": tf.int64}
    wanted |= {p + n: dtype for p in _PREFIXES for n, dtype in _RULE.items()}
    found: list[resources.Namespace] = []

    def ask_first(_, reader):
      for namespace in names:
        values = reader.variables(namespace, wanted)
        if "global_step" in values:
          training.update(values)
          found.append(namespace)
          queues.update(
            zip(
              paths := _queue_names(values),
              reader.queue_sizes(namespace, paths),
              strict=True,
            )
          )
          return

    error = self._ask([first], ask_first)[first]
    if error:
      # A series deletes a training's variables before it begins the next.
      queues.clear()
    if not found:
      return
    paths = [
      f"{prefix}gradients/{replica}"
      for prefix in _PREFIXES
      if f"{prefix}ledger/status" in training
      for replica in range(len(training[f"{prefix}ledger/status"]))
    ]

    def ask_further(task, reader):
      answers[task].queued = sum(reader.queue_sizes(found[0], paths))
      name = f"row_updates/{task.index}"
      values = reader.variables(found[0], {name: tf.int64})
      answers[task].row_updates = int(values.get(name, -1))

    for task, error in self._ask(
      [t for t in servers if not answers[t].error], ask_further
    ).items():
      if error == self._silence:
        answers[task].error = error

  def close(self) -> None:
    """Ends the connections to the tasks. It skips tasks that hang."""

    def close(_, reader):
      reader.close()

    idle = [t for t, thread in self._pending.items() if not thread.is_alive()]
    self._ask(idle, close)


def _queue_names(values: Mapping[str, np.ndarray]) -> list[str]:
  """Returns the names of the queues that the update rules have on PS task 0.

  Args:
    values: The values of the variables of the rules, by name. They tell which
      rules there are.
  """
  names = []
  for prefix in _PREFIXES:
    if f"{prefix}ledger/status" in values:
      names.append(f"{prefix}inbox")
      names += [
        f"{prefix}replies/{replica}"
        for replica in range(len(values[f"{prefix}ledger/status"]))
      ]
    if f"{prefix}async/state" in values:
      names += [f"{prefix}async/progress", f"{prefix}async/retries"]
  return names


def _is_in_graph(spec: cluster.ClusterSpec, beats: np.ndarray | None) -> bool:
  """Returns whether the training is in-graph: one client drives all workers.

  Args:
    spec: The cluster.
    beats: The variable `beats` of a heartbeat table, with one element per
      client; None if it is not known. Then the result is False.
  """
  return beats is not None and len(beats) == 1 < len(spec.replicas)


def _serving_task(
  spec: cluster.ClusterSpec, task: cluster.Task, answer: _Answer
) -> ServingTask:
  address = spec.address(task)
  if answer.error:
    return ServingTask(str(task), address, answer.error)
  memory, received, sent = -1, -1, -1
  if answer.files:
    memory = _memory(answer.files[0])
    received, sent = _traffic(answer.files[1])
  return ServingTask(
    str(task),
    address,
    memory_bytes=memory,
    received_bytes=received,
    sent_bytes=sent,
    queued_gradients=answer.queued,
    row_updates=answer.row_updates,
  )


def _memory(status: str) -> int:
  """Returns the resident memory in bytes, from the text of /proc/self/status.

  Returns -1 if the text does not have it.
  """
  found = re.search(r"^VmRSS:\s*(\d+) kB", status, re.MULTILINE)
  return int(found[1]) * 1024 if found else -1


def _traffic(devices: str) -> tuple[int, int]:
  """Returns (bytes received, bytes sent), from the text of /proc/self/net/dev.

  They are sums over all network interfaces.
  """
  rows = [line.partition(":")[2].split() for line in devices.splitlines()]
  rows = [row for row in rows if len(row) > 8 and row[0].isdecimal()]
  return sum(int(row[0]) for row in rows), sum(int(row[8]) for row in rows)


def summarize(
  spec: cluster.ClusterSpec,
  serving: Mapping[cluster.Task, ServingTask],
  table: Mapping[str, Any],
  training: Mapping[str, Any],
  queues: Mapping[str, int],
  *,
  now: float,
  is_in_graph: bool = False,
) -> Status:
  """Makes a `Status` from what was read. It is a pure function.

  Args:
    spec: The cluster.
    serving: The serving tasks: parameter servers and in-graph workers.
    table: The values of the variables of a heartbeat table, by name; empty if
      no serving task answered.
    training: The values of other variables of PS task 0, by name; empty if it
      did not answer, or has none yet.
    queues: The lengths of the queues of PS task 0, by name.
    now: The time in seconds since 1970, by the clock of the task that keeps
      `table`.
    is_in_graph: Whether one client drives all workers.

  Returns:
    The state of the training, without rates.
  """
  if not is_in_graph and len(table.get("beats", ())) > len(spec.replicas):
    # Others may join, which the document does not say.
    spec = spec.admit(len(table["beats"]) - spec.num_tasks("chief"))
  trains = spec.replicas if not is_in_graph else (spec.chief,)
  beats = table.get("beats", np.full(len(trains), -1.0))
  clients = [
    _client(spec, task, float(beat), now)
    for task, beat in zip(trains, beats, strict=False)
  ]
  workers = spec.tasks("worker") if is_in_graph else spec.replicas
  names = [str(task) for task in workers]
  published = _text(table.get("signature", b""))
  signature = json.loads(published) if published else {}
  outcome = _text(table.get("outcome", b""))
  state = "starting"
  if outcome:
    state = "ended"
  elif bool(table.get("is_open", False)) or is_in_graph and signature:
    state = "running"
  step = int(training.get("global_step", -1))
  status, counts = _records(training)
  faults = list(_faults(serving, clients, status, names, step, outcome))
  waits = []
  if not outcome:
    waits = list(_waits(training, clients, status, names, step, state))
  return Status(
    time=now,
    state=state,
    outcome=outcome,
    number=_number(table),
    rule=signature.get("rule", {}),
    global_step=step,
    examples_seen=int(training.get("examples_seen", -1)),
    parameter_bytes=sum(
      math.prod(variable["shape"]) * tf.as_dtype(variable["dtype"]).size
      for variable in signature.get("variables", ())
    ),
    received=status.received if status else 0,
    needed=status.needed if status else 0,
    serving=tuple(serving.values()),
    clients=tuple(clients),
    replicas=tuple(
      _replica(*record)
      for record in zip(names, status.replicas, counts, strict=False)
    )
    if status
    else (),
    queues=_added_up(queues),
    waits=tuple(waits),
    faults=tuple(faults),
  )


def _number(table: Mapping[str, Any]) -> int:
  """Returns `Status.number`, from the values of a heartbeat table by name."""
  number = int(table.get("number", heartbeat_table.NOT_BEGUN))
  return 1 if number == heartbeat_table.NOT_BEGUN else number


def _text(value: Any) -> str:
  """Returns the text of a string scalar: a NumPy array, or bytes."""
  value = value.item() if isinstance(value, np.ndarray) else value
  return value.decode() if isinstance(value, bytes) else str(value)


def _client(
  spec: cluster.ClusterSpec, task: cluster.Task, beat: float, now: float
) -> Client:
  """Makes a `Client` from the last heartbeat of a process that trains.

  Args:
    spec: The cluster.
    task: The task of the process.
    beat: Its element of `HeartbeatTable.beats`: the time of the last heartbeat,
      or another number that `HeartbeatTable` defines.
    now: The present time, by the same clock.
  """
  age: float | None = None
  if beat == 0:
    presence = _LEFT
  elif beat == -1:
    presence = _ABSENT
  else:
    age = max(0.0, now - abs(beat))
    presence = _ALIVE if age < heartbeats.ALIVE_SECS else _SILENT
    if presence == _ALIVE and beat < heartbeat_table.RESTS:
      presence = _RESTS
  address = "" if task in spec.joining else spec.address(task)
  return Client(str(task), address, task == spec.chief, presence, age)


def _replica(
  name: str, status: results.ReplicaStatus, counts: results.Counts
) -> Replica:
  mean, largest = 0.0, 0
  if any(counts.staleness):
    mean, _, largest = results.summary(counts.staleness)
  return Replica(
    task=name,
    doing=status.status.name.lower(),
    applied=counts.applied,
    refused=counts.refused,
    mean_staleness=mean,
    max_staleness=largest,
    waited_secs=counts.straggler_wait_secs,
    missed=counts.missed,
  )


def _records(
  training: Mapping[str, Any],
) -> tuple[results.StepStatus | None, list[results.Counts]]:
  """Makes records of the update rule's variables.

  A training may switch between two rules, each with its own variables.

  Args:
    training: The values of the variables of the rules, by name.

  Returns:
    The progress of the next update, and a list with one entry per replica: the
    numbers of its contributions that were used or refused. With two rules, the
    progress is that of the rule in use, and the numbers are sums over both
    rules. None and an empty list if there are no such variables yet.
  """
  found = []
  for prefix in _PREFIXES:
    values = {
      name.removeprefix(prefix): value
      for name, value in training.items()
      if name.startswith(prefix)
    }
    if "ledger/status" in values and values.keys() >= _LEDGER.keys():
      state = ledger_lib.Ledger(*[values[name] for name in _LEDGER])
      found.append(
        (ledger_lib.step_status(state), ledger_lib.counts_from_ledger(state))
      )
    elif values.keys() >= _ASYNC.keys():
      counts = async_admission.counts_of(
        values["async/applied"], values["async/dropped"]
      )
      found.append((_async_status(values), counts))
  if not found:
    return None, []
  in_use = int(training.get("rules/in_use", 0))
  statuses, counts = zip(*found, strict=True)
  totals = [results.total(each) for each in zip(*counts, strict=True)]
  return statuses[min(in_use, len(statuses) - 1)], totals


def _async_status(values: Mapping[str, Any]) -> results.StepStatus:
  kinds = {
    async_admission.OPEN: protocol.Status.ADMITTED,
    async_admission.LOST: protocol.Status.LOST,
  }
  status = [
    kinds.get(int(state), protocol.Status.COMPUTING)
    for state in values["async/state"]
  ]
  for gate in ("before", "after"):
    for replica, tag in enumerate(values.get(f"gates/{gate}/waiting", ())):
      if tag >= 0 and status[replica] == protocol.Status.COMPUTING:
        status[replica] = protocol.Status.WAITING
  return results.StepStatus(
    0, 0, [results.ReplicaStatus(each, -1) for each in status]
  )


def _waits(
  training: Mapping[str, Any],
  clients: Sequence[Client],
  status: results.StepStatus | None,
  names: Sequence[str],
  step: int,
  state: str,
) -> Iterable[str]:
  """Yields sentences that say which task waits for which.

  Args:
    training: The values of variables of PS task 0, by name.
    clients: The processes that train.
    status: The progress of the next update, and what each replica does; None if
      they are not known.
    names: The names of the replicas.
    step: The global step; -1 if it is not known.
    state: "starting", "running" or "ended".
  """
  # Nobody waits for those that may join, whose addresses are not known.
  absent = [c.task for c in clients if c.presence == _ABSENT and c.address]
  if absent:
    yield f"the training waits for {_listed(absent)} to start"
  if state == "starting" and not absent:
    yield "the workers wait for the chief to prepare the variables"
  if status is None:
    return
  waiting = protocol.Status.WAITING, protocol.Status.DELIVERED
  doing = [
    (name, replica.status)
    for name, replica in zip(names, status.replicas, strict=False)
  ]
  wait = [name for name, what in doing if what in waiting]
  others = [
    f"{name} ({what.name.lower()})"
    for name, what in doing
    if what not in waiting
  ]
  who = f"{_listed(wait)} {'waits' if len(wait) == 1 else 'wait'}"
  if step >= 0 and int(training.get("begun", -1)) == step:
    yield f"the parameter servers apply update {step + 1}"
  elif status.needed:
    yield (
      f"update {step + 1} has {status.received} of {status.needed}"
      " contributions"
      + (f"; {who} for {_listed(others)}" if wait and others else "")
    )
  elif wait and others:
    yield f"{who} for {_listed(others)}"


def _faults(
  serving: Mapping[cluster.Task, ServingTask],
  clients: Sequence[Client],
  status: results.StepStatus | None,
  names: Sequence[str],
  step: int,
  outcome: str,
) -> Iterable[str]:
  """Yields sentences that say what is wrong, and what happens because of it.

  Args:
    serving: The serving tasks: parameter servers and in-graph workers.
    clients: The processes that train.
    status: The progress of the next update, and what each replica does; None if
      they are not known.
    names: The names of the replicas.
    step: The global step; -1 if it is not known, and -2 if a chief was killed
      in the middle of an update.
    outcome: How training ended; "" while it goes on.
  """
  for task in serving.values():
    if task.error:
      yield (
        f"{task.task} at {task.address}: {task.error}. It is down, stopped or"
        " unreachable; all tasks that need it wait, or end with an error"
      )
  if outcome and outcome != heartbeats.FINISHED:
    yield f"the training has ended with: {outcome}"
  if step == chief_recovery.INCONSISTENT:
    yield (
      "the chief was killed in the middle of an update; the variables wait for"
      " a checkpoint to be restored"
    )
  presence = {client.task: client.presence for client in clients}
  away = _ABSENT, _SILENT, _LEFT
  lost = []
  for name, replica in zip(
    names, status.replicas if status else (), strict=False
  ):
    is_skipped = replica.status == protocol.Status.SKIPPED
    if is_skipped and presence.get(name) not in away and not outcome:
      yield (
        f"{name} exceeded the deadline of a step; updates go on without it"
        " until it contributes again"
      )
    is_silent = is_skipped and presence.get(name) == _SILENT
    if replica.status == protocol.Status.LOST or is_silent:
      lost.append(name)
  for client in clients:
    if client.presence == _SILENT and not outcome:
      what = f"{client.task}: no heartbeat for {client.heartbeat_secs:.0f} s"
      if client.is_chief:
        yield f"{what}; the workers wait for the chief, and give up later"
      elif client.task in lost:
        yield (
          f"{what}; it was declared lost: updates go on without it, or wait for"
          " its restart"
        )
      else:
        yield f"{what}; it will be declared lost if it stays silent"
  named = {client.task for client in clients if client.presence == _SILENT}
  for name in lost:
    if name not in named and not outcome:
      yield f"{name} was declared lost; it joins again when it is restarted"


def _listed(names: Sequence[str]) -> str:
  """Joins names in a phrase, such as "a, b and c"."""
  *first, last = names or [""]
  return f"{', '.join(first)} and {last}" if first else last


def _added_up(queues: Mapping[str, int]) -> dict[str, int]:
  """Adds up the lengths of queues that exist once per replica.

  Args:
    queues: The lengths of queues, by name. A name may end with the index of a
      replica, such as "replies/0" and "replies/1".

  Returns:
    The lengths by name without the index, such as "replies".
  """
  sums: dict[str, int] = {}
  for name, size in queues.items():
    name = re.sub(r"/\d+$", "", name)
    sums[name] = sums.get(name, 0) + size
  return sums


def _with_rates(status: Status, last: Status | None) -> Status:
  """Adds the rates, in steps and examples per second, since the last reading.

  Args:
    status: The present state.
    last: The state at the last reading; None if there was none.

  Returns:
    `status` with the rates. `status` itself if they are not known: there was no
    reading before, or it was of another training.
  """
  if last is None or status.number != last.number or status.global_step < 0:
    return status
  secs = status.time - last.time
  if secs <= 0 or status.global_step < last.global_step:
    return status
  return dataclasses.replace(
    status,
    steps_per_sec=(status.global_step - last.global_step) / secs,
    examples_per_sec=(status.examples_seen - last.examples_seen) / secs,
  )
