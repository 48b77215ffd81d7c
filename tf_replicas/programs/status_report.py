"""Prints what a training on parameter servers does, from outside.

  python -m tf_replicas.status --cluster_spec=FILE [--watch] [--json]

It shows which tasks are there, the global step and the steps per second, how
many contributions of each replica were used, the queues, the network traffic,
which task waits for which, and what is wrong. It changes nothing. It runs on
any machine that reaches the parameter servers, and works even if a task hangs.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tf_replicas import cluster
from tf_replicas.runtime import noise
from tf_replicas.runtime import processes

if TYPE_CHECKING:
  from tf_replicas.drivers import cluster_status


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    "python -m tf_replicas.status",
    description="Prints what a training on parameter servers does.",
    allow_abbrev=False,
  )
  parser.add_argument(
    "--cluster_spec",
    required=True,
    help="the cluster-spec file that the tasks use; a launcher that chooses"
    " the ports writes cluster.json to the directory of its logs",
  )
  for name, text in (
    ("watch", "repeat the reading until Ctrl-C or the end of the training"),
    ("json", "print one JSON document per reading, in one line"),
  ):
    parser.add_argument(f"--{name}", action="store_true", help=text)
  for name, default, text in (
    ("interval_secs", 2.0, "seconds between two readings, and for rates"),
    ("timeout_secs", 3.0, "seconds after which a task counts as not answering"),
  ):
    parser.add_argument(f"--{name}", type=float, default=default, help=text)
  parser.add_argument(
    "--namespace",
    default="",
    help="the namespace that the training's driver was given, if any",
  )
  return parser


def main(argv: list[str] | None = None) -> None:
  """Prints the state of a training.

  The exit status is 0, or 1 if no parameter server answered, or 2 if the
  arguments are invalid.

  Args:
    argv: The command line, without the name of the program. None: that of this
      process.
  """
  options = _parser().parse_args(argv)
  noise.hide()
  with processes.one_line_errors(usage=(cluster.ClusterError, ValueError)):
    for name in ("interval_secs", "timeout_secs"):
      value = getattr(options, name)
      if not value > 0:
        raise ValueError(f"`--{name}` must be positive. Received: {value}.")
    spec = cluster.load(options.cluster_spec)
    with processes.importing_tensorflow():
      from tf_replicas.drivers import cluster_status
      from tf_replicas.runtime import devices

    devices.configure(())
    reader = cluster_status.ClusterReader(
      spec, timeout_secs=options.timeout_secs, namespace=options.namespace
    )
    is_answered = True
    try:
      status = _print_all(reader, options)
      is_answered = any(not task.error for task in status.serving)
    except KeyboardInterrupt:
      pass  # The usual end of `--watch`.
    finally:
      reader.close()
  processes.exit_now(0 if is_answered else 1)


def _print_all(
  reader: "cluster_status.ClusterReader", options: argparse.Namespace
) -> "cluster_status.Status":
  """Reads and prints the state of the training.

  With `--watch`, it does so repeatedly, until the training ends. Without it, it
  prints one state. For the rates in it, it may read the state twice.

  Args:
    reader: Reads the state.
    options: The options of the command line.

  Returns:
    The last state.
  """
  status, last = reader.read(), None
  if not options.watch and status.global_step >= 0 and not status.outcome:
    last, status = status, _after(reader, options.interval_secs)
  while True:
    if options.json:
      print(json.dumps(dataclasses.asdict(status)), flush=True)
    else:
      print("\n".join([*lines(status, last), ""]), flush=True)
    if not options.watch or status.outcome:
      return status
    last, status = status, _after(reader, options.interval_secs)


def _after(
  reader: "cluster_status.ClusterReader", secs: float
) -> "cluster_status.Status":
  time.sleep(secs)
  return reader.read()


def lines(
  status: "cluster_status.Status",
  last: "cluster_status.Status | None" = None,
) -> Iterator[str]:
  """Yields the lines that describe the state of a training.

  Args:
    status: The state.
    last: An earlier state, which is needed to compute the network traffic. None
      if there is none; then the lines do not show the traffic.
  """
  yield _headline(status)
  rows = [_serving_row(task, status, last) for task in status.serving]
  replicas = {replica.task: replica for replica in status.replicas}
  for client in status.clients:
    heard = ""
    if client.heartbeat_secs is not None:
      heard = f", heartbeat {client.heartbeat_secs:.1f} s ago"
    role = " (chief)" if client.is_chief else ""
    note = f"{client.presence}{heard}"
    if client.task in replicas:
      note += f"; {_contributions(replicas.pop(client.task))}"
    rows.append((f"{client.task}{role}", client.address, note))
  for replica in replicas.values():  # In-graph workers.
    rows.append((replica.task, "", _contributions(replica)))
  widths = [
    max(map(len, column), default=0) for column in zip(*rows, strict=True)
  ]
  for name, address, note in rows:
    yield f"  {name:<{widths[0]}}  {address:<{widths[1]}}  {note}"
  if any(status.queues.values()):
    sizes = [f"{name} {size}" for name, size in status.queues.items() if size]
    yield f"  queues: {', '.join(sizes)}"
  yield from (f"  waits: {wait}" for wait in status.waits)
  yield from (f"  FAULT: {fault}" for fault in status.faults)


def _headline(status: "cluster_status.Status") -> str:
  parts = [time.strftime("%H:%M:%S", time.localtime(status.time or None))]
  parts.append(f"training {status.number} is {status.state}")
  if status.outcome:
    parts[-1] = f"training {status.number} has ended: {status.outcome}"
  if status.global_step >= 0:
    parts.append(f"step {status.global_step}")
  if status.steps_per_sec is not None:
    parts.append(
      f"{status.steps_per_sec:.3g} steps/sec"
      f" ({status.examples_per_sec:.4g} examples/sec)"
    )
  if status.rule.get("name"):
    rule = str(status.rule["name"])
    if status.needed:
      rule += f", {status.received} of {status.needed} contributions"
    parts.append(f"rule {rule}")
  if status.parameter_bytes:
    parts.append(f"variables {size(status.parameter_bytes)}")
  return "; ".join(parts)


def _serving_row(
  task: "cluster_status.ServingTask",
  status: "cluster_status.Status",
  last: "cluster_status.Status | None",
) -> tuple[str, str, str]:
  if task.error:
    return task.task, task.address, task.error
  notes = ["answers"]
  if task.memory_bytes >= 0:
    notes.append(f"memory {size(task.memory_bytes)}")
  before = {t.task: t for t in last.serving} if last else {}
  old = before.get(task.task)
  if last and old and old.received_bytes >= 0 and status.time > last.time:
    secs = status.time - last.time
    received = (task.received_bytes - old.received_bytes) / secs
    sent = (task.sent_bytes - old.sent_bytes) / secs
    notes.append(
      f"its machine receives {size(received)}/s and sends {size(sent)}/s"
    )
  if task.queued_gradients:
    notes.append(f"{task.queued_gradients} sets of gradients queued")
  if task.row_updates >= 0:
    notes.append(f"{task.row_updates} rows of tables updated")
  return task.task, task.address, ", ".join(notes)


def _contributions(replica: "cluster_status.Replica") -> str:
  text = (
    f"{replica.doing}; {replica.applied} contributions applied,"
    f" {replica.refused} refused"
  )
  if replica.max_staleness:
    text += (
      f", staleness {replica.mean_staleness:.2f} on average,"
      f" at most {replica.max_staleness}"
    )
  if replica.missed:
    text += f", {replica.missed} updates made without it"
  if replica.waited_secs >= 0.05:
    text += f"; updates waited {replica.waited_secs:.1f} s for it alone"
  return text


def size(num_bytes: float) -> str:
  """Formats a number of bytes with a unit, such as "12 B" or "3.4 KiB"."""
  for unit in ("B", "KiB", "MiB"):
    if num_bytes < 1024:
      return f"{num_bytes:.3g} {unit}"
    num_bytes /= 1024
  return f"{num_bytes:.3g} GiB"
