"""`fit` and `run` go on after a parameter server was killed and restarted."""

import json
import pathlib

import numpy as np
import pytest

from tests.support import trials

_TASK = pathlib.Path(__file__).parents[1] / "tasks" / "recovery_task.py"


def _train(directory, function, flags, **arguments) -> tuple[dict, str]:
  """What the chief printed, and the output of all tasks."""
  directory.mkdir()
  arguments = {"directory": str(directory), **arguments}
  if function == "fit_table":
    function, arguments["has_table"] = "fit", True
    # Who writes the rows makes no difference.
    arguments["table_writer"] = "ps" if arguments["kill"] else "chief"
  result = trials.python(
    *("-m", "tf_replicas.launch", "--ps=2", "--workers=2", *flags),
    *(str(_TASK), function, json.dumps(arguments)),
    environ=trials.SPEAKING_ENVIRON,
  )
  assert result.returncode == 0, result.stdout + result.stderr
  (line,) = [s for s in result.stdout.splitlines() if " RESULT {" in s]
  return json.loads(line.split(" RESULT ", 1)[1]), result.stdout


@pytest.mark.parametrize(
  ("function", "flags", "replication"),
  [
    ("fit", [], "between_graph"),
    pytest.param(
      "fit_table", [], "between_graph", marks=pytest.mark.exhaustive
    ),
    pytest.param("run", ["--chief"], "in_graph", marks=pytest.mark.exhaustive),
    pytest.param("fit", ["--chief"], "in_graph", marks=pytest.mark.exhaustive),
    pytest.param(
      "fit_table", ["--chief"], "in_graph", marks=pytest.mark.exhaustive
    ),
    pytest.param("run", [], "between_graph", marks=pytest.mark.exhaustive),
  ],
)
def test_ends_like_an_undisturbed_training(
  tmp_path, function, flags, replication
):
  killed, output = _train(
    tmp_path / "killed", function, flags, kill=True, replication=replication
  )
  assert "recovered from the loss of ps 0 at step" in output
  undisturbed, output = _train(
    tmp_path / "undisturbed",
    function,
    flags,
    kill=False,
    replication=replication,
  )
  assert "recovered" not in output
  _assert_alike(killed, undisturbed)


def _assert_alike(one: dict, other: dict) -> None:
  assert one["history"].keys() == other["history"].keys()
  for name, values in other["history"].items():
    np.testing.assert_allclose(one["history"][name], values, rtol=1e-5)
  for weights, others in zip(one["weights"], other["weights"], strict=True):
    np.testing.assert_allclose(weights, others, rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
  ("flags", "replication"), [([], "between_graph"), (["--chief"], "in_graph")]
)
def test_goes_on_after_an_interrupted_connection(tmp_path, flags, replication):
  """No parameter server has died, and the chief has closed its queues."""
  trained = {}
  for cuts in (True, False):
    trained[cuts], output = _train(
      tmp_path / str(cuts),
      "run",
      flags,
      kill=False,
      cuts=cuts,
      replication=replication,
    )
    assert ("recovered from the loss of a connection" in output) == cuts
  _assert_alike(trained[True], trained[False])
