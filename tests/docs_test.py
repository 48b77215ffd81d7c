"""Every code block of README.md and docs is run, checked or marked.

A line `<!-- ... -->` before a block marks it:

    <!-- example: NAME -->     another test runs it; see `EXAMPLES`
    <!-- output of: NAME -->   `tests/first_steps_test.py` compares it
    <!-- not run: REASON -->   it needs what tests do not have

Blocks of `python` and `output` need a mark. Blocks of `bash` are read: modules,
their flags and files must exist, and commands that end at once are run. Blocks
of `json` are cluster specs. Blocks of `message` quote the library.
"""

import ast
import functools
import importlib.util
import inspect
import json
import pathlib
import re
import shlex
from typing import NamedTuple

import jsonschema
import pytest
import tensorflow as tf  # noqa: F401  # Its first import starts `uname`.

import tf_replicas
from tests.support import trials
from tf_replicas import cluster

ROOT = trials.ROOT
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
PACKAGES = (
  "tf_replicas",
  "cifar10",
  "inception_mini",
  "experiments",
  "benchmarks",
)
# (page, name) of a block that is marked as an example -> the test that runs it.
EXAMPLES = {
  ("README.md", "train.py"): "tests/readme_test.py",
  ("docs/custom_loops.md", "join"): "tests/fitting/custom_loop_test.py",
  ("docs/custom_loops.md", "run"): "tests/fitting/custom_loop_test.py",
  ("docs/custom_loops.md", "session"): "tests/fitting/custom_loop_test.py",
  ("docs/custom_loops.md", "tf1"): "tests/fitting/custom_loop_test.py",
  ("docs/first_steps.md", "train.py"): "tests/first_steps_test.py",
  ("docs/keras.md", "train.py"): "tests/fitting/cluster_test.py",
  ("docs/migration.md", "contrib"): "tests/migration_test.py",
  ("docs/migration.md", "estimator"): "tests/migration_test.py",
  ("docs/migration.md", "hook"): "tests/migration_test.py",
  ("docs/migration.md", "horovod"): "tests/migration_test.py",
  ("docs/migration.md", "names"): "tests/migration_test.py",
  ("docs/migration.md", "strategy.py"): "tests/migration_test.py",
  ("docs/migration.md", "sync_train.py"): "tests/migration_test.py",
  ("docs/notebooks.md", "notebook"): "tests/notebooks_test.py",
  ("docs/programs.md", "classify.py"): "tests/readme_test.py",
  ("docs/programs.md", "program"): "tests/readme_test.py",
  ("docs/update_rules.md", "policy"): "tests/readme_test.py",
  ("docs/update_rules.md", "switch"): "tests/readme_test.py",
  ("docs/wrapper.md", "my_train.py"): "tests/readme_test.py",
}
# Commands that end at once, and import no TensorFlow.
RUN = ("-m tf_replicas.kubernetes ", "-c ")
OTHER_COMMANDS = {
  *("pip", "docker", "kubectl", "sbatch", "git", "export", "tensorboard", "."),
  *("kill", "tail", "cut"),
}


_LINK = (
  r"(https://[\w.-]+\.[a-z]+|http://localhost:\d+)(/[\w./%?=&-]*)?(#[\w.-]+)?"
)


class Block(NamedTuple):
  page: str
  line: int
  language: str
  code: str
  mark: str

  def __str__(self) -> str:
    return f"{self.page}:{self.line}"


def _blocks() -> list[Block]:
  found = []
  for path in PAGES:
    text = path.read_text(encoding="utf-8")
    pattern = r"(?:^<!-- ([^\n]*) -->\n)?^```(\w*)\n(.*?)^```$"
    for match in re.finditer(pattern, text, re.DOTALL | re.MULTILINE):
      mark, language, code = match.groups()
      line = text.count("\n", 0, match.start(2)) + 1
      page = str(path.relative_to(ROOT))
      found.append(Block(page, line, language, code, mark or ""))
  return found


BLOCKS = _blocks()


def of(language: str):
  """Parametrizes a test by the blocks of a language that are not marked."""
  blocks = [
    block
    for block in BLOCKS
    if block.language == language and not block.mark.startswith("not run: ")
  ]
  return pytest.mark.parametrize("block", blocks, ids=str)


def test_each_block_is_run_or_marked():
  for block in BLOCKS:
    kind, _, name = block.mark.partition(": ")
    assert kind in ("", "example", "output of", "not run"), block
    assert bool(kind) == bool(name), block
    if block.language in ("python", "output"):
      assert kind, f"{block}: needs a mark"
    else:
      assert block.language in ("bash", "json", "message"), block


