"""What the README shows runs as it stands there."""

import json
import pathlib
import re
import sys

from tests.support import binaries
from tests.support import trials
from tf_replicas import cluster
from tf_replicas.cluster import local_cluster

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def example(name: str) -> str:
  """The code block that follows `<!-- example: NAME -->`."""
  pattern = rf"<!-- example: {re.escape(name)} -->\n```python\n(.*?)```"
  return re.search(pattern, README, re.DOTALL).group(1)


def test_the_foreign_training_loop_is_short():
  lines = [line for line in example("my_train.py").splitlines() if line.strip()]
  assert len(lines) < 50


def test_the_foreign_training_loop_trains(tmp_path, monkeypatch):
  program = tmp_path / "my_train.py"
  program.write_text(example("my_train.py"), encoding="utf-8")
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
  """In a model of another process, as the README says."""
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
  exec(example("policy"), names)
  policy = names["rule"].policy
  assert policy.name == "by_root"
  assert float(policy.rate_factor(tf.constant(3.0))) == 0.5


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
  program = example("classify.py")
  assert program.count("/tmp/cifar10_export") == 1
  exec(program.replace("/tmp/cifar10_export", directory), {})
  assert capsys.readouterr().out.strip() in config.LABELS


def test_ci_installs_and_tests_as_the_readme_says():
  script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
  (tests,) = re.findall(r"^python -m pytest .*$", README, re.MULTILINE)
  assert f"stage tests {tests}\n" in script
  chosen = re.search(' -m "(.+)"$', tests).group(1)
  rest = tests.replace(f'"{chosen}"', f'"not ({chosen})"')
  assert f'stage "other tests" \\\n  {rest}\n' in script
  (packages,) = set(re.findall(r"pip install -q -e (\S+)", README))
  assert re.search(
    rf"stage install pip install -q .*-e {re.escape(packages)}\n", script
  )


def test_every_spec_that_the_readme_names_exists():
  for name in re.findall(r"cluster_specs/\w+\.json", README):
    assert (ROOT / name).exists(), name


def test_the_spec_that_it_shows_is_valid():
  (document,) = re.findall(r"```json\n(.*?)```", README, re.DOTALL)
  spec = cluster.parse(json.loads(document))
  assert spec.num_tasks("worker") == 2
