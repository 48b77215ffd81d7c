"""Says which update rule or cluster would make a recorded run faster.

  python -m cifar10.distributed_train --timeline --train_dir=RUN …
  python -m experiments.advise --run=RUN --read_bytes=4.3e6

Fits a simulated cluster to the timeline of the run (`recorded_run.fit`), and
lets it train with other rules, with backup replicas and with more PS tasks
(parameter servers). Prints the expected gain of each: its rate divided by that
of the simulated run itself. The simulator predicts times, and not precision:
asynchronous updates are made from older variables, and backup replicas mean
smaller updates. So the gain counts the examples that are applied per second,
and the updates per second stand beside it.

The first line compares the simulated run with the recorded one. Where they
differ much, the gains mean little. Gains of PS tasks assume that each holds an
equal share of the parameters. `claims.advice` follows advice in real runs, and
compares the gains. `--run` is a train directory, or a directory with the
timeline files themselves. The fit leaves out the first tenth of the updates, in
which the tasks start.
"""

import dataclasses
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from absl import flags

from experiments import simulator
from experiments.simulator import recorded_run
from tf_replicas.programs import command_line
from tf_replicas.runtime import processes

FLAGS = flags.FLAGS
_STEPS = 1_000
# A smaller gain is not worth a change, and may be chance.
LEAST_GAIN = 1.05


class Option(NamedTuple):
  """A way to train, and how fast it is.

  Attributes:
    kind: What would be changed: `rule`, `backups` or `ps`.
    what: The change, in words.
    cluster: The cluster.
    rule: The update rule.
  """

  kind: str
  what: str
  cluster: simulator.Cluster
  rule: simulator.Sync | simulator.Async


class Advice(NamedTuple):
  """An option with its expected gain.

  Attributes:
    option: The option.
    gain: Examples applied per second, divided by those of the present training.
    updates_gain: Updates per second, divided likewise.
  """

  option: Option
  gain: float
  updates_gain: float


def recorded_rule(
  events: Sequence[recorded_run.Event],
) -> simulator.Sync | simulator.Async:
  """Finds out by which rule a run was trained.

  Args:
    events: The events of the run.

  Returns:
    The synchronous rule, with its number of contributions per update, if the
    chief made the updates; otherwise the asynchronous rule.

  Raises:
    ValueError: If the run has no updates.
  """
  updates = [event for event in events if event.kind == "apply"]
  if not updates:
    raise ValueError("The timeline must have updates. Received: none.")
  if all(event.task != "chief" for event in updates):
    return simulator.Async()
  handed = sum(event.kind == "hand_over" for event in events)
  count = max(1, round(handed / len(updates)))
  replicas = {event.task for event in events if event.kind == "compute"}
  return simulator.Sync(None if count >= len(replicas) else count)


