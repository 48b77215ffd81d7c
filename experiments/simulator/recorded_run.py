"""Reads and writes timelines, and finds the cluster that behaves like a run.

A timeline is a record of what each task did from when to when; the docstring of
`experiments.simulator` describes the files.
"""

import collections
import dataclasses
import glob
import json
import os
from collections.abc import Iterable
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.simulator import compute_times
from experiments.simulator import simulated_cluster
from experiments.simulator import simulated_links

Event = simulated_cluster.Event
_FIELDS = [field.name for field in dataclasses.fields(Event)]
# What a replica does besides computing.
_BESIDES = ("read", "hand_over", "wait", "apply", "refused")
# Bandwidths explain a run equally well if their errors differ by this factor.
_ALIKE = 1.05


def write(events: Iterable[Event], directory: str) -> None:
  """Writes a timeline file `TASK.jsonl` per task, in the order of the events.

  Args:
    events: The events of all tasks.
    directory: The directory of the files; created if it does not exist.

  Raises:
    FileExistsError: If one of the files exists already.
  """
  os.makedirs(directory, exist_ok=True)
  by_task = collections.defaultdict(list)
  for event in events:
    by_task[event.task].append(event)
  for task, own in by_task.items():
    path = os.path.join(directory, task.replace(":", "_") + ".jsonl")
    with open(path, "x", encoding="utf-8") as file:
      for event in own:
        file.write(json.dumps(dataclasses.asdict(event)) + "\n")


def read(directory: str) -> list[Event]:
  """Reads the events of all timeline files, `*.jsonl`, of a directory.

  The last line of a file may be incomplete if its task was killed. It is
  ignored then.

  Args:
    directory: The directory of the files.

  Returns:
    The events of all tasks, ordered by their start.

  Raises:
    ValueError: If there is no such file, or a complete line is not an event.
  """
  paths = sorted(glob.glob(os.path.join(glob.escape(directory), "*.jsonl")))
  if not paths:
    raise ValueError(
      f"{directory} must hold timelines, `*.jsonl`. Received: none."
    )
  events = []
  for path in paths:
    with open(path, encoding="utf-8") as file:
      for number, line in enumerate(file, 1):
        if line.endswith("\n"):
          events.append(_parse(line, f"{path}, line {number}"))
  return sorted(events, key=lambda event: event.start)


def _parse(line: str, place: str) -> Event:
  words = f"{place} must be an object with {', '.join(_FIELDS)}"
  try:
    fields = json.loads(line)
    event = Event(**{name: fields[name] for name in _FIELDS})
    event = dataclasses.replace(
      event, start=float(event.start), end=float(event.end)
    )
    if type(event.task) is not str or type(event.step) is not int:
      raise TypeError
  except (KeyError, TypeError, ValueError):
    raise ValueError(f"{words}. Received: {line.strip()[:80]!r}.") from None
  if event.kind not in simulated_cluster.KINDS:
    kinds = ", ".join(simulated_cluster.KINDS)
    raise ValueError(
      f"{place}: `kind` must be one of {kinds}. Received: {event.kind!r}."
    )
  if not event.start <= event.end:
    raise ValueError(
      f"{place}: `end` must not be before `start`. Received: {event.start},"
      f" {event.end}."
    )
  return event


@dataclasses.dataclass(frozen=True)
class Fit:
  """A cluster for the simulator that behaves like a recorded run.

  Attributes:
    cluster: The cluster, with the recorded compute times.
    read_error: How far the recorded times of reads are from those of this
      cluster: the median, over all reads, of the relative difference.
    num_batches: The number of batches whose compute times were recorded.
    carried_bandwidth: The bytes/s that the PS tasks sent when most replicas
      read at the same time. If the PS tasks were never the bottleneck,
      `cluster.ps_bandwidth` is infinite, and the true one is at least this. A
      prediction for more readers than the run had then ignores the PS tasks'
      links, unless `fit` is told their bandwidth.
  """

  cluster: simulated_cluster.Cluster
  read_error: float
  num_batches: int
  carried_bandwidth: float


