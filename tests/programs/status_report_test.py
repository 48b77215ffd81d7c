"""Tests of `programs.status_report`: what is printed."""

import dataclasses
import json
import socket

import pytest

from tf_replicas.drivers import cluster_status
from tf_replicas.programs import status_report

STATUS = cluster_status.Status(
  time=1002.0,
  state="running",
  rule={"name": "sync_replicas"},
  global_step=12,
  examples_seen=120,
  steps_per_sec=2.5,
  examples_per_sec=25.0,
  parameter_bytes=5 << 20,
  received=1,
  needed=2,
  serving=(
    cluster_status.ServingTask("ps 0", "a:1", "", 1 << 30, 6000, 3000, 2, 120),
    cluster_status.ServingTask("ps 1", "b:1", "no answer for 3 s"),
  ),
  clients=(
    cluster_status.Client("worker 0", "c:1", True, "alive", 0.5),
    cluster_status.Client("worker 1", "d:1", False, "not here yet", None),
  ),
  replicas=(
    cluster_status.Replica("worker 0", "computing", 9, 1, 0.5, 3, 1.25),
    cluster_status.Replica("worker 1", "lost", 0, 0, 0.0, 0, 0.0),
  ),
  queues={"inbox": 0, "replies": 3},
  waits=("worker 0 waits",),
  faults=("ps 1 is away",),
)


def test_lines():
  last = dataclasses.replace(
    STATUS,
    time=1000.0,
    serving=(
      cluster_status.ServingTask("ps 0", "a:1", "", 1 << 30, 1904, 952),
    ),
  )
  headline, *rows = status_report.lines(STATUS, last)
  assert headline.partition("; ")[2] == (
    "training 1 is running; step 12; 2.5 steps/sec (25 examples/sec); rule"
    " sync_replicas, 1 of 2 contributions; variables 5 MiB"
  )
  assert rows == [
    "  ps 0              a:1  answers, memory 1 GiB, its machine receives 2"
    " KiB/s and sends 1 KiB/s, 2 sets of gradients queued, 120 rows of tables"
    " updated",
    "  ps 1              b:1  no answer for 3 s",
    "  worker 0 (chief)  c:1  alive, heartbeat 0.5 s ago; computing; 9"
    " contributions applied, 1 refused, staleness 0.50 on average, at most 3;"
    " updates waited 1.2 s for it alone",
    "  worker 1          d:1  not here yet; lost; 0 contributions applied, 0"
    " refused",
    "  queues: replies 3",
    "  waits: worker 0 waits",
    "  FAULT: ps 1 is away",
  ]


def test_the_end():
  status = dataclasses.replace(STATUS, state="ended", outcome="finished")
  headline, *_ = status_report.lines(status)
  assert "; training 1 has ended: finished; step 12; " in headline


class _Ended(Exception):
  pass


def _run(monkeypatch, tmp_path, *flags, port=1):
  """Prints the state of a cluster of which nothing runs."""

  def end(status):
    raise _Ended(status)

  monkeypatch.setattr(status_report.processes, "exit_now", end)
  path = tmp_path / "spec.json"
  address = f"127.0.0.1:{port}"
  jobs = {"ps": [address], "worker": ["127.0.0.1:1"]}
  path.write_text(json.dumps({"cluster": jobs}))
  with pytest.raises(_Ended) as ended:
    status_report.main([f"--cluster_spec={path}", *flags])
  return ended.value.args[0]


def test_json_of_a_task_that_does_not_answer(monkeypatch, tmp_path, capsys):
  with socket.socket() as silent:  # Accepts connections, and says nothing.
    silent.bind(("127.0.0.1", 0))
    silent.listen()
    port = silent.getsockname()[1]
    flags = ("--json", "--timeout_secs=0.5")
    assert _run(monkeypatch, tmp_path, *flags, port=port) == 1
  document = json.loads(capsys.readouterr().out)
  assert document["serving"][0]["error"]
  assert document["faults"][0].startswith(f"ps 0 at 127.0.0.1:{port}: ")


def test_refuses(monkeypatch, tmp_path, capsys):
  assert _run(monkeypatch, tmp_path, "--timeout_secs=0") == 2
  assert "`--timeout_secs` must be positive" in capsys.readouterr().err