def without_start(
  events: Sequence[recorded_run.Event],
) -> list[recorded_run.Event]:
  """Returns the events after the first tenth of the updates.

  Args:
    events: The events of the run.
  """
  ends = np.sort([event.end for event in events if event.kind == "apply"])
  begin = ends[len(ends) // 10] if len(ends) else -np.inf
  return [event for event in events if event.start >= begin]


def options(
  cluster: simulator.Cluster,
  rule: simulator.Sync | simulator.Async,
  max_ps: int,
) -> list[Option]:
  """Returns all changes in question.

  Args:
    cluster: The cluster of the run.
    rule: Its rule.
    max_ps: The largest number of PS tasks, as a multiple of the present one.
  """
  count = cluster.num_replicas
  found = []
  for name, other in (
    ("--update=sync", simulator.Sync()),
    ("--update=async", simulator.Async()),
    (
      "--update=async,bounded_staleness --max_staleness=2",
      simulator.Async(max_lead=2),
    ),
  ):
    if other != rule:
      found.append(Option("rule", name, cluster, other))
  for backups in range(1, count // 2 + 1):
    other = simulator.Sync(count - backups)
    if other != rule:
      words = f"--update=sync --replicas_to_aggregate={count - backups}"
      found.append(Option("backups", words, cluster, other))
  for times in range(2, max_ps + 1):
    # Each holds its share of the parameters, which needs equal shares.
    more = dataclasses.replace(
      cluster, num_ps=times, apply_secs=cluster.apply_secs / times
    )
    words = f"{times} times as many PS tasks, `partitioned` placement"
    found.append(Option("ps", words, more, rule))
  return found


def _words(rule: simulator.Sync | simulator.Async) -> str:
  if isinstance(rule, simulator.Async):
    return "asynchronous"
  count = rule.replicas_to_aggregate
  return f"synchronous, {'all' if count is None else count} per update"


def rates(
  cluster: simulator.Cluster, rule: simulator.Sync | simulator.Async
) -> tuple[float, float]:
  """Returns the contributions and the updates per second of a training.

  Args:
    cluster: The simulated cluster.
    rule: The update rule.
  """
  result = simulator.simulate(cluster, rule, _STEPS)
  return result.throughput, _STEPS / float(result.step_ends[-1])


def advise(
  cluster: simulator.Cluster,
  rule: simulator.Sync | simulator.Async,
  max_ps: int = 4,
) -> list[Advice]:
  """Predicts the gain of every change, the largest first.

  Args:
    cluster: The cluster of the run.
    rule: Its rule.
    max_ps: The largest number of PS tasks, as a multiple of the present one.
  """
  now = rates(cluster, rule)
  found = []
  for option in options(cluster, rule, max_ps):
    then = rates(option.cluster, option.rule)
    found.append(Advice(option, then[0] / now[0], then[1] / now[1]))
  return sorted(found, key=lambda advice: -advice.gain)


def report(
  events: Sequence[recorded_run.Event],
  read_bytes: float,
  ps_bandwidth: float = np.inf,
) -> list[str]:
  """Returns the lines that the program prints.

  Args:
    events: The events of the whole run.
    read_bytes: The bytes that a replica reads per step.
    ps_bandwidth: The bandwidth of all PS tasks together, in bytes/s, if known.

  Raises:
    ValueError: If the run is too short, or has no updates.
  """
  rule = recorded_rule(events)
  events = without_start(events)
  ends = np.sort([event.end for event in events if event.kind == "apply"])
  if len(ends) < 2 or ends[-1] <= ends[0]:
    raise ValueError(
      "The timeline must have at least two updates after its first tenth."
      f" Received: {len(ends)}."
    )
  fit = recorded_run.fit(
    events, read_bytes=read_bytes, ps_bandwidth=ps_bandwidth
  )
  measured = (len(ends) - 1) / float(ends[-1] - ends[0])
  ratio = rates(fit.cluster, rule)[1] / measured
  lines = [
    f"{fit.cluster.num_replicas} replicas, {_words(rule)}: {measured:.4g}"
    f" updates/s; the simulated run makes {ratio:.2f} of that",
    "gain (examples/s)  updates/s  change",
  ]
  found = advise(fit.cluster, rule)
  lines += [
    f"{advice.gain:17.2f}  {advice.updates_gain:9.2f}  {advice.option.what}"
    for advice in found
  ]
  if found[0].gain < LEAST_GAIN:
    lines.append(f"Nothing gains {LEAST_GAIN - 1:.0%} or more: change nothing.")
  else:
    lines.append(
      f"Largest gain: {found[0].option.what}. The simulator says nothing about"
      " precision: compare losses at equal times."
    )
  if isinstance(rule, simulator.Async):
    lines.append(
      "The timeline does not tell whether a bound, such as `max_staleness`,"
      " held workers back. Gains are relative to a run without one."
    )
  if np.isinf(fit.cluster.ps_bandwidth):
    lines.append(
      "The links of the PS tasks limited nothing in this run, so their"
      " bandwidth is unknown."
    )
  return lines


def _main() -> None:
  with processes.one_line_errors(usage=(ValueError,), run_time=(OSError,)):
    directory = FLAGS.run
    if os.path.isdir(os.path.join(directory, "timeline")):
      directory = os.path.join(directory, "timeline")
    bandwidth = np.inf if FLAGS.ps_bandwidth is None else FLAGS.ps_bandwidth
    events = recorded_run.read(directory)
    print("\n".join(report(events, FLAGS.read_bytes, bandwidth)))


if __name__ == "__main__":
  flags.DEFINE_string(
    "run", None, "The train directory of a run with --timeline"
  )
  flags.DEFINE_float(
    "read_bytes",
    None,
    "The bytes that a replica reads per step: 4 per float32 parameter",
    lower_bound=1.0,
  )
  flags.DEFINE_float(
    "ps_bandwidth",
    None,
    "The bytes/s of the links of all PS tasks together, if known",
    lower_bound=1.0,
  )
  flags.mark_flags_as_required(["run", "read_bytes"])
  command_line.start(lambda argv: _main())
