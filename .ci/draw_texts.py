"""Draws docstrings and log lines at random, for a reader new to the code.

  python .ci/draw_texts.py SEED [COUNT]

A docstring comes with its path and signature, and with what stands above it in
its file: the docstrings of the file and of the class. docs/architecture.md says
what readers understood.
"""

import ast
import pathlib
import random
import re
import sys
from collections.abc import Iterator

_ROOT = pathlib.Path(__file__).parents[1]
_FOLDERS = ("tf_replicas", "cifar10", "inception_mini")
_LOGS = ("log", "log_wait", "warning", "print", "warn_once")


def docstrings(path: pathlib.Path) -> Iterator[str]:
  """Yields the docstrings of a file's classes and functions, each with context.

  Args:
    path: The path of the file.
  """
  source = path.read_text(encoding="utf-8")
  lines, tree = source.splitlines(), ast.parse(source)
  left = [(tree, path.relative_to(_ROOT).as_posix() + " ::")]
  while left:
    owner, name = left.pop()
    for node in ast.iter_child_nodes(owner):
      if not isinstance(node, ast.FunctionDef | ast.ClassDef):
        continue
      left.append((node, f"{name} {node.name}"))
      if text := ast.get_docstring(node):
        above = [ast.get_docstring(tree)]
        if isinstance(owner, ast.ClassDef):
          above.append(ast.get_docstring(owner))
        signature = "\n".join(lines[node.lineno - 1 : node.body[0].lineno - 1])
        yield "\n\n".join(
          [
            f"{name} {node.name}",
            *(each for each in above if each),
            f'>>> To judge:\n{signature}\n"""{text}"""',
          ]
        )


def log_lines(path: pathlib.Path) -> Iterator[str]:
  """Yields the calls of a file that log or print a text of several words.

  Words that are values, of which a reader of the code sees only names, do not
  count. So `print(f"error: {message}")` is left out.

  Args:
    path: The path of the file.
  """
  source = path.read_text(encoding="utf-8")
  for node in ast.walk(ast.parse(source)):
    if not isinstance(node, ast.Call) or not node.args:
      continue
    name = ast.unparse(node.func).split(".")[-1].lstrip("_")
    texts = [
      each.value
      for each in ast.walk(node.args[0])
      if isinstance(each, ast.Constant) and isinstance(each.value, str)
    ]
    if name in _LOGS and len(re.findall(r"[a-z]{2,}", " ".join(texts))) > 2:
      place = f"{path.relative_to(_ROOT)}:{node.lineno}"
      yield f"{place}\n{ast.get_source_segment(source, node)}"


def main() -> None:
  """Prints `COUNT` docstrings and `COUNT` log lines."""
  seed, count = int(sys.argv[1]), int((sys.argv + ["10"])[2])
  paths = sorted(p for f in _FOLDERS for p in (_ROOT / f).rglob("*.py"))
  for kind in (docstrings, log_lines):
    texts = [text for path in paths for text in kind(path)]
    for number, text in enumerate(random.Random(seed).sample(texts, count), 1):
      print(f"##### {kind.__name__} {number}. {text}\n")


if __name__ == "__main__":
  main()
