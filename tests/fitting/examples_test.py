"""Keras' own examples, in `examples/keras`: with Keras, and on a cluster."""

import ast
import contextlib
import difflib
import io
import pathlib
import re
import runpy
import shutil
import subprocess

import pytest

from tests.support import trials

_DIRECTORY = pathlib.Path("examples", "keras")
# The last line of each program ends with an accuracy, or with the first and the
# last value of what gets smaller. Chance: 0.1 for the digits, and 0.5.
_GOALS = {
  "mnist_convnet": lambda accuracy: accuracy > 0.6,
  "structured_data": lambda accuracy: accuracy > 0.8,
  "text_classification_transformer": lambda accuracy: accuracy > 0.8,
  "timeseries_classification": lambda accuracy: accuracy > 0.85,
  "variational_autoencoder": lambda first, last: last < 0.6 * first,
  "wgan_gp": lambda first, last: last < 0.3 * first,
}


def _patched(name: str, directory: pathlib.Path) -> pathlib.Path:
  """Copies a program into `directory`, and applies its patch."""
  program = directory / _DIRECTORY / f"{name}.py"
  program.parent.mkdir(parents=True)
  shutil.copy(trials.ROOT / _DIRECTORY / program.name, program)
  patch = trials.ROOT / _DIRECTORY / f"{name}.patch"
  subprocess.run(["git", "apply", patch], cwd=directory, check=True, timeout=60)
  return program


def _lines_of_fit(text: str) -> range:
  """The numbers, from 0, of the lines of the call of `fit`."""
  (call,) = [
    node
    for node in ast.walk(ast.parse(text))
    if isinstance(node, ast.Call)
    and isinstance(node.func, ast.Attribute)
    and node.func.attr == "fit"
  ]
  return range(call.lineno - 1, call.end_lineno)


def _changed(before: str, after: str) -> list[str]:
  """Lines that were taken out or put in, but blank ones and those of `fit`."""
  texts = [before, after]
  lines = [text.splitlines() for text in texts]
  matcher = difflib.SequenceMatcher(None, *lines, autojunk=False)
  found = []
  for tag, *ends in matcher.get_opcodes():
    if tag == "equal":
      continue
    for sign, text, own, begin, end in zip(
      "-+", texts, lines, ends[::2], ends[1::2], strict=True
    ):
      found += [
        sign + own[number]
        for number in range(begin, end)
        if number not in _lines_of_fit(text) and own[number].strip()
      ]
  return found


def _result(output: str) -> list[float]:
  last = output.strip().splitlines()[-1]
  return [float(number) for number in re.findall(r"\d+\.\d+", last)]


def test_counts_changed_lines():
  before = "a = 1\n\nmodel.fit(\n  x,\n)\nb = 2\n"
  after = "a = 3\n\n\nlib.fit(\n  model_fn,\n  x,\n)\nc = 4\nb = 2\n"
  assert _changed(before, after) == ["-a = 1", "+a = 3", "+c = 4"]


def test_every_example_has_a_goal():
  programs = (trials.ROOT / _DIRECTORY).glob("*.py")
  assert sorted(program.stem for program in programs) == sorted(_GOALS)


@pytest.mark.parametrize("name", sorted(_GOALS))
def test_three_lines_replicate_it(name, tmp_path):
  """`pytest -rP` shows the differences."""
  before = (trials.ROOT / _DIRECTORY / f"{name}.py").read_text("utf-8")
  after = _patched(name, tmp_path).read_text("utf-8")
  for line in difflib.unified_diff(
    before.splitlines(), after.splitlines(), name, f"{name}, replicated"
  ):
    print(line)
  changed = _changed(before, after)
  print(f"{name}: {len(changed)} changed lines outside of `fit`: {changed}")
  assert "+import tf_replicas" in changed
  assert len(changed) <= 3, changed


# The others take long.
_IN_CI = ("mnist_convnet",)
_NAMES = [
  pytest.param(name, marks=() if name in _IN_CI else pytest.mark.exhaustive)
  for name in sorted(_GOALS)
]


@pytest.mark.parametrize("name", _NAMES)
def test_learns_with_keras(name):
  output = io.StringIO()
  with contextlib.redirect_stdout(output):
    runpy.run_path(str(trials.ROOT / _DIRECTORY / f"{name}.py"))
  assert _GOALS[name](*_result(output.getvalue())), output.getvalue()


@pytest.mark.parametrize("name", _NAMES)
def test_learns_on_a_cluster(name, tmp_path):
  command = ["-m", "tf_replicas.launch", "--ps=1"]
  command += ["--preload", "--workers=2", str(_patched(name, tmp_path))]
  result = trials.python(*command, cwd=tmp_path)
  assert result.returncode == 0, result.stdout + result.stderr
  assert _GOALS[name](*_result(result.stdout)), result.stdout
