r"""Trains for hours under random faults, and records what each task uses.

  python -m benchmarks.soak --output=experiments/results [--minutes=60]
    [--seed=1]

A call runs one *part*: a training by `cifar10.distributed_train` on 2 PS
(parameter servers), a chief and 2 workers, for `--minutes`. About once a
minute, a fault of `benchmarks.fault_matrix` hits a random task, which is
started again. Two tasks, `ps:1` and `worker:1`, are only frozen and never
killed, so that one process of each lives for the whole part. The parts take
turns in the driver and the rule; `soak.json` in `--output` has the parts so
far.

Every ten seconds, the resident memory, the threads and the open files of each
process are recorded; once a minute also how many elements are in the queues of
the PS tasks. After each fault, a step must follow within two minutes. In the
end, the chief gets SIGTERM, and then all other tasks; each must leave within
ten seconds. The last checkpoint must be of the last step, and have exactly the
examples of all updates.
"""

import contextlib
import datetime
import json
import os
import pathlib
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from absl import app
from absl import flags

from benchmarks import fault_matrix
from experiments.support import claims
from experiments.support import programs
from tf_replicas import cluster
from tf_replicas.drivers import cluster_status
from tf_replicas.runtime import fork_server

FLAGS = flags.FLAGS
flags.DEFINE_float("minutes", 60.0, "The length of the part", lower_bound=3.0)

KINDS = (
  ("between_graph", "sync"),
  ("in_graph", "sync"),
  ("between_graph", "async"),
  ("in_graph", "async"),
)
_SPARED = (cluster.Task("ps", 1), cluster.Task("worker", 1))
_FAULTS = ("kill", "restart", "term", "stop", "double")
_SAMPLE_SECS, _QUEUES_SECS = 10.0, 60.0
_FAULT_SECS = 40.0, 80.0  # From one fault to the next: between these.
_RECOVERY_SECS = 120.0
_LEAVE_SECS = 10.0
# A process has warmed up after so long; its first and last readings are means
# of so many.
_WARM_SECS, _READINGS = 120.0, 6
_ENDLESS = 10**9
_TAIL_BYTES = 8192


