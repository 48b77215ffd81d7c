"""What `docs/migration.md` shows runs, and what it names exists."""

import dataclasses
import importlib.util
import os
import pathlib
import re
import shlex

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_replicas
from tests.support import trials
from tf_replicas.programs import command_line
from tf_replicas.programs import update_options
from tf_replicas.rules import base as rule_base
from tf_replicas.session import checkpoints

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
EXAMPLES = dict(
  re.findall(
    r"<!-- example: ([\w.]+) -->\n```python\n(.*?)```", PAGE, re.DOTALL
  )
)
V1 = tf.compat.v1.train


def table(header: str) -> dict[str, list[str]]:
  """The rows of the table whose header begins so: first cell -> the others."""
  _, _, rest = PAGE.partition(f"\n| {header} ")
  rows = {}
  for line in rest.partition("\n\n")[0].splitlines()[2:]:
    first, *others = [cell.strip() for cell in line.strip("|").split(" | ")]
    rows[first.replace("`", "")] = [cell.replace("`", "") for cell in others]
  assert rows, header
  return rows


def plain(hints: dict[str, str], prefix: str = "") -> dict[str, list[str]]:
  return {f"{prefix}{k}": [v.replace("`", "")] for k, v in hints.items()}


def test_methods_and_flags_are_those_with_a_hint():
  assert table("method |") == plain(rule_base._TF1_SUCCESSORS)
  assert table("flag |") == plain(command_line._SUCCESSORS, "--")


def test_hooks_are_all_that_tf1_has():
  named = {
    name for row in table("hook |") for name in re.findall(r"\w+Hook", row)
  }
  assert named == {name for name in dir(V1) if name.endswith("Hook")}


def test_names_exist():
  for name in set(re.findall(r"\btf_replicas\.(\w+)", PAGE)) - {"launch"}:
    assert name in tf_replicas.__all__ + ["cluster"], name
  for name in set(re.findall(r"\btf\.train\.(\w+)", PAGE)):
    assert hasattr(V1, name) or hasattr(tf.train, name), name
  for name in set(re.findall(r"python -m ([\w.]+)", PAGE)):
    assert importlib.util.find_spec(name), name
  for name in set(re.findall(r"`((?:tests|cifar10|docs)/[\w./]*)`", PAGE)):
    assert (ROOT / name).exists(), name
  for name in set(re.findall(r"\]\(([\w.]+\.md)\)", PAGE)):
    assert (ROOT / "docs" / name).exists(), name


def test_wrappers_of_contrib_are_rules():
  names = {}
  exec(EXAMPLES["contrib"], names)
  rows = table("wrapper |")
  assert set(names["rules"]) == {row.partition("(")[0] for row in rows}
  for rule in names["rules"].values():
    assert isinstance(rule, rule_base.UpdateRule)
  settings = dataclasses.fields(update_options.UpdateSettings)
  for update, _ in rows.values():
    rule, *flags = update.split()
    assert rule == "any;" or rule in update_options.RULES
    if rule != "any;":
      assert {f.strip("-=") for f in flags} <= {f.name for f in settings}


def launch(script: str, directory: pathlib.Path) -> str:
  """Runs an example by the command that follows it; what it printed."""
  (directory / script).write_text(EXAMPLES[script], encoding="utf-8")
  pattern = rf"^python (-m tf_replicas\.launch .* {re.escape(script)})$"
  (command,) = re.findall(pattern, PAGE, re.MULTILINE)
  result = trials.python(*shlex.split(command), cwd=directory)
  assert result.returncode == 0, result.stdout + result.stderr
  return result.stdout


def test_synchronous_training_with_a_backup(tmp_path):
  assert ": step 200, loss = 0.0" in launch("sync_train.py", tmp_path)
  path = checkpoints.latest(tmp_path / "runs" / "1")
  assert path is not None
  values = checkpoints.read(path)
  assert values["global_step"] == 200
  assert values["examples_seen"] == 200 * 2 * 32
  for kind in ("variables", "averages"):
    np.testing.assert_allclose(values[f"{kind}/w"], np.ones([4, 1]), atol=0.01)


def test_the_strategys_training(tmp_path):
  output = launch("strategy.py", tmp_path)
  (loss,) = re.findall(r"\] loss: ([\d.e-]+)$", output, re.MULTILINE)
  # It is about 4 without training. Updates are asynchronous: the last gradient
  # may have been computed from far older variables, which leaves some error.
  assert float(loss) < 0.1


def test_a_function_around_the_step():
  def replica_fn():
    w = tf.Variable([1.0, 2.0], name="w")

    def dataset_fn(*_):
      return tf.data.Dataset.from_tensors(tf.ones([3, 2])).repeat()

    return tf_replicas.Replica(
      [w], lambda parameters, x: tf.reduce_mean(parameters[0] * x), dataset_fn
    )

  with tf_replicas.OneMachine(
    replica_fn,
    lambda: tf_replicas.SyncReplicasOptimizer(keras.optimizers.SGD(0.5), 1),
  ) as driver:
    session = tf_replicas.Session(None, state=driver.store, max_steps=2)
    names = {"driver": driver, "session": session, "np": np}
    exec(EXAMPLES["hook"], names)
    assert driver.global_step == 2
    scalars = names["step"]().scalars
    assert scalars["norm"] == pytest.approx(np.hypot(0.25, 1.25))
    assert "learning_rate" in scalars


@pytest.fixture
def in_directory(tmp_path, monkeypatch):
  """A directory to run in, without a cluster."""
  for name in [
    n for n in os.environ if n.startswith(("TF_REPLICAS_", "SLURM"))
  ]:
    monkeypatch.delenv(name)
  monkeypatch.delenv("TF_CONFIG", raising=False)
  monkeypatch.chdir(tmp_path)
  return tmp_path


def test_an_estimator(in_directory):
  names = {}
  exec(EXAMPLES["estimator"], names)
  history = names["history"]
  losses = history.history["loss"]
  assert losses[-1] < losses[0] and len(history.history["val_accuracy"]) == 3
  # As many steps as the original makes.
  (steps,) = re.findall(r"max_steps=(\d+)\)", PAGE)
  path = checkpoints.latest("runs/2")
  assert path is not None and path.endswith(f"-{steps}")
  history.model.export("exported")
  assert tf.saved_model.contains_saved_model("exported")


def test_horovods_training(in_directory):
  names = {}
  exec(EXAMPLES["horovod"], names)
  losses = names["history"].history["loss"]
  assert losses[-1] < losses[0]
  assert keras.models.load_model("model.keras").count_params() == 4


def test_a_map_of_names(in_directory):
  weights = np.array([[1.0], [2.0], [3.0]], "float32")
  with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    with tf.compat.v1.variable_scope("fc"):
      for name, value in (("weights", weights), ("biases", weights[1])):
        tf.compat.v1.get_variable(name, initializer=value)
    session.run(tf.compat.v1.global_variables_initializer())
    V1.Saver().save(session, "old/model.ckpt", 100)
  names = {"keras": keras, "tf": tf, "tf_replicas": tf_replicas}
  exec(EXAMPLES["names"], names)
  # The loss is 0 with the right bias, and the kernel has no part in it.
  x, y = np.zeros([4, 3]), np.full([4, 1], 2.0)
  model = tf_replicas.fit(names["model_fn"], x, y, verbose=0).model
  np.testing.assert_array_equal(model.get_weights()[0], weights)
  np.testing.assert_array_equal(model.get_weights()[1], [2.0])
