"""Runs tests with other versions of Python, TensorFlow and Keras.

  python -m benchmarks.versions --python=3.10 --tensorflow=2.16 --keras=3.8
  python -m benchmarks.versions --resolve

The first command needs `uv` (`pip install uv`) and an interpreter of that
version. It makes a virtual environment, and installs TensorFlow, Keras and a
wheel of this checkout. Then it runs the README's example from an empty
directory, the tests of the tier `unit`, and one training on real processes. The
second command finds the triples of versions whose requirements can be installed
together. Both write `experiments/results/versions.json`, and from it the page
`docs/versions.md`. Without flags, only the page is written.
"""

import concurrent.futures
import datetime
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from collections.abc import Sequence

from absl import app
from absl import flags

FLAGS = flags.FLAGS
flags.DEFINE_string(
  "python", None, "The version or path of the Python interpreter"
)
flags.DEFINE_string(
  "tensorflow", None, "The version of TensorFlow, such as 2.16"
)
flags.DEFINE_string("keras", None, "The version of Keras, such as 3.8")
flags.DEFINE_string(
  "environment",
  None,
  "The directory of the virtual environment: it is made if it does not exist,"
  " and kept. Without this flag, it is a temporary one",
)
flags.DEFINE_bool(
  "quick", False, "Run only the tests that a new version is likely to break"
)
flags.DEFINE_bool("resolve", False, "Find the triples that can be installed")

_ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = _ROOT / "experiments" / "results" / "versions.json"
PAGE = _ROOT / "docs" / "versions.md"

# What `--resolve` tries. A release candidate is named in full.
_PYTHONS = ("3.10", "3.11", "3.12", "3.13")
_TENSORFLOWS = ("2.16", "2.17", "2.18", "2.19", "2.20", "2.21", "2.22.0rc0")
_KERAS = tuple(f"3.{minor}" for minor in range(8, 16))

# One training on 1 parameter server and 2 workers.
_CLUSTER_TESTS = ("tests/drivers/between_graph_test.py", "-k", "two_workers")
# All tests that start no process, and those of them that use most of the
# private names: with optimizers, variables, Keras models and data sets.
_UNIT_TESTS = ("-m", "unit")
_QUICK_TESTS = (
  *_UNIT_TESTS,
  "tests/cifar10/muon_test.py",
  "tests/cifar10/sources_test.py",
  "tests/cifar10/train_test.py",
  "tests/cifar10/workload_test.py",
  "tests/drivers/mirrored_test.py",
  "tests/drivers/one_machine_test.py",
  "tests/fitting",
  "tests/inception_mini/sources_test.py",
  "tests/replica/embeddings_test.py",
  "tests/replica/keras_models_test.py",
  "tests/rules/periodic/local_optimizer_test.py",
  "tests/rules/sync/sync_replicas_test.py",
  "tests/runtime",
  "tests/store",
)
# Packages of the extra `test` that are installed apart, or that no test needs.
_LEFT_OUT = ("tensorflow", "keras", "tf-keras", "ruff", "basedpyright")
_SECS = {"unit": 3600, "cluster": 900, "example": 400, "install": 1800}

_INTRODUCTION = """# Versions

The library allows Python 3.10 to 3.13, TensorFlow 2.16 to 2.22 and Keras 3.8 to
3.15 (`pyproject.toml`). It uses private names of TensorFlow and Keras (in
`tf_replicas/runtime`), so each new version may break it. This page says what
older versions lack, and which versions were tested together.

`python -m benchmarks.versions --python=3.10 --tensorflow=2.16 --keras=3.8`
makes a new virtual environment, and installs these versions and a wheel of
the checkout there. It then runs the README's example on 1 parameter server and
2 workers, the tests of one training on real processes
(`{cluster_tests}`), and all tests that
start no process (`python -m pytest -m unit`). With `--quick`, it runs fewer
unit tests: those of the modules that use most of the private names. It stores
the figures in `experiments/results/versions.json`, and writes this page from
that file. `python -m benchmarks.versions --resolve` finds the triples of
versions (Python, TensorFlow, Keras) that can be installed together.

## What older versions lack

- `Muon` of Keras 3.10 to 3.12 fails with TensorFlow, in Keras' own `fit` too,
  because it reads an attribute that TensorFlow's variables do not have. The
  library refuses it with a one-line error. Keras 3.8 and 3.9 have no `Muon`.
- `Adagrad` and `Ftrl` of Keras 3.8 and 3.9 do not say which slot belongs to
  which variable. The library refuses them with a one-line error.
- Python 3.12.0 and 3.12.1 cannot start a thread while a process exits. With
  them, the chief ends the parameter servers one after another, and waits for
  any that hangs.
- With TensorFlow up to 2.19, the extra `tfds` also needs
  `pip install --no-deps "tensorflow-metadata<1.17"`: newer releases of
  it need a newer protobuf than they declare.

Tests of what a version lacks are skipped.
"""


