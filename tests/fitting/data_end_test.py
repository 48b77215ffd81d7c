"""Trainings whose data sets end, on real processes."""

import json
import pathlib

import pytest

from tests.support import trials

_TASK = pathlib.Path(__file__).parents[1] / "tasks" / "data_end_task.py"


def test_the_training_stops_or_goes_on():
  result = trials.python(
    *("-m", "tf_replicas.launch", "--ps=1", "--workers=2", _TASK),
    environ=trials.SPEAKING_ENVIRON,
  )
  output = result.stdout + result.stderr
  assert result.returncode == 0, output
  (line,) = [s for s in output.splitlines() if " RESULT [" in s]
  stopped, went_on = json.loads(line.split(" RESULT ", 1)[1])
  # Worker 1 has three batches, and worker 0 has six.
  assert stopped == [3, 3, 3]
  assert went_on == [6, 6, 3]
  assert "the data of 1 of 2 replicas have ended; training ends" in output
  assert "the data of 2 of 2 replicas have ended; training ends" in output
  assert output.count("worker 1: its data have ended") == 2


@pytest.mark.exhaustive
def test_a_worker_that_never_joins_has_no_data():
  result = trials.python(
    *("-m", "tf_replicas.launch", "--ps=1", "--workers=2", "--max_workers=3"),
    _TASK,
    environ=trials.SPEAKING_ENVIRON,
  )
  output = result.stdout + result.stderr
  assert result.returncode == 0, output
  (line,) = [s for s in output.splitlines() if " RESULT [" in s]
  assert json.loads(line.split(" RESULT ", 1)[1]) == [
    [3, 3, 3, 0],
    [6, 6, 3, 0],
  ]
  assert "the data of 2 of 2 replicas have ended; training ends" in output
