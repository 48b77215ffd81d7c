"""What the README and the pages of `docs` show runs as it stands there."""

import importlib.util
import pathlib
import re
import sys

import pytest

from tests.support import binaries
from tests.support import trials
from tf_replicas import cluster
from tf_replicas.cluster import local_cluster

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Name -> text, of all but the pages that experiments write.
PAGES = {
  str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
  for path in [
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("docs/*.md")),
    ROOT / "examples" / "README.md",
    ROOT / "experiments" / "README.md",
    ROOT / "inception_mini" / "README.md",
  ]
}
README = PAGES["README.md"]
MAX_README_BYTES = 9 * 1024


def blocks(page: str, language: str) -> list[str]:
  """The code blocks of a page in this language."""
  return re.findall(rf"```{language}\n(.*?)```", PAGES[page], re.DOTALL)


def example(page: str, name: str) -> str:
  """The code block that follows `<!-- example: NAME -->`."""
  pattern = rf"<!-- example: {re.escape(name)} -->\n```python\n(.*?)```"
  (code,) = re.findall(pattern, PAGES[page], re.DOTALL)
  return code


def links(text: str) -> list[str]:
  """The targets of links and pictures that are not on the web."""
  prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
  targets = re.findall(r"\]\(([^)\s]+)\)", prose)
  return [target for target in targets if "://" not in target]


def anchors(text: str) -> set[str]:
  """The headings of a page, as GitHub names them in links."""
  prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
  headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
  return {
    re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
    for heading in headings
  }


def test_the_foreign_training_loop_is_short():
  code = example("docs/wrapper.md", "my_train.py")
  assert len([line for line in code.splitlines() if line.strip()]) < 50


def test_the_foreign_training_loop_trains(tmp_path, monkeypatch):
  program = tmp_path / "my_train.py"
  program.write_text(
    example("docs/wrapper.md", "my_train.py"), encoding="utf-8"
  )
  jobs = {"ps": ["localhost:0"], "worker": ["localhost:0"] * 2}
  spec = cluster.resolve_ports(cluster.parse(jobs))
  path = tmp_path / "spec.json"
  path.write_text(spec.to_json(), encoding="utf-8")

  def command(task):
    return [sys.executable, str(program), str(path), task.job, str(task.index)]

  monkeypatch.chdir(tmp_path)  # Where it leaves the weights.
  with local_cluster.LocalCluster(spec, command, log_dir=tmp_path) as tasks:
    tasks.start()
    status = tasks.wait(timeout_secs=trials.DEADLINE_SECS)
    log = tasks.log(cluster.Task("worker", 0))
  assert status == 0, log
  first, last = re.search(r"loss ([\d.]+) -> ([\d.]+)", log).groups()
  assert float(last) < 0.1 * float(first)
  _assert_weights_fit(tmp_path / "weights.npz", float(last))


def _assert_weights_fit(path, loss):
  """In a model of another process, as `docs/wrapper.md` says."""
  import keras
  import numpy as np

  import tf_replicas

  keras.backend.clear_session()  # For the names that a new process gives.
  model = keras.Sequential(
    [keras.Input([4]), keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)]
  )
  tf_replicas.load_into_keras(model, np.load(path))
  x = np.random.default_rng(1).normal(size=[512, 4]).astype("float32")
  error = model(x) - x.sum(axis=1, keepdims=True)
  assert float(np.mean(error**2)) < 5 * loss


def test_the_policy_of_its_own_is_one():
  import tensorflow as tf

  names = {}
  exec(example("docs/update_rules.md", "policy"), names)
  policy = names["rule"].policy
  assert policy.name == "by_root"
  assert float(policy.rate_factor(tf.constant(3.0))) == 0.5


def test_the_rule_that_switches_has_two():
  names = {}
  exec(example("docs/update_rules.md", "switch"), names)
  assert len(names["rule"].rules) == 2
  assert names["rule"].total_num_replicas == 3


def test_the_exported_model_names_what_an_image_shows(
  tmp_path, monkeypatch, capsys
):
  import tensorflow as tf

  from cifar10 import config
  from cifar10 import export

  binaries.save_checkpoint(tmp_path / "run", seed=1, average_seed=2)
  directory = str(tmp_path / "export")
  export.export(str(tmp_path / "run"), directory)
  image = tf.cast(tf.random.uniform([50, 40, 3], 0, 255, tf.int32), tf.uint8)
  (tmp_path / "cat.png").write_bytes(tf.io.encode_png(image).numpy())
  monkeypatch.chdir(tmp_path)
  program = example("docs/programs.md", "classify.py")
  assert program.count("/tmp/cifar10_export") == 1
  exec(program.replace("/tmp/cifar10_export", directory), {})
  assert capsys.readouterr().out.strip() in config.LABELS


def test_a_program_is_called_as_a_function(tmp_path, capsys):
  program = example("docs/programs.md", "program")
  # The directory last: its name may have any number in it.
  for shown, used in (("100", "2"), ("/tmp/run", str(tmp_path))):
    assert program.count(shown) == 1
    program = program.replace(shown, used)
  exec(program, {})
  assert re.search(r"^2 \d+\.\d+$", capsys.readouterr().out, re.MULTILINE)


def test_ci_installs_and_tests_as_the_readme_says():
  script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
  (tests,) = re.findall(r"^python -m pytest .*$", README, re.MULTILINE)
  assert f"stage tests {tests}\n" in script
  chosen = re.search(' -m "(.+)"$', tests).group(1)
  rest = tests.replace(f'"{chosen}"', f'"not ({chosen} or exhaustive)"')
  assert f'stage "other tests" \\\n  {rest}\n' in script
  (packages,) = set(re.findall(r"pip install -q -e (\S+)", README))
  assert re.search(
    rf"stage install pip install -q .*-e {re.escape(packages)}\n", script
  )


def test_the_keras_example_is_the_one_that_a_cluster_runs():
  """By `tests/fitting/cluster_test.py`, with this command."""
  (code,) = blocks("README.md", "python")
  assert code == blocks("docs/keras.md", "python")[0]
  command = "python -m tf_replicas.launch --ps=1 --workers=2 train.py\n"
  assert command in blocks("README.md", "bash")
  assert command in blocks("docs/keras.md", "bash")


def test_the_readme_is_short():
  assert len(README.encode()) <= MAX_README_BYTES


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_exists(page):
  text = PAGES[page]
  for name in re.findall(r"(?:cluster_specs|examples)/[\w/]+\.\w+", text):
    assert (ROOT / name).exists(), name
  for name in re.findall(r"python -m ([\w.]*\w)", text):
    known = name.endswith(".NAME") or importlib.util.find_spec(name)
    assert known, name


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
  for link in links(PAGES[page]):
    name, _, anchor = link.partition("#")
    path = (ROOT / page).parent / name if name else ROOT / page
    assert path.exists(), link
    if anchor:
      assert anchor in anchors(path.read_text(encoding="utf-8")), link


def test_each_page_is_reached_from_the_readme():
  reached, new = set(), {"README.md"}
  while new:
    reached |= new
    new = {
      str(((ROOT / page).parent / link.partition("#")[0]).resolve())
      for page in new
      for link in links(PAGES[page])
      if not link.startswith("#")
    }
    new = {name.removeprefix(f"{ROOT}/") for name in new} & set(PAGES)
    new -= reached
  assert set(PAGES) == reached
