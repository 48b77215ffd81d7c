"""How a process begins, with TensorFlow."""

import subprocess
import sys

import conftest
import pytest


def test_tensorflow_is_imported_without_remarks_and_without_plots():
  """Keras does without matplotlib, which can still be imported later."""
  pytest.importorskip("matplotlib")
  program = """
import gc, sys
from tf_replicas import processes
with processes.importing_tensorflow():
  import tensorflow
assert "keras" in sys.modules
assert "matplotlib" not in sys.modules
import matplotlib.figure
assert gc.isenabled()
"""
  done = subprocess.run(
    [sys.executable, "-c", program],
    capture_output=True,
    text=True,
    timeout=conftest.DEADLINE_SECS,
    env={k: v for k, v in conftest.ENVIRON.items() if "LOG_LEVEL" not in k},
  )
  assert (done.returncode, done.stderr) == (0, "")