def _text(command: Sequence[object], secs: float, **options) -> str:
  """Runs a command, and returns what it prints.

  Args:
    command: The command line.
    secs: The time limit in seconds.
    **options: More arguments of `subprocess.run`.

  Raises:
    RuntimeError: If the command fails, with what it printed.
  """
  result = subprocess.run(
    list(map(str, command)),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    timeout=secs,
    check=False,
    **options,
  )
  if result.returncode:
    raise RuntimeError(f"{command} failed:\n{result.stdout}")
  return result.stdout


def _requirement(package: str, version: str) -> str:
  """Returns the requirement for a version of a package, in the form of pip.

  Args:
    package: The package.
    version: A release, or a minor version such as "2.16", which stands for all
      of its releases: `2.16.*`.
  """
  suffix = ".*" if version.count(".") == 1 else ""
  return f"{package}=={version}{suffix}"


def _minor(version: str) -> str:
  return ".".join(version.split(".")[:2])


def resolve() -> list[list[str]]:
  """Finds the triples of versions that can be installed together.

  Returns:
    The triples: minor versions of Python, TensorFlow and Keras.
  """

  def can_be_installed(triple: tuple[str, str, str]) -> bool:
    python, tensorflow, keras = triple
    requirements = [
      _requirement("tensorflow", tensorflow),
      _requirement("keras", keras),
    ]
    result = subprocess.run(
      ["uv", "pip", "compile", "--native-tls", "--quiet", "-"]
      + ["--python-version", python, "--only-binary", ":all:"],
      input="\n".join(requirements),
      capture_output=True,
      text=True,
      timeout=_SECS["install"],
      check=False,
    )
    if result.returncode and "No solution found" not in result.stderr:
      raise RuntimeError(result.stderr)
    return not result.returncode

  triples = list(itertools.product(_PYTHONS, _TENSORFLOWS, _KERAS))
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    answers = list(pool.map(can_be_installed, triples))
  return [
    [python, _minor(tensorflow), keras]
    for (python, tensorflow, keras), yes in zip(triples, answers, strict=True)
    if yes
  ]


def _test_requirements() -> list[str]:
  """Returns the packages that the tests need, without those in `_LEFT_OUT`.

  They are requirements in the form of pip, read from pyproject.toml.
  """
  import tomllib

  project = tomllib.loads((_ROOT / "pyproject.toml").read_text("utf-8"))
  extras = project["project"]["optional-dependencies"]
  found = [*project["project"]["dependencies"]]
  for requirement in extras["test"]:
    own = re.fullmatch(r"tf-replicas\[(.+)\]", requirement)
    for extra in own.group(1).split(",") if own else ():
      found += extras[extra]
    if not own:
      found.append(requirement)
  return [r for r in found if re.split(r"[^\w-]", r)[0] not in _LEFT_OUT]


def _install(
  venv: pathlib.Path, python: str, tensorflow: str, keras: str
) -> None:
  """Makes a virtual environment with some versions and what the tests need.

  Args:
    venv: The directory of the environment.
    python: The version or path of the Python interpreter.
    tensorflow: The version of TensorFlow.
    keras: The version of Keras.
  """
  versions = [
    _requirement("tensorflow", tensorflow),
    _requirement("keras", keras),
  ]
  secs = _SECS["install"]
  _text(["uv", "venv", "--quiet", "--python", python, venv], secs)
  install = ["uv", "pip", "install", "--native-tls", "--quiet"]
  install += ["--python", venv / "bin" / "python"]
  _text([*install, *versions, *_test_requirements()], secs)
  # A release candidate has no tf-keras of its own; the one before will do.
  major, minor = _minor(tensorflow).split(".")
  tf_keras = f"tf-keras<{major}.{int(minor) + 1}"
  _text([*install, "--no-deps", tf_keras], secs)
  if int(_version_in(venv, "protobuf").split(".")[0]) < 6:
    # Later ones need a newer protobuf than they require.
    _text([*install, "--no-deps", "tensorflow-metadata<1.17"], secs)
  # A release candidate installs keras-nightly, over the same files.
  remove = ["uv", "pip", "uninstall", "--quiet", *install[-2:]]
  _text([*remove, "keras-nightly"], secs)
  _text([*install, "--no-deps", "--reinstall", versions[1]], secs)


