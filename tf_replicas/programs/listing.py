"""Lists programs by name, with the first lines of their docstrings.

The source files are parsed instead of imported, since many programs import
TensorFlow, which takes seconds.
"""

import ast
import importlib.util
import pathlib
from collections.abc import Iterable


def print_programs(packages: Iterable[str]) -> None:
  """Prints the name and the summary of each program in some packages.

  The summary is the first line of the docstring. Packages that are not
  installed are skipped.

  Args:
    packages: Names of packages. A program is a module of these that can be run
      as `__main__`. Modules named `__main__` or `*_task` are left out.
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
