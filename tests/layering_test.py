"""Who may import whom, and what else holds for every module."""

import ast
import functools
import inspect
import pathlib
import re

import keras
from absl.testing import absltest
from absl.testing import parameterized

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIBRARY = "tf_replicas"
PROGRAMS = ("cifar10", "inception_mini")

# A package imports from itself and from the lines above its own; a sub-package
# from what its package may, from the package's own modules, and not from its
# siblings, unless they stand here.
LAYERS = (
  ("cluster", "runtime"),
  ("session", "store"),
  ("replica",),
  ("rules",),
  ("drivers",),
  ("programs",),
  ("fitting",),
)
MAY_USE_SIBLINGS = {
  # What the replicas exchange is gathered by the synchronous or the
  # asynchronous rule.
  "rules.periodic": ("rules.sync", "rules.asynchronous"),
}
HAS_NO_TENSORFLOW = ("cluster",)
STARTS_WITHOUT_TENSORFLOW = (
  "cluster",
  "programs",
  "runtime.noise",
  "runtime.processes",
)
IMPORTS_TENSORFLOW = {"programs.gpu_check", "programs.task_runner"}
# They start processes, are started by people, or read TensorFlow's log level.
READS_ENVIRONMENT = (
  "programs",
  "fitting",
  "cluster.local_cluster",
  "runtime.fork_server",
  "runtime.noise",
)
USES_PRIVATE_TENSORFLOW = ("runtime",)
USES_PRIVATE_KERAS = ("runtime",)
# Methods of named tuples, which must differ from fields; and `os._exit`.
_PUBLIC = {"_asdict", "_exit", "_fields", "_make", "_replace"}
HAS_FLAGS = ("programs",)
# Commands of the library, of which two end where those of a script begin.
PARSES_A_COMMAND_LINE = (
  "programs.manifests",
  "programs.script_launcher",
  "programs.status_report",
)


def _modules(package):
  return sorted(
    path
    for path in (ROOT / package).glob("**/*.py")
    if path.name != "__init__.py"
  )


def _parse(path):
  return ast.parse(path.read_text(encoding="utf-8"), str(path))


def _imports(tree, *, top_level_only=False):
  """Dotted names of all that is imported, `from a import b` as `a.b`.

  Imports inside functions count too, unless told otherwise.
  """
  nodes = tree.body if top_level_only else ast.walk(tree)
  names = set()
  for node in nodes:
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      names |= {f"{node.module}.{alias.name}" for alias in node.names}
  return names


def _is_within(name, package):
  return name == package or name.startswith(package + ".")


def _attributes(tree):
  """Dotted names of all attributes used, such as `tf.raw_ops`."""
  return {
    ast.unparse(node)
    for node in ast.walk(tree)
    if isinstance(node, ast.Attribute)
  }


def _private(tree):
  """All attributes that begin with one `_`, as AST nodes."""
  return [
    node
    for node in ast.walk(tree)
    if isinstance(node, ast.Attribute)
    and re.match("_[^_]", node.attr)
    and node.attr not in _PUBLIC
  ]


def _is_of_self(node):
  return ast.unparse(node.value) in ("self", "cls", "super()")


def _own_names(tree):
  """Names of the functions and classes of a module, and of what `self` has."""
  stored = {
    node.attr
    for node in ast.walk(tree)
    if isinstance(node, ast.Attribute)
    if isinstance(node.ctx, ast.Store) and _is_of_self(node)
  }
  definitions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
  return stored | {
    node.name for node in ast.walk(tree) if isinstance(node, definitions)
  }


def _names_of_keras(definition):
  """Private names that a class has from the classes of Keras above it.

  Args:
    definition: The AST node of the class.
  """
  found = set()
  for base in map(ast.unparse, definition.bases):
    if base.startswith("keras."):
      above = functools.reduce(getattr, base.split(".")[1:], keras)
      for parent in above.__mro__:
        if parent.__module__.startswith("keras."):
          source = inspect.getsource(parent)
          found |= set(re.findall(r"(?:self\.|def )(_[a-z]\w*)", source))
  return found


def _private_keras(tree):
  """What a module uses of Keras, or of other packages, that is private."""
  found = {
    name
    for name in _imports(tree) | _attributes(tree)
    if _is_within(name, "keras.src")
  }
  inherited = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.ClassDef):
      names = _names_of_keras(node)
      inherited |= names
      found |= {
        ast.unparse(attribute)
        for attribute in _private(node)
        if _is_of_self(attribute) and attribute.attr in names
      }
  own = _own_names(tree) - inherited
  return found | {
    ast.unparse(attribute)
    for attribute in _private(tree)
    if not _is_of_self(attribute) and attribute.attr not in own
  }


