"""Tests of `rules.periodic.periodic_optimizer` on real processes."""

import numpy as np
import pytest

from tests.tasks import cluster_task

STEPS = 3
WORKERS = 2


def _start(start_trial, replication, kind):
  jobs = {"ps": 2, "worker": WORKERS, "chief": int(replication == "in_graph")}
  document = {
    "cluster": {job: ["localhost:0"] * n for job, n in jobs.items() if n},
    "variables": {"on": "ps", "placement": "round_robin"},
  }
  trial = start_trial(
    "periodic", document, replication=replication, kind=kind, steps=STEPS
  )
  trial.await_success()
  return trial.report()


def _mean_of_walks():
  """The losses and the last values of model averaging, in plain Python."""
  center, losses = np.array([1.0, 2.0, 3.0]), []
  velocities = [np.zeros(3)] * WORKERS
  for step in range(STEPS):
    copies, loss = [], []
    for worker, data in enumerate(cluster_task.PERIODIC_DATA):
      values, velocity = center, velocities[worker]
      for number in range(cluster_task.PERIOD):
        x = data[(step * cluster_task.PERIOD + number) % len(data)]
        loss.append(((values - x) ** 2).sum() / 2)
        velocity = cluster_task.PERIODIC_MOMENTUM * velocity
        velocity = velocity - cluster_task.PERIODIC_RATE * (values - x)
        values = values + velocity
      velocities[worker] = velocity
      copies.append(values)
    center = np.mean(copies, axis=0)
    losses.append(np.mean(loss))
  return losses, center


@pytest.mark.parametrize(
  "replication",
  [
    "between_graph",
    pytest.param("in_graph", marks=pytest.mark.exhaustive),
  ],
)
def test_model_average_by_hand(start_trial, replication):
  report = _start(start_trial, replication, "model_average")
  losses, center = _mean_of_walks()
  state = report["state"]
  np.testing.assert_allclose(state["variables/a"], center[:2], rtol=1e-5)
  np.testing.assert_allclose(state["variables/b"], center[2], rtol=1e-5)
  batches = WORKERS * cluster_task.PERIOD
  for number, (step, loss, examples) in enumerate(report["steps"]):
    assert (step, examples) == (number + 1, batches)
    np.testing.assert_allclose(loss, losses[number], rtol=1e-5)
  assert state["examples_seen"] == STEPS * batches
  assert [applied for applied, *_ in report["counts"]] == [STEPS] * WORKERS
  assert report["refused"] == [0] * WORKERS


@pytest.mark.parametrize(
  ("replication", "kind"),
  [
    ("between_graph", "accumulated_gradients"),
    ("in_graph", "elastic_average"),
  ],
)
def test_meetings_at_any_time_are_counted(start_trial, replication, kind):
  report = _start(start_trial, replication, kind)
  steps = [step for step, _, _ in report["steps"]]
  # The chief may hear of several at once.
  assert steps == sorted(set(steps)) and steps[0] >= 1
  examples = sum(examples for _, _, examples in report["steps"])
  assert examples == steps[-1] * cluster_task.PERIOD
  assert report["refused"] == [0] * WORKERS
  assert np.all(np.isfinite(report["state"]["variables/a"]))