class Soak(fault_matrix.Training):
  """One part of the soak.

  Attributes:
    samples: For each task, readings [seconds since the start, number of the
      process, MiB of resident memory, threads, open files].
    queues: Readings [seconds since the start, elements in queues of PS 0, sets
      of gradients in the queues of all PS tasks].
    faults: What was injected, when, and how long it took until the next step.
  """

  def __init__(
    self, cell: fault_matrix.Cell, directory: str, server: Any, seed: str
  ):
    """Prepares the training, and starts nothing yet.

    Args:
      cell: The driver and the rule.
      directory: A directory for files of this part only.
      server: Starts processes.
      seed: Decides which fault comes when.
    """
    super().__init__(
      cell,
      directory,
      server,
      max_steps=_ENDLESS,
      log_every_steps=10,
      checkpoint_every_steps=500,
      max_starts=10_000,
    )
    self._dice = random.Random(seed)
    self._began = time.monotonic()
    self._sampled = self._queued = -1e9
    self._reader = cluster_status.ClusterReader(self._spec)
    self.samples: dict[str, list[list[float]]] = {
      str(task): [] for task in self._spec.tasks()
    }
    self.queues: list[list[float]] = []
    self.faults: list[dict[str, Any]] = []

  def soak(self, minutes: float) -> int:
    """Trains for some minutes, and injects faults.

    Returns:
      The global step of the last checkpoint.

    Raises:
      fault_matrix.Failed: If the training did not survive a fault, or lost or
        repeated an example.
    """
    self._began = time.monotonic()
    end = self._began + 60 * minutes
    self._deadline = float("inf")
    with contextlib.closing(self._reader), self.started():
      self._await_step(time.time(), "the first step")
      while (left := end - time.monotonic()) > 0:
        self._pause(min(self._dice.uniform(*_FAULT_SECS), left))
        if time.monotonic() < end - _RECOVERY_SECS:
          self._inject_one()
      return self._end()

  def _inject_one(self) -> None:
    task = self._dice.choice(self._spec.tasks())
    fault = "stop" if task in _SPARED else self._dice.choice(_FAULTS)
    at, step = time.monotonic() - self._began, self.last_step()
    while self._tasks.returncode(task) is not None:
      self._pause(0.2)  # It is being started again.
    self.inject(fault, [task])
    wall = time.time()
    secs = self._await_step(wall, f"a step after {fault} of {task}")
    self.faults.append(
      {
        "at": round(at),
        "fault": fault,
        "task": str(task),
        "step": step,
        "recovery_secs": round(secs, 1),
        "steps_again": max(0, step - self.last_step()),
      }
    )

  def _start_again(self) -> None:
    """Starts tasks that have ended, unless the first one of two lives.

    Then that one is the process of the task from now on.
    """
    for task, first in list(self._doubled.items()):
      if self._tasks.returncode(task) is not None and first.poll() is None:
        self._tasks._processes[task] = self._doubled.pop(task)
    super()._start_again()

  def _await_step(self, wall: float, what: str) -> float:
    """Waits for a log line after a time, and returns the seconds it took."""
    deadline = time.monotonic() + _RECOVERY_SECS
    while True:
      later = [x for x in self._newest() if x.when.timestamp() > wall]
      if later:
        return later[0].when.timestamp() - wall
      if time.monotonic() > deadline:
        raise fault_matrix.Failed(f"waited in vain for {what}")
      self._pause(0.2)

  def _newest(self) -> list[programs.Logged]:
    """Returns the newest log lines of the chief."""
    path = self._tasks.log_path(cluster.Task("chief", 0))
    if not path.exists():
      return []
    with path.open("rb") as file:
      if path.stat().st_size > _TAIL_BYTES:
        file.seek(-_TAIL_BYTES, os.SEEK_END)
        file.readline()  # The rest of a line.
      return programs.logged(file.read().decode(errors="replace"))

  def last_step(self) -> int:
    """Returns the global step in the newest log line; -1 before the first."""
    newest = self._newest()
    return newest[-1].step if newest else -1

  def _pause(self, secs: float) -> None:
    until = time.monotonic() + secs
    while (left := until - time.monotonic()) > 0:
      super()._pause(min(1.0, left))
      self._sample()

  def _sample(self) -> None:
    now = time.monotonic()
    if now - self._sampled >= _SAMPLE_SECS:
      self._sampled = now
      for task in self._tasks.running():
        pid = self._tasks._processes[task].pid
        if (usage := _usage(pid)) is not None:
          self.samples[str(task)].append(
            [round(now - self._began), pid, *usage]
          )
    if now - self._queued >= _QUEUES_SECS and self.last_step() > 0:
      self._queued = now
      status = self._reader.read()
      sets = sum(task.queued_gradients for task in status.serving)
      self.queues.append(
        [round(now - self._began), sum(status.queues.values()), sets]
      )

  def _end(self) -> int:
    """Asks the chief to save and leave, and then all other tasks to leave.

    Returns:
      The global step of the last checkpoint, which was checked.
    """
    step = self.last_step()
    for jobs in (["chief"], ["worker", "ps"]):
      asked = [task for task in self._tasks.running() if task.job in jobs]
      for task in asked:
        self._tasks.kill(task, signal.SIGTERM)
      deadline = time.monotonic() + _LEAVE_SECS
      while left := [t for t in asked if self._tasks.returncode(t) is None]:
        if time.monotonic() > deadline:
          names = ", ".join(map(str, left))
          raise fault_matrix.Failed(f"after SIGTERM still run: {names}")
        time.sleep(0.05)
    if (saved := self.check_examples()) < step:
      raise fault_matrix.Failed(f"step {step} was made, but {saved} was saved")
    return saved


def _usage(pid: int) -> list[float] | None:
  """Returns MiB of resident memory, threads and open files of a process.

  Returns:
    None if the process has ended.
  """
  try:
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    files = len(os.listdir(f"/proc/{pid}/fd"))
  except OSError:
    return None
  fields = dict(line.split(":", 1) for line in lines if ":" in line)
  if "VmRSS" not in fields:
    return None
  return [int(fields["VmRSS"].split()[0]) >> 10, int(fields["Threads"]), files]