def test_each_example_is_run_by_a_test():
  marked = {
    (block.page, block.mark.removeprefix("example: "))
    for block in BLOCKS
    if block.mark.startswith("example: ")
  }
  assert marked == set(EXAMPLES)
  for (page, _), test in EXAMPLES.items():
    assert pathlib.Path(page).name in (ROOT / test).read_text(encoding="utf-8")


@pytest.mark.parametrize(
  "block", [b for b in BLOCKS if b.language == "python"], ids=str
)
def test_python_compiles_and_its_names_exist(block):
  """So do the keyword arguments of public functions, in blocks not run too."""
  tree = ast.parse(block.code)
  for node in ast.walk(tree):
    if isinstance(node, ast.ImportFrom) and node.module == "tf_replicas":
      for alias in node.names:
        assert alias.name in tf_replicas.__all__, alias.name
    if _is_public(node):
      assert node.attr in tf_replicas.__all__, node.attr
    if isinstance(node, ast.Call) and _is_public(node.func):
      _check_keywords(node)


def _is_public(node: ast.AST) -> bool:
  return (
    isinstance(node, ast.Attribute)
    and isinstance(node.value, ast.Name)
    and node.value.id == "tf_replicas"
  )


def _check_keywords(node: ast.Call) -> None:
  function = getattr(tf_replicas, node.func.attr)
  parameters = inspect.signature(function).parameters.values()
  if any(p.kind == p.VAR_KEYWORD for p in parameters):
    return
  names = {p.name for p in parameters}
  for keyword in node.keywords:
    assert keyword.arg is None or keyword.arg in names, keyword.arg


@of("json")
def test_a_spec_is_valid(block):
  document = json.loads(block.code)
  assert cluster.parse(document)
  schema = ROOT / "tf_replicas" / "cluster" / "cluster_spec.schema.json"
  jsonschema.validate(document, json.loads(schema.read_text(encoding="utf-8")))


def _commands(code: str) -> list[list[str]]:
  """The commands of a block, each as a list of arguments."""
  code = re.sub(r"(^|\s)#.*", "", code.replace("\\\n", " "), flags=re.MULTILINE)
  lexer = shlex.shlex(code, posix=True, punctuation_chars="|&;\n")
  lexer.whitespace = " \t"
  lexer.whitespace_split = True
  commands, command = [], []
  for token in lexer:
    if set(token) <= set("|&;\n"):
      commands.append(command)
      command = []
    else:
      command.append(token)
  return [each for each in [*commands, command] if each]


@of("bash")
def test_commands_name_what_exists(block):
  for command in _commands(block.code):
    program, *arguments = command
    if program not in ("python", "python3"):
      assert program in OTHER_COMMANDS, command
    elif arguments[0] == "-m":
      _check_module(arguments[1], arguments[2:])
    for argument in arguments:
      for name in re.findall(r"(?:cluster_specs|examples)/[\w/.]+", argument):
        assert (ROOT / name).exists(), name


def _check_module(module: str, arguments: list[str]) -> None:
  if not module.startswith(PACKAGES):
    assert importlib.util.find_spec(module), module
    return
  names = _names(module)
  for argument in arguments:
    if argument == "--" or argument.endswith(".py"):
      return  # What follows is for another program.
    if argument.startswith("--"):
      flag = argument.partition("=")[0]
      assert {flag, flag[2:], flag[2:].removeprefix("no")} & names, (
        f"{module} has no flag {flag}"
      )


