"""Tests of `programs.listing`, by `python -m` of a package."""

import subprocess
import sys

import pytest

from tests.support import binaries
from tf_replicas import __main__

# Fails if TensorFlow is imported.
_RUN = """
import runpy, sys
sys.modules["tensorflow"] = sys.modules["keras"] = None
runpy.run_module(sys.argv.pop(), run_name="__main__")
"""


@pytest.mark.parametrize(
  "package, names",
  [
    ("cifar10", ["train", "multi_gpu_train", "distributed_train", "eval"]),
    ("inception_mini", ["train", "distributed_train", "build_imagenet_data"]),
    ("tf_replicas", ["launch", "kubernetes", "status"]),
  ],
)
def test_lists_programs(package, names):
  result = subprocess.run(
    [sys.executable, "-c", _RUN, package],
    cwd=binaries.ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  lines = [line.split(maxsplit=3) for line in result.stdout.splitlines()]
  listed = {line[2]: line[3] for line in lines if line[:1] == ["python"]}
  assert {f"{package}.{name}" for name in names} <= listed.keys()
  assert (
    "cifar10.workload" not in listed and f"{package}.__main__" not in listed
  )
  if package != "inception_mini":
    assert listed["cifar10.train"].startswith("Trains CIFAR-10 on one device")


def _command(monkeypatch, *arguments):
  """Runs what the command `tf_replicas` runs; returns its exit status."""
  monkeypatch.setattr(sys, "argv", ["tf_replicas", *arguments])
  with pytest.raises(SystemExit) as end:
    __main__.main()
  return end.value.code


def test_the_command_runs_the_programs_of_the_library(monkeypatch, capsys):
  assert _command(monkeypatch, "launch", "no_such_script.py") == 2
  assert "Received: no_such_script.py." in capsys.readouterr().err
  assert _command(monkeypatch, "kubernetes", "--help") == 0
  assert "Prints the manifests" in capsys.readouterr().out
  assert _command(monkeypatch, "lunch") == 2
  assert capsys.readouterr().err == (
    "error: the command must be one of launch, kubernetes, status; without a"
    " command, all programs are listed, including those of the examples."
    " Received: lunch.\n"
  )


def test_help_has_every_flag_in_its_group():
  output = binaries.run("cifar10.distributed_train", "--help").stdout
  groups = ["Training", "Run", "Gradients", "Devices", "Cluster", "Update rule"]
  places = [output.index(f"\n{group}:\n") for group in groups]
  assert places == sorted(places)
  assert output.index("--update:") > places[5]
  assert places[4] < output.index("--job_name:") < places[5]
  assert places[2] < output.index("--clip_norm:") < places[3]
  for name in ("--max_staleness", "--wire_dtype", "--[no]use_locking"):
    assert f"\n  {name}:" in output
  assert "--dataset=synthetic \\\n" in output
