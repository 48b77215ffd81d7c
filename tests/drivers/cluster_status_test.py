"""Tests of `drivers.cluster_status`: what it concludes from what it read."""

import json

import numpy as np
import pytest

from tf_replicas import cluster
from tf_replicas.drivers import cluster_status
from tf_replicas.rules import protocol
from tf_replicas.rules.sync import ledger as ledger_lib

NOW = 1000.0
SPEC = cluster.parse(
  {"cluster": {"ps": ["a:1"], "worker": ["b:2", "c:3"]}}, "spec.json"
)
STATUS = protocol.Status
SIGNATURE = {
  "rule": {"name": "sync_replicas"},
  "variables": [
    {"path": "v", "shape": [3, 4], "dtype": "float32", "ps": [0]},
    {"path": "w", "shape": [], "dtype": "int64", "ps": [0]},
  ],
}


def _table(*beats, **values):
  return {
    "beats": np.array(beats),
    "outcome": np.array(b"", object),
    "is_open": np.True_,
    "signature": np.array(json.dumps(SIGNATURE).encode(), object),
    "number": np.int64(1),
    **values,
  }


def _ledger(*status, received=0, prefix="", **values):
  state = ledger_lib.new_ledger(len(status), len(status))
  accepted = state.accepted.copy()
  accepted[:received] = 0
  state = state._replace(
    status=np.array(status, np.int64), accepted=accepted, **values
  )
  named = {f"{prefix}ledger/{k}": v for k, v in state._asdict().items()}
  return {"global_step": 7, "examples_seen": 70, "begun": 6, **named}


def _summarize(table, training=None, *, spec=SPEC, error="", queues=None):
  serving = {
    task: cluster_status.ServingTask(str(task), spec.address(task), error)
    for task in spec.tasks("ps")
  }
  return cluster_status.summarize(
    spec, serving, table, training or {}, queues or {}, now=NOW
  )


def test_before_the_chief_has_begun():
  status = _summarize(
    _table(NOW - 1, -1.0, is_open=np.False_, signature=np.array(b"", object))
  )
  assert (status.state, status.global_step) == ("starting", -1)
  assert [c.presence for c in status.clients] == ["alive", "not here yet"]
  assert status.waits == ("the training waits for worker 1 to start",)
  assert not status.faults


def test_a_synchronous_step():
  counts = np.zeros([2, ledger_lib.NUM_COLUMNS], np.int64)
  counts[1, [0, 1, 3]] = 5, 2, 1
  training = _ledger(
    STATUS.DELIVERED,
    STATUS.ADMITTED,
    received=1,
    counts=counts,
    held_up=np.array([0.0, 1.5]),
  )
  status = _summarize(
    _table(NOW - 1, NOW - 9), training, queues={"inbox": 1, "replies/0": 2}
  )
  assert (status.state, status.global_step) == ("running", 7)
  assert (status.received, status.needed) == (1, 2)
  assert status.parameter_bytes == 3 * 4 * 4 + 8
  assert status.waits == (
    "update 8 has 1 of 2 contributions; worker 0 waits for worker 1 (admitted)",
  )
  assert [c.presence for c in status.clients] == ["alive", "silent"]
  assert status.clients[1].heartbeat_secs == 9
  assert "will be declared lost" in status.faults[0]
  second = status.replicas[1]
  assert (second.applied, second.refused, second.waited_secs) == (5, 3, 1.5)
  assert status.queues == {"inbox": 1, "replies": 2}


def test_workers_that_may_join():
  training = _ledger(
    STATUS.DELIVERED, STATUS.SKIPPED, STATUS.DELIVERED, STATUS.SKIPPED
  )
  status = _summarize(_table(NOW, NOW, NOW, -1.0), training)
  assert [c.task for c in status.clients] == [f"worker {i}" for i in range(4)]
  assert [c.address for c in status.clients] == ["b:2", "c:3", "", ""]
  assert [c.presence for c in status.clients[2:]] == ["alive", "not here yet"]
  assert len(status.replicas) == 4
  assert not any("to start" in wait for wait in status.waits)
  # Worker 1 is slow. Worker 3 has not come yet, which is no fault.
  (fault,) = status.faults
  assert fault.startswith("worker 1 exceeded the deadline of a step")


