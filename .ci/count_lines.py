"""Lines of code, by top folder: python .ci/count_lines.py [REV]

Counts lines with code (no blank lines, comments and docstrings), lines of
docstrings, functions, modules, and functions called `test_…`.
"""

import ast
import io
import subprocess
import sys
import tokenize

_NO_CODE = {
  tokenize.COMMENT,
  tokenize.NL,
  tokenize.NEWLINE,
  tokenize.INDENT,
  tokenize.DEDENT,
  tokenize.ENDMARKER,
}


def count(source: str) -> tuple[int, int, int, int, int]:
  """Code lines, docstring lines, functions, 1 module, tests."""
  docs: set[int] = set()
  functions = tests = 0
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.FunctionDef):
      functions += 1
      tests += node.name.startswith("test_")
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
      if ast.get_docstring(node):
        first = node.body[0]
        docs |= set(range(first.lineno, first.end_lineno + 1))
  code: set[int] = set()
  for token in tokenize.generate_tokens(io.StringIO(source).readline):
    if token.type not in _NO_CODE:
      code |= set(range(token.start[0], token.end[0] + 1))
  lines = source.split("\n")
  code = {line for line in code - docs if lines[line - 1].strip()}
  return len(code), len(docs), functions, 1, tests


def git(*arguments: str) -> str:
  """What a git command prints."""
  command = ["git", *arguments]
  return subprocess.run(command, capture_output=True, text=True).stdout


def main(rev: str = "HEAD") -> None:
  totals: dict[str, list[int]] = {}
  for path in git("ls-tree", "-r", "--name-only", rev).split():
    if path.endswith(".py"):
      total = totals.setdefault(path.split("/")[0], [0] * 5)
      for i, n in enumerate(count(git("show", f"{rev}:{path}"))):
        total[i] += n
  print(
    f"{'':16}{'code':>8}{'docs':>8}{'functions':>11}{'modules':>9}{'tests':>8}"
  )
  for folder, (code, docs, functions, modules, tests) in totals.items():
    print(f"{folder:16}{code:8}{docs:8}{functions:11}{modules:9}{tests:8}")


if __name__ == "__main__":
  main(*sys.argv[1:])