def fit(
  events: Sequence[Event],
  *,
  read_bytes: float,
  gradient_bytes: float | None = None,
  ps_bandwidth: float = np.inf,
) -> Fit:
  """Finds the cluster for the simulator that behaves like a recorded run.

  All time of a replica counts as computing, except for reading, handing
  gradients over, waiting and applying. So the time between recorded events
  counts too. The latency is the time from an update of the chief to the end of
  the waits that it ends. Without such updates, it is half of the shortest
  refusal. Without refusals, or if gradients are sent before they are refused,
  as in asynchronous runs, it is taken as zero, and the bandwidth accounts for
  it. The bandwidths are those that best explain how
  the time of a read depends on the number of reads at the same time. If every
  read was beside equally many others, as in synchronous runs, the times of
  hand-overs decide: a replica that sends alone is as slow as its own link. If
  the PS tasks did not slow anything down, their bandwidth is unknown, and
  `ps_bandwidth` is taken.

  Args:
    events: The events of the run, or of a part of it.
    read_bytes: The bytes that a replica reads per step.
    gradient_bytes: The bytes that a replica hands over per contribution; None:
      `read_bytes`.
    ps_bandwidth: The bandwidth of the links of all PS tasks together, in
      bytes/s, if it is known. It is used if the run does not show it.

  Raises:
    ValueError: If no replica both reads and computes twice.
  """
  secs = compute_secs(events)
  medians = {task: float(np.median(own)) for task, own in secs.items()}
  usual = min(medians.values())
  if not 0 < usual < np.inf:
    raise ValueError(
      "The timeline must have replicas that compute for a finite time above 0."
      f" Received: {usual} s."
    )
  factors = [medians[task] / usual for task in secs]
  pooled = np.concatenate(
    [own / factor for own, factor in zip(secs.values(), factors, strict=True)]
  )
  reads = [event for event in events if event.kind == "read"]
  latency = _latency(events)
  sent_bytes = read_bytes if gradient_bytes is None else gradient_bytes
  found = _bandwidths(
    reads,
    [event for event in events if event.kind == "hand_over"],
    latency,
    read_bytes,
    sent_bytes,
  )
  updates = [e.end - e.start for e in events if e.kind == "apply"]
  cluster = simulated_cluster.Cluster(
    num_replicas=len(secs),
    compute=compute_times.Empirical(tuple(pooled.tolist())),
    slowdown=dict(enumerate(factors)),
    read_bytes=read_bytes,
    gradient_bytes=gradient_bytes,
    latency=latency,
    replica_bandwidth=found.replica,
    ps_bandwidth=min(found.ps, max(ps_bandwidth, found.carried)),
    apply_secs=float(np.mean(updates)) if updates else 0.0,
  )
  return Fit(
    cluster,
    read_error=found.error,
    num_batches=len(pooled),
    carried_bandwidth=found.carried,
  )


def _tasks_that(kind: str, events: Sequence[Event]) -> list[str]:
  return sorted(
    {event.task for event in events if event.kind == kind}, key=_by_number
  )


def _by_number(task: str) -> tuple:
  job, _, index = task.partition(":")
  return job, int(index) if index.isdigit() else 0, task


def compute_secs(events: Sequence[Event]) -> dict[str, np.ndarray]:
  """Returns the seconds that each batch of each replica took to compute.

  Args:
    events: The events of all tasks.

  Returns:
    The seconds by the name of the task, in the order of time.

  Raises:
    ValueError: If no replica both reads and computes twice.
  """
  tasks = _tasks_that("compute", events)
  secs = {task: _compute_secs(task, events) for task in tasks}
  secs = {task: own for task, own in secs.items() if len(own)}
  if not secs:
    raise ValueError(
      "The timeline must have a replica that reads and computes twice."
      f" Received: {len(events)} events."
    )
  return secs


def _compute_secs(task: str, events: Sequence[Event]) -> np.ndarray:
  """Returns the seconds that each batch of a replica took to compute.

  It is the time from one read to the next, less the time of recorded reads,
  transfers, waits and updates.

  Args:
    task: The task of the replica.
    events: The events of all tasks.
  """
  own = [event for event in events if event.task == task]
  starts = [event.start for event in own if event.kind == "read"]
  edges = np.array(starts)
  besides = [(e.start, e.end) for e in own if e.kind in _BESIDES]
  spent = np.diff(edges)
  busy = np.zeros(max(len(edges) - 1, 0))
  for start, end in _union(besides):
    # A span may go on in later turns: a read may begin as a hand-over ends.
    first = int(np.searchsorted(edges, start, side="right")) - 1
    last = int(np.searchsorted(edges, end, side="left")) - 1
    for turn in range(max(first, 0), min(last, len(busy) - 1) + 1):
      busy[turn] += min(end, edges[turn + 1]) - max(start, edges[turn])
  return np.maximum(spent - busy, 0.0)


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
  """Merges time spans that overlap.

  Args:
    spans: (start, end) pairs.

  Returns:
    Spans that cover the same time and do not overlap, ordered by their start.
  """
  union = []
  for start, end in sorted(spans):
    if union and start < union[-1][1]:
      union[-1] = (union[-1][0], max(union[-1][1], end))
    else:
      union.append((start, end))
  return union