def _calls(tree, name):
  """All calls of `name`, and its uses as a bare decorator, as they stand."""
  called = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
  calls = [ast.unparse(c) for c in called if ast.unparse(c.func) == name]
  used = sum(
    isinstance(node, ast.Attribute) and ast.unparse(node) == name
    for node in ast.walk(tree)
  )
  return calls + [name] * (used - len(calls))


def _name(path):
  """Dotted name of a module within the library: `rules.sync.ledger`."""
  parts = path.relative_to(ROOT / LIBRARY).with_suffix("").parts
  return ".".join(part for part in parts if part != "__init__")


def _package(module):
  """The package that a module is in."""
  return module.rpartition(".")[0]


def _may_import(module, imported):
  """Whether the layers let `module` import `imported`."""
  package, other = _package(module), _package(imported) or imported
  if _is_within(package, other):  # Its own package, or the one around it.
    return True
  if package.split(".")[0] == other.split(".")[0]:
    return other in MAY_USE_SIBLINGS.get(package, ())
  level = {name: i for i, names in enumerate(LAYERS) for name in names}
  return level[other.split(".")[0]] < level[package.split(".")[0]]


def _is_in(module, packages):
  return any(_is_within(module, package) for package in packages)


PATHS = {
  _name(path): path
  for path in sorted((ROOT / LIBRARY).glob("**/*.py"))
  if _name(path)
  and path.stem not in ("__main__", "launch", "kubernetes", "status")
}
NAMES = [name for name, path in PATHS.items() if path.stem != "__init__"]


def _library_imports(tree, **options):
  """The library's modules that are imported, by their names within it."""
  found = set()
  for name in _imports(tree, **options):
    if _is_within(name, LIBRARY) and name != LIBRARY:
      name = name[len(LIBRARY) + 1 :]
      while name not in PATHS:  # A name out of a module.
        name = name.rpartition(".")[0]
      found.add(name)
  return found


class LibraryTest(parameterized.TestCase):
  def _tree(self, module):
    return _parse(PATHS[module])

  @parameterized.parameters(*NAMES)
  def test_imports_only_from_below(self, module):
    for imported in _library_imports(self._tree(module)):
      self.assertTrue(
        _may_import(module, imported), f"{module} imports {imported}"
      )

  @parameterized.parameters(*NAMES)
  def test_knows_no_program_no_flags_and_no_plots(self, module):
    foreign = PROGRAMS + (
      "experiments",
      "benchmarks",
      "tests",
      "matplotlib",
    )
    if module not in PARSES_A_COMMAND_LINE:
      foreign += ("argparse",)
    if not _is_in(module, HAS_FLAGS):
      foreign += ("absl.flags",)
    for name in _imports(self._tree(module)):
      for package in foreign:
        self.assertFalse(_is_within(name, package), name)

  @parameterized.parameters(*NAMES)
  def test_reads_no_environment(self, module):
    used = _attributes(self._tree(module))
    used &= {"os.environ", "os.getenv", "os.environb", "os.putenv"}
    if not _is_in(module, READS_ENVIRONMENT):
      self.assertEmpty(used)

  @parameterized.parameters(*NAMES)
  def test_uses_no_private_tensorflow(self, module):
    if _is_in(module, USES_PRIVATE_TENSORFLOW):
      return
    tree = self._tree(module)
    private = [
      name
      for name in _imports(tree) | _attributes(tree)
      if _is_within(name, "tensorflow.python")
      or _is_within(name, "tf.raw_ops")
      or _is_within(name, "tf.compat.v1")
      or _is_within(name, "tf.__internal__")
    ]
    self.assertEmpty(private)

  @parameterized.parameters(*NAMES)
  def test_uses_no_private_keras(self, module):
    if not _is_in(module, USES_PRIVATE_KERAS):
      self.assertEmpty(_private_keras(self._tree(module)))

  @parameterized.parameters(*NAMES)
  def test_shares_resources_by_a_namespace_only(self, module):
    if _is_in(module, ("runtime",)):
      return
    for name in ("SharedVariable", "Queue", "Mutex"):
      self.assertEmpty(
        [
          call
          for call in _calls(self._tree(module), f"resources.{name}")
          if call != f"resources.{name}"  # A type.
        ]
      )

  @parameterized.parameters(*NAMES)
  def test_traces_without_autograph(self, module):
    """Nothing here needs it, and it takes its time at every start."""
    for call in _calls(self._tree(module), "tf.function"):
      self.assertIn("autograph=False", call)

  @parameterized.parameters(
    *[
      name
      for name in NAMES
      if _is_in(name, STARTS_WITHOUT_TENSORFLOW)
      and name not in IMPORTS_TENSORFLOW
    ]
  )
  def test_starts_without_tensorflow(self, module):
    """Nor do the modules that it imports at its start."""
    seen, todo = set(), {module}
    while todo:
      current = todo.pop()
      seen.add(current)
      tree = self._tree(current)
      for name in _imports(tree, top_level_only=True):
        self.assertNotIn(name.split(".")[0], ("tensorflow", "keras"), current)
      todo |= _library_imports(tree, top_level_only=True) - seen

  @parameterized.parameters(
    *[name for name in NAMES if _is_in(name, HAS_NO_TENSORFLOW)]
  )
  def test_never_imports_tensorflow(self, module):
    for name in _imports(self._tree(module)):
      self.assertNotIn(name.split(".")[0], ("tensorflow", "keras"))

  @parameterized.parameters(*NAMES)
  def test_is_named_after_an_idea(self, module):
    self.assertNoCommonElements(
      module.replace(".", "_").split("_"),
      ["utils", "util", "common", "helpers", "misc"],
    )

  def test_package_itself_imports_nothing(self):
    tree = _parse(ROOT / LIBRARY / "__init__.py")
    self.assertEqual(_imports(tree), {"importlib"})