def _version_in(venv: pathlib.Path, package: str) -> str:
  """Returns the installed version of a package in a virtual environment.

  Args:
    venv: The directory of the environment.
    package: The package, or "python".
  """
  script = (
    "import importlib.metadata as m, platform, sys\n"
    "name = sys.argv[1]\n"
    "print(platform.python_version() if name == 'python' else m.version(name))"
  )
  return _text([venv / "bin" / "python", "-c", script, package], 60).strip()


def _tests(python: pathlib.Path, *arguments: str, secs: float) -> dict:
  """Runs tests by pytest, and returns what came out.

  Args:
    python: The interpreter.
    *arguments: The arguments of pytest.
    secs: The time limit in seconds.

  Returns:
    The numbers of tests by outcome, the seconds, and the names of the tests
    that failed.
  """
  result = subprocess.run(
    [python, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider"]
    + list(arguments),
    cwd=_ROOT,
    env=_environ(),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    timeout=secs,
    check=False,
  )
  print(result.stdout[-20_000:], flush=True)
  return outcome_of(result.stdout)


def outcome_of(output: str) -> dict:
  """Reads the counts, the seconds and the failed tests from pytest's output.

  Raises:
    RuntimeError: If the output does not end with pytest's counts.
  """
  (summary,) = output.strip().splitlines()[-1:] or [""]
  counts = dict(
    (kind.removesuffix("s"), int(count))
    for count, kind in re.findall(
      r"(\d+) (passed|failed|skipped|errors?)", summary
    )
  )
  secs = re.search(r" in ([\d.]+)s", summary)
  if not counts or not secs:
    raise RuntimeError(f"pytest must end with counts. Received: {summary!r}.")
  return {
    "passed": counts.get("passed", 0),
    "failed": counts.get("failed", 0) + counts.get("error", 0),
    "skipped": counts.get("skipped", 0),
    "seconds": round(float(secs.group(1))),
    "failures": re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE),
  }


def _environ() -> dict[str, str]:
  """Returns this process's environment without PYTHONPATH.

  PYTHONPATH could replace the installed wheel by the checkout.
  """
  return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}


def run(
  python: str,
  tensorflow: str,
  keras: str,
  *,
  venv: pathlib.Path,
  quick: bool = False,
) -> dict:
  """Tests the library with a triple of versions, and returns the result.

  Args:
    python: The version or path of the Python interpreter.
    tensorflow: The version of TensorFlow.
    keras: The version of Keras.
    venv: The directory of the virtual environment. If it does not exist, it is
      made.
    quick: Whether to run only those unit tests that a new version is likely to
      break.

  Returns:
    The exact versions, the commit, the date, and the outcomes of the README's
    example, of a training on real processes and of the unit tests.
  """
  if not venv.exists():
    _install(venv, python, tensorflow, keras)
  interpreter = venv / "bin" / "python"
  _text(
    ["uv", "pip", "install", "--native-tls", "--quiet", "--no-deps"]
    + ["--reinstall", "--python", interpreter, _ROOT],
    _SECS["install"],
  )
  row = {
    name: _version_in(venv, name) for name in ("python", "tensorflow", "keras")
  }
  row["commit"] = _text(
    ["git", "-C", _ROOT, "describe", "--always", "--dirty"], 60
  ).strip()
  print(row, flush=True)
  row["date"] = datetime.date.today().isoformat()
  start = time.monotonic()
  example = subprocess.run(
    [interpreter, _ROOT / ".ci" / "try_wheel.py"],
    env=_environ(),
    timeout=_SECS["example"],
    check=False,
  )
  row["example"] = {
    "passed": not example.returncode,
    "seconds": round(time.monotonic() - start),
  }
  row["cluster"] = _tests(interpreter, *_CLUSTER_TESTS, secs=_SECS["cluster"])
  row["unit"] = _tests(
    *(interpreter, "-n", "2", "--dist", "loadfile"),
    *(_QUICK_TESTS if quick else _UNIT_TESTS),
    secs=_SECS["unit"],
  )
  row["scope"] = "quick" if quick else "unit"
  return row


def triple_of(row: dict) -> list[str]:
  """Returns the minor versions of Python, TensorFlow and Keras of a result."""
  return [_minor(row[key]) for key in ("python", "tensorflow", "keras")]