@functools.cache
def _names(module: str) -> frozenset[str]:
  """Strings and fields of a module and of what it imports of our packages.

  Among them are the names of its flags.
  """
  found, seen, left = set(), set(), [module]
  while left:
    name = left.pop()
    path = ROOT.joinpath(*name.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if name in seen or not path.exists():
      continue
    seen.add(name)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
      if isinstance(node, ast.Constant) and isinstance(node.value, str):
        found.add(node.value)
      elif isinstance(node, ast.AnnAssign) and isinstance(
        node.target, ast.Name
      ):
        found.add(node.target.id)
      elif isinstance(node, ast.Import):
        left += [alias.name for alias in node.names]
      elif isinstance(node, ast.ImportFrom) and node.module:
        left += [f"{node.module}.{alias.name}" for alias in node.names]
        left.append(node.module)
  assert seen, module
  return frozenset(found)


def test_modules_and_flags_are_checked():
  _check_module("cifar10.train", ["--train_dir=x", "--recipe=modern"])
  for module, flag in (
    ("cifar10.train", "--trian_dir=x"),
    ("tf_replicas.launch", "--works=2"),
    ("experiments.timeline", "--runs=x"),
  ):
    with pytest.raises(AssertionError, match="has no flag"):
      _check_module(module, [flag])
  with pytest.raises(AssertionError):
    _check_module("cifar10.nothing", [])


@pytest.mark.parametrize(
  "command",
  [
    command
    for block in BLOCKS
    if block.language == "bash" and not block.mark
    for command in _commands(block.code)
    if command[0] == "python" and " ".join(command[1:]).startswith(RUN)
  ],
  ids=lambda command: " ".join(command)[:40],
)
def test_short_commands_run(command):
  result = trials.python(*command[1:])
  assert result.returncode == 0, result.stderr
  assert result.stdout


@functools.cache
def _templates() -> str:
  """The strings of our programs, a line each; \\0 is what is put into them."""
  found = []
  for package in PACKAGES[:3]:
    for path in sorted((ROOT / package).rglob("*.py")):
      tree = ast.parse(path.read_text(encoding="utf-8"))
      for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
          node.value.value = None  # A docstring.
        found.append(_template(node) or "")
  return "\n".join(text.replace("\n", " ") for text in found)


def _template(node: ast.AST) -> str | None:
  if isinstance(node, ast.Constant) and isinstance(node.value, str):
    return node.value
  if isinstance(node, ast.JoinedStr):
    return "".join(_template(value) or "\0" for value in node.values)
  if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
    return (_template(node.left) or "\0") + (_template(node.right) or "\0")
  return None


def _is_of_the_library(message: str) -> bool:
  """Whether one template has its words in this order, or several in turn."""
  pieces = [
    piece.removesuffix(" Received: ").strip(":;,. ")
    for piece in message.split("…")
  ]
  pieces = [p for p in pieces if re.search(r"\w", p) and p != "Received"]
  if not pieces:
    return True
  if len(re.findall(r"\w", "".join(pieces))) < 6:
    return False  # Such a part may be of any template.
  if re.search(".*".join(map(re.escape, pieces)), _templates()):
    return True
  # What one template leaves open, another one fills.
  ends = re.finditer("[:;,…] |[.] |must (be|have) ", message)
  return any(
    _is_of_the_library(message[:cut]) and _is_of_the_library(message[cut:])
    for cut in (match.end() for match in ends)
    if cut < len(message)
  )


@of("message")
def test_a_quoted_message_is_of_the_library(block):
  message = block.code.rstrip("\n")
  assert "\n" not in message
  assert _is_of_the_library(message), message


def test_messages_are_checked():
  assert _is_of_the_library("waiting for … at …: … s so far")
  assert not _is_of_the_library("waiting for … near …: … s so far")
  assert not _is_of_the_library("`optimizer` must be built. Received: ….")


def test_each_message_is_explained():
  text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
  ends = re.findall(r"^```\n\n(.*)", text, re.MULTILINE)
  assert len(ends) == text.count("```message\n")
  for following in ends:
    assert not following.startswith("#"), following


@functools.cache
def _functions(path: str) -> frozenset[str]:
  """The names of the functions and methods of a file."""
  tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
  nodes = ast.walk(tree)
  return frozenset(n.name for n in nodes if isinstance(n, ast.FunctionDef))


def test_each_test_that_a_page_names_exists():
  named = {
    match.groups()
    for page in PAGES
    for match in re.finditer(
      r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text(encoding="utf-8")
    )
  }
  assert named
  for path, name in sorted(named):
    assert name in _functions(path), f"{path} has no {name}"


@pytest.mark.parametrize(
  "path", PAGES, ids=lambda path: str(path.relative_to(ROOT))
)
def test_links_to_other_sites_are_well_formed(path):
  text = path.read_text(encoding="utf-8")
  for link in re.findall(r"\]\((\w+:[^)]*)\)|<(\w+:[^>]*)>", text):
    (link,) = filter(None, link)
    assert re.fullmatch(_LINK, link), link


def test_each_public_name_is_in_the_reference():
  text = "".join(
    path.read_text(encoding="utf-8")
    for path in sorted(ROOT.glob("docs/api/*.md"))
  )
  shown = re.findall(
    r"^::: ([\w.]+)\n    options:\n      heading: tf_replicas\.(\w+)$",
    text,
    re.MULTILINE,
  )
  names = [name for _, name in shown]
  assert sorted(set(names) & set(tf_replicas.__all__)) == tf_replicas.__all__
  for path, name in shown:
    if name not in tf_replicas.__all__:
      continue
    module, _, attribute = path.rpartition(".")
    value = getattr(tf_replicas, name)
    if inspect.ismodule(value):
      assert value.__name__ == path
    else:
      assert (value.__module__, value.__name__) == (module, attribute)
