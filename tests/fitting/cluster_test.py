"""`fit` on real clusters, by the launcher, against Keras in one process."""

import json
import os
import pathlib
import re
import subprocess
import sys

import keras
import numpy as np
import pytest

from tests.fitting import models
from tests.support import trials
from tf_replicas.cluster import addresses
from tf_replicas.programs import script_launcher

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_MIRRORED = str(_ROOT / "cluster_specs" / "mirrored_2workers.json")
_TASK = _ROOT / "tests" / "tasks" / "fit_task.py"


def _launch(*flags: str, case: str, **arguments) -> tuple[dict, str]:
  """What the chief printed, and the whole output."""
  result = subprocess.run(
    [
      *(sys.executable, "-m", "tf_replicas.launch", *flags),
      *(str(_TASK), case, json.dumps(arguments)),
    ],
    cwd=_ROOT,
    env={**os.environ, "PYTHONPATH": str(_ROOT), "CUDA_VISIBLE_DEVICES": ""},
    capture_output=True,
    text=True,
    timeout=240,
    check=False,
  )
  output = result.stdout + result.stderr
  assert result.returncode == 0, output
  (line,) = [s for s in result.stdout.splitlines() if " RESULT {" in s]
  return json.loads(line.split(" RESULT ", 1)[1]), output


@pytest.mark.parametrize(
  ("flags", "replication", "name"),
  [
    (["--workers=2"], "between_graph", "several_outputs"),
    (["--workers=2", "--chief"], "in_graph", "recurrent"),
    (["--workers=3", "--ps=2"], "between_graph", "own_step"),
    (["--cluster_spec", _MIRRORED], "mirrored", "momentum"),
  ],
)
def test_replicas_train_as_one_process(flags, replication, name):
  """44 examples by 16 and 3 replicas: no batch is divided evenly."""
  case = models.CASES[name]
  arguments = {"batch_size": 16, "epochs": 2, "shuffle": False}
  ours, _ = _launch(*flags, case=name, replication=replication, **arguments)
  theirs = case.model_fn().fit(**case.arguments, verbose=0, **arguments)
  assert ours["epochs"] == [0, 1]
  assert ours["examples"] == [models.NUM_EXAMPLES] * 2
  assert sorted(ours["history"]) == sorted(theirs.history)
  for key, values in theirs.history.items():
    np.testing.assert_allclose(
      ours["history"][key], values, rtol=1e-4, atol=1e-4
    )
  for one, other in zip(
    ours["weights"], theirs.model.get_weights(), strict=True
  ):
    np.testing.assert_allclose(one, other, atol=case.tolerance)
  for one, other in zip(
    ours["slots"], theirs.model.optimizer.variables, strict=True
  ):
    np.testing.assert_allclose(one, other, atol=case.tolerance)


def test_asynchronous_updates_count_their_metrics():
  """Each epoch has all its updates; the rate of a callback is used."""
  ours, _ = _launch(
    case="momentum",
    rule={"policies": ["bounded_staleness"], "max_staleness": 2},
    batch_size=4,
    epochs=3,
    rate=0.0,
  )
  assert ours["epochs"] == [0, 1, 2]
  # A rate of 0 from the second epoch on, of which at most the updates under
  # way at its start escape.
  assert ours["slots"][1] == 0.0
  # Updates cross the ends of epochs, and each is counted once.
  assert sum(ours["examples"]) == 3 * models.NUM_EXAMPLES


def test_the_chief_waits_for_parameter_servers_in_vain():
  (port,) = addresses.free_ports(1, taken=set())
  jobs = {"ps": ["ps.absent.test:2222"], "worker": [f"localhost:{port}"]}
  config = {"cluster": jobs, "task": {"type": "worker", "index": 0}}
  arguments = json.dumps({"start_timeout_secs": 1})
  result = subprocess.run(
    [sys.executable, str(_TASK), "momentum", arguments],
    cwd=_ROOT,
    env={**trials.ENVIRON, "TF_CONFIG": json.dumps(config)},
    capture_output=True,
    text=True,
    timeout=240,
    check=False,
  )
  assert result.returncode == 1
  assert result.stderr.rstrip().splitlines()[-1] == (
    "TimeoutError: waiting for ps 0 at ps.absent.test:2222: gave up after 1 s"
  )


def _run(directory, *arguments: str) -> str:
  """Runs the launcher in `directory`; what it printed."""
  result = subprocess.run(
    [sys.executable, "-m", "tf_replicas.launch", *arguments],
    cwd=directory,
    env={**os.environ, "PYTHONPATH": str(_ROOT), "CUDA_VISIBLE_DEVICES": ""},
    capture_output=True,
    text=True,
    timeout=240,
    check=False,
  )
  assert result.returncode == 0, result.stdout + result.stderr
  return result.stdout


def test_the_example_learns_with_a_backup_worker(tmp_path):
  output = _run(
    tmp_path,
    "--workers=3",
    str(_ROOT / "examples" / "keras_fit.py"),
    "--replicas_to_aggregate=2",
    "--save_to=model.keras",
  )
  (accuracy,) = re.findall(r"accuracy: ([\d.]+)$", output, re.MULTILINE)
  assert float(accuracy) > 0.9
  assert (tmp_path / "model.keras").stat().st_size > 0


def test_the_script_of_the_documentation_saves_once(tmp_path):
  text = (_ROOT / "docs" / "keras.md").read_text(encoding="utf-8")
  (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
  (command,) = re.findall(
    r"```bash\npython -m tf_replicas.launch (.*?)\n", text
  )
  script = tmp_path / "train.py"
  script.write_text(block + "print('saved')\n", encoding="utf-8")
  assert _run(tmp_path, *command.split()).count("] saved") == 1
  assert keras.models.load_model(tmp_path / "model.keras").built


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    (["absent.py"], "the script must be a Python file. Received: absent.py."),
    (["--ps=0", __file__], "`--ps` must be at least 1. Received: 0."),
  ],
)
def test_the_launcher_refuses_in_one_line(arguments, words, capsys):
  with pytest.raises(SystemExit) as ended:
    script_launcher.main(arguments)
  assert ended.value.code == 2
  assert capsys.readouterr().err == f"error: {words}\n"
