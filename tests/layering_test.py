"""Who may import whom, and what else holds for every module."""

import ast
import pathlib

from absl.testing import absltest
from absl.testing import parameterized

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIBRARY = "tf_replicas"
PROGRAMS = ("cifar10", "inception_mini")

# A module imports from the lines above its own, and within its line from what
# stands to its left in an inner tuple. Adding a module means placing it here.
LAYERS = (
  (
    ("addresses", "cluster_validation", "cluster"),
    ("resources", "console", "checkpoints", "reports", "training"),
    ("workarounds", "checkpoints"),
    ("interrupts", "training"),
    ("moving_averages",),
    ("releases",),
    ("packing",),
    ("run_settings",),
    ("schedules",),
    ("compute_dtypes",),
    ("prepared_datasets",),
    ("processes",),
  ),
  (
    ("placement",),
    ("devices",),
    ("ledger",),
    ("evaluation", "fine_tuning"),
    ("local_cluster",),
  ),
  (
    ("parameter_store", "gradient_queues", "replies", "contributions"),
    ("parameter_store", "succession"),
    ("parameter_store", "inner_optimizer", "local_optimizer"),
    ("parameter_store", "connection", "register", "membership", "server"),
    ("parameter_store", "model_parallel", "towers", "turns"),
    ("towers", "keras_models"),
    ("timeline", "turns"),
    ("parameter_store", "contributions", "inner_optimizer", "mean_update"),
  ),
  (
    ("updates", "update_rule", "sync_replicas"),
    (
      "updates",
      "update_rule",
      "gates",
      "staleness",
      "applications",
      "replica_update",
      "async_replicas",
    ),
    ("updates", "update_rule", "rule_choice", "switching"),
    ("updates", "update_rule", "local_steps"),
    ("elastic_exchange",),
  ),
  (("meetings", "periodic_optimizer", "periodic_averaging"),),
  (
    ("driver", "stalls", "in_graph"),
    ("driver", "stalls", "between_graph"),
    ("driver", "one_machine", "worker_group", "mirrored"),
  ),
  (
    ("update_settings", "program", "roles", "launcher", "command_line"),
    ("update_settings", "update_flags", "command_line"),
  ),
)
WITHOUT_TENSORFLOW = {
  "addresses",
  "cluster",
  "cluster_validation",
  "command_line",
  "compute_dtypes",
  "launcher",
  "local_cluster",
  "prepared_datasets",
  "processes",
  "program",
  "run_settings",
  "schedules",
  "update_flags",
  "update_settings",
}
# They start processes, or are started by people.
READS_ENVIRONMENT = {"command_line", "launcher", "local_cluster"}
USES_PRIVATE_TENSORFLOW = {"resources", "workarounds"}
HAS_FLAGS = {"command_line", "update_flags"}
MAX_LINES = 400


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


def _calls(tree, name):
  """All calls of `name`, and its uses as a bare decorator, as they stand."""
  called = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
  calls = [ast.unparse(c) for c in called if ast.unparse(c.func) == name]
  used = sum(
    isinstance(node, ast.Attribute) and ast.unparse(node) == name
    for node in ast.walk(tree)
  )
  return calls + [name] * (used - len(calls))


def _may_import():
  """Module -> all that it may import."""
  below, allowed = set(), {}
  for layer in LAYERS:
    for order in layer:
      for position, module in enumerate(order):
        allowed.setdefault(module, set(below)).update(order[:position])
    below |= {module for order in layer for module in order}
  return allowed


NAMES = [path.stem for path in _modules(LIBRARY)]


