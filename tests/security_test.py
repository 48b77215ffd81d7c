"""Tests that nothing from a file is executed, and no archive is unpacked."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = [
  path
  for package in ("tf_replicas", "cifar10", "inception_mini")
  for path in sorted((ROOT / package).rglob("*.py"))
]
# What these read was sent by a process of the same training.
MAY = {
  "pickle.loads": (
    "tf_replicas/fitting/series.py",  # From the chief, by PS task 0.
    "tf_replicas/programs/function_launcher.py",  # By a pipe.
    "tf_replicas/programs/function_task.py",  # By a pipe.
  ),
  "exec": ("tf_replicas/runtime/fork_server.py",),  # The user's program.
  # It reads the images where they are; see the next test.
  "tarfile.open": ("inception_mini/imagenet.py",),
}
EXECUTE = (
  *("pickle.load", "pickle.loads", "marshal.loads", "eval", "exec"),
  *("numpy.load", "np.load", "yaml.load", "yaml.unsafe_load"),
  *("keras.models.load_model", "keras.saving.load_model", "os.system"),
  *("keras.config.enable_unsafe_deserialization", "tf.saved_model.load"),
  *("tarfile.open", "zipfile.ZipFile", "shutil.unpack_archive"),
)


def _calls(text):
  return {
    ast.unparse(node.func)
    for node in ast.walk(ast.parse(text))
    if isinstance(node, ast.Call)
  }


@pytest.mark.parametrize("name", EXECUTE)
def test_nothing_from_a_file_is_executed(name):
  found = {
    str(path.relative_to(ROOT))
    for path in SOURCES
    if name in _calls(path.read_text(encoding="utf-8"))
  }
  assert found == set(MAY.get(name, ()))


def test_nothing_is_unpacked():
  for path in SOURCES:
    calls = _calls(path.read_text(encoding="utf-8"))
    methods = {call.rpartition(".")[2] for call in calls}
    assert not methods & {"extract", "extractall", "unpack_archive"}, path


def test_calls_are_seen():
  assert _calls("x = [pickle.loads(f(b))]") == {"pickle.loads", "f"}