def test_a_skipped_worker_that_is_silent():
  training = _ledger(STATUS.DELIVERED, STATUS.SKIPPED)
  status = _summarize(_table(NOW, NOW - 30), training)
  assert status.faults == (
    "worker 1: no heartbeat for 30 s; it was declared lost: updates go on"
    " without it, or wait for its restart",
  )


def test_an_update_that_is_applied():
  training = _ledger(STATUS.DELIVERED, STATUS.DELIVERED, received=2)
  status = _summarize(_table(NOW, NOW), {**training, "begun": 7})
  assert status.waits == ("the parameter servers apply update 8",)


def test_an_asynchronous_step():
  applied = np.zeros([2, 256], np.int64)
  applied[0, :3] = 1, 2, 1
  training = {
    "global_step": 4,
    "async/state": np.array([0, -1]),
    "async/applied": applied,
    "async/dropped": np.zeros([2, 11], np.int64),
    "gates/after/waiting": np.array([5, -1]),
    "gates/after/clocks": np.array([5, 4]),
  }
  status = _summarize(_table(NOW, NOW), training)
  assert status.waits == ("worker 0 waits for worker 1 (lost)",)
  assert status.faults == (
    "worker 1 was declared lost; it joins again when it is restarted",
  )
  first = status.replicas[0]
  assert (first.applied, first.mean_staleness, first.max_staleness) == (4, 1, 2)


def test_two_rules_between_which_training_switches():
  counts = np.zeros([2, ledger_lib.NUM_COLUMNS], np.int64)
  counts[:, 0] = 3
  computing = STATUS.COMPUTING
  training = {
    **_ledger(computing, computing, prefix="rule0/", counts=counts),
    "rule1/async/state": np.array([1, 0]),
    "rule1/async/applied": np.ones([2, 256], np.int64),
    "rule1/async/dropped": np.zeros([2, 11], np.int64),
    "rules/in_use": 1,
  }
  status = _summarize(_table(NOW, NOW), training)
  assert [r.doing for r in status.replicas] == ["admitted", "computing"]
  assert [r.applied for r in status.replicas] == [3 + 256] * 2


def test_how_it_ended():
  training = _ledger(STATUS.COMPUTING, STATUS.COMPUTING)
  table = _table(0.0, NOW - 60, outcome=np.array(b"no such file", object))
  status = _summarize(table, training)
  assert (status.state, status.outcome) == ("ended", "no such file")
  assert [c.presence for c in status.clients] == ["has left", "silent"]
  assert status.faults == ("the training has ended with: no such file",)
  assert not status.waits


@pytest.mark.parametrize(
  ("table", "training", "words"),
  [
    (_table(NOW - 9, NOW), {}, "the workers wait for the chief, and give up"),
    (
      _table(NOW, NOW),
      {"global_step": -2},
      "the chief was killed in the middle of an update",
    ),
  ],
)
def test_faults(table, training, words):
  (fault,) = _summarize(table, training).faults
  assert words in fault


def test_no_task_answers():
  status = _summarize({}, error="no answer for 3 s")
  assert status.faults[0].startswith("ps 0 at a:1: no answer for 3 s. It is")
  assert [c.presence for c in status.clients] == ["not here yet"] * 2


def test_one_client_that_drives_all_workers():
  spec = cluster.parse(
    {"cluster": {"ps": ["a:1"], "worker": ["b:2", "c:3"], "chief": ["d:4"]}}
  )
  status = cluster_status.summarize(
    spec,
    {},
    _table(NOW),
    _ledger(STATUS.COMPUTING, STATUS.WAITING),
    {},
    now=NOW,
    is_in_graph=True,
  )
  assert [c.task for c in status.clients] == ["chief 0"]
  assert [r.task for r in status.replicas] == ["worker 0", "worker 1"]


@pytest.mark.parametrize(
  ("jobs", "words"),
  [
    ({"worker": ["b:2", "c:3"]}, "must have parameter servers"),
    ({"ps": ["localhost:0"], "worker": ["b:2"]}, "not port 0"),
  ],
)
def test_refuses(jobs, words):
  with pytest.raises(cluster.ClusterError, match=words):
    cluster_status.ClusterReader(cluster.parse({"cluster": jobs}))