def growth(samples: Sequence[Sequence[float]]) -> dict[str, Any] | None:
  """Describes the process of a task that lived longest.

  Args:
    samples: The readings of the task, as `Soak.samples` has them.

  Returns:
    Its minutes; and for memory, threads and files the first reading after the
    warm-up and the last one, each the median of some readings. None if no
    process lived for twice the time of the warm-up.
  """
  by_process: dict[float, list[Sequence[float]]] = {}
  for sample in samples:
    by_process.setdefault(sample[1], []).append(sample)
  longest = max(by_process.values(), key=lambda s: s[-1][0] - s[0][0])
  secs = longest[-1][0] - longest[0][0]
  warm = [s for s in longest if s[0] - longest[0][0] >= _WARM_SECS]
  if secs < 2 * _WARM_SECS or not warm:
    return None
  result: dict[str, Any] = {"minutes": round(secs / 60, 1)}
  for column, name in enumerate(("mib", "threads", "files"), 2):
    values = [s[column] for s in warm]
    result[name] = [
      statistics.median(values[:_READINGS]),
      statistics.median(values[-_READINGS:]),
    ]
  return result


def table(parts: Sequence[dict[str, Any]]) -> str:
  """Returns the Markdown tables of all parts."""
  lines = [
    "| part | kind | minutes | steps | faults | longest time to the next step |"
    " steps made again | most elements in queues |",
    "|---|---|---|---|---|---|---|---|",
  ]
  for number, part in enumerate(parts, 1):
    faults = part["faults"]
    longest = max((f["recovery_secs"] for f in faults), default=0)
    again = sum(f["steps_again"] for f in faults)
    queues = max((a + b for _, a, b in part["queues"]), default=0)
    kind = part["kind"]
    if reason := part.get("failed"):
      kind += f" (failed: {reason})"
    columns = [number, kind, part["minutes"], part["step"]]
    columns += [len(faults), f"{longest:.0f} s", again, queues]
    lines.append(f"| {' | '.join(map(str, columns))} |")
  lines += [
    "",
    "The process of each task that lived longest; first → last reading:",
    "",
    "| part | task | minutes | MiB | threads | open files |",
    "|---|---|---|---|---|---|",
  ]
  for number, part in enumerate(parts, 1):
    for task, samples in part["samples"].items():
      found = growth(samples) if samples else None
      if found is None:
        continue
      readings = [
        f"{found[n][0]:.0f} → {found[n][1]:.0f}"
        for n in ("mib", "threads", "files")
      ]
      columns = [number, task, found["minutes"], *readings]
      lines.append(f"| {' | '.join(map(str, columns))} |")
  return "\n".join(lines)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    sys.exit(f"unknown argument: {argv[1]}")
  path = pathlib.Path(FLAGS.output) / "soak.json"
  document = {"command": "python -m benchmarks.soak", "parts": []}
  if path.exists():
    document = json.loads(path.read_text(encoding="utf-8"))
  number = len(document["parts"])
  driver, rule = KINDS[number % len(KINDS)]
  cell = fault_matrix.Cell(driver, rule, "all", "none", "none")
  directory = tempfile.mkdtemp(prefix="soak")
  environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
  with fork_server.ForkServer(environ) as server:
    part = Soak(cell, directory, server, f"{FLAGS.seed} {number}")
    try:
      step, reason = part.soak(FLAGS.minutes), ""
    except fault_matrix.Failed as failure:
      step, reason = part.last_step(), str(failure)
  document["parts"].append(
    {
      "kind": f"{driver}, {rule}",
      "failed": reason,
      "minutes": FLAGS.minutes,
      "step": step,
      "faults": part.faults,
      "queues": part.queues,
      "samples": part.samples,
      "commit": claims.commit(),
      "date": datetime.date.today().isoformat(),
      "machine": claims.machine(),
    }
  )
  path.write_text(json.dumps(document) + "\n", encoding="utf-8")
  text = table(document["parts"])
  path.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
  print(text)
  if reason:
    sys.exit(f"part {number + 1}: {reason}; logs: {directory}")
  shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
  flags.mark_flag_as_required("output")
  app.run(main)
