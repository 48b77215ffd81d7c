"""Finds the tier of a test, and keeps tests of the tier `unit` from processes.

A *tier* is a group of tests that start processes of the same kind, such as
"unit" (none) or "cluster". The tier of a test follows from the code of its
function, its parameters and its fixtures, and from the code in `tests` that
these call. For tests whose code does not show it, `EXCEPTIONS` has the tier.
"""

import ast
import functools
import inspect
import multiprocessing.util
import os
import sys
import types
from collections.abc import Iterable
from collections.abc import Iterator

import pytest

TIERS = {
  "unit": "starts no process",
  "program": "starts programs of one process, or computes for long",
  "cluster": "starts clusters of real processes",
  "faults": "kills, freezes or restarts processes",
}
# A test that takes longer hangs. On a busy machine all of them are slow, and
# `trials.DEADLINE_SECS` should strike first, as its error shows the logs.
DEADLINE_SECS = {"unit": 300, "program": 600, "cluster": 900, "faults": 900}

# About how long a test takes with two workers on two cores, with its share of
# the fixtures, in seconds.
_SECS = {"unit": 0.2, "program": 2.0, "cluster": 12.0, "faults": 20.0}
# Those that take far longer. Beginnings of node ids.
LONG_SECS = {
  "tests/notebooks_test.py::test_what_a_slow": 90.0,
  "tests/fitting/keras_fit_test.py": 1.0,
}

# Beginnings of node ids. The longest that fits counts.
EXCEPTIONS = {
  # Their parameters are functions that they do not call, or in vain.
  "tests/tiers_test.py::test_a_unit_test_starts_no_process": "unit",
  "tests/tiers_test.py::test_a_tier_follows_from_the_code": "unit",
  "tests/programs/function_launcher_test.py::test_refuses": "unit",
  # By binaries that start the other processes themselves.
  "tests/cifar10/distributed_train_test.py::TestTraining": "cluster",
  "tests/cifar10/distributed_train_test.py::TestSwitching": "cluster",
  "tests/cifar10/distributed_train_test.py::TestAsynchronous": "cluster",
  "tests/cifar10/distributed_train_test.py::test_a_parameter_server_needs": (
    "cluster"
  ),
  "tests/inception_mini/binaries_test.py::test_trains": "cluster",
  "tests/inception_mini/binaries_test.py::test_statistics": "cluster",
  "tests/inception_mini/binaries_test.py::test_evaluates": "cluster",
  "tests/inception_mini/binaries_test.py::test_fine_tunes": "cluster",
  "tests/inception_mini/binaries_test.py::test_a_pretrained": "cluster",
  "tests/inception_mini/binaries_test.py::test_a_damaged": "cluster",
  "tests/programs/launcher_test.py::test_one_training_goes": "cluster",
  "tests/lost_updates_test.py::test_locking_loses_nothing": "cluster",
  "tests/cluster/slurm_test.py::test_a_job": "cluster",
  "tests/experiments/timed_training_test.py": "cluster",
  "tests/migration_test.py::test_synchronous": "cluster",
  "tests/migration_test.py::test_the_strategys": "cluster",
  "tests/examples_test.py::test_learns_on_a_cluster": "cluster",
  "tests/examples_test.py::test_a_backup_worker": "cluster",
  "tests/examples_test.py::test_an_own_policy": "cluster",
  "tests/examples_test.py::test_resumes": "cluster",
  # They start no process, but train.
  "tests/examples_test.py::test_an_own_rule": "program",
  # They read many damaged files.
  "tests/fuzz_test.py": "program",
  # They start no process, but train by every rule, or by many.
  "tests/conformance/rules_test.py": "program",
  "tests/experiments/race_test.py::EventClockTest": "program",
  "tests/experiments/papers_test.py::MeasureTest": "program",
  # It starts no process, but trains six programs.
  "tests/fitting/examples_test.py::test_learns_with_keras": "program",
  "tests/fitting/examples_test.py::test_learns_on_a_cluster": "cluster",
  # By the server that they test.
  "tests/runtime/fork_server_test.py": "program",
  # By functions of the experiments.
  "tests/experiments/real_processes_test.py::TrainTest": "program",
  # They start no process, but evaluate 1,000 images, build four networks of
  # Inception, train many models, or trace two rules and a change for every
  # replica.
  "tests/cifar10/eval_test.py::test_measures": "program",
  "tests/cifar10/eval_test.py::test_mean_of_the_views": "program",
  "tests/cifar10/eval_test.py::test_tensorboard": "program",
  "tests/cifar10/eval_test.py::test_does_without_matplotlib": "program",
  "tests/inception_mini/workload_test.py::test_the_loss_is_of": "program",
  "tests/fitting/properties_test.py::PropertiesTest": "program",
  "tests/replica/properties_test.py::PropertiesTest::test_trains": "program",
  "tests/rules/switching_test.py::SwitchingTest": "program",
  # They start no process, but train many models, let many threads compete, or
  # repeat random sequences.
  "tests/fitting/keras_fit_test.py": "program",
  "tests/rules/asynchronous/async_replicas_test.py::ConcurrentTest": "program",
  "tests/rules/periodic/periodic_averaging_test.py::StatisticsTest": "program",
  "tests/rules/periodic/periodic_averaging_test.py::EveryKindTest": "program",
  "tests/rules/sync/ledger_test.py::RandomSequencesTest": "program",
  "tests/replica/model_parallel_test.py::Cifar10Test": "program",
  "tests/replica/model_parallel_test.py::TopologyTest": "program",
  # By scenarios in which a process dies or fails.
  "tests/faults_test.py": "faults",
  "tests/drivers/mirrored_test.py::TestProcesses::test_all_refuse": "faults",
  "tests/drivers/mirrored_test.py::TestProcesses::test_the_others": "faults",
  "tests/drivers/mirrored_test.py::TestProcesses::test_a_process": "faults",
  "tests/drivers/mirrored_test.py::TestProcesses::test_a_killed": "faults",
}

