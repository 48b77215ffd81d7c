"""How a process begins, with TensorFlow, and what it says of its errors."""

import math
import os
import signal
import subprocess
import sys

import pytest
import tensorflow as tf

from tests.support import trials
from tf_replicas.runtime import processes


def test_tensorflow_is_imported_without_remarks_and_without_plots(tmp_path):
  """Keras does without matplotlib, which can still be imported later."""
  matplotlib = tmp_path / "matplotlib"
  matplotlib.mkdir()
  for module in ["__init__", "figure", "pyplot"]:
    (matplotlib / f"{module}.py").touch()
  program = """
import gc, sys
from tf_replicas.runtime import processes
with processes.importing_tensorflow():
  import tensorflow
assert "keras" in sys.modules
assert "matplotlib" not in sys.modules
import matplotlib.figure
assert gc.isenabled()
"""
  environ = {k: v for k, v in trials.ENVIRON.items() if "LOG_LEVEL" not in k}
  environ["PYTHONPATH"] += os.pathsep + str(tmp_path)
  done = subprocess.run(
    [sys.executable, "-c", program],
    capture_output=True,
    text=True,
    timeout=trials.DEADLINE_SECS,
    env=environ,
  )
  assert (done.returncode, done.stderr) == (0, "")


def test_a_time_limit_may_be_infinite():
  with processes.killed_after(math.inf):
    assert signal.alarm(0) > 1e8


@pytest.mark.parametrize("end", ["pass", "processes.exit_now(0)", "1 / 0"])
def test_functions_run_once_at_the_end_of_the_process(end):
  program = f"""
import os
from tf_replicas.runtime import processes
processes.at_exit(lambda: print("last"))
processes.at_exit(lambda: print("first"))
if not os.fork():
  processes.exit_now(0)
os.wait()
{end}
"""
  done = subprocess.run(
    [sys.executable, "-c", program],
    capture_output=True,
    text=True,
    timeout=trials.DEADLINE_SECS,
    env=trials.ENVIRON,
  )
  assert done.stdout.split() == ["first", "last"]


@pytest.mark.parametrize("is_graph", [False, True])
def test_words_of_data_are_told_and_its_graph_is_not(is_graph):
  """TensorFlow's own begin with 400 characters of how data is read."""

  def check(number):
    tf.debugging.Assert(number < 1, ["a file", "is damaged at", number])
    return number

  data = tf.data.Dataset.range(2).flat_map(
    lambda n: tf.data.Dataset.from_tensors(n).map(check)
  )
  data = iter(data.shuffle(1).batch(1).prefetch(1))

  def advance():
    return next(data)

  if is_graph:
    advance = tf.function(advance)
  with pytest.raises(tf.errors.InvalidArgumentError) as info:
    for _ in range(2):
      advance()
  words = processes.shortened(info.value.message)
  assert words == "assertion failed: [a file] [is damaged at] [1]"
  if "Iterator::Root" not in info.value.message:
    pytest.skip(f"TensorFlow {tf.__version__} tells nothing of the graph")