class LibraryTest(parameterized.TestCase):
  def _tree(self, module):
    return _parse(ROOT / LIBRARY / f"{module}.py")

  def test_every_module_has_a_place(self):
    self.assertCountEqual(NAMES, _may_import())

  @parameterized.parameters(*NAMES)
  def test_imports_only_from_below(self, module):
    imported = {
      name.split(".")[1]
      for name in _imports(self._tree(module))
      if _is_within(name, LIBRARY) and "." in name
    }
    self.assertContainsSubset(imported, _may_import()[module])

  @parameterized.parameters(*NAMES)
  def test_knows_no_program_no_flags_and_no_plots(self, module):
    foreign = PROGRAMS + (
      "experiments",
      "benchmarks",
      "tests",
      "argparse",
      "matplotlib",
    )
    if module not in HAS_FLAGS:
      foreign += ("absl.flags",)
    for name in _imports(self._tree(module)):
      for package in foreign:
        self.assertFalse(_is_within(name, package), name)

  @parameterized.parameters(*NAMES)
  def test_reads_no_environment(self, module):
    used = _attributes(self._tree(module))
    used &= {"os.environ", "os.getenv", "os.environb", "os.putenv"}
    if module not in READS_ENVIRONMENT:
      self.assertEmpty(used)

  @parameterized.parameters(*NAMES)
  def test_uses_no_private_tensorflow(self, module):
    if module in USES_PRIVATE_TENSORFLOW:
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
  def test_traces_without_autograph(self, module):
    """Nothing here needs it, and it takes its time at every start."""
    for call in _calls(self._tree(module), "tf.function"):
      self.assertIn("autograph=False", call)

  @parameterized.parameters(*sorted(WITHOUT_TENSORFLOW))
  def test_starts_without_tensorflow(self, module):
    """Nor do the modules that it imports at its start."""
    seen, todo = set(), [module]
    while todo:
      current = todo.pop()
      seen.add(current)
      for name in _imports(self._tree(current), top_level_only=True):
        self.assertNotIn(name.split(".")[0], ("tensorflow", "keras"), current)
        if _is_within(name, LIBRARY) and name.split(".")[1] not in seen:
          todo.append(name.split(".")[1])

  def _check_length(self, module):
    text = (ROOT / LIBRARY / f"{module}.py").read_text(encoding="utf-8")
    self.assertLessEqual(len(text.splitlines()), MAX_LINES)

  @parameterized.parameters(*NAMES)
  def test_is_not_too_long(self, module):
    self._check_length(module)

  @parameterized.parameters(*NAMES)
  def test_is_named_after_an_idea(self, module):
    self.assertNoCommonElements(
      module.split("_"), ["utils", "util", "common", "helpers", "misc"]
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
        if _is_within(name, LIBRARY):
          # The package, or one name out of it: no reaching into modules.
          self.assertLessEqual(name.count("."), 1, f"{path}: {name}")

  @parameterized.parameters(*PROGRAMS)
  def test_use_no_private_names_of_the_library(self, program):
    for path in _modules(program):
      tree = _parse(path)
      modules = {
        name.split(".")[1]
        for name in _imports(tree)
        if _is_within(name, LIBRARY) and "." in name
      }
      for name in _attributes(tree):
        owner, _, attribute = name.partition(".")
        if owner in modules | {LIBRARY}:
          self.assertFalse(attribute.startswith("_"), f"{path}: {name}")


class ReaderTest(absltest.TestCase):
  """The tests above would pass if nothing were found."""

  def test_imports_inside_functions_are_seen(self):
    tree = ast.parse("def f():\n  from tf_replicas import server\nimport a.b")
    self.assertEqual(_imports(tree), {"tf_replicas.server", "a.b"})
    self.assertEqual(_imports(tree, top_level_only=True), {"a.b"})

  def test_attributes_are_seen(self):
    tree = ast.parse("x = tf.raw_ops.Foo(os.environ['A'])")
    self.assertContainsSubset({"tf.raw_ops", "os.environ"}, _attributes(tree))

  def test_calls_and_bare_decorators_are_seen(self):
    tree = ast.parse("@tf.function\ndef f(): tf.function(g, autograph=False)")
    found = ["tf.function(g, autograph=False)", "tf.function"]
    self.assertEqual(_calls(tree, "tf.function"), found)

  def test_the_table_has_an_order(self):
    allowed = _may_import()
    self.assertIn("cluster", allowed["placement"])
    self.assertNotIn("placement", allowed["cluster"])
    self.assertNotIn("stalls", allowed["sync_replicas"])
    for module, others in allowed.items():
      self.assertNotIn(module, others)


if __name__ == "__main__":
  absltest.main()