# In the README's test command: one of each kind of use, with all tests of the
# same cluster, which is started once.
QUICK = (
  "tests/async_oracle_test.py",
  "tests/drivers/between_graph_test.py::test_backup",
  "tests/drivers/between_graph_test.py::test_two_workers",
  "tests/drivers/in_graph_test.py::test_two_workers",
  "tests/equivalence_test.py::test_three_replicas_equal_one[between_graph-m",
  "tests/faults_test.py::test_training_waits_for_the_restart",
  "tests/readme_test.py::test_the_foreign_training_loop_trains",
)

_STARTS = {"Popen", "run", "call", "check_call", "check_output"}
_CLUSTERS = {"LocalCluster", "LocalTraining", "NotebookClient"}
_ENDS = {"kill", "send_signal", "SIGKILL", "SIGSTOP", "SIGTERM"}


def of(item: pytest.Item) -> str:
  """Returns the tier of a test: a key of `TIERS`, such as "unit".

  The tier says which kinds of processes the test starts.
  """
  told = [name for name in EXCEPTIONS if item.nodeid.startswith(name)]
  if told:
    return EXCEPTIONS[max(told, key=len)]
  return of_functions(_functions(item), item.cls)


def secs(item: pytest.Item) -> float:
  """About how long a test takes, in seconds."""
  for name, found in LONG_SECS.items():
    if item.nodeid.startswith(name):
      return found
  return _SECS[of(item)]


def of_functions(functions: Iterable[object], cls: type | None) -> str:
  """Returns the tier of a test (a key of `TIERS`) from its functions.

  Args:
    functions: The functions that the test runs.
    cls: The class of the test, to which their `self` belongs; None if there is
      no class.
  """
  facts = frozenset().union(*(_facts(each, cls) for each in functions))
  if "starts" not in facts:
    return "unit"
  if "ends" in facts:
    return "faults"
  return "cluster" if "cluster" in facts else "program"


def _functions(item: pytest.Item) -> Iterator[object]:
  """Yields the function of a test, its `setUp` methods and its fixtures."""
  yield item.function
  for name in ("setUp", "setUpClass"):
    if hasattr(item.cls, name):
      yield getattr(item.cls, name)
  for definitions in item._fixtureinfo.name2fixturedefs.values():
    yield from (definition.func for definition in definitions)


