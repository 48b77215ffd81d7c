"""The notebooks run from beginning to end, and show what they say."""

import ast
import os
import re

import nbclient
import nbformat
import pytest

from tests.support import trials

_NOTEBOOKS = trials.ROOT / "notebooks"
# Of one cell, which may hold four trainings.
_CELL_SECS = 2 * trials.DEADLINE_SECS
_NAMES = sorted(path.name for path in _NOTEBOOKS.glob("*.ipynb"))


def _read(name: str) -> nbformat.NotebookNode:
  return nbformat.read(_NOTEBOOKS / name, as_version=4)


def _execute(name: str, monkeypatch) -> dict:
  """Executes a notebook in a kernel; returns what its last cell shows.

  No process may be left while the kernel still runs, nor after it.
  """
  for key in ("PYTHONPATH", "CUDA_VISIBLE_DEVICES"):
    monkeypatch.setenv(key, trials.ENVIRON[key])
  notebook = _read(name)
  before = set(trials.descendants(os.getpid()))
  client = nbclient.NotebookClient(
    notebook,
    timeout=_CELL_SECS,
    kernel_name="python3",
    resources={"metadata": {"path": str(_NOTEBOOKS)}},
  )
  with client.setup_kernel():
    for index, cell in enumerate(notebook.cells):
      client.execute_cell(cell, index)
    left = set(trials.descendants(os.getpid())) - before
    assert len(left) == 1  # The kernel.
  assert set(trials.descendants(os.getpid())) == before
  outputs = [output for c in notebook.cells for output in c.get("outputs", ())]
  assert not [o for o in outputs if o.output_type == "error"]
  assert any("image/png" in output.get("data", {}) for output in outputs)
  return ast.literal_eval(outputs[-1].data["text/plain"])


@pytest.mark.exhaustive
def test_what_a_slow_worker_costs(monkeypatch):
  summary = _execute("slow_worker.ipynb", monkeypatch)
  every, backup, bounded, free = summary.values()
  # By the sleeps alone, 10, 3 and 21 times; a busy machine adds to each step.
  assert backup["updates_per_sec"] > 1.5 * every["updates_per_sec"]
  assert bounded["updates_per_sec"] > 1.2 * every["updates_per_sec"]
  assert free["updates_per_sec"] > 1.5 * every["updates_per_sec"]
  assert len(set(every["examples"])) == 1
  assert backup["examples"][2] < 0.5 * backup["examples"][0]
  assert free["examples"][2] < 0.5 * free["examples"][0]
  # The fast ones are at most 4 steps ahead, of 32 examples each.
  assert bounded["examples"][0] <= bounded["examples"][2] + 6 * 32
  for rule in summary.values():
    assert rule["last_loss"] < rule["first_loss"]


def test_one_update(monkeypatch):
  summary = _execute("one_update.ipynb", monkeypatch)
  assert summary["sync"] == pytest.approx([0.95, -1.4])
  assert summary["async"] == pytest.approx([0.9, -0.8])
  assert summary["staleness"] == [[1], [0, 1]]


@pytest.mark.parametrize("name", _NAMES)
def test_a_notebook_is_stored_without_outputs(name):
  notebook = _read(name)
  nbformat.validate(notebook)
  for cell in notebook.cells:
    assert not cell.get("outputs")
    assert cell.get("execution_count") is None


def test_both_are_there():
  assert _NAMES == ["one_update.ipynb", "slow_worker.ipynb"]


def test_the_code_of_the_documentation(tmp_path, monkeypatch, capsys):
  text = (trials.ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8")
  (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
  notebook = nbformat.v4.new_notebook(
    cells=[nbformat.v4.new_code_cell(code + "\nhistory['loss']")]
  )
  for key in ("PYTHONPATH", "CUDA_VISIBLE_DEVICES"):
    monkeypatch.setenv(key, trials.ENVIRON[key])
  nbclient.NotebookClient(
    notebook,
    timeout=_CELL_SECS,
    kernel_name="python3",
    resources={"metadata": {"path": str(tmp_path)}},
  ).execute()
  losses = ast.literal_eval(notebook.cells[0].outputs[-1].data["text/plain"])
  assert losses[-1] < losses[0]
