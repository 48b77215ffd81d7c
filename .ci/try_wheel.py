"""Checks what a wheel holds, and runs the README's example with it.

  python .ci/try_wheel.py FILE.whl

The Python that runs this has the wheel installed. The example is the README's
Python program `train.py`, run by the README's command, in an empty directory.
"""

import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import zipfile

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_SECS = 300


def check(wheel: str) -> None:
  """Checks the names in the wheel: the library alone, with its data."""
  names = zipfile.ZipFile(wheel).namelist()
  top = {name.split("/")[0] for name in names}
  others = {name for name in top if not name.endswith(".dist-info")}
  if others != {"tf_replicas"}:
    sys.exit(f"{wheel} must hold tf_replicas alone. Received: {others}.")
  specs = sorted(path.name for path in (_ROOT / "cluster_specs").iterdir())
  expected = ["py.typed", *(f"cluster_specs/{name}" for name in specs)]
  missing = {f"tf_replicas/{name}" for name in expected} - set(names)
  if missing:
    sys.exit(f"{wheel} must hold all package data. Missing: {missing}.")


def run_example() -> None:
  """Runs the README's example in an empty directory."""
  readme = (_ROOT / "README.md").read_text(encoding="utf-8")
  code = re.search(r"```python\n(.*?)```", readme, re.DOTALL).group(1)
  (command,) = re.findall(r"^python (-m .* train\.py)$", readme, re.MULTILINE)
  with tempfile.TemporaryDirectory() as directory:
    pathlib.Path(directory, "train.py").write_text(code, encoding="utf-8")
    subprocess.run(
      [sys.executable, *shlex.split(command)],
      cwd=directory,
      timeout=_SECS,
      check=True,
    )
    if not pathlib.Path(directory, "model.keras").is_file():
      sys.exit("the README's example must save model.keras")


if __name__ == "__main__":
  for file in sys.argv[1:]:
    check(file)
  run_example()