@functools.cache
def _facts(function: object, cls: type | None) -> frozenset[str]:
  """Finds out from its source code what kinds of processes a function starts.

  The code in `tests` that the function names is searched too.

  Args:
    function: The function.
    cls: The class to which `self` in the function belongs; None if there is
      none.

  Returns:
    Words among "starts" (a process), "cluster" (of processes) and "ends" (kills
    or stops processes).
  """
  facts, seen, left = set(), set(), [function]
  while left:
    code = _plain(left.pop())
    if code is None or code in seen:
      continue
    seen.add(code)
    is_test = code.__module__.endswith("_test")
    for name, value in _named(code, cls):
      owner = getattr(value, "__module__", None)
      if owner == "subprocess" and name in _STARTS:
        facts.add("starts")
      elif name in _CLUSTERS:
        facts |= {"starts", "cluster"}
      elif is_test and name in _ENDS:
        facts.add("ends")
      left.append(value)
  return frozenset(facts)


def _plain(value: object) -> types.FunctionType | None:
  """Returns the Python function that runs when `value` is called.

  None means that the function is not in `tests`, or that there is none.
  """
  while isinstance(value, functools.partial):
    value = value.func
  if isinstance(value, type):
    value = value.__init__
  if isinstance(value, types.MethodType):
    value = value.__func__
  if not isinstance(value, types.FunctionType):
    return None
  value = inspect.unwrap(value)
  return value if value.__module__.startswith("tests.") else None


@functools.cache
def _definitions(path: str) -> dict[int, ast.AST]:
  """Returns the syntax tree of each function in a file, by its first line."""
  if not os.path.exists(path):  # Made while it ran, as by `dataclasses`.
    return {}
  with open(path, encoding="utf-8") as file:
    tree = ast.parse(file.read())
  return {
    min([node.lineno, *(d.lineno for d in node.decorator_list)]): node
    for node in ast.walk(tree)
    if isinstance(node, ast.FunctionDef)
  }


@functools.cache
def _named(
  function: types.FunctionType, cls: type | None
) -> list[tuple[str, object]]:
  """Returns all names that the code of a function refers to, with their values.

  Args:
    function: The function. There are no names if its code is in no file.
    cls: The class to which `self` in the function belongs.

  Returns:
    (last part of a dotted name, its value or None).
  """
  code, names = function.__code__, function.__globals__
  node = _definitions(code.co_filename).get(code.co_firstlineno)
  found = []
  for part in ast.walk(node) if node else ():
    if isinstance(part, ast.Name):
      found.append((part.id, names.get(part.id)))
    elif isinstance(part, ast.Attribute):
      owner = None
      if isinstance(part.value, ast.Name):
        name = part.value.id
        owner = cls if name in ("self", "cls") else names.get(name)
      found.append((part.attr, getattr(owner, part.attr, None)))
  return found


class ProcessStarted(AssertionError):
  """Raised if a test of the tier `unit` starts a process, which it must not."""


_SPAWN = "tests.spawn"
_EVENTS = {
  "os.fork",
  "os.forkpty",
  "os.posix_spawn",
  "os.spawn",
  "os.system",
  "subprocess.Popen",
  _SPAWN,
}


class Guard:
  """Raises `ProcessStarted` in code that starts a process, while it is active.

  Attributes:
    is_up: Whether the guard is active.
    refused: Descriptions of the refused starts, for code that catches the
      error.
  """

  def __init__(self):
    self.is_up = False
    self.refused: list[str] = []
    # Neither can be taken back; this one tells nobody when it starts one.
    spawn = multiprocessing.util.spawnv_passfds

    def audited(path, arguments, descriptors):
      sys.audit(_SPAWN, path, arguments)
      return spawn(path, arguments, descriptors)

    multiprocessing.util.spawnv_passfds = audited
    sys.addaudithook(self._hear)

  def _hear(self, event: str, arguments: tuple) -> None:
    if self.is_up and event in _EVENTS:
      what = f"{event}{arguments[:2]}"
      self.refused.append(what)
      raise ProcessStarted(
        f"{what}: a test of the tier `unit` starts no process. If it should,"
        " its code does not say so: add it to `tests.support.tiers.EXCEPTIONS`."
      )
