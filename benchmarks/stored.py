"""Stores what a benchmark measured, with what a reader needs to judge it."""

import datetime
import importlib.metadata
import json
import pathlib
import shlex
import sys
from typing import Any

from experiments.support import claims


def _circumstances() -> dict[str, str]:
  """Describes the command, the time, the machine, and the versions."""
  spec = sys.modules["__main__"].__spec__
  program = ["-m", spec.name] if spec else [sys.argv[0]]
  now = datetime.datetime.now(datetime.timezone.utc)
  return {
    "command": shlex.join(["python", *program, *sys.argv[1:]]),
    "date": now.isoformat("T", "seconds"),
    "machine": claims.machine(),
    "commit": claims.commit(),
    "tensorflow": importlib.metadata.version("tensorflow"),
  }


# Of this process: the command, when it began (in UTC), the machine, the commit
# of this tree (with a + if it has changes), and the version of TensorFlow. They
# are found at the start, because the files may change in the meantime.
CIRCUMSTANCES = _circumstances()


def write(path: str | None, measured: dict[str, Any]) -> None:
  """Writes results and their circumstances as JSON.

  Args:
    path: The file, which is replaced. None: nothing is written.
    measured: The results, and other values to store.
  """
  if path is not None:
    text = json.dumps({**CIRCUMSTANCES, **measured}, indent=1) + "\n"
    pathlib.Path(path).write_text(text, encoding="utf-8")