def _latency(events: Sequence[Event]) -> float:
  workers = set(_tasks_that("compute", events))
  updates = np.sort(
    [e.end for e in events if e.kind == "apply" and e.task not in workers]
  )
  waits = np.array([e.end for e in events if e.kind == "wait"])
  if len(updates) and len(waits):
    last = np.searchsorted(updates, waits, side="right") - 1
    since = waits[last >= 0] - updates[last[last >= 0]]
    if len(since):
      return float(np.median(_shortest_per(last[last >= 0], since)))
  refusals = [e.end - e.start for e in events if e.kind == "refused"]
  sent = [e.end - e.start for e in events if e.kind == "hand_over"]
  # Refusals that take as long are of gradients that were sent without asking.
  if not refusals or min(refusals) > min(sent, default=np.inf) / 2:
    return 0.0
  return min(refusals) / 2


def _shortest_per(groups: np.ndarray, values: np.ndarray) -> list[float]:
  return [float(values[groups == group].min()) for group in np.unique(groups)]


class _Bandwidths(NamedTuple):
  """The bandwidths that explain a run, in bytes/s.

  Attributes:
    replica: That of a replica's link.
    ps: That of all PS tasks together; infinity if they limited nothing.
    carried: What the PS tasks sent when most replicas read at once.
    error: The median relative error of the reads.
  """

  replica: float
  ps: float
  carried: float
  error: float


def _bandwidths(
  reads: Sequence[Event],
  hand_overs: Sequence[Event],
  latency: float,
  read_bytes: float,
  sent_bytes: float,
) -> _Bandwidths:
  """Finds the bandwidths that explain how long recorded transfers took.

  If n replicas read at once, each of them gets w * min(1, k / n), where w is
  the bandwidth of its own link and k * w that of all PS tasks together. For
  every k in question, w follows from each read. Chosen is the k for which the
  mean relative errors of the reads and of the hand-overs have the smallest sum;
  of those that are almost as good, the largest.

  Args:
    reads: The events of all reads.
    hand_overs: The events of all hand-overs.
    latency: Seconds from a replica to a PS task or back.
    read_bytes: The bytes of each read.
    sent_bytes: The bytes of each hand-over.
  """
  starts = np.array([event.start for event in reads]) + latency
  ends = np.array([event.end for event in reads]) - latency
  ends = np.maximum(ends, starts)
  if not read_bytes or not np.any(ends > starts):
    return _Bandwidths(np.inf, np.inf, np.inf, 0.0)
  edges = np.unique(np.concatenate([starts, ends]))
  lengths = np.diff(edges)
  users = np.searchsorted(np.sort(starts), edges[:-1], side="right")
  users -= np.searchsorted(np.sort(ends), edges[:-1], side="right")
  first = np.searchsorted(edges, starts)
  last = np.searchsorted(edges, ends)
  kept = last > first
  most = int(users.max())
  # (error, k, w, median error of the reads); the PS tasks limit no read if k is
  # at least `most`.
  tried = []
  for ratio in [*np.unique(np.geomspace(1, max(most, 1), 60))[:-1], np.inf]:
    share = lengths * np.minimum(1.0, ratio / np.maximum(users, 1))
    total = np.concatenate([[0.0], np.cumsum(share)])
    own = (total[last] - total[first])[kept]
    rate = read_bytes / float(np.median(own))
    errors = np.abs(own * rate / read_bytes - 1.0)
    sending = _sending_error(hand_overs, latency, sent_bytes, rate, ratio)
    total_error = float(errors.mean()) + sending
    tried.append((total_error, ratio, rate, float(np.median(errors))))
  enough = min(error for error, *_ in tried) * _ALIKE + 1e-6
  _, ratio, rate, error = max(
    (row for row in tried if row[0] <= enough), key=lambda row: row[1]
  )
  return _Bandwidths(rate, ratio * rate, min(ratio, most) * rate, error)


def _sending_error(
  hand_overs: Sequence[Event],
  latency: float,
  amount: float,
  bandwidth: float,
  ratio: float,
) -> float:
  """Returns how far bandwidths are from explaining the hand-overs.

  Args:
    hand_overs: The events of all hand-overs.
    latency: Seconds from a replica to a PS task or back.
    amount: The bytes of each hand-over.
    bandwidth: That of a replica's link, in bytes/s.
    ratio: The bandwidth of all PS tasks, as a multiple of `bandwidth`.

  Returns:
    The mean relative error of their times; 0 without hand-overs.
  """
  if not hand_overs or not amount:
    return 0.0
  sent = sorted(hand_overs, key=lambda event: event.start)
  starts = np.array([event.start for event in sent]) + latency
  took = np.array([event.end for event in sent]) - latency - starts
  took = np.maximum(took, 1e-9)
  ends = simulated_links.ends_evenly(
    starts, amount, ratio * bandwidth, bandwidth
  )
  wrong = np.abs((ends - starts) / took - 1.0)
  return float(np.mean(np.minimum(wrong, 1.0)))
