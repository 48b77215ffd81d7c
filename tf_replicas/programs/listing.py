"""Lists programs by name, each with the first line of its docstring.

The source files are parsed instead of imported, since many programs import
TensorFlow, which takes seconds.
"""

import ast
import importlib.util
import pathlib
from collections.abc import Iterable


def print_programs(packages: Iterable[str]) -> None:
  """Prints the command and the summary of each program in some packages.

  A program is a module that can be run with `python -m`. Its summary is the
  first line of its docstring. Modules named `__main__` or `*_task` are left
  out.

  Args:
    packages: The names of the packages. Those that are not installed are
      skipped.
  """
  summaries = {}
  for package in packages:
    spec = importlib.util.find_spec(package)
    for folder in spec.submodule_search_locations if spec else ():
      for path in sorted(pathlib.Path(folder).glob("*.py")):
        if path.stem == "__main__" or path.stem.endswith("_task"):
          continue  # The second kind is started by other programs.
        text = path.read_text(encoding="utf-8")
        if '\nif __name__ == "__main__":' in text:
          docstring = ast.get_docstring(ast.parse(text)) or ""
          summaries[f"{package}.{path.stem}"] = docstring.partition("\n")[0]
  width = max(map(len, summaries), default=0)
  for name, summary in summaries.items():
    print(f"python -m {name:<{width}}  {summary}")
  print("\nEach lists its flags with --help.")
