"""Tests of `drivers.in_graph` on real processes."""

import numpy as np
import pytest

from tests.support import trials

# The learning rate of `cluster_task.constant_gradients`.
RATE = 2.0


@pytest.fixture(scope="module")
def two_workers(start_trial):
  trial = start_trial(
    "constant_gradients",
    trials.document(2, 2, chief=1),
    replication="in_graph",
    steps=3,
  )
  trial.await_success()
  return trial


@pytest.mark.parametrize("step", [1, 2, 3])
def test_two_workers_by_hand(two_workers, step):
  state = two_workers.report()["steps"][step - 1]["state"]
  expected = {
    "v0": 0.0 - step * RATE * (0.1 + 0.3) / 2,
    "v1": 1.0 - step * RATE * (0.9 + 1.1) / 2,
    # Each row concerns one worker, and still is divided by two.
    "v2": [
      [3.0 - step * RATE * 0.1 / 2],
      [4.0 - step * RATE * 0.3 / 2],
      [5.0],
    ],
    "nobody": 6.0,
  }
  for name, value in expected.items():
    np.testing.assert_allclose(
      state[f"variables/{name}"], value, rtol=1e-6, atol=1e-6, err_msg=name
    )


def test_two_workers_averages_by_hand(two_workers):
  # decay = min(0.9, (1 + step) / (10 + step))
  first = (1 - 2 / 11) * -0.4
  second = 3 / 12 * first + (1 - 3 / 12) * -0.8
  third = 4 / 13 * second + (1 - 4 / 13) * -1.2
  np.testing.assert_allclose(
    [s["state"]["averages/v0"] for s in two_workers.report()["steps"]],
    [first, second, third],
    rtol=1e-5,
  )


def test_two_workers_report_what_they_did(two_workers):
  report = two_workers.report()
  steps = report["steps"]
  assert [s["global_step"] for s in steps] == [1, 2, 3]
  assert [s["num_examples"] for s in steps] == [2, 2, 2]
  first_loss = (
    (0.1 * 0.0 + 0.9 * 1.0 + 0.1 * 3.0) + (0.3 * 0.0 + 1.1 * 1.0 + 0.3 * 4.0)
  ) / 2
  np.testing.assert_allclose(steps[0]["loss"], first_loss, rtol=1e-6)
  assert [applied for applied, _, _ in report["counts"]] == [3, 3]
  assert report["refused"] == [0, 0]


def test_two_workers_leave_by_themselves(two_workers):
  assert set(two_workers.codes().values()) == {0}


def test_several_batches_per_step(start_trial):
  trial = start_trial(
    "constant_gradients",
    trials.document(1, 2, chief=1),
    replication="in_graph",
    steps=6,
    aggregate=3,
  )
  trial.await_success()
  report = trial.report()
  counts = [applied for applied, _, _ in report["counts"]]
  num_steps = len(report["steps"])  # More than 6 if a worker came late.
  assert sum(counts) == num_steps * 3
  # Until the second worker makes its first offer the first fills the steps;
  # from then on everyone has a place in each.
  assert min(counts) >= 1
  assert min(report["refused"]) == 0
  assert [s["num_examples"] for s in report["steps"]] == [3] * num_steps
  np.testing.assert_allclose(
    report["state"]["variables/v0"],
    -RATE * (counts[0] * 0.1 + counts[1] * 0.3) / 3,
    rtol=1e-5,
  )


@pytest.mark.exhaustive
def test_two_trainings_one_by_one(start_trial):
  """In the same client; a worker runs one training at a time."""
  trainings = {"first": (2.0, 3), "second": (0.5, 5)}
  trial = start_trial(
    "two_trainings",
    trials.document(1, 2, chief=1),
    replication="in_graph",
    namespaces=[*trainings],
    trainings=trainings,
    at_once=False,
  )
  trial.await_success()
  report = trial.report()
  assert "a worker runs one training at a time" in report["refused"]
  for name, (rate, steps) in trainings.items():
    state = report[name]["state"]
    np.testing.assert_allclose(
      state["variables/v0"], -steps * rate * (0.1 + 0.3) / 2, rtol=1e-5
    )
    assert state["global_step"] == steps
    assert [count[0] for count in report[name]["counts"]] == [steps, steps]