def page(results: dict) -> str:
  """Returns the text of the page `docs/versions.md` with all results.

  Args:
    results: The content of `experiments/results/versions.json`.
  """
  return "\n".join(
    [
      _INTRODUCTION.format(cluster_tests=" ".join(_CLUSTER_TESTS)),
      "## What was run\n",
      "*unit*: all unit tests; *quick*: the fewer unit tests of `--quick`."
      " *Training* and *example*: the tests of one training on real processes,"
      " and the README's example. The seconds depend on what else the machine"
      " did."
      " `experiments/results/versions.json` names the tests that failed. Early"
      " runs did not record their commit. A commit with `-dirty` had changes"
      " that were not committed.\n",
      *_run_table(results["runs"]),
      "",
      *_failures(results["runs"]),
      "## All triples\n",
      f"As of {results['resolved']['date']},"
      f" {len(results['resolved']['triples'])} triples can be installed. A date"
      " means: run, with the figures above. *Not run*: can be installed, but"
      " was not run. –: cannot be installed, by the requirements of TensorFlow"
      " or Keras, or because there is no wheel. 2.22 stands for 2.22.0rc0.\n",
      *_all_triples(results),
      "",
    ]
  )


def _run_table(rows: Iterable[dict]) -> list[str]:
  lines = [
    "| TensorFlow | Keras | Python | date | commit | tests | passed | failed |"
    " skipped | seconds | training | example |",
    "|---" * 12 + "|",
  ]
  for row in rows:
    tests = row["unit"]
    counts = [tests[key] for key in ("passed", "failed", "skipped", "seconds")]
    training = "passed" if not row["cluster"]["failed"] else "**failed**"
    example = "passed" if row["example"]["passed"] else "**failed**"
    cells = [row["tensorflow"], row["keras"], row["python"], row["date"]]
    cells += [row["commit"], row["scope"], *map(str, counts)]
    lines.append(f"| {' | '.join([*cells, training, example])} |")
  return lines


def _failures(rows: Iterable[dict]) -> list[str]:
  lines = []
  for row in rows:
    failed = [*row["unit"]["failures"], *row["cluster"]["failures"]]
    if failed:
      lines.append(
        f"TensorFlow {row['tensorflow']}, Keras {row['keras']}, {row['date']}:"
        f" {row.get('remark', 'failed tests:')}\n"
      )
      if "remark" not in row:
        lines += [*(f"- `{name}`" for name in failed), ""]
  return lines


def _all_triples(results: dict) -> list[str]:
  dates = {tuple(triple_of(row)): row["date"] for row in results["runs"]}
  known = {tuple(triple) for triple in results["resolved"]["triples"]}
  lines = [
    f"| Python | TensorFlow | {' | '.join(f'Keras {k}' for k in _KERAS)} |",
    "|---" * (2 + len(_KERAS)) + "|",
  ]
  for python, tensorflow in itertools.product(_PYTHONS, _TENSORFLOWS):
    triples = [(python, _minor(tensorflow), keras) for keras in _KERAS]
    if known.isdisjoint(triples):
      continue
    cells = [
      dates.get(triple, "not run" if triple in known else "–")
      for triple in triples
    ]
    lines.append(f"| {python} | {_minor(tensorflow)} | {' | '.join(cells)} |")
  return lines


def _add(results: dict, row: dict) -> None:
  """Adds a result to all results, in the place of an earlier one of its kind.

  Results of the same kind have the same minor versions of Python, TensorFlow
  and Keras, and are of the same tests.

  Args:
    results: The content of `experiments/results/versions.json`.
    row: The result, as `run` returns it.
  """
  others = [
    r
    for r in results["runs"]
    if (triple_of(r), r["scope"]) != (triple_of(row), row["scope"])
  ]
  results["runs"] = sorted(
    [*others, row],
    key=lambda r: [
      tuple(map(int, version.split("."))) for version in triple_of(r)[1:]
    ],
  )


def main(argv: Sequence[str]) -> None:
  del argv
  versions = [FLAGS.python, FLAGS.tensorflow, FLAGS.keras]
  if any(versions) and not all(versions):
    sys.exit("--python, --tensorflow and --keras must be given together.")
  row = None
  if all(versions):
    with tempfile.TemporaryDirectory() as directory:
      venv = FLAGS.environment or os.path.join(directory, "venv")
      venv = pathlib.Path(venv).absolute()
      row = run(*versions, venv=venv, quick=FLAGS.quick)
  triples = resolve() if FLAGS.resolve else None
  results = json.loads(RESULTS.read_text(encoding="utf-8"))
  if triples is not None:
    date = datetime.date.today().isoformat()
    results["resolved"] = {"date": date, "triples": triples}
  if row is not None:
    _add(results, row)
  text = json.dumps(results, indent=1, ensure_ascii=False)
  RESULTS.write_text(text + "\n", encoding="utf-8")
  PAGE.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
  app.run(main)
