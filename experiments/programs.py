"""Programs of this project, run by others of it."""

import subprocess
import sys


def output(module: str, *arguments: str) -> str:
  """What a program printed to its standard output.

  Raises:
    RuntimeError: If it failed, with all that it printed.
    subprocess.TimeoutExpired: If it takes longer than ten minutes.
  """
  result = subprocess.run(
    [sys.executable, "-m", module, *arguments],
    capture_output=True,
    text=True,
    check=False,
    timeout=600,
  )
  if result.returncode:
    raise RuntimeError(f"{module} failed:\n{result.stdout}{result.stderr}")
  return result.stdout