class ProgramsTest(parameterized.TestCase):
  @parameterized.parameters(*PROGRAMS)
  def test_know_only_the_library_and_themselves(self, program):
    for path in _modules(program):
      for name in _imports(_parse(path)):
        for other in {*PROGRAMS, "experiments", "benchmarks"} - {program}:
          self.assertFalse(_is_within(name, other), f"{path}: {name}")
        if _is_within(name, LIBRARY) and name != LIBRARY:
          # The package, or a module of it: no names out of modules.
          name = name[len(LIBRARY) + 1 :]
          self.assertIn(name, PATHS, f"{path}: {name}")

  @parameterized.parameters(*PROGRAMS)
  def test_use_no_private_names_of_the_library(self, program):
    for path in _modules(program):
      tree = _parse(path)
      modules = {
        name.split(".")[-1]
        for name in _imports(tree)
        if _is_within(name, LIBRARY) and "." in name
      }
      for name in _attributes(tree):
        owner, _, attribute = name.partition(".")
        if owner in modules | {LIBRARY}:
          self.assertFalse(attribute.startswith("_"), f"{path}: {name}")


class ReaderTest(parameterized.TestCase):
  """The tests above would pass if nothing were found."""

  def test_imports_inside_functions_are_seen(self):
    tree = ast.parse(
      "def f():\n  from tf_replicas.drivers import server\nimport a.b"
    )
    self.assertEqual(_imports(tree), {"tf_replicas.drivers.server", "a.b"})
    self.assertEqual(_imports(tree, top_level_only=True), {"a.b"})

  def test_attributes_are_seen(self):
    tree = ast.parse("x = tf.raw_ops.Foo(os.environ['A'])")
    self.assertContainsSubset({"tf.raw_ops", "os.environ"}, _attributes(tree))

  @parameterized.parameters(
    ("from keras.src import backend", {"keras.src.backend"}),
    (
      "keras.src.backend.x",
      {"keras.src", "keras.src.backend", "keras.src.backend.x"},
    ),
    ("model._flatten_layers()", {"model._flatten_layers"}),
    (
      "class A(keras.layers.Embedding):\n  def f(self): self._embeddings = 1",
      {"self._embeddings"},
    ),
    (
      "class A(keras.layers.Embedding):\n  def f(self): self._embeddings = 1\n"
      "def g(a): a._embeddings",
      {"self._embeddings", "a._embeddings"},
    ),
    ("class A:\n  def __init__(self, o): self._b = o._b", set()),
    ("class A(B):\n  def f(self): self._of_b()", set()),
    ("os._exit(pair._replace(a=1))", set()),
  )
  def test_private_names_of_keras_are_seen(self, program, expected):
    self.assertEqual(_private_keras(ast.parse(program)), expected)

  def test_calls_and_bare_decorators_are_seen(self):
    tree = ast.parse("@tf.function\ndef f(): tf.function(g, autograph=False)")
    found = ["tf.function(g, autograph=False)", "tf.function"]
    self.assertEqual(_calls(tree, "tf.function"), found)

  def test_the_layers_have_an_order(self):
    self.assertTrue(_may_import("store.placement", "cluster"))
    self.assertTrue(_may_import("rules.sync.ledger", "rules.base"))
    self.assertTrue(_may_import("rules.sync.ledger", "store.placement"))
    for module, imported in (
      ("cluster.spec", "store.placement"),
      ("session.training", "store.placement"),
      ("rules.base", "rules.sync.ledger"),
      ("rules.sync.ledger", "rules.asynchronous.staleness"),
      ("rules.sync.ledger", "drivers.server"),
    ):
      self.assertFalse(_may_import(module, imported), module)

  def test_every_package_has_a_place(self):
    packages = {name.split(".")[0] for name in PATHS}
    self.assertCountEqual([n for names in LAYERS for n in names], packages)


if __name__ == "__main__":
  absltest.main()
